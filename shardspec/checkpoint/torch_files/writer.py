"""Lays out `torch.save` files without torch: a zip with a pickle and the bytes of tensors.

Python's own pickler imports the classes that it names; this one writes the few instructions that a
state dict and torch's checkpoint metadata need. The zip is not compressed, and every record starts
at a multiple of 64 bytes. The CRC-32 of a record is written after it and in the directory at the
end, so that a file can be written from start to end. Records are at the offsets at which torch
writes them, because torch may compute offsets instead of reading the directory
(`torch.utils.serialization.config.load.calculate_storage_offsets`). Source: Lib/pickletools.py of
CPython; APPNOTE.TXT of PKWARE, 4.3 to 4.5; torch/serialization.py, torch/_utils.py,
caffe2/serialize/inline_container.cc and third_party/miniz of torch.
"""

import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from io import BytesIO
from math import prod
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import RawBytes
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.checkpoint.torch_files.values import STORAGES, Complex
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError


class Name(NamedTuple):
    """A reference to a class or function by its module and name."""

    module: str
    name: str


class PickledCall(NamedTuple):
    """The result of a call."""

    function: object
    args: tuple[object, ...] = ()


class Made(NamedTuple):
    """An object that is created without a call, and its state."""

    kind: object
    state: object = None


class Outside(NamedTuple):
    """A persistent id: a reference to an object outside the pickle, such as a storage."""

    key: tuple[object, ...]


class Pairs(NamedTuple):
    """A dict with unhashable keys, or with too many items to be in memory at once."""

    items: Iterable[tuple[object, object]]


def pickled(value: object) -> bytes:
    """Return a value as a pickle of protocol 2, as in files of torch.

    It may be None, a number, text, bytes, one of the values above, or a tuple, list or dict of
    these. Raises `CheckpointError` for anything else.

    >>> pickle.loads(pickled({"step": [1, None]}))
    {'step': [1, None]}
    """
    out = BytesIO()
    pickle_into(value, out.write)
    return out.getvalue()


_SHORT_TUPLES: Final = {0: (b")", b""), 1: (b"", b"\x85"), 2: (b"", b"\x86"), 3: (b"", b"\x87")}


def pickle_into(value: object, out: Callable[[bytes], object]) -> None:  # a case a type
    """Write a value piece by piece, as `pickled` does."""
    # Texts and names are written once and then referred to by numbers.
    numbers: dict[object, int] = {}

    def put(value: object) -> None:
        match value:
            case None | bool() | int() | float():
                # Python would write a subclass by its name.
                if isinstance(value, int | float) and not isinstance(value, bool):
                    value = int(value) if isinstance(value, int) else float(value)
                if isinstance(value, int) and value.bit_length() >= 8 * 255:
                    raise CheckpointError("a whole number of more than 255 bytes cannot be written")
                # Without the protocol and the end.
                out(pickle.dumps(value, 2)[2:-1])
            case str() | Name() if not isinstance(value, Complex):
                if value in numbers:
                    out(_numbered(b"h", b"j", numbers[value]))
                    return
                if isinstance(value, Name):
                    out(b"c" + _utf8(value.module) + b"\n" + _utf8(value.name) + b"\n")
                else:
                    data = _utf8(value)
                    out(b"X" + struct.pack("<I", len(data)) + data)
                out(_numbered(b"q", b"r", len(numbers)))
                numbers[value] = len(numbers)
            case Pairs(items):
                out(b"}(")
                for key, item in items:
                    put(key)
                    put(item)
                out(b"u")
            case PickledCall(function, args):
                put(function)
                put(args)
                out(b"R")
            case Made(kind, state):
                put(kind)
                out(b")\x81")
                if state is not None:
                    put(state)
                    out(b"b")
            case Outside(key):
                put(key)
                out(b"Q")
            case bytes():
                # Protocol 2 has no instruction for bytes; Python writes them so.
                put(PickledCall(Name("_codecs", "encode"), (value.decode("latin-1"), "latin1")))
            case tuple() | list():
                # The mark of a list follows the list; short tuples need none.
                start, end = (b"](", b"e")
                if isinstance(value, tuple):
                    start, end = _SHORT_TUPLES.get(len(value), (b"(", b"t"))
                out(start)
                for item in value:
                    put(item)
                out(end)
            case Mapping():
                put(Pairs(value.items()))
            case _:
                raise CheckpointError(
                    f"{value!r:.60} is a {type(value).__name__}, which cannot be written"
                )

    out(b"\x80\x02")
    put(value)
    out(b".")


def _numbered(short: bytes, long: bytes, number: int) -> bytes:
    return short + bytes((number,)) if number < 256 else long + struct.pack("<I", number)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{text!r:.60} contains {text[error.start]!r}, which UTF-8 cannot express; rename it"
        ) from None


check_text: Final[Callable[[str], object]] = _utf8
"""Raises `CheckpointError` if a text cannot be encoded."""


def tensor_value(shape: Sequence[int], dtype: str, key: str) -> PickledCall:
    """Return a tensor as torch pickles it, with its bytes in the record `data/<key>`."""
    sizes = tuple(shape)
    strides = tuple(prod(max(1, n) for n in sizes[dim + 1 :]) for dim in range(len(sizes)))
    count = prod(sizes)
    function, more = "_rebuild_tensor_v2", tuple[Name, ...]()
    if dtype in STORAGES:
        kind = Name("torch", f"{STORAGES[dtype]}Storage")
    else:
        kind, count = Name("torch.storage", "UntypedStorage"), count * item_bytes(dtype)
        function, more = "_rebuild_tensor_v3", (Name("torch", dtype),)
    storage = Outside(("storage", kind, key, "cpu", count))
    hooks = PickledCall(Name("collections", "OrderedDict"))
    return PickledCall(
        Name("torch._utils", function), (storage, 0, sizes, strides, False, hooks, *more)
    )


# --- the zip

_ALIGNMENT: Final = 64
_BIG: Final = 0xFFFFFFFF
_MANY: Final = 0xFFFF
_VERSION: Final = 45  # of the standard: the first that has sizes of more than 32 bits
_FOLLOWED: Final = 1 << 3  # flag: size and CRC-32 of a record follow it
_UTF8: Final = 1 << 11  # flag: of names


class _Record(NamedTuple):
    """A file of the archive; the CRC-32 of a tensor is None."""

    name: bytes
    num_bytes: int
    header: int
    crc32: int | None

    def flags(self) -> int:
        return _UTF8 | (_FOLLOWED if self.num_bytes else 0)

    def sizes_64(self) -> bytes:
        """Return an extra field with size and position, if they do not fit 32 bits."""
        big = [self.num_bytes, self.num_bytes] if self.num_bytes >= _BIG else []
        big += [self.header] if self.header >= _BIG else []
        return struct.pack(f"<HH{len(big)}Q", 1, 8 * len(big), *big) if big else b""

    def before(self) -> bytes:
        """Return the header of the record, padded so that the bytes after it are aligned."""
        extra = self.sizes_64()
        # torch's padding has this mark.
        room = -(self.header + 30 + len(self.name) + len(extra) + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", room) + b"Z" * room
        numbers = (_VERSION, self.flags(), 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return struct.pack("<4s5H3I2H", b"PK\x03\x04", *numbers) + self.name + extra

    def after(self, value: int) -> bytes:
        """Return the bytes after the record: CRC-32 and size; nothing after an empty record."""
        if not self.num_bytes:
            return b""
        sizes = "2Q" if self.sizes_64() else "2I"
        return struct.pack(f"<4sI{sizes}", b"PK\x07\x08", value, self.num_bytes, self.num_bytes)

    def listed(self, value: int) -> bytes:
        """Return the entry of the record in the directory."""
        extra, size = self.sizes_64(), min(self.num_bytes, _BIG)
        numbers = (_VERSION, _VERSION, self.flags(), 0, 0, 0, value, size, size)
        places = (len(self.name), len(extra), 0, 0, 0, 0, min(self.header, _BIG))
        head = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers, *places)
        return head + self.name + extra


class Archive:
    """The zip of `torch.save`: a pickle and the storages that it refers to.

    A storage is a key and its bytes, or the number of bytes of a tensor, which come later.
    """

    def __init__(self, data: bytes, storages: Iterable[tuple[str, int | bytes]]) -> None:
        self._records: list[_Record] = []
        self._gaps: list[tuple[_Record, int, bytearray]] = []
        """The record of each tensor, its start, and the bytes between it and the next."""
        self._head = literal = bytearray()
        self._end = 0
        for name, body in (
            *(("data.pkl", data), (".format_version", b"1"), (".storage_alignment", b"64")),
            ("byteorder", b"little"),
            *((f"data/{key}", body) for key, body in storages),
            ("version", b"3\n"),
        ):
            size, value = (body, None) if isinstance(body, int) else (len(body), crc32(body))
            record = _Record(f"archive/{name}".encode(), size, self._end, value)
            self._records.append(record)
            literal += record.before()
            start = self._end + len(record.before())
            self._end = start + size + len(record.after(0))
            if isinstance(body, int):
                literal = bytearray()
                self._gaps.append((record, start, literal))
            else:
                literal += body + record.after(crc32(body))

    @property
    def places(self) -> list[int]:
        """Positions of the bytes of each tensor in the file."""
        return [start for _, start, _ in self._gaps]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the zip file in bytes."""
        return self._end + len(self._directory([0] * len(self._gaps)))

    @cached_property
    def head(self) -> bytes:
        """Bytes before the first tensor; all bytes if there is none."""
        return bytes(self._head) + (b"" if self._gaps else self._directory(()))

    def late(self, crcs: Sequence[int]) -> Iterator[RawBytes]:
        """Yield the bytes after tensors, given the CRC-32 of each; a `Trailer`."""

        def after(number: int) -> bytes:
            record, _, literal = self._gaps[number]
            last = number + 1 == len(self._gaps)
            return record.after(crcs[number]) + literal + (self._directory(crcs) if last else b"")

        for number, (record, start, _) in enumerate(self._gaps):
            yield RawBytes(start + record.num_bytes, partial(after, number))

    def _directory(self, crcs: Sequence[int]) -> bytes:
        """Return the end of the zip: the directory, and its position in 64 and in 32 bits."""
        remaining = iter(crcs)
        joined = b"".join(
            record.listed(next(remaining) if record.crc32 is None else record.crc32)
            for record in self._records
        )
        count, size, start = len(self._records), len(joined), self._end
        numbers = (44, _VERSION, _VERSION, 0, 0, count, count, size, start)
        big = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", *numbers)
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
        small = (min(count, _MANY), min(count, _MANY), min(size, _BIG), min(start, _BIG))
        plain = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *small, 0)
        return joined + big + locator + plain

"""The zip that `torch.save` writes: where every record lies, without reading any of them.

A record is stored as it is, aligned by padding, so that a tensor's bytes can be read in place.
`zipfile` reads the directory at the end. What torch never writes is refused: compression, records
that share bytes or a name. Of a record's own header is read what says where it starts.
Source: PKWARE's APPNOTE.TXT 6.3.10, and ``caffe2/serialize/inline_container.cc`` of torch.
"""

import io
import struct
from array import array
from collections.abc import Mapping
from typing import Final, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.pickle_screen import MOST_PICKLE_BYTES
from shardspec.errors import CheckpointError

__all__ = ["TorchRecord", "TorchZip", "read_torch_zip"]

_LOCAL: Final = struct.Struct("<4s2x2H16x2H")
_END_BYTES: Final = 22
_LOCATOR_BYTES: Final = 20
_ENDS_BYTES: Final = 56 + _LOCATOR_BYTES + _END_BYTES
"""Of what follows the directory, at most."""
_UTF8_FLAG: Final = 1 << 11
_ENCRYPTED: Final = 1 | 1 << 6 | 1 << 13
_TAIL_BYTES: Final = 2048
"""Read at once from the end; it holds the whole directory of a single tensor."""
_MOST_DIRECTORY_BYTES: Final = 16 << 20
"""Of some 150,000 records; more than that would fill the memory."""
_AT_ONCE_BYTES: Final = 1 << 16
"""Read along with a header; taking a long record out of what was read would copy it."""
_LITTLE: Final = (6, crc32(b"little"))
"""Size and CRC-32 of what names the usual order of bytes, which then need not be read."""
_OLD: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
"""A pickle of the number 0x1950a86a20f9469cfc6c: what torch wrote before version 1.6."""


class TorchRecord(NamedTuple):
    """A record of the zip: where one storage lies in the file."""

    offset: int
    num_bytes: int
    crc32: int | None
    """Of all its bytes; None where torch was told not to take it."""


class TorchZip:
    """What a stretch of a file holds that `torch.save` wrote; made by `read_torch_zip`.

    The directory is kept as columns, in the order of the records: a file may have many, and there
    may be many files.
    """

    __slots__ = ("_archive", "_end", "crcs", "headers", "places", "sizes", "what")

    def __init__(
        self, what: str, archive: bytes, infos: Mapping[str, ZipInfo], offset: int, end: int
    ) -> None:
        self.what = what
        self._archive = archive
        self._end = offset + end
        self.places: Mapping[str, int] = {name: at for at, name in enumerate(infos)}
        """Name without the archive's to its place in the columns."""
        self.headers = array("Q", [offset + info.header_offset for info in infos.values()])
        """Positions of their own headers in the file."""
        self.sizes = array("Q", [info.file_size for info in infos.values()])
        self.crcs = array("I", [info.CRC for info in infos.values()])

    def share(self, other: "TorchZip") -> bool:
        """Keep the columns of another file, where they are equal, rather than its own."""
        if (self.places, self._end) != (other.places, other._end):
            return False
        self.places = other.places
        if (self.headers, self.sizes) != (other.headers, other.sizes):
            return False
        self.headers, self.sizes = other.headers, other.sizes
        return True

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of every storage, in no order."""
        return tuple(name[5:] for name in self.places if name.startswith("data/"))

    def num_bytes(self, key: str) -> int:
        """Return the bytes of a storage, which is known without reading anything."""
        return self.sizes[self.place(key)]

    def place(self, key: str) -> int:
        """Return the place of a storage in the columns."""
        return self._place(f"data/{key}")

    def record(self, file: SourceFile, key: str) -> TorchRecord:
        """Return where a storage lies; its own header is read and compared with the directory."""
        place, name = self.place(key), f"data/{key}"
        head = file.read(self.headers[place], _LOCAL.size + len(self._full(name)))
        start, size, value = self._start(name, head), self.sizes[place], self.crcs[place]
        return TorchRecord(start, size, value if value or not size else None)

    def pickle(self, file: SourceFile) -> bytes:
        """Return the bytes of its pickle, compared with their CRC-32."""
        size = self.sizes[self._place("data.pkl")]
        if size > MOST_PICKLE_BYTES:
            raise CheckpointError(
                f"{self.what}: its pickle has {size} bytes, past the limit of {MOST_PICKLE_BYTES}; "
                "save tensors as tensors, not as lists"
            )
        return self._small(file, "data.pkl")

    def _place(self, name: str) -> int:
        place = self.places.get(name)
        if place is None:
            raise CheckpointError(f"{self.what}: has no record {name!r:.100}; it is damaged")
        return place

    def _full(self, name: str) -> bytes:
        return self._archive + b"/" + name.encode("utf-8", "surrogateescape")

    def _limit(self, place: int) -> int:
        """Return where what follows a record starts."""
        return self.headers[place + 1] if place + 1 < len(self.headers) else self._end

    def _start(self, name: str, head: bytes) -> int:
        """Return where the bytes of a record start, given its own header."""
        signature, flags, method, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        place, full = self._place(name), self._full(name)
        start: int = self.headers[place] + _LOCAL.size + name_bytes + extra_bytes
        if (
            signature != b"PK\3\4"
            or method != ZIP_STORED
            or flags & _ENCRYPTED
            or head[_LOCAL.size : _LOCAL.size + name_bytes] != full
            or start + self.sizes[place] > self._limit(place)
        ):
            raise CheckpointError(
                f"{self.what}: the header of record {full!r} at byte {self.headers[place]} "
                "contradicts the directory; the file is damaged"
            )
        return start

    def _small(self, file: SourceFile, name: str) -> bytes:
        """Return the bytes of a record; those of a short one in one read with its header."""
        place = self._place(name)
        first, size = self.headers[place], self.sizes[place]
        ahead = self._limit(place) - first
        if ahead > _AT_ONCE_BYTES:
            ahead = _LOCAL.size + len(self._full(name))
        head = file.read(first, ahead)
        start = self._start(name, head)
        data = head[start - first :][:size]
        if len(data) < size:
            data = file.read(start, size)
        if self.crcs[place] != 0 and crc32(data) != self.crcs[place]:
            raise CheckpointError(
                f"{self.what}: the bytes of record {self._full(name)!r} are not as saved (CRC-32); "
                "restore the file or save again"
            )
        return data

    def check(self, file: SourceFile) -> None:
        """Refuse what is written by torch, but is no state of tensors that can be read here."""
        if "constants.pkl" in self.places:
            raise CheckpointError(
                f"{self.what}: is a TorchScript program, not a checkpoint; save the state dict of "
                "the module: torch.save(torch.jit.load(path).state_dict(), new_path)"
            )
        place = self.places.get("byteorder")
        if place is None or (self.sizes[place], self.crcs[place]) == _LITTLE:
            return
        order = self._small(file, "byteorder") if self.sizes[place] <= 16 else b"?"
        if order != b"little":
            raise CheckpointError(
                f"{self.what}: was written on a machine with byte order {order!r}; load it with "
                "torch.load and save it again on a little-endian one"
            )


def read_torch_zip(
    file: SourceFile, offset: int = 0, num_bytes: int | None = None, what: str | None = None
) -> TorchZip:
    """Read the directory of what `torch.save` wrote.

    Parameters
    ----------
    file
        The file, open.
    offset, num_bytes
        The stretch of it that is the zip; all of it by default.
    what
        For errors: what it is; the path by default.

    Raises
    ------
    CheckpointError
        If it is no such zip, is truncated or damaged, contradicts itself, is compressed or
        encrypted, or has two records that share bytes or a name.

    Notes
    -----
    Three small reads (end, pickle, header of the storage) find a single tensor.
    """
    what = str(file.path) if what is None else what
    num_bytes = file.num_bytes - offset if num_bytes is None else num_bytes
    if offset < 0 or num_bytes < 0 or offset + num_bytes > file.num_bytes:
        raise CheckpointError(
            f"{what}: bytes {offset} to {offset + num_bytes} are needed, but the file has "
            f"{file.num_bytes}; it was cut short, restore it"
        )
    tail = _tail(file, offset, num_bytes, _TAIL_BYTES)
    if len(tail) < _END_BYTES or tail[-_END_BYTES:][:4] != b"PK\5\6":
        raise CheckpointError(f"{what}: {_no_zip(file.read(offset, min(num_bytes, 512)))}")
    count, size = struct.unpack_from("<HL", tail, len(tail) - _END_BYTES + 10)
    if size > _MOST_DIRECTORY_BYTES:
        raise CheckpointError(
            f"{what}: its directory has {size} bytes, past the limit of {_MOST_DIRECTORY_BYTES}; "
            "save in fewer records"
        )
    if size + _ENDS_BYTES > len(tail):
        tail = _tail(file, offset, num_bytes, size + _ENDS_BYTES)
    try:
        # It counts from the start of what it is given, so that records lie before that.
        with ZipFile(io.BytesIO(tail)) as opened:
            infos, end = opened.infolist(), opened.start_dir
        is_64 = tail[-_END_BYTES - _LOCATOR_BYTES :].startswith(b"PK\6\7")
        if not infos or count not in (len(infos), 0xFFFF if is_64 else None):
            raise BadZipFile(f"it has {len(infos)} lines, not {count}")
        found = _checked(what, infos, offset, num_bytes - len(tail), end)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    # What zipfile raises for a damaged directory; the second for a version that it does not know.
    except (BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise CheckpointError(
            f"{what}: its directory contradicts itself ({error}); the file is damaged"
        ) from None
    found.check(file)
    return found


def _tail(file: SourceFile, offset: int, num_bytes: int, most: int) -> bytes:
    size = min(most, num_bytes)
    return file.read(offset + num_bytes - size, size)


def _no_zip(head: bytes) -> str:
    """Say what a file is that does not end as a zip of torch does."""
    again = "load it with torch.load and save it again"
    if head.startswith(b"PK\3\4"):
        return "does not end as torch.save ends a file; it was cut short, restore it"
    if head.startswith(_OLD):
        return f"is in the format that torch wrote before version 1.6; {again}"
    if head[257:262] == b"ustar":
        return f"is in the tar format that torch wrote before version 0.2; {again}"
    starts = repr(head[:4]) if head else "nothing: it is empty"
    return f"is nothing that torch.save writes (it starts with {starts}); check the file"


def _checked(what: str, infos: list[ZipInfo], offset: int, before: int, end: int) -> TorchZip:
    """Return the columns once no two records share a byte or a name.

    What was read starts so many bytes behind the start of the zip.
    """
    for info in infos:
        info.header_offset += before
    end += before
    infos.sort(key=lambda info: info.header_offset)
    limits = [info.header_offset for info in infos[1:]]
    archive = _name(infos[0]).partition(b"/")[0]
    named: dict[str, ZipInfo] = {}
    for info, limit in zip(infos, (*limits, end), strict=True):
        name, size = _name(info), info.file_size
        if info.compress_type != ZIP_STORED:
            raise CheckpointError(
                f"record {name!r:.100} is compressed (method {info.compress_type}), which torch "
                "never does; unpack it and save it again with torch.save"
            )
        if info.compress_size != size or info.flag_bits & _ENCRYPTED or info.volume:
            raise BadZipFile(f"record {name!r:.100}")
        if info.header_offset < 0 or info.header_offset + _LOCAL.size + len(name) + size > limit:
            raise CheckpointError(
                f"record {name!r:.100} of {size} bytes at byte {info.header_offset} runs into what "
                f"follows at {limit}; the file is damaged"
            )
        folder, _, inner = name.partition(b"/")
        if folder != archive:
            raise CheckpointError(
                f"record {name!r:.100} belongs to another archive than {archive!r:.100}; the file "
                "is damaged"
            )
        # Back to the same bytes, whatever they are.
        if named.setdefault(inner.decode("utf-8", "surrogateescape"), info) is not info:
            raise CheckpointError(f"record {name!r:.100} is there twice; the file is damaged")
    return TorchZip(what, archive, named, offset, end)


def _name(info: ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_FLAG else "cp437")

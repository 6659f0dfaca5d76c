"""The zip that `torch.save` writes: where every record lies, without reading any of them.

A record is stored as it is, aligned by padding, so that a tensor's bytes can be read in place. Only
the directory at the end is read here, and of a record's own header what says where it starts. What
torch never writes is refused: compression, gaps in the truth, records that share bytes.
Source: PKWARE's APPNOTE.TXT 6.3.10, and ``caffe2/serialize/inline_container.cc`` of torch.
"""

import struct
from array import array
from typing import Final, NamedTuple

from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.pickles import MOST_PICKLE_BYTES
from shardspec.checkpoint.torch_files.torch_lines import (
    ENTRY,
    ENTRY_BYTES,
    AlikeLines,
    Directory,
    TorchLines,
)
from shardspec.errors import CheckpointError

__all__ = ["TorchRecord", "TorchZip", "read_torch_zip"]

_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_LOCAL: Final = struct.Struct("<4s2x2H16x2H")
_LOCAL_BYTES: Final = _LOCAL.size
_FULL_16: Final = 0xFFFF
_FULL_32: Final = 0xFFFFFFFF
_ENCRYPTED: Final = 1 | 1 << 6 | 1 << 13
_EXTRA_64: Final = 1

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
    """A record of the zip: one storage."""

    offset: int
    """Position of its first byte in the file."""
    num_bytes: int
    crc32: int | None
    """Of all its bytes; None where torch was told not to take it."""


class _Entry(NamedTuple):
    """A line of the directory."""

    name: bytes
    header: int
    """Position of its own header in the file."""
    num_bytes: int
    crc32: int
    limit: int
    """Where the next thing starts."""


class TorchZip:
    """What a stretch of a file holds that `torch.save` wrote; made by `read_torch_zip`.

    Parameters
    ----------
    what
        For errors: the file, and which part of it.
    directory
        Its directory.
    """

    __slots__ = ("_archive", "crcs", "lines", "what")

    def __init__(self, what: str, directory: Directory) -> None:
        self.what = what
        self._archive, self.lines, self.crcs = directory

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of every storage, in no order."""
        return tuple(name[5:] for name in self.lines.places if name.startswith("data/"))

    def num_bytes(self, key: str) -> int:
        """Return the bytes of a storage, which is known without reading anything.

        Raises
        ------
        CheckpointError
            If there is no such storage.
        """
        return self.lines.sizes[self.place(key)]

    def place(self, key: str) -> int:
        """Return the place of a storage in the columns of `lines`.

        Raises
        ------
        CheckpointError
            If there is no such storage.
        """
        return self._place(f"data/{key}")

    def header(self, key: str) -> tuple[int, int]:
        """Return where in the file the own header of a storage starts and ends.

        Raises
        ------
        CheckpointError
            If there is no such storage.
        """
        entry = self._entry(f"data/{key}")
        return entry.header, entry.header + _LOCAL_BYTES + len(entry.name)

    def record(self, file: SourceFile, key: str) -> TorchRecord:
        """Return where a storage lies; its own header is read and compared with the directory.

        Raises
        ------
        CheckpointError
            If there is no such storage, or the two disagree.
        """
        entry = self._entry(f"data/{key}")
        start = self._start(entry, file.read(entry.header, _LOCAL_BYTES + len(entry.name)))
        value = entry.crc32
        return TorchRecord(start, entry.num_bytes, value if value or not entry.num_bytes else None)

    def pickle(self, file: SourceFile) -> bytes:
        """Return the bytes of its pickle, compared with their CRC-32.

        Raises
        ------
        CheckpointError
            If it is damaged, or too large to be a description of tensors.
        """
        entry = self._entry("data.pkl")
        if entry.num_bytes > MOST_PICKLE_BYTES:
            raise CheckpointError(
                f"{self.what}: its pickle has {entry.num_bytes} bytes, past the limit of "
                f"{MOST_PICKLE_BYTES}; save tensors as tensors, not as lists"
            )
        return self._small(file, entry)

    def _place(self, name: str) -> int:
        place = self.lines.places.get(name)
        if place is None:
            raise CheckpointError(f"{self.what}: has no record {name!r:.100}; it is damaged")
        return place

    def _entry(self, name: str) -> _Entry:
        place = self._place(name)
        _, headers, sizes, end = self.lines
        limit = headers[place + 1] if place + 1 < len(headers) else end
        full = self._archive + b"/" + name.encode("utf-8", "surrogateescape")
        return _Entry(full, headers[place], sizes[place], self.crcs[place], limit)

    def _start(self, entry: _Entry, head: bytes) -> int:
        """Return where the bytes of a record start, given its own header."""
        signature, flags, method, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        start: int = entry.header + _LOCAL_BYTES + name_bytes + extra_bytes
        if (
            signature != b"PK\3\4"
            or method != 0
            or flags & _ENCRYPTED
            or name_bytes != len(entry.name)
            or head[_LOCAL_BYTES : _LOCAL_BYTES + name_bytes] != entry.name
            or start + entry.num_bytes > entry.limit
        ):
            raise CheckpointError(
                f"{self.what}: the header of record {entry.name!r} at byte {entry.header} "
                "contradicts the directory; the file is damaged"
            )
        return start

    def _small(self, file: SourceFile, entry: _Entry) -> bytes:
        """Return the bytes of a record; those of a short one in one read with its header."""
        ahead = entry.limit - entry.header
        if ahead > _AT_ONCE_BYTES:
            ahead = _LOCAL_BYTES + len(entry.name)
        head = file.read(entry.header, ahead)
        start = self._start(entry, head)
        at = start - entry.header
        data = head[at : at + entry.num_bytes]
        if len(data) < entry.num_bytes:
            data = file.read(start, entry.num_bytes)
        if entry.crc32 != 0 and crc32(data) != entry.crc32:
            raise CheckpointError(
                f"{self.what}: the bytes of record {entry.name!r} are not as saved (CRC-32); "
                "restore the file or save again"
            )
        return data

    def check(self, file: SourceFile) -> None:
        """Refuse what is written by torch, but is no state of tensors that can be read here.

        Raises
        ------
        CheckpointError
            If it is a program (TorchScript), or from a machine with the other order of bytes.
        """
        if "constants.pkl" in self.lines.places:
            raise CheckpointError(
                f"{self.what}: is a TorchScript program, not a checkpoint; save the state dict of "
                "the module: torch.save(torch.jit.load(path).state_dict(), new_path)"
            )
        if "byteorder" not in self.lines.places:
            return
        entry = self._entry("byteorder")
        if (entry.num_bytes, entry.crc32) != _LITTLE:
            order = self._small(file, entry) if entry.num_bytes <= 16 else b"?"
            if order != b"little":
                raise CheckpointError(
                    f"{self.what}: was written on a machine with byte order {order!r}; load it "
                    "with torch.load and save it again on a little-endian one"
                )


def read_torch_zip(
    file: SourceFile,
    offset: int = 0,
    num_bytes: int | None = None,
    what: str | None = None,
    alike: AlikeLines | None = None,
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
    alike
        Directories of whole files that this one may be like, and that may be like this one.

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
    tail = file.read(offset + num_bytes - min(_TAIL_BYTES, num_bytes), min(_TAIL_BYTES, num_bytes))
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\5\6":
        raise CheckpointError(f"{what}: {_no_zip(file.read(offset, min(num_bytes, 512)))}")
    count, size, start, ends = _directory(tail, num_bytes, what)
    if not 0 < size <= _MOST_DIRECTORY_BYTES or start + size != ends:
        raise CheckpointError(
            f"{what}: its directory is said to have {size} bytes from byte {start}, but what "
            f"follows it is at {ends}; the file is damaged"
            if size <= _MOST_DIRECTORY_BYTES
            else f"{what}: its directory has {size} bytes, past the limit of "
            f"{_MOST_DIRECTORY_BYTES}; save in fewer records"
        )
    first = num_bytes - len(tail)
    data = tail[start - first :][:size] if start >= first else file.read(offset + start, size)
    if alike is not None and offset == 0:
        directory = alike.read(data, count, start, lambda: _read_lines(data, count, 0, start, what))
    else:
        directory, _ = _read_lines(data, count, offset, start, what)
    found = TorchZip(what, directory)
    found.check(file)
    return found


def _no_zip(head: bytes) -> str:
    """Say what a file is that does not end as a zip of torch does."""
    if head.startswith(b"PK\3\4"):
        return "does not end as torch.save ends a file; it was cut short, restore it"
    if head.startswith(_OLD):
        return (
            "is in the form that torch wrote before version 1.6; load it with torch.load and save "
            "it again"
        )
    if head[257:262] == b"ustar":
        return (
            "is in the tar form that torch wrote before version 0.2; load it with torch.load and "
            "save it again"
        )
    return "is nothing that torch.save writes (it starts with " + (
        f"{head[:4]!r}); check the file" if head else "nothing: it is empty); check the file"
    )


def _directory(tail: bytes, num_bytes: int, what: str) -> tuple[int, int, int, int]:
    """Return count, size and start of the directory, and where what follows it starts.

    Positions count from the start of the zip.
    """
    at = len(tail) - _END.size
    _, disk, first_disk, here, count, size, start, _ = _END.unpack_from(tail, at)
    ends = num_bytes - _END.size
    is_64 = at >= _LOCATOR.size and tail[at - _LOCATOR.size :][:4] == b"PK\6\7"
    bad = disk or first_disk or here != count
    if is_64:
        _, disk, place, disks = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        end_64 = place - (num_bytes - len(tail))
        bad = bad or disk or disks > 1 or place + _END_64.size + _LOCATOR.size != ends
        if bad or end_64 < 0 or tail[end_64 : end_64 + 4] != b"PK\6\6":
            raise CheckpointError(f"{what}: the records at its end contradict each other; damaged")
        stated = (count, size, start)
        _, _, _, _, disk, first_disk, here, count, size, start = _END_64.unpack_from(tail, end_64)
        bad = disk or first_disk or here != count
        for small, full, mark in zip(
            stated, (count, size, start), (_FULL_16, _FULL_32, _FULL_32), strict=True
        ):
            bad = bad or small not in (full, mark)
        ends = place
    elif count == _FULL_16 or _FULL_32 in (size, start):
        bad = True
    if bad:
        raise CheckpointError(f"{what}: the records at its end contradict each other; damaged")
    return count, size, start, ends


def _read_lines(
    data: bytes, count: int, offset: int, end: int, what: str
) -> tuple[Directory, list[int]]:
    """Return what the directory says, and where in it each line starts, in the order of records.

    It starts at `end` of the zip.
    """
    lines: list[tuple[int, bytes, int, int, int]] = []
    compressed: tuple[bytes, int] | None = None
    at = 0
    try:
        while at < len(data):
            # fmt: off
            (signature, flags, method, value, packed, size, name_bytes, extra_bytes, comment_bytes,
             disk, header) = ENTRY.unpack_from(data, at)
            # fmt: on
            start, named = at, at + ENTRY_BYTES
            after = named + name_bytes
            name = data[named:after]
            at = after + extra_bytes + comment_bytes
            if signature != b"PK\1\2" or at > len(data) or disk:
                raise ValueError
            if _FULL_32 in (size, packed, header):
                extra = data[after : after + extra_bytes]
                size, packed, header = _from_extra(extra, size, packed, header)
            if method != 0:
                compressed = compressed or (name, method)
            elif packed != size:
                raise ValueError
            if flags & _ENCRYPTED:
                raise ValueError
            lines.append((header, name, size, value, start))
    except (ValueError, struct.error):
        raise CheckpointError(
            f"{what}: line {len(lines)} of its directory contradicts itself; the file is damaged"
        ) from None
    if compressed is not None:
        name, method = compressed
        raise CheckpointError(
            f"{what}: record {name!r:.100} is compressed (method {method}), which torch never "
            "does; unpack it and save it again with torch.save"
        )
    if len(lines) != count:
        raise CheckpointError(
            f"{what}: its directory has {len(lines)} lines, not {count}; the file is damaged"
        )
    return _checked(lines, offset, end, what), [line[-1] for line in lines]


def _from_extra(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Fill in the sizes and the position that did not fit 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == _EXTRA_64 and length % 8 == 0:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            try:
                size = next(wide) if size == _FULL_32 else size
                packed = next(wide) if packed == _FULL_32 else packed
                header = next(wide) if header == _FULL_32 else header
            except StopIteration:
                raise ValueError from None
            return size, packed, header
        at += 4 + length
    raise ValueError


def _checked(
    lines: list[tuple[int, bytes, int, int, int]], offset: int, end: int, what: str
) -> Directory:
    """Return columns, in the order of the records, once no two share a byte or a name."""
    lines.sort()
    archive = lines[0][1].partition(b"/")[0]
    places: dict[str, int] = {}
    limits = [line[0] for line in lines[1:]]
    for (header, name, size, *_), limit in zip(lines, (*limits, end), strict=True):
        if header + _LOCAL_BYTES + len(name) + size > limit:
            raise CheckpointError(
                f"{what}: record {name!r:.100} of {size} bytes at byte {header} runs into what "
                f"follows at {limit}; the file is damaged"
            )
        folder, _, inner = name.partition(b"/")
        # Back to the same bytes, whatever they are.
        key = inner.decode("utf-8", "surrogateescape")
        if folder != archive or key in places:
            raise CheckpointError(
                f"{what}: record {name!r:.100} is there twice, or belongs to another archive than "
                f"{archive!r:.100}; the file is damaged"
            )
        places[key] = len(places)
    columns = TorchLines(
        places,
        array("Q", [offset + line[0] for line in lines]),
        array("Q", [line[2] for line in lines]),
        offset + end,
    )
    return Directory(archive, columns, array("I", [line[3] for line in lines]))

"""The zip that `torch.save` writes: where every record lies, without reading any of them.

A record is stored as it is, aligned by padding, so that a tensor's bytes can be read in place.
`zipfile` reads the directory at the end. What torch never writes is refused: compression, records
that share bytes or a name. Of a record's own header is read what says where it starts.
Source: PKWARE's APPNOTE.TXT 6.3.10, and ``caffe2/serialize/inline_container.cc`` of torch.
"""

import io
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from shardspec.checkpoint.read_boxes import crc32
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.unpickler import MOST_PICKLE_BYTES
from shardspec.errors import CheckpointError

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


class _Directory(NamedTuple):
    """Where records lie, as columns in their order: files may be many, and have many records."""

    places: dict[str, int]
    """Name without the archive's to its place in the columns."""
    headers: "array[int]"
    """Positions in the file of their own headers, and of what follows the last."""
    sizes: "array[int]"


class TorchRecord(NamedTuple):
    """What the directory says of a record."""

    full_name: bytes
    header: int
    """Position in the file of its own header."""
    limit: int
    """Position of what follows it."""
    num_bytes: int
    crc32: int | None
    """Of all its bytes; None where torch was told not to take it."""


@dataclass(slots=True)
class TorchZip:
    """What a stretch of a file holds that `torch.save` wrote; made by `read_torch_zip`."""

    path: Path
    what: str
    """What it is, for errors."""
    archive: bytes
    directory: _Directory
    crcs: "array[int]"
    """Of every record; 0 where torch was told not to take it."""

    def share(self, other: "TorchZip") -> bool:
        """Keep the directory of another file rather than an equal one; say whether it is."""
        if self.directory == other.directory:
            self.directory = other.directory
        return self.directory is other.directory

    def record(self, name: str) -> TorchRecord:
        """Return what is known of a record, such as ``data/0``, without reading anything."""
        places, headers, sizes = self.directory
        place = places.get(name)
        if place is None:
            raise CheckpointError(f"{self.what}: has no record {name!r:.100}; it is damaged")
        value = self.crcs[place] or (None if sizes[place] else 0)
        full = self.archive + b"/" + name.encode("utf-8", "surrogateescape")
        return TorchRecord(full, headers[place], headers[place + 1], sizes[place], value)

    def start(self, file: SourceFile, name: str) -> int:
        """Return where the bytes of a record start; its own header is read and checked."""
        record = self.record(name)
        head = file.read(record.header, _LOCAL.size + len(record.full_name))
        return self._start(record, head)

    def read(self, file: SourceFile, name: str) -> bytes:
        """Return the bytes of a record, compared with their CRC-32; short ones are read at once."""
        record = self.record(name)
        head = file.read(record.header, min(record.limit - record.header, _AT_ONCE_BYTES))
        start = self._start(record, head)
        data = head[start - record.header :][: record.num_bytes]
        if len(data) < record.num_bytes:
            data = file.read(start, record.num_bytes)
        if record.crc32 is not None and crc32(data) != record.crc32:
            raise CheckpointError(
                f"{self.what}: the bytes of record {record.full_name!r} are not as saved (CRC-32); "
                "restore the file or save again"
            )
        return data

    def pickle(self, file: SourceFile) -> bytes:
        """Return the bytes of its pickle."""
        size = self.record("data.pkl").num_bytes
        if size > MOST_PICKLE_BYTES:
            raise CheckpointError(
                f"{self.what}: its pickle has {size} bytes, past the limit of {MOST_PICKLE_BYTES}; "
                "save tensors as tensors, not as lists"
            )
        return self.read(file, "data.pkl")

    def _start(self, record: TorchRecord, head: bytes) -> int:
        """Return where the bytes of a record start, by its own header."""
        signature, flags, method, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        start: int = record.header + _LOCAL.size + name_bytes + extra_bytes
        if (
            signature != b"PK\3\4"
            or method != ZIP_STORED
            or flags & _ENCRYPTED
            or head[_LOCAL.size : _LOCAL.size + name_bytes] != record.full_name
            or start + record.num_bytes > record.limit
        ):
            raise CheckpointError(
                f"{self.what}: the header of record {record.full_name!r} at byte {record.header} "
                "contradicts the directory; the file is damaged"
            )
        return start


def read_torch_zip(
    file: SourceFile, offset: int = 0, num_bytes: int | None = None, what: str | None = None
) -> TorchZip:
    """Read the directory of what `torch.save` wrote into a stretch of a file, or into all of it.

    `what` it is, for errors, is the path unless told. Raises `CheckpointError` if it is no such
    zip, is truncated or damaged, contradicts itself, is compressed or encrypted, or has two records
    that share bytes or a name.
    """
    what = str(file.path) if what is None else what
    num_bytes = file.num_bytes - offset if num_bytes is None else num_bytes
    if offset < 0 or num_bytes < 0 or offset + num_bytes > file.num_bytes:
        raise CheckpointError(
            f"{what}: bytes {offset} to {offset + num_bytes} are needed, but the file has "
            f"{file.num_bytes}; it was cut short, restore it"
        )

    def tail_of(most: int) -> bytes:
        size = min(most, num_bytes)
        return file.read(offset + num_bytes - size, size)

    tail = tail_of(_TAIL_BYTES)
    if len(tail) < _END_BYTES or tail[-_END_BYTES:][:4] != b"PK\5\6":
        raise CheckpointError(f"{what}: {_no_zip(file.read(offset, min(num_bytes, 512)))}")
    count, size = struct.unpack_from("<HL", tail, len(tail) - _END_BYTES + 10)
    if size > _MOST_DIRECTORY_BYTES:
        raise CheckpointError(
            f"{what}: its directory has {size} bytes, past the limit of {_MOST_DIRECTORY_BYTES}; "
            "save in fewer records"
        )
    if size + _ENDS_BYTES > len(tail):
        tail = tail_of(size + _ENDS_BYTES)
    try:
        # It counts from the start of what it is given, so that records lie before that.
        with ZipFile(io.BytesIO(tail)) as opened:
            infos, end = opened.infolist(), opened.start_dir
        is_64 = tail[-_END_BYTES - _LOCATOR_BYTES :].startswith(b"PK\6\7")
        if not infos or count not in (len(infos), 0xFFFF if is_64 else None):
            raise BadZipFile(f"it has {len(infos)} lines, not {count}")
        before = num_bytes - len(tail)
        found = _checked(file.path, what, infos, end, offset, before)
    except CheckpointError:
        raise
    # What zipfile raises for a damaged directory; the second for a version that it does not know.
    except (BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise CheckpointError(
            f"{what}: its directory contradicts itself ({error}); the file is damaged"
        ) from None
    if "constants.pkl" in found.directory.places:
        raise CheckpointError(
            f"{what}: is a TorchScript program, not a checkpoint; save the state dict of the "
            "module: torch.save(torch.jit.load(path).state_dict(), new_path)"
        )
    if "byteorder" in found.directory.places:
        order, noted = b"little", found.record("byteorder")
        if (noted.num_bytes, noted.crc32) != _LITTLE:
            order = found.read(file, "byteorder") if noted.num_bytes <= 16 else b"?"
        if order != b"little":
            raise CheckpointError(
                f"{what}: was written on a machine with byte order {order!r}; load it with "
                "torch.load and save it again on a little-endian one"
            )
    return found


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


def _checked(
    path: Path, what: str, infos: list[ZipInfo], end: int, offset: int, before: int
) -> TorchZip:
    """Return the records, of which no two share a byte or a name.

    The zip starts at byte `offset` of the file, and what zipfile read `before` bytes further on.
    """
    infos.sort(key=lambda info: info.header_offset)
    headers: Sequence[int] = [info.header_offset + before for info in infos]
    archive = _name(infos[0]).partition(b"/")[0]
    places: dict[str, int] = {}
    for info, start, limit in zip(infos, headers, (*headers[1:], end + before), strict=True):
        name, size = _name(info), info.file_size
        shown = f"record {name!r:.100}"
        if info.compress_type != ZIP_STORED:
            raise CheckpointError(
                f"{what}: {shown} is compressed (method {info.compress_type}), which torch never "
                "does; unpack it and save it again with torch.save"
            )
        if info.compress_size != size or info.flag_bits & _ENCRYPTED or info.volume:
            raise BadZipFile(shown)
        if start < 0 or start + _LOCAL.size + len(name) + size > limit:
            raise BadZipFile(
                f"{shown} of {size} bytes at byte {start} runs into what follows at {limit}"
            )
        folder, _, inner = name.partition(b"/")
        if folder != archive:
            raise BadZipFile(f"{shown} belongs to another archive than {archive!r:.100}")
        # Back to the same bytes, whatever they are.
        key = inner.decode("utf-8", "surrogateescape")
        if key in places:
            raise BadZipFile(f"{shown} is there twice")
        places[key] = len(places)
    columns = (*headers, end + before)
    directory = _Directory(
        places,
        array("Q", [offset + at for at in columns]),
        array("Q", [info.file_size for info in infos]),
    )
    return TorchZip(path, what, archive, directory, array("I", [info.CRC for info in infos]))


def _name(info: ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_FLAG else "cp437")

"""Locates the records in a `torch.save` zip without reading them.

Records are stored uncompressed and aligned by padding, so that a tensor's bytes can be read in
place. `zipfile` reads the directory at the end. Compressed records, and records that share bytes or
a name, are refused: torch never writes them. The header in front of a record is used only to find
where the bytes start. Source: PKWARE's APPNOTE.TXT 6.3.10, and torch's inline_container.cc.
"""

import io
import struct
from array import array
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from shardspec.checkpoint.storage.checksums import crc32, crc32_of
from shardspec.checkpoint.storage.path import SourceFile, StoragePath
from shardspec.checkpoint.torch_files.unpickler import PickleError
from shardspec.errors import CheckpointError

_LOCAL: Final = struct.Struct("<4s2x2H16x2H")
_END_BYTES: Final = 22
_LOCATOR_BYTES: Final = 20
_ENDS_BYTES: Final = 56 + _LOCATOR_BYTES + _END_BYTES  # records after the directory, at most
_UTF8_FLAG: Final = 1 << 11
_ENCRYPTED: Final = 1 | 1 << 6 | 1 << 13
_TAIL_BYTES: Final = 2048
"""Bytes of the first read at the end of a file: the directory of a single tensor."""
_MAX_PICKLE_BYTES: Final = 32 << 20
"""The pickle of some 200,000 tensors; their bytes are other records."""
_MAX_DIRECTORY_BYTES: Final = 16 << 20
"""Some 150,000 records; larger ones would fill the memory."""
_NOT_READ: Final = (
    "is not a whole zip of torch.save, from torch 1.6 on; restore it, or load it with torch.load "
    "and save it again"
)


class TorchRecord(NamedTuple):
    """A record as the directory lists it; positions are in the file."""

    full_name: bytes
    header: int
    limit: int  # where the next record starts
    num_bytes: int
    crc32: int | None  # None if torch was configured not to compute it


Directory: TypeAlias = dict[str, tuple[int, int, int, int]]
"""Name of a record, without that of the archive -> number, header, limit and size."""


@dataclass(slots=True)
class TorchZip:
    """A zip of `torch.save` in a file or a part of one; made by `read_torch_zip`."""

    path: StoragePath
    label: str  # its name in errors
    archive: bytes  # the directory of all records
    directory: Directory  # files with equal directories may share one object
    crcs: "array[int]"  # of every record by its number

    def record(self, name: str) -> TorchRecord:
        """Return a record, such as ``data/0``, as the directory lists it."""
        if name not in self.directory:
            raise CheckpointError(f"{self.label}: has no record {name!r:.100}; it is damaged")
        number, header, limit, num_bytes = self.directory[name]
        value = self.crcs[number] or (None if num_bytes else 0)
        full = self.archive + b"/" + name.encode("utf-8", "surrogateescape")
        return TorchRecord(full, header, limit, num_bytes, value)

    def start(self, file: SourceFile, name: str) -> int:
        """Return the position of a record's bytes; reads and checks the header in front of them."""
        record = self.record(name)
        head = file.read(record.header, _LOCAL.size + len(record.full_name))
        signature, flags, method, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        start: int = record.header + _LOCAL.size + name_bytes + extra_bytes
        if (
            signature != b"PK\3\4"
            or method != ZIP_STORED
            or flags & _ENCRYPTED
            or head[_LOCAL.size : _LOCAL.size + name_bytes] != record.full_name
            or start + record.num_bytes > record.limit
        ):
            raise _contradiction(self.label, record.full_name)
        return start

    def is_intact(self, file: SourceFile, name: str) -> bool:
        """Return True if the bytes of a record match its CRC-32, or it has none."""
        record, start = self.record(name), self.start(file, name)
        return record.crc32 in (None, crc32_of(file, start, record.num_bytes))

    def read(self, file: SourceFile, name: str) -> bytes:
        """Return the bytes of a record, compared with their CRC-32."""
        record = self.record(name)
        data = file.read(self.start(file, name), record.num_bytes)
        if record.crc32 is not None and crc32(data) != record.crc32:
            raise CheckpointError(
                f"{self.label}: the bytes of record {record.full_name!r} have changed since the "
                "save (CRC-32); restore the file or save again"
            )
        return data

    def pickle(self, file: SourceFile) -> bytes:
        """Return the bytes of the pickle."""
        size = self.record("data.pkl").num_bytes
        if size > _MAX_PICKLE_BYTES:
            raise PickleError(
                f"{self.label}: its pickle has {size} bytes, past the limit of "
                f"{_MAX_PICKLE_BYTES}; save tensors as tensors, not as lists"
            )
        return self.read(file, "data.pkl")


def read_torch_zip(
    file: SourceFile, offset: int = 0, num_bytes: int | None = None, label: str | None = None
) -> TorchZip:
    """Read the directory of a zip of `torch.save` in a file or a part of one.

    `label` is its name in errors, by default the path. Raises `CheckpointError` if it is no such
    zip, truncated, damaged, compressed or encrypted, or if two records share bytes or a name.
    """
    label = label or str(file.path)
    num_bytes = file.num_bytes - offset if num_bytes is None else num_bytes
    if offset < 0 or num_bytes < 0 or offset + num_bytes > file.num_bytes:
        raise CheckpointError(
            f"{label}: bytes {offset} to {offset + num_bytes} are needed, but the file has "
            f"{file.num_bytes}; it was cut short, restore it"
        )
    tail_bytes = min(_TAIL_BYTES, num_bytes)
    tail = file.read(offset + num_bytes - tail_bytes, tail_bytes)
    if len(tail) < _END_BYTES or tail[-_END_BYTES:][:4] != b"PK\5\6":
        raise CheckpointError(f"{label}: {_NOT_READ if num_bytes else 'is empty; restore it'}")
    count, size = struct.unpack_from("<HL", tail, len(tail) - _END_BYTES + 10)
    if size > _MAX_DIRECTORY_BYTES:
        raise CheckpointError(
            f"{label}: its directory has {size} bytes, past the limit of {_MAX_DIRECTORY_BYTES}; "
            "save in fewer records"
        )
    if size + _ENDS_BYTES > len(tail):
        tail_bytes = min(size + _ENDS_BYTES, num_bytes)
        tail = file.read(offset + num_bytes - tail_bytes, tail_bytes)
    try:
        with ZipFile(io.BytesIO(tail)) as opened:
            infos, end = opened.infolist(), opened.start_dir
    # zipfile raises all of these for damaged directories, NotImplementedError for versions.
    except (BadZipFile, NotImplementedError, ValueError, OSError, struct.error):
        raise _contradiction(label) from None
    is_64 = tail[-_END_BYTES - _LOCATOR_BYTES :].startswith(b"PK\6\7")
    if not infos or count not in (len(infos), 0xFFFF if is_64 else None):
        raise _contradiction(label)
    # zipfile counts from the start of the tail, so the positions of records are negative.
    at = offset + num_bytes - len(tail)
    if any(_name(info).partition(b"/")[2] == b"constants.pkl" for info in infos):
        raise CheckpointError(
            f"{label}: is a TorchScript program, not a checkpoint; save the state dict of the "
            "module: torch.save(torch.jit.load(path).state_dict(), new_path)"
        )
    archive = _checked(file.path, label, infos, offset, at, end)
    if "byteorder" in archive.directory:
        record = archive.record("byteorder")
        # The usual order is recognized by its CRC-32, without reading it.
        if (record.num_bytes, record.crc32) != (6, crc32(b"little")):
            order = archive.read(file, "byteorder") if record.num_bytes <= 16 else b"?"
            if order != b"little":
                raise CheckpointError(
                    f"{label}: was written on a machine with byte order {order!r}; load it with "
                    "torch.load and save it again on a little-endian one"
                )
    return archive


def _contradiction(label: str, record: bytes = b"") -> CheckpointError:
    at = f" of record {record!r:.100}" if record else ""
    return CheckpointError(
        f"{label}: its directory{at} contradicts itself or the file; restore it, or save it again"
    )


def _checked(
    path: StoragePath, label: str, infos: list[ZipInfo], first: int, at: int, end: int
) -> TorchZip:
    """Return the zip with these records; raises CheckpointError if two share a byte or a name.

    The zip starts at byte `first` of the file. zipfile counted from byte `at`, and found the
    directory at `end`.
    """
    infos.sort(key=lambda info: info.header_offset)
    archive = _name(infos[0]).partition(b"/")[0]
    limits = (*(info.header_offset for info in infos[1:]), end)
    directory: Directory = {}
    for number, (info, limit) in enumerate(zip(infos, limits, strict=True)):
        name, size, header = _name(info), info.file_size, at + info.header_offset
        folder, _, inner = name.partition(b"/")
        # Encoding the key gives the same bytes, even if they are not UTF-8.
        key = inner.decode("utf-8", "surrogateescape")
        if info.compress_type != ZIP_STORED:
            raise CheckpointError(
                f"{label}: record {name!r:.100} is compressed, but torch never compresses; unpack "
                "it and save it again with torch.save"
            )
        if (
            info.compress_size != size
            or info.flag_bits & _ENCRYPTED
            or info.volume
            or header < first
            or header + _LOCAL.size + len(name) + size > at + limit
            or folder != archive
            or key in directory
        ):
            raise _contradiction(label, name)
        directory[key] = number, header, at + limit, size
    return TorchZip(path, label, archive, directory, array("I", [info.CRC for info in infos]))


def _name(info: ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_FLAG else "cp437")

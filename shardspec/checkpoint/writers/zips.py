"""Zip archives as torch.save lays them out, planned before their tensors are there.

Nothing is compressed, and every record starts at a multiple of 64 bytes. The checksum of a record
of a tensor is filled in when its bytes have passed. Source: APPNOTE.TXT of PKWARE, 4.3 to 4.5, and
caffe2/serialize/inline_container.cc of torch.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.targets import Piece

__all__ = ["ZipPlan"]

_ALIGNMENT: Final = 64
_BIG: Final = 0xFFFFFFFF
_MANY: Final = 0xFFFF
_VERSION: Final = 45
"""Of the standard: the first that has sizes of more than 32 bits."""
_ARCHIVE: Final = "archive"


@dataclass(frozen=True, slots=True)
class _Record:
    """A file of the archive; positions count from the start of the archive."""

    name: bytes
    num_bytes: int
    header: int
    start: int
    crc32: int | None
    """None if it is a tensor's, known later."""


class ZipPlan:
    """An archive in the making.

    Parameters
    ----------
    offset
        Where in the file it starts.
    """

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self._at = 0
        self._records: list[_Record] = []
        self._pieces: list[Piece] = []

    def add(self, name: str, data: bytes) -> None:
        """Add a record of known bytes."""
        start = self._begin(name, len(data), crc32(data))
        self._pieces.append(Piece(self._offset + start, data))

    def add_tensor(self, name: str, num_bytes: int) -> int:
        """Add a record to be filled later; return its position in the file."""
        return self._offset + self._begin(name, num_bytes, None)

    def _begin(self, name: str, num_bytes: int, value: int | None) -> int:
        encoded = f"{_ARCHIVE}/{name}".encode()
        header = self._at
        start = header + 30 + len(encoded) + _EXTRA_BYTES
        start += -start % _ALIGNMENT
        self._records.append(_Record(encoded, num_bytes, header, start, value))
        self._at = start + num_bytes
        return start

    @property
    def num_bytes(self) -> int:
        """Size of the archive."""
        records = sum(len(_central(record, 0)) for record in self._records)
        return self._at + records + _END_BYTES

    def pieces(self) -> list[Piece]:
        """Return the bytes that are known already."""
        return list(self._pieces)

    def late(self, crcs: Sequence[int]) -> list[Piece]:
        """Return headers and directory, given the CRC-32 of each record of a tensor in order."""
        left = iter(crcs)
        pieces = []
        directory = []
        for record in self._records:
            value = next(left) if record.crc32 is None else record.crc32
            pieces.append(Piece(self._offset + record.header, _local(record, value)))
            directory.append(_central(record, value))
        joined = b"".join(directory)
        end = _end(len(self._records), len(joined), self._at)
        pieces.append(Piece(self._offset + self._at, joined + end))
        return pieces


_EXTRA_BYTES: Final = 20 + 4
"""Room for sizes of 64 bits, and the head of the padding."""


def _local(record: _Record, value: int) -> bytes:
    """Return the header before a record, padded up to its start."""
    size = record.num_bytes
    big = size >= _BIG
    shown = _BIG if big else size
    extra = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
    room = record.start - record.header - 30 - len(record.name) - len(extra) - 4
    # torch marks its padding so.
    extra += struct.pack("<2sH", b"FB", room) + b"Z" * room
    head = struct.pack(
        "<4s5H3I2H", b"PK\x03\x04", _VERSION, 0, 0, 0, 0, value, shown, shown,
        len(record.name), len(extra),
    )  # fmt: skip
    return head + record.name + extra


def _central(record: _Record, value: int) -> bytes:
    """Return the entry of a record in the directory."""
    big = [number for number in (record.num_bytes, record.num_bytes) if number >= _BIG]
    big += [record.header] if record.header >= _BIG else []
    extra = struct.pack(f"<HH{len(big)}Q", 1, 8 * len(big), *big) if big else b""
    shown = min(record.num_bytes, _BIG)
    head = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, 0, value, shown, shown,
        len(record.name), len(extra), 0, 0, 0, 0, min(record.header, _BIG),
    )  # fmt: skip
    return head + record.name + extra


_END_BYTES: Final = 56 + 20 + 22


def _end(records: int, directory_bytes: int, start: int) -> bytes:
    """Return the end of an archive: in 64 bits, and what older readers look for."""
    big = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, records, records,
        directory_bytes, start,
    )  # fmt: skip
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + directory_bytes, 1)
    many = min(records, _MANY)
    plain = struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, many, many, min(directory_bytes, _BIG), min(start, _BIG), 0
    )
    return big + locator + plain

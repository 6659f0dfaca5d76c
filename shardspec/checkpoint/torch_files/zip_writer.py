"""Zip archives as torch.save lays them out, planned before their tensors are there.

Nothing is compressed, and every record starts at a multiple of 64 bytes. The CRC-32 of a record is
written after it and in the directory at the end: so a file of archives can be written from its
start on. Every byte between records is where torch has it, as torch may work out where they lie
and not look (`torch.utils.serialization.config.load.calculate_storage_offsets`).
Source: APPNOTE.TXT of PKWARE, 4.3 to 4.5; caffe2/serialize/inline_container.cc and
third_party/miniz of torch.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.targets import RawBytes

__all__ = ["ZipPlan"]

_ALIGNMENT: Final = 64
_BIG: Final = 0xFFFFFFFF
_MANY: Final = 0xFFFF
_VERSION: Final = 45
"""Of the standard: the first that has sizes of more than 32 bits."""
_FOLLOWED: Final = 1 << 3
"""Flag: size and CRC-32 of a record follow it."""
_UTF8: Final = 1 << 11
"""Flag: of names."""
_ARCHIVE: Final = "archive"


@dataclass(frozen=True, slots=True)
class _Record:
    """A file of the archive; positions count from the start of the archive."""

    name: bytes
    num_bytes: int
    header: int
    crc32: int | None
    """None if it is a tensor's, known later."""

    @property
    def flags(self) -> int:
        """What is special about it."""
        return _UTF8 | (_FOLLOWED if self.num_bytes else 0)

    def sizes_64(self) -> bytes:
        """Return, as an extra field, size and position where they do not fit 32 bits."""
        big = [self.num_bytes, self.num_bytes] if self.num_bytes >= _BIG else []
        big += [self.header] if self.header >= _BIG else []
        return struct.pack(f"<HH{len(big)}Q", 1, 8 * len(big), *big) if big else b""


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
        self._tensors: list[_Record] = []
        # Where it starts and what it is: what is known before the first tensor, after it, ...
        self._known: list[tuple[int, bytearray]] = [(0, bytearray())]

    def add(self, name: str, data: bytes) -> None:
        """Add a record of known bytes."""
        record = self._begin(name, len(data), crc32(data))
        self._extend(data)
        self._extend(_after(record, crc32(data)))

    def add_tensor(self, name: str, num_bytes: int) -> int:
        """Add a record to be filled later; return its position in the file."""
        record = self._begin(name, num_bytes, None)
        start = self._at
        self._tensors.append(record)
        self._at += num_bytes + len(_after(record, 0))
        self._known.append((self._at, bytearray()))
        return self._offset + start

    def _begin(self, name: str, num_bytes: int, value: int | None) -> _Record:
        record = _Record(f"{_ARCHIVE}/{name}".encode(), num_bytes, self._at, value)
        self._records.append(record)
        self._extend(_local(record))
        return record

    def _extend(self, data: bytes) -> None:
        self._known[-1][1].extend(data)
        self._at += len(data)

    @property
    def num_bytes(self) -> int:
        """Size of the archive."""
        return self._at + sum(len(_central(record, 0)) for record in self._records) + _END_BYTES

    def pieces(self) -> list[RawBytes]:
        """Return the bytes that are known already: those up to the first tensor."""
        data = bytes(self._known[0][1])
        return [RawBytes(self._offset, data if self._tensors else data + self._directory(()))]

    def late(self, crcs: Sequence[int], first: int = 0) -> list[RawBytes]:
        """Return what follows tensors, given the CRC-32 of each; as `Trailer` says."""
        pieces = []
        for number in range(first, len(crcs)):
            start, known = self._known[number + 1]
            data = _after(self._tensors[number], crcs[number])
            start -= len(data)
            data += known
            if number + 1 == len(self._tensors):
                data += self._directory(crcs)
            pieces.append(RawBytes(self._offset + start, data))
        return pieces

    def _directory(self, crcs: Sequence[int]) -> bytes:
        """Return the end of the archive, given the CRC-32 of each record of a tensor in order."""
        left = iter(crcs)
        joined = b"".join(
            _central(record, next(left) if record.crc32 is None else record.crc32)
            for record in self._records
        )
        return joined + _end(len(self._records), len(joined), self._at)


def _local(record: _Record) -> bytes:
    """Return the header before a record, padded so that the record is aligned."""
    extra = record.sizes_64()
    # torch marks its padding so.
    room = -(record.header + 30 + len(record.name) + len(extra) + 4) % _ALIGNMENT
    extra += struct.pack("<2sH", b"FB", room) + b"Z" * room
    head = struct.pack(
        "<4s5H3I2H", b"PK\x03\x04", _VERSION, record.flags, 0, 0, 0, 0, 0, 0,
        len(record.name), len(extra),
    )  # fmt: skip
    return head + record.name + extra


def _after(record: _Record, value: int) -> bytes:
    """Return what follows a record: its CRC-32 and size; nothing if it is empty."""
    if not record.num_bytes:
        return b""
    sizes = "2Q" if record.sizes_64() else "2I"
    size = record.num_bytes
    return struct.pack(f"<4sI{sizes}", b"PK\x07\x08", value, size, size)


def _central(record: _Record, value: int) -> bytes:
    """Return the entry of a record in the directory."""
    extra = record.sizes_64()
    shown = min(record.num_bytes, _BIG)
    head = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", _VERSION, _VERSION, record.flags, 0, 0, 0, value, shown,
        shown, len(record.name), len(extra), 0, 0, 0, 0, min(record.header, _BIG),
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

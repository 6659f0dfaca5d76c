"""Computes CRC-32, the checksum of zips and of shardspec's own format."""

from typing import Final, TypeAlias

from isal import isal_zlib

from shardspec.checkpoint.storage.path import SourceFile

BLOCK_BYTES: Final = 1 << 20
"""Maximum bytes copied per step: they fit the L2 cache of common CPUs."""
Buffer: TypeAlias = bytes | bytearray | memoryview


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32 of bytes (that of zlib and zip), continued from `value`.

    >>> crc32(b"b", crc32(b"a")) == crc32(b"ab")
    True
    """
    return int(isal_zlib.crc32(data, value))


def crc32_combine(first: int, second: int, num_bytes: int) -> int:
    """Return the CRC-32 of two joined parts; the second has `num_bytes`.

    >>> crc32_combine(crc32(b"a"), crc32(b"b"), 1) == crc32(b"ab")
    True
    """
    return int(isal_zlib.crc32_combine(first, second, num_bytes))


def crc32_of(file: SourceFile, start: int, num_bytes: int) -> int:
    """Return the CRC-32 of a range of bytes of a file."""
    value, end = 0, start + num_bytes
    for at in range(start, end, BLOCK_BYTES):
        value = crc32(file.read(at, min(BLOCK_BYTES, end - at)), value)
    return value


def crc_text(value: int) -> str:
    """Format a CRC-32 as eight hexadecimal digits.

    >>> crc_text(255)
    '000000ff'
    """
    return f"{value:08x}"

"""Files of an output on a disk: made with their size, written at any place, read again, flushed."""

import heapq
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.copy_plan import BLOCK_BYTES
from shardspec.checkpoint.digests import crc32, crc32_combine, crc_text
from shardspec.checkpoint.directories import open_below, reserve
from shardspec.checkpoint.store import RemotePath, reason
from shardspec.checkpoint.targets import OutputFile, RawBytes, Write
from shardspec.errors import CheckpointError

__all__ = [
    "Pieces",
    "Staged",
    "different",
    "digest_of_file",
    "finish_file",
    "read_back",
    "write_all",
    "write_list",
]

WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than what one call brings: small ones are more work, and large ones can be slow to come by."""


class Staged(NamedTuple):
    """An output that is begun: a file, or a directory of files."""

    place: Path
    """Where, by its descriptor."""
    path: Path
    """Its final name, for errors."""
    directory: bool

    def create(self, name: str, num_bytes: int) -> None:
        """Make a file of a size: a disk that has no room for it shows before any is written."""
        try:
            fd = self._open(name, os.O_CREAT | os.O_EXCL if self.directory else 0, make=True)
            try:
                reserve(fd, num_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be written: {reason(error)} ({num_bytes} bytes are needed); "
                "make room or write elsewhere"
            ) from None

    def open(self, name: str) -> int:
        """Open a file that was made; return its descriptor."""
        try:
            return self._open(name, 0)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {reason(error)}") from None

    def _open(self, name: str, flags: int, *, make: bool = False) -> int:
        if not self.directory:
            return os.open(self.place, os.O_RDWR | os.O_CLOEXEC)
        return open_below(self.place, name, os.O_RDWR | flags, make=make)


def write_all(fd: int, data: memoryview, offset: int, path: Path) -> None:
    """Write bytes at a place in a file.

    Raises
    ------
    CheckpointError
        If the system refuses, as when the disk is full.
    """
    done, end = 0, len(data)
    while done < end:
        try:
            done += os.pwrite(fd, data[done : done + WRITE_BYTES], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None


def finish_file(staged: Staged, file: OutputFile, crcs: Sequence[int], *, digested: bool) -> int:
    """Write and check what is no tensor's, flush a file, and return the CRC-32 of all of it."""
    fd = staged.open(file.name)
    try:
        trailer = () if file.trailer is None else file.trailer(crcs)
        for one in chain(file.raw, trailer):
            write_all(fd, memoryview(one.data), one.offset, staged.path)
        _flush(fd, staged.path)
        room = memoryview(bytearray(WRITE_BYTES))
        for one in chain(file.raw, trailer):
            for at in range(0, len(one.data), WRITE_BYTES):
                due = memoryview(one.data)[at : at + WRITE_BYTES]
                read_back(fd, found := room[: len(due)], one.offset + at, staged.path)
                if found != due:
                    raise different(staged.path, "a header", crc32(found), crc32(due))
    finally:
        os.close(fd)
    return digest_of_file(file, trailer, crcs) if digested else 0


class Pieces:
    """Pieces of a file, put together to blocks: how many bytes, and their CRC-32.

    Parameters
    ----------
    write_block
        Writes a block behind those before.
    """

    def __init__(self, write_block: Callable[[memoryview], object]) -> None:
        self._write_block = write_block
        self._waiting = bytearray()
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: bytes) -> None:
        """Write on."""
        self._waiting += data
        if len(self._waiting) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        block, self._waiting = self._waiting, bytearray()
        self.crc32 = crc32(block, self.crc32)
        self._write_block(memoryview(block))
        self.num_bytes += len(block)


def write_list(staged: Staged, name: str, fill: Callable[[Write], object]) -> tuple[str, int, int]:
    """Write a file that says what the others are; return its name, bytes and CRC-32."""
    staged.create(name, 0)
    fd = staged.open(name)
    try:
        pieces = Pieces(lambda block: write_all(fd, block, pieces.num_bytes, staged.path))
        fill(pieces.write)
        pieces.flush()
        _flush(fd, staged.path)
        found, room = 0, memoryview(bytearray(WRITE_BYTES))
        for at in range(0, pieces.num_bytes, WRITE_BYTES):
            part = room[: min(WRITE_BYTES, pieces.num_bytes - at)]
            read_back(fd, part, at, staged.path)
            found = crc32(part, found)
    finally:
        os.close(fd)
    if found != pieces.crc32:
        raise different(staged.path, name, found, pieces.crc32)
    return name, pieces.num_bytes, pieces.crc32


def _flush(fd: int, path: Path) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None


def digest_of_file(file: OutputFile, trailer: Sequence[RawBytes], crcs: Sequence[int]) -> int:
    """Return the CRC-32 of a file made of raw bytes and extents, with zeros between them."""
    # All are in ascending order, and there can be very many.
    raw = (
        ((one.offset, len(one.data), crc32(one.data)) for one in several)
        for several in (file.raw, trailer)
    )
    extents = (
        (extent.offset, extent.num_bytes, crc)
        for extent, crc in zip(file.extents, crcs, strict=True)
    )
    value = at = 0
    for offset, num_bytes, crc in heapq.merge(*raw, extents):
        if offset > at:
            value = crc32(bytes(offset - at), value)
        value = int(crc32_combine(value, crc, num_bytes))
        at = offset + num_bytes
    return value


def read_back(fd: int, room: memoryview, offset: int, path: Path) -> None:
    """Fill memory from a place in a file that was written."""
    done = 0
    while done < len(room):
        try:
            count = os.preadv(fd, [room[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read again: {reason(error)}") from None
        if not count:
            raise CheckpointError(f"{path}: was cut short while it was written; nothing was kept")
        done += count


def different(path: Path, name: str, found: int, expected: int) -> CheckpointError:
    """Return the error that says that what was written is not what is there."""
    why = "the memory of this machine, or what it is stored on, is at fault"
    if isinstance(path, RemotePath):
        why = "the store gives back something else than was sent, or another run has written there"
    return CheckpointError(
        f"{path}: {name} was read back differently: its CRC-32 is {crc_text(found)} instead of "
        f"{crc_text(expected)}; {why}; nothing was kept"
    )

"""Writing a file on a thread beside the one that reads, and reading it again on one more.

Reading ahead, writing and checking overlap: while one block is written, the next is put together,
and what was written before is flushed to the disk, read again and compared.
"""

import os
import time
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np

from shardspec.checkpoint.digests import crc32, crc_text
from shardspec.checkpoint.files import reason
from shardspec.checkpoint.regions import Bytes
from shardspec.errors import CheckpointError

__all__ = ["BLOCK_BYTES", "Behind", "ReadBack", "different", "write_all"]

BLOCK_BYTES: Final = 1 << 20
"""Most bytes of a block: it fits the L2 cache of common CPUs; smaller ones mean more calls."""
_BLOCKS: Final = 4
"""Blocks on their way: one being put together, one being written, and some slack between."""
_WRITE_BYTES: Final = 64 << 10
"""Bytes written by one call. For longer ones Linux takes large pages into its cache, and on a
virtual machine, whose host has to find memory for them first, this can take several times as
long."""
_CACHED_BYTES: Final = 4 << 20
"""Bytes flushed and read again at a time where flushing takes no time, as in memory: few enough to
be in the CPU's cache still."""
_FLUSHED_BYTES: Final = 64 << 20
"""Bytes flushed to a disk at a time: it is at work from then on, not at the end only."""
_FLUSH_SECONDS: Final = 1e-3
"""A flush that takes longer is one to a disk."""


def write_all(fd: int, data: memoryview, offset: int, path: Path) -> None:
    """Write bytes at a place in a file.

    Raises
    ------
    CheckpointError
        If the system refuses, as when the disk is full.
    """
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None


def different(path: Path, name: str, found: int, expected: int) -> CheckpointError:
    """Return the error of a part of a file that was read back differently."""
    return CheckpointError(
        f"{path}: {name} was read back differently: its CRC-32 is {crc_text(found)} instead of "
        f"{crc_text(expected)}; the memory of this machine, or what it is stored on, is at fault; "
        "nothing was kept"
    )


class ReadBack(NamedTuple):
    """A stretch of a file that is to be read again."""

    name: str
    """What it is, for errors."""
    offset: int
    num_bytes: int
    crc32: int
    """What it should have."""


class _Write(NamedTuple):
    room: Bytes
    """The buffer to give back."""
    data: Bytes
    offset: int
    check: ReadBack | None


class Behind:
    """Writes blocks of a file in the background, in the order in which they are put.

    For one thread that calls `room` and `put` in turns, inside a ``with`` block; at its end all is
    written, and what was to be checked has been flushed, read again and compared. An exception in
    the block stops the writing.

    Parameters
    ----------
    fd, path
        The file, open for writing and reading; the path is for errors.
    block_bytes
        Most bytes of a block.
    """

    def __init__(self, fd: int, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self._fd = fd
        self._path = path
        self.block_bytes = block_bytes
        self._failure: BaseException | None = None
        self._free: SimpleQueue[Bytes] = SimpleQueue()
        self._writes: SimpleQueue[_Write | None] = SimpleQueue()
        self._checks: SimpleQueue[ReadBack | None] = SimpleQueue()
        self._taken: Bytes | None = None
        self._threads: list[Thread] = []
        for _ in range(_BLOCKS):
            self._free.put(np.empty(block_bytes, np.uint8))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failure = self._failure or error
        self._writes.put(None)
        interrupt = None
        for thread in self._threads:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as again:
                    # The file must not be closed before the threads have let go of it.
                    self._failure = interrupt = again
        if interrupt is not None:
            raise interrupt
        if error is None and self._failure is not None:
            raise self._failure

    def room(self, num_bytes: int) -> Bytes:
        """Return flat memory for the next block, once there is some; the last is given back.

        Raises
        ------
        CheckpointError
            If a block before could not be written, or was read back differently.
        """
        if self._taken is None:
            self._taken = self._free.get()
        if self._failure is not None:
            raise self._failure
        return self._taken[:num_bytes]

    def put(self, data: Bytes, offset: int, name: str, crc: int | None) -> None:
        """Write a block: the memory that `room` gave, or other memory that nobody changes.

        Parameters
        ----------
        data
            The block, flat.
        offset
            Where in the file it goes.
        name
            What it is, for errors.
        crc
            Its CRC-32, if it is to be read again and compared.
        """
        assert self._taken is not None, "room was asked for"
        if not self._threads:
            self._threads = [Thread(target=self._write), Thread(target=self._check)]
            for thread in self._threads:
                thread.start()
        check = None if crc is None else ReadBack(name, offset, data.nbytes, crc)
        self._writes.put(_Write(self._taken, data, offset, check))
        self._taken = None

    def _write(self) -> None:
        while (write := self._writes.get()) is not None:
            if self._failure is None:
                try:
                    write_all(self._fd, write.data.data, write.offset, self._path)
                except BaseException as error:
                    self._failure = error
            self._free.put(write.room)
            if write.check is not None:
                self._checks.put(write.check)
        self._checks.put(None)

    def _check(self) -> None:
        room = memoryview(bytearray(self.block_bytes))
        waiting: list[ReadBack] = []
        num_bytes, enough = 0, _CACHED_BYTES
        check: ReadBack | None
        while True:
            check = self._checks.get()
            if check is not None:
                waiting.append(check)
                num_bytes += check.num_bytes
            if (check is None or num_bytes >= enough) and self._failure is None:
                try:
                    if waiting:
                        slow = self._flush() > _FLUSH_SECONDS
                        enough = _FLUSHED_BYTES if slow else _CACHED_BYTES
                        self._compare(waiting, room)
                except BaseException as error:
                    self._failure = error
                waiting, num_bytes = [], 0
            if check is None:
                return

    def _flush(self) -> float:
        """Return how many seconds it took."""
        started = time.monotonic()
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {reason(error)}") from None
        return time.monotonic() - started

    def _compare(self, waiting: list[ReadBack], room: memoryview) -> None:
        for name, offset, num_bytes, expected in waiting:
            if self._failure is not None:
                return
            value = 0
            for at in range(0, num_bytes, len(room)):
                part = room[: num_bytes - at]
                value = crc32(self._read(part, offset + at), value)
            if value != expected:
                raise different(self._path, name, value, expected)

    def _read(self, part: memoryview, offset: int) -> memoryview:
        done = 0
        while done < len(part):
            try:
                count = os.preadv(self._fd, [part[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self._path}: cannot be read again: {reason(error)}"
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{self._path}: ends at byte {offset + done} when read again, but more was "
                    "written; what it is stored on is at fault; nothing was kept"
                )
            done += count
        return part

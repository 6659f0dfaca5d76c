"""Writing a file so that the disk is at work while more is on its way."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardspec.checkpoint.store import reason
from shardspec.errors import CheckpointError

__all__ = ["WRITE_BYTES", "Writer", "write_all"]

WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than what one call brings: small ones are more work, and large ones can be slow to come by."""
_BEGUN_BYTES: Final = 8 << 20
"""Bytes that a disk is told of at a time."""
_PAGE: Final = 4096
"""What is told of ends with one, so that none is written to the disk twice."""


def write_all(
    fd: int, data: memoryview, offset: int, path: Path, at_once: int = WRITE_BYTES
) -> None:
    """Write bytes at a place in a file, so many by one call.

    Raises
    ------
    CheckpointError
        If the system refuses, as when the disk is full.
    """
    done, end = 0, len(data)
    while done < end:
        # A view less for each block of a file in memory.
        part = data if end <= at_once and not done else data[done : done + at_once]
        try:
            done += os.pwrite(fd, part, offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None


class Writer:
    """Writes blocks of a file, one after the other, and has the disk begin with them.

    Otherwise Linux begins when half a minute has passed or much of the memory is full, so that
    whoever flushes the file waits for most of it.

    Parameters
    ----------
    fd, path
        The file, open for writing; the path is for errors.
    """

    __slots__ = ("_end", "_fd", "_first", "_num_bytes", "_path", "at_once")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._first = self._end = 0
        """Where what the disk was not told of yet begins and ends."""
        self._num_bytes = 0
        """Of what was written there."""
        self.at_once = WRITE_BYTES
        """Bytes to write by one call."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at a place, mostly behind those before.

        Raises
        ------
        CheckpointError
            If the system refuses, as when the disk is full.
        """
        write_all(self._fd, data, offset, self._path, self.at_once)
        if not self._num_bytes:
            self._first = self._end = offset
        self._first = min(self._first, offset)
        self._end = max(self._end, offset + data.nbytes)
        self._num_bytes += data.nbytes
        if self._num_bytes >= _BEGUN_BYTES:
            end = self._end - self._end % _PAGE
            self._begin(self._first, end)
            self._first, self._num_bytes = end, self._end - end

    def _begin(self, start: int, end: int) -> None:
        """Have the disk begin to write a stretch, and do not wait until it has.

        A thread that does so beside the one that writes gets in its way. What happens to be on the
        disk already leaves the cache. Files in memory stay as they are.
        """
        if sys.platform == "linux":
            # A file system that knows no such advice begins when it will.
            with suppress(OSError):
                os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)

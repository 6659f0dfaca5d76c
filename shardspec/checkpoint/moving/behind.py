"""Writing a file, and reading it again behind the place that has been come to.

What was written is flushed to the disk, read again and compared while the rest is still on its way:
by a thread beside the one that writes, or by that one itself where other files keep the CPU busy.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeAlias

from shardspec.checkpoint.moving.buffers import BLOCK_BYTES
from shardspec.checkpoint.moving.digests import crc_text
from shardspec.checkpoint.moving.to_disk import Writer
from shardspec.checkpoint.store import RemotePath, reason
from shardspec.errors import CheckpointError

__all__ = ["Behind", "Check", "ReadBack", "different"]

_CACHED_BYTES: Final = 4 << 20
"""Bytes flushed and read again at a time where flushing takes no time, as in memory: few enough to
be in the CPU's cache still, and for another thread not too few to be told of."""
_OWN_CACHED_BYTES: Final = 1 << 20
"""The same for one that checks by itself: few enough to be in its own core's cache."""
_FLUSHED_BYTES: Final = 256 << 20
"""Bytes flushed to a disk and read again at a time. Each flush waits for the journal of the file
system, so that shorter stretches take longer."""
_FLUSH_SECONDS: Final = 1e-3
"""A flush of so many cached bytes that takes longer is one to a disk."""
_JUDGED: Final = 3
"""Flushes whose time is looked at: a busy machine may be slow once, and a disk quick later, when it
has written by itself."""


def different(path: Path, name: str, found: int, expected: int) -> CheckpointError:
    """Return the error of a part of a file that was read back differently."""
    why = "the memory of this machine, or what it is stored on, is at fault"
    if isinstance(path, RemotePath):
        why = "the store gives back something else than was sent, or another run has written there"
    return CheckpointError(
        f"{path}: {name} was read back differently: its CRC-32 is {crc_text(found)} instead of "
        f"{crc_text(expected)}; {why}; nothing was kept"
    )


Check: TypeAlias = Callable[[memoryview], None]
"""Looks at a block that was read again; raises what is to be raised if it is not right."""


class ReadBack(NamedTuple):
    """A block that is to be read again."""

    offset: int
    num_bytes: int
    check: Check


class Behind:
    """Writes blocks of a file, and has them read again.

    For one thread that calls `room` and `put` in turns, inside a ``with`` block; at its end what
    was to be checked has been flushed, read again and compared. An exception in the block stops
    the checks.

    Parameters
    ----------
    fd, path
        The file, open for writing and reading; the path is for errors.
    beside
        Whether a thread of its own checks; otherwise `put` does from time to time.
    block_bytes
        Most bytes of a block.
    """

    def __init__(
        self, fd: int, path: Path, *, beside: bool = True, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._fd = fd
        self._writer = Writer(fd, path)
        self.path = path
        self._beside = beside
        self.block_bytes = block_bytes
        self._room = memoryview(bytearray(block_bytes))
        self._failure: BaseException | None = None
        self._thread: Thread | None = None
        self._ended = Event()
        self._handed: SimpleQueue[Sequence[ReadBack]] = SimpleQueue()
        """Stretches for the thread; none are its end."""
        self._waiting: list[ReadBack] = []
        self._num_bytes = 0
        """Of what waits."""
        self._enough = _CACHED_BYTES
        self._in_memory = False
        """Whether one of the first flushes was quick; until then this is a disk."""
        self._flushes = 0
        self._unflushed = 0
        """Bytes that were not to be checked; only the first are counted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._failure = self._failure or error
        interrupt = None
        while True:
            try:
                if self._failure is None:
                    self._check()
                self._end()
                break
            except KeyboardInterrupt as again:
                # The file must not be closed before the thread has let go of it.
                self._failure = interrupt = again
        failure, self._failure = self._failure, None
        if interrupt is not None:
            raise interrupt
        if error is None and failure is not None:
            try:
                raise failure
            finally:
                # Otherwise an error and its traceback hold each other, and buffers with them.
                del failure

    def _end(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._handed.put(())
            # An interrupted join takes the thread for ended (bpo-45274), so it is not enough.
            self._ended.wait()
            self._thread.join()

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for the next block.

        Raises
        ------
        CheckpointError
            If a block before was read back differently.
        """
        if self._failure is not None:
            raise self._failure
        return self._room[:num_bytes]

    def put(self, data: memoryview, offset: int, check: Check | None) -> None:
        """Write a block: what `room` gave, or other memory.

        Parameters
        ----------
        data
            The block, flat, and no longer than `block_bytes` if it is to be read again.
        offset
            Where in the file it goes.
        check
            Called with the block once it was read again, in the order in which blocks were put;
            None if it is not to be.

        Raises
        ------
        CheckpointError
            If the system refuses, or blocks before were read back differently.
        """
        assert check is None or len(data) <= self.block_bytes, "it is read again as one block"
        self._writer.write(data, offset)
        if check is None:
            if self._unflushed < _CACHED_BYTES:
                self._unflushed += data.nbytes
                if self._unflushed >= _CACHED_BYTES:
                    self._flush()
        else:
            self._waiting.append(ReadBack(offset, data.nbytes, check))
            self._num_bytes += data.nbytes
            if self._num_bytes >= self._enough:
                self._check()

    def _check(self) -> None:
        """Have what waits compared."""
        waiting, self._waiting, self._num_bytes = self._waiting, [], 0
        if not waiting:
            return
        if not self._beside:
            # What lay there has been written.
            self._compare(waiting, self._room)
            return
        if self._thread is None:
            self._thread = Thread(target=self._compare_handed, name="shardspec-behind", daemon=True)
            self._thread.start()
        self._handed.put(waiting)

    def _compare_handed(self) -> None:
        room = memoryview(bytearray(self.block_bytes))
        while waiting := self._handed.get():
            if self._failure is None:
                try:
                    self._compare(waiting, room)
                except BaseException as error:
                    self._failure = error
        self._ended.set()

    def _compare(self, waiting: Sequence[ReadBack], room: memoryview) -> None:
        self._flush()
        for offset, num_bytes, check in waiting:
            if self._failure is not None:
                return
            check(self._read(room[:num_bytes], offset))

    def _flush(self) -> None:
        """Flush what was written, and learn whether that takes time."""
        started = time.monotonic()
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {reason(error)}") from None
        self._flushes += 1
        if self._flushes <= _JUDGED:
            self._in_memory |= time.monotonic() - started < _FLUSH_SECONDS
        if not self._in_memory:
            self._enough = _FLUSHED_BYTES if self._flushes >= _JUDGED else _CACHED_BYTES
        else:
            self._enough = _CACHED_BYTES if self._beside else _OWN_CACHED_BYTES
            self._writer.at_once = self.block_bytes

    def _read(self, part: memoryview, offset: int) -> memoryview:
        done = 0
        while done < len(part):
            try:
                count = os.preadv(self._fd, [part[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be read again: {reason(error)}"
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset + done} when read again, but more was "
                    "written; what it is stored on is at fault; nothing was kept"
                )
            done += count
        return part

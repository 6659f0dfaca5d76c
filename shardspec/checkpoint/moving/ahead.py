"""Having a disk read what will be wanted next, while what has come is copied.

The system reads ahead within one file; a tensor comes from many, a few MiB of each. So a thread
beside the one that copies asks for what lies before it in all of them, a block at a time, and the
disk does not wait for the processor nor the other way round. What is asked for goes to the cache of
the system and from there nowhere: nothing is copied, and whoever reads it finds what is wrong.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final, NamedTuple, Self

from shardspec.boxes import Box
from shardspec.checkpoint.moving.buffers import BLOCK_BYTES
from shardspec.checkpoint.moving.pieces import Place, Run, byte_box, pieces
from shardspec.checkpoint.moving.rows import rows_of
from shardspec.checkpoint.reading.source import StoredTensor, distinct
from shardspec.checkpoint.storage.files import OpenFiles
from shardspec.checkpoint.storage.remote import RemotePath
from shardspec.dtypes import item_bytes
from shardspec.errors import ShardSpecError

__all__ = ["Ahead", "Stretch", "stretches"]

_AHEAD_BYTES: Final = 8 << 20
"""How far before the one that copies: some blocks, so that one that comes late is there in time."""
_LOOKED_AT_ONE_OF: Final = 32
"""Blocks, until one is not in memory: for all that follow are asked for. Looking makes the disk
read a little of what is not there, and so the rest of it not as soon."""
_SUPPORTED: Final = sys.platform == "linux" and {"splice", "RWF_NOWAIT"} <= vars(os).keys()
"""Whether this Python knows the calls: one made for old systems does not."""


class Stretch(NamedTuple):
    """Bytes of a file that will be wanted."""

    path: Path
    start: int
    num_bytes: int
    at: int
    """Bytes that are written before the first of them is wanted."""


def stretches(tensor: StoredTensor, target: Box) -> Iterator[Stretch]:
    """Return what will be read to put one box of a tensor together, in that order.

    What does not lie in a file as one stretch is left out, and addends of a pending reduction are.

    Examples
    --------
    >>> from shardspec.checkpoint.reading.source import StoredBox
    >>> boxes = tuple(StoredBox(((0, 4), (c, c + 3)), (), c, Path(f"{c}"), 64) for c in (0, 3))
    >>> tensor = StoredTensor("w", (4, 6), "int8", None, (), boxes)
    >>> [(str(s.path), s.start, s.num_bytes) for s in stretches(tensor, ((1, 3), (0, 6)))]
    [('0', 67, 6), ('3', 67, 6)]
    """
    if tensor.pending:
        return
    size = item_bytes(tensor.dtype)
    places = [Place(byte_box(stored.box, size), stored) for stored in distinct(tensor)]
    for piece in pieces(byte_box(target, size), places, BLOCK_BYTES):
        if isinstance(piece, Run):
            yield Stretch(
                piece.source.path, piece.source_offset, piece.num_bytes, piece.target_offset
            )
        else:
            for rows in rows_of(piece, 0) or ():
                yield Stretch(rows.stored.path, rows.start, rows.num_bytes, piece.target_offset)


class Ahead:
    """Has the system read stretches of files, not far before the one that copies them.

    To be used in a ``with`` block, whose end ends it. Where the system cannot say what it has in
    memory, as for files that are in memory only, it does nothing; nor where Python cannot ask.

    Parameters
    ----------
    wanted
        What will be read, in that order; asked by a thread of its own. Errors end that thread, as
        they will be found by the one that copies. None if nothing is to be done.
    """

    def __init__(self, wanted: Iterable[Stretch] | None) -> None:
        self._wanted = wanted
        self._written = 0
        self._moved = Event()
        self._ended = False
        self._thread = Thread(target=self._bring_all, name="shardspec-ahead", daemon=True)

    def __enter__(self) -> Self:
        if self._wanted is not None and _SUPPORTED:
            # Without one more thread all goes on as well, if not as fast.
            with suppress(RuntimeError):
                self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._ended = True
        self._moved.set()
        if self._thread.ident is not None:
            self._thread.join()

    def advance(self, num_bytes: int) -> None:
        """Take note that so many bytes more were written."""
        self._written += num_bytes
        if not self._moved.is_set():
            self._moved.set()

    def _bring_all(self) -> None:
        assert self._wanted is not None, "the thread was started"
        judged, cold = 0, False
        with suppress(OSError, ShardSpecError), OpenFiles() as files, _Drain() as drain:
            for path, start, num_bytes, at in self._wanted:
                if isinstance(path, RemotePath):
                    # What is in a store is asked for ahead by who reads it.
                    return
                for done in range(0, num_bytes, BLOCK_BYTES):
                    if not self._come_near(at + done):
                        return
                    if at + done < self._written:
                        # Too late.
                        continue
                    fd = files.file(path).fd
                    length = min(BLOCK_BYTES, num_bytes - done)
                    if not cold and judged % _LOOKED_AT_ONE_OF == 0:
                        # Its first bytes may have come with those before them.
                        cold = not _in_memory(fd, start + done + length - 1)
                    judged += 1
                    if cold:
                        drain.bring(fd, start + done, length)

    def _come_near(self, at: int) -> bool:
        """Wait until the one that copies is near; return False if it has ended."""
        while not self._ended:
            self._moved.clear()
            if at <= self._written + _AHEAD_BYTES:
                return True
            if not self._ended:
                self._moved.wait()
        return False


def _in_memory(fd: int, at: int) -> bool:
    """Return whether the cache has a byte; raises OSError if the system cannot say."""
    try:
        os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


class _Drain:
    """Where bytes go that are to be read, but are not looked at: nothing is copied on the way."""

    def __enter__(self) -> Self:
        import fcntl

        with ExitStack() as stack:
            self._out, self._in = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, self._out)
            stack.callback(os.close, self._in)
            self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, self._nowhere)
            # A disk reads as much at once as it is asked for at once, and less takes as long.
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, BLOCK_BYTES)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._open.close()

    def bring(self, fd: int, start: int, num_bytes: int) -> None:
        """Have the system read a stretch of a file; it may end before."""
        done = 0
        while done < num_bytes:
            moved = os.splice(fd, self._in, num_bytes - done, offset_src=start + done)
            if not moved:
                return
            done += moved
            while moved:
                moved -= os.splice(self._out, self._nowhere, moved)

"""Having a disk read what will be wanted next, while what has come is copied.

The system reads ahead within one file; a tensor comes from many, a few MiB of each. So a thread
beside the one that copies asks for what comes next in all of them, a block at a time, and neither
the disk nor the processor waits for the other. What is asked for goes to the cache of the system
and from there nowhere: nothing is copied, and whoever reads it finds what is wrong.
"""

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final, NamedTuple, Self

from shardspec.boxes import Box, intersect
from shardspec.checkpoint.catalog import StoredTensor, distinct
from shardspec.checkpoint.moving.buffers import BLOCK_BYTES
from shardspec.checkpoint.moving.pieces import Place, Run, byte_box, pieces
from shardspec.checkpoint.moving.rows import stretch_of
from shardspec.checkpoint.source_files import FileStretch, OpenFiles
from shardspec.dtypes import item_bytes

__all__ = ["LEAST_BYTES", "Ahead", "Stretch", "in_files", "stretches"]

_AHEAD_BYTES: Final = 8 << 20
"""How far ahead of the one that copies: some blocks, so that one that is late is there in time."""
LEAST_BYTES: Final = 64 << 10
"""Of a disk, shorter stretches are left to the system: each costs the one that copies some time as
well. A store brings many with one request."""
_LOOKED_AT_ONE_OF: Final = 32
"""Until a block is found missing from memory, only one of so many is looked at; from then on all
are asked for. Looking makes the disk read a little of the block, and so the rest of it later."""
_LOOKS: Final = 8
"""When so many blocks were in memory, the others are taken to be there too."""
_OPEN_AT_ONCE: Final = 8
"""Files kept open for this: few, as the one that copies needs its own."""
_SUPPORTED: Final = sys.platform == "linux" and {"splice", "RWF_NOWAIT"} <= vars(os).keys()
"""Whether this Python knows the calls: one made for old systems does not."""


class Stretch(NamedTuple):
    """Bytes of a file that will be wanted, at most a block."""

    path: Path | None
    """The file; None if nothing can be asked for here."""
    start: int
    num_bytes: int
    at: int
    """Bytes that are written before the first of them is wanted."""


def stretches(tensor: StoredTensor, target: Box, least_bytes: int = 0) -> Iterator[Stretch]:
    """Return what will be read to put one box of a tensor together, in that order.

    What does not lie in a file as one stretch is left out, and so are addends of a pending
    reduction. `Stretch.at` counts bytes of the box, in the tensor's own dtype.

    Parameters
    ----------
    tensor, target
        The tensor, and the box, in elements.
    least_bytes
        Of a block that comes from several files, stretches are left out if they are shorter on
        average.

    Examples
    --------
    >>> from shardspec.checkpoint.catalog import StoredBox
    >>> boxes = tuple(
    ...     StoredBox(((0, 4), (c, c + 300_000)), (), c, Path(f"{c}"), 64) for c in (0, 300_000)
    ... )
    >>> tensor = StoredTensor("w", (4, 600_000), "int8", None, (), boxes)
    >>> found = stretches(tensor, ((1, 3), (0, 600_000)))
    >>> [(str(s.path), s.start, s.num_bytes, s.at) for s in found if s.path is not None][:2]
    [('0', 300064, 300000, 0), ('300000', 300064, 300000, 0)]
    """
    if tensor.pending:
        return
    size = item_bytes(tensor.dtype)
    places = [Place(byte_box(stored.box, size), stored) for stored in distinct(tensor)]
    for piece in pieces(byte_box(target, size), places, BLOCK_BYTES):
        first = piece.target_offset
        if isinstance(piece, Run):
            for at in range(0, piece.num_bytes, BLOCK_BYTES):
                length = min(BLOCK_BYTES, piece.num_bytes - at)
                yield Stretch(piece.source.path, piece.source_offset + at, length, first + at)
            continue
        yield Stretch(None, 0, 0, first)
        if piece.num_bytes < least_bytes * len(piece.sources):
            continue
        for place in piece.sources:
            shared = intersect(place.box, piece.box)
            found = None if shared is None else stretch_of(place, shared)
            if found is not None:
                yield Stretch(place.stored.path, *found, first)


def in_files(wanted: Iterable[Stretch]) -> Iterator[FileStretch]:
    """Return those of some stretches that can be asked for."""
    for path, start, num_bytes, _ in wanted:
        if path is not None:
            yield FileStretch(path, start, num_bytes)


class Ahead:
    """Has the system read stretches of files, not far ahead of the one that copies them.

    To be used in a ``with`` block; its end waits for the stretch that is being read. Where the
    system cannot say what it has in memory, as for files that are in memory only, nothing is done;
    nor where Python cannot ask.

    Parameters
    ----------
    wanted
        What will be read, in that order; asked by a thread of its own. Whatever goes wrong there
        ends that thread, and no more: the one that copies finds it too. None if nothing is to be
        done.
    """

    def __init__(self, wanted: Iterable[Stretch] | None) -> None:
        self._wanted = wanted
        self._written = 0
        self._ended = False
        self._asleep = False
        # Unlike an event, it is whole whenever a signal comes.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread = Thread(target=self._bring_all, name="shardspec-ahead", daemon=True)

    def __enter__(self) -> Self:
        if self._wanted is not None and _SUPPORTED:
            try:
                self._thread.start()
            except RuntimeError:
                # Without one more thread all goes on as well, if not as fast.
                pass
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._end()
        if self._thread.ident is not None:
            self._thread.join()

    def _end(self) -> None:
        self._ended = True
        self._wake.put(None)

    def advance(self, num_bytes: int) -> None:
        """Take note that so many bytes more were written."""
        self._written += num_bytes
        if self._asleep:
            self._asleep = False
            self._wake.put(None)

    def _bring_all(self) -> None:
        # Nobody needs this thread: what is wrong with a file is said by who reads it.
        with suppress(Exception), OpenFiles(_OPEN_AT_ONCE) as files, _Drain() as drain:
            self._bring(files, drain)

    def _bring(self, files: OpenFiles, drain: "_Drain") -> None:
        assert self._wanted is not None, "the thread was started"
        met = 0
        missing = False
        for path, start, num_bytes, at in self._wanted:
            if not self._come_near(at):
                return
            if path is None or at < self._written:
                # Nothing to ask for, or too late.
                continue
            if not missing and met % _LOOKED_AT_ONE_OF == 0:
                if met == _LOOKED_AT_ONE_OF * _LOOKS:
                    return
                # Its first bytes may have come with those before them.
                missing = not _in_memory(files.file(path).fd, start + num_bytes - 1)
            met += 1
            if missing:
                drain.bring(files.file(path).fd, start, num_bytes)

    def _come_near(self, at: int) -> bool:
        """Wait until the one that copies is near; return False if it has ended."""
        while not self._ended and at > self._written + _AHEAD_BYTES:
            self._asleep = True
            # What was written before that did not wake this thread.
            if not self._ended and at > self._written + _AHEAD_BYTES:
                self._wake.get()
        return not self._ended


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
                drained = os.splice(self._out, self._nowhere, moved)
                if not drained:
                    raise OSError(errno.EIO, "the pipe does not give back what it took")
                moved -= drained

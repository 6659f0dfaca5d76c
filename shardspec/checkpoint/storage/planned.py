"""Asking a store for what will be read, of several files, before it is wanted.

What is read of a checkpoint is known beforehand: a few MiB of one file, then of the next. A request
takes as long as some MiB on the way, so some are under way at any time.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.storage.aside import Aside
from shardspec.checkpoint.storage.remote import RemotePath, Store, StoreErrors
from shardspec.errors import CheckpointError

__all__ = [
    "AHEAD_BYTES",
    "MOST_OF_ONE",
    "FileStretch",
    "Planned",
    "Request",
    "read_range",
    "request",
]

AHEAD_BYTES: Final = 24 << 20
"""Bytes that are under way, or have come and were not taken yet."""
MOST_OF_ONE: Final = 4 << 20
"""Most bytes of a request."""
_MOST_REQUESTS: Final = 12
"""Under way at once: about as many as a store's package has connections."""
_JOINED_BYTES: Final = 8 << 20
_JOINED: Final = 1024
"""So many stretches, or bytes of them, are looked at together: those of one file become one
request, though others are read in between."""
_GAP_BYTES: Final = 64 << 10
"""What is shorter and lies between two stretches is read along."""


class FileStretch(NamedTuple):
    """Bytes of a file."""

    path: Path
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Where they end."""
        return self.start + self.num_bytes


class Request(NamedTuple):
    """Bytes of a file that are on their way."""

    stretch: FileStretch
    data: Aside[bytes]


def request(store: Store, stretch: FileStretch) -> Request:
    """Ask for bytes of a file; the answer is as `read_range` gives it."""
    return Request(stretch, Aside(partial(read_range, store, stretch)))


def read_range(store: Store, stretch: FileStretch) -> bytes:
    """Return bytes of a file, fewer if it ends before.

    Raises
    ------
    CheckpointError
        If the store refuses.
    """
    path, start, num_bytes = stretch
    if num_bytes <= 0:
        return b""
    with StoreErrors(path, "read"):
        return store.cat_file(str(path), start=start, end=start + num_bytes)


class Planned:
    """What will be read of files in a store; for one thread.

    Parameters
    ----------
    stretches
        What will be read, in that order. They are asked for when bytes are taken, by the thread
        that takes them. A CheckpointError there ends the plan, and no more: whoever reads finds it
        too.
    most_bytes
        How far ahead.
    """

    def __init__(self, stretches: Iterable[FileStretch], most_bytes: int = AHEAD_BYTES) -> None:
        self._left = iter(stretches)
        self._most_bytes = most_bytes
        self._next: deque[FileStretch] = deque()
        """What is asked for next."""
        self._under_way: deque[Request] = deque()
        self._num_bytes = 0
        """Of what is under way."""
        self._ask()

    def take(self, path: Path, start: int) -> Request | None:
        """Return the request that brings a byte, for whoever reads it now; None if there is none.

        What was to be read before it is let go.
        """
        if not any(_brings(one.stretch, path, start) for one in self._under_way):
            return None
        while True:
            found = self._under_way.popleft()
            self._num_bytes -= found.stretch.num_bytes
            if _brings(found.stretch, path, start):
                self._ask()
                return found

    def next_start(self, path: Path, start: int) -> int | None:
        """Return where what is under way of a file, or asked for next, starts after some place."""
        coming = [*(one.stretch for one in self._under_way), *self._next]
        starts = [one.start for one in coming if one.path == path and one.start > start]
        return min(starts, default=None)

    def _ask(self) -> None:
        while len(self._under_way) < _MOST_REQUESTS:
            if not self._next:
                self._next.extend(_joined(self._some()))
            if not self._next:
                return
            stretch = self._next[0]
            if self._under_way and self._num_bytes + stretch.num_bytes > self._most_bytes:
                return
            assert isinstance(stretch.path, RemotePath), "plans are made for stores"
            self._under_way.append(request(stretch.path.store, self._next.popleft()))
            self._num_bytes += stretch.num_bytes

    def _some(self) -> list[FileStretch]:
        """Return the next stretches, none longer than a request may be."""
        found: list[FileStretch] = []
        num_bytes = 0
        with suppress(CheckpointError):
            for path, first, length in self._left:
                for start in range(first, first + length, MOST_OF_ONE):
                    part = min(MOST_OF_ONE, first + length - start)
                    found.append(FileStretch(path, start, part))
                num_bytes += length
                if len(found) >= _JOINED or num_bytes >= min(_JOINED_BYTES, self._most_bytes):
                    break
        return found


def _brings(stretch: FileStretch, path: Path, start: int) -> bool:
    return stretch.path == path and stretch.start <= start < stretch.end


def _joined(stretches: Iterable[FileStretch]) -> Iterator[FileStretch]:
    """Join stretches of one file that follow each other there, at the place of the first."""
    found: list[FileStretch] = []
    last_of: dict[Path, int] = {}
    for stretch in stretches:
        path, start, _ = stretch
        place = last_of.get(path)
        if place is not None:
            last = found[place]
            end = max(last.end, stretch.end)
            near = last.start <= start <= last.end + _GAP_BYTES
            if near and end - last.start <= MOST_OF_ONE:
                found[place] = FileStretch(path, last.start, end - last.start)
                continue
        last_of[path] = len(found)
        found.append(stretch)
    return iter(found)

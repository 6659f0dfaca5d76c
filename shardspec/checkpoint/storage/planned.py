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

__all__ = ["MOST_OF_ONE", "FileStretch", "Planned", "Request", "read_range", "request"]

MOST_OF_ONE: Final = 4 << 20
"""Most bytes of a request."""
_MOST_BYTES: Final = 24 << 20
_MOST_REQUESTS: Final = 12
"""Of all that is under way, or has come and was not taken yet."""


class FileStretch(NamedTuple):
    """Bytes of a file."""

    path: Path
    start: int
    num_bytes: int


class Request(NamedTuple):
    """Bytes of a file that are on their way."""

    path: RemotePath
    start: int
    end: int
    data: Aside[bytes]


def request(store: Store, path: RemotePath, start: int, end: int) -> Request:
    """Ask for bytes of a file; the answer raises a CheckpointError if the store refuses."""
    data = Aside(partial(read_range, store, path, start, end))
    data.start()
    return Request(path, start, end, data)


def read_range(store: Store, path: RemotePath, start: int, end: int) -> bytes:
    """Return bytes of a file, fewer if it ends before.

    Raises
    ------
    CheckpointError
        If the store refuses.
    """
    if start >= end:
        return b""
    with StoreErrors(path, "read"):
        return store.cat_file(str(path), start=start, end=end)


class Planned:
    """What will be read of files in stores; for one thread.

    Parameters
    ----------
    stretches
        What will be read, in that order. Whatever goes wrong there ends the plan, and no more:
        whoever reads finds it too. Files of this machine are left out.
    """

    def __init__(self, stretches: Iterable[FileStretch]) -> None:
        self._left = _joined(stretches)
        self._under_way: deque[Request] = deque()
        self._num_bytes = 0
        self._ask()

    def take(self, path: Path, start: int) -> Request | None:
        """Return the request that brings a byte, for whoever reads it now; None if there is none.

        What was to be read before it is let go.
        """

        def brings(one: Request) -> bool:
            return one.path == path and one.start <= start < one.end

        if not any(map(brings, self._under_way)):
            return None
        while True:
            found = self._under_way.popleft()
            self._num_bytes -= found.end - found.start
            if brings(found):
                self._ask()
                return found

    def _ask(self) -> None:
        with suppress(Exception):
            while len(self._under_way) < _MOST_REQUESTS and self._num_bytes < _MOST_BYTES:
                stretch = next(self._left, None)
                if stretch is None:
                    return
                path, start, num_bytes = stretch
                assert isinstance(path, RemotePath), "others are left out"
                self._under_way.append(request(path.store, path, start, start + num_bytes))
                self._num_bytes += num_bytes


def _joined(stretches: Iterable[FileStretch]) -> Iterator[FileStretch]:
    """Yield what lies in stores, joined where it goes on, and cut where it is long."""
    last: FileStretch | None = None
    for stretch in stretches:
        if not isinstance(stretch.path, RemotePath):
            continue
        path, start, num_bytes = stretch
        if last is not None:
            if path == last.path and start == last.start + last.num_bytes:
                start, num_bytes = last.start, last.num_bytes + num_bytes
            else:
                yield last
        while num_bytes > MOST_OF_ONE:
            yield FileStretch(path, start, MOST_OF_ONE)
            start, num_bytes = start + MOST_OF_ONE, num_bytes - MOST_OF_ONE
        last = FileStretch(path, start, num_bytes)
    if last is not None:
        yield last

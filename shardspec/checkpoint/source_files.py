"""Reading files of checkpoints: regular ones, few kept open, several looked into at once."""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, Self, TypeVar

from shardspec.checkpoint.store import RemotePath, reason
from shardspec.checkpoint.store_ranges import (
    AHEAD_BYTES,
    FileStretch,
    RangePrefetcher,
    RangeReader,
)
from shardspec.errors import CheckpointError
from shardspec.input_files import open_regular

__all__ = [
    "HeaderFiles",
    "OpenFiles",
    "SourceFile",
    "prefetch_depth",
    "prefetch_map",
]

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

_STORE_LOOKS: Final = 8
"""Files in a store that are looked into at once: each look is some requests, one after another."""
_OPEN_AT_ONCE: Final = 128
"""Files kept open: far below the usual limit of 1024 for a process."""
_HEADERS_AT_ONCE: Final = 256
"""Readers of headers in stores; each keeps 64 KiB."""
_KEPT_BYTES: Final = 32 << 20
"""Bytes kept of all files in stores together."""


def prefetch_depth(place: Path, *, here: int = 0) -> int:
    """Return into how many files beside the one in hand it is worth looking at once.

    Files of this machine answer soon: `here` is returned for them.

    Examples
    --------
    >>> prefetch_depth(Path("models")), prefetch_depth(RemotePath("memory://models"), here=3)
    (0, 0)
    """
    if not isinstance(place, RemotePath):
        return here
    return _STORE_LOOKS - 1 if place.shared_store else 0


@contextmanager
def prefetch_map(
    items: Iterable[_Item],
    look: Callable[[_Item], _Found],
    ahead: int,
    undo: Callable[[_Found], None] | None = None,
) -> Generator[Iterator[_Found], None, None]:
    """Return an iterator over what a call for every item gives, in their order.

    So many calls are made `ahead` while the caller has one answer in hand, by as many threads. What
    a call raises is raised when it is the turn of its item. What was found ahead and had no turn
    when the block ends is undone; nobody waits for calls that are being made then.

    Examples
    --------
    >>> with prefetch_map("abc", str.upper, 2) as found:
    ...     list(found)
    ['A', 'B', 'C']
    """
    items = list(items)
    workers = min(ahead, len(items))
    if workers < 1 or len(items) < 2:
        yield map(look, items)
        return
    pool = ThreadPoolExecutor(workers, "shardspec-prefetch")
    waiting: deque[tuple[_Item, Future[_Found]]] = deque()

    def answer() -> _Found:
        item, future = waiting.popleft()
        return look(item) if future.cancelled() else future.result()

    def answers() -> Iterator[_Found]:
        for place, item in enumerate(items):
            try:
                waiting.append((item, pool.submit(look, item)))
            except RuntimeError:
                # There can be no more threads.
                pool.shutdown(wait=False, cancel_futures=True)
                while waiting:
                    yield answer()
                yield from map(look, items[place:])
                return
            if len(waiting) > ahead:
                yield answer()
        while waiting:
            yield answer()

    try:
        yield answers()
    finally:
        for _, future in waiting:
            if not future.cancel() and undo is not None:
                future.add_done_callback(partial(_undo, undo))
        pool.shutdown(wait=False, cancel_futures=True)


def _undo(undo: Callable[[_Found], None], future: Future[_Found]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


class SourceFile:
    """A regular file, here or in a store, open for reading; bytes are read where they lie."""

    __slots__ = ("_fd", "num_bytes", "path", "remote")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remote: RangeReader | None = None
        """Reads it, if it is in a store."""
        if isinstance(path, RemotePath):
            self._fd = -1
            self.remote = RangeReader(path)
            self.num_bytes = self.remote.num_bytes
        else:
            self._fd = open_regular(path, CheckpointError)
            self.num_bytes = os.fstat(self._fd).st_size

    @property
    def fd(self) -> int:
        """The descriptor of a file that is here; -1 of one that is in a store."""
        return self._fd

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from a place in the file."""
        if self.remote is not None:
            self.remote.read_into(buffer, offset)
            return
        done, end = 0, len(buffer)
        while done < end:
            try:
                count = os.preadv(self._fd, [buffer[done:] if done else buffer], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset + done}, but bytes up to "
                    f"{offset + end} are needed; it was cut short while being read"
                )
            done += count

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a stretch of the file; for headers and other small things."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def close(self) -> None:
        """Close it."""
        if self.remote is None:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenFiles:
    """Files opened on first use; the one unused for longest is closed when there are many."""

    def __init__(self, at_once: int = _OPEN_AT_ONCE) -> None:
        self._at_once = at_once
        self._files: OrderedDict[Path, SourceFile] = OrderedDict()
        self._planned: RangePrefetcher | None = None

    def will_read(
        self, directory: Path, stretches: Iterable[FileStretch], most_bytes: int = AHEAD_BYTES
    ) -> None:
        """Take note of what will be read, in that order; a store is asked for it so far ahead.

        Nothing is done for files of this machine, nor for stores of which every thread has its own.
        """
        if not (isinstance(directory, RemotePath) and directory.shared_store):
            return
        self._end_plan()
        self._planned = RangePrefetcher(directory.store, stretches, most_bytes)
        for file in self._files.values():
            if file.remote is not None:
                file.remote.planned = self._planned

    def file(self, path: Path) -> SourceFile:
        """Return an open file that is good until the next call."""
        found = self._files.get(path)
        if found is not None:
            self._files.move_to_end(path)
            return found
        while len(self._files) >= self._at_once:
            self._files.popitem(last=False)[1].close()
        opened = self._files[path] = SourceFile(path)
        if opened.remote is not None:
            opened.remote.planned = self._planned
            remote = [file.remote for file in self._files.values() if file.remote is not None]
            for reader in remote:
                reader.keep(_KEPT_BYTES // len(remote))
        return opened

    def _end_plan(self) -> None:
        if self._planned is not None:
            self._planned.close()
        self._planned = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_plan()
        for file in self._files.values():
            file.close()
        self._files.clear()


class HeaderFiles:
    """Short looks into many files, by any number of threads.

    Files are open for a moment only. Readers of those in stores stay for a while, as asking for the
    size of a file takes as long as reading of it, and what lies near may be looked at next.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stored: OrderedDict[Path, tuple[Lock, list[SourceFile]]] = OrderedDict()

    @contextmanager
    def file(self, path: Path) -> Iterator[SourceFile]:
        """Return an open file, for a ``with`` block."""
        if not isinstance(path, RemotePath):
            with SourceFile(path) as file:
                yield file
            return
        with self._lock:
            lock, opened = self._stored.setdefault(path, (Lock(), []))
            self._stored.move_to_end(path)
            if len(self._stored) > _HEADERS_AT_ONCE:
                # There is nothing to close.
                self._stored.popitem(last=False)
        with lock:
            if not opened:
                # This asks for its size.
                file = SourceFile(path)
                if file.remote is not None:
                    file.remote.keep(0)
                opened.append(file)
            yield opened[0]

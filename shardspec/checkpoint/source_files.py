"""Reading files of checkpoints, here or in a store, where requests are few and made ahead.

A request to a store takes as long as transferring some megabytes. So what will be read next is
requested in batches while the last one is in use, and several files are opened at once.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar

from shardspec.checkpoint.store import RemotePath, path_errors, reason
from shardspec.errors import CheckpointError
from shardspec.input_files import open_regular

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fsspec import AbstractFileSystem

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

AHEAD_BYTES: Final = 24 << 20
"""Bytes of a store that are requested, or have arrived and were not read yet."""
MAX_REQUEST_BYTES: Final = 4 << 20
_MIN_REQUEST_BYTES: Final = 64 << 10
"""A header and what is around it arrive at once. Shorter gaps between stretches are read along."""
_SEQUENTIAL_BYTES: Final = 512 << 10
"""Bytes requested at least by a reader that goes on where it stopped."""
_BATCHES: Final = 3
"""Batches of requests in flight."""
_BATCH_STRETCHES: Final = 1024
_FILES_AT_ONCE: Final = 8
"""Files in a store that are opened at once: each takes several requests, one after another."""
_MAX_OPEN: Final = 64
_MAX_HEADER_FILES: Final = 256


def prefetch_depth(place: Path, *, here: int = 0) -> int:
    """Return how many files to open ahead of the one in use; `here` for files of this machine."""
    if not isinstance(place, RemotePath):
        return here
    return _FILES_AT_ONCE - 1 if place.shared_store else 0


@contextmanager
def prefetch_map(
    items: Iterable[_Item],
    look: Callable[[_Item], _Found],
    ahead: int,
    workers: int | None = None,
) -> Generator[Iterator[_Found], None, None]:
    """Yield an iterator over the results of a call for every item, in order.

    Threads, by default `ahead`, make calls up to `ahead` of the result in use; with 0 the caller's
    makes them. An exception is raised when the result of its item is due. Calls that are running at
    the end of the block are waited for only if `workers` is given.

    >>> with prefetch_map("abc", str.upper, 2) as found:
    ...     list(found)
    ['A', 'B', 'C']
    """
    if ahead < 1:
        yield map(look, items)
        return
    # Importing it takes as long as copying 10 MiB.
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(workers or ahead, "shardspec-prefetch")
    pending: deque[tuple[_Item, Future[_Found] | None]] = deque()

    def result() -> _Found:
        item, future = pending.popleft()
        return look(item) if future is None else future.result()

    def results() -> Iterator[_Found]:
        for item in items:
            future = None
            # Where the system allows no more threads, the caller's thread makes the call.
            with suppress(RuntimeError):
                future = pool.submit(look, item)
            pending.append((item, future))
            if len(pending) > ahead:
                yield result()
        while pending:
            yield result()

    try:
        yield results()
    finally:
        running = True
        while running:
            # However often the user interrupts, calls that are waited for end.
            with suppress(KeyboardInterrupt):
                pool.shutdown(wait=workers is not None, cancel_futures=True)
                running = False


class FileStretch(NamedTuple):
    """Bytes of a file."""

    path: Path
    start: int
    num_bytes: int


_Ranges: TypeAlias = dict[str, list[tuple[int, int, int]]]
"""Per file, the first byte, end and index of the answer of each range."""


class RangePrefetcher:
    """Requests stretches of files in a store before they are read, for one thread.

    They are requested in batches, and read in the same order. An error among the stretches ends
    them: the reader will meet the same error.
    """

    def __init__(
        self,
        store: "AbstractFileSystem",
        stretches: Iterable[FileStretch],
        max_bytes: int = AHEAD_BYTES,
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._store = store
        self._left: Iterator[FileStretch] = (
            FileStretch(path, at, min(MAX_REQUEST_BYTES, start + num_bytes - at))
            for path, start, num_bytes in stretches
            for at in range(start, start + num_bytes, MAX_REQUEST_BYTES)
        )
        self._batch_bytes = max(1, max_bytes // _BATCHES)
        self._pool = ThreadPoolExecutor(_BATCHES, "shardspec-ranges")
        self._pending: deque[tuple[_Ranges, Future[list[bytes | BaseException]]]] = deque()
        self._request()

    def find(self, path: Path, start: int) -> tuple[int, bytes] | None:
        """Return where the range that holds a byte starts, and its bytes; None if there is none."""
        for count, (ranges, answers) in enumerate(self._pending):
            for first, end, index in ranges.get(str(path), ()):
                if first <= start < end:
                    # Earlier batches have been read, or will not be.
                    for _ in range(count):
                        self._pending.popleft()
                    self._request()
                    # If a request failed, the reader makes it again and reports the error.
                    with suppress(Exception):
                        data = answers.result()[index]
                        if isinstance(data, bytes) and len(data) == end - first:
                            return first, data
                    return None
        return None

    def close(self) -> None:
        """Make no more requests."""
        self._left = iter(())
        self._pending.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _request(self) -> None:
        from fsspec.utils import merge_offset_ranges

        while len(self._pending) < _BATCHES:
            batch: list[FileStretch] = []
            left = self._batch_bytes
            with suppress(CheckpointError, StopIteration):
                while left > 0 and len(batch) < _BATCH_STRETCHES:
                    batch.append(next(self._left))
                    left -= batch[-1].num_bytes
            if not batch:
                return
            paths, starts, ends = merge_offset_ranges(
                [str(path) for path, _, _ in batch],
                [start for _, start, _ in batch],
                [start + num_bytes for _, start, num_bytes in batch],
                max_gap=_MIN_REQUEST_BYTES,
                max_block=MAX_REQUEST_BYTES,
            )
            ranges: _Ranges = {}
            for index, (path, start, end) in enumerate(zip(paths, starts, ends, strict=True)):
                ranges.setdefault(path, []).append((start, end, index))
            # Where the system allows no more threads, nothing is requested ahead.
            with suppress(RuntimeError):
                answers = self._pool.submit(self._store.cat_ranges, paths, starts, ends)
                self._pending.append((ranges, answers))


def _cut_short(path: Path, end: int, due: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: ends at byte {end}, but bytes up to {due} are needed; it was cut short while "
        "being read"
    )


def read_fully(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a file; return how many bytes are missing at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
        if not count:
            break
        done += count
    return len(buffer) - done


class SourceFile:
    """A regular file, here or in a store, open for reading at any position."""

    __slots__ = ("_fd", "_kept", "_store", "num_bytes", "path", "prefetched")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prefetched: RangePrefetcher | None = None
        self._fd = -1
        self._kept = (-_MIN_REQUEST_BYTES, b"")
        """Position and bytes of the last range; one value, as threads may share the file."""
        if isinstance(path, RemotePath):
            self.num_bytes = path.num_bytes()
            # Kept, as other threads may get another one from fsspec.
            self._store = path.store
        else:
            self._fd = open_regular(path, CheckpointError)
            self.num_bytes = os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes from a position in the file."""
        end = offset + len(buffer)
        if self._fd < 0:
            at = offset
            while at < end:
                start, block = self._range_at(at, end)
                part = memoryview(block)[at - start : end - start]
                buffer[at - offset : at - offset + len(part)] = part
                at += len(part)
            return
        # Called so often that a context manager would cost time.
        try:
            missing = read_fully(self._fd, buffer, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None
        if missing:
            raise _cut_short(self.path, end - missing, end)

    def _range_at(self, at: int, due: int) -> tuple[int, bytes]:
        """Return bytes around a position of a file in a store, and where they start."""
        start, data = self._kept
        if start <= at < start + len(data):
            return start, data
        if self.prefetched is not None and (found := self.prefetched.find(self.path, at)):
            return found
        # Rows of columns are read along with the gaps between them.
        goes_on = 0 <= at - start - len(data) < _MIN_REQUEST_BYTES
        least = _SEQUENTIAL_BYTES if goes_on else _MIN_REQUEST_BYTES
        end = min(max(due, at + least), at + MAX_REQUEST_BYTES, self.num_bytes)
        data = b""
        if end > at:
            with path_errors(self.path, "read"):
                data = self._store.cat_file(str(self.path), start=at, end=end)
        if len(data) > max(end - at, 0):
            raise CheckpointError(
                f"{self.path}: the store answered a request for {end - at} bytes with "
                f"{len(data)}: it ignores ranges; download the checkpoint and name the copy"
            )
        if len(data) < max(end - at, 1):
            raise _cut_short(self.path, at + len(data), due)
        # All of a long range is in use at once; of this one only its end is kept.
        self._kept = (at, data) if len(data) <= _SEQUENTIAL_BYTES else (end, b"")
        return at, data

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes from a position in the file; for headers and other small things."""
        self.read_into(memoryview(data := bytearray(num_bytes)), offset)
        return bytes(data)

    def close(self) -> None:
        """Close it."""
        if self._fd >= 0:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KeptOpen(Generic[_Key, _Found]):
    """Things that are opened on first use; the least recently used one is closed if there are many.

    What `get` returns is valid until the next call.
    """

    def __init__(
        self, open: Callable[[_Key], _Found], close: Callable[[_Found], None], at_once: int
    ) -> None:
        self._open, self._close, self._at_once = open, close, at_once
        self._held: OrderedDict[_Key, _Found] = OrderedDict()

    def get(self, key: _Key) -> _Found:
        """Return what is open under a key."""
        if key in self._held:
            self._held.move_to_end(key)
        else:
            while len(self._held) >= self._at_once:
                self._close(self._held.popitem(last=False)[1])
            self._held[key] = self._open(key)
        return self._held[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._close(self._held.popitem()[1])


class OpenFiles(KeptOpen[Path, SourceFile]):
    """Source files that one thread reads."""

    def __init__(self) -> None:
        super().__init__(SourceFile, SourceFile.close, _MAX_OPEN)
        self._prefetched: RangePrefetcher | None = None

    def will_read(
        self, directory: Path, stretches: Iterable[FileStretch], max_bytes: int = AHEAD_BYTES
    ) -> None:
        """Request from a store what will be read, ahead and in this order; nothing else any more.

        Files of this machine need it not, nor can stores that each thread connects to by itself.
        """
        if self._prefetched is not None:
            self._prefetched.close()
            self._prefetched = None
        if isinstance(directory, RemotePath) and directory.shared_store:
            self._prefetched = RangePrefetcher(directory.store, stretches, max_bytes)

    def file(self, path: Path) -> SourceFile:
        """Return an open file; valid until the next call."""
        file = self.get(path)
        file.prefetched = self._prefetched
        return file

    def __exit__(self, *_: object) -> None:
        if self._prefetched is not None:
            self._prefetched.close()
        super().__exit__()


class HeaderFiles:
    """Opens files for short reads, by any number of threads; keeps those in stores."""

    def __init__(self) -> None:
        self._remote = lru_cache(maxsize=_MAX_HEADER_FILES)(SourceFile)

    @contextmanager
    def file(self, path: Path) -> Iterator[SourceFile]:
        """Open a file for the length of a block."""
        if isinstance(path, RemotePath):
            yield self._remote(path)
        else:
            with SourceFile(path) as file:
                yield file

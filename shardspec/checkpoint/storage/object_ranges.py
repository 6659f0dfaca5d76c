"""Ranges of objects in a store: near ranges are joined, and requested ahead of reading.

A request to a store takes as long as transferring some megabytes. So the next ranges are requested
in batches while the last batch is in use.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from shardspec.checkpoint.storage.path import FileStretch, SourceFile, StoragePath
from shardspec.checkpoint.storage.reading import AHEAD_BYTES
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fsspec import AbstractFileSystem

MAX_REQUEST_BYTES: Final = 4 << 20
_MIN_REQUEST_BYTES: Final = 64 << 10
"""The smallest request, for a header and what is around it. Shorter gaps are read along."""
_SEQUENTIAL_BYTES: Final = 512 << 10
"""The smallest request of a sequential reader."""
_BATCHES: Final = 3
"""Batches of requests in flight."""
_BATCH_STRETCHES: Final = 1024


class ObjectFile(SourceFile):
    """An object, read in ranges."""

    __slots__ = ("_kept", "_store")

    def __init__(self, path: StoragePath, num_bytes: int, store: "AbstractFileSystem") -> None:
        super().__init__(path, num_bytes)
        self._kept = (-_MIN_REQUEST_BYTES, b"")
        """Position and bytes of the last range; one value, as threads may share the file."""
        # fsspec may return another store to other threads.
        self._store = store

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes from a position in the file."""
        at, end = offset, offset + len(buffer)
        while at < end:
            start, block = self._range_at(at, end)
            part = memoryview(block)[at - start : end - start]
            buffer[at - offset : at - offset + len(part)] = part
            at += len(part)

    def close(self) -> None:
        """Do nothing: each range is a request of its own."""

    def _range_at(self, at: int, needed: int) -> tuple[int, bytes]:
        """Return the start and bytes of a range with a position."""
        start, data = self._kept
        if start <= at < start + len(data):
            return start, data
        if self.requested is not None and (arrived := self.requested.find(self.path, at)):
            return arrived
        # Rows of columns are read along with the gaps between them.
        goes_on = 0 <= at - start - len(data) < _MIN_REQUEST_BYTES
        least = _SEQUENTIAL_BYTES if goes_on else _MIN_REQUEST_BYTES
        end = min(max(needed, at + least), at + MAX_REQUEST_BYTES, self.num_bytes)
        data = b""
        if end > at:
            with self.path.errors("read"):
                data = self._store.cat_file(str(self.path), start=at, end=end)
        if len(data) > max(end - at, 0):
            raise CheckpointError(
                f"{self.path}: the store answered a request for {end - at} bytes with "
                f"{len(data)}: it ignores ranges; download the checkpoint and name the copy"
            )
        if len(data) < max(end - at, 1):
            raise self.cut_short(at + len(data), needed)
        # A long range is used up at once; only its end is remembered.
        self._kept = (at, data) if len(data) <= _SEQUENTIAL_BYTES else (end, b"")
        return at, data


_Ranges: TypeAlias = dict[str, list[tuple[int, int, int]]]
"""Per file, the first byte, end and index of the answer of each range."""


class RangePrefetcher:
    """Requests stretches of files in a store before they are read, for one thread.

    They are requested in batches, and read in the same order. If the iterator raises an error,
    prefetching stops: the reader will meet the same error.
    """

    def __init__(
        self,
        store: "AbstractFileSystem",
        stretches: Iterable[FileStretch],
        max_bytes: int = AHEAD_BYTES,
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._store = store
        self._stretches: Iterator[FileStretch] = (
            FileStretch(path, at, min(MAX_REQUEST_BYTES, start + num_bytes - at))
            for path, start, num_bytes in stretches
            for at in range(start, start + num_bytes, MAX_REQUEST_BYTES)
        )
        self._batch_bytes = max(1, max_bytes // _BATCHES)
        self._pool = ThreadPoolExecutor(_BATCHES, "shardspec-ranges")
        self._pending: deque[tuple[_Ranges, Future[list[bytes | BaseException]]]] = deque()
        self._request()

    def find(self, path: StoragePath, start: int) -> tuple[int, bytes] | None:
        """Return the start and bytes of the range with a byte; None if it was not requested."""
        for count, (ranges, answers) in enumerate(self._pending):
            for first, end, index in ranges.get(str(path), ()):
                if first <= start < end:
                    # Earlier batches are no longer needed.
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
        self._stretches = iter(())
        self._pending.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _request(self) -> None:
        from fsspec.utils import merge_offset_ranges

        while len(self._pending) < _BATCHES:
            batch: list[FileStretch] = []
            room = self._batch_bytes
            with suppress(CheckpointError, StopIteration):
                while room > 0 and len(batch) < _BATCH_STRETCHES:
                    batch.append(next(self._stretches))
                    room -= batch[-1].num_bytes
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
            # If the system allows no more threads, nothing is requested ahead.
            with suppress(RuntimeError):
                answers = self._pool.submit(self._store.cat_ranges, paths, starts, ends)
                self._pending.append((ranges, answers))

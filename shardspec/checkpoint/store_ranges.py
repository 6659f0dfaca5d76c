"""Ranges of files in a store, asked for before they are read.

A request to a store takes as long as some megabytes on the way. So what is known to be read next
is asked for in batches while the last one is worked on, and a reader that goes on near where it
stopped gets twice as much as the time before.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shardspec.checkpoint.store import RemotePath, store_errors
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["AHEAD_BYTES", "MOST_OF_ONE", "FileStretch", "RangePrefetcher", "RangeReader"]

AHEAD_BYTES: Final = 24 << 20
"""Bytes of a store that are under way, or have come and were not read yet."""
MOST_OF_ONE: Final = 4 << 20
"""Most bytes of a request."""
_LEAST_OF_ONE: Final = 64 << 10
"""Least bytes of a request: headers and what lies around them come in one. What is shorter and lies
between two stretches is read along."""
_BATCHES: Final = 3
"""Batches of requests that are under way at once."""
_BATCH_STRETCHES: Final = 1024


class FileStretch(NamedTuple):
    """Bytes of a file."""

    path: Path
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Where they end."""
        return self.start + self.num_bytes


def _read_range(store: "AbstractFileSystem", path: Path, start: int, end: int, due: int) -> bytes:
    """Return bytes of a file in a store."""
    data = b""
    if end > start:
        with store_errors(path, "read"):
            data = store.cat_file(str(path), start=start, end=end)
    _check_kept(data, end - start, path)
    if len(data) < max(end - start, 1):
        raise CheckpointError(
            f"{path}: ends at byte {start + len(data)}, but bytes up to {due} are needed; it was "
            "cut short while being read"
        )
    return data


def _check_kept(data: bytes, asked: int, path: object) -> None:
    if len(data) > max(asked, 0):
        raise CheckpointError(
            f"{path}: the store answered a request for {asked} bytes with {len(data)}: it does not "
            "keep to ranges; download the checkpoint and name the copy"
        )


class _Batch(NamedTuple):
    """Ranges of files in a store that are asked for together."""

    paths: list[str]
    starts: list[int]
    ends: list[int]
    places: dict[str, list[tuple[int, int]]]
    """Of each file, where ranges start, and which of all they are."""
    answers: Future[list[bytes | BaseException]]

    def find(self, path: str, start: int) -> int | None:
        """Return which range holds a byte."""
        places = self.places.get(path, [])
        at = bisect_right(places, start, key=lambda place: place[0]) - 1
        return places[at][1] if at >= 0 and start < self.ends[places[at][1]] else None

    def answer(self, place: int) -> tuple[int, bytes] | None:
        """Return where a range starts, and its bytes; None if they did not come as they should."""
        start, end = self.starts[place], self.ends[place]
        try:
            data = self.answers.result()[place]
        except Exception:  # who reads asks for itself, and says what is wrong
            return None
        if not isinstance(data, bytes) or len(data) < end - start:
            return None
        _check_kept(data, end - start, self.paths[place])
        return start, data


class RangePrefetcher:
    """Asks a store for ranges before they are read, batch by batch in their order; for one thread.

    Stretches that cannot be told end the plan, and no more: whoever reads finds the error too.
    """

    def __init__(
        self,
        store: "AbstractFileSystem",
        stretches: Iterable[FileStretch],
        most_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._store = store
        self._parts = _parts(stretches)
        self._batch_bytes = max(1, most_bytes // _BATCHES)
        self._pool = ThreadPoolExecutor(_BATCHES, "shardspec-ranges")
        self._under_way: deque[_Batch] = deque()
        self._ask()

    def find(self, path: Path, start: int) -> tuple[int, bytes] | None:
        """Return the range that holds a byte: where it starts, and its bytes; or None."""
        for count, batch in enumerate(self._under_way):
            place = batch.find(str(path), start)
            if place is not None:
                # What was to be read before has been, or will not be.
                for _ in range(count):
                    self._under_way.popleft()
                self._ask()
                return batch.answer(place)
        return None

    def close(self) -> None:
        """Ask for no more."""
        self._parts = iter(())
        self._under_way.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> None:
        while len(self._under_way) < _BATCHES:
            some: list[FileStretch] = []
            num_bytes = 0
            with suppress(CheckpointError):
                for part in islice(self._parts, _BATCH_STRETCHES):
                    some.append(part)
                    num_bytes += part.num_bytes
                    if num_bytes >= self._batch_bytes:
                        break
            if not some:
                return
            # Where there can be no more threads, all is read when it is wanted.
            with suppress(RuntimeError):
                self._under_way.append(self._batch(some))

    def _batch(self, stretches: Sequence[FileStretch]) -> _Batch:
        from fsspec.utils import merge_offset_ranges

        paths, starts, ends = merge_offset_ranges(
            [str(one.path) for one in stretches],
            [one.start for one in stretches],
            [one.end for one in stretches],
            max_gap=_LEAST_OF_ONE,
            max_block=MOST_OF_ONE,
        )
        places: dict[str, list[tuple[int, int]]] = {}
        for place, (path, start) in enumerate(zip(paths, starts, strict=True)):
            places.setdefault(path, []).append((start, place))
        answers = self._pool.submit(self._store.cat_ranges, paths, starts, ends)
        return _Batch(paths, starts, ends, places, answers)


def _parts(stretches: Iterable[FileStretch]) -> Iterator[FileStretch]:
    """Cut stretches so that none is longer than a request may be."""
    for path, first, num_bytes in stretches:
        for start in range(first, first + num_bytes, MOST_OF_ONE):
            yield FileStretch(path, start, min(MOST_OF_ONE, first + num_bytes - start))


class RangeReader:
    """Reads a file in a store by ranges, and keeps the last one."""

    __slots__ = ("_block", "_most", "_path", "_start", "_store", "_window", "num_bytes", "planned")

    def __init__(self, path: RemotePath) -> None:
        self.num_bytes = path.num_bytes()
        self.planned: RangePrefetcher | None = None
        self._path = path
        # Other threads would get one of their own from fsspec, with other connections.
        self._store = path.store
        self._start = 0
        self._block = b""
        self._window = _LEAST_OF_ONE
        self._most = MOST_OF_ONE

    def keep(self, num_bytes: int) -> None:
        """Keep at most so many bytes from now on; not below what headers need."""
        self._most = max(_LEAST_OF_ONE, min(num_bytes, MOST_OF_ONE))
        if len(self._block) > self._most:
            self._block = b""

    def holds(self, start: int, end: int) -> bool:
        """Return whether bytes are there without another request."""
        return self._start <= start and end <= self._start + len(self._block)

    def read_into(self, buffer: memoryview, offset: int, end: int = 0) -> None:
        """Fill a buffer of bytes from a place in the file; up to `end` will be read next."""
        end = max(end, offset + len(buffer))
        done = 0
        while done < len(buffer):
            start, block = self._block_at(offset + done, end)
            inside = offset + done - start
            part = memoryview(block)[inside : inside + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def _block_at(self, start: int, due: int) -> tuple[int, bytes]:
        """Return bytes of the file around a place, and where they start."""
        if self._start <= start < self._start + len(self._block):
            return self._start, self._block
        planned = None if self.planned is None else self.planned.find(self._path, start)
        if planned is not None:
            return planned
        # Rows of columns are read along with what lies between them, where that is little.
        goes_on = 0 <= start - self._start - len(self._block) < _LEAST_OF_ONE
        self._window = min(self._window * 2, self._most) if goes_on else _LEAST_OF_ONE
        end = min(start + min(max(due - start, self._window), self._most), self.num_bytes)
        # Let go of first: two of them would be twice the memory.
        self._block = b""
        self._block = _read_range(self._store, self._path, start, end, due)
        self._start = start
        return start, self._block

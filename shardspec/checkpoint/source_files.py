"""Reading files of checkpoints: regular ones only, few open at once, stores asked ahead.

A request to a store takes as long as some megabytes on the way. So what is known to be read next
is asked for in batches while the last one is worked on, and a reader that goes on near where it
stopped gets twice as much as the time before.
"""

import os
import stat
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from shardspec.checkpoint.store import RemotePath, reason, store_errors
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "AHEAD_BYTES",
    "MOST_OF_ONE",
    "FileStretch",
    "HeaderFiles",
    "OpenFiles",
    "RangePrefetcher",
    "SourceFile",
    "open_regular",
    "prefetch_depth",
    "prefetch_map",
]

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

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
_STORE_LOOKS: Final = 8
"""Files in a store that are looked into at once: each look is some requests, one after another."""
_OPEN_AT_ONCE: Final = 128
"""Files kept open: far below the usual limit of 1024 for a process."""
_HEADERS_AT_ONCE: Final = 256
"""Readers of headers in stores; each keeps 64 KiB."""
_ROWS_AT_ONCE: Final = 1024
"""Stretches of memory filled by one call, which is as many as Linux takes."""
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


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path}: is not a regular file")
    return fd


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
            self._fd = open_regular(path)
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
            count = self._readv([buffer[done:] if done else buffer], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset + done}, but bytes up to "
                    f"{offset + end} are needed; it was cut short while being read"
                )
            done += count

    def read_rows(self, rows: Sequence[memoryview], offset: int, num_bytes: int) -> None:
        """Fill stretches of memory, one after the other, from a stretch of the file."""
        if self.remote is not None:
            end = offset + num_bytes
            for row in rows:
                self.remote.read_into(row, offset, end)
                offset += len(row)
            return
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            due = num_bytes if len(some) == len(rows) else sum(map(len, some))
            if self._readv(some, offset) == due:
                offset += due
                continue
            # Rare: a signal came, or the file ends.
            for row in some:
                self.read_into(row, offset)
                offset += len(row)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a stretch of the file; for headers and other small things."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def _readv(self, rows: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(self._fd, rows, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None

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

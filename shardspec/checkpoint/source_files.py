"""Reading files of checkpoints, here or in a store: few kept open, what comes next asked for ahead.

A request to a store takes as long as some megabytes on the way. So what is known to be read next
is asked for in batches while the last one is worked on, a reader that goes on near where it stopped
gets twice as much as the time before, and several files are looked into at once.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar

from shardspec.checkpoint.store import RemotePath, reason, store_errors
from shardspec.errors import CheckpointError
from shardspec.input_files import open_regular

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fsspec import AbstractFileSystem

_Key = TypeVar("_Key")
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
_KEPT_BYTES: Final = 32 << 20
"""Bytes kept of all files in stores together."""


def prefetch_depth(place: Path, *, here: int = 0) -> int:
    """Return into how many files beside the one in hand it is worth looking at once.

    Files of this machine answer soon: `here` is returned for them.
    """
    if not isinstance(place, RemotePath):
        return here
    return _STORE_LOOKS - 1 if place.shared_store else 0


@contextmanager
def prefetch_map(
    items: Iterable[_Item], look: Callable[[_Item], _Found], ahead: int
) -> Generator[Iterator[_Found], None, None]:
    """Return an iterator over what a call for every item gives, in their order.

    So many calls are made `ahead` while the caller has one answer in hand, by as many threads. What
    a call raises is raised when it is the turn of its item. Nobody waits for calls that are being
    made when the block ends.

    >>> with prefetch_map("abc", str.upper, 2) as found:
    ...     list(found)
    ['A', 'B', 'C']
    """
    items = list(items)
    workers = min(ahead, len(items))
    if workers < 1 or len(items) < 2:
        yield map(look, items)
        return
    # Importing it takes as long as copying 10 MiB.
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(workers, "shardspec-prefetch")
    waiting: deque[tuple[_Item, Future[_Found] | None]] = deque()

    def answer() -> _Found:
        item, future = waiting.popleft()
        return look(item) if future is None else future.result()

    def answers() -> Iterator[_Found]:
        for item in items:
            future = None
            # Where there can be no more threads, the caller looks.
            with suppress(RuntimeError):
                future = pool.submit(look, item)
            waiting.append((item, future))
            if len(waiting) > ahead:
                yield answer()
        while waiting:
            yield answer()

    try:
        yield answers()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class FileStretch(NamedTuple):
    """Bytes of a file."""

    path: Path
    start: int
    num_bytes: int


_Ranges: TypeAlias = dict[str, list[tuple[int, int, int]]]
"""First byte, end and place among the answers of the ranges of each file."""


class RangePrefetcher:
    """Asks a store for stretches before they are read, batch by batch in their order, for a thread.

    Stretches that cannot be told end the plan, and no more: whoever reads finds the error too.
    """

    def __init__(
        self,
        store: "AbstractFileSystem",
        stretches: Iterable[FileStretch],
        most_bytes: int = AHEAD_BYTES,
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._store = store
        self._parts: Iterator[FileStretch] = (
            FileStretch(path, start, min(MOST_OF_ONE, first + num_bytes - start))
            for path, first, num_bytes in stretches
            for start in range(first, first + num_bytes, MOST_OF_ONE)
        )
        self._batch_bytes = max(1, most_bytes // _BATCHES)
        self._pool = ThreadPoolExecutor(_BATCHES, "shardspec-ranges")
        self._under_way: deque[tuple[_Ranges, Future[list[bytes | BaseException]]]] = deque()
        self._ask()

    def find(self, path: Path, start: int) -> tuple[int, bytes] | None:
        """Return the range that holds a byte: where it starts, and its bytes; or None."""
        for count, (ranges, answers) in enumerate(self._under_way):
            for first, end, place in ranges.get(str(path), ()):
                if first <= start < end:
                    # What was to be read before has been, or will not be.
                    for _ in range(count):
                        self._under_way.popleft()
                    self._ask()
                    # Who reads asks for what did not come as it should, and says what is wrong.
                    data: object = None
                    with suppress(Exception):
                        data = answers.result()[place]
                    if not isinstance(data, bytes) or len(data) < end - first:
                        return None
                    _check_kept(data, end - first, path)
                    return first, data
        return None

    def close(self) -> None:
        """Ask for no more."""
        self._parts = iter(())
        self._under_way.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> None:
        from fsspec.utils import merge_offset_ranges

        while len(self._under_way) < _BATCHES:
            some: list[FileStretch] = []
            left = self._batch_bytes
            with suppress(CheckpointError, StopIteration):
                while left > 0 and len(some) < _BATCH_STRETCHES:
                    some.append(next(self._parts))
                    left -= some[-1].num_bytes
            if not some:
                return
            paths, starts, ends = merge_offset_ranges(
                [str(one.path) for one in some],
                [one.start for one in some],
                [one.start + one.num_bytes for one in some],
                max_gap=_LEAST_OF_ONE,
                max_block=MOST_OF_ONE,
            )
            ranges: _Ranges = {}
            for place, (path, start, end) in enumerate(zip(paths, starts, ends, strict=True)):
                ranges.setdefault(path, []).append((start, end, place))
            # Where there can be no more threads, all is read when it is wanted.
            with suppress(RuntimeError):
                answers = self._pool.submit(self._store.cat_ranges, paths, starts, ends)
                self._under_way.append((ranges, answers))


def _check_kept(data: bytes, asked: int, path: object) -> None:
    if len(data) > max(asked, 0):
        raise CheckpointError(
            f"{path}: the store answered a request for {asked} bytes with {len(data)}: it does not "
            "keep to ranges; download the checkpoint and name the copy"
        )


def _cut_short(path: Path, end: int, due: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: ends at byte {end}, but bytes up to {due} are needed; it was cut short while "
        "being read"
    )


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

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from a place in the file."""
        at, due = offset, offset + len(buffer)
        while at < due:
            start, block = self._block_at(at, due)
            part = memoryview(block)[at - start : due - start]
            buffer[at - offset : at - offset + len(part)] = part
            at += len(part)

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
        data = b""
        if end > start:
            with store_errors(self._path, "read"):
                data = self._store.cat_file(str(self._path), start=start, end=end)
        _check_kept(data, end - start, self._path)
        if len(data) < max(end - start, 1):
            raise _cut_short(self._path, start + len(data), due)
        self._start, self._block = start, data
        return start, data


def read_fully(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a place in a file; return how many bytes were lacking at its end."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
        if not count:
            break
        done += count
    return len(buffer) - done


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

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from a place in the file."""
        if self.remote is not None:
            self.remote.read_into(buffer, offset)
            return
        # Called so often that a context manager would show.
        try:
            missing = read_fully(self._fd, buffer, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None
        if missing:
            end = offset + len(buffer)
            raise _cut_short(self.path, end - missing, end)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a stretch of the file; for headers and other small things."""
        self.read_into(memoryview(data := bytearray(num_bytes)), offset)
        return bytes(data)

    def close(self) -> None:
        """Close it."""
        if self.remote is None:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KeptOpen(Generic[_Key, _Found]):
    """What is opened on first use; the one unused for longest is closed when there are many."""

    def __init__(
        self, open: Callable[[_Key], _Found], close: Callable[[_Found], None], at_once: int
    ) -> None:
        self._open, self._close, self._at_once = open, close, at_once
        self.held: OrderedDict[_Key, _Found] = OrderedDict()

    def get(self, key: _Key) -> _Found:
        """Return what is good until the next call."""
        if key in self.held:
            self.held.move_to_end(key)
        else:
            while len(self.held) >= self._at_once:
                self._close(self.held.popitem(last=False)[1])
            self.held[key] = self._open(key)
        return self.held[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.held:
            self._close(self.held.popitem()[1])


class OpenFiles(KeptOpen[Path, SourceFile]):
    """Source files that one thread reads."""

    def __init__(self) -> None:
        super().__init__(self._opened, SourceFile.close, _OPEN_AT_ONCE)
        self._planned: RangePrefetcher | None = None

    def will_read(
        self, directory: Path, stretches: Iterable[FileStretch], most_bytes: int = AHEAD_BYTES
    ) -> None:
        """Note, once, what will be read, in that order; a store is asked for it so far ahead.

        Nothing is done for files of this machine, nor for stores of which every thread has its own.
        """
        if not (isinstance(directory, RemotePath) and directory.shared_store):
            return
        self._planned = RangePrefetcher(directory.store, stretches, most_bytes)
        for file in self.held.values():
            if file.remote is not None:
                file.remote.planned = self._planned

    def file(self, path: Path) -> SourceFile:
        """Return an open file that is good until the next call."""
        return self.get(path)

    def _opened(self, path: Path) -> SourceFile:
        opened = SourceFile(path)
        if opened.remote is not None:
            opened.remote.planned = self._planned
            readers = [file.remote for file in (*self.held.values(), opened) if file.remote]
            for reader in readers:
                reader.keep(_KEPT_BYTES // len(readers))
        return opened

    def __exit__(self, *_: object) -> None:
        if self._planned is not None:
            self._planned.close()
        super().__exit__()


class HeaderFiles:
    """Short looks into many files, by any number of threads; files are open for a moment only.

    Readers of those in stores stay for a while, as asking for the size of a file takes as long as
    reading of it, and what lies near may be looked at next.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # There is nothing to close.
        self._stored = KeptOpen(self._begun, lambda _: None, _HEADERS_AT_ONCE)

    def _begun(self, _: Path) -> tuple[Lock, list[SourceFile]]:
        return Lock(), []

    @contextmanager
    def file(self, path: Path) -> Iterator[SourceFile]:
        """Return an open file, for a ``with`` block."""
        if not isinstance(path, RemotePath):
            with SourceFile(path) as file:
                yield file
            return
        with self._lock:
            lock, opened = self._stored.get(path)
        with lock:
            if not opened:
                file = SourceFile(path)  # this asks for its size
                if file.remote is not None:
                    file.remote.keep(0)
                opened.append(file)
            yield opened[0]

"""Files that are read: several are looked into at once, and of many a few are open."""

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Final, Self, TypeVar

from shardspec.checkpoint.storage.path import FileStretch, Requested, SourceFile, StoragePath

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

AHEAD_BYTES: Final = 24 << 20
"""Bytes of a store that are requested, or have arrived and were not read yet."""
_MAX_OPEN: Final = 64
_MAX_HEADER_FILES: Final = 256


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
    pending: deque[Callable[[], _Found]] = deque()

    def results() -> Iterator[_Found]:
        for item in items:
            due: Callable[[], _Found] = partial(look, item)
            # Where the system allows no more threads, the caller's thread makes the call.
            with suppress(RuntimeError):
                due = pool.submit(look, item).result
            pending.append(due)
            if len(pending) > ahead:
                yield pending.popleft()()
        while pending:
            yield pending.popleft()()

    try:
        yield results()
    finally:
        running = True
        while running:
            # However often the user interrupts, calls that are waited for end.
            with suppress(KeyboardInterrupt):
                pool.shutdown(wait=workers is not None, cancel_futures=True)
                running = False


class OpenFiles:
    """Source files that one thread reads; of many, the one used least recently is closed."""

    def __init__(self) -> None:
        self._held: OrderedDict[StoragePath, SourceFile] = OrderedDict()
        self._requested: Requested | None = None

    def will_read(
        self, directory: StoragePath, stretches: Iterable[FileStretch], max_bytes: int = AHEAD_BYTES
    ) -> None:
        """Prefetch what will be read, in this order, in place of what was requested before."""
        if self._requested is not None:
            self._requested.close()
        self._requested = directory.request(stretches, max_bytes)

    def file(self, path: StoragePath) -> SourceFile:
        """Return an open file; valid until the next call."""
        if path in self._held:
            self._held.move_to_end(path)
        else:
            while len(self._held) >= _MAX_OPEN:
                self._held.popitem(last=False)[1].close()
            self._held[path] = path.open()
        file = self._held[path]
        file.requested = self._requested
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._requested is not None:
            self._requested.close()
        while self._held:
            self._held.popitem()[1].close()


class HeaderFiles:
    """Opens files for short reads, by any number of threads; keeps those that cost requests."""

    def __init__(self) -> None:
        self._kept: Callable[[StoragePath], SourceFile] = lru_cache(maxsize=_MAX_HEADER_FILES)(
            lambda path: path.open()
        )

    @contextmanager
    def file(self, path: StoragePath) -> Iterator[SourceFile]:
        """Open a file for the length of a block."""
        if path.requests:
            yield self._kept(path)
        else:
            with path.open() as file:
                yield file

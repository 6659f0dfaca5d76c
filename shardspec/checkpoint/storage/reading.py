"""Reads many files: opens some in advance, keeps few open, and detects files that change."""

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Final, NamedTuple, Self, TypeVar

from shardspec.checkpoint.storage.path import (
    FileStretch,
    Identity,
    Requested,
    SourceFile,
    StoragePath,
)
from shardspec.errors import CheckpointError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

AHEAD_BYTES: Final = 24 << 20
"""Maximum bytes requested from a store and not read yet."""
_MAX_OPEN: Final = 64
_MAX_HEADER_FILES: Final = 256


@contextmanager
def prefetch_map(
    items: Iterable[_Item],
    look: Callable[[_Item], _Result],
    ahead: int,
    workers: int | None = None,
) -> Generator[Iterator[_Result], None, None]:
    """Yield an iterator over `look(item)` for every item, in order; threads call in advance.

    Up to `ahead` results are computed before they are used, by `workers` threads (by default
    `ahead`). With 0 the calling thread makes each call. An exception is raised in place of the
    result of its item. The end of the block waits for running calls only if `workers` is given.

    >>> with prefetch_map("abc", str.upper, 2) as results:
    ...     list(results)
    ['A', 'B', 'C']
    """
    if ahead < 1:
        yield map(look, items)
        return
    # Imported here, as it takes as long as copying 10 MiB.
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(workers or ahead, "shardspec-prefetch")
    pending: deque[Callable[[], _Result]] = deque()

    def results() -> Iterator[_Result]:
        for item in items:
            call: Callable[[], _Result] = partial(look, item)
            # If the system allows no more threads, the calling thread makes the call.
            with suppress(RuntimeError):
                call = pool.submit(look, item).result
            pending.append(call)
            if len(pending) > ahead:
                yield pending.popleft()()
        while pending:
            yield pending.popleft()()

    try:
        yield results()
    finally:
        running = True
        while running:
            # Further interrupts do not cut the waiting short.
            with suppress(KeyboardInterrupt):
                pool.shutdown(wait=workers is not None, cancel_futures=True)
                running = False


class OpenFiles:
    """Open files of one thread; the least recently used ones are closed."""

    def __init__(self) -> None:
        self._files: OrderedDict[StoragePath, SourceFile] = OrderedDict()
        self._requested: Requested | None = None

    def will_read(
        self, directory: StoragePath, stretches: Iterable[FileStretch], max_bytes: int = AHEAD_BYTES
    ) -> None:
        """Start to read these ranges ahead, in order, and cancel earlier requests."""
        if self._requested is not None:
            self._requested.close()
        self._requested = directory.request(stretches, max_bytes)

    def file(self, path: StoragePath) -> SourceFile:
        """Return an open file; valid until the next call."""
        if path in self._files:
            self._files.move_to_end(path)
        else:
            while len(self._files) >= _MAX_OPEN:
                self._files.popitem(last=False)[1].close()
            self._files[path] = path.open()
        file = self._files[path]
        file.requested = self._requested
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._requested is not None:
            self._requested.close()
        while self._files:
            self._files.popitem()[1].close()


class HeaderFiles:
    """Opens files for short reads from any thread; files in object stores stay open."""

    def __init__(self) -> None:
        self._opened: Callable[[StoragePath], SourceFile] = lru_cache(maxsize=_MAX_HEADER_FILES)(
            lambda path: path.open()
        )

    @contextmanager
    def file(self, path: StoragePath) -> Iterator[SourceFile]:
        """Open a file for the duration of a block."""
        if path.requests:
            yield self._opened(path)
        else:
            with path.open() as file:
                yield file


class Snapshot(NamedTuple):
    """The identities of files, taken before a checkpoint is opened.

    Call `check_unchanged` after all reads: files rewritten meanwhile may mix old and new parts.
    """

    place: StoragePath
    """A file, or a directory."""
    nested: bool
    """True if files in subdirectories are included."""
    files: Mapping[StoragePath, Identity]

    @classmethod
    def of(cls, place: StoragePath, *, nested: bool = False) -> "Snapshot":
        """Return a snapshot of a file or directory."""
        return cls(place, nested, _identities(place, nested))

    def check_unchanged(self, files: Iterable[StoragePath]) -> None:
        """Raise CheckpointError if a file has changed since the snapshot."""
        now = _identities(self.place, self.nested)
        for path in files:
            if path not in now or now[path] != self.files.get(path):
                change = "changed" if path in now else "was removed"
                raise CheckpointError(
                    f"{path}: {change} while it was read, so the data may be a mixture of two "
                    "saves; run again when nothing writes to it"
                )


def _identities(place: StoragePath, nested: bool) -> dict[StoragePath, Identity]:
    """Return the identities of the files in a directory, or of one file."""
    try:
        entries = {place / name: entry for name, entry in place.list().items()}
    except NotADirectoryError:
        entry = place.look()
        return {} if entry is None else {place: entry.identity}
    except (OSError, CheckpointError):  # opening the checkpoint reports it
        return {}
    files: dict[StoragePath, Identity] = {}
    for path, entry in entries.items():
        if entry.kind != "directory":
            files[path] = entry.identity
        elif nested:
            files |= _identities(path, nested=True)
    return files

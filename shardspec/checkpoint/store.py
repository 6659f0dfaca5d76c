"""Checkpoints in object stores: paths that are URLs, such as ``s3://bucket/model``.

What lies behind a URL is reached through fsspec, which knows the stores and, from the environment
or its own files of settings, keys and endpoints. It is imported when the first URL is given.
"""

import os
import re
import stat
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path, PosixPath
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from shardspec.errors import CheckpointError, ShardSpecError

__all__ = [
    "AHEAD_BYTES",
    "MOST_OF_ONE",
    "Aside",
    "FileStretch",
    "HeaderFiles",
    "OpenFiles",
    "Planned",
    "RangeReader",
    "RemotePath",
    "Request",
    "SourceFile",
    "Store",
    "StoreErrors",
    "as_path",
    "file_inside",
    "kept_store",
    "open_regular",
    "path_exists",
    "prefetch_depth",
    "prefetch_map",
    "read_range",
    "reason",
    "request",
]

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_OF_THIS_MACHINE: Final = ("file", "local")
_WITHOUT_LISTS: Final = ("http", "https")
_LONGEST: Final = 300
"""Most characters of what a store says about an error."""


class Store(Protocol):
    """What is used of a file system of fsspec."""

    @property
    def async_impl(self) -> bool:
        """Whether all threads share it."""
        ...

    def info(self, path: str) -> dict[str, Any]:
        """Return name, type and size of what has a name; raise FileNotFoundError if nothing has."""
        ...

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        """Return the same of what lies in a directory."""
        ...

    def cat_file(self, path: str, *, start: int | None = None, end: int | None = None) -> bytes:
        """Return a range of bytes, or all."""
        ...

    def pipe_file(self, path: str, value: bytes) -> None:
        """Write a small file in one step, in place of any of that name."""
        ...

    def cp_file(self, path1: str, path2: str) -> None:
        """Copy a file inside the store in one step, in place of any of that name."""
        ...

    def open(self, path: str, mode: str, *, block_size: int, autocommit: bool) -> Any:  # noqa: ANN401
        """Open a file, which is there when it is closed, or else when it is committed."""
        ...

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        ...

    def invalidate_cache(self, path: str) -> None:
        """Forget what is known of a directory."""
        ...


class RemotePath(PosixPath):
    """A URL as a path: joined, listed and looked at like one.

    It leads to no file of this machine. What would take it for one, as `os.stat` and the methods of
    `Path` that are not defined here would, gets a TypeError.

    Examples
    --------
    >>> url = RemotePath("s3://models/llama") / "model.safetensors"
    >>> print(url, url.parent, url.name)
    s3://models/llama/model.safetensors s3://models/llama model.safetensors
    """

    __slots__ = ()

    def __str__(self) -> str:
        if not self.parts:
            return "."  # what all is in, for pathlib
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no file of this machine")

    @property
    def store(self) -> Store:
        """Where it lies; kept for the next time, by fsspec or for all threads.

        Raises
        ------
        CheckpointError
            If fsspec, or what it needs for this store, is not installed, or knows no such store.
        """
        scheme = self.parts[0].rstrip(":")
        if scheme in _WITHOUT_LISTS:
            raise CheckpointError(f"{self}: a web server does not list its files; download them")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise CheckpointError(
                f"{self}: URLs need fsspec: pip install fsspec s3fs (gcsfs for gs://)"
            ) from None
        try:
            shared = kept_store(f"{self.parts[0]}//{'/'.join(self.parts[1:2])}", os.getpid())
            store: Store = shared or url_to_fs(str(self))[0]
        except ImportError as error:
            raise CheckpointError(
                f"{self}: {scheme}:// needs a package that is not there: {error}"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{self}: {error}; URLs start with s3://, gs:// or another name that fsspec knows"
            ) from None
        return store

    @property
    def shared_store(self) -> bool:
        """Whether threads share its store; of other kinds each has one, and connects by itself.

        Raises
        ------
        CheckpointError
            As by `store`.
        """
        return self.store.async_impl

    def _info(self) -> dict[str, Any] | None:
        """Return what the store knows of it; None if there is nothing."""
        store = self.store
        with StoreErrors(self, "read"):
            for _ in range(2):
                try:
                    return store.info(str(self))
                except FileNotFoundError as error:
                    if _says_more(error):
                        raise
                # Perhaps it has been written since the store was last asked.
                store.invalidate_cache(str(self.parent))
        return None

    def entries(self) -> dict[str, bool]:
        """Return the names in a directory, and whether each is a file.

        Raises
        ------
        FileNotFoundError, NotADirectoryError
            As the system does for a path.
        CheckpointError
            If the store refuses.
        """
        store, own = self.store, str(self)
        store.invalidate_cache(own)
        info = self._info()
        if info is None:
            raise FileNotFoundError(own)
        if info["type"] == "file":
            raise NotADirectoryError(own)
        with StoreErrors(self, "read"):
            found = store.ls(own, detail=True)
        names = {entry["name"].rstrip("/"): entry["type"] == "file" for entry in found}
        # Some tools mark a directory by an empty object of its name.
        names.pop(info["name"].rstrip("/"), None)
        return {name.rpartition("/")[2]: plain for name, plain in names.items()}

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield what lies in a directory; raises as `entries`."""
        for name in self.entries():
            yield self / name

    def exists(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002  # named by pathlib
        """Return whether there is a file or a directory of that name."""
        return self._info() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002  # named by pathlib
        """Return whether there is a directory of that name."""
        info = self._info()
        return info is not None and info["type"] == "directory"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002  # named by pathlib
        """Return whether there is a file of that name."""
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002  # named by pathlib
        """Return the path itself."""
        return self

    def absolute(self) -> Self:
        """Return the path itself."""
        return self

    def num_bytes(self) -> int:
        """Return the size of a file.

        Raises
        ------
        CheckpointError
            If it is missing or a directory, or the store refuses.
        """
        info = self._info()
        if info is None:
            raise CheckpointError(f"{self}: cannot be read: there is no such file")
        if info["type"] != "file" or info["size"] is None:
            raise CheckpointError(f"{self}: is not a regular file")
        return int(info["size"])

    def replace(self, target: "RemotePath") -> "RemotePath":  # type: ignore[override]  # Path takes names on the disk
        """Give a file another name, in place of any of that name; return the new name.

        The store copies it in one step. What has the other name is the old file or the new one.

        Raises
        ------
        CheckpointError
            If the store refuses; the target is what it was then.
        """
        store = self.store
        with StoreErrors(target, "replaced"):
            store.cp_file(str(self), str(target))
        store.invalidate_cache(str(target.parent))
        # It has its name: what is left of the other takes room and does no harm.
        with suppress(CheckpointError):
            self.unlink(missing_ok=True)
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        store = self.store
        with StoreErrors(self, "removed"):
            try:
                store.rm_file(str(self))
            except FileNotFoundError:
                if not missing_ok:
                    raise
        store.invalidate_cache(str(self.parent))


def as_path(place: Path | str) -> Path:
    """Return a path, which is a `RemotePath` if it is given as a URL.

    Raises
    ------
    CheckpointError
        If it is neither, or empty, as the text of a variable that is not set.

    Examples
    --------
    >>> [type(as_path(text)).__name__ for text in ("s3://a/b", "memory://a")]
    ['RemotePath', 'RemotePath']
    >>> as_path("file:///tmp/a").as_posix(), as_path("a:/b").as_posix()
    ('/tmp/a', 'a:/b')
    """
    if isinstance(place, Path):
        return place
    if not isinstance(place, str):
        raise CheckpointError(f"a {type(place).__name__} is no path; give text or a Path")
    if not place:
        raise CheckpointError("an empty text is no path; '.' is the working directory")
    scheme, mark, rest = place.partition("://")
    if not mark or _SCHEME.fullmatch(scheme) is None:
        return Path(place)
    return Path(rest) if scheme in _OF_THIS_MACHINE else RemotePath(place)


@lru_cache(maxsize=16)
def kept_store(root: str, pid: int) -> Store | None:  # noqa: ARG001  # a fork has its own
    """Return what fsspec makes of scheme and bucket, if it is made for many threads.

    fsspec itself keeps one for each thread, up to its version 2026.4, and each would connect again.
    """
    from fsspec.core import url_to_fs

    store: Store = url_to_fs(root)[0]
    return store if store.async_impl else None


class StoreErrors:
    """Makes a `CheckpointError` of what a store raises.

    Stores raise errors of the system and errors of their own libraries, which are not known here.
    What Python raises for a mistake in a program, such as a TypeError, stays what it is.

    Parameters
    ----------
    path, done
        What is done where: ``cannot be <done>``.
    """

    __slots__ = ("_done", "_path")

    def __init__(self, path: Path, done: str) -> None:
        self._path = path
        self._done = done

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, ShardSpecError):
            return
        # Stores have errors of their packages, or raise these; any other is a fault of ours.
        foreign = type(error).__module__ != "builtins"
        if foreign or isinstance(error, OSError | ValueError | NotImplementedError):
            raise CheckpointError(f"{self._path}: cannot be {self._done}: {_text(error)}") from None


def _says_more(error: FileNotFoundError) -> bool:
    """Return whether it is not only the file that is missing, but the bucket."""
    return "bucket" in str(error).lower().split()


def _text(error: Exception) -> str:
    """Return what a store says, in one line."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(said.split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

_STORE_LOOKS: Final = 8
"""Files in a store that are looked into at once: each look is some requests, one after another."""


class _Outcome(NamedTuple, Generic[_T]):
    """What a call returned, or raised."""

    found: Sequence[_T]
    error: BaseException | None

    @classmethod
    def of(cls, call: Callable[[], _T]) -> "_Outcome[_T]":
        """Make a call."""
        try:
            return cls((call(),), None)
        except BaseException as error:
            return cls((), error)

    def answer(self) -> _T:
        """Return it or raise it."""
        error = self.error
        if error is not None:
            try:
                raise error
            finally:
                # Otherwise the error and its traceback hold each other, and what is held there.
                del error, self
        return self.found[0]


class Aside(Generic[_T]):
    """A call that is made by a thread of its own, which nobody waits for but who wants its answer.

    Examples
    --------
    >>> Aside(lambda: 2 + 3).answer()
    5
    """

    __slots__ = ("_call", "_outcome")

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._outcome: SimpleQueue[_Outcome[_T]] = SimpleQueue()
        try:
            Thread(target=self._make, daemon=True).start()
        except RuntimeError:
            # There can be no more threads.
            self._make()

    def _make(self) -> None:
        self._outcome.put(_Outcome.of(self._call))

    def answer(self) -> _T:
        """Wait for what the call returns; raises what it raises. To be asked for once."""
        return self._outcome.get().answer()


def prefetch_depth(place: Path, *, here: int = 0) -> int:
    """Return into how many files beside the one in hand it is worth looking at once.

    Parameters
    ----------
    place
        One of them, or where they lie.
    here
        What is returned for files of this machine, which answer soon.

    Raises
    ------
    CheckpointError
        If there is no such store.

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

    Parameters
    ----------
    items, look
        What to call, and what for. What it raises is raised when it is the turn of that item.
    ahead
        How many calls are made beside while the caller has one answer in hand, by as many threads;
        with 0, all are made by the caller's own.
    undo
        Called with what was found ahead and had no turn when the block ends.

    Yields
    ------
    Iterator
        For the ``with`` block. At its end nobody waits for calls that are being made.

    Examples
    --------
    >>> with prefetch_map("abc", str.upper, 2) as found:
    ...     list(found)
    ['A', 'B', 'C']
    """
    items = list(items)
    looks = _Looks(look, undo)
    try:
        workers = looks.start(min(ahead, len(items)) if len(items) > 1 else 0)
        yield looks.answers(items, ahead) if workers else map(look, items)
    finally:
        looks.end()


class _Looks(Generic[_Item, _Found]):
    """Calls that are made by some threads."""

    def __init__(
        self, look: Callable[[_Item], _Found], undo: Callable[[_Found], None] | None
    ) -> None:
        self._look = look
        self._undo = undo
        self._workers = 0
        self._ended = False
        self._lock = Lock()
        """Whoever has it knows whether all has ended, and what was found before that."""
        self._handed: SimpleQueue[tuple[_Item, SimpleQueue[_Outcome[_Found]]] | None] = (
            SimpleQueue()
        )
        self._waiting: deque[SimpleQueue[_Outcome[_Found]]] = deque()

    def start(self, count: int) -> int:
        """Start threads, and return how many there can be."""
        while self._workers < count:
            try:
                Thread(target=self._work, name="shardspec-aside", daemon=True).start()
            except RuntimeError:
                break
            self._workers += 1
        return self._workers

    def answers(self, items: Iterable[_Item], ahead: int) -> Iterator[_Found]:
        """Yield what is found, in the order of the items."""
        for item in items:
            self._waiting.append(SimpleQueue())
            self._handed.put((item, self._waiting[-1]))
            if len(self._waiting) > ahead:
                yield self._waiting.popleft().get().answer()
        while self._waiting:
            yield self._waiting.popleft().get().answer()

    def end(self) -> None:
        """Undo what had no turn; what is still to come is undone when it comes."""
        with self._lock:
            self._ended = True
        for _ in range(self._workers):
            self._handed.put(None)
        for outcome in self._waiting:
            try:
                self._drop(outcome.get_nowait())
            except Empty:
                # It was not made yet.
                continue

    def _work(self) -> None:
        while (handed := self._handed.get()) is not None:
            item, outcome = handed
            if self._ended:
                continue
            made = _Outcome.of(partial(self._look, item))
            with self._lock:
                wanted = not self._ended
                if wanted:
                    outcome.put(made)
            if not wanted:
                self._drop(made)

    def _drop(self, made: _Outcome[_Found]) -> None:
        if self._undo is not None:
            for found in made.found:
                self._undo(found)


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


_LEAST: Final = 64 << 10
"""Least bytes of a request: headers and what lies around them come in one."""
_ON_THE_WAY: Final = 3
"""Most requests that are under way while bytes are worked on: one alone does not fill the line."""
_CERTAIN: Final = 1 << 20
"""Bytes of a request from which on a reader is taken for one that goes on to the end."""


class RangeReader:
    """A file in a store; keeps the last range that it has read, and asks for the next ones.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    CheckpointError
        If it is missing, or the store refuses.
    """

    __slots__ = (
        "_ahead",
        "_block",
        "_expected",
        "_most",
        "_path",
        "_planned",
        "_planned_block",
        "_start",
        "_store",
        "_window",
        "num_bytes",
    )

    def __init__(self, path: RemotePath) -> None:
        self.num_bytes = path.num_bytes()
        self._path = path
        # Other threads would get one of their own from fsspec, with other connections.
        self._store = path.store
        self._planned: Planned | None = None
        self._start = 0
        self._block = b""
        self._planned_block = False
        """Whether what is kept was planned: then it stays until all of it was read, and no longer,
        as many files have their turn."""
        self._window = _LEAST
        self._expected = (0, 0)
        self._most = MOST_OF_ONE
        self._ahead: deque[Request] = deque()

    def keep(self, num_bytes: int) -> None:
        """Keep at most so many bytes from now on; not below what headers need."""
        self._most = max(_LEAST, min(num_bytes // (1 + _ON_THE_WAY), MOST_OF_ONE))
        if len(self._block) > self._most and not self._planned_block:
            self._let_go()
            self._ahead.clear()

    def _let_go(self) -> None:
        self._start += len(self._block)
        self._block = b""

    def holds(self, start: int, end: int) -> bool:
        """Return whether bytes are there without another request."""
        return self._start <= start and end <= self._start + len(self._block)

    def plan(self, planned: Planned) -> None:
        """Take what is planned from there when it is its turn."""
        self._planned = planned

    def expect(self, start: int, end: int) -> None:
        """Take note that all bytes of a stretch will be wanted."""
        self._expected = start, end

    def read_into(self, buffer: memoryview, offset: int, end: int = 0) -> None:
        """Fill a buffer of bytes from a place in the file.

        Parameters
        ----------
        buffer, offset
            The buffer, and the place.
        end
            Where that ends of which this is a part, if the rest will be read next.

        Raises
        ------
        CheckpointError
            If the file ends before, or the store refuses.
        """
        end = max(end, offset + len(buffer))
        done = 0
        while done < len(buffer):
            inside = offset + done - self._start
            if not 0 <= inside < len(self._block):
                self._fetch(offset + done, end - offset - done, end)
                inside = offset + done - self._start
            part = memoryview(self._block)[inside : inside + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if self._planned_block and inside + len(part) == len(self._block):
                self._let_go()

    def _fetch(self, start: int, num_bytes: int, needed: int) -> None:
        """Read a range from `start` on, of so many bytes if the limit allows, and keep it."""
        limit = self.num_bytes
        if self._planned is not None:
            if self._take_planned(self._planned, start):
                return
            # What is planned comes by itself.
            limit = self._planned.next_start(self._path, start) or limit
        # Rows of columns are read along with what lies between them, where that is little.
        stopped = self._start + len(self._block)
        goes_on = 0 <= start - stopped < _LEAST
        self._window = min(self._window * 2, self._most) if goes_on else _LEAST
        # Let go of first: two of them would be twice the memory.
        self._block = b""
        while self._ahead and not (
            self._ahead[0].stretch.start <= start < self._ahead[0].stretch.end
        ):
            self._ahead.popleft()
        if self._ahead:
            ahead = self._ahead.popleft()
            data = ahead.data.answer()
            start, end = ahead.stretch.start, ahead.stretch.end
        else:
            first, last = self._expected
            rest = last - start if first <= start else 0
            end = min(start + min(max(num_bytes, rest, self._window), self._most), limit)
            data = read_range(self._store, FileStretch(self._path, start, end - start))
        if len(data) != max(end - start, 1):
            raise CheckpointError(
                f"{self._path}: ends at byte {start + len(data)}, but bytes up to {needed} are "
                "needed; it was cut short while being read"
            )
        self._start, self._block, self._planned_block = start, data, False
        self._ask_ahead(goes_on, limit)

    def _take_planned(self, planned: Planned, start: int) -> bool:
        """Keep what the plan has for a place on; return False if there is nothing."""
        found = planned.take(self._path, start)
        if found is None:
            return False
        self._block = b""
        data = found.data.answer()
        if len(data) < found.stretch.num_bytes:
            # The file ends before; which of those who read of it has to know that, is seen next.
            return False
        self._start, self._block, self._planned_block = found.stretch.start, data, True
        return True

    def _ask_ahead(self, goes_on: bool, limit: int) -> None:
        """Ask for the next ranges where it is all but certain that they will be wanted."""
        first, last = self._expected
        if not (first <= self._start and self._start + len(self._block) <= last):
            certain = goes_on and self._window >= min(_CERTAIN, self._most)
            last = self.num_bytes if certain else 0
        last = min(last, limit)
        while len(self._ahead) < _ON_THE_WAY:
            start = self._ahead[-1].stretch.end if self._ahead else self._start + len(self._block)
            end = min(start + self._most, last)
            if start >= end:
                break
            stretch = FileStretch(self._path, start, end - start)
            self._ahead.append(request(self._store, stretch))


_OPEN_AT_ONCE: Final = 128
"""Files kept open: far below the usual limit of 1024 for a process."""
_GLANCED_AT_ONCE: Final = 256
"""Readers of files in stores; each keeps 64 KiB."""
_ROWS_AT_ONCE: Final = 1024
"""Stretches of memory filled by one call, which is as many as Linux takes."""
_KEPT_BYTES: Final = 32 << 20
"""Bytes kept of all files in stores together."""


def reason(error: OSError) -> str:
    """Return why the system refused, without its number and file name."""
    return error.strerror or str(error)


def path_exists(path: Path) -> bool:
    """Return whether something has this name, here or in a store."""
    # Path.exists raises where a name is too long.
    return path.exists() if isinstance(path, RemotePath) else os.path.exists(path)


def file_inside(directory: Path, name: str, stated_by: Path) -> Path:
    """Return the path of a file that a checkpoint names, which must lie in its directory.

    Raises
    ------
    CheckpointError
        If the name is not a plain one, or is a link that leads elsewhere.
    """
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(
            f"{stated_by}: file name {name!r} is not a plain name; files of a checkpoint lie in "
            "its own directory"
        )
    path = directory / name
    if isinstance(path, RemotePath):
        return path
    # Not Path.resolve, which raises where links lead in a circle.
    real = os.path.realpath(path)
    if os.path.islink(path) and os.path.dirname(real) != os.path.realpath(directory):
        raise CheckpointError(
            f"{stated_by}: file {name!r} is a link to {real}, outside the checkpoint; "
            "put the file itself into the directory"
        )
    return path


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises
    ------
    CheckpointError
        If it cannot be opened, or is a directory, pipe or device.
    """
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
    """A regular file, here or in a store, open for reading; bytes are read where they lie.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    CheckpointError
        If it cannot be opened, or is a directory, pipe or device.
    """

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

    def expect(self, start: int, end: int) -> None:
        """Take note that all bytes of a stretch will be wanted, one after the other."""
        if self.remote is not None:
            self.remote.expect(start, end)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from a place in the file.

        Raises
        ------
        CheckpointError
            If the file ends before, or cannot be read.
        """
        if self.remote is not None:
            self.remote.read_into(buffer, offset)
            return
        done, end = 0, len(buffer)
        while done < end:
            part = buffer[done:] if done else buffer
            try:
                count = os.preadv(self._fd, [part], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset + done}, but bytes up to "
                    f"{offset + end} are needed; it was cut short while being read"
                )
            done += count

    def read_rows(self, rows: Sequence[memoryview], offset: int, num_bytes: int) -> None:
        """Fill stretches of memory, one after the other, from a stretch of the file.

        Parameters
        ----------
        rows, offset, num_bytes
            The stretches of memory, where that of the file begins, and how long it is.

        Raises
        ------
        CheckpointError
            As by `read_into`.
        """
        if self.remote is not None:
            end = offset + num_bytes
            for row in rows:
                self.remote.read_into(row, offset, end)
                offset += len(row)
            return
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            wanted = num_bytes if len(some) == len(rows) else sum(map(len, some))
            try:
                count = os.preadv(self._fd, some, offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None
            if count == wanted:
                offset += wanted
                continue
            # Rare: a signal came, or the file ends.
            for row in some:
                self.read_into(row, offset)
                offset += len(row)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a stretch of the file; for headers and other small things."""
        if self.remote is None:
            try:
                whole = os.pread(self._fd, num_bytes, offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None
            if len(whole) == num_bytes:
                return whole
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def close(self) -> None:
        """Close it."""
        if self.remote is None:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class OpenFiles:
    """Files opened on first use; the one unused for longest is closed when there are many.

    Parameters
    ----------
    at_once
        Most files that are open.
    """

    def __init__(self, at_once: int = _OPEN_AT_ONCE) -> None:
        self._at_once = at_once
        self._files: OrderedDict[Path, SourceFile] = OrderedDict()
        self._planned: Planned | None = None

    def will_read(
        self, directory: Path, stretches: Iterable[FileStretch], most_bytes: int = AHEAD_BYTES
    ) -> None:
        """Take note of what will be read, in that order; a store is asked for it ahead.

        Parameters
        ----------
        directory
            Where the files lie; nothing is done for those of this machine, nor for stores of which
            every thread has its own.
        stretches
            What will be read.
        most_bytes
            How far ahead.
        """
        if not (isinstance(directory, RemotePath) and directory.shared_store):
            return
        self._planned = Planned(stretches, most_bytes)
        for file in self._files.values():
            if file.remote is not None:
                file.remote.plan(self._planned)

    def file(self, path: Path) -> SourceFile:
        """Return an open file that is good until the next call."""
        found = self._files.get(path)
        if found is not None:
            self._files.move_to_end(path)
            return found
        while len(self._files) >= self._at_once:
            self._files.popitem(last=False)[1].close()
        opened = self._files[path] = SourceFile(path)
        if opened.remote is not None and self._planned is not None:
            opened.remote.plan(self._planned)
        remote = [file.remote for file in self._files.values() if file.remote is not None]
        for reader in remote:
            reader.keep(_KEPT_BYTES // len(remote))
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._planned = None


class _Glanced:
    """A file in a store, for one thread at a time."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._file: SourceFile | None = None

    @contextmanager
    def file(self, path: Path) -> Iterator[SourceFile]:
        with self._turn:
            if self._file is None:
                # This asks for its size.
                self._file = SourceFile(path)
                if self._file.remote is not None:
                    self._file.remote.keep(0)
            yield self._file


class HeaderFiles:
    """Short looks into many files, by any number of threads.

    Files are open for a moment only. Readers of those in stores stay for a while, as asking for the
    size of a file takes as long as reading of it, and what lies near may be looked at next.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stored: OrderedDict[Path, _Glanced] = OrderedDict()

    @contextmanager
    def file(self, path: Path) -> Iterator[SourceFile]:
        """Return an open file, for a ``with`` block."""
        if isinstance(path, RemotePath):
            with self._lock:
                glanced = self._stored.setdefault(path, _Glanced())
                self._stored.move_to_end(path)
                if len(self._stored) > _GLANCED_AT_ONCE:
                    # There is nothing to close.
                    self._stored.popitem(last=False)
            with glanced.file(path) as file:
                yield file
        else:
            with SourceFile(path) as file:
                yield file

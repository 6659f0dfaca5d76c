"""Files of checkpoints, on this machine or behind URLs: listed, identified, read and uploaded.

A URL such as ``s3://bucket/model`` is a `RemotePath`. fsspec reaches what lies behind it; it knows
the stores, and takes keys and endpoints from the environment or its own settings. It is imported
when the first URL is given. A request to a store takes as long as transferring some megabytes. So
what will be read next is requested in batches while the last one is in use, and several files are
opened at once.
"""

import os
import re
import stat
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias, TypeVar

from shardspec.errors import CheckpointError, OutputExistsError, ShardSpecError
from shardspec.input_files import open_regular
from shardspec.text import Argument

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fsspec import AbstractFileSystem

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_TEMPORARY: Final = re.compile(r"\.shardspec-save-[0-9a-f]{16}\.tmp|\..*\.shardspec-tmp", re.DOTALL)
_MAX_ERROR_CHARS: Final = 300
_PART_BYTES: Final = 8 << 20
_MAX_PARTS: Final = 9_000
"""S3 takes 10,000 parts; a file of more than 72 GB is uploaded in larger ones."""
_IDENTITY_KEYS: Final = (
    *("size", "ETag", "etag", "md5Hash", "checksum", "generation", "VersionId", "version_id"),
    *("LastModified", "last_modified", "mtime", "updated", "created", "mtimeMs"),
)
"""What stores say of an object that tells it from one written later under its name."""
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
FileIdentity: TypeAlias = tuple[object, ...]
"""What changes when a file is written again: device, inode, size and time of modification; for an
object in a store its size, ETag and times."""


class RemotePath(PosixPath):
    """A URL as a path, which can be joined and listed.

    It is not a file of this machine: `os.stat`, and methods of `Path` that are not defined here,
    raise a TypeError.

    >>> url = RemotePath("s3://models/llama") / "model.safetensors"
    >>> print(url, url.parent, url.name)
    s3://models/llama/model.safetensors s3://models/llama model.safetensors
    """

    __slots__ = ()

    def __str__(self) -> str:
        if not self.parts:
            return "."  # the parent of all, for pathlib
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a file of this machine")

    @property
    def store(self) -> "AbstractFileSystem":
        """The file system of fsspec, which is cached."""
        scheme = self.parts[0].rstrip(":")
        if scheme in ("http", "https"):
            raise CheckpointError(f"{self}: a web server does not list its files; download them")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise CheckpointError(
                f"{self}: URLs need fsspec: pip install fsspec s3fs (gcsfs for gs://)"
            ) from None
        try:
            shared = kept_store(f"{self.parts[0]}//{'/'.join(self.parts[1:2])}", os.getpid())
            return shared or url_to_fs(str(self))[0]
        except ImportError as error:
            raise CheckpointError(
                f"{self}: {scheme}:// needs a package that is not installed: {error}"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{self}: {error}; URLs start with s3://, gs:// or another name that fsspec knows"
            ) from None

    @property
    def shared_store(self) -> bool:
        """Whether all threads share the store; otherwise each has its own connection."""
        return bool(self.store.async_impl)

    def info(self) -> dict[str, Any] | None:
        """Return what the store says about it; None if there is nothing."""
        store = self.store
        with path_errors(self, "read"):
            for _ in range(2):
                try:
                    found: dict[str, Any] = store.info(str(self))
                except FileNotFoundError as error:
                    # Not just the file is missing, but the bucket.
                    if "bucket" in str(error).lower().split():
                        raise
                else:
                    return found
                # It may have been written since the store was last asked.
                store.invalidate_cache(str(self.parent))
        return None

    def listing(self) -> dict[str, dict[str, Any]]:
        """Return the names in a directory, and what the store says about each.

        Raises FileNotFoundError or NotADirectoryError if there is no directory of that name.
        """
        store, own = self.store, str(self)
        store.invalidate_cache(own)
        info = self.info()
        if info is None:
            raise FileNotFoundError(own)
        if info["type"] == "file":
            raise NotADirectoryError(own)
        with path_errors(self, "read"):
            found = store.ls(own, detail=True)
        entries = {entry["name"].rstrip("/"): entry for entry in found}
        # Some tools mark a directory by an empty object of its name.
        entries.pop(info["name"].rstrip("/"), None)
        return {name.rpartition("/")[2]: entry for name, entry in entries.items()}

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield the paths in a directory; raises as `listing`."""
        for name in self.listing():
            yield self / name

    def exists(self, **_: bool) -> bool:
        """Return whether there is a file or a directory of that name."""
        return self.info() is not None

    def is_dir(self, **_: bool) -> bool:
        """Return whether there is a directory of that name."""
        return (self.info() or {}).get("type") == "directory"

    def is_file(self, **_: bool) -> bool:
        """Return whether there is a file of that name."""
        return (self.info() or {}).get("type") == "file"

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002  # named by pathlib
        """Return the path itself."""
        return self

    absolute = resolve

    def num_bytes(self) -> int:
        """Return the size of a file."""
        info = self.info()
        if info is None:
            raise CheckpointError(f"{self}: cannot be read: there is no such file")
        if info["type"] != "file" or info["size"] is None:
            raise CheckpointError(f"{self}: is not a regular file")
        return int(info["size"])

    def replace(self, target: "RemotePath") -> "RemotePath":  # type: ignore[override]  # Path takes names on the disk
        """Rename a file, replacing any of that name; return the new name.

        The store copies it in one step, so the name has the old file or the new one.
        """
        store = self.store
        with path_errors(target, "replaced"):
            store.cp_file(str(self), str(target))
        store.invalidate_cache(str(target.parent))
        # The file has its name; if the other one stays, it only takes room.
        with suppress(CheckpointError):
            self.unlink(missing_ok=True)
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        store = self.store
        with path_errors(self, "removed"):
            try:
                store.rm_file(str(self))
            except FileNotFoundError:
                if not missing_ok:
                    raise
        store.invalidate_cache(str(self.parent))


def as_path(place: Path | str) -> Path:
    """Return a path, which is a `RemotePath` if it is given as a URL; text may not be empty.

    >>> as_path("s3://a/b"), as_path("file:///tmp/a"), as_path("a:/b")
    (RemotePath('s3://a/b'), PosixPath('/tmp/a'), PosixPath('a:/b'))
    """
    if isinstance(place, Path):
        return place
    if not isinstance(place, str):
        raise CheckpointError(f"a {type(place).__name__} is not a path; give text or a Path")
    if not place:
        raise CheckpointError("an empty text is not a path; '.' is the working directory")
    scheme, mark, rest = place.partition("://")
    if not mark or _SCHEME.fullmatch(scheme) is None:
        return Path(place)
    return Path(rest) if scheme in ("file", "local") else RemotePath(place)


@lru_cache(maxsize=16)
def kept_store(root: str, pid: int) -> "AbstractFileSystem | None":  # noqa: ARG001  # a fork has its own
    """Return fsspec's store for a scheme and bucket, if threads can share it.

    fsspec up to 2026.4 keeps one for each thread, and each would connect again.
    """
    from fsspec.core import url_to_fs

    store = url_to_fs(root)[0]
    return store if store.async_impl else None


def is_temporary(name: str) -> bool:
    """Return whether a file has a name that only runs that were killed leave."""
    return _TEMPORARY.fullmatch(name) is not None


def output_exists(path: Path) -> OutputExistsError:
    """Return the error for an output that exists already."""
    return OutputExistsError(
        f"{path}: exists; choose another name, or overwrite it with ",
        Argument("overwrite", value=True),
    )


def reason(error: OSError) -> str:
    """Return why the system refused, without its number and file name."""
    return error.strerror or str(error)


@contextmanager
def path_errors(path: Path, done: str, more: str = "") -> Iterator[None]:
    """Turn errors of the system and of stores into a `CheckpointError`: what cannot be <done>.

    Stores also raise errors of their own libraries, which are not known here. Errors that Python
    raises for bugs, such as a TypeError, are not converted.
    """
    try:
        yield
    except ShardSpecError:
        raise
    except Exception as error:
        known: tuple[type[Exception], ...] = (OSError,)
        if isinstance(path, RemotePath):
            known = (OSError, ValueError, NotImplementedError)
            if isinstance(error, FileExistsError) and done == "written":
                raise output_exists(path) from None
        if type(error).__module__ == "builtins" and not isinstance(error, known):
            raise
        raise CheckpointError(f"{path}: cannot be {done}: {_text(error)}{more}") from None


def _text(error: Exception) -> str:
    """Return an error message in one line, with its class where it says no more than the path."""
    text = " ".join((reason(error) if isinstance(error, OSError) else str(error)).split())
    if " " not in text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"


def path_exists(path: Path) -> bool:
    """Return whether something has this name, here or in a store."""
    # Path.exists raises where a name is too long.
    return path.exists() if isinstance(path, RemotePath) else os.path.exists(path)


def file_inside(directory: Path, name: str, stated_by: Path, *, weights: bool = False) -> Path:
    """Return the path of a file that a checkpoint names, which must be in its directory.

    It may be a link: to a file inside the directory or to one of the same name, or from a folder of
    links to the ``blobs`` of a hub cache. Files of `weights`, which are opened only as such, may
    also be in directories below, and links to any file.
    """
    parts = name.split("/") if weights else [name]
    if any(part in ("", ".", "..") or any(c in part for c in "/\\\0") for part in parts):
        raise CheckpointError(
            f"{stated_by}: file name {name!r} is not a plain name; files of a checkpoint are in "
            "its own directory"
        )
    path = directory / name
    if weights or isinstance(path, RemotePath) or not os.path.islink(path):
        return path
    # Not Path.resolve, which raises where links lead in a circle.
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    cached = real.parent.name == "blobs" and (real.parent.parent / "snapshots").is_dir()
    if real.parent != home and real.name != name and not cached:
        raise CheckpointError(
            f"{stated_by}: file {name!r} is a link to {real}, outside the checkpoint; "
            "put the file itself into the directory"
        )
    return path


@contextmanager
def upload(
    path: RemotePath, num_bytes: int, *, overwrite: bool
) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Upload a file of about this size; yields a function that appends to it.

    The file appears at the end of the block, unless an exception is raised: an `OutputExistsError`
    if the file exists by then and `overwrite` is not set.
    """
    from fsspec.transaction import Transaction

    store = path.store
    part = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS))
    part += -part % (1 << 20)
    # A transaction of its own: threads share the one of the store.
    transaction = Transaction(store)
    if not store.async_impl:
        transaction.start()  # some of these ignore `autocommit`
    try:
        with path_errors(path, "written"):
            mode = "wb" if overwrite else "xb"
            file = store.open(str(path), mode, block_size=part, autocommit=False)
            transaction.files.append(file)

        def write(data: bytes | memoryview) -> None:
            with path_errors(path, "written"):
                file.write(data)

        try:
            yield write
        finally:
            with path_errors(path, "written"):
                file.close()  # sends the rest; the file appears with the commit
    except BaseException:
        transaction.complete(commit=False)
        raise
    else:
        with path_errors(path, "written"):
            transaction.complete(commit=True)
    finally:
        store.invalidate_cache(str(path.parent))


class Snapshot(NamedTuple):
    """The files of a place, and their identities; taken before a checkpoint is opened.

    `check_unchanged` is called once everything has been read: files that were written meanwhile may
    have been read half old and half new.
    """

    place: Path
    """A file, or a directory."""
    nested: bool
    """Whether directories below count."""
    files: Mapping[Path, FileIdentity]

    @classmethod
    def of(cls, place: Path, *, nested: bool = False) -> "Snapshot":
        """Take a snapshot."""
        return cls(place, nested, _identities(place, nested))

    def check_unchanged(self, files: Iterable[Path]) -> None:
        """Check that files are the same as in the snapshot."""
        remote = isinstance(self.place, RemotePath)
        listed = _identities(self.place, self.nested) if remote else {}
        for path in files:
            now = listed.get(path) if remote else _identity(path)
            if now is None or now != self.files.get(path):
                done = "was removed" if now is None else "changed"
                raise CheckpointError(
                    f"{path}: {done} while it was read, so that what was read may be a mixture of "
                    "two saves; run again when nobody writes it"
                )


def _identities(place: Path, nested: bool) -> dict[Path, FileIdentity]:
    """Return the identities of the files in a directory; a file stands for itself."""
    found: dict[Path, FileIdentity] = {}
    for path, identity in _listed(place).items():
        if identity is not None:
            found[path] = identity
        elif nested:
            found |= _identities(path, nested=True)
    return found


def _listed(place: Path) -> dict[Path, FileIdentity | None]:
    """Return what is in a directory: the identities of files, None for all else."""
    if not isinstance(place, RemotePath):
        try:
            return {path: _identity(path) for path in map(place.joinpath, os.listdir(place))}
        except NotADirectoryError:
            return {place: _identity(place)}
        except OSError:  # the reader of the checkpoint reports it
            return {}
    infos: dict[Path, dict[str, Any]] = {}
    try:
        infos = {place / name: info for name, info in place.listing().items()}
    except NotADirectoryError:
        place.store.invalidate_cache(str(place.parent))
        infos = {place: place.info() or {}}
    except FileNotFoundError:
        pass
    return {
        path: tuple((key, str(info[key])) for key in _IDENTITY_KEYS if key in info)
        if info.get("type") == "file"
        else None
        for path, info in infos.items()
    }


def _identity(path: Path) -> FileIdentity | None:
    """Return the identity of a file of this machine; None if there is none."""
    try:
        at = os.stat(path)
    except OSError:
        return None
    return None if stat.S_ISDIR(at.st_mode) else (at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns)


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


class OpenFiles:
    """Source files that one thread reads; of many, the one used least recently is closed."""

    def __init__(self) -> None:
        self._held: OrderedDict[Path, SourceFile] = OrderedDict()
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
        if path in self._held:
            self._held.move_to_end(path)
        else:
            while len(self._held) >= _MAX_OPEN:
                self._held.popitem(last=False)[1].close()
            self._held[path] = SourceFile(path)
        file = self._held[path]
        file.prefetched = self._prefetched
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._prefetched is not None:
            self._prefetched.close()
        while self._held:
            self._held.popitem()[1].close()


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

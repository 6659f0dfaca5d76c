"""Reads and writes files in object stores, which are named by URLs such as ``s3://bucket/model``.

fsspec connects to the stores, with keys and endpoints from the environment or its own settings. It
is imported with the first URL.

Starting a request takes as long as transferring some megabytes. So nearby ranges are read in one
request, and the next ranges are requested while the current ones are in use.

Files of an output are uploaded as they are written, and appear when all are complete. The file that
lists the others, such as an index, appears last.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardspec.checkpoint.storage.path import (
    Entry,
    FileStretch,
    Requested,
    SourceFile,
    Staged,
    Staging,
    StoragePath,
    WriteAt,
    is_temporary,
    output_exists,
)
from shardspec.checkpoint.storage.reading import AHEAD_BYTES
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fsspec import AbstractFileSystem

MAX_REQUEST_BYTES: Final = 4 << 20
_MIN_REQUEST_BYTES: Final = 64 << 10
"""Minimum bytes of a request. Gaps shorter than this are read too."""
_SEQUENTIAL_BYTES: Final = 512 << 10
"""Minimum bytes of a request of a sequential reader."""
_BATCHES: Final = 3
"""Batches of requests in flight."""
_BATCH_STRETCHES: Final = 1024
_PART_BYTES: Final = 8 << 20
_MAX_PARTS: Final = 9_000
"""S3 accepts 10,000 parts; a file of more than 72 GB is uploaded in larger parts."""
_IDENTITY_KEYS: Final = (
    *("name", "size", "ETag", "etag", "md5Hash", "checksum", "generation"),
    *("VersionId", "version_id"),
    *("LastModified", "last_modified", "mtime", "updated", "created", "mtimeMs"),
)
"""Keys of fsspec's info that identify an object and its version."""
_FILES_AT_ONCE: Final = 8
"""Files opened concurrently in a store: each takes several requests in sequence."""


class ObjectPath(StoragePath):
    """A URL as a path, which can be joined and listed.

    >>> url = ObjectPath("s3://models/llama") / "model.safetensors"
    >>> print(url, url.parent, url.name)
    s3://models/llama/model.safetensors s3://models/llama model.safetensors
    """

    __slots__ = ()
    requests = whole_files = True
    nests = False
    # fsspec's stores raise these for requests that fail, the last for operations that they lack.
    _refusals = (OSError, ValueError, NotImplementedError)

    def __str__(self) -> str:
        if not self.parts:
            return "."  # the top parent, for pathlib
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a file of this machine")

    @property
    def store(self) -> "AbstractFileSystem":
        """The cached file system of fsspec; raises CheckpointError if a package is missing."""
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
            shared = shared_store(f"{self.parts[0]}//{'/'.join(self.parts[1:2])}", os.getpid())
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
    def _threads_share(self) -> bool:
        """True if threads share the store; otherwise each has its own connection."""
        return bool(self.store.async_impl)

    def _info(self) -> dict[str, Any] | None:
        """Return fsspec's info about the object; None if it does not exist."""
        store = self.store
        with self.errors("read"):
            for _ in range(2):
                try:
                    info: dict[str, Any] = store.info(str(self))
                except FileNotFoundError as error:
                    # The bucket is missing, not just the object.
                    if "bucket" in str(error).lower().split():
                        raise
                else:
                    return info
                # The cached listing may be older than the object.
                store.invalidate_cache(str(self.parent))
        return None

    def look(self, *, follow_links: bool = True) -> Entry | None:  # noqa: ARG002  # there are none
        """Return the object or directory of this name; None if there is none."""
        info = self._info()
        return None if info is None else _entry(info)

    def list(self) -> dict[str, Entry]:
        """Return the entries of a directory by name."""
        store, own = self.store, str(self)
        store.invalidate_cache(own)
        info = self._info()
        if info is None:
            raise FileNotFoundError(own)
        if info["type"] == "file":
            store.invalidate_cache(str(self.parent))
            raise NotADirectoryError(own)
        with self.errors("read"):
            listed = store.ls(own, detail=True)
        entries = {entry["name"].rstrip("/"): entry for entry in listed}
        # Some tools mark a directory by an empty object of its name.
        entries.pop(info["name"].rstrip("/"), None)
        return {name.rpartition("/")[2]: _entry(entry) for name, entry in entries.items()}

    def names_below(self) -> Iterator[str]:
        """Yield the names of all entries of a directory; those of directories end in /."""
        for name, entry in self.list().items():
            yield name if entry.kind == "file" else f"{name}/"

    def taken(self) -> bool:
        """Return True if the name is in use; an empty object may mark a directory."""
        entry = self.look()
        return entry is not None and (entry.kind != "directory" or bool(self.list()))

    def open(self) -> SourceFile:
        """Open the object at this URL for reading."""
        entry = self.look()
        if entry is None:
            raise CheckpointError(f"{self}: cannot be read: there is no such file")
        if entry.kind != "file":
            raise CheckpointError(f"{self}: is not a regular file")
        return ObjectFile(self, entry.num_bytes, self.store)

    def request(self, stretches: Iterable[FileStretch], max_bytes: int) -> Requested | None:
        """Start to read these ranges ahead, if threads share the store."""
        return RangePrefetcher(self.store, stretches, max_bytes) if self._threads_share else None

    def files_ahead(self, local: int = 0) -> int:  # noqa: ARG002  # of this machine
        """Return the number of files to open ahead of the one in use."""
        return _FILES_AT_ONCE - 1 if self._threads_share else 0

    def write(
        self,
        num_bytes: int,
        pieces: Iterable[bytes | memoryview],
        *,
        overwrite: bool,
        mode_of: str | None = None,  # noqa: ARG002  # files have none
    ) -> None:
        """Upload a file that consists of `pieces`, one after the other."""
        staging = Staging({"": num_bytes}, directory=False, overwrite=overwrite)
        with self.stage(staging) as staged, staged.file("") as write:
            end = 0
            for piece in pieces:
                write(end, piece)
                end += len(piece)

    @contextmanager
    def stage(self, output: Staging) -> Iterator[Staged]:
        """Begin an output, which is committed at the end of the block."""
        uploads = _Uploads(self, output)
        try:
            yield uploads
            uploads.commit()
        except BaseException:
            uploads.discard()
            raise

    def unlink(self) -> None:
        """Remove the object if it exists."""
        store = self.store
        with self.errors("removed"), suppress(FileNotFoundError):
            store.rm_file(str(self))
        store.invalidate_cache(str(self.parent))


def _entry(info: dict[str, Any]) -> Entry:
    kind = info.get("type")
    identity = tuple((key, str(info[key])) for key in _IDENTITY_KEYS if key in info)
    if kind == "directory":
        return Entry("directory", 0, identity)
    size = info.get("size")
    return Entry("file" if kind == "file" and size is not None else "other", size or 0, identity)


@lru_cache(maxsize=16)
def shared_store(root: str, pid: int) -> "AbstractFileSystem | None":  # noqa: ARG001  # a fork has its own
    """Return fsspec's store for a scheme and bucket, if threads can share it.

    fsspec up to 2026.4 makes a store per thread, and each would connect separately.
    """
    from fsspec.core import url_to_fs

    store = url_to_fs(root)[0]
    return store if store.async_impl else None


class ObjectFile(SourceFile):
    """An object, read in ranges."""

    __slots__ = ("_last_range", "_store")

    def __init__(self, path: StoragePath, num_bytes: int, store: "AbstractFileSystem") -> None:
        super().__init__(path, num_bytes)
        self._last_range = (-_MIN_REQUEST_BYTES, b"")
        """Position and bytes of the last range; one tuple, since threads may share the file."""
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
        """Return (start, bytes) of a cached or new range that contains position `at`."""
        start, data = self._last_range
        if start <= at < start + len(data):
            return start, data
        if self.requested is not None and (arrived := self.requested.find(self.path, at)):
            return arrived
        # If a shard is a range of columns, the short gaps between its rows are read too.
        sequential = 0 <= at - start - len(data) < _MIN_REQUEST_BYTES
        least = _SEQUENTIAL_BYTES if sequential else _MIN_REQUEST_BYTES
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
        # A long range is used only once, so only its end is remembered.
        self._last_range = (at, data) if len(data) <= _SEQUENTIAL_BYTES else (end, b"")
        return at, data


_Ranges: TypeAlias = dict[str, list[tuple[int, int, int]]]
"""File -> (first byte, end, index of the response) of each range."""


class RangePrefetcher:
    """Requests ranges of files in a store before one thread reads them, in the same order.

    After an error of the iterator `stretches` no range is requested; the reader gets it, too.
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
        """Return (start, bytes) of a range that contains byte `start`; None if not requested."""
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
        """Stop requesting ranges."""
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


def _open_uncommitted(path: ObjectPath, num_bytes: int, *, overwrite: bool) -> Any:  # noqa: ANN401
    """Open a file of about this size for upload; it is visible after `commit`."""
    store = path.store
    if not store.async_impl:
        # These ignore `autocommit` outside of a transaction; this one is never completed.
        from fsspec.core import url_to_fs

        store = url_to_fs(str(path), skip_instance_cache=True)[0]
        store.start_transaction()
    part = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS))
    part += -part % (1 << 20)
    file = store.open(str(path), "wb" if overwrite else "xb", block_size=part, autocommit=False)
    # All users of a store share its transaction.
    store.transaction.files.remove(file)
    return file


@contextmanager
def _written(path: ObjectPath) -> Iterator[None]:
    with path.errors("written"):
        try:
            yield
        except FileExistsError:
            raise output_exists(path) from None


class _Uploads:
    """Uploads of the files of an output, one thread each, before they are committed."""

    def __init__(self, path: ObjectPath, output: Staging) -> None:
        self._path, self._output = path, output
        self._open: dict[str, Any] = {}
        self._num_bytes: dict[str, int] = {}
        self._made: list[ObjectPath] = []

    @contextmanager
    def file(self, name: str) -> Iterator[WriteAt]:
        """Yield a function that uploads a file from start to end."""
        path, end = self._at(name), 0
        with _written(path):
            file = self._open[name] = _open_uncommitted(
                path, self._output.files[name], overwrite=self._output.overwrite
            )

        def write(offset: int, data: bytes | memoryview) -> None:
            nonlocal end
            with _written(path):
                file.write(bytes(offset - end))
                file.write(data)
            end = offset + len(data)

        try:
            yield write
        finally:
            with _written(path):
                file.close()  # sends the rest
        self._num_bytes[name] = end

    def commit(self) -> None:
        """Make the files visible, the index last, and remove the files that they replace."""
        output, old = self._output, frozenset[str]()
        if output.directory and output.overwrite:
            with suppress(FileNotFoundError):
                old = frozenset(self._path.list())
        # Leftovers of killed runs are removed too.
        obsolete = output.replaced & old | {name for name in old if is_temporary(name)}
        # Old and new files side by side could be read as one checkpoint.
        if len(self._open) > 1 and not old.isdisjoint(self._open.keys() - {output.listing}):
            self._remove({name for name in obsolete if _is_list(name)} | old & self._open.keys())
        for name in sorted(self._open, key=lambda name: (name == output.listing, name)):
            self._commit(name)
        self._remove(obsolete - output.files.keys())

    def _commit(self, name: str) -> None:
        path, num_bytes = self._at(name), self._num_bytes[name]
        with _written(path):
            self._open[name].commit()
        del self._open[name]
        self._made.append(path)
        path.store.invalidate_cache(str(path.parent))
        entry = path.look()
        if entry is None or entry.num_bytes != num_bytes:
            raise CheckpointError(
                f"{path}: has {entry and entry.num_bytes} bytes in the store, but {num_bytes} were "
                "sent; another run has written there, or the store has lost some; write again"
            )

    def discard(self) -> None:
        """Discard the uploads, and remove files that are already visible."""
        for file in self._open.values():
            # The store deletes it later.
            with suppress(Exception):
                file.discard()
        with suppress(CheckpointError):
            self._remove(path.name for path in self._made)

    def _at(self, name: str) -> ObjectPath:
        return self._path / name if self._output.directory else self._path

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, the one that lists the others first."""
        for name in sorted(names, key=lambda name: (not _is_list(name), name)):
            self._at(name).unlink()


def _is_list(name: str) -> bool:
    """Return True for the name of a file that lists the others, such as an index."""
    return name.endswith((".json", ".metadata"))

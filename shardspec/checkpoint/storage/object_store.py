"""Storage in object stores, by URLs.

fsspec connects to the stores, with keys and endpoints from the environment or its own settings. It
is imported with the first URL.

An output is complete once all of it has arrived. A file with a new name is uploaded under that
name. If the name is taken, it is uploaded beside the old file, and in the end the store copies it
over that in one step.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from shardspec.checkpoint.storage.object_ranges import ObjectFile, RangePrefetcher
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
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PART_BYTES: Final = 8 << 20
_MAX_PARTS: Final = 9_000
"""S3 accepts 10,000 parts; a file of more than 72 GB is uploaded in larger parts."""
_IDENTITY_KEYS: Final = (
    *("name", "size", "ETag", "etag", "md5Hash", "checksum", "generation"),
    *("VersionId", "version_id"),
    *("LastModified", "last_modified", "mtime", "updated", "created", "mtimeMs"),
)
"""Facts of stores about an object that differ for other objects, and for later ones of its name."""
_FILES_AT_ONCE: Final = 8
"""Files in a store that are opened at once: each takes several requests in sequence."""


class ObjectPath(StoragePath):
    """A URL as a path, which can be joined and listed.

    >>> url = ObjectPath("s3://models/llama") / "model.safetensors"
    >>> print(url, url.parent, url.name)
    s3://models/llama/model.safetensors s3://models/llama model.safetensors
    """

    __slots__ = ()
    requests = whole_files = True
    nests = False
    # Built-in exceptions of fsspec's stores; the last for operations that a store lacks.
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
    def _threads_share(self) -> bool:
        """Whether threads share the store; otherwise each has its own connection."""
        return bool(self.store.async_impl)

    def _info(self) -> dict[str, Any] | None:
        """Return the store's facts about the object; None if there is none."""
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
                # It may have been written since the last request.
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
        """Return whether the name is in use; an empty object may mark a directory."""
        entry = self.look()
        return entry is not None and (entry.kind != "directory" or bool(self.list()))

    def open(self) -> SourceFile:
        """Open an object."""
        entry = self.look()
        if entry is None:
            raise CheckpointError(f"{self}: cannot be read: there is no such file")
        if entry.kind != "file":
            raise CheckpointError(f"{self}: is not a regular file")
        return ObjectFile(self, entry.num_bytes, self.store)

    def request(self, stretches: Iterable[FileStretch], max_bytes: int) -> Requested | None:
        """Prefetch stretches, if threads share the store."""
        return RangePrefetcher(self.store, stretches, max_bytes) if self._threads_share else None

    def files_ahead(self, local: int = 0) -> int:  # noqa: ARG002  # of this machine
        """Return how many files to open ahead of the one in use."""
        return _FILES_AT_ONCE - 1 if self._threads_share else 0

    def write(
        self,
        num_bytes: int,
        pieces: Iterable[bytes | memoryview],
        *,
        overwrite: bool,
        mode_of: str | None = None,  # noqa: ARG002  # files have none
    ) -> None:
        """Upload a file from pieces."""
        with upload(self, num_bytes, overwrite=overwrite) as append:
            for piece in pieces:
                append(piece)

    @contextmanager
    def stage(self, output: Staging) -> Iterator[Staged]:
        """Begin an output, which is complete at the end of the block."""
        names = frozenset[str]()
        if output.overwrite and output.directory:
            with suppress(FileNotFoundError):
                names = frozenset(self.list())
        elif output.overwrite and self.is_file():
            names = frozenset({self.name})
        taken = [name for name in output.files if name in names]
        # Old and new ones side by side could be taken for one checkpoint.
        mixed = output.directory and any(name != output.listing for name in taken)
        if mixed and output.listing is not None and output.listing not in taken:
            taken.append(output.listing)
        staged = _Uploads(self, output, taken)
        with staged.removed_on_failure():
            yield staged
            # Files to remove, besides those of the same names: also leftovers of killed runs.
            old = output.replaced & names | {name for name in names if is_temporary(name)}
            if mixed:
                in_the_way = {name for name in old if _is_list(name)} | names & output.files.keys()
                staged.remove(in_the_way)
                staged.made.extend(map(staged.final, taken))
            for name in taken:
                staged.move(name)
            if output.directory:
                staged.remove(old - output.files.keys())

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
def kept_store(root: str, pid: int) -> "AbstractFileSystem | None":  # noqa: ARG001  # a fork has its own
    """Return fsspec's store for a scheme and bucket, if threads can share it.

    fsspec up to 2026.4 makes a store for each thread, which would connect again.
    """
    from fsspec.core import url_to_fs

    store = url_to_fs(root)[0]
    return store if store.async_impl else None


@contextmanager
def _written(path: ObjectPath) -> Iterator[None]:
    with path.errors("written"):
        try:
            yield
        except FileExistsError:
            raise output_exists(path) from None


@contextmanager
def upload(
    path: ObjectPath, num_bytes: int, *, overwrite: bool
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
        with _written(path):
            mode = "wb" if overwrite else "xb"
            file = store.open(str(path), mode, block_size=part, autocommit=False)
            transaction.files.append(file)

        def write(data: bytes | memoryview) -> None:
            with _written(path):
                file.write(data)

        try:
            yield write
        finally:
            with _written(path):
                file.close()  # sends the rest; the file appears with the commit
    except BaseException:
        transaction.complete(commit=False)
        raise
    else:
        with _written(path):
            transaction.complete(commit=True)
    finally:
        store.invalidate_cache(str(path.parent))


class _Uploads:
    """An output of uploaded files, each by one thread."""

    def __init__(self, path: ObjectPath, output: Staging, taken: Sequence[str]) -> None:
        self._path, self._output, self._taken = path, output, taken
        self._mark = os.urandom(8).hex()
        """In the names of files that are uploaded beside older ones."""
        self.made: list[ObjectPath] = []
        """The files uploaded so far; removed on failure."""

    @contextmanager
    def file(self, name: str) -> Iterator[WriteAt]:
        """Upload a file from start to end; it exists at the end of the block."""
        place, end = self._uploaded_as(name), 0
        with upload(place, self._output.files[name], overwrite=self._output.overwrite) as append:

            def write(offset: int, data: bytes | memoryview) -> None:
                nonlocal end
                append(bytes(offset - end))
                append(data)
                end = offset + len(data)

            yield write
        self.made.append(place)
        with place.open() as file:
            if file.num_bytes != end:
                raise CheckpointError(
                    f"{place}: has {file.num_bytes} bytes in the store, but {end} were sent; "
                    "another run has written there, or the store has lost some; write again"
                )

    def final(self, name: str) -> ObjectPath:
        """Return the final path of a file."""
        return self._path / name if self._output.directory else self._path

    def _uploaded_as(self, name: str) -> ObjectPath:
        final = self.final(name)
        if name not in self._taken:
            return final
        return final.with_name(f".{final.name}.{self._mark}.shardspec-tmp")

    def move(self, name: str) -> None:
        """Move a file to its final path; the store copies it in one step."""
        source, target = self._uploaded_as(name), self.final(name)
        with target.errors("replaced"):
            target.store.cp_file(str(source), str(target))
        target.store.invalidate_cache(str(target.parent))
        # A copy that cannot be removed only takes room.
        with suppress(CheckpointError):
            source.unlink()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, first those that list others."""
        for name in sorted(names, key=lambda name: (not _is_list(name), name)):
            self.final(name).unlink()

    @contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """Remove what was uploaded if the block fails."""
        try:
            yield
        except BaseException:
            for file in self.made:
                with suppress(CheckpointError):
                    file.unlink()
            raise


def _is_list(name: str) -> bool:
    """Return whether a file lists the others, which are useless without it."""
    return name.endswith((".json", ".metadata"))

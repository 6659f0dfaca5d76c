"""Paths of checkpoints, on this machine or behind URLs: listed, identified and uploaded.

A URL such as ``s3://bucket/model`` is a `RemotePath`. fsspec reaches what lies behind it; it knows
the stores, and takes keys and endpoints from the environment or its own settings. It is imported
when the first URL is given.
"""

import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

from shardspec.errors import CheckpointError, OutputExistsError, ShardSpecError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_MAX_ERROR_CHARS: Final = 300
_PART_BYTES: Final = 8 << 20
_MAX_PARTS: Final = 9_000
"""S3 takes 10,000 parts; a file of more than 72 GB is uploaded in larger ones."""
_IDENTITY_KEYS: Final = (
    *("size", "ETag", "etag", "md5Hash", "checksum", "generation", "VersionId", "version_id"),
    *("LastModified", "last_modified", "mtime", "updated", "created", "mtimeMs"),
)
"""What stores say of an object that tells it from one written later under its name."""
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


def output_exists(path: Path) -> OutputExistsError:
    """Return the error for an output that exists already."""
    return OutputExistsError(
        f"{path}: exists; choose another name, or overwrite it with --force (overwrite=True)"
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


def file_inside(directory: Path, name: str, stated_by: Path) -> Path:
    """Return the path of a file that a checkpoint names, which must be in its directory.

    It may be a link inside the directory, or from the ``snapshots`` of a hub cache to its
    ``blobs``.
    """
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(
            f"{stated_by}: file name {name!r} is not a plain name; files of a checkpoint are in "
            "its own directory"
        )
    path = directory / name
    if isinstance(path, RemotePath) or not os.path.islink(path):
        return path
    # Not Path.resolve, which raises where links lead in a circle.
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if real.parent != home and not cached:
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
        files = tuple(files)
        if isinstance(self.place, RemotePath):
            now = _identities(self.place, self.nested)
        else:
            now = {path: at[0] for path in files if (at := _identity(path)) is not None}
        for path in files:
            if path not in now or now[path] != self.files.get(path):
                done = "changed" if path in now else "was removed"
                raise CheckpointError(
                    f"{path}: {done} while it was read, so that what was read may be a mixture of "
                    "two saves; run again when nobody writes it"
                )


def _identities(place: Path, nested: bool) -> dict[Path, FileIdentity]:
    """Return the identities of the files in a directory; a file stands for itself."""
    found: dict[Path, FileIdentity] = {}
    for path, identity, is_directory in _listed(place):
        if not is_directory:
            found[path] = identity
        elif nested:
            found |= _identities(path, nested=True)
    return found


def _listed(place: Path) -> Iterator[tuple[Path, FileIdentity, bool]]:
    """Yield what is in a directory, and whether it is a directory too."""
    if isinstance(place, RemotePath):
        infos: dict[Path, dict[str, Any]] = {}
        try:
            infos = {place / name: info for name, info in place.listing().items()}
        except NotADirectoryError:
            place.store.invalidate_cache(str(place.parent))
            infos = {place: place.info() or {}}
        except FileNotFoundError:
            pass
        for path, info in infos.items():
            identity = tuple((key, str(info[key])) for key in _IDENTITY_KEYS if key in info)
            yield path, identity, info.get("type") != "file"
        return
    paths: list[Path] = []
    try:
        paths = [place / name for name in os.listdir(place)]
    except NotADirectoryError:
        paths = [place]
    except OSError:  # the reader of the checkpoint reports it
        pass
    for path in paths:
        if (at := _identity(path)) is not None:
            yield path, *at


def _identity(path: Path) -> tuple[FileIdentity, bool] | None:
    """Return the identity of a file of this machine, and whether it is a directory."""
    try:
        at = os.stat(path)
    except OSError:
        return None
    return (at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns), stat.S_ISDIR(at.st_mode)

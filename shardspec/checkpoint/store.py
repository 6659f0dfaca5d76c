"""Files of checkpoints, on this machine or behind URLs: listed, identified, named and uploaded.

A URL such as ``s3://bucket/model`` is a `RemotePath`. What lies behind it is reached through
fsspec, which knows the stores and takes keys and endpoints from the environment or its own
settings. It is imported when the first URL is given.
"""

import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

from shardspec.checkpoint.directories import exists
from shardspec.errors import CheckpointError, ShardSpecError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_LONGEST: Final = 300
"""Most characters of what a store says about an error."""
_PART_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 9_000
"""S3 takes 10,000 parts; a file of more than 72 GB comes in larger ones."""
_IDENTITY_KEYS: Final = (
    *("size", "ETag", "etag", "md5Hash", "checksum", "generation", "VersionId", "version_id"),
    *("LastModified", "last_modified", "mtime", "updated", "created", "mtimeMs"),
)
"""What stores say of an object that tells it from one written later under its name."""

FileIdentity: TypeAlias = tuple[object, ...]
"""What differs once a file was written again: device, inode, size and time of modification; of an
object in a store its size, ETag and times."""


class RemotePath(PosixPath):
    """A URL as a path: joined, listed and looked at like one.

    It leads to no file of this machine. What would take it for one, as `os.stat` and the methods of
    `Path` that are not defined here would, gets a TypeError.

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
        raise TypeError(f"{self} is no file of this machine")

    @property
    def store(self) -> "AbstractFileSystem":
        """The file system of fsspec; kept for the next time, by fsspec or for all threads."""
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
                f"{self}: {scheme}:// needs a package that is not there: {error}"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{self}: {error}; URLs start with s3://, gs:// or another name that fsspec knows"
            ) from None

    @property
    def shared_store(self) -> bool:
        """Whether threads share its store; of other kinds each has one, and connects by itself."""
        return bool(self.store.async_impl)

    def info(self) -> dict[str, Any] | None:
        """Return what the store knows of it; None if there is nothing."""
        store = self.store
        with store_errors(self, "read"):
            for _ in range(2):
                try:
                    found: dict[str, Any] = store.info(str(self))
                except FileNotFoundError as error:
                    # Not only the file is missing, but the bucket.
                    if "bucket" in str(error).lower().split():
                        raise
                else:
                    return found
                # Perhaps it has been written since the store was last asked.
                store.invalidate_cache(str(self.parent))
        return None

    def listing(self) -> dict[str, dict[str, Any]]:
        """Return the names in a directory, and what the store knows of each.

        Raises FileNotFoundError or NotADirectoryError if there is no directory of that name.
        """
        store, own = self.store, str(self)
        store.invalidate_cache(own)
        info = self.info()
        if info is None:
            raise FileNotFoundError(own)
        if info["type"] == "file":
            raise NotADirectoryError(own)
        with store_errors(self, "read"):
            found = store.ls(own, detail=True)
        entries = {entry["name"].rstrip("/"): entry for entry in found}
        # Some tools mark a directory by an empty object of its name.
        entries.pop(info["name"].rstrip("/"), None)
        return {name.rpartition("/")[2]: entry for name, entry in entries.items()}

    def entries(self) -> dict[str, bool]:
        """Return the names in a directory, and whether each is a file; raises as `listing`."""
        return {name: entry["type"] == "file" for name, entry in self.listing().items()}

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield what lies in a directory; raises as `listing`."""
        for name in self.listing():
            yield self / name

    def exists(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002  # named by pathlib
        """Return whether there is a file or a directory of that name."""
        return self.info() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002  # named by pathlib
        """Return whether there is a directory of that name."""
        return (self.info() or {}).get("type") == "directory"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002  # named by pathlib
        """Return whether there is a file of that name."""
        return (self.info() or {}).get("type") == "file"

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
        """Return the size of a file."""
        info = self.info()
        if info is None:
            raise CheckpointError(f"{self}: cannot be read: there is no such file")
        if info["type"] != "file" or info["size"] is None:
            raise CheckpointError(f"{self}: is not a regular file")
        return int(info["size"])

    def replace(self, target: "RemotePath") -> "RemotePath":  # type: ignore[override]  # Path takes names on the disk
        """Give a file another name, in place of any of that name; return the new name.

        The store copies it in one step. What has the other name is the old file or the new one.
        """
        store = self.store
        with store_errors(target, "replaced"):
            store.cp_file(str(self), str(target))
        store.invalidate_cache(str(target.parent))
        # It has its name: what is left of the other takes room and does no harm.
        with suppress(CheckpointError):
            self.unlink(missing_ok=True)
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        store = self.store
        with store_errors(self, "removed"):
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
        raise CheckpointError(f"a {type(place).__name__} is no path; give text or a Path")
    if not place:
        raise CheckpointError("an empty text is no path; '.' is the working directory")
    scheme, mark, rest = place.partition("://")
    if not mark or _SCHEME.fullmatch(scheme) is None:
        return Path(place)
    return Path(rest) if scheme in ("file", "local") else RemotePath(place)


@lru_cache(maxsize=16)
def kept_store(root: str, pid: int) -> "AbstractFileSystem | None":  # noqa: ARG001  # a fork has its own
    """Return what fsspec makes of scheme and bucket, if it is made for many threads.

    fsspec itself keeps one for each thread, up to its version 2026.4, and each would connect again.
    """
    from fsspec.core import url_to_fs

    store = url_to_fs(root)[0]
    return store if store.async_impl else None


@contextmanager
def store_errors(path: Path, done: str) -> Iterator[None]:
    """Make a `CheckpointError` of what a store raises: that a path "cannot be <done>", and why.

    Stores raise errors of the system and errors of their own libraries, which are not known here.
    What Python raises for a mistake in a program, such as a TypeError, stays what it is.
    """
    try:
        yield
    except ShardSpecError:
        raise
    except Exception as error:
        if isinstance(error, FileExistsError) and done == "written":
            raise exists(path) from None
        # Stores have errors of their packages, or raise these; any other is a fault of ours.
        foreign = type(error).__module__ != "builtins"
        if not foreign and not isinstance(error, OSError | ValueError | NotImplementedError):
            raise
        raise CheckpointError(f"{path}: cannot be {done}: {_text(error)}") from None


_MEANINGS: Final = (
    (FileNotFoundError, "there is no such file"),
    (PermissionError, "access was denied"),
    (IsADirectoryError, "it is a directory"),
    (NotADirectoryError, "it is no directory"),
)


def _text(error: Exception) -> str:
    """Return what a store says, in one line; some say no more than the path."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(said.split())
    if " " not in text:
        meaning = next((m for kind, m in _MEANINGS if isinstance(error, kind)), None)
        name = type(error).__name__
        text = meaning or (f"{name}: {text}" if text else name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def reason(error: OSError) -> str:
    """Return why the system refused, without its number and file name."""
    return error.strerror or str(error)


@contextmanager
def system_errors(path: Path, done: str, more: str = "") -> Iterator[None]:
    """Make a `CheckpointError` of what the system refuses; as `store_errors` for this machine."""
    try:
        yield
    except CheckpointError:  # one of an output that exists is an OSError too
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be {done}: {reason(error)}{more}") from None


def path_exists(path: Path) -> bool:
    """Return whether something has this name, here or in a store."""
    # Path.exists raises where a name is too long.
    return path.exists() if isinstance(path, RemotePath) else os.path.exists(path)


def file_inside(directory: Path, name: str, stated_by: Path) -> Path:
    """Return the path of a file that a checkpoint names, which must lie in its directory.

    It may be a link inside the directory, or from the ``snapshots`` of a hub cache to its
    ``blobs``.
    """
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(
            f"{stated_by}: file name {name!r} is not a plain name; files of a checkpoint lie in "
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
    """Write a file in a store, of this size as far as is known, by what is yielded.

    It appears at the end of the block unless anything is raised: an `OutputExistsError` in the end
    if there is such a file and `overwrite` is not set.
    """
    from fsspec.transaction import Transaction

    store = path.store
    part = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))
    part += -part % (1 << 20)
    # One of its own: stores that threads share have one for all files.
    transaction = Transaction(store)
    if not store.async_impl:
        # Some of these look for a transaction only.
        transaction.start()
    ended = False
    try:
        with store_errors(path, "written"):
            mode = "wb" if overwrite else "xb"
            file = store.open(str(path), mode, block_size=part, autocommit=False)
            transaction.files.append(file)

        def write(data: bytes | memoryview) -> None:
            with store_errors(path, "written"):
                file.write(data)

        try:
            yield write
        finally:
            with store_errors(path, "written"):
                # Sends what is left; in a transaction the file is not there yet.
                file.close()
        ended = True
        with store_errors(path, "written"):
            transaction.complete(commit=True)
    except BaseException:
        if not ended:
            transaction.complete(commit=False)
        raise
    finally:
        store.invalidate_cache(str(path.parent))


class Snapshot(NamedTuple):
    """Which files were at a place at some moment; taken before a checkpoint is opened.

    Whoever has read it asks `check_unchanged`: files written meanwhile may have been read half as
    they were and half as they are.
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
        """Check that files are still those that they were."""
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
    """Return what tells the files at a place from those written later under their names."""
    found: dict[Path, FileIdentity] = {}
    for path, (identity, is_directory) in _entries(place).items():
        if not is_directory:
            found[path] = identity
        elif nested:
            found |= _identities(path, nested=True)
    return found


def _entries(place: Path) -> dict[Path, tuple[FileIdentity, bool]]:
    """Return what lies in a directory, and what is a directory; a file is all that is in it."""
    if isinstance(place, RemotePath):
        try:
            infos: dict[Path, dict[str, Any]] = {place / n: i for n, i in place.listing().items()}
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            place.store.invalidate_cache(str(place.parent))
            infos = {place: place.info() or {}}
        return {
            path: (
                tuple((key, str(info[key])) for key in _IDENTITY_KEYS if key in info),
                info.get("type") != "file",
            )
            for path, info in infos.items()
        }
    try:
        paths = [place / name for name in os.listdir(place)]
    except NotADirectoryError:
        paths = [place]
    except OSError:  # who reads it says why it cannot be
        return {}
    return {path: at for path in paths if (at := _identity(path)) is not None}


def _identity(path: Path) -> tuple[FileIdentity, bool] | None:
    """Return what tells a file of this machine from a later one, and whether it is a directory."""
    try:
        at = os.stat(path)
    except OSError:
        return None
    return (at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns), stat.S_ISDIR(at.st_mode)

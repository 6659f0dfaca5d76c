"""Checkpoints in object stores: paths that are URLs, such as ``s3://bucket/model``.

What lies behind a URL is reached through fsspec, which knows the stores and, from the environment
or its own files of settings, keys and endpoints. It is imported when the first URL is given.
"""

import os
import re
from collections.abc import Generator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PosixPath
from types import TracebackType
from typing import Any, Final, Protocol, Self

from shardspec.errors import CheckpointError, ShardSpecError

__all__ = ["RemotePath", "Store", "StoreErrors", "as_path", "kept_store"]

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
                f"{self}: URLs need fsspec: pip install 'shardspec[remote]'"
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

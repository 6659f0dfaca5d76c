"""Defines paths with methods that list, read, write and replace files, on disks or in stores.

`StoragePath` is a `pathlib.PurePosixPath` with these methods. `local` has the subclass for disks,
and `object_store` the one for URLs; `storage_path` chooses between them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePath, PurePosixPath
from typing import ClassVar, Final, Literal, NamedTuple, Protocol, Self, TypeAlias

from shardspec.errors import CheckpointError, OutputExistsError, ShardSpecError
from shardspec.text import Argument

_TEMPORARY: Final = re.compile(r"\.shardspec-save-[0-9a-f]{16}\.tmp|\..*\.shardspec-tmp", re.DOTALL)
_MAX_ERROR_CHARS: Final = 300

Identity: TypeAlias = tuple[object, ...]
"""A value that changes when a file is written again: device, inode, size and modification time; for
an object in a store its name, size, ETag and times."""
WriteAt: TypeAlias = Callable[[int, bytes | memoryview], object]
"""Writes bytes at a position in a file."""


class Entry(NamedTuple):
    """A file or directory in a storage."""

    kind: Literal["file", "directory", "other"]
    num_bytes: int
    identity: Identity
    """A value that changes when the file is written again."""


class FileStretch(NamedTuple):
    """A range of bytes of a file."""

    path: "StoragePath"
    start: int
    num_bytes: int


class Requested(Protocol):
    """Ranges of files that are requested before they are read."""

    def find(self, path: "StoragePath", start: int) -> tuple[int, bytes] | None:
        """Return (start, bytes) of a range that contains byte `start`; None if not requested."""

    def close(self) -> None:
        """Stop requesting ranges."""


class SourceFile(ABC):
    """A regular file that is open for reading at any position."""

    __slots__ = ("num_bytes", "path", "requested")

    def __init__(self, path: "StoragePath", num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self.requested: Requested | None = None
        """Ranges requested ahead; None if there are none."""

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes from a position in the file."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes from a position in the file; for headers and other small reads."""
        self.read_into(memoryview(data := bytearray(num_bytes)), offset)
        return bytes(data)

    def cut_short(self, end: int, needed: int) -> CheckpointError:
        """Return the error for a file that ends before `needed` bytes."""
        return CheckpointError(
            f"{self.path}: ends at byte {end}, but bytes up to {needed} are needed; it was cut "
            "short while being read"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Staging(NamedTuple):
    """An output to write: one file, or a directory of files."""

    files: Mapping[str, int]
    """Name relative to the output -> approximate size in bytes."""
    directory: bool
    overwrite: bool
    listing: str | None = None
    """The file that lists the others; it is written last."""
    replaced: frozenset[str] = frozenset()
    """Names of files that may be replaced; a directory with another file is not replaced."""
    identity: Identity | None = None
    """Identity of the directory to replace, empty if there is none; None to skip the check."""


class Staged(Protocol):
    """An output that is being written under a temporary name."""

    def file(self, name: str) -> AbstractContextManager[WriteAt]:
        """Yield a function that writes to a file, from start to end if `whole_files` is set."""


class StoragePath(PurePosixPath, ABC):
    """The path of a file or directory in a storage, which need not exist."""

    __slots__ = ()

    requests: ClassVar[bool]
    """True if each `look` is a request to another machine."""
    whole_files: ClassVar[bool]
    """True if each file of an output is written from start to end by one thread."""
    nests: ClassVar[bool]
    """True if an output may have files in subdirectories."""
    _refusals: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Built-in exceptions by which the storage refuses an operation."""

    # --- looking

    @abstractmethod
    def look(self, *, follow_links: bool = True) -> Entry | None:
        """Return the file or directory of this name; None if there is none. May raise OSError."""

    @abstractmethod
    def list(self) -> dict[str, Entry]:
        """Return the entries of a directory by name.

        Raises FileNotFoundError or NotADirectoryError if there is no directory of this name.
        """

    def names(self) -> Sequence[str]:
        """Return the names in a directory in ascending order; raises as `list`."""
        return sorted(self.list())

    @abstractmethod
    def names_below(self) -> Iterator[str]:
        """Yield the relative names of all files in a directory; those of directories end in /."""

    def exists(self) -> bool:
        """Return True if a file or directory has this name."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Return True if a directory has this name."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Return True if a regular file has this name."""
        return self._kind() == "file"

    def _kind(self) -> str | None:
        try:
            entry = self.look()
        except (OSError, ValueError):
            return None
        return entry and entry.kind

    def taken(self) -> bool:
        """Return True if the name is in use, even by a broken link."""
        return self.exists()

    def absolute(self) -> Self:
        """Return a path that does not depend on the working directory."""
        return self

    def resolved(self) -> Self:
        """Return the path with links resolved."""
        return self

    def leads_outside(self) -> "StoragePath | None":
        """Return the target of this path if it is a link that may not be followed, else None."""
        return None

    def public(self) -> PurePath:
        """Return the path to give to users: a `Path` if it is on this machine."""
        return self

    # --- reading

    @abstractmethod
    def open(self) -> SourceFile:
        """Open a regular file; raises `CheckpointError` for anything else."""

    def request(self, stretches: Iterable[FileStretch], max_bytes: int) -> Requested | None:  # noqa: ARG002
        """Start to read ranges of files in this directory ahead; None if the storage cannot."""
        return None

    def files_ahead(self, local: int = 0) -> int:
        """Return the number of files to open in advance; `local` of them on this machine."""
        return local

    # --- writing

    @abstractmethod
    def write(
        self,
        num_bytes: int,
        pieces: Iterable[bytes | memoryview],
        *,
        overwrite: bool,
        mode_of: str | None = None,
    ) -> None:
        """Write a file from pieces, which appears once it is complete and flushed.

        Its mode and owner are those of the replaced file, or of its neighbor `mode_of`, if the
        storage has these. After an exception, such as `OutputExistsError`, there is no new file.
        """

    @abstractmethod
    def stage(self, output: Staging) -> AbstractContextManager[Staged]:
        """Begin an output of this name, which appears at the end of the block.

        If an exception is raised, the output is removed, and an older one is kept.
        """

    def output(self) -> Self:
        """Return the path that an output of this name is written to, with links resolved.

        Raises `CheckpointError` if the name is a link of another user.
        """
        return self

    def refusal(self) -> str:
        """Return the reason why no file can be created here; empty if one can."""
        return ""

    def make_directory(self) -> None:  # stores make it with the first file
        """Make the directory and its parents if they do not exist."""

    @contextmanager
    def locked(self) -> Iterator[bool | None]:
        """Lock the directory; yields False if another run has the lock, None without locks."""
        yield None

    @abstractmethod
    def unlink(self) -> None:
        """Remove the file if it exists."""

    @contextmanager
    def errors(self, verb: str, more: str = "") -> Iterator[None]:
        """Convert errors of the storage into a `CheckpointError`: "PATH: cannot be VERB: ...".

        Exceptions that mean a bug, such as TypeError, are not converted.
        """
        try:
            yield
        except ShardSpecError:
            raise
        except Exception as error:  # clients of stores raise errors of their own
            if type(error).__module__ == "builtins" and not isinstance(error, self._refusals):
                raise
            raise CheckpointError(f"{self}: cannot be {verb}: {_text(error)}{more}") from None


def file_inside(
    directory: StoragePath, name: str, listed_by: StoragePath, *, weights: bool = False
) -> StoragePath:
    """Return the path of a file that a checkpoint lists, which must be in its directory.

    The file may be a link to a file in the directory, to a file of the same name, or, in a hub
    cache, to one of the ``blobs``. Files of `weights` may also be in subdirectories, and be links
    to any file. Raises `CheckpointError` for other names and links.
    """
    parts = name.split("/") if weights else [name]
    if any(part in ("", ".", "..") or any(c in part for c in "/\\\0") for part in parts):
        raise CheckpointError(
            f"{listed_by}: file name {name!r} is not a plain name; files of a checkpoint are in "
            "its own directory"
        )
    path = directory / name
    if not weights and (real := path.leads_outside()) is not None:
        raise CheckpointError(
            f"{listed_by}: file {name!r} is a link to {real}, outside the checkpoint; "
            "put the file itself into the directory"
        )
    return path


def output_exists(path: PurePath) -> OutputExistsError:
    """Return the error for an output that exists already."""
    return OutputExistsError(
        f"{path}: exists; choose another name, or overwrite it with ",
        Argument("overwrite", value=True),
    )


def output_replaced(path: PurePath) -> CheckpointError:
    """Return the error for an output that another run has replaced during this one."""
    return CheckpointError(
        f"{path}: another run replaced it during this run; run again to replace the new one"
    )


def check_new_file(path: StoragePath, *, overwrite: bool) -> None:
    """Raise a `CheckpointError` if a file of this name cannot be written."""
    if path.taken() and not overwrite:
        raise output_exists(path)
    if problem := "it is a directory; name a file" if path.is_dir() else path.refusal():
        raise CheckpointError(f"{path}: this file cannot be written: {problem}")


def is_temporary(name: str) -> bool:
    """Return True for names of temporary files, which only killed runs leave.

    >>> is_temporary(f".shardspec-save-{'0' * 16}.tmp"), is_temporary("model.safetensors")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def reason(error: OSError) -> str:
    """Return the system's reason for an error, without number and file name."""
    return error.strerror or str(error)


def _text(error: Exception) -> str:
    """Return an error message in one line, with its class if the message is a single word."""
    text = " ".join((reason(error) if isinstance(error, OSError) else str(error)).split())
    if " " not in text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"

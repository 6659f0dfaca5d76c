"""What checkpoints ask of a storage: the files of a place are listed, read, written and replaced.

A `StoragePath` is the path of a file or directory that knows its storage. Its text, parts, parents
and ``/`` are those of `pathlib.PurePosixPath`. A storage is one module with a subclass: `local`, or
`object_store`; `storage_path` chooses it by how a user names the place.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePath, PurePosixPath
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, Self, TypeAlias

from shardspec.errors import CheckpointError, OutputExistsError, ShardSpecError
from shardspec.text import Argument

_TEMPORARY: Final = re.compile(r"\.shardspec-save-[0-9a-f]{16}\.tmp|\..*\.shardspec-tmp", re.DOTALL)
_MAX_ERROR_CHARS: Final = 300

Identity: TypeAlias = tuple[object, ...]
"""What changes when a file is written again: device, inode, size and time of modification; for an
object in a store its name, size, ETag and times."""
WriteAt: TypeAlias = Callable[[int, bytes | memoryview], object]
"""Writes bytes at a position in a file."""


class Entry(NamedTuple):
    """What has a name in a storage."""

    kind: Literal["file", "directory", "other"]
    num_bytes: int
    identity: Identity
    """Files of which `list`, or `look`, returns the same one are the same file."""


class FileStretch(NamedTuple):
    """Bytes of a file."""

    path: "StoragePath"
    start: int
    num_bytes: int


class Requested(Protocol):
    """Stretches that were requested before they are read."""

    def find(self, path: "StoragePath", start: int) -> tuple[int, bytes] | None:
        """Return where the range that holds a byte starts, and its bytes; None if there is none."""

    def close(self) -> None:
        """Make no more requests."""


class SourceFile(ABC):
    """A regular file that is open for reading at any position."""

    __slots__ = ("num_bytes", "path", "requested")

    def __init__(self, path: "StoragePath", num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self.requested: Requested | None = None
        """Where bytes are looked for first."""

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes from a position in the file."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes from a position in the file; for headers and other small things."""
        self.read_into(memoryview(data := bytearray(num_bytes)), offset)
        return bytes(data)

    def cut_short(self, end: int, needed: int) -> CheckpointError:
        """Return the error for a file that ends before the bytes that are needed."""
        return CheckpointError(
            f"{self.path}: ends at byte {end}, but bytes up to {needed} are needed; it was cut "
            "short while being read"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Staging(NamedTuple):
    """An output that is to be written: one file, or a directory of files."""

    files: Mapping[str, int]
    """Names relative to the output, and about how many bytes each gets."""
    directory: bool
    overwrite: bool
    listing: str | None = None
    """The file that lists the others; it is written last."""
    replaced: frozenset[str] = frozenset()
    """All files in a directory that is replaced; with others, it is kept."""
    identity: Identity | None = None
    """That of the directory to replace, empty if there is none; None if it is not known."""


class Staged(Protocol):
    """An output that is being written and has no name yet."""

    published: bool
    """Set in a process that has joined, once the first one may have given it its name."""

    @property
    def token(self) -> Any:  # noqa: ANN401  # each storage has its own
        """What other processes join it by."""

    def file(self, name: str) -> AbstractContextManager[WriteAt]:
        """Write a file, from start to end where `StoragePath.whole_files` says so."""


class StoragePath(PurePosixPath, ABC):
    """The path of a file or directory in a storage; there need not be any."""

    __slots__ = ()

    requests: ClassVar[bool]
    """Whether each look is a request to another machine."""
    whole_files: ClassVar[bool]
    """Whether an output's files are written from start to end, each by one thread."""
    nests: ClassVar[bool]
    """Whether an output may have files in directories below."""
    _refusals: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Errors of Python's that mean that the storage refuses."""

    # --- looking

    @abstractmethod
    def look(self, *, follow_links: bool = True) -> Entry | None:
        """Return what has this name; None if there is nothing. May raise an OSError."""

    @abstractmethod
    def list(self) -> dict[str, Entry]:
        """Return what is in a directory, by name.

        Raises FileNotFoundError or NotADirectoryError if there is no directory of that name.
        """

    def names(self) -> Sequence[str]:
        """Return the names in a directory in ascending order; raises as `list`."""
        return sorted(self.list())

    @abstractmethod
    def names_below(self) -> Iterator[str]:
        """Yield the relative names of all files in a directory; those of directories end in /."""

    def exists(self) -> bool:
        """Return whether there is something of that name."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Return whether there is a directory of that name."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Return whether there is a file of that name."""
        return self._kind() == "file"

    def _kind(self) -> str | None:
        try:
            entry = self.look()
        except (OSError, ValueError):
            return None
        return entry and entry.kind

    def taken(self) -> bool:
        """Return whether the name is in use, be it by a link that leads nowhere."""
        return self.exists()

    def absolute(self) -> Self:
        """Return the place by a name that does not depend on the working directory."""
        return self

    def resolved(self) -> Self:
        """Return the place with links resolved."""
        return self

    def leads_outside(self) -> "StoragePath | None":
        """Return where a file of a checkpoint leads if it is a link that may not be followed."""
        return None

    def public(self) -> PurePath:
        """Return the place as users get it: a `Path` if it is on this machine."""
        return self

    # --- reading

    @abstractmethod
    def open(self) -> SourceFile:
        """Open a regular file; `CheckpointError` if it is none."""

    def request(self, stretches: Iterable[FileStretch], max_bytes: int) -> Requested | None:  # noqa: ARG002
        """Request stretches of files in this directory ahead of reading, where that helps."""
        return None

    def files_ahead(self, here: int = 0) -> int:
        """Return how many files to open ahead of the one in use; `here` for this machine's."""
        return here

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
        """Write a file of some pieces, which appears when it is complete and will last.

        It gets mode and owner of the file that it replaces, or of the one beside it that `mode_of`
        names, where files have them. If an exception is raised, such as an `OutputExistsError`,
        nothing of it stays.
        """

    @abstractmethod
    def stage(self, output: Staging) -> AbstractContextManager[Staged]:
        """Begin an output here, which appears at the end of the block.

        If an exception is raised, what was written is removed, and what was there is kept.
        """

    @abstractmethod
    def join(self, output: Staging, token: Any) -> AbstractContextManager[Staged]:  # noqa: ANN401
        """Open what another process of the same user has staged here."""

    def output(self) -> Self:
        """Return the place that an output of this name is written to, links resolved.

        Raises a `CheckpointError` if following the name would trust another user.
        """
        return self

    def refusal(self) -> str:
        """Return why nothing can be made here, such as a missing directory; empty if it can."""
        return ""

    @property
    def shared(self) -> bool:
        """Whether other processes see what is written."""
        return True

    def make_directory(self) -> None:  # stores make it with the first file
        """Make a directory, and those above it, if it is not there."""

    @contextmanager
    def locked(self) -> Iterator[bool | None]:
        """Lock a directory; yields False if another run has it, None where there are no locks."""
        yield None

    @abstractmethod
    def unlink(self) -> None:
        """Remove a file; it is no error if there is none."""

    @contextmanager
    def errors(self, done: str, more: str = "") -> Iterator[None]:
        """Turn errors of the storage into a `CheckpointError`: what cannot be <done>.

        Stores also raise errors of their own libraries, which are not known here. Errors that
        Python raises for bugs, such as a TypeError, are not converted.
        """
        try:
            yield
        except ShardSpecError:
            raise
        except Exception as error:  # of a store's library, whose errors have no common class
            if type(error).__module__ == "builtins" and not isinstance(error, self._refusals):
                raise
            raise CheckpointError(f"{self}: cannot be {done}: {_text(error)}{more}") from None


def file_inside(
    directory: StoragePath, name: str, stated_by: StoragePath, *, weights: bool = False
) -> StoragePath:
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
    if not weights and (real := path.leads_outside()) is not None:
        raise CheckpointError(
            f"{stated_by}: file {name!r} is a link to {real}, outside the checkpoint; "
            "put the file itself into the directory"
        )
    return path


def output_exists(path: PurePath) -> OutputExistsError:
    """Return the error for an output that exists already."""
    return OutputExistsError(
        f"{path}: exists; choose another name, or overwrite it with ",
        Argument("overwrite", value=True),
    )


def check_new_file(path: StoragePath, *, overwrite: bool) -> None:
    """Raise a `CheckpointError` if a file of this name cannot be written."""
    if path.taken() and not overwrite:
        raise output_exists(path)
    if problem := "is a directory; name a file" if path.is_dir() else path.refusal():
        raise CheckpointError(f"{path}: {problem}")


def is_temporary(name: str) -> bool:
    """Return whether a file has a name that only runs that were killed leave."""
    return _TEMPORARY.fullmatch(name) is not None


def reason(error: OSError) -> str:
    """Return why the system refused, without its number and file name."""
    return error.strerror or str(error)


def _text(error: Exception) -> str:
    """Return an error message in one line, with its class where it says no more than the path."""
    text = " ".join((reason(error) if isinstance(error, OSError) else str(error)).split())
    if " " not in text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"

"""Reads, writes and replaces files on this machine's disks."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from shardspec.checkpoint.storage import commit, system_calls
from shardspec.checkpoint.storage.path import (
    Entry,
    SourceFile,
    StoragePath,
    reason,
)
from shardspec.errors import CheckpointError
from shardspec.input_files import open_regular


class LocalFile(SourceFile):
    """An open file on this machine."""

    __slots__ = ("_fd",)

    def __init__(self, path: StoragePath) -> None:
        self._fd = open_regular(path, CheckpointError)
        super().__init__(path, os.fstat(self._fd).st_size)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes from a position in the file."""
        # Called so often that a context manager would be too slow.
        try:
            missing = system_calls.read_fully(self._fd, buffer, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {reason(error)}") from None
        if missing:
            end = offset + len(buffer)
            raise self.cut_short(end - missing, end)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class LocalPath(StoragePath):
    """A path on this machine.

    >>> LocalPath("/dev/null").look().kind
    'other'
    """

    __slots__ = ()
    requests = whole_files = False
    nests = True

    def look(self, *, follow_links: bool = True) -> Entry | None:
        """Return the file or directory of this name; None if there is none."""
        try:
            at = os.stat(self, follow_symlinks=follow_links)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(at.st_mode):
            return Entry("directory", 0, (at.st_dev, at.st_ino))
        identity = (at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns)
        return Entry("file" if stat.S_ISREG(at.st_mode) else "other", at.st_size, identity)

    def list(self) -> dict[str, Entry]:
        """Return the entries of a directory by name, without broken links."""
        entries = {}
        for name in self.names():
            try:
                entry = (self / name).look()
            except OSError:
                continue
            if entry is not None:
                entries[name] = entry
        return entries

    def names(self) -> Sequence[str]:
        """Return the names in a directory in ascending order."""
        with _listing(self):
            return sorted(os.listdir(self))

    def names_below(self) -> Iterator[str]:
        """Yield the relative names of all files in a directory; those of directories end in /."""
        with _listing(self):
            for above, inner, names in os.walk(self, onerror=_refuse):
                at = os.path.relpath(above, self)
                if not (inner or names) and at != ".":
                    yield f"{at}/"
                links = [name for name in inner if os.path.islink(f"{above}/{name}")]
                yield from (os.path.normpath(f"{at}/{name}") for name in names + links)

    def taken(self) -> bool:
        """Return True if the name is in use, even by a broken link."""
        return os.path.lexists(self)

    def absolute(self) -> Self:
        """Return a path that does not depend on the working directory."""
        return type(self)(os.getcwd(), self)

    def resolved(self) -> Self:
        """Return the path with links resolved."""
        # Path.resolve raises for circular links.
        return type(self)(os.path.realpath(self))

    def leads_outside(self) -> StoragePath | None:
        """Return the target of a link that may not be followed; None otherwise."""
        if not os.path.islink(self):
            return None
        real, home = self.resolved(), self.parent.resolved()
        cached = real.parent.name == "blobs" and (real.parent.parent / "snapshots").is_dir()
        return None if real.parent == home or real.name == self.name or cached else real

    def public(self) -> Path:
        """Return the path as a `Path`."""
        return Path(self)

    def open(self) -> SourceFile:
        """Open a regular file."""
        return LocalFile(self)

    write = commit.write_atomically
    stage = commit.staged_output

    def output(self) -> Self:
        """Return the path that an output of this name is written to, with links resolved."""
        # Another user's link may lead to any file of this user.
        if os.path.islink(self):
            owner = os.lstat(self).st_uid
            if owner not in (os.geteuid(), 0):
                raise CheckpointError(
                    f"{self}: is a link that another user has made (user id {owner}); remove it, "
                    "or choose another name"
                )
        return self.resolved()

    def refusal(self) -> str:
        """Return the reason why no file can be created here; empty if one can."""
        if os.access(self.parent, os.W_OK | os.X_OK, effective_ids=True):
            return ""
        state = "is not writable" if self.parent.is_dir() else "does not exist"
        return f"its directory {self.parent} {state}; make it first, or write elsewhere"

    def make_directory(self) -> None:
        """Make the directory and its parents if they do not exist."""
        with self.errors("made a directory"):
            os.makedirs(self, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[bool | None]:
        """Lock the directory until the end of the block, or of this process."""
        with self.errors("read"):
            fd = os.open(self, system_calls.DIRECTORY)
        try:
            yield system_calls.lock(fd)
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Remove the file if it exists."""
        with self.errors("removed"):
            Path(self).unlink(missing_ok=True)


@contextmanager
def _listing(directory: LocalPath) -> Iterator[None]:
    """Convert errors into a CheckpointError, except those for a directory that does not exist."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {reason(error)}") from None


def _refuse(error: OSError) -> None:
    raise error

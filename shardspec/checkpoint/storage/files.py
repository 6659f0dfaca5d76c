"""Reading files of a checkpoint: regular ones only, inside its directory only, few open at once."""

import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Final, Self

from shardspec.checkpoint.storage.planned import AHEAD_BYTES, FileStretch, Planned
from shardspec.checkpoint.storage.ranges import RangeReader
from shardspec.checkpoint.storage.remote import RemotePath
from shardspec.errors import CheckpointError

__all__ = [
    "Glances",
    "OpenFiles",
    "SourceFile",
    "file_inside",
    "is_there",
    "open_regular",
    "reason",
]

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


def is_there(path: Path) -> bool:
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


class Glances:
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

"""Reading files of a checkpoint: regular ones only, inside its directory only, few open at once."""

import os
import stat
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shardspec.errors import CheckpointError

__all__ = ["OpenFiles", "file_inside", "open_regular", "read_into", "reason"]

_OPEN_AT_ONCE: Final = 128
"""Files kept open: far below the usual limit of 1024 for a process."""


def reason(error: OSError) -> str:
    """Return why the system refused, without its number and file name."""
    return error.strerror or str(error)


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
    # Not Path.resolve, which raises where links lead in a circle.
    real = os.path.realpath(path)
    if path.is_symlink() and os.path.dirname(real) != os.path.realpath(directory):
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


def read_into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer of bytes from a place in a file.

    Raises
    ------
    CheckpointError
        If the file ends before, or cannot be read.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from None
        if count == 0:
            raise CheckpointError(
                f"{path}: ends at byte {offset + done}, but bytes up to {offset + len(buffer)} are "
                "needed; it was cut short while being read"
            )
        done += count


class OpenFiles:
    """Files opened on first use; the one unused for longest is closed when there are many."""

    def __init__(self) -> None:
        self._fds: OrderedDict[Path, int] = OrderedDict()

    def fd(self, path: Path) -> int:
        """Return a descriptor that is good until the next call."""
        if path in self._fds:
            self._fds.move_to_end(path)
            return self._fds[path]
        while len(self._fds) >= _OPEN_AT_ONCE:
            os.close(self._fds.popitem(last=False)[1])
        self._fds[path] = open_regular(path)
        return self._fds[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

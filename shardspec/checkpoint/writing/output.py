"""Files that appear whole or not at all."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardspec.checkpoint.store import reason
from shardspec.errors import CheckpointError, OutputExistsError

__all__ = ["reserve", "sync_directory", "write_atomically"]


def write_atomically(
    path: Path, num_bytes: int, fill: Callable[[int], None], *, overwrite: bool
) -> None:
    """Create a file under another name, fill it, flush it to the disk, and only then name it.

    Parameters
    ----------
    path
        The final name. It is untouched until the file is complete.
    num_bytes
        Size of the file: a disk that has no room for it shows before anything is written.
    fill
        Writes the contents, given a descriptor.
    overwrite
        Whether a file of that name is replaced.

    Raises
    ------
    OutputExistsError
        If there is such a file and `overwrite` is not set, even where it appeared meanwhile.
    CheckpointError
        If the system refuses, as when the disk is full. The unfinished file is removed; it is
        removed too when `fill` raises, or the user interrupts.
    """
    temporary = path.parent / f".shardspec-{os.urandom(8).hex()}.tmp"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None
    try:
        with open(fd, "wb", buffering=0):
            reserve(fd, num_bytes)
            fill(fd)
            os.fsync(fd)
        _publish(temporary, path, overwrite)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: cannot be written: {reason(error)} ({num_bytes} bytes are needed); make "
            "room or write elsewhere"
        ) from None
    finally:
        # By now the file has its name, or an error is on its way that says more.
        with suppress(OSError):
            temporary.unlink()
    sync_directory(path.parent)


def reserve(fd: int, num_bytes: int) -> None:
    """Give a new file its size, if the file system says that it has the room.

    That is a word about now, not a promise: posix_fallocate promises, but takes longer than
    writing where files are in memory, and leaves disks work to do twice.

    Raises
    ------
    OSError
        If there is less room than needed, or the system refuses the size.
    """
    room = os.fstatvfs(fd)
    # Some file systems count nothing.
    if room.f_blocks and room.f_bfree * room.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, num_bytes)


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    if not overwrite:
        try:
            # Unlike a rename, this fails where the name was taken by another process meanwhile.
            os.link(temporary, path)
            return
        except FileExistsError:
            raise OutputExistsError(
                f"{path}: exists; choose another name, or overwrite it with --force "
                "(overwrite=True)"
            ) from None
        except OSError:
            # This file system has no hard links; the check at the start has to do.
            pass
    temporary.replace(path)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, where the file system can do that."""
    # Some network file systems refuse; the rename itself has happened then.
    with suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

"""Files that appear whole or not at all."""

import errno
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardspec.checkpoint.files import reason
from shardspec.errors import CheckpointError, OutputExistsError

__all__ = ["sync_directory", "write_atomically"]


def write_atomically(
    path: Path, num_bytes: int, fill: Callable[[int], None], *, overwrite: bool
) -> None:
    """Create a file under another name, fill it, flush it to the disk, and only then name it.

    Parameters
    ----------
    path
        The final name. It is untouched until the file is complete.
    num_bytes
        Size of the file: reserved first, so that a full disk shows before anything is written.
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
    temporary = path.parent / f".shardspec-{secrets.token_hex(8)}.tmp"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None
    try:
        with open(fd, "wb", buffering=0):
            _reserve(fd, num_bytes)
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


def _reserve(fd: int, num_bytes: int) -> None:
    """Give a file its size, and its room on the disk where the file system can promise that."""
    os.ftruncate(fd, num_bytes)
    if sys.platform == "linux" and num_bytes:
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    if not overwrite:
        try:
            # Unlike a rename, this fails where the name was taken by another process meanwhile.
            os.link(temporary, path)
            return
        except FileExistsError:
            raise OutputExistsError(
                f"{path}: exists; choose another name, or overwrite it with --force (force=True)"
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

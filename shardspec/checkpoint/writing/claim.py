"""A place to work in beside an output, that only one run has at a time.

The place has a name of its own until the work is done. It is locked while a run is alive, so what a
killed run has left is known from what another one is writing: the first is cleared away, the
second is left in peace.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardspec.checkpoint.store import reason
from shardspec.checkpoint.writing.output import sync_directory
from shardspec.checkpoint.writing.rename import publish
from shardspec.errors import CheckpointError

__all__ = ["claimed", "claimed_beside", "place_beside"]


def place_beside(path: Path) -> Path:
    """Return where an output is worked on.

    Examples
    --------
    >>> place_beside(Path("/models/llama.safetensors")).as_posix()
    '/models/.llama.safetensors.shardspec'
    """
    return path.with_name(f".{path.name}.shardspec")


@contextmanager
def claimed(path: Path, *, directory: bool, overwrite: bool) -> Iterator[Path]:
    """Make an empty file or directory to fill, and give it the final name when all went well.

    Parameters
    ----------
    path
        The final name; it is untouched until the end.
    directory
        Whether a directory is wanted.
    overwrite
        Whether what has the final name is replaced in the end.

    Yields
    ------
    Path
        The place to fill. It is removed if anything is raised.

    Raises
    ------
    OutputExistsError
        In the end, if something has the final name and `overwrite` is not set.
    CheckpointError
        If another run is at work on the same output, or the system refuses.
    """
    place = place_beside(path)
    try:
        lock = _claim(place, directory, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None
    try:
        yield place
        try:
            publish(place, path, overwrite=overwrite)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None
        sync_directory(path.parent)
    except BaseException:
        # Still locked: nobody else has begun to work there.
        _discard(place)
        raise
    finally:
        os.close(lock)


@contextmanager
def claimed_beside(place: Path, path: Path) -> Iterator[None]:
    """Make an empty directory to work in, and remove it in the end.

    Parameters
    ----------
    place, path
        The directory, and the output that it is for, for errors.

    Raises
    ------
    CheckpointError
        If another run has it, or the system refuses.
    """
    try:
        lock = _claim(place, True, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None
    try:
        yield
    finally:
        _discard(place)
        os.close(lock)


def _claim(place: Path, directory: bool, path: Path) -> int:
    """Return the lock of a new, empty place."""
    while True:
        made = _make(place, directory)
        try:
            lock = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            # The run that had it has just ended.
            continue
        except OSError:
            if made:
                _discard(place)
            raise
        try:
            locked = _lock(lock)
            if locked and _same(lock, place):
                if made:
                    return os.dup(lock)
                # Left by a run that was killed.
                _remove(place)
            elif not locked and not made:
                raise CheckpointError(
                    f"{path}: another run is writing it; wait for that one, or choose another name"
                )
        finally:
            os.close(lock)


def _make(place: Path, directory: bool) -> bool:
    """Make a place; return whether there was none."""
    try:
        if directory:
            place.mkdir()
        else:
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    return True


def _lock(fd: int) -> bool:
    """Lock a place; return False if another run has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # This file system has no locks: nobody can be told from a run that was killed.
        return True
    return True


def _same(fd: int, place: Path) -> bool:
    """Return whether a descriptor is still what the name leads to."""
    try:
        at = os.stat(place, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), at)


def _discard(place: Path) -> None:
    """Remove what can be removed: an error is on its way already, and the next run clears more."""
    with suppress(OSError, ImportError):
        if stat.S_ISDIR(os.lstat(place).st_mode):
            _remove_tree(place, ignore_errors=True)
        else:
            place.unlink()


def _remove(place: Path) -> None:
    try:
        if stat.S_ISDIR(os.lstat(place).st_mode):
            _remove_tree(place)
        else:
            place.unlink()
    except FileNotFoundError:
        pass


def _remove_tree(place: Path, *, ignore_errors: bool = False) -> None:
    # Importing it takes as long as copying 5 MiB, and few runs find a directory to remove.
    import shutil

    shutil.rmtree(place, ignore_errors=ignore_errors)

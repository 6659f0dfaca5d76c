"""Outputs that appear whole or not at all: staged under another name, flushed, then renamed.

A staged file or directory has an unpredictable name beside the output, is made exclusively, and
belongs to its maker alone (modes 0600 and 0700) until it is published. Everything in it is opened
through the descriptor that made it, so nobody who may write into the same directory can lead a
write elsewhere. A lock tells a run that is alive from what a killed one has left: the first is
respected, the second is cleared away. Where the file system has no locks, nothing is cleared.
"""

import fcntl
import json
import os
import re
import stat
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shardspec.checkpoint.directories import (
    DESCRIPTORS,
    DIRECTORY,
    EXCHANGE,
    NEW_FILE,
    NO_REPLACE,
    by_descriptor,
    exists,
    give_mode,
    give_modes,
    is_same,
    lock,
    move_others,
    names_below,
    old_mode,
    opened,
    remove_tree,
    rename_file,
    renameat2,
    reserve,
    unlink_same,
)
from shardspec.checkpoint.store import reason
from shardspec.errors import CheckpointError

__all__ = ["joined_output", "real_path", "staged_output", "write_atomically"]

_LOCK_SUFFIX: Final = ".lock"


@contextmanager
def staged_output(
    path: Path,
    *,
    directory: bool,
    overwrite: bool,
    replaced: Collection[str] = (),
    check: Callable[[], None] | None = None,
) -> Iterator[Path]:
    """Make an empty file or directory to fill, and give it the final name when all went well.

    Parameters
    ----------
    path
        The final name; it is untouched until the end.
    directory
        Whether a directory is wanted.
    overwrite
        Whether what has the final name is replaced in the end.
    replaced
        Names of files in a directory that is replaced which go; files that have the name of a new
        one go too. All others are kept, also those that appear meanwhile.
    check
        Called when everything is written; raises if the output may not get its name.

    Yields
    ------
    Path
        What to fill, by its descriptor. It is removed if anything is raised.

    Raises
    ------
    OutputExistsError
        In the end, if something has the final name and `overwrite` is not set.
    CheckpointError
        If another run is at work on the same output, or the system refuses.
    """
    with _refusals(path):
        parent = os.open(path.parent, DIRECTORY)
    try:
        with _refusals(path):
            stage = _Stage(parent, path, directory)
        try:
            yield stage.place
            if check is not None:
                check()
            with _refusals(path):
                stage.publish(overwrite, replaced)
        except BaseException:
            stage.discard()
            raise
        finally:
            stage.close()
        with suppress(OSError):  # some network file systems refuse; the rename has happened
            os.fsync(parent)
    finally:
        os.close(parent)


@contextmanager
def joined_output(staged: Path, path: Path) -> Iterator[Path]:
    """Open what another process of the same user has staged.

    Parameters
    ----------
    staged
        Its `real_path`, as that process says.
    path
        The final name, for errors.

    Raises
    ------
    CheckpointError
        If it is not there, or belongs to somebody else.
    """
    try:
        fd = os.open(staged, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(
            f"{path}: what the first process has begun is not seen here ({reason(error)}); write "
            "to a directory that all processes share"
        ) from None
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise CheckpointError(f"{path}: {staged.name} beside it belongs to another user")
        yield by_descriptor(fd, staged)
    finally:
        os.close(fd)


def real_path(place: Path) -> Path:
    """Return the name under which something is staged, for other processes."""
    return Path(os.readlink(place)) if place.parent == DESCRIPTORS else place


def write_atomically(
    path: Path,
    num_bytes: int,
    fill: Callable[[int], None],
    *,
    overwrite: bool,
    mode_of: str | None = None,
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
    mode_of
        Name of the file in the same directory whose mode the new one gets, and its owner where the
        system lets us: that of the file that is replaced unless given.

    Raises
    ------
    OutputExistsError
        If there is such a file and `overwrite` is not set, even where it appeared meanwhile.
    CheckpointError
        If the system refuses, as when the disk is full. The unfinished file is removed; it is
        removed too when `fill` raises, or the user interrupts.
    """
    name = f".shardspec-{'' if mode_of is None else 'save-'}{os.urandom(8).hex()}.tmp"
    with _refusals(path):
        parent = os.open(path.parent, DIRECTORY)
    try:
        with _refusals(path):
            fd = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        try:
            with _refusals(path, f" ({num_bytes} bytes are needed); make room or write elsewhere"):
                reserve(fd, num_bytes)
                fill(fd)
                older = old_mode(parent, mode_of or path.name)
                owners = os.geteuid(), os.fstat(parent).st_uid
                if mode_of and older and older.st_uid not in owners:
                    older = None  # another user may have put it there
                give_mode(fd, older, directory=False)
                os.fsync(fd)
                rename_file(parent, name, path, fd, overwrite)
        finally:
            # By now the file has its name, or an error is on its way that says more.
            unlink_same(parent, name, fd)
            os.close(fd)
        with suppress(OSError):
            os.fsync(parent)
    finally:
        os.close(parent)


@contextmanager
def _refusals(path: Path, more: str = "") -> Iterator[None]:
    """Make errors of ours of what the system refuses."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}{more}") from None


@contextmanager
def _one_at_a_time(parent: int) -> Iterator[None]:
    """Let one run at a time begin in a directory, where the file system has locks.

    Whoever holds the lock for longer than a second does something else with the directory.
    """
    deadline = time.monotonic() + 1.0
    held = lock(parent)
    while held is False and time.monotonic() < deadline:
        time.sleep(0.002)
        held = lock(parent)
    try:
        yield
    finally:
        if held:
            fcntl.flock(parent, fcntl.LOCK_UN)


class _Stage:
    """A staged file or directory, and its lock."""

    def __init__(self, parent: int, path: Path, directory: bool) -> None:
        self._parent, self._path, self._directory = parent, path, directory
        self._exchanged = False
        self._pattern = re.compile(
            re.escape(f".{path.name}.shardspec-") + "[0-9a-f]{16}(" + re.escape(_LOCK_SUFFIX) + ")?"
        )
        with _one_at_a_time(parent):
            self._clear("")
            self._make()
            try:
                # Where there is no lock, another run may have begun at the same moment.
                self._clear(self._lock_name)
            except BaseException:
                self.discard()
                self.close()
                raise
        self.place = by_descriptor(self._fd, path.with_name(self._name))

    def _make(self) -> None:
        for _ in range(20):
            self._name = f".{self._path.name}.shardspec-{os.urandom(8).hex()}"
            self._lock_name = self._name + (_LOCK_SUFFIX if self._directory else "")
            self._lock = os.open(self._lock_name, NEW_FILE, 0o600, dir_fd=self._parent)
            if lock(self._lock) is not True:
                warnings.warn(
                    f"{self._path}: this file system has no locks, so another run that writes the "
                    "same output is not noticed",
                    RuntimeWarning,
                    stacklevel=2,
                )
            # Between the two lines above, another run may have taken it for left behind.
            if is_same(self._parent, self._lock_name, self._lock):
                break
            os.close(self._lock)
        else:
            raise CheckpointError(
                f"{self._path}: whatever is begun beside it is taken away at once; write to a "
                "directory that only you can change"
            )
        self._fd = self._lock
        if self._directory:
            try:
                os.mkdir(self._name, 0o700, dir_fd=self._parent)
                self._fd = os.open(self._name, DIRECTORY | os.O_NOFOLLOW, dir_fd=self._parent)
            except OSError:
                self.discard()
                os.close(self._lock)
                raise

    def _clear(self, own: str) -> None:
        """Remove what killed runs of this user have left at this output.

        Raises
        ------
        CheckpointError
            If another run is alive; of two that begin together, the one with the lesser name is.
        """
        for name in sorted(os.listdir(self._parent)):
            match = self._pattern.fullmatch(name)
            if match is None or name == own:
                continue
            with suppress(FileNotFoundError):
                at = os.stat(name, dir_fd=self._parent, follow_symlinks=False)
                if not stat.S_ISREG(at.st_mode) or at.st_uid != os.geteuid():
                    continue
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with opened(name, self._parent, flags) as fd:
                    locked = lock(fd)
                    if locked is False and (not own or name < own):
                        raise CheckpointError(
                            f"{self._path}: another run is writing it; wait for that one, or "
                            "choose another name"
                        )
                    if locked and is_same(self._parent, name, fd):
                        if match[1]:
                            self._clear_directory(name.removesuffix(_LOCK_SUFFIX), fd)
                        os.unlink(name, dir_fd=self._parent)

    def _clear_directory(self, name: str, locked: int) -> None:
        """Remove what a killed run had staged; if that has its name, move what is of others."""
        try:
            inode, made, replaced = json.loads(os.pread(locked, os.fstat(locked).st_size, 0))
        except ValueError:  # it has not come to that
            remove_tree(self._parent, name)
            return
        for left in (name, f"{name}-old"):
            # What cannot be moved stays.
            with suppress(OSError), opened(left, self._parent) as old:
                if os.fstat(old).st_ino == inode:
                    remove_tree(self._parent, left)
                    continue
                with opened(self._path.name, self._parent) as new:
                    if os.fstat(new).st_ino == inode:
                        move_others(old, new, made, replaced, late=True)
                os.rmdir(left, dir_fd=self._parent)

    def publish(self, overwrite: bool, replaced: Collection[str]) -> None:
        """Give the output its name."""
        if not self._directory:
            give_mode(self._fd, old_mode(self._parent, self._path.name), directory=False)
            rename_file(self._parent, self._name, self._path, self._fd, overwrite)
            return
        old = old_mode(self._parent, self._path.name) if overwrite else None
        self._give_modes(old, replaced)
        if old is None:
            if not renameat2(self._parent, self._name, self._path.name, NO_REPLACE, self._path):
                if os.path.lexists(self._path):
                    raise exists(self._path)
                os.rename(
                    self._name,
                    self._path.name,
                    src_dir_fd=self._parent,
                    dst_dir_fd=self._parent,
                )
            self._check_named()
            return
        old_name = self._name
        made = frozenset(names_below(self._fd))
        # If this run is killed from here on, the next one moves what is somebody else's.
        record = json.dumps([os.fstat(self._fd).st_ino, sorted(made), sorted(replaced)])
        os.pwrite(self._lock, record.encode(), 0)
        os.fsync(self._lock)
        self._exchanged = renameat2(self._parent, self._name, self._path.name, EXCHANGE, self._path)
        if not self._exchanged:
            # Between these two, neither stands under the name; both are complete on the disk.
            old_name = f"{self._name}-old"
            for one, other in ((self._path.name, old_name), (self._name, self._path.name)):
                os.rename(one, other, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        self._check_named()
        self._keep_others(old_name, made, replaced)

    def _check_named(self) -> None:
        if not is_same(self._parent, self._path.name, self._fd):
            raise CheckpointError(
                f"{self._path}: somebody else has put something else under this name; write to a "
                "directory that only you can change"
            )

    def _give_modes(self, old: os.stat_result | None, replaced: Collection[str]) -> None:
        """Give the directory and its files the modes of what they replace."""
        if old is None:
            give_modes(self._fd, None, None, None)
            return
        with opened(self._path.name, self._parent) as older:
            known = [at for name in replaced if (at := old_mode(older, name)) is not None]
            alike = known[0] if len({at.st_mode for at in known}) == 1 else None
            give_modes(self._fd, older, old, alike)

    def _keep_others(self, old_name: str, made: Collection[str], replaced: Collection[str]) -> None:
        """Move to the new directory what was none of the old checkpoint, and remove the rest."""
        failed: OSError | None = None
        for _ in range(10):
            try:
                with opened(old_name, self._parent) as old:
                    move_others(old, self._fd, made, replaced)
                failed = None
            except OSError as error:
                failed = error
            # What somebody puts there by its descriptor meanwhile is kept too.
            with suppress(OSError):
                os.rmdir(old_name, dir_fd=self._parent)
                return
        if failed is not None:
            raise CheckpointError(
                f"{self._path}: is written, but what else lay in the old directory could not be "
                f"moved there ({failed.filename or old_name}: {reason(failed)}); it is kept in "
                f"{self._path.with_name(old_name)}"
            )

    def discard(self) -> None:
        """Remove what can be removed: an error is on its way already."""
        with suppress(OSError):
            # The old directory may have this name by now, with what is somebody else's in it.
            if self._directory and not self._exchanged:
                remove_tree(self._parent, self._name)
            unlink_same(self._parent, self._lock_name, self._lock)

    def close(self) -> None:
        """End the claim."""
        if self._directory:
            unlink_same(self._parent, self._lock_name, self._lock)
            os.close(self._fd)
        os.close(self._lock)

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
    NEW_FILE,
    by_descriptor,
    check_named,
    exchange,
    give_mode,
    give_modes,
    is_same,
    lock,
    move_others,
    names_below,
    opened,
    remove_tree,
    rename,
    reserve,
    stat_of,
    sync,
    unlink_same,
)
from shardspec.checkpoint.store import reason, system_errors
from shardspec.errors import CheckpointError

_LOCK_SUFFIX: Final = ".lock"


@contextmanager
def staged_output(
    path: Path,
    *,
    directory: bool,
    overwrite: bool,
    replaced: Collection[str] = (),
    inode: int | None = None,
) -> Iterator[Path]:
    """Make an empty file or directory to fill, and give it the final name when all went well.

    Of a directory that is replaced, files that have the name of a new one or are named in
    `replaced` go; all others are kept, also those that appear meanwhile. `inode` is the number of
    that directory, or 0 if there is none, where it is known. What to fill is removed if anything is
    raised: an `OutputExistsError` in the end if something has the name and `overwrite` is not set,
    a `CheckpointError` if another run is at work on the same output, or has replaced it meanwhile.
    """
    with _opened_parent(path) as parent:
        with system_errors(path, "written"):
            stage = _Stage(parent, path, directory)
        try:
            yield stage.place
            with system_errors(path, "written"):
                stage.publish(overwrite, replaced, inode)
        finally:
            stage.close()


@contextmanager
def joined_output(staged: Path, path: Path) -> Iterator[Path]:
    """Open what another process of the same user has staged; `path` is its final name."""
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
    """Create a file under another name, fill it by its descriptor, flush it, and only then name it.

    It gets mode and owner of the file that it replaces, or of the one in the same directory that
    `mode_of` names. The unfinished file is removed when anything is raised: an `OutputExistsError`
    if there is such a file and `overwrite` is not set, a `CheckpointError` as when the disk has no
    room for `num_bytes`.
    """
    name = f".shardspec-{'' if mode_of is None else 'save-'}{os.urandom(8).hex()}.tmp"
    with _opened_parent(path) as parent:
        with system_errors(path, "written"):
            fd = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        try:
            more = f" ({num_bytes} bytes are needed); make room or write elsewhere"
            with system_errors(path, "written", more):
                reserve(fd, num_bytes)
                fill(fd)
                older = stat_of(parent, mode_of or path.name)
                owners = os.geteuid(), os.fstat(parent).st_uid
                if mode_of and older and older.st_uid not in owners:
                    older = None  # another user may have put it there
                give_mode(fd, older)
                os.fsync(fd)
                rename(parent, name, path, fd, overwrite=overwrite)
        finally:
            # By now the file has its name, or an error is on its way that says more.
            unlink_same(parent, name, fd)
            os.close(fd)


@contextmanager
def _opened_parent(path: Path) -> Iterator[int]:
    """Open the directory of an output; when all went well, flush its names to the disk."""
    with system_errors(path, "written"):
        parent = os.open(path.parent, DIRECTORY)
    try:
        yield parent
        sync(parent)
    finally:
        os.close(parent)


@contextmanager
def _one_at_a_time(parent: int) -> Iterator[None]:
    """Let one run at a time begin in a directory: otherwise two could refuse each other.

    Whoever holds its lock for longer than a second does something else with the directory.
    """
    deadline = time.monotonic() + 1.0
    while lock(parent) is False and time.monotonic() < deadline:
        time.sleep(0.002)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_UN)


class _Stage:
    """A staged file, which is its own lock, or a staged directory, and a lock beside it."""

    def __init__(self, parent: int, path: Path, directory: bool) -> None:
        self._parent, self._path, self._directory = parent, path, directory
        self._published = False
        self._name = f".{path.name}.shardspec-{os.urandom(8).hex()}"
        self._lock_name = self._name + (_LOCK_SUFFIX if directory else "")
        with _one_at_a_time(parent):
            self._lock = self._fd = os.open(self._lock_name, NEW_FILE, 0o600, dir_fd=parent)
            try:
                self._begin()
            except BaseException:
                self.close()
                raise
        self.place = by_descriptor(self._fd, path.with_name(self._name))

    def _begin(self) -> None:
        locked = lock(self._lock)
        if locked is None:
            warnings.warn(
                f"{self._path}: this file system has no locks, so another run that writes the "
                "same output is not noticed",
                RuntimeWarning,
                stacklevel=2,
            )
        # Made first, then looked around: of two that begin at once, one sees the other.
        self._clear()
        # Before it was locked, another run may have taken it for left behind.
        if locked is False or not is_same(self._parent, self._lock_name, self._lock):
            raise self._another_run()
        if self._directory:
            os.mkdir(self._name, 0o700, dir_fd=self._parent)
            self._fd = os.open(self._name, DIRECTORY | os.O_NOFOLLOW, dir_fd=self._parent)

    def _another_run(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: another run is writing it; wait for that one, or choose another name"
        )

    def _clear(self) -> None:
        """Remove what killed runs of this user have left; raise if another run is alive."""
        pattern = re.compile(re.escape(f".{self._path.name}.shardspec-") + r"[0-9a-f]{16}(\.lock)?")
        for name in os.listdir(self._parent):
            match = pattern.fullmatch(name)
            if match is None or name == self._lock_name:
                continue
            with suppress(FileNotFoundError):
                at = os.stat(name, dir_fd=self._parent, follow_symlinks=False)
                if not stat.S_ISREG(at.st_mode) or at.st_uid != os.geteuid():
                    continue
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with opened(name, self._parent, flags) as fd:
                    locked = lock(fd)
                    if locked is False:
                        raise self._another_run()
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

    def publish(self, overwrite: bool, replaced: Collection[str], inode: int | None) -> None:
        """Give the output its name."""
        parent, name, final = self._parent, self._name, self._path.name
        old = stat_of(parent, final)
        if inode is not None and inode != (0 if old is None else old.st_ino):
            raise CheckpointError(
                f"{self._path}: another run has replaced it meanwhile; run again to replace that"
            )
        if not self._directory:
            give_mode(self._fd, old)
            rename(parent, name, self._path, self._fd, overwrite=overwrite)
            return
        if old is None or not overwrite:
            give_modes(self._fd, None)
            rename(parent, name, self._path, self._fd, overwrite=False)
            self._published = True
            return
        with opened(final, parent) as older:
            known = [at for one in replaced if (at := stat_of(older, one)) is not None]
            alike = known[0] if len({at.st_mode for at in known}) == 1 else None
            give_modes(self._fd, older, alike)
        made = frozenset(names_below(self._fd))
        # If this run is killed from here on, the next one moves what is somebody else's.
        record = json.dumps([os.fstat(self._fd).st_ino, sorted(made), sorted(replaced)])
        os.pwrite(self._lock, record.encode(), 0)
        os.fsync(self._lock)
        old_name = exchange(parent, name, self._path)
        self._published = True
        check_named(parent, self._path, self._fd)
        self._keep_others(old_name, made, replaced)

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

    def close(self) -> None:
        """End the claim; remove what was not published, as far as the system lets us."""
        if self._directory and not self._published:
            remove_tree(self._parent, self._name)
        unlink_same(self._parent, self._lock_name, self._lock)
        for fd in {self._fd, self._lock}:
            os.close(fd)

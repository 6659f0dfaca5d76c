"""Outputs that appear whole or not at all.

An output NAME is written by these steps. All names are beside it; they are opened without following
links, by the descriptor of their directory.

1. Lock ``.NAME.shardspec-lock``, a file of this user. If another run has locked it, end.
2. Remove ``.NAME.shardspec-staging``, which a killed run may have left, and make it anew: a file of
   mode 0600, or a directory of mode 0700.
3. Fill it. All that is in it is opened through its descriptor, also without following links, so
   that nobody who may write to the same directory can redirect a write.
4. Check that what is to be replaced is still what it was. Give the new files its modes and owners,
   and flush them and their directories to the disk.
5. Rename the staged output to NAME, and flush the directory. A directory exchanges names with the
   one that it replaces. Where the system cannot do that, that one is ``.NAME.shardspec-old`` for a
   moment; if the run is killed then, the next one gives it its name back.
6. Remove what was replaced, then the lock.

A run that is killed before step 5 leaves the old output, or none; then the new one. What else it
leaves is removed by the next run. Where the file system has no locks, the names of step 2 are
unpredictable, so that two runs do not share them, and what is left stays.
"""

import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint import local
from shardspec.checkpoint.store import RemotePath, output_exists, path_errors, reason, upload
from shardspec.errors import CheckpointError
from shardspec.text import shown

_ATTEMPTS: Final = 10


class Destination(NamedTuple):
    """Where an output goes."""

    path: Path
    replaced: frozenset[str] = frozenset()
    """Names of the files in a directory that is replaced; with others, it is kept."""
    inode: int | None = None
    """Inode of the directory to replace, 0 if there is none; None if that is not known."""


@contextmanager
def staged_output(
    destination: Destination, *, directory: bool, overwrite: bool
) -> Iterator[tuple[int, Path]]:
    """Make an empty file or directory to fill, which gets the final name at the end of the block.

    Yields its descriptor and its name until then, which somebody else may give to something else.
    If an exception is raised, what was made is removed, and what was there is kept: also a
    `CheckpointError` if another run is writing the output, or has replaced it.
    """
    path = destination.path
    with _opened_parent(path) as parent, _locked(parent, path) as stem:
        staging, older = f"{stem}-staging", f"{stem}-old"
        with path_errors(path, "written"):
            _recover(parent, path, staging, older)
            _check_same(parent, destination)
        with _made(parent, staging, path, directory=directory) as fd:
            yield fd, path.with_name(staging)
            with path_errors(path, "written"):
                _check_same(parent, destination)
                if directory and overwrite and local.stat_of(parent, path.name) is not None:
                    _exchange(parent, staging, older, destination, fd)
                else:
                    if directory:
                        local.give_modes(fd, None, None)
                    else:
                        local.give_mode(fd, local.mode_at(parent, path.name, fd))
                    _rename(parent, staging, path, fd, overwrite and not directory)


@contextmanager
def joined_output(place: Path, path: Path, *, directory: bool) -> Iterator[int]:
    """Open what another process of the same user has staged; `path` is its final name."""
    with ExitStack() as held:
        try:
            fd = held.enter_context(
                local.opened(place, flags=local.INNER if directory else local.FILE)
            )
        except OSError as error:
            raise CheckpointError(
                f"{path}: what the first process has begun is not seen here ({reason(error)}); "
                "write to a directory that all processes share"
            ) from None
        if os.fstat(fd).st_uid != os.geteuid():
            raise CheckpointError(f"{path}: {place.name} beside it belongs to another user")
        yield fd


@contextmanager
def _locked(parent: int, path: Path) -> Iterator[str]:
    """Lock an output by a file beside it; yield what the names of this run start with.

    Raises a `CheckpointError` if another run has the lock.
    """
    stem = f".{path.name}.shardspec"
    name = f"{stem}-lock"
    for _ in range(_ATTEMPTS):
        _check_own(parent, name, path)
        with path_errors(path, "written"):
            fd = os.open(name, local.FILE | os.O_CREAT | os.O_NONBLOCK, 0o600, dir_fd=parent)
        try:
            locked = local.lock(fd)
            if locked is False:
                raise CheckpointError(
                    f"{path}: another run is writing it; wait for that one, or choose another name"
                )
            # The run that had it before may have removed it since it was opened.
            if not local.is_same(parent, name, fd):
                continue
            if locked is None:
                warnings.warn(
                    f"{path}: this file system has no locks, so another run that writes the same "
                    "output is not noticed",
                    RuntimeWarning,
                    stacklevel=4,
                )
                stem += f"-{os.urandom(8).hex()}"
            try:
                yield stem
            finally:
                with suppress(OSError):
                    if local.is_same(parent, name, fd):
                        os.unlink(name, dir_fd=parent)
            return
        finally:
            os.close(fd)
    raise CheckpointError(f"{path}: {name} beside it is removed again and again; remove it")


def _check_own(parent: int, name: str, path: Path) -> bool:
    """Return whether there is a file or directory of a name; refuse links and those of others."""
    with path_errors(path, "written"):
        try:
            at = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
    usual = stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode)
    if not usual or at.st_uid != os.geteuid():
        what = f"belongs to user id {at.st_uid}" if usual else "is no file of a run"
        raise CheckpointError(
            f"{path}: {name} beside it {what}; remove it, or choose another name or directory"
        )
    return True


def _recover(parent: int, path: Path, staging: str, older: str) -> None:
    """Bring what a killed run has left to an end: the old output, or the new one, is there."""
    if _check_own(parent, older, path) and not os.path.lexists(path):
        os.rename(older, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    for left in (staging, older):
        if _check_own(parent, left, path):
            local.remove(parent, left)
            if _check_own(parent, left, path):
                raise CheckpointError(
                    f"{path}: {left} beside it is of a run that was killed, and cannot be removed "
                    "from here; remove it"
                )


def _check_same(parent: int, destination: Destination) -> None:
    """Check that the directory to replace is still the one that was looked at."""
    old = local.stat_of(parent, destination.path.name)
    if destination.inode not in (None, 0 if old is None else old.st_ino):
        raise CheckpointError(
            f"{destination.path}: another run has replaced it meanwhile; run again to replace that"
        )


def _exchange(parent: int, staging: str, older: str, destination: Destination, fd: int) -> None:
    """Give a staged directory the name of an older one, which is removed."""
    path, replaced, left = destination.path, destination.replaced, staging
    with local.opened(path.name, parent) as old:
        if local.lock(old) is False:
            raise CheckpointError(f"{path}: another run is saving there; wait for that one")
        if late := sorted(
            islice((name for name in local.names_below(old) if name not in replaced), 3)
        ):
            raise CheckpointError(
                f"{path}: {', '.join(map(shown, late))} was put there meanwhile and would be lost; "
                "move that, and run again"
            )
        local.give_modes(fd, old, local.common_mode(old, replaced))
        if not local.renameat2(parent, staging, path, local.EXCHANGE):
            # Between these two, neither has the name; both are complete on the disk.
            left = older
            os.rename(path.name, older, src_dir_fd=parent, dst_dir_fd=parent)
            try:
                os.rename(staging, path.name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                os.rename(older, path.name, src_dir_fd=parent, dst_dir_fd=parent)
                raise
        _check_named(parent, path, fd)
        # What cannot be removed takes room and does no harm.
        with suppress(OSError):
            if local.is_same(parent, left, old):
                local.remove(parent, left)


def write_atomically(
    path: Path,
    num_bytes: int,
    pieces: Iterable[bytes | memoryview],
    *,
    overwrite: bool,
    mode_of: str | None = None,
) -> None:
    """Write a file of some pieces, which appears when it is complete and on the disk.

    It gets mode and owner of the file that it replaces, or of the one beside it that `mode_of`
    names. If an exception is raised, such as an `OutputExistsError`, the file is removed.
    """
    if isinstance(path, RemotePath):
        with upload(path, num_bytes, overwrite=overwrite) as append:
            for piece in pieces:
                append(piece)
        return
    name = f".shardspec-{'' if mode_of is None else 'save-'}{os.urandom(8).hex()}.tmp"
    more = f" ({num_bytes} bytes are needed); make room or write elsewhere"
    with (
        _opened_parent(path) as parent,
        _made(parent, name, path) as fd,
        path_errors(path, "written", more),
    ):
        local.reserve(fd, num_bytes)
        done = 0
        for piece in pieces:
            local.write_all(fd, memoryview(piece), done, path)
            done += len(piece)
        older = local.mode_at(parent, mode_of or path.name, fd)
        if mode_of and older and older[0] not in (os.geteuid(), os.fstat(parent).st_uid):
            older = None  # another user may have put it there
        local.give_mode(fd, older)
        os.fsync(fd)
        _rename(parent, name, path, fd, overwrite)


@contextmanager
def _made(parent: int, name: str, path: Path, *, directory: bool = False) -> Iterator[int]:
    """Make an empty file or directory, which is removed unless it has another name in the end."""
    with path_errors(path, "written"):
        if directory:
            os.mkdir(name, 0o700, dir_fd=parent)
        try:
            fd = os.open(name, local.INNER if directory else local.NEW_FILE, 0o600, dir_fd=parent)
        except OSError:
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            raise
    try:
        yield fd
    finally:
        # By now it has its name, or an error is on its way that says more.
        with suppress(OSError):
            if local.is_same(parent, name, fd):
                local.remove(parent, name)
        os.close(fd)


@contextmanager
def _opened_parent(path: Path) -> Iterator[int]:
    """Open the directory of an output."""
    with path_errors(path, "written"):
        parent = os.open(path.parent, local.DIRECTORY)
    try:
        yield parent
    finally:
        os.close(parent)


def _rename(parent: int, name: str, path: Path, fd: int, overwrite: bool) -> None:
    """Give a file or directory its final name."""
    if overwrite:
        os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    elif not local.renameat2(parent, name, path, local.NO_REPLACE):
        try:
            # Unlike a rename, this fails where the name was taken meanwhile.
            os.link(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            # This file system has no hard links, or it is a directory.
            if os.path.lexists(path):
                raise output_exists(path) from None
            os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    _check_named(parent, path, fd)


def _check_named(parent: int, path: Path, fd: int) -> None:
    """Flush the directory of what was renamed; check that it has its name."""
    local.sync(parent)
    if not local.is_same(parent, path.name, fd):
        raise CheckpointError(
            f"{path}: somebody else has put something else under this name; write to a directory "
            "that only you can change"
        )

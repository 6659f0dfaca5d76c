"""Outputs that appear whole or not at all.

An output NAME is written by these steps. Other names are beside it; they are opened without
following links, by the descriptor of their directory.

1. Lock ``.NAME.shardspec-lock``, a file of this user. If another run has locked it, stop.
2. Remove ``.NAME.shardspec-staging``, which a killed run may have left, and create it: a file of
   mode 0600, or a directory of mode 0700.
3. Fill it. Everything in it is opened through its descriptor, without following links, so that
   other users of the directory cannot redirect a write.
4. Check that the output to replace is unchanged. Give the new files its modes and owners, and flush
   them and their directories to the disk.
5. Rename the staged output to NAME, and flush the directory. A directory exchanges names with the
   one that it replaces. If the system cannot do that, the old one is ``.NAME.shardspec-old`` for a
   moment; if the run is killed then, the next one gives it its name back.
6. Remove the replaced output, then the lock.

A run that is killed before step 5 leaves the old output, or none; after it, the new one. The next
run removes other leftovers. If the file system has no locks, the names of step 2 are unpredictable,
so that two runs do not share them, and leftovers stay.
"""

import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Final

from shardspec.checkpoint.storage import descriptors
from shardspec.checkpoint.storage.path import (
    Identity,
    Staging,
    StoragePath,
    WriteAt,
    output_exists,
)
from shardspec.errors import CheckpointError
from shardspec.text import shown

_ATTEMPTS: Final = 10
_FLUSH_BYTES: Final = 8 << 20
"""Written before the disk is to begin with them, which would else wait for the end of the file."""


class StagedFiles:
    """An output that is written by these steps: a file, or a directory of files."""

    def __init__(self, path: StoragePath, fd: int, *, directory: bool) -> None:
        self.path, self.fd, self._directory = path, fd, directory

    def create(self, name: str, num_bytes: int) -> None:
        """Create a file of a size; raises if the disk is full."""
        with self.path.errors("written", _more(num_bytes)):
            fd = self._open(name, descriptors.NEW_FILE)
            try:
                descriptors.reserve(fd, num_bytes)
            finally:
                os.close(fd)

    @contextmanager
    def file(self, name: str) -> Iterator[WriteAt]:
        """Write a file at any positions, by any number of threads."""
        with self.path.errors("written"):
            fd = self._open(name, descriptors.FILE)
        try:
            new_bytes = 0

            def write(at: int, data: bytes | memoryview) -> None:
                nonlocal new_bytes
                descriptors.write_all(fd, memoryview(data), at, self.path)
                new_bytes += len(data)
                if new_bytes >= _FLUSH_BYTES:
                    new_bytes = 0
                    descriptors.begin_flush(fd)

            yield write
        finally:
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        return descriptors.open_below(self.fd, name, flags) if self._directory else os.dup(self.fd)


@contextmanager
def staged_output(path: StoragePath, output: Staging) -> Iterator[StagedFiles]:
    """Create files to fill, which are published at the end of the block.

    Raises `CheckpointError` if another run is writing the output, or has replaced it.
    """
    directory, overwrite, identity = output.directory, output.overwrite, output.identity
    with _opened_parent(path) as parent, _locked(parent, path) as stem:
        staging, older = f"{stem}-staging", f"{stem}-old"
        with path.errors("written"):
            _recover(parent, path, staging, older)
            _check_same(parent, path, identity)
        with _made(parent, staging, path, directory=directory) as fd:
            staged = StagedFiles(path, fd, directory=directory)
            for name, num_bytes in output.files.items():
                staged.create(name, num_bytes)
            yield staged
            with path.errors("written"):
                _check_same(parent, path, identity)
                old = descriptors.stat_of(parent, path.name) if directory and overwrite else None
                if old is not None:
                    _exchange(parent, staging, older, path, output.replaced, fd)
                    return
                if directory:
                    descriptors.give_modes(fd, None, None)
                else:
                    descriptors.give_mode(fd, descriptors.mode_at(parent, path.name, fd))
                    os.fsync(fd)
                _rename(parent, staging, path, fd, overwrite and not directory)


@contextmanager
def _locked(parent: int, path: StoragePath) -> Iterator[str]:
    """Lock an output by a file beside it; yield the prefix of the names of this run.

    Raises `CheckpointError` if another run has the lock.
    """
    stem = f".{path.name}.shardspec"
    name = f"{stem}-lock"
    for _ in range(_ATTEMPTS):
        _check_own(parent, name, path)
        with path.errors("written"):
            fd = os.open(name, descriptors.FILE | os.O_CREAT | os.O_NONBLOCK, 0o600, dir_fd=parent)
        try:
            locked = descriptors.lock(fd)
            if locked is False:
                raise CheckpointError(
                    f"{path}: another run is writing it; wait for that one, or choose another name"
                )
            # The run that had the lock before may have removed the file since it was opened.
            if not descriptors.is_same(parent, name, fd):
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
                    if descriptors.is_same(parent, name, fd):
                        os.unlink(name, dir_fd=parent)
            return
        finally:
            os.close(fd)
    raise CheckpointError(f"{path}: {name} beside it is removed repeatedly; write elsewhere")


def _check_own(parent: int, name: str, path: StoragePath) -> bool:
    """Return whether a file or directory exists; raises CheckpointError for others' and links."""
    with path.errors("written"):
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


def _recover(parent: int, path: StoragePath, staging: str, older: str) -> None:
    """Finish or undo the steps of a killed run, and remove its leftovers."""
    if _check_own(parent, older, path) and not os.path.lexists(path):
        os.rename(older, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    for name in (staging, older):
        if _check_own(parent, name, path):
            descriptors.remove(parent, name)
            if _check_own(parent, name, path):
                raise CheckpointError(
                    f"{path}: {name} beside it is of a run that was killed, and cannot be removed "
                    "from here; remove it"
                )


def _check_same(parent: int, path: StoragePath, identity: Identity | None) -> None:
    """Raise CheckpointError if the directory to replace is no longer the one that was checked."""
    old = descriptors.stat_of(parent, path.name)
    if identity not in (None, () if old is None else (old.st_dev, old.st_ino)):
        raise CheckpointError(
            f"{path}: another run has replaced it meanwhile; run again to replace that"
        )


def _exchange(
    parent: int, staging: str, older: str, path: StoragePath, replaced: frozenset[str], fd: int
) -> None:
    """Give a staged directory the name of an older one, and remove that."""
    leftover = staging
    with descriptors.opened(path.name, parent) as old:
        if descriptors.lock(old) is False:
            raise CheckpointError(f"{path}: another run is saving there; wait for that one")
        if late := sorted(
            islice((name for name in descriptors.names_below(old) if name not in replaced), 3)
        ):
            raise CheckpointError(
                f"{path}: {', '.join(map(shown, late))} was put there meanwhile and would be lost; "
                "move that, and run again"
            )
        descriptors.give_modes(fd, old, descriptors.common_mode(old, replaced))
        if not descriptors.renameat2(parent, staging, path, descriptors.EXCHANGE):
            # Between the two renames nothing has the name; both are complete on the disk.
            leftover = older
            os.rename(path.name, older, src_dir_fd=parent, dst_dir_fd=parent)
            try:
                os.rename(staging, path.name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                os.rename(older, path.name, src_dir_fd=parent, dst_dir_fd=parent)
                raise
        _check_named(parent, path, fd)
        # A directory that cannot be removed takes room and does no harm.
        with suppress(OSError):
            if descriptors.is_same(parent, leftover, old):
                descriptors.remove(parent, leftover)


def write_atomically(
    path: StoragePath,
    num_bytes: int,
    pieces: Iterable[bytes | memoryview],
    *,
    overwrite: bool,
    mode_of: str | None = None,
) -> None:
    """Write a file from pieces, which appears once it is complete; see `StoragePath.write`."""
    name = f".shardspec-{'' if mode_of is None else 'save-'}{os.urandom(8).hex()}.tmp"
    with (
        _opened_parent(path) as parent,
        _made(parent, name, path) as fd,
        path.errors("written", _more(num_bytes)),
    ):
        descriptors.reserve(fd, num_bytes)
        done = 0
        for piece in pieces:
            descriptors.write_all(fd, memoryview(piece), done, path)
            done += len(piece)
        older = descriptors.mode_at(parent, mode_of or path.name, fd)
        if mode_of and older and older[0] not in (os.geteuid(), os.fstat(parent).st_uid):
            older = None  # another user may have created it
        descriptors.give_mode(fd, older)
        os.fsync(fd)
        _rename(parent, name, path, fd, overwrite)


def _more(num_bytes: int) -> str:
    return f" ({num_bytes} bytes are needed); make room or write elsewhere"


@contextmanager
def _made(parent: int, name: str, path: StoragePath, *, directory: bool = False) -> Iterator[int]:
    """Create an empty file or directory, which is removed unless it has been renamed."""
    with path.errors("written"):
        if directory:
            os.mkdir(name, 0o700, dir_fd=parent)
        try:
            fd = os.open(
                name, descriptors.INNER if directory else descriptors.NEW_FILE, 0o600, dir_fd=parent
            )
        except OSError:
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            raise
    try:
        yield fd
    finally:
        # It has been renamed, or an error with more details is being raised.
        with suppress(OSError):
            if descriptors.is_same(parent, name, fd):
                descriptors.remove(parent, name)
        os.close(fd)


@contextmanager
def _opened_parent(path: StoragePath) -> Iterator[int]:
    """Open the directory of an output."""
    with path.errors("written"):
        parent = os.open(path.parent, descriptors.DIRECTORY)
    try:
        yield parent
    finally:
        os.close(parent)


def _rename(parent: int, name: str, path: StoragePath, fd: int, overwrite: bool) -> None:
    """Give a file or directory its final name; raises OutputExistsError if that is taken."""
    if overwrite:
        os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    elif not descriptors.renameat2(parent, name, path, descriptors.NO_REPLACE):
        try:
            # Unlike a rename, a link fails if the name was taken meanwhile.
            os.link(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            # The file system has no hard links, or this is a directory.
            if os.path.lexists(path):
                raise output_exists(path) from None
            os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    _check_named(parent, path, fd)


def _check_named(parent: int, path: StoragePath, fd: int) -> None:
    """Flush the directory after a rename; raises CheckpointError if the name leads elsewhere."""
    descriptors.sync(parent)
    if not descriptors.is_same(parent, path.name, fd):
        raise CheckpointError(
            f"{path}: another user has put another file under this name; write to a directory "
            "that only you can change"
        )

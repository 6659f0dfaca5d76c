"""Publishes outputs atomically: each appears complete or not at all.

An output NAME is written in these steps. The other names are in the same directory.

1. Lock ``.NAME.shardspec-lock``. If another run has locked it, stop.
2. Remove ``.NAME.shardspec-staging``, which a killed run may have left, and create it for this user
   alone: a file, or a directory.
3. Fill it.
4. Check that the output to replace is unchanged. Give the new files the modes and owners of the old
   ones. Flush files and directories to the disk.
5. Rename the staged output to NAME, and flush the directory. A directory exchanges names with the
   one that it replaces. If the system cannot do that, the old one is briefly called
   ``.NAME.shardspec-old``; if the run is killed then, the next one renames it back.
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
from functools import reduce
from itertools import islice
from operator import and_
from pathlib import PurePath
from typing import Final

from shardspec.checkpoint.storage import system_calls
from shardspec.checkpoint.storage.path import (
    Identity,
    Staging,
    StoragePath,
    WriteAt,
    output_exists,
    output_replaced,
)
from shardspec.errors import CheckpointError
from shardspec.text import shown

_ATTEMPTS: Final = 10
_FLUSH_BYTES: Final = 8 << 20
"""Bytes between early flushes; the last flush then has little left to write."""


class StagedFiles:
    """The files of an output while they are written, under its temporary name."""

    def __init__(self, path: StoragePath, place: StoragePath, *, directory: bool) -> None:
        self._path, self.place, self._directory = path, place, directory

    def create(self, name: str, num_bytes: int) -> None:
        """Create a file of a size; raises if the disk is full."""
        with self._path.errors("written", _more(num_bytes)):
            place = self._at(name)
            if self._directory:
                os.makedirs(place.parent, 0o700, exist_ok=True)
            flags = system_calls.NEW_FILE if self._directory else system_calls.FILE
            fd = os.open(place, flags, 0o600)
            try:
                system_calls.reserve(fd, num_bytes)
            finally:
                os.close(fd)

    @contextmanager
    def file(self, name: str) -> Iterator[WriteAt]:
        """Yield a function that writes to the file at any position, from any thread."""
        with self._path.errors("written"):
            fd = os.open(self._at(name), system_calls.FILE)
        try:
            new_bytes = 0

            def write(at: int, data: bytes | memoryview) -> None:
                nonlocal new_bytes
                system_calls.write_all(fd, memoryview(data), at, self._path)
                new_bytes += len(data)
                if new_bytes >= _FLUSH_BYTES:
                    new_bytes = 0
                    system_calls.begin_flush(fd)

            yield write
        finally:
            os.close(fd)

    def _at(self, name: str) -> StoragePath:
        if not self._directory:
            return self.place
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise CheckpointError(f"{name!r} does not name a file in a directory; choose another")
        return self.place / name


@contextmanager
def staged_output(path: StoragePath, output: Staging) -> Iterator[StagedFiles]:
    """Create the files of an output to fill in the block; they appear at the end of the block.

    Raises `CheckpointError` if another run is writing the output, or has replaced it.
    """
    directory = output.directory
    with _locked(path) as stem:
        staging, older = path.with_name(f"{stem}-staging"), path.with_name(f"{stem}-old")
        with path.errors("written"):
            _recover(path, staging, older)
            _check_same(path, output.identity)
        try:
            staged = StagedFiles(path, staging, directory=directory)
            with path.errors("written"):
                if directory:
                    os.mkdir(staging, 0o700)
                else:
                    os.close(os.open(staging, system_calls.NEW_FILE, 0o600))
            for name, num_bytes in output.files.items():
                staged.create(name, num_bytes)
            yield staged
            with path.errors("written"):
                _check_same(path, output.identity)
                if directory and output.overwrite and path.taken():
                    _exchange(staging, older, path, output.replaced)
                else:
                    _finish_all(staging, None if directory else path)
                    _rename(staging, path, output.overwrite and not directory)
        finally:
            # The staged output after an error; the replaced one after an exchange.
            with suppress(OSError):
                system_calls.remove(staging)


@contextmanager
def _locked(path: StoragePath) -> Iterator[str]:
    """Lock an output by a file beside it; yield the prefix of this run's temporary names.

    Raises `CheckpointError` if another run has the lock.
    """
    stem = f".{path.name}.shardspec"
    place = path.with_name(f"{stem}-lock")
    for _ in range(_ATTEMPTS):
        _check_own(path, place)
        with path.errors("written"):
            fd = os.open(place, system_calls.FILE | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            locked = system_calls.lock(fd)
            if locked is False:
                raise CheckpointError(
                    f"{path}: another run is writing it; wait for that one, or choose another name"
                )
            # The run that had the lock before may have removed the file since it was opened.
            if not _is_same(place, fd):
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
                    os.unlink(place)
            return
        finally:
            os.close(fd)
    raise CheckpointError(f"{path}: {place.name} beside it keeps disappearing; write elsewhere")


def _is_same(place: StoragePath, fd: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(place), os.fstat(fd))
    return False


def _check_own(path: StoragePath, place: StoragePath) -> bool:
    """Return True if a file or directory exists; raises CheckpointError if another user owns it."""
    with path.errors("written"):
        at = _stat(place)
    if at is None:
        return False
    usual = stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode)
    if not usual or at.st_uid != os.geteuid():
        problem = f"belongs to user id {at.st_uid}" if usual else "is not a file of a run"
        raise CheckpointError(
            f"{path}: {place.name} beside it {problem}; remove it, or choose another name or "
            "directory"
        )
    return True


def _stat(place: PurePath | None) -> os.stat_result | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return None if place is None else os.lstat(place)
    return None


def _recover(path: StoragePath, staging: StoragePath, older: StoragePath) -> None:
    """Finish or undo the steps of a killed run, and remove its leftovers."""
    if _check_own(path, older) and not path.taken():
        os.rename(older, path)
    for leftover in (staging, older):
        if _check_own(path, leftover):
            system_calls.remove(leftover)
            if leftover.taken():
                raise CheckpointError(
                    f"{path}: a killed run left {leftover.name} beside it, which this run cannot "
                    "remove; remove it"
                )


def _check_same(path: StoragePath, identity: Identity | None) -> None:
    """Raise CheckpointError if the directory to replace has changed since it was checked."""
    old = _stat(path)
    if identity not in (None, () if old is None else (old.st_dev, old.st_ino)):
        raise output_replaced(path)


def _exchange(
    staging: StoragePath, older: StoragePath, path: StoragePath, replaced: frozenset[str]
) -> None:
    """Replace directory `path` by `staging`, unless files outside `replaced` were added."""
    fd = os.open(path, system_calls.DIRECTORY)
    try:
        if system_calls.lock(fd) is False:
            raise CheckpointError(f"{path}: another run is saving there; wait for that one")
        late = (name for name in path.names_below() if name not in replaced)
        if some := sorted(islice(late, 3)):
            raise CheckpointError(
                f"{path}: {', '.join(map(shown, some))} was put there during this run and would be "
                "lost; move it away, and run again"
            )
        _finish_all(staging, path)
        if system_calls.renameat2(staging, path, system_calls.EXCHANGE):
            system_calls.sync(path.parent)
            return
        # Between the two renames the name does not exist; both outputs are complete.
        os.rename(path, older)
        try:
            os.rename(staging, path)
        except BaseException:
            os.rename(older, path)
            raise
        system_calls.sync(path.parent)
        with suppress(OSError):
            system_calls.remove(older)
    finally:
        os.close(fd)


def _finish_all(staging: StoragePath, old: StoragePath | None) -> None:
    """Give all new files and directories their final mode, and flush them to the disk.

    A file gets the mode of the file that it replaces, or else the strictest in the old directory.
    """
    strictest = None
    if not staging.is_dir():
        system_calls.finish(staging, _stat(old))
        return
    if old is not None:
        files = [_stat(old / name) for name in sorted(old.names_below())]
        stats = [at for at in files if at is not None and stat.S_ISREG(at.st_mode)]
        if stats:
            mode = reduce(and_, (stat.S_IMODE(at.st_mode) for at in stats), 0o777)
            strictest = stats[0].st_uid, stats[0].st_gid, mode
    for above, _, names in os.walk(staging, topdown=False):
        at = None if old is None else old / os.path.relpath(above, staging)
        for name in names:
            before = None if at is None else _stat(at / name)
            system_calls.finish(PurePath(above, name), before, strictest)
        system_calls.finish(PurePath(above), _stat(at))


def write_atomically(
    path: StoragePath,
    num_bytes: int,
    pieces: Iterable[bytes | memoryview],
    *,
    overwrite: bool,
    mode_of: str | None = None,
) -> None:
    """Write a file from pieces; it appears once it is complete; see `StoragePath.write`."""
    kind = "" if mode_of is None else "save-"
    place = path.with_name(f".shardspec-{kind}{os.urandom(8).hex()}.tmp")
    with path.errors("written", _more(num_bytes)):
        fd = os.open(place, system_calls.NEW_FILE, 0o600)
        try:
            system_calls.reserve(fd, num_bytes)
            end = 0
            for piece in pieces:
                system_calls.write_all(fd, memoryview(piece), end, path)
                end += len(piece)
            older = _stat(path.with_name(mode_of or path.name))
            if (
                mode_of
                and older
                and older.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid)
            ):
                older = None  # another user may have created it
            system_calls.finish(place, older)
            _rename(place, path, overwrite)
        finally:
            os.close(fd)
            with suppress(OSError):
                system_calls.remove(place)


def _more(num_bytes: int) -> str:
    return f" ({num_bytes} bytes are needed); make room or write elsewhere"


def _rename(place: StoragePath, path: StoragePath, overwrite: bool) -> None:
    """Give a file or directory its final name; raises OutputExistsError if that is taken."""
    if overwrite:
        os.rename(place, path)
    elif not system_calls.renameat2(place, path, system_calls.NO_REPLACE):
        try:
            # Unlike a rename, a link fails if the name was taken meanwhile.
            os.link(place, path)
        except OSError:
            # The file system has no hard links, or this is a directory.
            if path.taken():
                raise output_exists(path) from None
            os.rename(place, path)
    system_calls.sync(path.parent)

"""Outputs that appear whole or not at all: staged under another name, flushed, then renamed.

Staged is a file or directory of a random name beside the output, with mode 0600 or 0700. Everything
in it is opened through its descriptor, and no link is followed, so nobody who may write to the same
directory can redirect a write. A lock tells a run that is alive from the remains of a killed one,
which are removed; where the file system has no locks, nothing is.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from shardspec.checkpoint.store import output_exists, path_errors, reason
from shardspec.errors import CheckpointError

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DESCRIPTORS: Final = Path("/proc/self/fd")
_NO_REPLACE: Final = 1
_EXCHANGE: Final = 2
_LOCK_SUFFIX: Final = ".lock"
_ATTEMPTS: Final = 10


class Destination(NamedTuple):
    """Where an output goes."""

    path: Path
    replaced: frozenset[str] = frozenset()
    """Names of files in a directory that go, beside those of the output."""
    inode: int | None = None
    """Inode of the directory to replace, 0 if there is none; None if that is not known."""


@contextmanager
def staged_output(destination: Destination, *, directory: bool, overwrite: bool) -> Iterator[Path]:
    """Make an empty file or directory to fill, which gets the final name at the end of the block.

    Of a directory that is replaced, files of the same names and those in `replaced` are removed;
    all others are kept, also those that appear meanwhile. If an exception is raised, what was made
    is removed: also a `CheckpointError` if another run is writing the output, or has replaced it.
    """
    path = destination.path
    with _opened_parent(path) as parent:
        with path_errors(path, "written"):
            stage = _Stage(parent, path, directory)
        try:
            yield _by_descriptor(stage.fd, path.with_name(stage.name))
            with path_errors(path, "written"):
                stage.publish(overwrite, destination.replaced, destination.inode)
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
        yield _by_descriptor(fd, staged)
    finally:
        os.close(fd)


def real_path(place: Path) -> Path:
    """Return the name under which something is staged, for other processes."""
    return Path(os.readlink(place)) if place.parent == _DESCRIPTORS else place


def write_atomically(
    path: Path,
    num_bytes: int,
    fill: Callable[[int], None],
    *,
    overwrite: bool,
    mode_of: str | None = None,
) -> None:
    """Create a file under another name, fill it by its descriptor, flush it, then rename it.

    It gets mode and owner of the file that it replaces, or of the one beside it that `mode_of`
    names. If an exception is raised, such as an `OutputExistsError`, the file is removed.
    """
    name = f".shardspec-{'' if mode_of is None else 'save-'}{os.urandom(8).hex()}.tmp"
    with _opened_parent(path) as parent:
        with path_errors(path, "written"):
            fd = os.open(name, _NEW_FILE, 0o600, dir_fd=parent)
        try:
            more = f" ({num_bytes} bytes are needed); make room or write elsewhere"
            with path_errors(path, "written", more):
                reserve(fd, num_bytes)
                fill(fd)
                older = _stat_of(parent, mode_of or path.name)
                owners = os.geteuid(), os.fstat(parent).st_uid
                if mode_of and older and older.st_uid not in owners:
                    older = None  # another user may have put it there
                _give_mode(fd, older)
                os.fsync(fd)
                _rename(parent, name, path, fd, overwrite)
        finally:
            # By now the file has its name, or an error is on its way that says more.
            _unlink_same(parent, name, fd)
            os.close(fd)


@contextmanager
def _opened_parent(path: Path) -> Iterator[int]:
    """Open the directory of an output; at the end of the block flush its names to the disk."""
    with path_errors(path, "written"):
        parent = os.open(path.parent, DIRECTORY)
    try:
        yield parent
        _sync(parent)
    finally:
        os.close(parent)


class _Stage:
    """A staged file, which is its own lock, or a staged directory, and a lock beside it."""

    def __init__(self, parent: int, path: Path, directory: bool) -> None:
        self._parent, self._path, self._directory = parent, path, directory
        self._published = False
        self._another_run = CheckpointError(
            f"{path}: another run is writing it; wait for that one, or choose another name"
        )
        self.name = f".{path.name}.shardspec-{os.urandom(8).hex()}"
        self._lock_name = self.name + (_LOCK_SUFFIX if directory else "")
        # One run at a time begins, as two could refuse each other. Whoever has locked the directory
        # for longer does something else with it.
        deadline = time.monotonic() + 1.0
        while lock(parent) is False and time.monotonic() < deadline:
            time.sleep(0.002)
        try:
            self._lock = self.fd = os.open(self._lock_name, _NEW_FILE, 0o600, dir_fd=parent)
            try:
                self._begin()
            except BaseException:
                self.close()
                raise
        finally:
            with suppress(OSError):
                fcntl.flock(parent, fcntl.LOCK_UN)

    def _begin(self) -> None:
        locked = lock(self._lock)
        if locked is None:
            warnings.warn(
                f"{self._path}: this file system has no locks, so another run that writes the "
                "same output is not noticed",
                RuntimeWarning,
                stacklevel=2,
            )
        self._remove_remains()
        # Before it was locked, another run may have taken it for remains.
        if locked is False or not _is_same(self._parent, self._lock_name, self._lock):
            raise self._another_run
        if self._directory:
            os.mkdir(self.name, 0o700, dir_fd=self._parent)
            self.fd = os.open(self.name, DIRECTORY | os.O_NOFOLLOW, dir_fd=self._parent)

    def _remove_remains(self) -> None:
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
                        raise self._another_run
                    if locked and _is_same(self._parent, name, fd):
                        if match[1]:
                            staged = name.removesuffix(_LOCK_SUFFIX)
                            record = os.pread(fd, os.fstat(fd).st_size, 0)
                            try:
                                self._move_rest(staged, *json.loads(record))
                            except ValueError:  # it had not begun to publish
                                shutil.rmtree(staged, ignore_errors=True, dir_fd=self._parent)
                            except OSError:  # what cannot be moved stays
                                pass
                        os.unlink(name, dir_fd=self._parent)

    def _move_rest(
        self, name: str, inode: int, made: Collection[str], replaced: Collection[str]
    ) -> None:
        """Move the files of others to the directory that was published; remove the rest."""
        for left in (name, f"{name}-old"):
            with suppress(FileNotFoundError), opened(left, self._parent) as old:
                if os.fstat(old).st_ino == inode:  # not published
                    shutil.rmtree(left, ignore_errors=True, dir_fd=self._parent)
                    continue
                with opened(self._path.name, self._parent) as new:
                    if os.fstat(new).st_ino == inode:
                        move_others(old, new, made, replaced)
                os.rmdir(left, dir_fd=self._parent)

    def publish(self, overwrite: bool, replaced: Collection[str], inode: int | None) -> None:
        """Give the output its name."""
        parent, name, final = self._parent, self.name, self._path.name
        old = _stat_of(parent, final)
        if inode is not None and inode != (0 if old is None else old.st_ino):
            raise CheckpointError(
                f"{self._path}: another run has replaced it meanwhile; run again to replace that"
            )
        if not self._directory or old is None or not overwrite:
            if self._directory:
                _give_modes(self.fd, None, None)
            else:
                _give_mode(self.fd, old)
            _rename(parent, name, self._path, self.fd, overwrite and not self._directory)
            self._published = True
            return
        with opened(final, parent) as older:
            known = [at for one in replaced if (at := _stat_of(older, one)) is not None]
            alike = known[0] if len({at.st_mode for at in known}) == 1 else None
            _give_modes(self.fd, older, alike)
        made = names_below(self.fd)
        # If this run is killed from here on, the next one moves the files of others.
        rest = os.fstat(self.fd).st_ino, sorted(made), sorted(replaced)
        os.pwrite(self._lock, json.dumps(rest).encode(), 0)
        os.fsync(self._lock)
        kept = name
        if not renameat2(parent, name, self._path, _EXCHANGE):
            # Between these two, neither has the name; both are complete on the disk.
            kept = f"{name}-old"
            os.rename(final, kept, src_dir_fd=parent, dst_dir_fd=parent)
            os.rename(name, final, src_dir_fd=parent, dst_dir_fd=parent)
        self._published = True
        _check_named(parent, self._path, self.fd)
        for attempt in range(_ATTEMPTS):
            try:
                self._move_rest(name, *rest)
                return
            except OSError as error:
                # Somebody may put files there by its descriptor, or have them open (NFS).
                if attempt < _ATTEMPTS - 1 or error.errno == errno.ENOTEMPTY:
                    continue
                raise CheckpointError(
                    f"{self._path}: is written, but what else was in the old directory could not "
                    f"be moved there ({error.filename or kept}: {reason(error)}); it is kept in "
                    f"{self._path.with_name(kept)}"
                ) from None

    def close(self) -> None:
        """Remove what was not published, as far as the system allows it, and the lock."""
        if self._directory and not self._published:
            shutil.rmtree(self.name, ignore_errors=True, dir_fd=self._parent)
        _unlink_same(self._parent, self._lock_name, self._lock)
        for fd in {self.fd, self._lock}:
            os.close(fd)


def move_others(old: int, new: int, made: Collection[str], replaced: Collection[str]) -> None:
    """Move from a directory to its replacement what was neither made there nor is replaced.

    What has the same name in the new one by now is newer, and stays. Raises an IsADirectoryError if
    a file was made where the old one has a directory.
    """
    made, gone = frozenset(made), {*made, *replaced}
    inside = {str(above) for name in gone for above in PurePosixPath(name).parents}

    def move(old: int, new: int, above: str) -> None:
        for name in os.listdir(old):
            full = above + name
            mode = os.stat(name, dir_fd=old, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode) and full in gone:
                os.unlink(name, dir_fd=old)
            elif stat.S_ISDIR(mode) and full in made:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), full)
            elif stat.S_ISDIR(mode) and full in inside:
                with suppress(FileExistsError):
                    os.mkdir(name, stat.S_IMODE(mode), dir_fd=new)
                with opened(name, old) as before, opened(name, new) as now:
                    move(before, now, f"{full}/")
                for at in (old, new):
                    with suppress(OSError):  # one that is not empty stays
                        os.rmdir(name, dir_fd=at)
            elif name not in os.listdir(new):
                os.rename(name, name, src_dir_fd=old, dst_dir_fd=new)

    move(old, new, "")


def _rename(parent: int, name: str, path: Path, fd: int, overwrite: bool) -> None:
    """Give a file or directory its final name."""
    if overwrite:
        os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    elif not renameat2(parent, name, path, _NO_REPLACE):
        try:
            # Unlike a rename, this fails where the name was taken meanwhile.
            os.link(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            # This file system has no hard links, or it is a directory.
            if os.path.lexists(path):
                raise output_exists(path) from None
            os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    _check_named(parent, path, fd)


def renameat2(parent: int, name: str, path: Path, flag: int) -> bool:
    """Rename with a flag of Linux (renameat2); return whether the file system knows it."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(parent, os.fsencode(name), parent, os.fsencode(path.name), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        raise output_exists(path)
    raise OSError(code, os.strerror(code), str(path))


@contextmanager
def opened(
    name: Path | str, parent: int | None = None, flags: int = DIRECTORY | os.O_NOFOLLOW
) -> Iterator[int]:
    """Open something, by default a directory, for the length of a block."""
    fd = os.open(name, flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def names_below(fd: int) -> set[str]:
    """Return the relative names of all files in a directory and below it."""
    walked = os.fwalk(".", onerror=_refuse, dir_fd=fd)
    return {os.path.normpath(f"{above}/{name}") for above, _, names, _ in walked for name in names}


def reserve(fd: int, num_bytes: int) -> None:
    """Give a new file its size, if the file system says that it has room now."""
    # posix_fallocate would promise it, but is slow in memory and makes disks do the work twice.
    room = os.fstatvfs(fd)
    # Some file systems count nothing.
    if room.f_blocks and room.f_bfree * room.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, num_bytes)


def lock(fd: int) -> bool | None:
    """Lock a file or directory; False if another process has it, None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_same(parent: int, name: str, fd: int) -> bool:
    """Return whether a name still leads to an open file or directory."""
    with suppress(FileNotFoundError):
        at = os.stat(name, dir_fd=parent, follow_symlinks=False)
        return os.path.samestat(os.fstat(fd), at)
    return False


def _check_named(parent: int, path: Path, fd: int) -> None:
    if not _is_same(parent, path.name, fd):
        raise CheckpointError(
            f"{path}: somebody else has put something else under this name; write to a directory "
            "that only you can change"
        )


def _unlink_same(parent: int, name: str, fd: int) -> None:
    with suppress(OSError):
        if _is_same(parent, name, fd):
            os.unlink(name, dir_fd=parent)


def _by_descriptor(fd: int, otherwise: Path) -> Path:
    """Return a path that leads to an open file or directory whatever becomes of its name."""
    at = _DESCRIPTORS / str(fd)
    return at if at.exists() else otherwise


def _stat_of(parent: int, name: str) -> os.stat_result | None:
    """Return the status of a file or directory; None if it is a link or missing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        at = os.stat(name, dir_fd=parent, follow_symlinks=False)
        return at if stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode) else None
    return None


def _give_mode(fd: int, old: os.stat_result | None) -> None:
    """Give something new the mode of what it replaces, and its owner where the system allows it."""
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if old is None or stat.S_IFMT(old.st_mode) != kind:
        os.fchmod(fd, (0o777 if kind == stat.S_IFDIR else 0o666) & ~_umask())
        return
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(OSError):
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode) & 0o777)


def _umask() -> int:
    # Setting it to learn it would change it for other threads meanwhile.
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text("utf-8")
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _give_modes(new: int, older: int | None, alike: os.stat_result | None) -> None:
    """Give all in a directory modes as in an older one, new names that of `alike`; flush it."""
    for above, _, names, fd in os.fwalk(".", topdown=False, onerror=_refuse, dir_fd=new):
        for name in names:
            old = None if older is None else _stat_of(older, f"{above}/{name}")
            with opened(name, fd, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as file:
                _give_mode(file, old or alike)
        _give_mode(fd, None if older is None else _stat_of(older, above))
        _sync(fd)


def _refuse(error: OSError) -> None:
    raise error


def _sync(fd: int) -> None:
    """Flush the names in a directory to the disk, where the file system can do that."""
    with suppress(OSError):
        os.fsync(fd)

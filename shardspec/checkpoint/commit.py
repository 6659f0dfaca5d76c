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
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from shardspec.checkpoint.store import (
    RemotePath,
    output_exists,
    path_errors,
    read_fully,
    reason,
    upload,
)
from shardspec.errors import CheckpointError

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_INNER: Final = DIRECTORY | os.O_NOFOLLOW
FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE: Final = FILE | os.O_CREAT | os.O_EXCL
_NO_REPLACE: Final = 1
_EXCHANGE: Final = 2
_ATTEMPTS: Final = 10
_WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than that: small ones are more work, and large ones can be slow to get."""


class Destination(NamedTuple):
    """Where an output goes."""

    path: Path
    replaced: frozenset[str] = frozenset()
    """Names of files in a directory that go, beside those of the output."""
    inode: int | None = None
    """Inode of the directory to replace, 0 if there is none; None if that is not known."""


@contextmanager
def staged_output(
    destination: Destination, *, directory: bool, overwrite: bool
) -> Iterator[tuple[int, Path]]:
    """Make an empty file or directory to fill, which gets the final name at the end of the block.

    Yields its descriptor and its name until then, which somebody else may give to something else.

    Of a directory that is replaced, files of the same names and those in `replaced` are removed;
    all others are kept, also those that appear meanwhile. If an exception is raised, what was made
    is removed: also a `CheckpointError` if another run is writing the output, or has replaced it.
    """
    path = destination.path
    with (
        _opened_parent(path) as parent,
        _locked(parent, path) as (name, record),
        _made(parent, name, path, directory=directory) as fd,
    ):
        yield fd, path.with_name(name)
        with path_errors(path, "written"):
            old = _stat_of(parent, path.name)
            if destination.inode not in (None, 0 if old is None else old.st_ino):
                raise CheckpointError(
                    f"{path}: another run has replaced it meanwhile; run again to replace that"
                )
            if directory and overwrite and old is not None:
                _exchange(parent, name, path, fd, record, destination.replaced)
            else:
                if directory:
                    _give_modes(fd, None, None)
                else:
                    _give_mode(fd, old)
                _rename(parent, name, path, fd, overwrite and not directory)


@contextmanager
def joined_output(place: Path, path: Path, *, directory: bool) -> Iterator[int]:
    """Open what another process of the same user has staged; `path` is its final name."""
    with ExitStack() as held:
        try:
            fd = held.enter_context(opened(place, flags=_INNER if directory else FILE))
        except OSError as error:
            raise CheckpointError(
                f"{path}: what the first process has begun is not seen here ({reason(error)}); "
                "write to a directory that all processes share"
            ) from None
        if os.fstat(fd).st_uid != os.geteuid():
            raise CheckpointError(f"{path}: {place.name} beside it belongs to another user")
        yield fd


@contextmanager
def _locked(parent: int, path: Path) -> Iterator[tuple[str, int]]:
    """Lock an output by a file beside it; yield the name to stage it under, and the open lock.

    What killed runs of this user have left is removed. Raises a `CheckpointError` if another run is
    alive.
    """
    another_run = CheckpointError(
        f"{path}: another run is writing it; wait for that one, or choose another name"
    )
    name = f".{path.name}.shardspec-{os.urandom(8).hex()}"
    # One run at a time begins, as two could refuse each other. Whoever has locked the directory for
    # longer does something else with it.
    deadline = time.monotonic() + 1.0
    while lock(parent) is False and time.monotonic() < deadline:
        time.sleep(0.002)
    with _made(parent, f"{name}.lock", path) as own:
        locked = lock(own)
        if locked is None:
            warnings.warn(
                f"{path}: this file system has no locks, so another run that writes the same "
                "output is not noticed",
                RuntimeWarning,
                stacklevel=2,
            )
        pattern = re.compile(re.escape(f".{path.name}.shardspec-") + r"[0-9a-f]{16}\.lock")
        with path_errors(path, "written"):
            for other in filter(pattern.fullmatch, os.listdir(parent)):
                if other != f"{name}.lock" and _remove_remains(parent, other, path) is False:
                    raise another_run
        # Before it was locked, another run may have taken it for remains.
        with path_errors(path, "written"):
            if locked is False or not _is_same(parent, f"{name}.lock", own):
                raise another_run
        with suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_UN)
        yield name, own


def _remove_remains(parent: int, locked_by: str, path: Path) -> bool | None:
    """Remove what a killed run has left, known by its lock; return False if the run is alive."""
    with suppress(FileNotFoundError):
        at = os.stat(locked_by, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISREG(at.st_mode) or at.st_uid != os.geteuid():
            return None
        with opened(locked_by, parent, FILE | os.O_NONBLOCK) as fd:
            if not (locked := lock(fd)) or not _is_same(parent, locked_by, fd):
                return locked
            name = locked_by.removesuffix(".lock")
            try:
                _move_rest(parent, name, path, *json.loads(os.pread(fd, os.fstat(fd).st_size, 0)))
            except ValueError:  # it had not begun to replace a directory
                _remove(parent, name)
            except OSError:  # what cannot be moved stays
                pass
            os.unlink(locked_by, dir_fd=parent)
    return True


def _exchange(
    parent: int, name: str, path: Path, fd: int, record: int, replaced: Collection[str]
) -> None:
    """Give a staged directory the name of an older one, and keep the files of others."""
    with opened(path.name, parent) as older:
        known = [at for one in replaced if (at := _stat_of(older, one)) is not None]
        _give_modes(fd, older, known[0] if len({at.st_mode for at in known}) == 1 else None)
    # If this run is killed from here on, the next one moves the files of others.
    rest = os.fstat(fd).st_ino, sorted(names_below(fd)), sorted(replaced)
    os.pwrite(record, json.dumps(rest).encode(), 0)
    os.fsync(record)
    kept = name
    if not renameat2(parent, name, path, _EXCHANGE):
        # Between these two, neither has the name; both are complete on the disk.
        kept = f"{name}-old"
        os.rename(path.name, kept, src_dir_fd=parent, dst_dir_fd=parent)
        os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    _check_named(parent, path, fd)
    for attempt in range(_ATTEMPTS):
        try:
            _move_rest(parent, name, path, *rest)
            return
        except OSError as error:
            # Somebody may put files there by its descriptor, or have them open (NFS).
            if attempt == _ATTEMPTS - 1 and error.errno != errno.ENOTEMPTY:
                raise CheckpointError(
                    f"{path}: is written, but what else was in the old directory could not be "
                    f"moved there ({error.filename or kept}: {reason(error)}); it is kept in "
                    f"{path.with_name(kept)}"
                ) from None


def _move_rest(
    parent: int, name: str, path: Path, inode: int, made: list[str], replaced: list[str]
) -> None:
    """Move the files of others to the directory that was published; remove the rest."""
    for left in (name, f"{name}-old"):
        with suppress(FileNotFoundError), opened(left, parent) as old:
            if os.fstat(old).st_ino == inode:  # not published
                shutil.rmtree(left, ignore_errors=True, dir_fd=parent)
                continue
            with opened(path.name, parent) as new:
                if os.fstat(new).st_ino == inode:
                    move_others(old, new, made, replaced)
            os.rmdir(left, dir_fd=parent)


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
        reserve(fd, num_bytes)
        done = 0
        for piece in pieces:
            write_all(fd, memoryview(piece), done, path)
            done += len(piece)
        older = _stat_of(parent, mode_of or path.name)
        owners = os.geteuid(), os.fstat(parent).st_uid
        if mode_of and older and older.st_uid not in owners:
            older = None  # another user may have put it there
        _give_mode(fd, older)
        os.fsync(fd)
        _rename(parent, name, path, fd, overwrite)


def write_all(
    fd: int, data: memoryview, offset: int, path: Path, scratch: memoryview | None = None
) -> int:
    """Write bytes at a position in a file; raise if the disk is full.

    With `scratch`, memory as long as they are, each part is read again while it is in the CPU's
    cache. Returns the CRC-32 of what was read.
    """
    done = found = 0
    with path_errors(path, "written"):
        while done < len(data):
            count = os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)
            if scratch is not None:
                back = scratch[:count]
                read_back(fd, back, offset + done, path)
                found = int(crc32(back, found))
            done += count
    return found


def read_back(fd: int, room: memoryview, offset: int, path: Path) -> None:
    """Fill memory from a position in a file that was written."""
    # Called so often that a context manager would cost time.
    try:
        missing = read_fully(fd, room, offset)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read again: {reason(error)}") from None
    if missing:
        raise CheckpointError(f"{path}: was cut short while it was written; nothing was kept")


@contextmanager
def _made(parent: int, name: str, path: Path, *, directory: bool = False) -> Iterator[int]:
    """Make an empty file or directory, which is removed unless it has another name in the end."""
    with path_errors(path, "written"):
        if directory:
            os.mkdir(name, 0o700, dir_fd=parent)
        try:
            fd = os.open(name, _INNER if directory else NEW_FILE, 0o600, dir_fd=parent)
        except OSError:
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            raise
    try:
        yield fd
    finally:
        # By now it has its name, or an error is on its way that says more.
        with suppress(OSError):
            if _is_same(parent, name, fd):
                _remove(parent, name)
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
def opened(name: Path | str, parent: int | None = None, flags: int = _INNER) -> Iterator[int]:
    """Open something, by default a directory, for the length of a block."""
    fd = os.open(name, flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def open_below(fd: int, name: str, flags: int) -> int:
    """Open a file below a directory, following no links; directories above a new one are made."""
    *above, last = name.split("/")
    if not {"", ".", ".."}.isdisjoint((*above, last)):
        raise CheckpointError(f"{name!r} does not name a file in a directory; choose another")
    with ExitStack() as held:
        for part in above:
            if flags & os.O_CREAT:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            fd = held.enter_context(opened(part, fd))
        return os.open(last, flags, 0o600, dir_fd=fd)


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


def _remove(parent: int, name: str) -> None:
    """Remove a file or directory as far as the system allows it."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        shutil.rmtree(name, ignore_errors=True, dir_fd=parent)


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

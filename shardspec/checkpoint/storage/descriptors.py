"""System calls on files and directories by descriptors: open, walk, lock, rename, flush.

Names are relative to the descriptor of their directory, and links are not followed.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePath
from typing import Final, TypeAlias

from shardspec.checkpoint.storage.path import StoragePath, output_exists
from shardspec.errors import CheckpointError

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
INNER: Final = DIRECTORY | os.O_NOFOLLOW
FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE: Final = FILE | os.O_CREAT | os.O_EXCL
NO_REPLACE: Final = 1
EXCHANGE: Final = 2
_WRITE_BYTES: Final = 128 << 10
"""Bytes written by one call, as `cat` does. Linux makes the pages of its cache no larger: small
pages are more work, and large ones can be slow to allocate."""

Mode: TypeAlias = tuple[int, int, int]
"""User, group and mode of a file or directory."""


@contextmanager
def opened(name: PurePath | str, parent: int | None = None, flags: int = INNER) -> Iterator[int]:
    """Open a file or directory, by default a directory, for the length of a block."""
    fd = os.open(name, flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def open_below(fd: int, name: str, flags: int) -> int:
    """Open a file below a directory without following links; parents of a new one are created."""
    *above, last = name.split("/")
    if not {"", ".", ".."}.isdisjoint((*above, last)):
        raise CheckpointError(f"{name!r} does not name a file in a directory; choose another")
    with ExitStack() as opened_above:
        for part in above:
            if flags & os.O_CREAT:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            fd = opened_above.enter_context(opened(part, fd))
        return os.open(last, flags, 0o600, dir_fd=fd)


def names_below(fd: int) -> Iterator[str]:
    """Yield the relative names of all files below a directory.

    Empty directories are among them; their names end in a slash.
    """
    for above, inner, names, at in os.fwalk(".", onerror=_refuse, dir_fd=fd):
        if not (inner or names) and above != ".":
            yield f"{os.path.normpath(above)}/"
        for name in names + inner:
            mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                yield os.path.normpath(f"{above}/{name}")


def reserve(fd: int, num_bytes: int) -> None:
    """Give a new file its size; raises OSError if the file system has less free space."""
    # posix_fallocate would reserve it, but is slow in memory and makes disks write twice.
    room = os.fstatvfs(fd)
    # Some file systems report no sizes.
    if room.f_blocks and room.f_bfree * room.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, num_bytes)


def lock(fd: int) -> bool | None:
    """Lock a file or directory; False if another process has, None if there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_same(parent: int, name: str, fd: int) -> bool:
    """Return whether a name still leads to an open file or directory."""
    with suppress(FileNotFoundError):
        at = os.stat(name, dir_fd=parent, follow_symlinks=False)
        return os.path.samestat(os.fstat(fd), at)
    return False


def read_fully(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a file; return how many bytes are missing as the file ends."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
        if not count:
            break
        done += count
    return len(buffer) - done


def write_all(fd: int, data: memoryview, offset: int, path: StoragePath) -> None:
    """Write bytes at a position in a file; raise if the disk is full."""
    done = 0
    with path.errors("written"):
        while done < len(data):
            done += os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)


def begin_flush(fd: int) -> None:
    """Let the disk begin with what was written to a file, where the system can (Linux)."""
    import ctypes

    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)  # SYNC_FILE_RANGE_WRITE


def renameat2(parent: int, name: str, path: StoragePath, flag: int) -> bool:
    """Rename with a flag of Linux (renameat2); return False if the file system lacks it."""
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


def remove(parent: int, name: str) -> None:
    """Remove a file or directory as far as the system allows it."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        shutil.rmtree(name, ignore_errors=True, dir_fd=parent)


def stat_of(parent: int, name: str) -> os.stat_result | None:
    """Return the status of a file or directory; None if it is a link or missing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        at = os.stat(name, dir_fd=parent, follow_symlinks=False)
        return at if stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode) else None
    return None


def mode_at(parent: int, name: str, fd: int) -> Mode | None:
    """Return the mode of a file or directory, if it is of the same kind as an open one."""
    at = stat_of(parent, name)
    if at is None or stat.S_IFMT(at.st_mode) != stat.S_IFMT(os.fstat(fd).st_mode):
        return None
    return at.st_uid, at.st_gid, stat.S_IMODE(at.st_mode) & 0o777


def common_mode(directory: int, names: Iterable[str]) -> Mode | None:
    """Return the strictest mode of some files, with the owner of the first one."""
    stats = (stat_of(directory, name) for name in sorted(names))
    files = [at for at in stats if at is not None and stat.S_ISREG(at.st_mode)]
    mode = 0o777
    for at in files:
        mode &= at.st_mode
    return (files[0].st_uid, files[0].st_gid, mode) if files else None


def give_mode(fd: int, old: Mode | None) -> None:
    """Give a new file the mode of the old one, and its owner if the system allows it."""
    if old is None:
        usual = 0o777 if stat.S_ISDIR(os.fstat(fd).st_mode) else 0o666
        os.fchmod(fd, usual & ~_umask())
        return
    user, group, mode = old
    if (user, group) != (os.geteuid(), os.getegid()):
        with suppress(OSError):
            os.fchown(fd, user, group)
    os.fchmod(fd, mode)


def _umask() -> int:
    # os.umask would change it for other threads meanwhile.
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text("utf-8")
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def give_modes(new: int, older: int | None, common: Mode | None) -> None:
    """Give all files in a directory their modes in an older one, or a common mode; flush them."""
    for above, _, names, fd in os.fwalk(".", topdown=False, onerror=_refuse, dir_fd=new):
        for name in names:
            with opened(name, fd, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as file:
                old = None if older is None else mode_at(older, f"{above}/{name}", file)
                give_mode(file, old or common)
                os.fsync(file)
        give_mode(fd, None if older is None else mode_at(older, above, fd))
        sync(fd)


def _refuse(error: OSError) -> None:
    raise error


def sync(fd: int) -> None:
    """Flush the names in a directory to the disk, if the file system can do that."""
    with suppress(OSError):
        os.fsync(fd)

"""Wraps system calls on files: lock, read and write in full, rename, flush."""

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Final

from shardspec.checkpoint.storage.path import StoragePath, output_exists

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE: Final = FILE | os.O_CREAT | os.O_EXCL
NO_REPLACE: Final = 1
EXCHANGE: Final = 2
_HERE: Final = -100
"""AT_FDCWD: relative paths start in the working directory."""
_WRITE_BYTES: Final = 128 << 10
"""Bytes per write call, as in `cat`. Linux makes no larger pages in its cache: small pages are more
work, and large ones can be slow to allocate."""


def reserve(fd: int, num_bytes: int) -> None:
    """Give a new file its size; raises OSError if the file system has less free space."""
    # posix_fallocate would reserve it, but is slow in memory and makes disks write twice.
    room = os.fstatvfs(fd)
    # Some file systems report no sizes.
    if room.f_blocks and room.f_bfree * room.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, num_bytes)


def lock(fd: int) -> bool | None:
    """Lock a file; return False if another process has the lock, None without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def read_fully(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a file; return the number of bytes missing at the end of the file."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(fd, [buffer[filled:] if filled else buffer], offset + filled)
        if not count:
            break
        filled += count
    return len(buffer) - filled


def write_all(fd: int, data: memoryview, offset: int, path: StoragePath) -> None:
    """Write bytes at a position in a file; raise if the disk is full."""
    written = 0
    with path.errors("written"):
        while written < len(data):
            written += os.pwrite(fd, data[written : written + _WRITE_BYTES], offset + written)


def begin_flush(fd: int) -> None:
    """Start flushing the written bytes of a file to the disk, on systems that can (Linux)."""
    import ctypes

    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)  # SYNC_FILE_RANGE_WRITE


def renameat2(source: StoragePath, path: StoragePath, flag: int) -> bool:
    """Rename with a flag of Linux (renameat2); return False if the file system lacks it."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(source), _HERE, os.fsencode(path), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        raise output_exists(path)
    raise OSError(code, os.strerror(code), str(path))


def remove(place: PurePath) -> None:
    """Remove a file or directory as far as the system allows it."""
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place, ignore_errors=True)
    else:
        Path(place).unlink(missing_ok=True)


def finish(
    place: PurePath, older: os.stat_result | None, default: tuple[int, int, int] | None = None
) -> None:
    """Give a new file or directory the owner and mode of an older one, and flush it.

    Without an older one of the same kind it gets owner, group and mode of `default`, or else the
    default mode.
    """
    fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        if older is not None and stat.S_IFMT(older.st_mode) == stat.S_IFMT(os.fstat(fd).st_mode):
            default = older.st_uid, older.st_gid, stat.S_IMODE(older.st_mode) & 0o777
        if default is None:
            default = -1, -1, (0o777 if directory else 0o666) & ~_umask()
        with suppress(OSError):
            os.fchown(fd, *default[:2])
        os.fchmod(fd, default[2])
        if directory:
            _flush(fd)
        else:
            os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    # os.umask would change it for other threads meanwhile.
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text("utf-8")
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync(directory: StoragePath) -> None:
    """Flush the names in a directory to the disk, if the file system can do that."""
    with suppress(OSError):
        fd = os.open(directory, DIRECTORY)
        try:
            _flush(fd)
        finally:
            os.close(fd)


def _flush(fd: int) -> None:
    with suppress(OSError):
        os.fsync(fd)

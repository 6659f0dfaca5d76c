"""What Linux offers to those who share a directory: locks, names by descriptor, exact renames.

Nothing here follows a link that somebody else may have put into the place of a name.
"""

import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from shardspec.errors import CheckpointError, OutputExistsError

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DESCRIPTORS: Final = Path("/proc/self/fd")
_NO_REPLACE: Final = 1
_EXCHANGE: Final = 2


@contextmanager
def opened(
    name: Path | str, parent: int | None = None, flags: int = DIRECTORY | os.O_NOFOLLOW
) -> Iterator[int]:
    """Open something, a directory unless said otherwise, for the length of a block."""
    fd = os.open(name, flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def exists(path: Path) -> OutputExistsError:
    """Return the error that says that an output is there already."""
    return OutputExistsError(
        f"{path}: exists; choose another name, or overwrite it with --force (overwrite=True)"
    )


def reserve(fd: int, num_bytes: int) -> None:
    """Give a new file its size, if the file system says that it has the room.

    That is a word about now, not a promise: posix_fallocate promises, but takes longer than
    writing where files are in memory, and leaves disks work to do twice.
    """
    room = os.fstatvfs(fd)
    # Some file systems count nothing.
    if room.f_blocks and room.f_bfree * room.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, num_bytes)


def lock(fd: int) -> bool | None:
    """Lock a file or directory; False if another has it, None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_same(parent: int, name: str, fd: int) -> bool:
    """Return whether a descriptor is still what the name leads to."""
    try:
        at = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), at)


def check_named(parent: int, path: Path, fd: int) -> None:
    """Raise if a name that was given to a file or directory leads to something else."""
    if not is_same(parent, path.name, fd):
        raise CheckpointError(
            f"{path}: somebody else has put something else under this name; write to a directory "
            "that only you can change"
        )


def unlink_same(parent: int, name: str, fd: int) -> None:
    """Remove a name if a descriptor is still what it leads to."""
    with suppress(OSError):
        if is_same(parent, name, fd):
            os.unlink(name, dir_fd=parent)


def remove_tree(parent: int, name: str) -> None:
    """Remove a directory and what is in it, as far as the system lets us."""
    # Importing it takes as long as copying 5 MiB, and few runs have a directory to remove.
    import shutil

    shutil.rmtree(name, ignore_errors=True, dir_fd=parent)


def by_descriptor(fd: int, otherwise: Path) -> Path:
    """Return a path that leads to an open file or directory whatever becomes of its name."""
    at = DESCRIPTORS / str(fd)
    return at if at.exists() else otherwise


def open_below(place: Path, name: str, flags: int, *, make: bool = False) -> int:
    """Open a file in a directory by its name, which may name directories on the way, but no links.

    With `make`, directories on the way that are missing are made, for this user alone.
    """
    *above, last = name.split("/")
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if not above:
        return os.open(place / last, flags, 0o600)
    if not {"", ".", ".."}.isdisjoint((*above, last)):
        raise CheckpointError(f"{name!r} does not name a file below a directory; choose another")
    fd = os.open(place, DIRECTORY)
    try:
        for part in above:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            inner = os.open(part, DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        return os.open(last, flags, 0o600, dir_fd=fd)
    finally:
        os.close(fd)


def names_below(fd: int, above: str = "") -> Iterator[str]:
    """Yield the names of everything but directories, in a directory and below it."""
    with os.scandir(fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                with opened(entry.name, fd) as inner:
                    yield from names_below(inner, f"{above}{entry.name}/")
            else:
                yield above + entry.name


def stat_of(parent: int, name: str) -> os.stat_result | None:
    """Return the state of a file or directory that is there; None if it is a link or missing."""
    try:
        at = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return at if stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode) else None


def give_mode(fd: int, old: os.stat_result | None) -> None:
    """Give something new the mode of what it replaces, and its owner where the system lets us."""
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if old is None or stat.S_IFMT(old.st_mode) != kind:
        os.fchmod(fd, (0o777 if kind == stat.S_IFDIR else 0o666) & ~_umask())
        return
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(OSError):
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode) & 0o777)


def give_modes(new: int, older: int | None, alike: os.stat_result | None = None) -> None:
    """Give a directory and all in it the modes of what they replace in an older one, and flush it.

    `alike` is the state of files that replace none, if it is known.
    """

    def refuse(error: OSError) -> None:
        raise error

    for above, _, names, fd in os.fwalk(".", topdown=False, onerror=refuse, dir_fd=new):
        for name in names:
            old = None if older is None else stat_of(older, f"{above}/{name}")
            with opened(name, fd, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as file:
                give_mode(file, old or alike)
        give_mode(fd, None if older is None else stat_of(older, above))
        sync(fd)


def _umask() -> int:
    with suppress(OSError):
        found = re.search(rb"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_bytes(), re.M)
        if found is not None:
            return int(found[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def move_others(
    old: int,
    new: int,
    made: Collection[str],
    replaced: Collection[str],
    *,
    late: bool = False,
) -> None:
    """Move from a directory to the one that replaces it what neither was made there nor is to go.

    `made` are names of the files made in the new one, `replaced` of those of the old that go. With
    `late`, what has a name in the new one by now is newer, and stays. Raises an IsADirectoryError
    if a file was made where the old one has a directory.
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
            elif not (late and name in os.listdir(new)):
                os.rename(name, name, src_dir_fd=old, dst_dir_fd=new)

    move(old, new, "")


def rename(parent: int, name: str, path: Path, fd: int, *, overwrite: bool) -> None:
    """Give a file or directory its final name, and make sure that it is that which has the name."""
    if overwrite:
        os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    elif not renameat2(parent, name, path, _NO_REPLACE):
        try:
            # Unlike a rename, this fails where the name was taken by another process meanwhile.
            os.link(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            # This file system has no hard links, or it is a directory; a look has to do.
            if os.path.lexists(path):
                raise exists(path) from None
            os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    check_named(parent, path, fd)


def exchange(parent: int, name: str, path: Path) -> str:
    """Put a directory into the place of another; return the name that the other has then."""
    if renameat2(parent, name, path, _EXCHANGE):
        return name
    # Between these two, neither stands under the name; both are complete on the disk.
    old_name = f"{name}-old"
    os.rename(path.name, old_name, src_dir_fd=parent, dst_dir_fd=parent)
    os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    return old_name


def renameat2(parent: int, name: str, path: Path, flag: int) -> bool:
    """Rename by a flag of Linux (renameat2); return whether the file system knows it."""
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(parent, os.fsencode(name), parent, os.fsencode(path.name), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        raise exists(path)
    raise OSError(code, os.strerror(code), str(path))


def sync(fd: int) -> None:
    """Flush the names in a directory to the disk, where the file system can do that."""
    with suppress(OSError):
        os.fsync(fd)

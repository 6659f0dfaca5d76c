"""Giving a finished file or directory its name, in one indivisible step where the system has one.

Linux can rename only if the new name is free, and can exchange two names (renameat2). Elsewhere a
link does the first for files; what is left is a check just before.
"""

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardspec.errors import OutputExistsError

__all__ = ["publish"]

_AT_FDCWD: Final = -100
_NOREPLACE: Final = 1
_EXCHANGE: Final = 2
_UNSUPPORTED: Final = frozenset((errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP))


def publish(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Give what is finished its name.

    Parameters
    ----------
    temporary
        A file or directory beside `path`.
    path
        The final name.
    overwrite
        Whether something of that name is replaced; a directory that was replaced is removed.

    Raises
    ------
    OutputExistsError
        If there is something of that name and `overwrite` is not set.
    OSError
        If the system refuses.
    """
    if not overwrite:
        if not _rename(temporary, path, _NOREPLACE):
            _publish_new(temporary, path)
    elif not temporary.is_dir():
        temporary.replace(path)
    elif not path.exists():
        temporary.rename(path)
    else:
        if not _rename(temporary, path, _EXCHANGE):
            # Between these two, neither stands under the name; both are complete on the disk.
            aside = temporary.with_name(f"{temporary.name}.old")
            path.rename(aside)
            temporary.rename(path)
            temporary = aside
        # The output has its name: that the old one cannot be removed is no failure.
        with suppress(OSError, ImportError):
            # Importing it takes as long as copying 5 MiB, and few outputs replace a directory.
            import shutil

            shutil.rmtree(temporary, ignore_errors=True)


def _publish_new(temporary: Path, path: Path) -> None:
    if not temporary.is_dir():
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise exists(path) from None
        except OSError:
            # This file system has no hard links; the check at the start has to do.
            temporary.replace(path)
        else:
            # The output has its name; the next run removes this one.
            with suppress(OSError):
                temporary.unlink()
    elif os.path.lexists(path):
        raise exists(path)
    else:
        temporary.rename(path)


def exists(path: Path) -> OutputExistsError:
    """Return the error that says so."""
    return OutputExistsError(
        f"{path}: exists; choose another name, or overwrite it with --force (overwrite=True)"
    )


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Rename by a flag of Linux; return whether the system and its file system know it."""
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        raise exists(target)
    raise OSError(code, os.strerror(code), str(target))

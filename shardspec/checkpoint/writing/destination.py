"""Whether an output may be written where the user wants it, found out before anything is."""

import os
import stat
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.store import RemotePath, reason
from shardspec.checkpoint.writing.rename import exists
from shardspec.checkpoint.writing.replacing import BESIDE_SUFFIX
from shardspec.errors import CheckpointError

__all__ = ["check_destination"]

_OF_CHECKPOINTS: Final = (".safetensors", ".json", ".distcp", ".metadata", ".pt")
"""How the names of files end that make up a checkpoint that may be replaced as a whole."""


def check_destination(output: Path, source: Catalog, *, directory: bool, overwrite: bool) -> Path:
    """Return where to write, links followed, once it is clear that writing there does no harm.

    Parameters
    ----------
    output
        What the user named.
    source
        The checkpoint that is read; no part of it is written over.
    directory
        Whether a directory is to be written.
    overwrite
        Whether what is there may be replaced.

    Raises
    ------
    OutputExistsError
        If it exists and `overwrite` is not set.
    CheckpointError
        If it cannot be written, is of another kind, belongs to the source, or is a directory that
        holds more than a checkpoint.
    """
    if "\0" in str(output):
        raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL; choose another")
    if isinstance(output, RemotePath):
        _check_remote(output, source, directory, overwrite)
        return output
    path = Path(os.path.realpath(output))
    try:
        at = path.stat()
    except FileNotFoundError:
        _check_place(output, path, source)
        if not path.parent.is_dir():
            raise CheckpointError(
                f"{output}: its directory {path.parent} does not exist; make it first"
            ) from None
        _check_writable(output, path.parent)
        return path
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {reason(error)}") from None
    if directory:
        _check_directory(output, path, at, source, overwrite)
    else:
        _check_file(output, path, at, source, overwrite)
    _check_writable(output, path.parent)
    return path


def _check_writable(output: Path, directory: Path) -> None:
    """Refuse a place where nothing can be made, before anything is read, and in a dry run too."""
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise CheckpointError(
            f"{output}: nothing can be written into {directory}, for want of permission or because "
            "it is read-only; write elsewhere"
        )


_LISTS: Final = (".json", ".metadata")
"""How the names of files end that list the other files of a checkpoint."""


def _check_place(output: Path, path: Path, source: Catalog) -> None:
    """Refuse a new name that would make the output a part of what is read."""
    if not source.directory.is_dir() or any(f.name.endswith(_LISTS) for f in source.files):
        return
    for file in source.files:
        at = file.parent if isinstance(file, RemotePath) else Path(os.path.realpath(file.parent))
        if file.suffix == path.suffix and at == path.parent:
            raise CheckpointError(
                f"{output}: would lie among the files of the checkpoint, which no index lists, and "
                "count as one of them; choose another directory"
            )


def _check_file(
    output: Path, path: Path, at: os.stat_result, source: Catalog, overwrite: bool
) -> None:
    if not stat.S_ISREG(at.st_mode):
        kind = "a directory" if stat.S_ISDIR(at.st_mode) else "no regular file"
        raise CheckpointError(f"{output}: is {kind}; name a file to write")
    for file in source.files:
        if not isinstance(file, RemotePath) and path.samefile(file):
            raise CheckpointError(
                f"{output}: is {file.name} of the checkpoint itself; choose another name"
            )
    if not overwrite:
        raise exists(output)


def _check_directory(
    output: Path, path: Path, at: os.stat_result, source: Catalog, overwrite: bool
) -> None:
    if not stat.S_ISDIR(at.st_mode):
        raise CheckpointError(f"{output}: is a file; name a directory to write")
    for file in source.files:
        if not isinstance(file, RemotePath) and path in Path(os.path.realpath(file)).parents:
            raise CheckpointError(
                f"{output}: holds the checkpoint itself; choose another directory"
            )
    if not overwrite:
        raise exists(output)
    try:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            plain = entry.is_file(follow_symlinks=False)
            if not plain or not entry.name.endswith(_OF_CHECKPOINTS):
                raise _holds_more(output, entry.name)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{output}: cannot be read: {reason(error)}") from None


def _holds_more(output: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{output}: holds {name!r}, which is no part of a checkpoint, so the directory is not "
        "replaced; choose another one"
    )


def _check_remote(output: RemotePath, source: Catalog, directory: bool, overwrite: bool) -> None:
    """Do in a store what is done for files and directories of this machine."""
    for file in source.files:
        if output == file or output in file.parents:
            raise CheckpointError(f"{output}: holds the checkpoint itself; choose another name")
    try:
        entries = output.entries()
    except FileNotFoundError:
        _check_place(output, output, source)
        return
    except NotADirectoryError:
        if directory:
            raise CheckpointError(f"{output}: is a file; name a directory to write") from None
        if not overwrite:
            raise exists(output) from None
        return
    if not directory:
        raise CheckpointError(f"{output}: is a directory; name a file to write")
    if entries and not overwrite:
        raise exists(output)
    for name, plain in sorted(entries.items()):
        if not plain or not name.endswith((*_OF_CHECKPOINTS, BESIDE_SUFFIX)):
            raise _holds_more(output, name)

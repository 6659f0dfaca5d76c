"""Whether an output may be written where the user wants it, found out before anything is."""

import os
import re
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.directories import exists, names_below, opened
from shardspec.checkpoint.formats.names import (
    BIN_INDEX,
    DEEPSPEED_MODEL,
    DEEPSPEED_UNIVERSAL,
    INDEX_SUFFIX,
    INFO_NAME,
    METADATA_NAME,
    UNIVERSAL_LATEST,
    UNIVERSAL_OPTIMIZER,
    format_of_names,
    is_data_file,
)
from shardspec.checkpoint.store import RemotePath, reason
from shardspec.errors import CheckpointError, ShardSpecError

__all__ = ["check_destination", "check_others", "files_of_checkpoint"]


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
        If it cannot be written, is of another kind, or belongs to the source.
    """
    if "\0" in str(output):
        raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL; choose another")
    if isinstance(output, RemotePath):
        _check_remote(output, source, directory, overwrite)
        return output
    _check_link(output)
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
    _check_there(output, path, at, source, directory=directory, overwrite=overwrite)
    _check_writable(output, path.parent)
    return path


def _check_link(output: Path) -> None:
    """Refuse a link that somebody else has made: it may lead to any file of this user."""
    try:
        at = os.lstat(output)
    except OSError:
        return
    if stat.S_ISLNK(at.st_mode) and at.st_uid not in (os.geteuid(), 0):
        raise CheckpointError(
            f"{output}: is a link that another user has made (user id {at.st_uid}); remove it, or "
            "choose another name"
        )


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


def _check_there(
    output: Path,
    path: Path,
    at: os.stat_result,
    source: Catalog,
    *,
    directory: bool,
    overwrite: bool,
) -> None:
    """Refuse what is of another kind, belongs to the source, or is to be kept."""
    if directory and not stat.S_ISDIR(at.st_mode):
        raise CheckpointError(f"{output}: is a file; name a directory to write")
    if not directory and not stat.S_ISREG(at.st_mode):
        kind = "a directory" if stat.S_ISDIR(at.st_mode) else "no regular file"
        raise CheckpointError(f"{output}: is {kind}; name a file to write")
    for file in source.files:
        if isinstance(file, RemotePath):
            continue
        if directory and path in Path(os.path.realpath(file)).parents:
            raise CheckpointError(
                f"{output}: holds the checkpoint itself; choose another directory"
            )
        if not directory and path.samefile(file):
            raise CheckpointError(
                f"{output}: is {file.name} of the checkpoint itself; choose another name"
            )
    if not overwrite:
        raise exists(output)


_LISTS_OF_FILES: Final = (INFO_NAME, METADATA_NAME, BIN_INDEX)
_OWN_NAMES: Final = re.compile(
    r"(model(-\d{5}-of-\d{5})?|shard-\d+-model-\d+-of-\d+|shard-\d{5,}-[0-9a-f]{16})\.safetensors"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin"
)
"""Files that nothing lists and that are nonetheless parts of a checkpoint by their names."""


def files_of_checkpoint(directory: Path) -> frozenset[str]:
    """Return the names of the files in a directory that make up the checkpoint that it holds.

    Only what can be opened as a checkpoint counts, and in it only what an index or a sharding info
    lists and is as that says, or what has a name that only parts of checkpoints have. Whatever else
    lies there is somebody else's.
    """
    from shardspec.checkpoint.open import open_checkpoint

    try:
        source = open_checkpoint(directory)
        for name in source.names:
            source.tensor(name)
    except ShardSpecError:
        return frozenset(name for name in _names_in(directory) if _OWN_NAMES.fullmatch(name))
    if source.format == DEEPSPEED_UNIVERSAL:
        below = (file.relative_to(source.directory).as_posix() for file in source.files)
        return frozenset((*below, UNIVERSAL_OPTIMIZER, UNIVERSAL_LATEST))
    inside = {file.name for file in source.files if file.parent == source.directory}
    listed = any(name in _LISTS_OF_FILES or name.endswith(INDEX_SUFFIX) for name in inside)
    return frozenset(
        name
        for name in inside
        if _OWN_NAMES.fullmatch(name)
        or (listed and name.endswith(_DATA))
        or name in _LISTS_OF_FILES
        or name.endswith(INDEX_SUFFIX)
    )


_DATA: Final = (".safetensors", ".distcp", ".bin")


def _names_in(directory: Path, inner: Collection[str] = ()) -> set[str]:
    """Return the names in a directory; of those that are `inner` directories what lies below."""
    try:
        if isinstance(directory, RemotePath):
            return set(directory.entries())
        found = set(os.listdir(directory))
        for name in found & set(inner):
            with opened(directory / name) as fd:
                found = found - {name} | set(names_below(fd, f"{name}/"))
    except OSError:
        return set()
    return found


def _check_kinds(output: Path, new: Collection[str]) -> None:
    """Refuse to write files where directories are, or directories where anything else is."""
    if isinstance(output, RemotePath):
        return
    due = dict.fromkeys(new, "file")
    due |= {str(at): "directory" for name in new for at in PurePosixPath(name).parents}
    for name, kind in due.items():
        try:
            mode = os.lstat(output / name).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) != (kind == "directory"):
            raise CheckpointError(
                f"{output}: holds {name!r}, where a {kind} is to be written; move it, or choose "
                "another directory"
            )


def check_others(
    output: Path, replaced: frozenset[str], new: frozenset[str], *, listed: bool
) -> None:
    """Refuse to write a directory in which files that are kept would count, and not what is new.

    A kept index, info or metadata would be read instead of what was written, or make it unreadable.

    Parameters
    ----------
    output
        The directory, if it exists.
    replaced
        Names of files that go.
    new
        Names of files that are written.
    listed
        Whether the output lists its files.

    Raises
    ------
    CheckpointError
        If there are any; names them.
    """
    inner = {name.split("/")[0] for name in new if "/" in name}
    heads = new - {name for name in new if "/" in name} | inner
    _check_kinds(output, new)
    kept = _names_in(output, inner) - replaced - new
    if not listed:
        others = sorted(
            name
            for name in kept
            if is_data_file(name)
            or name.endswith(INDEX_SUFFIX)
            # Of a Universal Checkpoint.
            or (inner and DEEPSPEED_MODEL.fullmatch(name))
            or ("/" in name and name.endswith(".pt"))
        )
        if others:
            raise CheckpointError(
                f"{output}: holds {', '.join(map(repr, others[:3]))}, which would count as parts "
                "of what is written there; move them, or choose another directory"
            )
    known = format_of_names(heads)
    if format_of_names(heads | kept) is not known:
        first = sorted(n for n in kept if format_of_names(heads | {n}) is not known)
        first = first or sorted(kept)
        raise CheckpointError(
            f"{output}: holds {', '.join(map(repr, first[:3]))}, which would be read instead of "
            "what is written there; move them, or choose another directory"
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

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


def check_destination(output: Path, source: Catalog, *, directory: bool, overwrite: bool) -> Path:
    """Return where to write, links followed, once it is clear that writing there does no harm.

    No part of the `source` is written over, and what is there is of the kind that is written: a
    `directory` or a file. Raises an `OutputExistsError` if it exists and `overwrite` is not set, a
    `CheckpointError` for all else.
    """
    if "\0" in str(output):
        raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL; choose another")
    here = not isinstance(output, RemotePath)
    # A link of somebody else may lead to any file of this user. Not Path.is_symlink, which raises
    # where a name is too long.
    if here and os.path.islink(output):
        owner = os.lstat(output).st_uid
        if owner not in (os.geteuid(), 0):
            raise CheckpointError(
                f"{output}: is a link that another user has made (user id {owner}); remove it, or "
                "choose another name"
            )
    path = _real(output)
    kind = _kind(output, path)
    for file in source.files:
        same = path == _real(file)
        if not same and here and kind == "a file":
            same = not isinstance(file, RemotePath) and path.samefile(file)
        if directory and (same or path in _real(file).parents):
            raise CheckpointError(f"{output}: holds the checkpoint itself; choose another name")
        if same:
            raise CheckpointError(
                f"{output}: is {file.name} of the checkpoint itself; choose another name"
            )
    due = "a directory" if directory else "a file"
    if kind not in (None, due):
        raise CheckpointError(f"{output}: is {kind}; name {due} to write")
    if kind is None:
        _check_place(output, path, source)
    elif not overwrite and (here or not path.is_dir() or any(path.iterdir())):
        # A directory in a store may be an empty mark.
        raise exists(output)
    if here and not path.parent.is_dir():
        raise CheckpointError(
            f"{output}: its directory {path.parent} does not exist; make it first"
        )
    if here and not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise CheckpointError(
            f"{output}: nothing can be written into {path.parent}, for want of permission or "
            "because it is read-only; write elsewhere"
        )
    return path


def _real(path: Path) -> Path:
    """Return a path with links followed."""
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def _kind(output: Path, path: Path) -> str | None:
    """Return what is there, in words; None if there is nothing."""
    if isinstance(path, RemotePath):
        info = path.info()
        return None if info is None else f"a {info['type']}"
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {reason(error)}") from None
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "no regular file"


def _check_place(output: Path, path: Path, source: Catalog) -> None:
    """Refuse a new name that would make the output a part of what is read."""
    lists = (".json", ".metadata")
    if not source.directory.is_dir() or any(f.name.endswith(lists) for f in source.files):
        return
    for file in source.files:
        if file.suffix == path.suffix and _real(file.parent) == path.parent:
            raise CheckpointError(
                f"{output}: would lie among the files of the checkpoint, which no index lists, and "
                "count as one of them; choose another directory"
            )


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
    Files of the names `replaced` go, those of the names `new` are written; `listed` says whether
    the output lists its files.
    """
    inner = {name.split("/")[0] for name in new if "/" in name}
    heads = new - {name for name in new if "/" in name} | inner
    _check_kinds(output, new)
    kept = _names_in(output, inner) - replaced - new
    counted: list[str] = []
    if not listed:
        counted = sorted(
            name
            for name in kept
            if is_data_file(name)
            or name.endswith(INDEX_SUFFIX)
            # Of a Universal Checkpoint.
            or (inner and DEEPSPEED_MODEL.fullmatch(name))
            or ("/" in name and name.endswith(".pt"))
        )
    read: list[str] = []
    known = format_of_names(heads)
    if format_of_names(heads | kept) is not known:
        read = sorted(name for name in kept if format_of_names(heads | {name}) is not known)
        read = read or sorted(kept)
    for names, do in ((counted, "count as parts of"), (read, "be read instead of")):
        if names:
            raise CheckpointError(
                f"{output}: holds {', '.join(map(repr, names[:3]))}, which would {do} what is "
                "written there; move them, or choose another directory"
            )

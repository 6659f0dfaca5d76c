"""Whether an output may be written where the user wants it, checked before anything is written."""

import os
import re
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.commit import Destination, names_below, opened
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
from shardspec.checkpoint.store import RemotePath, output_exists, path_errors
from shardspec.checkpoint.targets import Target
from shardspec.errors import CheckpointError, ShardSpecError

_LISTS: Final = {
    "shardspec": INFO_NAME,
    "dcp": METADATA_NAME,
    "huggingface": f"model{INDEX_SUFFIX}",
}
"""The file that lists the others of an output, by its format."""
_LISTS_OF_FILES: Final = (INFO_NAME, METADATA_NAME, BIN_INDEX, INDEX_SUFFIX)
_DATA: Final = (".safetensors", ".distcp", ".bin")
_OWN_NAMES: Final = re.compile(
    r"(model(-\d{5}-of-\d{5})?|shard-\d+-model-\d+-of-\d+|shard-\d{5,}-[0-9a-f]{16})\.safetensors"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin"
)
"""Files that are parts of a checkpoint by their names, also where nothing lists them."""


def check_place(output: Path, source: Catalog, *, directory: bool, overwrite: bool) -> Path:
    """Return where to write, links resolved, if writing there does no harm.

    No part of the `source` is overwritten, and what is there is a directory or a file like the
    output. Raises an `OutputExistsError` if it exists and `overwrite` is not set, a
    `CheckpointError` otherwise.
    """
    if "\0" in str(output):
        raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL; choose another")
    here = not isinstance(output, RemotePath)
    # Somebody else's link may lead to any file of this user. Path.is_symlink raises where a name is
    # too long.
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
        # Without an index, every file of the directory counts.
        listed = any(file.name.endswith((".json", ".metadata")) for file in source.files)
        beside = file.suffix == path.suffix and _real(file.parent) == path.parent
        if kind is None and beside and not listed and source.directory.is_dir():
            raise CheckpointError(
                f"{output}: would be among the files of the checkpoint, which no index lists, and "
                "count as one of them; choose another directory"
            )
    due = "a directory" if directory else "a file"
    if kind not in (None, due):
        raise CheckpointError(f"{output}: is {kind}; name {due} to write")
    # A directory in a store may be an empty mark.
    if kind and not overwrite and (here or not path.is_dir() or any(path.iterdir())):
        raise output_exists(output)
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
    """Return a path with links resolved."""
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def _kind(output: Path, path: Path) -> str | None:
    """Return what is there, in words; None if there is nothing."""
    if isinstance(path, RemotePath):
        info = path.info()
        return None if info is None else f"a {info['type']}"
    with path_errors(output, "written"):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return None
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "no regular file"


def check_replaced(path: Path, target: Target, format: str) -> Destination:
    """Return which files of a directory an output replaces.

    Refuse it where others would count as parts of what is new, or be read instead: a kept index,
    for example.
    """
    inode: int | None = None
    if not isinstance(path, RemotePath):
        inode = path.stat().st_ino if path.exists() else 0
    replaced = _files_of_checkpoint(path)
    new = {file.name for file in target.files}
    if target.last is not None:
        new.add(_LISTS[format])
    inner = {name.split("/")[0] for name in new if "/" in name}
    heads = {name for name in new if "/" not in name} - inner
    _check_kinds(path, new)
    kept = _names_in(path, inner) - replaced - new
    counted: list[str] = []
    if format not in ("shardspec", "dcp"):  # these list their files
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
                f"{path}: holds {', '.join(map(repr, names[:3]))}, which would {do} what is "
                "written there; move them, or choose another directory"
            )
    return Destination(path, replaced, inode)


def _files_of_checkpoint(directory: Path) -> frozenset[str]:
    """Return the names of the files that make up the checkpoint in a directory.

    Only what can be opened counts, and in it only what an index or a sharding info lists, or what
    has a name that only parts of checkpoints have. All other files are somebody else's.
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
    lists = {name for name in inside if name.endswith(_LISTS_OF_FILES)}
    listed = {name for name in inside if lists and name.endswith(_DATA)}
    return frozenset(lists | listed | {name for name in inside if _OWN_NAMES.fullmatch(name)})


def _names_in(directory: Path, inner: Collection[str] = ()) -> set[str]:
    """Return the names in a directory, and instead of `inner` directories what is below them."""
    try:
        if isinstance(directory, RemotePath):
            return set(directory.listing())
        found = set(os.listdir(directory))
        for name in found & set(inner):
            with opened(directory / name) as fd:
                found = found - {name} | {f"{name}/{below}" for below in names_below(fd)}
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

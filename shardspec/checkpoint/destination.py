"""Where an output goes: it replaces an older checkpoint and nothing else, and none of its source.

What is there is looked at before anything is written. Overwriting replaces a checkpoint: its own
files, and those beside the weights that belong to it. A directory with any other file is refused.
"""

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.commit import Destination
from shardspec.checkpoint.formats.registry import default_format, format_of, formats
from shardspec.checkpoint.local import names_below, opened
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.store import RemotePath, is_temporary, output_exists, path_errors
from shardspec.checkpoint.targets import Target
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.text import shown

_SHOWN: Final = 3
_MOST_LOOKED_AT: Final = 1000
"""Names among which the first ones are shown, by the alphabet."""


def check_destination(
    output: Path, source: Catalog, target: Target, overwrite: bool
) -> Destination:
    """Return where to write, links resolved, and what is replaced, if that does no harm.

    No part of the `source` is overwritten, and what is there is a directory or a file like the
    output. Raises an `OutputExistsError` if it exists and `overwrite` is not set, a
    `CheckpointError` otherwise.
    """
    directory = target.directory
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
    wanted = "a directory" if directory else "a file"
    problem = _part_of_source(path, source, directory, kind)
    if problem:
        pass
    elif kind not in (None, wanted):
        problem = f"is {kind}; name {wanted} to write"
    # A directory in a store may be an empty mark.
    elif kind and not overwrite and (here or not path.is_dir() or any(path.iterdir())):
        raise output_exists(output)
    elif here and not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        state = "is not writable" if path.parent.is_dir() else "does not exist"
        problem = f"its directory {path.parent} {state}; make it first, or write elsewhere"
    if problem:
        raise CheckpointError(f"{output}: {problem}")
    if not (overwrite and directory):
        return Destination(path)
    inode = None if not here else path.stat().st_ino if kind else 0
    new = {file.name for file in target.files}
    if target.listing is not None:
        new.add(target.listing.name)
    return Destination(path, _replaced(path, new) if kind else frozenset(), inode)


def _part_of_source(path: Path, source: Catalog, directory: bool, kind: str | None) -> str:
    """Return why an output would change what is read; nothing if it does not."""
    # Without an index, every file of the directory counts.
    listed = any(file.name.endswith((".json", ".metadata")) for file in source.files)
    all_count = kind is None and not listed and source.directory.is_dir()
    for file in source.files:
        same = path == _real(file)
        if not same and kind == "a file" and not isinstance(path, RemotePath):
            same = not isinstance(file, RemotePath) and path.samefile(file)
        if directory and (same or path in _real(file).parents):
            return "holds the checkpoint itself; choose another name"
        if same:
            return f"is {file.name} of the checkpoint itself; choose another name"
        if all_count and file.suffix == path.suffix and _real(file.parent) == path.parent:
            return (
                "would be among the files of the checkpoint, which no index lists, and count as "
                "one of them; choose another directory"
            )
    return ""


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
    return "a file" if stat.S_ISREG(mode) else "not a regular file"


def _replaced(path: Path, new: Collection[str]) -> frozenset[str]:
    """Return the names of all files in a directory that is replaced.

    Raises a `CheckpointError` if any is neither of the checkpoint there nor written anew.
    """
    with path_errors(path, "replaced"):
        owned = {*new, *_owned(path)}
        others = (name for name in _names_in(path) if name not in owned)
        if strangers := sorted(islice(others, _MOST_LOOKED_AT)):
            some = ", ".join(shown(name) for name in strangers[:_SHOWN])
            more = " and more" if len(strangers) > _SHOWN else ""
            raise CheckpointError(
                f"{path}: holds {some}{more}, which no checkpoint there owns, and which would be "
                "lost; move that, or choose another directory"
            )
        return frozenset(_names_in(path))


def _owned(path: Path) -> Iterable[str]:
    """Return the relative names of what belongs to the checkpoint in a directory."""
    top = sorted(at.name for at in path.iterdir())
    # Of runs that were killed while they saved or replaced something.
    shards = default_format("sharded")
    owned = {name for name in top if shards.owns(name) or is_temporary(name)}
    if (format := format_of(top)) is None:
        return owned
    owned.update(filter(format.owns, _names_in(path)))
    for other in formats():
        owned |= other.sidecars(path, top)
    try:
        source = open_checkpoint(path)
        for name in source.names:
            source.tensor(name)  # its files may be found only now
    except ShardSpecError:
        pass
    else:
        files = (file for file in source.files if path in file.parents)
        owned.update("/".join(file.parts[len(path.parts) :]) for file in files)
    return owned


def _names_in(path: Path) -> Iterator[str]:
    """Yield the relative names of the files in a directory; those of empty directories end in /."""
    if isinstance(path, RemotePath):
        for name, info in path.listing().items():
            yield name if info.get("type") == "file" else f"{name}/"
        return
    with opened(path) as fd:
        yield from names_below(fd)

"""Where an output goes: it replaces an older checkpoint and nothing else, never its source.

What is there is looked at before anything is written. Overwriting replaces a checkpoint: its own
files, and those beside the weights that belong to it. A directory with any other file is refused.
"""

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats import default_format, format_of, formats
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.path import (
    Entry,
    Identity,
    StoragePath,
    is_temporary,
    output_exists,
)
from shardspec.checkpoint.targets import Target
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.text import shown

_SHOWN: Final = 3
_MOST_LOOKED_AT: Final = 1000
"""Most names that are sorted to show the first."""
_KINDS: Final = {"file": "a file", "directory": "a directory", "other": "not a regular file"}


class Destination(NamedTuple):
    """Where an output goes."""

    path: StoragePath
    replaced: frozenset[str] = frozenset()
    """Names of the files in the directory; it is not replaced if there are others by then."""
    identity: Identity | None = None
    """That of the directory to replace: empty if it does not exist, None if it is not known."""


def check_destination(
    output: StoragePath, source: Catalog, target: Target, overwrite: bool
) -> Destination:
    """Return where to write, links resolved, and what is replaced, if that does no harm.

    No part of the `source` is overwritten, and what is there is a directory or a file like the
    output. Raises an `OutputExistsError` if it exists and `overwrite` is not set, a
    `CheckpointError` otherwise.
    """
    directory = target.directory
    if "\0" in str(output):
        raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL; choose another")
    path = output.output()
    with output.errors("written"):
        entry = path.look()
    kind = None if entry is None else _KINDS[entry.kind]
    wanted = "a directory" if directory else "a file"
    problem = _part_of_source(path, entry, source, directory)
    if problem:
        pass
    elif kind not in (None, wanted):
        problem = f"is {kind}; name {wanted} to write"
    elif not overwrite and path.taken():
        raise output_exists(output)
    else:
        problem = path.refusal()
    if problem:
        raise CheckpointError(f"{output}: {problem}")
    if not (overwrite and directory):
        return Destination(path)
    if entry is None:
        return Destination(path, identity=())
    new = {file.name for file in target.files}
    if target.listing is not None:
        new.add(target.listing.name)
    return Destination(path, _replaced(path, new), entry.identity)


def _part_of_source(
    path: StoragePath, entry: Entry | None, source: Catalog, directory: bool
) -> str:
    """Return why writing an output would change what is read; empty if it would not."""
    # Without an index, every file of the directory counts.
    listed = any(file.name.endswith((".json", ".metadata")) for file in source.files)
    all_count = entry is None and not listed and source.directory.is_dir()
    for file in source.files:
        same = path == file.resolved()
        # Links to one file have several names; objects have one, and each look costs a request.
        if not same and entry is not None and entry.kind == "file" and not file.requests:
            read = file.look()
            same = read is not None and read.identity == entry.identity
        if directory and (same or path in file.resolved().parents):
            return "holds the checkpoint itself; choose another name"
        if same:
            return f"is {file.name} of the checkpoint itself; choose another name"
        if all_count and file.suffix == path.suffix and file.parent.resolved() == path.parent:
            return (
                "would be among the files of the checkpoint, which no index lists, and count as "
                "one of them; choose another directory"
            )
    return ""


def _replaced(path: StoragePath, new: Collection[str]) -> frozenset[str]:
    """Return the names of all files in a directory that is replaced.

    Raises a `CheckpointError` if any is neither of the checkpoint there nor written anew.
    """
    with path.errors("replaced"):
        owned = {*new, *_owned(path)}
        others = (name for name in path.names_below() if name not in owned)
        if strangers := sorted(islice(others, _MOST_LOOKED_AT)):
            some = ", ".join(shown(name) for name in strangers[:_SHOWN])
            more = " and more" if len(strangers) > _SHOWN else ""
            raise CheckpointError(
                f"{path}: holds {some}{more}, which no checkpoint there owns, and which would be "
                "lost; move that, or choose another directory"
            )
        return frozenset(path.names_below())


def _owned(path: StoragePath) -> Iterable[str]:
    """Return the relative names of what belongs to the checkpoint in a directory."""
    top = path.names()
    # Of runs that were killed while they saved or replaced something.
    shards = default_format("sharded")
    owned = {name for name in top if shards.owns(name) or is_temporary(name)}
    if (format := format_of(top)) is None:
        return owned
    owned.update(filter(format.owns, path.names_below()))
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

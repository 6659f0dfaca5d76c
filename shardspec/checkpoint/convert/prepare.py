"""Plans an output before its first byte: its tensors, its files, and the files it replaces.

What is at its place is looked at before anything is written. Overwriting replaces a checkpoint: its
own files, and those beside the weights that belong to it. A directory with any other file is
refused, as is an output that would change its own source.
"""

import os
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import PurePath
from typing import Final, NamedTuple

from shardspec.checkpoint.boxes.coverage import check_tensors
from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.convert.options import WriteOptions, WriteReport
from shardspec.checkpoint.convert.sharding import ON_ONE_DEVICE, check_sharding, sharding_of
from shardspec.checkpoint.formats import (
    Format,
    Wanted,
    default_format,
    format_of,
    formats,
    merged_format,
    written_format,
)
from shardspec.checkpoint.open import as_catalog, open_checkpoint
from shardspec.checkpoint.quantization.cuts import refuse_casts
from shardspec.checkpoint.select.choice import (
    Choice,
    carried_values,
    check_drop,
    check_dropped,
    select,
)
from shardspec.checkpoint.select.dequantized import mapped_source
from shardspec.checkpoint.select.mapped import config_of
from shardspec.checkpoint.storage.path import (
    Entry,
    Identity,
    StoragePath,
    is_temporary,
    output_exists,
)
from shardspec.checkpoint.targets import Carried, Target, add_sidecars
from shardspec.dtypes import dtype_name
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.layout.layout import Layout
from shardspec.layout.rules import winning_patterns
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


class Prepared(NamedTuple):
    """An output that can be made and may be written."""

    source: Catalog
    """What it is made of: a checkpoint with maps applied."""
    target: Target
    destination: Destination
    report: WriteReport
    """What is known before anything is written."""


def prepared_output(
    checkpoint: PurePath | str | Catalog,
    output: StoragePath,
    options: WriteOptions,
    save: str,
) -> Prepared:
    """Check that an output can be made and may be written; `save` names this save."""
    if options.threads < 1:
        raise CheckpointError(f"{options.threads} threads write nothing; give at least 1")
    format = _format(output, options)
    source, target = _laid_out(checkpoint, output, options, format, save)
    destination = check_destination(output, source, target, options.overwrite)
    names = (tensor.source for tensor in target.tensors)
    reads = check_tensors(source, names, options.verify)
    pickled = source.facts.pickled
    report = WriteReport(
        path=output.public(),
        format=format.name,
        read=source.format,
        reads={
            str(path).removeprefix(f"{source.directory}{os.sep}"): num_bytes
            for path, num_bytes in sorted(reads.items())
        },
        tensors=len(target.tensors) + sum(len(pickled.get(n, ())) for n in target.carried),
        writes={file.name: file.num_bytes for file in target.files},
        left_out=_left_out(source, target),
        sidecars=target.sidecars,
        weight_files=sum(bool(file.extents) for file in target.files),
        not_copied=target.not_copied,
        filled=source.facts.filled,
        sharding=target.sharding if options.dry_run else {},
    )
    return Prepared(source, target, destination, report)


def _left_out(source: Catalog, target: Target) -> tuple[str, ...]:
    """Return the names of the entries that the output lacks."""
    names = sorted(source.extras.keys() - target.carried)
    metadata = source.facts.file_metadata
    if (metadata.values.keys() | metadata.contradictions.keys()) - target.carried:
        names.append("__metadata__")
    return tuple(names)


# --- what it is made of


def _format(output: StoragePath, options: WriteOptions) -> Format:
    """Return the format of an output, which can be sharded as its caller wants."""
    if options.way == "merged":
        return merged_format(output, options.format, options.max_shard_bytes, options.in_directory)
    name = options.format
    format = default_format("sharded") if name is None else written_format(name, "sharded")
    check_sharding(options)
    return format


def _opened(
    checkpoint: PurePath | str | Catalog, options: WriteOptions, format: Format
) -> tuple[Catalog, Choice]:
    """Open a checkpoint, mapped and quantized as wanted; return what remains to be chosen too."""
    source, names = as_catalog(checkpoint), options.names
    choice: Choice = options
    quantize = options.quantize, options.scale_rule, options.quantize_include
    if any(value is not None for value in (names, options.dtype, *quantize)):
        config = config_of(source, names)
        source, choice = mapped_source(source, names, options)
        if quantize != (None, None, None):
            from shardspec.checkpoint.quantization.quantize import quantize_of, quantized_as

            how = quantize_of(*quantize)
            source = quantized_as(source, how, options if names is None else Choice(), config)
            choice = options.after_map() if options.quantize is not None else choice
    else:
        check_drop(options)
    return source.as_stored() if format.keeps == "objects" else source, choice


def _laid_out(
    checkpoint: PurePath | str | Catalog,
    output: StoragePath,
    options: WriteOptions,
    format: Format,
    save: str,
) -> tuple[Catalog, Target]:
    """Open a checkpoint, choose tensors of it, and lay out the files of an output.

    `save` names this save. Raises ShardSpecError if the format cannot hold what is wanted.
    """
    merged = options.way == "merged"
    source, choice = _opened(checkpoint, options, format)
    tensors = select(source, choice)
    if choice.dtype is not None:
        refuse_casts(source, [tensor.source for tensor in tensors], dtype_name(choice.dtype))
    mesh, layouts = ON_ONE_DEVICE, dict[str, Layout]()
    if "sharded" in format.writes:
        mesh, layouts = sharding_of(source, options, tensors)
    carried = carried_values(source, choice, tensors, objects=format.keeps == "objects")
    if format.keeps == "tensors":
        carried = Carried(frozenset(), {}, {})
    # Whole tensors are what a merge is for: it may lose other entries.
    may_lose = None if merged and not options.drop_values else options.drop_values
    check_dropped(source, choice, carried.names, may_lose)
    if merged and source.extras and not (tensors or carried.names):
        raise CheckpointError(
            f"{source.directory}: holds no tensor that could be written, but "
            f"{min(source.extras)!r} and the like; name the checkpoint of the model"
        )
    assert format.lay_out is not None, "it is written"
    target = format.lay_out(
        source,
        Wanted(
            *(output.name, options.way, tensors, carried, mesh, layouts, save),
            *(options.metadata, options.sidecars, options.max_shard_bytes),
        ),
    )
    target = target._replace(carried=target.carried | carried.names)
    if not merged:
        winners = winning_patterns(list(options.rules or {}), layouts)
        chosen = {n: (winners.get(n, ""), str(at.labelled_spec)) for n, at in layouts.items()}
        target = target._replace(sharding=chosen)
    if options.quantize is not None and not (target.directory and options.sidecars):
        raise CheckpointError(
            f"{output}: without a config.json nothing states the blocks of {options.quantize}; "
            "name a directory, as model/, and write the files beside the weights"
        )
    if options.sidecars:
        dtype = None if choice.dtype is None else dtype_name(choice.dtype)
        target = add_sidecars(source, target, format.sidecars, dtype)
    if not output.nests and any("/" in file.name for file in target.files):
        raise CheckpointError(
            f"{output}: the format {format.name!r} has files in directories, which are not written "
            "into a store; write to a directory here, and copy that"
        )
    return source, target


# --- what it replaces


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

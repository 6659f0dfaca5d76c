"""Checkpoints of torch in Hugging Face format: safetensors per rank, with offsets of their boxes.

``torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)`` lets rank r write
``shard-{r+1:05}-model-{i:05}-of-{n:05}.safetensors`` for every i of 1 to n, the number of files of
the merged model, for which it has something. Every box is stored once; a note in each file
(`saved_offsets`) says where it starts in the whole tensor. **Nothing says how large the whole
tensor is, nor how many ranks there were**, so that without the last shards everything looks like a
smaller model. Here the extent of the boxes counts as the shape only where one of these confirms it:

- the caller says how many ranks have written files (`ranks`), and as many are there;
- those of several ranks are there, whose numbers and boxes leave no gap and whose sizes are what
  `torch.chunk` makes for as many ranks or an axis of theirs; the user is told that this was taken
  for enough;
- whole tensors of the same names, shapes and dtypes lie above the shards, whose folder is called
  ``sharded``: what torch's ``enable_consolidation=True`` has written in that save.

With n above 1, every rank has to have written all n files; only the whole tensors can confirm a
save where one had nothing to write. What stays undetectable: a wrong `ranks`; files of another save
with the same names and boxes; changed bytes (there are no digests). Source:
torch/distributed/checkpoint/hf_storage.py and _hf_utils.py, torch 2.8 to 2.13.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.catalog import ListedCatalog, StoredBox, StoredTensor, box_text
from shardspec.checkpoint.formats.names import DCP_HF, DCP_HF_SHARD, is_data_file, is_index
from shardspec.checkpoint.formats.safetensors import (
    Header,
    open_index_directory,
    open_without_index,
    read_header,
    saved_offsets,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.tiling import check_tiling
from shardspec.errors import CheckpointError

_MERGED_ABOVE: Final = "sharded"


class _Shard(NamedTuple):
    """One file, by what its name says."""

    path: Path
    number: int
    """Rank that wrote it, plus 1."""
    model: int
    """Which file of the merged model its tensors belong to, from 1."""
    models: int
    """How many files the merged model has."""


def open_dcp_hf(directory: Path, *, ranks: int | None = None) -> ListedCatalog:
    """Read the header and the offsets of every shard, and check what the shapes rest on.

    `ranks` is how many have written files: all, unless there are fewer tensors than ranks.
    """
    names = sorted(path.name for path in directory.iterdir() if is_data_file(path.name))
    shards = [
        _Shard(file_inside(directory, name, directory), *map(int, match.groups()))
        for name in names
        if (match := DCP_HF_SHARD.fullmatch(name)) is not None
    ]
    _check_names(directory, shards)
    tensors = _read(shards)
    if len(shards) < len(names):
        raise CheckpointError(
            f"{directory}: holds shards and other safetensors files; name the file to read, or "
            "move the shards into a folder of their own, called 'sharded' if the others are the "
            "same model merged"
        )
    whole = _merged_above(directory)
    if whole is not None:
        _compare(tensors, whole)
    if whole is None or ranks is not None:
        _check_ranks(directory, shards, ranks)
    if whole is None:
        _check_grid(directory, shards)
    found = ListedCatalog(DCP_HF, directory, tensors, tuple(shard.path for shard in shards))
    if whole is None and ranks is None:
        count = len({shard.number for shard in shards})
        for tensor in tensors.values():
            check_tiling(tensor)
            _check_chunks(directory, tensor, count)
        found.notes = (
            f"took it that {count} ranks have written it: their shards leave no gap, but no file "
            f"says that there was no later one; --ranks {count} checks the number",
        )
    return found


def _check_names(directory: Path, shards: list[_Shard]) -> None:
    seen: dict[tuple[int, int], _Shard] = {}
    for shard in shards:
        if shard.models != shards[0].models or not 1 <= shard.model <= shard.models:
            raise CheckpointError(
                f"{directory}: {shards[0].path.name} and {shard.path.name} cannot be of one save; "
                "move those of the other save away"
            )
        first = seen.setdefault((shard.number, shard.model), shard)
        if first is not shard or shard.number < 1:
            raise CheckpointError(
                f"{directory}: {shard.path.name} has a number that no rank writes, or that "
                f"{first.path.name} has too; move it away"
            )


def _read(shards: list[_Shard]) -> dict[str, StoredTensor]:
    """Return the tensors, as large as their boxes reach."""
    boxes: dict[str, dict[Box, StoredBox]] = {}
    reach: dict[str, tuple[tuple[int, ...], str, Path]] = {}
    paths = [shard.path for shard in shards]
    with prefetch_map(paths, _header, prefetch_depth(paths[0])) as headers:
        for shard, (header, offsets) in zip(shards, headers, strict=True):
            for name, own_dtype, sizes, offset, _ in header.entries:
                starts = offsets[name]
                ends = tuple(lo + size for lo, size in zip(starts, sizes, strict=True))
                before, dtype, path = reach.setdefault(name, (ends, own_dtype, shard.path))
                if own_dtype != dtype or len(ends) != len(before):
                    raise CheckpointError(
                        f"tensor {name!r} is {dtype} of {len(before)} dims in {path} and "
                        f"{own_dtype} of {len(ends)} in {shard.path}; the files are not of one save"
                    )
                reach[name] = tuple(map(max, before, ends)), dtype, path
                box = tuple(zip(starts, ends, strict=True))
                held = StoredBox(box, (), shard.number - 1, shard.path, offset)
                first = boxes.setdefault(name, {}).setdefault(box, held)
                if first is not held:
                    raise CheckpointError(
                        f"tensor {name!r}: {first.path} and {shard.path} both hold its box "
                        f"{box_text(box)}, which torch stores once; one is a copy, restore the "
                        "right file"
                    )
    tensors = {}
    for name, (shape, dtype, _) in reach.items():
        stored = tuple(box for box in boxes[name].values() if box_size(box.box))
        tensors[name] = StoredTensor(name, shape, dtype, None, (), stored)
    return tensors


def _header(path: Path) -> tuple[Header, Mapping[str, tuple[int, ...]]]:
    with SourceFile(path) as file:
        header = read_header(file)
    offsets = saved_offsets(path, header)
    if offsets is None:
        raise CheckpointError(
            f"{path}: is named like a shard but does not say where its tensors belong "
            "(no DCP_SHARDING_INFO in its metadata); the file was changed, restore it"
        )
    return header, offsets


def _merged_above(directory: Path) -> Mapping[str, StoredTensor] | None:
    """Return the merged model that torch has written above the shards, if it has."""
    if directory.resolve().name != _MERGED_ABOVE:
        return None
    above = directory.resolve().parent
    beside = [path.name for path in above.iterdir()]
    if any(map(is_index, beside)):
        return open_index_directory(above).tensors
    return open_without_index(above).tensors if any(map(is_data_file, beside)) else None


def _compare(tensors: Mapping[str, StoredTensor], whole: Mapping[str, StoredTensor]) -> None:
    for name in sorted(tensors.keys() | whole.keys()):
        sides = [
            f"{found[name].dtype} of shape {list(found[name].shape)}" if name in found else "absent"
            for found in (tensors, whole)
        ]
        if sides[0] != sides[1]:
            raise CheckpointError(
                f"tensor {name!r} is {sides[0]} in the shards and {sides[1]} in the merged files "
                "above them; a shard is missing, or the two are not of one save"
            )


def _check_ranks(directory: Path, shards: list[_Shard], ranks: int | None) -> None:
    """Compare the ranks that are there with how many there were; refuse if nobody says that."""
    known = {shard.number for shard in shards}
    count, last = len(known), max(known)
    missing = next((n for n in range(1, max(ranks or 0, last) + 1) if n not in known), None)
    option = f"--ranks {count} (ranks={count})"
    if ranks is None and missing is not None:
        raise CheckpointError(
            f"{directory}: shard {missing} is missing; restore it, or if that rank had nothing to "
            f"write, say how many ranks had: {option}"
        )
    if ranks is None and count == 1:
        raise CheckpointError(
            f"{directory}: the only shard here is {last}, and neither a whole shape nor the number "
            "of ranks stands in it, so that later ones may be missing without a trace; if there "
            f"were none, say so: {option}"
        )
    if ranks is not None and count != ranks:
        hint = "" if missing is None else f"; shard {missing} is not there"
        raise CheckpointError(
            f"{directory}: holds shards of {count} ranks, but {ranks} are said to have written "
            f"some{hint}; restore what is missing or correct the number"
        )


def _check_chunks(directory: Path, tensor: StoredTensor, ranks: int) -> None:
    """Check that a tensor is cut as `torch.chunk` does for so many ranks, or an axis of theirs.

    A tensor that is cut along several dims is not looked at.
    """
    cut = {
        at
        for box in tensor.boxes
        for at, side in enumerate(box.box)
        if side[1] - side[0] != tensor.shape[at]
    }
    if len(cut) != 1:
        return
    (dim,) = cut
    size = tensor.shape[dim]
    *lengths, last = (hi - lo for lo, hi in sorted(box.box[dim] for box in tensor.boxes))
    length = lengths[0]
    axes = {-(-size // axis) for axis in range(2, ranks + 1) if ranks % axis == 0}
    if {*lengths} != {length} or last > length or length not in axes:
        raise CheckpointError(
            f"{directory}: tensor {tensor.name!r} is cut into {len(lengths) + 1} parts along dim "
            f"{dim}, of {length} to {last} elements, as torch does not cut {size} for {ranks} "
            "ranks, so that a shard may be missing; restore it, or say how many have written: "
            "--ranks N (ranks=N)"
        )


def _check_grid(directory: Path, shards: list[_Shard]) -> None:
    found = {(shard.number, shard.model) for shard in shards}
    due = product(sorted({number for number, _ in found}), range(1, shards[0].models + 1))
    for number, model in due:
        if (number, model) not in found:
            name = f"shard-{number:05}-model-{model:05}-of-{shards[0].models:05}.safetensors"
            raise CheckpointError(
                f"{directory}: {name} is missing; restore it, or put the merged files of the same "
                "save above a folder 'sharded' to show that there was none"
            )

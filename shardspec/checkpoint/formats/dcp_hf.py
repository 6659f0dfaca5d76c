"""Reads torch DCP in Hugging Face format: a safetensors file per rank, with offsets of boxes.

With ``HuggingFaceStorageWriter(save_distributed=True)``, rank r writes its boxes of the tensors of
file i of n as ``shard-{r+1:05}-model-{i:05}-of-{n:05}.safetensors``; merging would give n files.
**Neither the shapes of tensors nor the number of ranks is recorded.** A shape is assumed to end
where the boxes end, if one of these confirms it:

- the caller gives the number of ranks (`ranks`), and there are that many files;
- shards of several ranks have consecutive numbers and boxes without gaps, and the boxes have the
  sizes that `torch.chunk` gives for that number of ranks or a divisor of it; a note says so;
- the folder is called ``sharded``, and its parent has merged tensors of the same names, shapes and
  dtypes: torch writes them with ``enable_consolidation=True``.

Source: hf_storage.py and _hf_utils.py of torch/distributed/checkpoint, torch 2.8 to 2.13.
"""

import re
from itertools import product
from typing import Final, TypeAlias

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.catalog import (
    Catalog,
    CheckpointFacts,
    StoredBox,
    StoredTensor,
    box_text,
)
from shardspec.checkpoint.compare.coverage import check_tiling
from shardspec.checkpoint.formats import Format, OpenOptions, huggingface, safetensors
from shardspec.checkpoint.formats.model_files import is_data_file, is_index
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.errors import CheckpointError
from shardspec.text import Argument

_Shards: TypeAlias = dict[tuple[int, int], StoragePath]
"""(Number of the rank, from 1, number of the merged file) -> file."""


_SHARD: Final = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


def _open(directory: StoragePath, options: OpenOptions) -> Catalog:
    """Return the catalog from all shards' headers; CheckpointError if a shard may be missing."""
    ranks = options.ranks
    names = [name for name in directory.names() if is_data_file(name)]
    shards: _Shards = {}
    first, models = "", 0
    for name in names:
        if match := _SHARD.fullmatch(name):
            number, model, count = map(int, match.groups())
            first, models = first or name, models or count
            path = shards.setdefault((number, model), file_inside(directory, name, directory))
            if path.name != name or number < 1 or not 1 <= model <= count == models:
                odd = path.name if path.name != name else first
                raise CheckpointError(
                    f"{directory}: {odd} and {name} are of different saves; move the files of one "
                    "save away"
                )
    tensors = _read(shards)
    if len(shards) < len(names):
        raise CheckpointError(
            f"{directory}: contains shards and other safetensors files; name the file to read, or "
            "move the shards to another folder, called 'sharded' if the others are merged"
        )
    home, merged = directory.resolved(), None
    beside = home.parent.names() if home.name == "sharded" else []
    if any(is_index(name) or is_data_file(name) for name in beside):
        # torch has written the merged model above the shards.
        model_above = huggingface.open_model(home.parent, options)
        merged = dict(
            zip(model_above.names, map(model_above.tensor, model_above.names), strict=True)
        )
        in_shards, in_merged = (
            {name: f"{x.dtype} of shape {list(x.shape)}" for name, x in group.items()}
            for group in (tensors, merged)
        )
        for name in sorted(in_shards.keys() | in_merged.keys()):
            if in_shards.get(name) != in_merged.get(name):
                raise CheckpointError(
                    f"tensor {name!r} is {in_shards.get(name, 'absent')} in the shards and "
                    f"{in_merged.get(name, 'absent')} in the merged files above them; a shard is "
                    "missing, or the files are of different saves"
                )
    facts = CheckpointFacts()
    numbers = {number for number, _ in shards}
    if merged is None or ranks is not None:
        _check_ranks(directory, numbers, ranks)
    for number, model in product(sorted(numbers), range(1, models + 1)):
        if merged is None and (number, model) not in shards:
            name = f"shard-{number:05}-model-{model:05}-of-{models:05}.safetensors"
            raise CheckpointError(
                f"{directory}: {name} is missing; restore it, or put the merged files of the same "
                "save above a folder 'sharded' to show that no such shard was written"
            )
    if merged is None and ranks is None:
        count = len(numbers)
        for tensor in tensors.values():
            check_tiling(tensor)
            _check_chunks(directory, tensor, count)
        note = (
            f"assuming that {count} ranks wrote it: their shards leave no gap, but no file "
            "says that there was no later one; give the number of ranks to have it checked"
        )
        facts = CheckpointFacts(notes=(note,))
    return Catalog(FORMAT.called, directory, tensors, tuple(shards.values()), facts=facts)


def _read(shards: _Shards) -> dict[str, StoredTensor]:
    """Return name -> tensor; the size of a dim is the largest end of the tensor's boxes."""
    boxes: dict[str, dict[Box, StoredBox]] = {}
    reach: dict[str, tuple[tuple[int, ...], str, StoragePath]] = {}
    depth = next(iter(shards.values())).files_ahead()
    with prefetch_map(shards.values(), safetensors.read_offsets, depth) as headers:
        for ((number, _), path), (header, offsets) in zip(shards.items(), headers, strict=True):
            if offsets is None:
                raise CheckpointError(
                    f"{path}: is named like a shard but does not say where its tensors belong (no "
                    "DCP_SHARDING_INFO in its metadata); the file was changed, restore it"
                )
            for name, own_dtype, sizes, offset, _ in header.entries:
                stops = tuple(lo + size for lo, size in zip(offsets[name], sizes, strict=True))
                before, dtype, first_path = reach.setdefault(name, (stops, own_dtype, path))
                if own_dtype != dtype or len(stops) != len(before):
                    raise CheckpointError(
                        f"tensor {name!r} is {dtype} of {len(before)} dims in {first_path} and "
                        f"{own_dtype} of {len(stops)} in {path}; the files are of different saves"
                    )
                reach[name] = tuple(map(max, before, stops)), dtype, first_path
                box = tuple(zip(offsets[name], stops, strict=True))
                stored = StoredBox(box, (), number - 1, path, offset)
                first = boxes.setdefault(name, {}).setdefault(box, stored)
                if first is not stored:
                    raise CheckpointError(
                        f"tensor {name!r}: {first.path} and {path} both have box {box_text(box)}, "
                        "which torch stores once; one is a copy, restore the right file"
                    )
    return {
        name: StoredTensor(
            name, shape, dtype, None, (), tuple(b for b in boxes[name].values() if box_size(b.box))
        )
        for name, (shape, dtype, _) in reach.items()
    }


def _check_ranks(directory: StoragePath, numbers: set[int], ranks: int | None) -> None:
    """Check that shards 1 to `ranks` exist; if `ranks` is None, 1 to the largest of `numbers`."""
    count = len(numbers)
    missing = min(set(range(1, max(ranks or 0, *numbers, 0) + 1)) - numbers, default=None)
    if ranks is None:
        certain, reason = missing is None and count > 1, "no file says how many ranks there were"
    else:
        certain, reason = count == ranks, f"{ranks} are expected"
    if not certain:
        lacks = "" if missing is None else f"; shard {missing} is not there"
        raise CheckpointError(
            f"{directory}: has shards of {count} rank{'s' * (count > 1)}, but {reason}{lacks}; "
            "restore what is missing, or give the number of ranks that wrote a shard: ",
            Argument("ranks", count),
        )


def _check_chunks(directory: StoragePath, tensor: StoredTensor, ranks: int) -> None:
    """Check that the shards of a tensor are as long as `torch.chunk` makes them for `ranks`."""
    dims = range(len(tensor.shape))
    sharded = {d for box in tensor.boxes for d in dims if box.box[d] != (0, tensor.shape[d])}
    if len(sharded) != 1:
        return
    (dim,) = sharded
    size = tensor.shape[dim]
    *lengths, last = (hi - lo for lo, hi in sorted(box.box[dim] for box in tensor.boxes))
    length = lengths[0]
    axes = {-(-size // axis) for axis in range(2, ranks + 1) if ranks % axis == 0}
    if {*lengths} != {length} or last > length or length not in axes:
        raise CheckpointError(
            f"{directory}: tensor {tensor.name!r} has {len(lengths) + 1} shards along dim {dim}, "
            f"of {length} to {last} elements, but torch splits {size} over {ranks} ranks "
            "differently; restore missing shards, or give the number of ranks: ",
            Argument("ranks"),
        )


FORMAT: Final = Format(
    name="dcp-huggingface",
    title="torch DCP, Hugging Face format",
    recognizes=lambda names: any(map(_SHARD.fullmatch, names)),
    open=_open,
    instead="'huggingface' writes the merged files, and 'dcp' shards",
    owns=lambda name: _SHARD.fullmatch(name) is not None,
    keeps="tensors",
    takes=("ranks",),
    known_by="shard-00001-model-….safetensors",
)

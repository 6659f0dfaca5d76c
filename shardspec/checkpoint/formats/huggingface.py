"""Reads and writes Hugging Face checkpoints: one safetensors file, or several with an index.

The index, ``{"metadata": ..., "weight_map": {tensor name: file name}}``, is compared with the
headers of the files, except `total_size`: writers count tied tensors once or twice.

Sources: ``save_pretrained`` of transformers; ``split_torch_state_dict_into_shards`` of
huggingface_hub.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from shardspec.checkpoint.catalog import Catalog, Listing, OutputTensor, Target
from shardspec.checkpoint.formats import (
    Format,
    OpenOptions,
    Wanted,
    safetensors,
)
from shardspec.checkpoint.formats.model_files import (
    files_of_index,
    find_safetensors,
    is_data_file,
    is_index,
)
from shardspec.checkpoint.formats.safetensors import METADATA, output_file
from shardspec.checkpoint.storage.path import StoragePath

INDEX_NAME: Final = "model.safetensors.index.json"
_SHARD_BYTES: Final = 5 * 10**9
"""Default limit of bytes of tensors per file, as in transformers."""
_ADAPTER: Final = "adapter_model.safetensors"
_OWN: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def _recognizes(names: Collection[str]) -> bool:
    return any(is_index(name) or is_data_file(name) for name in names)


def open_model(place: StoragePath, _: OpenOptions) -> Catalog:
    """Return the catalog of an index file or a directory; without an index, of all its files."""
    if is_index(place.name) and not place.is_dir():
        return safetensors.open_files(place.parent, files_of_index(place))
    return safetensors.open_files(place, find_safetensors(place))


def _lay_out(source: Catalog, output: Wanted) -> Target:
    metadata = safetensors.agreed_metadata(source, output)
    # PEFT expects its own name, even if the adapter was resharded in between.
    adapter = {file.name for file in source.files} == {_ADAPTER} or (
        (source.home / "adapter_config.json").is_file()
        and not (source.home / "config.json").is_file()
    )
    limit = output.max_shard_bytes or _SHARD_BYTES
    alone = _ADAPTER if adapter else "model.safetensors"
    target = huggingface_target(output.tensors, limit, {**METADATA, **metadata}, alone)
    return target._replace(carried=frozenset(metadata))


def huggingface_target(
    tensors: Sequence[OutputTensor],
    max_shard_bytes: int,
    metadata: Mapping[str, str] = METADATA,
    alone: str = "model.safetensors",
) -> Target:
    """Return a directory to be written: safetensors files of up to `max_shard_bytes`, and an index.

    A larger tensor gets a file of its own. A single file is named `alone` and has no index.
    """
    shards: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    if len(shards) == 1:
        return Target((output_file(alone, shards[0], metadata),), True, tensors)
    files = {
        f"model-{place:05d}-of-{len(shards):05d}.safetensors": shard
        for place, shard in enumerate(shards, 1)
    }
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
        "weight_map": {tensor.name: name for name, shard in files.items() for tensor in shard},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    listing = Listing(INDEX_NAME, lambda _, write: write(text.encode()))
    written = tuple(output_file(name, shard, metadata) for name, shard in files.items())
    return Target(written, True, tensors, listing)


FORMAT: Final = Format(
    name="huggingface",
    title="safetensors",
    recognizes=_recognizes,
    open=open_model,
    lay_out=_lay_out,
    writes=("merged",),
    owns=lambda name: _OWN.fullmatch(name) is not None,
    keeps="tensors",
    limits_files=True,
    reads_file=lambda start: is_index(start.name) is not None,
    names_others=lambda name: is_index(name) is not None,
    known_by="an index, *.safetensors",
)

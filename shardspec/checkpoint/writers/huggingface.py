"""Safetensors files of a limited size and the index that says which holds what.

Source: https://huggingface.co/docs/transformers/big_models, "Sharded checkpoints", and
`split_torch_state_dict_into_shards` of huggingface_hub: tensors go into a file in their order until
the next would exceed the limit; one that exceeds it alone has a file of its own.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from shardspec.checkpoint.writers.safetensors_file import one_file
from shardspec.checkpoint.writing.targets import Target, Wanted

__all__ = ["INDEX_NAME", "huggingface_target"]

INDEX_NAME: Final = "model.safetensors.index.json"


def huggingface_target(tensors: Sequence[Wanted], max_shard_bytes: int) -> Target:
    """Return the output that is a directory of safetensors files with an index.

    Parameters
    ----------
    tensors
        What to write, in the order in which it is put into files.
    max_shard_bytes
        Most bytes of tensors in a file.

    Examples
    --------
    >>> tensors = [Wanted(name, name, (3,), "float32") for name in "abc"]
    >>> [file.name for file in huggingface_target(tensors, 24).files]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    shards: list[list[Wanted]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    if len(shards) == 1:
        return Target((one_file("model.safetensors", shards[0]),), directory=True)
    names = [
        f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)
    ]
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
        "weight_map": {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        },
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"

    def last(_: Mapping[str, Sequence[int]]) -> Sequence[tuple[str, bytes]]:
        return [(INDEX_NAME, text.encode())]

    files = (one_file(name, shard) for name, shard in zip(names, shards, strict=True))
    return Target(tuple(files), directory=True, last=last)

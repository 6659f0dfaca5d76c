"""Megatron-core's ``torch_dist``, where it differs from `torch.distributed.checkpoint`.

It is a directory of torch's with ``common.pt`` and ``metadata.json``. Its ``.metadata`` has the
plans by which ranks wrote (``all_local_plans``), of which nothing is needed. Before 0.13 the
distributed optimizer stores its tensors **flat**: each rank's fragment of a tensor is a block of
it, which is made one dim, and of this each data parallel rank has a stretch. So the tensor is
listed with one dim a fragmented axis and one of the elements of a block; the shape that it had is
``mcore_data[NAME]["nd_reformulated_orig_global_shape"]``. A stretch of a block is a few boxes of
the tensor. Source: ``dist_checkpointing/strategies/torch.py`` and ``resharding.py``.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final

from shardspec.boxes import Box, box_size, row_major_boxes
from shardspec.checkpoint.torch_files.unpickler import Global, Names, Record, record_class
from shardspec.checkpoint.torch_files.values import sizes_of
from shardspec.errors import CheckpointError


class _Unused(Record):
    """Stands for a part of a plan; what it holds is let go of."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            state.clear()


_CHECKPOINT: Final = "torch.distributed.checkpoint"
_WRITE_ITEM_TYPE: Final = f"{_CHECKPOINT}.planner.WriteItemType"
PLAN_NAMES: Final[Names] = {
    _WRITE_ITEM_TYPE: record_class("WriteItemType"),
    **{
        name: Global(name, (_Unused,), {})
        for name in (
            *(f"{_CHECKPOINT}.planner.{kind}" for kind in ("SavePlan", "WriteItem")),
            *(f"{_CHECKPOINT}.planner.{kind}" for kind in ("TensorWriteData", "BytesIOWriteData")),
            f"{_CHECKPOINT}.filesystem._StoragePrefix",
            "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
        )
    },
}
"""What the metadata of 0.10 to 0.16 names besides what torch's does."""

MEGATRON_OBJECT: Final = re.compile(r"/shard_[0-9.]+_[0-9.]+\Z")
"""What the names of its objects end in: which of how many it is, such as ``/shard_0.1_4.2``."""

_OF_OPTIMIZER: Final = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|param|fp32_param)\.")
_SHAPE: Final = "nd_reformulated_orig_global_shape"
_CONVERT: Final = "convert it with Megatron's own tools to fully_reshardable"


def original_shapes(said: object, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that were made flat, by ``mcore_data``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, data in (said if isinstance(said, dict) else {}).items():
        if not isinstance(data, dict) or not isinstance(name, str) or data.keys() - {_SHAPE}:
            raise CheckpointError(
                f"{path}: says of {name!r:.200} what no version of Megatron-core up to 0.16 does "
                f"(mcore_data); {_CONVERT}"
            )
        if data:
            try:
                shapes[name] = sizes_of(data[_SHAPE])
            except ValueError as error:
                raise CheckpointError(f"{path}: tensor {name!r}: {error}; damaged") from None
    return shapes


def block_of(
    name: str, flat: tuple[int, ...], shape: tuple[int, ...], path: Path
) -> tuple[int, ...]:
    """Return the shape of the blocks of a flat tensor: `flat` is their number a dim, and size."""
    *counts, elements = flat or (-1,)
    block = tuple(size // max(1, count) for size, count in zip(shape, counts, strict=False))
    whole = tuple(count * size for count, size in zip(counts, block, strict=False))
    if len(counts) != len(shape) or whole != shape or prod(block) != elements:
        raise CheckpointError(
            f"{path}: tensor {name!r} is said to be flat, {list(flat)}, of shape {list(shape)}, "
            "which is not made of such blocks; the metadata contradicts itself, save again"
        )
    return block


def check_optimizer(shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Check that what the optimizer holds of a tensor has its shape; flat ones have been undone."""
    for name, shape in shapes.items():
        match = _OF_OPTIMIZER.match(name)
        model = shapes.get(name[match.end() :], shape) if match else shape
        if shape != model and prod(shape) == prod(model):
            raise CheckpointError(
                f"{path}: tensor {name!r} is {list(shape)}, but that of the model {list(model)}, "
                f"and nothing says how it was made flat (mcore_data); {_CONVERT}"
            )


def boxes_of_stretch(block: tuple[int, ...], chunk: Box) -> list[tuple[Box, int]]:
    """Return the boxes of a tensor that a chunk of it as stored flat holds, one after the other.

    Each comes with the number of elements of the chunk before it.

    >>> boxes_of_stretch((2, 3), ((1, 2), (0, 1), (2, 6)))
    [(((2, 3), (2, 3)), 0), (((3, 4), (0, 3)), 1)]
    """
    *at, (lo, hi) = chunk
    if any(end - start != 1 for start, end in at):
        raise CheckpointError(f"a chunk {chunk} of a flat tensor is of several blocks; save again")
    found = []
    done = 0
    for inner in row_major_boxes(block, lo, hi):
        moved = tuple(
            (first + start * size, last + start * size)
            for (first, last), (start, _), size in zip(inner, at, block, strict=True)
        )
        found.append((moved, done))
        done += box_size(inner)
    return found

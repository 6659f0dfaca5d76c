"""What the files of DeepSpeed's ZeRO hold of parameters: flat tensors, frozen ones, tied ones."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import box_size, row_major_boxes
from shardspec.checkpoint.catalog import StoredBox, StoredTensor
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.torch_files.states import (
    StateTensor,
    TorchState,
    plain_value,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.values import sizes_of
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

OPTIMIZER: Final = "optimizer_state_dict"
TO_UNIVERSAL: Final = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder RUN "
    "--output_folder OUTPUT"
)
MODULE: Final = "module."


class FlatPiece(NamedTuple):
    """A flat tensor of one rank, and its place in the line of those that it is joined with."""

    rank: int
    path: StoragePath
    tensor: StateTensor
    span: range


ZeroLines: TypeAlias = dict[int, list[FlatPiece]]
"""Flat tensors that follow each other: by group, or with stage 3 by rank."""


class Parameter(NamedTuple):
    """A parameter, and where it lies in flat tensors that follow each other."""

    name: str
    shape: tuple[int, ...]
    group: int
    span: range  # its place in its line, or with stage 3 in that of each rank


def shapes_of(state: TorchState, said: object) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of parameters, as a model's file says them."""
    try:
        if isinstance(said, dict) and all(isinstance(name, str) for name in said):
            return {name: sizes_of(value) for name, value in said.items()}
    except ValueError:
        pass
    raise CheckpointError(
        f"{state.path}: says {said!r:.200} where names and shapes of parameters are due "
        "(param_shapes); the file was changed, restore it"
    )


def tensor_of(one: Parameter, lines: ZeroLines, stage: int) -> StoredTensor:
    """Return what flat tensors hold of a parameter."""
    chosen = lines if stage == 3 else {0: lines[one.group]}
    dtype = next(iter(chosen.values()))[0].tensor.local.dtype
    size = item_bytes(dtype)
    boxes = []
    for rank, pieces in chosen.items():
        # The elements of the parameter from `first` on lie in this line.
        first, start = rank * len(one.span), one.span.start
        end = min(one.span.stop, start + prod(one.shape) - first)
        begin = bisect_right(pieces, start, key=lambda piece: piece.span.start) - 1
        for piece in pieces[max(0, begin) :]:
            lo, hi = max(start, piece.span.start), min(end, piece.span.stop)
            if lo >= hi:
                break
            offset = piece.tensor.place.offset + (lo - piece.span.start) * size
            # The digest is of the whole piece, and checked with what comes first in it.
            digest = piece.tensor.place.digest if lo == piece.span.start else None
            for box in row_major_boxes(one.shape, first + lo - start, first + hi - start):
                boxes.append(StoredBox(box, (), piece.rank, piece.path, offset, digest))
                digest = None
                offset += size * box_size(box)
    return StoredTensor(one.name, one.shape, dtype, None, (), tuple(boxes))


def untrained(models: Sequence[TorchState], stage: int) -> dict[str, StoredTensor]:
    """Return buffers, and frozen parameters, of which each model's file of stage 3 has a part."""
    model = models[0]
    tensors = {}
    for key, found in model.tensors.items():
        name = key.removeprefix(MODULE)
        # With stage 3 the files have no elements of parameters here.
        if name != key and (stage < 3 or 0 not in found.local.shape):
            tensors[name] = whole_tensor(name, model.path, found)
    for name, shape in shapes_of(model, _under(model, "frozen_param_shapes")).items():
        due = (-(-prod(shape) // len(models)),) if stage == 3 else shape
        lines: ZeroLines = {}
        for rank, state in enumerate(models[: len(models) if stage == 3 else 1]):
            part = state.tensors.get(f"frozen_param_fragments.{name}")
            if part is None or part.local.shape != due:
                raise CheckpointError(
                    f"{state.path}: lacks its {prod(due)} elements of the frozen parameter "
                    f"{name!r} of shape {list(shape)}; the file was changed, restore it"
                )
            lines[rank] = [FlatPiece(rank, state.path, part, range(prod(due)))]
            tensors[name] = whole_tensor(name, state.path, part)
        if stage == 3:
            tensors[name] = tensor_of(Parameter(name, shape, 0, range(prod(due))), lines, stage)
    return tensors


def add_tied(model: TorchState, tensors: dict[str, StoredTensor]) -> None:
    """Add parameters that are others under a second name."""
    for alias, target in _under(model, "shared_params").items():
        if isinstance(target, str) and target in tensors:
            tensors[alias] = replace(tensors[target], name=alias)


def _under(state: TorchState, key: str) -> dict[str, object]:
    """Return the entries of a dict that was flattened."""
    start = f"{key}."
    return {k.removeprefix(start): v for k, v in state.extras.items() if k.startswith(start)}


def extras_of(*states: TorchState) -> dict[str, object]:
    """Return entries that are not tensors and do not describe the layout of any."""
    left = ("param_shapes", "frozen_param_", "shared_params", "buffer_names", "param_slice_")
    return {
        name: plain_value(value, state.archive)
        for state in states
        for name, value in state.extras.items()
        if not name.removeprefix(f"{OPTIMIZER}.").startswith(left)
    }

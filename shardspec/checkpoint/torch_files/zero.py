"""The parameters in files of DeepSpeed's ZeRO: flat tensors, frozen and tied parameters."""

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
    """A flat tensor of one rank, and its place in the line of tensors that it is joined with."""

    rank: int
    path: StoragePath
    tensor: StateTensor
    span: range


ZeroLines: TypeAlias = dict[int, list[FlatPiece]]
"""Flat tensors that follow each other, by group, or with stage 3 by rank."""


class Parameter(NamedTuple):
    """A parameter, and its place in a line of flat tensors."""

    name: str
    shape: tuple[int, ...]
    group: int
    span: range  # in its line, or with stage 3 in that of each rank


def shapes_of(state: TorchState, stated: object) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of parameters in a model's file."""
    try:
        if isinstance(stated, dict) and all(isinstance(name, str) for name in stated):
            return {name: sizes_of(value) for name, value in stated.items()}
    except ValueError:
        pass
    raise CheckpointError(
        f"{state.path}: has {stated!r:.200} in place of names and shapes of parameters "
        "(param_shapes); the file was changed, restore it"
    )


def tensor_of(parameter: Parameter, lines: ZeroLines, stage: int) -> StoredTensor:
    """Return a parameter with its boxes in flat tensors."""
    chosen = lines if stage == 3 else {0: lines[parameter.group]}
    dtype = next(iter(chosen.values()))[0].tensor.local.dtype
    size = item_bytes(dtype)
    boxes = []
    for rank, pieces in chosen.items():
        # The elements of the parameter from `first` on lie in this line.
        first, start = rank * len(parameter.span), parameter.span.start
        end = min(parameter.span.stop, start + prod(parameter.shape) - first)
        begin = bisect_right(pieces, start, key=lambda piece: piece.span.start) - 1
        for piece in pieces[max(0, begin) :]:
            lo, hi = max(start, piece.span.start), min(end, piece.span.stop)
            if lo >= hi:
                break
            offset = piece.tensor.place.offset + (lo - piece.span.start) * size
            # The digest is of the whole piece, and checked with the first box in it.
            digest = piece.tensor.place.digest if lo == piece.span.start else None
            for box in row_major_boxes(parameter.shape, first + lo - start, first + hi - start):
                boxes.append(StoredBox(box, (), piece.rank, piece.path, offset, digest))
                digest = None
                offset += size * box_size(box)
    return StoredTensor(parameter.name, parameter.shape, dtype, None, (), tuple(boxes))


def untrained(models: Sequence[TorchState], stage: int) -> dict[str, StoredTensor]:
    """Return buffers and frozen parameters; with stage 3, each model's file has a part of these."""
    model = models[0]
    tensors = {}
    for key, tensor in model.tensors.items():
        name = key.removeprefix(MODULE)
        # With stage 3 these entries of parameters are empty.
        if name != key and (stage < 3 or 0 not in tensor.local.shape):
            tensors[name] = whole_tensor(name, model.path, tensor)
    for name, shape in shapes_of(model, _under(model, "frozen_param_shapes")).items():
        local = (-(-prod(shape) // len(models)),) if stage == 3 else shape
        lines: ZeroLines = {}
        for rank, state in enumerate(models[: len(models) if stage == 3 else 1]):
            part = state.tensors.get(f"frozen_param_fragments.{name}")
            if part is None or part.local.shape != local:
                raise CheckpointError(
                    f"{state.path}: lacks its {prod(local)} elements of the frozen parameter "
                    f"{name!r} of shape {list(shape)}; the file was changed, restore it"
                )
            lines[rank] = [FlatPiece(rank, state.path, part, range(prod(local)))]
            tensors[name] = whole_tensor(name, state.path, part)
        if stage == 3:
            tensors[name] = tensor_of(Parameter(name, shape, 0, range(prod(local))), lines, stage)
    return tensors


def add_tied(model: TorchState, tensors: dict[str, StoredTensor]) -> None:
    """Add parameters that share the storage of others, under their names."""
    for alias, target in _under(model, "shared_params").items():
        if isinstance(target, str) and target in tensors:
            tensors[alias] = replace(tensors[target], name=alias)


def _under(state: TorchState, key: str) -> dict[str, object]:
    """Return the entries of a flattened dict."""
    start = f"{key}."
    return {k.removeprefix(start): v for k, v in state.extras.items() if k.startswith(start)}


def extras_of(*states: TorchState) -> dict[str, object]:
    """Return the entries that are neither tensors nor descriptions of their layout."""
    omitted = ("param_shapes", "frozen_param_", "shared_params", "buffer_names", "param_slice_")
    return {
        name: plain_value(value, state.archive)
        for state in states
        for name, value in state.extras.items()
        if not name.removeprefix(f"{OPTIMIZER}.").startswith(omitted)
    }

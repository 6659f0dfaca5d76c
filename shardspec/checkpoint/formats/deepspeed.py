"""DeepSpeed's ZeRO checkpoints, stages 1 to 3: what `zero_to_fp32.py` reads, and the moments.

Every rank has saved **flat** fp32 tensors, one a group of parameters, and the moments of the same
lengths. ``param_shapes`` in the model's file gives names and shapes in the order in which they lie.

- Stages 1 and 2: the flat tensors of the ranks make up one, with padding at its end, and perhaps
  after each parameter (``param_alignment_paddings``).
- Stage 3: of each parameter, a rank has ceil(elements / ranks) elements, all at the same place.
  Groups follow on from one another; a parameter may begin in one and end in the next.

A stretch of a flat tensor is a few boxes of the parameter. Tensors are the parameters under their
names, as fp32; frozen ones and buffers as they are stored (zero_to_fp32.py makes them fp32, as
``--dtype float32`` does); tied ones; and ``optimizer.KIND.NAME`` of what the optimizer keeps of
each (``exp_avg``, ``exp_avg_sq``, ``step``). **That two ranks' files of stage 3 were swapped cannot
be told**; those of stages 1 and 2 say where they belong (``param_slice_mappings``), unless the run
had ``round_robin_gradients``.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import row_major_boxes
from shardspec.checkpoint.catalog import ListedCatalog, StoredBox, StoredTensor
from shardspec.checkpoint.formats.deepspeed_files import (
    OPTIMIZER,
    ZeroRank,
    read_ranks,
    tag_directory,
)
from shardspec.checkpoint.formats.names import DEEPSPEED, DEEPSPEED_LATEST
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.state import (
    StateTensor,
    TorchState,
    plain_value,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.unpickler import Record
from shardspec.checkpoint.torch_files.values import sizes_of
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["beside", "open_deepspeed", "shape_of"]

_GROUP: Final = re.compile(
    rf"{OPTIMIZER}\.(?:single_partition_of_fp32_groups|fp32_flat_groups)\.(\d{{1,9}})"
)
_STATE: Final = re.compile(
    rf"{OPTIMIZER}\.(?:base_optimizer_state|optimizer_state_dict)\.(?:state\.)?(\d{{1,9}})\.(\w+)"
)
_MODULE: Final = "module."
_WEIGHT: Final = ""
"""The kind of flat tensors that are parameters; others are those of the optimizer's states."""


class _Piece(NamedTuple):
    """A flat tensor of one rank, at a place among those that it makes up one with."""

    rank: int
    path: Path
    tensor: StateTensor
    start: int

    @property
    def end(self) -> int:
        return self.start + self.tensor.local.shape[0]


_Lines: TypeAlias = dict[int, list[_Piece]]
"""Flat tensors that follow on from one another: by group, or with stage 3 by rank."""


class _Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    group: int
    start: int
    """Elements before it: of its group, or with stage 3 of a rank's groups together."""

    @property
    def end(self) -> int:
        return self.start + prod(self.shape)


def open_deepspeed(directory: Path) -> ListedCatalog:
    """Read what describes the files of all ranks; not their data.

    Parameters
    ----------
    directory
        That of a tag, or the one above.

    Raises
    ------
    CheckpointError
        If a file is missing, damaged or of another save, or if flat tensors are not as long as
        the parameters in them.
    """
    place = tag_directory(directory)
    ranks, stage = read_ranks(place)
    parameters, needed = _parameters(ranks, stage)
    flat = _flat(ranks, stage, needed)
    if stage < 3:
        _check_slices(ranks, parameters, flat[_WEIGHT])
    tensors = beside(ranks, stage)
    scalars = _scalars(ranks)
    for one in parameters:
        for kind, lines in flat.items():
            if stage == 3 or one.group in lines:
                name = f"optimizer.{kind}.{one.name}" if kind else one.name
                tensors[name] = _tensor(name, one, lines, stage)
        group = one.group
        if stage == 3:
            group = bisect_right(flat[_WEIGHT][0], one.start, key=lambda piece: piece.start) - 1
        for kind, boxes in scalars.get(group, {}).items():
            name = f"optimizer.{kind}.{one.name}"
            tensors[name] = replace(boxes, name=name)
    model = ranks[0].model
    for alias, target in _under(model, "shared_params").items():
        if isinstance(target, str) and target in tensors:
            tensors[alias] = replace(tensors[target], name=alias)
    for name in model.tensors:
        if name.startswith(_MODULE) and name.removeprefix(_MODULE) not in tensors:
            raise CheckpointError(
                f"{model.path}: {name} is in no flat tensor, not frozen and not tied: nothing "
                "holds its elements; save it again with DeepSpeed 0.8 or later"
            )
    paths = dict.fromkeys(state.path for rank in ranks for state in rank)
    found = ListedCatalog(DEEPSPEED, place, tensors, paths, None, _extras(ranks[0]))
    if place != directory:
        why = f"which {DEEPSPEED_LATEST} names"
        if not directory.joinpath(DEEPSPEED_LATEST).exists():
            why = "the only tag"
        found.notes = (f"reading {place.name}, {why}",)
    return found


def _under(state: TorchState, key: str) -> dict[str, object]:
    """Return the entries of a dict that was flattened."""
    start = f"{key}."
    return {k.removeprefix(start): v for k, v in state.extras.items() if k.startswith(start)}


def shape_of(state: TorchState, name: object, value: object) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape of a parameter, as a model's file says them."""
    try:
        if isinstance(name, str):
            return name, sizes_of(value)
    except ValueError:
        pass
    raise CheckpointError(
        f"{state.path}: says of parameter {name!r:.200} that it has shape {value!r:.60}; the file "
        "was changed, restore it"
    )


def _parameters(ranks: Sequence[ZeroRank], stage: int) -> tuple[list[_Parameter], list[int]]:
    """Return where parameters lie, and how long the flat tensors have to be for them."""
    optimizer, model = ranks[0]
    groups = model.extras.get("param_shapes")
    paddings = optimizer.extras.get(f"{OPTIMIZER}.param_alignment_paddings")
    found: list[_Parameter] = []
    needed: list[int] = []
    at = 0
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        at = at if stage == 3 else 0
        said = paddings[number : number + 1] if isinstance(paddings, list) and stage < 3 else []
        gaps = said[0] if said else [0] * len(group)
        if not isinstance(group, dict) or not isinstance(gaps, list) or len(gaps) != len(group):
            break
        for (key, value), gap in zip(group.items(), gaps, strict=True):
            name, shape = shape_of(model, key, value)
            found.append(_Parameter(name, shape, number, at))
            at += -(-prod(shape) // len(ranks)) if stage == 3 else prod(shape) + gap
        needed.append(at)
    if not isinstance(groups, list) or len(needed) != len(groups):
        raise CheckpointError(
            f"{model.path}: has no param_shapes, or other ones than {optimizer.path} has "
            "param_alignment_paddings, and flat tensors cannot be taken apart; restore the file"
        )
    return found, [at] * len(ranks) if stage == 3 else needed


def _flat(ranks: Sequence[ZeroRank], stage: int, needed: Sequence[int]) -> dict[str, _Lines]:
    """Return the flat tensors of every kind, of the lengths that they need to have."""
    kinds: dict[str, dict[tuple[int, int], StateTensor]] = {_WEIGHT: {}}
    for number, rank in enumerate(ranks):
        for name, tensor in rank.optimizer.tensors.items():
            match = _GROUP.fullmatch(name) or _STATE.fullmatch(name)
            if match is None or (match.re is _STATE and not tensor.local.shape):
                continue
            if len(tensor.local.shape) != 1 or tensor.place.strides:
                raise CheckpointError(
                    f"{rank.optimizer.path}: {name} has shape {list(tensor.local.shape)}, but flat "
                    "tensors are due; the file was changed, restore it"
                )
            kind = match[2] if match.re is _STATE else _WEIGHT
            kinds.setdefault(kind, {})[number, int(match[1])] = tensor
    weights = kinds[_WEIGHT]
    groups = sorted({group for _, group in weights})
    if groups != list(range(len(groups))) or (stage < 3 and len(groups) != len(needed)):
        raise CheckpointError(
            f"{ranks[0].optimizer.path}: has the flat groups {groups}, but {ranks[0].model.path} "
            "other groups of parameters; the files are not of one save, restore those of one"
        )
    flat: dict[str, _Lines] = {kind: {} for kind in kinds}
    for (kind, tensors), group in product(kinds.items(), groups):
        if stage < 3 and all((at, group) not in tensors for at in range(len(ranks))):
            # The optimizer keeps nothing of a group that was never updated.
            continue
        # Behind the last parameter of stages 1 and 2 ranks have padding, or leave it out.
        share = -(-needed[group] // (2 * len(ranks))) * 2 if stage < 3 else 0
        for number, rank in enumerate(ranks):
            found = tensors.get((number, group))
            length = 0 if found is None else found.local.shape[0]
            if stage == 3:
                like = weights.get((0, group))
                due = {0 if like is None else like.local.shape[0]}
            else:
                due = {share, min(max(0, needed[group] - number * share), share)}
            if found is None or length not in due:
                raise CheckpointError(
                    f"{rank.optimizer.path}: the flat {kind or 'fp32'} tensor of group {group} has "
                    f"{length} elements, but {min(due)} are due; it was padded or cut off, "
                    "or param_shapes is of another save; restore the files of one"
                )
            line = flat[kind].setdefault(number if stage == 3 else group, [])
            start = number * share if stage < 3 else line[-1].end if line else 0
            line.append(_Piece(number, rank.optimizer.path, found, start))
    for line, wanted in zip(flat[_WEIGHT].values(), needed, strict=True):
        if stage == 3 and line[-1].end != wanted:
            raise CheckpointError(
                f"{line[-1].path}: the flat fp32 tensors have {line[-1].end} elements, but the "
                f"parameters in them {wanted}; they were padded or cut off, or param_shapes is of "
                "another save; restore the files of one"
            )
    return flat


def _check_slices(ranks: Sequence[ZeroRank], stated: Sequence[_Parameter], flat: _Lines) -> None:
    """Compare where parameters lie with what each rank says of its own parts of them.

    With ``round_robin_gradients`` ranks say where they lay before DeepSpeed changed their order;
    only param_shapes is right then.
    """
    if ranks[0].model.extras.get("ds_config.zero_optimization.round_robin_gradients") is True:
        return
    known = {(one.group, one.name): one for one in stated}
    for number, rank in enumerate(ranks):
        said = rank.optimizer.extras.get(f"{OPTIMIZER}.param_slice_mappings")
        for group, slices in enumerate(said if isinstance(said, list) else ()):
            for name, note in slices.items() if isinstance(slices, dict) else ():
                one = known.get((group, name))
                due = None
                if one is not None:
                    piece = flat[group][number]
                    lo = max(one.start, piece.start)
                    due = lo - piece.start, min(one.end, piece.end) - lo
                if not isinstance(note, Record) or due != (note.get("start"), note.get("numel")):
                    raise CheckpointError(
                        f"{rank.optimizer.path}: says that its part of {name!r} lies elsewhere "
                        f"than that of rank {number} does; the file is of another rank or save, "
                        "restore it"
                    )


def _scalars(ranks: Sequence[ZeroRank]) -> dict[int, dict[str, StoredTensor]]:
    """Return what the optimizer keeps of a group, such as its step; all ranks have the same."""
    found: dict[int, dict[str, StoredTensor]] = {}
    values: dict[tuple[int, str], tuple[str, bytes]] = {}
    for number, rank in enumerate(ranks):
        path = rank.optimizer.path
        with SourceFile(path) as file:
            for name, tensor in rank.optimizer.tensors.items():
                match, local, place = _STATE.fullmatch(name), tensor.local, tensor.place
                if match is None or local.shape:
                    continue
                group, kind = int(match[1]), match[2]
                value = local.dtype, file.read(place.offset, item_bytes(local.dtype))
                box = StoredBox((), (), number, path, place.offset, place.digest)
                like = found.setdefault(group, {}).get(kind)
                before = () if like is None else like.boxes
                if len(before) != number or values.setdefault((group, kind), value) != value:
                    raise CheckpointError(
                        f"{path}: has another {kind} of group {group} than "
                        f"{ranks[0].optimizer.path}; the files are not of one save, restore those "
                        "of one"
                    )
                found[group][kind] = StoredTensor(kind, (), local.dtype, None, (), (*before, box))
    return found


def beside(ranks: Sequence[ZeroRank], stage: int) -> dict[str, StoredTensor]:
    """Return buffers, and parameters that are not trained."""
    model = ranks[0].model
    tensors = {}
    for key, found in model.tensors.items():
        name = key.removeprefix(_MODULE)
        # With stage 3 there are no elements of parameters here.
        if name != key and (stage < 3 or 0 not in found.local.shape):
            tensors[name] = whole_tensor(name, model.path, found)
    for key, value in _under(model, "frozen_param_shapes").items():
        name, shape = shape_of(model, key, value)
        lines: _Lines = {}
        share = -(-prod(shape) // len(ranks)) if stage == 3 else prod(shape)
        for at, rank in enumerate(ranks[: len(ranks) if stage == 3 else 1]):
            part = rank.model.tensors.get(f"frozen_param_fragments.{name}")
            if part is None or part.local.shape != ((share,) if stage == 3 else shape):
                raise CheckpointError(
                    f"{rank.model.path}: lacks its {share} elements of the frozen parameter "
                    f"{name!r} of shape {list(shape)}; the file was changed, restore it"
                )
            lines[at] = [_Piece(at, rank.model.path, part, 0)]
        tensors[name] = (
            _tensor(name, _Parameter(name, shape, 0, 0), lines, stage)
            if stage == 3
            else whole_tensor(name, model.path, lines[0][0].tensor)
        )
    return tensors


def _tensor(name: str, one: _Parameter, lines: _Lines, stage: int) -> StoredTensor:
    """Return what flat tensors hold of a parameter."""
    count = one.end - one.start
    share = -(-count // len(lines)) if stage == 3 else count
    chosen = lines if stage == 3 else {0: lines[one.group]}
    boxes: list[StoredBox] = []
    for rank, pieces in chosen.items():
        boxes += _boxes(pieces, one, rank * share, min(share, count - rank * share))
    dtype = next(iter(chosen.values()))[0].tensor.local.dtype
    return StoredTensor(name, one.shape, dtype, None, (), tuple(boxes))


def _boxes(
    pieces: Sequence[_Piece], one: _Parameter, first: int, count: int
) -> Iterator[StoredBox]:
    """Yield the boxes of elements of a parameter from `first` on, which lie from its start on."""
    at = one.start
    begin = bisect_right(pieces, at, key=lambda piece: piece.start) - 1
    for piece in pieces[max(0, begin) :]:
        lo, hi = max(at, piece.start), min(at + count, piece.end)
        if lo >= hi:
            break
        size = item_bytes(piece.tensor.local.dtype)
        offset = piece.tensor.place.offset + (lo - piece.start) * size
        # The digest is of the whole piece, and judged with what comes first in it.
        digest = piece.tensor.place.digest if lo == piece.start else None
        for box in row_major_boxes(one.shape, first + lo - at, first + hi - at):
            yield StoredBox(box, (), piece.rank, piece.path, offset, digest)
            digest = None
            offset += size * prod(end - start for start, end in box)


def _extras(first: ZeroRank) -> Mapping[str, object]:
    """Return what is no tensor, and does not describe how tensors lie."""
    left = ("param_shapes", "frozen_param_", "shared_params", "buffer_names", "param_slice_")
    return {
        name: plain_value(value)
        for state in first
        for name, value in state.extras.items()
        if not name.removeprefix(f"{OPTIMIZER}.").startswith(left)
    }

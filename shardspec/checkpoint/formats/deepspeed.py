"""DeepSpeed's ZeRO checkpoints, stages 1 to 3: what `zero_to_fp32.py` reads, and the moments.

Every rank has saved **flat** fp32 tensors, one a group of parameters, and the moments of the same
lengths. ``param_shapes`` in the model's file gives names and shapes in the order in which they lie.

- Stages 1 and 2: the flat tensors of the ranks make up one, with padding at its end, and perhaps
  after each parameter (``param_alignment_paddings``).
- Stage 3: of each parameter, a rank has ceil(elements / ranks) elements, all at the same place.
  Groups follow on from one another; a parameter may begin in one and end in the next.

A stretch of a flat tensor is a few boxes of the parameter. Tensors are the parameters under their
names, as fp32; frozen ones and buffers as they are stored; tied ones; and ``optimizer.KIND.NAME``
of what the optimizer keeps of each (``exp_avg``, ``exp_avg_sq``, ``step``). **That two ranks' files
of stage 3 were swapped cannot be told**; those of stages 1 and 2 say where they belong
(``param_slice_mappings``), unless the run had ``round_robin_gradients``.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import row_major_boxes
from shardspec.checkpoint.catalog import ListedCatalog, StoredBox, StoredTensor
from shardspec.checkpoint.formats.deepspeed_files import (
    OPTIMIZER,
    ZeroRun,
    read_run,
    tag_directory,
)
from shardspec.checkpoint.formats.names import DEEPSPEED, DEEPSPEED_LATEST
from shardspec.checkpoint.formats.torch_file import (
    StateTensor,
    TorchState,
    of_two_saves,
    plain_value,
    whole_tensor,
)
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.unpickler import Record
from shardspec.checkpoint.torch_files.values import sizes_of
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

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


_ByRank: TypeAlias = dict[tuple[str, int], dict[int, StateTensor]]
"""By kind and group what each rank has."""
_Lines: TypeAlias = dict[int, list[_Piece]]
"""Flat tensors that follow on from one another: by group, or with stage 3 by rank."""


class _Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    group: int = 0
    start: int = 0
    """Elements before it: of its group, or with stage 3 of a rank's groups together."""

    @property
    def end(self) -> int:
        return self.start + prod(self.shape)


def open_deepspeed(directory: Path) -> ListedCatalog:
    """Read what describes the files of all ranks, of a tag or the directory above; not their data.

    Refused are files that are missing, damaged or of another save, and flat tensors that are not as
    long as the parameters in them.
    """
    place = tag_directory(directory)
    run = read_run(place)
    parameters, needed = _parameters(run)
    flat_parts, scalar_parts = _kept(run)
    flat = _lines(run, flat_parts, needed)
    _check_slices(run, parameters, flat[_WEIGHT])
    tensors = beside(run.models, run.stage)
    scalars = _scalars(run, scalar_parts)
    for one in parameters:
        group = one.group
        if run.stage == 3:
            group = bisect_right(flat[_WEIGHT][0], one.start, key=lambda piece: piece.start) - 1
        kept = {
            kind: _tensor(one, lines, run.stage)
            for kind, lines in flat.items()
            if run.stage == 3 or group in lines
        }
        for kind, tensor in (kept | scalars.get(group, {})).items():
            name = f"optimizer.{kind}.{one.name}" if kind else one.name
            tensors[name] = replace(tensor, name=name)
    model = run.models[0]
    add_tied(model, tensors)
    for name in model.tensors:
        if name.startswith(_MODULE) and name.removeprefix(_MODULE) not in tensors:
            raise CheckpointError(
                f"{model.path}: {name} is in no flat tensor, not frozen and not tied: nothing "
                "holds its elements; save it again with DeepSpeed 0.8 or later"
            )
    paths = [state.path for state in (*run.optimizers, *run.models)]
    found = ListedCatalog(
        DEEPSPEED, place, tensors, paths, None, extras_of(run.optimizers[0], model)
    )
    if place != directory:
        why = f"which {DEEPSPEED_LATEST} names"
        if not directory.joinpath(DEEPSPEED_LATEST).exists():
            why = "the only tag"
        found.notes = (f"reading {place.name}, {why}",)
    return found


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


def _parameters(run: ZeroRun) -> tuple[list[_Parameter], list[int]]:
    """Return where parameters lie, and how long the flat tensors have to be for them."""
    optimizer, model, ranks = run.optimizers[0], run.models[0], len(run.optimizers)
    groups = model.extras.get("param_shapes")
    said = optimizer.extras.get(f"{OPTIMIZER}.param_alignment_paddings")
    paddings = said if isinstance(said, list) and run.stage < 3 else []
    found: list[_Parameter] = []
    needed: list[int] = []
    at = 0
    for number, group in enumerate(groups if isinstance(groups, list) else [None]):
        at = at if run.stage == 3 else 0
        shapes = group if isinstance(group, dict) else {}
        gaps = paddings[number] if number < len(paddings) else [0] * len(shapes)
        if shapes is not group or not isinstance(gaps, list) or len(gaps) != len(shapes):
            raise CheckpointError(
                f"{model.path}: has no param_shapes, or other ones than {optimizer.path} has "
                "param_alignment_paddings, and flat tensors cannot be taken apart; restore the file"
            )
        for (key, value), gap in zip(shapes.items(), gaps, strict=True):
            name, shape = shape_of(model, key, value)
            found.append(_Parameter(name, shape, number, at))
            at += -(-prod(shape) // ranks) if run.stage == 3 else prod(shape) + gap
        needed.append(at)
    return found, [at] * ranks if run.stage == 3 else needed


def _kept(run: ZeroRun) -> tuple[_ByRank, _ByRank]:
    """Return what the optimizers' files have of parameters: flat tensors, and scalars."""
    flat: _ByRank = {}
    scalars: _ByRank = {}
    for rank, state in enumerate(run.optimizers):
        for name, tensor in state.tensors.items():
            match = _GROUP.fullmatch(name) or _STATE.fullmatch(name)
            if match is None:
                continue
            kind = match[2] if match.re is _STATE else _WEIGHT
            shape = tensor.local.shape
            found = flat if shape or kind == _WEIGHT else scalars
            if found is flat and (len(shape) != 1 or tensor.place.strides):
                raise CheckpointError(
                    f"{state.path}: {name} has shape {list(shape)}, but flat tensors are due; the "
                    "file was changed, restore it"
                )
            found.setdefault((kind, int(match[1])), {})[rank] = tensor
    return flat, scalars


def _lines(run: ZeroRun, flat: _ByRank, needed: Sequence[int]) -> dict[str, _Lines]:
    """Return the flat tensors of every kind in order, of the lengths that they need to have."""
    stage, ranks = run.stage, len(run.optimizers)
    groups = sorted(group for kind, group in flat if kind == _WEIGHT)
    if groups != list(range(len(groups))) or (stage < 3 and len(groups) != len(needed)):
        path, listed = run.optimizers[0].path, list(range(len(needed)))
        raise of_two_saves(path, "the list of flat groups", groups, run.models[0].path, listed)
    lines: dict[str, _Lines] = {kind: {} for kind in (_WEIGHT, *(kind for kind, _ in flat))}
    for kind, group in product(lines, groups):
        parts = flat.get((kind, group), {})
        if stage < 3 and not parts:
            # The optimizer keeps nothing of a group that was never updated.
            continue
        # Behind the last parameter of stages 1 and 2 ranks have padding, or leave it out.
        share = -(-needed[group] // (2 * ranks)) * 2 if stage < 3 else 0
        like = flat[_WEIGHT, group].get(0)
        for rank, state in enumerate(run.optimizers):
            if stage == 3:
                due = {0 if like is None else like.local.shape[0]}
            else:
                due = {share, min(max(0, needed[group] - rank * share), share)}
            part = parts.get(rank)
            length = 0 if part is None else part.local.shape[0]
            if part is None or length not in due:
                what = f"the flat {kind or 'fp32'} tensor of group {group} has"
                raise _wrong_length(state.path, what, length, min(due))
            line = lines[kind].setdefault(rank if stage == 3 else group, [])
            start = rank * share if stage < 3 else line[-1].end if line else 0
            line.append(_Piece(rank, state.path, part, start))
    for line, wanted in zip(lines[_WEIGHT].values(), needed, strict=True):
        path, length = line[-1].path, line[-1].end
        if stage == 3 and length != wanted:
            raise _wrong_length(path, "all its flat fp32 tensors have", length, wanted)
    return lines


def _wrong_length(path: Path, what: str, length: int, due: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: {what} {length} elements, but {due} are due by param_shapes; it "
        "was padded or cut off, or these are of another save; restore the files of one"
    )


def _check_slices(run: ZeroRun, stated: Sequence[_Parameter], flat: _Lines) -> None:
    """Compare where parameters lie with what ranks of stages 1 and 2 say of their parts of them.

    With ``round_robin_gradients`` ranks say where they lay before DeepSpeed changed their order;
    only param_shapes is right then.
    """
    round_robin = "ds_config.zero_optimization.round_robin_gradients"
    if run.stage == 3 or run.models[0].extras.get(round_robin) is True:
        return
    known = {(one.group, one.name): one for one in stated}
    for number, state in enumerate(run.optimizers):
        said = state.extras.get(f"{OPTIMIZER}.param_slice_mappings")
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
                        f"{state.path}: says that its part of {name!r} lies elsewhere than that of "
                        f"rank {number} does; the file is of another rank or save, restore it"
                    )


def _scalars(run: ZeroRun, scalars: _ByRank) -> dict[int, dict[str, StoredTensor]]:
    """Return what the optimizer keeps of a group, such as its step; all ranks have the same."""
    found: dict[int, dict[str, StoredTensor]] = {}
    for (kind, group), parts in scalars.items():
        dtype = next(iter(parts.values())).local.dtype
        boxes: list[StoredBox] = []
        due = None
        for rank, (path, *_) in enumerate(run.optimizers):
            value, part = None, parts.get(rank)
            if part is not None:
                place = part.place
                boxes.append(StoredBox((), (), rank, path, place.offset, place.digest))
                with SourceFile(path) as file:
                    data = file.read(place.offset, item_bytes(part.local.dtype))
                value = f"{part.local.dtype} {data.hex()}"
            due = value if rank == 0 else due
            if value != due:
                what = f"the {kind} of group {group}"
                raise of_two_saves(path, what, value, run.optimizers[0].path, due)
        found.setdefault(group, {})[kind] = StoredTensor(kind, (), dtype, None, (), tuple(boxes))
    return found


def beside(models: Sequence[TorchState], stage: int) -> dict[str, StoredTensor]:
    """Return buffers, and parameters that are not trained, of which each model's file has a part.

    Of stages 1 and 2 the first model's file has all of them.
    """
    model = models[0]
    tensors = {}
    for key, found in model.tensors.items():
        name = key.removeprefix(_MODULE)
        # With stage 3 there are no elements of parameters here.
        if name != key and (stage < 3 or 0 not in found.local.shape):
            tensors[name] = whole_tensor(name, model.path, found)
    for key, value in _under(model, "frozen_param_shapes").items():
        name, shape = shape_of(model, key, value)
        due = (-(-prod(shape) // len(models)),) if stage == 3 else shape
        lines: _Lines = {}
        for rank, state in enumerate(models[: len(models) if stage == 3 else 1]):
            part = state.tensors.get(f"frozen_param_fragments.{name}")
            if part is None or part.local.shape != due:
                raise CheckpointError(
                    f"{state.path}: lacks its {prod(due)} elements of the frozen parameter "
                    f"{name!r} of shape {list(shape)}; the file was changed, restore it"
                )
            lines[rank] = [_Piece(rank, state.path, part, 0)]
        tensors[name] = (
            _tensor(_Parameter(name, shape), lines, stage)
            if stage == 3
            else whole_tensor(name, model.path, lines[0][0].tensor)
        )
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


def _tensor(one: _Parameter, lines: _Lines, stage: int) -> StoredTensor:
    """Return what flat tensors hold of a parameter."""
    count = prod(one.shape)
    share = -(-count // len(lines)) if stage == 3 else count
    chosen = lines if stage == 3 else {0: lines[one.group]}
    boxes: list[StoredBox] = []
    for rank, pieces in chosen.items():
        boxes += _boxes(pieces, one, rank * share, min(share, count - rank * share))
    dtype = next(iter(chosen.values()))[0].tensor.local.dtype
    return StoredTensor(one.name, one.shape, dtype, None, (), tuple(boxes))


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


def extras_of(*states: TorchState) -> dict[str, object]:
    """Return what is no tensor, and does not describe how tensors lie."""
    left = ("param_shapes", "frozen_param_", "shared_params", "buffer_names", "param_slice_")
    return {
        name: plain_value(value)
        for state in states
        for name, value in state.extras.items()
        if not name.removeprefix(f"{OPTIMIZER}.").startswith(left)
    }

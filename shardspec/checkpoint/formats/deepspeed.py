"""Reads DeepSpeed's ZeRO checkpoints, stages 1 to 3: weights and optimizer moments.

Every rank writes ``[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt`` with **flat** fp32 tensors,
one for each group of parameters, and the optimizer's moments of the same lengths.
``[zero_pp_rank_R_]mp_rank_00_model_states.pt``, one file in stages 1 and 2 and one for each rank in
stage 3, has the names and shapes of the parameters in their order (``param_shapes``).

- Stages 1 and 2: the concatenated flat tensors of the ranks are one group, with padding at the end
  and possibly after each parameter (``param_alignment_paddings``).
- Stage 3: a rank has ceil(elements / ranks) elements of each parameter, at the same position on all
  ranks. Groups are consecutive; a parameter may span two of them.

A range of a flat tensor becomes a few boxes of the parameter. The catalog lists parameters in fp32,
also tied ones, as `zero_to_fp32.py` makes them; frozen parameters and buffers in their stored
dtype; and ``optimizer.KIND.NAME`` for each KIND of optimizer state (``exp_avg``, ``exp_avg_sq``,
``step``). **Swapped files of stage 3 cannot be detected**; files of stages 1 and 2 record the
positions of parameters (``param_slice_mappings``), unless the run had ``round_robin_gradients``.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import box_size, row_major_boxes
from shardspec.checkpoint.catalog import Catalog, StoredBox, StoredTensor
from shardspec.checkpoint.formats import Format, Newest, OpenOptions, named_by, only_one
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.torch_files import DEEPSPEED, EXPERTS, PARTS, PIPELINE, part_text
from shardspec.checkpoint.torch_files.states import (
    StateTensor,
    TorchState,
    check_no_copies,
    mismatch_error,
    plain_value,
    read_torch_states,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.unpickler import Record
from shardspec.checkpoint.torch_files.values import sizes_of
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

_OPTIMIZER: Final = "optimizer_state_dict"
_TO_UNIVERSAL: Final = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder RUN "
    "--output_folder OUTPUT"
)
_MODULE: Final = "module."
OPTIMIZER_FILE: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt"
)
MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_model_states\.pt")
_OF_RANK: Final = re.compile(rf"(?!mp_){MODEL_FILE.pattern}")
"""Name of a rank's file; a single file of model states may be from a run without ZeRO."""
_STEP: Final = re.compile(r"global_step\d+")
_SCRIPT: Final = "zero_to_fp32.py"
_TRACKER: Final = "latest"
_GROUP: Final = re.compile(
    rf"{_OPTIMIZER}\.(?:single_partition_of_fp32_groups|fp32_flat_groups)\.(\d{{1,9}})"
)
_STATE: Final = re.compile(
    rf"{_OPTIMIZER}\.(?:base_optimizer_state|optimizer_state_dict)\.(?:state\.)?(\d{{1,9}})\.(\w+)"
)
_PARALLEL: Final = re.compile(
    r"(?:layer_.*|.*expert_\d.*|.*mp_rank_\d*[1-9]\d*_(?:model|optim))_states\.pt"
)
_WEIGHT: Final = ""
"""Kind of the flat tensors of parameters; other kinds are states of the optimizer."""


class _FlatPiece(NamedTuple):
    """One rank's flat tensor; `span` is its range in the concatenation over all ranks."""

    rank: int
    path: StoragePath
    tensor: StateTensor
    span: range


_ZeroLines: TypeAlias = dict[int, list[_FlatPiece]]
"""Number of the group (in stage 3, of the rank) -> consecutive flat tensors."""


class _Parameter(NamedTuple):
    """A parameter; `span` is its range in the concatenation of all ranks' flat tensors."""

    name: str
    shape: tuple[int, ...]
    group: int
    span: range  # in its line, or with stage 3 in that of each rank


class _Run(NamedTuple):
    """The files of all ranks."""

    stage: int
    optimizers: Sequence[TorchState]
    models: Sequence[TorchState]  # with stage 3 one for each rank, else one


_ByRank: TypeAlias = dict[tuple[str, int], dict[int, StateTensor]]
"""(Kind, group) -> rank -> tensor."""


def _open(directory: StoragePath, _: OpenOptions) -> Catalog:
    """Return the catalog of a ZeRO checkpoint; reads the pickles of all ranks, no data."""
    run = _read_run(directory)
    parameters, needed = _parameters(run)
    flat, scalars = _optimizer_tensors(run)
    lines = _lines(run, flat, needed)
    _check_slices(run, parameters, lines[_WEIGHT])
    tensors = _untrained(run.models, run.stage)
    of_groups = _scalars(run, scalars)
    for parameter in parameters:
        group = parameter.group
        if run.stage == 3:
            weights, start = lines[_WEIGHT][0], parameter.span.start
            group = bisect_right(weights, start, key=lambda piece: piece.span.start) - 1
        states = of_groups.get(group, {}) | {
            kind: _tensor_of(parameter, line, run.stage)
            for kind, line in lines.items()
            if run.stage == 3 or group in line
        }
        for kind, tensor in states.items():
            name = f"optimizer.{kind}.{parameter.name}" if kind else parameter.name
            tensors[name] = replace(tensor, name=name)
    model = run.models[0]
    _add_tied(model, tensors)
    for name in model.tensors:
        if name.startswith(_MODULE) and name.removeprefix(_MODULE) not in tensors:
            raise CheckpointError(
                f"{model.path}: {name} is in no flat tensor, not frozen and not tied: no file "
                "has its elements; save it again with DeepSpeed 0.8 or later"
            )
    paths = [state.path for state in (*run.optimizers, *run.models)]
    extras = _extras_of(run.optimizers[0], model)
    return Catalog(FORMAT.called, directory, tensors, paths, None, extras)


def _shapes_of(state: TorchState, shapes: object) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes by name; raises CheckpointError if they are malformed."""
    try:
        if isinstance(shapes, dict) and all(isinstance(name, str) for name in shapes):
            return {name: sizes_of(value) for name, value in shapes.items()}
    except ValueError:
        pass
    raise CheckpointError(
        f"{state.path}: has {shapes!r:.200} instead of the names and shapes of parameters "
        "(param_shapes); the file was changed, restore it"
    )


def _tensor_of(parameter: _Parameter, lines: _ZeroLines, stage: int) -> StoredTensor:
    """Return a parameter; its boxes are ranges of the flat tensors of several ranks."""
    chosen = lines if stage == 3 else {0: lines[parameter.group]}
    dtype = next(iter(chosen.values()))[0].tensor.local.dtype
    size = item_bytes(dtype)
    boxes = []
    for rank, pieces in chosen.items():
        # This line contains the elements of the parameter from `first` on.
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


def _untrained(models: Sequence[TorchState], stage: int) -> dict[str, StoredTensor]:
    """Return the buffers and frozen parameters, which are in no flat tensor."""
    model = models[0]
    tensors = {}
    for key, tensor in model.tensors.items():
        name = key.removeprefix(_MODULE)
        # With stage 3 these entries of parameters are empty.
        if name != key and (stage < 3 or 0 not in tensor.local.shape):
            tensors[name] = whole_tensor(name, model.path, tensor)
    for name, shape in _shapes_of(model, _under(model, "frozen_param_shapes")).items():
        local = (-(-prod(shape) // len(models)),) if stage == 3 else shape
        lines: _ZeroLines = {}
        for rank, state in enumerate(models[: len(models) if stage == 3 else 1]):
            part = state.tensors.get(f"frozen_param_fragments.{name}")
            if part is None or part.local.shape != local:
                raise CheckpointError(
                    f"{state.path}: lacks its {prod(local)} elements of the frozen parameter "
                    f"{name!r} of shape {list(shape)}; the file was changed, restore it"
                )
            lines[rank] = [_FlatPiece(rank, state.path, part, range(prod(local)))]
            tensors[name] = whole_tensor(name, state.path, part)
        if stage == 3:
            tensors[name] = _tensor_of(_Parameter(name, shape, 0, range(prod(local))), lines, stage)
    return tensors


def _add_tied(model: TorchState, tensors: dict[str, StoredTensor]) -> None:
    """Add parameters that share the weights of another one, such as a tied ``lm_head.weight``."""
    for alias, target in _under(model, "shared_params").items():
        if isinstance(target, str) and target in tensors:
            tensors[alias] = replace(tensors[target], name=alias)


def _under(state: TorchState, key: str) -> dict[str, object]:
    """Return the entries of a nested dict: "a.b" of the state becomes "b" with key "a"."""
    start = f"{key}."
    return {k.removeprefix(start): v for k, v in state.extras.items() if k.startswith(start)}


def _extras_of(*states: TorchState) -> dict[str, object]:
    """Return values that are not tensors, such as step counts, without DeepSpeed's own tables."""
    omitted = ("param_shapes", "frozen_param_", "shared_params", "buffer_names", "param_slice_")
    return {
        name: plain_value(value, state.archive)
        for state in states
        for name, value in state.extras.items()
        if not name.removeprefix(f"{_OPTIMIZER}.").startswith(omitted)
    }


def _read_run(place: StoragePath) -> _Run:
    """Return the files of all ranks, in order; raises CheckpointError if they are of two saves."""
    names = place.names()
    if "zero" in names:
        raise CheckpointError(
            f"{place}: is a Universal Checkpoint, which cannot be read; name the checkpoint from "
            "which DeepSpeed made it"
        )
    for kind in (EXPERTS, PIPELINE):
        part = next(filter(PARTS[kind][0].fullmatch, names), None)
        if part is not None:
            raise CheckpointError(f"{place}: {part} is one of several files of {part_text(kind)}")
    parallel = next(filter(_PARALLEL.fullmatch, names), None)
    if parallel is not None:
        raise CheckpointError(
            f"{place}: {parallel} is of a run with tensor parallel ranks, which cannot be read; "
            f"merge with DeepSpeed: {_TO_UNIVERSAL}; each zero/NAME/fp32.pt then has one tensor"
        )
    paths = _files(place, names, OPTIMIZER_FILE, None)
    optimizers = read_torch_states(paths)
    stage, ranks = _number(optimizers[0], "zero_stage"), len(optimizers)
    if stage not in (1, 2, 3):
        raise CheckpointError(
            f"{optimizers[0].path}: does not record a ZeRO stage from 1 to 3; save it again with "
            "DeepSpeed 0.8 or later"
        )
    for state in optimizers:
        if (own := _number(state, "zero_stage")) != stage:
            raise mismatch_error(state.path, "zero_stage", own, optimizers[0].path, stage)
        # Before other files are checked: they may be complete when the last of these is missing.
        _check_ranks(state, "partition_count", _number(state, "partition_count") or ranks, ranks)
    expected = list(range(ranks)) if stage == 3 else [-1]
    models = read_torch_states(_files(place, names, MODEL_FILE, expected))
    first = models[0]
    shared = list(product(models, ("ds_version", "global_steps", "param_shapes")))
    for state, key in (*shared, *product(optimizers, ("ds_version",))):
        value, first_value = state.extras.get(key), first.extras.get(key)
        if value != first_value:
            raise mismatch_error(state.path, key, value, first.path, first_value)
    for state in models:
        _check_ranks(state, "dp_world_size", state.extras.get("dp_world_size", ranks), ranks)
    check_no_copies(optimizers)
    return _Run(stage, optimizers, models)


def _check_ranks(state: TorchState, key: str, recorded: object, ranks: int) -> None:
    """Refuse a file that records another number of `ranks` than there are files."""
    if recorded != ranks:
        more = isinstance(recorded, int) and recorded > ranks
        raise CheckpointError(
            f"{state.path}: {key} is {recorded!s:.60}, but {state.path.parent} has files of "
            f"{ranks} ranks; {'restore the others' if more else 'move those of another save away'}"
        )


def _files(
    place: StoragePath, names: Sequence[str], pattern: re.Pattern[str], expected: list[int] | None
) -> list[StoragePath]:
    """Return the files that match `pattern`: one per rank in `expected`, or for 0 to the largest.

    Rank -1 stands for a file of all ranks. Raises CheckpointError for a missing or surplus file.
    """
    by_rank: dict[int, str] = {}
    odd = None
    for match in filter(None, map(pattern.fullmatch, names)):
        if by_rank.setdefault(-1 if match[1] is None else int(match[1]), match[0]) != match[0]:
            odd = match[0]
    expected = list(range(1 + max(by_rank, default=0))) if expected is None else expected
    models = list(filter(MODEL_FILE.fullmatch, names))
    if not by_rank and pattern is OPTIMIZER_FILE and models:
        raise CheckpointError(
            f"{place}: has no ZeRO optimizer states (…_optim_states.pt); restore them, or for a "
            f"run without ZeRO, name {place / models[0]}"
        )
    for rank in expected:
        if rank not in by_rank:
            kind = "optim" if pattern is OPTIMIZER_FILE else "model"
            start = f"zero_pp_rank_{rank}_" if rank >= 0 else ""
            raise CheckpointError(
                f"{place}: {start}mp_rank_00_{kind}_states.pt is missing; restore it"
            )
    odd = next((by_rank[rank] for rank in by_rank if rank not in expected), odd)
    if odd is not None:
        raise CheckpointError(f"{place}: {odd} is of another save than the others; move it away")
    return [file_inside(place, by_rank[rank], place) for rank in expected]


def _number(state: TorchState, key: str) -> int | None:
    """Return a number that an optimizer's file records, such as the ZeRO stage; None if absent."""
    value = state.extras.get(f"{_OPTIMIZER}.{key}")
    values = value.args if isinstance(value, Record) else value
    values = values if isinstance(values, list | tuple) else [values]
    return max((number for number in values if type(number) is int), default=None)


def _parameters(run: _Run) -> tuple[list[_Parameter], list[int]]:
    """Return each parameter with its range in a flat tensor, and the lengths of flat tensors."""
    optimizer, model, ranks = run.optimizers[0], run.models[0], len(run.optimizers)
    groups = model.extras.get("param_shapes")
    recorded = optimizer.extras.get(f"{_OPTIMIZER}.param_alignment_paddings")
    paddings = recorded if isinstance(recorded, list) and run.stage < 3 else []
    parameters: list[_Parameter] = []
    needed: list[int] = []
    at = 0
    for number, group in enumerate(groups if isinstance(groups, list) else [groups]):
        at = at if run.stage == 3 else 0
        shapes = _shapes_of(model, group)
        gaps = paddings[number] if number < len(paddings) else [0] * len(shapes)
        counts = isinstance(gaps, list) and all(type(gap) is int and gap >= 0 for gap in gaps)
        if not counts or len(gaps) != len(shapes):
            raise CheckpointError(
                f"{optimizer.path}: param_alignment_paddings has {gaps!r:.60} for {len(shapes)} "
                f"parameters in {model.path}; restore the files of one save"
            )
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            count = -(-prod(shape) // ranks) if run.stage == 3 else prod(shape)
            parameters.append(_Parameter(name, shape, number, range(at, at + count)))
            at += count + gap
        needed.append(at)
    return parameters, [at] * ranks if run.stage == 3 else needed


def _optimizer_tensors(run: _Run) -> tuple[_ByRank, _ByRank]:
    """Return the optimizers' tensors as (flat ones, scalars), each by kind, group and rank."""
    flat: _ByRank = {}
    scalars: _ByRank = {}
    dtypes: dict[str, str] = {}
    for rank, state in enumerate(run.optimizers):
        for name, tensor in state.tensors.items():
            match = _GROUP.fullmatch(name) or _STATE.fullmatch(name)
            if match is None:
                continue
            kind = match[2] if match.re is _STATE else _WEIGHT
            shape, dtype = tensor.local.shape, tensor.local.dtype
            by_rank = flat if shape or kind == _WEIGHT else scalars
            if by_rank is flat:
                first_dtype = dtypes.setdefault(kind, dtype)
                if len(shape) != 1 or tensor.place.strides or dtype != first_dtype:
                    raise CheckpointError(
                        f"{state.path}: {name} is {dtype} of shape {list(shape)}, but should be a "
                        f"flat tensor of {first_dtype}; the file was changed, restore it"
                    )
            by_rank.setdefault((kind, int(match[1])), {})[rank] = tensor
    return flat, scalars


def _lines(run: _Run, flat: _ByRank, needed: Sequence[int]) -> dict[str, _ZeroLines]:
    """Return the flat tensors by kind ("" for weights, ``exp_avg``...) and group, in rank order.

    Raises CheckpointError if a tensor is missing, or if its length does not fit `needed`.
    """
    stage, ranks = run.stage, len(run.optimizers)
    count = sum(kind == _WEIGHT for kind, _ in flat)
    groups = range(max(count, 1 if stage == 3 else len(needed)))
    lines: dict[str, _ZeroLines] = {kind: {} for kind in (_WEIGHT, *(kind for kind, _ in flat))}
    for kind, group in product(lines, groups):
        parts = flat.get((kind, group), {})
        if stage < 3 and kind != _WEIGHT and not parts:
            continue  # a group that was never updated has no states
        first = flat.get((_WEIGHT, group), {}).get(0)
        total = needed[group] if stage < 3 and group < len(needed) else 0
        for rank, state in enumerate(run.optimizers):
            line = lines[kind].setdefault(rank if stage == 3 else group, [])
            if stage == 3:
                start = line[-1].span.stop if line else 0
                rest = needed[rank] - start
                lengths = {rest if first is None or group == groups[-1] else first.local.shape[0]}
            else:
                # Padding after the last parameter may be missing.
                share = -(-total // (2 * ranks)) * 2
                start = rank * share
                lengths = {share, min(max(0, total - start), share)}
            part = parts.get(rank)
            if part is None or part.local.shape[0] not in lengths:
                length = 0 if part is None else part.local.shape[0]
                raise CheckpointError(
                    f"{state.path}: the flat {kind or 'fp32'} tensor of group {group} has {length} "
                    f"elements, but by param_shapes it should have {min(lengths)}; restore the "
                    "files of one save"
                )
            span = range(start, start + part.local.shape[0])
            line.append(_FlatPiece(rank, state.path, part, span))
    return lines


def _check_slices(run: _Run, parameters: Sequence[_Parameter], weights: _ZeroLines) -> None:
    """Check that files of ZeRO stages 1 and 2 record the same ranges as `parameters`."""
    # With round_robin_gradients DeepSpeed records them before it reorders parameters.
    round_robin = "ds_config.zero_optimization.round_robin_gradients"
    if run.stage == 3 or run.models[0].extras.get(round_robin) is True:
        return
    by_name = {(parameter.group, parameter.name): parameter for parameter in parameters}
    for rank, state in enumerate(run.optimizers):
        recorded = state.extras.get(f"{_OPTIMIZER}.param_slice_mappings")
        for group, slices in enumerate(recorded if isinstance(recorded, list) else ()):
            for name, note in slices.items() if isinstance(slices, dict) else ():
                expected = None
                if parameter := by_name.get((group, name)):
                    piece = weights[group][rank].span
                    lo = max(parameter.span.start, piece.start)
                    expected = lo - piece.start, min(parameter.span.stop, piece.stop) - lo
                own = isinstance(note, Record) and (note.get("start"), note.get("numel"))
                if own != expected:
                    raise CheckpointError(
                        f"{state.path}: {name!r} is at another position than in the file of rank "
                        f"{rank}; this file is of another rank or save, restore it"
                    )


def _scalars(run: _Run, scalars: _ByRank) -> dict[int, dict[str, StoredTensor]]:
    """Return group -> kind, such as ``step`` -> scalar; CheckpointError if ranks differ."""
    by_group: dict[int, dict[str, StoredTensor]] = {}
    for (kind, group), parts in scalars.items():
        boxes: list[StoredBox] = []
        values = []
        for rank, (path, *_) in enumerate(run.optimizers):
            value = "missing"
            if part := parts.get(rank):
                offset = part.place.offset
                boxes.append(StoredBox((), (), rank, path, offset, part.place.digest))
                with path.open() as file:
                    data = file.read(offset, item_bytes(part.local.dtype))
                value = f"{part.local.dtype} {data.hex()}"
            values.append(value)
            if value != values[0]:
                title = f"the {kind} of group {group}"
                raise mismatch_error(path, title, value, run.optimizers[0].path, values[0])
        dtype = parts[0].local.dtype
        by_group.setdefault(group, {})[kind] = StoredTensor(kind, (), dtype, None, (), tuple(boxes))
    return by_group


def _recognizes(names: Collection[str]) -> bool:
    patterns = (_STEP, OPTIMIZER_FILE, _OF_RANK)
    if "zero" in names and any(map(MODEL_FILE.fullmatch, names)):
        return True  # a Universal Checkpoint, which is refused
    return _SCRIPT in names or any(kind.fullmatch(name) for kind in patterns for name in names)


def _newest(place: StoragePath, names: Sequence[str]) -> Newest | None:
    """Return the save that ``latest`` names, or the only one; None in the directory of a save."""
    if any(OPTIMIZER_FILE.fullmatch(name) or MODEL_FILE.fullmatch(name) for name in names):
        return None
    if _TRACKER in names:
        # Files of model states alone may be of other tools.
        return named_by(place / _TRACKER, names, lambda text: [text])._replace(of_run=True)
    folders = (place / name for name in names if (place / name).is_dir())
    saves = [at.name for at in folders if _recognizes(at.names())]
    return only_one(place, saves, _TRACKER)._replace(of_run=True)


FORMAT: Final = Format(
    name="deepspeed",
    title=DEEPSPEED,
    recognizes=_recognizes,
    open=_open,
    instead="for any number of ranks DeepSpeed makes a Universal Checkpoint of it",
    keeps="notes",
    newest=_newest,
    known_by="zero_pp_rank_0_…_states.pt",
)

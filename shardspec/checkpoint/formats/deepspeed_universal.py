"""DeepSpeed's Universal Checkpoints, as ``ds_to_universal`` makes them of a ZeRO run; both ways.

- ``zero/NAME/fp32.pt`` has a whole parameter; ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``
  beside it have its states in the optimizer. Those of stage 3 are flat, as the engine loads them.
- ``zero/optimizer_state.pt``: the other states of rank 0's optimizer, such as learning rates and
  the loss scaler, without flat tensors.
- The model's files, unchanged, with the names and shapes of parameters: one file, or with stage 3
  one for each rank, with its part of the frozen parameters.
- ``latest_universal`` names the directory itself, for ``engine.load_checkpoint(OUT)``.

Tensors have the names of the run's own checkpoint. Tied parameters are read as the one that they
are tied to: their own fp32.pt has the rounded values of the model. Source: ds_to_universal.py
and universal_checkpoint.py of deepspeed/checkpoint; engine.py, base_optimizer.py and zero/stage3.py
of deepspeed/runtime.
"""

import os
import re
from collections.abc import Mapping
from math import prod
from typing import Final

from shardspec.checkpoint.catalog import Catalog, StoredTensor
from shardspec.checkpoint.formats import Format, OpenOptions, Wanted, deepspeed
from shardspec.checkpoint.formats.deepspeed import MODEL_FILE, OPTIMIZER_FILE
from shardspec.checkpoint.storage.path import SourceFile, StoragePath, file_inside
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.checkpoint.targets import OutputFile, OutputTensor, RawBytes, Target, copied_file
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.states import (
    StateTensor,
    mismatch_error,
    read_torch_states,
    state_file,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.unpickler import record_class
from shardspec.checkpoint.torch_files.values import TorchTensor, tensor_place
from shardspec.checkpoint.torch_files.writer import Archive, PickledCall, pickle_into, tensor_value
from shardspec.checkpoint.torch_files.zero import (
    OPTIMIZER,
    TO_UNIVERSAL,
    add_tied,
    extras_of,
    shapes_of,
    untrained,
)
from shardspec.checkpoint.torch_files.zip_reader import TorchZip, read_torch_zip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

_LATEST: Final = "latest_universal"
_OPTIMIZER_STATE: Final = "zero/optimizer_state.pt"
_OWN: Final = re.compile(
    rf"zero/optimizer_state\.pt|zero/[^/]+/(fp32|exp_avg|exp_avg_sq|step)\.pt|{_LATEST}"
    r"|mp_rank_\d{2,6}_model_states\.pt"
)
_WEIGHT: Final = "fp32"
_STEP: Final = "step"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_KEPT: Final = re.compile(r"optimizer\.(\w+)\.(.+)", re.DOTALL)
_CAST: Final = ("float32", "bfloat16", "float16")
"""Dtypes of tensors that are written as fp32 although they are not trained."""
_FLAT: Final = ("fp32_flat_groups", "single_partition_of_fp32_groups", "param_slice_mappings")
_PLAIN_NAME: Final = re.compile(r"(?!\.\.?\Z|optimizer_state\.pt\Z)[^/\\\0]+", re.DOTALL)
_CARRIED: Final = {
    name: record_class(name)
    for name in (
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        *("argparse.Namespace", "types.SimpleNamespace"),
        *("pathlib.Path", "pathlib.PosixPath", "pathlib._local.Path", "pathlib._local.PosixPath"),
        *("datetime.datetime", "datetime.timedelta", "numpy.ndarray", "numpy.dtype"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    )
}
"""Classes of objects in an optimizer's state that are written as they were read."""
_MAX_NAME_BYTES: Final = 255
_MAX_PIECES: Final = 1_000_000  # of a pickle; records may hold the same part many times over


def _full_name(kind: str, name: str) -> str:
    return name if kind == _WEIGHT else f"optimizer.{kind}.{name}"


def _open(directory: StoragePath, _: OpenOptions) -> Catalog:
    """Read the descriptions of tensors in all files; not their data."""
    matches = sorted(
        filter(None, map(MODEL_FILE.fullmatch, directory.names())),
        key=lambda match: (int(match[2]), int(match[1] or 0)),
    )
    paths = [file_inside(directory, match[0], directory) for match in matches]
    models = read_torch_states(paths)
    first = models[0]
    # Every tensor parallel rank has a model's file; with stage 3 every rank has one.
    whole = len({match[2] for match in matches}) == 1
    stage3 = whole and all(match[1] for match in matches)
    count = first.extras.get("dp_world_size", len(models)) if stage3 else len(models)
    ranks = [int(match[1]) for match in matches] if stage3 else range(len(models))
    if count != len(models) or [*ranks] != [*range(len(models))]:
        raise CheckpointError(
            f"{directory}: was saved by {count!r:.60} ranks, but {len(models)} have a file "
            "…_model_states.pt here; restore what is missing"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for model in models:
        groups = model.extras.get("param_shapes")
        for group in groups if isinstance(groups, list) else ():
            shapes.update(shapes_of(model, group))
    zero = file_inside(directory, "zero", directory)
    files, tensors = _tensors(zero, shapes if stage3 else {})
    kinds = sorted({kind for name, kind in files if name in shapes} | {_WEIGHT})
    for name, shape in shapes.items():
        # Tensor parallel ranks record the shapes of their parts.
        like = shape if whole else None
        for kind in kinds:
            if (name, kind) not in files:
                raise CheckpointError(f"{zero / name / kind}.pt: is missing; restore it")
            stored = tensors.get(_full_name(kind, name))
            if stored is None or (kind != _WEIGHT and not stored.shape):
                continue  # a number for all elements
            like = stored.shape if like is None else like
            if stored.shape != like:
                what = f"its shape by {kind}.pt"
                raise mismatch_error(zero / name, what, stored.shape, first.path.name, like)
    others = untrained(models if stage3 else models[:1], 3 if stage3 else 2)
    lacking = min(others.keys() - tensors.keys(), default=None)
    if not whole and lacking is not None:
        raise CheckpointError(
            f"{first.path}: holds a part of {lacking!r} only, which is not in {zero}; convert it "
            "again with a later DeepSpeed"
        )
    tensors = others | tensors
    add_tied(first, tensors)
    extras = extras_of(first)
    paths += files.values()
    return Catalog(FORMAT.called, directory, tensors, paths, None, extras)


def _tensors(
    zero: StoragePath, flat: Mapping[str, tuple[int, ...]]
) -> tuple[dict[tuple[str, str], StoragePath], dict[str, StoredTensor]]:
    """Return the files by parameter and kind, and their tensors; `flat` has shapes of flat ones."""
    files = {
        (folder.name, name.removesuffix(".pt")): file_inside(folder, name, folder)
        for folder in map(zero.joinpath, zero.names())
        if folder.is_dir()
        for name in folder.names()
        if name.endswith(".pt")
    }
    tensors = {}
    with prefetch_map(files.values(), _read, zero.files_ahead()) as states:
        for ((name, kind), path), state in zip(files.items(), states, strict=True):
            if state is not None:
                local, place = state
                shape = flat.get(name, local.shape)
                if not place.strides and local.shape == (prod(shape),):
                    local = local._replace(shape=shape)
                full = _full_name(kind, name)
                tensors[full] = whole_tensor(full, path, StateTensor(local, place))
    return files, tensors


def _read(path: StoragePath) -> StateTensor | None:
    """Return the tensor in a file; None if it has a plain number instead."""
    with path.open() as file:
        archive = read_torch_zip(file)
        value = read_torch(archive, archive.pickle(file))
        if isinstance(value, dict):
            value = value.get("param")
        if isinstance(value, TorchTensor) and value.placed is None:
            return StateTensor(value, tensor_place(value, file, archive))
    if isinstance(value, int | float):
        return None
    raise CheckpointError(f"{path}: holds no tensor; restore the file")


def _lay_out(source: Catalog, _: Wanted) -> Target:
    """Return the Universal Checkpoint of a whole ZeRO run."""
    _check_source(source)
    models = [path for path in source.files if MODEL_FILE.fullmatch(path.name)]
    stage3 = all(path.name.startswith("zero_pp") for path in models)
    (first,) = read_torch_states(models[:1])
    shapes = first.extras["param_shapes"]
    groups = [list(map(str, group)) for group in shapes] if isinstance(shapes, list) else []
    kinds: dict[str, set[str]] = {name: set() for group in groups for name in group}
    tensors, files = [], []
    for name in source.names:
        match = None if name in kinds else _KEPT.fullmatch(name)
        kind, owner = match.groups() if match else (_WEIGHT, name)
        outline = source.outline(name)
        dtype, trained = outline.dtype, owner in kinds
        if not trained:
            if stage3 or dtype not in _CAST:
                continue  # the model's file has it
            dtype = "float32"
        elif kind != _WEIGHT:
            if kind not in (_MOMENTS if outline.shape or kind != _STEP else (_STEP,)):
                raise CheckpointError(
                    f"{source.directory}: the optimizer keeps {kind} of {owner!r}, but a Universal "
                    "Checkpoint has exp_avg, exp_avg_sq and step only; load it with as many ranks "
                    "as have saved it"
                )
            kinds[owner].add(kind)
        tensor = OutputTensor(name, name, outline.shape, dtype)
        tensors.append(tensor)
        shape = (prod(tensor.shape),) if stage3 and kind != _STEP else tensor.shape
        value: object = tensor_value(shape, dtype, "0")
        if kind != _STEP and not stage3:
            value = ({"cat_dim": 0} if trained else {}) | {"param": value}
        files.append(state_file(_file_name(source, owner, kind), value, [tensor]))
    every = set().union(*kinds.values())
    for name, own in sorted(kinds.items()):
        if own != every:
            raise CheckpointError(
                f"{source.directory}: the optimizer keeps {', '.join(sorted(every - own))} of "
                f"other parameters, but not of {name!r}, and DeepSpeed loads all or none; save "
                "again when every group of parameters has been updated"
            )
    for number, group in enumerate(groups if not stage3 else ()):
        # Some optimizers keep a step as a number, one for each group.
        step = source.extras.get(f"{OPTIMIZER}.base_optimizer_state.state.{number}.{_STEP}")
        if type(step) in (int, float):
            files += [state_file(_file_name(source, name, _STEP), step) for name in group]
    # Files of optimizers are in the order of ranks.
    optimizer = next(p for p in source.files if OPTIMIZER_FILE.fullmatch(p.name))
    files.append(_optimizer_file(optimizer, stage3))
    files += [copied_file(path, path.name) for path in models]
    files.append(OutputFile(_LATEST, 1, (RawBytes(0, b"."),), ()))
    return Target(tuple(files), True, tensors, digested=True)


def _check_source(source: Catalog) -> None:
    """Raise CheckpointError unless the source is a ZeRO run without rules that join parameters."""
    if source.format != deepspeed.FORMAT.called:
        raise CheckpointError(
            f"{source.directory}: is in the format of {source.format}, but a Universal Checkpoint "
            "needs what a run of DeepSpeed's ZeRO saves besides tensors; name such a run"
        )
    for key, value in source.extras.items():
        start, _, rest = key.partition(".")
        has_rules = start == "universal_checkpoint_info" and rest != "universal_checkpoint_version"
        if (has_rules or "autoep" in start) and value:
            raise CheckpointError(
                f"{source.directory}: its {key} has rules for joining parameters, which are not "
                f"read; use {TO_UNIVERSAL}"
            )


def _file_name(source: Catalog, owner: str, kind: str) -> str:
    """Return the name of a parameter's file, relative to the output."""
    if not _PLAIN_NAME.fullmatch(owner) or len(os.fsencode(owner)) > _MAX_NAME_BYTES:
        raise CheckpointError(
            f"{source.directory}: the parameter {owner!r:.300} would need a directory of that "
            "name, which is impossible; rename it in the model and save again"
        )
    return f"zero/{owner}/{kind}.pt"


def _optimizer_file(path: StoragePath, stage3: bool) -> OutputFile:
    """Return the file of an optimizer's states other than the tensors of parameters."""
    with path.open() as file:
        archive = read_torch_zip(file)
        value = read_torch(archive, archive.pickle(file), _CARRIED)
        inner = OPTIMIZER if stage3 else "base_optimizer_state"
        match value:
            case {"optimizer_state_dict": dict() as saved}:
                base = saved.get(inner)
            case _:
                saved, base = {}, None
        if not isinstance(base, dict) or not isinstance(states := base.get("state"), dict):
            raise CheckpointError(
                f"{path}: has no state and param_groups of the optimizer in one dict, which "
                "DeepSpeed loads; save it again with a later DeepSpeed"
            )
        kept = {key: entry for key, entry in saved.items() if key not in (*_FLAT, inner)}
        if stage3:
            kept[inner] = base | {"state": {n: _without_flat(entry) for n, entry in states.items()}}
        paddings = kept.get("group_paddings")
        if isinstance(paddings, list):
            kept["group_paddings"] = [0] * len(paddings)  # whole parameters have none
        kept["param_groups"] = base.get("param_groups")
        return _rewritten(kept, file, archive)


def _without_flat(state: object) -> object:
    """Return the optimizer's state of a group without flat tensors."""
    if not isinstance(state, dict):
        return state
    return {k: v for k, v in state.items() if not isinstance(v, TorchTensor) or not v.shape}


def _rewritten(value: object, file: SourceFile, archive: TorchZip) -> OutputFile:
    """Return the file of a value from another file, with the tensors in it."""
    storages: list[tuple[str, bytes]] = []

    def stored(tensor: TorchTensor) -> PickledCall:
        at = tensor_place(tensor, file, archive)
        if at.strides is not None or tensor.placed is not None:
            kind = "DTensor" if tensor.placed else "tensor that is not contiguous"
            raise CheckpointError(f"a {kind} cannot be carried along")
        key, size = str(len(storages)), prod(tensor.shape) * item_bytes(tensor.dtype)
        storages.append((key, file.read(at.offset, size)))
        return tensor_value(tensor.shape, tensor.dtype, key)

    pieces: list[bytes] = []

    def write(piece: bytes) -> None:
        pieces.append(piece)
        if len(pieces) > _MAX_PIECES:
            raise CheckpointError(
                f"a value has more than {_MAX_PIECES:,} parts, the limit for a copy"
            )

    try:
        pickle_into(value, write, stored)
    except (CheckpointError, RecursionError) as error:
        raise CheckpointError(
            f"{file.path}: besides the tensors of parameters, {error}; use {TO_UNIVERSAL}"
        ) from None
    rewritten = Archive(b"".join(pieces), storages)
    raw = (RawBytes(0, rewritten.head),)
    return OutputFile(_OPTIMIZER_STATE, rewritten.num_bytes, raw, ())


FORMAT: Final = Format(
    name="deepspeed-universal",
    title="DeepSpeed Universal Checkpoint",
    recognises=lambda names: "zero" in names and any(map(MODEL_FILE.fullmatch, names)),
    open=_open,
    lay_out=_lay_out,
    writes=("sharded",),
    owns=lambda name: _OWN.fullmatch(name) is not None,
    keeps="notes",
    whole_run="a Universal Checkpoint",
    nested=True,
    known_by="zero beside mp_rank_00_model_states.pt",
)

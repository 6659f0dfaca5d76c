"""DeepSpeed's Universal Checkpoints, as ``ds_to_universal`` makes them of a ZeRO run; both ways.

- ``zero/NAME/fp32.pt`` has a whole parameter, ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``
  beside it what the optimizer keeps of it; of stage 3 flat, as the engine wants them.
- ``zero/optimizer_state.pt``: what rank 0 keeps besides, such as learning rates and the loss
  scaler, without its flat tensors.
- The model's files as they are: one, or of stage 3 one a rank, with its part of what is frozen;
  they say the names and shapes that are due.
- ``latest_universal`` names the directory itself, for ``engine.load_checkpoint(OUT)``.

Tensors have the names that they have when the run's own checkpoint is read. Tied parameters are the
one that they are tied to: their own fp32.pt has the rounded values of the model.

Source: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py, and what loads them in
deepspeed/runtime/engine.py, base_optimizer.py and zero/stage3.py.
"""

import os
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import Catalog, ListedCatalog, StoredTensor
from shardspec.checkpoint.formats.deepspeed import add_tied, beside, shape_of
from shardspec.checkpoint.formats.deepspeed_files import DEEPSPEED_NAMES, OPTIMIZER, TWO_SAVES
from shardspec.checkpoint.formats.names import (
    DEEPSPEED,
    DEEPSPEED_MODEL,
    DEEPSPEED_OPTIMIZER,
    DEEPSPEED_UNIVERSAL,
    PARTS,
    UNIVERSAL_LATEST,
    UNIVERSAL_OPTIMIZER,
)
from shardspec.checkpoint.formats.torch_target import add_state, tensor_value
from shardspec.checkpoint.sidecars import copied_file
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.targets import (
    Extent,
    OutputFile,
    OutputTensor,
    RawBytes,
    Target,
    whole_box,
)
from shardspec.checkpoint.torch_files.pickle_writer import Call, Made, Name
from shardspec.checkpoint.torch_files.torch_state import (
    ARGUMENT_NAMES,
    StateTensor,
    TorchState,
    plain_value,
    read_torch_states,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.torch_values import TorchTensor, read_torch, tensor_place
from shardspec.checkpoint.torch_files.unpickler import Global, Record
from shardspec.checkpoint.torch_files.zip_files import read_torch_zip
from shardspec.checkpoint.torch_files.zip_writer import ZipPlan
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["open_universal", "universal_target"]

_TOOL: Final = PARTS["DeepSpeed's tensor parallel"][1]
_WEIGHT: Final = "fp32"
_STEP: Final = "step"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_KEPT: Final = re.compile(r"optimizer\.(\w+)\.(.+)", re.DOTALL)
_CAST: Final = ("float32", "bfloat16", "float16")
"""What is written as fp32 though it is not trained."""
_OF_PARAMETERS: Final = (
    "fp32_flat_groups",
    "single_partition_of_fp32_groups",
    "param_slice_mappings",
)
_PADDINGS: Final = "group_paddings"
_HOMES: Final = {
    **dict.fromkeys(("set", "frozenset", "bytearray", "range", "slice"), "builtins"),
    "device": "torch",
}
"""Where things are found whose records do not say it."""
_MOST_NAME_BYTES: Final = 255
_MOST_PARTS: Final = 100_000
_MOST_DEPTH: Final = 64


def _full_name(kind: str, name: str) -> str:
    return name if kind == _WEIGHT else f"optimizer.{kind}.{name}"


def open_universal(directory: Path) -> ListedCatalog:
    """Read what describes the tensors of all files; not their data.

    Refused are files that are missing or damaged, or of another shape than the model's file says.
    """
    names = sorted(path.name for path in directory.iterdir())
    matches = sorted(
        (match for name in names if (match := DEEPSPEED_MODEL.fullmatch(name))),
        key=lambda match: (int(match[2]), int(match[1] or 0)),
    )
    paths = [file_inside(directory, match[0], directory) for match in matches]
    models = read_torch_states(paths, DEEPSPEED_NAMES)
    first = models[0]
    # There is a model's file of every tensor parallel rank, or of stage 3 of every rank.
    whole = len({match[2] for match in matches}) == 1
    flat = whole and all(match[1] for match in matches)
    if flat:
        count = first.extras.get("dp_world_size", len(models))
        if count != len(models) or [int(match[1]) for match in matches] != [*range(len(models))]:
            raise CheckpointError(
                f"{directory}: was saved by {count!r:.60} ranks, but {len(models)} have a file "
                "…_model_states.pt here; restore what is missing"
            )
    zero = file_inside(directory, "zero", directory)
    due = _shapes(models)
    files, tensors = _tensors(zero, due if flat else {})
    kinds = sorted({kind for name, kind in files if name in due} | {_WEIGHT})
    for name, shape in due.items():
        # Tensor parallel ranks say the shapes of their parts.
        like = shape if whole else None
        for kind in kinds:
            if (name, kind) not in files:
                raise CheckpointError(f"{zero / name / kind}.pt: is missing; restore it")
            stored = tensors.get(_full_name(kind, name))
            if stored is None or (kind != _WEIGHT and not stored.shape):
                continue  # of all elements
            like = stored.shape if like is None else like
            if stored.shape != like:
                raise CheckpointError(
                    f"{zero / name}: has shape {list(stored.shape)}, but {like!r:.60} is due by "
                    f"{first.path.name}; {TWO_SAVES}"
                )
    others = beside(models if flat else models[:1], 3 if flat else 2)
    lacking = min(others.keys() - tensors.keys(), default=None)
    if not whole and lacking is not None:
        raise CheckpointError(
            f"{first.path}: holds a part of {lacking!r} only, which is not in {zero}; convert it "
            "again with a later DeepSpeed"
        )
    tensors = others | tensors
    add_tied(first, tensors)
    left = ("param_shapes", "frozen_param_", "shared_params", "buffer_names")
    extras = {k: plain_value(v) for k, v in first.extras.items() if not k.startswith(left)}
    return ListedCatalog(
        DEEPSPEED_UNIVERSAL, directory, tensors, (*paths, *files.values()), None, extras
    )


def _shapes(models: Sequence[TorchState]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that are due."""
    due: dict[str, tuple[int, ...]] = {}
    for model in models:
        groups = model.extras.get("param_shapes")
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict):
                due.update(shape_of(model, *one) for one in group.items())
    return due


def _tensors(
    zero: Path, flat: Mapping[str, tuple[int, ...]]
) -> tuple[dict[tuple[str, str], Path], dict[str, StoredTensor]]:
    """Return the files by parameter and kind, and their tensors; those of `flat` take its shape."""
    files = {
        (folder.name, path.stem): file_inside(folder, path.name, folder)
        for folder in sorted(zero.iterdir())
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.suffix == ".pt"
    }
    tensors = {}
    with prefetch_map(files.values(), _read, prefetch_depth(zero)) as found:
        for ((name, kind), path), held in zip(files.items(), found, strict=True):
            if held is not None:
                local, place = held.local, held.place
                shape = flat.get(name, local.shape)
                if not place.strides and local.shape == (prod(shape),):
                    local = local._replace(shape=shape)
                full = _full_name(kind, name)
                tensors[full] = whole_tensor(full, path, StateTensor(local, place))
    return files, tensors


def _read(path: Path) -> StateTensor | None:
    """Return the tensor in a file; None where it has a plain number."""
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        value = read_torch(file, found, DEEPSPEED_NAMES)
        if isinstance(value, dict):
            value = value.get("param")
        if isinstance(value, TorchTensor):
            return StateTensor(value, tensor_place(value, file, found))
    if isinstance(value, int | float):
        return None
    raise CheckpointError(f"{path}: holds no tensor; restore the file")


def universal_target(source: Catalog) -> tuple[list[OutputTensor], Target]:
    """Return the tensors and files of the Universal Checkpoint of a ZeRO run.

    Refused are sources that are none, and what cannot be carried.
    """
    if source.format != DEEPSPEED:
        raise CheckpointError(
            f"{source.directory}: is in the format of {source.format}, but a Universal Checkpoint "
            "needs what a run of DeepSpeed's ZeRO saves besides tensors; name such a run"
        )
    _check_plain(source)
    models = [path for path in source.files if DEEPSPEED_MODEL.fullmatch(path.name)]
    optimizers = {
        int(match[1]): path
        for path in source.files
        if (match := DEEPSPEED_OPTIMIZER.fullmatch(path.name))
    }
    stage3 = all(path.name.startswith("zero_pp") for path in models)
    (first,) = read_torch_states(models[:1], DEEPSPEED_NAMES)
    shapes = first.extras["param_shapes"]
    groups = [list(map(str, group)) for group in shapes] if isinstance(shapes, list) else []
    kinds: dict[str, set[str]] = {name: set() for group in groups for name in group}
    tensors, files = [], []
    for name in source.names:
        match = None if name in kinds else _KEPT.fullmatch(name)
        kind, owner = (_WEIGHT, name) if match is None else match.groups()
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
        files.append(_torch_file(_place(source, owner, kind), value, tensor))
    _check_kinds(source, kinds)
    for number, group in enumerate(groups if not stage3 else ()):
        # Some optimizers keep steps as numbers, one for all of a group.
        step = source.extras.get(f"{OPTIMIZER}.base_optimizer_state.state.{number}.{_STEP}")
        if type(step) in (int, float):
            files += [_torch_file(_place(source, name, _STEP), step) for name in group]
    files.append(_optimizer_file(optimizers[0], stage3))
    files += [copied_file(path, path.name) for path in models]
    files.append(OutputFile(UNIVERSAL_LATEST, 1, (RawBytes(0, b"."),), ()))
    carried = frozenset(source.extras)
    return tensors, Target(tuple(files), directory=True, digested=True, carried=carried)


def _check_plain(source: Catalog) -> None:
    """Refuse what says that parameters are put together by rules of their own."""
    for key, value in source.extras.items():
        start, _, rest = key.partition(".")
        said = start == "universal_checkpoint_info" and rest != "universal_checkpoint_version"
        if (said or "autoep" in start) and value:
            raise CheckpointError(
                f"{source.directory}: its {key} has rules of how parameters are put together, "
                f"which are not read here; use {_TOOL}"
            )


def _check_kinds(source: Catalog, kinds: Mapping[str, set[str]]) -> None:
    """Refuse a run in which the optimizer has updated some parameters, and others never."""
    every = set().union(*kinds.values())
    for name, found in sorted(kinds.items()):
        if found != every:
            raise CheckpointError(
                f"{source.directory}: the optimizer keeps {', '.join(sorted(every - found))} of "
                f"other parameters, but not of {name!r}, and DeepSpeed loads all or none; save "
                "again when every group of parameters has been updated"
            )


def _place(source: Catalog, owner: str, kind: str) -> str:
    """Return the name of a file of a parameter, below the output."""
    place = f"zero/{owner}"
    if (
        owner in ("", ".", "..")
        or place == UNIVERSAL_OPTIMIZER
        or any(c in owner for c in "/\\\0")
        or len(os.fsencode(owner)) > _MOST_NAME_BYTES
    ):
        raise CheckpointError(
            f"{source.directory}: the parameter {owner!r:.300} would need a directory of that "
            "name, which there cannot be; rename it in the model and save again"
        )
    return f"{place}/{kind}.pt"


def _torch_file(
    name: str,
    value: object,
    tensor: OutputTensor | None = None,
    storages: Sequence[tuple[str, bytes]] = (),
) -> OutputFile:
    """Return a file for torch.load: of a value, whose storage 0 may be a tensor to be copied."""
    plan = ZipPlan()
    if tensor is None:
        add_state(plan, value, storages)
        return OutputFile(name, plan.num_bytes, tuple(plan.pieces()), ())
    (at,) = add_state(plan, value, [("0", tensor.num_bytes)])
    extents = (Extent(tensor, whole_box(tensor.shape), at),)
    return OutputFile(name, plan.num_bytes, tuple(plan.pieces()), extents, plan.late)


def _optimizer_file(path: Path, stage3: bool) -> OutputFile:
    """Return the file of what a rank's optimizer keeps besides the tensors of parameters."""
    with SourceFile(path) as file:
        rewriter = _Rewriter(file)
        value = read_torch(file, rewriter.zip, {**ARGUMENT_NAMES, **DEEPSPEED_NAMES})
        held = value.get(OPTIMIZER) if isinstance(value, dict) else None
        inner = OPTIMIZER if stage3 else "base_optimizer_state"
        base = held.get(inner) if isinstance(held, dict) else None
        states = base.get("state") if isinstance(base, dict) else None
        if not isinstance(held, dict) or not isinstance(base, dict) or not isinstance(states, dict):
            raise CheckpointError(
                f"{path}: has no state and param_groups of the optimizer in one dict, which "
                "DeepSpeed loads; save it again with a later DeepSpeed"
            )
        kept = {key: one for key, one in held.items() if key not in (*_OF_PARAMETERS, inner)}
        if stage3:
            kept[inner] = base | {"state": {n: _scalars(one) for n, one in states.items()}}
        paddings = kept.get(_PADDINGS)
        if isinstance(paddings, list):
            kept[_PADDINGS] = [0] * len(paddings)  # parameters that are whole have none
        kept["param_groups"] = base.get("param_groups")
        written = rewriter.rewritten(kept)
    return _torch_file(UNIVERSAL_OPTIMIZER, written, storages=rewriter.storages)


def _scalars(state: object) -> object:
    """Return what an optimizer keeps of a group without its flat tensors."""
    if not isinstance(state, dict):
        return state
    return {k: v for k, v in state.items() if not isinstance(v, TorchTensor) or not v.shape}


class _Rewriter:
    """Makes of values that were read from a file of `torch.save` values to be written."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._left = _MOST_PARTS
        self.zip = read_torch_zip(file)
        self.storages: list[tuple[str, bytes]] = []

    def rewritten(self, value: object, depth: int = 0) -> object:
        """Return a value to be written; its tensors are read."""
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            raise self._refused("a value of too many or too deeply nested parts")

        def each(values: Sequence[object]) -> list[object]:
            return [self.rewritten(one, depth + 1) for one in values]

        match value:
            case TorchTensor(dtype, shape):
                at = tensor_place(value, self._file, self.zip)
                if at.strides is not None:
                    raise self._refused("a tensor that is not contiguous")
                data = self._file.read(at.offset, prod(shape) * item_bytes(dtype))
                self.storages.append((str(len(self.storages)), data))
                return tensor_value(shape, dtype, self.storages[-1][0])
            case Record(args=(), state=state):
                return Made(self._named(value), *each([state]))
            case Record(args=args, state=None):
                return Call(self._named(value), tuple(each(args)))
            case Global():
                return self._named(value)
            case dict():
                return dict(zip(value, each([*value.values()]), strict=True))
            case list():
                return each(value)
            case tuple():
                return tuple(each(value))
        if value is None or type(value) in (bool, int, float, bytes, str):
            return value
        raise self._refused(f"a {type(value).__name__}")

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file.path}: keeps {what} besides the tensors of parameters, which cannot be "
            f"written again; use {_TOOL}"
        )

    def _named(self, value: Record | Global) -> Name:
        module, _, name = value.name.rpartition(".")
        module = module or _HOMES.get(name, "")
        if not module:
            raise self._refused(f"a {name}")
        return Name(module, name)

"""DeepSpeed's Universal Checkpoint of a ZeRO run, as ``ds_to_universal`` makes it.

- ``zero/NAME/fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt`` of each parameter; of
  stage 3 flat, as the engine wants them.
- ``zero/optimizer_state.pt``: what rank 0 keeps besides, such as learning rates and the loss
  scaler. Its flat tensors are left out, which ds_to_universal copies of stage 3 and nobody loads.
- The model's files as they are: counters, the schedule of learning rates, frozen parameters.
- ``latest_universal``, which names the directory itself, so that
  ``engine.load_checkpoint(OUT)`` finds it.

Source: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py, and what loads them in
deepspeed/runtime/engine.py, base_optimizer.py and zero/stage3.py.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats.deepspeed_files import DEEPSPEED_NAMES, OPTIMIZER
from shardspec.checkpoint.formats.names import (
    DEEPSPEED,
    DEEPSPEED_MODEL,
    DEEPSPEED_OPTIMIZER,
    PARTS,
    UNIVERSAL_LATEST,
    UNIVERSAL_OPTIMIZER,
)
from shardspec.checkpoint.sidecars import copied_file
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.targets import (
    Extent,
    OutputFile,
    OutputTensor,
    RawBytes,
    Target,
    whole_box,
)
from shardspec.checkpoint.torch_files.state import ARGUMENT_NAMES, read_torch_state
from shardspec.checkpoint.torch_files.unpickler import Global, Record
from shardspec.checkpoint.torch_files.values import (
    TorchTensor,
    read_torch_pickle,
    tensor_place,
)
from shardspec.checkpoint.torch_files.writer import (
    Call,
    Made,
    Name,
    ZipPlan,
    add_state,
    tensor_value,
)
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["universal_target"]

_TOOL: Final = PARTS["DeepSpeed's tensor parallel"][1]
_KEPT: Final = re.compile(r"optimizer\.(\w+)\.(.+)", re.DOTALL)
_WEIGHT: Final = "fp32"
_MOMENTS: Final = frozenset(("exp_avg", "exp_avg_sq"))
_STEP: Final = "step"
_CAST: Final = frozenset(("float32", "bfloat16", "float16"))
"""What is written as fp32 though it is not trained."""
_OF_PARAMETERS: Final = (
    "fp32_flat_groups",
    "single_partition_of_fp32_groups",
    "param_slice_mappings",
)
_HOMES: Final = {
    **dict.fromkeys(("set", "frozenset", "bytearray", "range", "slice"), "builtins"),
    "device": "torch",
}
"""Where things are found whose records do not say it."""
_PADDINGS: Final = "group_paddings"
_MOST_NAME_BYTES: Final = 255
_MOST_PARTS: Final = 100_000
_MOST_DEPTH: Final = 64


def universal_target(source: Catalog) -> tuple[list[OutputTensor], Target]:
    """Return the tensors and files of the Universal Checkpoint of a ZeRO run.

    Raises
    ------
    CheckpointError
        If the source is no such run, or something of it cannot be carried.
    """
    if source.format != DEEPSPEED:
        raise CheckpointError(
            f"{source.directory}: is in the format of {source.format}, but a Universal Checkpoint "
            "needs what a run of DeepSpeed's ZeRO saves besides tensors; name such a run"
        )
    _check_plain(source)
    models = [path for path in source.files if DEEPSPEED_MODEL.fullmatch(path.name)]
    stage3 = all(path.name.startswith("zero_pp") for path in models)
    first = read_torch_state(models[0], more=DEEPSPEED_NAMES)
    shapes = first.extras["param_shapes"]
    groups = [list(map(str, group)) for group in shapes] if isinstance(shapes, list) else []
    trained = {name for group in groups for name in group}
    kinds: dict[str, set[str]] = {name: set() for name in trained}
    tensors, files = [], []
    for name in source.names:
        match = None if name in trained else _KEPT.fullmatch(name)
        kind, owner = (_WEIGHT, name) if match is None else match.groups()
        outline = source.outline(name)
        dtype = outline.dtype
        if owner not in trained:
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
        form = _bare if kind == _STEP else _flat if stage3 else _in_dict
        if form is _in_dict and owner in trained:
            form = partial(_in_dict, cat_dim=0)
        files.append(_tensor_file(_place(source, owner, kind), tensor, form))
    _check_kinds(source, kinds)
    if not stage3:
        files += _plain_steps(source, groups)
    for path in source.files:
        match = DEEPSPEED_OPTIMIZER.fullmatch(path.name)
        if match is not None and not int(match[1]):
            files.append(_optimizer_file(path, stage3))
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


def _bare(tensor: OutputTensor) -> object:
    return tensor_value(tensor.shape, tensor.dtype, "0")


def _flat(tensor: OutputTensor) -> object:
    return tensor_value((prod(tensor.shape),), tensor.dtype, "0")


def _in_dict(tensor: OutputTensor, **more: int) -> object:
    return {**more, "param": _bare(tensor)}


def _tensor_file(
    name: str, tensor: OutputTensor, form: Callable[[OutputTensor], object]
) -> OutputFile:
    plan = ZipPlan()
    (at,) = add_state(plan, form(tensor), [("0", tensor.num_bytes)])
    extents = (Extent(tensor, whole_box(tensor.shape), at),)
    return OutputFile(name, plan.num_bytes, tuple(plan.pieces()), extents, plan.late)


def _value_file(name: str, value: object, storages: Sequence[tuple[str, bytes]]) -> OutputFile:
    plan = ZipPlan()
    add_state(plan, value, storages)
    return OutputFile(name, plan.num_bytes, tuple(plan.pieces()), ())


def _plain_steps(source: Catalog, groups: Sequence[Sequence[str]]) -> list[OutputFile]:
    """Return the files of steps that optimizers keep as numbers, one for all of a group."""
    files = []
    for number, group in enumerate(groups):
        step = source.extras.get(f"{OPTIMIZER}.base_optimizer_state.state.{number}.{_STEP}")
        if type(step) in (int, float):
            files += [_value_file(_place(source, name, _STEP), step, ()) for name in group]
    return files


def _optimizer_file(path: Path, stage3: bool) -> OutputFile:
    """Return the file of what a rank's optimizer keeps besides the tensors of parameters."""
    with SourceFile(path) as file:
        rewriter = _Rewriter(file)
        names = {**ARGUMENT_NAMES, **DEEPSPEED_NAMES}
        value = read_torch_pickle(rewriter.zip.pickle(file), str(path), names)
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
    return _value_file(UNIVERSAL_OPTIMIZER, written, rewriter.storages)


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
        deeper = depth + 1
        match value:
            case TorchTensor(dtype, shape):
                at = tensor_place(value, self._file, self.zip)
                if at.strides is not None:
                    raise self._refused("a tensor that is not contiguous")
                data = self._file.read(at.offset, prod(shape) * item_bytes(dtype))
                self.storages.append((str(len(self.storages)), data))
                return tensor_value(shape, dtype, self.storages[-1][0])
            case Record(args=(), state=state):
                return Made(self._named(value), self.rewritten(state, deeper))
            case Record(args=args, state=None):
                return Call(self._named(value), tuple(self.rewritten(one, deeper) for one in args))
            case Global():
                return self._named(value)
            case dict():
                return {key: self.rewritten(one, deeper) for key, one in value.items()}
            case list():
                return [self.rewritten(one, deeper) for one in value]
            case tuple():
                return tuple(self.rewritten(one, deeper) for one in value)
            case None | bool() | int() | float() | bytes():
                return value
            case str() if type(value) is str:
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

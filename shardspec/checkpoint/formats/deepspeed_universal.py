"""DeepSpeed's Universal Checkpoints, as ``ds_to_universal`` makes them of others.

``zero/NAME/fp32.pt`` has a whole parameter, ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``
beside it what the optimizer keeps of it; ``mp_rank_00_model_states.pt`` the rest, and the names and
shapes that are due. Of stage 3 parameters are flat there, and each rank has a model's file, with
its part of what is frozen. Tensors have the names that they have when the run's own checkpoint is
read. Tied parameters are the one that they are tied to: their own fp32.pt has the rounded values of
the model.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from shardspec.checkpoint.catalog import ListedCatalog, StoredTensor
from shardspec.checkpoint.formats.deepspeed import beside, shape_of
from shardspec.checkpoint.formats.deepspeed_files import DEEPSPEED_NAMES, ZeroRank
from shardspec.checkpoint.formats.names import DEEPSPEED_MODEL, DEEPSPEED_UNIVERSAL
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.torch_files.state import (
    StateTensor,
    plain_value,
    read_torch_state,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.values import (
    TorchTensor,
    read_torch_pickle,
    tensor_place,
)
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError

__all__ = ["open_universal"]

_ZERO = "zero"
_WEIGHT = "fp32"
_BESIDE = ("module", "frozen_param_fragments")
_TIED = "shared_params."


def open_universal(directory: Path) -> ListedCatalog:
    """Read what describes the tensors of all files; not their data.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or has another shape than the model's file says.
    """
    names = sorted(path.name for path in directory.iterdir())
    matches = sorted(
        (match for name in names if (match := DEEPSPEED_MODEL.fullmatch(name))),
        key=lambda match: (int(match[2]), int(match[1] or 0)),
    )
    models = [
        read_torch_state(file_inside(directory, match[0], directory), more=DEEPSPEED_NAMES)
        for match in matches
    ]
    whole = len({match[2] for match in matches}) == 1
    # Of stage 3 every rank has a model's file, and of each parameter there is a flat tensor.
    flat = whole and all(match[1] for match in matches)
    zero = file_inside(directory, _ZERO, directory)
    files = {
        (folder.name, path.stem): file_inside(folder, path.name, folder)
        for folder in sorted(zero.iterdir())
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.suffix == ".pt"
    }
    with prefetch_map(files.values(), _read, prefetch_depth(directory)) as read:
        held = dict(zip(files, read, strict=True))
    due: dict[str, tuple[int, ...]] = {}
    for model in models:
        groups = model.extras.get("param_shapes")
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict):
                due.update(shape_of(model, *one) for one in group.items())
    tensors: dict[str, StoredTensor] = {}
    for (name, kind), found in held.items():
        if found is not None:
            shape, local = due.get(name, ()), found.local
            if flat and not found.place.strides and local.shape == (prod(shape),):
                local = local._replace(shape=shape)
            full = name if kind == _WEIGHT else f"optimizer.{kind}.{name}"
            place = StateTensor(local, found.place)
            tensors[full] = whole_tensor(full, files[name, kind], place)
    kinds = {kind for name, kind in held if name in due} | {_WEIGHT}
    for name, shape in due.items():
        lacks = next((kind for kind in sorted(kinds) if (name, kind) not in held), None)
        if lacks is not None:
            raise CheckpointError(f"{zero / name / lacks}.pt: is missing; restore it")
        # Those of tensor parallel ranks are of their parts.
        stored = [tensors[key].shape for key in _of_elements(name, kinds, tensors)]
        wrong = next((one for one in stored if one != (shape if whole else stored[0])), None)
        if wrong is not None:
            raise CheckpointError(
                f"{zero / name}: has shape {list(wrong)}, but {shape!r:.60} is due by "
                f"{models[0].path.name}; the files are not of one save, restore those of one"
            )
    first = models[0]
    if flat:
        count = first.extras.get("dp_world_size", len(models))
        if count != len(models) or [int(match[1]) for match in matches] != [*range(len(models))]:
            raise CheckpointError(
                f"{directory}: was saved by {count!r:.60} ranks, but {len(models)} have a file "
                "…_model_states.pt here; restore what is missing"
            )
        tensors = beside([ZeroRank(model, model) for model in models], 3) | tensors
    else:
        for key, found in first.tensors.items():
            start, _, name = key.partition(".")
            if start in _BESIDE and name not in tensors:
                said = first.extras.get(f"frozen_param_shapes.{name}", found.local.shape)
                if not whole or found.local.shape != said:
                    raise CheckpointError(
                        f"{first.path}: holds a part of {name!r} only, which is not in {zero}; "
                        "convert it again with a later DeepSpeed"
                    )
                tensors[name] = whole_tensor(name, first.path, found)
    for key, target in first.extras.items():
        alias = key.removeprefix(_TIED)
        if alias != key and isinstance(target, str) and target in tensors:
            tensors[alias] = replace(tensors[target], name=alias)
    left = ("param_shapes", "frozen_param_", "shared_params", "buffer_names")
    others = {k: plain_value(v) for k, v in first.extras.items() if not k.startswith(left)}
    paths = (*(model.path for model in models), *files.values())
    return ListedCatalog(DEEPSPEED_UNIVERSAL, directory, tensors, paths, None, others)


def _of_elements(name: str, kinds: set[str], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return the names of a parameter and of what is kept of each of its elements."""
    full = [name if kind == _WEIGHT else f"optimizer.{kind}.{name}" for kind in sorted(kinds)]
    return [one for one in full if one in tensors and (one == name or tensors[one].shape)]


def _read(path: Path) -> StateTensor | None:
    """Return the tensor in a file; None where it has a plain number."""
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        value = read_torch_pickle(found.pickle(file), found.what, DEEPSPEED_NAMES)
        if isinstance(value, dict):
            value = value.get("param")
        if isinstance(value, TorchTensor):
            return StateTensor(value, tensor_place(value, file, found))
    if isinstance(value, int | float):
        return None
    raise CheckpointError(f"{path}: holds no tensor; restore the file")

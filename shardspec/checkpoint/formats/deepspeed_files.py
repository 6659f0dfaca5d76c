"""The files of a DeepSpeed run: which there are, and whether they are of one save.

A run's directory has ``latest``, which names the tag, a directory. In it every rank has written
``[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt``, and with stage 3 its ``…_model_states.pt``; in
stages 1 and 2 one ``mp_rank_00_model_states.pt`` is of all.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.formats.names import (
    DEEPSPEED_LATEST,
    DEEPSPEED_MODEL,
    DEEPSPEED_OPTIMIZER,
    PARTS,
    find_deepspeed,
)
from shardspec.checkpoint.formats.torch_file import (
    TorchState,
    check_no_copies,
    of_two_saves,
    read_torch_states,
)
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.torch_files.unpickler import Names, Record, record_class
from shardspec.errors import CheckpointError

DEEPSPEED_NAMES: Final[Names] = {
    f"deepspeed.{name}": record_class(f"deepspeed.{name}")
    for name in (
        *("runtime.zero.config.ZeroStageEnum", "utils.tensor_fragment.fragment_address"),
        *(f"runtime.fp16.loss_scaler.{kind}" for kind in ("LossScaler", "DynamicLossScaler")),
    )
}
"""What DeepSpeed's files name besides tensors; records stand for them, nothing is made."""

OPTIMIZER: Final = "optimizer_state_dict"
"""Under which an optimizer's file has what it saves."""
_UNIVERSAL: Final = "make a Universal Checkpoint of it: " + PARTS["DeepSpeed's tensor parallel"][1]
_PARALLEL: Final = re.compile(r"layer_.*_states\.pt|.*expert_\d.*_states\.pt")
_MOST_LATEST_BYTES: Final = 4096


class ZeroRun(NamedTuple):
    """What the ranks have saved."""

    stage: int
    optimizers: Sequence[TorchState]
    models: Sequence[TorchState]
    """One a rank with stage 3, else one of all."""


def tag_directory(directory: Path) -> Path:
    """Return the directory with the files of the ranks, which that above names."""
    names = frozenset(path.name for path in directory.iterdir())
    if any(DEEPSPEED_OPTIMIZER.fullmatch(n) or DEEPSPEED_MODEL.fullmatch(n) for n in names):
        return directory
    if DEEPSPEED_LATEST in names:
        path = file_inside(directory, DEEPSPEED_LATEST, directory)
        with SourceFile(path) as file:
            said = file.read(0, min(file.num_bytes, _MOST_LATEST_BYTES)).strip().decode("latin1")
        if said not in names or not file_inside(directory, said, path).is_dir():
            raise CheckpointError(
                f"{path}: says {said!r:.200}, but no such checkpoint is beside it; name the "
                "directory of the tag itself"
            )
        return directory / said
    found = [
        name
        for name in sorted(names)
        if (directory / name).is_dir()
        and find_deepspeed(frozenset(at.name for at in (directory / name).iterdir()))
    ]
    if len(found) == 1:
        return directory / found[0]
    raise CheckpointError(
        f"{directory}: has the tags {', '.join(found) or '(none)'} and no {DEEPSPEED_LATEST} that "
        "says which counts; name the directory of one"
    )


def read_run(place: Path) -> ZeroRun:
    """Return what all ranks saved, rank by rank, once it is of one save."""
    names = sorted(path.name for path in place.iterdir())
    parallel = next(filter(_PARALLEL.fullmatch, names), None)
    if parallel is not None:
        raise CheckpointError(
            f"{place}: {parallel} is of a run with experts or pipeline stages, which are not read; "
            f"{_UNIVERSAL}"
        )
    found = _by_rank(place, names, DEEPSPEED_OPTIMIZER)
    # At least one is due.
    count = 1 + max((rank for rank in found if rank is not None), default=0)
    optimizers = read_torch_states(_due(place, found, range(count), "optim"), DEEPSPEED_NAMES)
    stage = _number(optimizers[0], "zero_stage")
    if stage not in (1, 2, 3):
        raise CheckpointError(
            f"{optimizers[0].path}: says no stage of ZeRO from 1 to 3; save it again with "
            "DeepSpeed 0.8 or later"
        )
    found = _by_rank(place, names, DEEPSPEED_MODEL)
    due: Sequence[int | None] = range(count) if stage == 3 else [None]
    paths = _due(place, found, due, "model")
    other = next((path for rank, path in found.items() if rank not in due), None)
    if other is not None:
        raise CheckpointError(
            f"{other}: is not of the save of the optimizer states, of {count} ranks and stage "
            f"{stage}; restore what is missing of these, or move it away"
        )
    run = ZeroRun(stage, optimizers, read_torch_states(paths, DEEPSPEED_NAMES))
    _check_one_save(run)
    check_no_copies(optimizers)
    return run


def _by_rank(place: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int | None, Path]:
    """Return the files of a kind by their rank; None for that of all ranks."""
    found: dict[int | None, Path] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        rank = None if match[1] is None else int(match[1])
        if int(match[2]):
            raise CheckpointError(
                f"{place}: {match[0]} is of a tensor parallel run, which is not read; {_UNIVERSAL}"
            )
        if rank in found:
            raise CheckpointError(
                f"{place}: {found[rank].name} and {match[0]} are both of rank {rank}; move that of "
                "the other save away"
            )
        found[rank] = file_inside(place, match[0], place)
    return found


def _due(
    place: Path, found: Mapping[int | None, Path], ranks: Sequence[int | None], kind: str
) -> list[Path]:
    """Return the files of a kind that these ranks have written."""
    for rank in ranks:
        if rank not in found:
            start = "" if rank is None else f"zero_pp_rank_{rank}_"
            raise CheckpointError(
                f"{place}: {start}mp_rank_00_{kind}_states.pt is missing; restore it"
            )
    return [found[rank] for rank in ranks]


def _number(state: TorchState, key: str) -> int | None:
    """Return a number of an optimizer's state, however DeepSpeed has wrapped it."""
    value = state.extras.get(f"{OPTIMIZER}.{key}")
    if isinstance(value, Record) and len(value.args) == 1:
        (value,) = value.args
    if isinstance(value, list):
        value = max((one for one in value if type(one) is int), default=None)
    return value if type(value) is int else None


def _check_one_save(run: ZeroRun) -> None:
    """Check that all files say the same of the save."""
    first, model = run.optimizers[0], run.models[0]
    for state, key in (
        *product(run.models, ("ds_version", "global_steps", "param_shapes")),
        *product(run.optimizers, ("ds_version",)),
    ):
        due, said = model.extras.get(key), state.extras.get(key)
        if said != due:
            raise of_two_saves(state.path, key, said, model.path, due)
    for state in run.optimizers:
        stage = _number(state, "zero_stage")
        if stage != run.stage:
            raise of_two_saves(state.path, "zero_stage", stage, first.path, run.stage)
    counts = [(state.path, _number(state, "partition_count")) for state in run.optimizers]
    for path, said in (*counts, *((m.path, m.extras.get("dp_world_size")) for m in run.models)):
        if type(said) is int and said != len(run.optimizers):
            raise CheckpointError(
                f"{path}: was saved by {said} ranks, but optimizer states of {len(counts)} are "
                "there; restore what is missing"
            )

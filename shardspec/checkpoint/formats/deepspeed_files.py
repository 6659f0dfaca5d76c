"""The files of a DeepSpeed run: which there are, and whether they are of one save.

A run's directory has ``latest``, which names the tag, a directory. In it every rank has written
``[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt``, and with stage 3 its ``…_model_states.pt``; in
stages 1 and 2 one ``mp_rank_00_model_states.pt`` is of all.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.formats.names import (
    DEEPSPEED_LATEST,
    DEEPSPEED_MODEL,
    DEEPSPEED_OPTIMIZER,
    PARTS,
    find_deepspeed,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.torch_files.state import (
    TorchState,
    check_no_copies,
    read_torch_state,
)
from shardspec.checkpoint.torch_files.unpickler import Names, Record, record_class
from shardspec.errors import CheckpointError

__all__ = ["DEEPSPEED_NAMES", "OPTIMIZER", "ZeroRank", "read_ranks", "tag_directory"]

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


class ZeroRank(NamedTuple):
    """What one rank has saved."""

    optimizer: TorchState
    model: TorchState
    """Its own with stage 3, else that of all."""


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


def read_ranks(place: Path) -> tuple[list[ZeroRank], int]:
    """Return what all ranks saved, rank by rank, and the stage of ZeRO.

    Raises
    ------
    CheckpointError
        If a file is missing, damaged or of another save.
    """
    names = sorted(path.name for path in place.iterdir())
    parallel = next((name for name in names if _PARALLEL.fullmatch(name)), None)
    if parallel is not None:
        raise CheckpointError(
            f"{place}: {parallel} is of a run with experts or pipeline stages, which are not read; "
            f"{_UNIVERSAL}"
        )
    optimizers = _by_rank(place, names, DEEPSPEED_OPTIMIZER)
    models = _by_rank(place, names, DEEPSPEED_MODEL)
    # At least one is due.
    for rank in range(max((rank for rank in optimizers if rank is not None), default=0) + 1):
        if rank not in optimizers:
            raise CheckpointError(
                f"{place}: zero_pp_rank_{rank}_mp_rank_00_optim_states.pt is missing, which rank "
                f"{rank} wrote; restore it"
            )
    states = _states(place, [optimizers[rank] for rank in range(len(optimizers))])
    stage = _number(states[0], "zero_stage")
    if stage not in (1, 2, 3):
        raise CheckpointError(
            f"{states[0].path}: says no stage of ZeRO from 1 to 3; save it again with DeepSpeed "
            "0.8 or later"
        )
    due: list[int | None] = [*range(len(states))] if stage == 3 else [None]
    for one in due:
        if one not in models:
            start = "" if one is None else f"zero_pp_rank_{one}_"
            raise CheckpointError(
                f"{place}: {start}mp_rank_00_model_states.pt is missing, which stage {stage} "
                "writes; restore it"
            )
    if len(models) > len(due):
        other = next(path for rank, path in models.items() if rank not in due)
        raise CheckpointError(
            f"{other}: is not of the save of the optimizer states, of {len(states)} ranks and "
            f"stage {stage}; restore what is missing of these, or move it away"
        )
    kept = _states(place, [models[one] for one in due])
    ranks = [ZeroRank(state, kept[at if stage == 3 else 0]) for at, state in enumerate(states)]
    _check_one_save(ranks)
    check_no_copies(states)
    return ranks, stage


def _by_rank(place: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int | None, Path]:
    """Return the files of a kind by their rank; None for that of all ranks."""
    found: dict[int | None, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = None if match[1] is None else int(match[1])
        if int(match[2]):
            raise CheckpointError(
                f"{place}: {name} is of a tensor parallel run, which is not read; {_UNIVERSAL}"
            )
        if rank in found:
            raise CheckpointError(
                f"{place}: {found[rank].name} and {name} are both of rank {rank}; move that of "
                "the other save away"
            )
        found[rank] = file_inside(place, name, place)
    return found


def _states(place: Path, paths: Sequence[Path]) -> list[TorchState]:
    look = partial(read_torch_state, more=DEEPSPEED_NAMES)
    with prefetch_map(paths, look, prefetch_depth(place)) as states:
        return list(states)


def _number(state: TorchState, key: str) -> int | None:
    """Return a number of an optimizer's state, however DeepSpeed has wrapped it."""
    value = state.extras.get(f"{OPTIMIZER}.{key}")
    if isinstance(value, Record) and len(value.args) == 1:
        (value,) = value.args
    if isinstance(value, list):
        value = max((one for one in value if type(one) is int), default=None)
    return value if type(value) is int else None


def _check_one_save(ranks: Sequence[ZeroRank]) -> None:
    """Check that all files say the same of the save."""
    first = ranks[0]
    for rank in ranks:
        for one, other, key in (
            (first.model, rank.optimizer, "ds_version"),
            *((first.model, rank.model, key) for key in ("ds_version", "global_steps")),
            (first.model, rank.model, "param_shapes"),
        ):
            a, b = one.extras.get(key), other.extras.get(key)
            if a != b:
                raise CheckpointError(
                    f"{other.path}: its {key} is {b!r:.60}, but {a!r:.60} in {one.path}; the files "
                    "are not of one save, restore those of one"
                )
        if _number(rank.optimizer, "zero_stage") != _number(first.optimizer, "zero_stage"):
            raise CheckpointError(
                f"{rank.optimizer.path}: is of another stage of ZeRO than {first.optimizer.path}; "
                "the files are not of one save, restore those of one"
            )
        said = rank.model.extras.get("dp_world_size")
        counts = {
            rank.optimizer.path: _number(rank.optimizer, "partition_count"),
            rank.model.path: said if type(said) is int else None,
        }
        for path, count in counts.items():
            if count not in (None, len(ranks)):
                raise CheckpointError(
                    f"{path}: was saved by {count} ranks, but optimizer states of {len(ranks)} are "
                    "there; restore what is missing"
                )

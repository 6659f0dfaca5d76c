"""Directories of runs, which hold several checkpoints: the one that counts."""

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.errors import CheckpointError

_MOST_TRACKER_BYTES: Final = 4096


class Newest(NamedTuple):
    """The checkpoint that counts in the directory of a run."""

    place: StoragePath
    note: str
    """For the user: how it was found."""
    of_run: bool = False
    """Whether it is in the format of the run, if the names in it show no format."""


def named_by(
    tracker: StoragePath, there: Collection[str], folders_of: Callable[[str], Sequence[str]]
) -> Newest:
    """Return the checkpoint that a file of a run names.

    `folders_of` returns the names that a directory may have for what the file says. Raises
    `CheckpointError` if none of them is `there`.
    """
    run = tracker.parent
    path = file_inside(run, tracker.name, run)
    with path.open() as file:
        text = file.read(0, min(file.num_bytes, _MOST_TRACKER_BYTES)).strip().decode("latin1")
    name = next((name for name in folders_of(text) if name in there), "")
    if not name or not file_inside(run, name, path).is_dir():
        raise CheckpointError(
            f"{path}: says {text!r:.200}, but no such checkpoint is beside it; name the "
            "directory of the checkpoint itself"
        )
    return Newest(run / name, f"reading {name}, which {tracker.name} names")


def only_one(run: StoragePath, checkpoints: Sequence[str], tracker: str) -> Newest:
    """Return the one checkpoint in a run without a `tracker`; raises CheckpointError if several."""
    if len(checkpoints) != 1:
        raise CheckpointError(
            f"{run}: has the checkpoints {', '.join(checkpoints) or '(none)'} and no {tracker} "
            "that says which counts; name the directory of one"
        )
    place = file_inside(run, checkpoints[0], run)
    return Newest(place, f"reading {checkpoints[0]}, which is the only one")

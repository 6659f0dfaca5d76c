"""From a directory to a checkpoint that can be read."""

from pathlib import Path

from shardspec.checkpoint.native import NativeCheckpoint, open_native

__all__ = ["open_checkpoint"]


def open_checkpoint(directory: Path | str) -> NativeCheckpoint:
    """Open the checkpoint in a directory; its headers are read and checked, its data is not.

    Raises
    ------
    CheckpointError
        If the directory is missing, holds no finished save, or contradicts itself.
    """
    return open_native(Path(directory))

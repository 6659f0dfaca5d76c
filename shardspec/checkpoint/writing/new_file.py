"""A new file, here or in a store, written from its start on; it appears when it is whole."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from shardspec.checkpoint.commit import write_atomically
from shardspec.checkpoint.moving.to_disk import Writer
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.writing.upload import Upload

__all__ = ["Write", "write_file"]

Write: TypeAlias = Callable[[memoryview], None]
"""Writes on where it stopped."""


def write_file(
    path: Path, num_bytes: int, fill: Callable[[Write], None], *, overwrite: bool
) -> None:
    """Create a file that appears under its name when it is complete.

    Parameters
    ----------
    path, num_bytes
        Its name and size.
    fill
        Writes the contents in order, by calling what it is given.
    overwrite
        Whether a file of that name is replaced.

    Raises
    ------
    OutputExistsError
        If there is such a file and `overwrite` is not set.
    CheckpointError
        If the system or the store refuses; nothing of the new file stays.
    """
    if isinstance(path, RemotePath):
        with Upload(path, num_bytes, overwrite=overwrite) as upload:
            fill(upload.write)
        return

    def to_disk(fd: int) -> None:
        at, writer = 0, Writer(fd, path)

        def write(data: memoryview) -> None:
            nonlocal at
            writer.write(data, at)
            at += len(data)

        fill(write)

    write_atomically(path, num_bytes, to_disk, overwrite=overwrite)

"""Taking turns at a directory: one save at a time."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from shardspec.checkpoint.store import reason
from shardspec.errors import CheckpointError

__all__ = ["Turn", "shard_name"]


def shard_name(rank: int, save: str) -> str:
    """Return the name of a file of a save.

    Examples
    --------
    >>> shard_name(3, "89abcdef01234567")
    'shard-00003-89abcdef01234567.safetensors'
    """
    return f"shard-{rank:05d}-{save}.safetensors"


class Turn:
    """The right to save into a directory, from `take` to the end of the block.

    The system gives it back when a process is killed. On a file system without locks everybody
    has it.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self.locked = False
        """Whether no other save is at work in the directory."""

    def take(self, directory: Path) -> None:
        """Take it for a directory.

        Raises
        ------
        CheckpointError
            If another save has it, or the directory cannot be read.
        """
        try:
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be read: {reason(error)}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
        except BlockingIOError:
            raise CheckpointError(
                f"{directory}: another run is saving there; wait for that one, or choose another "
                "directory"
            ) from None
        except OSError:
            # This file system has no locks: who else is at work cannot be known.
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)

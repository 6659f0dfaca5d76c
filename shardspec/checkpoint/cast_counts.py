"""What casts lost in a whole run: added up over threads, refused if that was asked for."""

from threading import Lock
from typing import TYPE_CHECKING

from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

__all__ = ["CastCounts"]


class CastCounts:
    """Adds up the losses of a run.

    Parameters
    ----------
    strict
        Whether any loss is an error.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._lock = Lock()
        self.losses: CastLosses | None = None
        """Of all blocks that were cast so far; None if there was none."""

    def add(self, name: str, losses: "CastLosses") -> None:
        """Count what a block lost.

        Raises
        ------
        CheckpointError
            If that is not allowed.
        """
        if self._strict and losses:
            raise CheckpointError(
                f"{name}: the cast would not keep its numbers: {losses}; choose another dtype, or "
                "allow for it without --strict-cast (strict_cast=False)"
            )
        with self._lock:
            self.losses = losses if self.losses is None else self.losses + losses

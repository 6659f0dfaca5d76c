"""Which of the processes of torchrun this is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

__all__ = ["Member"]


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes."""

    rank: int
    size: int
    job: str = field(default="", compare=False, repr=False)
    """A word that tells the processes of one torchrun from those of another."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Member | None":
        """Return which of the processes of torchrun this is; None if it is alone.

        Examples
        --------
        >>> Member.of_environment({"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "4"})
        Member(rank=1, size=4)
        """
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        job = "/".join(environment.get(name, "") for name in names)
        return cls(rank, size, f"{crc32(job.encode()):08x}") if size > 1 else None

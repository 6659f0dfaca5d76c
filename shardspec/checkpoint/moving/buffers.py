"""Memory to copy with."""

from typing import Final

__all__ = ["BLOCK_BYTES", "Buffers"]

BLOCK_BYTES: Final = 1 << 20
"""Most bytes of a block: it fits the L2 cache of common CPUs; smaller ones mean more calls."""
_ROW_BYTES: Final = 2048
"""Shorter rows are put together faster by numpy: for the system, and for a CRC, each is one more
thing to look at."""


class Buffers:
    """Memory for one thread that copies: made once, used for every tensor."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK_BYTES))
        """Where a block of the target is put together."""
        self.scratch = memoryview(bytearray(BLOCK_BYTES))
        """What was read and is still to be put in place."""
        self.row_bytes = _ROW_BYTES
        """Rows as long as this are read right into their places."""

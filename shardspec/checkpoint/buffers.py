"""Memory to copy with."""

from typing import Final

__all__ = ["BLOCK_BYTES", "Buffers"]

BLOCK_BYTES: Final = 1 << 20
"""Most bytes of a block: it fits the L2 cache of common CPUs; smaller ones mean more calls."""


class Buffers:
    """Memory for one thread that copies: made once, used for every tensor."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK_BYTES))
        """Where a block of the target is put together."""
        self.scratch = memoryview(bytearray(BLOCK_BYTES))
        """What was read and is still to be put in place."""

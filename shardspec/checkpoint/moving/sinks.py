"""Where bytes go that are put together from stored boxes: memory, or a file."""

from collections.abc import Callable
from typing import Protocol

from shardspec.checkpoint.moving.behind import Behind
from shardspec.checkpoint.moving.digests import crc32, crc32_combine
from shardspec.checkpoint.moving.pieces import Block
from shardspec.dtypes import item_bytes

__all__ = ["FileSink", "MemorySink", "Sink"]


class Sink(Protocol):
    """Where the bytes of a target go."""

    def room(self, block: Block) -> memoryview:
        """Return flat memory in which a block can be put together."""
        ...

    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:
        """Take a block that was put together in what `room` gave; and its CRC-32, if known."""
        ...


class MemorySink:
    """Puts a target into memory.

    Parameters
    ----------
    out
        Flat memory as long as the target.
    """

    def __init__(self, out: memoryview) -> None:
        self._out = out

    def room(self, block: Block) -> memoryview:
        """Return the very place of the block."""
        return self._out[block.target_offset : block.target_offset + block.num_bytes]

    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:
        """Do nothing: the block is in its place."""


class FileSink:
    """Writes a target into a file.

    Parameters
    ----------
    name, offset
        What the target is, for errors, and where in the file it starts.
    behind
        Writes blocks of that file.
    advance
        Called with the number of bytes of each block.
    digested
        Whether to take the CRC-32 of what is written.
    checked
        Whether to have what was written read again; then it is `digested` too.
    dtypes
        Source and target dtype if the numbers are to be cast.
    """

    def __init__(
        self,
        name: str,
        offset: int,
        behind: Behind,
        advance: Callable[[int], None],
        *,
        digested: bool = False,
        checked: bool = False,
        dtypes: tuple[str, str] | None = None,
    ) -> None:
        assert digested or not checked, "what is checked has a digest"
        self._name = name
        self._offset = offset
        self._behind = behind
        self._advance = advance
        self._digested = digested
        self._checked = checked
        self._dtypes = dtypes
        self.crc32 = 0
        """Of what was put so far, if it is digested; the target is filled from its start."""

    def room(self, block: Block) -> memoryview:
        """Return the start of a buffer."""
        return self._behind.room(block.num_bytes)

    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:
        """Have the block written."""
        target = block.target_offset
        if self._dtypes is not None:
            source, wanted = self._dtypes
            from shardspec.checkpoint.moving.numbers import cast

            room, crc = cast(room, source, wanted), None
            target = target // item_bytes(source) * item_bytes(wanted)
        if self._digested:
            crc = crc32(room) if crc is None else crc
            self.crc32 = int(crc32_combine(self.crc32, crc, len(room)))
        self._behind.put(room, self._offset + target, self._name, crc if self._checked else None)
        self._advance(len(room))

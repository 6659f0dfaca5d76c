"""Where bytes go that are put together from stored boxes: memory, or a file."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from shardspec.checkpoint.moving.behind import Behind, different
from shardspec.checkpoint.moving.cast_counts import CastCounts
from shardspec.checkpoint.moving.digests import Arrival, Checks, crc32, crc32_combine
from shardspec.checkpoint.moving.pieces import Block
from shardspec.checkpoint.moving.rows import Rows, crc32_of_part
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

    def carry(
        self,
        block: Block,  # noqa: ARG002
        room: memoryview,  # noqa: ARG002
        rows: Sequence[Rows],  # noqa: ARG002
        checks: Checks,  # noqa: ARG002
    ) -> bool:
        """Take a block made of rows, if their digests can be taken on what is read back of it.

        Otherwise return False: then nothing was done, as where nothing is read back.
        """
        return False


class MemorySink(Sink):
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


class FileSink(Sink):
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
    end_to_end
        Whether digests of sources may be taken on what is read again; then it is `checked` too, and
        every box of the tensor is wanted whole.
    dtypes
        Source and target dtype if the numbers are to be cast.
    cast_counts
        Told of what casts do not keep.
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
        end_to_end: bool = False,
        dtypes: tuple[str, str] | None = None,
        cast_counts: CastCounts | None = None,
    ) -> None:
        assert digested or not checked, "what is checked has a digest"
        assert checked or not end_to_end, "what is judged there is read again"
        self._name = name
        self._offset = offset
        self._behind = behind
        self._advance = advance
        self._digested = digested
        self._checked = checked
        self._end_to_end = end_to_end and dtypes is None
        self._dtypes = dtypes
        self._cast_counts = cast_counts
        self.crc32 = 0
        """Of what was put, if it is digested, and read again, if it is checked."""

    def room(self, block: Block) -> memoryview:
        """Return the start of a buffer."""
        return self._behind.room(block.num_bytes)

    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:
        """Have the block written."""
        target = block.target_offset
        if self._dtypes is not None:
            source, wanted = self._dtypes
            from shardspec.checkpoint.numeric import cast

            (room, losses), crc = cast(room, source, wanted), None
            assert self._cast_counts is not None, "what is cast is counted"
            self._cast_counts.add(self._name, losses)
            target = target // item_bytes(source) * item_bytes(wanted)
        most = self._behind.block_bytes
        if len(room) <= most:
            self._put(room, self._offset + target, crc)
            return
        # Numbers that were cast may take more memory than a block.
        for at in range(0, len(room), most):
            self._put(room[at : at + most], self._offset + target + at, None)

    def _put(self, data: memoryview, offset: int, crc: int | None) -> None:
        check = None
        if self._digested:
            crc = crc32(data) if crc is None else crc
            if self._checked:
                check = partial(self._compare, crc)
            else:
                self._count(len(data), crc)
        self._behind.put(data, offset, check)
        self._advance(len(data))

    def carry(self, block: Block, room: memoryview, rows: Sequence[Rows], checks: Checks) -> bool:
        """Have the block written if `end_to_end` was asked for, and all rows allow for it."""
        if not self._end_to_end:
            return False
        arrivals = []
        for part in rows:
            arrival = checks.arrival(part.stored, part.start)
            if arrival is None:
                return False
            arrivals.append((part, arrival))
        for part, arrival in arrivals:
            arrival.expect(part.num_bytes)
        offset = self._offset + block.target_offset
        self._behind.put(room, offset, partial(self._arrive, arrivals))
        self._advance(len(room))
        return True

    def _compare(self, expected: int, data: memoryview) -> None:
        """Compare what was read back with what was written."""
        found = crc32(data)
        if found != expected:
            raise different(self._behind.path, self._name, found, expected)
        self._count(len(data), found)

    def _arrive(self, arrivals: Sequence[tuple[Rows, Arrival]], data: memoryview) -> None:
        """Have what was read back judged by the digests of where it came from."""
        whole = crc32(data)
        self._count(len(data), whole)
        for part, arrival in arrivals:
            found = whole if len(arrivals) == 1 else crc32_of_part(part, data)
            expected = arrival.add(part.num_bytes, found)
            if expected is not None:
                raise different(self._behind.path, self._name, arrival.crc32, expected)

    def _count(self, num_bytes: int, crc: int) -> None:
        self.crc32 = int(crc32_combine(self.crc32, crc, num_bytes))

"""Putting boxes of tensors together from stored boxes: a block at a time, no byte more than needed.

All goes through a buffer that fits the CPU's cache: for files in memory this is faster than having
the system copy by itself (copy_file_range), and what passes by can be checked. Memory does not grow
with the size of a tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, intersect, slices_within
from shardspec.checkpoint.catalog import StoredBox, StoredTensor, distinct
from shardspec.checkpoint.copy_plan import (
    BLOCK_BYTES,
    Block,
    Place,
    byte_box,
    offset_in,
    pieces,
)
from shardspec.checkpoint.digests import Checks, crc32
from shardspec.checkpoint.source_files import OpenFiles, SourceFile
from shardspec.dtypes import item_bytes

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import Bytes

__all__ = ["BlockRead", "Buffers", "read_box", "read_box_into"]

_Seen: TypeAlias = Callable[[int, memoryview], None]
"""Told of every stretch that was read: its position in the file, and its bytes."""


class Buffers:
    """Memory for one thread that copies: made once, used for every tensor."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK_BYTES))
        """Where a block of the target is put together."""
        self.scratch = memoryview(bytearray(BLOCK_BYTES))
        """What was read and is still to be put in place."""


class BlockRead(NamedTuple):
    """A stretch of a box that was put together."""

    offset: int
    """Where in the box, row-major, it starts."""
    data: memoryview
    """Good until the next one is read."""
    crc32: int | None
    """Of the bytes, if it was taken."""


def read_box(
    tensor: StoredTensor,
    target: Box,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None = None,
    out: memoryview | None = None,
) -> Iterator[BlockRead]:
    """Read one box of a tensor, from its start to its end; pending reductions are finished.

    Parameters
    ----------
    tensor
        What is stored; its boxes tile it, as `check_tiling` makes sure.
    target
        The box wanted, in elements.
    files, buffers
        Open files and memory to work with.
    checks
        Digests to compare on the way; None leaves them alone.
    out
        Flat memory as long as the box, for blocks to be put together in; a buffer unless given.

    Raises
    ------
    CheckpointError
        If reading fails, or the bytes of a box that was read whole are not as saved.
    """
    size = item_bytes(tensor.dtype)
    wanted = byte_box(target, size)
    parts: dict[tuple[int, ...], list[Place]] = {
        addend: [] for addend in product(*(range(p.addends) for p in tensor.pending))
    }
    for stored in distinct(tensor):
        parts[stored.addend].append(Place(byte_box(stored.box, size), stored))

    def room_for(offset: int, num_bytes: int) -> memoryview:
        return buffers.block[:num_bytes] if out is None else out[offset : offset + num_bytes]

    if tensor.pending:
        yield from _reduced(tensor, wanted, list(parts.values()), room_for, files, buffers, checks)
        return
    most = len(buffers.block)
    for piece in pieces(wanted, parts[()], most):
        if isinstance(piece, Block):
            room = room_for(piece.target_offset, piece.num_bytes)
            _gather(piece, piece.sources, room, size, files, buffers, checks)
            yield BlockRead(piece.target_offset, room, None)
            continue
        file = files.file(piece.source.path)
        for at in range(0, piece.num_bytes, most):
            room = room_for(piece.target_offset + at, min(most, piece.num_bytes - at))
            file.read_into(room, piece.source_offset + at)
            crc = None
            if checks is not None and piece.source in checks:
                crc = crc32(room)
                checks.add_known(piece.source, piece.source_offset + at, len(room), crc)
            yield BlockRead(piece.target_offset + at, room, crc)


def read_box_into(
    tensor: StoredTensor,
    target: Box,
    out: memoryview,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None = None,
) -> None:
    """Read one box of a tensor into flat memory as long as the box; as `read_box`."""
    for _ in read_box(tensor, target, files, buffers, checks, out):
        pass


def _reduced(
    tensor: StoredTensor,
    wanted: Box,
    parts: Sequence[Sequence[Place]],
    room_for: Callable[[int, int], memoryview],
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None,
) -> Iterator[BlockRead]:
    """Combine all addends of a pending tensor, one block after the other."""
    import numpy as np

    from shardspec.checkpoint.numeric import Reduction

    every = [place for addend in parts for place in addend]
    size = item_bytes(tensor.dtype)
    reduction = Reduction(tensor.dtype, tensor.pending)
    for block in pieces(wanted, every, len(buffers.block), runs=False):
        assert isinstance(block, Block), "runs were not asked for"
        room = room_for(block.target_offset, block.num_bytes)
        numbers = np.frombuffer(room, np.uint8)
        for addend in parts:
            _gather(block, addend, room, size, files, buffers, checks)
            reduction.add(numbers)
        reduction.finish(numbers)
        yield BlockRead(block.target_offset, room, None)


def _gather(
    block: Block,
    sources: Sequence[Place],
    room: memoryview,
    item_bytes: int,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None,
) -> None:
    """Read what several places hold of a block into flat memory as long as the block."""
    # Importing numpy takes its time, and boxes of whole rows need none.
    import numpy as np

    out = np.frombuffer(room, np.uint8).reshape(box_shape(block.box))
    for box, stored in sources:
        shared = intersect(box, block.box)
        if shared is None:
            continue
        seen = _seen(stored, checks) if checks is not None and stored in checks else None
        file, part = files.file(stored.path), out[slices_within(shared, block.box)]
        gaps = stored.strides
        if not gaps:
            strides = [1]
            for side in reversed(box_shape(box)[1:]):
                strides.insert(0, strides[0] * side)
            start = stored.offset + offset_in(box, [lo for lo, _ in shared])
            _read(file, start, tuple(strides), part, buffers.scratch, seen)
            continue
        lows = [lo - first for (first, _), (lo, _) in zip(box, shared, strict=True)]
        lows[-1] //= item_bytes
        start = stored.offset + sum(n * step for n, step in zip(lows, gaps, strict=True))
        # The last dim is taken apart into elements and their bytes; the longest stride goes first.
        items = part.reshape(*part.shape[:-1], -1, item_bytes)
        order = sorted(range(len(lows)), key=lambda dim: -gaps[dim])
        steps = (*(gaps[dim] for dim in order), 1)
        _read(file, start, steps, items.transpose(*order, len(lows)), buffers.scratch, seen)


def _seen(stored: StoredBox, checks: Checks) -> _Seen:
    return lambda start, data: checks.add(stored, start, data)


_PAGE: Final = 4096
"""Gaps shorter than this are read along: the system reads whole pages of a file anyway."""


def _read(
    file: SourceFile,
    start: int,
    strides: tuple[int, ...],
    out: "Bytes",
    scratch: memoryview,
    seen: _Seen | None,
) -> None:
    import numpy as np

    span, gap = 1, 0
    for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        if size > 1:
            gap = max(gap, stride - span)
            span += (size - 1) * stride
    if out.flags.c_contiguous and all(
        size == 1 or stride == own
        for size, stride, own in zip(out.shape, strides, out.strides, strict=True)
    ):
        file.read_into(out.reshape(-1).data, start)
        if seen is not None:
            seen(start, out.reshape(-1).data)
    elif span <= len(scratch) and gap < _PAGE:
        file.read_into(scratch[:span], start)
        if seen is not None:
            seen(start, scratch[:span])
        _copy(np.ndarray(out.shape, np.uint8, scratch, strides=strides), out)
    else:
        # A single row is contiguous on both sides, so there is a dim left to go along.
        step = 1
        if gap < _PAGE:
            step = max(1, min(len(scratch) // strides[0], out.shape[0] - 1))
        for at in range(0, out.shape[0], step):
            part = out[at] if step == 1 else out[at : at + step]
            rest = strides[1:] if step == 1 else strides
            _read(file, start + at * strides[0], rest, part, scratch, seen)


def _copy(source: "Bytes", out: "Bytes") -> None:
    """Copy between arrays of bytes whose last dims are contiguous, in units as wide as they allow.

    numpy moves one item at a time where rows are short, so wider items mean fewer of them.
    """
    unit = gcd(
        8,
        out.shape[-1],
        source.__array_interface__["data"][0],
        out.__array_interface__["data"][0],
        *source.strides[:-1],
        *out.strides[:-1],
    )
    import numpy as np

    wide = np.dtype(f"u{unit}")
    np.copyto(out.view(wide), source.view(wide))

"""Putting blocks together from several places, with numpy."""

from collections.abc import Sequence

import numpy as np

from shardspec.boxes import Box, box_shape, intersect, slices_within
from shardspec.checkpoint.catalog import StoredBox, StoredTensor
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.digests import Checks
from shardspec.checkpoint.moving.pieces import Block, Place, pieces
from shardspec.checkpoint.moving.regions import Seen, read_region, read_strided_region
from shardspec.checkpoint.moving.sinks import Sink
from shardspec.checkpoint.numeric import Reduction
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.dtypes import item_bytes

__all__ = ["gather", "reduce_blocks"]


def gather(
    block: Block,
    sources: Sequence[Place],
    room: memoryview,
    item_bytes: int,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None,
) -> None:
    """Read what several places hold of a block into flat memory.

    Parameters
    ----------
    block, sources
        The block, and the places.
    room
        Memory as long as the block.
    item_bytes
        Bytes of an element.
    files, buffers, checks
        As for `copy_box`.
    """
    out = np.frombuffer(room, np.uint8).reshape(box_shape(block.box))
    for place in sources:
        shared = intersect(place.box, block.box)
        if shared is not None:
            stored: StoredBox = place.stored
            seen: Seen | None = None
            if checks is not None and stored in checks:
                seen = _seen(stored, checks)
            file, part = files.file(stored.path), out[slices_within(shared, block.box)]
            if stored.strides is None:
                read_region(file, stored.offset, place.box, shared, part, buffers.scratch, seen)
            else:
                read_strided_region(
                    file,
                    stored.offset,
                    stored.strides,
                    item_bytes,
                    place.box,
                    shared,
                    part,
                    buffers.scratch,
                    seen,
                )


def _seen(stored: StoredBox, checks: Checks) -> Seen:
    return lambda start, data: checks.add(stored, start, data)


def reduce_blocks(
    tensor: StoredTensor,
    wanted: Box,
    parts: Sequence[Sequence[Place]],
    sink: Sink,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None,
) -> None:
    """Combine all addends of a pending tensor, one block after the other.

    Parameters
    ----------
    tensor, wanted
        The tensor, and the box wanted of it, in bytes.
    parts
        What is stored of each addend.
    sink, files, buffers, checks
        As for `copy_box`.
    """
    every = [place for addend in parts for place in addend]
    size = item_bytes(tensor.dtype)
    reduction = Reduction(tensor.dtype, tensor.pending)
    for block in pieces(wanted, every, len(buffers.block), runs=False):
        assert isinstance(block, Block), "runs were not asked for"
        room = sink.room(block)
        numbers = np.frombuffer(room, np.uint8)
        for addend in parts:
            gather(block, addend, room, size, files, buffers, checks)
            reduction.add(numbers)
        reduction.finish(numbers)
        sink.put(block, room)

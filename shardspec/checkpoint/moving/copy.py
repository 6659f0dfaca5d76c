"""Moving the bytes of a tensor from where its boxes are stored to where they are wanted.

All goes through a buffer that fits the CPU's cache: for files in memory this is faster than having
the system copy by itself (copy_file_range), and what passes by can be checked. Memory does not grow
with the size of a tensor.
"""

from collections.abc import Sequence
from itertools import product
from typing import assert_never

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import StoredTensor, distinct
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.digests import Checks
from shardspec.checkpoint.moving.pieces import Block, Place, Run, byte_box, pieces
from shardspec.checkpoint.moving.rows import Rows, crc32_of_part, read_rows, rows_of
from shardspec.checkpoint.moving.sinks import Sink
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.dtypes import item_bytes

__all__ = ["copy_box"]


def copy_box(
    tensor: StoredTensor,
    target: Box,
    sink: Sink,
    files: OpenFiles,
    buffers: Buffers,
    *,
    checks: Checks | None = None,
) -> None:
    """Put one box of a tensor where it is wanted; pending reductions are finished on the way.

    Parameters
    ----------
    tensor
        What is stored; its boxes tile it, as `check_tiling` makes sure.
    target
        The box wanted, in elements.
    sink
        Where it goes, row-major.
    files, buffers
        Open files and memory to work with.
    checks
        Digests to compare on the way; None leaves them alone.

    Raises
    ------
    CheckpointError
        If reading or writing fails, or the bytes of a box that was read whole are not as saved.
    """
    size = item_bytes(tensor.dtype)
    wanted = byte_box(target, size)
    parts: dict[tuple[int, ...], list[Place]] = {
        addend: [] for addend in product(*(range(p.addends) for p in tensor.pending))
    }
    for stored in distinct(tensor):
        parts[stored.addend].append(Place(byte_box(stored.box, size), stored))
    if tensor.pending:
        from shardspec.checkpoint.moving.gather import reduce_blocks

        reduce_blocks(tensor, wanted, list(parts.values()), sink, files, buffers, checks)
        return
    for piece in pieces(wanted, parts[()], len(buffers.block)):
        match piece:
            case Run():
                _copy_run(piece, sink, files, buffers, checks)
            case Block():
                room = sink.room(piece)
                rows = rows_of(piece, buffers.row_bytes)
                if rows is not None:
                    read_rows(rows, room, files)
                    _put(piece, room, rows, sink, checks)
                else:
                    # Importing numpy takes its time, and long rows need none.
                    from shardspec.checkpoint.moving.gather import gather

                    gather(piece, piece.sources, room, size, files, buffers, checks)
                    sink.put(piece, room)
            case _:
                assert_never(piece)


def _copy_run(
    run: Run, sink: Sink, files: OpenFiles, buffers: Buffers, checks: Checks | None
) -> None:
    """Move a run a block at a time: its digest is taken while the bytes are in the cache."""
    file = files.file(run.source.path)
    for at in range(0, run.num_bytes, len(buffers.block)):
        length = min(len(buffers.block), run.num_bytes - at)
        block = Block(((0, length),), (), run.target_offset + at, length)
        room = sink.room(block)
        start = run.source_offset + at
        file.read_into(room, start)
        _put(block, room, [Rows(run.source, start, length, (slice(0, length),))], sink, checks)


def _put(
    block: Block, room: memoryview, rows: Sequence[Rows], sink: Sink, checks: Checks | None
) -> None:
    """Put a block made of rows, and have their digests taken."""
    if checks is None:
        sink.put(block, room)
    elif not sink.carry(block, room, rows, checks):
        crc = None
        for part in rows:
            if part.stored in checks:
                crc = crc32_of_part(part, room)
                checks.add_known(part.stored, part.start, part.num_bytes, crc)
        sink.put(block, room, crc if len(rows) == 1 else None)

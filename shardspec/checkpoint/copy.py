"""Moving the bytes of a tensor from where its boxes are stored to where they are wanted.

Whole rows go from file to file inside the system; what is cut along rows is gathered in a buffer
that fits the CPU's cache. Memory does not grow with the size of a tensor.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Final, Protocol, assert_never

import numpy as np

from shardspec.boxes import Box, box_shape, intersect, slices_within
from shardspec.checkpoint.behind import BLOCK_BYTES, Behind
from shardspec.checkpoint.digests import Checks, crc32, crc32_combine
from shardspec.checkpoint.files import OpenFiles, SourceFile, reason
from shardspec.checkpoint.numbers import cast
from shardspec.checkpoint.pieces import Block, Place, Run, byte_box, pieces
from shardspec.checkpoint.reduce import Reduction
from shardspec.checkpoint.regions import Bytes, Seen, read_region, read_strided_region
from shardspec.checkpoint.source import StoredBox, StoredTensor, distinct
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["Buffers", "FileSink", "MemorySink", "Sink", "copy_box"]

_COPY_BYTES: Final = 4 << 20
"""Bytes copied by one call inside the system, so that progress is seen."""
_NO_DIRECT_COPY: Final = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
)
"""Answers of a system or file system that cannot copy between these two files by itself."""


class Buffers:
    """Memory for one thread that copies: made once, used for every tensor."""

    def __init__(self) -> None:
        self.block: Bytes = np.empty(BLOCK_BYTES, np.uint8)
        """Where a block of the target is put together."""
        self.scratch: Bytes = np.empty(BLOCK_BYTES, np.uint8)
        """What was read and is still to be put in place."""


class Sink(Protocol):
    """Where the bytes of a target go."""

    @property
    def direct(self) -> bool:
        """Whether runs may be copied without being seen."""
        ...

    def copy(self, run: Run, file: SourceFile) -> None:
        """Copy a run from an open file to its place."""
        ...

    def room(self, block: Block) -> Bytes:
        """Return flat memory in which a block can be put together."""
        ...

    def put(self, block: Block, room: Bytes, crc: int | None = None) -> None:
        """Take a block that was put together in what `room` gave; and its CRC-32, if known."""
        ...


class MemorySink:
    """Puts a target into memory.

    Parameters
    ----------
    out
        Flat memory as long as the target.
    """

    def __init__(self, out: Bytes) -> None:
        self._out = out

    @property
    def direct(self) -> bool:
        """True: nothing is done with the bytes."""
        return True

    def copy(self, run: Run, file: SourceFile) -> None:
        """Read a run straight to its place."""
        place = self._out[run.target_offset : run.target_offset + run.num_bytes]
        file.read_into(place.data, run.source_offset)

    def room(self, block: Block) -> Bytes:
        """Return the very place of the block."""
        return self._out[block.target_offset : block.target_offset + block.num_bytes]

    def put(self, block: Block, room: Bytes, crc: int | None = None) -> None:
        """Do nothing: the block is in its place."""


class FileSink:
    """Writes a target into a file.

    Parameters
    ----------
    fd, path
        The file, open for writing; the path is for errors.
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
        fd: int,
        path: Path,
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
        self._fd = fd
        self._path = path
        self._name = name
        self._offset = offset
        self._behind = behind
        self._advance = advance
        self._digested = digested
        self._checked = checked
        self._dtypes = dtypes
        self.crc32 = 0
        """Of what was put so far, if it is digested; the target is filled from its start."""

    @property
    def direct(self) -> bool:
        """Whether the system may copy by itself, as nothing has to be seen or changed."""
        return not self._digested and self._dtypes is None

    def copy(self, run: Run, file: SourceFile) -> None:
        """Copy a run inside the system, or through memory where it cannot do that."""
        source = file.descriptor
        done = 0
        if source is not None and sys.platform == "linux":
            done = self._copy_direct(run, source)
        while done < run.num_bytes:
            part = self._behind.room(min(self._behind.block_bytes, run.num_bytes - done))
            file.read_into(part.data, run.source_offset + done)
            target = self._offset + run.target_offset + done
            self._behind.put(part, target, self._name, None)
            done += len(part)
            self._advance(len(part))

    def _copy_direct(self, run: Run, fd: int) -> int:
        """Return how many bytes the system has copied."""
        done = 0
        while done < run.num_bytes:
            try:
                count = os.copy_file_range(
                    fd,
                    self._fd,
                    min(_COPY_BYTES, run.num_bytes - done),
                    run.source_offset + done,
                    self._offset + run.target_offset + done,
                )
            except OSError as error:
                if error.errno in _NO_DIRECT_COPY:
                    return done
                raise CheckpointError(
                    f"{self._path}: copying from {run.source.path} failed: {reason(error)}"
                ) from None
            if count == 0:
                # Either the file was cut short, which reading will tell, or the file system lies.
                return done
            done += count
            self._advance(count)
        return done

    def room(self, block: Block) -> Bytes:
        """Return the start of a buffer."""
        return self._behind.room(block.num_bytes)

    def put(self, block: Block, room: Bytes, crc: int | None = None) -> None:
        """Have the block written."""
        target = block.target_offset
        if self._dtypes is not None:
            source, wanted = self._dtypes
            room, crc = cast(room, source, wanted), None
            target = target // item_bytes(source) * item_bytes(wanted)
        if self._digested:
            crc = crc32(room.data) if crc is None else crc
            self.crc32 = int(crc32_combine(self.crc32, crc, room.nbytes))
        self._behind.put(room, self._offset + target, self._name, crc if self._checked else None)
        self._advance(len(room))


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
        Digests to compare on the way; None leaves them alone, and lets the system copy by itself.

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
        _reduce(tensor, wanted, list(parts.values()), sink, files, buffers, checks)
        return
    for piece in pieces(wanted, parts[()], buffers.block.size):
        match piece:
            case Run():
                if sink.direct and (checks is None or piece.source not in checks):
                    sink.copy(piece, files.file(piece.source.path))
                else:
                    _copy_blocks(piece, sink, files, buffers, checks)
            case Block():
                room = sink.room(piece)
                _gather(piece.sources, piece.box, room, size, files, buffers, checks)
                sink.put(piece, room)
            case _:
                assert_never(piece)


def _copy_blocks(
    run: Run, sink: Sink, files: OpenFiles, buffers: Buffers, checks: Checks | None
) -> None:
    """Move a run a block at a time: its digest is taken while the bytes are in the cache."""
    file = files.file(run.source.path)
    file.expect(run.source_offset, run.source_offset + run.num_bytes)
    for at in range(0, run.num_bytes, buffers.block.size):
        length = min(buffers.block.size, run.num_bytes - at)
        block = Block(((0, length),), (), run.target_offset + at, length)
        room = sink.room(block)
        start = run.source_offset + at
        file.read_into(room.data, start)
        if checks is not None and run.source in checks:
            crc = crc32(room.data)
            checks.add(run.source, start, room.data, crc)
            sink.put(block, room, crc)
        else:
            sink.put(block, room)


def _reduce(
    tensor: StoredTensor,
    wanted: Box,
    parts: Sequence[Sequence[Place]],
    sink: Sink,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None,
) -> None:
    """Combine all addends of one block after the other."""
    every = [place for addend in parts for place in addend]
    size = item_bytes(tensor.dtype)
    reduction = Reduction(tensor.dtype, tensor.pending)
    for block in pieces(wanted, every, buffers.block.size, runs=False):
        assert isinstance(block, Block), "runs were not asked for"
        room = sink.room(block)
        for addend in parts:
            _gather(addend, block.box, room, size, files, buffers, checks)
            reduction.add(room)
        reduction.finish(room)
        sink.put(block, room)


def _gather(
    sources: Sequence[Place],
    box: Box,
    room: Bytes,
    item_bytes: int,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None,
) -> None:
    """Read what several places hold of one box (in bytes) into flat memory."""
    out = room.reshape(box_shape(box))
    for place in sources:
        shared = intersect(place.box, box)
        if shared is not None:
            stored: StoredBox = place.stored
            seen: Seen | None = None
            if checks is not None and stored in checks:
                seen = _seen(stored, checks)
            file, part = files.file(stored.path), out[slices_within(shared, box)]
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

"""Reading boxes of tensors out of stored boxes, block by block, and checking their digests.

All goes through a buffer that fits the CPU's cache: for files in memory this is faster than a copy
by the system (copy_file_range), and the bytes can be checked on the way. Memory does not grow with
the size of a tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from isal.isal_zlib import crc32 as _crc32
from isal.isal_zlib import crc32_combine

from shardspec.boxes import Box, box_shape, box_size, chunks, intersect, slices_within
from shardspec.checkpoint.catalog import (
    Digest,
    FileBox,
    Outline,
    StoredBox,
    StoredTensor,
    box_text,
    distinct,
)
from shardspec.checkpoint.store import FileStretch, OpenFiles, SourceFile
from shardspec.copies import overlaps
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import Bytes

BLOCK_BYTES: Final = 1 << 20
"""Most bytes that are copied at once: they fit the L2 cache of common CPUs."""
_LONG_ROW: Final = 2048
"""Bytes from which rows are copied one by one, and not by numpy."""
_PAGE: Final = 4096
"""Shorter gaps are read along: the system reads whole pages anyway."""
_MAX_SPANS: Final = 64
"""Spans of a box kept apart; there are more where columns are read of which not all are wanted."""

Buffer: TypeAlias = bytes | bytearray | memoryview
_Seen: TypeAlias = Callable[[int, memoryview], int | None]
"""Called with what was read: its position in the file, and its bytes."""
_Key: TypeAlias = tuple[Path, Digest]
_Spans: TypeAlias = dict[int, tuple[int, int]]
"""First byte to the end and the CRC-32; no two touch."""


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32 of bytes (that of zlib and zip), going on from `value`."""
    return int(_crc32(data, value))


def crc_text(value: int) -> str:
    """Write a CRC-32 as the eight digits under which it is stored and shown."""
    return f"{value:08x}"


def stored_bytes(tensor: Outline[FileBox], stored: FileBox) -> int:
    """Return the bytes of a stored box."""
    return box_size(stored.box) * item_bytes(tensor.dtype)


class Checks:
    """Checks the digests of the boxes of one tensor while they are read, by threads, in any order.

    `finish` reads what was not read yet. Without it, a box of which some bytes are never read, or
    that is read in many pieces at once, is not checked.
    """

    def __init__(self, tensor: StoredTensor, boxes: Iterable[StoredBox] | None = None) -> None:
        self._tensor = tensor
        self._lock = Lock()
        # Boxes inside one digested stretch, such as parts of a storage, are checked together.
        self._open: dict[_Key, tuple[StoredBox, _Spans]] = {}
        self._late: dict[_Key, tuple[StoredBox, _Spans]] = {}
        """Those read in too many pieces."""
        for stored in tensor.boxes if boxes is None else boxes:
            if stored.digest is not None:
                self._open.setdefault((stored.path, stored.digest), (stored, {}))

    def __contains__(self, stored: StoredBox) -> bool:
        return (stored.path, stored.digest) in self._open

    def add(self, stored: StoredBox, start: int, data: Buffer) -> int | None:
        """Take in bytes from a position in the file of a box; return their CRC-32 if computed.

        Raises `CheckpointError` if they complete the box and its digest is another.
        """
        digest, length = stored.digest, memoryview(data).nbytes
        end = start + length
        with self._lock:
            if self._spans(stored, start, end) is None:
                return None
        found = value = crc32(data)
        with self._lock:
            spans = self._spans(stored, start, end)
            if spans is None or digest is None:
                return found
            before = next((at for at, (to, _) in spans.items() if to == start), None)
            if before is not None:
                start, value = before, int(crc32_combine(spans.pop(before)[1], value, length))
            if end in spans:
                at, (end, tail) = end, spans.pop(end)
                value = int(crc32_combine(value, tail, end - at))
            spans[start] = end, value
            if (start, end) == (digest.start, digest.start + digest.num_bytes):
                del self._open[stored.path, digest]
                if value != digest.crc32:
                    raise CheckpointError(
                        f"tensor {self._tensor.name!r}: rank {stored.rank}'s box "
                        f"{box_text(stored.box)} in {stored.path} has CRC-32 {crc_text(value)}, "
                        f"but {crc_text(digest.crc32)} was saved; its bytes were changed, restore "
                        "the file or save again"
                    )
            elif len(spans) > _MAX_SPANS:
                spans.clear()
                self._late[stored.path, digest] = self._open.pop((stored.path, digest))
        return found

    def _spans(self, stored: StoredBox, start: int, end: int) -> _Spans | None:
        """Return what was read of a box so far, unless some of these bytes were."""
        assert stored.digest is not None, "only those with a digest are checked"
        found = self._open.get((stored.path, stored.digest))
        # Gaps between the rows of one box are read as the rows of another.
        if found is None or any(at < end and start < to for at, (to, _) in found[1].items()):
            return None
        return found[1]

    def finish(self, files: OpenFiles) -> None:
        """Read the rest of the boxes that are not checked yet, and check them."""
        self._open |= self._late
        for (path, digest), (stored, spans) in list(self._open.items()):
            at, last = digest.start, digest.start + digest.num_bytes
            for start, end in (*sorted((a, b) for a, (b, _) in spans.items()), (last, last)):
                for piece in range(at, start, BLOCK_BYTES):
                    num_bytes = min(BLOCK_BYTES, start - piece)
                    self.add(stored, piece, files.file(path).read(piece, num_bytes))
                at = end
            if not digest.num_bytes:
                self.add(stored, at, b"")


class Part(NamedTuple):
    """What a stored box holds of a block."""

    stored: StoredBox
    box: Box  # the stored box in bytes
    shared: Box  # what is in both, in bytes

    @property
    def start(self) -> int:
        """Position in the file of its first byte, in a row-major box."""
        return self.stored.offset + offset_in(self.box, self.shared)

    @property
    def contiguous(self) -> bool:
        """Whether it is one stretch of its file."""
        return not self.stored.strides and _contiguous(self.shared, self.box)


def byte_box(box: Box, item_bytes: int) -> Box:
    """Return a box with its last dim in bytes; that of a scalar gets the one dim."""
    if not box:
        return ((0, item_bytes),)
    *outer, (lo, hi) = box
    return (*outer, (lo * item_bytes, hi * item_bytes))


def offset_in(outer: Box, inner: Box) -> int:
    """Return how many elements of a row-major box precede the first one of another in it."""
    offset = 0
    for (lo, hi), (at, _) in zip(outer, inner, strict=True):
        offset = offset * (hi - lo) + at - lo
    return offset


def _contiguous(part: Box, outer: Box) -> bool:
    """Return whether a part of a row-major box is one stretch of it."""
    whole = True
    for side, outer_side in zip(reversed(part), reversed(outer), strict=True):
        if not whole and side[1] - side[0] > 1:
            return False
        whole = whole and side == outer_side
    return True


def cut(
    tensor: StoredTensor, target: Box, most: int = BLOCK_BYTES
) -> Iterator[tuple[Box, list[Part]]]:
    """Cut a box of a tensor into blocks of at most so many bytes, a multiple of every item size.

    Yields each block in bytes, and its parts in stored boxes: of all addends that are pending.
    """
    size = item_bytes(tensor.dtype)
    wanted = byte_box(target, size)
    stored = [(one, byte_box(one.box, size)) for one in distinct(tensor)]
    stored = [one for one in stored if intersect(one[1], wanted) is not None]
    for block, met in overlaps([box for _, box in stored], chunks(wanted, most)):
        yield block, [Part(*stored[number], shared) for number, shared in met]


def stretches(tensor: StoredTensor, target: Box) -> Iterator[FileStretch]:
    """Yield what will be read for a box of a tensor, in that order, where that is contiguous.

    Addends of a pending reduction are left out.
    """
    if tensor.pending:
        return
    for _, parts in cut(tensor, target):
        for part in parts:
            if part.contiguous:
                yield FileStretch(part.stored.path, part.start, box_size(part.shared))


class Buffers:
    """Memory for one thread that copies: for a block of the target, and for what is put into it."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK_BYTES))
        self.scratch = memoryview(bytearray(BLOCK_BYTES))


def read_box(
    tensor: StoredTensor,
    target: Box,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None = None,
    out: memoryview | None = None,
) -> Iterator[tuple[memoryview, int | None]]:
    """Read one box of a tensor in order; yield blocks, and their CRC-32 if it was computed.

    The stored boxes tile the tensor (`check_tiling`). Pending reductions are finished. A block is
    valid until the next one is read, or a part of `out`, which is flat and as long as the box.
    """
    at = 0
    for block, parts in cut(tensor, target, len(buffers.block)):
        num_bytes = box_size(block)
        room = buffers.block[:num_bytes] if out is None else out[at : at + num_bytes]
        read = partial(_read_part, tensor, block, room, files, buffers, checks)
        crc = None
        if tensor.pending:
            _reduce(tensor, parts, room, read)
        else:
            for part in parts:
                crc = read(part)
        yield room, crc if len(parts) == 1 else None
        at += num_bytes


def read_box_into(
    tensor: StoredTensor,
    target: Box,
    out: memoryview,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None = None,
) -> None:
    """Read one box of a tensor into flat memory; as `read_box`."""
    for _ in read_box(tensor, target, files, buffers, checks, out):
        pass


def _reduce(
    tensor: StoredTensor, parts: list[Part], room: memoryview, read: Callable[[Part], object]
) -> None:
    """Combine all addends of a block of a pending tensor."""
    import numpy as np

    from shardspec.checkpoint.numeric import reduce

    numbers = np.frombuffer(room, np.uint8)

    def addends() -> "Iterator[Bytes]":
        for addend in product(*(range(pending.addends) for pending in tensor.pending)):
            for part in parts:
                if part.stored.addend == addend:
                    read(part)
            yield numbers

    reduce(tensor.dtype, tensor.pending, addends(), numbers)


def _read_part(
    tensor: StoredTensor,
    block: Box,
    room: memoryview,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None,
    part: Part,
) -> int | None:
    """Read what a stored box holds of a block; return the CRC-32 of these bytes if it was taken."""
    stored, box, shared = part
    file = files.file(stored.path)
    seen = None if checks is None or stored not in checks else partial(checks.add, stored)
    at, width = offset_in(block, shared), shared[-1][1] - shared[-1][0]
    direct = _contiguous(shared, block)
    # Importing numpy takes as long as copying 200 MiB, and long rows need none.
    by_rows = shared[1:-1] == block[1:-1] and width >= _LONG_ROW
    if part.contiguous and (direct or by_rows):
        num_bytes = box_size(shared)
        data = room[at : at + num_bytes] if direct else buffers.scratch[:num_bytes]
        file.read_into(data, part.start)
        crc = None if seen is None else seen(part.start, data)
        if direct:
            return crc
        for start in range(0, num_bytes, width):
            room[at : at + width] = data[start : start + width]
            at += block[-1][1] - block[-1][0]
        return None
    import numpy as np

    width = item_bytes(tensor.dtype)
    rows = box_shape(box)[1:]
    gaps = stored.strides or (*(prod(rows[dim:]) for dim in range(len(rows))), width)
    lows = [lo - first for (first, _), (lo, _) in zip(box, shared, strict=True)]
    lows[-1] //= width
    start = stored.offset + sum(n * step for n, step in zip(lows, gaps, strict=True))
    out = np.frombuffer(room, np.uint8).reshape(box_shape(block))[slices_within(shared, block)]
    if gaps[-1] == width:
        gaps = gaps[:-1]
    else:  # the last dim is taken apart into elements and their bytes
        out = out.reshape(*out.shape[:-1], -1, width)
    # The longest stride goes first.
    order = sorted(range(len(gaps)), key=lambda dim: -gaps[dim])
    steps = (*(gaps[dim] for dim in order), 1)
    _read(file, start, steps, out.transpose(*order, len(gaps)), buffers.scratch, seen)
    return None


def _read(
    file: SourceFile,
    start: int,
    strides: tuple[int, ...],
    out: "Bytes",
    scratch: memoryview,
    seen: _Seen | None,
) -> None:
    """Read bytes that lie in a file by some strides."""
    import numpy as np

    span, gap = 1, 0
    for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        if size > 1:
            gap = max(gap, stride - span)
            span += (size - 1) * stride
    as_stored = out.flags.c_contiguous and all(
        size == 1 or stride == own
        for size, stride, own in zip(out.shape, strides, out.strides, strict=True)
    )
    if as_stored or (span <= len(scratch) and gap < _PAGE):
        data = out.reshape(-1).data if as_stored else scratch[:span]
        file.read_into(data, start)
        if seen is not None:
            seen(start, data)
        if not as_stored:
            _copy(np.ndarray(out.shape, np.uint8, scratch, strides=strides), out)
        return
    # A single row is contiguous on both sides, so there is a dim left to go along.
    step = 1
    if gap < _PAGE:
        step = max(1, min(len(scratch) // strides[0], out.shape[0] - 1))
    for at in range(0, out.shape[0], step):
        some = (out[at], strides[1:]) if step == 1 else (out[at : at + step], strides)
        _read(file, start + at * strides[0], some[1], some[0], scratch, seen)


def _copy(source: "Bytes", out: "Bytes") -> None:
    """Copy between arrays of bytes whose last dims are contiguous, a row of these at a time."""
    import numpy as np

    width = out.shape[-1]
    row = np.dtype(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")
    np.copyto(out.view(row), source.view(row))

"""A copy plan: which rows of which tensors go where, and from which bytes they are put together.

Below a box everything counts bytes: its last dim is its length times the item size, so that no
later step needs to know a dtype.
"""

from collections.abc import Iterator
from itertools import groupby
from math import prod
from typing import Final, NamedTuple

from shardspec.boxes import Box, box_shape, box_size, intersect
from shardspec.checkpoint.catalog import StoredBox, StoredTensor, distinct
from shardspec.checkpoint.source_files import FileStretch
from shardspec.checkpoint.targets import Target
from shardspec.dtypes import item_bytes

__all__ = [
    "BLOCK_BYTES",
    "Copy",
    "Part",
    "TensorCopies",
    "blocks",
    "byte_box",
    "cut",
    "in_one",
    "offset_in",
    "plan_copies",
    "plan_files",
    "stretches",
]

BLOCK_BYTES: Final = 1 << 20
"""Most bytes that are copied at once: they fit the L2 cache of common CPUs."""
_COPY_BYTES: Final = 64 << 20
"""Most bytes of a copy, so that threads have their shares of a tensor that is larger."""
_SHARES: Final = 8
"""Copies that a process has at least, where there is more than a block for each."""


class Copy(NamedTuple):
    """One entry of a plan: some rows of a box of a tensor go to a place in a file."""

    file: int
    """Number of the file in the target."""
    extent: int
    """Number of the extent in the file."""
    box: Box
    """The rows of the extent's box that are copied."""
    offset: int
    """Position of their first byte in the file."""
    num_bytes: int
    """Bytes in the file."""


class TensorCopies(NamedTuple):
    """The copies of one tensor that one process makes."""

    source: str
    """Name of the tensor in the source."""
    copies: list[Copy]
    complete: bool
    """Whether no other process makes copies of the tensor."""


def plan_copies(target: Target, rank: int = 0, size: int = 1) -> Iterator[TensorCopies]:
    """Yield the copies that fill a target, tensor by tensor, so that each is read once.

    Of several processes, each has as many bytes as the others, in one stretch of the whole plan:
    a copy is made by the one in whose share its middle lies.

    Examples
    --------
    >>> from shardspec.checkpoint.targets import Extent, OutputFile, OutputTensor
    >>> tensor = OutputTensor("w", "w", (100, 1 << 20), "int8")
    >>> extent = Extent(tensor, ((0, 100), (0, 1 << 20)), 8)
    >>> target = Target((OutputFile("a", 8, (), (extent,)),), directory=False)
    >>> (found,) = plan_copies(target)
    >>> [(copy.box[0], copy.offset) for copy in found.copies]
    [((0, 64), 8), ((64, 100), 67108872)]
    """

    def source(code: int) -> str:
        return target.files[code >> 32].extents[code & 0xFFFFFFFF].tensor.source

    # Numbers take a fraction of the memory that pairs do.
    places = [
        place << 32 | number
        for place, file in enumerate(target.files)
        for number in range(len(file.extents))
    ]
    order: dict[str, int] = {}
    for code in places:
        order.setdefault(source(code), len(order))
    places.sort(key=lambda code: order[source(code)])
    total = sum(extent.num_bytes for file in target.files for extent in file.extents)
    most = min(_COPY_BYTES, max(BLOCK_BYTES, total // (_SHARES * size)))
    if size == 1:
        most = _COPY_BYTES
    before = 0
    for name, codes in groupby(places, source):
        mine: list[Copy] = []
        complete = True
        for code in codes:
            for copy in _copies_of(target, code >> 32, code & 0xFFFFFFFF, most):
                if _owner(before, copy.num_bytes, total, size) == rank:
                    mine.append(copy)
                else:
                    complete = False
                before += copy.num_bytes
        if mine:
            yield TensorCopies(name, mine, complete)


def plan_files(target: Target, rank: int = 0, size: int = 1) -> list[int]:
    """Return the numbers of the files that one of several processes writes from start to end."""
    total, before, mine = sum(file.num_bytes for file in target.files), 0, []
    for number, file in enumerate(target.files):
        if _owner(before, file.num_bytes, total, size) == rank:
            mine.append(number)
        before += file.num_bytes
    return mine


def _owner(before: int, num_bytes: int, total: int, size: int) -> int:
    """Return in whose share of all bytes the middle of some lies."""
    return min(size - 1, (2 * before + num_bytes) * size // (2 * max(1, total)))


def _copies_of(target: Target, place: int, number: int, most: int) -> Iterator[Copy]:
    """Yield the copies that fill an extent: rows of at most so many bytes, if it has rows."""
    extent = target.files[place].extents[number]
    box, size = extent.box, extent.num_bytes
    rows = box[0][1] - box[0][0] if box else 0
    if size <= most or rows <= 1:
        yield Copy(place, number, box, extent.offset, size)
        return
    row_bytes = size // rows
    step = max(1, most // row_bytes)
    for lo in range(box[0][0], box[0][1], step):
        hi = min(lo + step, box[0][1])
        offset = extent.offset + (lo - box[0][0]) * row_bytes
        yield Copy(place, number, ((lo, hi), *box[1:]), offset, (hi - lo) * row_bytes)


class Part(NamedTuple):
    """What a stored box holds of a block."""

    stored: StoredBox
    box: Box
    """The stored box in bytes, as `byte_box` gives it."""
    shared: Box
    """What is in both, in bytes."""

    @property
    def start(self) -> int:
        """Position in the file of its first byte, if the stored box is row-major."""
        return self.stored.offset + offset_in(self.box, self.shared)

    @property
    def contiguous(self) -> bool:
        """Whether it lies in its file as one stretch."""
        return not self.stored.strides and in_one(self.shared, self.box)


def byte_box(box: Box, item_bytes: int) -> Box:
    """Return a box with its last dim in bytes; that of a scalar gets the one dim.

    Examples
    --------
    >>> byte_box(((0, 2), (3, 7)), 4), byte_box((), 4)
    (((0, 2), (12, 28)), ((0, 4),))
    """
    if not box:
        return ((0, item_bytes),)
    *outer, (lo, hi) = box
    return (*outer, (lo * item_bytes, hi * item_bytes))


def offset_in(outer: Box, inner: Box) -> int:
    """Return how many bytes of a row-major box precede the first one of another in it.

    Examples
    --------
    >>> offset_in(((0, 2), (4, 10)), ((1, 2), (6, 7)))
    8
    """
    offset = 0
    for (lo, hi), (at, _) in zip(outer, inner, strict=True):
        offset = offset * (hi - lo) + at - lo
    return offset


def in_one(part: Box, outer: Box) -> bool:
    """Return whether a part of a row-major box is one stretch of it.

    Examples
    --------
    >>> in_one(((1, 3), (0, 4)), ((0, 9), (0, 4))), in_one(((1, 3), (0, 2)), ((0, 9), (0, 4)))
    (True, False)
    """
    whole = True
    for side, outer_side in zip(reversed(part), reversed(outer), strict=True):
        if not whole and side[1] - side[0] > 1:
            return False
        whole = whole and side == outer_side
    return True


def blocks(box: Box, most: int, prefix: Box = ()) -> Iterator[Box]:
    """Divide a box into stretches of at most `most` elements, in row-major order.

    Examples
    --------
    >>> list(blocks(((0, 3), (1, 5)), 8))
    [((0, 2), (1, 5)), ((2, 3), (1, 5))]
    """
    if not box_size(box):
        return
    if len(prefix) == len(box):
        yield prefix
        return
    low, high = box[len(prefix)]
    rest = box[len(prefix) + 1 :]
    row = prod(box_shape(rest))
    if row <= most:
        step = most // row
        for lo in range(low, high, step):
            yield (*prefix, (lo, min(lo + step, high)), *rest)
    else:
        for at in range(low, high):
            yield from blocks(box, most, (*prefix, (at, at + 1)))


def cut(
    tensor: StoredTensor, target: Box, most: int = BLOCK_BYTES
) -> Iterator[tuple[Box, list[Part]]]:
    """Cut a box of a tensor into blocks that are put together one after the other.

    Parameters
    ----------
    tensor
        What is stored.
    target
        The box wanted, in elements.
    most
        Most bytes of a block; a multiple of every item size.

    Yields
    ------
    tuple
        The block in bytes, and what holds its parts: of all addends of a pending reduction.

    Examples
    --------
    >>> boxes = tuple(StoredBox(((row, row + 1), (0, 6)), (), 0, None, 9) for row in (0, 1))
    >>> tensor = StoredTensor("w", (2, 6), "int8", None, (), boxes)
    >>> [(block, [part.start for part in parts]) for block, parts in cut(tensor, ((0, 2), (0, 6)))]
    [(((0, 2), (0, 6)), [9, 9])]
    """
    size = item_bytes(tensor.dtype)
    wanted = byte_box(target, size)
    waiting = [
        (box, stored)
        for stored in distinct(tensor)
        if intersect(box := byte_box(stored.box, size), wanted) is not None
    ]
    # Boxes are met in the order of their first rows; the last one here is the next.
    waiting.sort(key=lambda one: one[0][0][0])
    waiting.reverse()
    active: list[tuple[Box, StoredBox]] = []
    for block in blocks(wanted, most):
        low, high = block[0]
        while waiting and waiting[-1][0][0][0] < high:
            active.append(waiting.pop())
        active = [one for one in active if one[0][0][1] > low]
        yield (
            block,
            [
                Part(stored, box, shared)
                for box, stored in active
                if (shared := intersect(box, block)) is not None
            ],
        )


def stretches(tensor: StoredTensor, target: Box) -> Iterator[FileStretch]:
    """Return what will be read to put one box of a tensor together, in that order.

    Addends of a pending reduction are left out, and so is what does not lie in a file as one
    stretch.

    Examples
    --------
    >>> from pathlib import Path
    >>> boxes = tuple(
    ...     StoredBox(((0, 4), (c, c + 3)), (), c, Path(f"{c}"), 64) for c in (0, 3)
    ... )
    >>> tensor = StoredTensor("w", (4, 6), "int8", None, (), boxes)
    >>> [(str(s.path), s.start, s.num_bytes) for s in stretches(tensor, ((1, 3), (0, 6)))]
    [('0', 67, 6), ('3', 67, 6)]
    """
    if tensor.pending:
        return
    for _, parts in cut(tensor, target):
        for part in parts:
            if part.contiguous:
                yield FileStretch(part.stored.path, part.start, box_size(part.shared))

"""A copy plan: which rows of which tensors go where, and from which bytes they are put together.

Below a box everything counts bytes: its last dim is its length times the item size, so that no
later step needs to know a dtype.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Final, NamedTuple

from shardspec.boxes import Box, box_size, chunks, intersect
from shardspec.checkpoint.catalog import StoredBox, StoredTensor, distinct
from shardspec.checkpoint.source_files import FileStretch
from shardspec.checkpoint.targets import Target
from shardspec.copies import overlaps
from shardspec.dtypes import item_bytes

__all__ = [
    "BLOCK_BYTES",
    "Copy",
    "Part",
    "TensorCopies",
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
    """Some of a box of a tensor goes to a place in a file."""

    file: int
    """Number of the file in the target."""
    extent: int
    """Number of the extent in the file."""
    box: Box
    """What of the extent's box is copied."""
    offset: int
    """Position of its first byte in the file."""
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
    most = _COPY_BYTES
    if size > 1:
        most = min(_COPY_BYTES, max(BLOCK_BYTES, total // (_SHARES * size)))
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
    """Yield the copies that fill an extent, of at most so many bytes."""
    extent = target.files[place].extents[number]
    item, offset = item_bytes(extent.tensor.dtype), extent.offset
    boxes = chunks(extent.box, most // item) if extent.num_bytes > most else (extent.box,)
    for box in boxes:
        num_bytes = box_size(box) * item
        yield Copy(place, number, box, offset, num_bytes)
        offset += num_bytes


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
    """Return a box with its last dim in bytes; that of a scalar gets the one dim."""
    if not box:
        return ((0, item_bytes),)
    *outer, (lo, hi) = box
    return (*outer, (lo * item_bytes, hi * item_bytes))


def offset_in(outer: Box, inner: Box) -> int:
    """Return how many bytes of a row-major box precede the first one of another in it."""
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


def cut(
    tensor: StoredTensor, target: Box, most: int = BLOCK_BYTES
) -> Iterator[tuple[Box, list[Part]]]:
    """Cut a box of a tensor into blocks of at most so many bytes, to be put together in order.

    Yields each block in bytes, and what holds its parts: of all addends of a pending reduction.
    `most` is a multiple of every item size.
    """
    size = item_bytes(tensor.dtype)
    wanted = byte_box(target, size)
    stored = [(one, byte_box(one.box, size)) for one in distinct(tensor)]
    stored = [one for one in stored if intersect(one[1], wanted) is not None]
    for block, met in overlaps([box for _, box in stored], chunks(wanted, most)):
        yield block, [Part(*stored[number], shared) for number, shared in met]


def stretches(tensor: StoredTensor, target: Box) -> Iterator[FileStretch]:
    """Return what will be read to put one box of a tensor together, in that order.

    Addends of a pending reduction are left out, and so is what does not lie in a file as one
    stretch.
    """
    if tensor.pending:
        return
    for _, parts in cut(tensor, target):
        for part in parts:
            if part.contiguous:
                yield FileStretch(part.stored.path, part.start, box_size(part.shared))

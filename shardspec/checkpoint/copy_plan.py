"""A copy plan: which rows of which tensors go where, and from which bytes they are put together.

Below a box everything counts bytes: its last dim is its length times the item size, so that no
later step needs to know a dtype.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import Final, NamedTuple

from shardspec.boxes import Box, box_shape, box_size, intersect
from shardspec.checkpoint.catalog import StoredBox, StoredTensor, distinct
from shardspec.checkpoint.source_files import FileStretch
from shardspec.checkpoint.targets import Target
from shardspec.dtypes import item_bytes

__all__ = [
    "BLOCK_BYTES",
    "Block",
    "Copy",
    "Place",
    "Run",
    "TensorCopies",
    "byte_box",
    "offset_in",
    "pieces",
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


class Place(NamedTuple):
    """A stored box by the bytes it covers."""

    box: Box
    """The box in bytes, as `byte_box` gives it."""
    stored: StoredBox


class Run(NamedTuple):
    """Bytes that are contiguous both in a file and in the target."""

    source: StoredBox
    source_offset: int
    """Position of the first byte in the file."""
    target_offset: int
    """Position of the first byte in the target."""
    num_bytes: int


class Block(NamedTuple):
    """A stretch of the target that has to be gathered from several places."""

    box: Box
    """Which part it is, in bytes."""
    sources: tuple[Place, ...]
    """What holds some of it."""
    target_offset: int
    num_bytes: int


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


def offset_in(outer: Box, corner: Sequence[int]) -> int:
    """Return how many bytes precede a position in a row-major box.

    Examples
    --------
    >>> offset_in(((0, 2), (4, 10)), (1, 6))
    8
    """
    offset = 0
    for (lo, hi), at in zip(outer, corner, strict=True):
        offset = offset * (hi - lo) + at - lo
    return offset


def pieces(
    target: Box, places: Sequence[Place], block_bytes: int, *, runs: bool = True
) -> Iterator[Run | Block]:
    """Cut a target box into pieces that can be moved one after the other.

    Parameters
    ----------
    target
        The box wanted, in bytes.
    places
        Stored boxes that together cover it.
    block_bytes
        Most bytes of a `Block`; a multiple of every item size.
    runs
        Whether a `Run` may be used; without, everything comes as blocks (for sums).

    Yields
    ------
    Run or Block
        Pieces that cover the target once, in ascending order.

    Examples
    --------
    >>> def place(box):
    ...     return Place(box, StoredBox(box, (), 0, None, 100))
    >>> rows = [place(((0, 1), (0, 6))), place(((1, 2), (0, 6)))]
    >>> [(p.source_offset, p.target_offset, p.num_bytes) for p in pieces(((0, 2), (0, 6)), rows, 8)]
    [(100, 0, 6), (100, 6, 6)]
    >>> columns = [place(((0, 2), (0, 3))), place(((0, 2), (3, 6)))]
    >>> [(p.box, p.num_bytes) for p in pieces(((0, 2), (0, 6)), columns, 16)]
    [(((0, 2), (0, 6)), 12)]
    """
    if not box_size(target):
        return
    met = [place for place in places if intersect(place.box, target) is not None]
    yield from _cut(target, met, (), block_bytes, runs)


def _cut(
    target: Box, met: Sequence[Place], prefix: Box, block_bytes: int, runs: bool
) -> Iterator[Run | Block]:
    """Cut the part of the target in `prefix` (one index a dim), which all of `met` reach."""
    dim = len(prefix)
    inner = target[dim + 1 :]
    row_bytes = prod(box_shape(inner))
    low, high = target[dim]
    cuts = {low, high}
    starts: dict[int, list[Place]] = {}
    for place in met:
        lo, hi = max(place.box[dim][0], low), min(place.box[dim][1], high)
        starts.setdefault(lo, []).append(place)
        cuts.update((lo, hi))
    active: list[Place] = []
    for lo, hi in pairwise(sorted(cuts)):
        active = [place for place in active if place.box[dim][1] > lo] + starts.get(lo, [])
        alone = active[0] if runs and len(active) == 1 else None
        if alone and alone.stored.strides is None and alone.box[dim + 1 :] == inner:
            corner = [side[0] for side in (*prefix, (lo, hi), *inner)]
            yield Run(
                alone.stored,
                alone.stored.offset + offset_in(alone.box, corner),
                offset_in(target, corner),
                (hi - lo) * row_bytes,
            )
        elif row_bytes <= block_bytes:
            step = block_bytes // row_bytes
            for at in range(lo, hi, step):
                box = (*prefix, (at, min(at + step, hi)), *inner)
                first = offset_in(target, [side[0] for side in box])
                yield Block(box, tuple(active), first, box_size(box))
        else:
            for at in range(lo, hi):
                yield from _cut(target, active, (*prefix, (at, at + 1)), block_bytes, runs)


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
    size = item_bytes(tensor.dtype)
    places = [Place(byte_box(stored.box, size), stored) for stored in distinct(tensor)]
    for piece in pieces(byte_box(target, size), places, BLOCK_BYTES):
        if isinstance(piece, Run):
            yield FileStretch(piece.source.path, piece.source_offset, piece.num_bytes)
            continue
        for box, stored in piece.sources:
            shared = intersect(box, piece.box)
            if shared is not None and stored.strides is None and _in_one(shared, box):
                start = stored.offset + offset_in(box, [lo for lo, _ in shared])
                yield FileStretch(stored.path, start, prod(box_shape(shared)))


def _in_one(part: Box, outer: Box) -> bool:
    """Return whether a part of a row-major box is one stretch of it."""
    whole = True
    for side, outer_side in zip(reversed(part), reversed(outer), strict=True):
        if not whole and side[1] - side[0] > 1:
            return False
        whole = whole and side == outer_side
    return True

"""How to put a box together from stored boxes: the pieces to move, in the order of the target.

Everything here counts bytes: the last dim of a box is its length times the item size, so that no
later step needs to know a dtype. The target is laid out row-major.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shardspec.boxes import Box, box_shape, box_size, intersect
from shardspec.checkpoint.catalog import StoredBox

__all__ = ["Block", "Place", "Run", "byte_box", "offset_in", "pieces"]


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

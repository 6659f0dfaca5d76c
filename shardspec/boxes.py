"""Computes with boxes: shapes, intersections and splits of parts of a global tensor.

A box is one half-open interval ``(lo, hi)`` per tensor dim. The box of a scalar is ``()``. A box
with ``lo == hi`` in some dim is empty.

>>> inner, outer = ((0, 2), (1, 4)), ((0, 2), (0, 9))
>>> box_shape(inner), box_size(inner), contains(outer, inner), slices_within(inner, outer)
((2, 3), 6, True, (slice(0, 2, None), slice(1, 4, None)))
>>> intersect(inner, ((1, 9), (0, 2))), intersect(inner, ((2, 9), (0, 2)))
(((1, 2), (1, 2)), None)
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]


def split_interval(lo: int, hi: int, parts: int, index: int) -> tuple[int, int]:
    """Return part `index` of ``[lo, hi)`` split into `parts` by the rule of `torch.chunk`.

    >>> [split_interval(0, 5, 4, index) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    block = -(-(hi - lo) // parts)
    return min(lo + index * block, hi), min(lo + (index + 1) * block, hi)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the length of each dim of a box."""
    return tuple(hi - lo for lo, hi in box)


def box_size(box: Box) -> int:
    """Return the number of elements of a box."""
    size = 1
    for lo, hi in box:
        size *= hi - lo
    return size


def chunks(box: Box, max_elements: int) -> Iterator[Box]:
    """Split a box into parts of at most `max_elements`, in row-major order.

    Parts are as large as possible, and are full rows if a row fits. An empty box has no parts.

    >>> list(chunks(((4, 6), (0, 5)), 3))
    [((4, 5), (0, 3)), ((4, 5), (3, 5)), ((5, 6), (0, 3)), ((5, 6), (3, 5))]
    """
    assert max_elements > 0, "a chunk has at least one element"
    size = box_size(box)
    if 0 < size <= max_elements:
        yield box
    elif size:
        dim = next(d for d, (lo, hi) in enumerate(box) if hi - lo > 1)
        lo, hi = box[dim]
        row = size // (hi - lo)
        rows = max(1, max_elements // row)
        for start in range(lo, hi, rows):
            part = (*box[:dim], (start, min(start + rows, hi)), *box[dim + 1 :])
            yield from chunks(part, max_elements)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    shared = []
    for (a_lo, a_hi), (b_lo, b_hi) in zip(a, b, strict=True):
        lo, hi = max(a_lo, b_lo), min(a_hi, b_hi)
        if lo >= hi:
            return None
        shared.append((lo, hi))
    return tuple(shared)


def contains(outer: Box, inner: Box) -> bool:
    """Return True if all of `inner` is in `outer`."""
    return all(
        o_lo <= lo and hi <= o_hi for (o_lo, o_hi), (lo, hi) in zip(outer, inner, strict=True)
    )


def local_index(intervals: Sequence[tuple[int, int]], index: int) -> int:
    """Return the position of a global index in a shard that consists of some intervals.

    >>> local_index([(0, 2), (4, 6)], 5)
    3
    """
    before = 0
    for lo, hi in intervals:
        if lo <= index < hi:
            return before + index - lo
        before += hi - lo
    raise IndexError(f"index {index} is outside the intervals {intervals}")


def row_major_boxes(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """Divide elements number `lo` to `hi` of a row-major tensor into boxes, in row-major order.

    >>> row_major_boxes((3, 4), 2, 9)
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if lo >= hi:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    (first, start), (last, rest) = divmod(lo, row), divmod(hi, row)

    def within(index: int, lo: int, hi: int) -> list[Box]:
        return [((index, index + 1), *box) for box in row_major_boxes(shape[1:], lo, hi)]

    if first == last:
        return within(first, start, rest)
    boxes = within(first, start, row) if start else []
    first += start > 0
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    return boxes + within(last, 0, rest)


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index that selects `inner` from an array with the elements of `outer`."""
    return tuple(
        slice(lo - o_lo, hi - o_lo) for (lo, hi), (o_lo, _) in zip(inner, outer, strict=True)
    )

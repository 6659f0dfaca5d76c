"""Which elements of a tensor views cover, as sets: whether each is covered once, or at all.

Along each dim a view covers a set of indices, and of the tensor the product of these. Sets are
bits; one bit stands for as many neighbouring elements as all views cover alike.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Final, TypeAlias

from shardspec.errors import LayoutError
from shardspec.resharding.views import Factor, TensorView

Index: TypeAlias = tuple[int, ...]
_Cover: TypeAlias = tuple[int, ...]
"""Per dim the indices that a view covers, as bits."""
_Judge: TypeAlias = Callable[[int, Sequence[int]], int]
"""Which indices of one dim are at fault, given all of them and those that each view covers."""

_MOST_BITS: Final = 1 << 30
"""Of all sets of a tensor."""
_MOST_WORK: Final = 1 << 22
"""Sets that are compared for a tensor, long ones counted as several."""
_SHORT_BITS: Final = 512


def first_overlap(shape: Sequence[int], sides: Sequence[TensorView]) -> Index | None:
    """Return the first index, in row-major order, that several views cover.

    >>> halves = [TensorView(((Factor(0, 4, lo, 3),),)) for lo in (0, 1)]
    >>> first_overlap((4,), halves), first_hole((4,), halves[:1])
    ((1,), (3,))
    """
    return _first(shape, sides, _twice)


def first_hole(shape: Sequence[int], sides: Sequence[TensorView]) -> Index | None:
    """Return the first index, in row-major order, that no view covers."""
    return _first(shape, sides, _uncovered)


def covers(side: TensorView, index: Index) -> bool:
    """Say whether a view covers an index."""
    for at, factors in zip(index, side.dims, strict=True):
        for factor in reversed(factors):
            at, place = divmod(at, factor.size)
            if not factor.start <= place < factor.start + factor.length:
                return False
    return True


def _twice(_: int, sets: Sequence[int]) -> int:
    seen = twice = 0
    for bits in sets:
        twice |= seen & bits
        seen |= bits
    return twice


def _uncovered(whole: int, sets: Sequence[int]) -> int:
    for bits in sets:
        whole &= ~bits
    return whole


def _first(shape: Sequence[int], sides: Sequence[TensorView], judge: _Judge) -> Index | None:
    if 0 in shape:
        return None
    columns = list(zip(*(side.dims for side in sides), strict=True)) or [()] * len(shape)
    units = [gcd(size, *map(_unit, column)) for size, column in zip(shape, columns, strict=True)]
    lengths = [size // unit for size, unit in zip(shape, units, strict=True)]
    if sum(lengths) * len(sides) > _MOST_BITS:
        raise LayoutError(
            f"{len(sides):,} equations cut a tensor of {list(shape)} too finely to be checked; cut "
            "it into fewer and larger parts"
        )
    sets = [
        tuple(_bits(factors, unit) for factors, unit in zip(side.dims, units, strict=True))
        for side in sides
    ]
    # A scalar is a dim of one index.
    search = _Search(lengths or [1], judge)
    index = search.first(0, sets if shape else [(1,)] * len(sides))
    return None if index is None else tuple(a * b for a, b in zip(index, units, strict=False))


class _Search:
    """Looks for the first index at fault; what it may compare is bounded."""

    def __init__(self, lengths: Sequence[int], judge: _Judge) -> None:
        self._lengths, self._judge, self._left = lengths, judge, _MOST_WORK

    def first(self, dim: int, covers: Sequence[_Cover]) -> Index | None:
        """Return the first index at fault, from a dim on."""
        whole = (1 << self._lengths[dim]) - 1
        if dim == len(self._lengths) - 1:
            bad = self._judge(whole, [cover[dim] for cover in covers])
            return ((bad & -bad).bit_length() - 1,) if bad else None
        # Indices that are in the same sets are looked at together.
        alike = [whole]
        for bits in {cover[dim] for cover in covers}:
            alike = [part for some in alike for part in (some & bits, some & ~bits) if part]
            self._spend(dim, len(alike))
        first_of_parts = []
        for some in alike:
            self._spend(dim, len(covers))
            within = [cover for cover in covers if cover[dim] & some]
            rest = self.first(dim + 1, within)
            if rest is not None:
                first_of_parts.append(((some & -some).bit_length() - 1, *rest))
        return min(first_of_parts, default=None)

    def _spend(self, dim: int, count: int) -> None:
        self._left -= count * (1 + self._lengths[dim] // _SHORT_BITS)
        if self._left < 0:
            raise LayoutError(
                "the equations of a tensor overlap in too many ways to be checked; cut it in fewer"
            )


def _unit(factors: Sequence[Factor]) -> int:
    """Return a length that divides where each stretch of covered indices begins and ends."""
    width = 1
    for factor in reversed(factors):
        if factor.length != factor.size:
            return width * gcd(factor.size, factor.start, factor.length)
        width *= factor.size
    return width


def _bits(factors: Sequence[Factor], unit: int) -> int:
    """Return which indices of a dim are covered, one bit for every `unit` of them."""
    bits, width, solid = 1, 1, True
    for factor in reversed(factors):
        if solid:
            start, length = (n * width // unit for n in (factor.start, factor.length))
            solid = factor.length == factor.size
            # The unit may be longer than minor factors, which are then whole.
            bits = (1 << length) - 1 << start
        else:
            bits = _repeated(bits, width // unit, factor.length) << (width // unit * factor.start)
        width *= factor.size
    return bits


def _repeated(bits: int, width: int, count: int) -> int:
    """Return bits `count` times, one after the other."""
    result = at = 0
    while count:
        if count & 1:
            result |= bits << at
            at += width
        bits |= bits << width
        width, count = width * 2, count >> 1
    return result

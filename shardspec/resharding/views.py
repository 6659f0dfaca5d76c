"""Views: equal elements of two tensors, told by factored and permuted dims.

``"(g q d) c"`` reads dim 0 as the product of `g`, `q` and `d`, in einops' words. A view of a source
and a view of a target with the same names say which element goes where: the element at indices
``g, q, d, c`` of one is that of the other. So fusing, splitting, stacking, transposing and padding
are all the same thing, an equation between views.

Along each dim an index is a sum of indices of the view times a weight, so a box of a tensor is a
few boxes of the view, and a box of the view is a strided part of a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from shardspec.boxes import Box, local_index

__all__ = ["Factor", "TensorView", "View", "identity_view"]


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a dim."""

    axis: int
    """Which dim of the view it is."""
    size: int
    """Its whole size."""
    start: int
    """Where the view begins in it."""
    length: int
    """How far the view reaches in it."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """One side of an equation: per dim of the tensor its factors, the major one first."""

    dims: tuple[tuple[Factor, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the tensor."""
        return tuple(prod(factor.size for factor in factors) for factors in self.dims)

    def boxes(self, box: Box, axes: int) -> list[Box]:
        """Return the boxes of the view that a box of the tensor holds.

        Parameters
        ----------
        box
            Intervals of the tensor's dims.
        axes
            How many dims the view has.

        Examples
        --------
        >>> side = TensorView(((Factor(0, 2, 0, 2), Factor(1, 4, 1, 2)),))
        >>> side.boxes(((2, 8),), 2)
        [((0, 1), (1, 2)), ((1, 2), (0, 2))]
        """
        choices = []
        for (lo, hi), factors in zip(box, self.dims, strict=True):
            kept = []
            for part in _ranges(lo, hi, [factor.size for factor in factors]):
                clipped = [
                    (max(0, a - f.start), min(f.length, b - f.start))
                    for (a, b), f in zip(part, factors, strict=True)
                ]
                if all(a < b for a, b in clipped):
                    kept.append({f.axis: i for f, i in zip(factors, clipped, strict=True)})
            choices.append(kept)
        found = []
        for chosen in product(*choices):
            intervals = {axis: i for part in chosen for axis, i in part.items()}
            found.append(tuple(intervals.get(axis, (0, 1)) for axis in range(axes)))
        return found

    def strides(self, strides: Sequence[int], axes: int) -> tuple[int, ...]:
        """Return the steps in memory along the dims of the view, given those of the tensor.

        Examples
        --------
        >>> TensorView(((Factor(1, 2, 0, 2), Factor(0, 4, 0, 4)),)).strides([10], 2)
        (10, 40)
        """
        found = [0] * axes
        for stride, factors in zip(strides, self.dims, strict=True):
            weight = stride
            for factor in reversed(factors):
                found[factor.axis] = weight
                weight *= factor.size
        return tuple(found)

    def offset(
        self,
        strides: Sequence[int],
        intervals: Sequence[Sequence[tuple[int, int]]],
        corner: Sequence[int],
    ) -> int:
        """Return where in memory an element of the view lies.

        Parameters
        ----------
        strides, intervals
            Of the shard: steps in memory, and the indices that it holds of each dim.
        corner
            Indices of the element in the view.

        Examples
        --------
        >>> side = TensorView(((Factor(0, 2, 0, 2), Factor(1, 4, 1, 2)),))
        >>> side.offset([1], [[(2, 8)]], [1, 0])
        3
        """
        at = 0
        for stride, held, factors in zip(strides, intervals, self.dims, strict=True):
            index = 0
            for factor in factors:
                index = index * factor.size + factor.start + corner[factor.axis]
            at += local_index(held, index) * stride
        return at

    def indices(self, dim: int) -> int:
        """Return which indices of a dim the view covers, as the bits of a whole number.

        Examples
        --------
        >>> bin(TensorView(((Factor(0, 2, 0, 2), Factor(1, 3, 1, 1)),)).indices(0))
        '0b10010'
        """
        bits, width = 1, 1
        for factor in reversed(self.dims[dim]):
            repeated = 0
            for index in range(factor.start, factor.start + factor.length):
                repeated |= bits << (index * width)
            bits, width = repeated, width * factor.size
        return bits


@dataclass(frozen=True, slots=True)
class View:
    """An equation: the elements of a source that are those of a target."""

    shape: tuple[int, ...]
    """Sizes of the dims of the view."""
    source: TensorView
    target: TensorView

    def reversed(self) -> "View":
        """Return the equation the other way round."""
        return View(self.shape, self.target, self.source)


def identity_view(shape: Sequence[int]) -> View:
    """Return the view of a tensor that stays as it is."""
    side = TensorView(tuple((Factor(axis, n, 0, n),) for axis, n in enumerate(shape)))
    return View(tuple(shape), side, side)


def _ranges(lo: int, hi: int, sizes: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Return the boxes that the indices from `lo` to `hi` are in digits of the given sizes.

    Examples
    --------
    >>> _ranges(1, 7, [2, 4])
    [((0, 1), (1, 4)), ((1, 2), (0, 3))]
    >>> _ranges(4, 12, [3, 4])
    [((1, 3), (0, 4))]
    """
    if lo >= hi:
        return []
    if len(sizes) <= 1:
        return [((lo, hi),)] if sizes else [()]
    inner = prod(sizes[1:])
    first, start = divmod(lo, inner)
    last, end = divmod(hi, inner)
    if first == last:
        return [((first, first + 1), *rest) for rest in _ranges(start, end, sizes[1:])]
    found = []
    if start:
        found += [((first, first + 1), *rest) for rest in _ranges(start, inner, sizes[1:])]
        first += 1
    if first < last:
        found.append(((first, last), *((0, size) for size in sizes[1:])))
    if end:
        found += [((last, last + 1), *rest) for rest in _ranges(0, end, sizes[1:])]
    return found

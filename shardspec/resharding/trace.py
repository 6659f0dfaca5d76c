"""Deriving a map from a loader: run it on tensors whose values are their own places.

A function that only moves elements, run on tensors that hold the numbers 0, 1, 2, ... leaves in
every place of its results the number of the element that belongs there. What comes out is
compressed into equations between views.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardspec.errors import LayoutError
from shardspec.resharding.maps import Equation, Shape
from shardspec.resharding.views import Factor, TensorView, View

Ints: TypeAlias = npt.NDArray[np.int64]
Loader: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def trace_map(loader: Loader, source_shapes: Mapping[str, Shape]) -> tuple[Equation, ...]:
    """Return which elements of its argument a function puts where in its result.

    Parameters
    ----------
    loader
        Takes a state dict and returns one; it may rename, cut, join, permute and repeat, but not
        compute.
    source_shapes
        Name to global shape of what it takes.

    Raises
    ------
    LayoutError
        If the function computes: an element of its result is none of its argument's, or is not a
        whole number.

    Examples
    --------
    >>> def fuse(state):
    ...     return {"qk": torch.cat([state["q"], state["k"]])}
    >>> for e in trace_map(fuse, {"q": (4, 2), "k": (2, 2)}):
    ...     print(e.source, e.view.target.boxes(((0, 6), (0, 2)), len(e.view.shape)))
    q [((0, 4), (0, 2))]
    k [((0, 2), (0, 2))]
    """
    names = list(source_shapes)
    sizes = [prod(source_shapes[name]) for name in names]
    bounds = np.cumsum([1, *sizes])  # zero stands for padding
    places: Ints = np.arange(int(bounds[-1]))
    result = _run(loader, source_shapes, bounds, places)
    # Once more with the places shuffled: a function that moves elements does not see their values.
    shuffled = places.copy()
    np.random.default_rng(0).shuffle(shuffled[1:])
    again = _run(loader, source_shapes, bounds, shuffled)
    found = []
    for target, values in result.items():
        known = values.size == 0 or (values.min() >= 0 and values.max() < len(places))
        if not (known and target in again and np.array_equal(again[target], shuffled[values])):
            raise LayoutError(
                f"{target!r} is computed, not moved; trace the part of the function that only "
                "moves elements"
            )
        for box in _affine_boxes(values, bounds):
            if box.first == 0:
                continue  # padding
            at = int(np.searchsorted(bounds, box.first, side="right")) - 1
            name, inside = names[at], box._replace(first=box.first - int(bounds[at]))
            views = _views(source_shapes[name], values.shape, inside)
            found += [Equation(name, target, view) for view in views]
    return tuple(found)


def _run(
    loader: Loader, shapes: Mapping[str, Shape], bounds: Ints, values: Ints
) -> dict[str, Ints]:
    state = {
        name: torch.from_numpy(values[lo:hi].copy()).reshape(shape)
        for (name, shape), (lo, hi) in zip(shapes.items(), pairwise(bounds.tolist()), strict=True)
    }
    result = {}
    for target, tensor in loader(state).items():
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"{target!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.dtype != torch.int64:
            raise LayoutError(
                f"{target!r} came out as {str(tensor.dtype).removeprefix('torch.')}: the function "
                "computes or casts; trace the part of it that only moves elements"
            )
        moved: Ints = tensor.detach().cpu().numpy()
        result[target] = moved
    return result


class _Box(NamedTuple):
    """A part of a target whose places in the sources grow by one step along every dim."""

    corner: Shape
    lengths: Shape
    first: int
    """The place of its first element."""
    steps: Shape


def _affine_boxes(values: Ints, bounds: Ints) -> list[_Box]:
    """Cut an array of places into such boxes, each of one source."""
    if values.size == 0:
        return []
    todo = [((0,) * values.ndim, values.shape)]
    found = []
    owner = np.searchsorted(bounds, values, side="right")
    while todo:
        corner, shape = todo.pop()
        part = tuple(slice(c, c + n) for c, n in zip(corner, shape, strict=True))
        block, owners = values[part], owner[part]
        for dim, size in enumerate(shape):
            edges = [*_breaks(block, owners, dim), size]
            if len(edges) > 2:
                for a, b in pairwise(edges):
                    at = (*corner[:dim], corner[dim] + a, *corner[dim + 1 :])
                    todo.append((at, (*shape[:dim], b - a, *shape[dim + 1 :])))
                break
        else:
            first = int(block.flat[0])
            next_ = [np.take(block, 1, d).flat[0] if n > 1 else first for d, n in enumerate(shape)]
            found.append(_Box(corner, shape, first, tuple(int(n) - first for n in next_)))
    return sorted(found)


def _breaks(block: Ints, owners: Ints, dim: int) -> list[int]:
    """Return where along a dim a new stretch of equal steps begins; 0 is the first."""
    size = block.shape[dim]
    if size < 2:
        return [0]
    steps, same = (
        np.moveaxis(np.diff(array, axis=dim), dim, 0).reshape(size - 1, -1)
        for array in (block, owners)
    )
    uniform = (steps == steps[:, :1]).all(axis=1) & (same == 0).all(axis=1)
    starts: list[int] = [0]
    of_stretch: int | None = None
    for at, (even, step) in enumerate(zip(uniform.tolist(), steps[:, 0].tolist(), strict=True)):
        if even and of_stretch in (None, step):
            of_stretch = step
        else:
            starts.append(at + 1)
            of_stretch = None
    return starts


def _views(source: Shape, target: Shape, box: _Box) -> Iterator[View]:
    """Yield the views of a box: one, or several where its places leap within the source."""
    found = _view_or_leap(source, target, box)
    if isinstance(found, View):
        yield found
        return
    lengths = (*box.lengths[:found], 1, *box.lengths[found + 1 :])
    for index in range(box.lengths[found]):
        corner = list(box.corner)
        corner[found] += index
        first = box.first + index * box.steps[found]
        yield from _views(source, target, _Box(tuple(corner), lengths, first, box.steps))


def _view_or_leap(source: Shape, target: Shape, box: _Box) -> View | int:
    """Return the view of a box, or a dim of it along which places leave one factor of a dim."""
    widths = [prod(source[dim + 1 :]) for dim in range(len(source))]
    moving: list[list[tuple[int, int]]] = [[] for _ in source]
    for axis, (step, length) in enumerate(zip(box.steps, box.lengths, strict=True)):
        if length > 1:
            if step <= 0:
                return axis
            dim = next(dim for dim, width in enumerate(widths) if step % width == 0)
            moving[dim].append((step // widths[dim], axis))
    shape = list(box.lengths)
    here = []
    for width, size, steps in zip(widths, source, moving, strict=True):
        start, left, factors = box.first // width % size, size, []
        for step, axis in sorted(steps, reverse=True):
            factor = Factor(axis, left // step, start % left // step, box.lengths[axis])
            if left % step or factor.start + factor.length > factor.size:
                return axis
            factors.append(factor)
            left = step
        if left > 1 or not factors:  # what stands still
            shape.append(1)
            factors.append(Factor(len(shape) - 1, left, start % left, 1))
        here.append(tuple(factors))
    sides = enumerate(zip(target, box.corner, box.lengths, strict=True))
    there = tuple((Factor(dim, size, at, length),) for dim, (size, at, length) in sides)
    return View(tuple(shape), TensorView(tuple(here)), TensorView(there))

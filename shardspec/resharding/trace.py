"""Deriving a map from a loader: run it on tensors whose values are their own places.

A function that only moves elements, run on tensors that hold the numbers 0, 1, 2, ... leaves in
every place of its results the number of the element that belongs there. What comes out is
compressed into equations between views.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardspec.errors import LayoutError
from shardspec.resharding.maps import Equation, Shape
from shardspec.resharding.views import Factor, TensorView, View

__all__ = ["trace_map"]

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
            first = box[2]
            if first == 0:
                continue  # padding
            at = int(np.searchsorted(bounds, first, side="right")) - 1
            moved = _Moved(names[at], target, source_shapes[names[at]], values.shape)
            found += moved.equations(box, int(bounds[at]))
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


_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""Corner and lengths in the target, the first place, and the step of places along each dim."""


def _affine_boxes(values: Ints, bounds: Ints) -> list[_Box]:
    """Cut an array into boxes in each of which places grow by one step along every dim."""
    if values.size == 0:
        return []
    if values.ndim == 0:
        return [((), (), int(values), ())]
    todo = [(tuple(0 for _ in values.shape), values.shape)]
    found = []
    owner = np.searchsorted(bounds, values, side="right")
    while todo:
        corner, shape = todo.pop()
        part = tuple(slice(c, c + n) for c, n in zip(corner, shape, strict=True))
        block, owners = values[part], owner[part]
        cuts = [_breaks(block, owners, dim) for dim in range(block.ndim)]
        if not any(len(cut) > 1 for cut in cuts):
            steps = tuple(
                int(np.take(block, 1, dim).flat[0] - block.flat[0]) if block.shape[dim] > 1 else 0
                for dim in range(block.ndim)
            )
            found.append((corner, tuple(shape), int(block.flat[0]), steps))
            continue
        dim = next(d for d, cut in enumerate(cuts) if len(cut) > 1)
        edges = [*cuts[dim], shape[dim]]
        for a, b in pairwise(edges):
            new_corner = (*corner[:dim], corner[dim] + a, *corner[dim + 1 :])
            todo.append((new_corner, (*shape[:dim], b - a, *shape[dim + 1 :])))
    return sorted(found)


def _breaks(block: Ints, owners: Ints, dim: int) -> list[int]:
    """Return where along a dim a new stretch of equal steps begins; 0 is the first."""
    size = block.shape[dim]
    if size < 2:
        return [0]
    steps = np.moveaxis(np.diff(block, axis=dim), dim, 0).reshape(size - 1, -1)
    same = np.moveaxis(np.diff(owners, axis=dim), dim, 0).reshape(size - 1, -1)
    uniform = (steps == steps[:, :1]).all(axis=1) & (same == 0).all(axis=1)
    starts, at = [0], 0
    while at < size - 1:
        if not uniform[at]:
            at += 1
            starts.append(at)
            continue
        step, end = steps[at, 0], at + 1
        while end < size - 1 and uniform[end] and steps[end, 0] == step:
            end += 1
        at = end
        if at < size - 1:
            # The element that ends a stretch belongs to it; the next one begins another.
            at += 1
            starts.append(at)
    return starts


@dataclass(frozen=True, slots=True)
class _Moved:
    """Two tensors, between which boxes moved."""

    source: str
    target: str
    source_shape: Shape
    target_shape: Shape

    def equations(self, box: _Box, start: int) -> list[Equation]:
        """Return the equations of a box: one, or several where places leap within the source.

        Parameters
        ----------
        box
            Part of the target.
        start
            The first place of the source.
        """
        corner, lengths, first, steps = box
        leaping = self._leaping(lengths, first - start, steps)
        if leaping is None:
            return [self._equation(corner, lengths, first - start, steps)]
        found = []
        for index in range(lengths[leaping]):
            at = (*corner[:leaping], corner[leaping] + index, *corner[leaping + 1 :])
            alone = (*lengths[:leaping], 1, *lengths[leaping + 1 :])
            found += self.equations((at, alone, first + index * steps[leaping], steps), start)
        return found

    @property
    def _widths(self) -> list[int]:
        return [prod(self.source_shape[dim + 1 :]) for dim in range(len(self.source_shape))]

    def _moving(
        self, lengths: Sequence[int], steps: Sequence[int]
    ) -> dict[int, list[tuple[int, int]]]:
        """Return per dim of the source its steps, each with the dim of the target, descending."""
        found: dict[int, list[tuple[int, int]]] = {}
        for axis, (step, length) in enumerate(zip(steps, lengths, strict=True)):
            if length > 1:
                dim = next(d for d, width in enumerate(self._widths) if step % width == 0)
                found.setdefault(dim, []).append((step // self._widths[dim], axis))
        return {dim: sorted(moving, reverse=True) for dim, moving in found.items()}

    def _leaping(self, lengths: Sequence[int], first: int, steps: Sequence[int]) -> int | None:
        """Return a dim along which places do not stay in one factor of one dim of the source."""
        for axis, (step, length) in enumerate(zip(steps, lengths, strict=True)):
            if length > 1 and step <= 0:
                return axis
        for dim, moving in self._moving(lengths, steps).items():
            left = self.source_shape[dim]
            start = first // self._widths[dim] % left
            for step, axis in moving:
                if left % step or start % left // step + lengths[axis] > left // step:
                    return axis
                left = step
        return None

    def _equation(
        self, corner: Sequence[int], lengths: Sequence[int], first: int, steps: Sequence[int]
    ) -> Equation:
        shape = list(lengths)
        target_dims = tuple(
            (Factor(dim, size, start, length),)
            for dim, (size, start, length) in enumerate(
                zip(self.target_shape, corner, lengths, strict=True)
            )
        )
        moving = self._moving(lengths, steps)
        source_dims = []
        for dim, (size, width) in enumerate(zip(self.source_shape, self._widths, strict=True)):
            start, left, factors = first // width % size, size, []
            for step, axis in moving.get(dim, []):
                factors.append(Factor(axis, left // step, start % left // step, lengths[axis]))
                left = step
            if left > 1 or not factors:  # what stands still
                shape.append(1)
                factors.append(Factor(len(shape) - 1, left, start % left, 1))
            source_dims.append(tuple(factors))
        view = View(tuple(shape), TensorView(tuple(source_dims)), TensorView(target_dims))
        return Equation(self.source, self.target, view)

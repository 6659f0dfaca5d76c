"""Derives a name map from a function that loads a state dict, by running it on element numbers.

python examples/trace_map.py

The function may only move elements. It is called with tensors of the numbers 0, 1, 2, ..., so each
element of its results is the number of the source element that belongs there. The numbers are then
turned into equations between views.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardspec.boxes import Box, box_shape
from shardspec.errors import LayoutError
from shardspec.resharding.name_map import Equation, Shape
from shardspec.resharding.views import Factor, TensorView, View

Ints: TypeAlias = npt.NDArray[np.int64]
Loader: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def trace_map(loader: Loader, source_shapes: Mapping[str, Shape]) -> tuple[Equation, ...]:
    """Return the equations between elements of a function's argument and of its result.

    Parameters
    ----------
    loader
        Takes a state dict and returns one; it may rename, cut, join, permute and repeat, but not
        compute.
    source_shapes
        Name to global shape of the tensors in the function's argument.

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
    sizes = [prod(shape) for shape in source_shapes.values()]
    bounds = np.cumsum([1, *sizes])  # zero stands for padding
    places: Ints = np.arange(int(bounds[-1]))
    result = _run(loader, source_shapes, bounds, places)
    # Once more with shuffled numbers: a function that only moves elements ignores their values.
    shuffled = places.copy()
    np.random.default_rng(0).shuffle(shuffled[1:])
    again = _run(loader, source_shapes, bounds, shuffled)
    # The source tensor of every element, and its indices there.
    dims = max(map(len, source_shapes.values()), default=0)
    elements: Ints = np.zeros((len(places), 1 + dims), np.int64)
    elements[:, 0] = np.searchsorted(bounds, places, side="right") - 1
    for shape, (lo, hi) in zip(source_shapes.values(), pairwise(bounds.tolist()), strict=True):
        for dim, index in enumerate(np.indices(shape), 1):
            elements[lo:hi, dim] = index.ravel()
    equations = []
    for target, values in result.items():
        in_range = values.size == 0 or (values.min() >= 0 and values.max() < len(places))
        if not (in_range and target in again and np.array_equal(again[target], shuffled[values])):
            raise LayoutError(
                f"{target!r} is computed, not moved; trace the part of the function that only "
                "moves elements"
            )
        for source, view in _views(elements[values], list(source_shapes.values())):
            equations.append(Equation(names[source], target, view))
    return tuple(equations)


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


def _views(elements: Ints, sources: Sequence[Shape]) -> list[tuple[int, View]]:
    """Split a target into views, each with the number of its source; padding, -1, has none."""
    *target, _ = elements.shape
    todo: list[Box] = [tuple((0, size) for size in target)] if elements.size else []
    views = []
    while todo:
        box = todo.pop()
        block = elements[tuple(slice(lo, hi) for lo, hi in box)]
        number = int(block.flat[0])
        every = ((dim, _edges(block, dim)) for dim in range(len(box)))
        cut = next(((dim, edges) for dim, edges in every if len(edges) > 2), None)
        if cut is None and number >= 0:
            view = _view(block, box, sources[number], target)
            if isinstance(view, View):
                views.append((box, number, view))
            else:
                cut = view, list(range(block.shape[view] + 1))
        if cut is not None:
            dim, edges = cut
            lo = box[dim][0]
            todo += [(*box[:dim], (lo + a, lo + b), *box[dim + 1 :]) for a, b in pairwise(edges)]
    return [(number, view) for _, number, view in sorted(views)]


def _edges(block: Ints, dim: int) -> list[int]:
    """Return the borders, along a dim, of stretches with equal steps in one source."""
    if block.shape[dim] == 1:
        return [0, 1]
    steps = np.moveaxis(np.diff(block, axis=dim), dim, 0)
    steps = steps.reshape(len(steps), -1, block.shape[-1])
    even = (steps == steps[:, :1]).all(axis=(1, 2)) & (steps[:, 0, 0] == 0)
    edges = [0]
    of_stretch: list[int] | None = None
    for at, (same, step) in enumerate(zip(even.tolist(), steps[:, 0].tolist(), strict=True), 1):
        if same and of_stretch in (None, step):
            of_stretch = step
        else:
            edges.append(at)
            of_stretch = None
    return [*edges, len(steps) + 1]


def _view(block: Ints, box: Box, source: Shape, target: Sequence[int]) -> View | int:
    """Return the view of a box with even steps; else a dim along which to split the box."""
    shape = list(box_shape(box))
    first, *_ = block.reshape(-1, block.shape[-1])
    moving: list[list[tuple[int, int]]] = [[] for _ in source]
    for axis, length in enumerate(shape):
        if length > 1:
            step = block[tuple(int(dim == axis) for dim in range(len(box)))] - first
            moves = [(dim, by) for dim, by in enumerate(step[1:].tolist()) if by]
            if len(moves) != 1 or moves[0][1] < 0:
                return axis
            moving[moves[0][0]].append((moves[0][1], axis))
    source_dims = []
    for remaining, start, steps in zip(source, first[1:].tolist(), moving, strict=False):
        factors = []
        for by, axis in sorted(steps, reverse=True):
            factor = Factor(axis, remaining // by, start % remaining // by, shape[axis])
            if remaining % by or factor.start + factor.length > factor.size:
                return axis
            factors.append(factor)
            remaining = by
        if remaining > 1 or not factors:  # what stands still
            factors.append(Factor(len(shape), remaining, start % remaining, 1))
            shape.append(1)
        source_dims.append(tuple(factors))
    sides = enumerate(zip(target, box, strict=True))
    target_dims = tuple((Factor(dim, size, lo, hi - lo),) for dim, (size, (lo, hi)) in sides)
    return View(tuple(shape), TensorView(tuple(source_dims)), TensorView(target_dims))


def fuse(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join q, k and v by heads, as inference engines do."""
    heads = [state[name].view(2, -1, 3) for name in ("q", "k", "v")]
    return {"qkv": torch.cat(heads, 1).flatten(0, 1), "norm": state["norm"]}


def main() -> None:
    """Trace a loader and print its equations."""
    shapes = {"q": (8, 3), "k": (4, 3), "v": (4, 3), "norm": (3,)}
    for source, target, view in trace_map(fuse, shapes):
        dims = [", ".join(f"{f.start}:{f.start + f.length}" for f in d) for d in view.target.dims]
        print(f"{source} → {target}[{' | '.join(dims)}]")


if __name__ == "__main__":
    main()

"""Prices of every move between every two specs, for one tensor on one mesh.

Where every dim divides evenly whatever the cut, prices depend on the tensor's bytes alone: the
lines they lie on are found once per mesh and rank, and specs that differ by a permutation of the
dims share them. Else prices are made for the one shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Exchange, Permute, Slice, Step
from shardspec.dtypes import item_bytes
from shardspec.layout.graph import Cuts, PartialState
from shardspec.layout.routed_cost import (
    Floats,
    Ints,
    Overlaps,
    RoutedPrices,
    geometry_of,
    routed_prices,
    without_ones,
)
from shardspec.layout.space import Space, count_states, is_symmetric, space_of

__all__ = [
    "TIE_SECONDS",
    "Prices",
    "alike_axes",
    "changed_axes",
    "exchange_between",
    "forget_prices",
    "prices_of",
]

TIE_SECONDS: Final = 1e-12
"""Added per step while searching, so that of equally cheap plans the one with fewer steps wins."""

_ROUNDING: Final = 1e-12
"""Prices that differ by so little, in proportion, are one price summed in another order."""

_LEAST_STATES: Final = 64
_FEW_STATES: Final = 400
"""Up to so many states prices are small enough to keep those of hundreds of tensors, or of many."""

_MOST_CELLS: Final = 1 << 21
"""Pairs of specs times pairs of devices that are priced together."""
_MOST_WORK: Final = 1e7
"""Pairs of specs times devices up to which every permute and exchange is priced."""


@dataclass(frozen=True, eq=False)
class Prices:
    """Seconds of the single moves between all specs of a space.

    Attributes
    ----------
    space
        What the rows and columns stand for.
    local_bytes : array (states)
        Bytes of the largest shard of each state.
    collective, permute, exchange : arrays (states, states)
        Seconds of going from the row's state to the column's in one such step; inf where none
        does.
    routed
        Whether permute and exchange are priced; false where there are too many pairs.
    model
        Prices of the links.
    """

    space: Space
    local_bytes: Floats
    collective: Floats
    permute: Floats
    exchange: Floats
    routed: bool
    model: CostModel

    def cheapest(self) -> Floats:
        """Return the cheapest single move between every two states, the tie-breaker included."""
        best: Floats = np.minimum(self.collective, self.permute)
        np.minimum(best, self.exchange, out=best)
        best += TIE_SECONDS
        return best

    def with_pair(self, source: int, target: int, permute: float, exchange: float) -> "Prices":
        """Return the prices with permute and exchange between two states added."""
        both = self.permute.copy(), self.exchange.copy()
        for matrix, seconds in zip(both, (permute, exchange), strict=True):
            matrix[source, target] = seconds
        return replace(self, permute=both[0], exchange=both[1])

    def with_slices_joined(self) -> "Prices":
        """Return the prices with a slice by several axes of one dim as one move.

        Its seconds are those of several slices, but between them no shard is ever held; so it is
        needed where bytes are bounded.
        """
        steps, collective = dict(self.space.steps), self.collective.copy()
        for target, (cuts, pending) in enumerate(self.space.states):
            for dim, axes in enumerate(cuts):
                for kept in range(len(axes) - 1):
                    whole = (*cuts[:dim], axes[:kept], *cuts[dim + 1 :])
                    source = self.space.index[whole, pending]
                    steps[source, target] = Slice(dim, axes[kept:])
                    collective[source, target] = 0.0
        return replace(self, space=replace(self.space, steps=steps), collective=collective)

    def step(self, source: int, target: int) -> Step:
        """Return the cheapest single move between two states; a collective where it is as cheap."""
        seconds = (
            self.collective[source, target],
            self.permute[source, target],
            self.exchange[source, target],
        )
        best = min(seconds) * (1 + _ROUNDING)
        if seconds[0] <= best:
            return self.space.steps[source, target]
        ends = self.space.states[source][0], self.space.states[target][0]
        if seconds[1] <= best:
            return Permute(changed_axes(*ends))
        return exchange_between(*ends, self.model)


def changed_axes(before: Cuts, after: Cuts) -> tuple[int, ...]:
    """Return the axes whose part in the cuts differs, ascending.

    Examples
    --------
    >>> changed_axes(((0, 1), ()), ((1, 0), (2,)))
    (0, 1, 2)
    """

    def places(cuts: Cuts) -> set[tuple[int, int, int]]:
        return {(a, dim, i) for dim, axes in enumerate(cuts) for i, a in enumerate(axes)}

    return tuple(sorted({axis for axis, _, _ in places(before) ^ places(after)}))


def exchange_between(before: Cuts, after: Cuts, model: CostModel) -> Exchange:
    """Return the exchange from one spec to another on the same mesh.

    Examples
    --------
    >>> from shardspec.comm.cost import Link
    >>> model = CostModel((2, 2), (Link(1e-5, 1e-11), Link(1e-6, 1e-12)))
    >>> exchange_between(((1,), ()), ((0,), ()), model)
    Exchange(axes=(0, 1), apart=(0,))
    """
    cut = [axis for axes in before for axis in axes]
    return Exchange(changed_axes(before, after), model.apart(cut))


def alike_axes(mesh_shape: tuple[int, ...], model: CostModel) -> tuple[int, ...]:
    """Return per mesh axis a number that is the same for axes equally long and fast.

    Examples
    --------
    >>> from shardspec.comm.cost import Link
    >>> fast, slow = Link(1e-6, 1e-12), Link(1e-5, 1e-11)
    >>> alike_axes((2, 2, 2, 4), CostModel((2, 2, 2, 4), (slow, fast, fast, fast)))
    (0, 1, 1, 3)
    """
    if model.measured:  # of this mesh's own axes
        return tuple(range(len(mesh_shape)))
    kinds = [(n, replace(link, name="")) for n, link in zip(mesh_shape, model.links, strict=True)]
    return tuple(map(kinds.index, kinds))


@lru_cache(maxsize=16)
def _count_rows(space: Space, alike: tuple[int, ...]) -> int:
    """Return how many states are priced where those that are alike are priced once."""
    return len(np.unique(space.orbits(alike)[0]))


def prices_of(
    mesh_shape: tuple[int, ...],
    pending: PartialState,
    global_shape: tuple[int, ...],
    dtype: str,
    model: CostModel,
    most_work: float = _MOST_WORK,
) -> Prices:
    """Price all single moves of a tensor on a mesh.

    Parameters
    ----------
    mesh_shape, pending, global_shape, dtype, model
        The tensor, the mesh, its links, and what is pending at the source.
    most_work
        Pairs of specs times devices up to which permute and exchange are priced too.
    """
    states = count_states(len(mesh_shape), len(global_shape), len(pending))
    priced = _few_prices if states <= _FEW_STATES else _many_prices
    if states <= _LEAST_STATES:
        priced = _least_prices
    return priced(mesh_shape, pending, global_shape, dtype, model, most_work)


def _prices(
    mesh_shape: tuple[int, ...],
    pending: PartialState,
    global_shape: tuple[int, ...],
    dtype: str,
    model: CostModel,
    most_work: float,
) -> Prices:
    space = space_of(len(mesh_shape), len(global_shape), pending)
    local_bytes = space.local_elements(mesh_shape, global_shape) * item_bytes(dtype)
    count = len(space.states)
    collective = np.full((count, count), np.inf)
    collective[space.edge_from, space.edge_to] = space.edge_seconds(model, local_bytes)
    known = len(space.nothing_pending)  # the states with nothing pending come first
    routed = _routed(mesh_shape, global_shape, dtype, model, most_work)
    permute, exchange = np.full((2, count, count), np.inf)
    if routed is not None:
        permute[:known, :known], exchange[:known, :known] = routed
    return Prices(space, local_bytes, collective, permute, exchange, routed is not None, model)


_least_prices = lru_cache(maxsize=512)(_prices)
_few_prices = lru_cache(maxsize=32)(_prices)
_many_prices = lru_cache(maxsize=1)(_prices)
"""Of one large space: its prices take some 50 MiB."""


def forget_prices() -> None:
    """Let go of the prices that are kept."""
    _least_prices.cache_clear()
    _few_prices.cache_clear()
    _many_prices.cache_clear()


def _routed(
    mesh_shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    dtype: str,
    model: CostModel,
    most_work: float,
) -> tuple[Floats, Floats] | None:
    """Return permute and exchange between all states with nothing pending, None for too many.

    Axes of one device make no difference, so states that differ only there are priced once.
    """
    kept = without_ones(mesh_shape)
    if len(kept) < len(mesh_shape):
        few = _routed(model.on(kept).mesh_shape, global_shape, dtype, model.on(kept), most_work)
        if few is None:
            return None
        place = {axis: number for number, axis in enumerate(kept)}
        index = space_of(len(kept), len(global_shape), ()).index
        same = np.array(
            [
                index[tuple(tuple(place[a] for a in axes if a in place) for axes in cuts), ()]
                for cuts, _ in space_of(len(mesh_shape), len(global_shape), ()).states
            ]
        )
        permute, exchange = (seconds[np.ix_(same, same)] for seconds in few)
        # Between those that are priced as one nothing moves.
        permute[same[:, None] == same] = 0.0
        np.fill_diagonal(permute, np.inf)
        return permute, exchange
    plain = space_of(len(mesh_shape), len(global_shape), ())
    count = len(plain.states)
    even = is_symmetric(global_shape, mesh_shape)
    rows = _count_rows(plain, alike_axes(mesh_shape, model)) if even else count
    geometry = geometry_of(mesh_shape)
    if rows * count * prod(mesh_shape) > most_work or len(geometry.rows) < prod(mesh_shape):
        return None
    permute = np.full((count, count), np.inf)
    if even:
        lines = _even_lines(mesh_shape, len(global_shape), model)
        num_bytes = float(prod(global_shape) * item_bytes(dtype))
        exchange = _highest(lines.exchange, num_bytes)
        permute[lines.permute_from, lines.permute_to] = _highest(lines.permute, num_bytes)
    else:
        exchange = np.full((count, count), np.inf)
        for source, row in _each_row(plain, mesh_shape, global_shape, model):
            exchange[source] = row.exchange.at(item_bytes(dtype))
            permute[source, row.permutable] = row.permute.at(item_bytes(dtype))
    exchange[exchange == 0] = np.inf  # nothing moves: that is a slice, or no step at all
    return permute, exchange


@dataclass(frozen=True, eq=False)
class _EvenLines:
    """Prices by the bytes of the whole tensor, where all dims divide evenly.

    Of each price its lines come along the first axis, fixed part and slope: so they are evaluated
    in a few sweeps over contiguous memory.
    """

    exchange: tuple[Floats, Floats]
    permute: tuple[Floats, Floats]
    permute_from: Ints
    permute_to: Ints


def _even_lines(mesh_shape: tuple[int, ...], dims: int, model: CostModel) -> _EvenLines:
    few = count_states(len(mesh_shape), dims, 0) <= _FEW_STATES
    return (_few_even_lines if few else _many_even_lines)(mesh_shape, dims, model)


def _make_even_lines(mesh_shape: tuple[int, ...], dims: int, model: CostModel) -> _EvenLines:
    space = space_of(len(mesh_shape), dims, ())
    count = len(space.states)
    sizes = (prod(mesh_shape),) * dims
    volume = float(prod(sizes))
    stands_for, relabelled = space.orbits(alike_axes(mesh_shape, model))
    rows = {
        source: (row.exchange.pruned(), row.permute.pruned(), row.permutable)
        for source, row in _each_row(space, mesh_shape, sizes, model, only=np.unique(stands_for))
    }
    most = (
        max(exchange.fixed.shape[-1] for exchange, _, _ in rows.values()),
        max(permute.fixed.shape[-1] for _, permute, _ in rows.values()),
    )
    fixed, slope = np.empty((2, most[0], count, count))
    ends, permute_fixed, permute_slope = [], [], []
    for state in range(count):
        exchange, permute, permutable = rows[stands_for[state]]
        image = relabelled[state]
        fixed[:, state] = _widened(exchange.fixed, most[0])[image].T
        slope[:, state] = _widened(exchange.slope / volume, most[0])[image].T
        back = np.empty(count, dtype=np.int64)
        back[image] = np.arange(count)
        reached = back[permutable]
        ends.append(np.stack([np.full(len(reached), state), reached]))
        permute_fixed.append(_widened(permute.fixed, most[1]))
        permute_slope.append(_widened(permute.slope, most[1]) / volume)
    pairs = np.concatenate(ends, axis=1)
    return _EvenLines(
        (fixed, slope),
        (
            _lines_first(np.concatenate(permute_fixed)),
            _lines_first(np.concatenate(permute_slope)),
        ),
        pairs[0],
        pairs[1],
    )


_few_even_lines = lru_cache(maxsize=16)(_make_even_lines)
_many_even_lines = lru_cache(maxsize=1)(_make_even_lines)


def _lines_first(lines: Floats) -> Floats:
    return np.ascontiguousarray(np.moveaxis(lines, -1, 0))


def _highest(lines: tuple[Floats, Floats], x: float) -> Floats:
    """Return the largest of lines at one place; as `Lines.at`, the lines along the first axis."""
    best: Floats | None = None
    for fixed, slope in zip(*lines, strict=True):
        value = slope * x
        value += fixed
        best = value if best is None else np.maximum(best, value, out=best)
    assert best is not None, "every price has a line"
    return best


def _widened(lines: Floats, count: int) -> Floats:
    """Repeat the first line until there are `count`."""
    missing = count - lines.shape[-1]
    return np.concatenate([lines, np.repeat(lines[..., :1], missing, axis=-1)], axis=-1)


def _each_row(
    space: Space,
    mesh_shape: tuple[int, ...],
    sizes: tuple[int, ...],
    model: CostModel,
    only: Ints | None = None,
) -> Iterator[tuple[int, RoutedPrices]]:
    """Price permute and exchange from every state, or from some, to all states."""
    geometry = geometry_of(mesh_shape)
    by_size = {size: Overlaps(geometry, space.lists, size) for size in set(sizes)}
    overlaps = [by_size[size] for size in sizes]
    uncut, count = space.uncut_bits(), len(space.states)
    # Those that the same axes cut are priced together, so many as take little memory.
    at_once = max(1, _MOST_CELLS // (count * geometry.differ.size))
    sources = np.arange(count) if only is None else only
    for bits in np.unique(uncut[sources]).tolist():
        alike = sources[uncut[sources] == bits]
        for first in range(0, len(alike), at_once):
            some = alike[first : first + at_once]
            prices = routed_prices(
                geometry,
                model,
                overlaps,
                np.repeat(space.list_index[some], count, axis=0),
                np.tile(space.list_index, (len(some), 1)),
                bits,
                np.tile(uncut, len(some)),
            )
            for number, source in enumerate(some.tolist()):
                yield source, prices.between(number * count, (number + 1) * count)

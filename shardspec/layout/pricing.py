"""Computes the seconds of every single step between the specs of one tensor on one mesh.

>>> from shardspec import DeviceMesh
>>> source = Layout(DeviceMesh(range(4), (2, 2)), "[S01]", (4_000_000,), "f32")
>>> target, model = source.with_spec("[S10]"), CostModel.of_mesh(source.mesh)
>>> permute, exchange = pair_prices(source, target, model)
>>> permute < exchange
True
>>> prices = prices_of(source, model)
>>> prices.step(prices.state(source), prices.state(target))
Permute(axes=(0, 1))

The cost model prices collectives, and `shardspec.layout.routed` prices permutes and exchanges. If
all shards are equally large, their prices depend only on the mesh, the specs and the number of
elements, and stay equal when dims, or axes with equal links, are permuted. Otherwise prices are
computed for the shape of the tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel, model_on_axes, slower_axes
from shardspec.comm.curves import Line, copies
from shardspec.comm.steps import Exchange, Permute, Slice, Step
from shardspec.dtypes import item_bytes
from shardspec.layout.graph import (
    TIE_SECONDS,
    Cuts,
    Floats,
    Ints,
    PartialState,
    Space,
    count_states,
    is_symmetric,
    orbits,
    space_of,
    spec_of,
    state_of,
)
from shardspec.layout.layout import Layout
from shardspec.layout.routed import (
    MAX_EXACT_DEVICES,
    LineArrays,
    Routing,
    Sides,
    longest,
    pruned,
    value_at,
)

_ROUNDING: Final = 1e-12
"""Relative difference below which prices are equal: rounding of sums in different orders."""
_FEW_STATES: Final = 200
"""Up to this many states, prices take less than 1 MiB, so more tensors are cached."""
_MAX_CELLS: Final = 1 << 21
"""The most pairs of specs times pairs of devices in one batch."""
_MAX_WORK: Final = 1e7
"""The most pairs of specs times devices for which every permute and exchange is priced."""


@dataclass(frozen=True, eq=False)
class Prices:
    """The cheapest single move between any two specs of a space."""

    space: Space
    """The states of rows and columns."""
    steps: dict[tuple[int, int], Step]
    """(source state, target state) -> collective or slice."""
    local_bytes: Floats
    """Bytes of the largest shard of each state."""
    seconds: Floats
    """(states, states): seconds from the row's state to the column's; inf without a single step."""
    kind: npt.NDArray[np.int8]
    """0 where a collective or slice is the cheapest, 1 for a permute, 2 for an exchange."""
    routed: bool
    """True if permutes and exchanges are priced; False if there are too many pairs of specs."""
    model: CostModel

    @cached_property
    def live_bytes(self) -> Floats:
        """Bytes of the shards before and after each move on the fullest device; inf without one."""
        live: Floats = self.local_bytes[:, None] + self.local_bytes
        return np.where(np.isfinite(self.seconds), live, np.inf)

    def state(self, layout: Layout) -> int:
        """Return the index of a layout's spec among the states of the space."""
        return self.space.index[state_of(layout.spec)]

    def with_pair(self, source: Layout, target: Layout) -> "Prices":
        """Add the permute and the exchange between two specs; return the new prices."""
        pair = self.state(source), self.state(target)
        seconds, kind = self.seconds.copy(), self.kind.copy()
        each = (seconds[pair], *pair_prices(source, target, self.model))
        seconds[pair] = min(each)
        kind[pair] = next(n for n, price in enumerate(each) if price <= min(each) * (1 + _ROUNDING))
        return replace(self, seconds=seconds, kind=kind)

    def with_slices_joined(self) -> "Prices":
        """Make slices along several axes single moves; return the new prices.

        A single slice has no shards in between that would count in `live_bytes`.
        """
        steps, seconds, kind = dict(self.steps), self.seconds.copy(), self.kind.copy()
        for target, (cuts, pending) in enumerate(self.space.states):
            for dim, axes in enumerate(cuts):
                for num_kept in range(len(axes) - 1):
                    shorter = (*cuts[:dim], axes[:num_kept], *cuts[dim + 1 :])
                    pair = self.space.index[shorter, pending], target
                    steps[pair] = Slice(dim, axes[num_kept:])
                    seconds[pair] = kind[pair] = 0
        return replace(self, steps=steps, seconds=seconds, kind=kind)

    def step(self, source: int, target: int) -> Step:
        """Return the cheapest single step between two states."""
        pair = self.space.states[source][0], self.space.states[target][0]
        match self.kind[source, target]:
            case 0:
                return self.steps[source, target]
            case 1:
                return Permute(changed_axes(*pair))
            case _:
                return exchange_between(*pair, self.model)

    def move(self, tensor: Layout, source: int, target: int) -> tuple[Step, Layout]:
        """Return the cheapest single step of a tensor between two states, and the layout after."""
        target_spec = spec_of(self.space.states[target])
        return self.step(source, target), tensor.with_spec(target_spec)


def states_of(tensor: Layout) -> int:
    """Return the number of specs that a conversion of a tensor can visit."""
    return count_states(tensor.mesh.ndim, tensor.spec.dims, len(tensor.spec.partials))


def exchange_between(before: Cuts, after: Cuts, model: CostModel) -> Exchange:
    """Return the exchange from one spec to another on the same mesh."""
    return Exchange(
        changed_axes(before, after), slower_axes(model, [a for axes in before for a in axes])
    )


def changed_axes(*both: Cuts) -> tuple[int, ...]:
    """Return the axes whose dim, or position in the dim, changes between two specs, ascending.

    >>> changed_axes(((0, 1), ()), ((0,), (1,)))
    (1,)
    """
    before, after = (
        {(a, dim, i) for dim, axes in enumerate(cuts) for i, a in enumerate(axes)} for cuts in both
    )
    return tuple(sorted({axis for axis, _, _ in before ^ after}))


def alike_axes(model: CostModel) -> tuple[int, ...]:
    """Return a number per mesh axis; axes of the same length and link have the same number.

    >>> from shardspec.comm.curves import Link
    >>> alike_axes(CostModel((2, 4, 2), (Link(1e-6, 1e-12),) * 3))
    (0, 1, 0)
    """
    each = zip(model.mesh_shape, model.links, strict=True)
    kinds = [(n, replace(link, name="")) for n, link in each]
    return tuple(map(kinds.index, kinds))


def prices_of(tensor: Layout, model: CostModel, max_work: float = _MAX_WORK) -> Prices:
    """Return the prices of all moves of a tensor.

    Permute and exchange are omitted if pairs of specs times devices exceed `max_work`.
    """
    prices = small_prices if states_of(tensor) <= _FEW_STATES else large_prices
    pending, item = state_of(tensor.spec)[1], item_bytes(tensor.dtype)
    return prices(pending, tensor.global_shape, item, model, max_work)


def prices_to_search(
    source: Layout, model: CostModel, max_bytes: int | None, target: Layout | None = None
) -> tuple[Prices, Floats]:
    """Return the prices, and the matrix to search: their seconds plus a tie-breaker.

    Moves that exceed `max_bytes` are inf. If there are too many pairs of specs to price every
    permute and exchange, only those between `source` and `target` are priced.
    """
    prices = prices_of(source, model)
    if max_bytes is not None:
        prices = prices.with_slices_joined()
    if target and not prices.routed and not source.spec.partials and source != target:
        prices = prices.with_pair(source, target)
    move = prices.seconds + TIE_SECONDS
    if max_bytes is not None:
        move[prices.live_bytes > max_bytes] = np.inf
    return prices, move


def _prices(
    pending: PartialState,
    global_shape: tuple[int, ...],
    item: int,
    model: CostModel,
    max_work: float,
) -> Prices:
    """Return the prices of tensors of one shape; see `prices_of`."""
    space = space_of(len(model.mesh_shape), len(global_shape), pending)
    local_bytes = np.full(len(space.states), float(item))
    for dim, size in enumerate(global_shape):
        local_bytes *= longest(model.mesh_shape, space.lists, size)[space.list_index[:, dim]]
    seconds = np.full((len(space.states),) * 2, np.inf)
    kind = np.zeros(seconds.shape, np.int8)
    pairs, lines = _collective_lines(space, model)
    shard_bytes = local_bytes[pairs[0]]
    seconds[pairs] = np.min([fixed + slope * shard_bytes for fixed, slope in lines], axis=0)
    finished = space.num_finished
    routed = _routed(global_shape, item, model, max_work)
    for number, price in enumerate(routed or (), 1):
        best = seconds[:finished, :finished]
        cheaper = price < best * (1 - _ROUNDING)
        np.minimum(price, best, out=best)
        # Ten times as fast as a mask; correct, as a later kind of move has the larger number.
        np.maximum(
            kind[:finished, :finished], cheaper * np.int8(number), out=kind[:finished, :finished]
        )
    return Prices(space, space.steps, local_bytes, seconds, kind, routed is not None, model)


small_prices = lru_cache(maxsize=64)(_prices)
large_prices = lru_cache(maxsize=4)(_prices)


def step_lines(model: CostModel) -> Callable[[Step], tuple[Line, ...]]:
    """Return `model.lines` with a cache: steps of the same kind and axes share one result."""
    lines_of: dict[object, tuple[Line, ...]] = {}

    def lines(step: Step) -> tuple[Line, ...]:
        # The order of the axes does not matter.
        key = type(step), frozenset(step.axes), copies(step, 1)
        if key not in lines_of:
            lines_of[key] = model.lines(step)
        return lines_of[key]

    return lines


@lru_cache(maxsize=16)
def _collective_lines(space: Space, model: CostModel) -> tuple[Sides, list[LineArrays]]:
    """Return (states before, states after, price lines) of all collectives and slices.

    The price is the lowest of the lines at the bytes of a shard.
    """
    of_edges = list(map(step_lines(model), space.steps.values()))
    most = max(map(len, of_edges), default=1)
    lines = np.array([(*each, *each[:1] * (most - len(each))) for each in of_edges])
    fixed, slope = lines.reshape(-1, most, 2).transpose(2, 1, 0).copy()
    pairs = np.array(list(space.steps), dtype=np.int64).reshape(-1, 2).T.copy()
    return (pairs[0], pairs[1]), list(zip(fixed, slope, strict=True))


def _routed(
    global_shape: tuple[int, ...], item: int, model: CostModel, max_work: float
) -> tuple[Floats, Floats] | None:
    """Return the seconds of permutes, and of exchanges, between all states without reductions.

    Returns None if pairs times devices exceed `max_work`.
    """
    mesh_shape = model.mesh_shape
    dims, space = len(global_shape), space_of(len(mesh_shape), len(global_shape), ())
    axes = [axis for axis, length in enumerate(mesh_shape) if length > 1]
    if len(axes) < len(mesh_shape):
        # Axes of one device do not matter, so states that differ only in them share a price.
        squeezed_seconds = _routed(global_shape, item, model_on_axes(model, axes), max_work)
        if squeezed_seconds is None:
            return None
        index = space_of(len(axes), dims, ()).index
        squeezed = (
            tuple(tuple(axes.index(a) for a in cut if a in axes) for cut in cuts)
            for cuts, _ in space.states
        )
        same = np.array([index[cuts, ()] for cuts in squeezed])
        permute, exchange = (seconds[np.ix_(same, same)] for seconds in squeezed_seconds)
        permute[same[:, None] == same] = 0.0
        np.fill_diagonal(permute, np.inf)
        return permute, exchange
    devices, count = prod(mesh_shape), len(space.states)
    sources, orbit = np.arange(count), None
    if is_symmetric(global_shape, mesh_shape):
        orbit = orbits(space, alike_axes(model))
        sources = np.unique(orbit[0])
    if len(sources) * count * devices > max_work or devices > MAX_EXACT_DEVICES:
        return None
    rows: Iterable[tuple[Ints, LineArrays, LineArrays]]
    if orbit is None:
        rows, size = _rows(space, model, global_shape, sources), item
    else:
        rows, size = _even_rows(space, model), prod(global_shape) * item
    seconds = np.empty((2, count, count))
    for batch, *lines in rows:
        for each, prices in zip(lines, seconds, strict=True):
            prices[batch] = value_at(each, size).reshape(-1, count)
    if orbit is not None:
        seconds = seconds.reshape(2, -1).take(orbit[0][:, None] * count + orbit[1], axis=1)
    seconds[1][seconds[1] == 0] = np.inf  # nothing moves: a slice, or no step at all
    return seconds[0], seconds[1]


@lru_cache(maxsize=8)
def _even_rows(space: Space, model: CostModel) -> list[tuple[Ints, LineArrays, LineArrays]]:
    """Return price lines of permutes and exchanges from one state of each orbit to all states.

    Evenly divided states in one orbit have equal prices; see `shardspec.layout.graph.orbits`.
    """
    sizes = (prod(model.mesh_shape),) * space.dims
    sources = np.unique(orbits(space, alike_axes(model))[0])
    scale, rows = prod(sizes), []
    for batch, permute, exchange in _rows(space, model, sizes, sources):
        # With lines along the slow axis in memory, maxima over them are many times faster.
        permute, exchange = (
            (np.asfortranarray(fixed), np.asfortranarray(slope / scale))
            for fixed, slope in (permute, pruned(*exchange))
        )
        rows.append((batch, permute, exchange))
    return rows


def _rows(
    space: Space, model: CostModel, sizes: Sequence[int], sources: Ints
) -> Iterator[tuple[Ints, LineArrays, LineArrays]]:
    """Yield (sources, permute lines, exchange lines) in batches of sources with the same axes."""
    routing, count = Routing(model, sizes, space.lists), len(space.states)
    at_once = max(1, _MAX_CELLS // (count * routing.differ.size))
    used = routing.axis_bits(space.list_index[sources])
    for bits in np.unique(used).tolist():
        same_axes = sources[used == bits]
        for first in range(0, len(same_axes), at_once):
            batch = same_axes[first : first + at_once]
            before = np.repeat(space.list_index[batch], count, axis=0)
            yield batch, *routing.lines(before, np.tile(space.list_index, (len(batch), 1)))


@lru_cache(maxsize=1024)
def pair_prices(source: Layout, target: Layout, model: CostModel) -> tuple[float, float]:
    """Return the seconds of a permute, and of an exchange, on one mesh; inf if impossible."""
    pair = state_of(source.spec)[0], state_of(target.spec)[0]
    lists = list(dict.fromkeys((*pair[0], *pair[1])))
    routing = Routing(model, source.global_shape, lists)
    before, after = (np.array([[lists.index(axes) for axes in cuts]], np.int64) for cuts in pair)
    item = item_bytes(source.dtype)
    permute, exchange = (float(value_at(each, item)[0]) for each in routing.lines(before, after))
    return permute if pair[0] != pair[1] else np.inf, exchange or np.inf

"""Prices of every move between every two specs, for one tensor on one mesh.

Collectives are priced by the cost model, permute and exchange as `shardspec.layout.routed` says.
Where every dim divides evenly whatever the cut, these depend on the mesh and the rank alone, and
specs that differ by a permutation of the dims, or of like axes, share them; else they are made for
the one shape.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
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
    Lines,
    Routing,
    Sides,
    longest,
    pruned,
    value_at,
)

_ROUNDING: Final = 1e-12
"""Prices that differ by so little, in proportion, are one price summed in another order."""
_FEW_STATES: Final = 200
"""Up to so many states prices take less than a MiB, so those of many tensors are kept."""
_MAX_CELLS: Final = 1 << 21
"""Pairs of specs times pairs of devices that are priced together."""
_MAX_WORK: Final = 1e7
"""Pairs of specs times devices up to which every permute and exchange is priced."""


@dataclass(frozen=True, eq=False)
class Prices:
    """The cheapest single move between all specs of a space."""

    space: Space
    """What the rows and columns stand for."""
    steps: dict[tuple[int, int], Step]
    """The collectives and slices."""
    local_bytes: Floats
    """Bytes of the largest shard of each state."""
    seconds: Floats
    """(states, states); inf where no single move leads there."""
    kind: npt.NDArray[np.int8]
    """0 where a collective or slice is the cheapest, 1 for a permute, 2 for an exchange."""
    routed: bool
    """Whether permute and exchange are priced; false where there are too many pairs."""
    model: CostModel

    @cached_property
    def live_bytes(self) -> Floats:
        """Bytes that the fullest device holds during the move between every two states, or inf."""
        held: Floats = self.local_bytes[:, None] + self.local_bytes
        return np.where(np.isfinite(self.seconds), held, np.inf)

    def state(self, layout: Layout) -> int:
        """Return the state that a layout is in."""
        return self.space.index[state_of(layout.spec)]

    def with_pair(self, source: Layout, target: Layout) -> "Prices":
        """Return the prices with permute and exchange between two specs added."""
        ends = self.state(source), self.state(target)
        seconds, kind = self.seconds.copy(), self.kind.copy()
        each = (seconds[ends], *pair_prices(source, target, self.model))
        seconds[ends] = min(each)
        kind[ends] = next(n for n, price in enumerate(each) if price <= min(each) * (1 + _ROUNDING))
        return replace(self, seconds=seconds, kind=kind)

    def with_slices_joined(self) -> "Prices":
        """Return the prices with slices along several axes as one move: nothing is held between."""
        steps, seconds, kind = dict(self.steps), self.seconds.copy(), self.kind.copy()
        for target, (cuts, pending) in enumerate(self.space.states):
            for dim, axes in enumerate(cuts):
                for kept in range(len(axes) - 1):
                    whole = (*cuts[:dim], axes[:kept], *cuts[dim + 1 :])
                    ends = self.space.index[whole, pending], target
                    steps[ends] = Slice(dim, axes[kept:])
                    seconds[ends] = kind[ends] = 0
        return replace(self, steps=steps, seconds=seconds, kind=kind)

    def step(self, source: int, target: int) -> Step:
        """Return the cheapest single step between two states."""
        ends = self.space.states[source][0], self.space.states[target][0]
        match self.kind[source, target]:
            case 0:
                return self.steps[source, target]
            case 1:
                return Permute(changed_axes(*ends))
            case _:
                return exchange_between(*ends, self.model)

    def move(self, tensor: Layout, source: int, target: int) -> tuple[Step, Layout]:
        """Return the cheapest single move of a tensor between two states, and where it leads."""
        target_spec = spec_of(self.space.states[target])
        return self.step(source, target), tensor.with_spec(target_spec)


def states_of(tensor: Layout) -> int:
    """Return how many specs a conversion of a tensor can pass through."""
    return count_states(tensor.mesh.ndim, tensor.spec.dims, len(tensor.spec.partials))


def exchange_between(before: Cuts, after: Cuts, model: CostModel) -> Exchange:
    """Return the exchange from one spec to another on the same mesh."""
    return Exchange(changed_axes(before, after), model.apart([a for axes in before for a in axes]))


def changed_axes(*both: Cuts) -> tuple[int, ...]:
    """Return the axes whose place in the cuts differs, ascending."""
    before, after = (
        {(a, dim, i) for dim, axes in enumerate(cuts) for i, a in enumerate(axes)} for cuts in both
    )
    return tuple(sorted({axis for axis, _, _ in before ^ after}))


def alike_axes(model: CostModel) -> tuple[int, ...]:
    """Return per mesh axis a number that is the same for axes equally long and fast."""
    if model.measured:  # curves of this mesh's own axes
        return tuple(range(len(model.links)))
    each = zip(model.mesh_shape, model.links, strict=True)
    kinds = [(n, replace(link, name="")) for n, link in each]
    return tuple(map(kinds.index, kinds))


def prices_of(tensor: Layout, model: CostModel, max_work: float = _MAX_WORK) -> Prices:
    """Price all moves of a tensor; permute and exchange for `max_work` pairs times devices."""
    prices = small_prices if states_of(tensor) <= _FEW_STATES else large_prices
    pending, item = state_of(tensor.spec)[1], item_bytes(tensor.dtype)
    return prices(pending, tensor.global_shape, item, model, max_work)


def prices_to_search(
    source: Layout, model: CostModel, max_bytes: int | None, target: Layout | None = None
) -> tuple[Prices, Floats]:
    """Return prices, and the seconds of the moves that hold at most `max_bytes`, ties broken.

    Where there are too many pairs of specs to price permute and exchange, those straight from the
    source to the target are.
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
    ends, lines = _collective_lines(space, model)
    held = local_bytes[ends[0]]
    seconds[ends] = np.min([fixed + slope * held for fixed, slope in lines], axis=0)
    known = space.num_finished
    routed = _routed(global_shape, item, model, max_work)
    for number, price in enumerate(routed or (), 1):
        best = seconds[:known, :known]
        cheaper = price < best * (1 - _ROUNDING)
        np.minimum(price, best, out=best)
        # Ten times as fast as by a mask: a later move that is cheaper has the larger number.
        np.maximum(kind[:known, :known], cheaper * np.int8(number), out=kind[:known, :known])
    return Prices(space, space.steps, local_bytes, seconds, kind, routed is not None, model)


small_prices = lru_cache(maxsize=64)(_prices)
large_prices = lru_cache(maxsize=4)(_prices)


def step_lines(model: CostModel) -> Callable[[Step], tuple[Line, ...]]:
    """Return what tells a model's lines of a step, computed once for steps that cost the same."""
    known: dict[object, tuple[Line, ...]] = {}

    def lines(step: Step) -> tuple[Line, ...]:
        # Along the same axes, in whatever order these arrive.
        key = type(step), frozenset(step.axes), copies(step, 1)
        if key not in known:
            known[key] = model.lines(step)
        return known[key]

    return lines


@lru_cache(maxsize=16)
def _collective_lines(space: Space, model: CostModel) -> tuple[Sides, list[Lines]]:
    """Return both ends of every edge, and lines over the bytes held; the lowest is the price."""
    of_edges = list(map(step_lines(model), space.steps.values()))
    most = max(map(len, of_edges), default=1)
    lines = np.array([(*each, *each[:1] * (most - len(each))) for each in of_edges])
    fixed, slope = lines.reshape(-1, most, 2).transpose(2, 1, 0).copy()
    ends = np.array(list(space.steps), dtype=np.int64).reshape(-1, 2).T.copy()
    return (ends[0], ends[1]), list(zip(fixed, slope, strict=True))


def _routed(
    global_shape: tuple[int, ...], item: int, model: CostModel, max_work: float
) -> tuple[Floats, Floats] | None:
    """Return permute and exchange between all states with nothing pending, None for too many."""
    mesh_shape = model.mesh_shape
    dims, space = len(global_shape), space_of(len(mesh_shape), len(global_shape), ())
    axes = [axis for axis, length in enumerate(mesh_shape) if length > 1]
    if len(axes) < len(mesh_shape):
        # Axes of one device make no difference, so states that differ only there are priced once.
        found = _routed(global_shape, item, model.on(axes), max_work)
        if found is None:
            return None
        index = space_of(len(axes), dims, ()).index
        squeezed = (
            tuple(tuple(axes.index(a) for a in cut if a in axes) for cut in cuts)
            for cuts, _ in space.states
        )
        same = np.array([index[cuts, ()] for cuts in squeezed])
        permute, exchange = (seconds[np.ix_(same, same)] for seconds in found)
        permute[same[:, None] == same] = 0.0
        np.fill_diagonal(permute, np.inf)
        return permute, exchange
    devices, count = prod(mesh_shape), len(space.states)
    sources, alike = np.arange(count), None
    if is_symmetric(global_shape, mesh_shape):
        alike = orbits(space, alike_axes(model))
        sources = np.unique(alike[0])
    if len(sources) * count * devices > max_work or devices > MAX_EXACT_DEVICES:
        return None
    rows: Iterable[tuple[Ints, Lines, Lines]]
    if alike is None:
        rows, size = _rows(space, model, global_shape, sources), item
    else:
        rows, size = _even_rows(space, model), prod(global_shape) * item
    seconds = np.empty((2, count, count))
    for some, *lines in rows:
        for each, prices in zip(lines, seconds, strict=True):
            prices[some] = value_at(each, size).reshape(-1, count)
    if alike is not None:
        seconds = seconds.reshape(2, -1).take(alike[0][:, None] * count + alike[1], axis=1)
    seconds[1][seconds[1] == 0] = np.inf  # nothing moves: that is a slice, or no step at all
    return seconds[0], seconds[1]


@lru_cache(maxsize=8)
def _even_rows(space: Space, model: CostModel) -> list[tuple[Ints, Lines, Lines]]:
    """Return lines from one state of each kind to all, by the bytes of an evenly cut tensor."""
    sizes = (prod(model.mesh_shape),) * space.dims
    sources = np.unique(orbits(space, alike_axes(model))[0])
    scale, found = prod(sizes), []
    for some, permute, exchange in _rows(space, model, sizes, sources):
        # Lines along the slow axis in memory: their maximum is taken many times faster.
        permute, exchange = (
            (np.asfortranarray(fixed), np.asfortranarray(slope / scale))
            for fixed, slope in (permute, pruned(*exchange))
        )
        found.append((some, permute, exchange))
    return found


def _rows(
    space: Space, model: CostModel, sizes: Sequence[int], sources: Ints
) -> Iterator[tuple[Ints, Lines, Lines]]:
    """Yield sources that the same axes shard, and lines of permute and exchange to all states."""
    routing, count = Routing(model, sizes, space.lists), len(space.states)
    at_once = max(1, _MAX_CELLS // (count * routing.differ.size))
    used = routing.axis_bits(space.list_index[sources])
    for bits in np.unique(used).tolist():
        alike = sources[used == bits]
        for first in range(0, len(alike), at_once):
            some = alike[first : first + at_once]
            ends = np.repeat(space.list_index[some], count, axis=0)
            yield some, *routing.lines(ends, np.tile(space.list_index, (len(some), 1)))


def pair_prices(source: Layout, target: Layout, model: CostModel) -> tuple[float, float]:
    """Return the seconds of a permute and of an exchange to a spec on the same mesh, or inf."""
    ends = state_of(source.spec)[0], state_of(target.spec)[0]
    lists = list(dict.fromkeys((*ends[0], *ends[1])))
    routing = Routing(model, source.global_shape, lists)
    here, there = (np.array([[lists.index(axes) for axes in cuts]], np.int64) for cuts in ends)
    item = item_bytes(source.dtype)
    permute, exchange = (float(value_at(each, item)[0]) for each in routing.lines(here, there))
    return permute if ends[0] != ends[1] else np.inf, exchange or np.inf

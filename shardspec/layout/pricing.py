"""Prices of every move between every two specs, for one tensor on one mesh.

Prices of permute and exchange are lines over the bytes. Where every dim divides evenly whatever the
cut, the lines depend on the mesh and the rank alone, and specs that differ by a permutation of the
dims, or of axes that are alike, share them; else they are made for the one shape.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Exchange, Permute, Slice, Step
from shardspec.dtypes import item_bytes
from shardspec.layout.graph import (
    Cuts,
    Floats,
    PartialState,
    Space,
    count_states,
    is_symmetric,
    space_of,
    spec_of,
    state_of,
)
from shardspec.layout.layout import Layout
from shardspec.layout.routed import Lines, Overlaps, geometry_of, routed_lines

TIE_SECONDS: Final = 1e-12
"""Added per step while searching, so that of equally cheap plans the one with fewer steps wins."""

_ROUNDING: Final = 1e-12
"""Prices that differ by so little, in proportion, are one price summed in another order."""

_FEW_STATES: Final = 200
"""Up to so many states what is worked out takes a MiB, so that of many tensors is kept."""
_MOST_CELLS: Final = 1 << 21
"""Pairs of specs times pairs of devices that are priced together."""
_MOST_WORK: Final = 1e7
"""Pairs of specs times devices up to which every permute and exchange is priced."""


@dataclass(frozen=True, eq=False)
class Prices:
    """Seconds of the single moves between all specs of a space, as arrays (states, states).

    Row: where from. Column: where to. inf where no such step leads there.
    """

    space: Space
    """What the rows and columns stand for."""
    local_bytes: Floats
    """Bytes of the largest shard of each state."""
    collective: Floats
    permute: Floats
    exchange: Floats
    routed: bool
    """Whether permute and exchange are priced; false where there are too many pairs."""
    model: CostModel

    def cheapest(self) -> Floats:
        """Return the cheapest single move between every two states, the tie-breaker included."""
        best: Floats = np.minimum(self.collective, self.permute)
        np.minimum(best, self.exchange, out=best)
        best += TIE_SECONDS
        return best

    def with_pair(self, source: Layout, goal: Cuts) -> "Prices":
        """Return the prices with permute and exchange between two states added."""
        ends = self.space.index[state_of(source.spec)], self.space.index[goal, ()]
        permute, exchange = self.permute.copy(), self.exchange.copy()
        permute[ends], exchange[ends] = pair_prices(source, goal, self.model)
        return replace(self, permute=permute, exchange=exchange)

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

    @property
    def live_bytes(self) -> Floats:
        """Bytes that the fullest device holds during the move between every two states."""
        return self.local_bytes[:, None] + self.local_bytes

    def layout(self, tensor: Layout, state: int) -> Layout:
        """Return the layout of a tensor in a state."""
        return tensor.with_spec(spec_of(self.space.states[state]))

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
        return permute_between(*ends) if seconds[1] <= best else exchange_between(*ends, self.model)


def permute_between(before: Cuts, after: Cuts) -> Permute:
    """Return the permute from one spec to another on the same mesh."""
    return Permute(_changed_axes(before, after))


def exchange_between(before: Cuts, after: Cuts, model: CostModel) -> Exchange:
    """Return the exchange from one spec to another on the same mesh."""
    cut = [axis for axes in before for axis in axes]
    return Exchange(_changed_axes(before, after), model.apart(cut))


def _changed_axes(before: Cuts, after: Cuts) -> tuple[int, ...]:
    """Return the axes whose part in the cuts differs, ascending."""

    def places(cuts: Cuts) -> set[tuple[int, int, int]]:
        return {(a, dim, i) for dim, axes in enumerate(cuts) for i, a in enumerate(axes)}

    return tuple(sorted({axis for axis, _, _ in places(before) ^ places(after)}))


def alike_axes(mesh_shape: tuple[int, ...], model: CostModel) -> tuple[int, ...]:
    """Return per mesh axis a number that is the same for axes equally long and fast."""
    if model.measured:  # of this mesh's own axes
        return tuple(range(len(mesh_shape)))
    kinds = [(n, replace(link, name="")) for n, link in zip(mesh_shape, model.links, strict=True)]
    return tuple(map(kinds.index, kinds))


def prices_of(tensor: Layout, model: CostModel, most_work: float = _MOST_WORK) -> Prices:
    """Price all single moves of a tensor on its mesh, and with what is pending there.

    Up to `most_work` pairs of specs times devices permute and exchange are priced too.
    """
    pending = state_of(tensor.spec)[1]
    few = count_states(tensor.mesh.ndim, tensor.spec.dims, len(pending)) <= _FEW_STATES
    make = _prices_of_few if few else _prices_of_many
    return make(
        tensor.mesh.shape, pending, tensor.global_shape, item_bytes(tensor.dtype), model, most_work
    )


def prices_to_search(
    source: Layout, model: CostModel, max_bytes: int | None, target: Layout | None = None
) -> tuple[Prices, Floats]:
    """Return prices, and the moves of a search with a bound on what a device holds, or without.

    Where there are too many pairs of specs to price permute and exchange, those straight from the
    source to the target are.
    """
    prices = prices_of(source, model)
    if max_bytes is not None:
        prices = prices.with_slices_joined()
    if target and not prices.routed and not source.spec.partials and source != target:
        prices = prices.with_pair(source, state_of(target.spec)[0])
    move = prices.cheapest()
    if max_bytes is not None:
        move[prices.live_bytes > max_bytes] = np.inf
    return prices, move


def _prices(
    mesh_shape: tuple[int, ...],
    pending: PartialState,
    global_shape: tuple[int, ...],
    item: int,
    model: CostModel,
    most_work: float,
) -> Prices:
    space = space_of(len(mesh_shape), len(global_shape), pending)
    local_bytes = space.local_elements(mesh_shape, global_shape) * item
    count = len(space.states)
    collective, permute, exchange = np.full((3, count, count), np.inf)
    collective[space.edge_from, space.edge_to] = space.edge_seconds(model, local_bytes)
    known = len(space.nothing_pending)  # the states with nothing pending come first
    routed = _routed(mesh_shape, global_shape, item, model, most_work)
    if routed is not None:
        permute[:known, :known], exchange[:known, :known] = routed
    return Prices(space, local_bytes, collective, permute, exchange, routed is not None, model)


_prices_of_few = lru_cache(maxsize=64)(_prices)
_prices_of_many = lru_cache(maxsize=1)(_prices)


def forget_prices() -> None:
    """Let go of the prices that are kept."""
    _prices_of_few.cache_clear()
    _prices_of_many.cache_clear()


def _routed(
    mesh_shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    item: int,
    model: CostModel,
    most_work: float,
) -> tuple[Floats, Floats] | None:
    """Return permute and exchange between all states with nothing pending, None for too many.

    Axes of one device make no difference, so states that differ only there are priced once.
    """
    space, squeezed = space_of(len(mesh_shape), len(global_shape), ()), _Squeezed(mesh_shape)
    count, dims = len(space.states), len(global_shape)
    if len(squeezed.axes) < len(mesh_shape):
        small = model.on(squeezed.axes)
        found = _routed(small.mesh_shape, global_shape, item, small, most_work)
        if found is None:
            return None
        index = space_of(len(squeezed.axes), dims, ()).index
        same = np.array([index[squeezed.cuts(cuts), ()] for cuts, _ in space.states])
        permute, exchange = (seconds[np.ix_(same, same)] for seconds in found)
        # Between those that are priced as one nothing moves.
        permute[same[:, None] == same] = 0.0
        np.fill_diagonal(permute, np.inf)
        return permute, exchange
    devices = prod(mesh_shape)
    even = is_symmetric(global_shape, mesh_shape)
    alike = space.orbits(alike_axes(mesh_shape, model)) if even else None
    rows = count if alike is None else len(np.unique(alike[0]))
    if rows * count * devices > most_work or len(geometry_of(mesh_shape).rows) < devices:
        return None
    make = _lines_of_few if count <= _FEW_STATES else _lines_of_many
    # All sizes that divide evenly have the same lines.
    sizes, scale = global_shape, item
    if even:
        sizes, scale = (devices,) * dims, prod(global_shape) * item
    permute, exchange = make(mesh_shape, sizes, model, even)
    seconds = _highest(permute, scale), _highest(exchange, scale)
    seconds[1][seconds[1] == 0] = np.inf  # nothing moves: that is a slice, or no step at all
    return seconds


def _lines(
    mesh_shape: tuple[int, ...], sizes: tuple[int, ...], model: CostModel, even: bool
) -> tuple[Lines, Lines]:
    """Return permute and exchange between all states, by the bytes of an element.

    Where sizes are `even`, by those of the whole tensor instead. Lines lie along the first axis
    here, so that they are evaluated in a few sweeps over contiguous memory.
    """
    space = space_of(len(mesh_shape), len(sizes), ())
    geometry, uncut, count = geometry_of(mesh_shape), space.uncut_bits(), len(space.states)
    by_size = {size: Overlaps(geometry, space.lists, size) for size in set(sizes)}
    overlaps = [by_size[size] for size in sizes]
    stands_for, relabelled = np.arange(count), np.broadcast_to(np.arange(count), (count, count))
    if even:
        stands_for, relabelled = space.orbits(alike_axes(mesh_shape, model))
    rows: dict[int, tuple[Lines, Lines]] = {}
    # Those that the same axes cut are priced together, so many as take little memory.
    sources, at_once = np.unique(stands_for), max(1, _MOST_CELLS // (count * geometry.differ.size))
    for bits in np.unique(uncut[sources]).tolist():
        alike = sources[uncut[sources] == bits]
        for first in range(0, len(alike), at_once):
            some = alike[first : first + at_once]
            lines = routed_lines(
                geometry,
                model,
                overlaps,
                np.repeat(space.list_index[some], count, axis=0),
                np.tile(space.list_index, (len(some), 1)),
                bits,
                np.tile(uncut, len(some)),
            )
            for number, source in enumerate(some.tolist()):
                part = slice(number * count, (number + 1) * count)
                permute, exchange = (Lines(each.fixed[part], each.slope[part]) for each in lines)
                rows[source] = permute, exchange.pruned()

    elements = prod(sizes) if even else 1

    def joined(which: int) -> Lines:
        most = max(row[which].fixed.shape[-1] for row in rows.values())
        fixed, slope = np.empty((2, most, count, count))
        for state, image in enumerate(relabelled):
            row = rows[int(stands_for[state])][which]
            for every, values in ((fixed, row.fixed), (slope, row.slope / elements)):
                every[:, state] = values[image, :1].T  # the first line again where there are fewer
                every[: values.shape[-1], state] = values[image].T
        return Lines(fixed, slope)

    return joined(0), joined(1)


_lines_of_few = lru_cache(maxsize=16)(_lines)
_lines_of_many = lru_cache(maxsize=1)(_lines)


def _highest(lines: Lines, x: float) -> Floats:
    """Return the largest of lines along the first axis at one place."""
    best: Floats = lines.slope[0] * x + lines.fixed[0]
    for fixed, slope in zip(lines.fixed[1:], lines.slope[1:], strict=True):
        value = slope * x
        value += fixed
        np.maximum(best, value, out=best)
    return best


class _Squeezed:
    """A mesh without its axes of one device, which make no difference."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.axes = tuple(axis for axis, devices in enumerate(mesh_shape) if devices > 1)
        self._place = {axis: number for number, axis in enumerate(self.axes)}

    def cuts(self, cuts: Cuts) -> Cuts:
        place = self._place
        return tuple(tuple(place[a] for a in axes if a in place) for axes in cuts)


def pair_prices(source: Layout, target: Cuts, model: CostModel) -> tuple[float, float]:
    """Return the seconds of a permute and of an exchange to one spec; inf where there is none.

    Nothing is pending at the source; the target is on the same mesh.
    """
    squeezed = _Squeezed(source.mesh.shape)
    model = model.on(squeezed.axes)
    plain = state_of(source.spec)[0]
    here, there = squeezed.cuts(plain), squeezed.cuts(target)
    sides = list(zip(source.global_shape, here, there, strict=True))
    # Dims that stay whole are one dim.
    whole = prod(size for size, *cuts in sides if not any(cuts))
    sides = [(whole, (), ()), *(side for side in sides if any(side[1:]))]
    geometry = geometry_of(model.mesh_shape)
    overlaps = [Overlaps(geometry, lists, size) for size, *lists in sides]
    full = (1 << len(model.mesh_shape)) - 1
    uncut, uncut_then = (
        full - sum(1 << a for axes in cuts for a in axes) for cuts in (here, there)
    )
    first, second = np.zeros((1, len(sides)), dtype=np.int64), np.ones((1, len(sides)), np.int64)
    lines = routed_lines(geometry, model, overlaps, first, second, uncut, np.array([uncut_then]))
    item = item_bytes(source.dtype)
    permute, exchange = (float(each.at(item)[0]) for each in lines)
    return permute if plain != target else np.inf, exchange or np.inf

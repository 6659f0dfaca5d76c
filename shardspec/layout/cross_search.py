"""The cheapest way between two meshes: moves on the first, one exchange, moves on the second.

The exchange may join any spec on the one mesh to any on the other. What it costs is known only
after saying who sends what, so pairs of specs are looked at in the order of a bound that it cannot
cost less than, until no pair that is left can be cheaper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Exchange, Step
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.cross import common_mesh, common_model, exchange_seconds, held_bytes
from shardspec.layout.graph import Cuts, spec_of, state_of
from shardspec.layout.layout import Layout
from shardspec.layout.pricing import TIE_SECONDS, Prices, prices_of
from shardspec.layout.routed_cost import Geometry, geometry_of
from shardspec.layout.search import distances, shortest_walk
from shardspec.layout.space import MAX_STATES, count_states

__all__ = ["Move", "path_between_meshes"]

Floats: TypeAlias = npt.NDArray[np.float64]
Move: TypeAlias = tuple[Step, Layout]
"""A step, and the layout it leads to."""
PathOnOneMesh: TypeAlias = Callable[[Layout, Layout], Sequence[Move]]
"""Returns the cheapest moves between two layouts of one mesh."""

_MOST_PAIRS: Final = 2e7
"""Pairs of specs times devices up to which every pair is considered."""
_MOST_PRICED: Final = 3e5
"""Exchanges times devices that are priced before the best so far is taken."""


@dataclass(frozen=True, eq=False)
class _Side:
    """Specs on one mesh at which the tensor may leave or arrive, and the way from or to there."""

    layout: Layout
    """The end of the conversion that lies on this mesh."""
    cuts: list[Cuts]
    seconds: Floats
    """From the source to each spec, or from each spec to the target."""
    walk: Callable[[int], Sequence[Move]]
    """The moves of the cheapest way from the source to a spec, or from it to the target."""

    def at(self, index: int) -> Layout:
        """Return the layout of one of the specs."""
        return self.layout.with_spec(spec_of((self.cuts[index], ())))


def path_between_meshes(
    source: Layout,
    target: Layout,
    models: tuple[CostModel, CostModel],
    max_bytes: int | None,
    on_one_mesh: PathOnOneMesh,
) -> list[Move]:
    """Return the cheapest moves from a layout to one on another mesh.

    Parameters
    ----------
    source, target
        The same tensor; nothing is pending at the target.
    models
        Prices on the source's mesh and on the target's.
    max_bytes
        The most bytes a device may hold during a step; None for any number.
    on_one_mesh
        How moves are found on a mesh with too many specs to consider each.

    Raises
    ------
    LayoutError
        If every way needs more than `max_bytes`, with the least that one needs.

    Notes
    -----
    Exact where there are so few pairs of specs and devices that all are considered, as there are
    for three axes each and a hundred devices. On larger meshes the tensor leaves as it is and
    arrives as it shall be, or the best of the pairs looked at is taken.
    """
    found = _path(source, target, models, max_bytes, on_one_mesh)
    if found is not None:
        return found
    assert max_bytes is not None, "without a bound there is always a way"
    too_little, enough = max_bytes, max_bytes
    while found is None:  # double, then halve the distance
        too_little, enough = enough, 2 * enough + 1
        found = _path(source, target, models, enough, on_one_mesh)
    while enough - too_little > 1:
        between = (too_little + enough) // 2
        if _path(source, target, models, between, on_one_mesh) is None:
            too_little = between
        else:
            enough = between
    raise LayoutError(
        f"no plan from {source} to {target} holds at most {max_bytes} bytes on every device; the "
        f"least that one needs is {enough}"
    )


def _path(
    source: Layout,
    target: Layout,
    models: tuple[CostModel, CostModel],
    max_bytes: int | None,
    on_one_mesh: PathOnOneMesh,
) -> list[Move] | None:
    here = _side(source, models[0], max_bytes, on_one_mesh, leaving=True)
    there = _side(target, models[1], max_bytes, on_one_mesh, leaving=False)
    devices = len(common_mesh(source.mesh, target.mesh).ids)
    if len(here.cuts) * len(there.cuts) * devices > _MOST_PAIRS:
        here = _end_alone(source, on_one_mesh, leaving=True)
        if len(there.cuts) * devices > _MOST_PAIRS:
            there = _end_alone(target, on_one_mesh, leaving=False)
    best = _cheapest_pair(here, there, models, max_bytes)
    if best is None:
        return None
    across = (Exchange(()), there.at(best[1]))
    return [*here.walk(best[0]), across, *there.walk(best[1])]


def _side(
    end: Layout,
    model: CostModel,
    max_bytes: int | None,
    on_one_mesh: PathOnOneMesh,
    *,
    leaving: bool,
) -> _Side:
    """Search from the source to all specs of its mesh, or from all specs to the target."""
    start = state_of(end.spec)
    if count_states(end.mesh.ndim, end.spec.dims, len(start[1])) > MAX_STATES:
        return _end_alone(end, on_one_mesh, leaving=leaving)
    prices = prices_of(end.mesh.shape, start[1], end.global_shape, end.dtype, model)
    if max_bytes is not None:
        prices = prices.with_slices_joined()
    move = prices.cheapest()
    if max_bytes is not None:
        live = prices.local_bytes[:, None] + prices.local_bytes
        move = np.where(live <= max_bytes, move, inf)
    place = prices.space.index[start]
    seconds = distances(move if leaving else move.T, place)
    plain = prices.space.nothing_pending
    reached = plain[np.isfinite(seconds[plain])]

    def walk(index: int) -> Sequence[Move]:
        ends = (place, int(reached[index])) if leaving else (int(reached[index]), place)
        return _moves(prices, move, ends, end)

    cuts = [prices.space.states[i][0] for i in reached]
    return _Side(end, cuts, seconds[reached], walk)


def _moves(prices: Prices, move: Floats, ends: tuple[int, int], layout: Layout) -> Sequence[Move]:
    walk = shortest_walk(move, *ends)
    assert walk is not None, "the distance is finite"
    states = prices.space.states
    return [(prices.step(a, b), layout.with_spec(spec_of(states[b]))) for a, b in pairwise(walk)]


def _end_alone(end: Layout, on_one_mesh: PathOnOneMesh, *, leaving: bool) -> _Side:
    """Let the tensor leave or arrive as it is; what is pending is finished first."""
    plain = end.with_spec(end.spec.without_partial())
    moves = on_one_mesh(end, plain) if leaving else []
    return _Side(end, [state_of(plain.spec)[0]], np.zeros(1), lambda _: moves)


def _cheapest_pair(
    here: _Side, there: _Side, models: tuple[CostModel, CostModel], max_bytes: int | None
) -> tuple[int, int] | None:
    """Return where to leave and where to arrive."""
    meshes = here.layout.mesh, there.layout.mesh
    model = common_model(*meshes, *models)
    devices = len(common_mesh(*meshes).ids)
    bound = here.seconds[:, None] + there.seconds + _least_exchange(here, there, model)
    budget = max(16, int(_MOST_PRICED / devices))
    best, found = inf, None
    for flat in np.argsort(bound, axis=None, kind="stable")[:budget].tolist():
        pair = divmod(flat, len(there.cuts))
        if bound[pair] >= best:
            break
        before, after = here.at(pair[0]), there.at(pair[1])
        if max_bytes is not None and held_bytes(before, after) > max_bytes:
            continue
        seconds = exchange_seconds(before, after, model) + TIE_SECONDS
        total = float(here.seconds[pair[0]] + there.seconds[pair[1]]) + seconds
        if total < best:
            best, found = total, pair
    return found


def _least_exchange(here: _Side, there: _Side, model: CostModel) -> Floats:
    """Return per pair of specs what the exchange costs at least.

    Someone receives all that it lacks, over the fastest link; on a bus, all do.
    """
    a, b = geometry_of(here.layout.mesh.shape), geometry_of(there.layout.mesh.shape)
    ids_a, ids_b = here.layout.mesh.ids, there.layout.mesh.ids
    known = {device: place for place, device in enumerate(ids_a)}
    both = [(known[device], place) for place, device in enumerate(ids_b) if device in known]
    at_a, at_b = np.array(both, dtype=np.int64).reshape(-1, 2).T
    sides = [
        (
            _intervals(a, [cuts[dim] for cuts in here.cuts], size),
            _intervals(b, [cuts[dim] for cuts in there.cuts], size),
        )
        for dim, size in enumerate(here.layout.global_shape)
    ]
    wanted = np.ones((len(there.cuts), len(ids_b)))
    for _, (lo, hi) in sides:
        wanted *= hi - lo
    on_bus = model.link_model == "shared-bus"
    amount = np.empty((len(here.cuts), len(there.cuts)))
    for row in range(len(here.cuts)):
        kept = np.ones((len(there.cuts), len(both)))
        for (lo_a, hi_a), (lo_b, hi_b) in sides:
            lo = np.maximum(lo_a[row, at_a], lo_b[:, at_b])
            hi = np.minimum(hi_a[row, at_a], hi_b[:, at_b])
            kept *= np.maximum(hi - lo, 0)
        lacking = wanted.copy()
        lacking[:, at_b] -= kept
        amount[row] = lacking.sum(axis=1) if on_bus else lacking.max(axis=1)
    alpha = min(link.latency_s for link in model.links)
    beta = min(link.seconds_per_byte for link in model.links)
    least: Floats = (amount > 0) * alpha + amount * item_bytes(here.layout.dtype) * beta
    return least


def _intervals(
    geometry: Geometry, lists: list[tuple[int, ...]], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return per list of axes where each device's part of a dim begins and ends."""
    known = {axes: geometry.intervals(axes, size) for axes in set(lists)}
    return (
        np.stack([known[axes][0] for axes in lists]),
        np.stack([known[axes][1] for axes in lists]),
    )

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

from shardspec.boxes import Box
from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Step
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.cross import (
    MOST_DEVICES,
    boxes_seconds,
    common_mesh,
    common_model,
    count_pieces,
    exchange_to,
    most_held,
)
from shardspec.layout.graph import Cuts, spec_of, state_of
from shardspec.layout.layout import Layout
from shardspec.layout.move_cost import live_bytes
from shardspec.layout.pricing import TIE_SECONDS, Prices, prices_of
from shardspec.layout.routed_cost import Geometry, geometry_of
from shardspec.layout.search import distances, least_peaks, shortest_walk
from shardspec.layout.space import MAX_STATES, count_states

__all__ = ["Move", "path_between_meshes"]

Floats: TypeAlias = npt.NDArray[np.float64]
Move: TypeAlias = tuple[Step, Layout]
"""A step, and the layout it leads to."""
PathOnOneMesh: TypeAlias = Callable[[Layout, Layout], Sequence[Move]]
"""Returns the cheapest moves between two layouts of one mesh."""

_Sides: TypeAlias = tuple[Box, ...]

_MOST_PAIRS: Final = 2e7
"""Pairs of specs times devices up to which every pair is considered."""
_MOST_INTERVALS: Final = 5e6
"""Specs of a mesh times devices and dims up to which each spec is considered; 16 bytes each."""
_MOST_LISTED: Final = 300_000
"""Pieces of exchanges that are listed before the best so far is taken."""


@dataclass(frozen=True, eq=False)
class _Side:
    """Specs on one mesh at which the tensor may leave or arrive, and the way from or to there."""

    layout: Layout
    """The end of the conversion that lies on this mesh."""
    cuts: list[Cuts]
    seconds: Floats
    """From the source to each spec, or from each spec to the target."""
    peak: Floats
    """The bytes that the fullest device holds at least on the way; 0 where there is no bound."""
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
    devices = common_mesh(source.mesh, target.mesh).size
    if devices > MOST_DEVICES:
        raise LayoutError(
            f"the two meshes have {devices:,} devices together; conversions between meshes are "
            f"planned for up to {MOST_DEVICES:,}"
        )
    here = _side(source, models[0], max_bytes, on_one_mesh, leaving=True)
    there = _side(target, models[1], max_bytes, on_one_mesh, leaving=False)
    dims = source.spec.dims
    if (
        len(here.cuts) * len(there.cuts) * devices > _MOST_PAIRS
        or len(here.cuts) * source.mesh.size * dims > _MOST_INTERVALS
    ):
        here = _end_alone(source, on_one_mesh, leaving=True)
    if len(there.cuts) * target.mesh.size * dims > _MOST_INTERVALS:
        there = _end_alone(target, on_one_mesh, leaving=False)
    best = _cheapest_pair(here, there, models, max_bytes)
    if best is None:
        raise LayoutError(
            f"no plan from {source} to {target} holds at most {max_bytes} bytes on every device; "
            f"the least that one needs is {_least_bytes(here, there)}"
        )
    before, after = here.at(best[0]), there.at(best[1])
    across = (exchange_to(before, after, *models), after)
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
    place = prices.space.index[start]
    peak = np.zeros(len(move))
    if max_bytes is not None:
        live = prices.local_bytes[:, None] + prices.local_bytes
        peak = least_peaks(move if leaving else move.T, live, place)
        move = np.where(live <= max_bytes, move, inf)
    seconds = distances(move if leaving else move.T, place)
    reached = prices.space.nothing_pending

    def walk(index: int) -> Sequence[Move]:
        ends = (place, int(reached[index])) if leaving else (int(reached[index]), place)
        return _moves(prices, move, ends, end)

    cuts = [prices.space.states[i][0] for i in reached]
    return _Side(end, cuts, seconds[reached], peak[reached], walk)


def _moves(prices: Prices, move: Floats, ends: tuple[int, int], layout: Layout) -> Sequence[Move]:
    walk = shortest_walk(move, *ends)
    assert walk is not None, "the distance is finite"
    states = prices.space.states
    return [(prices.step(a, b), layout.with_spec(spec_of(states[b]))) for a, b in pairwise(walk)]


def _end_alone(end: Layout, on_one_mesh: PathOnOneMesh, *, leaving: bool) -> _Side:
    """Let the tensor leave or arrive as it is; what is pending is finished first."""
    plain = end.with_spec(end.spec.without_partial())
    moves = on_one_mesh(end, plain) if leaving else []
    layouts = [end, *(after for _, after in moves)]
    peak = max((live_bytes(*ends) for ends in pairwise(layouts)), default=0)
    return _Side(end, [state_of(plain.spec)[0]], np.zeros(1), np.array([peak]), lambda _: moves)


def _cheapest_pair(
    here: _Side, there: _Side, models: tuple[CostModel, CostModel], max_bytes: int | None
) -> tuple[int, int] | None:
    """Return where to leave and where to arrive."""
    meshes = here.layout.mesh, there.layout.mesh
    mesh, model = common_mesh(*meshes), common_model(*meshes, *models)
    item = item_bytes(here.layout.dtype)
    bound = here.seconds[:, None] + there.seconds + _least_exchange(here, there, model)
    held, wanted = _Boxes(here), _Boxes(there)
    # Axes of one device, and dims too short to be cut, make many specs the same boxes.
    known: dict[tuple[_Sides, _Sides], float] = {}
    best, found = inf, None
    too_many: LayoutError | None = None
    listed = 0
    for flat in np.argsort(bound, axis=None, kind="stable").tolist():
        pair = divmod(flat, len(there.cuts))
        if not bound[pair] < best or (listed > _MOST_LISTED and found is not None):
            break
        before, after = held.of(pair[0]), wanted.of(pair[1])
        if max_bytes is not None and most_held(before, after) * item > max_bytes:
            continue
        key = tuple(before.values()), tuple(after.values())
        if key not in known:
            listed += mesh.size + count_pieces(before, after)
            try:
                known[key] = boxes_seconds(before, after, mesh, model, item) + TIE_SECONDS
            except LayoutError as error:
                known[key], too_many = inf, error
        total = float(here.seconds[pair[0]] + there.seconds[pair[1]]) + known[key]
        if total < best:
            best, found = total, pair
    if found is None and too_many is not None:
        raise too_many
    return found


def _least_bytes(here: _Side, there: _Side) -> int:
    """Return the bytes that the fullest device holds at least, whichever way is taken."""
    item = item_bytes(here.layout.dtype)
    held, wanted = _Boxes(here), _Boxes(there)
    known: dict[tuple[_Sides, _Sides], int] = {}
    bound = np.maximum(here.peak[:, None], there.peak)
    best = inf
    for flat in np.argsort(bound, axis=None, kind="stable").tolist():
        pair = divmod(flat, len(there.cuts))
        if bound[pair] >= best:
            break
        before, after = held.of(pair[0]), wanted.of(pair[1])
        key = tuple(before.values()), tuple(after.values())
        if key not in known:
            known[key] = most_held(before, after) * item
        best = min(best, max(known[key], float(bound[pair])))
    return int(best)


class _Boxes:
    """The boxes of all devices at each spec of a side, worked out when they are asked for."""

    def __init__(self, side: _Side) -> None:
        self._side = side
        self._known: dict[int, dict[int, Box]] = {}

    def of(self, index: int) -> dict[int, Box]:
        if index not in self._known:
            self._known[index] = self._side.at(index).boxes()
        return self._known[index]


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
    alpha = min(link.latency_s for link in model.links) + model.start_s
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

"""Conversions between two meshes: moves on the first, one exchange, moves on the second.

In an exchange the devices of both meshes are looked at as one mesh, on which a device that is not
in the source's mesh holds nothing and one that is not in the target's wants nothing. It may join
any spec on the one mesh to any on the other. What it costs is known only after saying who sends
what, so pairs of specs are looked at in the order of a bound that it cannot cost less than, until
no pair that is left can be cheaper.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from math import inf, prod
from operator import ne
from typing import Final, TypeAlias

import numpy as np

from shardspec.boxes import Box, box_size, intersect
from shardspec.comm.cost import CostModel
from shardspec.comm.curves import Link
from shardspec.comm.routes import Transfer, distance_on, exchange_routes
from shardspec.comm.steps import Exchange, Step
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.graph import (
    MAX_STATES,
    Cuts,
    Floats,
    count_states,
    spec_of,
    state_of,
)
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.pricing import TIE_SECONDS, prices_to_search
from shardspec.layout.routed import geometry_of, shared
from shardspec.layout.search import distances, least_peaks, shortest_walk
from shardspec.mesh import DeviceMesh, LinkModel

Move: TypeAlias = tuple[Step, Layout]
"""A step, and the layout it leads to."""

_MOST_DEVICES: Final = 1 << 14
"""Devices between which boxes are exchanged one by one."""
_MAX_PIECES: Final = 500_000
"""Pieces that one exchange between two meshes may have: to list them takes seconds."""
_MOST_PAIRS: Final = 2e7
"""Pairs of specs times devices up to which every pair is considered."""
_MOST_INTERVALS: Final = 5e6
"""Specs of a mesh times devices and dims up to which each spec is considered; 16 bytes each."""
_MOST_LISTED: Final = 300_000
"""Pieces of exchanges that are listed before the best so far is taken."""


@lru_cache(maxsize=64)
def common_mesh(a: DeviceMesh, b: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the devices of both: the one that has them all, or a row of them.

    Where both have all, the one with more axes says more about who is near whom.
    """
    ids_a, ids_b = set(a.ids), set(b.ids)
    if ids_b <= ids_a and (ids_a != ids_b or a.ndim >= b.ndim):
        return a
    if ids_a <= ids_b:
        return b
    union = sorted(ids_a | ids_b)
    return DeviceMesh(union, (len(union),))


def common_model(a: DeviceMesh, b: DeviceMesh, model_a: CostModel, model_b: CostModel) -> CostModel:
    """Return the links of `common_mesh`: its own, or the slowest of both for a row of devices."""
    mesh = common_mesh(a, b)
    if mesh == a:
        return model_a
    if mesh == b:
        return model_b
    links = (*model_a.links, *model_b.links)
    slowest = Link(
        max(link.latency_s for link in links),
        max(link.seconds_per_byte for link in links),
        "slowest of both meshes",
        max(link.start_s for link in links),
    )
    both_on_bus = model_a.link_model == model_b.link_model == "shared-bus"
    link_model: LinkModel = "shared-bus" if both_on_bus else "ring"
    copy_s = max(model_a.copy_s, model_b.copy_s)
    return CostModel(mesh.shape, (slowest,), link_model, copy_s=copy_s)


def exchange_to(
    before: Layout, after: Layout, model: CostModel, target_model: CostModel | None = None
) -> Exchange:
    """Return the exchange between two layouts: replicas that are as near share the work.

    The models are of the mesh of each; the second is of use for another mesh only.
    """
    one = before.mesh == after.mesh
    if not one and target_model is not None:
        model = common_model(before.mesh, after.mesh, model, target_model)
    plain = one and before.spec.is_plain and after.spec.is_plain
    cut = map(int, before.spec.axes) if plain else range(len(model.links))
    return Exchange(tuple(range(before.mesh.ndim)) if one else (), model.apart(cut))


def exchange_seconds(before: Layout, after: Layout, model: CostModel) -> float:
    """Return the modelled seconds of an exchange between two layouts, part by part.

    Nothing is pending; the model is that of the `common_mesh` of both.
    """
    mesh, item = _checked_mesh(before, after), item_bytes(before.dtype)
    return sum(_boxes_seconds(*ends, mesh, model, item) for ends in _boxes_of(before, after))


def _boxes_of(before: Layout, after: Layout) -> Iterator[tuple[dict[int, Box], dict[int, Box]]]:
    """Yield what devices hold of each part of a tensor, before and after."""
    for cell in cells_of(before, after):
        yield LayoutCell(before, cell).boxes(), LayoutCell(after, cell).boxes()


def _checked_mesh(before: Layout, after: Layout) -> DeviceMesh:
    mesh = common_mesh(before.mesh, after.mesh)
    if mesh.size > _MOST_DEVICES:
        raise LayoutError(
            f"the exchange between {before.spec} and {after.spec} is among {mesh.size:,} devices; "
            f"such are planned for up to {_MOST_DEVICES:,}"
        )
    return mesh


def _boxes_seconds(
    held: Mapping[int, Box],
    wanted: Mapping[int, Box],
    mesh: DeviceMesh,
    model: CostModel,
    item: int,
) -> float:
    """Return the modelled seconds of an exchange, given the boxes of all devices.

    Raises `LayoutError` if so many pieces would travel that they cannot be listed.
    """
    pieces = count_pieces(held, wanted)
    if pieces > _MAX_PIECES:
        raise LayoutError(
            f"between these meshes {pieces:,} pieces of the tensor would travel; conversions of up "
            f"to {_MAX_PIECES:,} are planned: cut the tensor alike on both, or by fewer devices"
        )
    moves = exchange_routes(held, wanted, distance_on(mesh, model.apart(range(mesh.ndim))))
    seconds = _routes_seconds(moves, mesh, model, item)
    return seconds + model.copy_s * _most_held(held, wanted) * item if seconds else seconds


def count_pieces(held: Mapping[int, Box], wanted: Mapping[int, Box]) -> int:
    """Return how many pieces travel or stay in an exchange."""
    sides = [sorted(set(side)) for side in zip(*held.values(), strict=True)]
    starts, ends = [[lo for lo, _ in side] for side in sides], [[hi for _, hi in s] for s in sides]
    found: Counter[Box] = Counter(wanted.values())
    return sum(
        times
        * prod(
            max(0, bisect_left(start, hi) - bisect_right(end, lo))
            for start, end, (lo, hi) in zip(starts, ends, box, strict=True)
        )
        for box, times in found.items()
    )


def _routes_seconds(
    moves: Sequence[Transfer], mesh: DeviceMesh, model: CostModel, item: int
) -> float:
    """Return the modelled seconds of transfers that travel at once, one at most a pair of devices.

    `item` is the bytes of an element.
    """
    busy: dict[tuple[str, int], float] = defaultdict(float)
    peers: dict[tuple[str, int], int] = defaultdict(int)
    latency = per_byte = moved = 0.0
    at = {device: mesh.coordinates(device) for device in mesh.ids}
    links: dict[tuple[bool, ...], tuple[float, float]] = {}
    for move in moves:
        if move.src == move.dst:
            continue
        differ = tuple(map(ne, at[move.src], at[move.dst]))
        if differ not in links:
            links[differ] = model.slowest([axis for axis, other in enumerate(differ) if other])
        alpha, beta = links[differ]
        num_bytes = box_size(move.box) * item
        latency, per_byte, moved = max(latency, alpha), max(per_byte, beta), moved + num_bytes
        for end in (("sends", move.src), ("receives", move.dst)):
            busy[end] += alpha + num_bytes * beta
            peers[end] += 1
    start = model.start_s if moved else 0.0
    if model.link_model == "shared-bus":
        return start + max(peers.values(), default=0) * latency + moved * per_byte
    return start + max(busy.values(), default=0.0)


def received_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the busiest device of the target's mesh lacks."""
    _checked_mesh(before, after)
    lacking: dict[int, int] = dict.fromkeys(after.mesh.ids, 0)
    for held, wanted in _boxes_of(before, after):
        for device, box in wanted.items():
            lacking[device] += missing(box, held.get(device))
    return max(lacking.values()) * item_bytes(before.dtype)


def missing(wanted: Box, held: Box | None) -> int:
    """Return the elements of a box that one who has another box, or none, lacks."""
    kept = None if held is None else intersect(wanted, held)
    return box_size(wanted) - (box_size(kept) if kept is not None else 0)


def live_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the fullest device of either mesh holds before and after together."""
    if before.mesh == after.mesh:
        return before.max_local_bytes + after.max_local_bytes
    return max(
        sum(prod(layout.local_shape(d)) for layout in (before, after) if d in layout.mesh)
        for d in {*before.mesh.ids, *after.mesh.ids}
    ) * item_bytes(before.dtype)


def _most_held(held: Mapping[int, Box], wanted: Mapping[int, Box]) -> int:
    """Return the elements that the fullest device holds before and after together."""
    return max(
        sum(box_size(boxes[device]) for boxes in (held, wanted) if device in boxes)
        for device in held.keys() | wanted.keys()
    )


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
    on_one_mesh: Callable[[Layout, Layout], Sequence[Move]],
) -> list[Move]:
    """Return the cheapest moves from a layout to one on another mesh, where nothing is pending.

    `models` price on the source's mesh and on the target's; no device may hold more than
    `max_bytes` during a step, else a `LayoutError` says the least that is needed. `on_one_mesh`
    finds moves on a mesh with too many specs to consider each.

    Exact where there are so few pairs of specs and devices that all are considered, as there are
    for three axes each and a hundred devices. On larger meshes the tensor leaves as it is and
    arrives as it shall be, or the best of the pairs looked at is taken.
    """
    devices = common_mesh(source.mesh, target.mesh).size
    if devices > _MOST_DEVICES:
        raise LayoutError(
            f"the two meshes have {devices:,} devices together; conversions between meshes are "
            f"planned for up to {_MOST_DEVICES:,}"
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
    before, after = here.at(best[0]), there.at(best[1])
    across = (exchange_to(before, after, *models), after)
    return [*here.walk(best[0]), across, *there.walk(best[1])]


def _side(
    end: Layout,
    model: CostModel,
    max_bytes: int | None,
    on_one_mesh: Callable[[Layout, Layout], Sequence[Move]],
    *,
    leaving: bool,
) -> _Side:
    """Search from the source to all specs of its mesh, or from all specs to the target."""
    start = state_of(end.spec)
    if count_states(end.mesh.ndim, end.spec.dims, len(start[1])) > MAX_STATES:
        return _end_alone(end, on_one_mesh, leaving=leaving)
    prices, move = prices_to_search(end, model, max_bytes)
    place, reached = prices.space.index[start], prices.space.nothing_pending
    peak = np.zeros(len(move))
    if max_bytes is not None:
        every = prices.cheapest()
        peak = least_peaks(every if leaving else every.T, prices.live_bytes, place)
    seconds = distances(move if leaving else move.T, place)

    def walk(index: int) -> Sequence[Move]:
        ends = (place, int(reached[index])) if leaving else (int(reached[index]), place)
        found = shortest_walk(move, *ends)
        assert found is not None, "the distance is finite"
        return [(prices.step(a, b), prices.layout(end, b)) for a, b in pairwise(found)]

    cuts = [prices.space.states[i][0] for i in reached]
    return _Side(end, cuts, seconds[reached], peak[reached], walk)


def _end_alone(
    end: Layout, on_one_mesh: Callable[[Layout, Layout], Sequence[Move]], *, leaving: bool
) -> _Side:
    """Let the tensor leave or arrive as it is; what is pending is finished first."""
    plain = end.with_spec(end.spec.without_partial())
    moves = on_one_mesh(end, plain) if leaving else []
    layouts = [end, *(after for _, after in moves)]
    peak = max((live_bytes(*ends) for ends in pairwise(layouts)), default=0)
    return _Side(end, [state_of(plain.spec)[0]], np.zeros(1), np.array([peak]), lambda _: moves)


def _cheapest_pair(
    here: _Side, there: _Side, models: tuple[CostModel, CostModel], max_bytes: int | None
) -> tuple[int, int]:
    """Return where to leave and where to arrive."""
    meshes = here.layout.mesh, there.layout.mesh
    mesh, model = common_mesh(*meshes), common_model(*meshes, *models)
    item = item_bytes(here.layout.dtype)
    held, wanted = cache(lambda n: here.at(n).boxes()), cache(lambda n: there.at(n).boxes())
    # Axes of one device, and dims too short to be cut, make many specs the same boxes.
    seconds: dict[tuple[tuple[Box, ...], ...], float] = {}
    too_many: list[LayoutError] = []
    listed = 0

    def total(a: int, b: int) -> float:
        nonlocal listed
        before, after = held(a), wanted(b)
        if max_bytes is not None and _most_held(before, after) * item > max_bytes:
            return inf
        key = tuple(before.values()), tuple(after.values())
        if key not in seconds:
            listed += mesh.size + count_pieces(before, after)
            try:
                seconds[key] = _boxes_seconds(before, after, mesh, model, item) + TIE_SECONDS
            except LayoutError as error:
                seconds[key] = inf
                too_many.append(error)
        return float(here.seconds[a] + there.seconds[b]) + seconds[key]

    least = here.seconds[:, None] + there.seconds + _least_exchange(here, there, model)
    _, found = _lowest(least, total, lambda: listed > _MOST_LISTED)
    if found is not None:
        return found
    if too_many:
        raise too_many[-1]

    def peak(a: int, b: int) -> float:
        return max(float(peaks[a, b]), _most_held(held(a), wanted(b)) * item)

    peaks = np.maximum(here.peak[:, None], there.peak)
    raise LayoutError(
        f"no plan from {here.layout} to {there.layout} holds at most {max_bytes} bytes on every "
        f"device; the least that one needs is {int(_lowest(peaks, peak)[0])}"
    )


def _lowest(
    bound: Floats, value: Callable[[int, int], float], enough: Callable[[], bool] = lambda: False
) -> tuple[float, tuple[int, int] | None]:
    """Return the lowest value of a pair, and the pair; no value is below its bound.

    Where one was found and `enough` was done, the lowest so far is taken.
    """
    best, found = inf, None
    for flat in np.argsort(bound, axis=None, kind="stable").tolist():
        pair = divmod(flat, bound.shape[1])
        if not bound[pair] < best or (found is not None and enough()):
            break
        here = value(*pair)
        if here < best:
            best, found = here, pair
    return best, found


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
            a.intervals([cuts[dim] for cuts in here.cuts], size),
            b.intervals([cuts[dim] for cuts in there.cuts], size),
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
            kept *= shared((lo_a[row, at_a], hi_a[row, at_a]), (lo_b[:, at_b], hi_b[:, at_b]))
        lacking = wanted.copy()
        lacking[:, at_b] -= kept
        amount[row] = lacking.sum(axis=1) if on_bus else lacking.max(axis=1)
    alpha = min(link.latency_s for link in model.links) + model.start_s
    beta = min(link.seconds_per_byte for link in model.links)
    least: Floats = (amount > 0) * alpha + amount * item_bytes(here.layout.dtype) * beta
    return least

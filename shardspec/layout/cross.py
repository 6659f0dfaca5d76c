"""Exchanges between layouts, also on two meshes: what they cost and move, and where to cross over.

In an exchange the devices of both meshes are seen as one mesh, on which a device that is not in the
source's mesh holds nothing and one that is not in the target's wants nothing. The exchange may join
any spec on the one mesh to any on the other. Its price is known only once it is known who sends
what. So pairs of specs are looked at in the order of a lower bound of their price, until no pair
that is left can be cheaper.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf, prod
from operator import ne
from typing import Final, TypeAlias

import numpy as np

from shardspec.boxes import Box, box_size, intersect
from shardspec.comm.cost import CostModel
from shardspec.comm.curves import Link
from shardspec.comm.steps import Exchange
from shardspec.comm.transfers import distance_on, exchange_routes
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.graph import (
    MAX_STATES,
    TIE_SECONDS,
    Cuts,
    Floats,
    distances,
    spec_of,
    state_of,
)
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.pricing import prices_to_search, states_of
from shardspec.layout.routed import MAX_EXACT_DEVICES, intervals, shared
from shardspec.mesh.device_mesh import DeviceMesh, LinkModel

Boxes: TypeAlias = Mapping[int, Box]
"""Device to the box that it holds."""

_MAX_DEVICES: Final = 1 << 14
"""Devices between which boxes are exchanged one by one."""
_MAX_PIECES: Final = 500_000
"""Pieces that one exchange may have: to list them takes seconds."""
_MAX_WORK: Final = 2e7
"""Pairs of specs times devices up to which every pair is considered."""
_MAX_INTERVALS: Final = 5e6
"""Specs of a mesh times devices and dims up to which each spec is considered; 16 bytes each."""
_MAX_LISTED: Final = 300_000
"""Pieces of exchanges that are listed before the best so far is taken."""


@lru_cache(maxsize=64)
def common_mesh(a: DeviceMesh, b: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the devices of both: the one that has them all, or a row of them."""
    ids_a, ids_b = set(a.ids), set(b.ids)
    # Where both have all, the one with more axes says more about who is near whom.
    if ids_b <= ids_a and (ids_a != ids_b or a.ndim >= b.ndim):
        return a
    if ids_a <= ids_b:
        return b
    union = sorted(ids_a | ids_b)
    return DeviceMesh(union, (len(union),))


def common_model(a: DeviceMesh, b: DeviceMesh, model_a: CostModel, model_b: CostModel) -> CostModel:
    """Return the links of `common_mesh`: its own, or the slowest of both for a row of devices."""
    mesh = common_mesh(a, b)
    if mesh in (a, b):
        return model_a if mesh == a else model_b
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
    """Return the exchange between two layouts; each model is that of the mesh of one."""
    one = before.mesh == after.mesh
    if not one and target_model is not None:
        model = common_model(before.mesh, after.mesh, model, target_model)
    plain = one and before.spec.is_plain and after.spec.is_plain
    cut = map(int, before.spec.axes) if plain else range(len(model.links))
    return Exchange(tuple(range(before.mesh.ndim)) if one else (), model.apart(cut))


def exchange_seconds(before: Layout, after: Layout, model: CostModel) -> float:
    """Return the seconds of an exchange, part by part; the model is of the `common_mesh`."""
    mesh, item = _checked_mesh(before, after), item_bytes(before.dtype)
    ends = ((here.boxes(), there.boxes()) for here, there in _cells(before, after))
    return sum(_boxes_seconds(held, wanted, mesh, model, item) for held, wanted in ends)


def received_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the busiest device of the target's mesh lacks.

    On one mesh of more than 512 devices only some are looked at.
    """
    ids = after.mesh.ids
    if before.mesh == after.mesh and before.spec.is_plain and after.spec.is_plain:
        ids = ids[:: -(-len(ids) // MAX_EXACT_DEVICES)]
    else:
        _checked_mesh(before, after)
    cells = list(_cells(before, after))

    def lacking(device: int, here: LayoutCell, there: LayoutCell) -> int:
        wanted = there.box(device)
        kept = intersect(wanted, here.box(device)) if device in before.mesh else None
        return box_size(wanted) - (0 if kept is None else box_size(kept))

    most = max(sum(lacking(device, *cell) for cell in cells) for device in ids)
    return most * item_bytes(before.dtype)


def live_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the fullest device of either mesh holds before and after together."""
    if before.mesh == after.mesh:
        return before.max_local_bytes + after.max_local_bytes
    return max(
        sum(prod(layout.local_shape(d)) for layout in (before, after) if d in layout.mesh)
        for d in {*before.mesh.ids, *after.mesh.ids}
    ) * item_bytes(before.dtype)


def _cells(before: Layout, after: Layout) -> Iterator[tuple[LayoutCell, LayoutCell]]:
    """Yield both layouts of each part of a tensor."""
    for cell in cells_of(before, after):
        yield LayoutCell(before, cell), LayoutCell(after, cell)


def _checked_mesh(before: Layout, after: Layout) -> DeviceMesh:
    mesh = common_mesh(before.mesh, after.mesh)
    if mesh.size() > _MAX_DEVICES:
        raise LayoutError(
            f"the exchange between {before.spec} and {after.spec} is among {mesh.size():,} "
            f"devices; exchanges are planned for up to {_MAX_DEVICES:,}"
        )
    return mesh


def _boxes_seconds(
    held: Boxes, wanted: Boxes, mesh: DeviceMesh, model: CostModel, item: int
) -> float:
    """Return the modelled seconds of an exchange between boxes of elements of `item` bytes."""
    pieces = _count_pieces(held, wanted)
    if pieces > _MAX_PIECES:
        raise LayoutError(
            f"between these meshes {pieces:,} pieces of the tensor would travel; conversions of up "
            f"to {_MAX_PIECES:,} are planned: cut the tensor alike on both, or by fewer devices"
        )
    busy: dict[tuple[str, int], float] = defaultdict(float)
    peers: Counter[tuple[str, int]] = Counter()
    latency = per_byte = moved = 0.0
    links: dict[tuple[bool, ...], tuple[float, float]] = {}
    at = {device: mesh.coordinates(device) for device in mesh.ids}
    for move in exchange_routes(held, wanted, distance_on(mesh, model.apart(range(mesh.ndim)))):
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
    if not moved:
        return 0.0
    seconds = max(busy.values())
    if model.link_model == "shared-bus":
        seconds = max(peers.values()) * latency + moved * per_byte
    return model.start_s + seconds + model.copy_s * _most_held(held, wanted) * item


def _count_pieces(held: Boxes, wanted: Boxes) -> int:
    """Return how many pieces travel or stay in an exchange."""
    sides = [sorted(set(side)) for side in zip(*held.values(), strict=True)]
    ends = [([lo for lo, _ in side], [hi for _, hi in side]) for side in sides]
    return sum(
        times
        * prod(
            max(0, bisect_left(starts, hi) - bisect_right(stops, lo))
            for (starts, stops), (lo, hi) in zip(ends, box, strict=True)
        )
        for box, times in Counter(wanted.values()).items()
    )


def _most_held(held: Boxes, wanted: Boxes) -> int:
    """Return the elements that the fullest device holds before and after together."""
    return max(
        sum(box_size(boxes[device]) for boxes in (held, wanted) if device in boxes)
        for device in held.keys() | wanted.keys()
    )


@dataclass(frozen=True, eq=False)
class _Side:
    """Specs on one mesh at which the tensor may leave or arrive."""

    layout: Layout
    """The end of the conversion that lies on this mesh."""
    cuts: list[Cuts]
    seconds: Floats
    """From the source to each spec, or from each spec to the target."""

    @classmethod
    def alone(cls, end: Layout) -> "_Side":
        """Let the tensor leave or arrive as it is; what is pending is finished first."""
        return cls(end, [state_of(end.spec)[0]], np.zeros(1))

    @classmethod
    def every(cls, end: Layout, model: CostModel, leaving: bool) -> "_Side":
        """Search from the source to all specs of its mesh, or from all specs to the target."""
        if states_of(end) > MAX_STATES:
            return cls.alone(end)
        prices, move = prices_to_search(end, model, None)
        finished = prices.space.num_finished
        seconds = distances(move if leaving else move.T, [prices.state(end)])[0, :finished]
        return cls(end, [cuts for cuts, _ in prices.space.states[:finished]], seconds)

    @property
    def num_intervals(self) -> int:
        return len(self.cuts) * self.layout.mesh.size() * self.layout.spec.dims

    def at(self, index: int) -> Layout:
        """Return the layout of one of the specs."""
        return self.layout.with_spec(spec_of((self.cuts[index], ())))


def cheapest_crossing(
    source: Layout, target: Layout, models: tuple[CostModel, CostModel]
) -> tuple[Layout, Layout]:
    """Return the layouts between which a tensor goes over to another mesh.

    `models` price on each mesh. The choice is the cheapest where so few specs and devices are
    involved that all pairs are considered. On larger meshes the tensor leaves and arrives as it
    is, or the best of the pairs looked at is taken.
    """
    mesh, model = (
        common_mesh(source.mesh, target.mesh),
        common_model(source.mesh, target.mesh, *models),
    )
    if mesh.size() > _MAX_DEVICES:
        raise LayoutError(
            f"the two meshes have {mesh.size():,} devices together; conversions between meshes are "
            f"planned for up to {_MAX_DEVICES:,}"
        )
    here = _Side.every(source, models[0], leaving=True)
    there = _Side.every(target, models[1], leaving=False)
    work = len(here.cuts) * len(there.cuts) * mesh.size()
    if work > _MAX_WORK or here.num_intervals > _MAX_INTERVALS:
        here = _Side.alone(source)
    if there.num_intervals > _MAX_INTERVALS:
        there = _Side.alone(target)
    item = item_bytes(source.dtype)
    held, wanted = cache(lambda n: here.at(n).boxes()), cache(lambda n: there.at(n).boxes())
    # Axes of one device, and dims too short to be cut, make many specs the same boxes.
    seconds: dict[tuple[tuple[Box, ...], ...], float] = {}
    too_many: list[LayoutError] = []
    listed = 0

    def total(a: int, b: int) -> float:
        nonlocal listed
        before, after = held(a), wanted(b)
        key = tuple(before.values()), tuple(after.values())
        if key not in seconds:
            listed += mesh.size() + _count_pieces(before, after)
            try:
                seconds[key] = _boxes_seconds(before, after, mesh, model, item) + TIE_SECONDS
            except LayoutError as error:
                seconds[key] = inf
                too_many.append(error)
        return float(here.seconds[a] + there.seconds[b]) + seconds[key]

    least = here.seconds[:, None] + there.seconds + _least_exchange(here, there, model)
    found = _lowest(least, total, lambda: listed > _MAX_LISTED)
    if found is None:
        raise too_many[-1]
    return here.at(found[0]), there.at(found[1])


def _lowest(
    bound: Floats, value: Callable[[int, int], float], enough: Callable[[], bool]
) -> tuple[int, int] | None:
    """Return the pair with the lowest value, or with the lowest so far once that is `enough`."""
    lowest, best_pair = inf, None
    for flat in np.argsort(bound, axis=None, kind="stable").tolist():
        pair = divmod(flat, bound.shape[1])
        if not bound[pair] < lowest or (best_pair is not None and enough()):
            break
        seconds = value(*pair)
        if seconds < lowest:
            lowest, best_pair = seconds, pair
    return best_pair


def _least_exchange(here: _Side, there: _Side, model: CostModel) -> Floats:
    """Return the least that exchanges cost: on the fastest link some device gets what it lacks."""
    meshes = here.layout.mesh, there.layout.mesh
    known = {device: place for place, device in enumerate(meshes[0].ids)}
    both = [(known[device], place) for place, device in enumerate(meshes[1].ids) if device in known]
    at_a, at_b = np.array(both, dtype=np.int64).reshape(-1, 2).T
    sides = [
        [
            intervals(mesh.shape, [cuts[dim] for cuts in side.cuts], size)
            for mesh, side in zip(meshes, (here, there), strict=True)
        ]
        for dim, size in enumerate(here.layout.global_shape)
    ]
    wanted = np.ones((len(there.cuts), meshes[1].size()))
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

"""Chooses the specs before and after the exchange that moves a tensor to another mesh.

>>> first, second = DeviceMesh(range(4), (2, 2)), DeviceMesh(range(4, 8), (4,))
>>> source, target = Layout(first, "[S0,R]", (8, 8), "f32"), Layout(second, "[S0,R]", (8, 8), "f32")
>>> models = CostModel.of_mesh(first), CostModel.of_mesh(second)
>>> [str(layout.spec) for layout in cheapest_crossing(source, target, models)]
['[S0,S1]', '[S0,R]']
>>> received_bytes(source, target), live_bytes(source, target)
(64, 128)
>>> model = common_model(first, second, *models)
>>> common_mesh(first, second), exchange_to(source, target, model)
(DeviceMesh(range(8), (8,)), Exchange(axes=(), apart=()))

An exchange treats the devices of both meshes as a single mesh: devices outside the source's mesh
have empty boxes before, and devices outside the target's mesh have empty boxes after. It may
connect any spec of the first mesh with any spec of the second. To price a pair of specs, all copies
are listed; so pairs are priced in order of a lower bound until no other pair can be cheaper.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import inf, prod
from typing import Final, TypeAlias

import numpy as np

from shardspec.boxes import Box, box_size, intersect
from shardspec.comm.cluster import Cluster, busiest_seconds, slowest_link
from shardspec.comm.cost import CostModel, exchange_start, slower_axes, slowest_costs
from shardspec.comm.steps import Exchange
from shardspec.comm.transfers import distance_of, exchange_routes
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
"""Device id to its box."""

_MAX_DEVICES: Final = 1 << 14
"""The most devices among which exchanges are planned."""
_MAX_PIECES: Final = 500_000
"""The most pieces of one exchange; listing them takes seconds."""
_MAX_WORK: Final = 2e7
"""The most pairs of specs times devices for which every pair is considered."""
_MAX_INTERVALS: Final = 5e6
"""The most specs of a mesh times devices times dims to consider each spec; 16 bytes each."""
_MAX_LISTED: Final = 300_000
"""The most pieces that a search lists before it returns the best exchange so far."""


@lru_cache(maxsize=64)
def common_mesh(a: DeviceMesh, b: DeviceMesh) -> DeviceMesh:
    """Return a mesh of all devices of two meshes: one of the two, or else a mesh of one axis."""
    ids_a, ids_b = set(a.ids), set(b.ids)
    # If the devices are the same, the mesh with more axes has more detailed distances.
    if ids_b <= ids_a and (ids_a != ids_b or a.ndim >= b.ndim):
        return a
    if ids_a <= ids_b:
        return b
    union = sorted(ids_a | ids_b)
    return DeviceMesh(union, (len(union),))


def common_model(a: DeviceMesh, b: DeviceMesh, model_a: CostModel, model_b: CostModel) -> CostModel:
    """Return the cost model of `common_mesh`; a new axis has the slowest link of both meshes."""
    mesh = common_mesh(a, b)
    if mesh in (a, b):
        return model_a if mesh == a else model_b
    both_on_bus = model_a.link_model == model_b.link_model == "shared-bus"
    link_model: LinkModel = "shared-bus" if both_on_bus else "ring"
    copy_s = max(model_a.copy_s, model_b.copy_s)
    cluster = None if both_on_bus or model_a.cluster != model_b.cluster else model_a.cluster
    links = (*model_a.links, *model_b.links)
    if cluster is not None:
        crossing = len(cluster.by_host(mesh.ids)) > 1
        links = (cluster.inside, *([cluster.between] if crossing and cluster.between else []))
    slowest = slowest_link(links, "slowest of both meshes")
    return CostModel(mesh.shape, (slowest,), link_model, copy_s=copy_s, cluster=cluster)


def exchange_to(
    before: Layout, after: Layout, model: CostModel, target_model: CostModel | None = None
) -> Exchange:
    """Return the exchange between two layouts; each mesh has its own model."""
    if before.mesh != after.mesh:
        if target_model is not None:
            model = common_model(before.mesh, after.mesh, model, target_model)
        return _crossing(before.mesh, after.mesh, model)
    plain = before.spec.is_plain and after.spec.is_plain
    cut = map(int, before.spec.axes) if plain else range(len(model.links))
    return Exchange(tuple(range(before.mesh.ndim)), slower_axes(model, cut))


@lru_cache(maxsize=64)
def _crossing(a: DeviceMesh, b: DeviceMesh, model: CostModel) -> Exchange:
    """Return the exchange between two meshes, given the model of their common mesh."""
    cluster = _cluster_of(a, b, model)
    if cluster and cluster.per_node:
        hosts = [set(cluster.by_host(mesh.ids)) for mesh in (a, b)]
        # If no host has devices of both, all holders are equally far.
        nearest = hosts[0] & hosts[1] and len(hosts[0] | hosts[1]) > 1
        return Exchange((), (), cluster.per_node if nearest else 0)
    return Exchange((), slower_axes(model, range(len(model.links))))


def exchange_seconds(before: Layout, after: Layout, model: CostModel) -> float:
    """Return the modeled seconds of an exchange; `model` is that of the `common_mesh`."""
    _check_devices(common_mesh(before.mesh, after.mesh))
    meshes, item = (before.mesh, after.mesh), item_bytes(before.dtype)
    pairs = ((old.boxes(), new.boxes()) for old, new in _cells(before, after))
    return sum(_boxes_seconds(have, want, meshes, model, item) for have, want in pairs)


def received_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the busiest device of the target's mesh receives.

    On a mesh of more than 512 devices this is the maximum over a sample of them.
    """
    ids = after.mesh.ids
    if before.mesh == after.mesh and before.spec.is_plain and after.spec.is_plain:
        ids = ids[:: -(-len(ids) // MAX_EXACT_DEVICES)]
    else:
        _check_devices(common_mesh(before.mesh, after.mesh))
    cells = list(_cells(before, after))

    def lacking(device: int, old: LayoutCell, new: LayoutCell) -> int:
        want = new.box(device)
        present = intersect(want, old.box(device)) if device in before.mesh else None
        return box_size(want) - (0 if present is None else box_size(present))

    most = max(sum(lacking(device, *cell) for cell in cells) for device in ids)
    return most * item_bytes(before.dtype)


def live_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes of the shards before and after, in sum, on the fullest device."""
    if before.mesh == after.mesh:
        return before.max_local_bytes + after.max_local_bytes
    return max(
        sum(prod(layout.local_shape(d)) for layout in (before, after) if d in layout.mesh)
        for d in {*before.mesh.ids, *after.mesh.ids}
    ) * item_bytes(before.dtype)


def _cells(before: Layout, after: Layout) -> Iterator[tuple[LayoutCell, LayoutCell]]:
    """Yield both layouts restricted to each cell, in which a device has at most one box."""
    for cell in cells_of(before, after):
        yield LayoutCell(before, cell), LayoutCell(after, cell)


def _check_devices(mesh: DeviceMesh) -> None:
    if mesh.size() > _MAX_DEVICES:
        raise LayoutError(
            f"an exchange among {mesh.size():,} devices is too large to plan; use at most "
            f"{_MAX_DEVICES:,}"
        )


def _boxes_seconds(
    have: Boxes,
    want: Boxes,
    meshes: tuple[DeviceMesh, DeviceMesh],
    model: CostModel,
    item: int,
) -> float:
    """Return the modeled seconds of an exchange of boxes; an element has `item` bytes."""
    pieces = count_pieces(have, want)
    if pieces > _MAX_PIECES:
        raise LayoutError(
            f"a conversion between these meshes would send {pieces:,} pieces, more than "
            f"{_MAX_PIECES:,}; use the same spec on both, or fewer devices"
        )
    link, distance = (
        _pair_link(meshes, model),
        distance_of(_crossing(*meshes, model), common_mesh(*meshes)),
    )
    messages = [
        (copy.sender, copy.receiver, box_size(copy.box) * item)
        for copy in exchange_routes(have, want, distance)
        if copy.sender != copy.receiver
    ]
    if not messages:
        return 0.0
    if model.link_model == "shared-bus":
        peers = Counter(
            end for sender, receiver, _ in messages for end in ((0, sender), (1, receiver))
        )
        lines = [link(sender, receiver) for sender, receiver, _ in messages]
        latency, per_byte = max(a for a, _ in lines), max(b for _, b in lines)
        seconds = max(peers.values()) * latency + sum(n for *_, n in messages) * per_byte
    else:
        seconds = busiest_seconds(messages, link, _cluster_of(*meshes, model))
    return exchange_start(model) + seconds + model.copy_s * _max_live_elements(have, want) * item


def _cluster_of(a: DeviceMesh, b: DeviceMesh, model: CostModel) -> Cluster | None:
    """Return the cluster that prices pairs of devices; None if links of axes price them."""
    cluster = model.cluster
    if a == b or cluster is None or model.link_model != "ring":
        return None
    # Links given per axis are more detailed than the hosts inferred from them.
    return cluster if cluster.per_node or common_mesh(a, b) not in (a, b) else None


def _pair_link(
    meshes: tuple[DeviceMesh, DeviceMesh], model: CostModel
) -> Callable[[int, int], tuple[float, float]]:
    """Return a function from two devices to the seconds per message and per byte between them."""
    if (cluster := _cluster_of(*meshes, model)) is not None:
        return cluster.link
    mesh = common_mesh(*meshes)
    at = {device: mesh.coordinates(device) for device in mesh.ids}
    costs = cache(partial(slowest_costs, model))
    return lambda a, b: costs(tuple(np.flatnonzero(np.not_equal(at[a], at[b])).tolist()))


def count_pieces(have: Boxes, want: Boxes) -> int:
    """Return the number of pieces of an exchange, including those that are not sent.

    >>> count_pieces({0: ((0, 4),), 1: ((4, 8),)}, {2: ((0, 8),), 3: ((0, 2),)})
    3
    """
    sides = [sorted(set(side)) for side in zip(*have.values(), strict=True)]
    edges = [([lo for lo, _ in side], [hi for _, hi in side]) for side in sides]
    return sum(
        times
        * prod(
            max(0, bisect_left(starts, hi) - bisect_right(stops, lo))
            for (starts, stops), (lo, hi) in zip(edges, box, strict=True)
        )
        for box, times in Counter(want.values()).items()
    )


def _max_live_elements(have: Boxes, want: Boxes) -> int:
    """Return the most elements on one device: those that it has plus those that it wants."""
    return max(
        sum(box_size(boxes[device]) for boxes in (have, want) if device in boxes)
        for device in have.keys() | want.keys()
    )


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The specs on one mesh that an exchange with another mesh may start from, or lead to."""

    layout: Layout
    """The source or target of the conversion, whichever is on this mesh."""
    cuts: list[Cuts]
    seconds: Floats
    """Cost of each spec: from the source to it, or from it to the target."""

    @classmethod
    def alone(cls, layout: Layout) -> "_Candidates":
        """Return the single candidate: the spec of `layout`, with its reductions finished."""
        return cls(layout, [state_of(layout.spec)[0]], np.zeros(1))

    @classmethod
    def every(cls, layout: Layout, model: CostModel, leaving: bool) -> "_Candidates":
        """Return every spec on the mesh of `layout`, or only its own if there are too many."""
        if states_of(layout) > MAX_STATES:
            return cls.alone(layout)
        prices, move = prices_to_search(layout, model, None)
        finished = prices.space.num_finished
        seconds = distances(move if leaving else move.T, [prices.state(layout)])[0, :finished]
        return cls(layout, [cuts for cuts, _ in prices.space.states[:finished]], seconds)

    @property
    def num_intervals(self) -> int:
        return len(self.cuts) * self.layout.mesh.size() * self.layout.spec.dims

    def at(self, index: int) -> Layout:
        """Return the layout with the candidate spec at an index."""
        return self.layout.with_spec(spec_of((self.cuts[index], ())))


def cheapest_crossing(
    source: Layout, target: Layout, models: tuple[CostModel, CostModel]
) -> tuple[Layout, Layout]:
    """Return the best layouts before and after the exchange to another mesh.

    `models` are the cost models of the two meshes. The result is optimal if there are few enough
    pairs of specs to consider all; otherwise it is the best pair that was priced, or `source` and
    `target`. Raises `LayoutError` for too many devices or pieces.
    """
    meshes = source.mesh, target.mesh
    mesh, model = common_mesh(*meshes), common_model(*meshes, *models)
    _check_devices(mesh)
    leaving = _Candidates.every(source, models[0], leaving=True)
    arriving = _Candidates.every(target, models[1], leaving=False)
    work = len(leaving.cuts) * len(arriving.cuts) * mesh.size()
    if work > _MAX_WORK or leaving.num_intervals > _MAX_INTERVALS:
        leaving = _Candidates.alone(source)
    if arriving.num_intervals > _MAX_INTERVALS:
        arriving = _Candidates.alone(target)
    item = item_bytes(source.dtype)
    boxes_before, boxes_after = (
        cache(lambda n: leaving.at(n).boxes()),
        cache(lambda n: arriving.at(n).boxes()),
    )
    # Keyed by boxes, since many specs have the same boxes if axes or dims are short.
    seconds: dict[tuple[tuple[Box, ...], ...], float] = {}
    too_many: list[LayoutError] = []
    listed = 0

    def total(a: int, b: int) -> float:
        nonlocal listed
        before, after = boxes_before(a), boxes_after(b)
        key = tuple(before.values()), tuple(after.values())
        if key not in seconds:
            listed += mesh.size() + count_pieces(before, after)
            try:
                seconds[key] = _boxes_seconds(before, after, meshes, model, item) + TIE_SECONDS
            except LayoutError as error:
                seconds[key] = inf
                too_many.append(error)
        return float(leaving.seconds[a] + arriving.seconds[b]) + seconds[key]

    least = leaving.seconds[:, None] + arriving.seconds + _least_exchange(leaving, arriving, model)
    best_pair = _lowest(least, total, lambda: listed > _MAX_LISTED)
    if best_pair is None:
        raise too_many[-1]
    return leaving.at(best_pair[0]), arriving.at(best_pair[1])


def _lowest(
    bound: Floats, value: Callable[[int, int], float], enough: Callable[[], bool]
) -> tuple[int, int] | None:
    """Return the pair with the lowest value, or the best so far once `enough` returns true.

    `bound` has a lower bound of every pair's value. Returns None if every value is infinite.
    """
    lowest, best_pair = inf, None
    for flat in np.argsort(bound, axis=None, kind="stable").tolist():
        pair = divmod(flat, bound.shape[1])
        if not bound[pair] < lowest or (best_pair is not None and enough()):
            break
        seconds = value(*pair)
        if seconds < lowest:
            lowest, best_pair = seconds, pair
    return best_pair


def _least_exchange(leaving: _Candidates, arriving: _Candidates, model: CostModel) -> Floats:
    """Return array [leaving, arriving]: a lower bound of the cost of an exchange of two specs.

    The bound is the longest time in which a device gets its missing elements over its fastest
    link. On a shared bus, the elements of all devices add up.
    """
    meshes = leaving.layout.mesh, arriving.layout.mesh
    place_in_source = {device: place for place, device in enumerate(meshes[0].ids)}
    places_in_both = [
        (place_in_source[device], place)
        for place, device in enumerate(meshes[1].ids)
        if device in place_in_source
    ]
    at_a, at_b = np.array(places_in_both, dtype=np.int64).reshape(-1, 2).T
    sides = [
        [
            intervals(mesh.shape, [cuts[dim] for cuts in side.cuts], size)
            for mesh, side in zip(meshes, (leaving, arriving), strict=True)
        ]
        for dim, size in enumerate(leaving.layout.global_shape)
    ]
    want = np.ones((len(arriving.cuts), meshes[1].size()))
    for _, (lo, hi) in sides:
        want *= hi - lo
    on_bus = model.link_model == "shared-bus"
    # The fastest link to each device.
    lines = np.min([[(link.latency_s, link.seconds_per_byte)] for link in model.links], axis=0)
    if (cluster := _cluster_of(*meshes, model)) is not None:
        hosts = set(map(cluster.host, meshes[0].ids))
        near = [[cluster.host(device) in hosts] for device in meshes[1].ids]
        lines = np.where(near, np.minimum(cluster.near, cluster.far), cluster.far)
    item, start = item_bytes(leaving.layout.dtype), exchange_start(model)
    least = np.empty((len(leaving.cuts), len(arriving.cuts)))
    for row in range(len(leaving.cuts)):
        present = np.ones((len(arriving.cuts), len(places_in_both)))
        for (lo_a, hi_a), (lo_b, hi_b) in sides:
            present *= shared((lo_a[row, at_a], hi_a[row, at_a]), (lo_b[:, at_b], hi_b[:, at_b]))
        lacking = want.copy()
        lacking[:, at_b] -= present
        amount = lacking.sum(axis=1, keepdims=True) if on_bus else lacking
        seconds = (amount > 0) * (lines[:, 0] + start) + amount * item * lines[:, 1]
        least[row] = seconds.max(axis=1)
    return least

"""The formulas of the cost model written out once more, from the boxes of every device.

Slow and plain on purpose: every device and every link is looked at, and nothing of the library's
own arithmetic is used but the boxes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from math import ceil, prod
from operator import ne

import networkx as nx

from shardspec import CostModel, DeviceMesh, Layout, ShardingSpec
from shardspec.boxes import Box, box_size, intersect
from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from shardspec.dtypes import item_bytes
from shardspec.layout.graph import explore, spec_of


def link(mesh: DeviceMesh, model: CostModel, a: int, b: int) -> tuple[float, float]:
    """Return latency and seconds a byte between two different devices."""
    pairs = enumerate(zip(mesh.coordinates(a), mesh.coordinates(b), strict=True))
    return slowest(model, [axis for axis, (here, there) in pairs if here != there])


def slowest(model: CostModel, axes: Iterable[int]) -> tuple[float, float]:
    links = [model.links[axis] for axis in axes]
    return max(x.latency_s for x in links), max(x.seconds_per_byte for x in links)


@lru_cache(maxsize=512)
def boxes_of(layout: Layout) -> dict[int, Box]:
    return layout.boxes()


def largest_shard(layout: Layout) -> int:
    return max(map(box_size, boxes_of(layout).values())) * item_bytes(layout.dtype)


@lru_cache(maxsize=1)
def exchanged(
    before: Layout, after: Layout, model: CostModel
) -> list[tuple[int, tuple[int, ...], int]]:
    """Return per piece that travels who wants it, who may send it, and its bytes.

    Any holder may, but those that are further along an axis slower than one that cuts the source.
    """
    mesh = before.mesh
    cut = [axis for axis in map(int, before.spec.axes) if mesh.shape[axis] > 1]
    slow = [
        axis
        for axis, n in enumerate(mesh.shape)
        if n > 1
        and any(slowest(model, [axis])[i] > slowest(model, [c])[i] for c in cut for i in (0, 1))
    ]
    holders: dict[Box, list[int]] = defaultdict(list)
    for device, box in boxes_of(before).items():
        holders[box].append(device)
    pieces = []
    at = {device: [mesh.coordinates(device)[axis] for axis in slow] for device in mesh.ids}
    for receiver, wanted in boxes_of(after).items():
        for box, devices in holders.items():
            piece = intersect(wanted, box)
            if piece is not None and receiver not in devices:
                away = {device: sum(map(ne, at[device], at[receiver])) for device in devices}
                near = tuple(device for device in devices if away[device] == min(away.values()))
                pieces.append((receiver, near, box_size(piece) * item_bytes(before.dtype)))
    return pieces


def exchange(before: Layout, after: Layout, model: CostModel) -> float:
    """Return the seconds of an exchange: replicas send as much as each other, and whole pieces."""
    pieces = exchanged(before, after, model)
    links = [
        min(link(before.mesh, model, sender, receiver) for sender in near)
        for receiver, near, _ in pieces
    ]
    alphas = sorted({alpha for alpha, _ in links}, reverse=True)
    busy: dict[tuple[str, int], float] = defaultdict(float)
    messages: dict[tuple[str, int], float] = defaultdict(float)
    for device in before.mesh.ids:
        sends = [(piece, at) for piece, at in zip(pieces, links, strict=True) if device in piece[1]]
        counted = 0
        for alpha in alphas:
            share = sum(1 / len(near) for (_, near, _), at in sends if at[0] >= alpha)
            busy["sends", device] += (ceil(share - 1e-9) - counted) * alpha
            counted = ceil(share - 1e-9)
        messages["sends", device] = counted
        busy["sends", device] += sum(n * at[1] / len(near) for (_, near, n), at in sends)
    for (receiver, _, num_bytes), (alpha, beta) in zip(pieces, links, strict=True):
        busy["receives", receiver] += alpha + num_bytes * beta
        messages["receives", receiver] += 1
    if model.link_model == "shared-bus":
        total = sum(num_bytes for *_, num_bytes in pieces)
        return max(messages.values()) * alphas[0] + total * max(beta for _, beta in links)
    return max(busy.values())


@lru_cache(maxsize=1)
def permuted(before: Layout, after: Layout, model: CostModel) -> list[tuple[float, float]] | None:
    """Return the links used by the best assignment of senders to receivers; None if none exists.

    The best has the smallest slowest link, found by matching over more and more links.
    """
    held, wanted = boxes_of(before), boxes_of(after)
    if Counter(held.values()) != Counter(wanted.values()):
        return None
    size = largest_shard(before)
    costs = {
        (sender, receiver): (0.0, 0.0)
        if sender == receiver or not box_size(wanted[receiver])
        else link(before.mesh, model, sender, receiver)
        for sender, has in held.items()
        for receiver, wants in wanted.items()
        if has == wants
    }
    for most in sorted({alpha + size * beta for alpha, beta in costs.values()}):
        graph = nx.Graph()
        graph.add_nodes_from(("to", device) for device in wanted)
        graph.add_edges_from(
            (("from", sender), ("to", receiver))
            for (sender, receiver), (alpha, beta) in costs.items()
            if alpha + size * beta <= most
        )
        tops = {("to", device) for device in wanted}
        matching = nx.bipartite.maximum_matching(graph, tops) if graph.edges else {}
        if all(top in matching for top in tops):
            return [costs[matching[top][1], top[1]] for top in tops]
    raise AssertionError("each box is held as often before as after")


def seconds(step: Step, before: Layout, after: Layout, model: CostModel) -> float:
    """Return what a step costs by the table of the design."""
    mesh = before.mesh
    held = largest_shard(before)
    n = prod(mesh.shape[axis] for axis in step.axes)
    bus = model.link_model == "shared-bus"
    match step:
        case Slice():
            return 0.0
        case Permute():
            used = permuted(before, after, model)
            assert used is not None, "only called for a permute that exists"
            if bus:
                ends = zip(boxes_of(before).values(), boxes_of(after).values(), strict=True)
                moving = sum(a != b and box_size(b) > 0 for a, b in ends)
                return max(a for a, _ in used) + max(b for _, b in used) * moving * held
            return max(alpha + held * beta for alpha, beta in used)
        case Exchange():
            return exchange(before, after, model)
        case AllGather() | ReduceScatter() | AllReduce() | AllToAll():
            long = [axis for axis in step.axes if mesh.shape[axis] > 1]
            alpha, beta = slowest(model, long) if long else (0.0, 0.0)
    share: float
    match step:
        case AllGather():
            messages, share = n - 1, n - 1
        case ReduceScatter() | AllToAll():
            messages, share = n - 1, (n - 1) / n
        case AllReduce():
            messages, share = 2 * (n - 1), 2 * (n - 1) / n
    if bus:
        return messages * alpha + mesh.size() * share * held * beta
    if isinstance(step, AllToAll):
        me, *_ = mesh.ids
        peers = [link(mesh, model, me, p) for p in mesh.group(me, step.axes) if p != me]
        return sum(alpha + held / n * beta for alpha, beta in peers)
    return messages * alpha + share * held * beta


def received(step: Step, before: Layout, after: Layout) -> int:
    """Return the bytes that the busiest device receives, for cuts that divide evenly."""
    mesh, one = before.mesh, item_bytes(before.dtype)
    n = prod(mesh.shape[axis] for axis in step.axes)
    if isinstance(step, AllReduce):  # a reduce-scatter of an n-th, then an all-gather of it
        return 2 * (n - 1) * largest_shard(after) // n
    if isinstance(step, ReduceScatter):  # n - 1 addends of the part that is kept
        return (n - 1) * largest_shard(after)
    counts = []
    for device in mesh.ids:
        kept = intersect(before.box(device), after.box(device))
        counts.append(box_size(after.box(device)) - (box_size(kept) if kept else 0))
    return max(counts) * one


def priced_graph(tensor: Layout, model: CostModel) -> nx.DiGraph:
    """Return every spec that can follow a tensor's, joined by every step, with its seconds.

    Nodes are specs as text. The tensor's own cuts play no part, only what is pending.
    """
    dims = tensor.spec.dims
    start = ShardingSpec(dims, partial=tensor.spec.partial)
    space = explore(tensor.mesh.ndim, start)
    layouts = {state: tensor.with_spec(spec_of(state)) for state in space.nodes}
    graph = nx.DiGraph()
    graph.add_nodes_from(str(layout.spec) for layout in layouts.values())

    def join(step: Step, before: Layout, after: Layout) -> None:
        ends = str(before.spec), str(after.spec)
        cost = seconds(step, before, after, model)
        if not graph.has_edge(*ends) or cost < graph.edges[ends]["seconds"]:
            graph.add_edge(*ends, seconds=cost)

    for a, b, step in space.edges(data="step"):
        join(step, layouts[a], layouts[b])
    whole = [layout for layout in layouts.values() if not layout.spec.partials]
    axes = tuple(range(tensor.mesh.ndim))
    for before in whole:
        for after in whole:
            if before != after and exchanged(before, after, model):
                join(Exchange(axes), before, after)
            if before != after and permuted(before, after, model) is not None:
                join(Permute(axes), before, after)
    return graph

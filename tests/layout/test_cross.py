"""Plans between meshes: the cheapest, by looking at every way; and what they move and hold."""

from itertools import product
from operator import gt
from typing import Any

import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.comm.cost import models_on, slowest_costs
from shardspec.comm.curves import Link
from shardspec.comm.steps import AllReduce, Exchange, ReduceScatter
from shardspec.errors import LayoutError
from shardspec.layout.cross import (
    common_mesh,
    common_model,
    exchange_seconds,
    live_bytes,
    received_bytes,
)
from tests.conversions import partial_specs, plain_specs

FAST, SLOW = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9)


def mesh(ids, shape, links=None, link_model="ring"):
    links = links or (SLOW, *(FAST,) * (len(shape) - 1))
    return DeviceMesh(
        ids,
        shape,
        mesh_alpha=[link.latency_s for link in links],
        mesh_beta=[link.seconds_per_byte for link in links],
        link_model=link_model,
    )


PAIRS = {
    "other shape": (mesh(range(6), (2, 3)), mesh(range(6), (3, 2))),
    "one axis": (mesh(range(6), (2, 3)), mesh(range(6), (6,))),
    "permuted": (mesh(range(4), (2, 2)), mesh([3, 2, 0, 1], (2, 2))),
    "more": (mesh(range(4), (2, 2)), mesh(range(6), (2, 3))),
    "fewer": (mesh(range(6), (2, 3)), mesh([5, 2, 0], (3,))),
    "disjoint": (mesh(range(4), (2, 2)), mesh(range(4, 10), (3, 2))),
    "axes of one": (mesh([3, 1], (1, 2)), mesh([1, 3], (2, 1), (FAST, SLOW))),
    "to axes of one": (mesh(range(6), (2, 3)), mesh(range(6), (1, 3, 2))),
    "overlapping": (mesh(range(4), (2, 2)), mesh([2, 3, 9], (3,))),
    "an axis of one": (mesh(range(2), (1, 2)), mesh([1, 2, 0], (3, 1))),
    "one device": (mesh([0], (1, 1)), mesh([1], (1,))),
    "on a bus": (
        mesh(range(4), (2, 2), link_model="shared-bus"),
        mesh(range(2, 8), (2, 3), link_model="shared-bus"),
    ),
}


def by_hand(before, after, model):
    """Seconds of the exchange, from who sends what: the definition, device by device."""
    both = common_mesh(before.mesh, after.mesh)
    held, wanted = before.boxes(), after.boxes()
    sent = dict.fromkeys(both.ids, 0)
    sends: dict[int, list[Any]] = {d: [] for d in both.ids}
    gets: dict[int, list[Any]] = {d: [] for d in both.ids}

    def apart(a, b):
        here, there = both.coordinates(a), both.coordinates(b)
        return [i for i in range(both.ndim) if here[i] != there[i]]

    # Replicas share, but for those further along an axis slower than another.
    costs = [slowest_costs(model, [axis]) for axis in range(both.ndim)]
    long = [axis for axis in range(both.ndim) if both.shape[axis] > 1]
    slow = {axis for axis in long for other in long if any(map(gt, costs[axis], costs[other]))}
    item, message = 4, 1 << 17
    for device, box in wanted.items():
        cells = sorted({cell for cell in held.values() if all(lo < hi for lo, hi in cell)})
        for cell in cells:
            amount = 1
            for (lo, hi), (start, end) in zip(cell, box, strict=True):
                amount *= max(0, min(hi, end) - max(lo, start))
            if not amount:
                continue
            holders = [d for d in before.mesh.ids if held[d] == cell]
            nearest = min(holders, key=lambda d: (len(slow & {*apart(d, device)}), sent[d]))
            if device not in holders:
                sent[nearest] += message + amount
                sends[nearest].append((device, amount * item))
                gets[device].append((nearest, amount * item))
    pairs = [(a, b, n) for a, to in sends.items() for b, n in to]
    if not pairs:
        return 0.0
    links = {(a, b): slowest_costs(model, apart(a, b)) for a, b, _ in pairs}
    if both not in (before.mesh, after.mesh) and model.link_model == "ring":
        # Of a new row only hosts are known: devices that differ along a fast axis of a mesh.
        near = [
            {a, b}
            for of in (before.mesh, after.mesh)
            for a, b in product(of.ids, repeat=2)
            if all(
                of.mesh_beta[axis] == FAST.seconds_per_byte
                for axis in range(of.ndim)
                if of.coordinates(a)[axis] != of.coordinates(b)[axis]
            )
        ]
        for pair in links:
            link = FAST if set(pair) in near else SLOW
            links[pair] = link.latency_s, link.seconds_per_byte
    if model.link_model == "shared-bus":
        messages = max(len(peers) for table in (sends, gets) for peers in table.values())
        slowest = [max(link[i] for link in links.values()) for i in (0, 1)]
        return messages * slowest[0] + sum(n for *_, n in pairs) * slowest[1]
    return max(
        max(
            sum(links[device, b][0] + n * links[device, b][1] for b, n in sends[device]),
            sum(links[a, device][0] + n * links[a, device][1] for a, n in gets[device]),
        )
        for device in both.ids
    )


def _cases():
    """Yield meshes, shapes, and one of how many pairs is planned.

    Even sizes but for one, and three axes, which have many specs, are exhaustive.
    """
    for name, shape in product(PAIRS, [(12, 12), (512, 256), (5, 7)]):
        if name != "to axes of one" and (shape == (5, 7) or (name, shape[0]) == ("one axis", 512)):
            yield pytest.param(name, shape, 5, id=f"{name}-{shape} sampled")
        yield pytest.param(name, shape, 1, marks=pytest.mark.exhaustive, id=f"{name}-{shape}")


@pytest.mark.parametrize(("name", "shape", "every"), list(_cases()))
def test_plan_is_the_cheapest_of_all_ways(name, shape, every):
    here, there = PAIRS[name]
    model = common_model(here, there, *models_on([here, there]).values())
    converter = LayoutConverter()
    leave = [Layout(here, spec, shape, "f32") for spec in plain_specs(2, here.ndim)]
    arrive = [Layout(there, spec, shape, "f32") for spec in plain_specs(2, there.ndim)]
    across = {(a, b): by_hand(a, b, model) for a, b in product(leave, arrive)}
    some = list(across)[::every]
    for a, b in some:
        assert exchange_seconds(a, b, model) == pytest.approx(across[a, b], rel=1e-12)
    pairs = [pair for side in (leave, arrive) for pair in product(side, repeat=2)]
    seconds_of_pairs = converter.costs(*zip(*pairs, strict=True)).tolist()
    inside = dict(zip(pairs, seconds_of_pairs, strict=True))
    # Whatever is done before, an exchange is followed by the cheapest way on from where it ends.
    at = {
        (source, b): min(inside[source, a] + across[a, b] for a in leave)
        for source, b in product(leave, arrive)
    }
    for source, target in some:
        best = min(at[source, b] + inside[b, target] for b in arrive)
        plan = converter.plan(source, target)
        assert plan.cost_seconds == pytest.approx(best, rel=1e-9, abs=2e-11)
        assert plan.source == source
        assert plan.target == target
        assert sum(plan.step_seconds) == plan.cost_seconds


def test_what_is_pending_is_finished_before_the_way_across():
    here, there = PAIRS["more"]
    for spec, target in list(product(partial_specs(2, 2, ops=("sum",)), plain_specs(2, 2)))[::4]:
        source = Layout(here, spec, (12, 12), "f32")
        plan = LayoutConverter().plan(source, Layout(there, target, (12, 12), "f32"))
        kinds = [type(step) for step in plan.steps]
        assert kinds.count(Exchange) >= 1
        finished = [i for i, kind in enumerate(kinds) if kind in (AllReduce, ReduceScatter)]
        crossing = next(
            i
            for i in range(len(kinds))
            if plan.layouts[i].mesh == here and plan.layouts[i + 1].mesh == there
        )
        assert finished
        assert max(finished) < crossing


def test_nothing_moves_where_the_same_devices_hold_the_same_boxes():
    rows = Layout(DeviceMesh(range(8), (2, 4)), "[S01,R]", (16, 3), "f32")
    line = Layout(DeviceMesh(range(8), (8,)), "[S0,R]", (16, 3), "f32")
    plan = LayoutConverter().plan(rows, line)
    assert plan.steps == (Exchange(()),)
    assert (plan.cost_seconds, plan.bytes_received) == (0.0, 0)


def test_bytes_that_are_lacking_and_held():
    left, right = DeviceMesh([0, 1], (2,)), DeviceMesh([1, 2], (2,))
    before, after = Layout(left, "[S0]", (8,), "int8"), Layout(right, "[S0]", (8,), "int8")
    assert received_bytes(before, after) == 4
    assert live_bytes(before, after) == 8  # device 1 holds the second half, then the first
    scalar = Layout(left, "[]", (), "f64"), Layout(right, "[]", (), "f64")
    assert received_bytes(*scalar) == 8
    assert live_bytes(*scalar) == 16


def test_a_plan_between_meshes_says_what_is_held_at_most_and_takes_no_bound():
    here, there = PAIRS["more"]
    source, target = (
        Layout(here, "[R,R]", (12, 12), "f32"),
        Layout(there, "[S0,S1]", (12, 12), "f32"),
    )
    plan = LayoutConverter().plan(source, target)
    assert plan.peak_bytes == max(plan.live_bytes) >= 12 * 12 * 4 + 6 * 4 * 4
    with pytest.raises(LayoutError, match=r"max_bytes is for conversions on one mesh, .*another"):
        LayoutConverter().plan(source, target, max_bytes=10 * plan.peak_bytes)


def test_conversions_between_meshes_that_are_refused():
    here, there = PAIRS["more"]
    source = Layout(here, "[S0|P1]", (12,), "f32")
    with pytest.raises(LayoutError, match="cannot stay pending on another mesh"):
        LayoutConverter().plan(source, Layout(there, "[R|P1]", (12,), "f32"))
    with pytest.raises(LayoutError, match=r"global shape \(12,\) differs from \(13,\)"):
        LayoutConverter().plan(source, Layout(there, "[R]", (13,), "f32"))
    with pytest.raises(LayoutError, match="dtype float32 differs from float64"):
        LayoutConverter().plan(source, Layout(there, "[R]", (12,), "f64"))
    with pytest.raises(LayoutError, match="cost model is for a mesh of shape"):
        LayoutConverter(target_model=CostModel((4,), (FAST,))).plan(
            source, Layout(there, "[R]", (12,), "f32")
        )


def test_the_common_mesh_is_that_with_more_axes_or_a_line_of_all():
    node, line = DeviceMesh(range(8), (2, 4)), DeviceMesh(range(8), (8,))
    assert common_mesh(node, line) == node
    assert common_mesh(line, node) == node
    assert common_mesh(node, DeviceMesh([6, 7], (2,))) == node
    assert common_mesh(DeviceMesh([6, 7], (2,)), node) == node
    apart = common_mesh(node, DeviceMesh([9, 8, 0], (3,)))
    assert (apart.ids, apart.shape) == (tuple(range(10)), (10,))


def test_meshes_of_many_devices_take_the_straight_way():
    """Too many specs to consider each: the tensor leaves and arrives as it is."""
    many = DeviceMesh(range(64), (2,) * 6)
    source = Layout(many, "[S012,S345,R]", (64, 64, 64), "f32")
    target = Layout(DeviceMesh(range(64, 128), (2,) * 6), "[S345,S012,R]", (64, 64, 64), "f32")
    plan = LayoutConverter().plan(source, target)
    assert plan.steps == (Exchange(()),)
    assert plan.bytes_received == 64**3 * 4 // 64

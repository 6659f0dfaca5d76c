from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec, plan_reshard
from shardspec.comm.curves import Link, bytes_received
from shardspec.comm.presets import assumed_cluster
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice
from shardspec.errors import LayoutError, MeshError
from shardspec.layout.graph import explore, spec_of
from tests.layout import formulas

SLOW, FAST = Link(1e-5, 2e-11, "slow"), Link(2e-6, 3e-12, "fast")
RINGS = CostModel((2, 4), (SLOW, FAST))
BUS = CostModel((2, 4), (SLOW, FAST), "shared-bus")
MB = 1_000_000


@pytest.mark.parametrize(
    ("step", "rings", "bus", "received"),
    [
        # Fast axis of 4: 3 messages of 2 µs. A megabyte takes 3 µs on it, and 20 µs on the slow.
        (Slice(0, (0, 1)), 0, 0, 0),
        (AllGather(0, (1,)), 3 * 2 + 3 * 3, 3 * 2 + 8 * 3 * 3, 3 * MB),
        (AllGather(0, (0,)), 10 + 20, 10 + 8 * 20, MB),
        (AllGather(0, (0, 1)), 7 * 10 + 7 * 20, 7 * 10 + 8 * 7 * 20, 7 * MB),
        (ReduceScatter(0, (1,), "sum"), 3 * 2 + 3 * 3 / 4, 3 * 2 + 8 * 3 * 3 / 4, MB * 3 // 4),
        (ReduceScatter(1, (1, 0), "max"), 7 * 10 + 20 * 7 / 8, 70 + 8 * 20 * 7 / 8, MB * 7 // 8),
        (AllReduce((0,), "avg"), 2 * 10 + 2 * 20 / 2, 2 * 10 + 8 * 2 * 20 / 2, MB),
        (AllReduce((0, 1), "sum"), 14 * 10 + 14 * 20 / 8, 140 + 8 * 14 * 20 / 8, MB * 14 // 8),
        (AllToAll(0, 1, (1,), (1,)), 3 * 2 + 3 * 3 / 4, 3 * 2 + 8 * 3 * 3 / 4, MB * 3 // 4),
        # Of 7 peers, 3 are reached by the fast axis alone, 4 cross the slow one.
        (
            AllToAll(0, 1, (0, 1), (1, 0)),
            3 * 2 + 4 * 10 + (3 * 3 + 4 * 20) / 8,
            7 * 10 + 8 * 20 * 7 / 8,
            MB * 7 // 8,
        ),
    ],
    ids=str,
)
def test_the_table_by_hand(step, rings, bus, received):
    assert RINGS.step_seconds(step, MB) == pytest.approx(rings * 1e-6, rel=1e-12)
    assert BUS.step_seconds(step, MB) == pytest.approx(bus * 1e-6, rel=1e-12)
    assert bytes_received(step, (2, 4), MB) == received


@pytest.mark.parametrize("link_model", ["ring", "shared-bus"])
@pytest.mark.parametrize("start", ["[R,R]", "[R,R|P012]"])
def test_every_collective_against_the_boxes(start, link_model):
    mesh = DeviceMesh(range(24), (2, 3, 4))
    model = CostModel(mesh.shape, (SLOW, Link(7e-6, 1e-12), FAST), link_model)
    tensor = Layout(mesh, start, (240, 48), "int32")
    steps = 0
    for before, after, step in explore(3, ShardingSpec.parse(start)).edges(data="step"):
        here, there = (tensor.with_spec(spec_of(state)) for state in (before, after))
        wanted = formulas.seconds(step, here, there, model)
        held = here.max_local_bytes
        assert model.step_seconds(step, held) == pytest.approx(wanted, rel=1e-12)
        ((fixed, per_byte),) = model.lines(step)
        assert fixed + per_byte * held == model.step_seconds(step, held)
        if not isinstance(step, Slice):
            assert bytes_received(step, mesh.shape, held) == formulas.received(step, here, there)
        steps += 1
    assert steps == {"[R,R]": 390, "[R,R|P012]": 787}[start]


def test_the_order_of_axes_does_not_matter_to_the_price():
    model = CostModel((2, 3, 4), (SLOW, FAST, SLOW))
    for count in (1, 2, 3):
        for axes in combinations(range(3), count):
            prices = {
                model.step_seconds(AllToAll(0, 1, leaving, arriving), MB)
                for leaving in permutations(axes)
                for arriving in permutations(axes)
            }
            assert len(prices) == 1


def test_an_axis_of_one_costs_nothing():
    model = CostModel((1, 4), (SLOW, FAST))
    for step in (
        AllGather(0, (0,)),
        AllToAll(0, 1, (0,), (0,)),
        ReduceScatter(0, (0,), "sum"),
        AllReduce((0,), "sum"),
    ):
        assert model.step_seconds(step, MB) == 0
        assert bytes_received(step, (1, 4), MB) == 0


def test_bytes_received_are_rounded_up():
    assert bytes_received(ReduceScatter(0, (0,), "sum"), (3,), 10) == 7
    assert bytes_received(AllReduce((0,), "sum"), (3,), 10) == 14


def test_the_model_of_a_mesh():
    given = DeviceMesh(range(8), (2, 4), mesh_alpha=(1e-5, 2e-6), mesh_beta=(2e-11, 3e-12))
    assert CostModel.of_mesh(given).links == (Link(1e-5, 2e-11), Link(2e-6, 3e-12))
    bus = DeviceMesh(range(8), (2, 4), link_model="shared-bus")
    inside = assumed_cluster().inside
    assert CostModel.of_mesh(bus).links == (inside, inside)
    assert CostModel.of_mesh(bus).copy_s == 0


def test_links_in_words():
    assert str(SLOW) == "slow: 10 µs, 50 GB/s"
    assert str(Link(0.0, 0.0)) == "given: 0 µs, free"
    assert str(assumed_cluster().inside) == (
        "assumed h100-nvswitch (measured for 2, 4, 8 devices; otherwise 23 µs + 249 GB/s)"
    )


@pytest.mark.parametrize(
    "number",
    [float("nan"), float("inf"), -1e-9, 1.7e308, 1.1e9, 5e-324, True, "1e-5", 10**400, None, [1]],
)
def test_links_that_are_none(number):
    for numbers in ((number, 0.0), (0.0, number)):
        with pytest.raises(MeshError, match=r"^link 'given' has latency .* none negative$"):
            Link(*numbers)
    with pytest.raises(MeshError, match=r"^link 'x' has latency .* none negative$"):
        Link(0.0, 0.0, "x", start_s=number)
    with pytest.raises(MeshError, match=r"^copy_s is .* s a byte; give a finite number"):
        CostModel((2, 2), (FAST, FAST), copy_s=number)
    for links in ((FAST,), (FAST,) * 3, ()):
        with pytest.raises(
            MeshError, match=r"^\d links for the 2 axes of a mesh of shape \(2, 2\)"
        ):
            CostModel((2, 2), links)


@pytest.mark.parametrize("link_model", ["ring", "shared-bus"])
@pytest.mark.parametrize("number", [0, 1e-100, np.float32(1e-9), 1e9])
def test_the_dearest_links_still_price_the_largest_tensors(number, link_model):
    mesh, links = DeviceMesh(range(8), (2, 4)), (Link(number, number, "x", number),) * 2
    model = CostModel((2, 4), links, link_model, copy_s=number)
    assert {type(value) for value in (links[0].latency_s, model.copy_s)} == {float}
    largest = Layout(mesh, "[S0,R]", (2**40, 2**23 - 1), "int8")
    converter = LayoutConverter(model)
    for target in ("[R,S0]", "[R,R]", "[S10,R]"):
        assert converter.plan(largest, target).cost_seconds < 1e50
    table = converter.cost_table(mesh, (2**40, 2**18), "int8", partial=("sum",))
    assert (table.bytes_received >= -1).all()
    with pytest.raises(LayoutError, match=r"more than 2.58 bytes, too many"):
        converter.cost_table(mesh, (2**40, 2**19), "int8")


@pytest.mark.parametrize("bound", [float("nan"), float("inf"), -1, True, "5", 0.5, [1]])
def test_bounds_that_are_no_number_of_bytes(bound):
    layout = Layout(DeviceMesh(range(4)), "[S0]", (8,), "float32")
    for act in (
        lambda: LayoutConverter().plan(layout, "[R]", max_bytes=bound),
        lambda: LayoutConverter().alternatives(layout, "[R]", 2, max_bytes=bound),
        lambda: plan_reshard({"w": layout}, {"w": layout}, max_bytes=bound),
    ):
        with pytest.raises(LayoutError, match=r"^max_bytes is .*; give a whole number of bytes"):
            act()
    numbers: tuple[Any, ...] = (48, 48.0, np.int64(48), 2**2000)
    for enough in numbers:
        assert LayoutConverter().plan(layout, "[R]", max_bytes=enough).peak_bytes == 40

"""The next best plans, against every path that there is, found by plain depth-first search."""

import time
from functools import cache
from itertools import pairwise, permutations
from math import factorial, inf, prod

import networkx as nx
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec
from shardspec.comm.curves import Link
from shardspec.comm.steps import Slice
from shardspec.errors import LayoutError
from shardspec.layout.graph import explore
from tests.layout import formulas

FAST, SLOW = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9)
TIE = 1e-12
"""Seconds that the search adds to each move."""


def model_of(mesh_shape, link_model="ring"):
    return CostModel(mesh_shape, (SLOW, *[FAST] * (len(mesh_shape) - 1)), link_model)


def moves_of(plan):
    """Return what tells plans apart: both ends of every step that communicates."""
    return tuple(
        (str(a.spec), str(b.spec))
        for step, (a, b) in zip(plan.steps, pairwise(plan.layouts), strict=True)
        if not isinstance(step, Slice)
    )


@cache
def is_cut(before, after):
    """Whether slices alone lead from one spec to the other."""
    a, b = ShardingSpec.parse(before), ShardingSpec.parse(after)
    pairs = zip(a.dim_specs, b.dim_specs, strict=True)
    return a.partials == b.partials and all(y.axes[: len(x.axes)] == x.axes for x, y in pairs)


@cache
def orders_of(before, after):
    """In how many orders single slices lead from one spec to the other."""
    a, b = ShardingSpec.parse(before), ShardingSpec.parse(after)
    counts = [len(y.axes) - len(x.axes) for x, y in zip(a.dim_specs, b.dim_specs, strict=True)]
    return factorial(sum(counts)) // prod(map(factorial, counts))


def every_plan(graph, source, target, to_go, bound):
    """Return the seconds of all plans up to a bound, by the moves that communicate.

    All simple paths of single moves are walked. A plan counts if each order of its slices makes
    such a path: so slices come to no layout twice whatever their order.
    """
    found: dict[tuple[tuple[str, str], ...], tuple[int, int, float]] = {}

    def walk(path, seconds):
        here = path[-1]
        if here == target:
            # Runs of slices as (first, last), all else as it is.
            runs: list[tuple[str, str] | None] = []
            moves = []
            for a, b in pairwise(path):
                if not is_cut(a, b):
                    moves.append((a, b))
                    runs.append(None)
                elif runs and runs[-1] is not None:
                    runs[-1] = (runs[-1][0], b)
                else:
                    runs.append((a, b))
            orders = prod(orders_of(*run) for run in runs if run is not None)
            paths, _, _ = found.get(tuple(moves), (0, 0, 0))
            found[tuple(moves)] = paths + 1, orders, seconds
            return
        for after, data in graph.adj[here].items():
            total = seconds + data["seconds"] + TIE
            if after not in path and total + to_go.get(after, inf) <= bound:
                walk([*path, after], total)

    walk([source], 0.0)
    return {m: seconds for m, (paths, orders, seconds) in found.items() if paths == orders}


def check_pair(graph, converter, layout, target, count):
    source = str(layout.spec)
    to_go = nx.single_source_dijkstra_path_length(
        graph.reverse(copy=False), target, weight=lambda _a, _b, data: data["seconds"] + TIE
    )
    bound = to_go[source] * 1.01 + TIE / 2
    while True:
        wanted = every_plan(graph, source, target, to_go, bound)
        if len(wanted) >= count or bound > 1:  # seconds: there are no more
            break
        bound = bound * 1.2 + 1e-7
    in_order = sorted(wanted.values())[:count]
    plans = converter.alternatives(layout, target, count)
    assert plans[0] == converter.plan(layout, target)
    assert len(plans) == len({moves_of(plan) for plan in plans}) == len(in_order)
    for plan, seconds in zip(plans, in_order, strict=True):
        assert moves_of(plan) in wanted or seconds == pytest.approx(in_order[-1], rel=1e-9)
        slices = sum(len(s.axes) for s in plan.steps if isinstance(s, Slice))
        moves = slices + sum(not isinstance(s, Slice) for s in plan.steps)
        cost = plan.cost_seconds + moves * TIE
        assert cost == pytest.approx(seconds, rel=1e-9, abs=TIE / 10), plan
        assert len(set(plan.layouts)) == len(plan.layouts)
        assert (plan.source, str(plan.target.spec)) == (layout, target)


@pytest.mark.parametrize(
    "link_model", ["ring", pytest.param("shared-bus", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("shape", [(600, 1200), (7, 5)])
@pytest.mark.parametrize("pending", ["", "|P1", "|P01"])
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_pair_of_two_axes(link_model, shape, pending, every):
    mesh = DeviceMesh(range(6), (2, 3))
    tensor = Layout(mesh, f"[R,R{pending}]", shape, "float32")
    model = model_of(mesh.shape, link_model)
    converter = LayoutConverter(model)
    graph = formulas.priced_graph(tensor, model)
    pairs = [
        (source, target)
        for source, target in permutations(graph, 2)
        if ShardingSpec.parse(source).partial == tensor.spec.partial
    ]
    assert len(pairs) == {"": 110, "|P1": 39, "|P01": 17}[pending]
    for source, target in pairs[::every]:
        check_pair(graph, converter, tensor.with_spec(source), target, 6)


@pytest.mark.parametrize(
    ("shape", "pending"),
    [
        pytest.param((64, 128), "", marks=pytest.mark.exhaustive),
        ((7, 5), ""),
        pytest.param((64, 64), "|P2", marks=pytest.mark.exhaustive),
    ],
)
def test_pairs_of_three_axes(shape, pending):
    mesh = DeviceMesh(range(8), (2, 2, 2))
    tensor = Layout(mesh, f"[R,R{pending}]", shape, "float32")
    model = model_of(mesh.shape)
    converter = LayoutConverter(model)
    graph = formulas.priced_graph(tensor, model)
    sources = [s for s in graph if ShardingSpec.parse(s).partial == tensor.spec.partial]
    for number, source in enumerate(sources[::5]):
        for target in list(graph)[number % 11 :: 11]:
            if target != source:
                check_pair(graph, converter, tensor.with_spec(source), target, 5)


def test_all_that_there_are():
    """Two layouts have one way to and fro; four axes at rank 1 are asked for more than exist."""
    mesh = DeviceMesh(range(2), (2,))
    layout = Layout(mesh, "[S0]", (8,), "f32")
    assert len(LayoutConverter().alternatives(layout, "[R]", 50)) == 1
    assert len(LayoutConverter().alternatives(layout, "[S0]", 50)) == 1
    layout = Layout(mesh, "[S0,R]", (4096, 4096), "f32")
    plans = LayoutConverter().alternatives(layout, "[R,S0]", 50)
    assert [[str(x.spec) for x in plan.layouts] for plan in plans] == [
        ["[S0,R]", "[R,S0]"],
        ["[S0,R]", "[R,R]", "[R,S0]"],
    ]


def test_under_a_bound_on_bytes():
    model = model_of((2, 3))
    layout = Layout(DeviceMesh(range(6), (2, 3)), "[S0,R]", (60, 120), "f32")
    converter = LayoutConverter(model)
    free = converter.alternatives(layout, "[R,S01]", 20)
    bound = sorted(plan.peak_bytes for plan in free)[10]
    bounded = converter.alternatives(layout, "[R,S01]", 5, max_bytes=bound)
    assert list(bounded) == [plan for plan in free if plan.peak_bytes <= bound][:5]
    assert bounded != free[:5]
    with pytest.raises(LayoutError, match="give at least "):
        converter.alternatives(layout, "[R,S01]", 5, max_bytes=10)


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((64, 64, 64, 64), "[S0,S12,R,S3]", "[S21,R,S0,R]"),
        pytest.param((0, 64, 3, 5), "[S0,S12,R,S3]", "[S21,R,S0,R]", marks=pytest.mark.exhaustive),
        # The best is a permute, the next cost seven times as much: many ways lie between.
        ((7, 5, 33, 3), "[S20,R,S31,R]", "[S30,R,S21,R]"),
    ],
)
def test_four_axes_and_rank_4_in_a_second(shape, source, target):
    mesh = DeviceMesh(range(16), (2, 2, 2, 2))
    converter = LayoutConverter(model_of(mesh.shape))
    layout = Layout(mesh, source, shape, "f32")
    converter.plan(layout, target)  # prices all moves, once
    start = time.perf_counter()
    plans = converter.alternatives(layout, target, 10)
    assert time.perf_counter() - start < 10  # a tenth of a second where nothing else runs
    assert len({moves_of(plan) for plan in plans}) == 10
    costs = [plan.cost_seconds for plan in plans]
    assert costs == pytest.approx(sorted(costs), abs=1e-11)
    assert converter.alternatives(layout, target, 10) == plans


@pytest.mark.parametrize(
    ("mesh_shape", "target", "count", "message"),
    [
        ((2, 2), "[R,S0]", 0, "cannot list 0 plans; ask for at least 1"),
        (
            (2,) * 6,
            "[R,S0]",
            2,
            "alternatives: 11743 layouts (mesh 2x2x2x2x2x2, 2 dims) are too many for this search, "
            "whose limit is 1500; ask for the plan alone",
        ),
    ],
)
def test_what_cannot_be_listed(mesh_shape, target, count, message):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    layout = Layout(mesh, "[S0,R]", (64, 64), "f32")
    with pytest.raises(LayoutError) as caught:
        LayoutConverter().alternatives(layout, target, count)
    assert str(caught.value) == message
    assert LayoutConverter().alternatives(layout, target, 1) == (
        LayoutConverter().plan(layout, target),
    )


def test_between_meshes_there_is_one():
    here, there = DeviceMesh(range(4), (2, 2)), DeviceMesh(range(4, 8), (4,))
    source, target = (Layout(mesh, "[S0,R]", (8, 8), "f32") for mesh in (here, there))
    assert len(LayoutConverter().alternatives(source, target, 1)) == 1
    with pytest.raises(LayoutError, match=r"^alternatives are listed on one mesh only, but "):
        LayoutConverter().alternatives(source, target, 2)


def test_the_graph_of_record_has_every_step():
    """Steps of alternatives that are no permute or exchange are edges of the transition graph."""
    layout = Layout(DeviceMesh(range(6), (2, 3)), "[S0,R]", (60, 120), "f32")
    graph = explore(2, layout.spec)
    steps = {step for _, _, step in graph.edges(data="step")}
    plans = LayoutConverter(model_of((2, 3))).alternatives(layout, "[S1,S0]", 20)
    used = {step for plan in plans for step in plan.steps}
    assert {type(step).__name__ for step in used - steps} <= {"Exchange", "Permute", "Slice"}
    assert used & steps

"""The transition graph that a user holds: networkx finds in it what the planner finds."""

from itertools import product
from math import prod

import networkx as nx
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec, ShardSpecError
from shardspec.comm.curves import Link
from shardspec.comm.steps import Exchange, Permute
from shardspec.errors import LayoutError
from shardspec.layout.graph import explore, spec_of

SLOW, FAST = Link(1.4e-5, 1 / 48e9), Link(3.4e-6, 1 / 362e9)


def converter_on(shape):
    return LayoutConverter(CostModel(shape, (SLOW, *[FAST] * (len(shape) - 1))))


@pytest.mark.parametrize(
    ("shape", "start", "sizes"),
    [
        ((2, 3), "[R,R]", (7, 5)),
        ((2, 3), "[R,R|P01]", (600, 36)),
        ((1, 2), "[S1,R]", (8, 3)),
        ((2, 1, 3), "[R,R]", (6, 12)),
        ((2, 2, 3), "[R|P(2)]", (25,)),
        ((4,), "[R,S0,R]", (4, 4, 4)),
        ((2,), "[]", ()),
    ],
)
@pytest.mark.parametrize("sampled", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_shortest_paths_take_as_long_as_plans(shape, start, sizes, sampled):
    """Pairs of specs with the source's sums: seconds of the path, of the plan, and none."""
    mesh, converter = DeviceMesh(range(prod(shape)), shape), converter_on(shape)
    layout = Layout(mesh, start.replace("(2)", "2"), sizes, "bf16")
    graph = converter.graph(layout)
    lengths = dict(nx.all_pairs_dijkstra_path_length(graph, weight="seconds"))
    reached, pairs = 0, list(product(graph, graph))
    for source, target in pairs[:: (11 if len(pairs) > 1000 else 2) if sampled else 1]:
        if target not in lengths[source]:
            with pytest.raises(LayoutError, match="a conversion only finishes reductions"):
                converter.plan(layout.with_spec(source), target)
            continue
        plan = converter.plan(layout.with_spec(source), target)
        assert lengths[source][target] == pytest.approx(plan.cost_seconds, rel=1e-9, abs=2e-11)
        reached += 1
    assert reached >= len(graph) / 2


def test_an_edge_is_the_cheapest_single_step_with_its_price_and_bytes():
    shape, converter = (2, 3), converter_on((2, 3))
    mesh = DeviceMesh(range(6), shape)
    layout = Layout(mesh, "[R,R]", (600, 36), "f32")
    graph = converter.graph(layout)
    kinds = set()
    for source, target, edge in graph.edges(data=True):
        assert set(edge) == {"step", "seconds", "bytes"}
        kinds.add(type(edge["step"]))
        plan = converter.plan(layout.with_spec(source), target)
        assert plan.cost_seconds <= edge["seconds"] * (1 + 1e-9) + 1e-11
        if plan.steps == (edge["step"],):
            assert edge["bytes"] == plan.bytes_received
            assert edge["seconds"] == pytest.approx(plan.cost_seconds)
    assert {Permute, Exchange} <= kinds
    plain = explore(2, layout.spec)
    assert {spec_of(state) for state in plain} == set(graph)
    assert {(spec_of(a), spec_of(b)) for a, b in plain.edges} <= set(graph.edges)


def test_what_has_no_graph():
    wide = Layout(DeviceMesh(range(32), (2,) * 5), "[R,R,R,R]", (64,) * 4, "f32")
    with pytest.raises(LayoutError, match=r"has 12,341 specs, more than 1,500"):
        LayoutConverter().graph(wide)
    with pytest.raises(LayoutError, match=r"on the 4096 devices .* would take .*single costs"):
        LayoutConverter().graph(Layout(DeviceMesh(range(4096), (4096,)), "[R]", (7,), "f32"))
    parts = Layout(DeviceMesh(range(2), (2,)), "[S0{4,2}]", (6,), "f32")
    with pytest.raises(ShardSpecError, match="the transition graph"):
        LayoutConverter().graph(parts)


def test_the_spec_of_the_layout_says_only_what_is_pending():
    mesh = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
    layout = Layout(mesh, "[S(dp),R|P(tp)]", (6, 6), "f32")
    graph = LayoutConverter().graph(layout)
    assert graph.number_of_nodes() == 14
    assert ShardingSpec.parse("[S0,R|P1]") in graph
    assert ShardingSpec.parse("[S0,R]") in graph

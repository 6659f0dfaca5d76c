"""The search against networkx, on graphs that are built and priced anew here."""

import os
import subprocess
import sys
import time
from functools import cache, partial
from itertools import pairwise, product
from math import inf, prod
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec
from shardspec.comm.curves import Link
from shardspec.comm.steps import Exchange, Permute, Slice
from shardspec.layout.graph import (
    cheapest_path,
    distances,
    explore,
    shortest_walk,
    spec_of,
    state_of,
    successors,
)
from shardspec.layout.routed import intervals
from shardspec.layout.search import naive_plan
from tests.layout import formulas
from tests.layout.plan_texts import plan_texts

SLOW, FAST = Link(1e-5, 1 / 45e9), Link(3e-6, 1 / 362e9)
FAR = Link(5e-5, 1 / 1e9)
TIE = 1e-12
"""Seconds that the search adds to each move, a slice by one axis being one: of equally cheap plans
the one with fewer moves is taken."""


def model_of(kind, shape):
    if kind == "shared-bus":
        return CostModel(shape, (FAST,) * len(shape), "shared-bus")
    if kind == "uniform":
        return CostModel(shape, (FAST,) * len(shape))
    return CostModel(shape, (FAR, SLOW, FAST)[-len(shape) :])


MODELS = ["two-tier", "uniform", "shared-bus"]
# Small and large ones, so that now messages and now bytes decide; even and uneven; shorter than
# the mesh; and how many sources and targets there are.
TENSORS = [
    ((2, 3), (12, 18), "", 11, 11),
    ((2, 3), (6000, 1200), "", 11, 11),
    ((2, 3), (7, 5), "", 11, 11),
    ((2, 3), (4001, 1), "", 11, 11),
    ((2, 3), (600, 6, 6000), "", 19, 19),
    ((2, 3), (5, 701, 9), "", 19, 19),
    ((4, 2), (64, 9000), "", 11, 11),
    ((5,), (10, 4000), "", 3, 3),
    ((1, 2), (6000, 1200), "", 11, 11),
    ((2, 1), (7, 5), "", 11, 11),
    ((1, 1), (7, 5), "P0", 3, 14),
    ((1, 3), (701, 50), "P01", 1, 18),
    ((2, 3), (6000, 1200), "P1", 3, 14),
    ((2, 3), (701, 5), "P01", 1, 18),
    ((2, 3), (701, 50), "Pavg0,P1", 1, 18),
]


def converter_of(kind, mesh_shape):
    model = model_of(kind, mesh_shape)
    return LayoutConverter(model), model


def with_tie(_before, _after, edge):
    return edge["seconds"] + TIE


def check_all_pairs(mesh_shape, shape, pending, kind, every=1):
    """Compare the cost of the plans from all sources, or some, with networkx's; return how many."""
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    whole = ",".join("R" * len(shape))
    tensor = Layout(mesh, f"[{whole}|{pending}]" if pending else f"[{whole}]", shape, "float32")
    converter, model = converter_of(kind, mesh_shape)
    graph = formulas.priced_graph(tensor, model)
    pairs = 0
    # Other sources have a graph of their own.
    alike = [
        node for node in graph.nodes if ShardingSpec.parse(node).partial == tensor.spec.partial
    ]
    for source in alike[::every]:
        best = nx.single_source_dijkstra_path_length(graph, source, weight=with_tie)
        assert set(best) == set(graph.nodes)
        for target in graph.nodes:
            plan = converter.plan(tensor.with_spec(source), target)
            again = sum(
                formulas.seconds(step, before, after, model)
                for step, before, after in zip(
                    plan.steps, plan.layouts, plan.layouts[1:], strict=False
                )
            )
            moves = sum(len(s.axes) if isinstance(s, Slice) else 1 for s in plan.steps)
            cost = plan.cost_seconds + moves * TIE
            assert cost == pytest.approx(best[target], rel=1e-15, abs=TIE / 10), plan
            assert plan.cost_seconds == pytest.approx(again, rel=1e-12, abs=0), plan
            assert str(plan.source.spec) == source
            assert str(plan.target.spec) == target
            pairs += 1
    return pairs


def models_and_strides():
    """Yield models, and one of how many sources is planned from in `make test`."""
    yield pytest.param(MODELS[0], 3)
    for kind in MODELS:
        yield pytest.param(kind, 1, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("kind", "every"), list(models_and_strides()))
@pytest.mark.parametrize(("mesh_shape", "shape", "pending", "sources", "targets"), TENSORS, ids=str)
def test_every_plan_is_as_cheap_as_networkx_finds(
    mesh_shape, shape, pending, sources, targets, kind, every
):
    pairs = check_all_pairs(mesh_shape, shape, pending, kind, every)
    assert pairs == -(-sources // every) * targets


# `test_exactness.py` has plans on three axes in `make test`.
THREE_AXES = [("two-tier", (2, 2, 2), (7, 501)), *((kind, (1, 3, 2), (7, 501)) for kind in MODELS)]
MORE = [("two-tier", (2, 2, 2), (8, 8000)), ("shared-bus", (2, 2, 2), (80, 800))]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "mesh_shape", "shape"), THREE_AXES + MORE, ids=str)
def test_every_plan_on_three_axes(kind, mesh_shape, shape):
    assert check_all_pairs(mesh_shape, shape, "", kind) == 2401


@pytest.mark.parametrize("start", ["[R,R]", "[S012,R]", "[S2,S01]", "[R,S1|P02]", "[R,R|Pmax012]"])
def test_the_search_that_grows_its_graph(start):
    """The search for graphs too large to lay out, on one small enough for networkx."""
    mesh = DeviceMesh(range(12), (2, 3, 2))
    tensor = Layout(mesh, start, (35, 22), "float32")
    model = model_of("two-tier", mesh.shape)
    graph = nx.DiGraph()
    space = explore(3, tensor.spec)
    for before, after, step in space.edges(data="step"):
        held = tensor.with_spec(spec_of(before)).max_local_bytes
        graph.add_edge(before, after, seconds=model.step_seconds(step, held) + TIE)

    @cache
    def price(step, state):
        held = tensor.with_spec(spec_of(state)).max_local_bytes
        return model.step_seconds(step, held) + TIE

    source = state_of(tensor.spec)
    best = nx.single_source_dijkstra_path_length(graph, source, weight="seconds")
    assert len(best) == len(space)
    for target, cost in best.items():
        path = cheapest_path(lambda state: successors(state, range(3)), source, target, price)
        assert path is not None
        nodes = [source, *(state for _, state in path)]
        assert nodes[-1] == target
        for (step, after), before in zip(path, nodes, strict=False):
            assert space.edges[before, after]["step"] == step
        assert nx.path_weight(graph, nodes, "seconds") == pytest.approx(cost, rel=1e-12)


def test_a_bound_that_nothing_meets():
    source, target = (state_of(ShardingSpec.parse(text)) for text in ("[S0,R]", "[R,S0]"))
    edges = partial(successors, axes_to_use=range(2))
    found = cheapest_path(edges, source, target, lambda *_: 1.0, bound=1.5)
    assert found is not None
    assert len(found) == 1
    assert cheapest_path(edges, source, target, lambda *_: 1.0, bound=1.0) is None
    assert cheapest_path(edges, source, source, lambda *_: 1.0, bound=0.0) == []


def test_matrix_searches_against_networkx():
    rng = np.random.default_rng(5)
    for size in (1, 2, 7, 23):
        move = np.where(rng.random((size, size)) < 0.3, rng.random((size, size)), inf)
        np.fill_diagonal(move, inf)
        graph = nx.DiGraph()
        graph.add_nodes_from(range(size))
        ends = zip(*np.nonzero(np.isfinite(move)), strict=True)
        graph.add_weighted_edges_from((a, b, move[a, b]) for a, b in ends)
        expected = np.full((size, size), inf)
        for a, costs in nx.all_pairs_dijkstra_path_length(graph):
            for b, cost in costs.items():
                expected[a, b] = cost
        np.testing.assert_allclose(distances(move, np.arange(size)), expected, rtol=1e-12)
        reached = distances(np.where(np.isfinite(move), 1.0, inf), np.arange(size), np.maximum)
        assert (np.isfinite(reached) == np.isfinite(expected)).all()
        for a, b in product(range(size), repeat=2):
            np.testing.assert_allclose(distances(move, [a])[0, b], expected[a, b], rtol=1e-12)
            walk = shortest_walk(move, a, b)
            if walk is None:
                assert expected[a, b] == inf
            else:
                assert (walk[0], walk[-1]) == (a, b)
                cost = sum(move[c, d] for c, d in pairwise(walk))
                np.testing.assert_allclose(cost, expected[a, b], rtol=1e-12)


def test_a_tensor_so_large_that_ties_are_not_broken():
    """Seconds by the million swallow what tells paths of more moves apart; there is a plan."""
    layout = Layout(DeviceMesh(range(2048), (1, 1024, 2)), "[S1,S20]", (1, 2**63 - 1), "float32")
    plan = LayoutConverter().plan(layout, "[R,S2]")
    assert str(plan.target.spec) == "[R,S2]"
    naive = naive_plan(layout, layout.with_spec("[R,S2]"), CostModel.of_mesh(layout.mesh))
    assert plan.cost_seconds < naive.cost_seconds


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [2**63 - 1, 2**63 - 2, 2**62 + 1, 2**62])
@pytest.mark.parametrize("specs", [("[S0]", "[S1]"), ("[S0]", "[S10]"), ("[S01]", "[S1]")])
def test_sides_whose_sum_is_past_64_bits(size, specs):
    """Starts and stops of parts stay below the size, and so do all sums on the way."""
    mesh = DeviceMesh(range(6), (2, 3))
    source, target = (Layout(mesh, spec, (size,), "float32") for spec in specs)
    plan = LayoutConverter().plan(source, target)
    assert 0 < plan.cost_seconds < inf
    every = [(0,), (1,), (0, 1), (1, 0)]
    for axes, *sides in zip(every, *intervals(mesh.shape, every, size), strict=True):
        layout = Layout(mesh, f"[S{''.join(map(str, axes))}]", (size,), "float32")
        due = [layout.intervals(device)[0][0] for device in mesh.ids]
        assert [*zip(*map(np.ndarray.tolist, sides), strict=True)] == due


def test_processes_that_plan_alone_find_the_same_plans():
    """This process, whose hashes of text have a seed of their own, and another."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.layout.plan_texts"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "4242"},
        check=True,
        timeout=120,
    )
    texts = list(plan_texts())
    assert done.stdout.splitlines() == texts
    assert len(texts) == 121 + 105 + 2


ORDINARY = [
    ((2, 2, 2, 2, 2), "[S01,S2,R]", "[R,S012,S3]"),
    ((2, 2, 2, 2, 2), "[S0,S1,S2,S3]", "[S3,S2,S1,S0]"),
    ((2, 3, 2, 2, 2), "[S01,R|P4]", "[R,S04]"),
    ((2, 2, 2, 2, 2, 2), "[S01,S23]", "[S23,S01]"),
    ((2, 2, 2, 2, 2, 2), "[S0,S1,S2]", "[R,S01,S5]"),
    ((2, 2, 2, 2, 2, 2), "[R,S1,R|P05]", "[S0,S1,R]"),
    ((2, 2, 2, 2, 2, 2), "[S012345,R]", "[S0,R]"),
]


@pytest.mark.parametrize(("mesh_shape", "source", "target"), ORDINARY)
def test_five_and_six_axes_plan_in_seconds(mesh_shape, source, target):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    dims = ShardingSpec.parse(source).dims
    layout = Layout(mesh, source, (192,) * dims, "bfloat16")
    model = CostModel(mesh.shape, (FAR, SLOW, *(FAST,) * (mesh.ndim - 2)))
    start = time.perf_counter()
    plan = LayoutConverter(model).plan(layout, target)
    assert time.perf_counter() - start < 10
    again = sum(
        formulas.seconds(step, before, after, model)
        for step, before, after in zip(plan.steps, plan.layouts, plan.layouts[1:], strict=False)
    )
    assert plan.cost_seconds == pytest.approx(again, rel=1e-12)
    assert plan.target == layout.with_spec(target)
    if not layout.spec.partials:
        straight = formulas.seconds(Exchange((0,)), layout, plan.target, model)
        assert plan.cost_seconds <= straight * (1 + 1e-12)


def test_every_kind_of_step_is_the_best_somewhere():
    """No step is priced out of every plan: among two models each is chosen for some pair."""
    kinds = set()
    for kind, shape in product(MODELS, [(6, 12), (6000, 6000)]):
        mesh = DeviceMesh(range(8), (4, 2))
        converter, _ = converter_of(kind, mesh.shape)
        specs = [spec_of(s) for s in explore(2, ShardingSpec(2)).nodes]
        for source, target in product(specs, repeat=2):
            plan = converter.plan(Layout(mesh, source, shape, "float32"), target)
            kinds |= {type(step).__name__ for step in plan.steps}
        plan = converter.plan(Layout(mesh, "[R,R|P01]", shape, "float32"), "[S0,R]")
        kinds |= {type(step).__name__ for step in plan.steps}
        plan = converter.plan(Layout(mesh, "[R,R|P01]", shape, "float32"), "[R,R]")
        kinds |= {type(step).__name__ for step in plan.steps}
    everything = {"Slice", "AllGather", "AllToAll", "ReduceScatter", "AllReduce"}
    assert kinds == everything | {Exchange.__name__, Permute.__name__}


def test_no_plan_is_impossible_while_another_is_not():
    """Every pair on small meshes, also of short and uneven dims."""
    for shape, sizes in product([(2,), (2, 2), (1, 3)], [(4, 4), (3, 1), (0, 2)]):
        mesh = DeviceMesh(range(prod(shape)), shape)
        start = Layout(mesh, "[R,R|P0]" if len(shape) == 1 else "[R,R|P01]", sizes, "f32")
        specs = [spec_of(state) for state in explore(mesh.ndim, start.spec)]
        for source, target in product(specs, repeat=2):
            if set(target.partials) <= set(source.partials):
                plan = LayoutConverter().plan(start.with_spec(source), target)
                assert plan.cost_seconds < inf, (shape, sizes, source, target)


@pytest.mark.parametrize(("axes", "dims"), [(6, 2), (6, 3)])
def test_sums_over_many_axes_end_in_plans_that_can_be_run(axes, dims):
    """On meshes whose specs are too many for a matrix, without a search through all of them."""
    random = np.random.default_rng(3)
    mesh = DeviceMesh(range(2**axes), (2,) * axes)
    for number in range(3):
        order = random.permutation(axes).tolist()
        at = int(random.integers(0, axes + 1))
        source = ShardingSpec(dims, {0: order[:at]}, partial=dict.fromkeys(order[at:], "sum"))
        goal = ShardingSpec(dims, {dims - 1: order[: random.integers(0, 3)]})
        plan = LayoutConverter().plan(Layout(mesh, source, (8 - number % 4,) * dims, "f32"), goal)
        assert plan.cost_seconds < inf, (source, goal)
        naive = naive_plan(plan.source, plan.target, plan.model).cost_seconds
        assert plan.cost_seconds <= naive * (1 + 1e-9), (source, goal)

"""The plan that gathers everything, and what is said about better ones."""

import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.comm.curves import Link
from shardspec.comm.steps import AllGather, AllReduce, Exchange, Slice
from shardspec.layout.plan import difference_text
from shardspec.layout.search import naive_plan
from tests.conversions import plain_specs, targets_of
from tests.layout import formulas

MESH = DeviceMesh(range(6), (2, 3))
MODEL = CostModel((2, 3), (Link(1e-5, 1 / 50e9), Link(3e-6, 1 / 400e9)))


def naive(source, target, shape=(12, 18)):
    layout = Layout(MESH, source, shape, "float32")
    return naive_plan(layout, layout.with_spec(target), MODEL)


def test_reduces_gathers_and_slices():
    plan = naive("[S0,R|P1]", "[S1,S0]")
    assert plan.steps == (
        AllReduce((1,), "sum"),
        AllGather(0, (0,)),
        Slice(0, (1,)),
        Slice(1, (0,)),
    )
    assert [str(layout.spec) for layout in plan.layouts] == [
        *("[S0,R|P1]", "[S0,R]", "[R,R]", "[S1,R]", "[S1,S0]")
    ]


def test_each_operation_of_its_own_and_what_stays_pending():
    plan = naive("[R,R|Psum0,Pavg1]", "[R,R]")
    assert plan.steps == (AllReduce((1,), "avg"), AllReduce((0,), "sum"))
    assert naive("[R,R|P01]", "[R,S1|P0]").steps == (AllReduce((1,), "sum"), Slice(1, (1,)))
    assert naive("[S0,R]", "[S0,R]").steps == ()


@pytest.mark.parametrize("shape", [(12, 18), (7, 5)])
def test_prices_and_bytes_are_those_of_its_steps(shape):
    """Every pair: it ends where it should, costs what its steps do, and is never cheaper."""
    converter = LayoutConverter(MODEL)
    sources = [*plain_specs(2, 2), Layout(MESH, "[R,S0|P1]", shape, "float32").spec]
    pairs = [(a, b) for a in sources for b in targets_of(a, 2)]
    assert len(pairs) == 121 + 14
    for source, target in pairs:
        plan = naive(source, target, shape)
        assert (plan.source.spec, plan.target.spec) == (source, target)
        moves = zip(plan.steps, plan.layouts, plan.layouts[1:], strict=False)
        seconds = sum(formulas.seconds(*move, MODEL) for move in moves)
        assert plan.cost_seconds == pytest.approx(seconds, rel=1e-12)
        best = converter.plan(plan.source, target)
        assert best.cost_seconds <= plan.cost_seconds * (1 + 1e-9)
        if source != target:
            assert any(layout.spec.dim_partition_dict == {} for layout in plan.layouts)


def test_to_another_mesh_the_whole_tensor_crosses():
    source = Layout(MESH, "[S0,R|P1]", (12, 18), "float32")
    there = DeviceMesh(range(20, 24), (2, 2))
    plan = naive_plan(source, Layout(there, "[R,S01]", (12, 18), "float32"), MODEL)
    assert plan.steps == (
        AllReduce((1,), "sum"),
        AllGather(0, (0,)),
        Exchange((), apart=(0,)),
        Slice(1, (0, 1)),
    )
    assert [layout.mesh for layout in plan.layouts] == [MESH] * 3 + [there] * 2
    assert plan.step_bytes[2] == 12 * 18 * 4


def test_a_plan_under_a_bound_may_be_slower_than_the_naive_one():
    """A plan that holds less may be slower; the sentence says so."""
    slow = naive("[S0,R]", "[R,S01]", (1200, 1800))
    fast = LayoutConverter(MODEL).plan(slow.source, slow.target)
    text = difference_text(slow, fast)
    assert " slower, receives " in text
    assert "× the bytes, holds " in text

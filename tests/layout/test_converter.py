import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from itertools import pairwise, product

import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec
from shardspec.comm.curves import Link
from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
)
from shardspec.errors import AxisError, LayoutError
from tests.conversions import plain_specs, targets_of
from tests.layout import formulas

MESH = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
NAMED = Layout(MESH, "[S(dp),R]", (600, 1200), "bf16")
UNIFORM = (Link(1e-6, 1e-10),) * 2


LATENT = Link(3.4e-6, 1 / 362e9)
"""Where messages cost time, as on a real network."""


def plan_of(source, target, shape=(600, 1200), mesh=MESH, model=None):
    model = model or CostModel(mesh.shape, (LATENT,) * mesh.ndim)
    return LayoutConverter(model).plan(Layout(mesh, source, shape, "bf16"), target)


def test_nothing_to_do():
    plan = LayoutConverter().plan(NAMED, "[S0,R]")
    assert plan.steps == ()
    assert plan.layouts == (NAMED,)
    assert plan.source == plan.target == NAMED
    assert (plan.cost_seconds, plan.bytes_received) == (0, 0)
    assert plan.live_bytes == ()
    assert plan.peak_bytes == 300 * 1200 * 2


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("[R,R]", "[S01,R]", [Slice(0, (0, 1))]),
        ("[R,R]", "[S1,S0]", [Slice(0, (1,)), Slice(1, (0,))]),
        ("[S0,R]", "[R,R]", [AllGather(0, (0,))]),
        ("[S01,R]", "[R,R]", [AllGather(0, (1,)), AllGather(0, (0,))]),
        ("[S0,R]", "[R,S0]", [AllToAll(0, 1, (0,), (0,))]),
        ("[S01,R]", "[S10,R]", [Permute((0, 1))]),
        ("[S0,R]", "[S1,R]", [Exchange((0, 1))]),
        ("[R,R|P1]", "[R,R]", [AllReduce((1,), "sum")]),
        (
            "[R,R|Pmax01]",
            "[R,S10]",
            [ReduceScatter(1, (1,), "max"), ReduceScatter(1, (0,), "max")],
        ),
        ("[R,R|Pavg0,P1]", "[R,R|Pavg0]", [AllReduce((1,), "sum")]),
    ],
)
def test_plans_have_the_steps_that_are_named_here(source, target, steps):
    plan = plan_of(source, target)
    if isinstance(steps[0], Slice):
        assert sorted(plan.steps, key=str) == sorted(steps, key=str)
    else:
        assert list(plan.steps) == steps
    assert str(plan.target.spec) == target


@pytest.mark.parametrize("link_model", ["ring", "shared-bus"])
def test_one_gather_or_two(link_model):
    """Two short gathers have fewer messages than one long one, and as many bytes."""
    source = Layout(MESH, "[S01,R]", (6, 6), "int8")
    slow_start = CostModel((2, 3), UNIFORM, link_model)
    no_start = CostModel((2, 3), (Link(0.0, 1e-10),) * 2, link_model)
    two = (AllGather(0, (1,)), AllGather(0, (0,)))
    assert LayoutConverter(slow_start).plan(source, "[R,R]").steps == two
    assert LayoutConverter(no_start).plan(source, "[R,R]").steps == (AllGather(0, (0, 1)),)


def test_a_plan_does_not_gather_what_can_be_moved():
    """The example of a greedy search: it gathers first, where moving alone is cheaper."""
    source = Layout(MESH, "[R,S01,R]", (600, 600, 600), "f32")
    plan = LayoutConverter().plan(source, "[S01,R,R]")
    assert not any(isinstance(step, AllGather) for step in plan.steps)
    assert plan.peak_bytes == 2 * 600**3 * 4 // 6


def test_axes_may_be_called_by_name():
    plan = LayoutConverter().plan(NAMED, "[R,S(tp,dp)]")
    assert str(plan.target.spec) == "[R,S10]"
    assert plan == LayoutConverter().plan(NAMED, "[R,S10]")
    assert plan == LayoutConverter().plan(NAMED, ShardingSpec(2, {1: ["tp", "dp"]}))
    assert plan == LayoutConverter().plan(NAMED, NAMED.with_spec("[R,S10]"))


def test_bytes_are_those_of_the_boxes():
    """Counted from the boxes of all devices; cuts that divide evenly, pending ones too."""
    steps = 0
    mesh = DeviceMesh([4, 1, 0, 5, 3, 2], (2, 3))
    sources = [*plain_specs(2, 2), *map(ShardingSpec.parse, ["[R,R|P01]", "[S0,R|Pmax1]"])]
    for source in sources:
        for target in targets_of(source, 2):
            plan = plan_of(source, target, (36, 72), mesh)
            for step, got, (before, after) in zip(
                plan.steps, plan.step_bytes, pairwise(plan.layouts), strict=True
            ):
                assert got == formulas.received(step, before, after), plan
                steps += 1
            assert plan.bytes_received == sum(plan.step_bytes)
    assert steps > 150


def test_exchange_brings_only_what_is_missing():
    """However uneven: no device receives a byte that it holds already."""
    exchanges = 0
    for source, target in product(plain_specs(2, 2), repeat=2):
        plan = plan_of(source, target, (7, 5))
        for step, got, ends in zip(
            plan.steps, plan.step_bytes, pairwise(plan.layouts), strict=True
        ):
            if isinstance(step, Exchange):
                per_device: dict[int, int] = dict.fromkeys(MESH.ids, 0)
                for receiver, _, num_bytes in formulas.exchanged(
                    *ends, CostModel((2, 3), (LATENT,) * 2)
                ):
                    per_device[receiver] += num_bytes
                assert got == max(per_device.values())
                exchanges += 1
    assert exchanges > 20


def test_live_and_peak_bytes():
    model = CostModel((2, 3), UNIFORM)
    plan = plan_of("[R,S0|P1]", "[S0,R]", model=model)
    sizes = [formulas.largest_shard(layout) for layout in plan.layouts]
    assert len(sizes) == 3
    assert plan.live_bytes == tuple(a + b for a, b in pairwise(sizes))
    assert plan.peak_bytes == max(plan.live_bytes)
    assert plan_of("[S0,R]", "[R,R]").peak_bytes == (600 + 300) * 1200 * 2


def test_a_plan_is_a_value():
    plan = plan_of("[S0,R]", "[R,S10]")
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(pickle.loads(pickle.dumps(plan))) == hash(plan)
    assert plan != plan_of("[S0,R]", "[R,S01]")
    with pytest.raises(FrozenInstanceError):
        plan.steps = ()


def test_links_decide_which_axis_is_gathered_first():
    """The slow axis is gathered first, while shards are small, for which others change places."""
    source = Layout(MESH, "[S01,R]", (6000, 6000), "f32")
    slow, fast = Link(1e-6, 1e-8), Link(1e-6, 1e-12)
    paths = {}
    for name, links in {"dp": (slow, fast), "tp": (fast, slow)}.items():
        plan = LayoutConverter(CostModel((2, 3), links)).plan(source, "[R,R]")
        paths[name] = [str(layout.spec) for layout in plan.layouts[1:-1]]
    assert paths == {"dp": ["[S0,S1]", "[R,S1]"], "tp": ["[S0,R]"]}


def test_a_mesh_with_links_has_a_model():
    given = DeviceMesh(range(6), (2, 3), mesh_alpha=(1e-6, 2e-6), mesh_beta=(1e-8, 1e-12))
    plan = LayoutConverter().plan(Layout(given, "[R,R]", (4, 4), "f32"), "[S0,R]")
    assert plan.model.links == (Link(1e-6, 1e-8), Link(2e-6, 1e-12))
    chosen = CostModel((2, 3), UNIFORM)
    assert LayoutConverter(chosen).plan(plan.source, "[S0,R]").model == chosen


def test_cost_is_that_of_the_plan():
    converter = LayoutConverter()
    for target in map(str, plain_specs(2, 2)):
        assert converter.cost(NAMED, target) == converter.plan(NAMED, target).cost_seconds
        assert converter.cost(NAMED, target) == converter.cost(NAMED, NAMED.with_spec(target))


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("[R]", LayoutError, ["[R]", "1 dim", "2 dims"]),
        ("[S2,R]", AxisError, ["axis 2", "2 axes"]),
        ("[S(pp),R]", AxisError, ["'pp'", "dp, tp"]),
        ("[S0,R|P1]", LayoutError, ["pending sum", "never starts one"]),
        (NAMED.with_spec("[R,R|Pmax0]"), LayoutError, ["pending max", "never starts one"]),
        (Layout(MESH, "[R,R]", (600, 6), "bf16"), LayoutError, ["global shape", "(600, 6)"]),
        (Layout(MESH, "[R,R]", (600, 1200), "f16"), LayoutError, ["dtype", "float16", "bfloat16"]),
        (
            Layout(DeviceMesh(range(6), (2, 3)), "[R,R|P0]", (600, 1200), "bf16"),
            LayoutError,
            ["cannot stay pending on another mesh"],
        ),
    ],
    ids=str,
)
def test_targets_that_do_not_fit_are_refused_in_one_line(target, error, words):
    for ask in (LayoutConverter().plan, LayoutConverter().cost):
        with pytest.raises(error) as caught:
            ask(NAMED, target)
        message = str(caught.value)
        assert "\n" not in message
        assert [word for word in words if word not in message] == []


def test_a_pending_mean_is_not_a_sum():
    source = Layout(MESH, "[R,R|P0]", (6, 6), "f32")
    with pytest.raises(LayoutError, match="has a pending avg that the source lacks"):
        LayoutConverter().plan(source, "[R,R|Pavg0]")


def test_a_model_of_another_mesh():
    with pytest.raises(LayoutError, match=r"mesh of shape \(2, 2\).*mesh of shape \(2, 3\)"):
        LayoutConverter(CostModel((2, 2), UNIFORM)).plan(NAMED, "[R,R]")


def lists_only(value):
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and lists_only(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(lists_only, value))
    return isinstance(value, str | int | float)


def test_a_dict_holds_what_the_plan_does():
    plan = plan_of("[S01,R|P(2)]", "[R,S1]", mesh=DeviceMesh(range(12), (2, 3, 2)))
    told = plan.as_dict()
    assert lists_only(told)
    assert told["source"] == "[S01,R|P2]"
    assert told["target"] == "[R,S1]"
    assert told["mesh"] == [2, 3, 2]
    assert told["shape"] == [600, 1200]
    assert told["dtype"] == "bfloat16"
    assert told["link_model"] == "ring"
    assert told["cost_seconds"] == plan.cost_seconds
    assert told["bytes_received"] == plan.bytes_received
    assert told["peak_bytes"] == plan.peak_bytes
    links = told["links"]
    assert isinstance(links, list)
    assert len(links) == 3
    steps = told["steps"]
    assert isinstance(steps, list)
    assert [step["layout"] for step in steps] == [str(after.spec) for after in plan.layouts[1:]]
    assert [step["step"] for step in steps] == [type(step).__name__ for step in plan.steps]
    assert [step["axes"] for step in steps if "axes" in step] == [
        list(step.axes) for step in plan.steps if "axes" in step.__slots__
    ]
    assert sum(step["seconds"] for step in steps) == plan.cost_seconds
    assert [step["bytes_received"] for step in steps] == list(plan.step_bytes)
    assert [step["live_bytes"] for step in steps] == list(plan.live_bytes)

import json

import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
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
from shardspec.layout.plan import plans_table, route_text, step_text
from tests.conversions import plain_specs, targets_of

MODEL = CostModel((2, 4), (Link(1e-5, 1 / 50e9, "slow"), Link(3e-6, 1 / 400e9, "fast")))
MESH = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
PLAN = LayoutConverter(MODEL).plan(
    Layout(MESH, "[S(dp),R|P(tp)]", (4096, 4096), "bf16"), "[R,S(tp)]"
)

# By hand: 16 MiB held, 3 messages of 3 µs and 12 MiB at 400 GB/s; then 10 µs and 4 MiB at 50 GB/s.
GOLDEN = """\
[S(dp),R|P(tp)] → [R,S(tp)]   [4096, 4096] bfloat16 (32 MiB) on mesh dp=2,tp=4
step                    axes   layout after    receives       time          live
────────────────────────────────────────────────────────────────────────────────
reduce-scatter sum      tp     [S(dp),S(tp)]     12 MiB   40.46 µs        20 MiB
dim 1
all-gather dim 0        dp     [R,S(tp)]          4 MiB   93.89 µs        12 MiB
────────────────────────────────────────────────────────────────────────────────
total                                            16 MiB   134.3 µs   peak 20 MiB
per device; ring model; axis dp slow: 10 µs, 50 GB/s; axis tp fast: 3 µs, 400
  GB/s
accuracy: not measured: reduce-scatter of 4, all-gather of 2
"""


def test_text_of_a_plan_is_as_recorded():
    assert str(PLAN) == GOLDEN.removesuffix("\n")


def test_nothing_to_do():
    layout = Layout(MESH, "[S0,R]", (3, 5), "f32")
    assert str(LayoutConverter().plan(layout, "[S(dp),R]")) == (
        "[S(dp),R] → [S(dp),R]   [3, 5] float32 (60 B) on mesh dp=2,tp=4\n"
        "nothing to do: both are the same layout"
    )


def test_between_meshes_axes_and_links_are_those_of_each():
    here = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    there = DeviceMesh(range(4, 8), (4,), axis_names=("pp",))
    source = Layout(here, "[S(dp),R|P(tp)]", (8, 8), "f32")
    plan = LayoutConverter().plan(source, Layout(there, "[R,R]", (8, 8), "f32"))
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    notes = " ".join(" ".join(lines).split())
    assert "(256 B) from mesh dp=2,tp=2 to mesh pp=4 step " in notes
    assert (
        "per device; ring model; no links given: assuming h100-nvswitch for dp and tp (measured "
        "for 2, 4, 8 devices; otherwise 23 µs + 249 GB/s); local copies at 1675 GB/s; then "
        "ring model; "
        "no links given: assuming h100-nvswitch for pp (measured for 2, 4, 8 devices; otherwise "
        "23 µs + 249 GB/s); local copies at 1675 GB/s accuracy: "
    ) in notes
    for step, before in zip(plan.steps, plan.layouts, strict=False):
        assert {here: "tp", there: "pp"}[before.mesh] in str(plan), step
    assert "exchange" in route_text(plan).split(", ")


def test_a_route_in_a_line():
    assert route_text(PLAN) == "reduce-scatter tp, all-gather dp"
    nothing = LayoutConverter().plan(PLAN.source, PLAN.source)
    assert route_text(nothing) == "nothing to do"


PLANS = """\
plan    steps                              through         receives       time   ratio     peak
───────────────────────────────────────────────────────────────────────────────────────────────
best    reduce-scatter tp, all-gather dp   [S(dp),S(tp)]     16 MiB   134.3 µs   1.00×   20 MiB
again   reduce-scatter tp, all-gather dp   [S(dp),S(tp)]     16 MiB   134.3 µs   1.00×   20 MiB
"""


def test_plans_side_by_side(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert plans_table([PLAN, PLAN], ["best", "again"]) == PLANS.removesuffix("\n")
    free = LayoutConverter().plan(Layout(MESH, "[R,R]", (8, 8), "f32"), "[S0,R]")
    assert plans_table([free], ["1"]).splitlines()[-1].split() == (
        ["1", "slice", "dp", "0", "B", "0", "s", "384", "B"]
    )


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Slice(1, (0, 2)), "slice dim 1"),
        (AllGather(0, (1,)), "all-gather dim 0"),
        (AllToAll(0, 2, (1,), (1,)), "all-to-all dim 0 → 2"),
        (ReduceScatter(1, (0,), "max"), "reduce-scatter max dim 1"),
        (AllReduce((0, 1), "avg"), "all-reduce avg"),
        (Permute((0, 1)), "permute"),
        (Exchange((0, 1)), "exchange"),
    ],
)
def test_steps_in_words(step, text):
    assert step_text(step) == text


def test_every_table_lines_up_and_every_json_parses(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    plans = 0
    layout = Layout(DeviceMesh(range(8), (2, 4)), "[R,R|P01]", (700, 50), "f32")
    for source in [*plain_specs(2, 2), layout.spec]:
        for target in targets_of(source, 2):
            plan = LayoutConverter(MODEL).plan(layout.with_spec(source), target)
            assert json.loads(json.dumps(plan.as_dict())) == plan.as_dict()
            text = str(plan)
            lines = text.splitlines()
            if plan.steps:
                rules = [at for at, line in enumerate(lines) if line.startswith("──")]
                assert rules == [2, 3 + len(plan.steps)]
                assert len(lines[2]) == max(map(len, lines[1 : rules[1] + 2])) <= 90, plan
                assert all(str(after.spec) in text for after in plan.layouts)
            plans += 1
    assert plans == 121 + 18

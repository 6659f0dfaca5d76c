"""Plans under a bound on memory, against brute force over the same moves."""

from math import isfinite

import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.comm.curves import Link
from shardspec.comm.steps import Slice
from shardspec.errors import LayoutError
from tests.layout.brute_force import Brute, Model, chains
from tests.layout.test_exactness import layouts_of

SLOW, FAST = Link(1.4e-5, 1 / 48e9), Link(3.4e-6, 1 / 362e9)


@pytest.mark.parametrize(
    ("mesh", "shape", "every"),
    [
        pytest.param((2, 2, 2), (64, 64), 11, marks=pytest.mark.exhaustive),
        ((2, 3), (7, 5), 10),
        ((2, 2, 2), (13, 5), 451),
        pytest.param((2, 3), (7, 5), 1, marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 2), (13, 5), 37, marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 2), (16, 16, 16), 157, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_pairs_and_every_bound(mesh, shape, every):
    """For pairs, sums pending too, and each size that could be a bound: the optimum, or the least.

    `python -m benchmarks.exactness` looks at many more.
    """
    brute = Brute(mesh, shape)
    links = (SLOW, *[FAST] * (len(mesh) - 1))
    model = Model(
        tuple(link.latency_s for link in links), tuple(link.seconds_per_byte for link in links)
    )
    move, live = brute.moves(model, 4), brute.live(4)
    bounds = np.unique(live)
    best = [chains(np.where(live <= bound, move, np.inf)) for bound in bounds]
    converter = LayoutConverter(CostModel(mesh, links))
    layouts = layouts_of(brute, shape)
    pairs = [
        (i, j)
        for i, (_, pending) in enumerate(brute.states)
        for j, (_, left) in enumerate(brute.states)
        if set(left) <= set(pending)
    ][::every]
    refused = planned = 0
    for i, j in pairs:
        least = next(b for b, costs in zip(bounds, best, strict=True) if isfinite(costs[i, j]))
        for bound, costs in zip(bounds, best, strict=True):
            if isfinite(costs[i, j]):
                plan = converter.plan(layouts[i], layouts[j], max_bytes=int(bound))
                assert plan.cost_seconds == pytest.approx(costs[i, j], rel=1e-9, abs=2e-11)
                assert max(plan.live_bytes, default=0) <= bound
                planned += 1
            else:
                with pytest.raises(LayoutError, match=f"give at least {int(least)}$"):
                    converter.plan(layouts[i], layouts[j], max_bytes=int(bound))
                refused += 1
    assert planned > refused > 0


def test_a_slice_by_two_axes_holds_nothing_in_between():
    source = Layout(DeviceMesh(range(8), (2, 2, 2)), "[R,R]", (64, 64), "float32")
    plan = LayoutConverter().plan(source, "[R,S01]", max_bytes=20480)
    assert (plan.steps, plan.live_bytes) == ((Slice(1, (0, 1)),), (20480,))


def test_alternatives_keep_to_the_bound_too():
    source = Layout(DeviceMesh(range(8), (2, 4)), "[R,R]", (64, 64), "float32")
    plans = LayoutConverter().alternatives(source, "[R,S10]", 5, max_bytes=20480)
    assert len(plans) > 1
    assert all(plan.peak_bytes <= 20480 for plan in plans)
    assert any(plan.steps[:2] == (Slice(1, (1,)), Slice(0, (0,))) for plan in plans)


def test_too_many_layouts_for_a_bound():
    mesh = DeviceMesh(range(64), (2,) * 6)
    layout = Layout(mesh, "[S0,R]", (64, 64), "f32")
    with pytest.raises(LayoutError, match="max_bytes: 1"):
        LayoutConverter().plan(layout, "[R,S0]", max_bytes=10)

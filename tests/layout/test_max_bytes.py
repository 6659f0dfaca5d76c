"""Plans under a bound on memory, against brute force over the same moves."""

from itertools import product
from math import inf

import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, Link
from shardspec.errors import LayoutError
from shardspec.layout.graph import spec_of
from shardspec.layout.pricing import prices_of

MESH = DeviceMesh(range(8), (2, 2, 2))
MODEL = CostModel(MESH.shape, (Link(1.4e-5, 1 / 48e9), *[Link(3.4e-6, 1 / 362e9)] * 2))
SHAPE = (64, 64)


def test_every_pair_and_every_bound():
    """For each pair and each size that a plan could be bound by: the optimum, or the least."""
    prices = prices_of(MESH.shape, (), SHAPE, "float32", MODEL)
    live = prices.local_bytes[:, None] + prices.local_bytes
    move = np.minimum(np.minimum(prices.collective, prices.permute), prices.exchange)
    converter = LayoutConverter(MODEL)
    states = range(0, len(prices.space.states), 4)
    bounds = np.unique(live)
    best = {}
    for bound in bounds:
        seconds = np.where(live <= bound, move, inf)
        np.fill_diagonal(seconds, 0.0)
        for middle in range(len(seconds)):
            seconds = np.minimum(seconds, seconds[:, [middle]] + seconds[[middle]])
        best[bound] = seconds
    specs = [spec_of(state) for state in prices.space.states]
    refused = 0
    for bound, source, target in product(bounds, states, states):
        layout = Layout(MESH, specs[source], SHAPE, "float32")
        wanted = best[bound][source, target]
        if np.isfinite(wanted):
            plan = converter.plan(layout, specs[target], max_bytes=int(bound))
            assert plan.cost_seconds == pytest.approx(wanted, rel=1e-9, abs=2e-11)
            assert max(plan.live_bytes, default=0) <= bound
        else:
            least = min(b for b in bounds if np.isfinite(best[b][source, target]))
            with pytest.raises(LayoutError, match=f"the least that one needs is {int(least)}$"):
                converter.plan(layout, specs[target], max_bytes=int(bound))
            refused += 1
    assert refused > 0


def test_too_many_layouts_for_a_bound():
    mesh = DeviceMesh(range(64), (2,) * 6)
    layout = Layout(mesh, "[S0,R]", (64, 64), "f32")
    with pytest.raises(LayoutError, match="max_bytes is not searched for among 1"):
        LayoutConverter().plan(layout, "[R,S0]", max_bytes=10)

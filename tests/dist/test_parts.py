"""Parts and blocks between real processes, over gloo."""

from typing import Any

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout
from tests.dist.processes import run_ranks
from tests.layout.test_parts import SHAPE, SPECS, WHOLE, shard_by_index

pytestmark = pytest.mark.dist

WORLD = 4


def _conversions(rank: int) -> tuple[int, list[str]]:
    compared, wrong = 0, []
    mesh, other = DeviceMesh([2, 0, 3, 1], (2, 2)), DeviceMesh([1, 3, 0], (3,))
    for number, spec in enumerate(SPECS):
        before = DTensor(WHOLE, mesh, spec)
        if not torch.equal(before.to_local(), shard_by_index(WHOLE, before.layout, rank)):
            wrong.append(f"made as {spec}")
        for to in (SPECS[-number], SPECS[(5 * number + 4) % len(SPECS)]):
            after = before.redistribute(to)
            compared += 1
            if not torch.equal(after.to_local(), shard_by_index(WHOLE, after.layout, rank)):
                wrong.append(f"{spec} to {to}")
        target = Layout(other, "[S0{6,4,2}*2,R]", SHAPE, "int64")
        moved = before.redistribute(target.spec, device_mesh=other)
        if rank in other and not torch.equal(moved.to_local(), shard_by_index(WHOLE, target, rank)):
            wrong.append(f"{spec} to another mesh")
    weight = DTensor(WHOLE.float().requires_grad_(), mesh, "[S1{8,4},S0]")
    (weight.redistribute("[S0,S1]").to_global() * WHOLE).sum().backward()
    grad = weight.grad
    assert grad is not None
    if not torch.equal(grad.to_local(), shard_by_index(WHOLE.float(), weight.layout, rank)):
        wrong.append("gradient")
    upwards: Any = DTensor(WHOLE, DeviceMesh(range(4), (2, 2)), "[S1{8,4},S0]")
    if not torch.equal((upwards + 1).to_global(), WHOLE + 1):
        wrong.append("sum")
    return compared, wrong


def test_in_a_job(tmp_path):
    for compared, wrong in run_ranks(WORLD, tmp_path, _conversions):
        assert wrong == []
        assert compared == 2 * len(SPECS)

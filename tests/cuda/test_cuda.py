"""Conversions of CUDA tensors: simulated, over NCCL with one rank, and over gloo.

NCCL gives each rank a GPU of its own, so one GPU tries it with one rank. There every axis has one
device, and every step is still a step. gloo lets several ranks share a GPU.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout, plan_reshard
from tests.conversions import (
    partial_specs,
    plain_specs,
    reduced,
    same_bits,
    shard_of,
    stack_of,
    targets_of,
)
from tests.dist.processes import run_ranks
from tests.resharding.states import random_case, shard_at

CUDA = torch.device("cuda", 0)


def wrong_conversions(
    mesh: DeviceMesh, shape: tuple[int, ...], dtype: str, every: int = 1
) -> tuple[int, list[str]]:
    """Convert between all pairs of layouts; return how many shards were compared, and complaints.

    Shards are CUDA tensors; each is compared with the values that the box map says.
    """
    compared, wrong, index = 0, [], 0
    specs = plain_specs(len(shape), mesh.ndim) + list(
        partial_specs(len(shape), mesh.ndim, ("sum", "max"))
    )
    for source in specs:
        before = Layout(mesh, source, shape, dtype)
        stack = stack_of(before)
        simulated = not dist.is_initialized()
        held = mesh.ids if simulated else (dist.get_rank(),)
        shards = {device: shard_of(before, stack, device).to(CUDA) for device in held}
        start = DTensor.from_shards(shards, before) if simulated else None
        for target in targets_of(source, mesh.ndim):
            index += 1
            if index % every:
                continue
            if start is None:
                (local,) = shards.values()
                tensor = DTensor.from_local(local, mesh, source, global_shape=shape)
            else:
                tensor = start
            got = tensor.redistribute(target)
            after = before.with_spec(target)
            values = reduced(stack, source, target)
            for device in held:
                shard = got.to_local(device) if simulated else got.to_local()
                compared += 1
                if shard.device != CUDA:
                    wrong.append(f"{source} → {target}: on {shard.device}")
                if not same_bits(shard.cpu(), shard_of(after, values, device)):
                    wrong.append(f"{source} → {target}: device {device} got {shard.cpu()}")
    return compared, wrong


@pytest.mark.parametrize(
    ("mesh_shape", "shape"),
    [((2, 3), (7, 5)), ((1, 2), (3, 4)), ((2, 1), (3, 4)), ((1, 1), (2, 3)), ((1, 3, 2), (7, 4))],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_a_simulated_mesh_of_cuda_tensors(mesh_shape, shape, dtype):
    mesh = DeviceMesh(range(torch.Size(mesh_shape).numel()), mesh_shape)
    compared, wrong = wrong_conversions(mesh, shape, dtype, every=1 if len(mesh_shape) < 3 else 7)
    assert compared > 0
    assert wrong == []


def test_gradients_on_a_simulated_mesh_of_cuda_tensors():
    whole = torch.randn(7, 5, dtype=torch.float64, device=CUDA)
    weights = torch.randn(7, 5, dtype=torch.float64, device=CUDA)
    leaf = DTensor(whole.requires_grad_(), DeviceMesh(range(6), (2, 3)), "[S0,S1]")
    (leaf.redistribute("[S1,R]").to_global() ** 2 * weights).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.to_global(), 2 * whole.detach() * weights)


def _nccl_with_one_rank(_: int):
    # The default group of the job is gloo's; NCCL serves what lies on the GPU.
    torch.cuda.set_device(CUDA)
    return [
        wrong_conversions(DeviceMesh([0], mesh_shape), shape, dtype, every)
        for mesh_shape, shape, every in (
            ((1,), (5, 3), 1),
            ((1, 1), (3, 4), 1),
            ((1, 1, 1), (3, 2), 5),
        )
        for dtype in ("float32", "bfloat16", "int32")
    ]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_with_one_rank(tmp_path: Path, backend: str):
    (found,) = run_ranks(1, tmp_path, _nccl_with_one_rank, backend=backend)
    assert all(compared > 0 for compared, _ in found)
    assert [wrong for _, wrong in found] == [[]] * len(found)


def _gloo_on_one_gpu(_: int):
    cases = (
        ([2, 0, 3, 1], (2, 2), (7, 5), 3),
        ([2, 0, 3, 1], (1, 4), (7, 5), 2),
        ([2, 0, 3, 1], (4, 1), (6, 4), 2),
    )
    return [
        wrong_conversions(DeviceMesh(ids, mesh_shape), shape, dtype, every)
        for ids, mesh_shape, shape, every in cases
        for dtype in ("float32", "bfloat16")
    ]


def _reshard_on_one_gpu(rank: int):
    wrong = []
    for seed in range(30):
        whole, source, target = random_case(seed, ids=4)
        plan = plan_reshard(source, target, max_bytes=(None, 4096)[seed % 2])
        inside = rank in next(iter(source.values())).mesh
        state = {}
        if inside:
            state = {n: shard_at(w, source[n], rank).to(CUDA) for n, w in whole.items()}
        for _ in range(2):
            got = plan.run(state)
            for name, tensor in got.items():
                shard = tensor.shards[rank].cpu()
                if not torch.equal(shard, shard_at(whole[name], target[name], rank)):
                    wrong.append((seed, name))
    return wrong


def test_state_dicts_between_ranks_that_share_a_gpu(tmp_path: Path):
    assert run_ranks(4, tmp_path, _reshard_on_one_gpu) == [[]] * 4


def test_gloo_with_cuda_tensors(tmp_path: Path):
    for found in run_ranks(4, tmp_path, _gloo_on_one_gpu):
        assert all(compared > 0 for compared, _ in found)
        assert [wrong for _, wrong in found] == [[]] * len(found)

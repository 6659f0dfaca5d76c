"""Conversions on real processes, against the box map and against torch's own DTensor."""

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardspec import DeviceMesh, DTensor, ShardingSpec
from shardspec.layout.graph import explore, spec_of
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def every_spec(num_axes: int, dims: int) -> list[ShardingSpec]:
    graph = explore(num_axes, ShardingSpec(dims))
    return sorted((spec_of(state) for state in graph.nodes), key=str)


def unsharded_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = (torch.arange(prod(shape)) * 37 % 101).reshape(shape)
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def placements(spec: ShardingSpec, num_axes: int) -> list[Any] | None:
    """torch's words for a spec whose axes cut each dim in ascending order, else None."""
    result: list[Any] = [Replicate() for _ in range(num_axes)]
    for dim, axes in spec.dim_partition_dict.items():
        if axes != sorted(axes):
            return None
        for axis in axes:
            result[int(axis)] = Shard(dim)
    return result


def _convert(rank: int, jobs: list[Any]) -> tuple[int, int, list[str]]:
    tried, by_torch, wrong = 0, 0, []
    for ids, mesh_shape, shape, every in jobs:
        mesh = DeviceMesh(ids, mesh_shape, init_process_group=True)
        specs = every_spec(mesh.ndim, len(shape))
        pairs = list(product(specs, repeat=2))[::every]
        plain = list(ids) == sorted(ids)
        torch_mesh = TorchMesh("cpu", torch.tensor(ids).reshape(mesh_shape)) if plain else None
        for index, (source, target) in enumerate(pairs):
            dtype = DTYPES[index % len(DTYPES)]
            whole = unsharded_tensor(shape, dtype)
            start = DTensor(whole, mesh, source)
            got = start.redistribute(target)
            box = got.layout.box(rank)
            wanted = whole[tuple(slice(lo, hi) for lo, hi in box)]
            tried += 1
            if not torch.equal(got.to_local(), wanted) or not torch.equal(got.to_global(), whole):
                wrong.append(f"{mesh_shape} {shape} {source} → {target}")
            theirs = placements(target, mesh.ndim)
            if torch_mesh is not None and theirs is not None:
                other: TorchDTensor = distribute_tensor(whole, torch_mesh, theirs)
                by_torch += 1
                if not torch.equal(got.to_local(), other.to_local()):
                    wrong.append(f"torch differs: {mesh_shape} {shape} {target}")
    return tried, by_torch, wrong


SAMPLED = pytest.mark.parametrize("rarely", [7, pytest.param(1, marks=pytest.mark.exhaustive)])


@SAMPLED
def test_pairs_on_four_processes(tmp_path, rarely):
    jobs = [
        (range(4), (2, 2), (8, 12), rarely),
        ([2, 0, 3, 1], (2, 2), (7, 5), rarely),
        (range(4), (2, 2), (5, 3, 7), 3 * rarely),
        (range(4), (4,), (1, 9), 1),
    ]
    for tried, by_torch, wrong in run_ranks(4, tmp_path, _convert, jobs):
        assert wrong == []
        assert tried == 3 * -(-121 // rarely) + 9
        assert by_torch >= 100 // rarely


@SAMPLED
def test_pairs_on_eight_processes(tmp_path, rarely):
    jobs = [
        (range(8), (2, 4), (16, 8), 3 * rarely),
        ([6, 1, 7, 0, 3, 2, 5, 4], (2, 4), (13, 5), 7 * rarely),
        (range(8), (2, 2, 2), (7, 11), 80 * rarely),
        ([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2), (5, 3, 9), 601 * rarely),
    ]
    for tried, by_torch, wrong in run_ranks(8, tmp_path, _convert, jobs):
        assert wrong == []
        assert tried == sum(-(-pairs // rarely) for pairs in (41, 18, 31, 19))
        assert by_torch >= 40 // rarely


def _reduce(rank: int, rarely: int) -> list[str]:
    """Sources with a pending reduction, and gradients, on one mesh of six."""
    wrong = []
    mesh = DeviceMesh([4, 0, 5, 2, 1, 3], (2, 3), init_process_group=True)
    at = mesh.coordinates(rank)
    addends = torch.randint(-3, 4, (6, 7, 5), generator=torch.Generator().manual_seed(3)).double()
    ways = product(
        ("sum", "avg", "min", "max", "prod"),
        ("[R,R|P{}1]", "[S0,R|P{}1]", "[R,R|P{}01]", "[R,S1|P{}0]"),
        ("[R,R]", "[S1,R]", "[S0,S1]", "[R,S10]"),
    )
    for op, source, target in list(ways)[::rarely]:
        spec = ShardingSpec.parse(source.format(op))
        axes = [int(p.axis) for p in spec.partials]
        count = prod(mesh.shape[axis] for axis in axes)
        index = 0
        for axis in axes:
            index = index * mesh.shape[axis] + at[axis]
        stacked = addends[:count]
        whole = {
            "sum": stacked.sum(0),
            "avg": stacked.mean(0),
            "prod": stacked.prod(0),
            "min": stacked.amin(0),
            "max": stacked.amax(0),
        }[op]
        box = DTensor(whole, mesh, spec.without_partial()).layout.box(rank)
        local = (
            addends[index][tuple(slice(*side) for side in box)]
            .clone()
            .requires_grad_(op in ("sum", "avg"))
        )
        start = DTensor.from_local(local, mesh, spec, global_shape=(7, 5))
        end = start.redistribute(target)
        result = end.to_global()
        if not torch.allclose(result, whole, rtol=1e-12, atol=0):
            wrong.append(f"{spec} → {target}")
        if local.requires_grad:
            weights = torch.arange(35.0).reshape(7, 5).double()
            (result * weights).sum().backward()
            scale = 1 / count if op == "avg" else 1.0
            wanted = DTensor(weights * scale, mesh, spec.without_partial()).to_local()
            if local.grad is None or not torch.allclose(local.grad, wanted, rtol=1e-12, atol=0):
                wrong.append(f"gradient of {spec} → {target}")
    return wrong


@SAMPLED
def test_pending_reductions_and_their_gradients(tmp_path, rarely):
    assert run_ranks(6, tmp_path, _reduce, rarely) == [[]] * 6


def _one_bad_rank(rank: int) -> list[str]:
    mesh = DeviceMesh(range(4), (2, 2), init_process_group=True)
    messages = []
    for local in (
        torch.zeros(3 if rank != 2 else 4, 2),
        torch.zeros(3, 2, dtype=torch.float32 if rank != 1 else torch.float64),
        torch.zeros(3, 2) if rank != 3 else torch.zeros(6),
    ):
        try:
            DTensor.from_local(local, mesh, "[S0,S1]", global_shape=(6, 4))
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
    fine = DTensor.from_local(torch.zeros(3 - rank // 2, 2), mesh, "[S0,R]")
    messages.append(str(tuple(fine.shape)))
    outside = DeviceMesh([3, 1], (2,))
    held = DTensor(torch.arange(3), outside, "[S0]")
    messages.append(str({device: shard.tolist() for device, shard in held.shards.items()}))
    return messages


def test_a_wrong_shard_on_one_rank_is_an_error_on_all(tmp_path):
    results = run_ranks(4, tmp_path, _one_bad_rank)
    for shape, dtype, dims, inferred, _ in results:
        assert "device 2 has a shard of shape (4, 2) and dtype float32" in shape
        assert "holds shape (3, 2) and dtype float32" in shape
        assert "device 1 has a shard of shape (3, 2) and dtype float64" in dtype
        assert "device 3 has a shard of shape (6,)" in dims
        assert inferred == "(5, 2)"
    assert [held for *_, held in results] == ["{}", "{1: [2]}", "{}", "{3: [0, 1]}"]

"""Colossal-AI's page of its d_tensor: a mesh, a spec by a dict, there and back, offline merging."""

from pathlib import Path

import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, ShardingSpec, merge, save_sharded

SHAPES = {
    1: [(1, 1), (1, 1, 1)],
    2: [(2, 1), (1, 2, 1)],
    4: [(2, 2), (2, 1, 2), (1, 2, 1, 2)],
    8: [(2, 4), (2, 2, 2), (2, 2, 1, 2)],
}


def run(rank: int, place: Path) -> None:
    world = dist.get_world_size()
    a = torch.arange(16.0 * 32).reshape(16, 32)
    for shape in SHAPES[world]:
        device_mesh = DeviceMesh(torch.arange(0, world), shape, init_process_group=True)
        for by_dim in ({0: [0]}, {0: [0, 1]}, {0: [1], 1: [0]}):
            sharding_spec = ShardingSpec(a.dim(), by_dim)
            d_tensor = DTensor(a, device_mesh, sharding_spec)
            assert str(d_tensor) == repr(d_tensor)
            assert f"{sharding_spec} of [16, 32] float32 on {device_mesh}" in str(d_tensor)
            assert torch.equal(d_tensor.to_global(), a)
        name = "x".join(map(str, shape))
        save_sharded({"a": d_tensor}, place / name)
        dist.barrier()
        if rank == 0:
            merge(place / name, place / f"{name}.pt")
            merged = torch.load(place / f"{name}.pt", weights_only=True)
            assert torch.equal(merged["a"], a)

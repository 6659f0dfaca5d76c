"""The recipe of DeviceMesh: groups and ranks of a 2-D mesh, and hybrid sharding over it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from shardspec import init_device_mesh


def run(rank: int) -> None:
    world = dist.get_world_size()
    shape = (min(world, 2), -(-world // 2))
    plain = init_device_mesh("cpu", shape)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    assert (plain.shape, plain.ndim, plain.mesh_dim_names) == (shape, 2, None)
    row, column = divmod(rank, shape[1])
    assert mesh.mesh.tolist() == torch.arange(world).reshape(shape).tolist()
    assert (mesh.size(), mesh.size(0), mesh.size(1)) == (world, *shape)
    assert (mesh.get_rank(), mesh.get_coordinate()) == (rank, (row, column))
    assert (mesh.get_local_rank("replicate"), mesh.get_local_rank(1)) == (row, column)
    shards, replicas = mesh["shard"], mesh["replicate"]
    assert shards.ids == tuple(range(row * shape[1], (row + 1) * shape[1]))
    assert shards.get_local_rank() == column
    assert replicas.ids == tuple(range(column, world, shape[1]))
    groups = [mesh.get_group(mesh_dim="replicate"), mesh.get_group("shard")]
    assert groups == mesh.get_all_groups() == [mesh.get_group(0), mesh.get_group(1)]
    for group, members in zip(groups, (replicas.ids, shards.ids), strict=True):
        assert tuple(dist.get_process_group_ranks(group)) == members
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(members)
    assert mesh.flatten("all").ids == tuple(range(world))
    assert dist.get_world_size(mesh.flatten("all").get_group()) == world
    _groups_by_hand(rank, shape, groups)
    _hybrid_sharding(mesh)


def _groups_by_hand(rank: int, shape: tuple[int, int], groups: list[dist.ProcessGroup]) -> None:
    """What the recipe does first without a mesh has the same members."""
    rows, columns = shape
    for number in range(rows):
        members = list(range(number * columns, (number + 1) * columns))
        made = dist.new_group(members)
        if rank in members:
            assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(groups[1])
    for number in range(columns):
        members = list(range(number, rows * columns, columns))
        made = dist.new_group(members)
        if rank in members:
            assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(groups[0])


def _hybrid_sharding(mesh: Any) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    batch = torch.arange(12.0).reshape(2, 6) / 10
    expected = net()(batch)
    model: Any = fully_shard(net(), mesh=mesh.to_torch())
    torch.testing.assert_close(model(batch), expected)
    if torch.cuda.is_available():  # the older FSDP takes no model on the CPU
        cuda = init_device_mesh("cuda", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
        hybrid = FSDP(
            net().cuda(),
            device_mesh=cuda.to_torch(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
        torch.testing.assert_close(hybrid(batch.cuda()).cpu(), expected)

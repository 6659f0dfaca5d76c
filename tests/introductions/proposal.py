"""The proposal of a distributed tensor: placements, modules by functions, states on disk."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardspec import (
    DeviceMesh,
    DTensor,
    distribute_module,
    distribute_tensor,
    empty,
    load_sharded,
    save_sharded,
)


def run(rank: int, place: Path) -> None:
    world = dist.get_world_size()
    ids = list(range(world))
    mesh = DeviceMesh("cpu", ids)
    assert DeviceMesh(device_type="cpu", mesh=ids) == mesh
    assert mesh.to_torch().device_type == "cpu"
    grid = DeviceMesh("cpu", [ids[: world // 2], ids[world // 2 :]] if world > 1 else [ids])
    _tensors(rank, mesh, grid)
    _modules(mesh)
    _states(rank, mesh, grid, place)


def _tensors(rank: int, mesh: DeviceMesh, grid: DeviceMesh) -> None:
    world = mesh.size()
    rows = empty((8, 12), device_mesh=mesh, placements=[Shard(0)])
    assert rows.shape == (8, 12)
    assert rows.to_local().shape == torch.empty(8, 12).chunk(world)[rank].shape
    whole = empty((8, 12), device_mesh=mesh, placements=[Replicate()])
    assert whole.to_local().shape == (8, 12)
    mixed = empty((8, 12), device_mesh=grid, placements=[Replicate(), Shard(0)])
    assert mixed.to_local().shape == (8 // grid.size(1), 12)
    local = torch.full((2, 3), rank + 1.0, requires_grad=True)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    there = tensor.redistribute(mesh, [Replicate()])
    back = there.redistribute(mesh, [Shard(0)])
    weights = torch.arange(6.0 * world).reshape(2 * world, 3)
    (back.full_tensor() * weights).sum().backward()
    assert local.grad is not None
    assert torch.equal(local.grad, weights[2 * rank : 2 * rank + 2])
    addend = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    assert addend.redistribute(mesh, [Replicate()]).to_local().tolist() == [float(world)] * 3
    meta = distribute_tensor(torch.empty(8, 12, device="meta"), mesh, [Shard(1)])
    assert meta.to_local().is_meta
    columns = torch.empty(8, 12).chunk(world, 1)  # six chunks for eight ranks
    assert meta.to_local().shape == (columns[rank].shape if rank < len(columns) else (8, 0))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.fc1, self.fc2 = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc2(torch.relu(self.fc1(x)))


def _modules(mesh: DeviceMesh) -> None:
    def shard_all(_name: str, module: nn.Module) -> None:
        def to_rows(tensor: torch.Tensor) -> Any:
            return distribute_tensor(tensor, mesh, [Shard(0)])

        module._apply(to_rows)

    def shard_first(name: str, module: Any, mesh: DeviceMesh) -> None:
        if name == "fc1":
            weight: Any = distribute_tensor(module.weight, mesh, [Shard(0)])
            module.register_parameter("weight", nn.Parameter(weight))

    def replicate_input(inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()])

    def gather_output(output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(mesh, [Replicate()]).to_local()

    batch = torch.arange(16.0).reshape(2, 8) / 10
    expected = Network()(batch)
    for partition_fn, second in ((shard_all, Shard(0)), (shard_first, Replicate())):
        module: Any = distribute_module(
            Network(),
            mesh,
            partition_fn=partition_fn,
            input_fn=replicate_input,
            output_fn=gather_output,
        )
        first, last = module.fc1.weight, module.fc2.weight
        assert (first.placements, last.placements) == ((Shard(0),), (second,))
        torch.testing.assert_close(module(batch), expected)
        module(batch).sum().backward()
        assert first.grad.placements == (Shard(0),)
    replicated: Any = distribute_module(Network(), mesh)
    assert replicated.fc1.weight.placements == (Replicate(),)


def _states(rank: int, mesh: DeviceMesh, grid: DeviceMesh, place: Path) -> None:
    """What one distribution has saved, another loads, also of another world."""
    whole = torch.arange(60.0).reshape(12, 5)
    saved = place / "state"
    save_sharded({"w": distribute_tensor(whole, mesh, [Shard(0)])}, saved)
    again = load_sharded(saved, grid, {"w": [Replicate(), Shard(1)]})["w"]
    assert again.placements == (Replicate(), Shard(1))
    assert torch.equal(again.full_tensor(), whole)
    alone = DeviceMesh("cpu", [0])
    last = load_sharded(saved, alone, {"w": [Replicate()]})["w"]
    assert last.shards.keys() == ({0} if rank == 0 else set())
    assert all(torch.equal(shard, whole) for shard in last.shards.values())

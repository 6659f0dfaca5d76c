"""A demonstration of DTensor: meshes, creation, placements, operators, redistribution, modules."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    LayoutConverter,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    ones,
    rand,
    randn,
    zeros,
)

WHOLE = torch.arange(40.0).reshape(8, 5)


def run(rank: int) -> None:
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    assert line.get_coordinate() == (rank,)
    assert line.size() == world
    grid = init_device_mesh("cpu", (-(-world // 2), min(world, 2)), mesh_dim_names=("dp", "tp"))
    assert grid.get_coordinate() == divmod(rank, min(world, 2))
    _creation(rank, line)
    _redistribution(rank, line)
    _operators(line)
    _two_dims(rank, grid)
    _modules(line)


def _creation(rank: int, mesh: DeviceMesh) -> None:
    world = mesh.size()
    sharded = distribute_tensor(WHOLE, mesh, [Shard(0)])
    assert torch.equal(sharded.to_local(), WHOLE.tensor_split(world)[rank])
    assert sharded.placements == (Shard(0),)
    assert sharded.device_mesh is mesh
    assert torch.equal(sharded.full_tensor(), WHOLE)
    assert torch.equal(distribute_tensor(WHOLE, mesh, [Replicate()]).to_local(), WHOLE)
    assert torch.equal(distribute_tensor(WHOLE, mesh, placements=[Shard(-1)]).full_tensor(), WHOLE)
    local = torch.full((2, 3), float(rank))
    built = DTensor.from_local(local, mesh, [Shard(0)])
    assert built.shape == (2 * world, 3)
    assert built.full_tensor()[::2, 0].tolist() == [float(other) for other in range(world)]
    for make, number in ((zeros, 0.0), (ones, 1.0)):
        made = make((world + 1, 4), device_mesh=mesh, placements=[Shard(0)])
        assert torch.equal(made.full_tensor(), torch.full((world + 1, 4), number))
        assert made.placements == (Shard(0),)
    for draw in (rand, randn):
        torch.manual_seed(rank)
        whole = draw(6, 4, device_mesh=mesh, placements=[Replicate()]).to_local()
        torch.manual_seed(rank)
        assert torch.equal(draw(6, 4, device_mesh=mesh, placements=[Shard(1)]).full_tensor(), whole)


def _redistribution(rank: int, mesh: DeviceMesh) -> None:
    """From every placement to every other, by the collective that the introduction names."""
    world = mesh.size()
    values = {"whole": WHOLE, "sum": WHOLE * world}
    starts = {
        (Shard(0),): values["whole"],
        (Shard(1),): values["whole"],
        (Replicate(),): values["whole"],
        (Partial(),): values["sum"],
    }
    collectives: dict[Any, str] = {
        ((Shard(0),), (Replicate(),)): "AllGather",
        ((Replicate(),), (Shard(0),)): "Slice",
        ((Partial(),), (Replicate(),)): "AllReduce",
        ((Partial(),), (Shard(0),)): "ReduceScatter",
        ((Shard(0),), (Shard(1),)): "AllToAll",
    }
    for source, whole in starts.items():
        tensor = (
            DTensor.from_local(WHOLE, mesh, source)
            if source == (Partial(),)
            else distribute_tensor(WHOLE, mesh, source)
        )
        for target in [(Shard(0),), (Shard(1),), (Replicate(),)]:
            moved = tensor.redistribute(mesh, target)
            assert moved.placements == target
            assert torch.equal(moved.full_tensor(), whole)
            for again in (
                tensor.redistribute(placements=target),
                tensor.redistribute(target),
                tensor.redistribute(device_mesh=mesh, placements=list(target)),
                tensor.redistribute(mesh, placements=target),
            ):
                assert torch.equal(again.to_local(), moved.to_local())
            name = collectives.get((source, target))
            if name is not None and world > 1:
                large = Layout(mesh, source, (1024, 1024), "float32")
                plan = LayoutConverter().plan(large, target)
                assert [type(step).__name__ for step in plan.steps] == [name]
    assert rank in mesh


def _operators(mesh: DeviceMesh) -> None:
    a, b = WHOLE, WHOLE.t().contiguous() / 7
    rows: Any = distribute_tensor(a, mesh, [Shard(0)])
    columns: Any = distribute_tensor(b, mesh, [Shard(1)])
    doubled = rows * 2 + rows.sin()
    assert doubled.placements == (Shard(0),)
    torch.testing.assert_close(doubled.full_tensor(), a * 2 + a.sin())
    inner: Any = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    torch.testing.assert_close(inner.full_tensor(), a @ b)
    outer = rows @ distribute_tensor(b, mesh, [Replicate()])
    assert outer.placements == (Shard(0),)
    torch.testing.assert_close(outer.full_tensor(), a @ b)
    for tensor, whole in ((rows, a), (columns, b)):
        torch.testing.assert_close(tensor.sum().full_tensor(), whole.sum())
        torch.testing.assert_close(tensor.mean(0).full_tensor(), whole.mean(0))
        torch.testing.assert_close(tensor.sum(dim=1).full_tensor(), whole.sum(dim=1))


def _two_dims(rank: int, mesh: DeviceMesh) -> None:
    row, column = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    tensor = distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)])
    expected = WHOLE.tensor_split(mesh.size(0))[row]
    assert torch.equal(tensor.to_local(), torch.chunk(expected, mesh.size(1), 1)[column])
    mixed = tensor.redistribute(mesh, [Replicate(), Shard(0)])
    assert torch.equal(mixed.to_local(), torch.chunk(WHOLE, mesh.size(1))[column])
    assert torch.equal(mixed.redistribute(mesh, [Shard(0), Shard(0)]).full_tensor(), WHOLE)
    assert mesh.get_rank() == rank


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


def _modules(mesh: DeviceMesh) -> None:
    """Parameters over devices by a function of one's own; gradients gathered."""
    torch.manual_seed(3)
    plain = Perceptron()
    torch.manual_seed(3)

    def shard_linear(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            placements = [Shard(0)] if name == "up" else [Shard(1)]
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, placements))

    sharded = distribute_module(
        Perceptron(),
        mesh,
        shard_linear,
        input_fn=lambda _, inputs, mesh: distribute_tensor(inputs[0], mesh, [Replicate()]),
        output_fn=lambda _, output, mesh: output.redistribute(mesh, [Replicate()]).to_local(),
    )
    parameters: dict[str, Any] = dict(sharded.named_parameters())
    assert parameters["up.weight"].placements == (Shard(0),)
    assert parameters["down.weight"].placements == (Shard(1),)
    assert parameters["up.bias"].placements == (Replicate(),)
    for model in (plain, sharded):
        model(WHOLE).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameters[name].grad.full_tensor(), parameter.grad)

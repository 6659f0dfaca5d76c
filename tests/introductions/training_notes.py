"""Notes on training: a network trained, saved and asked; DDP, FSDP, tensor parallelism."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardspec import distribute_module, init_device_mesh, merge, save_sharded
from shardspec.parallel import inputs_as, outputs_as


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.rand(32, 2, generator=torch.Generator().manual_seed(2)) * 2 - 1
    return points, (points[:, :1] * points[:, 1:]).sign()


def _train(model: Any, steps: int = 5) -> float:
    points, signs = _data()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss: Any = (model(points) - signs).square().mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    return float(loss)


def run(rank: int, place: Path) -> None:
    world = dist.get_world_size()
    shape = (-(-world // 2), min(world, 2))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    alone = Network()
    loss = _train(alone)
    expected = alone(_data()[0]).detach()

    rules = {"up.weight": "[S(tp),R]", "up.bias": "[S(tp)]", "down.weight": "[R,S(tp)]"}
    sharded = distribute_module(
        Network(), mesh, rules, inputs_as([Replicate()] * 2), outputs_as([Replicate()] * 2)
    )
    assert abs(_train(sharded) - loss) < 1e-5
    save_sharded(sharded.state_dict(), place / "network")
    dist.barrier()
    if rank == 0:
        merge(place / "network", place / "network.pt")
        asked = Network()
        asked.load_state_dict(torch.load(place / "network.pt", weights_only=True))
        torch.testing.assert_close(asked(_data()[0]).detach(), expected)

    replicated = DistributedDataParallel(Network(), process_group=mesh.get_group("dp"))
    assert abs(_train(replicated) - loss) < 1e-5
    parts = fully_shard(Network(), mesh=mesh.to_torch())
    assert abs(_train(parts) - loss) < 1e-5
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallel = parallelize_module(Network(), mesh["tp"].to_torch(), styles)
    assert abs(_train(parallel) - loss) < 1e-5

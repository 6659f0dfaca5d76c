"""Jobs on gloo ranks, and one process, that save with torch, for tests to read."""

import logging
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.dist.processes import run_ranks

__all__ = ["JOBS", "Net", "probe", "run_jobs", "save_alone"]


class Net(torch.nn.Module):
    """Sizes that nothing divides, a scalar, a buffer, and a layer with fewer rows than ranks."""

    def __init__(self, inner):
        super().__init__()
        self.up = torch.nn.Linear(5, inner)
        self.down = torch.nn.Linear(inner, 7)
        self.head = torch.nn.Linear(7, 3, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.tensor(41))

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x)))) * self.scale


def tensor_parallel(net, mesh):
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp(net, world):
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(net.up, mesh=mesh)
    fully_shard(net, mesh=mesh)


def fsdp_tp(net, world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(net, mesh["tp"])
    fully_shard(net.down, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])


def hsdp(net, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net, mesh=mesh)


def tp(net, world):
    tensor_parallel(net, init_device_mesh("cpu", (world,)))


def hsdp_tp(net, world):
    mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
    tensor_parallel(net, mesh["tp"])
    fully_shard(net, mesh=mesh["replicate", "shard"])


# Ranks, and rows of the first layer: tensor parallelism needs even parts, which FSDP may split
# unevenly.
JOBS = {fsdp: (4, 13), fsdp_tp: (4, 10), hsdp: (4, 13), tp: (4, 12), hsdp_tp: (8, 10)}


def probe(dtype):
    """What the trained model is asked, in the job and in one process."""
    return torch.linspace(-1, 1, 40, dtype=dtype).view(8, 5)


def train(rank, world, cut, directory):
    """Two steps of Adam, then a save of all of it, and of the whole tensors that torch gathers."""
    torch.manual_seed(3)
    net = Net(JOBS[cut][1]).to(torch.bfloat16 if cut is tp else torch.float32)
    cut(net, world)
    adam = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(2):
        torch.manual_seed(step if cut in (tp, fsdp_tp, hsdp_tp) else step + 100 * rank)
        x = torch.randn(4, 5, dtype=next(net.parameters()).dtype)
        net(x).square().mean().backward()
        adam.step()
        adam.zero_grad()
    model = get_model_state_dict(net)
    state = {
        "model": model,
        "optim": get_optimizer_state_dict(net, adam),
        "trainer": {"step": 2, "name": "ünï", "losses": [1.5, None, True], "rng": [b"\1\2", {3}]},
        "list": [torch.arange(3), {"deep": torch.ones(2, 0, 4)}],
        "turned": torch.arange(6.0).view(2, 3).t(),
        "cut": torch.arange(20.0)[3:11:2],
    }
    save(state, checkpoint_id=os.path.join(directory, "ckpt"))
    whole = StateDictOptions(full_state_dict=True)
    full = {
        "model": get_model_state_dict(net, options=whole),
        "optim": get_optimizer_state_dict(net, adam, options=whole),
    }
    with torch.no_grad():
        logits = net(probe(next(net.parameters()).dtype))
    if rank == 0:
        torch.save(logits, os.path.join(directory, "logits.pt"))
        torch.save(full, os.path.join(directory, "full.pt"))
        shown = {
            name: str(value.placements)
            for name, value in model.items()
            if isinstance(value, DTensor)
        }
        torch.save(shown, os.path.join(directory, "placements.pt"))


def play(rank, directory, world):
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for cut, (ranks, _) in JOBS.items():
        if ranks == world:
            place = directory / cut.__name__
            place.mkdir(exist_ok=True)
            train(rank, world, cut, place)
            dist.barrier()


def run_jobs(directory, world):
    """Save with each way to cut for so many ranks, into folders of their names."""
    place = directory / f"ranks-{world}"
    place.mkdir()
    run_ranks(world, place, play, directory, world)


def save_alone(state, path):
    """Save from one process, of which torch warns."""
    with pytest.warns(UserWarning, match="single process"):
        save(state, checkpoint_id=path)

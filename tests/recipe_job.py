"""What docs/recipes.md starts from: one small model, saved as each tool saves it.

The page shows the bodies of these functions, and a test compares them.
"""

import json
import logging
import os
import shutil
import tarfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.checkpoint.formats.megatron_files import core, write
from tests.dist.processes import run_ranks
from tests.real.conftest import DATA

__all__ = ["make_checkpoints"]

RANKS = 4


class Model(nn.Module):
    """An embedding, a feed-forward block, a norm, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(90, 20)
        self.up = nn.Linear(20, 44)
        self.down = nn.Linear(44, 20)
        self.norm = nn.LayerNorm(20)
        self.head = nn.Linear(20, 90, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def train(model):
    """One step of Adam, so that it has state."""
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.arange(6)).square().mean().backward()
    adam.step()
    return adam


def fsdp2(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    train(model)
    dcp.save(model.state_dict(), checkpoint_id="fsdp2")


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model)
    dcp.save(model.state_dict(), checkpoint_id="tp")


def fsdp2_and_tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    train(model)
    dcp.save(model.state_dict(), checkpoint_id="fsdp2_tp")


def hsdp(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    train(model)
    dcp.save(model.state_dict(), checkpoint_id="hsdp")


def verl(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    adam = train(model)
    name = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    os.makedirs("actor/huggingface", exist_ok=True)
    torch.save(model.state_dict(), f"actor/model_{name}")
    torch.save(adam.state_dict(), f"actor/optim_{name}")
    torch.save({"rng": torch.get_rng_state()}, f"actor/extra_state_{name}")
    Path("actor/fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))


def with_optimizer(model):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    adam = train(model)
    weights, optim = get_state_dict(model, adam)
    dcp.save({"model": weights, "optim": optim, "step": 1}, checkpoint_id="step-1")


def hugging_face_form(model):
    # Imported here: it takes a second, and only the ranks need it.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    train(model)
    state = model.state_dict()
    del state["head.weight"]
    dcp.save(state, storage_writer=HuggingFaceStorageWriter("shards", save_distributed=True))


def hugging_face(model):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    state = model.state_dict()
    del state["head.weight"]
    index = {name: 1 if name == "embed.weight" else 2 for name in state}
    # In this way of the writer one rank has everything.
    writer = HuggingFaceStorageWriter("hub", fqn_to_index_mapping=index)
    dcp.save(state if dist.get_rank() == 0 else {}, storage_writer=writer)


def one_file(model):
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": 1}, "last.pt")


WAYS = (
    fsdp2,
    tensor_parallel,
    fsdp2_and_tensor_parallel,
    hsdp,
    verl,
    with_optimizer,
    hugging_face_form,
    hugging_face,
    one_file,
)


def play(_rank, directory):
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.chdir(directory)
    for way in WAYS:
        torch.manual_seed(0)
        way(Model())


def make_checkpoints(directory, temporary):
    """Save into a directory in each way; meet in another."""
    run_ranks(RANKS, temporary, play, directory)
    # As Megatron's own code writes it, but by hand: three tensor parallel ranks, two stages.
    write(directory / "megatron", core(gated=True), 3, [[0, 1], [2, 3, 4]])
    # As Megatron-core itself has written it.
    with tarfile.open(DATA / "megatron-0.16.tar.xz") as archive:
        archive.extractall(temporary, filter="data")
    run = directory / "torch-dist"
    shutil.copytree(Path(temporary) / "megatron-0.16", run / "iter_0000010")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    # As DeepSpeed and Meta have written theirs.
    with tarfile.open(DATA / "deepspeed.tar.xz") as archive:
        archive.extractall(temporary, filter="data")
    shutil.copytree(Path(temporary) / "zero3", directory / "zero3")
    shutil.copytree(Path(temporary) / "meta", directory / "llama")

"""Hybrid sharding: parameters sharded over the devices of a node, replicated over nodes.

torchrun --standalone --nproc_per_node 8 examples/hsdp.py    (4 or 8 processes)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec import DTensor, init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, world // 2), axis_names=("node", "gpu"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 7))
alone = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 7))
alone.load_state_dict(model.state_dict())
# torch shards and gathers; the mesh and its process groups are shardspec's.
fully_shard(model, mesh=mesh.to_torch())

if rank == 0:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, TorchDTensor)
        ours = DTensor.from_torch(parameter)
        here = tuple(ours.to_local().shape)
        print(f"{name}: {ours.layout.labelled_spec} of {tuple(parameter.shape)}, {here} here")

# Each rank takes its own rows of one batch; gradients are means over all of them.
batch = torch.randn(16 * world, 32)
mine = batch[16 * rank : 16 * (rank + 1)]
sgd, sgd_alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
for _ in range(3):
    model(mine).square().mean().backward()
    sgd.step()
    sgd.zero_grad()
    alone(batch).square().mean().backward()
    sgd_alone.step()
    sgd_alone.zero_grad()

for name, parameter in model.named_parameters():
    assert isinstance(parameter, TorchDTensor)
    whole = parameter.full_tensor()
    if rank == 0:
        same = torch.allclose(whole, alone.get_parameter(name), atol=1e-6)
        print(f"{name}: as trained in one process: {same}")
# No process ends while others still communicate.
dist.barrier()
dist.destroy_process_group()

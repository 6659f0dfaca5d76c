"""A feed-forward block sharded by columns, then by rows: one sum over tp in each direction.

torchrun --standalone --nproc_per_node 4 examples/tensor_parallel_mlp.py    (2, 4 or 8 processes)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec import init_device_mesh
from shardspec.parallel import distribute_module, inputs_as, outputs_as


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for a batch of rows."""
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]  # a module's call is untyped


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,), axis_names=("tp",))
rules = {"up.weight": "[S(tp),R]", "up.bias": "[S(tp)]", "down.weight": "[R,S(tp)]"}

# The same weights and data, in one process and sharded over all processes.
torch.manual_seed(0)
alone, cut = MLP(), MLP()
cut.load_state_dict(alone.state_dict())
distribute_module(cut, mesh, rules, inputs_as("[R,R]"), outputs_as("[R,R]"))
if rank == 0:
    for name, spec in rules.items():
        print(f"{name:12} {spec}")

batch, wanted = torch.randn(32, 64), torch.randn(32, 64)
losses: list[list[float]] = []
for model in (alone, cut):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for _ in range(5):
        loss = (model(batch) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    losses.append(curve)
if rank == 0:
    print("loss alone:", " ".join(f"{loss:.5f}" for loss in losses[0]))
    print("loss cut:  ", " ".join(f"{loss:.5f}" for loss in losses[1]))
    held = sum(p.to_local().numel() for p in cut.parameters() if isinstance(p, TorchDTensor))
    print(f"parameters here: {held:,} of {sum(p.numel() for p in alone.parameters()):,}")
# No process ends while others still communicate.
dist.barrier()
dist.destroy_process_group()

"""Four real processes: shard a tensor, convert it, and compute gradients.

torchrun --standalone --nproc_per_node 4 examples/real_processes.py
"""

import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, ShardingSpec

# Every rank runs this file. The mesh initializes torch.distributed if needed.
a = torch.arange(24.0).view(4, 6).requires_grad_()
device_mesh = DeviceMesh(torch.arange(0, 4), (2, 2), init_process_group=True)
sharding_spec = ShardingSpec(a.dim(), {0: [0]})
d_tensor = DTensor(a, device_mesh, sharding_spec)
global_tensor = d_tensor.to_global()

rank = dist.get_rank()


def say(text: object) -> None:
    """Print one line per rank, in the order of the ranks."""
    lines: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, text)
    if rank == 0:
        for number, line in enumerate(lines):
            print(f"rank {number}: {line}", flush=True)


say(
    f"{d_tensor.sharding_spec} {tuple(d_tensor.to_local().shape)}, "
    f"whole again: {torch.equal(global_tensor, a)}"
)

# The same tensor sharded in another way, by the cheapest steps.
columns = d_tensor.redistribute("[R,S01]")
say(f"{columns.sharding_spec} {columns.to_local()[0].tolist()} in row 0")

# Gradients flow back through the conversion. Every rank computes the same loss from the global
# tensor; `grad` is the gradient of the rank's own shard: 2a, as in one process.
loss = columns.to_global().square().sum()
loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
assert d_tensor.grad is not None
say(f"gradient {d_tensor.grad.to_local()[0].tolist()} in its first row")

# No process ends while others still communicate.
dist.barrier()
dist.destroy_process_group()

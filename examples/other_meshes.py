"""One tensor on three meshes: of another shape, with more devices, and with other devices.

python examples/other_meshes.py, or in a job of six:
torchrun --standalone --nproc_per_node 6 examples/other_meshes.py
"""

import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter

in_a_job = dist.is_torchelastic_launched()
if in_a_job:
    dist.init_process_group("gloo")
rank = dist.get_rank() if in_a_job else 0

weight = torch.arange(48.0 * 36).view(48, 36)
nodes = DeviceMesh(range(4), (2, 2))
line = DeviceMesh(range(4), (4,))
grown = DeviceMesh(range(6), (3, 2))
last = DeviceMesh([4, 5], (2,))
ways = ((line, "[S0,R]"), (grown, "[S0,S1]"), (last, "[R,S0]"))

# The plan: steps on the first mesh, one exchange between the meshes, steps on the second.
converter = LayoutConverter()
source = Layout(nodes, "[S0,R]", weight.shape, weight.dtype)
for mesh, spec in ways:
    plan = converter.plan(source, Layout(mesh, spec, weight.shape, weight.dtype))
    if rank == 0:
        print(
            f"{source.spec} on {nodes} → {spec} on {mesh} of devices {mesh.ids[0]} to "
            f"{mesh.ids[-1]}: a device receives at most {plan.bytes_received} bytes"
        )

# Every rank of either mesh calls this; a rank outside the first has a tensor without shards.
tensor = DTensor(weight, nodes, "[S0,R]")
for mesh, spec in ways:
    tensor = tensor.redistribute(spec, device_mesh=mesh)

device = rank if in_a_job else 5
if device in last:
    columns = slice(18 * (device - 4), 18 * (device - 3))
    right = torch.equal(tensor.to_local(device), weight[:, columns])
    # One write, since two ranks print at the same time.
    print(f"device {device} holds columns {columns.start} to {columns.stop}: {right}\n", end="")
if in_a_job:
    # No process ends while others still communicate.
    dist.barrier()
    dist.destroy_process_group()

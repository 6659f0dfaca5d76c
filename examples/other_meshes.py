"""One tensor on its way over three meshes: reshaped, grown, and handed to other devices.

python examples/other_meshes.py, or in a job of twelve:
torchrun --standalone --nproc_per_node 12 examples/other_meshes.py
"""

import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter

in_a_job = dist.is_torchelastic_launched()
if in_a_job:
    dist.init_process_group("gloo")
rank = dist.get_rank() if in_a_job else 0

weight = torch.arange(48.0 * 36).view(48, 36)
nodes = DeviceMesh(range(8), (2, 4))
wide = DeviceMesh(range(8), (4, 2))
grown = DeviceMesh(range(12), (3, 4))
last = DeviceMesh(range(8, 12), (4,))

# What it takes, on paper: moves on the one mesh, one exchange across, moves on the other.
converter = LayoutConverter()
source = Layout(nodes, "[S0,R]", weight.shape, weight.dtype)
for mesh, spec in ((wide, "[S0,S1]"), (grown, "[S0,S1]"), (last, "[R,S0]")):
    plan = converter.plan(source, Layout(mesh, spec, weight.shape, weight.dtype))
    if rank == 0:
        print(
            f"{source.spec} on {nodes} → {spec} on {mesh} of devices {mesh.ids[0]} to "
            f"{mesh.ids[-1]}: a device receives at most {plan.bytes_received} bytes"
        )

# And done. Every rank of either mesh calls; one that holds nothing has a tensor without shards.
tensor = DTensor(weight, nodes, "[S0,R]")
for mesh, spec in ((wide, "[S0,S1]"), (grown, "[S0,S1]"), (last, "[R,S0]")):
    tensor = tensor.redistribute(spec, device_mesh=mesh)

device = rank if in_a_job else 9
if device in last:
    columns = slice(9 * (device - 8), 9 * (device - 7))
    right = torch.equal(tensor.to_local(device), weight[:, columns])
    print(f"device {device} holds columns {columns.start} to {columns.stop}: {right}")
if in_a_job:
    dist.destroy_process_group()

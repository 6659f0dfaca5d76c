"""The cheapest path depends on the links: one sum, two machines, two plans.

python examples/cheapest_path.py
"""

from dataclasses import replace

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.comm.curves import Link

# A gradient with a sum pending over axis "dp": each device along dp has one addend. The target is
# the finished sum on all 8 devices.
mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
gradient = Layout(mesh, "[R,R|P(dp)]", (8192, 8192), "bf16")

# Seconds per message and seconds per byte, along one axis of the mesh.
nvlink = Link(3.4e-6, 1 / 362e9, "NVLink")
network = Link(10e-6, 1 / 50e9, "network")

one_node = CostModel(mesh.shape, (nvlink, nvlink))
two_nodes = CostModel(mesh.shape, (network, nvlink))

print("One node, NVLink along both axes:\n")
direct = LayoutConverter(one_node).plan(gradient, "[R,R]")
print(direct)

print("\nTwo nodes, the network along dp:\n")
in_parts = LayoutConverter(two_nodes).plan(gradient, "[R,R]")
print(in_parts)

# Plans are plain values: here the first plan is priced with the links of the second machine.
slow = replace(direct, model=two_nodes)
print(f"""
On two nodes the first plan would take {slow.cost_seconds * 1e3:.2f} ms instead of {
    in_parts.cost_seconds * 1e3:.2f} ms. The second sends only
a quarter of the bytes through the network from each device, and puts the quarters
together over NVLink. On one node that detour would not pay.""")

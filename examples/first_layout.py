"""A first layout: who holds which part of a tensor, and moving it. Needs no processes and no GPU.

python examples/first_layout.py
"""

import torch

from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter

# Four devices in a grid of two rows and two columns. Axis 0 runs down, axis 1 to the right.
#     0 1
#     2 3
mesh = DeviceMesh(range(4), (2, 2))

# "[S0,R]": dim 0 of the tensor is cut over axis 0 of the mesh, dim 1 is whole everywhere.
layout = Layout(mesh, "[S0,R]", (4, 4), torch.float32)
print(layout.picture())
print("device 3 holds rows and columns", layout.box(3), "of shape", layout.local_shape(3))

# "[R,S01]": now the columns are cut, over axis 0 and inside each half over axis 1.
print()
print(layout.with_spec("[R,S01]").picture())

# The cheapest way from one to the other, found on paper.
print()
print(LayoutConverter().plan(layout, "[R,S01]"))

# And carried out. Outside of a distributed job all four devices live in this process; under
# torchrun the same lines move data between processes.
matrix = torch.arange(16.0).view(4, 4)
cut = DTensor(matrix, mesh, "[S0,R]")
moved = cut.redistribute("[R,S01]")
print()
print("device 3 held ", cut.to_local(3).tolist())
print("device 3 holds", moved.to_local(3).tolist())
print("together they are the matrix again:", torch.equal(moved.to_global(), matrix))

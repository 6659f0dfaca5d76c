"""A first layout: which device has which part of a tensor, and a conversion; one process, no GPU.

python examples/first_layout.py
"""

import torch

from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter

# Four devices in a grid of two rows and two columns. Axis 0 runs down, axis 1 to the right.
#     0 1
#     2 3
mesh = DeviceMesh(range(4), (2, 2))

# "[S0,R]": dim 0 of the tensor is sharded over axis 0 of the mesh, dim 1 is not sharded.
layout = Layout(mesh, "[S0,R]", (4, 4), torch.float32)
print(layout.picture())
print("device 3 holds rows and columns", layout.box(3), "of shape", layout.local_shape(3))

# "[R,S01]": now the columns are sharded, over axis 0 and inside each half over axis 1.
print()
print(layout.with_spec("[R,S01]").picture())

# The cheapest plan from one layout to the other; planning needs no job.
print()
print(LayoutConverter().plan(layout, "[R,S01]"))

# Now the plan runs. Outside of a job this process simulates all four devices; under torchrun the
# same lines move data between processes.
matrix = torch.arange(16.0).view(4, 4)
cut = DTensor(matrix, mesh, "[S0,R]")
moved = cut.redistribute("[R,S01]")
print()
print("device 3 held ", cut.to_local(3).tolist())
print("device 3 holds", moved.to_local(3).tolist())
print("together they are the matrix again:", torch.equal(moved.to_global(), matrix))

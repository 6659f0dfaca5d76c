"""Finds the layout of a result without computing it: torch's DTensor runs on meta tensors.

torch's mesh gets groups without a backend: operations on meta tensors only look up their sizes.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,
    _register_process_group,
    _resolve_process_group,
)
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_leaves

from shardspec.errors import LayoutError, LossyConversionError
from shardspec.interop.torch_dtensor import in_our_words, layout_of, torch_dtensor
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.mesh.job import check_ascending
from shardspec.tensor.operators.call import REFUSALS, Call
from shardspec.tensor.operators.tensor import TensorLike

Layouts: TypeAlias = Sequence[Layout | None] | None

_HASHABLE: Final = (int, float, complex, str, type(None), torch.dtype, torch.device)
_MOST_KNOWN: Final = 4096
_KNOWN: Final[dict[Hashable, tuple[Layouts]]] = {}
"""Layouts of the results of earlier calls."""
_NAMES: Final = count(1)


@lru_cache(maxsize=64)
def _mesh_without_job(mesh: DeviceMesh) -> tuple[TorchMesh, dict[GroupName, dist.ProcessGroup]]:
    """Return a torch mesh like `mesh`, and its process groups by name; they cannot communicate."""
    check_ascending(mesh)
    number = next(_NAMES)
    grid = torch.arange(len(mesh.ids), dtype=torch.int).reshape(mesh.shape)
    # Different names keep it from equalling a mesh of a job, in torch's caches.
    names = [GroupName(f"axis {axis} of simulated mesh {number}") for axis in range(mesh.ndim)]
    made = TorchMesh("cpu", grid, mesh_dim_names=tuple(names), _init_backend=False, _rank=0)
    made._dim_group_names = names
    groups = [dist.ProcessGroup(HashStore(), 0, size) for size in mesh.shape]
    return made, dict(zip(names, groups, strict=True))


def _register(groups: Mapping[GroupName, dist.ProcessGroup]) -> None:
    """Register groups, also those that torch's `destroy_process_group` has forgotten."""
    for name, group in groups.items():
        try:
            _resolve_process_group(name)
        except RuntimeError:
            _register_process_group(name, group)


def layouts_by_torch(call: Call, torch_mesh: TorchMesh | None = None) -> Layouts:
    """Return the layouts of the tensors that a call returns; None where torch has no rule.

    `torch_mesh` is that of the running job; without it this process simulates the mesh.
    """
    if torch_mesh is not None:
        return _propagated(call, torch_mesh)
    key = _key(call)
    found = None if key is None else _KNOWN.get(key)
    if found is not None:
        return found[0]
    mesh = call.tensors[0].layout.mesh
    torch_mesh, groups = _mesh_without_job(mesh)
    _register(groups)
    layouts = _propagated(call, torch_mesh)
    if key is not None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = (layouts,)
    return layouts


def _key(call: Call) -> Hashable | None:
    """Return a key: calls with equal keys have results of equal layouts; None if unhashable."""
    leaves: list[Hashable] = []
    for leaf in call.leaves:
        if isinstance(leaf, TensorLike):
            leaves.append((TensorLike, leaf.layout))
        elif isinstance(leaf, torch.Tensor):
            leaves.append((torch.Tensor, leaf.dtype))
        elif isinstance(leaf, _HASHABLE):
            leaves.append((type(leaf), leaf))
        else:
            return None
    return (call.function, *leaves, str(call.structure), torch.get_default_dtype())


def _propagated(call: Call, torch_mesh: TorchMesh) -> Layouts:
    tensors = call.tensors
    mesh, theirs = tensors[0].layout.mesh, {}
    device = next(iter(tensors[0].communicator.addressable), mesh.ids[0])
    with torch.no_grad(), implicit_replication():
        for tensor in tensors:
            shape = tensor.layout.local_shape(device)
            local = torch.empty(shape, dtype=tensor.dtype, device="meta")
            theirs[id(tensor)] = torch_dtensor(local, tensor.layout, torch_mesh)
        try:
            result = call.on(theirs)
            return [
                layout_of(in_our_words(leaf), mesh) if isinstance(leaf, TorchDTensor) else None
                for leaf in tree_leaves(result)
                if isinstance(leaf, torch.Tensor)
            ]
        except (*REFUSALS, LayoutError, LossyConversionError):
            return None

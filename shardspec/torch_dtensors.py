"""Conversions by plans for programs that keep torch's DTensor."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.placement_types import Placement

from shardspec.comm.torch_mesh import from_torch
from shardspec.dtensor import DTensor
from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import in_our_words, torch_dtensor
from shardspec.interop.torch_placements import from_placements
from shardspec.layout.layout import SpecLike
from shardspec.mesh import DeviceMesh


def redistribute(
    tensor: torch.Tensor,
    placements_or_spec: Sequence[Placement] | SpecLike,
    device_mesh: DeviceMesh | TorchMesh | None = None,
) -> TorchDTensor:
    """Convert a torch DTensor to another layout by the cheapest plan; every rank calls it.

    As for `DTensor.redistribute`: it is differentiable, and the other mesh may have the same
    devices in another shape, more, fewer or others. Where nothing moves the storage is shared.

    Parameters
    ----------
    tensor
        torch's DTensor. A rank outside its mesh has one too, without a shard.
    placements_or_spec
        One placement of torch per axis of the target's mesh, or a spec, as text too.
    device_mesh
        Where it is to be, as one of ours or of torch's; by default where it is. A mesh of ours
        that has the ids and the shape of the tensor's gives the plan its links.

    Raises
    ------
    LayoutError
        If placements or spec do not fit the tensor or the mesh, want a reduction pending that is
        not, or a gradient is wanted that cannot be had.
    LossyConversionError
        If a placement that is wanted has no counterpart in a spec. What the tensor has and a spec
        cannot say, as the masked sum of an embedding, is finished by torch before.
    MeshError, CommunicatorError
        If a mesh belongs to another job, or the ranks ask for different conversions.

    Examples
    --------
    In a job of eight, with ``weight`` sharded by rows over a mesh of (2, 4)::

        by_columns = redistribute(weight, [Shard(1), Shard(1)])
        by_columns = redistribute(weight, "[R,S(dp,tp)]")
        elsewhere = redistribute(weight, "[S0,R]", torch_mesh_of_four)
    """
    if not isinstance(tensor, TorchDTensor):
        raise LayoutError(
            f"redistribute takes a DTensor of torch, not a {type(tensor).__name__}; one of ours "
            "has a method of that name"
        )
    source = from_torch(tensor.device_mesh)
    if isinstance(device_mesh, DeviceMesh):
        target = device_mesh
        if (target.ids, target.shape) == (source.ids, source.shape):
            source = target
    else:
        target = source if device_mesh is None else from_torch(device_mesh)
    if isinstance(placements_or_spec, Sequence) and not isinstance(placements_or_spec, str):
        spec: SpecLike = from_placements(placements_or_spec, tensor.shape, target)
    else:
        spec = placements_or_spec
    ours = DTensor.from_torch(in_our_words(tensor), device_mesh=source)
    result = ours.redistribute(spec, device_mesh=target)
    if isinstance(device_mesh, TorchMesh):
        torch_mesh = device_mesh
    elif target == source:
        torch_mesh = tensor.device_mesh
    else:
        torch_mesh = target.to_torch(tensor.device_mesh.device_type)
    outside = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    shard = next(iter(result.shards.values()), outside)
    return torch_dtensor(shard, result.layout, torch_mesh)

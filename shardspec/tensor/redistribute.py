"""Provides `redistribute`, which converts torch's own DTensor by the cheapest plan."""

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec.comm.process_group import communicator_of
from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import in_our_words, torch_dtensor
from shardspec.layout.layout import SpecLike, checked_mesh
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tensor.compiling import outside_graphs
from shardspec.tensor.dtensor import DTensor
from shardspec.tensor.run import telling


@outside_graphs
def redistribute(
    tensor: torch.Tensor,
    placements_or_spec: SpecLike,
    device_mesh: DeviceMesh | TorchMesh | None = None,
) -> TorchDTensor:
    """Convert a torch DTensor to another layout by the cheapest plan; every rank calls it.

    It is differentiable, and the other mesh may have other devices, as for `DTensor.redistribute`.
    Where nothing moves the storage is shared.

    Parameters
    ----------
    tensor
        torch's DTensor. A rank outside its mesh has one too, without a shard.
    placements_or_spec
        One placement of torch per axis of the target's mesh, or a spec, also as text.
    device_mesh
        The mesh of the result, of shardspec or of torch; by default that of the tensor. A mesh of
        shardspec with the ids and shape of the tensor's gives the plan its links.

    Raises
    ------
    LayoutError
        If placements or spec do not fit the tensor or the mesh, have a pending reduction that the
        tensor lacks, or a gradient is tracked that cannot be computed.
    LossyConversionError
        If a placement of the target has no counterpart in a spec. Where one of the tensor has none,
        as the masked sum of an embedding, torch finishes it first.
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
    source = DeviceMesh.from_torch(tensor.device_mesh)
    grid = source.ids, source.shape
    target: object = tensor.device_mesh if device_mesh is None else device_mesh
    torch_mesh = target if isinstance(target, TorchMesh) else None
    if torch_mesh is not None:
        target = DeviceMesh.from_torch(torch_mesh)
    elif isinstance(target, DeviceMesh) and (target.ids, target.shape) == grid:
        source, torch_mesh = target, tensor.device_mesh
    with telling(communicator_of(source), source, target):
        mesh = checked_mesh(target)
        if torch_mesh is None:
            torch_mesh = mesh.to_torch(tensor.device_mesh.device_type)
        ours = DTensor.from_torch(in_our_words(tensor), device_mesh=source)
        result = ours.redistribute(placements_or_spec, device_mesh=mesh)
    if result.layout == ours.layout and torch_mesh == tensor.device_mesh:
        return result.to_torch()
    outside = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    shard = next(iter(result.shards.values()), outside)
    return torch_dtensor(shard, result.layout, torch_mesh)

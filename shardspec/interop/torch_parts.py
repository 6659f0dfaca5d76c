"""Shards of torch's DTensors: that of this rank, or those of all ranks of a simulated job.

torch's `LocalTensor` has the latter: what is done to it is done to each of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor as TorchDTensor


def joined(shards: Sequence[torch.Tensor], *, tracked: bool = False) -> torch.Tensor:
    """Return one tensor with the shards of all ranks, from rank 0 on, as a leaf of autograd."""
    local = {rank: shard.detach() for rank, shard in enumerate(shards)}
    made: torch.Tensor = LocalTensor(local, tracked)  # type: ignore[no-untyped-call]  # untyped in torch
    return made


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the shards of all ranks if the tensor has them, else the tensor alone."""
    return list(tensor._local_tensors.values()) if isinstance(tensor, LocalTensor) else [tensor]


def like_parts(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parts in the form of another tensor: a single part, or several joined."""
    return joined(parts) if isinstance(tensor, LocalTensor) else parts[0]


def shard_memory(tensor: TorchDTensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, without the wrapper of a running collective."""
    local = tensor._local_tensor
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def places_of(tensor: TorchDTensor) -> list[tuple[int, ...]]:
    """Return the coordinates in the mesh of the rank of each part."""
    mesh = tensor.device_mesh
    if isinstance(tensor._local_tensor, LocalTensor):
        return list(np.ndindex(*mesh.shape))
    return [tuple(mesh.get_coordinate() or (0,) * mesh.ndim)]

"""Shards that may be in torch's DTensor as well: one storage, and one history of gradients."""

from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from shardspec.comm.communicator import Communicator
from shardspec.errors import CommunicatorError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.operations.methods import TensorMethods

# torch's DTensor takes as long to import as the rest of torch, so it waits until one is asked for.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

__all__ = ["ShardStorage"]


class ShardStorage(TensorMethods):
    """The shards of a tensor, made of torch tensors or of torch's DTensor.

    What was made of shards becomes torch's DTensor when an operation asks for it, and keeps that:
    views of it, and what is written to them, are then known to autograd on both sides. Where the
    DTensor gets another history by that, the shards are taken from it from then on.
    """

    __slots__ = ("_history", "_shards", "_torch", "communicator", "layout")

    layout: Layout
    """Which box every device holds."""
    communicator: Communicator
    """Who moves shards."""
    _shards: dict[int, torch.Tensor] | None
    """Those it was made of, by physical id; None where it was made of torch's."""
    _torch: "TorchDTensor | None"
    """The same storage as torch's, once it was asked for."""
    _history: object
    """What torch's was computed by when it was made of the shards."""

    @property
    def shape(self) -> torch.Size:
        """Sizes of the whole tensor."""
        return torch.Size(self.layout.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        dtype = getattr(torch, self.layout.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def device_mesh(self) -> DeviceMesh:
        """The devices."""
        return self.layout.mesh

    @property
    def sharding_spec(self) -> ShardingSpec:
        """How the tensor is cut, axes by number."""
        return self.layout.spec

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are tracked for the shards."""
        if self._own() is None:
            return self._torch is not None and self._torch.requires_grad
        return any(shard.requires_grad for shard in self.shards.values())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Track gradients from here on, or no longer; return the tensor itself."""
        own = self._own()
        if own is None:
            self.to_torch().requires_grad_(requires_grad)
        else:
            self._torch = None
            for shard in own.values():
                shard.requires_grad_(requires_grad)
        return self

    def dim(self) -> int:
        """Return the number of tensor dims."""
        return len(self.layout.global_shape)

    def to_torch(self) -> "TorchDTensor":
        """Return the tensor as torch's: the same storage, and gradients flow back.

        It is the same object each time. Every rank of the mesh calls this.

        Raises
        ------
        CommunicatorError
            If this process simulates the mesh: torch needs a job with one process per device.
        MeshError, LossyConversionError
            If torch has no such mesh, or no word for how reductions are pending.
        """
        own = self._own()
        tracked = torch.is_grad_enabled() and any(s.requires_grad for s in (own or {}).values())
        if self._torch is None or (tracked and not self._torch.requires_grad):
            assert own is not None, "it is made of the one or of the other"
            if not dist.is_initialized() or set(own) - {dist.get_rank()}:
                raise CommunicatorError(
                    f"this process simulates mesh {self.device_mesh}, but torch's DTensor, and so "
                    "any operation, needs one process per device; start the program with torchrun, "
                    "or work on to_global()"
                )
            from shardspec.interop.torch_dtensor import torch_dtensor

            outside = torch.empty(0, dtype=self.dtype)
            self._torch = torch_dtensor(next(iter(own.values()), outside), self.layout)
            self._history = self._torch.grad_fn
        return self._torch

    def _own(self) -> dict[int, torch.Tensor] | None:
        """Return the shards it was made of, unless torch's tensor has had another history since."""
        if self._torch is not None and self._torch.grad_fn is not self._history:
            self._shards = None
        return self._shards

    def follow(self, tensor: "TorchDTensor") -> None:
        """Take note that torch's tensor, which is this one's, may have been written to."""
        from shardspec.interop.torch_dtensor import layout_of

        layout = layout_of(tensor, self.device_mesh)
        with torch.no_grad():
            place = tensor.to_local().data_ptr()
        own = self._own() or {}
        if layout != self.layout or any(shard.data_ptr() != place for shard in own.values()):
            self.layout, self._shards = layout, None

    def is_leaf_with_gradient(self) -> bool:
        """Whether gradients are collected at the shards that this was made of."""
        return any(s.requires_grad and s.is_leaf for s in (self._own() or {}).values())

    @property
    def shards(self) -> dict[int, torch.Tensor]:
        """The shard of every device that this process holds, by physical id."""
        own = self._own()
        if own is not None:
            return own
        from shardspec.interop.torch_dtensor import local_of

        assert self._torch is not None, "it is made of the one or of the other"
        return {device: local_of(self._torch) for device in self.communicator.addressable}

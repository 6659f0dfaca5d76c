"""Converts shards to a torch `DTensor` and back, sharing storage and gradients.

torch and shardspec share a convention: the gradient of a shard is that of its box, equal on all
devices that have the box, and each addend of a pending sum gets the gradient of the sum. One
difference: an addend of a pending mean of n gets 1/n of the mean's gradient here, but all in torch.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from shardspec.errors import LayoutError, LossyConversionError
from shardspec.interop.notations import from_placements, to_placements
from shardspec.layout.layout import Layout
from shardspec.layout.placements import own_placements, spec_of_placements
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.mesh.job import device_type_of


def layout_of(tensor: TorchDTensor, mesh: DeviceMesh | None = None) -> Layout:
    """Return the layout of a torch DTensor, by default on the mesh that `from_torch` makes.

    Raises what `shardspec.interop.notations.from_placements` and `DeviceMesh.from_torch` raise.
    """
    own_mesh = DeviceMesh.from_torch(tensor.device_mesh) if mesh is None else mesh
    if own_mesh.shape != tuple(tensor.device_mesh.shape):
        raise LayoutError(
            f"the tensor is on a torch mesh of shape {tuple(tensor.device_mesh.shape)}, but mesh "
            f"{own_mesh} has shape {own_mesh.shape}"
        )
    return _layout(own_mesh, tensor.placements, _order_of(tensor._spec), tensor.shape, tensor.dtype)


def layout_of_spec(spec: DTensorSpec) -> Layout:
    """Return the layout of a spec of torch's planners; raises what `layout_of` raises."""
    if spec.tensor_meta is None:
        raise LayoutError(f"{spec} lacks a tensor; give it a tensor_meta with shape and dtype")
    mesh, meta = DeviceMesh.from_torch(spec.mesh), spec.tensor_meta
    return _layout(mesh, spec.placements, _order_of(spec), meta.shape, meta.dtype)


def _order_of(spec: DTensorSpec) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return the order in which axes shard each dim; None for strided shards.

    Split factors of strided shards contain the order.
    """
    strided = any(isinstance(placement, _StridedShard) for placement in spec.placements)
    return None if strided else getattr(spec, "shard_order", None)


@lru_cache(maxsize=4096)
def _layout(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Layout:
    axis_order = None if order is None else dict(order)
    spec = spec_of_placements(own_placements(placements), shape, mesh.shape, axis_order)
    return Layout(mesh, spec, shape, dtype)


def is_strided(tensor: TorchDTensor) -> bool:
    """Return True if torch represents the tensor by strided shards, as it does for S10."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def local_of(tensor: TorchDTensor) -> torch.Tensor:
    """Return this rank's shard, with the same storage; gradients flow back to the DTensor."""
    return _shard_of(tensor, _of_gradient(tensor.placements))


def torch_dtensor(
    shard: torch.Tensor, layout: Layout, torch_mesh: TorchMesh | None = None
) -> TorchDTensor:
    """Return a torch DTensor of this rank's shard, with its storage; gradients flow back.

    A rank outside the mesh passes an empty tensor. Raises what `DeviceMesh.to_torch` raises, and
    `LossyConversionError` if torch cannot express the combination of pending reductions, or would
    give the uneven shards other boxes.
    """
    mesh = layout.mesh
    if not _has_torchs_boxes(layout):
        raise LossyConversionError(
            f"torch would split shape {layout.global_shape} by {layout.spec} at other indices; "
            "use save_sharded, or redistribute to the mesh's order of axes first"
        )
    if torch_mesh is None:
        torch_mesh = mesh.to_torch(device_type_of(mesh) if shard.is_meta else shard.device.type)
    if len({partial.op for partial in layout.spec.partials}) > 1:
        raise LossyConversionError(
            f"torch has no tensor with several kinds of pending reductions, such as {layout.spec}; "
            "finish one of them first"
        )
    means = [mesh.shape[int(p.axis)] for p in layout.spec.partials if p.op == "avg"]
    return _from_shard(
        shard, torch_mesh, to_placements(layout.spec, mesh), layout.global_shape, 1 / prod(means)
    )


@lru_cache(maxsize=4096)
def _has_torchs_boxes(layout: Layout) -> bool:
    """Return True if torch gives every shard its box.

    Some uneven shards, of a dim cut by axes in descending order, get another box.
    """
    mesh, shape = layout.mesh, layout.global_shape
    placements = to_placements(layout.spec, mesh)
    strided = {p.dim for p in placements if isinstance(p, _StridedShard)}
    cut = ((dim, layout.spec.dim_specs[dim].axes) for dim in strided)
    if all(shape[dim] % prod(mesh.shape[int(axis)] for axis in axes) == 0 for dim, axes in cut):
        return True
    for device, box in layout.boxes().items():
        at = list(mesh.coordinates(device))
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh.shape, at, placements)
        for (start, stop), size, offset in zip(box, sizes, offsets, strict=True):
            if stop - start != size or (size and start != offset):
                return False
    return True


def _from_shard(
    shard: torch.Tensor,
    mesh: TorchMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    gradient_factor: float = 1,
) -> TorchDTensor:
    # torch leaves Function.apply untyped.
    made: TorchDTensor = _OfShard.apply(  # type: ignore[no-untyped-call]
        shard, mesh, tuple(placements), torch.Size(shape), gradient_factor
    )
    return made


def _shard_of(tensor: TorchDTensor, of_gradient: tuple[Placement, ...]) -> torch.Tensor:
    # torch leaves Function.apply untyped.
    shard: torch.Tensor = _ToShard.apply(tensor, of_gradient)  # type: ignore[no-untyped-call]
    return shard


# torch's from_local and to_local make tensors with separate version counters, so a backward pass
# would miss writes to tensors that it needs. They also lose second-order gradients in another
# layout. Shards are independent here; in torch replicas are one tensor. So a second-order gradient
# of addends is a pending sum here, and complete on every device there.


class _OfShard(torch.autograd.Function):
    """Makes a torch DTensor of a shard, differentiably."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        shard: torch.Tensor,
        mesh: TorchMesh,
        placements: tuple[Placement, ...],
        shape: torch.Size,
        factor: float,
    ) -> torch.Tensor:
        ctx.placements, ctx.factor = placements, factor
        ctx.set_materialize_grads(False)
        order = list(range(len(shape)))
        if shard.dim() == len(shape):  # dims have the order in memory of the shard's
            order.sort(key=shard.stride().__getitem__, reverse=True)
        stride = torch.empty_permuted(shape, order, device="meta").stride()
        return counted_with(
            shard,
            TorchDTensor.from_local(
                shard, mesh, placements, run_check=False, shape=shape, stride=stride
            ),
        )

    @staticmethod
    def backward(ctx: Any, gradient: TorchDTensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        if gradient is None:
            return None, None, None, None, None
        complete = _of_gradient(ctx.placements)
        if gradient.placements != complete:
            gradient = gradient.redistribute(placements=complete)
        added_up = tuple(Partial() if p.is_partial() else p for p in ctx.placements)
        shard = _shard_of(gradient, added_up)
        return shard if ctx.factor == 1 else shard * ctx.factor, None, None, None, None


class _ToShard(torch.autograd.Function):
    """Returns the shard of a torch DTensor, differentiably, given its gradient's placements."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        tensor: TorchDTensor,
        of_gradient: tuple[Placement, ...],
    ) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.shape = tensor.device_mesh, of_gradient, tensor.shape
        sizes = list(zip(tensor.device_mesh.shape, tensor.placements, strict=True))
        ctx.addends = prod(size for size, p in sizes if p.is_partial())
        ctx.factor = prod(size for size, p in sizes if p == Partial("avg"))
        ctx.set_materialize_grads(False)
        local = tensor.to_local()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return counted_with(tensor, local.view_as(local))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # noqa: ANN401
        if gradient is None:
            return None, None
        if ctx.factor != 1:
            gradient = gradient * ctx.factor
        return _from_shard(gradient, ctx.mesh, ctx.placements, ctx.shape, 1 / ctx.addends), None


def counted_with(tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """Return `alias`, another tensor of the same storage, with the version counter of `tensor`."""
    if alias.is_inference():  # inference tensors have no version counters
        return alias
    with _Detaching(alias):
        return tensor.detach()


class _Detaching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Makes ``detach`` return `stand_in`, to which torch then gives the version counter."""

    def __init__(self, stand_in: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._stand_in = stand_in

    def __torch_dispatch__(
        self,
        _func: Callable[..., object],
        _types: object,
        _args: Sequence[object] = (),
        _kwargs: object = None,
    ) -> torch.Tensor:
        """Return `stand_in` whatever function is called."""
        return self._stand_in


def in_our_words(tensor: TorchDTensor) -> TorchDTensor:
    """Redistribute a tensor to placements that a spec can express; most tensors are unchanged.

    torch's masked and scaled sums are finished. Shards that are not boxes, as after flattening a
    sharded dim, are gathered. A pending min, max or prod that requires a gradient is finished,
    since torch can differentiate this and shardspec cannot.
    """
    # True for each placement that a spec can express, and that tracked gradients pass.
    expressible = [
        not tensor.requires_grad or p.reduce_op in ("sum", "avg")
        if type(p) is Partial
        else type(p) in (Replicate, Shard)
        for p in tensor.placements
    ]
    if all(expressible):
        return tensor
    if not any(p.is_partial() for p in tensor.placements):
        grid = DeviceMesh(range(tensor.device_mesh.size()), tensor.device_mesh.shape)
        with suppress(LayoutError):
            from_placements(tensor.placements, tensor.dim(), grid)
            return tensor
    placements = [
        p if keep else Replicate() for p, keep in zip(tensor.placements, expressible, strict=True)
    ]
    finished = tensor.redistribute(placements=placements)
    if not tensor.requires_grad:
        return finished
    # torch cannot pass a gradient with a pending sum back to a masked sum; the gradient of a shard
    # has none.
    return _from_shard(local_of(finished), tensor.device_mesh, placements, finished.shape)


def _of_gradient(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements of a gradient, which has no pending reductions."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)

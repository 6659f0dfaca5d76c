"""Cuts a global tensor into the shards of devices, and checks that shards fit a layout."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from shardspec.comm.agreement import description
from shardspec.comm.communicator import Communicator
from shardspec.comm.process_group import communicator_of
from shardspec.comm.steps import Exchange
from shardspec.dtypes import dtype_name
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout, SpecLike, checked_mesh
from shardspec.layout.moving import transfers_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tensor.run import mesh_text, run_conversion

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

Facts: TypeAlias = tuple[tuple[int, ...], str]
"""Shape and dtype of a shard."""

_UNSIGNED: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_BITS: Final = {**_UNSIGNED, 16: torch.complex128}
"""Dtypes that keep any bits, by their size in bytes."""
_SENT_ONCE_BYTES: Final = 1 << 20
"""The least bytes for which the source sends each element once and an all-gather makes copies."""


def communicator_for(
    communicator: Communicator | None, mesh: DeviceMesh | None, needs_shards: str = ""
) -> Communicator:
    """Return `communicator`, or by default that of the running job for this mesh.

    Raises `LayoutError` if it is for another mesh or there is no mesh, and `CommunicatorError` on a
    rank outside the mesh if `needs_shards` says what that rank cannot do.
    """
    mesh = checked_mesh(mesh)
    chosen = communicator_of(mesh) if communicator is None else communicator
    if chosen.mesh != mesh:
        raise LayoutError(
            f"the communicator is for mesh {chosen.mesh} with ids {chosen.mesh.ids}, but the "
            f"tensor is on mesh {mesh} with ids {mesh.ids}; use one mesh"
        )
    if needs_shards and not chosen.addressable:
        raise CommunicatorError(
            f"this rank is not part of mesh {mesh} with ids {mesh.ids}; only its ranks "
            f"{needs_shards}"
        )
    return chosen


def new_layout(
    mesh: DeviceMesh, spec: SpecLike, global_shape: Sequence[int], dtype: torch.dtype
) -> Layout:
    """Return the layout of a new tensor; LayoutError if the spec has pending reductions."""
    layout = Layout(mesh, spec, global_shape, dtype)
    if layout.spec.partials:
        raise LayoutError(
            f"a new tensor cannot be sharded as {layout.spec}: a pending reduction has one addend "
            "per device; give each device's addend to DTensor.from_local"
        )
    return layout


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype by its name: "bfloat16" is `torch.bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


@lru_cache(maxsize=4096)
def shape_and_dtype(layout: Layout, device: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and torch dtype of the shard that a device has."""
    return layout.local_shape(device), torch_dtype(layout.dtype)


def facts_of(shard: torch.Tensor) -> Facts:
    """Return a shard's shape and the name of its dtype."""
    check_dense(shard)
    return tuple(shard.shape), dtype_name(shard.dtype)


def bits_of(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Return the elements' bits as a numpy array of unsigned integers; no copy on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return plain.view(_BITS[plain.element_size()]).numpy()


def check_shards(layout: Layout, facts: Mapping[int, Facts | None]) -> None:
    """Raise `LayoutError` if a device's shard does not fit the layout; `facts` are by device."""
    for device, given in facts.items():
        if given is None:
            raise LayoutError(f"the shard of device {device} is missing for {layout}")
        shape = layout.local_shape(device)
        if given != (shape, layout.dtype):
            raise LayoutError(
                f"device {device} has a shard of shape {given[0]} and dtype {given[1]}, "
                f"but under {layout} it holds shape {shape} and dtype {layout.dtype}; correct the "
                "shard, the spec or global_shape"
            )


def copies_for(devices: Sequence[int], shard: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return device -> shard: the shard itself for the first device, and copies for the others.

    Copies are separate leaves, so the gradient of `shard` is that of the first device.
    """
    check_dense(shard)
    first, *others = devices
    copies = {d: shard.detach().clone().requires_grad_(shard.requires_grad) for d in others}
    return {first: shard, **copies}


def added_up(mesh: DeviceMesh, spec: ShardingSpec, facts: Mapping[int, Facts]) -> tuple[int, ...]:
    """Return the global shape of shards: shards of 3 and 4 rows by "[S0,R]" make 7 rows.

    Raises `LayoutError` if a shard has a different number of dims than the spec.
    """
    for device in mesh.ids:
        if len(facts[device][0]) != spec.dims:
            raise LayoutError(
                f"device {device} has a shard of shape {facts[device][0]}, but spec {spec} is for "
                f"{spec.dims} dims"
            )
    return tuple(
        sum(part.size for part in dim_spec.parts)
        or sum(facts[device][0][dim] for device in mesh.group(mesh.ids[0], dim_spec.axes))
        for dim, dim_spec in enumerate(spec.dim_specs)
    )


def is_torch_dtensor(value: object) -> "TypeGuard[TorchDTensor]":
    """Return True for a DTensor of torch; False if torch's DTensor was never imported.

    Importing it takes as long as the rest of torch.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_dense(tensor: object) -> None:
    """Raise `LayoutError` unless this is a plain dense torch tensor."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor.layout, Layout):
        raise LayoutError(
            f"expected a plain torch.Tensor, got a {type(tensor).__name__}; use "
            "torch.as_tensor(...) for arrays and lists, and redistribute for a DTensor"
        )
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise LayoutError(
            f"a {'nested' if tensor.is_nested else kind} tensor cannot be sharded, only dense ones "
            "can; convert it first, by to_dense(), dequantize() or to_padded_tensor()"
        )
    if is_torch_dtensor(tensor):
        raise LayoutError(
            "this is a DTensor of torch; DTensor.from_torch makes one of ours of it, and "
            "shardspec.redistribute shards it another way"
        )


def shards_of(
    tensor: torch.Tensor, layout: Layout, communicator: Communicator, src_rank: int | None
) -> dict[int, torch.Tensor]:
    """Return this process's shards of the global tensor that rank `src_rank` has.

    Of other ranks' tensors only shape, dtype and device matter. If `src_rank` is None, all ranks
    must have the same tensor, and nothing is sent.
    """
    ids, addressable = layout.mesh.ids, communicator.addressable
    if src_rank is None:
        check_copies(communicator, dict.fromkeys(addressable, tensor), f"the tensor for {layout}")
    elif not (isinstance(src_rank, int) and 0 <= src_rank < len(ids)):
        raise LayoutError(
            f"src_rank {src_rank!r} is no index into the {len(ids)} ids {ids} of the mesh; give "
            f"0 to {len(ids) - 1}, or None if every rank has the same tensor"
        )
    if src_rank is None or len(addressable) in (0, len(ids)):
        return {device: _shard_of(tensor, layout, device) for device in addressable}
    # A scalar travels as a vector of one element.
    full = tensor if tensor.dim() else tensor.view(1)
    target = layout if tensor.dim() else Layout(layout.mesh, "[R]", (1,), layout.dtype)
    sent = target
    if tensor.nbytes >= _SENT_ONCE_BYTES or not target.spec.is_plain:
        sent = _without_copies(target)
    whole = ShardingSpec(full.dim())
    source = Layout(DeviceMesh([ids[src_rank]], (1,)), whole, full.shape, layout.dtype)
    (device,) = addressable
    given = full if device in source.mesh else full.new_empty([0] * full.dim())
    words = {
        "mesh": mesh_text(layout),
        "new tensor": str(layout.spec),
        "shape": str(list(layout.global_shape)),
        "dtype": layout.dtype,
        "gradient": "wanted" if tensor.requires_grad else "",
        "src_rank": str(src_rank),
    }
    with communicator.conversion(description(words), tensor.device.type):
        exchange = Exchange(tuple(range(layout.mesh.ndim)))
        received = communicator.run(transfers_of(exchange, source, sent), {device: given})
    if sent != target:
        received = run_conversion(LayoutConverter().plan(sent, target), communicator, received)
    return {device: received[device].view(layout.local_shape(device))}


def _shard_of(tensor: torch.Tensor, layout: Layout, device: int) -> torch.Tensor:
    """Return a contiguous copy of the box of a global tensor that a device has."""
    for dim, side in enumerate(layout.intervals(device)):
        pieces = [tensor.narrow(dim, lo, hi - lo) for lo, hi in side]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return tensor.clone(memory_format=torch.contiguous_format)


def _without_copies(layout: Layout) -> Layout:
    """Return a layout in which every element is on one device, by sharding along all axes."""
    spec, shape = layout.spec, layout.global_shape
    spec = ShardingSpec(spec.dims, spec.dim_partition_dict)
    unused = [axis for axis in range(layout.mesh.ndim) if axis not in spec.axes]
    dim = max(range(len(shape)), key=layout.local_shape(layout.mesh.ids[0]).__getitem__)
    return layout.with_spec(spec.with_dims({dim: [*spec.dim_specs[dim].axes, *unused]}))


def check_copies(
    communicator: Communicator, tensors: Mapping[int, torch.Tensor], what: str
) -> None:
    """Raise `LayoutError` if ranks have different tensors; only if ``SHARDSPEC_CHECK=1``."""
    if os.environ.get("SHARDSPEC_CHECK") != "1":
        return
    first = communicator.mesh.ids[0]
    digests = communicator.gather({device: _digest(t) for device, t in tensors.items()})
    differing = [str(device) for device, digest in digests.items() if digest != digests[first]]
    if differing:
        raise LayoutError(
            f"{what} should be the same on every rank, but that of rank {', '.join(differing)} "
            f"differs from that of rank {first}"
        )


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()

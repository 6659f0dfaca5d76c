"""Specs as placements of `torch.distributed.tensor`, and back."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardspec.errors import LossyConversionError
from shardspec.layout.layout import SpecLike, resolve_axes
from shardspec.layout.placements import (
    PartialPlacement,
    Placement,
    Split,
    Whole,
    placements_of,
    spec_of_placements,
)
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

__all__ = ["from_placements", "placements_text", "to_placements", "to_shard_order"]


def to_placements(spec: SpecLike, mesh: DeviceMesh) -> tuple["TorchPlacement", ...]:
    """Return torch's placements for a spec, one per mesh axis.

    Axes that split a dim in another order than from left to right become `_StridedShard`, as torch
    writes them, and so do parts of one size. torch has every spec without other parts and without
    blocks, which raise `LossyConversionError`; where a dim does not divide evenly, it splits by the
    same rule. An axis that the mesh lacks is an `AxisError`.

    Examples
    --------
    >>> to_placements("[S10,R]", DeviceMesh(range(4), (2, 2)))
    (_StridedShard(dim=0, sf=2), Shard(dim=0))
    """
    from torch.distributed.tensor import placement_types

    return tuple(
        getattr(placement_types, kind)(*args, **options)
        for kind, args, options in _calls(spec, mesh)
    )


def to_shard_order(
    spec: SpecLike, mesh: DeviceMesh
) -> tuple[tuple["TorchPlacement", ...], dict[int, tuple[int, ...]]]:
    """Return torch's placements without strides, and the order that torch keeps beside them.

    That is, per dim that is split, the axes that do so, the major one first, as `from_placements`
    takes them. ``DTensorSpec.shard_order`` has them as ``ShardOrderEntry(dim, axes)``.

    Examples
    --------
    >>> to_shard_order("[S10,R]", DeviceMesh(range(4), (2, 2)))
    ((Shard(dim=0), Shard(dim=0)), {0: (1, 0)})
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    resolved.check_plain("an order of axes beside torch's placements")
    placements = tuple(
        Shard(placement.dim) if isinstance(placement, _StridedShard) else placement
        for placement in to_placements(resolved, mesh)
    )
    order = resolved.dim_partition_dict.items()
    return placements, {dim: tuple(map(int, axes)) for dim, axes in order}


def from_placements(
    placements: Sequence["TorchPlacement"],
    dims: int | Sequence[int],
    mesh: DeviceMesh,
    *,
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> ShardingSpec:
    """Return the spec that torch's placements, one per mesh axis, describe.

    `dims` is the number of dims, or the shape of the tensor: a `_StridedShard` whose factor no axis
    has made is a dim of parts, ``S0{8,8}``, whose sizes follow from it. `shard_order` has per dim
    the axes that split it, the major one first, where torch keeps the order beside the placements
    (``DTensorSpec.shard_order``).

    Raises `LayoutError` if the number of placements is not that of the axes, a dim does not exist,
    or no order of the axes has these split factors; `LossyConversionError` if a placement is of
    another kind: a masked or scaled partial, or one that has no name. Also if several axes shard
    parts of one dim.

    Examples
    --------
    >>> from torch.distributed.tensor import Partial, Shard
    >>> str(from_placements([Shard(0), Partial()], 2, DeviceMesh(range(4), (2, 2))))
    '[S0,R|P1]'
    >>> from torch.distributed.tensor.placement_types import _StridedShard
    >>> str(from_placements([_StridedShard(0, split_factor=2)], (8, 3), DeviceMesh([0, 1])))
    '[S0{4,4},R]'
    """
    ours = [_ours(placement) for placement in placements]
    return spec_of_placements(ours, dims, mesh.shape, shard_order)


def _ours(placement: "TorchPlacement") -> Placement:
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    # By exact class: those derived from Partial mean something else.
    kind = type(placement)
    if kind is Replicate:
        return Whole()
    if isinstance(placement, Shard) and kind is Shard:
        return Split(placement.dim)
    if isinstance(placement, _StridedShard):
        return Split(placement.dim, int(placement.split_factor))
    if isinstance(placement, Partial) and kind is Partial:
        match placement.reduce_op:
            case "sum" | "avg" | "min" | "max" as op:
                return PartialPlacement(op)
            case "product" | "prod":
                return PartialPlacement("prod")
    raise LossyConversionError(
        f"placement {placement} has no counterpart in a spec; redistribute to Shard, Replicate or "
        "Partial of sum, avg, min, max or product first"
    )


def placements_text(spec: SpecLike, mesh: DeviceMesh) -> str:
    """Write torch's placements for a spec as they are written in Python; needs no torch.

    Examples
    --------
    >>> placements_text("[S10,R]", DeviceMesh(range(4), (2, 2)))
    '[_StridedShard(0, split_factor=2), Shard(0)]'
    """
    texts = (
        f"{kind}({', '.join([*map(json.dumps, args), *(f'{k}={v}' for k, v in options.items())])})"
        for kind, args, options in _calls(spec, mesh)
    )
    return f"[{', '.join(texts)}]"


def _calls(
    spec: SpecLike, mesh: DeviceMesh
) -> Iterator[tuple[str, tuple[int | str, ...], dict[str, int]]]:
    """Yield the class of torch, and its arguments, of the placement of every mesh axis."""
    for placement in placements_of(resolve_axes(ShardingSpec.of(spec), mesh), mesh.shape):
        match placement:
            case Whole():
                yield "Replicate", (), {}
            case PartialPlacement(op):
                yield "Partial", ("product" if op == "prod" else op,), {}
            case Split(dim, 1):
                yield "Shard", (dim,), {}
            case Split(dim, factor):
                yield "_StridedShard", (dim,), {"split_factor": factor}

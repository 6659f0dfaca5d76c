"""Specs as placements of `torch.distributed.tensor`, and back."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, get_args

from shardspec.comm.steps import ReduceOp
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

_OPS: Final[Mapping[str, ReduceOp]] = {op: op for op in get_args(ReduceOp)} | {"product": "prod"}


def to_placements(spec: SpecLike, mesh: DeviceMesh) -> tuple["TorchPlacement", ...]:
    """Return torch's placements for a spec, one per mesh axis.

    Axes in another order than from left to right, and parts of one size, are a `_StridedShard`.
    Other parts, and blocks, raise `LossyConversionError`.

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
    """Return torch's placements without strides, and per sharded dim its axes, major first.

    ``DTensorSpec.shard_order`` has them as ``ShardOrderEntry(dim, axes)``.
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

    `dims` is the number of dims, or the shape of the tensor, which gives the sizes where a
    `_StridedShard` means parts, ``S0{8,8}``. `shard_order` is ``DTensorSpec.shard_order`` as a
    dict. Raises as `spec_of_placements` does, and `LossyConversionError` for a masked or scaled
    partial.
    """
    return spec_of_placements([*map(_ours, placements)], dims, mesh.shape, shard_order)


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
    if isinstance(placement, Partial) and kind is Partial and placement.reduce_op in _OPS:
        return PartialPlacement(_OPS[placement.reduce_op])
    raise LossyConversionError(
        f"placement {placement} has no counterpart in a spec; redistribute to Shard, Replicate or "
        "Partial of sum, avg, min, max or product first"
    )


def placements_text(spec: SpecLike, mesh: DeviceMesh) -> str:
    """Return the Python source of torch's placements; works without torch."""
    texts = (
        f"{kind}({', '.join([*map(json.dumps, args), *(f'{k}={v}' for k, v in options.items())])})"
        for kind, args, options in _calls(spec, mesh)
    )
    return f"[{', '.join(texts)}]"


def _calls(
    spec: SpecLike, mesh: DeviceMesh
) -> Iterator[tuple[str, tuple[int | str, ...], dict[str, int]]]:
    """Yield the name of torch's class, and its arguments, for every mesh axis."""
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

"""Converts specs to placements of `torch.distributed.tensor`, one per mesh axis, and back.

torch splits a dim along the mesh axes from left to right. In `[S10]` on a 2x2 mesh axis 1 splits
first, so axis 0 gets a ``_StridedShard`` whose split factor is the number of parts that axis 1
makes: ``(_StridedShard(0, split_factor=2), Shard(0))``. The rule is
``DTensorSpec._convert_shard_order_to_StridedShard`` in torch 2.13. If only one axis shards a dim,
the factor is the number of separately sharded parts: `[S0{4,4}]` on a mesh of 2 is
``(_StridedShard(0, split_factor=2),)``. This module does not import torch.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from shardspec.boxes import split_interval
from shardspec.comm.steps import ReduceOp
from shardspec.errors import LayoutError, LossyConversionError
from shardspec.layout.spec import DimSpec, Part, ShardingSpec, check_plain
from shardspec.mesh.device_ids import whole_number
from shardspec.text import counted, shown

_MODULE: Final = "torch.distributed.tensor.placement_types"
REDUCE_OPS: Final[Mapping[str, ReduceOp]] = {
    **{op: op for op in get_args(ReduceOp)},
    "product": "prod",
}


class Split(NamedTuple):
    """A split of a dim: torch's ``Shard``, or ``_StridedShard`` with a factor above 1."""

    dim: int
    split_factor: int = 1
    """Number of parts that axes further right make; this axis splits each part."""


Placement: TypeAlias = Split | ReduceOp | None
"""A split, the operation of a pending reduction (``Partial``), or nothing (``Replicate``)."""


def is_placements(value: object) -> bool:
    """Return True for a list, such as torch's placements; raises `LayoutError` for a placement.

    >>> is_placements(["Shard(0)"]), is_placements("[S0]")
    (True, False)
    """
    types = sys.modules.get(_MODULE)
    if types is not None and isinstance(value, types.Placement):
        raise LayoutError(
            f"{value!r} is the placement of one mesh axis; give a list with one per axis, as in "
            f"[{value!r}]"
        )
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def own_placements(placements: object) -> tuple[Placement, ...]:
    """Return torch's placements as `Placement` values of this module.

    Raises `LayoutError` for other objects, `LossyConversionError` for masked or scaled partials.
    """
    assert isinstance(placements, Sequence)
    types = sys.modules.get(_MODULE)
    return tuple(_own(types, placement) for placement in placements)


def _own(types: Any, placement: Any) -> Placement:  # noqa: ANN401  # torch may be missing
    if types is None or not isinstance(placement, types.Placement):
        raise LayoutError(
            f"{shown(placement)} is not a placement; give Shard, Replicate or Partial of torch for "
            "each mesh axis, or a spec in one text, such as '[S0,R]'"
        )
    # By exact class, because subclasses of Partial have other meanings.
    kind = type(placement)
    if kind is types.Replicate:
        return None
    if kind in (types.Shard, types._StridedShard):
        dim, factor = whole_number(placement.dim), 1
        if kind is types._StridedShard:
            factor = int(placement.split_factor)
        if dim is None:
            raise LayoutError(f"{placement!r}: give a whole number as dim")
        return Split(dim, factor)
    if kind is types.Partial and placement.reduce_op in REDUCE_OPS:
        return REDUCE_OPS[placement.reduce_op]
    raise LossyConversionError(
        f"placement {placement} has no counterpart in a spec; redistribute to Shard, Replicate or "
        "Partial of sum, avg, min, max or product first"
    )


def placements_of(spec: ShardingSpec, mesh_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placement of every mesh axis; the axes of `spec` must be numbers.

    Raises `LossyConversionError` for blocks, and for parts that torch cannot express.

    >>> placements_of(ShardingSpec.parse("[S10,R|P2]"), (2, 3, 2))
    (Split(dim=0, split_factor=3), Split(dim=0, split_factor=1), 'sum')
    """
    placements: list[Placement] = [None] * len(mesh_shape)
    for dim, cut in enumerate(spec.dim_specs):
        parts = _parts(sum(part.size for part in cut.parts), len(cut.parts))
        if not cut.is_plain and (cut.block > 1 or len(cut.axes) > 1 or parts != cut.parts):
            check_plain(spec, "torch's placements")
        axes = [int(axis) for axis in cut.axes]
        for place, axis in enumerate(axes):
            before = prod(mesh_shape[previous] for previous in axes[:place] if previous > axis)
            placements[axis] = Split(dim, max(1, len(cut.parts)) * before)
    for partial in spec.partials:
        placements[int(partial.axis)] = partial.op
    return tuple(placements)


def spec_of_placements(
    placements: Sequence[Placement],
    dims: int | Sequence[int],
    mesh_shape: Sequence[int],
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> ShardingSpec:
    """Return the spec equivalent to placements, one per mesh axis.

    `dims` is the number of the tensor's dims, or their sizes if a split factor makes parts. A
    negative dim of a `Split` counts from the end. torch may store the order of axes of each dim in
    `shard_order`; split factors are then all 1. Raises `LayoutError` for placements that do not fit
    mesh or tensor, and `LossyConversionError` if several axes shard the parts of one dim.

    >>> str(spec_of_placements([Split(0, 3), Split(0)], 2, (2, 3)))
    '[S10,R]'
    >>> str(spec_of_placements([Split(0, 2)], (6, 5), (3,)))
    '[S0{3,3},R]'
    """
    check_count(placements, mesh_shape)
    sizes = None if isinstance(dims, int) else tuple(dims)
    dims = dims if isinstance(dims, int) else len(dims)
    orders: dict[int, list[int | str]] = {}
    factors: dict[int, list[int]] = {}
    # From the right, each axis is inserted where the sizes of the axes before it multiply to its
    # split factor.
    for axis, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, Split):
            continue
        if not -dims <= placement.dim < dims:
            raise LayoutError(
                f"the placement of axis {axis} splits dim {placement.dim}, but the tensor has "
                f"{counted(dims, 'dim')}"
            )
        order = orders.setdefault(placement.dim % dims, [])
        split_factors = factors.setdefault(placement.dim % dims, [])
        split_factors.append(placement.split_factor)
        right_of_it = [mesh_shape[int(other)] for other in order]
        made = list(accumulate(right_of_it, mul, initial=split_factors[0]))
        if placement.split_factor not in made:
            raise LayoutError(
                f"axis {axis} has split factor {placement.split_factor}, but the axes to its right "
                f"that split the same dim make {right_of_it or 'no'} parts; no order of the axes "
                "has it"
            )
        order.insert(made.index(placement.split_factor), axis)
    parts = {dim: split_factors for dim, split_factors in factors.items() if split_factors[0] > 1}
    if shard_order is not None and not parts:
        known: dict[int, list[int | str]] = {d: list(a) for d, a in shard_order.items() if a}
        axes_placed, axes_known = (
            {d: sorted(a, key=int) for d, a in o.items()} for o in (orders, known)
        )
        if axes_placed != axes_known:
            raise LayoutError(f"shard order {known} names other dims or axes than the placements")
        orders = known
    cuts = {dim: DimSpec(tuple(order)) for dim, order in orders.items()}
    for dim, split_factors in parts.items():
        if sizes is None:
            raise LayoutError(
                f"split factor {split_factors[0]} makes parts of dim {dim}, whose size is not "
                "given; give the shape of the tensor"
            )
        if len(split_factors) > 1:
            # torch distributes such tensors by one rule and gathers them by another.
            raise LossyConversionError(
                f"axes {sorted(map(int, orders[dim]))} shard dim {dim} with split factors "
                f"{split_factors[::-1]}, which torch's full_tensor() mixes up; redistribute to "
                "Shard or Replicate over all of them but one first"
            )
        cuts[dim] = DimSpec(cuts[dim].axes, _parts(sizes[dim], split_factors[0]))
    pending: dict[int | str, ReduceOp] = {
        axis: op for axis, op in enumerate(placements) if isinstance(op, str)
    }
    return ShardingSpec(dims, cuts, partial=pending)


def check_count(placements: Sequence[object], mesh_shape: Sequence[int]) -> None:
    """Raise `LayoutError` unless there is one placement per mesh axis.

    >>> check_count(["sum"], (2, 2))
    Traceback (most recent call last):
        ...
    shardspec.errors.LayoutError: 1 placement for a mesh of 2 axes (2x2); give one per axis
    """
    if len(placements) != len(mesh_shape):
        raise LayoutError(
            f"{counted(len(placements), 'placement')} for a mesh of "
            f"{counted(len(mesh_shape), 'axis', 'axes')} ({'x'.join(map(str, mesh_shape))}); give "
            "one per axis"
        )


def _parts(size: int, factor: int) -> tuple[Part, ...]:
    """Return the parts into which a split factor divides a dim; an axis shards each of them."""
    intervals = (split_interval(0, size, factor, place) for place in range(factor))
    return tuple(Part(hi - lo) for lo, hi in intervals if lo < hi)

"""Specs in the words of `torch.distributed.tensor`: one placement per mesh axis, and back.

torch splits a dim by the axes that shard it from left to right. An axis that splits inside axes
further right has a split factor: the number of parts which those have made before
(``_StridedShard``). So `[S10]` on a 2x2 mesh is ``(_StridedShard(0, split_factor=2), Shard(0))``.
The rule is ``DTensorSpec._convert_shard_order_to_StridedShard`` in torch 2.13, and its inverse.
Nothing here needs torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from shardspec.comm.steps import ReduceOp
from shardspec.errors import LayoutError
from shardspec.layout.spec import ShardingSpec

__all__ = ["PartialPlacement", "Placement", "Split", "Whole", "placements_of", "spec_of_placements"]


@dataclass(frozen=True, slots=True)
class Whole:
    """The axis splits nothing: torch's ``Replicate``."""


@dataclass(frozen=True, slots=True)
class Split:
    """The axis splits a dim: torch's ``Shard``, or ``_StridedShard`` with a factor above 1."""

    dim: int
    split_factor: int = 1
    """Parts that axes further right have made of the dim before this one splits each of them."""


@dataclass(frozen=True, slots=True)
class PartialPlacement:
    """A reduction over the axis is pending: torch's ``Partial``."""

    op: ReduceOp


Placement: TypeAlias = Whole | Split | PartialPlacement


def placements_of(spec: ShardingSpec, mesh_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placement of every mesh axis.

    Parameters
    ----------
    spec
        Axes by number.
    mesh_shape
        Devices along each axis.

    Examples
    --------
    >>> placements_of(ShardingSpec.parse("[S10,R]"), (2, 3))
    (Split(dim=0, split_factor=3), Split(dim=0, split_factor=1))
    """
    spec.check_plain("torch's placements")
    placements: list[Placement] = [Whole()] * len(mesh_shape)
    for dim, axes in spec.dim_partition_dict.items():
        for place, axis in enumerate(axes):
            before = [int(other) for other in axes[:place] if int(other) > int(axis)]
            placements[int(axis)] = Split(dim, prod(mesh_shape[other] for other in before))
    for partial in spec.partials:
        placements[int(partial.axis)] = PartialPlacement(partial.op)
    return tuple(placements)


def spec_of_placements(
    placements: Sequence[Placement],
    dims: int,
    mesh_shape: Sequence[int],
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> ShardingSpec:
    """Return the spec that placements describe.

    Parameters
    ----------
    placements
        One per mesh axis.
    dims
        Dims of the tensor; a negative dim of a `Split` counts from the end.
    mesh_shape
        Devices along each axis.
    shard_order
        Per dim the axes that split it, the major one first, where torch keeps that beside the
        placements; split factors are then all 1.

    Raises
    ------
    LayoutError
        If the number of placements is not that of the axes, a dim does not exist, or no order of
        the axes has these split factors.

    Examples
    --------
    >>> str(spec_of_placements([Split(0, 3), Split(0)], 2, (2, 3)))
    '[S10,R]'
    >>> str(spec_of_placements([Split(0), PartialPlacement("sum")], 1, (2, 3)))
    '[S0|P1]'
    """
    if len(placements) != len(mesh_shape):
        raise LayoutError(
            f"{len(placements)} placements for a mesh of {len(mesh_shape)} axes "
            f"({'x'.join(map(str, mesh_shape))}); give one per axis"
        )
    orders: dict[int, list[int | str]] = {}
    partial: dict[int | str, ReduceOp] = {}
    # From the right: an axis goes in after as many parts as its factor says.
    for axis in reversed(range(len(mesh_shape))):
        match placements[axis]:
            case Whole():
                pass
            case PartialPlacement(op):
                partial[axis] = op
            case Split(dim, factor):
                if not -dims <= dim < dims:
                    raise LayoutError(
                        f"the placement of axis {axis} splits dim {dim}, but the tensor has {dims} "
                        f"{'dim' if dims == 1 else 'dims'}"
                    )
                order = orders.setdefault(dim % dims, [])
                order.insert(_place(order, factor, mesh_shape, axis), axis)
    if shard_order is not None:
        orders = _checked_order(orders, {d: list(axes) for d, axes in shard_order.items() if axes})
    return ShardingSpec(dims, orders, partial=partial)


def _place(order: Sequence[int | str], factor: int, mesh_shape: Sequence[int], axis: int) -> int:
    parts = 1
    for place in range(len(order) + 1):
        if parts == factor:
            return place
        if place < len(order):
            parts *= mesh_shape[int(order[place])]
    raise LayoutError(
        f"axis {axis} has split factor {factor}, but the axes to its right that split the same dim "
        f"make {[mesh_shape[int(a)] for a in order] or 'no'} parts; no order of the axes has it"
    )


def _checked_order(
    found: Mapping[int, list[int | str]], given: dict[int, list[int | str]]
) -> dict[int, list[int | str]]:
    if {dim: sorted(axes, key=int) for dim, axes in found.items()} != {
        dim: sorted(axes, key=int) for dim, axes in given.items()
    }:
        raise LayoutError(f"shard order {given} names other dims or axes than the placements")
    return given

"""Defines the steps of a plan as plain values: each is one collective or one local move.

Several axes of one step share one collective. `backward` follows the convention of
`torch.distributed.tensor`: a device receives the gradient of its box of the global tensor, so
devices with the same box receive the same gradient.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

ReduceOp: TypeAlias = Literal["sum", "avg", "min", "max", "prod"]
"""Operations that combine the addends of a tensor."""


@dataclass(frozen=True, slots=True)
class Slice:
    """R → S: keep a part of one dim; `axes` are appended to its axes, so [S0] becomes [S01]."""

    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    """S → R: gather the innermost `axes` of one dim, in the order of the spec: [S01] to [S0]."""

    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllToAll:
    """S → S: move the innermost axes of one dim to the end of another: [S01,R] to [S0,S1]."""

    src_dim: int
    dst_dim: int
    src_axes: tuple[int, ...]
    dst_axes: tuple[int, ...]
    """The same axes in their order at the end of `dst_dim`."""

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes along which data moves."""
        return self.dst_axes


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """P → S: reduce over `axes` and keep a part of `dim`: [R|P0] to [S0]."""

    dim: int
    axes: tuple[int, ...]
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class AllReduce:
    """P → R: finish a pending reduction over ascending axes; every device gets the full result."""

    axes: tuple[int, ...]
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class Permute:
    """Send every device its new shard from one device, as in [S01] → [S10].

    Possible if the devices have the same boxes before and after, each equally often.
    """

    axes: tuple[int, ...]
    """Mesh axes whose position in the spec changes, ascending."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send every device exactly the bytes it lacks; holders of the same box share the sending.

    Possible between any two layouts without pending reductions, also on different meshes.
    """

    axes: tuple[int, ...]
    """Mesh axes whose position in the spec changes, ascending; empty between different meshes."""
    apart: tuple[int, ...] = ()
    """Slow mesh axes: replicas along them do not share the sending, only the nearest send."""
    per_node: int = field(default=0, repr=False)
    """Devices per host, by ids: a holder on the receiver's host sends; 0 if any holder may."""


Step: TypeAlias = Slice | AllGather | AllToAll | ReduceScatter | AllReduce | Permute | Exchange


def backward(step: Step) -> Step | None:
    """Return the step for the gradient of a step; None if the gradient stays in place.

    >>> backward(AllGather(0, (1,))), backward(AllReduce((0,), "sum"))
    (Slice(dim=0, axes=(1,)), None)
    """
    match step:
        case Slice(dim, axes) | ReduceScatter(dim, axes, _):
            return AllGather(dim, axes)
        case AllGather(dim, axes):
            return Slice(dim, axes)
        case AllToAll(src_dim, dst_dim, src_axes, dst_axes):
            return AllToAll(dst_dim, src_dim, dst_axes, src_axes)
        case Permute() | Exchange():
            return step
        case AllReduce():  # the gradient of a sum is the gradient of each addend
            return None

"""The closed set of steps: one collective or one local move each, as pure data.

Several axes of one step travel in one collective. `backward` follows the convention of
`torch.distributed.tensor`: the gradient that arrives at a device is that of its box of the global
tensor, so devices that hold the same box receive the same gradient.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

ReduceOp: TypeAlias = Literal["sum", "avg", "min", "max", "prod"]
"""Operations that combine the addends of a tensor."""


@dataclass(frozen=True, slots=True)
class Slice:
    """R → S: keep a part; `axes` come after those that shard the dim already, major first."""

    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    """S → R: collect the innermost `axes` of one dim, in the order of the spec before the step."""

    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllToAll:
    """S → S: move the innermost axes of one dim, in their order there, to the end of another."""

    src_dim: int
    dst_dim: int
    src_axes: tuple[int, ...]
    dst_axes: tuple[int, ...]
    """The same axes in the order in which they arrive at the end of `dst_dim`."""

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes along which data moves."""
        return self.dst_axes


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """P → S: finish a reduction and keep a part; `axes` are in the order in which they arrive."""

    dim: int
    axes: tuple[int, ...]
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class AllReduce:
    """P → R: finish a pending reduction over ascending axes; every device gets the whole result."""

    axes: tuple[int, ...]
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class Permute:
    """Every device gets its whole new shard from one device: S01 ↔ S10, S0 ↔ S1 of equal length.

    Possible if the devices together hold the same boxes before and after, each equally often.
    """

    axes: tuple[int, ...]
    """Mesh axes that shard otherwise afterwards, ascending."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send every device exactly the bytes it lacks; holders of the same box share the sending.

    Possible between any two layouts without pending reductions, also on different meshes.
    """

    axes: tuple[int, ...]
    """Mesh axes that shard otherwise afterwards, ascending; empty between different meshes."""
    apart: tuple[int, ...] = ()
    """Mesh axes so slow that replicas along them do not share the sending; the nearest send."""
    per_node: int = field(default=0, repr=False)
    """Devices that share a host, by ids: replicas of the receiver's host send; 0 if any does."""


Step: TypeAlias = Slice | AllGather | AllToAll | ReduceScatter | AllReduce | Permute | Exchange


def backward(step: Step) -> Step | None:
    """Return the step that carries a gradient back; None if the gradient stays in place."""
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

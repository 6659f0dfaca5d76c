"""Boxes by the backend's own collectives, where they fit.

These take tensors in which the parts of all ranks lie one behind the other, equally long, in the
order of the ranks. NCCL has algorithms for all-gather and reduce-scatter that its sends and
receives do not reach; its all-to-all is nothing but sends and receives.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_size
from shardspec.comm.failures import failing
from shardspec.comm.role import Role
from shardspec.comm.steps import AllGather, ReduceOp, ReduceScatter, Step

__all__ = ["Native", "fits", "in_turn"]


# Named anew in torch 2.13, which warns of the old names.
_NEW_NAMES: Final = torch.__version__ >= "2.13"  # compares as versions do
_ALL_GATHER: Final = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
_REDUCE_SCATTER: Final = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor


class Native:
    """Carries boxes by all-gather and reduce-scatter, in steps that fit; a `Carrier`.

    Parameters
    ----------
    group
        The members of the roles, ranks ascending.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def move(self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in; see `Carrier`."""
        with failing(what, _others(role)):
            _ALL_GATHER(result.view(-1), shard.contiguous().view(-1), group=self._group)

    def reduce(
        self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with the sum or mean of the addends; see `Carrier`."""
        assert op in ("sum", "avg"), "one that fits"
        with failing(what, _others(role)):
            _REDUCE_SCATTER(result.view(-1), shard.contiguous().view(-1), group=self._group)
        if op == "avg":
            result /= len(role.members)


def _others(role: Role) -> list[int]:
    return [peer for peer in role.members if peer != role.device]


def fits(step: Step, role: Role) -> bool:
    """Say whether a collective of the backend does a step; all members say the same.

    Examples
    --------
    >>> from shardspec.comm.role import role_of
    >>> from shardspec.layout.layout import Layout
    >>> from shardspec.mesh import DeviceMesh
    >>> for shape in ((6, 5), (7, 5)):
    ...     cut = Layout(DeviceMesh(range(2), (2,)), "[S0,R]", shape, "int8")
    ...     step = AllGather(0, (0,))
    ...     fits(step, role_of(step, cut.mesh, 1, cut.box, cut.with_spec("[R,R]").box))
    True
    False
    """
    members = sorted(role.members)
    match step:
        case AllGather():
            coming = {part.peer: part.box for part in role.incoming}
            return in_turn([coming.get(peer) for peer in members], role.wanted)
        case ReduceScatter(op="sum" | "avg"):
            going = {**dict(role.outgoing), role.device: role.wanted}
            return in_turn([going.get(peer) for peer in members], role.held)
        case _:
            return False


def in_turn(parts: Sequence[Box | None], whole: Box) -> bool:
    """Say whether parts of a box lie one behind the other in memory, equally long, and fill it.

    Examples
    --------
    >>> whole = ((0, 4), (0, 3))
    >>> in_turn([((0, 2), (0, 3)), ((2, 4), (0, 3))], whole)
    True
    >>> in_turn([((2, 4), (0, 3)), ((0, 2), (0, 3))], whole)
    False
    """
    size = box_size(whole)
    if size == 0 or size % len(parts):
        return False
    each = size // len(parts)
    return all(
        part is not None and _flat_range(part, whole) == (at * each, (at + 1) * each)
        for at, part in enumerate(parts)
    )


def _flat_range(part: Box, whole: Box) -> tuple[int, int] | None:
    """Return where a part lies in the memory of a whole, or None where it has gaps."""
    start = 0
    stride = box_size(whole)
    partial = False
    for (lo, hi), (whole_lo, whole_hi) in zip(part, whole, strict=True):
        if partial and (lo, hi) != (whole_lo, whole_hi):
            return None
        stride //= whole_hi - whole_lo
        start += (lo - whole_lo) * stride
        partial = partial or hi - lo > 1
    return start, start + box_size(part)

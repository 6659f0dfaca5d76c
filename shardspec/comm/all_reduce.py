"""All-reduce of any dtype and operation: every member reduces a part, then all share the parts."""

import torch

from shardspec.boxes import split_interval
from shardspec.comm.carrier import Carrier
from shardspec.comm.fresh import fresh
from shardspec.comm.role import Incoming, Role
from shardspec.comm.steps import AllReduce

__all__ = ["all_reduce"]


def all_reduce(
    carrier: Carrier, step: AllReduce, members: tuple[int, ...], me: int, shard: torch.Tensor
) -> torch.Tensor:
    """Return the reduction of the members' shards: as many bytes as on a ring.

    Parameters
    ----------
    carrier
        What carries the parts.
    step, members
        The operation, and the ranks whose shards are combined, in the order in which they are.
    me
        The rank of this process.
    shard
        Its addend; only read.
    """
    if shard.is_contiguous():
        flat = shard.view(-1)
        result = fresh(flat, flat.shape)
    else:
        # The parts are then reduced in place: nobody else reads the part that this rank reduces.
        result = shard.clone(memory_format=torch.contiguous_format).view(-1)
        flat = result
    whole = ((0, flat.numel()),)
    parts = {
        peer: (split_interval(0, flat.numel(), len(members), at),)
        for at, peer in enumerate(members)
    }
    filled = {peer: part for peer, part in parts.items() if part[0][0] < part[0][1]}
    mine = parts[me]
    others = [peer for peer in members if peer != me]
    reducing = Role(
        me,
        members,
        whole,
        mine,
        tuple((peer, part) for peer, part in filled.items() if peer != me),
        tuple(Incoming(peer, mine, whole) for peer in members) if me in filled else (),
    )
    reduced = result[slice(*mine[0])]
    carrier.reduce(step, reducing, flat, reduced, step.op)
    sharing = Role(
        me,
        members,
        mine,
        whole,
        tuple((peer, mine) for peer in others) if me in filled else (),
        tuple(Incoming(peer, part, part) for peer, part in filled.items()),
    )
    carrier.move(step, sharing, reduced, result)
    return result.view(shard.shape)

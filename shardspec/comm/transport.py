"""How the boxes of a step travel between processes: the protocol, and what its ways share."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from shardspec.boxes import slices_within, split_interval
from shardspec.comm.control import ranks_text
from shardspec.comm.results import checked, combine, empty_hugepages
from shardspec.comm.routes import Incoming, TransferSchedule
from shardspec.comm.steps import ReduceOp
from shardspec.errors import CommunicatorError

__all__ = [
    "Transport",
    "all_reduce",
    "cause",
    "copy_own_part",
    "failing",
]


class Transport(Protocol):
    """Moves the boxes of one step between the shards of different processes.

    Results do not depend on the transport, bit for bit.
    """

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Put the boxes that this device gets side by side, and serve those that others want.

        Parameters
        ----------
        schedule
            What this device does.
        shard
            Shaped as the box held before, of any strides; only read.
        result
            Shaped as the box held after, to be filled. Where the shard is a part of it, it is in
            place.

        Raises
        ------
        CommunicatorError
            If a peer has gone, or does not come within the timeout of the process group.
        """
        ...

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Combine the addends of all members, of the box held after; see `move`.

        The result may lie in the shard, in the place of this device's own addend.
        """
        ...


def all_reduce(
    transport: Transport, schedule: TransferSchedule, shard: torch.Tensor, op: ReduceOp
) -> torch.Tensor:
    """Return the reduction of all members' shards, of any dtype and operation.

    Every member reduces a part, then all share the parts: as many bytes as on a ring.
    """
    step, me, members = schedule.step, schedule.device, schedule.members
    if len(members) == 1 or shard.numel() == 0:
        return combine([shard], op)
    if shard.is_contiguous():
        flat = shard.view(-1)
        result = empty_hugepages(flat, flat.shape)
    else:
        # The parts are then reduced in place: nobody else reads the part that this rank reduces.
        result = flat = shard.clone(memory_format=torch.contiguous_format).view(-1)
    whole = ((0, flat.numel()),)
    parts = {
        peer: (split_interval(0, flat.numel(), len(members), at),)
        for at, peer in enumerate(members)
    }
    filled = {peer: part for peer, part in parts.items() if part[0][0] < part[0][1]}
    mine = parts[me]
    addends = tuple(Incoming(peer, mine, whole) for peer in members) if me in filled else ()
    others = tuple((peer, part) for peer, part in filled.items() if peer != me)
    reduced = result[slice(*mine[0])]
    with checked(step, result if result is not flat else result[:0]):
        reducing = TransferSchedule(step, me, members, whole, mine, others, addends)
        transport.reduce(reducing, flat, reduced, op)
        readers = tuple((peer, mine) for peer in schedule.peers) if me in filled else ()
        coming = tuple(Incoming(peer, part, part) for peer, part in filled.items())
        sharing = TransferSchedule(step, me, members, mine, whole, readers, coming)
        transport.move(sharing, reduced, result)
    return result.view(shard.shape)


def copy_own_part(schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
    """Copy what a device holds and keeps to its place."""
    for part in schedule.incoming:
        if part.peer == schedule.device:
            place = result[slices_within(part.box, schedule.after)]
            kept = shard[slices_within(part.box, schedule.before)]
            if place.data_ptr() != kept.data_ptr():
                place.copy_(kept)


@contextmanager
def failing(what: object, peers: Iterable[int]) -> Iterator[None]:
    """Turn what `torch.distributed` raises into a `CommunicatorError`.

    Parameters
    ----------
    what
        The step that is under way.
    peers
        Whom this rank talks to.

    Examples
    --------
    >>> with failing("AllGather(dim=0, axes=(0,))", [1, 2]):
    ...     raise RuntimeError("Connection closed by peer")
    Traceback (most recent call last):
        ...
    shardspec.errors.CommunicatorError: AllGather(dim=0, axes=(0,)) with ranks 1, 2 failed: \
Connection closed by peer; the job cannot go on, see what these ranks say
    """
    try:
        yield
    except CommunicatorError:
        raise
    except RuntimeError as error:  # DistBackendError and the other errors of torch are such
        raise CommunicatorError(
            f"{what} with {ranks_text(peers)} failed: {cause(error)}; the job cannot go on, see "
            "what these ranks say"
        ) from error


def cause(error: RuntimeError) -> str:
    """Return what happened, without where in the sources of the backend, and without its advice."""
    line = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), "no reason given"
    )
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]

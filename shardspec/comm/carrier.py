"""The protocol of what carries boxes from device to device, and how a device keeps its own part."""

from typing import Protocol

import torch

from shardspec.boxes import slices_within
from shardspec.comm.reduce_op import ReduceOp
from shardspec.comm.role import Role

__all__ = ["Carrier", "keep_own_part"]


class Carrier(Protocol):
    """Carries the boxes of one step between the shards of different processes.

    Results do not depend on the carrier, bit for bit.
    """

    def move(self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Put the boxes that this device gets side by side, and serve those that others want.

        Parameters
        ----------
        what
            The step, for errors.
        role
            What this device does.
        shard
            Shaped as the box held, of any strides; only read.
        result
            Shaped as the box wanted, to be filled. Where the shard is a part of it, it is in place.

        Raises
        ------
        CommunicatorError
            If a peer has gone, or does not come within the timeout of the process group.
        """
        ...

    def reduce(
        self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Combine the parts that come in, all of the box wanted; see `move`.

        The result may lie in the shard, in the place of this device's own addend.
        """
        ...


def keep_own_part(role: Role, shard: torch.Tensor, result: torch.Tensor) -> None:
    """Copy what a device holds and keeps to its place."""
    for part in role.incoming:
        if part.peer == role.device:
            place = result[slices_within(part.box, role.wanted)]
            kept = shard[slices_within(part.box, role.held)]
            if place.data_ptr() != kept.data_ptr():
                place.copy_(kept)

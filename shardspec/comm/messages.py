"""Boxes as messages: isend and irecv of bounded chunks, on any backend and any device.

Both ends cut a box into the same chunks. Where a part of a tensor is not contiguous its chunks pass
through buffers, and only so many bytes of these are under way at once. So a step needs little
memory besides the shards, and a chunk is copied while the cache still holds it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_size, slices_within
from shardspec.comm.carrier import keep_own_part
from shardspec.comm.chunks import chunks
from shardspec.comm.failures import failing
from shardspec.comm.reduce import combine_into
from shardspec.comm.reduce_op import ReduceOp
from shardspec.comm.role import Role

__all__ = ["STAGED_BYTES", "Addressed", "Messages", "exchange"]

STAGED_BYTES: Final = 16 << 20
"""The most that lies in buffers at once on the CPU, up to 32 peers; with more, half a MiB for each.
Four times the bytes of a round elsewhere."""
_ROUND_BYTES: Final = {"cpu": STAGED_BYTES // 4}
"""What a device sends to all its peers in one round, and what it receives, by its type."""
_ROUND_BYTES_ELSEWHERE: Final = 64 << 20
"""Links between accelerators want longer messages."""
_LEAST_BYTES: Final = 256 << 10
"""The shortest chunk: shorter messages cost more time than they save memory."""

Addressed: TypeAlias = list[tuple[int, torch.Tensor]]
"""Pairs of peer and tensor."""
Boxes: TypeAlias = list[tuple[int, Box]]
"""Pairs of peer and box."""


class Messages:
    """Carries boxes by `torch.distributed.isend` and `irecv`; a `Carrier`."""

    def move(self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in, and send what others want; see `Carrier`."""
        line = _Line(what, role, shard)
        for sends, receives in line.rounds():
            arriving, late = [], []
            for peer, box in receives:
                place = result[slices_within(box, role.wanted)]
                if place.is_contiguous():
                    arriving.append((peer, place))
                else:
                    arriving.append((peer, line.buffer(place)))
                    late.append(partial(place.copy_, arriving[-1][1]))
            line.post(sends, arriving, late)
        keep_own_part(role, shard, result)
        line.finish()

    def reduce(
        self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with what the addends of all members come to; see `Carrier`."""
        line = _Line(what, role, shard)
        for sends, receives in line.rounds():
            arriving, late = [], []
            if receives:
                box = receives[0][1]  # of every member the same
                place = result[slices_within(box, role.wanted)]
                own = shard[slices_within(box, role.held)]
                arriving = [(peer, line.buffer(place)) for peer, _ in receives]
                if place.data_ptr() == own.data_ptr():
                    # The result takes the place of this device's addend, maybe not the first.
                    own = line.buffer(place).copy_(own)
                addends = {role.device: own, **dict(arriving)}
                in_order = [addends[part.peer] for part in role.incoming]
                late = [partial(combine_into, place, in_order, op)]
            line.post(sends, arriving, late)
        line.finish()


@dataclass(frozen=True, slots=True)
class _Round:
    """One chunk of every box, on its way."""

    works: Sequence[dist.Work]
    late: Sequence[Callable[[], object]]
    """What is done with the chunks once they are here."""
    tensors: Sequence[torch.Tensor]
    """Kept until they have gone."""
    buffers: Sequence[torch.Tensor]
    """Free for the next round after that."""


class _Line:
    """Rounds on their way, the oldest first, and the buffers that they share."""

    def __init__(self, what: object, role: Role, shard: torch.Tensor) -> None:
        self._what, self._role, self._shard = what, role, shard
        self._peers = {peer for peer, _ in role.outgoing} | {part.peer for part in role.incoming}
        self._peers.discard(role.device)
        self._under_way: deque[_Round] = deque()
        boxes = [box for _, box in role.outgoing] + [part.box for part in role.incoming]
        peers = max(1, len(role.members) - 1)
        self._round_bytes = _ROUND_BYTES.get(shard.device.type, _ROUND_BYTES_ELSEWHERE)
        most = max(self._round_bytes // peers, _LEAST_BYTES) // shard.element_size()
        self._most = most
        self._buffer_size = min(most, max(map(box_size, boxes), default=0))
        self._free: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []

    def rounds(self) -> Iterator[tuple[Boxes, Boxes]]:
        """Yield what is sent and received round by round, once there is room for it."""
        role = self._role
        incoming = [(part.peer, part.box) for part in role.incoming if part.peer != role.device]
        sends, receives = (
            zip_longest(
                *([(peer, part) for part in chunks(box, self._most)] for peer, box in boxes)
            )
            for boxes in (role.outgoing, incoming)
        )
        room = 2 * self._round_bytes  # for one round more, of what is sent and what comes
        for sent, received in zip_longest(sends, receives, fillvalue=()):
            while self._under_way and self._staged_bytes() > room:
                self._finish_oldest()
            yield [part for part in sent if part], [part for part in received if part]

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous buffer shaped as a chunk, for the round that is posted next."""
        flat = self._free.pop() if self._free else self._shard.new_empty(self._buffer_size)
        self._taken.append(flat)
        return flat[: like.numel()].view(like.shape)

    def post(self, sends: Boxes, receives: Addressed, late: Sequence[Callable[[], object]]) -> None:
        """Start a round; parts of the shard that are not contiguous are sent from a copy."""
        leaving = []
        for peer, box in sends:
            part = self._shard[slices_within(box, self._role.held)]
            leaving.append((peer, part if part.is_contiguous() else self.buffer(part).copy_(part)))
        with failing(self._what, self._peers):
            works = _start(leaving, receives)
        kept = [tensor for _, tensor in leaving]
        self._under_way.append(_Round(works, late, kept, self._taken))
        self._taken = []

    def finish(self) -> None:
        """Wait for all rounds."""
        while self._under_way:
            self._finish_oldest()

    def _staged_bytes(self) -> int:
        count = sum(len(one.buffers) for one in self._under_way)
        return count * self._buffer_size * self._shard.element_size()

    def _finish_oldest(self) -> None:
        oldest = self._under_way.popleft()
        with failing(self._what, self._peers):
            for work in oldest.works:
                work.wait()
        for act in oldest.late:
            act()
        self._free += oldest.buffers


def exchange(what: object, sends: Addressed, receives: Addressed) -> None:
    """Send and receive contiguous tensors, all at once.

    Parameters
    ----------
    what
        What this is for, for errors.
    sends, receives
        Pairs of peer and tensor; those for one peer in the order in which it takes them.

    Raises
    ------
    CommunicatorError
        If a peer has gone, or does not come within the timeout of the process group.
    """
    with failing(what, [peer for peer, _ in sends + receives]):
        for work in _start(sends, receives):
            work.wait()


def _start(sends: Addressed, receives: Addressed) -> list[dist.Work]:
    """Post contiguous tensors as bytes, so that every dtype travels; empty ones do not."""
    ops = [dist.P2POp(dist.irecv, _as_bytes(t), peer) for peer, t in receives if t.numel()]
    ops += [dist.P2POp(dist.isend, _as_bytes(t), peer) for peer, t in sends if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Strides are set, not kept: a single element counts as contiguous whatever its stride, but
    # only stride 1 can be seen as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

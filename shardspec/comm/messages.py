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

from shardspec.boxes import Box, slices_within
from shardspec.comm.carrier import keep_own_part
from shardspec.comm.chunks import chunks
from shardspec.comm.failures import failing
from shardspec.comm.reduce import combine_into
from shardspec.comm.role import Role
from shardspec.comm.steps import ReduceOp

__all__ = ["STAGED_BYTES", "Addressed", "Messages", "exchange"]

STAGED_BYTES: Final = 16 << 20
"""The most that lies in buffers at once, up to 32 peers; with more, half a MiB for each of them."""
_ROUND_BYTES: Final = 4 << 20
"""What a device sends to all its peers in one round, and what it receives."""
_LEAST_BYTES: Final = 256 << 10
"""The shortest chunk: shorter messages cost more time than they save memory."""

Addressed: TypeAlias = list[tuple[int, torch.Tensor]]
"""Pairs of peer and tensor."""


class Messages:
    """Carries boxes by `torch.distributed.isend` and `irecv`; a `Carrier`."""

    def move(self, what: object, role: Role, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in, and send what others want; see `Carrier`."""
        line = _Line(what, role)
        for sends, receives in _rounds(role, shard.element_size()):
            line.make_room()
            places = [(peer, result[slices_within(box, role.wanted)]) for peer, box in receives]
            arriving = [
                (peer, place if place.is_contiguous() else _buffer(place)) for peer, place in places
            ]
            late = [
                partial(place.copy_, buffer)
                for (_, place), (_, buffer) in zip(places, arriving, strict=True)
                if place is not buffer
            ]
            line.post(_parts(role, shard, sends), arriving, late)
        keep_own_part(role, shard, result)
        line.finish()

    def reduce(
        self,
        what: object,
        role: Role,
        shard: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp,
    ) -> None:
        """Fill the result with what the addends of all members come to; see `Carrier`."""
        line = _Line(what, role)
        for sends, receives in _rounds(role, shard.element_size()):
            line.make_room()
            arriving = []
            late = []
            if receives:
                box = receives[0][1]
                place = result[slices_within(box, role.wanted)]
                own = shard[slices_within(box, role.held)]
                arriving = [(peer, _buffer(place)) for peer, _ in receives]
                addends = {role.device: own, **dict(arriving)}
                in_order = [addends[part.peer] for part in role.incoming]
                late = [partial(_combine, place, own, in_order, op)]
            line.post(_parts(role, shard, sends), arriving, late)
        line.finish()


@dataclass(frozen=True, slots=True)
class _Round:
    """One chunk for every peer, on its way."""

    works: Sequence[dist.Work]
    staged_bytes: int
    late: Sequence[Callable[[], object]]
    """What is done with the chunks once they are here."""
    sent: Addressed
    """Kept until it has gone."""


class _Line:
    """Rounds on their way, the oldest first."""

    def __init__(self, what: object, role: Role) -> None:
        self._what = what
        self._peers = {peer for peer, _ in role.outgoing} | {part.peer for part in role.incoming}
        self._peers.discard(role.device)
        self._rounds: deque[_Round] = deque()
        self._staged = 0

    def make_room(self) -> None:
        """Wait until one more round fits into the bound on buffers."""
        while self._rounds and self._staged > STAGED_BYTES - 2 * _ROUND_BYTES:
            self._finish_oldest()

    def post(
        self, sends: Addressed, receives: Addressed, late: Sequence[Callable[[], object]]
    ) -> None:
        """Start a round; parts that are not contiguous are sent from a copy."""
        dense = [(peer, part.contiguous()) for peer, part in sends]
        staged = sum(
            copy.nbytes
            for (_, copy), (_, part) in zip(dense, sends, strict=True)
            if copy is not part
        )
        if late:
            staged += sum(buffer.nbytes for _, buffer in receives)
        with failing(self._what, self._peers):
            works = _start(dense, receives)
        self._rounds.append(_Round(works, staged, late, dense))
        self._staged += staged

    def finish(self) -> None:
        """Wait for all rounds."""
        while self._rounds:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        oldest = self._rounds.popleft()
        with failing(self._what, self._peers):
            for work in oldest.works:
                work.wait()
        for act in oldest.late:
            act()
        self._staged -= oldest.staged_bytes


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


def _rounds(
    role: Role, item_bytes: int
) -> Iterator[tuple[list[tuple[int, Box]], list[tuple[int, Box]]]]:
    """Yield what is sent and received round by round: one chunk of every box in each."""
    peers = max(1, len(role.members) - 1)
    most = max(_ROUND_BYTES // peers, _LEAST_BYTES) // item_bytes
    incoming = [(part.peer, part.box) for part in role.incoming if part.peer != role.device]
    sends, receives = (
        zip_longest(*([(peer, chunk) for chunk in chunks(box, most)] for peer, box in boxes))
        for boxes in (role.outgoing, incoming)
    )
    for sent, received in zip_longest(sends, receives, fillvalue=()):
        yield [part for part in sent if part], [part for part in received if part]


def _parts(role: Role, shard: torch.Tensor, boxes: list[tuple[int, Box]]) -> Addressed:
    return [(peer, shard[slices_within(box, role.held)]) for peer, box in boxes]


def _buffer(place: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(place, memory_format=torch.contiguous_format)


def _combine(
    place: torch.Tensor, own: torch.Tensor, addends: Sequence[torch.Tensor], op: ReduceOp
) -> None:
    if place.data_ptr() == own.data_ptr():
        # The result takes the place of this device's addend, which may not be the first.
        copy = own.clone()
        addends = [copy if addend is own else addend for addend in addends]
    combine_into(place, addends, op)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Strides are set, not kept: a single element counts as contiguous whatever its stride, but
    # only stride 1 can be seen as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

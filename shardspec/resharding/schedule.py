"""What one device sends, receives and keeps under a plan, message by message."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np

from shardspec.boxes import Box, box_size, intersect
from shardspec.comm.routes import chunks
from shardspec.dtypes import item_bytes
from shardspec.resharding.copies import MAX_PEERS, StateCopies

__all__ = ["Messages", "Piece", "Schedule", "Wave", "schedule_for"]

_ALIGNMENT: Final = 16
"""Pieces start at multiples of this in a message, so that every dtype can be seen there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor, and where it lies in a message."""

    move: int
    """The place of the tensor in the plan's moves."""
    box: Box
    """In coordinates of the global tensor."""
    offset: int
    """Byte of the message at which it starts."""
    num_bytes: int


Wave: TypeAlias = tuple[int, int]
"""Which peers, by how far they stand behind the sender in the row of devices, and which of their
messages."""
Messages: TypeAlias = dict[int, tuple[Piece, ...]]
"""By peer, the boxes of its message."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one device does. A wave is at most one message to and from each of some peers.

    Every device takes part in waves in ascending order, so none waits in a circle.
    """

    sends: Mapping[Wave, Messages]
    """Per wave, by peer, what is packed into its message."""
    receives: Mapping[Wave, Messages]
    """Per wave, by peer, what is unpacked from its message."""
    kept: tuple[tuple[int, Box], ...]
    """What the device has already: the tensor's place in the moves, and the box."""


@lru_cache(maxsize=64)
def schedule_for(plan: StateCopies, device: int) -> Schedule:
    """Return what a device does under a plan; both ends of a message find the same one."""
    sends: dict[int, list[tuple[int, Box]]] = {}
    receives: dict[int, list[tuple[int, Box]]] = {}
    kept: list[tuple[int, Box]] = []
    for number, (kind, places) in enumerate(zip(plan.overlaps, plan.kinds.values(), strict=True)):
        width = plan.item_bytes[number]
        starts = plan.senders.starts[number]
        sending = np.array([device in holders for holders in kind.holders], dtype=bool)
        concerned = kind.receiver == device
        if sending.any():
            concerned |= sending[kind.at]
        for demand in np.nonzero(concerned)[0].tolist():
            holders = kind.holders[kind.at[demand]]
            receiver = int(kind.receiver[demand])
            box = kind.box(demand)
            num_bytes = int(kind.elements[demand]) * width
            start = int(starts[demand])
            for place in places:
                for sender, part in plan.senders.split(holders, box, start, num_bytes):
                    if sender == device:
                        sends.setdefault(receiver, []).append((place, part))
                    elif receiver == device:
                        receives.setdefault(sender, []).append((place, part))
                start += num_bytes
        for row in np.nonzero(kind.kept_by == device)[0].tolist():
            own = intersect(
                kind.source_boxes[kind.kept_at[row]], kind.target_boxes[kind.kept_to[row]]
            )
            assert own is not None, "what is kept is an overlap"
            kept += [(place, own) for place in places]
    at = {device: place for place, device in enumerate(plan.devices)}
    here, count = at[device], len(at)
    return Schedule(
        _waves(plan, sends, {peer: (at[peer] - here) % count for peer in sends}),
        _waves(plan, receives, {peer: (here - at[peer]) % count for peer in receives}),
        tuple(sorted(kept)),
    )


def _waves(
    plan: StateCopies, streams: dict[int, list[tuple[int, Box]]], behind: Mapping[int, int]
) -> dict[Wave, Messages]:
    """Divide streams into messages; `behind` says how far the receiver is behind the sender."""
    waves: dict[Wave, Messages] = {}
    for peer, stream in sorted(streams.items()):
        turn = behind[peer] // MAX_PEERS
        for number, message in enumerate(_messages(plan, sorted(stream))):
            waves.setdefault((turn, number), {})[peer] = message
    return waves


def _messages(plan: StateCopies, stream: list[tuple[int, Box]]) -> Iterator[tuple[Piece, ...]]:
    """Divide what goes from one device to another into messages of bounded size."""
    most = plan.bucket_bytes
    message: list[Piece] = []
    end = 0
    for place, box in stream:
        width = item_bytes(plan.moves[place].wire_dtype)
        for part in chunks(box, max(1, most // width)):
            num_bytes = box_size(part) * width
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
            if message and at + num_bytes > most:
                yield tuple(message)
                message, at = [], 0
            message.append(Piece(place, part, at, num_bytes))
            end = at + num_bytes
    if message:
        yield tuple(message)

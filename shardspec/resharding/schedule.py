"""What one device sends, receives and keeps under a plan, message by message."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from shardspec.boxes import Box, box_shape, intersect
from shardspec.comm.routes import chunks
from shardspec.layout.layout import Layout
from shardspec.resharding.copies import MAX_PEERS, StateCopies, TensorMove
from shardspec.resharding.stages import Stage
from shardspec.resharding.views import identity_view

__all__ = [
    "Kept",
    "Messages",
    "Piece",
    "Region",
    "Schedule",
    "Wave",
    "message_bytes",
    "region_of",
    "schedule_for",
]

_ALIGNMENT: Final = 16
"""Pieces start at multiples of this in a message, so that every dtype can be seen there."""
_MESSAGE_BYTES: Final = 4 << 20
"""Of a message at most: larger ones are no faster, and smaller buckets stay in caches."""


class Region(NamedTuple):
    """Where a box lies in memory, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Piece(NamedTuple):
    """A box of one tensor, where it lies in a message, and where in a contiguous shard."""

    move: int
    """The place of the tensor in the plan's moves."""
    box: Box
    """In coordinates of the global tensor, or of the view where the move has one."""
    message: Region
    shard: Region
    end: int
    """Byte of the message behind it."""


class Kept(NamedTuple):
    """A box that a device has already, and where it lies in its contiguous shards."""

    move: int
    box: Box
    source: Region
    target: Region


Wave: TypeAlias = tuple[int, int, int]
"""Which stage of the plan, which peers, by how far they stand behind the sender in the row of
devices, and which of their messages."""
Intervals: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""Per dim the indices that a shard holds, ascending."""
Messages: TypeAlias = dict[int, tuple[Piece, ...]]
"""By peer, the boxes of its message."""
Streams: TypeAlias = dict[int, list[Piece]]
"""By peer, the boxes of all its messages."""
_Streams: TypeAlias = dict[int, list[tuple[int, int, Box]]]
"""By peer the tensor, bytes of an element, and box."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one device does. A wave is at most one message to and from each of some peers.

    Every device takes part in waves in ascending order, so none waits in a circle.
    """

    sends: Mapping[Wave, Messages]
    """Per wave, by peer, what is packed into its message."""
    receives: Mapping[Wave, Messages]
    """Per wave, by peer, what is unpacked from its message."""
    kept: tuple[Kept, ...]
    """What the device has already."""
    largest_message: int = field(init=False)
    """In bytes."""
    streams: tuple[tuple[Streams, Streams], ...] = field(init=False)
    """Per stage all that goes to each peer, and all that comes from it, in order."""

    def __post_init__(self) -> None:
        waves = (*self.sends.values(), *self.receives.values())
        sizes = (message_bytes(pieces) for messages in waves for pieces in messages.values())
        object.__setattr__(self, "largest_message", max(sizes, default=0))
        stages = range(1 + max((wave[0] for wave in self.waves), default=0))
        streams = tuple((_by_peer(self.sends, s), _by_peer(self.receives, s)) for s in stages)
        object.__setattr__(self, "streams", streams)

    @property
    def waves(self) -> list[Wave]:
        """Those that the device takes part in, in order."""
        return sorted({*self.sends, *self.receives})


def _by_peer(waves: Mapping[Wave, Messages], stage: int) -> Streams:
    found: Streams = {}
    for wave in sorted(waves):
        if wave[0] == stage:
            for peer, pieces in waves[wave].items():
                found.setdefault(peer, []).extend(pieces)
    return found


def message_bytes(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a message: whole elements of any dtype."""
    return -(-pieces[-1].end // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=64)
def schedule_for(plan: StateCopies, device: int) -> Schedule:
    """Return what a device does under a plan; both ends of a message find the same one."""
    known = _Shards(plan, device)
    kept: list[Kept] = []
    for places, kind in zip(plan.kinds.values(), plan.stages[0].kinds, strict=True):
        for row in np.nonzero(kind.kept_by == device)[0].tolist():
            own = intersect(
                kind.source_boxes[kind.kept_at[row]], kind.target_boxes[kind.kept_to[row]]
            )
            assert own is not None, "what is kept is an overlap"
            regions = known.region(places[0], own, True), known.region(places[0], own, False)
            kept += [Kept(place, own, *regions) for place in places]
    sends: dict[Wave, Messages] = {}
    receives: dict[Wave, Messages] = {}
    at = {device: place for place, device in enumerate(plan.devices)}
    here, count = at[device], len(at)
    for number, stage in enumerate(plan.stages):
        outgoing, incoming = _streams(stage, list(plan.kinds.values()), device)
        behind = {peer: (at[peer] - here) % count for peer in outgoing}
        sends |= _waves(known, number, outgoing, behind, of_source=number == 0)
        behind = {peer: (here - at[peer]) % count for peer in incoming}
        receives |= _waves(known, number, incoming, behind, of_source=False)
    return Schedule(sends, receives, tuple(sorted(kept)))


def _streams(
    stage: Stage, places: Sequence[Sequence[int]], device: int
) -> tuple[_Streams, _Streams]:
    """Return what a device sends to each other one in a stage, and what it receives."""
    outgoing: _Streams = {}
    incoming: _Streams = {}
    senders = stage.senders
    for kind, starts, width, moves in zip(
        stage.kinds, senders.starts, stage.item_bytes, places, strict=True
    ):
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
            for place in moves:
                for sender, part in senders.split(holders, box, start, num_bytes):
                    if sender == device:
                        outgoing.setdefault(receiver, []).append((place, width, part))
                    elif receiver == device:
                        incoming.setdefault(sender, []).append((place, width, part))
                start += num_bytes
    return outgoing, incoming


class _Part(NamedTuple):
    """A box that fits into a message, or a part of one that does not."""

    box: Box
    num_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of its elements in the message."""
    shard: Region


class _Shards:
    """What is asked again and again of the layouts of one device."""

    def __init__(self, plan: StateCopies, device: int) -> None:
        self.plan = plan
        self.most_bytes = min(plan.bucket_bytes, _MESSAGE_BYTES)
        """Of a message."""
        self._device = device
        self._known: dict[Layout, tuple[tuple[int, ...], Intervals]] = {}
        self._parts: dict[tuple[object, ...], list[_Part]] = {}

    def parts(self, place: int, box: Box, width: int, of_source: bool) -> list[_Part]:
        """Return the parts of a box, which are those of all tensors that are laid out alike."""
        move = self.plan.moves[place]
        key = (of_source, move.source if of_source else move.target, move.view, box, width)
        if key not in self._parts:
            found = []
            for part in chunks(box, max(1, self.most_bytes // width)):
                shape = box_shape(part)
                region = self.region(place, part, of_source)
                found.append(_Part(part, prod(shape) * width, shape, _contiguous(shape), region))
            self._parts[key] = found
        return self._parts[key]

    def region(self, place: int, box: Box, of_source: bool) -> Region:
        """Return where a box lies in the shard of a tensor if that is contiguous."""
        move = self.plan.moves[place]
        layout = move.source if of_source else move.target
        if layout not in self._known:
            strides = _contiguous(layout.local_shape(self._device))
            self._known[layout] = strides, layout.intervals(self._device)
        return region_of(move, box, *self._known[layout], of_source=of_source)


def region_of(
    move: TensorMove, box: Box, strides: Sequence[int], held: Intervals, *, of_source: bool
) -> Region:
    """Return where a box lies in a shard.

    Parameters
    ----------
    move, box
        The tensor, and a box of it, or of its view.
    strides, held
        Of the shard: steps in memory, and the indices that it holds of each dim.
    of_source
        Whether the shard is one of the source.
    """
    view = move.view or identity_view(move.source.global_shape)
    side = view.source if of_source else view.target
    offset = side.offset(strides, held, [lo for lo, _ in box])
    return Region(box_shape(box), side.strides(strides, len(box)), offset)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()


def _waves(
    known: _Shards,
    stage: int,
    streams: _Streams,
    behind: Mapping[int, int],
    *,
    of_source: bool,
) -> dict[Wave, Messages]:
    """Divide streams into messages; `behind` says how far the receiver is behind the sender."""
    waves: dict[Wave, Messages] = {}
    for peer, stream in sorted(streams.items()):
        turn = behind[peer] // MAX_PEERS
        for number, message in enumerate(_messages(known, sorted(stream), of_source)):
            waves.setdefault((stage, turn, number), {})[peer] = message
    return waves


def _messages(
    known: _Shards, stream: list[tuple[int, int, Box]], of_source: bool
) -> Iterator[tuple[Piece, ...]]:
    """Divide what goes from one device to another into messages of bounded size."""
    message: list[Piece] = []
    end = 0
    for place, width, box in stream:
        for part in known.parts(place, box, width, of_source):
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
            if message and at + part.num_bytes > known.most_bytes:
                yield tuple(message)
                message, at = [], 0
            end = at + part.num_bytes
            there = Region(part.shape, part.strides, at // width)
            message.append(Piece(place, part.box, there, part.shard, end))
    if message:
        yield tuple(message)

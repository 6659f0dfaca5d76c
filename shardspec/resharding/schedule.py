"""What one device sends, receives and keeps under a plan.

Tensors that go from the same layout to the same layout are listed together, as they are planned.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from shardspec.boxes import Box, box_shape, box_size, chunks, intersect
from shardspec.layout.layout import Layout
from shardspec.resharding.copies import MAX_PEERS, StateCopies
from shardspec.resharding.views import View, identity_view

_ALIGNMENT: Final = 16
"""Boxes start at multiples of this in a message, so that every dtype can be seen there."""
_MESSAGE_BYTES: Final = 4 << 20
"""Of a message at most: larger ones are no faster, and smaller buckets stay in caches."""


class Part(NamedTuple):
    """The same box of some tensors that are laid out alike, and whose it is."""

    sender: int
    receiver: int
    places: Sequence[int]
    """Of the tensors in the plan's moves."""
    box: Box
    """In coordinates of the global tensor, or of the view where the move has one."""
    item_bytes: int


class Piece(NamedTuple):
    """The same box of some tensors, and where these boxes lie in a message."""

    places: Sequence[int]
    box: Box
    start: int
    """Byte of the first one."""
    step: int
    """Bytes from one to the next."""


Message: TypeAlias = list[Piece]
Wanted: TypeAlias = dict[int, list[Part]]
"""By sender."""
Wave: TypeAlias = tuple[int, int, int]
"""Which stage of the plan, which peers, by how far they stand behind the sender in the row of
devices, and which of their messages."""


class Schedule(NamedTuple):
    """The messages of one device. A wave is at most one to and one from each of some peers.

    Every device takes part in waves in ascending order, so none waits in a circle.
    """

    sends: dict[Wave, dict[int, Message]]
    """Per wave, by peer, what is packed into its message."""
    receives: dict[Wave, dict[int, Message]]
    """Per wave, by peer, what is unpacked from its message."""
    kept: list[Part]
    """What the device has already."""
    largest_message: int
    """In bytes."""


def message_bytes(message: Message) -> int:
    """Return the bytes of a message: whole elements of any dtype."""
    last = message[-1]
    return last.start + last.step * len(last.places)


def _kept_parts(plan: StateCopies, device: int) -> Iterator[Part]:
    """Yield what a device has already."""
    first = plan.stages[0]
    for places, kind, width in zip(plan.kinds.values(), first.kinds, first.item_bytes, strict=True):
        for row in np.nonzero(kind.kept_by == device)[0].tolist():
            boxes = kind.source_boxes[kind.kept_at[row]], kind.target_boxes[kind.kept_to[row]]
            box = intersect(*boxes)
            assert box is not None, "what is kept is an overlap"
            yield Part(device, device, places, box, width)


def _parts_of(
    plan: StateCopies, stage_number: int, device: int, *, sent: bool = True
) -> Iterator[Part]:
    """Yield what a device receives in a stage, and, if asked for, what it sends.

    What goes from one device to another comes in the same order on both.
    """
    stage = plan.stages[stage_number]
    senders = stage.senders
    for places, kind, starts, width in zip(
        plan.kinds.values(), stage.kinds, senders.starts, stage.item_bytes, strict=True
    ):
        concerned = kind.receiver == device
        if sent and len(kind.at):
            concerned |= np.array([device in holders for holders in kind.holders])[kind.at]
        for demand in np.nonzero(concerned)[0].tolist():
            holders, receiver = kind.holders[kind.at[demand]], int(kind.receiver[demand])
            box, num_bytes = kind.box(demand), int(kind.elements[demand]) * width
            shares: dict[tuple[int, Box], Sequence[int]] = {(holders[0], box): places}
            if len(holders) > 1:
                split: dict[tuple[int, Box], list[int]] = {}
                for start, place in enumerate(places):
                    at = int(starts[demand]) + start * num_bytes
                    for share in senders.split(holders, box, at, num_bytes):
                        split.setdefault(share, []).append(place)
                shares = dict(split)
            for (sender, share_box), some in shares.items():
                if receiver == device or sender == device:
                    yield Part(sender, receiver, some, share_box, width)


@lru_cache(maxsize=64)
def reads_for(plan: StateCopies, device: int, stage: int) -> tuple[set[int], set[int], Wanted]:
    """Return who may read from a device in a stage, from whom it may read, and what of whom.

    Of those that hold the same, all are named. What a device has already it reads from itself.
    """
    readers: set[int] = set()
    holders = {device}
    for kind in plan.stages[stage].kinds:
        if len(kind.at):
            holding = np.array([device in some for some in kind.holders])[kind.at]
            readers.update(kind.receiver[holding].tolist())
            wanted = kind.at[kind.receiver == device]
            holders.update(*(kind.holders[at] for at in set(wanted.tolist())))
    found: Wanted = {device: [] if stage else list(_kept_parts(plan, device))}
    for part in _parts_of(plan, stage, device, sent=False):
        found.setdefault(part.sender, []).append(part)
    return readers, holders, found


@lru_cache(maxsize=64)
def schedule_for(plan: StateCopies, device: int) -> Schedule:
    """Return the messages of a device; both ends of one find the same."""
    at = {device: place for place, device in enumerate(plan.devices)}
    sends: dict[Wave, dict[int, Message]] = {}
    receives: dict[Wave, dict[int, Message]] = {}
    most_bytes = min(plan.bucket_bytes, _MESSAGE_BYTES)
    for stage in range(len(plan.stages)):
        streams: dict[tuple[int, int], list[Part]] = {}
        for part in _parts_of(plan, stage, device):
            streams.setdefault((part.sender, part.receiver), []).append(part)
        for (sender, receiver), parts in streams.items():
            turn = (at[receiver] - at[sender]) % len(at) // MAX_PEERS
            waves, peer = (sends, receiver) if sender == device else (receives, sender)
            for number, message in enumerate(_messages(parts, most_bytes)):
                waves.setdefault((stage, turn, number), {})[peer] = message
    messages = [m for waves in (sends, receives) for wave in waves.values() for m in wave.values()]
    largest = max(map(message_bytes, messages), default=0)
    return Schedule(sends, receives, list(_kept_parts(plan, device)), largest)


def _messages(parts: list[Part], most_bytes: int) -> Iterator[Message]:
    """Divide what goes from one device to another into messages of bounded size."""
    message: Message = []
    end = 0
    for part in parts:
        for box in chunks(part.box, max(1, most_bytes // part.item_bytes)):
            step = -(-box_size(box) * part.item_bytes // _ALIGNMENT) * _ALIGNMENT
            left = part.places
            while left:
                fitting = (most_bytes - end) // step
                if message and not fitting:
                    yield message
                    message, end = [], 0
                    continue
                fitting = max(1, fitting)  # alone in a message it may need a few bytes more
                some, left = left[:fitting], left[fitting:]
                message.append(Piece(some, box, end, step))
                end += step * len(some)
    if message:
        yield message


@lru_cache(maxsize=4096)
def region_of(
    layout: Layout,
    view: View | None,
    box: Box,
    strides: tuple[int, ...],
    device: int,
    *,
    of_source: bool,
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return where a box lies in the shard of a device that has these strides.

    That is its shape, and in the unit of the strides its own strides, and its offset.
    """
    view = view or identity_view(layout.global_shape)
    side = view.source if of_source else view.target
    offset = side.offset(strides, layout.intervals(device), [lo for lo, _ in box])
    return box_shape(box), side.strides(strides, len(box)), offset

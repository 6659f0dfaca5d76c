"""Lists the transfers of a step as plain data: which device sends which box to which device.

Devices form groups along the axes of a collective. In a group, a device gets from each member the
intersection of its own box after the step with the member's box before it. If a reduction is
pending, the parts are combined; otherwise they are disjoint. Exchange and permute transfer between
all devices of the mesh.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import itemgetter, ne
from typing import Final, TypeAlias

from shardspec.boxes import Box, box_size, intersect, split_interval
from shardspec.comm.senders import Copy, Holders, Senders, find_copies, whole_senders
from shardspec.comm.steps import Exchange, Permute, ReduceOp, Slice, Step
from shardspec.mesh.device_mesh import DeviceMesh

Distance: TypeAlias = Callable[[int, int], int]
"""The distance of two devices; 0 only from a device to itself."""
Message: TypeAlias = Sequence[Copy]
"""The copies that one device sends to another in one message."""

_ALIGNMENT: Final = 16
"""Boxes in a message start at multiples of this many bytes, enough for every dtype."""
_MESSAGE: Final = 1 << 17
"""The cost of starting a message, in elements, on today's links."""


def aligned_bytes(copy: Copy) -> int:
    """Return the bytes of one box of a copy in a message, padding included.

    >>> aligned_bytes(Copy(((0, 5),), (0,), 1, item_bytes=4))
    32
    """
    return -(-box_size(copy.box) * copy.item_bytes // _ALIGNMENT) * _ALIGNMENT


def message_bytes(message: Message) -> int:
    """Return the bytes of a message; only messages of several boxes are padded.

    >>> copy = Copy(((0, 5),), (0,), 1, item_bytes=4)
    >>> message_bytes([copy]), message_bytes([copy, copy])
    (20, 64)
    """
    if len(message) == 1 and len(message[0].places) == 1:
        return message[0].num_bytes
    return sum(aligned_bytes(copy) * len(copy.places) for copy in message)


def distance_on(mesh: DeviceMesh, axes: Sequence[int] | None = None) -> Distance:
    """Return a function that counts the axes on which two devices differ; by default all count.

    >>> distance = distance_on(DeviceMesh(range(4), (2, 2)))
    >>> distance(0, 1), distance(0, 3)
    (1, 2)
    """
    counted = range(mesh.ndim) if axes is None else axes
    at = {device: [mesh.coordinates(device)[axis] for axis in counted] for device in mesh.ids}
    return lambda a, b: sum(map(ne, at[a], at[b]))


def distance_of(step: Exchange, mesh: DeviceMesh) -> Distance:
    """Return the distance by which an exchange chooses senders: the nearest holder sends."""
    if hosted := step.per_node:
        return lambda a, b: (a != b) + (a // hosted != b // hosted)
    return distance_on(mesh, step.apart)


def exchange_routes(
    before: Mapping[int, Box], after: Mapping[int, Box], distance: Distance
) -> list[Copy]:
    """Return the copies that give every device its box of `after`.

    The ids of `before` and `after` may differ. The nearest holder sends a piece; among equally near
    ones, the holder that has sent least. Messages take time to start, so a piece is divided only if
    its holder would otherwise send much more than its share, and more than any device receives.
    Copies are in the order of `after` and cover every element once.

    >>> before, after = {0: ((0, 2),), 1: ((2, 4),)}, {0: ((0, 4),), 1: ((3, 4),)}
    >>> [(copy.box, copy.sender, copy.receiver) for copy in exchange_routes(before, after, ne)]
    [(((0, 2),), 0, 0), (((2, 4),), 1, 0), (((3, 4),), 1, 1)]
    """
    have: dict[Box, Holders] = {}
    for device, box in sorted(before.items(), key=itemgetter(1)):
        if box_size(box):
            have[box] = (*have.get(box, ()), device)
    want: dict[Box, list[int]] = defaultdict(list)
    for device, box in after.items():
        if box_size(box):
            want[box].append(device)
    order = {device: place for place, device in enumerate(after)}
    copies: list[Copy] = []
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    of_replicas: dict[Holders, list[int]] = defaultdict(list)
    for copy in sorted(find_copies(have, want), key=lambda copy: order[copy.receiver]):
        if copy.receiver not in copy.holders:
            away = [distance(candidate, copy.receiver) for candidate in copy.holders]
            least = min(away)
            near = tuple(
                candidate for candidate, far in zip(copy.holders, away, strict=True) if far == least
            )
            cost = _MESSAGE + box_size(copy.box)
            copy = copy._replace(holders=tuple(whole_senders([(near, cost)], sent)))
            received[copy.receiver] += cost
            of_replicas[near].append(len(copies))
        copies.append(copy)
    most = max(received.values(), default=0)
    divided: dict[int, list[Copy]] = {}
    for near, places in of_replicas.items():
        loads = [sent[holder] for holder in near]
        if max(loads) >= max(most, sum(loads) // len(near)) + 2 * _MESSAGE:
            places.sort(key=lambda place: near.index(copies[place].sender))
            sizes = [box_size(copies[place].box) for place in places]
            senders = Senders([(near, size) for size in sizes])
            for place, start, size in zip(places, senders.starts, sizes, strict=True):
                parts = senders.split(near, copies[place].box, start, size)
                to = copies[place].receiver
                divided[place] = [Copy(box, (sender,), to) for sender, box in parts]
    return [part for place, copy in enumerate(copies) for part in divided.get(place, (copy,))]


def permute_routes(
    before: Mapping[int, Box], after: Mapping[int, Box], distance: Distance
) -> list[Copy]:
    """Return copies in which every device sends its shard to one device, and receives one.

    Devices whose box does not change keep it. Every other device gets its box from the nearest
    holder that does not send yet.

    >>> before, after = {0: ((0, 2),), 1: ((2, 4),)}, {0: ((2, 4),), 1: ((0, 2),)}
    >>> [(copy.box, copy.sender, copy.receiver) for copy in permute_routes(before, after, ne)]
    [(((2, 4),), 1, 0), (((0, 2),), 0, 1)]
    """
    unused: dict[Box, list[int]] = defaultdict(list)
    for device, box in before.items():
        if after[device] != box:
            unused[box].append(device)
    copies = []
    for device, box in after.items():
        holder = device
        if before[device] != box:
            holder = min(unused[box], key=lambda src: distance(src, device))
            unused[box].remove(holder)
        if box_size(box):
            copies.append(Copy(box, (holder,), device))
    return copies


@dataclass(frozen=True, slots=True)
class DeviceTransfers:
    """The transfers of one device in one step; do not modify the lists."""

    step: Step
    device: int
    members: tuple[int, ...]
    """The devices of the group, in the same order on all of them."""
    boxes_before: Mapping[int, Box]
    """The box of each device before the step."""
    after: Box
    """The box of this device after the step."""
    outgoing: Sequence[Copy]
    """The boxes that this device sends to others."""
    incoming: Sequence[Copy]
    """The boxes that this device gets, in the order of their senders, its own part included."""

    @property
    def before(self) -> Box:
        """The box of this device before the step."""
        return self.boxes_before[self.device]

    @property
    def op(self) -> ReduceOp | None:
        """The operation that combines incoming boxes; None if they are disjoint."""
        op: ReduceOp | None = getattr(self.step, "op", None)
        return op

    @property
    def peers(self) -> set[int]:
        """The other devices that this device sends to or receives from."""
        pairs = [(copy.sender, copy.receiver) for copy in (*self.incoming, *self.outgoing)]
        return {*chain(*pairs)} - {self.device}


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfers of one step among the devices of a mesh, as plain data.

    `shardspec.layout.moving` creates them from layouts, and communicators execute them.

    Examples
    --------
    >>> from shardspec.comm.steps import AllGather
    >>> rows, whole = (((0, 2),), ((2, 3),)), (((0, 3),), ((0, 3),))
    >>> transfers = Transfers(AllGather(0, (0,)), DeviceMesh([5, 9], (2,)), rows, whole)
    >>> [(copy.sender, copy.box) for copy in transfers.of(9).incoming]
    [(5, ((0, 2),)), (9, ((2, 3),))]
    """

    step: Step
    mesh: DeviceMesh
    before: tuple[Box, ...]
    """The box of each device before, in the order of the mesh's ids; boxes may be empty."""
    after: tuple[Box, ...]
    """The box of each device after, in the same order."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        value = hash((self.step, self.mesh, self.before, self.after))
        object.__setattr__(self, "_hash", value)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Transfers"], tuple[object, ...]]:
        # Rebuilt rather than restored: hashes of text differ from process to process.
        return Transfers, (self.step, self.mesh, self.before, self.after)

    def of(self, device: int) -> DeviceTransfers:
        """Return the transfers of one device.

        Members are in the order of the mesh, not of the axes in the spec, so that sums add in the
        same order and round alike on every device.
        """
        return _of_device(self, device)


@lru_cache(maxsize=1024)
def _of_device(transfers: Transfers, device: int) -> DeviceTransfers:
    step, mesh = transfers.step, transfers.mesh
    before, after = _boxes(transfers)
    if not isinstance(step, Permute | Exchange):
        members = (device,) if isinstance(step, Slice) else mesh.group(device, sorted(step.axes))
        return _among(step, device, members, before, after)
    incoming, outgoing = (side.get(device, []) for side in _routes(transfers))
    going = [copy for copy in outgoing if copy.receiver != device]
    return DeviceTransfers(step, device, mesh.ids, before, after[device], going, incoming)


def _among(
    step: Step,
    device: int,
    members: tuple[int, ...],
    before: Mapping[int, Box],
    after: Mapping[int, Box],
) -> DeviceTransfers:
    """Return the transfers of a device in a collective, where all members send to each other."""
    incoming = [
        Copy(box, (peer,), device)
        for peer in members
        if (box := intersect(after[device], before[peer])) is not None
    ]
    outgoing = [
        Copy(box, (device,), peer)
        for peer in members
        if peer != device and (box := intersect(before[device], after[peer])) is not None
    ]
    return DeviceTransfers(step, device, members, before, after[device], outgoing, incoming)


@lru_cache(maxsize=256)
def _boxes(transfers: Transfers) -> tuple[dict[int, Box], dict[int, Box]]:
    ids = transfers.mesh.ids
    before, after = (
        dict(zip(ids, boxes, strict=True)) for boxes in (transfers.before, transfers.after)
    )
    return before, after


@lru_cache(maxsize=64)
def _routes(transfers: Transfers) -> tuple[dict[int, list[Copy]], dict[int, list[Copy]]]:
    """Return (device -> copies to it, device -> copies from it), with copies to itself in both."""
    step, boxes = transfers.step, _boxes(transfers)
    if isinstance(step, Exchange):
        copies = exchange_routes(*boxes, distance_of(step, transfers.mesh))
    else:
        copies = permute_routes(*boxes, distance_on(transfers.mesh))
    incoming: dict[int, list[Copy]] = defaultdict(list)
    outgoing: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        incoming[copy.receiver].append(copy)
        outgoing[copy.sender].append(copy)
    return incoming, outgoing


@lru_cache(maxsize=1024)
def all_reduce_halves(
    step: Step, device: int, members: tuple[int, ...], size: int
) -> tuple[DeviceTransfers, DeviceTransfers]:
    """Return the two halves of an all-reduce of a vector: a reduce-scatter and an all-gather.

    >>> from shardspec.comm.steps import AllReduce
    >>> reduce, gather = all_reduce_halves(AllReduce((0,), "sum"), 1, (0, 1), 8)
    >>> reduce.before, reduce.after, gather.after
    (((0, 8),), ((4, 8),), ((0, 8),))
    """
    wholes: dict[int, Box] = dict.fromkeys(members, ((0, size),))
    parts: dict[int, Box] = {
        peer: (split_interval(0, size, len(members), at),) for at, peer in enumerate(members)
    }
    ways = (wholes, parts), (parts, wholes)
    reduce, share = (_among(step, device, members, *boxes) for boxes in ways)
    return reduce, share

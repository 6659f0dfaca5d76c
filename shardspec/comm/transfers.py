"""Who sends which box to whom in one step, as data that needs neither tensors nor a job.

Along the axes of a collective, devices form groups, and inside a group a device gets from each
member what its box after the step shares with the member's box before it. Where a reduction is
pending, the parts are combined; otherwise they are disjoint and are put side by side. Exchange and
permute move between all devices of the mesh.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter, ne
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_size, intersect, split_interval
from shardspec.comm.senders import Holders, Senders, find_copies, whole_senders
from shardspec.comm.steps import Exchange, Permute, ReduceOp, Slice, Step
from shardspec.mesh.device_mesh import DeviceMesh

Distance: TypeAlias = Callable[[int, int], int]
"""How far two devices are apart; 0 only from a device to itself."""
Parts: TypeAlias = list[tuple[int, Box]]
"""Pairs of peer and box."""

_MESSAGE: Final = 1 << 17
"""Elements that take about as long as a message takes to start, on links of today."""


class Piece(NamedTuple):
    """The same box of some tensors, and where these boxes lie in a message."""

    places: Sequence[int]
    box: Box
    start: int
    """Byte of the first one."""
    step: int
    """Bytes from one to the next."""


Message: TypeAlias = Sequence[Piece]
"""What goes from one device to another at once."""


def message_bytes(message: Message) -> int:
    """Return the bytes of a message: whole elements of any dtype in it."""
    last = message[-1]
    return last.start + last.step * len(last.places)


class Transfer(NamedTuple):
    """A box on its way from one device to another, or staying where it is."""

    src: int
    dst: int
    box: Box
    """In coordinates of the global tensor."""


def distance_on(mesh: DeviceMesh, axes: Sequence[int] | None = None) -> Distance:
    """Return a function that counts the axes, of some or all, on which two devices differ."""
    kept = range(mesh.ndim) if axes is None else axes
    at = {device: [mesh.coordinates(device)[axis] for axis in kept] for device in mesh.ids}
    return lambda a, b: sum(map(ne, at[a], at[b]))


def exchange_routes(
    before: Mapping[int, Box], after: Mapping[int, Box], distance: Distance
) -> list[Transfer]:
    """Return what must move so that every device holds its box after; the ids may differ.

    Of the nearest holders of a piece, the one that has sent least sends it. Since every message
    takes time, pieces are divided only where one holder would send much more than its share, and
    than anyone receives. Moves are in the order of `after`, every element once.
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
    moves: list[Transfer] = []
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    of_replicas: dict[Holders, list[int]] = defaultdict(list)
    for copy in sorted(find_copies(have, want), key=lambda copy: order[copy.receiver]):
        holder = copy.receiver
        if holder not in copy.holders:
            away = [distance(one, copy.receiver) for one in copy.holders]
            least = min(away)
            near = tuple(one for one, far in zip(copy.holders, away, strict=True) if far == least)
            cost = _MESSAGE + box_size(copy.box)
            (holder,) = whole_senders([(near, cost)], sent)
            received[copy.receiver] += cost
            of_replicas[near].append(len(moves))
        moves.append(Transfer(holder, copy.receiver, copy.box))
    most = max(received.values(), default=0)
    divided: dict[int, list[Transfer]] = {}
    for near, places in of_replicas.items():
        loads = [sent[holder] for holder in near]
        if max(loads) >= max(most, sum(loads) // len(near)) + 2 * _MESSAGE:
            places.sort(key=lambda place: near.index(moves[place].src))
            sizes = [box_size(moves[place].box) for place in places]
            senders = Senders([(near, size) for size in sizes])
            for place, start, size in zip(places, senders.starts, sizes, strict=True):
                parts = senders.split(near, moves[place].box, start, size)
                divided[place] = [Transfer(one, moves[place].dst, box) for one, box in parts]
    return [part for place, move in enumerate(moves) for part in divided.get(place, (move,))]


def permute_routes(
    before: Mapping[int, Box], after: Mapping[int, Box], distance: Distance
) -> list[Transfer]:
    """Return which device each one gets its whole new shard from, every device sending one.

    Where an axis that is slower for short messages is slower for long ones too, every assignment in
    which devices keep what they can is equally good: the slowest link used is the same.
    """
    unused: dict[Box, list[int]] = defaultdict(list)
    for device, box in before.items():
        if after[device] != box:
            unused[box].append(device)
    moves = []
    for device, box in after.items():
        holder = device
        if before[device] != box:
            holder = min(unused[box], key=lambda src: distance(src, device))
            unused[box].remove(holder)
        if box_size(box):
            moves.append(Transfer(holder, device, box))
    return moves


@dataclass(frozen=True, slots=True)
class DeviceTransfers:
    """What one device does in one step; the lists are only read."""

    step: Step
    device: int
    members: tuple[int, ...]
    """The devices that move data among themselves, in the same order on all of them."""
    held: Mapping[int, Box]
    """What each device holds before the step."""
    after: Box
    """What this one holds after the step."""
    outgoing: Parts
    """Which other device gets which box from it."""
    incoming: Parts
    """Who it gets which box from, its own part included, in the order of members."""

    @property
    def before(self) -> Box:
        """What this device holds before the step."""
        return self.held[self.device]

    @property
    def op(self) -> ReduceOp | None:
        """How what arrives is combined; None where it is disjoint."""
        op: ReduceOp | None = getattr(self.step, "op", None)
        return op

    @property
    def peers(self) -> set[int]:
        """The other devices that it sends to or gets something from."""
        return {peer for peer, _ in [*self.incoming, *self.outgoing]} - {self.device}


@dataclass(frozen=True, slots=True)
class Transfers:
    """What moves in one step among the devices of a mesh, as plain data.

    Layouts make it (`shardspec.layout.moving`), and communicators carry it out.

    Examples
    --------
    >>> from shardspec.comm.steps import AllGather
    >>> rows, whole = {5: ((0, 2),), 9: ((2, 3),)}, {5: ((0, 3),), 9: ((0, 3),)}
    >>> gather = Transfers.between(AllGather(0, (0,)), DeviceMesh([5, 9], (2,)), rows, whole)
    >>> gather.of(9).incoming
    [(5, ((0, 2),)), (9, ((2, 3),))]
    """

    step: Step
    mesh: DeviceMesh
    before: tuple[Box, ...]
    """What each device of the mesh holds, in the order of its ids; boxes may be empty."""
    after: tuple[Box, ...]
    """What each one holds then."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        value = hash((self.step, self.mesh, self.before, self.after))
        object.__setattr__(self, "_hash", value)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Transfers"], tuple[object, ...]]:
        # Rebuilt rather than restored: hashes of text differ from process to process.
        return Transfers, (self.step, self.mesh, self.before, self.after)

    @classmethod
    def between(
        cls, step: Step, mesh: DeviceMesh, before: Mapping[int, Box], after: Mapping[int, Box]
    ) -> "Transfers":
        """Return the transfers of a step from the boxes of devices, by physical id."""
        ends = (tuple(boxes[device] for device in mesh.ids) for boxes in (before, after))
        return cls(step, mesh, *ends)

    def box_after(self, device: int) -> Box:
        """Return what a device holds after the step."""
        return self.after[self.mesh.ids.index(device)]

    def of(self, device: int) -> DeviceTransfers:
        """Return what a device sends and receives.

        Members are sorted by axes, not as a spec has them, so that the order of addends, and with
        it the rounding of sums, is the same everywhere.
        """
        return _of_device(self, device)


@lru_cache(maxsize=1024)
def _of_device(transfers: Transfers, device: int) -> DeviceTransfers:
    step, mesh = transfers.step, transfers.mesh
    held, wanted = _boxes(transfers)
    if not isinstance(step, Permute | Exchange):
        members = (device,) if isinstance(step, Slice) else mesh.group(device, sorted(step.axes))
        return _among(step, device, members, held, wanted)
    incoming, outgoing = (side.get(device, []) for side in _routes(transfers))
    going = [(peer, box) for peer, box in outgoing if peer != device]
    return DeviceTransfers(step, device, mesh.ids, held, wanted[device], going, incoming)


def _among(
    step: Step,
    device: int,
    members: tuple[int, ...],
    held: Mapping[int, Box],
    wanted: Mapping[int, Box],
) -> DeviceTransfers:
    """Return what a device does where each member gets from all others what both boxes share."""
    incoming, outgoing = (
        [(p, box) for p in peers if (box := intersect(mine[device], theirs[p])) is not None]
        for peers, mine, theirs in (
            (members, wanted, held),
            ([peer for peer in members if peer != device], held, wanted),
        )
    )
    return DeviceTransfers(step, device, members, held, wanted[device], outgoing, incoming)


@lru_cache(maxsize=256)
def _boxes(transfers: Transfers) -> tuple[dict[int, Box], dict[int, Box]]:
    ids = transfers.mesh.ids
    before, after = (
        dict(zip(ids, boxes, strict=True)) for boxes in (transfers.before, transfers.after)
    )
    return before, after


@lru_cache(maxsize=64)
def _routes(transfers: Transfers) -> tuple[dict[int, Parts], dict[int, Parts]]:
    """Return what each device receives and sends, its own part included."""
    step, ends = transfers.step, _boxes(transfers)
    if isinstance(step, Exchange):
        moves = exchange_routes(*ends, distance_on(transfers.mesh, step.apart))
    else:
        moves = permute_routes(*ends, distance_on(transfers.mesh))
    incoming: dict[int, Parts] = defaultdict(list)
    outgoing: dict[int, Parts] = defaultdict(list)
    for src, dst, box in moves:
        incoming[dst].append((src, box))
        outgoing[src].append((dst, box))
    return incoming, outgoing


@lru_cache(maxsize=1024)
def all_reduce_halves(
    step: Step, device: int, members: tuple[int, ...], size: int
) -> tuple[DeviceTransfers, DeviceTransfers]:
    """Divide an all-reduce of a vector: each member reduces a part, then all share the parts."""
    wholes: dict[int, Box] = dict.fromkeys(members, ((0, size),))
    parts: dict[int, Box] = {
        peer: (split_interval(0, size, len(members), at),) for at, peer in enumerate(members)
    }
    ways = (wholes, parts), (parts, wholes)
    reduce, share = (_among(step, device, members, *ends) for ends in ways)
    return reduce, share

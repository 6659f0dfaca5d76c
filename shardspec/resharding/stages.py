"""Who sends which bytes to whom when many tensors change their layouts, and in which messages.

Which replica sends a box is decided for all tensors together. Where some devices share a host,
copies may come in two stages, so that bytes cross between hosts once and are passed on inside.
Meshes tell hosts by their links: an axis that is faster than the slowest one joins devices of a
host.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size, chunks
from shardspec.comm.senders import Holders, Senders, find_copies, overlaps
from shardspec.comm.transfers import Message, Piece, message_bytes
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.views import TensorView, View, identity_view

MAX_PEERS: Final = 32
"""How many devices a device sends to at once at most, and receives from."""
_ALIGNMENT: Final = 16
"""Boxes start at multiples of this in a message, which suits every dtype."""
_MESSAGE_BYTES: Final = 4 << 20
"""The longest message: longer ones are no faster, and smaller buckets stay in caches."""


class StateCopy(NamedTuple):
    """The same box of some tensors that are laid out alike, for one device."""

    places: Sequence[int]
    """Of the tensors in the plan's moves."""
    box: Box
    """In coordinates of the global tensor, or of the view where the move has one."""
    holders: Holders
    """Devices that have it; only the sender once that is chosen."""
    receiver: int
    item_bytes: int
    """Bytes of an element on its way."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the boxes of all the tensors."""
        return box_size(self.box) * self.item_bytes * len(self.places)


MoveKind: TypeAlias = tuple[Layout, Layout, View | None]
"""From which layout to which tensors go, and which elements are which."""


def copies_of_kinds(kinds: Iterable[tuple[MoveKind, Sequence[int], int]]) -> Iterator[StateCopy]:
    """Yield what devices need of tensors of each kind, which have places, and bytes an element.

    What a device has already it copies from itself.
    """
    # Experts of a layer differ in who has their boxes alone.
    holders = lru_cache(64)(_holders)
    overlapping = lru_cache(16)(lambda have, want: list(overlaps(have, want)))
    for (source, target, view), places, item_bytes in kinds:
        view = view or identity_view(source.global_shape)
        axes = len(view.shape)
        have, want = holders(source, view.source, axes), holders(target, view.target, axes)
        for box, holding, receiver in find_copies(have, want, overlapping):
            yield StateCopy(places, box, holding, receiver, item_bytes)


def _holders(layout: Layout, side: TensorView, axes: int) -> dict[Box, Holders]:
    """Return the boxes of the view that are not empty, each with its holders; they are disjoint."""
    boxes = _held(layout).items()
    return {part: devices for box, devices in boxes for part in side.boxes(box, axes)}


@lru_cache(maxsize=1024)
def _held(layout: Layout) -> dict[Box, Holders]:
    """Return the boxes of a layout that are not empty, each with its holders."""
    # Parts are intersected one by one: a replicated part may join the one before it.
    cells = [] if layout.spec.is_plain else [LayoutCell(layout, cell) for cell in cells_of(layout)]
    holders: dict[Box, list[int]] = {}
    for device in layout.mesh.ids:
        boxes = [cell.box(device) for cell in cells] or layout.local_boxes(device)
        for box in filter(box_size, boxes):
            holders.setdefault(box, []).append(device)
    return {box: tuple(devices) for box, devices in holders.items()}


def _divided(
    senders: Senders, copy: StateCopy, holders: Holders, start: int
) -> dict[tuple[int, Box], Sequence[int]]:
    """Return which boxes each of the holders sends, and of which tensors."""
    size = copy.num_bytes // len(copy.places)
    given = senders.stretches(holders, start, copy.num_bytes)
    if len(given) == 1:
        return {(given[0][0], copy.box): copy.places}
    shares: dict[tuple[int, Box], list[int]] = {}
    for number, place in enumerate(copy.places):
        for share in senders.split(holders, copy.box, start + number * size, size):
            shares.setdefault(share, []).append(place)
    return dict(shares)


class PlanStage:
    """Copies that need nothing of each other; a stage starts when the one before has ended.

    Of each group by itself the busiest sender sends as little as possible.
    """

    def __init__(self, *groups: Sequence[StateCopy]) -> None:
        self.groups = groups
        self._streams: dict[int, dict[tuple[int, int], list[StateCopy]]] = {}

    @cached_property
    def senders(self) -> list[Senders]:
        """For each group which of the replicas sends what."""
        return [Senders((copy.holders, copy.num_bytes) for copy in group) for group in self.groups]

    def _copies(self) -> Iterator[tuple[StateCopy, Senders, int]]:
        """Yield every copy, and where its bytes are in the sequence of its holders."""
        for copies, senders in zip(self.groups, self.senders, strict=True):
            yield from ((c, senders, at) for c, at in zip(copies, senders.starts, strict=True))

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes by sender and receiver; of what replicas share up to a row of a tensor."""
        traffic: Counter[tuple[int, int]] = Counter()
        for copies, senders in zip(self.groups, self.senders, strict=True):
            spans = zip(copies, senders.starts, senders.sizes, strict=True)
            for copy, start, num_bytes in spans:
                if len(copy.holders) == 1:
                    traffic[copy.holders[0], copy.receiver] += num_bytes
                    continue
                for sender, part in senders.stretches(copy.holders, start, num_bytes):
                    traffic[sender, copy.receiver] += part
        return dict(sorted(traffic.items()))

    @property
    def most_peers(self) -> int:
        """To how many devices one sends at most, or from how many it receives."""
        peers = Counter(end for pair in self.traffic for end in enumerate(pair))
        return max(peers.values(), default=0)

    def seconds(self, link: Callable[[int, int], tuple[float, float]], files: Set[int]) -> float:
        """Return modelled seconds: those of the device that sends or receives longest.

        `link` says what a message between two devices costs, and a byte of it; files are none.
        """
        busy: defaultdict[tuple[int, int], float] = defaultdict(float)
        for pair, num_bytes in self.traffic.items():
            latency, per_byte = link(*pair)
            for end in enumerate(pair):
                busy[end] += latency + per_byte * num_bytes
        return max((s for (_, device), s in busy.items() if device not in files), default=0.0)

    def streams(self, device: int) -> dict[tuple[int, int], list[StateCopy]]:
        """Return what a device sends or receives, by sender and receiver, in the order of both."""
        if device not in self._streams:
            streams: dict[tuple[int, int], list[StateCopy]] = {}
            for copy, senders, start in self._copies():
                if copy.receiver != device and device not in copy.holders:
                    continue
                for (sender, box), places in _divided(senders, copy, copy.holders, start).items():
                    if device in (sender, copy.receiver):
                        part = copy._replace(places=places, box=box, holders=(sender,))
                        streams.setdefault((sender, copy.receiver), []).append(part)
            self._streams[device] = streams
        return self._streams[device]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Devices by host, and what messages cost inside one and between two."""

    number: Mapping[int, int]
    """Device to the host that it is of."""
    inside: tuple[float, float]
    """Seconds a message, and seconds a byte."""
    between: tuple[float, float]

    def crosses(self, sender: int, receiver: int) -> bool:
        """Whether a message leaves its host."""
        return self.number.get(sender) != self.number.get(receiver)

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return what a message costs, and a byte of it."""
        return self.between if self.crosses(sender, receiver) else self.inside


def hosts_of(meshes: Iterable[DeviceMesh]) -> Hosts | None:
    """Return which devices are joined by faster links than the slowest; None if all or none are."""
    meshes = list(meshes)
    links = [
        (alpha, beta, mesh, axis)
        for mesh in meshes
        if mesh.link_model == "ring"
        for axis, (alpha, beta) in enumerate(
            zip(mesh.mesh_alpha or (), mesh.mesh_beta or (), strict=True)
        )
        if mesh.shape[axis] > 1
    ]
    slowest = max((beta for _, beta, _, _ in links), default=0.0)
    fast = [link for link in links if link[1] < slowest]
    number = {device: device for mesh in meshes for device in mesh.ids}
    for _, _, mesh, axis in fast:
        for group in {mesh.group(device, [axis]) for device in mesh.ids}:
            met = {number[device] for device in group}
            number = {device: min(met) if of in met else of for device, of in number.items()}
    names = {old: new for new, old in enumerate(sorted(set(number.values())))}
    if not fast or len(names) == 1:
        return None
    return Hosts(
        {device: names[number[device]] for device in sorted(number)},
        inside=(max(link[0] for link in fast), max(link[1] for link in fast)),
        between=(max(link[0] for link in links), slowest),
    )


def crossing_once(
    copies: Iterable[StateCopy], host: Mapping[int, int], width_of: Callable[[int], int]
) -> tuple[PlanStage, PlanStage]:
    """Return the same copies in two stages, so that no byte goes to a host twice.

    What a host has already its own devices send. What several of its devices want from elsewhere is
    divided among them in the first stage, so that the busiest of them gets least, and in the second
    each hands its part to the rest; `width_of` says how wide elements of a tensor are by then.
    """
    wanted: dict[tuple[int, Box, int], list[StateCopy]] = {}
    for copy in copies:
        wanted.setdefault((copy.places[0], copy.box, host[copy.receiver]), []).append(copy)
    near: list[StateCopy] = []
    far: list[tuple[StateCopy, Holders]] = []
    for (_, _, number), same in wanted.items():
        inside_holders = tuple(holder for holder in same[0].holders if host[holder] == number)
        near += [copy._replace(holders=inside_holders) for copy in same if inside_holders]
        if not inside_holders:
            far.append((same[0], tuple(copy.receiver for copy in same)))
    relays = Senders([(ids, copy.num_bytes) for copy, ids in far])
    across: list[StateCopy] = []
    inside: list[StateCopy] = []
    for (copy, receivers), start in zip(far, relays.starts, strict=True):
        for (relay, box), places in _divided(relays, copy, receivers, start).items():
            across.append(copy._replace(places=places, box=box, receiver=relay))
            width = width_of(places[0])
            others = (device for device in receivers if device != relay)
            inside += [StateCopy(places, box, (relay,), other, width) for other in others]
    return PlanStage(across, near), PlanStage(inside)


Turn: TypeAlias = tuple[int, int, int]
"""Which stage of the plan, which peers, by how far they stand behind the sender in the row of
devices, and which of their messages."""


class Schedule(NamedTuple):
    """The messages of one device. A wave is at most one to and one from each of some peers.

    Every device takes part in waves in ascending order, so none waits in a circle.
    """

    sends: dict[Turn, dict[int, Message]]
    """Per wave, by peer, what is packed into its message."""
    receives: dict[Turn, dict[int, Message]]
    """Per wave, by peer, what is unpacked from its message."""
    largest_message: int
    """In bytes."""


def schedule_of(
    stages: Sequence[PlanStage], devices: Sequence[int], device: int, bucket_bytes: int
) -> Schedule:
    """Return the messages of a device; both ends of one find the same."""
    at = {each: place for place, each in enumerate(devices)}
    sends: dict[Turn, dict[int, Message]] = {}
    receives: dict[Turn, dict[int, Message]] = {}
    largest = 0
    for number, stage in enumerate(stages):
        for (sender, receiver), copies in stage.streams(device).items():
            turn = (at[receiver] - at[sender]) % len(at) // MAX_PEERS
            waves, peer = (sends, receiver) if sender == device else (receives, sender)
            for place, message in enumerate(_messages(copies, min(bucket_bytes, _MESSAGE_BYTES))):
                waves.setdefault((number, turn, place), {})[peer] = message
                largest = max(largest, message_bytes(message))
    return Schedule(sends, receives, largest)


def _messages(copies: Iterable[StateCopy], most_bytes: int) -> Iterator[Message]:
    """Divide what goes from one device to another into messages of bounded size."""
    message: list[Piece] = []
    end = 0
    for copy in copies:
        for box in chunks(copy.box, max(1, most_bytes // copy.item_bytes)):
            step = -(-box_size(box) * copy.item_bytes // _ALIGNMENT) * _ALIGNMENT
            places = copy.places
            while places:
                if message and end + step > most_bytes:
                    yield message
                    message, end = [], 0
                # Alone in a message a box may need a few bytes more.
                fitting = max(1, (most_bytes - end) // step)
                message.append(Piece(places[:fitting], box, end, step))
                end, places = message_bytes(message), places[fitting:]
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
    corner = [lo for lo, _ in box]
    return box_shape(box), *side.in_memory(strides, layout.intervals(device), corner)

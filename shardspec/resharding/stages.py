"""Routes of a reshard plan: senders, receivers, stages and messages.

The sender of a box that has replicas is chosen for all tensors together. Between hosts, copies may
come in up to three stages, so that bytes enter a host once and are passed on, between hosts and
inside them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size, chunks
from shardspec.comm.cluster import Cluster, busiest_seconds
from shardspec.comm.curves import Line
from shardspec.comm.senders import Holders, Senders, find_copies, overlaps
from shardspec.comm.transfers import Message, Piece, message_bytes
from shardspec.layout.layout import Layout, LayoutCell, cells_of
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
    # Tensors inside one stretch stay whole; only those at its end are cut.
    shares: dict[tuple[int, Box], list[int]] = {}
    begin = cut = 0
    for holder, count in given:
        first, last, rest = -(-begin // size), *divmod(begin + count, size)
        if last > first:
            shares.setdefault((holder, copy.box), []).extend(copy.places[first:last])
        if rest and last >= cut:
            cut = last + 1
            for share in senders.split(holders, copy.box, start + last * size, size):
                shares.setdefault(share, []).append(copy.places[last])
        begin += count
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

    def seconds(self, link: Callable[[int, int], Line], cluster: Cluster, files: Set[int]) -> float:
        """Return modelled seconds: those of the device or port that sends or receives longest.

        `link` says what a message between two devices costs, and a byte of it; files are none.
        """
        messages = ((*pair, num_bytes) for pair, num_bytes in self.traffic.items())
        return busiest_seconds(messages, link, cluster, files)

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


class _Far(NamedTuple):
    """One box that some hosts lack."""

    copy: StateCopy
    """The copy to one of its receivers."""
    receivers: dict[int, Holders]
    """The devices that need the box, by host."""
    center: int | None = None
    """The host that gets the box first and passes it on; None if the source sends it to each."""


def staged(
    copies: Iterable[StateCopy],
    cluster: Cluster,
    width_of: Callable[[int], int],
    *,
    relays: bool,
    by_host: bool,
) -> tuple[PlanStage, ...]:
    """Return the same copies in stages, so that each byte enters a host once.

    A host whose own devices have a box copies it inside. What several devices of a host need from
    elsewhere is divided among them, and each passes its part on inside. With `relays`, what several
    hosts need leaves the source once: every host gets a part of it first, and passes this on to the
    others, so that hosts share the sending evenly. With `by_host` the busiest host sends least,
    else the busiest device. `width_of` returns the bytes of an element of a tensor in the target.
    """
    needed: dict[tuple[int, Box], list[StateCopy]] = {}
    for copy in copies:
        needed.setdefault((copy.places[0], copy.box), []).append(copy)
    near: list[StateCopy] = []
    far: list[_Far] = []
    for same in needed.values():
        holders = cluster.by_host(same[0].holders)
        receivers: dict[int, Holders] = {}
        for copy in same:
            host = cluster.host(copy.receiver)
            if host in holders:
                near.append(copy._replace(holders=holders[host]))
            else:
                receivers[host] = (*receivers.get(host, ()), copy.receiver)
        if receivers:
            far.append(_Far(same[0], receivers))
    if relays:
        far = list(_with_centers(far, cluster))
    across: list[StateCopy] = []
    passed: list[StateCopy] = []
    inside: tuple[list[StateCopy], list[StateCopy]] = [], []
    if by_host:
        far = list(_from_one_host(far, cluster))
    # Parts go to one device of each host; `late` ones come from the host that got them first.
    first = [(f.copy, f.receivers[f.center]) for f in far if f.center is not None]
    first += [(f.copy, ids) for f in far if f.center is None for ids in f.receivers.values()]
    centers = [f for f in far if f.center is not None]
    late: list[tuple[StateCopy, Holders]] = []
    for number, parts in enumerate(_shared(first)):
        for part, relay in parts:
            across.append(part._replace(receiver=relay))
            after = part._replace(holders=(relay,), item_bytes=width_of(part.places[0]))
            inside[0].extend(_to_others(after, first[number][1]))
            if number < len(centers):
                receivers, center = centers[number].receivers, centers[number].center
                late += [(after, ids) for host, ids in receivers.items() if host != center]
    for (_, ids), parts in zip(late, _shared(late), strict=True):
        for part, relay in parts:
            passed.append(part._replace(receiver=relay))
            inside[1].extend(_to_others(part._replace(holders=(relay,)), ids))
    stages = PlanStage(across, near), PlanStage(passed, inside[0]), PlanStage(inside[1])
    return tuple(stage for stage in stages if any(stage.groups))


def _to_others(copy: StateCopy, receivers: Holders) -> list[StateCopy]:
    return [copy._replace(receiver=other) for other in receivers if other != copy.holders[0]]


def _shared(
    items: Sequence[tuple[StateCopy, Holders]], given: Iterable[tuple[Holders, int]] = ()
) -> Iterator[list[tuple[StateCopy, int]]]:
    """Yield the parts of each copy, each with one of some numbers, evenly spread over all copies.

    `given` are demands of the same numbers that count too.
    """
    fixed = list(given)
    senders = Senders([*fixed, *((numbers, copy.num_bytes) for copy, numbers in items)])
    for (copy, numbers), start in zip(items, senders.starts[len(fixed) :], strict=True):
        shares = _divided(senders, copy, numbers, start)
        yield [(copy._replace(places=places, box=box), at) for (at, box), places in shares.items()]


def _with_centers(far: Iterable[_Far], cluster: Cluster) -> Iterator[_Far]:
    """Yield parts of boxes that several hosts need, each with the host that passes it on.

    A box that goes to n hosts is sent n times: once by a host that has it, and n - 1 times by any.
    """
    several = [item for item in far if len(item.receivers) > 1]
    once = [item for item in far if len(item.receivers) == 1]
    yield from once
    sources = [tuple(sorted(cluster.by_host(item.copy.holders))) for item in (*several, *once)]
    sizes = [item.copy.num_bytes for item in (*several, *once)]
    demands = list(zip(sources, sizes, strict=True))
    # The items are as long as what is sent again, so that shares of one are shares of the other.
    again = [
        (
            item.copy._replace(item_bytes=item.copy.item_bytes * (len(item.receivers) - 1)),
            (*hosts, *sorted(item.receivers)),
        )
        for hosts, item in zip(sources, several, strict=False)
    ]
    for item, hosts, parts in zip(several, sources, _shared(again, demands), strict=False):
        for part, host in parts:
            copy = part._replace(item_bytes=item.copy.item_bytes)
            if host in hosts:
                # The first time it may come from any host that has it.
                holders = cluster.by_host(copy.holders)[host]
                first, *others = item.receivers.items()
                yield _Far(copy, dict([first]))
                yield _Far(copy._replace(holders=holders), dict(others))
            else:
                yield _Far(copy, item.receivers, host)


def _from_one_host(far: Sequence[_Far], cluster: Cluster) -> Iterator[_Far]:
    """Yield parts of boxes, each of which one host sends; the busiest host sends least."""
    items = [(item.copy, tuple(sorted(cluster.by_host(item.copy.holders)))) for item in far]
    times = [1 if item.center is not None else len(item.receivers) for item in far]
    relayed = [
        ((item.center,), item.copy.num_bytes * (len(item.receivers) - 1))
        for item in far
        if item.center is not None
    ]
    weighted = [
        (copy._replace(item_bytes=copy.item_bytes * count), hosts)
        for (copy, hosts), count in zip(items, times, strict=True)
    ]
    for item, parts in zip(far, _shared(weighted, relayed), strict=True):
        for part, host in parts:
            holders = cluster.by_host(item.copy.holders)[host]
            copy = part._replace(item_bytes=item.copy.item_bytes, holders=holders)
            yield item._replace(copy=copy)


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

"""Decides, for a whole state dict, which device sends which box to which device, and when.

Senders of replicated boxes are chosen for all tensors together, so that the busiest sends least.
Between hosts a plan has up to three stages: a byte goes from its source to one device of a host,
from there to other hosts that need it, and in each host to the other devices.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size, chunks
from shardspec.comm.cluster import Cluster, busiest_seconds
from shardspec.comm.cost import Links, cluster_of
from shardspec.comm.curves import Line
from shardspec.comm.senders import Copy, Holders, Senders, find_copies, overlaps
from shardspec.comm.transfers import Message, aligned_bytes, message_bytes
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.cross import count_pieces
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.views import TensorView, View, identity_view
from shardspec.text import bytes_text, counted, seconds_text
from shardspec.tracing import LOGGER

_MAX_PEERS: Final = 32
"""Maximum devices that a device sends to at once, and receives from."""
_MESSAGE_BYTES: Final = 4 << 20
"""Maximum bytes of a message: longer ones are no faster, and smaller buckets stay in caches."""
_LEAST_BUCKET: Final = 16
"""Bytes of the largest element."""
_MANY_COPIES: Final = 2_000_000
"""Number of copies of a tensor above which planning logs its time and memory."""
_COPY_SECONDS: Final = 5e-6
_COPY_BYTES: Final = 380
"""Time and memory to plan one copy, measured from 4,096 devices to 4,096 others, all to all."""


_LITTLE: Final = 1e-3
"""Fraction of a plan's seconds; stages that could save no more are not tried."""
_FEW: Final = 1e-2
"""Fraction of a plan's bytes between hosts; stages that could save no more are not tried."""


@dataclass(frozen=True, slots=True, init=False)
class StoredLayout(Layout):
    """Layout of a tensor over the files of a checkpoint, which are numbered like devices."""

    stored: tuple[tuple[int, tuple[Box, ...]], ...]
    """(file number, boxes) of each file."""

    def __init__(
        self,
        files: DeviceMesh,
        stored: Mapping[int, Sequence[Box]],
        global_shape: Sequence[int],
        dtype: object,
    ) -> None:
        Layout.__init__(self, files, ShardingSpec(len(global_shape)), global_shape, dtype)
        boxes_of = tuple((file, tuple(boxes)) for file, boxes in sorted(stored.items()))
        object.__setattr__(self, "stored", boxes_of)
        object.__setattr__(self, "_hash", hash((boxes_of, self.global_shape, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        return StoredLayout, (self.mesh, dict(self.stored), self.global_shape, self.dtype)

    def local_boxes(self, physical_id: int) -> list[Box]:
        """Return the boxes of the tensor that a file contains, given the file's number."""
        return list(dict(self.stored).get(physical_id, ()))


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor that a plan converts: its name and layout before and after."""

    source_name: str
    target_name: str
    source: Layout
    target: Layout
    view: View | None = None
    """The elements of the source and of the target that correspond; by default equal indices."""

    @property
    def wire_dtype(self) -> str:
        """Dtype in which elements travel: the shorter one, or the target's if both are as long.

        So a cast to fewer bytes is done by the sender, and one to more bytes by the receiver.
        """
        return min(self.target.dtype, self.source.dtype, key=item_bytes)


MoveKind: TypeAlias = tuple[Layout, Layout, View | None]
"""Source layout, target layout, and view."""


def kinds_of(moves: Iterable[TensorMove]) -> dict[MoveKind, list[int]]:
    """Group moves with the same layouts and view, which travel together; return their indices."""
    kinds: dict[MoveKind, list[int]] = {}
    for place, move in enumerate(moves):
        kinds.setdefault((move.source, move.target, move.view), []).append(place)
    return kinds


def meshes_of(moves: Iterable[TensorMove], *, stored: bool = False) -> set[DeviceMesh]:
    """Return all meshes of devices in the moves; with `stored`, those that number files."""
    layouts = {layout for move in moves for layout in (move.source, move.target)}
    return {layout.mesh for layout in layouts if isinstance(layout, StoredLayout) == stored}


def files_of(moves: Iterable[TensorMove]) -> frozenset[int]:
    """Return the ids that stand for files of a checkpoint instead of devices."""
    return frozenset(number for mesh in meshes_of(moves, stored=True) for number in mesh.ids)


def cluster_of_moves(moves: Iterable[TensorMove], links: Links | None) -> Cluster:
    """Return the links between all devices; LayoutError if `links` do not fit the meshes."""
    return cluster_of(sorted(meshes_of(moves), key=lambda mesh: (mesh.ids, mesh.shape)), links)


@dataclass(frozen=True, eq=False)
class StateCopies:
    """All copies of a plan, as data: those within devices, and in stages those between devices."""

    moves: tuple[TensorMove, ...]
    values: tuple[tuple[str, str], ...]
    padded: tuple[str, ...]
    dropped: tuple[str, ...]
    digest: str
    """Hash of the plan. This field and the four above it are those of the `ReshardPlan`."""
    devices: tuple[int, ...]
    """Ids of all devices and files, ascending."""
    files: frozenset[int]
    """Ids that number files of a checkpoint."""
    cluster: Cluster
    """Links between the devices, and the devices that share a host."""
    own_copies: Sequence[Copy]
    """Copies of each device from itself."""
    stages: "tuple[PlanStage, ...]"
    """Copies between devices. Each byte enters a host once if that takes less time."""
    traffic: Mapping[tuple[int, int], int]
    """Bytes by sender and receiver, of all stages."""
    bucket_bytes: int
    """Maximum bytes of a message."""
    _schedules: "dict[int, Schedule]" = field(default_factory=dict, init=False)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the devices; 1 where a checkpoint is read."""
        return _count_hosts(self.devices, self.files, self.cluster)

    @property
    def cost_seconds(self) -> float:
        """Modeled seconds; see `ReshardPlan.cost_seconds`."""
        return _seconds(self.stages, self.devices, self.files, self.cluster)

    def schedule(self, device: int) -> "Schedule":
        """Return the messages that a device sends and receives, in order."""
        if device not in self._schedules:
            self._schedules[device] = _schedule(
                self.stages, self.devices, device, self.bucket_bytes
            )
        return self._schedules[device]


def state_copies(
    moves: tuple[TensorMove, ...],
    values: tuple[tuple[str, str], ...],
    padded: tuple[str, ...],
    dropped: tuple[str, ...],
    digest: str,
    kinds: Mapping[MoveKind, Sequence[int]],
    max_bytes: int,
    links: Links | None,
) -> StateCopies:
    """Choose senders and stages for all moves; return the copies.

    Raises LayoutError if `max_bytes` is too small for messages with all peers at once.
    """
    examples = [moves[places[0]] for places in kinds.values()]
    cluster, files = cluster_of_moves(examples, links), files_of(examples)
    devices = tuple(sorted(files.union(*(mesh.ids for mesh in meshes_of(examples)))))
    own_copies: list[Copy] = []
    lacking: list[Copy] = []
    for copy in _needed(moves, kinds):
        (own_copies if copy.holders == (copy.receiver,) else lacking).append(copy)
    stages: tuple[PlanStage, ...] = (PlanStage(lacking),)
    if _count_hosts(devices, files, cluster) > 1:
        # Later stages read the target.
        widths = [item_bytes(move.target.dtype) for move in moves]
        stages = _cheapest_stages(stages[0], cluster, widths.__getitem__)
    traffic = sum((Counter(stage.traffic) for stage in stages), Counter[tuple[int, int]]())
    most = min(max(1, *(stage.most_peers for stage in stages)), _MAX_PEERS)
    # Two buckets per peer: one is filled while the other is sent.
    bucket = max_bytes // (2 * most)
    if bucket < _LEAST_BUCKET:
        raise LayoutError(
            f"max_bytes={max_bytes} is too small for messages with "
            f"{counted(most, 'peer')} at once; give at least {2 * most * _LEAST_BUCKET}"
        )
    named = moves, values, padded, dropped, digest
    return StateCopies(*named, devices, files, cluster, own_copies, stages, traffic, bucket)


def _count_hosts(devices: Sequence[int], files: Set[int], cluster: Cluster) -> int:
    return 1 if files else len(set(map(cluster.host, devices)))


def _seconds(
    stages: Iterable["PlanStage"], devices: Sequence[int], files: Set[int], cluster: Cluster
) -> float:
    """Return the modeled seconds of stages that run one after the other."""
    one = cluster.far if len(set(map(cluster.host, devices))) > 1 else cluster.near
    link = (lambda _a, _b: one) if files else cluster.link
    moving = (stage for stage in stages if stage.traffic)
    return sum((cluster.start_s + stage.seconds(link, cluster, files) for stage in moving), 0.0)


def _needed(moves: Sequence[TensorMove], kinds: Mapping[MoveKind, Sequence[int]]) -> Iterator[Copy]:
    """Yield a copy for each box that a device needs, from the devices that have it."""
    # Experts of a layer have equal boxes on different devices.
    holders = lru_cache(64)(_holders)
    overlapping = lru_cache(16)(lambda have, want: list(overlaps(have, want)))
    for (source, target, view), places in kinds.items():
        view = view or identity_view(source.global_shape)
        axes, width = len(view.shape), item_bytes(moves[places[0]].wire_dtype)
        have, want = holders(source, view.source, axes), holders(target, view.target, axes)
        _warn_of_many(have, want)
        yield from find_copies(have, want, overlapping, places, width)


def _warn_of_many(have: Mapping[Box, Holders], want: Mapping[Box, Holders]) -> None:
    """Log the expected time and memory of planning if it has millions of copies."""
    receiving = [box for box, receivers in want.items() for _ in receivers]
    if len(have) * len(receiving) <= _MANY_COPIES:
        return
    count = count_pieces(dict(enumerate(have)), dict(enumerate(receiving)))
    if count > _MANY_COPIES:
        took = seconds_text(count * _COPY_SECONDS), bytes_text(count * _COPY_BYTES)
        LOGGER.warning(
            "planning %s copies of boxes takes about %s and %s of memory; shard the same dims "
            "before and after to need fewer",
            f"{count:,}",
            *took,
        )


def _holders(layout: Layout, side: TensorView, axes: int) -> dict[Box, Holders]:
    """Return nonempty box -> devices that have it; boxes are in coordinates of the view `side`."""
    boxes = holders_of(layout).items()
    return {part: devices for box, devices in boxes for part in side.boxes(box, axes)}


@lru_cache(maxsize=1024)
def holders_of(layout: Layout) -> dict[Box, Holders]:
    """Return nonempty box -> devices that have it.

    >>> holders_of(Layout(DeviceMesh(range(4), (2, 2)), "[S0]", (6,), "float32"))
    {((0, 3),): (0, 1), ((3, 6),): (2, 3)}
    """
    holders: dict[Box, list[int]] = {}
    for device in layout.mesh.ids:
        for box in boxes_of(layout, device):
            holders.setdefault(box, []).append(device)
    return {box: tuple(devices) for box, devices in holders.items()}


def boxes_of(layout: Layout, device: int) -> list[Box]:
    """Return the nonempty boxes of a device; boxes of other devices are equal or disjoint."""
    if layout.spec.is_plain:
        boxes = layout.local_boxes(device)
    else:  # parts are intersected one by one: a replicated part may join the one before it
        boxes = [LayoutCell(layout, cell).box(device) for cell in cells_of(layout)]
    return [box for box in boxes if box_size(box)]


def _divided(
    senders: Senders, copy: Copy, holders: Holders, start: int
) -> dict[tuple[int, Box], Sequence[int]]:
    """Share a copy, at byte `start` of its holders' copies; return (holder, box) -> indices."""
    size = copy.num_bytes // len(copy.places)
    stretches = senders.stretches(holders, start, copy.num_bytes)
    if len(stretches) == 1:
        return {(stretches[0][0], copy.box): copy.places}
    # Tensors inside one stretch are not cut; only those at its end are.
    shares: dict[tuple[int, Box], list[int]] = {}
    begin = cut = 0
    for holder, count in stretches:
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
    """Copies that may happen at the same time; a stage starts when the one before has ended.

    Within each group of copies, the busiest sender sends as little as possible.
    """

    def __init__(self, *groups: Sequence[Copy]) -> None:
        self.groups = groups
        self._streams: dict[int, dict[tuple[int, int], list[Copy]]] = {}

    @cached_property
    def senders(self) -> list[Senders]:
        """The chosen senders, for each group of copies with the same holders."""
        return [Senders((copy.holders, copy.num_bytes) for copy in group) for group in self.groups]

    def _copies(self) -> Iterator[tuple[Copy, Senders, int]]:
        """Yield (copy, senders of its group, offset of the copy in the bytes of that group)."""
        for copies, senders in zip(self.groups, self.senders, strict=True):
            yield from ((c, senders, at) for c, at in zip(copies, senders.starts, strict=True))

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes by (sender, receiver); where replicas share the sending, exact up to one row."""
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
        """Maximum number of devices that a device sends to, or that it receives from."""
        peers = Counter(end for pair in self.traffic for end in enumerate(pair))
        return max(peers.values(), default=0)

    def seconds(self, link: Callable[[int, int], Line], cluster: Cluster, files: Set[int]) -> float:
        """Return the modeled seconds of the device or network port that is busy longest.

        `link` returns the seconds of a message and of a byte between two devices.
        """
        messages = ((*pair, num_bytes) for pair, num_bytes in self.traffic.items())
        return busiest_seconds(messages, link, cluster, files)

    def streams(self, device: int) -> dict[tuple[int, int], list[Copy]]:
        """Return the copies that a device takes part in, by (sender, receiver)."""
        if device not in self._streams:
            streams: dict[tuple[int, int], list[Copy]] = {}
            for copy, senders, start in self._copies():
                if copy.receiver != device and device not in copy.holders:
                    continue
                for (sender, box), places in _divided(senders, copy, copy.holders, start).items():
                    if device in (sender, copy.receiver):
                        part = copy._replace(places=places, box=box, holders=(sender,))
                        streams.setdefault((sender, copy.receiver), []).append(part)
            self._streams[device] = streams
        return self._streams[device]


class Far(NamedTuple):
    """A box that some hosts need and do not have."""

    copy: Copy
    """The copy of the box to one of its receivers."""
    receivers: dict[int, Holders]
    """The devices that need the box, by host."""
    center: int | None = None
    """The host that gets the box first and passes it on; None if the source sends it to each."""


def _cheapest_stages(
    direct: PlanStage, cluster: Cluster, width_of: Callable[[int], int]
) -> tuple[PlanStage, ...]:
    """Return `direct` alone, or several stages that pass boxes on inside hosts, if faster."""

    def price(stages: Iterable[PlanStage]) -> float:
        return _seconds(stages, (), frozenset(), cluster)

    (copies,) = direct.groups
    near, far = near_and_far(copies, cluster)
    holders = {copy.holders for copy in copies}
    if len(near) + len(far) == len(copies) and all(len(ids) == 1 for ids in holders):
        return (direct,)  # each box goes from one device to one
    seconds, priced = price([direct]), _merged(near, far, width_of)
    crossing = sum(size for pair, size in direct.traffic.items() if cluster.crosses(*pair))
    least = sum(item.copy.num_bytes * len(item.receivers) for item in far)
    bound = _least_seconds(priced[1], cluster)
    if crossing <= (1 + _FEW) * least and seconds <= (1 + _LITTLE) * bound:
        return (direct,)
    ways = [(False, False)]
    if any(len(cluster.by_host(ids)) > 1 for ids in holders):
        ways.insert(0, (False, True))
    if any(len(item.receivers) > 1 for item in far):
        ways = [(True, from_one_host) for _, from_one_host in ways] + ways
    prices = [price(in_stages(*priced, cluster, width_of, *way)) for way in ways]
    stages = in_stages(near, far, cluster, width_of, *ways[prices.index(min(prices))])
    return stages if price(stages) <= seconds else (direct,)


def near_and_far(copies: Iterable[Copy], cluster: Cluster) -> tuple[list[Copy], list[Far]]:
    """Split copies into those inside a host, and the boxes that a host gets from other hosts."""
    by_host = cache(cluster.by_host)
    near: list[Copy] = []
    far: list[Far] = []
    # Copies of the same box follow each other.
    for _, group in groupby(copies, key=lambda copy: (copy.box, copy.places)):
        first, *others = group
        holders = by_host(first.holders)
        receivers = by_host((first.receiver, *(copy.receiver for copy in others)))
        lacking = {host: ids for host, ids in receivers.items() if host not in holders}
        for host in receivers.keys() - lacking.keys():
            box, _, _, places, item_bytes = first
            here = holders[host]
            near += [Copy(box, here, device, places, item_bytes) for device in receivers[host]]
        if lacking:
            far.append(Far(first, lacking))
    return near, far


def _merged(
    near: Iterable[Copy], far: Iterable[Far], width_of: Callable[[int], int]
) -> tuple[list[Copy], list[Far]]:
    """Replace copies of equal holders and receivers by one of their total size, to price faster."""
    inside: Counter[tuple[Holders, int]] = Counter()
    for copy in near:
        inside[copy.holders, copy.receiver] += copy.num_bytes
    totals: Counter[tuple[object, ...]] = Counter()
    example: dict[tuple[object, ...], Far] = {}
    for item in far:
        copy = item.copy
        place = copy.places[0]
        key = copy.holders, tuple(item.receivers.values()), copy.item_bytes, width_of(place)
        totals[key] += copy.num_bytes // copy.item_bytes
        example.setdefault(key, item)
    return [Copy(((0, size),), *endpoints) for endpoints, size in inside.items()], [
        item._replace(copy=item.copy._replace(box=((0, totals[key]),), places=item.copy.places[:1]))
        for key, item in example.items()
    ]


def _least_seconds(far: Iterable[Far], cluster: Cluster) -> float:
    """Return a lower bound: the seconds in which every host can receive its missing bytes."""
    received = defaultdict[object, float](float)
    for item in far:
        for host, ids in item.receivers.items():
            share = 1 if cluster.shares_ports else len(ids)
            received[host if cluster.shares_ports else ids] += item.copy.num_bytes / share
    return cluster.far[1] * max(received.values(), default=0)


def in_stages(
    near: Sequence[Copy],
    far: Sequence[Far],
    cluster: Cluster,
    width_of: Callable[[int], int],
    passed_on: bool,
    from_one_host: bool,
) -> tuple[PlanStage, ...]:
    """Return the copies in stages such that each byte enters a host once.

    A host whose own devices have a box copies it inside. Devices of a host that need the same box
    each receive a part of it, and pass the part on inside. If `passed_on`, boxes that
    several hosts need leave the source once: every host gets a part first, and passes it on to the
    others, so that hosts share the sending evenly. If `from_one_host`, the busiest host sends
    least, else the busiest device. `width_of` returns the bytes of an element in the target.
    """
    if passed_on:
        far = list(_with_centers(far, cluster))
    if from_one_host:
        far = list(_from_one_host(far, cluster))
    across: list[Copy] = []
    passed: list[Copy] = []
    inside: tuple[list[Copy], list[Copy]] = [], []
    # Parts go to one device of each host; `late` ones come from the host that got them first.
    centers = [f for f in far if f.center is not None]
    first = [(f.copy, f.receivers[f.center]) for f in centers if f.center is not None]
    first += [(f.copy, ids) for f in far if f.center is None for ids in f.receivers.values()]
    late: list[tuple[Copy, Holders]] = []
    for number, parts in enumerate(_shared(first)):
        for part, relay in parts:
            box, holders, _, places, item_bytes = part
            across.append(Copy(box, holders, relay, places, item_bytes))
            after = Copy(box, (relay,), relay, places, width_of(places[0]))
            inside[0].extend(_to_others(after, first[number][1]))
            if number < len(centers):
                receivers, center = centers[number].receivers, centers[number].center
                late += [(after, ids) for host, ids in receivers.items() if host != center]
    for (_, ids), parts in zip(late, _shared(late), strict=True):
        for (box, holders, _, places, item_bytes), relay in parts:
            passed.append(Copy(box, holders, relay, places, item_bytes))
            inside[1].extend(_to_others(Copy(box, (relay,), relay, places, item_bytes), ids))
    stages = PlanStage(across, near), PlanStage(passed, inside[0]), PlanStage(inside[1])
    return tuple(stage for stage in stages if any(stage.groups))


def _to_others(copy: Copy, receivers: Holders) -> list[Copy]:
    box, holders, _, places, item_bytes = copy
    return [
        Copy(box, holders, other, places, item_bytes) for other in receivers if other != holders[0]
    ]


def _shared(
    items: Sequence[tuple[Copy, Holders]], loads: Iterable[tuple[Holders, int]] = ()
) -> Iterator[list[tuple[Copy, int]]]:
    """Divide each copy among the hosts or devices that are listed with it.

    Yields a list of (part, its host or device) per copy. What each of them sends becomes even in
    total, including `loads`, the bytes that hosts or devices already send.
    """
    fixed = list(loads)
    senders = Senders([*fixed, *((numbers, copy.num_bytes) for copy, numbers in items)])
    for (copy, numbers), start in zip(items, senders.starts[len(fixed) :], strict=True):
        if len(numbers) == 1:
            yield [(copy, numbers[0])]
            continue
        shares = _divided(senders, copy, numbers, start)
        yield [(copy._replace(places=places, box=box), at) for (at, box), places in shares.items()]


def _with_centers(far: Iterable[Far], cluster: Cluster) -> Iterator[Far]:
    """Divide boxes that several hosts need; give each part a host that forwards it, if any does.

    A box that goes to n hosts is sent n times: once by a host that has it, and n - 1 times by any.
    """
    several = [item for item in far if len(item.receivers) > 1]
    once = [item for item in far if len(item.receivers) == 1]
    yield from once
    sources = [tuple(sorted(cluster.by_host(item.copy.holders))) for item in (*several, *once)]
    sizes = [item.copy.num_bytes for item in (*several, *once)]
    demands = list(zip(sources, sizes, strict=True))
    # Items are scaled to the bytes that are sent again, so that their shares are proportional.
    again = [
        (
            item.copy._replace(item_bytes=item.copy.item_bytes * (len(item.receivers) - 1)),
            (*hosts, *sorted(item.receivers)),
        )
        for hosts, item in zip(sources, several, strict=False)
    ]
    for item, hosts, parts in zip(several, sources, _shared(again, demands), strict=False):
        for (box, holders, receiver, places, _), host in parts:
            copy = Copy(box, holders, receiver, places, item.copy.item_bytes)
            if host not in hosts:
                yield Far(copy, item.receivers, host)
                continue
            # Any host that has the box may send it first.
            first, *others = item.receivers.items()
            yield Far(copy, dict([first]))
            yield Far(copy._replace(holders=cluster.by_host(holders)[host]), dict(others))


def _from_one_host(far: Sequence[Far], cluster: Cluster) -> Iterator[Far]:
    """Divide boxes into parts with one sending host each, so that the busiest host sends least."""
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
    for item, (_, hosts), parts in zip(far, items, _shared(weighted, relayed), strict=True):
        if len(hosts) == 1:
            yield item
            continue
        by_host = cluster.by_host(item.copy.holders)
        for (box, _, receiver, places, _), host in parts:
            copy = Copy(box, by_host[host], receiver, places, item.copy.item_bytes)
            yield item._replace(copy=copy)


Turn: TypeAlias = tuple[int, int, int]
"""Stage of the plan, distance of the peers in device order // 32, and message number."""


class Schedule(NamedTuple):
    """The messages of one device by turn: at most one to and one from each of some peers per turn.

    All devices process turns in ascending order, which prevents deadlock.
    """

    sends: dict[Turn, dict[int, Message]]
    """Messages to send, by wave and receiver."""
    receives: dict[Turn, dict[int, Message]]
    """Messages to receive, by wave and sender."""
    largest_message: int
    """Size of the largest message in bytes."""


def _schedule(
    stages: Sequence[PlanStage], devices: Sequence[int], device: int, bucket_bytes: int
) -> Schedule:
    """Return the messages of a device; its peers divide the same copies in the same way."""
    at = {each: place for place, each in enumerate(devices)}
    sends: dict[Turn, dict[int, Message]] = {}
    receives: dict[Turn, dict[int, Message]] = {}
    largest = 0
    for number, stage in enumerate(stages):
        for (sender, receiver), copies in stage.streams(device).items():
            turn = (at[receiver] - at[sender]) % len(at) // _MAX_PEERS
            waves, peer = (sends, receiver) if sender == device else (receives, sender)
            for place, message in enumerate(_messages(copies, min(bucket_bytes, _MESSAGE_BYTES))):
                waves.setdefault((number, turn, place), {})[peer] = message
                largest = max(largest, message_bytes(message))
    return Schedule(sends, receives, largest)


def _messages(copies: Iterable[Copy], most_bytes: int) -> Iterator[Message]:
    """Yield messages of at most `most_bytes` with all copies from one device to another."""
    message: list[Copy] = []
    end = 0
    for copy in copies:
        for box in chunks(copy.box, max(1, most_bytes // copy.item_bytes)):
            part, places = copy._replace(box=box), copy.places
            step = aligned_bytes(part)
            while places:
                if message and end + step > most_bytes:
                    yield message
                    message, end = [], 0
                # Alone in a message a box may need a few bytes more.
                fitting = max(1, (most_bytes - end) // step)
                message.append(part._replace(places=places[:fitting]))
                end, places = end + step * len(message[-1].places), places[fitting:]
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
    """Return shape, strides and offset of a box in a device's shard, in the unit of `strides`."""
    view = view or identity_view(layout.global_shape)
    side = view.source if of_source else view.target
    corner = [lo for lo, _ in box]
    return box_shape(box), *side.in_memory(strides, layout.intervals(device), corner)

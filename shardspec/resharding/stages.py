"""Who sends which bytes to whom at once when many tensors change their layouts.

Tensors that go from the same layout to the same layout are planned once, as a *kind*: which source
boxes overlap which target boxes. Which replica of a box sends it is found for all tensors together.

Where some devices share a host, copies may come in two stages, so that bytes cross between hosts
once and are passed on inside. Meshes say it by their links: an axis that is faster than the slowest
one joins devices of a host.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.boxes import Box, box_size, intersect
from shardspec.copies import Holders, Senders, overlaps
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.mesh import DeviceMesh
from shardspec.resharding.views import TensorView, View, identity_view

Ints: TypeAlias = npt.NDArray[np.int64]
Row: TypeAlias = tuple[int, int, int, int]
"""A demand: numbers of the source box and of the target box, the device, and how many elements."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What every tensor needs that goes from one layout to another.

    Rows of the arrays are demands: a device that wants what another one has.
    """

    holders: tuple[Holders, ...]
    """Per distinct source box the devices that hold it."""
    source_boxes: tuple[Box, ...]
    """In coordinates of the view, as all boxes here."""
    target_boxes: tuple[Box, ...]
    at: Ints
    """Per demand the source box, ascending."""
    to: Ints
    """Per demand the target box."""
    receiver: Ints
    """Per demand the device that wants it."""
    elements: Ints
    """Per demand how many."""
    kept_at: Ints
    """The same for what a device has already: the source box, ..."""
    kept_to: Ints
    kept_by: Ints

    @classmethod
    def of(
        cls,
        have: Sequence[tuple[Box, Holders]],
        want: Sequence[Box],
        demands: Sequence[Row],
        kept: Sequence[Row],
    ) -> "Kind":
        """Return the kind of some rows."""
        holders, boxes = tuple(one for _, one in have), tuple(box for box, _ in have)
        rows = [np.array(sorted(r), dtype=np.int64).reshape(-1, 4).T for r in (demands, kept)]
        columns = [column.copy() for column in (*rows[0], *rows[1][:3])]
        return cls(holders, boxes, tuple(want), *columns)

    def box(self, demand: int) -> Box:
        """Return what a demand asks for."""
        box = intersect(self.source_boxes[self.at[demand]], self.target_boxes[self.to[demand]])
        assert box is not None, "demands are overlaps"
        return box


def kind_of(source: Layout, target: Layout, view: View | None = None) -> Kind:
    """Intersect the boxes of two layouts of one tensor, or of what a view equates."""
    view = view or identity_view(source.global_shape)
    axes = len(view.shape)
    have, want = _distinct(source, view.source, axes), _distinct(target, view.target, axes)
    want.sort()
    demands: list[Row] = []
    kept: list[Row] = []
    met = overlaps([box for box, _ in have], (box for box, _ in want))
    for to, ((_, receivers), (_, found)) in enumerate(zip(want, met, strict=True)):
        for at, shared in found:
            holding, elements = have[at][1], box_size(shared)
            for device in receivers:
                (kept if device in holding else demands).append((at, to, device, elements))
    return Kind.of(have, [box for box, _ in want], demands, kept)


def _distinct(layout: Layout, side: TensorView, axes: int) -> list[tuple[Box, Holders]]:
    """Return the boxes of the view that are not empty, each with its holders; they are disjoint."""
    # Cut by parts: a replicated one may join what is before it.
    cells = [] if layout.spec.is_plain else [LayoutCell(layout, cell) for cell in cells_of(layout)]
    found: dict[Box, list[int]] = {}
    for device in layout.mesh.ids:
        boxes = [cell.box(device) for cell in cells] or layout.local_boxes(device)
        for box in filter(box_size, boxes):
            found.setdefault(box, []).append(device)
    return [
        (part, tuple(devices)) for box, devices in found.items() for part in side.boxes(box, axes)
    ]


@dataclass(frozen=True, eq=False)
class Stage:
    """Copies that need nothing of each other; a stage starts when the one before has ended."""

    kinds: tuple[Kind, ...]
    """What is wanted, for every pair of layouts."""
    counts: tuple[int, ...]
    """How many tensors want it."""
    item_bytes: tuple[int, ...]
    """Bytes of an element on its way."""

    @cached_property
    def _demands(self) -> list[list[tuple[Holders, int, int]]]:
        """Per kind and demand the holders, the receiver, and the bytes of all tensors."""
        scales = map(mul, self.counts, self.item_bytes)
        return [
            [
                (kind.holders[at], receiver, elements * scale)
                for at, receiver, elements in zip(
                    kind.at.tolist(), kind.receiver.tolist(), kind.elements.tolist(), strict=True
                )
            ]
            for kind, scale in zip(self.kinds, scales, strict=True)
        ]

    @cached_property
    def senders(self) -> Senders:
        """Which of the replicas sends what."""
        return Senders([(one[0], one[2]) for one in demands] for demands in self._demands)

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes by sender and receiver; of what replicas share up to a row of a tensor."""
        found: Counter[tuple[int, int]] = Counter()
        for starts, demands in zip(self.senders.starts, self._demands, strict=True):
            for start, (holders, receiver, num_bytes) in zip(starts, demands, strict=True):
                for sender, part in self.senders.stretches(holders, start, num_bytes):
                    found[sender, receiver] += part
        return dict(sorted(found.items()))

    @property
    def most_peers(self) -> int:
        """To how many devices one sends at most, or from how many it receives."""
        ends = (Counter(pair[end] for pair in self.traffic) for end in (0, 1))
        return max((count for peers in ends for count in peers.values()), default=0)

    def seconds(self, link: Callable[[int, int], tuple[float, float]], files: Set[int]) -> float:
        """Return modelled seconds: those of the device that sends or receives longest.

        `link` says what a message between two devices costs, and a byte of it; files are none.
        """
        busy: list[defaultdict[int, float]] = [defaultdict(float), defaultdict(float)]
        for pair, num_bytes in self.traffic.items():
            latency, per_byte = link(*pair)
            for one, seconds in zip(pair, busy, strict=True):
                seconds[one] += latency + per_byte * num_bytes
        return max((s for end in busy for one, s in end.items() if one not in files), default=0.0)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Devices by host, and what messages cost inside one and between two."""

    number: Mapping[int, int]
    """Device to the host that it is of."""
    inside: tuple[float, float]
    """Seconds a message, and seconds a byte."""
    between: tuple[float, float]

    def crosses(self, one: int, other: int) -> bool:
        """Whether a message leaves its host."""
        return self.number.get(one) != self.number.get(other)

    def link(self, one: int, other: int) -> tuple[float, float]:
        """Return what a message costs, and a byte of it."""
        return self.between if self.crosses(one, other) else self.inside


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
    if not fast:
        return None
    number = {device: device for mesh in meshes for device in mesh.ids}
    for mesh in {mesh for _, _, mesh, _ in fast}:
        along = [axis for _, _, other, axis in fast if other == mesh]
        for group in {mesh.group(device, along) for device in mesh.ids}:
            met = {number[device] for device in group}
            number = {device: min(met) if of in met else of for device, of in number.items()}
    names = {old: new for new, old in enumerate(sorted(set(number.values())))}
    if len(names) == 1:
        return None
    return Hosts(
        {device: names[number[device]] for device in sorted(number)},
        inside=(max(link[0] for link in fast), max(link[1] for link in fast)),
        between=(max(link[0] for link in links), slowest),
    )


_Copy: TypeAlias = tuple[Box, Holders, Box, int]
"""A box, who holds it, the box that is wanted, and by which device."""


def crossing_once(kind: Kind, host: Mapping[int, int]) -> tuple[Kind, Kind]:
    """Return the copies of a kind in two stages, so that no byte goes to a host twice.

    Of what a host has already its own devices send. What several devices of a host want of others
    is divided among them in the first stage, and in the second each hands its part to the rest.
    """
    first: list[_Copy] = []
    second: list[_Copy] = []
    wanted: dict[tuple[int, int], dict[int, list[int]]] = {}
    for at, to, device in zip(
        kind.at.tolist(), kind.to.tolist(), kind.receiver.tolist(), strict=True
    ):
        wanted.setdefault((to, host[device]), {}).setdefault(at, []).append(device)
    for (to, number), by_source in wanted.items():
        target = kind.target_boxes[to]
        far: list[int] = []
        receivers: list[int] = []
        for at, devices in by_source.items():
            box, holders = kind.source_boxes[at], kind.holders[at]
            near = tuple(holder for holder in holders if host[holder] == number)
            if near or len(devices) == 1:
                first += [(box, near or holders, target, device) for device in devices]
            else:
                far.append(at)
                receivers = devices  # none here has it, so these are all who want the target
        boxes = [intersect(kind.source_boxes[at], target) for at in far]
        for at, part, relay in _divided(far, boxes, receivers):
            first.append((kind.source_boxes[at], kind.holders[at], part, relay))
            second += [(part, (relay,), part, other) for other in receivers if other != relay]
    return _kind_of_copies(first, kind), _kind_of_copies(second, None)


def _divided(
    places: Sequence[int], boxes: Sequence[Box | None], receivers: Sequence[int]
) -> Iterator[tuple[int, Box, int]]:
    """Yield which part of which box goes to which of the receivers first: about as much to each."""
    count = len(receivers)
    for number, (at, box) in enumerate(zip(places, boxes, strict=True)):
        assert box is not None, "demands are overlaps"
        dim = next((dim for dim, (lo, hi) in enumerate(box) if hi - lo > 1), None)
        if len(boxes) >= count or dim is None:
            yield at, box, receivers[number * count // max(count, len(boxes))]
            continue
        lo, hi = box[dim]
        for relay, receiver in enumerate(receivers):
            begin, end = (lo + (hi - lo) * edge // count for edge in (relay, relay + 1))
            if begin < end:
                yield at, (*box[:dim], (begin, end), *box[dim + 1 :]), receiver


def _kind_of_copies(copies: Sequence[_Copy], own: Kind | None) -> Kind:
    """Return copies as a kind, with what another one says that devices have already."""
    sources: dict[tuple[Box, Holders], int] = {}
    targets = {box: number for number, box in enumerate(own.target_boxes if own else ())}
    demands = []
    for box, holders, target, device in copies:
        at = sources.setdefault((box, holders), len(sources))
        to = targets.setdefault(target, len(targets))
        shared = intersect(box, target)
        assert shared is not None, "demands are overlaps"
        demands.append((at, to, device, box_size(shared)))
    have, kept = list(sources), []
    if own is not None:
        have += [(box, ()) for box in own.source_boxes]
        columns = (own.kept_at + len(sources)).tolist(), own.kept_to.tolist(), own.kept_by.tolist()
        kept = [(*row, 0) for row in zip(*columns, strict=True)]
    return Kind.of(have, list(targets), demands, kept)

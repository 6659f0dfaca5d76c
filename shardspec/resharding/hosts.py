"""Which devices share a host, and copies that cross between hosts once and are passed on inside.

Meshes say it by their links: an axis that is faster than the slowest one joins devices of a host.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardspec.boxes import Box, box_size, intersect
from shardspec.copies import Holders
from shardspec.mesh import DeviceMesh
from shardspec.resharding.stages import Kind

__all__ = ["Hosts", "crossing_once", "hosts_of"]


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
    """Return which devices are joined by faster links than the slowest, if some are and some not.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), mesh_alpha=(1e-5, 1e-6), mesh_beta=(1e-10, 1e-12))
    >>> found = hosts_of([mesh, DeviceMesh([3, 9], (2,))])
    >>> dict(found.number), found.inside, found.between
    ({0: 0, 1: 0, 2: 1, 3: 1, 9: 2}, (1e-06, 1e-12), (1e-05, 1e-10))
    """
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
    number: dict[int, int] = {}
    for mesh in meshes:
        along = [axis for _, _, other, axis in fast if other == mesh]
        for device in mesh.ids:
            group = mesh.group(device, along) if along else (device,)
            if device != group[0]:
                continue
            met = {number[member] for member in group if member in number}
            new = min(met, default=len(number))
            number.update((member, new) for member, old in number.items() if old in met)
            number.update((member, new) for member in group)
    names = {old: new for new, old in enumerate(sorted(set(number.values())))}
    if len(names) == 1:
        return None
    return Hosts(
        {device: names[number[device]] for device in sorted(number)},
        inside=(max(link[0] for link in fast), max(link[1] for link in fast)),
        between=(max(link[0] for link in links), slowest),
    )


_Copy = tuple[Box, Holders, Box, int]
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
    return _kind(first, kind), _kind(second, None)


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


def _kind(copies: Sequence[_Copy], own: Kind | None) -> Kind:
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

"""Which devices share a host, and copies that cross between hosts once and are passed on inside.

Meshes say it by their links: an axis that is faster than the slowest one joins devices of a host.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardspec.boxes import Box, box_size, intersect
from shardspec.mesh import DeviceMesh
from shardspec.resharding.transfers import Ints, Kind

__all__ = ["Hosts", "crossing_once", "hosts_of"]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Devices by host, and what messages cost inside one and between two."""

    number: Mapping[int, int]
    """Device to the host that it is of."""
    inside: tuple[float, float]
    """Seconds a message, and seconds a byte."""
    between: tuple[float, float]


def hosts_of(meshes: Iterable[DeviceMesh]) -> Hosts | None:
    """Return which devices are joined by faster links than the slowest, if some are and some not.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), mesh_alpha=(1e-5, 1e-6), mesh_beta=(1e-10, 1e-12))
    >>> found = hosts_of([mesh, DeviceMesh([3, 9], (2,))])
    >>> dict(found.number)
    {0: 0, 1: 0, 2: 1, 3: 1, 9: 2}
    >>> found.inside, found.between
    ((1e-06, 1e-12), (1e-05, 1e-10))
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


def crossing_once(kind: Kind, host: Mapping[int, int]) -> tuple[Kind, Kind]:
    """Return the copies of a kind in two stages, so that no byte goes to a host twice.

    Of what a host has already its own devices send. What several devices of a host want of others
    is divided among them in the first stage, and in the second each hands its part to the rest.

    Parameters
    ----------
    kind
        What is wanted.
    host
        Device to host.
    """
    first, second = _Rows(kind.target_boxes), _Rows(())
    groups: dict[tuple[int, int], list[int]] = {}
    receivers_of: dict[tuple[int, int], list[int]] = {}
    # Demands of the same overlap are neighbours.
    new = np.diff(kind.at, prepend=-1).astype(bool) | np.diff(kind.to, prepend=-1).astype(bool)
    for start, end in pairwise([*np.flatnonzero(new).tolist(), len(kind.at)]):
        at, to = int(kind.at[start]), int(kind.to[start])
        by_host: dict[int, list[int]] = {}
        for device in kind.receiver[start:end].tolist():
            by_host.setdefault(host[device], []).append(device)
        for number, receivers in by_host.items():
            near = tuple(holder for holder in kind.holders[at] if host[holder] == number)
            if near or len(receivers) == 1:
                holders = near or kind.holders[at]
                elements = int(kind.elements[start])
                for device in receivers:
                    first.add(kind.source_boxes[at], holders, to, device, elements)
            else:
                groups.setdefault((to, number), []).append(at)
                receivers_of[to, number] = receivers
    for (to, number), places in groups.items():
        receivers = receivers_of[to, number]
        boxes = [intersect(kind.source_boxes[at], kind.target_boxes[to]) for at in places]
        for at, part, relay in _shared(places, boxes, receivers):
            size = box_size(part)
            row = kind.source_boxes[at], kind.holders[at]
            first.add(*row, first.target(part), receivers[relay], size)
            for device in receivers:
                if device != receivers[relay]:
                    second.add(part, (receivers[relay],), second.target(part), device, size)
    return first.kind(kind), second.kind(None)


def _shared(
    places: Sequence[int], boxes: Sequence[Box | None], receivers: Sequence[int]
) -> Iterable[tuple[int, Box, int]]:
    """Yield which part of which box goes to which of the receivers first: about as much to each."""
    count = len(receivers)
    for number, (at, box) in enumerate(zip(places, boxes, strict=True)):
        assert box is not None, "demands are overlaps"
        if len(boxes) >= count:
            yield at, box, number * count // len(boxes)
            continue
        dim = next((dim for dim, (lo, hi) in enumerate(box) if hi - lo > 1), None)
        if dim is None:
            yield at, box, number
            continue
        lo, hi = box[dim]
        for relay in range(count):
            begin, end = (lo + (hi - lo) * edge // count for edge in (relay, relay + 1))
            if begin < end:
                yield at, (*box[:dim], (begin, end), *box[dim + 1 :]), relay


class _Rows:
    """Demands, gathered one by one."""

    def __init__(self, target_boxes: Sequence[Box]) -> None:
        self._sources: dict[tuple[Box, tuple[int, ...]], int] = {}
        self._targets = list(target_boxes)
        self._places: dict[Box, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []

    def target(self, box: Box) -> int:
        """Return the number of a box that is wanted, beside those given."""
        place = self._places.setdefault(box, len(self._targets))
        if place == len(self._targets):
            self._targets.append(box)
        return place

    def add(
        self, box: Box, holders: tuple[int, ...], to: int, receiver: int, elements: int
    ) -> None:
        """Add what a device wants of a box that some hold."""
        at = self._sources.setdefault((box, holders), len(self._sources))
        self._rows.append((at, to, receiver, elements))

    def kind(self, own: Kind | None) -> Kind:
        """Return the demands, with what another kind says that devices have already."""
        rows = np.array(sorted(self._rows), dtype=np.int64).reshape(-1, 4)
        boxes = [box for box, _ in self._sources]
        nothing: Ints = np.zeros(0, dtype=np.int64)
        kept = (nothing, nothing, nothing)
        if own is not None:
            kept = own.kept_at + len(boxes), own.kept_to, own.kept_by
            boxes += own.source_boxes
        holders = [holders for _, holders in self._sources]
        at, to, receiver, elements = (column.copy() for column in rows.T)
        return Kind(
            tuple(holders) + ((),) * (len(boxes) - len(holders)),
            tuple(boxes),
            tuple(self._targets),
            at,
            to,
            receiver,
            elements,
            *kept,
        )

"""What permute and exchange cost: priced from the boxes of every device on both sides.

A device that lacks bytes gets them from one that holds them. Those that hold the same, and are as
near, send as much as each other: no other choice of senders makes the busiest one send less. Per
device and link the seconds are ``alpha + bytes * beta``; the busiest device, sending or receiving,
sets the price of an exchange, and the slowest link used that of a permute. On a shared bus the
bytes of all devices add up instead.

Every price here is the largest of a few lines ``fixed + slope * elements``, kept as two arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, product
from math import prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.layout.graph import Floats, Ints

Bools: TypeAlias = npt.NDArray[np.bool_]
Sides: TypeAlias = tuple[Ints, Ints]
"""Where parts of a dim begin, and where they end."""

ALL_DEVICES: Final = 512
"""Up to so many devices every one is priced; on larger meshes those at the corners stand for
all, which is exact where the cuts are even and the axes equally long."""
_MOST_PAIRS: Final = 1 << 20
"""Pairs of devices up to which corners are looked at; on the largest meshes four are."""
_AT_ONCE: Final = 1 << 15
"""Devices that are looked at together."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Prices as the largest of lines ``fixed + slope * x``, along the last axis."""

    fixed: Floats
    slope: Floats

    def at(self, x: float) -> Floats:
        """Return the price at `x`."""
        value: Floats = (self.fixed + self.slope * x).max(axis=-1)
        return value

    def pruned(self) -> "Lines":
        """Return lines with the same maximum for every ``x >= 0``, mostly far fewer of them.

        The upper envelope of those that are kept is convex, so whether another rises above it is
        seen where two of them cross.
        """
        first = _argmax_by(self.fixed, self.slope)
        kept = [first]
        if self.fixed.shape[-1] > 1:
            kept.append(_argmax_by(self.slope, self.fixed))
        while True:
            index = np.stack(kept, axis=-1)
            fixed = np.take_along_axis(self.fixed, index, axis=-1)
            slope = np.take_along_axis(self.slope, index, axis=-1)
            worst = self._missed(fixed, slope)
            if worst is None:
                return Lines(fixed, slope)
            kept.append(worst)

    def _missed(self, fixed: Floats, slope: Floats) -> Ints | None:
        """Return per price a line that rises above the kept ones, None where none does."""
        count = fixed.shape[-1]
        for i, j in combinations(range(count), 2):
            steeper = slope[..., j] - slope[..., i]
            with np.errstate(divide="ignore", invalid="ignore"):
                cross = (fixed[..., i] - fixed[..., j]) / steeper
            cross = np.where(np.isfinite(cross) & (cross > 0), cross, 0.0)[..., None]
            envelope = (fixed + slope * cross).max(axis=-1)
            values = self.fixed + self.slope * cross
            above = values.max(axis=-1) > envelope * (1 + 1e-12)
            if above.any():
                return np.where(above, values.argmax(axis=-1), 0)
        return None


def _argmax_by(major: Floats, minor: Floats) -> Ints:
    """Return where `major` is largest; of equal ones where `minor` is."""
    ties = major >= major.max(axis=-1, keepdims=True)
    index: Ints = np.where(ties, minor, -np.inf).argmax(axis=-1)
    return index


@dataclass(frozen=True, eq=False)
class Geometry:
    """Devices of a mesh shape, seen in pairs."""

    mesh_shape: tuple[int, ...]
    coordinates: Ints
    """(devices, axes): of every device, in row-major order."""
    rows: Ints
    """Devices that are priced."""
    differ: Ints
    """(rows, devices): bit ``i`` is set where two devices differ on axis ``i``."""

    def intervals(self, lists: Sequence[tuple[int, ...]], size: int) -> Sides:
        """Return (lists, devices): where each device's part of a dim begins, and where it ends."""
        known: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
        for axes in set(lists):
            lo = np.zeros(len(self.coordinates), dtype=np.int64)
            hi = np.full_like(lo, size)
            for axis in axes:
                block = -(-(hi - lo) // self.mesh_shape[axis])
                start = np.minimum(lo + self.coordinates[:, axis] * block, hi)
                lo, hi = start, start + np.minimum(block, hi - start)
            known[axes] = lo, hi
        starts, ends = zip(*(known[axes] for axes in lists), strict=True)
        return np.stack(starts), np.stack(ends)

    def by_bits(self, model: CostModel) -> tuple[Floats, Floats]:
        """Return what a pair takes and pays a byte, by the bits of the axes between them."""
        alpha, beta = np.zeros((2, 1 << len(self.mesh_shape)))
        for axis in range(len(self.mesh_shape)):
            link, half = model.pair(axis), 1 << axis
            for table, cost in zip((alpha, beta), link, strict=True):
                np.maximum(table[:half], cost, out=table[half : 2 * half])
        return alpha, beta


def shared(a: Sides, b: Sides) -> Ints:
    """Return how long the intervals are that parts of a dim share."""
    lengths: Ints = np.minimum(a[1], b[1])
    lengths = lengths - np.maximum(a[0], b[0])
    return np.maximum(lengths, 0, out=lengths)


def geometry_of(mesh_shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of a mesh shape; that of a small mesh is kept."""
    return (_kept if prod(mesh_shape) <= ALL_DEVICES else _geometry)(mesh_shape)


def _geometry(mesh_shape: tuple[int, ...]) -> Geometry:
    coordinates = (
        np.indices(mesh_shape).reshape(len(mesh_shape), prod(mesh_shape)).T.astype(np.int64)
    )
    if prod(mesh_shape) <= ALL_DEVICES:
        rows = np.arange(len(coordinates))
    else:
        ends = (sorted({0, n - 1}) for n in mesh_shape)
        # Where there are many, some far apart.
        corners = [np.ravel_multi_index(at, mesh_shape) for at in product(*ends)]
        most = max(4, _MOST_PAIRS // prod(mesh_shape))
        rows = np.array(corners)[
            np.linspace(0, len(corners) - 1, min(most, len(corners)), dtype=int)
        ]
    differ = np.zeros((len(rows), len(coordinates)), dtype=np.int64)
    for axis in range(len(mesh_shape)):
        different = coordinates[rows, axis][:, None] != coordinates[:, axis][None, :]
        differ |= different.astype(np.int64) << axis
    return Geometry(mesh_shape, coordinates, rows, differ)


_kept = lru_cache(maxsize=16)(_geometry)


class Overlaps:
    """How much of one tensor dim two devices share, for every pair of lists of axes.

    `parts` is equal for lists that cut the dim at the same places, `largest` the longest part that
    each list makes.
    """

    def __init__(self, geometry: Geometry, lists: Sequence[tuple[int, ...]], size: int) -> None:
        self._lo, self._hi = geometry.intervals(lists, size)
        self._geometry, self._lists = geometry, list(lists)
        self._sums: dict[int, tuple[Floats, Floats]] = {}
        self.largest: Floats = (self._hi - self._lo).max(axis=1).astype(np.float64)
        known: dict[object, int] = {}
        parts = []
        for axes, starts, ends in zip(lists, self._lo, self._hi, strict=True):
            ways = prod(geometry.mesh_shape[axis] for axis in axes)
            key = (ways, np.unique(starts[starts < ends]).tobytes())
            parts.append(known.setdefault(key, len(known)))
        self.parts: Ints = np.array(parts, dtype=np.int64)

    def sums(self, varying: int) -> tuple[Floats, Floats]:
        """Return what a device shares with those that differ from it on these axes at most.

        Given the bits of the axes. Both arrays are (lists, lists, rows): under the first list, the
        lengths, summed over all parts that these axes make of it, that lie in the row device's own
        part under the second list; and how many such parts are not empty.
        """
        if varying not in self._sums:
            found = [self._sums_of(place, varying) for place in range(len(self._lists))]
            lengths, parts = (np.stack(each) for each in zip(*found, strict=True))
            self._sums[varying] = lengths, parts
        return self._sums[varying]

    def _sums_of(self, place: int, varying: int) -> tuple[Floats, Floats]:
        mesh_shape, rows = self._geometry.mesh_shape, self._geometry.rows
        along = [axis for axis in self._lists[place] if varying >> axis & 1]
        strides = [prod(mesh_shape[axis + 1 :]) for axis in along]
        sizes = [mesh_shape[axis] for axis in along]
        others = rows.copy()
        for axis, stride in zip(along, strides, strict=True):
            others -= self._geometry.coordinates[rows, axis] * stride
        steps = np.indices(sizes).reshape(len(sizes), prod(sizes)).T @ np.array(strides, dtype=int)
        peers = others[:, None] + steps
        own = self._lo[:, rows, None], self._hi[:, rows, None]
        lengths = shared(own, (self._lo[place][peers], self._hi[place][peers]))
        return lengths.sum(axis=-1).astype(np.float64), (lengths > 0).sum(axis=-1).astype(float)

    def same(self, a: Ints, b: Ints, some: slice) -> Bools:
        """Return (pairs, rows, devices): where two parts are the same interval, and not empty."""
        rows = self._geometry.rows
        lo, hi = self._lo[a][..., rows, None], self._hi[a][..., rows, None]
        same: Bools = lo == self._lo[b][..., None, some]
        same &= hi == self._hi[b][..., None, some]
        same &= lo < hi
        return same


def routed_lines(
    geometry: Geometry,
    model: CostModel,
    overlaps: Sequence[Overlaps],
    sources: Ints,
    targets: Ints,
    uncut: int,
    uncut_then: Ints,
) -> tuple[Lines, Lines]:
    """Return what permute and exchange cost by the bytes of an element, per pair of specs.

    `overlaps` has one entry per tensor dim, and `sources` and `targets` (pairs, dims) say which of
    its lists cuts that. `uncut` has the bits of the axes that cut nothing, the same for all
    sources: devices that differ only on these hold the same. `uncut_then` are those of each target.
    A permute, which needs both ends to hold the same boxes as often, else has a fixed part of inf.
    """
    exchange = _exchange_lines(geometry, model, overlaps, sources, targets, uncut, uncut_then)
    alike = (targets != sources).any(axis=-1)
    for dim, table in enumerate(overlaps):
        alike &= table.parts[targets[:, dim]] == table.parts[sources[:, dim]]
    some = sources[alike], targets[alike], uncut, uncut_then[alike]
    found = _permute_lines(geometry, model, overlaps, *some)
    fixed = np.full((len(targets), found.fixed.shape[-1]), np.inf)
    slope = np.zeros_like(fixed)
    fixed[alike], slope[alike] = found.fixed, found.slope
    return Lines(fixed, slope), exchange


def _exchange_lines(
    geometry: Geometry,
    model: CostModel,
    overlaps: Sequence[Overlaps],
    sources: Ints,
    targets: Ints,
    uncut: int,
    uncut_then: Ints,
) -> Lines:
    """Price exchanges, from what devices get over the cheapest axes alone, then over more.

    Who differs from a device on some axes at most holds a product of parts, one per dim; so what it
    gets from all of them is a product of sums over one dim each.
    """
    all_axes = (1 << len(geometry.mesh_shape)) - 1
    cut = all_axes & ~uncut
    along = [axis for axis in range(len(geometry.mesh_shape)) if cut >> axis & 1]
    sharing = ~cut & ~sum(1 << axis for axis in model.apart(along)) & all_axes
    replicas = prod(n for axis, n in enumerate(geometry.mesh_shape) if sharing >> axis & 1)

    @cache
    def reached(varying: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Return bytes and peers of receiving, then of sending, its own part included.

        What is asked of a device is asked of its replicas as well; they send as much as each other.
        """
        asking = varying & cut | sharing
        received, senders, sent, receivers = np.ones((4, len(targets), len(geometry.rows)))
        for dim, table in enumerate(overlaps):
            for both, sums in zip((received, senders), table.sums(varying), strict=True):
                both *= sums[sources[:, dim], targets[:, dim]]
            for both, sums in zip((sent, receivers), table.sums(asking), strict=True):
                both *= sums[targets[:, dim], sources[:, dim]]
        # Axes that cut nothing any more: all along these want the same.
        free = np.ones((len(targets), 1))
        for axis, devices in enumerate(geometry.mesh_shape):
            free[(uncut_then & asking) >> axis & 1 == 1] *= devices
        return received, senders, sent * free / replicas, receivers * free

    everything = reached(all_axes)
    fixed, slope = np.zeros((2, 2, len(targets), len(geometry.rows)))
    of_axes = [model.slowest([axis]) for axis in range(len(geometry.mesh_shape))]
    slowest = np.zeros((2, len(targets)))
    for which in range(2):
        costs = [cost[which] for cost in of_axes]
        before = reached(0)
        for cost in sorted(set(costs)):
            now = reached(sum(1 << axis for axis, other in enumerate(costs) if other <= cost))
            more = [a - b for a, b in zip(now, before, strict=True)]
            # Pieces stay whole: of three, one of two replicas sends two, and the slow ones count.
            more[3] = np.ceil((everything[3] - before[3]) / replicas)
            more[3] -= np.ceil((everything[3] - now[3]) / replicas)
            if which:
                slope += cost * np.stack(more[::2])
            else:
                fixed += cost * np.stack(more[1::2])
            slowest[which] = np.where(more[0].any(axis=-1), cost, slowest[which])
            before = now
    if model.link_model == "shared-bus":
        # The busiest device's messages, and everyone's bytes.
        own = reached(0)
        messages = np.maximum(
            everything[1] - own[1], np.ceil((everything[3] - own[3]) / replicas)
        ).max(axis=-1)
        scale = prod(geometry.mesh_shape) / len(geometry.rows)
        moved = (everything[0] - own[0]).sum(axis=-1) * scale
        fixed, slope = (messages * slowest[0])[:, None], (moved * slowest[1])[:, None]
    else:
        fixed, slope = (np.concatenate(list(each), axis=-1) for each in (fixed, slope))
    moving = slope.any(axis=-1, keepdims=True) if model.start_s or model.copy_s else None
    if moving is not None:
        fixed = fixed + model.start_s * moving
        # Pieces are packed and unpacked.
        held = _largest(overlaps, sources) + _largest(overlaps, targets)
        slope = slope + model.copy_s * moving * held[:, None]
    return Lines(fixed, slope)


def _permute_lines(
    geometry: Geometry,
    model: CostModel,
    overlaps: Sequence[Overlaps],
    sources: Ints,
    targets: Ints,
    uncut: int,
    uncut_then: Ints,
) -> Lines:
    """Price permutes to targets that hold the same boxes as often as the source."""
    by_bits = geometry.by_bits(model)
    # Of many combinations of axes few differ in latency and rate.
    kinds, kind_of = np.unique(by_bits[0] + 1j * by_bits[1], return_inverse=True)
    devices, rows = len(geometry.coordinates), len(geometry.rows)
    used = np.zeros((len(targets), len(kinds)), dtype=bool)
    wants, stays = np.zeros((2, len(targets), rows), dtype=bool)
    # So many devices at a time that large meshes fit into memory.
    for first in range(0, devices, _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        differ = geometry.differ[:, some]
        served, away = (differ & uncut) == 0, differ != 0  # by the nearest holder
        wanted = np.ones((len(targets), *differ.shape), dtype=bool)
        held = np.ones_like(wanted)
        for dim, table in enumerate(overlaps):
            wanted &= table.same(targets[:, dim], sources[:, dim], some)
            held &= table.same(sources[:, dim], targets[:, dim], some)
        wanted &= served
        held &= (differ & uncut_then[:, None, None]) == 0
        wants |= wanted.any(axis=-1)
        stays |= (wanted & ~away).any(axis=-1)
        held |= wanted
        crossed = kind_of[differ]
        for kind in range(len(kinds)):
            used[:, kind] |= (held & (crossed == kind)).any(axis=(1, 2))
    fixed, slope = (np.where(used, cost, 0.0) for cost in (kinds.real, kinds.imag))
    if model.link_model == "shared-bus":
        # A shard that is empty does not travel, and one that is there already stays.
        moving = (wants & ~stays).mean(axis=-1) * devices
        fixed = fixed.max(axis=-1, keepdims=True)
        slope = slope.max(axis=-1, keepdims=True) * moving[:, None]
    return Lines(fixed, slope * _largest(overlaps, sources)[:, None])


def _largest(overlaps: Sequence[Overlaps], lists: Ints) -> Floats:
    """Return the elements of the largest shard of each spec."""
    elements = np.ones(len(lists))
    for dim, table in enumerate(overlaps):
        elements *= table.largest[lists[:, dim]]
    return elements

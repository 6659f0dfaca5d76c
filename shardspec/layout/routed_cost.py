"""What permute and exchange cost: priced from the boxes of every device on both sides.

A device that lacks bytes gets them from the nearest holder, the one with the same coordinates on
all axes that do not cut the source; so who sends what to whom follows from the two cuts alone. Per
device and link the seconds are ``alpha + bytes * beta``; the busiest device, sending or receiving,
sets the price of an exchange, and the slowest link used that of a permute. On a shared bus the
bytes of all devices add up instead.

Every price here is the largest of a few lines ``fixed + slope * elements``, kept as two arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel

__all__ = [
    "Geometry",
    "Lines",
    "Overlaps",
    "RoutedPrices",
    "geometry_of",
    "routed_prices",
    "without_ones",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_ALL_DEVICES = 512
"""Up to so many devices every one is priced; on larger meshes those at the corners stand for
all, which is exact where the cuts are even and the axes equally long."""
_MOST_PAIRS = 1 << 20
"""Pairs of devices up to which corners are looked at; on the largest meshes four are."""
_ALL = slice(None)
_AT_ONCE = 1 << 15
"""Devices that are looked at together."""
_MOST_KEPT = 1 << 21
"""Shares of all pairs of lists and devices up to which they are worked out once."""


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
        """Return lines with the same maximum for every ``x >= 0``, mostly far fewer of them."""
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
        """Return per price a line that rises above the kept ones somewhere, None where none does.

        The upper envelope of the kept lines is convex, so it is enough to look where two of them
        cross.
        """
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
    """Devices of a mesh shape, seen in pairs.

    Attributes
    ----------
    coordinates : array (devices, axes)
        Of every device, in row-major order.
    rows : array of indices
        Devices that are priced.
    differ : array (rows, devices)
        Bit ``i`` is set where two devices differ on axis ``i``.
    """

    mesh_shape: tuple[int, ...]
    coordinates: Ints
    rows: Ints
    differ: Ints

    def intervals(self, axes: Sequence[int], size: int) -> tuple[Ints, Ints]:
        """Return where each device's part of a dim begins and ends."""
        lo = np.zeros(len(self.coordinates), dtype=np.int64)
        hi = np.full_like(lo, size)
        for axis in axes:
            block = -(-(hi - lo) // self.mesh_shape[axis])
            start = np.minimum(lo + self.coordinates[:, axis] * block, hi)
            lo, hi = start, start + np.minimum(block, hi - start)
        return lo, hi

    def by_bits(self, model: CostModel) -> tuple[Floats, Floats]:
        """Return latency and seconds a byte of a link, by the bits of the axes it crosses."""
        alpha, beta = np.zeros((2, 1 << len(self.mesh_shape)))
        for axis in range(len(self.mesh_shape)):
            link, half = model.slowest([axis]), 1 << axis
            for table, cost in zip((alpha, beta), link, strict=True):
                np.maximum(table[:half], cost, out=table[half : 2 * half])
        return alpha, beta


def without_ones(mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes that have more than one device, which alone make a difference.

    Examples
    --------
    >>> without_ones((1, 4, 1, 2))
    (1, 3)
    """
    return tuple(axis for axis, devices in enumerate(mesh_shape) if devices > 1)


def geometry_of(mesh_shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of a mesh shape; that of a small mesh is kept."""
    return (_kept_geometry if prod(mesh_shape) <= _ALL_DEVICES else _geometry)(mesh_shape)


@lru_cache(maxsize=16)
def _kept_geometry(mesh_shape: tuple[int, ...]) -> Geometry:
    return _geometry(mesh_shape)


def _geometry(mesh_shape: tuple[int, ...]) -> Geometry:
    coordinates = (
        np.indices(mesh_shape).reshape(len(mesh_shape), prod(mesh_shape)).T.astype(np.int64)
    )
    if prod(mesh_shape) <= _ALL_DEVICES:
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


class Overlaps:
    """How much of one tensor dim two devices share, for every pair of lists of axes.

    Attributes
    ----------
    parts : array (lists)
        Equal for lists that cut the dim at the same places.
    largest : array (lists)
        Length of the longest part.
    """

    def __init__(self, geometry: Geometry, lists: Sequence[tuple[int, ...]], size: int) -> None:
        bounds = [geometry.intervals(axes, size) for axes in lists]
        self._lo, self._hi = (np.stack(ends) for ends in zip(*bounds, strict=True))
        self._rows = geometry.rows
        self.largest: Floats = (self._hi - self._lo).max(axis=1).astype(np.float64)
        known: dict[object, int] = {}
        parts = []
        for axes, starts, ends in zip(lists, self._lo, self._hi, strict=True):
            ways = prod(geometry.mesh_shape[axis] for axis in axes)
            key = (ways, np.unique(starts[starts < ends]).tobytes())
            parts.append(known.setdefault(key, len(known)))
        self.parts: Ints = np.array(parts, dtype=np.int64)
        self._shares: Floats | None = None
        every = np.arange(len(lists))
        if len(lists) ** 2 * geometry.differ.size <= _MOST_KEPT:
            self._shares = self.share(every[:, None], every[None, :])

    def share(self, a: Ints, b: Ints, some: slice = _ALL) -> Floats:
        """Return what row devices under lists `a` share with some devices under lists `b`.

        Returns
        -------
        array (…, rows, devices)
            Lengths; lists are those given, broadcast.
        """
        if self._shares is not None:
            return self._shares[a, b][..., some]
        hi = np.minimum(self._hi[a][..., self._rows, None], self._hi[b][..., None, some])
        hi -= np.maximum(self._lo[a][..., self._rows, None], self._lo[b][..., None, some])
        lengths: Floats = np.maximum(hi, 0, out=hi).astype(np.float64)
        return lengths

    def same(self, a: Ints, b: Ints, some: slice = _ALL) -> Bools:
        """Return likewise where the two intervals are equal and not empty."""
        lo, hi = self._lo[a][..., self._rows, None], self._hi[a][..., self._rows, None]
        same: Bools = lo == self._lo[b][..., None, some]
        same &= hi == self._hi[b][..., None, some]
        same &= lo < hi
        return same


@dataclass(frozen=True, slots=True)
class RoutedPrices:
    """Exchange and permute from one spec to many.

    Attributes
    ----------
    exchange : Lines
        Per target; in bytes where an element takes one byte.
    permute : Lines
        Per entry of `permutable`; likewise.
    permutable : array of indices
        The targets that hold the same boxes as often as the source.
    """

    exchange: Lines
    permute: Lines
    permutable: Ints


def routed_prices(
    geometry: Geometry,
    model: CostModel,
    overlaps: Sequence[Overlaps],
    source: Ints,
    targets: Ints,
    uncut: Ints,
) -> RoutedPrices:
    """Price exchange and permute from one spec with nothing pending to many.

    Parameters
    ----------
    geometry, model
        The mesh, and its prices.
    overlaps
        One per tensor dim.
    source : array (dims)
        Which list cuts each dim of the source.
    targets : array (targets, dims)
        Likewise of each target.
    uncut : array (targets + 1)
        Bits of the axes that cut nothing, of the source and then of each target: devices that
        differ only on these hold the same.
    """
    by_bits = geometry.by_bits(model)
    # Of many combinations of axes few differ in latency and rate.
    kinds, kind_of = np.unique(by_bits[0] + 1j * by_bits[1], return_inverse=True)
    bus = model.link_model == "shared-bus"
    alike = (targets != source).any(axis=-1)
    for dim, table in enumerate(overlaps):
        alike &= table.parts[targets[:, dim]] == table.parts[source[dim]]
    permutable = np.flatnonzero(alike)
    devices, rows = len(geometry.coordinates), len(geometry.rows)
    weights = np.zeros((4, len(targets), rows))
    counts = np.zeros((2, len(targets), rows))
    moved = np.zeros(len(targets))
    slowest = np.zeros((2, len(targets)))
    used = np.zeros((len(permutable), len(kinds)), dtype=bool)
    wants, stays = np.zeros((2, len(permutable), rows), dtype=bool)
    # Sums over all devices, so many at a time that large meshes fit into memory.
    for first in range(0, devices, _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        differ = geometry.differ[:, some]
        served, away = (differ & uncut[0]) == 0, differ != 0  # by the nearest holder
        received, sent = np.empty((2, len(targets), *differ.shape))
        received[:] = sent[:] = served & away
        for dim, table in enumerate(overlaps):
            received *= table.share(targets[:, dim], source[dim], some)
            sent *= table.share(source[dim], targets[:, dim], some)
        alpha, beta = (table[differ] for table in by_bits)
        if bus:
            counts += [(received > 0).sum(axis=-1), (sent > 0).sum(axis=-1)]
            moved += received.sum(axis=(1, 2))
            costs = [((received > 0) * cost).max(axis=(1, 2)) for cost in (alpha, beta)]
            np.maximum(slowest, costs, out=slowest)
        else:
            moves = ((received > 0, alpha), (sent > 0, alpha), (received, beta), (sent, beta))
            weights += [np.einsum("trc,rc->tr", amounts, cost) for amounts, cost in moves]
        wanted = np.ones((len(permutable), *differ.shape), dtype=bool)
        held = np.ones_like(wanted)
        for dim, table in enumerate(overlaps):
            wanted &= table.same(targets[permutable, dim], source[dim], some)
            held &= table.same(source[dim], targets[permutable, dim], some)
        wanted &= served
        held &= (differ & uncut[1:][permutable][:, None, None]) == 0
        wants |= wanted.any(axis=-1)
        stays |= (wanted & ~away).any(axis=-1)
        held |= wanted
        crossed = kind_of[differ]
        for kind in range(len(kinds)):
            used[:, kind] |= (held & (crossed == kind)).any(axis=(1, 2))
    if bus:
        # The busiest device's messages, and everyone's bytes.
        messages = counts.max(axis=(0, 2))
        exchange = Lines(
            (messages * slowest[0])[:, None], (moved * (devices / rows) * slowest[1])[:, None]
        )
    else:
        exchange = Lines(np.concatenate(weights[:2], axis=-1), np.concatenate(weights[2:], axis=-1))
    if model.start_s:
        moving_any = exchange.slope.any(axis=-1, keepdims=True)
        exchange = Lines(exchange.fixed + model.start_s * moving_any, exchange.slope)
    fixed, slope = (np.where(used, cost, 0.0) for cost in (kinds.real, kinds.imag))
    if bus:
        # A shard that is empty does not travel, and one that is there already stays.
        moving = (wants & ~stays).mean(axis=-1) * devices
        fixed = fixed.max(axis=-1, keepdims=True)
        slope = slope.max(axis=-1, keepdims=True) * moving[:, None]
    fixed = fixed + model.start_s * (wants & ~stays).any(axis=-1, keepdims=True)
    largest = float(np.prod([o.largest[a] for o, a in zip(overlaps, source, strict=True)]))
    return RoutedPrices(exchange, Lines(fixed, slope * largest), permutable)

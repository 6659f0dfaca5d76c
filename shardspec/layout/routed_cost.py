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

__all__ = ["Geometry", "Lines", "Overlaps", "RoutedPrices", "geometry_of", "routed_prices"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_ALL_DEVICES = 512
"""Up to so many devices every one is priced; on larger meshes those at the corners stand for
all, which is exact where the cuts are even and the axes equally long."""


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
            start = lo + self.coordinates[:, axis] * block
            lo, hi = np.minimum(start, hi), np.minimum(start + block, hi)
        return lo, hi

    def by_bits(self, model: CostModel) -> tuple[Floats, Floats]:
        """Return latency and seconds a byte of a link, by the bits of the axes it crosses."""
        links = [(0.0, 0.0)]
        for bits in range(1, 1 << len(self.mesh_shape)):
            axes = [axis for axis in range(len(self.mesh_shape)) if bits >> axis & 1]
            links.append(model.slowest(axes))
        table = np.array(links)
        return table[:, 0], table[:, 1]


@lru_cache(maxsize=16)
def geometry_of(mesh_shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of a mesh shape."""
    coordinates = np.indices(mesh_shape).reshape(len(mesh_shape), -1).T.astype(np.int64)
    if prod(mesh_shape) <= _ALL_DEVICES:
        rows = np.arange(len(coordinates))
    else:
        corners = product(*(sorted({0, n - 1}) for n in mesh_shape))
        rows = np.array([np.ravel_multi_index(at, mesh_shape) for at in corners])
    differ = np.zeros((len(rows), len(coordinates)), dtype=np.int64)
    for axis in range(len(mesh_shape)):
        different = coordinates[rows, axis][:, None] != coordinates[:, axis][None, :]
        differ |= different.astype(np.int64) << axis
    return Geometry(mesh_shape, coordinates, rows, differ)


class Overlaps:
    """How much of one tensor dim two devices share, for every pair of lists of axes.

    Attributes
    ----------
    share : array (lists, lists, rows, devices)
        Entry ``[a, b, r, c]``: the length that row device ``r`` under list ``a`` shares with device
        ``c`` under list ``b``.
    same : array of bool, the same shape
        Where the two intervals are equal and not empty.
    parts : array (lists)
        Equal for lists that cut the dim at the same places.
    largest : array (lists)
        Length of the longest part.
    """

    def __init__(self, geometry: Geometry, lists: Sequence[tuple[int, ...]], size: int) -> None:
        bounds = [geometry.intervals(axes, size) for axes in lists]
        lo, hi = (np.stack(ends) for ends in zip(*bounds, strict=True))
        row_lo, row_hi = (ends[:, None, geometry.rows, None] for ends in (lo, hi))
        col_lo, col_hi = (ends[None, :, None, :] for ends in (lo, hi))
        shared = np.minimum(row_hi, col_hi) - np.maximum(row_lo, col_lo)
        self.share: Floats = np.maximum(shared, 0).astype(np.float64)
        self.same: Bools = (row_lo == col_lo) & (row_hi == col_hi) & (row_lo < row_hi)
        self.largest: Floats = (hi - lo).max(axis=1).astype(np.float64)
        known: dict[object, int] = {}
        parts = []
        for axes, starts, ends in zip(lists, lo, hi, strict=True):
            ways = prod(geometry.mesh_shape[axis] for axis in axes)
            key = (ways, np.unique(starts[starts < ends]).tobytes())
            parts.append(known.setdefault(key, len(known)))
        self.parts: Ints = np.array(parts, dtype=np.int64)


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
    shape = (len(targets), *geometry.differ.shape)
    received, sent = np.ones(shape), np.ones(shape)
    for dim, table in enumerate(overlaps):
        received *= table.share[targets[:, dim], source[dim]]
        sent *= table.share[source[dim], targets[:, dim]]
    served = (geometry.differ & uncut[0]) == 0  # by the nearest holder
    away = geometry.differ != 0
    received *= served & away
    sent *= served & away
    by_bits = geometry.by_bits(model)
    alpha, beta = (table[geometry.differ] for table in by_bits)
    bus = model.link_model == "shared-bus"
    exchange = (
        _bus_lines(geometry, received, sent, alpha, beta)
        if bus
        else Lines(
            np.concatenate([_weighed(received > 0, alpha), _weighed(sent > 0, alpha)], axis=-1),
            np.concatenate([_weighed(received, beta), _weighed(sent, beta)], axis=-1),
        )
    )
    alike = (targets != source).any(axis=-1)
    for dim, table in enumerate(overlaps):
        alike &= table.parts[targets[:, dim]] == table.parts[source[dim]]
    permutable = np.flatnonzero(alike)
    wanted = np.ones((len(permutable), *geometry.differ.shape), dtype=bool)
    held = np.ones_like(wanted)
    for dim, table in enumerate(overlaps):
        wanted &= table.same[targets[permutable, dim], source[dim]]
        held &= table.same[source[dim], targets[permutable, dim]]
    wanted &= served
    held &= (geometry.differ & uncut[1:][permutable][:, None, None]) == 0
    largest = float(np.prod([o.largest[a] for o, a in zip(overlaps, source, strict=True)]))
    used = np.stack(
        [
            ((wanted | held) & (geometry.differ == bits)).any(axis=(1, 2))
            for bits in range(len(by_bits[0]))
        ],
        axis=-1,
    )
    fixed, slope = np.where(used, by_bits[0], 0.0), np.where(used, by_bits[1], 0.0)
    if bus:
        # A shard that is empty does not travel, and one that is there already stays.
        travels = wanted.any(axis=-1) & ~(wanted & ~away).any(axis=-1)
        moving = travels.mean(axis=-1) * len(geometry.coordinates)
        fixed = fixed.max(axis=-1, keepdims=True)
        slope = slope.max(axis=-1, keepdims=True) * moving[:, None]
    return RoutedPrices(exchange, Lines(fixed, slope * largest), permutable)


def _weighed(amounts: Floats | Bools, weights: Floats) -> Floats:
    """Add up what each row device moves, weighed by the links it moves on."""
    total: Floats = np.einsum("trc,rc->tr", amounts, weights)
    return total


def _bus_lines(
    geometry: Geometry, received: Floats, sent: Floats, alpha: Floats, beta: Floats
) -> Lines:
    """Return the price on a shared bus: the busiest device's messages, and everyone's bytes."""
    messages = np.maximum(
        (received > 0).sum(axis=-1).max(axis=-1), (sent > 0).sum(axis=-1).max(axis=-1)
    )
    devices = len(geometry.coordinates) / len(geometry.rows)
    moved = received.sum(axis=(1, 2)) * devices
    slowest = [((received > 0) * cost).max(axis=(1, 2)) for cost in (alpha, beta)]
    return Lines((messages * slowest[0])[:, None], (moved * slowest[1])[:, None])

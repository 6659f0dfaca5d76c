"""Computes the seconds of permutes and exchanges from the boxes of every device before and after.

>>> from shardspec.comm.curves import Link
>>> model = CostModel((2, 2), (Link(1e-5, 1e-9), Link(1e-6, 1e-10)))
>>> routing = Routing(model, [8], [(0, 1), (1, 0)])
>>> permute, exchange = routing.lines(np.array([[0]]), np.array([[1]]))  # S01 to S10, over bytes
>>> value_at(permute, 1000), value_at(exchange, 1000)
(array([1.2e-05]), array([1.2e-05]))

Every device gets the elements it lacks from the nearest holders. Equally near holders of the same
box share the sending. A link takes ``alpha + bytes * beta`` seconds for a device. An exchange takes
as long as its busiest device, and a permute as long as the slowest link used. On a shared bus the
bytes of all devices add up. So a price is the maximum of a few lines ``fixed + slope * elements``.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import combinations, product
from math import prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel, exchange_start, pair_line, slower_axes, slowest_costs
from shardspec.layout.graph import Floats, Ints

Sides: TypeAlias = tuple[Ints, Ints]
"""The starts and the stops of intervals of a dim."""
LineArrays: TypeAlias = tuple[Floats, Floats]
"""Prices as the maximum of lines: their fixed parts and slopes, along the last axis."""

MAX_EXACT_DEVICES: Final = 512
"""The most devices of a mesh on which every device is priced. On larger meshes only the corners of
the mesh are priced, which is exact for even shards and axes of equal length."""
_MAX_PAIRS: Final = 1 << 20
"""The most pairs of priced corners and devices; at least four corners are priced."""
_ROUNDING: Final = 1e-12
"""Relative difference below which prices are equal: rounding of sums in different orders."""


def value_at(lines: LineArrays, x: float) -> Floats:
    """Return the maximum at `x` of the lines along the last axis.

    >>> value_at((np.array([1.0, 5.0]), np.array([3.0, 1.0])), 2.5)
    np.float64(8.5)
    """
    best: Floats = (lines[0] + lines[1] * x).max(axis=-1)
    return best


def pruned(fixed: Floats, slope: Floats) -> LineArrays:
    """Return the lines that are the highest at some ``x >= 0``; they are usually few.

    Their maximum is convex, so a line that rises above it does so where two of them cross.

    >>> pruned(np.array([3.0, 1.0, 0.0]), np.array([0.0, 0.1, 2.0]))
    (array([3., 0.]), array([0., 2.]))
    """
    # Complex numbers sort by their real parts, then by their imaginary parts.
    chosen = [(fixed + 1j * slope).argmax(axis=-1), (slope + 1j * fixed).argmax(axis=-1)]
    while True:
        index = np.stack(chosen, axis=-1)
        f, s = (np.take_along_axis(each, index, axis=-1) for each in (fixed, slope))
        for i, j in combinations(range(len(chosen)), 2):
            with np.errstate(divide="ignore", invalid="ignore"):
                cross = (f[..., i] - f[..., j]) / (s[..., j] - s[..., i])
            cross = np.where(np.isfinite(cross) & (cross > 0), cross, 0.0)[..., None]
            values = fixed + slope * cross
            above = values.max(axis=-1) > (f + s * cross).max(axis=-1) * (1 + _ROUNDING)
            if above.any():
                chosen.append(np.where(above, values.argmax(axis=-1), 0))
                break
        else:
            return f, s


@lru_cache(maxsize=8)
def device_coordinates(mesh_shape: tuple[int, ...]) -> Ints:
    """Return (devices, axes): the coordinates of every device, in row-major order.

    >>> device_coordinates((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    coordinates: Ints = np.indices(mesh_shape).reshape(len(mesh_shape), prod(mesh_shape)).T
    return coordinates


def intervals(mesh_shape: tuple[int, ...], lists: Sequence[tuple[int, ...]], size: int) -> Sides:
    """Return (lists, devices): starts and stops of each device's part of a dim.

    >>> starts, stops = intervals((2, 2), [(0,), (0, 1)], 6)
    >>> starts.tolist(), stops.tolist()
    ([[0, 0, 3, 3], [0, 2, 3, 5]], [[3, 3, 6, 6], [2, 3, 5, 6]])
    """
    coordinates = device_coordinates(mesh_shape)
    sides = np.zeros((2, len(lists), len(coordinates)), dtype=np.int64)
    sides[1] = size
    first_place: dict[tuple[int, ...], int] = {}
    for place, axes in enumerate(lists):
        if first_place.setdefault(axes, place) < place:
            sides[:, place] = sides[:, first_place[axes]]
            continue
        lo, hi = sides[:, place]
        for axis in axes:
            block = -(-(hi - lo) // mesh_shape[axis])
            lo += np.minimum(coordinates[:, axis] * block, hi - lo)
            hi[:] = lo + np.minimum(hi - lo, block)  # lo + block may overflow
    return sides[0], sides[1]


def shared(a: Sides, b: Sides) -> Ints:
    """Return the lengths of the intersections of intervals.

    >>> shared((np.array([0, 4]), np.array([4, 8])), (np.array([2, 0]), np.array([9, 3])))
    array([2, 0])
    """
    lengths: Ints = np.minimum(a[1], b[1])
    lengths = lengths - np.maximum(a[0], b[0])
    return np.maximum(lengths, 0, out=lengths)


def longest(mesh_shape: tuple[int, ...], lists: Sequence[tuple[int, ...]], size: int) -> Floats:
    """Return the length of the longest part of a dim under each list of axes.

    >>> longest((2, 4), [(), (0,), (0, 1)], 10)
    array([10.,  5.,  2.])
    """
    sides = []
    for axes in lists:
        side = size
        for axis in axes:
            side = -(-side // mesh_shape[axis])
        sides.append(side)
    return np.array(sides, dtype=np.float64)


class _Dim:
    """Overlaps between devices' parts of one tensor dim, for all ways to shard it by axes."""

    def __init__(
        self, mesh_shape: tuple[int, ...], rows: Ints, lists: Sequence[tuple[int, ...]], size: int
    ) -> None:
        self._mesh_shape, self._rows, self._lists = mesh_shape, rows, lists
        self.lo, self.hi = intervals(mesh_shape, lists, size)
        self.longest = longest(mesh_shape, lists, size)
        # Lists with the same cuts and the same number of devices get the same number.
        parts: dict[object, int] = {}
        self.parts = np.array(
            [
                parts.setdefault(
                    (prod(mesh_shape[axis] for axis in axes), np.unique(lo[lo < hi]).tobytes()),
                    len(parts),
                )
                for axes, lo, hi in zip(lists, self.lo, self.hi, strict=True)
            ]
        )
        self._sums: dict[int, tuple[Floats, Floats]] = {}

    def sums(self, varying: int) -> tuple[Floats, Floats]:
        """Return the elements and the number of a device's overlaps, each (lists, lists, devices).

        Entry (a, b, device) compares the part of `device` if axes `b` shard the dim with the parts
        of other devices if axes `a` do. Only devices that differ on axes in `varying` count, which
        has one bit per axis.
        """
        # A dict, as a cache of a bound method would keep these arrays alive.
        if varying in self._sums:
            return self._sums[varying]
        strides = [prod(self._mesh_shape[axis + 1 :]) for axis in range(len(self._mesh_shape))]
        lengths, parts = np.empty((2, len(self._lists), len(self._lists), len(self._rows)))
        own = self.lo[:, self._rows, None], self.hi[:, self._rows, None]
        at = device_coordinates(self._mesh_shape)[self._rows]
        for place, axes in enumerate(self._lists):
            peers = self._rows[:, None]
            for axis in axes:
                if varying >> axis & 1:
                    moved = np.arange(self._mesh_shape[axis]) - at[:, axis, None]
                    peers = (peers[:, :, None] + moved[:, None] * strides[axis]).reshape(
                        len(at), -1
                    )
            overlap = shared(own, (self.lo[place][peers], self.hi[place][peers]))
            lengths[place], parts[place] = overlap.sum(axis=-1), (overlap > 0).sum(axis=-1)
        self._sums[varying] = lengths, parts
        return self._sums[varying]

    def same(self, a: Ints, b: Ints) -> npt.NDArray[np.bool_]:
        """Return (pairs, devices, devices): True if two devices have the same nonempty interval.

        Pair i compares a device's part by axes ``a[i]`` with another's by axes ``b[i]``.
        """
        lo, hi = self.lo[a][:, self._rows, None], self.hi[a][:, self._rows, None]
        same: npt.NDArray[np.bool_] = lo == self.lo[b][:, None]
        same &= hi == self.hi[b][:, None]
        same &= lo < hi
        return same


class Routing:
    """Prices of permutes and exchanges between specs.

    A spec is a row of indices into `lists`: the axes that shard each dim.
    """

    def __init__(
        self, model: CostModel, sizes: Sequence[int], lists: Sequence[tuple[int, ...]]
    ) -> None:
        self._model, self._mesh_shape = model, model.mesh_shape
        self._axes = range(len(model.mesh_shape))
        self._rows, self.differ, *self._differences = _devices_in_pairs(model.mesh_shape)
        by_size = {size: _Dim(model.mesh_shape, self._rows, lists, size) for size in set(sizes)}
        self._dims = [by_size[size] for size in sizes]
        self._bits = np.array([sum(1 << axis for axis in axes) for axes in lists], np.int64)

    def axis_bits(self, specs: Ints) -> Ints:
        """Return the axes that each spec uses, one bit per axis."""
        bits: Ints = self._bits[specs].sum(axis=-1)
        return bits

    def lines(self, sources: Ints, targets: Ints) -> tuple[LineArrays, LineArrays]:
        """Return the price lines of permutes, and of exchanges, from each source to its target.

        All sources must use the same axes. A permute between different sets of boxes costs inf.
        Lines are functions of the bytes of an element.
        """
        used = int(self.axis_bits(sources[:1])[0])
        same_boxes = (targets != sources).any(axis=-1)
        for dim, table in enumerate(self._dims):
            same_boxes &= table.parts[targets[:, dim]] == table.parts[sources[:, dim]]
        permute = self._permute(sources[same_boxes], targets[same_boxes], used)
        fixed = np.full((len(targets), permute[0].shape[-1]), np.inf)
        slope = np.zeros_like(fixed)
        fixed[same_boxes], slope[same_boxes] = permute
        return (fixed, slope), self._exchange(sources, targets, used)

    def _local(self, specs: Ints) -> Floats:
        """Return the elements of the largest shard of each spec."""
        elements = np.ones(len(specs))
        for dim, table in enumerate(self._dims):
            elements *= table.longest[specs[:, dim]]
        return elements

    def _exchange(self, sources: Ints, targets: Ints, used: int) -> LineArrays:
        """Return the price lines of exchanges; a device receives from the nearest holders first.

        Boxes are products of parts, one per dim. So the elements that a device gets from all
        devices which differ on some axes are a product of sums, one per dim.
        """
        model, mesh_shape, every = self._model, self._mesh_shape, (1 << len(self._axes)) - 1
        slow_axes = slower_axes(model, [axis for axis in self._axes if used >> axis & 1])
        sharing = every & ~used & ~sum(1 << axis for axis in slow_axes)
        replicas = prod(mesh_shape[axis] for axis in self._axes if sharing >> axis & 1)
        unused_then = every & ~self.axis_bits(targets)

        @cache
        def reached(varying: int) -> Floats:
            """Return four arrays: elements received, senders, elements sent, receivers.

            They count peers that differ from a device along axes `varying` only, or not at all.
            """
            asking = varying & used | sharing
            totals = np.ones((4, len(targets), len(self._rows)))
            for dim, table in enumerate(self._dims):
                for total, sums in zip(totals[:2], table.sums(varying), strict=True):
                    total *= sums[sources[:, dim], targets[:, dim]]
                for total, sums in zip(totals[2:], table.sums(asking), strict=True):
                    total *= sums[targets[:, dim], sources[:, dim]]
            for axis in self._axes:
                # All devices along an axis that the target does not use request the same.
                totals[2:, (unused_then & asking) >> axis & 1 == 1] *= mesh_shape[axis]
            totals[2] /= replicas
            return totals

        everything, own = reached(every), reached(0)
        fixed, slope = np.zeros((2, 2, len(targets), len(self._rows)))
        slowest = np.zeros((2, len(targets)))
        for term in range(2):
            costs = [slowest_costs(model, [axis])[term] for axis in self._axes]
            before = own
            for cost in sorted(set(costs)):
                now = reached(sum(1 << axis for axis in self._axes if costs[axis] <= cost))
                more = now - before
                # Pieces are not divided: if two replicas send three pieces, one sends two.
                more[3] = np.ceil((everything[3] - before[3]) / replicas)
                more[3] -= np.ceil((everything[3] - now[3]) / replicas)
                if term:
                    slope += cost * more[::2]
                else:
                    fixed += cost * more[1::2]
                slowest[term] = np.where(more[0].any(axis=-1), cost, slowest[term])
                before = now
        if model.link_model == "shared-bus":
            # The latency of the busiest device's messages, and the bytes of all devices.
            gets, sends = everything[1] - own[1], np.ceil((everything[3] - own[3]) / replicas)
            messages = np.maximum(gets, sends).max(axis=-1)
            moved = (everything[0] - own[0]).mean(axis=-1) * prod(mesh_shape)
            fixed, slope = (messages * slowest[0])[:, None], (moved * slowest[1])[:, None]
        else:
            fixed, slope = (np.concatenate(list(each), axis=-1) for each in (fixed, slope))
        moving = slope.any(axis=-1, keepdims=True)
        # Pieces are packed and unpacked.
        elements = (self._local(sources) + self._local(targets))[:, None]
        return fixed + exchange_start(model) * moving, slope + model.copy_s * moving * elements

    def _permute(self, sources: Ints, targets: Ints, used: int) -> LineArrays:
        """Return the price lines of permutes; each source must have the boxes of its target."""
        bits, places = self._differences
        links = np.zeros((2, len(bits)))
        for axis in self._axes:
            crossed = (bits >> axis & 1)[None] * np.array(pair_line(self._model, axis))[:, None]
            np.maximum(links, crossed, out=links)
        # Many combinations of axes have the same latency and rate.
        kinds, kind_of = np.unique(links[0] + 1j * links[1], return_inverse=True)
        every = (1 << len(self._axes)) - 1
        unused, unused_then = every & ~used, every & ~self.axis_bits(targets)
        receives = np.ones((len(targets), *self.differ.shape), dtype=bool)
        sends = np.ones_like(receives)
        for dim, table in enumerate(self._dims):
            receives &= table.same(targets[:, dim], sources[:, dim])
            sends &= table.same(sources[:, dim], targets[:, dim])
        receives &= (self.differ & unused) == 0  # by the nearest holder
        sends &= (self.differ & unused_then[:, None, None]) == 0
        crossed = kind_of[places]
        crossing = receives | sends
        used_kinds = np.stack(
            [(crossing & (crossed == kind)).any(axis=(1, 2)) for kind in range(len(kinds))], axis=-1
        )
        fixed, slope = (np.where(used_kinds, cost, 0.0) for cost in (kinds.real, kinds.imag))
        if self._model.link_model == "shared-bus":
            # Empty shards are not sent, nor shards that the device already has.
            stays = (receives & (self.differ == 0)).any(axis=-1)
            moving = (receives.any(axis=-1) & ~stays).mean(axis=-1) * prod(self._mesh_shape)
            fixed = fixed.max(axis=-1, keepdims=True)
            slope = slope.max(axis=-1, keepdims=True) * moving[:, None]
        return fixed, slope * self._local(sources)[:, None]


@lru_cache(maxsize=8)
def _devices_in_pairs(mesh_shape: tuple[int, ...]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the devices to price, and the axes on which each differs from every device.

    The arrays are the `rows` to price, `differ[row, device]` with one bit per axis that differs,
    the distinct values of `differ`, and the index of each element of `differ` among the values.
    """
    coordinates = device_coordinates(mesh_shape)
    rows = np.arange(len(coordinates))
    if len(rows) > MAX_EXACT_DEVICES:
        edges = (sorted({0, n - 1}) for n in mesh_shape)
        corners = np.array([np.ravel_multi_index(at, mesh_shape) for at in product(*edges)])
        # If there are too many corners, use an evenly spaced selection.
        most = min(max(4, _MAX_PAIRS // len(rows)), len(corners))
        rows = corners[np.linspace(0, len(corners) - 1, most, dtype=int)]
    differ = np.zeros((len(rows), len(coordinates)), dtype=np.int64)
    for axis, at in enumerate(coordinates.T):
        differ |= (at[rows, None] != at).astype(np.int64) << axis
    kinds, kind_of = np.unique(differ, return_inverse=True)
    return rows, differ, kinds, kind_of.reshape(differ.shape)

"""What permute and exchange cost: priced from the boxes of every device on both sides.

A device that lacks bytes gets them from one that holds them; holders of the same box that are as
near share the work, and no other choice makes the busiest one send less. Per device and link the
seconds are ``alpha + bytes * beta``. The busiest device, sending or receiving, sets the price of an
exchange, and the slowest link used that of a permute. On a shared bus the bytes of all devices add
up instead. Such a price is the largest of a few lines ``fixed + slope * elements``.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import combinations, product
from math import prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.layout.graph import Floats, Ints

Sides: TypeAlias = tuple[Ints, Ints]
"""Where intervals of a dim begin, and where they end."""
Lines: TypeAlias = tuple[Floats, Floats]
"""Prices as the largest of lines: their fixed parts and slopes, along the last axis."""

MAX_EXACT_DEVICES: Final = 512
"""Up to so many devices each is priced; on larger meshes those at the corners stand for all,
which is exact where the cuts are even and the axes equally long."""
_MAX_PAIRS: Final = 1 << 20
"""Pairs of devices up to which corners are looked at; on the largest meshes four are."""
_ROUNDING: Final = 1e-12
"""Prices that differ by so little, in proportion, are one price summed in another order."""


def value_at(lines: Lines, x: float) -> Floats:
    """Return the largest of lines along the last axis at one place."""
    best: Floats = (lines[0] + lines[1] * x).max(axis=-1)
    return best


def pruned(fixed: Floats, slope: Floats) -> Lines:
    """Return lines with the same maximum for every ``x >= 0``, mostly far fewer of them.

    The upper envelope of those that are kept is convex, so whether another line rises above it is
    seen where two of them cross.
    """
    # Complex numbers are in the order of their real parts, equal ones in that of the imaginary.
    kept = [(fixed + 1j * slope).argmax(axis=-1), (slope + 1j * fixed).argmax(axis=-1)]
    while True:
        index = np.stack(kept, axis=-1)
        f, s = (np.take_along_axis(each, index, axis=-1) for each in (fixed, slope))
        for i, j in combinations(range(len(kept)), 2):
            with np.errstate(divide="ignore", invalid="ignore"):
                cross = (f[..., i] - f[..., j]) / (s[..., j] - s[..., i])
            cross = np.where(np.isfinite(cross) & (cross > 0), cross, 0.0)[..., None]
            values = fixed + slope * cross
            above = values.max(axis=-1) > (f + s * cross).max(axis=-1) * (1 + _ROUNDING)
            if above.any():
                kept.append(np.where(above, values.argmax(axis=-1), 0))
                break
        else:
            return f, s


@lru_cache(maxsize=8)
def device_coordinates(mesh_shape: tuple[int, ...]) -> Ints:
    """Return (devices, axes): the coordinates of every device, in row-major order."""
    found: Ints = np.indices(mesh_shape).reshape(len(mesh_shape), prod(mesh_shape)).T
    return found


def intervals(mesh_shape: tuple[int, ...], lists: Sequence[tuple[int, ...]], size: int) -> Sides:
    """Return (lists, devices): where each device's part of a dim begins, and where it ends."""
    coordinates = device_coordinates(mesh_shape)
    sides = np.zeros((2, len(lists), len(coordinates)), dtype=np.int64)
    sides[1] = size
    known: dict[tuple[int, ...], int] = {}
    for place, axes in enumerate(lists):
        if known.setdefault(axes, place) < place:
            sides[:, place] = sides[:, known[axes]]
            continue
        lo, hi = sides[:, place]
        for axis in axes:
            block = -(-(hi - lo) // mesh_shape[axis])
            lo += np.minimum(coordinates[:, axis] * block, hi - lo)
            np.minimum(hi, lo + block, out=hi)
    return sides[0], sides[1]


def shared(a: Sides, b: Sides) -> Ints:
    """Return how long the intersections of intervals are."""
    lengths: Ints = np.minimum(a[1], b[1])
    lengths = lengths - np.maximum(a[0], b[0])
    return np.maximum(lengths, 0, out=lengths)


def longest(mesh_shape: tuple[int, ...], lists: Sequence[tuple[int, ...]], size: int) -> Floats:
    """Return how long the longest part of a dim is under each list of axes."""
    sides = []
    for axes in lists:
        side = size
        for axis in axes:
            side = -(-side // mesh_shape[axis])
        sides.append(side)
    return np.array(sides, dtype=np.float64)


class _Dim:
    """How much of one tensor dim devices share, for every pair of lists of axes."""

    def __init__(
        self, mesh_shape: tuple[int, ...], rows: Ints, lists: Sequence[tuple[int, ...]], size: int
    ) -> None:
        self._mesh_shape, self._rows, self._lists = mesh_shape, rows, lists
        self.lo, self.hi = intervals(mesh_shape, lists, size)
        self.longest = longest(mesh_shape, lists, size)
        # Lists that cut the dim at the same places, as often, have the same number.
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
        """Return what a device shares with those that differ from it on these axes at most.

        Both arrays are (lists, lists, rows): the lengths of all parts that these axes make under
        the first list, as far as they lie in the row device's own part under the second; and how
        many such parts are not empty.
        """
        # In a dict: a cache of a bound method would keep these arrays until the next collection.
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
            found = shared(own, (self.lo[place][peers], self.hi[place][peers]))
            lengths[place], parts[place] = found.sum(axis=-1), (found > 0).sum(axis=-1)
        self._sums[varying] = lengths, parts
        return self._sums[varying]

    def same(self, a: Ints, b: Ints) -> npt.NDArray[np.bool_]:
        """Return (pairs, rows, devices): where two parts are the same interval, and not empty."""
        lo, hi = self.lo[a][:, self._rows, None], self.hi[a][:, self._rows, None]
        same: npt.NDArray[np.bool_] = lo == self.lo[b][:, None]
        same &= hi == self.hi[b][:, None]
        same &= lo < hi
        return same


class Routing:
    """Prices permute and exchange between specs, each the index of a list of axes for every dim."""

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
        """Return the bits of the axes that shard a dim of each spec."""
        bits: Ints = self._bits[specs].sum(axis=-1)
        return bits

    def lines(self, sources: Ints, targets: Ints) -> tuple[Lines, Lines]:
        """Return what permute and exchange cost by the bytes of an element, per pair of specs.

        The same axes shard all sources. Where ends hold other boxes, a permute costs inf.
        """
        used = int(self.axis_bits(sources[:1])[0])
        alike = (targets != sources).any(axis=-1)
        for dim, table in enumerate(self._dims):
            alike &= table.parts[targets[:, dim]] == table.parts[sources[:, dim]]
        found = self._permute(sources[alike], targets[alike], used)
        fixed = np.full((len(targets), found[0].shape[-1]), np.inf)
        slope = np.zeros_like(fixed)
        fixed[alike], slope[alike] = found
        return (fixed, slope), self._exchange(sources, targets, used)

    def _local(self, specs: Ints) -> Floats:
        """Return the elements of the largest shard of each spec."""
        elements = np.ones(len(specs))
        for dim, table in enumerate(self._dims):
            elements *= table.longest[specs[:, dim]]
        return elements

    def _exchange(self, sources: Ints, targets: Ints, used: int) -> Lines:
        """Price exchanges, from what devices get over the cheapest axes alone, then over more.

        Who differs from a device on some axes at most holds a product of parts, one per dim; so
        what it gets from all of them is a product of sums over one dim each.
        """
        model, mesh_shape, every = self._model, self._mesh_shape, (1 << len(self._axes)) - 1
        apart = model.apart([axis for axis in self._axes if used >> axis & 1])
        sharing = every & ~used & ~sum(1 << axis for axis in apart)
        replicas = prod(mesh_shape[axis] for axis in self._axes if sharing >> axis & 1)
        unused_then = every & ~self.axis_bits(targets)

        @cache
        def reached(varying: int) -> Floats:
            """Return bytes and peers of receiving, then of sending, its own part included.

            What is asked of a device is asked of its replicas as well; they send as much as each
            other.
            """
            asking = varying & used | sharing
            found = np.ones((4, len(targets), len(self._rows)))
            for dim, table in enumerate(self._dims):
                for both, sums in zip(found[:2], table.sums(varying), strict=True):
                    both *= sums[sources[:, dim], targets[:, dim]]
                for both, sums in zip(found[2:], table.sums(asking), strict=True):
                    both *= sums[targets[:, dim], sources[:, dim]]
            for axis in self._axes:
                # All along an axis that shards nothing any more want the same.
                found[2:, (unused_then & asking) >> axis & 1 == 1] *= mesh_shape[axis]
            found[2] /= replicas
            return found

        everything, own = reached(every), reached(0)
        fixed, slope = np.zeros((2, 2, len(targets), len(self._rows)))
        slowest = np.zeros((2, len(targets)))
        for which in range(2):
            costs = [model.slowest([axis])[which] for axis in self._axes]
            before = own
            for cost in sorted(set(costs)):
                now = reached(sum(1 << axis for axis in self._axes if costs[axis] <= cost))
                more = now - before
                # Pieces stay whole: of three, one of two replicas sends two; slow ones count.
                more[3] = np.ceil((everything[3] - before[3]) / replicas)
                more[3] -= np.ceil((everything[3] - now[3]) / replicas)
                if which:
                    slope += cost * more[::2]
                else:
                    fixed += cost * more[1::2]
                slowest[which] = np.where(more[0].any(axis=-1), cost, slowest[which])
                before = now
        if model.link_model == "shared-bus":
            # The busiest device's messages, and everyone's bytes.
            gets, sends = everything[1] - own[1], np.ceil((everything[3] - own[3]) / replicas)
            messages = np.maximum(gets, sends).max(axis=-1)
            moved = (everything[0] - own[0]).mean(axis=-1) * prod(mesh_shape)
            fixed, slope = (messages * slowest[0])[:, None], (moved * slowest[1])[:, None]
        else:
            fixed, slope = (np.concatenate(list(each), axis=-1) for each in (fixed, slope))
        moving = slope.any(axis=-1, keepdims=True)
        # Pieces are packed and unpacked.
        held = (self._local(sources) + self._local(targets))[:, None]
        return fixed + model.start_s * moving, slope + model.copy_s * moving * held

    def _permute(self, sources: Ints, targets: Ints, used: int) -> Lines:
        """Price permutes to targets that hold the same boxes as often as the source."""
        bits, places = self._differences
        links = np.zeros((2, len(bits)))
        for axis in self._axes:
            crossed = (bits >> axis & 1)[None] * np.array(self._model.pair(axis))[:, None]
            np.maximum(links, crossed, out=links)
        # Of many combinations of axes few differ in latency and rate.
        kinds, kind_of = np.unique(links[0] + 1j * links[1], return_inverse=True)
        every = (1 << len(self._axes)) - 1
        unused, unused_then = every & ~used, every & ~self.axis_bits(targets)
        wanted = np.ones((len(targets), *self.differ.shape), dtype=bool)
        held = np.ones_like(wanted)
        for dim, table in enumerate(self._dims):
            wanted &= table.same(targets[:, dim], sources[:, dim])
            held &= table.same(sources[:, dim], targets[:, dim])
        wanted &= (self.differ & unused) == 0  # by the nearest holder
        held &= (self.differ & unused_then[:, None, None]) == 0
        crossed = kind_of[places]
        crossing = wanted | held
        used_kinds = np.stack(
            [(crossing & (crossed == kind)).any(axis=(1, 2)) for kind in range(len(kinds))], axis=-1
        )
        fixed, slope = (np.where(used_kinds, cost, 0.0) for cost in (kinds.real, kinds.imag))
        if self._model.link_model == "shared-bus":
            # A shard that is empty does not travel, and one that is there already stays.
            stays = (wanted & (self.differ == 0)).any(axis=-1)
            moving = (wanted.any(axis=-1) & ~stays).mean(axis=-1) * prod(self._mesh_shape)
            fixed = fixed.max(axis=-1, keepdims=True)
            slope = slope.max(axis=-1, keepdims=True) * moving[:, None]
        return fixed, slope * self._local(sources)[:, None]


@lru_cache(maxsize=8)
def _devices_in_pairs(mesh_shape: tuple[int, ...]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the devices that are priced, and (these, devices): bits of the axes that differ.

    Beside them all such bits that occur, and which of these each pair has.
    """
    coordinates = device_coordinates(mesh_shape)
    rows = np.arange(len(coordinates))
    if len(rows) > MAX_EXACT_DEVICES:
        ends = (sorted({0, n - 1}) for n in mesh_shape)
        corners = np.array([np.ravel_multi_index(at, mesh_shape) for at in product(*ends)])
        # Where there are many, some far apart.
        most = min(max(4, _MAX_PAIRS // len(rows)), len(corners))
        rows = corners[np.linspace(0, len(corners) - 1, most, dtype=int)]
    differ = np.zeros((len(rows), len(coordinates)), dtype=np.int64)
    for axis, at in enumerate(coordinates.T):
        differ |= (at[rows, None] != at).astype(np.int64) << axis
    kinds, kind_of = np.unique(differ, return_inverse=True)
    return rows, differ, kinds, kind_of.reshape(differ.shape)

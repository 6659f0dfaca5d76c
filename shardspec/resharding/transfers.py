"""Who sends which bytes to whom when many tensors change their layouts at once.

Tensors that go from the same layout to the same layout are planned once, as a *kind*: which source
boxes overlap which target boxes. Replicas of a box share the work of sending it. Which of them
sends what is found for all tensors together, so that the busiest sender of the whole state dict
is as little busy as possible.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.boxes import Box, intersect
from shardspec.layout.layout import Layout
from shardspec.resharding.views import TensorView, View, identity_view

__all__ = ["Kind", "Senders", "balanced", "kind_of"]

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What every tensor needs that goes from one layout to another.

    Rows of the arrays are demands: a device that wants what another one has.
    """

    holders: tuple[tuple[int, ...], ...]
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

    def box(self, demand: int) -> Box:
        """Return what a demand asks for."""
        box = intersect(self.source_boxes[self.at[demand]], self.target_boxes[self.to[demand]])
        assert box is not None, "demands are overlaps"
        return box


def _distinct(layout: Layout, side: TensorView, axes: int) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of the view that are not empty, each with its holders; they are disjoint."""
    held = {device: layout.local_boxes(device) for device in layout.mesh.ids}
    if not all(cut.is_plain for cut in layout.spec.dim_specs):
        held = _disjoint(held)
    found: dict[Box, list[int]] = {}
    for device, boxes in held.items():
        for box in boxes:
            if all(lo < hi for lo, hi in box):
                found.setdefault(box, []).append(device)
    return [
        (part, tuple(devices)) for box, devices in found.items() for part in side.boxes(box, axes)
    ]


def _disjoint(held: Mapping[int, Sequence[Box]]) -> dict[int, list[Box]]:
    """Cut boxes wherever one begins or ends: a replicated part may join what is before it.

    Examples
    --------
    >>> _disjoint({0: [((0, 2),), ((4, 6),)], 1: [((2, 6),)]})
    {0: [((0, 2),), ((4, 6),)], 1: [((2, 4),), ((4, 6),)]}
    """
    every = [box for boxes in held.values() for box in boxes]
    edges = [
        sorted({edge for side in sides for edge in side}) for sides in zip(*every, strict=True)
    ]

    def cells(box: Box) -> Iterator[Box]:
        inner = (
            [lo, *all_[bisect_right(all_, lo) : bisect_left(all_, hi)], hi]
            for all_, (lo, hi) in zip(edges, box, strict=True)
        )
        return product(*map(pairwise, inner))

    return {
        device: [cell for box in boxes for cell in cells(box)] for device, boxes in held.items()
    }


def kind_of(source: Layout, target: Layout, view: View | None = None) -> Kind:
    """Intersect the boxes of two layouts of one tensor, or of what a view equates.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> a = Layout(DeviceMesh(range(2), (2,)), "[S0]", (6,), "float32")
    >>> kind = kind_of(a, Layout(DeviceMesh([2, 1, 5], (3,)), "[S0]", (6,), "float32"))
    >>> [(kind.holders[s], kind.box(i)) for i, s in enumerate(kind.at.tolist())]
    [((0,), ((0, 2),)), ((0,), ((2, 3),)), ((1,), ((4, 6),))]
    >>> kind.receiver.tolist(), kind.kept_by.tolist()
    ([2, 1, 5], [1])
    """
    view = view or identity_view(source.global_shape)
    axes = len(view.shape)
    have, want = _distinct(source, view.source, axes), _distinct(target, view.target, axes)
    # Of a scalar, each box has one element.
    bounds = [
        np.array([[*box, (0, 1)] for box, _ in boxes], dtype=np.int64).reshape(-1, axes + 1, 2)
        for boxes in (have, want)
    ]
    lo = np.maximum(bounds[0][:, None, :, 0], bounds[1][None, :, :, 0])
    hi = np.minimum(bounds[0][:, None, :, 1], bounds[1][None, :, :, 1])
    sizes = np.maximum(hi - lo, 0).prod(axis=-1)
    demands: list[tuple[int, int, int]] = []
    kept: list[tuple[int, int, int]] = []
    for at, to in zip(*(axis.tolist() for axis in np.nonzero(sizes)), strict=True):
        holding = have[at][1]
        for device in want[to][1]:
            (kept if device in holding else demands).append((at, to, device))
    rows = np.array(demands, dtype=np.int64).reshape(-1, 3)
    own = np.array(kept, dtype=np.int64).reshape(-1, 3)
    elements = sizes[rows[:, 0], rows[:, 1]].astype(np.int64)
    return Kind(
        tuple(holders for _, holders in have),
        tuple(box for box, _ in have),
        tuple(box for box, _ in want),
        at=rows[:, 0].copy(),
        to=rows[:, 1].copy(),
        receiver=rows[:, 2].copy(),
        elements=elements,
        kept_at=own[:, 0].copy(),
        kept_to=own[:, 1].copy(),
        kept_by=own[:, 2].copy(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Senders:
    """How the holders of the same boxes share what others want of these.

    All that is wanted of boxes with the same holders is one sequence of bytes, in the order of
    kinds, demands and tensors. Each holder sends one stretch of it.
    """

    ends: dict[tuple[int, ...], Ints]
    """Per set of holders the byte behind the stretch of each."""
    starts: tuple[Ints, ...]
    """Per kind and demand where the bytes of its first tensor lie in that sequence."""

    def split(
        self, holders: tuple[int, ...], box: Box, start: int, num_bytes: int
    ) -> list[tuple[int, Box]]:
        """Return who sends a box, by rows where its bytes lie in several stretches.

        Parameters
        ----------
        holders
            The devices that hold it.
        box
            What is to be sent.
        start, num_bytes
            Where its bytes lie in the sequence of its holders.
        """
        if len(holders) == 1:
            return [(holders[0], box)]
        ends = self.ends[holders]
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, start + num_bytes, side="left"))
        first, last = min(first, len(ends) - 1), min(last, len(ends) - 1)
        if first == last:
            return [(holders[first], box)]
        dim = next((dim for dim, (lo, hi) in enumerate(box) if hi - lo > 1), None)
        if dim is None:
            return [(holders[first], box)]
        lo, hi = box[dim]
        parts, at = [], lo
        for place in range(first, last + 1):
            share = min(1.0, (int(ends[place]) - start) / num_bytes)
            behind = hi if place == last else lo + round((hi - lo) * share)
            if behind > at:
                parts.append((holders[place], (*box[:dim], (at, behind), *box[dim + 1 :])))
                at = behind
        return parts


def balanced(kinds: Sequence[Kind], counts: Sequence[int], item_bytes: Sequence[int]) -> Senders:
    """Share the sending among replicas, so that the busiest sender sends least.

    Parameters
    ----------
    kinds, counts, item_bytes
        What is wanted, how many tensors want it, and bytes of an element on the way.
    """
    totals: dict[tuple[int, ...], int] = {}
    starts = []
    for kind, count, width in zip(kinds, counts, item_bytes, strict=True):
        start = np.zeros(len(kind.at), dtype=np.int64)
        bounds = np.searchsorted(kind.at, np.arange(len(kind.holders) + 1))
        weights = kind.elements * (width * count)
        for box, (first, last) in enumerate(pairwise(bounds.tolist())):
            if first == last:
                continue
            behind = np.cumsum(weights[first:last])
            base = totals.get(kind.holders[box], 0)
            start[first:last] = base + behind - weights[first:last]
            totals[kind.holders[box]] = base + int(behind[-1])
        starts.append(start)
    shares = _shares(totals)
    ends = {holders: np.round(np.cumsum(shares[holders])).astype(np.int64) for holders in totals}
    return Senders(ends, tuple(starts))


def _shares(totals: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], npt.NDArray[np.float64]]:
    """Divide each total among its holders: the sums of squares of what devices send is least.

    Of all ways to divide, that one also has the least maximum. Each set of holders in turn is
    filled up to one level beside what its members send for others, until nothing changes; this
    is coordinate descent on a convex function.
    """
    devices = sorted({device for holders in totals for device in holders})
    index = {device: place for place, device in enumerate(devices)}
    places = {holders: np.array([index[d] for d in holders]) for holders in totals}
    load = np.zeros(len(devices))
    shares = {}
    order = sorted(totals, key=lambda holders: (len(holders), holders))
    for holders in order:
        shares[holders] = _filled(load[places[holders]], totals[holders])
        load[places[holders]] += shares[holders]
    shared = [holders for holders in order if len(holders) > 1]
    for _ in range(100):
        moved = 0.0
        for holders in shared:
            at = places[holders]
            rest = load[at] - shares[holders]
            new = _filled(rest, totals[holders])
            moved = max(moved, float(np.abs(new - shares[holders]).max()))
            load[at] = rest + new
            shares[holders] = new
        if moved <= 1e-3 * (load.max() if len(load) else 0):
            break
    return shares


def _filled(load: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """Return what each gets so that, with its load, all that get something are at one level.

    Examples
    --------
    >>> _filled(np.array([1.0, 5.0, 3.0]), 4.0).tolist()
    [3.0, 0.0, 1.0]
    """
    ascending = np.sort(load)
    count = np.arange(1, len(load) + 1)
    level = (total + np.cumsum(ascending)) / count
    used = int(np.nonzero(level >= ascending)[0][-1])
    filled: npt.NDArray[np.float64] = np.maximum(level[used] - load, 0.0)
    return filled

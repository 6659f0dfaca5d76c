"""Who sends which bytes to whom at once when many tensors change their layouts.

Tensors that go from the same layout to the same layout are planned once, as a *kind*: which source
boxes overlap which target boxes. Which replica of a box sends it is found for all tensors together.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from operator import mul
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.boxes import Box, box_size, intersect
from shardspec.copies import Holders, Senders, overlaps
from shardspec.layout.layout import Layout
from shardspec.resharding.views import TensorView, View, identity_view

__all__ = ["Kind", "Stage", "kind_of"]

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
    held = {device: layout.local_boxes(device) for device in layout.mesh.ids}
    if not all(cut.is_plain for cut in layout.spec.dim_specs):
        held = _disjoint(held)
    found: dict[Box, list[int]] = {}
    for device, boxes in held.items():
        for box in filter(box_size, boxes):
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

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Bytes by device that sends."""
        return self._summed(0)

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Bytes by device that receives."""
        return self._summed(1)

    def _summed(self, end: int) -> Mapping[int, int]:
        found: Counter[int] = Counter()
        for pair, num_bytes in self.traffic.items():
            found[pair[end]] += num_bytes
        return found

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

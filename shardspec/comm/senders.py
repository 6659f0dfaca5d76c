"""Chooses, for every box that a device or file needs, a holder that sends it.

>>> have = {((0, 2),): (0, 1), ((2, 4),): (2,)}  # devices 0 and 1 have rows 0 and 1
>>> [(copy.box, copy.holders) for copy in find_copies(have, {((0, 4),): [3]})]
[(((0, 2),), (0, 1)), (((2, 4),), (2,))]

Every plan that moves data consists of such copies. Holders and receivers are devices or files:

- an exchange in the conversion of one tensor copies from devices to devices
  (`shardspec.comm.transfers`);
- ``plan_reshard`` does so for a state dict (`shardspec.resharding.stages`);
- ``load_sharded``, and a plan whose source is a checkpoint, copy from files to devices
  (`shardspec.checkpoint.job.load`);
- ``merge`` and ``reshard`` copy from files to files (`shardspec.checkpoint.convert.output`);
- ``save_sharded`` copies from devices to files (`shardspec.checkpoint.catalog`).

All of them find the holders of a requested box, and choose one of the holders to send it.
`overlaps` finds holders lazily, one requested box at a time, so that the plan of a large checkpoint
need not fit in memory. `Senders` may cut boxes to minimize the load of the busiest holder;
`whole_senders` does not cut boxes, as files and messages require.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size, intersect

Holders: TypeAlias = tuple[int, ...]
"""Numbers of the devices or files that have the same box."""


class Copy(NamedTuple):
    """A box to copy to one receiver, of one tensor or of several that have the same box."""

    box: Box
    """The box in coordinates of the global tensor, or of a view of it."""
    holders: Holders
    """All holders of the box; only the sender once it is chosen."""
    receiver: int
    places: Sequence[int] = (0,)
    """Indices of the tensors whose box is copied."""
    item_bytes: int = 1
    """Bytes of an element during the transfer."""

    @property
    def sender(self) -> int:
        """The holder that sends, once the planner has chosen it."""
        return self.holders[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the boxes of all tensors of the copy."""
        return box_size(self.box) * self.item_bytes * len(self.places)


_MOST_ROUNDS: Final = 1000
_ENOUGH_ROWS: Final = 64
"""The least length of an outer dim along which a box is cut, even if an inner dim is longer."""
_EVEN: Final = 2e-3
"""Fraction by which the busiest holder may exceed the lower bound."""
_OVERSHOOT: Final = 1.9


def overlaps(
    have: Sequence[Box], want: Iterable[Box]
) -> Iterator[tuple[Box, list[tuple[int, Box]]]]:
    """Yield each box of `want`, with (index, intersection) of the boxes of `have` that overlap it.

    Boxes must not be empty. Boxes of `want` must be in ascending order of their first rows, unless
    the boxes of `have` form a grid, as those of a layout do.

    >>> next(overlaps([((0, 2),), ((2, 4),)], [((1, 3),)]))
    (((1, 3),), [(0, ((1, 2),)), (1, ((2, 3),))])
    """
    numbers: dict[Box, list[int]] = {}
    for number, box in enumerate(have):
        numbers.setdefault(box, []).append(number)
    sides = [sorted(set(intervals)) for intervals in zip(*numbers, strict=True)]
    is_disjoint = all(a[1] <= b[0] for side in sides for a, b in pairwise(side))
    if not is_disjoint or prod(map(len, sides)) != len(numbers):
        yield from _swept(have, want)
        return
    # In a grid, bisection in each dim finds the overlapping boxes.
    edges = [([lo for lo, _ in side], [hi for _, hi in side]) for side in sides]
    for box in want:
        met = [
            side[bisect_right(stops, lo) : bisect_left(starts, hi)]
            for side, (starts, stops), (lo, hi) in zip(sides, edges, box, strict=True)
        ]
        shared = [
            [(max(a, lo), min(b, hi)) for a, b in side]
            for side, (lo, hi) in zip(met, box, strict=True)
        ]
        cells = zip(product(*met), product(*shared), strict=True)
        yield box, [(number, part) for cell, part in cells for number in numbers[cell]]


Overlapping: TypeAlias = Callable[
    [tuple[Box, ...], tuple[Box, ...]], Iterable[tuple[Box, list[tuple[int, Box]]]]
]
"""A function with the signature of `overlaps`."""


def _swept(have: Sequence[Box], want: Iterable[Box]) -> Iterator[tuple[Box, list[tuple[int, Box]]]]:
    """Yield the overlaps of boxes as `overlaps` does, by a sweep along the first dim."""
    waiting = sorted(range(len(have)), key=lambda number: have[number][0][0], reverse=True)
    near: list[int] = []
    for box in want:
        while waiting and have[waiting[-1]][0][0] < box[0][1]:
            near.append(waiting.pop())
        near = [number for number in near if have[number][0][1] > box[0][0]]
        shared = ((number, intersect(have[number], box)) for number in near)
        yield box, [(number, part) for number, part in shared if part is not None]


def find_copies(
    have: Mapping[Box, Holders],
    want: Mapping[Box, Sequence[int]],
    overlapping: Overlapping = overlaps,
    places: Sequence[int] = (0,),
    item_bytes: int = 1,
) -> Iterator[Copy]:
    """Yield the copies that every receiver needs, in ascending order of boxes in `want`.

    Boxes must not be empty. A receiver copies from itself the parts that it already has.
    `overlapping` may be a cached form of `overlaps`; copies get `places` and `item_bytes`.

    >>> copies = find_copies({((0, 2),): (0, 1), ((2, 4),): (2,)}, {((1, 3),): [1]})
    >>> [copy[:3] for copy in copies]
    [(((1, 2),), (1,), 1), (((2, 3),), (2,), 1)]
    """
    holders_of = list(have.values())
    for box, shared in overlapping(tuple(have), tuple(sorted(want))):
        for number, part in shared:
            for receiver in want[box]:
                own = receiver in holders_of[number]
                holders = (receiver,) if own else holders_of[number]
                yield Copy(part, holders, receiver, places, item_bytes)


def whole_senders(
    demands: Iterable[tuple[Holders, int]], gives: MutableMapping[int, int]
) -> Iterator[int]:
    """Yield the sender of each box, without cutting boxes: the holder with the least load so far.

    `demands` are (holders, bytes) of the boxes. `gives` is the load of each holder, and is updated.
    With the largest boxes first, the highest load is at most 4/3 of the optimum if all boxes have
    the same holders (Graham, "Bounds on multiprocessing timing anomalies", 1969).

    >>> list(whole_senders([((0, 1), 5), ((0, 1), 3), ((0, 2), 4)], {0: 4, 1: 0, 2: 0}))
    [1, 0, 2]
    """
    for holders, amount in demands:
        holder = min(holders, key=gives.__getitem__)
        gives[holder] += amount
        yield holder


def balanced(totals: Mapping[Holders, int]) -> dict[Holders, list[float]]:
    """Divide the bytes of each set of holders among its members, so that the largest load is small.

    In the example, device 1 sends 5 of the 6 bytes that 0 and 1 have, because 0 also sends 4 alone.
    Each set in turn levels the total loads of its members, which is coordinate descent on the sum
    of squares. Steps are over-relaxed, since overlapping sets converge slowly otherwise. The result
    is within 0.2 % of a lower bound.

    >>> balanced({(0,): 4, (0, 1): 6})
    {(0,): [4.0], (0, 1): [1.0, 5.0]}
    """
    if all(len(holders) == 1 for holders in totals):
        return {holders: [float(total)] for holders, total in totals.items()}
    load = dict.fromkeys((holder for holders in totals for holder in holders), 0.0)
    order = sorted(totals, key=lambda holders: (len(holders), holders))
    shares = {holders: [0.0] * len(holders) for holders in totals}
    for turn in range(_MOST_ROUNDS):
        for holders in order:
            if turn and len(holders) == 1:
                continue
            old = shares[holders]
            rest = [load[holder] - share for holder, share in zip(holders, old, strict=True)]
            new = _filled(rest, totals[holders])
            if turn:
                changes = list(zip(old, new, strict=True))
                step = min([_OVERSHOOT, *(a / (a - b) for a, b in changes if b < a)])
                new = [max(a + step * (b - a), 0.0) for a, b in changes]
            shares[holders] = new
            load.update((h, a + b) for h, a, b in zip(holders, rest, new, strict=True))
        if max(load.values(), default=0.0) <= (1 + _EVEN) * _least_maximum(totals, load):
            break
    return shares


def _least_maximum(totals: Mapping[Holders, int], load: Mapping[int, float]) -> float:
    """Return a lower bound of the busiest holder's load.

    k holders send all boxes that only they have, so one of the k sends at least a k-th.
    """
    loads = sorted(load.values())
    lowest = sorted(
        ((min(load[h] for h in holders), n) for holders, n in totals.items()), reverse=True
    )
    least = inside = 0.0
    for low, total in lowest:
        inside += total
        least = max(least, inside / (len(loads) - bisect_left(loads, low)))
    return least


def _filled(load: Sequence[float], total: float) -> list[float]:
    """Return each holder's part of `total`, so that the lowest loads rise to a common level."""
    level = below = 0.0
    for count, amount in enumerate(sorted(load), 1):
        if count > 1 and level < amount:
            break
        below += amount
        level = (total + below) / count
    return [max(level - amount, 0.0) for amount in load]


class Senders:
    """Chooses the senders of boxes; several holders may each send a part of a box.

    `demands` are (holders, bytes) of the boxes. The boxes with the same holders form one sequence
    of bytes, and each holder sends one stretch of it.

    >>> senders = Senders([((0,), 4), ((0, 1), 3), ((0, 1), 3)])
    >>> senders.stretches((0, 1), 0, 3)
    [(0, 1), (1, 2)]
    >>> senders.split((0, 1), ((0, 3), (5, 6)), 0, 3)
    [(0, ((0, 1), (5, 6))), (1, ((1, 3), (5, 6)))]
    """

    def __init__(self, demands: Iterable[tuple[Holders, int]]) -> None:
        totals: Counter[Holders] = Counter()
        self.starts: list[int] = []
        """The start of each demand in the sequence of its holders."""
        self.sizes: list[int] = []
        """The bytes of each demand."""
        for holders, num_bytes in demands:
            self.sizes.append(num_bytes)
            self.starts.append(totals[holders])
            totals[holders] += num_bytes
        self.ends = {
            holders: [*map(round, accumulate(shares[:-1])), totals[holders]]
            for holders, shares in balanced(totals).items()
        }
        """Set of holders to the end of the stretch of each holder."""

    def stretches(self, holders: Holders, start: int, num_bytes: int) -> list[tuple[int, int]]:
        """Return (sender, bytes) pairs for a range of the sequence of bytes with some holders."""
        if len(holders) == 1:
            return [(holders[0], num_bytes)]
        stops, stop, stretches = self.ends[holders], start + num_bytes, []
        place = bisect_right(stops, start)
        while start < stop:
            end = min(stop, stops[place])
            if end > start:
                stretches.append((holders[place], end - start))
            start, place = max(start, end), place + 1
        return stretches

    def split(
        self, holders: Holders, box: Box, start: int, num_bytes: int
    ) -> list[tuple[int, Box]]:
        """Return (sender, part of the box) pairs: the whole box, or ranges of its rows."""
        stretches = self.stretches(holders, start, num_bytes)
        sides = box_shape(box)
        longest = max(sides, default=1)
        if len(stretches) == 1 or longest == 1:
            return [(stretches[0][0], box)]
        # Rows of an outer dim are adjacent in memory.
        dim = next(d for d, side in enumerate(sides) if side >= min(longest, _ENOUGH_ROWS))
        (lo, hi), num_sent, parts = box[dim], 0, []
        at = lo
        for holder, count in stretches:
            num_sent += count
            behind = lo + round((hi - lo) * (num_sent / num_bytes))
            if behind > at:
                parts.append((holder, (*box[:dim], (at, behind), *box[dim + 1 :])))
                at = behind
        return parts

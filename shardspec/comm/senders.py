"""The planner: copies of boxes, from those that hold them to those that want them.

Every plan that moves data is made of such copies. Holders and receivers are devices or files:

- an exchange within the conversion of one tensor copies from devices to devices
  (`shardspec.comm.transfers`);
- ``plan_reshard`` does so for a whole state dict (`shardspec.resharding.stages`);
- ``load_sharded``, and a plan whose source is a checkpoint, copy from files to devices
  (`shardspec.checkpoint.load`);
- ``merge`` and ``reshard`` copy from files to files (`shardspec.checkpoint.output`);
- ``save_sharded`` copies from devices to files (`shardspec.checkpoint.targets`).

All ask two questions. Who has what is wanted? `overlaps` answers that for one wanted box after the
other, so that a plan of a large checkpoint need not be in memory. Which of several holders gives
it? `Senders` may cut boxes, so that the busiest holder gives as little as possible; `whole_senders`
keeps each box whole, as files and messages do.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, intersect

Holders: TypeAlias = tuple[int, ...]
"""Numbers of the devices or files that hold the same box."""


class Copy(NamedTuple):
    """A box that a receiver gets from one of its holders."""

    box: Box
    """In coordinates of the global tensor."""
    holders: Holders
    """Who has it; only the sender once that is chosen."""
    receiver: int


_MOST_ROUNDS: Final = 1000
_ENOUGH_ROWS: Final = 64
"""To divide a box by."""
_EVEN: Final = 2e-3
"""How far the busiest holder may be above the lower bound."""
_OVERSHOOT: Final = 1.9


def overlaps(
    have: Sequence[Box], want: Iterable[Box]
) -> Iterator[tuple[Box, list[tuple[int, Box]]]]:
    """Yield every wanted box, with the numbers of the held ones that it meets and what both share.

    No box is empty. Wanted ones come in ascending order of their first rows, as blocks of one box
    do, unless those that are held form a grid, as the boxes of a layout do.
    """
    numbers: dict[Box, list[int]] = {}
    for number, box in enumerate(have):
        numbers.setdefault(box, []).append(number)
    sides = [sorted(set(intervals)) for intervals in zip(*numbers, strict=True)]
    apart = all(a[1] <= b[0] for side in sides for a, b in pairwise(side))
    if not apart or prod(map(len, sides)) != len(numbers):
        yield from _swept(have, want)
        return
    # Of a grid, what a box meets is found by bisection, dim by dim.
    edges = [([lo for lo, _ in side], [hi for _, hi in side]) for side in sides]
    for box in want:
        met = [
            side[bisect_right(ends, lo) : bisect_left(starts, hi)]
            for side, (starts, ends), (lo, hi) in zip(sides, edges, box, strict=True)
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
"""What `overlaps` is."""


def _swept(have: Sequence[Box], want: Iterable[Box]) -> Iterator[tuple[Box, list[tuple[int, Box]]]]:
    """Find what boxes share going down the first dim."""
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
) -> Iterator[Copy]:
    """Yield what every receiver needs, by wanted box in ascending order; no box is empty.

    What a receiver holds already it copies from itself. `overlapping` may remember what boxes have
    in common.

    >>> list(find_copies({((0, 2),): (0, 1), ((2, 4),): (2,)}, {((1, 3),): [1]}))
    [Copy(box=((1, 2),), holders=(1,), receiver=1), Copy(box=((2, 3),), holders=(2,), receiver=1)]
    """
    held = list(have.values())
    for box, shared in overlapping(tuple(have), tuple(sorted(want))):
        for number, part in shared:
            for receiver in want[box]:
                own = receiver in held[number]
                yield Copy(part, (receiver,) if own else held[number], receiver)


def whole_senders(
    demands: Iterable[tuple[Holders, int]], gives: MutableMapping[int, int]
) -> Iterator[int]:
    """Yield which of its holders gives each of some boxes that stay whole: who gives least so far.

    `gives` is what each holder gives already, and is added to. Given the largest first, the busiest
    of those that hold the same boxes gives at most 4/3 of what is possible (Graham, "Bounds on
    multiprocessing timing anomalies", 1969).

    >>> list(whole_senders([((0, 1), 5), ((0, 1), 3), ((0, 2), 4)], {0: 4, 1: 0, 2: 0}))
    [1, 0, 2]
    """
    for holders, amount in demands:
        holder = min(holders, key=gives.__getitem__)
        gives[holder] += amount
        yield holder


def balanced(totals: Mapping[Holders, int]) -> dict[Holders, list[float]]:
    """Divide bytes among those that hold them, so that the busiest holder gives least.

    Each set of holders in turn is filled up to one level beside what its members give for others.
    That is coordinate descent on the sum of squares, whose minimum also has the least maximum; it
    overshoots, since chains of overlapping sets would take long otherwise, and ends within 0.2 %
    of a lower bound.
    """
    load = dict.fromkeys((one for holders in totals for one in holders), 0.0)
    order = sorted(totals, key=lambda holders: (len(holders), holders))
    shares = {holders: [0.0] * len(holders) for holders in totals}
    for turn in range(_MOST_ROUNDS):
        for holders in order:
            if turn and len(holders) == 1:
                continue
            old = shares[holders]
            rest = [load[one] - share for one, share in zip(holders, old, strict=True)]
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

    What only the busiest k holders have, they must give: at least one of them gives a k-th of it.
    """
    loads = sorted(load.values())
    lowest = sorted(((min(load[h] for h in some), n) for some, n in totals.items()), reverse=True)
    least = inside = 0.0
    for low, total in lowest:
        inside += total
        least = max(least, inside / (len(loads) - bisect_left(loads, low)))
    return least


def _filled(load: Sequence[float], total: float) -> list[float]:
    """Return what each gets so that, with its load, all that get something are at one level."""
    level = below = 0.0
    for count, one in enumerate(sorted(load), 1):
        if count > 1 and level < one:
            break
        below += one
        level = (total + below) / count
    return [max(level - one, 0.0) for one in load]


class Senders:
    """Who gives which bytes, where a box may be cut.

    All that is wanted of boxes with the same holders, as `demands` say in bytes, is one sequence,
    in their order, and each of the holders gives one stretch of it.

    >>> senders = Senders([((0,), 4), ((0, 1), 3), ((0, 1), 3)])
    >>> senders.stretches((0, 1), 0, 3)
    [(0, 1), (1, 2)]
    >>> senders.split((0, 1), ((0, 3), (5, 6)), 0, 3)
    [(0, ((0, 1), (5, 6))), (1, ((1, 3), (5, 6)))]
    """

    def __init__(self, demands: Iterable[tuple[Holders, int]]) -> None:
        totals: Counter[Holders] = Counter()
        self.starts: list[int] = []
        """Per demand where its bytes lie in the sequence of its holders."""
        self.sizes: list[int] = []
        """Per demand its bytes."""
        for holders, num_bytes in demands:
            self.sizes.append(num_bytes)
            self.starts.append(totals[holders])
            totals[holders] += num_bytes
        self.ends = {
            holders: [*map(round, accumulate(shares[:-1])), totals[holders]]
            for holders, shares in balanced(totals).items()
        }
        """Per set of holders the byte behind the stretch of each."""

    def stretches(self, holders: Holders, start: int, num_bytes: int) -> list[tuple[int, int]]:
        """Return who gives some bytes of the sequence of holders, in order, and how many each."""
        if len(holders) == 1:
            return [(holders[0], num_bytes)]
        ends, stop, found = self.ends[holders], start + num_bytes, []
        place = bisect_right(ends, start)
        while start < stop:
            end = min(stop, ends[place])
            if end > start:
                found.append((holders[place], end - start))
            start, place = max(start, end), place + 1
        return found

    def split(
        self, holders: Holders, box: Box, start: int, num_bytes: int
    ) -> list[tuple[int, Box]]:
        """Return who gives a box, by rows where its bytes lie in several stretches."""
        given = self.stretches(holders, start, num_bytes)
        sides = box_shape(box)
        longest = max(sides, default=1)
        if len(given) == 1 or longest == 1:
            return [(given[0][0], box)]
        # Rows of an outer dim lie together in memory.
        dim = next(d for d, side in enumerate(sides) if side >= min(longest, _ENOUGH_ROWS))
        (lo, hi), done, parts = box[dim], 0, []
        at = lo
        for holder, count in given:
            done += count
            behind = lo + round((hi - lo) * (done / num_bytes))
            if behind > at:
                parts.append((holder, (*box[:dim], (at, behind), *box[dim + 1 :])))
                at = behind
        return parts

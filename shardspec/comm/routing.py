"""Who gets which box from whom where devices do not move in groups: exchange and permute.

The devices' boxes before the step form a grid: per dim the tensor is cut at the same places for all
of them. So the pieces of a wanted box are found by bisection, dim by dim.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from shardspec.boxes import Box, box_size

__all__ = ["Distance", "Transfer", "exchange_routes", "permute_routes"]

Distance: TypeAlias = Callable[[int, int], int]
"""How far two devices are apart; 0 only from a device to itself."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box on its way, or staying where it is."""

    src: int
    """Physical id of the holder."""
    dst: int
    """Physical id of the receiver; equal to `src` for a part that stays."""
    box: Box
    """What moves, in coordinates of the global tensor."""


def exchange_routes(
    before: Mapping[int, Box], after: Mapping[int, Box], distance: Distance
) -> list[Transfer]:
    """Return what must move so that everyone holds the box wanted.

    Each piece comes from the nearest holder. Of equally near ones the holder that has been given
    the fewest bytes so far sends, so that replicas share the work; then the first one.

    Parameters
    ----------
    before, after
        The box of every device that holds one, before and after; the ids may differ.
    distance
        Between two devices.

    Returns
    -------
    list of Transfer
        By receiver in the order of `after`; every element that is wanted comes once.

    Examples
    --------
    >>> halves, thirds = {0: ((0, 3),), 1: ((3, 6),)}, {0: ((0, 2),), 1: ((2, 6),)}
    >>> for move in exchange_routes(halves, thirds, lambda a, b: a != b):
    ...     print(move.src, move.dst, move.box)
    0 0 ((0, 2),)
    0 1 ((2, 3),)
    1 1 ((3, 6),)
    """
    holders: dict[Box, list[int]] = defaultdict(list)
    for device, box in before.items():
        if box_size(box):
            holders[box].append(device)
    sides = [sorted(set(intervals)) for intervals in zip(*holders, strict=True)]
    starts = [[lo for lo, _ in side] for side in sides]
    ends = [[hi for _, hi in side] for side in sides]
    sent: dict[int, int] = defaultdict(int)
    moves = []
    for device, wanted in after.items():
        if not box_size(wanted):
            continue
        own = before.get(device)
        overlapping = [
            side[bisect_right(end, lo) : bisect_left(start, hi)]
            for side, start, end, (lo, hi) in zip(sides, starts, ends, wanted, strict=True)
        ]
        shared = [
            [(max(cut_lo, lo), min(cut_hi, hi)) for cut_lo, cut_hi in side]
            for side, (lo, hi) in zip(overlapping, wanted, strict=True)
        ]
        for cell, piece in zip(product(*overlapping), product(*shared), strict=True):
            holder = device
            if cell != own:
                holder, *others = holders[cell]
                if others:
                    holder = min(holders[cell], key=lambda src: (distance(src, device), sent[src]))
                sent[holder] += box_size(piece)
            moves.append(Transfer(holder, device, piece))
    return moves


def permute_routes(
    before: Mapping[int, Box], after: Mapping[int, Box], distance: Distance
) -> list[Transfer]:
    """Return which device each one gets its whole new shard from, every device sending one.

    Devices that hold what they want keep it. Where an axis that is slower for short messages is
    slower for long ones too, every such assignment is as good as any other: the slowest link used
    is the same.

    Examples
    --------
    >>> left, right = ((0, 1),), ((1, 2),)
    >>> moves = permute_routes({0: left, 1: right}, {0: right, 1: left}, lambda a, b: a != b)
    >>> [(move.src, move.dst) for move in moves]
    [(1, 0), (0, 1)]
    """
    unused: dict[Box, list[int]] = defaultdict(list)
    for device, box in before.items():
        unused[box].append(device)
    kept = [device for device, box in after.items() if before[device] == box]
    for device in kept:
        unused[before[device]].remove(device)
    source = {device: device for device in kept}
    for device, box in after.items():
        if device not in source:
            holder = min(unused[box], key=lambda src: distance(src, device))
            unused[box].remove(holder)
            source[device] = holder
    return [Transfer(source[d], d, box) for d, box in after.items() if box_size(box)]

"""Pickles that end alike: what one of them means tells what the others do.

A pickle is a program, and one that differs from another near its start only, as what ranks save
does, goes on as that one from where the two are at the same point: with the same things on the
stack, and under the numbers that the rest refers to. So its start is run, and compared; then the
rest, which is most of it, means what it meant before.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from shardspec.checkpoint.torch_files.pickle_values import Global, Halfway, Record, Trace

__all__ = ["QUICK_BYTES", "Special", "TracedPickle", "same"]

QUICK_BYTES: Final = 8 << 10
"""Of instructions, which take about a millisecond."""
_SHORT_BYTES: Final = 64 << 10
_PART_OF_IT: Final = 8
"""A start that is longer than an eighth of the whole, or half of a short one, is not worth it."""
_MOST_STEPS: Final = 1 << 20
"""Values that are compared; starts have some hundred."""
_PLAIN: Final = (str, bytes, int, type(None), Global)

Special: TypeAlias = Callable[[object, object], bool | None]
"""Whether two values are the same; None if that depends on what they hold."""


class TracedPickle:
    """A pickle that was read, for others that end as it does.

    Parameters
    ----------
    data, trace
        The pickle, and what was noted of it.
    settled
        From where on it depends on nothing but what it says itself.
    """

    def __init__(self, data: bytes, trace: Trace, settled: int) -> None:
        most = max(len(data) // _PART_OF_IT, min(_SHORT_BYTES, len(data) // 2), QUICK_BYTES)
        first, last = bisect_left(trace.ends, settled), bisect_right(trace.ends, most)
        if not trace.memo.complete:
            last = first
        self._ends = trace.ends[first:last]
        """Where a start may end: the one from which others were alike, and later ones."""
        self.start = data[: self._ends[-1]] if self._ends else b""
        """Its first bytes, up to the last of these places."""
        self._tail = data[self._ends[0] :] if self._ends else b""
        """What comes after the first of them."""
        numbered = trace.counts[last - 1] if self._ends else 0
        taken_up = trace.memo.taken_up.items()
        self._taken_up = {place: count for place, count in taken_up if place < numbered}

    @property
    def num_bytes(self) -> int:
        """What is kept of it."""
        return len(self.start) + len(self._tail)

    def common_tail(self, data: bytes) -> tuple[int, int] | None:
        """Return where what another one ends with starts, here and there; None if that is little.

        Both are places between two instructions.
        """
        if not self._ends:
            return None
        if not data.endswith(self._tail):
            first = self._ends[0]
            if not data.endswith(self._tail[self._ends[-1] - first :]):
                return None
            place = bisect_left(
                self._ends, True, key=lambda end: data.endswith(self._tail[end - first :])
            )
            self._tail = self._tail[self._ends[place] - first :]
            self._ends = self._ends[place:]
        return self._ends[0], len(data) - len(self._tail)

    def goes_on_alike(self, one: Halfway, other: Halfway, special: Special) -> bool:
        """Say whether the rest means the same after another start.

        Parameters
        ----------
        one, other
            What the rest of this pickle goes on from, and what the other one's does.
        special
            Asked first about every pair of values.
        """
        if len(one.memo) != len(other.memo) or len(one.stacks) != len(other.stacks):
            return False
        pairs: list[tuple[object, object]] = [
            (list(mine), list(others))
            for mine, others in zip(one.stacks, other.stacks, strict=True)
        ]
        for place, count in self._taken_up.items():
            # What was referred to last when there were fewer is not needed any more.
            if place < len(one.memo) <= count:
                pairs.append((one.memo[place], other.memo[place]))
        return same(pairs, special)


def same(pairs: Iterable[tuple[object, object]], special: Special) -> bool:
    """Say whether inert values are the same by pairs, and hold each other in the same way.

    Parameters
    ----------
    pairs
        Values out of two pickles; they may hold themselves. Very many are taken for different.
    special
        Asked first about every pair.

    Examples
    --------
    >>> one = [1, "a"]
    >>> same([({"x": one}, {"x": [1, "a"]})], lambda a, b: None)
    True
    >>> same([([one, one], [[1, "a"], [1, "a"]])], lambda a, b: None)
    False
    """
    todo = list(pairs)
    partner: dict[int, object] = {}
    compared: set[tuple[int, int]] = set()
    held: list[object] = []
    """What is known by its id has to stay."""
    for _ in range(_MOST_STEPS):
        if not todo:
            return True
        a, b = todo.pop()
        if type(a) is not type(b):
            return False
        # Long texts, too, are looked at once, however often they are referred to.
        if (id(a), id(b)) in compared:
            continue
        compared.add((id(a), id(b)))
        held += (a, b)
        if isinstance(a, float | complex):
            # Zeros have signs, and what is no number is not equal to itself.
            if repr(a) != repr(b):
                return False
            continue
        if isinstance(a, _PLAIN):
            if a != b:
                return False
            continue
        if isinstance(a, list | dict | Record):
            # What can be changed must be one in both where it is one in either.
            if id(a) in partner or id(b) in partner:
                return False
            partner[id(a)], partner[id(b)] = b, a
        found = special(a, b)
        inside = _inside(a, b) if found is None else found
        if isinstance(inside, bool):
            if not inside:
                return False
        else:
            todo += inside
    return False


def _inside(a: object, b: object) -> list[tuple[object, object]] | bool:
    """Return what two values of one type hold, by pairs; or whether they are the same."""
    if isinstance(a, Record) and isinstance(b, Record):
        return a.name == b.name and [(a.args, b.args), (a.state, b.state)]
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and [
            *zip(a.keys(), b.keys(), strict=True),
            *zip(a.values(), b.values(), strict=True),
        ]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and list(zip(a, b, strict=True))
    return False

"""The optimum over the declared moves, found from their definitions alone.

Nothing of the library's search, prices, routes or boxes is used: layouts, moves and costs are
written out again, and the optimum is found by plain dynamic programming over all layouts. Who sends
what to whom is worked out once per mesh and shape, in elements; models and sizes are put on it.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import inf, prod
from typing import Any

import numpy as np
import numpy.typing as npt

Cuts = tuple[tuple[int, ...], ...]
State = tuple[Cuts, tuple[int, ...]]
"""Per dim the axes that cut it; and the axes over which a sum is pending."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """Seconds a message and a byte on each axis, whether on one bus, and of a copied byte."""

    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    bus: bool = False
    copy: float = 0.0

    def slowest(self, axes: Sequence[int]) -> tuple[float, float]:
        return max(self.alpha[a] for a in axes), max(self.beta[a] for a in axes)


def lists_of(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(axes) + 1):
        yield from permutations(axes, count)


def all_cuts(num_axes: int, dims: int) -> list[Cuts]:
    """Every way to give each dim an ordered list of axes, none used twice."""

    def fill(dim: int, left: tuple[int, ...]) -> Iterator[Cuts]:
        if dim == dims:
            yield ()
            return
        for axes in lists_of(left):
            rest = tuple(a for a in left if a not in axes)
            for others in fill(dim + 1, rest):
                yield (axes, *others)

    return list(fill(0, tuple(range(num_axes))))


def interval(
    size: int, axes: Sequence[int], at: Sequence[int], mesh: Sequence[int]
) -> tuple[int, int]:
    lo, hi = 0, size
    for axis in axes:
        block = -(-(hi - lo) // mesh[axis])
        lo, hi = min(lo + at[axis] * block, hi), min(lo + (at[axis] + 1) * block, hi)
    return lo, hi


def chains(move: Floats) -> Floats:
    """Seconds of the cheapest chain between any two, of the seconds of single moves."""
    best = move.copy()
    np.fill_diagonal(best, 0.0)
    for k in range(len(best)):
        np.minimum(best, best[:, k, None] + best[None, k], out=best)
    return best


class Brute:
    """All layouts of one tensor on one mesh, sums pending over any axes, and all moves."""

    def __init__(self, mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
        assert prod(shape), "of an empty tensor there are no boxes to move"
        self.mesh, self.shape = mesh, shape
        axes = range(len(mesh))
        self.devices = list(product(*(range(n) for n in mesh)))
        self.cuts = all_cuts(len(mesh), len(shape))
        self.states: list[State] = [(cuts, ()) for cuts in self.cuts]
        for count in range(1, len(mesh) + 1):
            for left in combinations(axes, count):
                for cuts in self.cuts:
                    if not {a for c in cuts for a in c} & set(left):
                        self.states.append((cuts, left))
        self.index = {state: i for i, state in enumerate(self.states)}
        self.boxes = np.array(
            [
                [
                    [interval(n, axes, at, mesh) for n, axes in zip(shape, cuts, strict=True)]
                    for at in self.devices
                ]
                for cuts in self.cuts
            ],
            dtype=np.int64,
        ).reshape(len(self.cuts), len(self.devices), len(shape), 2)
        self.sizes = (self.boxes[..., 1] - self.boxes[..., 0]).prod(axis=-1)
        self.largest = {
            cuts: int(size) for cuts, size in zip(self.cuts, self.sizes.max(1), strict=True)
        }
        self.classes = sorted(
            {self._differ(a, b) for a in self.devices for b in self.devices} - {()}
        )
        self.wanted = np.stack([self._wanted_from(u) for u in range(len(self.cuts))])
        self.permutable = dict(self._permutes())

    @staticmethod
    def _differ(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)

    def _wanted_from(self, u: int) -> Floats:
        """Elements [to which cuts, receiver, holder] that a receiver lacks and a holder has."""
        wanted = np.zeros((len(self.cuts), len(self.devices), len(self.devices)))
        for holder in self._full(u):
            lo = np.maximum(self.boxes[..., 0], self.boxes[u, holder, :, 0])
            hi = np.minimum(self.boxes[..., 1], self.boxes[u, holder, :, 1])
            wanted[:, :, holder] = np.maximum(hi - lo, 0).prod(axis=-1)
            have = (self.boxes[u] == self.boxes[u, holder]).all(axis=(-1, -2))
            wanted[:, have, holder] = 0
        return wanted

    def _shares(self, u: int, model: Model) -> Floats:
        """Which part of what a receiver wants of a holder's box this one sends [receiver, holder].

        Replicas share evenly, but for those that are further along an axis that is slower, in
        latency or rate, than one that cuts the source.
        """
        long = [a for a, n in enumerate(self.mesh) if n > 1]
        cut = [a for axes in self.cuts[u] for a in axes if a in long]
        slow = [
            a
            for a in long
            if any(cost[a] > min(cost[c] for c in cut) for cost in (model.alpha, model.beta) if cut)
        ]
        shares = np.zeros((len(self.devices), len(self.devices)))
        for receiver, at in enumerate(self.devices):
            for holder in self._full(u):
                same = [
                    d
                    for d in self._full(u)
                    if (self.boxes[u, d] == self.boxes[u, holder]).all()
                    and all(self.devices[d][a] == at[a] for a in slow if a not in cut)
                ]
                if holder in same:
                    shares[receiver, holder] = 1 / len(same)
        return shares

    def _permutes(self) -> Iterator[tuple[tuple[int, int], list[list[tuple[int, Set[Any]]]]]]:
        """For pairs with the same boxes: per box the ways to hand it on.

        A way is how many shards move, and along which sets of axes.
        """
        bags = [
            sorted(box.tobytes() for box, n in zip(boxes, sizes, strict=True) if n)
            for boxes, sizes in zip(self.boxes, self.sizes, strict=True)
        ]
        for u, v in permutations(range(len(self.cuts)), 2):
            if bags[u] != bags[v]:
                continue
            groups: list[list[tuple[int, Set[Any]]]] = []
            for box in set(bags[u]):
                here = [d for d in self._full(u) if self.boxes[u, d].tobytes() == box]
                there = [d for d in self._full(v) if self.boxes[v, d].tobytes() == box]
                ways: set[tuple[int, Set[Any]]] = set()
                for order in permutations(here):
                    pairs = [(h, r) for h, r in zip(order, there, strict=True) if h != r]
                    used = {self._differ(self.devices[h], self.devices[r]) for h, r in pairs}
                    ways.add((len(pairs), frozenset(used)))
                groups.append(sorted(ways, key=str))
            yield (u, v), groups

    def _full(self, u: int) -> list[int]:
        return [d for d in range(len(self.devices)) if self.sizes[u, d]]

    def moves(self, model: Model, item: int) -> Floats:
        """Seconds of the cheapest single move between any two layouts; inf without one."""
        count = len(self.states)
        move = np.full((count, count), inf)
        for i, state in enumerate(self.states):
            for reached, seconds in self._collectives(state, model, item):
                j = self.index[reached]
                move[i, j] = min(move[i, j], seconds)
        plain = len(self.cuts)
        move[:plain, :plain] = np.minimum(move[:plain, :plain], self._exchanges(model, item))
        for (u, v), groups in self.permutable.items():
            seconds = self._permute(groups, self.largest[self.cuts[u]] * item, model)
            move[u, v] = min(move[u, v], seconds)
        return move

    def optimum(self, model: Model, item: int) -> Floats:
        """Seconds of the cheapest chain of moves between any two layouts."""
        return chains(self.moves(model, item))

    def live(self, item: int) -> Floats:
        """Bytes that the fullest device holds in a move between any two layouts."""
        held = np.array([float(self.largest[cuts] * item) for cuts, _ in self.states])
        result: Floats = held[:, None] + held
        return result

    def _collective(self, kind: str, axes: Sequence[int], b: int, model: Model) -> float:
        n = prod(self.mesh[a] for a in axes)
        alpha, beta = model.slowest(axes)
        share = {
            "gather": n - 1,
            "scatter": (n - 1) / n,
            "reduce": 2 * (n - 1) / n,
            "all-to-all": (n - 1) / n,
        }[kind]
        messages = 2 * (n - 1) if kind == "reduce" else n - 1
        if model.bus:
            return messages * alpha + len(self.devices) * share * b * beta
        if kind == "all-to-all":
            peers = product(*(range(n) if a in axes else (0,) for a, n in enumerate(self.mesh)))
            links = [model.slowest([a for a, x in enumerate(p) if x]) for p in peers if any(p)]
            return sum(al + b / n * be for al, be in links)
        return messages * alpha + share * b * beta

    def _collectives(self, state: State, model: Model, item: int) -> Iterator[tuple[State, float]]:
        cuts, left = state
        used = {a for c in cuts for a in c} | set(left)
        b = self.largest[cuts] * item
        known: dict[tuple[str, tuple[int, ...]], float] = {}

        def seconds(kind: str, axes: Sequence[int], copies: int = 0) -> float:
            key = (kind, tuple(sorted(axes)))
            if key not in known:
                known[key] = self._collective(kind, key[1], b, model)
            moving = any(self.mesh[a] > 1 for a in axes)
            return known[key] + moving * copies * b * model.copy

        def changed(changes: dict[int, tuple[int, ...]]) -> Cuts:
            return tuple(changes.get(d, c) for d, c in enumerate(cuts))

        for d, own in enumerate(cuts):
            for axes in lists_of([a for a in range(len(self.mesh)) if a not in used]):
                if axes:
                    yield (changed({d: own + axes}), left), 0.0
            for k in range(1, len(own) + 1):
                stay, go = own[:-k], own[-k:]
                result = prod(self.mesh[a] for a in go)
                yield (changed({d: stay}), left), seconds("gather", go, result if d else 0)
                for e, other in enumerate(cuts):
                    if e != d:
                        for order in permutations(go):
                            reached = changed({d: stay, e: other + order})
                            yield (reached, left), seconds("all-to-all", go, (d > 0) + (e > 0))
            for axes in lists_of(left):
                if axes:
                    rest = tuple(a for a in left if a not in axes)
                    yield (changed({d: own + axes}), rest), seconds("scatter", axes, int(d > 0))
        for count in range(1, len(left) + 1):
            for axes in combinations(left, count):
                rest = tuple(a for a in left if a not in axes)
                yield (cuts, rest), seconds("reduce", axes)

    def _links(self, model: Model) -> tuple[Floats, Floats]:
        table = np.zeros((2, len(self.devices), len(self.devices)))
        for a, b in permutations(range(len(self.devices)), 2):
            table[:, a, b] = model.slowest(self._differ(self.devices[a], self.devices[b]))
        return table[0], table[1]

    def _exchanges(self, model: Model, item: int) -> Floats:
        alpha, beta = self._links(model)
        classes = sorted(set(alpha.ravel()), reverse=True)
        result = np.full((len(self.cuts), len(self.cuts)), inf)
        for u in range(len(self.cuts)):
            shares = self._shares(u, model)
            part = self.wanted[u] * shares
            asked = (self.wanted[u] > 0) * shares
            received = asked.sum(axis=-1)
            # Pieces stay whole: of three, one of two replicas sends two, and slow ones count first.
            sent = [np.ceil((asked * (alpha >= a)).sum(axis=-2) - 1e-9) for a in classes]
            if model.bus:
                messages = np.maximum(
                    received.max(axis=-1), np.ceil(asked.sum(axis=-2) - 1e-9).max(axis=-1)
                )
                total = part.sum(axis=(-1, -2)) * item
                slowest = [((asked > 0) * cost).max(axis=(-1, -2)) for cost in (alpha, beta)]
                seconds = messages * slowest[0] + total * slowest[1]
            else:
                more = np.diff(sent, axis=0, prepend=0)
                latency = sum(a * count for a, count in zip(classes, more, strict=True))
                sends = latency + (part * item * beta).sum(axis=-2)
                gets = (asked * alpha + part * item * beta).sum(axis=-1)
                seconds = np.maximum(sends.max(axis=-1), gets.max(axis=-1))
            some = part.any(axis=(-1, -2))
            held = [self.largest[cuts] + self.largest[self.cuts[u]] for cuts in self.cuts]
            result[u, some] = (seconds + np.array(held) * item * model.copy)[some]
        return result

    def _permute(self, groups: list[list[tuple[int, Set[Any]]]], b: int, model: Model) -> float:
        price = {axes: model.slowest(axes)[0] + b * model.slowest(axes)[1] for axes in self.classes}

        def worst(used: Set[Any]) -> float:
            return max((price[axes] for axes in used), default=0.0)

        if not model.bus:
            return max(min(worst(used) for _, used in ways) for ways in groups)
        moved = 0
        crossed: set[Any] = set()
        for ways in groups:
            fewest = min(count for count, _ in ways)
            moved += fewest
            crossed |= min((used for count, used in ways if count == fewest), key=worst)
        slowest = [model.slowest(axes) for axes in crossed]
        latency = max((al for al, _ in slowest), default=0.0)
        return latency + moved * b * max((be for _, be in slowest), default=0.0)

"""The next best plans beside the cheapest one.

What counts as another plan: plans are told apart by the moves that communicate, each from one
layout to another. Between two layouts only the cheapest kind of move is looked at. Slices that
follow each other count as one cut, whatever their order, because they are free and leave the same
layout behind. No plan comes to a layout twice, and a cut comes to every layout that lies between
its ends: so nothing is gathered only to be cut as it was.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count as count_from
from itertools import islice, pairwise
from math import inf
from typing import TypeAlias

import numpy as np

from shardspec.comm.steps import Slice
from shardspec.errors import LayoutError
from shardspec.layout.cross import Move
from shardspec.layout.graph import (
    MAX_STATES,
    Cuts,
    Floats,
    State,
    count_states,
    state_of,
)
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan
from shardspec.layout.pricing import TIE_SECONDS, Prices, prices_to_search
from shardspec.layout.search import distances

_Node: TypeAlias = tuple[int, bool]
"""A state, and whether a cut led to it: after a cut comes no other."""


def cheapest_plans(
    best: ConversionPlan, count: int, max_bytes: int | None = None
) -> tuple[ConversionPlan, ...]:
    """Return the cheapest plans between two layouts, the given one first; fewer if there are fewer.

    The order is that of the search: by seconds, and `TIE_SECONDS` for every move. Ways from the
    source are taken up in the order of what they cost and of the distance that is left at least.
    Against `networkx.shortest_simple_paths` on the same graph, a way ends where it first comes to a
    layout twice, and not at the target: among cuts that is most of them.

    No device holds more than `max_bytes` at once. Raises `LayoutError` if `count` is less than 1;
    or for more than one plan, if both ends are on different meshes, or there are too many layouts.
    """
    if count < 1:
        raise LayoutError(f"cannot list {count} plans; ask for at least 1")
    plain = best.source.spec.is_plain and best.target.spec.is_plain
    if count == 1 or best.source == best.target or not plain:
        return (best,)
    source, mesh = best.source, best.source.mesh
    if best.target.mesh != mesh:
        raise LayoutError(
            f"alternatives are listed on one mesh only, and {best.target} is on another one than "
            f"{source}"
        )
    states = count_states(mesh.ndim, source.spec.dims, len(source.spec.partials))
    if states > MAX_STATES:
        raise LayoutError(
            f"alternatives are not searched for among {states} layouts (mesh {mesh}, "
            f"{source.spec.dims} dims), only among up to {MAX_STATES}; ask for the plan alone"
        )
    prices, move = prices_to_search(source, best.model, max_bytes, best.target)
    here, there = state_of(source.spec), state_of(best.target.spec)
    start, goal = prices.space.index[here], prices.space.index[there]
    # By both ends of every move that communicates, which tell plans apart.
    plans = {_moved(best): best}
    for path in islice(_paths(prices, move, start, goal, count), count):
        plan = ConversionPlan.of_moves(source, _moves(prices, path, source), best.model)
        plans.setdefault(_moved(plan), plan)
    return tuple(plans.values())[:count]


def _moved(plan: ConversionPlan) -> tuple[tuple[Layout, Layout], ...]:
    return tuple((before, after) for _, before, after in plan.communicating)


def _paths(
    prices: Prices, others: Floats, start: int, goal: int, count: int
) -> Iterator[list[_Node]]:
    """Yield the cheapest paths in order, as nodes; slices in a row are one edge."""
    states, slices = prices.space.states, defaultdict[int, list[int]](list)
    # No way comes back to where it started, nor goes on from where it ends.
    others[:, start] = others[goal] = np.inf
    left = distances(others.T, goal)
    for a, b in sorted(ends for ends, step in prices.space.steps.items() if type(step) is Slice):
        if np.isfinite(others[a, b]):
            slices[a].append(b)
            others[a, b] = np.inf
    known: list[float] = []  # seconds of the cheapest complete paths, negative

    def edges(node: _Node, most: float) -> Iterator[tuple[_Node, float, frozenset[State]]]:
        """Yield where a move or a cut leads, its seconds, and the states that it passes."""
        here, after_cut = node
        least = others[here] + left
        for b in np.flatnonzero(np.isfinite(least) & (least <= most)).tolist():
            yield (b, False), float(others[here, b]), frozenset([states[b]])
        for b, number in _reached(slices, here).items() if not after_cut else ():
            if left[b] <= most:
                yield (b, True), number * TIE_SECONDS, _between(states[here], states[b])

    order = count_from(0)
    first, seen = (start, False), frozenset([states[start]])
    queue = [(float(left[start]), next(order), 0.0, [first], seen)] if start != goal else []
    while queue:
        _, _, seconds, path, seen = heappop(queue)
        if path[-1][0] == goal:
            yield path
            continue
        # What is summed in another order may differ in the last digits.
        most = inf if len(known) < count else -known[0] * (1 + 1e-9) - seconds
        for node, more, passed in edges(path[-1], most):
            if seen.isdisjoint(passed):
                total = seconds + more
                least = total + float(left[node[0]])
                heappush(queue, (least, next(order), total, [*path, node], seen | passed))
                if node[0] == goal:
                    heappush(known, -total)
                    if len(known) > count:
                        heappop(known)


def _moves(prices: Prices, path: Sequence[_Node], source: Layout) -> Iterator[Move]:
    """Yield the steps of a path with where they lead, each cut as one slice a dim."""
    states, layout = prices.space.states, source
    for (a, _), (b, by_cut) in pairwise(path):
        if not by_cut:
            layout = prices.layout(source, b)
            yield prices.step(a, b), layout
            continue
        before, after = states[a][0], states[b][0]
        cut = {dim: axes for dim, axes in enumerate(after) if axes != before[dim]}
        # What leaves least comes first: then least is held at once.
        left = {
            dim: source.with_spec(layout.spec.with_dims({dim: cut[dim]})).max_local_bytes
            for dim in cut
        }
        for dim in sorted(cut, key=left.__getitem__):
            layout = source.with_spec(layout.spec.with_dims({dim: cut[dim]}))
            yield Slice(dim, cut[dim][len(before[dim]) :]), layout


def _reached(cuts: Mapping[int, list[int]], start: int) -> dict[int, int]:
    """Return the states that slices lead to, with the number of slices."""
    found = {start: 0}
    todo = [start]
    for state in todo:
        for after in cuts.get(state, []):
            if after not in found:
                found[after] = found[state] + 1
                todo.append(after)
    del found[start]
    return found


def _between(before: State, after: State) -> frozenset[State]:
    """Return every state that slices from one to the other may come to, but the first."""
    partial: list[Cuts] = [()]
    for here, there in zip(before[0], after[0], strict=True):
        parts = [there[:count] for count in range(len(here), len(there) + 1)]
        partial = [(*cuts, part) for cuts in partial for part in parts]
    return frozenset((cuts, before[1]) for cuts in partial) - {before}

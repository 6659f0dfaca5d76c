"""The next best plans beside the cheapest one.

What counts as another plan: plans are told apart by the moves that communicate, each from one
layout to another. Between two layouts only the cheapest kind of move is looked at. Slices that
follow each other count as one cut, whatever their order, because they are free and leave the same
layout behind. No plan comes to a layout twice, and a cut comes to every layout that lies between
its ends: so nothing is gathered only to be cut as it was.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count as count_from
from itertools import islice, pairwise
from typing import Final, TypeAlias

import networkx as nx
import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Slice, Step
from shardspec.errors import LayoutError
from shardspec.layout.graph import (
    MAX_STATES,
    Cuts,
    Floats,
    State,
    count_states,
    spec_of,
    state_of,
)
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan
from shardspec.layout.pricing import TIE_SECONDS, Prices, prices_of
from shardspec.layout.search import distances

__all__ = ["cheapest_plans"]

_Node: TypeAlias = tuple[int, bool]
"""A state, and whether a cut led to it: after a cut comes no other."""

_FIRST_EDGES: Final = 8
"""Moves looked at for each plan that is asked for, at first; four times as many in each round."""


def cheapest_plans(
    best: ConversionPlan, count: int, max_bytes: int | None = None
) -> tuple[ConversionPlan, ...]:
    """Return the cheapest plans between two layouts, the given one first; fewer if there are fewer.

    The order is that of the search: by seconds, and `TIE_SECONDS` for every move. Ways from the
    source are taken up in the order of what they cost and of the distance that is left at least,
    over those moves alone that lie on some way no dearer than a bound; the bound grows until enough
    plans are below it. Against `networkx.shortest_simple_paths` on the same graph, a way ends where
    it first comes to a layout twice, and not at the target: among cuts that is most of them.

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
    search = _Search.of(source, best.target, best.model, max_bytes)
    known = {_moves_of(best)}
    plans = [best]
    for path in islice(search.paths(count), count):
        plan = search.plan(path, source, best.model)
        if _moves_of(plan) not in known:
            known.add(_moves_of(plan))
            plans.append(plan)
    return tuple(plans[:count])


def _moves_of(plan: ConversionPlan) -> tuple[tuple[Layout, Layout], ...]:
    """Return what tells plans apart: both ends of every move that communicates."""
    return tuple((before, after) for _, before, after in plan.communicating)


@dataclass(frozen=True, eq=False)
class _Search:
    """Prices of single moves, and the exact distances that bound a search among them."""

    prices: Prices
    move: Floats
    start: int
    goal: int
    left: Floats
    """From each state to the goal."""
    least: Floats
    """Per move the seconds of the cheapest way that takes it, from the start to the goal."""

    @classmethod
    def of(
        cls, source: Layout, target: Layout, model: CostModel, max_bytes: int | None
    ) -> "_Search":
        """Price the moves as the search for the cheapest plan does."""
        here, there = state_of(source.spec), state_of(target.spec)
        prices = prices_of(source, model)
        if max_bytes is not None:
            prices = prices.with_slices_joined()
        start, goal = prices.space.index[here], prices.space.index[there]
        if not prices.routed and not here[1]:
            prices = prices.with_pair(source, there[0])
        move = prices.cheapest() if max_bytes is None else prices.within(max_bytes)[0]
        # No way comes back to where it started, nor goes on from where it ends.
        move[:, start] = move[goal] = np.inf
        left = distances(move.T, goal)
        least = distances(move, start)[:, None] + move + left
        return cls(prices, move, start, goal, left, least)

    def paths(self, count: int) -> Iterator[list[_Node]]:
        """Yield at least so many paths in order, if there are so many."""
        in_order = np.sort(self.least[np.isfinite(self.least)])
        edges = _FIRST_EDGES * count
        while True:
            everything = edges >= len(in_order)
            # What is summed in another order may differ in the last digits.
            bound = np.inf if everything else float(in_order[edges]) * (1 + 1e-9)
            found = list(islice(self._paths_below(bound), count))
            if everything or len(found) >= count:
                yield from found
                return
            edges *= 4

    def _paths_below(self, bound: float) -> Iterator[list[_Node]]:
        graph = self._graph(bound)
        first = (self.start, False)
        if first not in graph:
            return
        order = count_from(0)
        seen = frozenset([self.prices.space.states[self.start]])
        queue = [(float(self.left[self.start]), next(order), 0.0, [first], seen)]
        while queue:
            least, _, seconds, path, seen = heappop(queue)
            if least > bound:
                return
            if path[-1][0] == self.goal:
                yield path
                continue
            for node, edge in graph.adj[path[-1]].items():
                if seen.isdisjoint(edge["passed"]):
                    total = seconds + edge["seconds"]
                    least = total + float(self.left[node[0]])
                    way = [*path, node], seen | edge["passed"]
                    heappush(queue, (least, next(order), total, *way))

    def _graph(self, bound: float) -> nx.DiGraph:
        """Return the moves that lie on a way within the bound; slices in a row are one edge."""
        graph, states = nx.DiGraph(), self.prices.space.states
        cuts: dict[int, list[int]] = {}
        within = np.isfinite(self.least) & (self.least <= bound)
        for a, b in np.argwhere(within).tolist():
            if isinstance(self.prices.step(a, b), Slice):
                cuts.setdefault(a, []).append(b)
                continue
            move = {"seconds": float(self.move[a, b]), "passed": frozenset([states[b]])}
            for after_cut in (False, True):
                graph.add_edge((a, after_cut), (b, False), **move)
        for a in cuts:
            for b, slices in _reached(cuts, a).items():
                cut = {"seconds": slices * TIE_SECONDS, "passed": _between(states[a], states[b])}
                graph.add_edge((a, False), (b, True), **cut)
        return graph

    def plan(self, path: Sequence[_Node], source: Layout, model: CostModel) -> ConversionPlan:
        """Return the plan of a path, with each cut as one slice a dim."""
        states = self.prices.space.states
        steps: list[Step] = []
        layouts = [source]
        for (a, _), (b, by_cut) in pairwise(path):
            if not by_cut:
                steps.append(self.prices.step(a, b))
                layouts.append(source.with_spec(spec_of(states[b])))
                continue
            here = layouts[-1]
            cut = {
                dim: after
                for dim, (before, after) in enumerate(zip(states[a][0], states[b][0], strict=True))
                if after != before
            }
            # What leaves least comes first: then least is held at once.
            left = {
                dim: source.with_spec(here.spec.with_dims({dim: cut[dim]})).max_local_bytes
                for dim in cut
            }
            for dim in sorted(cut, key=left.__getitem__):
                steps.append(Slice(dim, cut[dim][len(states[a][0][dim]) :]))
                layouts.append(source.with_spec(layouts[-1].spec.with_dims({dim: cut[dim]})))
        return ConversionPlan(tuple(steps), tuple(layouts), model)


def _reached(cuts: dict[int, list[int]], start: int) -> dict[int, int]:
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

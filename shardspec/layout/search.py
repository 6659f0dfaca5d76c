"""Dijkstra's search over the layout-transition graph, priced for one tensor on one mesh."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final, TypeAlias

from shardspec.comm.steps import Step
from shardspec.layout.graph import State, TransitionGraph

__all__ = ["TIE_SECONDS", "Price", "cheapest_path"]

TIE_SECONDS: Final = 1e-12
"""Added per step while searching, so that of equally cheap plans the one with fewer steps wins."""

Price: TypeAlias = Callable[[Step, State], float]
"""Seconds of a step that starts from a state."""


def cheapest_path(
    space: TransitionGraph, source: State, target: State, price: Price
) -> list[tuple[Step, State]] | None:
    """Return the cheapest steps from one state to another, each with the state it leads to.

    Parameters
    ----------
    space
        The graph; it is grown along the way.
    source, target
        Where to start and to end.
    price
        Seconds of a step from a state; never negative.

    Returns
    -------
    list or None
        Empty where source and target are the same, None where no path exists.

    Notes
    -----
    Edges are visited in the fixed order of the graph and remaining ties go to the path found first,
    so every rank that searches alone finds the same path. The search is that of
    `networkx.dijkstra_path`, which the tests hold it against; networkx's own wants all edges to
    exist beforehand, and the graph of a six-axis mesh has millions.
    """
    best: dict[State, float] = {source: 0.0}
    came_from: dict[State, tuple[State, Step]] = {}
    done: set[State] = set()
    order = count()
    queue = [(0.0, next(order), source)]
    while queue:
        seconds, _, state = heappop(queue)
        if state == target:
            return _walk_back(came_from, source, target)
        if state in done:
            continue
        done.add(state)
        for reached, step in space.expand(state).items():
            total = seconds + price(step, state) + TIE_SECONDS
            if reached not in best or total < best[reached]:
                best[reached] = total
                came_from[reached] = (state, step)
                heappush(queue, (total, next(order), reached))
    return None


def _walk_back(
    came_from: dict[State, tuple[State, Step]], source: State, target: State
) -> list[tuple[Step, State]]:
    path = []
    state = target
    while state != source:
        previous, step = came_from[state]
        path.append((step, state))
        state = previous
    return path[::-1]

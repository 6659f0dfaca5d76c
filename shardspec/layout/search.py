"""Cheapest paths: over prices laid out as a matrix, or over a graph that grows on the way.

In a matrix (states, states) of seconds a move goes from the row's state to the column's; it is inf
where there is none. Of equally cheap ways every search here takes the same one each time, so that
every rank that plans alone finds the same plan.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TypeAlias

import numpy as np

from shardspec.comm.steps import Step
from shardspec.layout.graph import Floats, Ints, State, TransitionGraph

Price: TypeAlias = Callable[[Step, State], float]
"""Seconds of a step that starts from a state, the tie-breaker included; never negative."""

_AT_ONCE = 24
"""Sources that are searched from together."""


def distances(move: Floats, source: int) -> Floats:
    """Return the cheapest seconds from one state to every other.

    Bellman and Ford's relaxation, all edges at once: as many rounds as the longest of the cheapest
    paths has moves, which is a handful, and all but the first two look at few edges.
    """
    best: Floats = move[source].copy()
    best[source] = 0.0
    # Only what has come nearer can bring others nearer.
    middles = np.flatnonzero(best < inf)
    while len(middles):
        better: Floats = np.minimum(best, (best[middles, None] + move[middles]).min(axis=0))
        middles = np.flatnonzero(better < best)
        best = better
    return best


def all_distances(move: Floats, sources: Ints) -> Floats:
    """Return (sources, states): the cheapest seconds from each of some states to every state.

    The relaxation of `distances`, a few sources at a time, so that what is worked on stays in the
    CPU's cache.
    """
    best: Floats = move[sources]
    best[np.arange(len(sources)), sources] = 0.0
    for first in range(0, len(sources), _AT_ONCE):
        some = best[first : first + _AT_ONCE]
        through = np.empty_like(some)
        middles = np.arange(len(move))
        while len(middles):
            before = some.copy()
            for middle in middles:
                np.add(some[:, middle, None], move[middle], out=through)
                np.minimum(some, through, out=some)
            middles = np.flatnonzero((some < before).any(axis=0))
    return best


def least_peaks(move: Floats, live: Floats, source: int) -> Floats:
    """Return to each state the least number that some path's live bytes never exceed, or inf.

    `live` has the bytes that are live during each move.
    """
    needed = np.where(np.isfinite(move), live, inf)
    best: Floats = needed[source].copy()
    best[source] = 0.0
    while True:
        better = np.minimum(best, np.maximum(best[:, None], needed).min(axis=0))
        if np.array_equal(better, best):
            return best
        best = better


def shortest_walk(move: Floats, source: int, target: int) -> list[int] | None:
    """Return the states of a cheapest path, both ends included; None where no path exists.

    Of equally cheap predecessors the one with the smallest index is taken.
    """
    best = distances(move, source)
    if not np.isfinite(best[target]):
        return None
    walk = [target]
    while walk[-1] != source:
        # What is added to break ties is lost beside millions of seconds: then a state that was
        # passed may seem as near as before.
        best[walk[-1]] = inf
        walk.append(int((best + move[:, walk[-1]]).argmin()))
    return walk[::-1]


def cheapest_path(
    space: TransitionGraph,
    source: State,
    target: State,
    price: Price,
    bound: float = inf,
    most_edges: float = inf,
) -> list[tuple[Step, State]] | None:
    """Return the cheapest steps from one state to another, each with the state it leads to.

    Empty where both are the same; None where no path of fewer seconds than `bound` is found among
    `most_edges` steps. This is Dijkstra's search; networkx's own wants all edges to exist
    beforehand, and the graph of a six-axis mesh has millions. Ties go to the path found first.
    """
    best: dict[State, float] = {source: 0.0}
    came_from: dict[State, tuple[State, Step]] = {}
    done: set[State] = set()
    order = count()
    queue = [(0.0, next(order), source)]
    while queue:
        seconds, _, state = heappop(queue)
        if state == target:
            path = []
            while state != source:
                previous, step = came_from[state]
                path.append((step, state))
                state = previous
            return path[::-1]
        if state in done:
            continue
        done.add(state)
        steps = space.expand(state)
        most_edges -= len(steps)
        if most_edges < 0:
            return None
        for reached, step in steps.items():
            total = seconds + price(step, state)
            if total < best.get(reached, bound):
                best[reached] = total
                came_from[reached] = (state, step)
                heappush(queue, (total, next(order), reached))
    return None

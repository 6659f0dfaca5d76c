"""Cheapest paths: over prices laid out as a matrix, or over a graph that grows on the way."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.steps import Step
from shardspec.layout.graph import State, TransitionGraph

__all__ = ["Price", "all_distances", "cheapest_path", "distances", "least_peaks", "shortest_walk"]

Price: TypeAlias = Callable[[Step, State], float]
"""Seconds of a step that starts from a state, the tie-breaker included."""

Floats: TypeAlias = npt.NDArray[np.float64]

_AT_ONCE = 24
"""Sources that are searched from together."""


def distances(move: Floats, source: int, target: int | None = None) -> Floats:
    """Return the cheapest seconds from one state to every other.

    Bellman and Ford's relaxation, all edges at once: as many rounds as the longest of the cheapest
    paths has moves, which is a handful, and all but the first two look at few edges.

    Parameters
    ----------
    move : array (states, states)
        Seconds of the cheapest single move; inf where there is none.
    source
        Where to start.
    target
        Where to end: states that are no nearer may get more than their least. By default none.

    Examples
    --------
    >>> inf = np.inf
    >>> distances(np.array([[inf, 1, 5], [inf, inf, 1], [inf, inf, inf]]), 0)
    array([0., 1., 2.])
    """
    best: Floats = move[source].copy()
    best[source] = 0.0
    # Only what has come nearer can bring others nearer, and only through what is nearer than the
    # target can the target come nearer.
    middles = np.flatnonzero(best < (np.inf if target is None else best[target]))
    while len(middles):
        better: Floats = np.minimum(best, (best[middles, None] + move[middles]).min(axis=0))
        nearer = better < best
        if target is not None:
            nearer &= better < better[target]
        middles = np.flatnonzero(nearer)
        best = better
    return best


def all_distances(move: Floats, sources: npt.NDArray[np.int64]) -> Floats:
    """Return the cheapest seconds from each of some states to every state.

    Parameters
    ----------
    move : array (states, states)
        Seconds of the cheapest single move; inf where there is none.
    sources : array of indices

    Returns
    -------
    array (sources, states)

    Notes
    -----
    The relaxation of `distances`, in place; after the first round only through states that have
    come nearer. A few sources at a time, so that what is worked on stays in the CPU's cache.

    Examples
    --------
    >>> inf = np.inf
    >>> move = np.array([[inf, 1, 5], [inf, inf, 1], [1, inf, inf]])
    >>> all_distances(move, np.array([0, 2]))
    array([[0., 1., 2.],
           [1., 2., 0.]])
    """
    best: Floats = move[sources]
    best[np.arange(len(sources)), sources] = 0.0
    for first in range(0, len(sources), _AT_ONCE):
        _relax(best[first : first + _AT_ONCE], move)
    return best


def _relax(best: Floats, move: Floats) -> None:
    """Bring the seconds from some sources down to the least, in place."""
    through = np.empty_like(best)
    middles = np.arange(len(move))
    while len(middles):
        before = best.copy()
        for middle in middles:
            np.add(best[:, middle, None], move[middle], out=through)
            np.minimum(best, through, out=best)
        middles = np.flatnonzero((best < before).any(axis=0))


def least_peaks(move: Floats, live: Floats, source: int) -> Floats:
    """Return to each state the smallest number that some path's live bytes never exceed.

    Parameters
    ----------
    move : array (states, states)
        Seconds of the cheapest single move; inf where there is none.
    live : array (states, states)
        Bytes that are live during a move.
    source
        Where to start.

    Returns
    -------
    array (states)
        inf where no path leads.

    Examples
    --------
    >>> move = np.array([[np.inf, 1, 1], [np.inf, np.inf, 1], [np.inf, np.inf, np.inf]])
    >>> least_peaks(move, np.array([[2, 3, 9], [3, 4, 5], [9, 5, 6]]), 0)
    array([0., 3., 5.])
    """
    needed = np.where(np.isfinite(move), live, np.inf)
    best: Floats = needed[source].copy()
    best[source] = 0.0
    while True:
        better = np.minimum(best, np.maximum(best[:, None], needed).min(axis=0))
        if np.array_equal(better, best):
            return best
        best = better


def shortest_walk(move: Floats, source: int, target: int) -> list[int] | None:
    """Return the states of a cheapest path, both ends included; None where no path exists.

    Of equally cheap predecessors the one with the smallest index is taken, so every rank that
    searches alone finds the same path.

    Examples
    --------
    >>> inf = np.inf
    >>> shortest_walk(np.array([[inf, 1, 5], [inf, inf, 1], [inf, inf, inf]]), 0, 2)
    [0, 1, 2]
    """
    best = distances(move, source, target)
    if not np.isfinite(best[target]):
        return None
    walk = [target]
    while walk[-1] != source:
        # What is added to break ties is lost beside millions of seconds: then a state that was
        # passed may seem as near as before.
        best[walk[-1]] = np.inf
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

    Parameters
    ----------
    space
        The graph.
    source, target
        Where to start and to end.
    price
        Seconds of a step from a state; never negative.
    bound
        Look only for paths of fewer seconds.
    most_edges
        Give up after so many steps were looked at.

    Returns
    -------
    list or None
        Empty where source and target are the same, None where no such path was found.

    Notes
    -----
    Edges are visited in the fixed order of the graph and remaining ties go to the path found first,
    so every rank that searches alone finds the same path. The search is that of
    `networkx.dijkstra_path`; networkx's own wants all edges to exist beforehand, and the graph of a
    six-axis mesh has millions.
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

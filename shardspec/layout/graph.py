"""Defines the layout-transition graph: every node is a spec, every edge is exactly one step.

>>> start = state_of(ShardingSpec.parse("[S0,R]"))
>>> for step, state in successors(start, [0, 1]):
...     print(spec_of(state), step)
[S01,R] Slice(dim=0, axes=(1,))
[S0,S1] Slice(dim=1, axes=(1,))
[R,S0] AllToAll(src_dim=0, dst_dim=1, src_axes=(0,), dst_axes=(0,))
[R,R] AllGather(dim=0, axes=(0,))

The graph depends only on the number of mesh axes, the tensor rank and the pending reductions. Two
axes and rank 2 give 11 nodes, four axes and rank 4 give 1,457. There are two forms: `successors`
expands a node on demand, and `Space` stores the whole graph as arrays, to price all edges at once.

Slices are free, so the graph has only slices along single axes; plans join them afterwards. An
all-to-all may reorder up to `MAX_REORDERED` axes and keeps the order of more axes. If there are
more pending axes, a reduction finishes one of them or all.

A matrix (states, states) has the seconds of the step from the row's state to the column's, or inf.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations, permutations, product
from itertools import count as counter
from math import comb, factorial, inf, prod
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceOp,
    ReduceScatter,
    Slice,
    Step,
)
from shardspec.errors import LayoutError
from shardspec.layout.spec import ShardingSpec, check_plain

if TYPE_CHECKING:
    import networkx as nx

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

Cuts: TypeAlias = tuple[tuple[int, ...], ...]
"""Per tensor dim the axes that shard it, major first."""
PartialState: TypeAlias = tuple[tuple[int, ReduceOp], ...]
"""Axis and operation of each pending reduction, by ascending axis."""
SpecState: TypeAlias = tuple[Cuts, PartialState]
"""A spec as tuples, which are quick to hash and to change."""
Node: TypeAlias = tuple[int, bool]
"""The index of a state, and True if the path reaches it by slices; other steps must follow them."""

TIE_SECONDS: Final = 1e-12
"""Cost added per move to prefer the plan with fewer moves among equally cheap ones."""
MAX_REORDERED: Final = 4
"""The most axes that one all-to-all may reorder."""
MAX_STATES: Final = 1500
"""The most states of a graph that is stored as arrays; four axes at rank 4 fit."""
_MAX_ORDERS: Final = 5000
_MAX_AXES: Final = 32
_MAX_DIMS: Final = 64
"""The limit of torch and numpy."""
_SOURCES_AT_ONCE: Final = 24
"""Rows that `distances` relaxes together; they fit into the CPU's cache."""


def state_of(spec: ShardingSpec) -> SpecState:
    """Return the state of a spec with numbered axes: `[S10,R|P2]` is ((1, 0), ()), ((2, sum),)."""
    check_plain(spec, "the transition graph")
    cuts = tuple(tuple(int(axis) for axis in cut.axes) for cut in spec.dim_specs)
    return cuts, tuple(sorted((int(p.axis), p.op) for p in spec.partials))


@lru_cache(maxsize=1 << 13)
def spec_of(state: SpecState) -> ShardingSpec:
    """Return the spec of a state; the inverse of `state_of`."""
    cuts, pending = state
    return ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=dict(pending))


def explore(num_axes: int, start: ShardingSpec) -> "nx.DiGraph":
    """Return the graph of all states reachable from a spec; edges have the attribute `step`.

    >>> explore(2, ShardingSpec.parse("[R,R]")).number_of_nodes()
    11
    """
    import networkx as nx  # takes an eighth of a second to import

    todo = [state_of(start)]
    graph = nx.DiGraph()
    graph.add_node(todo[0])
    while todo:
        state = todo.pop()
        for step, reached in successors(state, range(num_axes)):
            if reached not in graph:
                todo.append(reached)
            graph.add_edge(state, reached, step=step)
    return graph


def successors(
    state: SpecState, axes_to_use: Sequence[int], dims: Sequence[int] | None = None
) -> Iterator[tuple[Step, SpecState]]:
    """Yield every step from a state, and the state after it, once each and in a fixed order.

    Slices use `axes_to_use`; axes move only to `dims`, by default to all.
    """
    cuts, pending = state
    dims = range(len(cuts)) if dims is None else dims
    used = {axis for cut in cuts for axis in cut} | {axis for axis, _ in pending}

    def with_cut(dim: int, axes: tuple[int, ...], of: Cuts = cuts) -> Cuts:
        return (*of[:dim], axes, *of[dim + 1 :])

    for dim in dims:
        for axis in axes_to_use:
            if axis not in used:
                yield Slice(dim, (axis,)), (with_cut(dim, (*cuts[dim], axis)), pending)
    for src, cut in enumerate(cuts):
        for number in range(1, len(cut) + 1):
            leaving, shorter = cut[-number:], with_cut(src, cut[:-number])
            orders = list(permutations(leaving)) if number <= MAX_REORDERED else [leaving]
            for dst in dims:
                for axes in orders if dst != src else ():
                    reached = with_cut(dst, cuts[dst] + axes, shorter)
                    yield AllToAll(src, dst, leaving, axes), (reached, pending)
    for op in sorted({op for _, op in pending}):
        for axes in _arrangements([axis for axis, its in pending if its == op]):
            rest = tuple(p for p in pending if p[0] not in axes)
            for dim in dims:
                yield ReduceScatter(dim, axes, op), (with_cut(dim, cuts[dim] + axes), rest)
            if axes == tuple(sorted(axes)):
                yield AllReduce(axes, op), (cuts, rest)
    for dim, cut in enumerate(cuts):
        for number in range(1, len(cut) + 1):
            yield AllGather(dim, cut[-number:]), (with_cut(dim, cut[:-number]), pending)


def _arrangements(axes: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield every non-empty subset of axes in every order; of many axes, each alone and all."""
    if len(axes) > MAX_REORDERED:
        yield from ((axis,) for axis in axes)
        yield tuple(axes)
        return
    for number in range(1, len(axes) + 1):
        for chosen in combinations(axes, number):
            yield from permutations(chosen)


def count_states(num_axes: int, dims: int, num_pending: int) -> int:
    """Return the number of reachable specs; raises `LayoutError` for too many axes or dims.

    >>> count_states(2, 2, 0), count_states(4, 4, 0)
    (11, 1457)
    """
    if num_axes > _MAX_AXES or dims > _MAX_DIMS:
        raise LayoutError(
            f"cannot plan conversions for {num_axes} mesh axes and {dims} dims; use at most "
            f"{_MAX_AXES} axes and {_MAX_DIMS} dims"
        )
    # p axes stay pending; k of the others, in order, are distributed over the dims.
    return sum(
        comb(num_pending, p) * comb(num_axes - p, k) * factorial(k) * comb(max(k + dims - 1, 0), k)
        for p in range(num_pending + 1)
        for k in range(num_axes - p + 1)
    )


def is_symmetric(global_shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> bool:
    """Return True if prices stay equal when dims, or axes of equal length, are permuted.

    They do if every dim divides evenly. Returns False if there are too many permutations.

    >>> is_symmetric((8, 8), (2, 4)), is_symmetric((8, 9), (2, 4))
    (True, False)
    """
    orders = factorial(len(global_shape)) * factorial(len(mesh_shape))
    devices = prod(mesh_shape)
    return orders <= _MAX_ORDERS and all(size and size % devices == 0 for size in global_shape)


@dataclass(frozen=True, eq=False)
class Space:
    """All specs for some number of axes and dims, and the steps between them."""

    num_axes: int
    dims: int
    states: list[SpecState]
    """All states, sorted by pending reductions, then by cuts."""
    index: dict[SpecState, int]
    lists: list[tuple[int, ...]]
    """Every list of axes that shards a dim of some state."""
    list_index: Ints
    """(states, dims): index into `lists` of the axes that shard each dim."""
    num_finished: int
    """The first `num_finished` states have no pending reduction; exchanges connect only these."""
    steps: dict[tuple[int, int], Step]
    """(source state, target state) -> step."""


@lru_cache(maxsize=4)
def orbits(space: Space, axis_kinds: tuple[int, ...], *, first: bool = False) -> tuple[Ints, Ints]:
    """Return one state for each group of equally priced states, and the permutations to it.

    On an even square, [S0,R] and [R,S0] cost the same. Such states differ by a permutation of dims
    (without the first dim if `first`), or of axes with the same number in `axis_kinds`. Row ``u``
    of the second array (states, states) has every state after the permutation from ``u`` to the
    chosen state of its group.
    """
    by_dims = [
        [space.index[tuple(cuts[d] for d in order), pending] for cuts, pending in space.states]
        for order in permutations(range(space.dims))
        if not first or order[:1] == (0,)
    ]
    by_axes = [
        [
            space.index[
                tuple(tuple(order[a] for a in axes) for axes in cuts),
                tuple(sorted((order[a], op) for a, op in pending)),
            ]
            for cuts, pending in space.states
        ]
        for order in permutations(range(space.num_axes))
        if all(axis_kinds[order[axis]] == axis_kinds[axis] for axis in range(space.num_axes))
    ]
    images = np.array(by_dims)[:, np.array(by_axes)].reshape(-1, len(space.states))
    return images.min(axis=0), images[images.argmin(axis=0)]


@lru_cache(maxsize=16)
def space_of(num_axes: int, dims: int, pending: PartialState) -> Space:
    """Return the space of all specs that a conversion can pass through."""
    graph = explore(num_axes, spec_of((((),) * dims, pending)))
    states: list[SpecState] = sorted(
        graph.nodes, key=lambda s: (len(s[1]), s[1], sum(map(len, s[0])), s[0])
    )
    index = {state: i for i, state in enumerate(states)}
    lists = sorted({axes for cuts, _ in states for axes in cuts}, key=lambda a: (len(a), a))
    list_index = [[lists.index(axes) for axes in cuts] for cuts, _ in states]
    return Space(
        num_axes,
        dims,
        states,
        index,
        lists,
        np.array(list_index, dtype=np.int64).reshape(len(states), dims),
        sum(not reductions for _, reductions in states),
        {(index[a], index[b]): step for a, b, step in graph.edges(data="step")},
    )


def distances(move: Floats, sources: Sequence[int] | Ints, join: np.ufunc = np.add) -> Floats:
    """Return (sources, states): the seconds of the cheapest path from each source to every state.

    `join` adds the moves of a path; `np.maximum` gives the path whose largest move is smallest.
    This is the Bellman-Ford algorithm, with as many rounds as the longest cheapest path has moves.

    >>> move = np.array([[inf, 1.0, 5.0], [inf, inf, 2.0], [inf, inf, inf]])
    >>> distances(move, [0]), distances(move, [0], np.maximum), shortest_walk(move, 0, 2)
    (array([[0., 1., 3.]]), array([[0., 1., 2.]]), [0, 1, 2])
    """
    best: Floats = move[sources]
    best[np.arange(len(sources)), sources] = 0.0
    for first in range(0, len(sources), _SOURCES_AT_ONCE):
        rows = best[first : first + _SOURCES_AT_ONCE]
        through = np.empty_like(rows)
        middles = np.flatnonzero((rows < inf).any(axis=0))
        while len(middles):
            before = rows.copy()
            if len(rows) == 1:  # all at once is faster
                join(rows[0, middles, None], move[middles]).min(axis=0, initial=inf, out=through[0])
                np.minimum(rows, through, out=rows)
                middles = np.flatnonzero(rows[0] < before[0])
                continue
            for middle in middles:
                join(rows[:, middle, None], move[middle], out=through)
                np.minimum(rows, through, out=rows)
            # Only states whose distance fell can shorten paths to others.
            middles = np.flatnonzero((rows < before).any(axis=0))
    return best


def shortest_walk(move: Floats, source: int, target: int) -> list[int] | None:
    """Return the states of a cheapest path, `source` and `target` included; None without a path.

    Ties are broken by number of moves, then by state index.
    """
    best = distances(move, [source])[0]
    if not np.isfinite(best[target]):
        return None
    # Rounding removes the tie-breaker from very long times; this search still avoids cycles.
    follows: dict[int, int] = {target: target}
    queue = deque([target])
    while source not in follows:
        state = queue.popleft()
        for previous in np.flatnonzero(best + move[:, state] == best[state]).tolist():
            if previous not in follows:
                follows[previous] = state
                queue.append(previous)
    walk = [source]
    while walk[-1] != target:
        walk.append(follows[walk[-1]])
    return walk


def cheapest_path(
    edges: Callable[[SpecState], Iterable[tuple[Step, SpecState]]],
    source: SpecState,
    target: SpecState,
    price: Callable[[Step, SpecState], float],
    bound: float = inf,
    max_edges: float = inf,
) -> list[tuple[Step, SpecState]] | None:
    """Return the cheapest steps from one state to another, each with the state after it.

    Returns None if the first `max_edges` steps give no path cheaper than `bound`. This is
    Dijkstra's algorithm. networkx would need all edges in advance, which are millions for six axes.
    """
    best: dict[SpecState, float] = {source: 0.0}
    came_from: dict[SpecState, tuple[SpecState, Step]] = {}
    closed: set[SpecState] = set()
    order = counter()
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
        if state in closed:
            continue
        closed.add(state)
        for step, reached in edges(state):
            max_edges -= 1
            total = seconds + price(step, state)
            if total < best.get(reached, bound):
                best[reached] = total
                came_from[reached] = (state, step)
                heappush(queue, (total, next(order), reached))
        if max_edges < 0:
            return None
    return None


def cheapest_paths(
    space: Space,
    slices: Iterable[tuple[int, int]],
    move: Floats,
    start: int,
    goal: int,
    count: int,
) -> Iterator[list[Node]]:
    """Yield the `count` cheapest paths in order, or more; consecutive slices form one edge.

    The path with the lowest bound of its total cost is extended first (A*).
    `networkx.shortest_simple_paths` would include paths that gather and then slice again.
    """
    states, sliced = space.states, defaultdict[int, list[int]](list)
    # Paths do not return to the start, and end at the goal.
    move[:, start] = move[goal] = inf
    rest = distances(move.T, [goal])[0]
    for a, b in sorted(slices):
        if np.isfinite(move[a, b]):
            sliced[a].append(b)
            move[a, b] = inf
    totals: list[float] = []  # negative seconds of the cheapest complete paths, as a heap

    def cuts_from(start: int) -> dict[int, int]:
        """Return state -> number of slices, for states that slices alone reach from `start`."""
        num_slices = {start: 0}
        todo = [start]
        for state in todo:
            for after in sliced.get(state, []):
                if after not in num_slices:
                    num_slices[after] = num_slices[state] + 1
                    todo.append(after)
        del num_slices[start]
        return num_slices

    def edges(node: Node, most: float) -> Iterator[tuple[Node, float, frozenset[SpecState]]]:
        """Yield (next node, seconds to it, states on the way) for paths of up to `most` seconds."""
        state, after_cut = node
        least = move[state] + rest
        for b in np.flatnonzero(np.isfinite(least) & (least <= most)).tolist():
            yield (b, False), float(move[state, b]), frozenset([states[b]])
        for b, number in cuts_from(state).items() if not after_cut else ():
            if rest[b] <= most:
                yield (b, True), number * TIE_SECONDS, _between(states[state], states[b])

    order = counter()
    queue = [(float(rest[start]), next(order), 0.0, [(start, False)], frozenset([states[start]]))]
    while queue:
        _, _, seconds, path, visited = heappop(queue)
        if path[-1][0] == goal:
            yield path
            continue
        # The margin allows for rounding of sums in different orders.
        most = inf if len(totals) < count else -totals[0] * (1 + 1e-9) - seconds
        for node, more, passed in edges(path[-1], most):
            if visited.isdisjoint(passed):
                total = seconds + more
                least = total + float(rest[node[0]])
                heappush(queue, (least, next(order), total, [*path, node], visited | passed))
                if node[0] == goal:
                    heappush(totals, -total)
                    if len(totals) > count:
                        heappop(totals)


def _between(before: SpecState, after: SpecState) -> frozenset[SpecState]:
    """Return the states that slices from `before` to `after` may visit, in any order of slices."""
    parts = (
        [longer[:length] for length in range(len(shorter), len(longer) + 1)]
        for shorter, longer in zip(before[0], after[0], strict=True)
    )
    return frozenset((cuts, before[1]) for cuts in product(*parts)) - {before}

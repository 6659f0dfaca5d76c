"""The layout-transition graph: every spec is a node, every edge is exactly one step.

Which steps lead where depends only on the number of mesh axes, the tensor rank and what is pending,
not on sizes, so one graph serves every mesh shape and tensor; prices are put on it per conversion.
The graph has 11 nodes for two axes and rank 2, 1,457 for four axes and rank 4, and a great many for
six axes. So it is there in two forms: `TransitionGraph` makes it where it is looked at, `Space` is
all of it as arrays, in which thousands of edges are priced at once.

Cutting is free, so a slice along several axes is as good as one slice after another: the graph has
the single ones, and a plan joins them again. Where more than `MAX_REORDERED` axes of one dim travel
together, they arrive in the order in which they left; fewer arrive in any order. Of more pending
axes than that each is finished alone, or all are at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from math import comb, factorial, prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import copies
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
from shardspec.layout.spec import ShardingSpec

if TYPE_CHECKING:
    import networkx as nx

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

Cuts: TypeAlias = tuple[tuple[int, ...], ...]
"""Per tensor dim the axes that cut it, the major one first."""
PartialState: TypeAlias = tuple[tuple[int, ReduceOp], ...]
"""Axis and operation of each pending reduction, by ascending axis."""
State: TypeAlias = tuple[Cuts, PartialState]
"""A spec in the form the search works on: quick to hash and to change."""

MAX_REORDERED: Final = 4
"""The most axes that one all-to-all may put into a new order."""
MAX_STATES: Final = 1500
"""Up to so many states (four axes at rank 4) a space is laid out whole."""
_MOST_ORDERS: Final = 5000
_MOST_AXES: Final = 32
_MOST_DIMS: Final = 64
"""As many as torch and numpy have."""


def state_of(spec: ShardingSpec) -> State:
    """Return the state of a spec whose axes are numbers: `[S10,R|P2]` is ((1, 0), ()), ((2, sum),).

    Raises `LossyConversionError` for parts and blocks.
    """
    spec.check_plain("the transition graph")
    cuts = tuple(tuple(int(axis) for axis in cut.axes) for cut in spec.dim_specs)
    return cuts, tuple(sorted((int(p.axis), p.op) for p in spec.partials))


@lru_cache(maxsize=1 << 13)
def spec_of(state: State) -> ShardingSpec:
    """Return the spec of a state; undoes `state_of`."""
    cuts, pending = state
    return ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=dict(pending))


@dataclass(frozen=True, slots=True)
class TransitionGraph:
    """All specs reachable by steps.

    Examples
    --------
    >>> whole = ShardingSpec.parse("[R,R]")
    >>> graph = TransitionGraph(2).explore(whole)
    >>> graph.number_of_nodes()
    11
    >>> graph.edges[state_of(whole), state_of(ShardingSpec.parse("[R,S1]"))]["step"]
    Slice(dim=1, axes=(1,))
    """

    num_axes: int
    """Mesh axes."""
    axes: tuple[int, ...] | None = None
    """Those that may come to cut a dim; by default all."""
    dims: tuple[int, ...] | None = None
    """The dims that axes may come to; by default all."""

    def expand(self, state: State) -> dict[State, Step]:
        """Return the states that one step leads to, in one fixed order, with the step."""
        axes = range(self.num_axes) if self.axes is None else self.axes
        dims = range(len(state[0])) if self.dims is None else self.dims
        return {reached: step for step, reached in _successors(state, axes, dims)}

    def explore(self, start: ShardingSpec) -> "nx.DiGraph":
        """Return all states that can be reached from a spec; edges have the attribute ``step``."""
        import networkx as nx  # takes an eighth of a second, and planning needs none of it

        graph = nx.DiGraph()
        todo = [state_of(start)]
        graph.add_node(todo[0])
        while todo:
            state = todo.pop()
            for reached, step in self.expand(state).items():
                if reached not in graph:
                    todo.append(reached)
                graph.add_edge(state, reached, step=step)
        return graph


def _successors(
    state: State, axes_to_use: Sequence[int], dims: Sequence[int]
) -> Iterator[tuple[Step, State]]:
    """List every step possible from a state, and where it leads."""
    cuts, pending = state
    used = {axis for cut in cuts for axis in cut} | {axis for axis, _ in pending}

    def with_cut(dim: int, axes: tuple[int, ...], of: Cuts = cuts) -> Cuts:
        return (*of[:dim], axes, *of[dim + 1 :])

    for dim in dims:
        for axis in axes_to_use:
            if axis not in used:
                yield Slice(dim, (axis,)), (with_cut(dim, (*cuts[dim], axis)), pending)
    for src, cut in enumerate(cuts):
        for count in range(1, len(cut) + 1):
            leaving, shorter = cut[-count:], with_cut(src, cut[:-count])
            # Many axes arrive in the order in which they left.
            orders = list(permutations(leaving)) if count <= MAX_REORDERED else [leaving]
            for dst in dims:
                for axes in orders if dst != src else ():
                    reached = with_cut(dst, cuts[dst] + axes, shorter)
                    yield AllToAll(src, dst, leaving, axes), (reached, pending)
    for op in sorted({op for _, op in pending}):
        of_op = [axis for axis, its in pending if its == op]
        for axes in _arrangements(of_op):
            left = tuple(p for p in pending if p[0] not in axes)
            for dim in dims:
                yield ReduceScatter(dim, axes, op), (with_cut(dim, cuts[dim] + axes), left)
            if axes == tuple(sorted(axes)):
                yield AllReduce(axes, op), (cuts, left)
    for dim, cut in enumerate(cuts):
        for count in range(1, len(cut) + 1):
            yield AllGather(dim, cut[-count:]), (with_cut(dim, cut[:-count]), pending)


def _arrangements(axes: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield every non-empty choice of axes in every order; of many axes, each alone and all."""
    if len(axes) > MAX_REORDERED:
        yield from ((axis,) for axis in axes)
        yield tuple(axes)
        return
    for count in range(1, len(axes) + 1):
        for chosen in combinations(axes, count):
            yield from permutations(chosen)


def count_states(num_axes: int, dims: int, num_pending: int) -> int:
    """Return how many specs can be reached; `LayoutError` where there are too many axes or dims.

    Of `num_axes` axes, ``p`` of the `num_pending` stay pending, ``k`` of the others cut dims, and
    ``k`` axes in order are laid into `dims` dims.
    """
    if num_axes > _MOST_AXES or dims > _MOST_DIMS:
        raise LayoutError(
            f"conversions are planned on up to {_MOST_AXES} mesh axes and for tensors of up to "
            f"{_MOST_DIMS} dims, but these are {num_axes} axes and {dims} dims"
        )
    return sum(
        comb(num_pending, p)
        * sum(
            comb(num_axes - p, k) * factorial(k) * comb(max(k + dims - 1, 0), k)
            for k in range(num_axes - p + 1)
        )
        for p in range(num_pending + 1)
    )


def is_symmetric(global_shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> bool:
    """Say whether states that differ by the order of dims and of like axes are priced as one.

    They cost the same where every dim divides evenly whatever the cut. Of many axes and dims there
    are too many orders to look at.
    """
    orders = factorial(len(global_shape)) * factorial(len(mesh_shape))
    devices = prod(mesh_shape)
    return orders <= _MOST_ORDERS and all(size and size % devices == 0 for size in global_shape)


@dataclass(frozen=True, eq=False)
class Space:
    """All specs of some axes, rank and pending reductions, and the steps among them."""

    num_axes: int
    dims: int
    states: list[State]
    """Fewer pending reductions and fewer cuts first."""
    index: dict[State, int]
    lists: list[tuple[int, ...]]
    """Every list of axes that cuts a dim somewhere."""
    list_index: Ints
    """(states, dims): which of `lists` cuts each dim."""
    nothing_pending: Ints
    """States with no pending reduction: the first ones. Permute and exchange join these."""
    edge_from: Ints
    edge_to: Ints
    edge_kind: Ints
    """Which of `kinds` prices each edge."""
    kinds: list[Step]
    """One step for each kind and set of axes; steps that share them cost the same."""
    steps: dict[tuple[int, int], Step]

    def uncut_bits(self) -> Ints:
        """Return per state the bits of the axes that neither cut a dim nor are pending."""
        full = (1 << self.num_axes) - 1
        used = [
            sum(1 << axis for axes in (*cuts, *((a,) for a, _ in left)) for axis in axes)
            for cuts, left in self.states
        ]
        return full - np.array(used, dtype=np.int64)

    def edge_seconds(self, model: CostModel, local_bytes: Floats) -> Floats:
        """Return the seconds of every edge, given the bytes of the largest shard of each state."""
        held = local_bytes[self.edge_from]
        seconds: Floats = np.min(
            [fixed + per_byte * held for fixed, per_byte in _edge_lines(self, model)], axis=0
        )
        return seconds

    def local_elements(self, mesh_shape: tuple[int, ...], global_shape: tuple[int, ...]) -> Floats:
        """Return the elements of the largest shard of every state."""
        elements = np.ones(len(self.states))
        for dim, size in enumerate(global_shape):
            sides = []
            for axes in self.lists:
                side = size
                for axis in axes:
                    side = -(-side // mesh_shape[axis])
                sides.append(side)
            elements *= np.array(sides, dtype=np.float64)[self.list_index[:, dim]]
        return elements

    def orbits(self, alike: Sequence[int], *, first: bool = False) -> tuple[Ints, Ints]:
        """Return for each state the one that stands for it, and how to get there.

        Where all dims divide evenly, states cost the same that differ by a permutation of the
        tensor dims (but for the `first`, if that is not like the others), or of mesh axes that have
        the same number in `alike`. The second array is (states, states): row ``u`` maps every state
        by the permutation that takes ``u`` to the state that stands for it.
        """
        return _orbits(self, tuple(alike), first)


@lru_cache(maxsize=4)
def _orbits(space: Space, alike: tuple[int, ...], first: bool) -> tuple[Ints, Ints]:
    by_dims = [
        [space.index[tuple(cuts[d] for d in order), left] for cuts, left in space.states]
        for order in permutations(range(space.dims))
        if not first or order[:1] == (0,)
    ]
    by_axes = [
        [
            space.index[
                tuple(tuple(order[a] for a in axes) for axes in cuts),
                tuple(sorted((order[a], op) for a, op in left)),
            ]
            for cuts, left in space.states
        ]
        for order in permutations(range(space.num_axes))
        if all(alike[order[axis]] == alike[axis] for axis in range(space.num_axes))
    ]
    images = np.array(by_dims)[:, np.array(by_axes)].reshape(-1, len(space.states))
    return images.min(axis=0), images[images.argmin(axis=0)]


@lru_cache(maxsize=16)
def _edge_lines(space: Space, model: CostModel) -> list[tuple[Floats, Floats]]:
    """Return lines, each as the seconds of every edge whatever the size and those per byte held."""
    of_kinds = [model.lines(step) for step in space.kinds]
    most = max(map(len, of_kinds), default=1)
    lines = np.array([(*each, *each[:1] * (most - len(each))) for each in of_kinds])
    lines = lines.reshape(-1, most, 2)[space.edge_kind]
    return [(lines[:, n, 0].copy(), lines[:, n, 1].copy()) for n in range(most)]


@lru_cache(maxsize=16)
def space_of(num_axes: int, dims: int, pending: PartialState) -> Space:
    """Return the space of all specs that a conversion can pass through from what is pending."""
    start: State = (((),) * dims, pending)
    graph = TransitionGraph(num_axes).explore(spec_of(start))
    states = sorted(graph.nodes, key=_order)
    index = {state: i for i, state in enumerate(states)}
    lists = sorted({axes for cuts, _ in states for axes in cuts}, key=lambda a: (len(a), a))
    place = {axes: i for i, axes in enumerate(lists)}
    list_index = [[place[axes] for axes in cuts] for cuts, _ in states]
    steps: dict[tuple[int, int], Step] = {
        (index[a], index[b]): step for a, b, step in graph.edges(data="step")
    }
    kinds: dict[tuple[str, tuple[int, ...], int], Step] = {}
    keys = [(type(s).__name__, tuple(sorted(s.axes)), copies(s, 1)) for s in steps.values()]
    for key, step in zip(keys, steps.values(), strict=True):
        kinds.setdefault(key, step)
    number = {key: n for n, key in enumerate(kinds)}
    ends = np.array(list(steps), dtype=np.int64).reshape(-1, 2)
    return Space(
        num_axes=num_axes,
        dims=dims,
        states=states,
        index=index,
        lists=lists,
        list_index=np.array(list_index, dtype=np.int64).reshape(len(states), dims),
        nothing_pending=np.flatnonzero([not left for _, left in states]),
        edge_from=ends[:, 0],
        edge_to=ends[:, 1],
        edge_kind=np.array([number[key] for key in keys], dtype=np.int64),
        kinds=list(kinds.values()),
        steps=steps,
    )


def _order(state: State) -> tuple[Any, ...]:
    cuts, pending = state
    return len(pending), pending, sum(map(len, cuts)), cuts

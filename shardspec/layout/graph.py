"""The layout-transition graph: every spec is a node, every edge is exactly one step.

Which steps lead where depends only on the number of mesh axes, the tensor rank and what is pending,
not on sizes, so one graph serves every mesh shape and tensor; prices are put on it per conversion.
The graph has 11 nodes for two axes and rank 2, 1,457 for four axes and rank 4, and a great many for
six axes; so it is made where it is looked at.

Cutting is free, so a slice along several axes is as good as one slice after another: the graph has
the single ones, and a plan joins them again. Where more than `MAX_REORDERED` axes of one dim travel
together, they arrive in the order in which they left; fewer arrive in any order. Of more pending
axes than that each is finished alone, or all are at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import Final, TypeAlias

import networkx as nx

from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceOp,
    ReduceScatter,
    Slice,
    Step,
)
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis

__all__ = [
    "MAX_REORDERED",
    "Cuts",
    "PartialState",
    "State",
    "TransitionGraph",
    "spec_of",
    "state_of",
]

Cuts: TypeAlias = tuple[tuple[int, ...], ...]
"""Per tensor dim the axes that cut it, the major one first."""
PartialState: TypeAlias = tuple[tuple[int, ReduceOp], ...]
"""Axis and operation of each pending reduction, by ascending axis."""
State: TypeAlias = tuple[Cuts, PartialState]
"""A spec in the form the search works on: quick to hash and to change."""

MAX_REORDERED: Final = 4
"""The most axes that one all-to-all may put into a new order."""


def state_of(spec: ShardingSpec) -> State:
    """Return the state of a spec whose axes are numbers.

    Examples
    --------
    >>> state_of(ShardingSpec.parse("[S10,R|P2]"))
    (((1, 0), ()), ((2, 'sum'),))
    """
    spec.check_plain("the transition graph")
    cuts = tuple(tuple(_number(axis) for axis in cut.axes) for cut in spec.dim_specs)
    return cuts, tuple(sorted((_number(p.axis), p.op) for p in spec.partials))


def _number(axis: Axis) -> int:
    assert isinstance(axis, int), "layouts hold axes by number"
    return axis


@lru_cache(maxsize=1 << 13)
def spec_of(state: State) -> ShardingSpec:
    """Return the spec of a state; undoes `state_of`."""
    cuts, pending = state
    return ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=dict(pending))


@dataclass(frozen=True, slots=True)
class TransitionGraph:
    """All specs reachable by steps.

    Parameters
    ----------
    num_axes
        Mesh axes.
    axes, dims
        The mesh axes that may come to cut a dim, and the dims that axes may come to; by default
        all.

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
    axes: tuple[int, ...] | None = None
    dims: tuple[int, ...] | None = None

    def expand(self, state: State) -> dict[State, Step]:
        """Return the states that one step leads to, in one fixed order, with the step."""
        axes = range(self.num_axes) if self.axes is None else self.axes
        dims = range(len(state[0])) if self.dims is None else self.dims
        return {reached: step for step, reached in _successors(state, axes, dims)}

    def explore(self, start: ShardingSpec) -> nx.DiGraph:
        """Return everything that can be reached from a spec.

        Nodes are states; edges have the attribute ``step``.
        """
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
    free = [axis for axis in axes_to_use if axis not in used]
    for dim in dims:
        for axis in free:
            yield Slice(dim, (axis,)), (_extended(cuts, dim, (axis,)), pending)
    for src in range(len(cuts)):
        for leaving in _innermost(cuts[src]):
            shorter = _shortened(cuts, src, len(leaving))
            for dst in dims:
                if dst != src:
                    for axes in _arrivals(leaving):
                        reached = _extended(shorter, dst, axes)
                        yield AllToAll(src, dst, leaving, axes), (reached, pending)
    for op in sorted({op for _, op in pending}):
        of_op = [axis for axis, its in pending if its == op]
        for axes in _arrangements(of_op):
            left = tuple(p for p in pending if p[0] not in axes)
            for dim in dims:
                yield ReduceScatter(dim, axes, op), (_extended(cuts, dim, axes), left)
            if axes == tuple(sorted(axes)):
                yield AllReduce(axes, op), (cuts, left)
    for dim in range(len(cuts)):
        for axes in _innermost(cuts[dim]):
            yield AllGather(dim, axes), (_shortened(cuts, dim, len(axes)), pending)


def _arrangements(axes: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield every non-empty choice of axes in every order; of many axes, each alone and all."""
    if len(axes) > MAX_REORDERED:
        yield from ((axis,) for axis in axes)
        yield tuple(axes)
        return
    for count in range(1, len(axes) + 1):
        for chosen in combinations(axes, count):
            yield from permutations(chosen)


def _arrivals(leaving: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which axes that leave together may arrive."""
    return permutations(leaving) if len(leaving) <= MAX_REORDERED else iter([leaving])


def _innermost(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the last axis of a cut, the last two, and so on to all of them."""
    for count in range(1, len(cut) + 1):
        yield cut[-count:]


def _extended(cuts: Cuts, dim: int, axes: tuple[int, ...]) -> Cuts:
    return (*cuts[:dim], cuts[dim] + axes, *cuts[dim + 1 :])


def _shortened(cuts: Cuts, dim: int, count: int) -> Cuts:
    return (*cuts[:dim], cuts[dim][:-count], *cuts[dim + 1 :])

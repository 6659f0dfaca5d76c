"""The transition graph as arrays: every spec has an index, every edge a place in a list.

networkx explains, exports and draws; where prices are put on thousands of edges at once, these
arrays, made from the graph, do the arithmetic.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import comb, factorial, prod
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import copies
from shardspec.comm.steps import Step
from shardspec.errors import LayoutError
from shardspec.layout.graph import PartialState, State, TransitionGraph, spec_of

__all__ = ["MAX_STATES", "Space", "count_states", "is_symmetric", "space_of"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
_Key: TypeAlias = tuple[str, tuple[int, ...], int]

MAX_STATES: Final = 1500
"""Up to so many states (four axes at rank 4) a space is laid out whole."""
_MOST_ORDERS: Final = 5000
_MOST_AXES: Final = 32
_MOST_DIMS: Final = 64
"""As many as torch and numpy have."""


def count_states(num_axes: int, dims: int, num_pending: int) -> int:
    """Return how many specs can be reached.

    Of `num_axes` axes, ``p`` of the `num_pending` stay pending, ``k`` of the others cut dims, and
    ``k`` axes in order are laid into `dims` dims.

    Examples
    --------
    >>> count_states(2, 2, 0), count_states(2, 3, 0), count_states(4, 4, 0), count_states(2, 0, 1)
    (11, 19, 1457, 2)

    Raises
    ------
    LayoutError
        If there are more axes or dims than conversions are planned for.
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

    Examples
    --------
    >>> is_symmetric((8, 16), (2, 4)), is_symmetric((8, 15), (2, 4)), is_symmetric((8,) * 9, (8,))
    (True, False, False)
    """
    orders = factorial(len(global_shape)) * factorial(len(mesh_shape))
    devices = prod(mesh_shape)
    return orders <= _MOST_ORDERS and all(size and size % devices == 0 for size in global_shape)


@dataclass(frozen=True, eq=False)
class Space:
    """All specs of some axes, rank and pending reductions, and the steps among them.

    Attributes
    ----------
    states
        In the order of the index: fewer pending reductions and fewer cuts first.
    index
        Of every state.
    lists
        Every list of axes that cuts a dim somewhere.
    list_index : array (states, dims)
        Which of `lists` cuts each dim.
    nothing_pending : array of indices
        States with no pending reduction; permute and exchange join these.
    edge_from, edge_to : arrays (edges)
        Where each step of the graph starts and ends.
    edge_kind : array (edges)
        Which of `kinds` prices it.
    kinds
        One step for each kind and set of axes; steps that share them cost the same.
    """

    num_axes: int
    dims: int
    states: list[State]
    index: dict[State, int]
    lists: list[tuple[int, ...]]
    list_index: Ints
    nothing_pending: Ints
    edge_from: Ints
    edge_to: Ints
    edge_kind: Ints
    kinds: list[Step]
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
        sides_of = {size: self._sides(mesh_shape, size) for size in set(global_shape)}
        for dim, size in enumerate(global_shape):
            elements *= sides_of[size][self.list_index[:, dim]]
        return elements

    def _sides(self, mesh_shape: tuple[int, ...], size: int) -> Floats:
        """Return the longest part of a dim under every list of axes."""
        sides = []
        for axes in self.lists:
            side = size
            for axis in axes:
                side = -(-side // mesh_shape[axis])
            sides.append(side)
        return np.array(sides, dtype=np.float64)

    def orbits(
        self, alike: tuple[int, ...] | None = None, *, first: bool = False
    ) -> tuple[Ints, Ints]:
        """Return for each state the one that stands for it, and how to get there.

        Where all dims divide evenly, states cost the same that differ by a permutation of the
        tensor dims, or of mesh axes that are alike.

        Parameters
        ----------
        alike
            Per mesh axis a number; axes with the same one are equally long and fast. By default
            no two are.
        first
            Whether the first dim is not like the others.

        Returns
        -------
        representative : array (states)
            Index of the state that stands for each.
        relabelled : array (states, states)
            Row ``u`` maps every state ``v`` by the permutation that takes ``u`` to its
            representative.
        """
        return _orbits(self, alike or tuple(range(self.num_axes)), first)


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
    chosen = images.argmin(axis=0)
    return images.min(axis=0), images[chosen]


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
    """Return the space of all specs that a conversion can pass through.

    Parameters
    ----------
    num_axes, dims, pending
        Mesh axes, tensor rank, and what is pending at the source.
    """
    start: State = (((),) * dims, pending)
    graph = TransitionGraph(num_axes).explore(spec_of(start))
    states = sorted(graph.nodes, key=_order)
    index = {state: i for i, state in enumerate(states)}
    lists = sorted({axes for cuts, _ in states for axes in cuts}, key=lambda a: (len(a), a))
    place = {axes: i for i, axes in enumerate(lists)}
    steps: dict[tuple[int, int], Step] = {
        (index[a], index[b]): step for a, b, step in graph.edges(data="step")
    }
    kind_of: dict[_Key, int] = {}
    kinds: list[Step] = []
    edge_kind = []
    for step in steps.values():
        key = (type(step).__name__, tuple(sorted(step.axes)), copies(step, 1))
        if key not in kind_of:
            kind_of[key] = len(kinds)
            kinds.append(step)
        edge_kind.append(kind_of[key])
    ends = np.array(list(steps), dtype=np.int64).reshape(-1, 2)
    return Space(
        num_axes=num_axes,
        dims=dims,
        states=states,
        index=index,
        lists=lists,
        list_index=np.array(
            [[place[axes] for axes in cuts] for cuts, _ in states], dtype=np.int64
        ).reshape(len(states), dims),
        nothing_pending=np.array(
            [i for i, (_, left) in enumerate(states) if not left], dtype=np.int64
        ),
        edge_from=ends[:, 0],
        edge_to=ends[:, 1],
        edge_kind=np.array(edge_kind, dtype=np.int64),
        kinds=kinds,
        steps=steps,
    )


def _order(state: State) -> tuple[Any, ...]:
    cuts, pending = state
    return len(pending), pending, sum(map(len, cuts)), cuts

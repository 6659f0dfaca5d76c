"""Costs of many pairs of layouts at once: every distinct pair of specs of a tensor priced once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.errors import LayoutError
from shardspec.layout.graph import state_of
from shardspec.layout.layout import Layout
from shardspec.layout.pricing import TIE_SECONDS, prices_of
from shardspec.layout.search import all_distances
from shardspec.layout.space import MAX_STATES, count_states
from shardspec.mesh import DeviceMesh

__all__ = ["pair_costs"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_MOST_SPREAD: Final = 1 << 26
"""Numbers that are told apart by a table of all between the smallest and the largest."""


def pair_costs(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    model_of: Callable[[DeviceMesh], CostModel],
    cost: Callable[[Layout, Layout], float],
) -> Floats:
    """Return the seconds from each source to the target beside it; see `LayoutConverter.costs`.

    Parameters
    ----------
    sources, targets
        Equally many.
    model_of
        Returns the prices on a mesh.
    cost
        Prices one pair; for those between two meshes, and of tensors with too many layouts.
    """
    if len(sources) != len(targets):
        raise LayoutError(f"{len(sources)} sources for {len(targets)} targets; give pairs")
    if not len(sources):
        return np.zeros(0)
    (here, at_here), (there, at_there) = _distinct(sources), _distinct(targets)
    tensors, meshes = _Ids(), _Ids()
    tensor_here, tensor_there = (
        tensors.of((x.global_shape, x.dtype) for x in e) for e in (here, there)
    )
    wrong = tensor_here[at_here] != tensor_there[at_there]
    if wrong.any():
        edge = int(wrong.argmax())
        raise LayoutError(
            f"edge {edge} is between two tensors: {sources[edge]} and {targets[edge]}; both ends "
            "need one shape and dtype"
        )
    # Pairs are numbered tensor by tensor, so that few numbers stay unused.
    row, (column, columns) = _places(tensor_here)[0], _places(tensor_there)
    block = np.bincount(tensor_here, minlength=len(columns)) * columns
    first = (np.cumsum(block) - block)[tensor_here] + row * columns[tensor_here]
    pairs, at = _numbered(first[at_here] + column[at_there])
    some = np.empty(len(pairs), dtype=np.int64)
    some[at] = np.arange(len(at))
    left, right = at_here[some], at_there[some]
    mesh_here, mesh_there = (meshes.of(x.mesh for x in ends) for ends in (here, there))
    states = [state_of(layout.spec) for layout in there]
    keys = [(x.mesh, x.global_shape, x.dtype, state_of(x.spec)[1]) for x in here]
    group = _Ids().of(keys)[left]
    group[mesh_here[left] != mesh_there[right]] = -1
    seconds = np.empty(len(pairs))
    order = np.argsort(group, kind="stable")
    for numbers in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        starts, row = np.unique(left[numbers], return_inverse=True)
        ends, column = np.unique(right[numbers], return_inverse=True)
        mesh, shape, dtype, pending = keys[starts[0]]
        known = None
        if (
            group[numbers[0]] >= 0
            and count_states(mesh.ndim, len(shape), len(pending)) <= MAX_STATES
        ):
            prices = prices_of(mesh.shape, pending, shape, dtype, model_of(mesh))
            index = prices.space.index
            goals = np.array([index.get(states[end], -1) for end in ends.tolist()])
            if prices.routed and goals.min() >= 0:
                rows = np.array([index[state_of(here[n].spec)] for n in starts.tolist()])
                known = all_distances(prices.cheapest() - TIE_SECONDS, rows)[:, goals]
        if known is None:
            found = [
                cost(here[a], there[b]) for a, b in zip(left[numbers], right[numbers], strict=True)
            ]
            seconds[numbers] = found
        else:
            seconds[numbers] = known[row, column]
    every: Floats = seconds[at]
    return every


class _Ids:
    """Numbers for values, the same for equal ones."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def of(self, values: Iterable[object]) -> Ints:
        known = self._known
        return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)


def _places(groups: Ints) -> tuple[Ints, Ints]:
    """Return the place of each one among those of its group, and how many each group has."""
    counts = np.bincount(groups)
    order = np.argsort(groups, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places, counts


def _distinct(layouts: Sequence[Layout]) -> tuple[list[Layout], Ints]:
    """Return the distinct layouts, and which of them each one is.

    Millions of edges are among a few objects; so these are told apart by identity before they are
    compared.
    """
    ids = np.fromiter(map(id, layouts), dtype=np.int64, count=len(layouts)) >> 3
    values, at = _numbered(ids)
    some = np.empty(len(values), dtype=np.int64)
    some[at] = np.arange(len(ids))
    places: dict[Layout, int] = {}
    same = np.array([places.setdefault(layouts[n], len(places)) for n in some.tolist()])
    return list(places), at if len(places) == len(same) else same[at]


def _numbered(values: Ints) -> tuple[Ints, Ints]:
    """Return the distinct numbers, ascending, and the place of each one among them."""
    least = values.min()
    spread = int(values.max() - least) + 1
    if spread > _MOST_SPREAD:
        distinct, at = np.unique(values, return_inverse=True)
        return distinct, at
    offsets = values - least
    there = np.zeros(spread, dtype=bool)
    there[offsets] = True
    distinct = np.flatnonzero(there)
    places = np.empty(spread, dtype=np.int64)
    places[distinct] = np.arange(len(distinct))
    return distinct + least, places[offsets]

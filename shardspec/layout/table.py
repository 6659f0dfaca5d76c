"""Computes many costs at once: between all layouts of a tensor, or for a list of pairs.

`LayoutConverter.cost_table` and `LayoutConverter.costs` show examples.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from math import prod
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import bytes_received
from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import item_bytes
from shardspec.errors import AxisError, LayoutError
from shardspec.layout.graph import (
    MAX_STATES,
    TIE_SECONDS,
    Floats,
    Ints,
    PartialState,
    distances,
    is_symmetric,
    orbits,
    spec_of,
    state_of,
)
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.pricing import Prices, alike_axes, prices_of, states_of
from shardspec.layout.routed import intervals, shared
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import bytes_text, html_table, seconds_text

_End = TypeVar("_End")
"""Any object that `layout_of` maps to a layout."""

_MAX_BYTES: Final = 1 << 58
"""The largest tensor: sums over a few steps still fit in 64 bits."""
_MAX_WORK: Final = 3e8
"""The limit of `prices_of` for a table: about a minute."""
_MAX_LAYOUTS: Final = 3000
_MAX_SHOWN: Final = 64
"""The most layouts in a table of a notebook."""
_BYTES_EACH: Final = 200
"""Memory per pair of layouts while a table is computed."""
_MAX_SPREAD: Final = 1 << 26
"""The largest range of numbers for which `_numbered` uses a table instead of sorting."""


@dataclass(frozen=True, eq=False, repr=False)
class CostTable:
    """The costs of the cheapest plans between all layouts of one tensor.

    Arrays are (layouts, layouts): rows are sources, columns are targets.
    """

    labels: tuple[str, ...]
    """The specs of rows and columns in canonical notation, with axis names if the mesh has any."""
    seconds: npt.NDArray[np.float64]
    """Seconds of the plan; inf if the target has a pending reduction that the source lacks."""
    mesh_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    bytes_received: npt.NDArray[np.int64]
    """Bytes that the busiest device receives in a cheapest plan; -1 without a plan."""
    peak_bytes: npt.NDArray[np.int64]
    """The most bytes on a device at once; -1 without a plan."""
    local_bytes: npt.NDArray[np.int64]
    """Bytes of the largest shard of each layout."""
    axis_names: tuple[str, ...] | None = None
    """The names of the mesh axes; `cost` and `index` accept them in specs."""

    def __repr__(self) -> str:
        return (
            f"CostTable({len(self.labels)} layouts of {list(self.global_shape)} {self.dtype} on a "
            f"mesh of shape {self.mesh_shape})"
        )

    def _repr_html_(self) -> str:
        """Show the seconds in notebooks, with darker cells for higher ones."""
        if len(self.labels) > _MAX_SHOWN:
            return f"<code>{escape(repr(self))}</code>"
        finite = np.where(np.isfinite(self.seconds), self.seconds, 0.0)
        rows = [
            [label, *(seconds_text(each) if np.isfinite(each) else "–" for each in row)]
            for label, row in zip(self.labels, self.seconds.tolist(), strict=True)
        ]
        shades = (finite / (finite.max() or 1.0)).tolist()
        return html_table(repr(self), ["from ↓ to →", *self.labels], rows, shades)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {label: place for place, label in enumerate(self.labels)}

    def cost(self, source: SpecLike, target: SpecLike) -> float:
        """Return the seconds from one spec to another; `LayoutError` if one is not in the table."""
        return float(self.seconds[self.index(source), self.index(target)])

    def index(self, spec: SpecLike) -> int:
        """Return the row and column of a spec, with axes by number or by name.

        Raises `LayoutError` if it is not in the table.
        """
        place = self._places.get(spec) if isinstance(spec, str) else None
        if place is not None:
            return place
        mesh = DeviceMesh(range(prod(self.mesh_shape)), self.mesh_shape, axis_names=self.axis_names)
        try:
            layout = Layout(mesh, spec, self.global_shape, self.dtype)
            return self._places[str(layout.labelled_spec)]
        except (AxisError, LayoutError, KeyError) as error:
            why = str(error)
            if isinstance(error, KeyError):
                why = "pending reductions are in it where cost_table is given partial="
        raise LayoutError(
            f"spec {spec} is not in the table of {len(self.labels)} layouts on a mesh of "
            f"shape {self.mesh_shape}: {why}"
        )


def cost_table(
    mesh: DeviceMesh,
    global_shape: tuple[int, ...],
    dtype: object,
    model: CostModel,
    partial: Sequence[ReduceOp] = (),
) -> CostTable:
    """Price every conversion of a tensor; see `LayoutConverter.cost_table`."""
    if isinstance(partial, str) or len(partial) > 1:
        raise LayoutError(
            f"partial={partial!r}: a table has one kind of pending reduction; give partial=('sum',)"
        )
    pending: PartialState = tuple((axis, op) for op in partial for axis in range(mesh.ndim))
    spec = ShardingSpec(len(global_shape), partial=dict(pending))
    replicated = Layout(mesh, spec, global_shape, dtype)
    count = states_of(replicated)
    if count > _MAX_LAYOUTS:
        raise LayoutError(
            f"a mesh of {mesh.ndim} axes and a tensor of {len(global_shape)} dims have {count:,} "
            f"layouts, more than the {_MAX_LAYOUTS:,} of a table: it would take "
            f"{bytes_text(_BYTES_EACH * count * count)}; ask for single costs"
        )
    prices = table_prices(replicated, model)
    specs = map(spec_of, prices.space.states)
    labels = tuple(str(replicated.with_spec(spec).labelled_spec) for spec in specs)
    seconds, received, peak = _along_paths(prices, replicated, model)
    return CostTable(
        labels,
        seconds,
        mesh.shape,
        replicated.global_shape,
        replicated.dtype,
        received,
        peak,
        prices.local_bytes.astype(np.int64),
        mesh.axis_names,
    )


def table_prices(tensor: Layout, model: CostModel) -> Prices:
    """Return the prices of all moves, permute and exchange included.

    Raises `LayoutError` if the tensor is too large or the moves are too many.
    """
    if prod(tensor.global_shape) * item_bytes(tensor.dtype) > _MAX_BYTES:
        raise LayoutError(
            f"{list(tensor.global_shape)} {tensor.dtype} has more than 2^58 bytes, too many for a "
            "table; ask for single costs"
        )
    prices, count = prices_of(tensor, model, _MAX_WORK), states_of(tensor)
    if not prices.routed:
        raise LayoutError(
            f"a table of {count:,} layouts on the {tensor.mesh.size()} devices of mesh "
            f"{tensor.mesh} would take {bytes_text(_BYTES_EACH * count * count)} and many minutes; "
            "ask for single costs"
        )
    return prices


def _along_paths(prices: Prices, tensor: Layout, model: CostModel) -> tuple[Floats, Ints, Ints]:
    """Return seconds, received bytes and peak bytes of the cheapest paths between all states.

    If dims divide evenly, one search serves all specs with equal prices.
    """
    joined, space = prices.with_slices_joined(), prices.space
    move, count = joined.seconds + TIE_SECONDS, len(space.states)
    every = sources = place = np.arange(count)
    relabeled = np.broadcast_to(every, (count, count))
    if is_symmetric(tensor.global_shape, tensor.mesh.shape):
        stands_for, relabeled = orbits(space, alike_axes(model), first=model.copy_s > 0)
        sources, place = np.unique(stands_for, return_inverse=True)
    received_in = bytes_of_moves(joined, tensor)
    local = prices.local_bytes.astype(np.int64)
    best = distances(move, sources)
    seconds, received = np.zeros(best.shape), np.zeros(best.shape, dtype=np.int64)
    peak = np.repeat(local[sources, None], count, axis=1)
    for row, source in enumerate(sources.tolist()):
        last = _last_moves(move, best[row], source)
        of_move = move[last, every] - TIE_SECONDS, received_in(last), local[last] + local
        at = np.where(np.isfinite(best[row]), every, source)
        for _ in range(count):
            goal = np.flatnonzero(at != source)
            if not goal.size:
                break
            state = at[goal]
            seconds[row, goal] += of_move[0][state]
            received[row, goal] += of_move[1][state]
            peak[row, goal] = np.maximum(peak[row, goal], of_move[2][state])
            at[goal] = last[state]
    nowhere = ~np.isfinite(best)
    seconds[nowhere], received[nowhere], peak[nowhere] = np.inf, -1, -1

    def of_all(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.take_along_axis(rows[place], relabeled, axis=1)

    return of_all(seconds), of_all(received), of_all(peak)


def _last_moves(move: Floats, best: Floats, source: int) -> Ints:
    """Return the predecessor of every state on a cheapest path from the source."""
    last = np.full(len(best), source)
    further = np.flatnonzero(best < move[source])
    further = further[further != source]
    if further.size:
        last[further] = (best[:, None] + move[:, further]).argmin(axis=0)
    return last


def bytes_of_moves(prices: Prices, tensor: Layout) -> Callable[[Ints], Ints]:
    """Return a function from moves to the bytes that the busiest device receives in each.

    Its argument lists the moves by their sources: entry ``s`` moves to state ``s``.
    """
    space, mesh_shape = prices.space, tensor.mesh.shape
    local, lists = prices.local_bytes.astype(np.int64), space.list_index
    every = np.arange(len(local))
    sides = [intervals(mesh_shape, space.lists, size) for size in tensor.global_shape]
    of_steps = np.zeros(prices.seconds.shape, dtype=np.int64)
    received_once = cache(bytes_received)  # many states have the same step and bytes
    for pair, step in prices.steps.items():
        of_steps[pair] = received_once(step, mesh_shape, int(local[pair[0]]))

    def received(source: Ints) -> Ints:
        num_bytes: Ints = of_steps[source, every]
        routed = np.flatnonzero(prices.kind[source, every])
        common = target = np.ones((len(routed), 1), dtype=np.int64)
        for dim, (lo, hi) in enumerate(sides):
            a, b = lists[source[routed], dim], lists[routed, dim]
            common = common * shared((lo[a], hi[a]), (lo[b], hi[b]))
            target = target * (hi[b] - lo[b])
        num_bytes[routed] = np.max(target - common, axis=-1, initial=0) * item_bytes(tensor.dtype)
        return num_bytes

    return received


def pair_costs(
    sources: Sequence[_End],
    targets: Sequence[_End],
    model_of: Callable[[DeviceMesh], CostModel],
    cost: Callable[[Layout, Layout], float],
    layout_of: Callable[[_End], Layout],
) -> Floats:
    """Return the seconds of each pair, from matrices of prices if possible, else by `cost`.

    `layout_of` is called once per distinct object; see `LayoutConverter.costs`.
    """
    if len(sources) != len(targets):
        raise LayoutError(f"{len(sources)} sources for {len(targets)} targets; give pairs")
    if not len(sources):
        return np.zeros(0)
    layouts, layout_index = _distinct([*sources, *targets], layout_of)
    source_index, target_index = layout_index[: len(sources)], layout_index[len(sources) :]
    tensors = _ids((x.global_shape, x.dtype) for x in layouts)
    wrong = tensors[source_index] != tensors[target_index]
    if wrong.any():
        edge = int(wrong.argmax())
        raise LayoutError(
            f"pair {edge} is of two tensors: {sources[edge]} and {targets[edge]}; give both the "
            "same shape and dtype"
        )
    pairs, at = _numbered(source_index * len(layouts) + target_index)
    source_index, target_index = np.divmod(pairs, len(layouts))
    # Pairs of one tensor with the same pending reductions share one matrix of prices.
    meshes = _ids(x.mesh for x in layouts)
    spaces = _ids((x.mesh, x.global_shape, x.dtype, x.spec.partials) for x in layouts)
    groups = np.where(meshes[source_index] == meshes[target_index], spaces[source_index], -1)
    seconds = np.empty(len(pairs))
    for group in np.unique(groups):
        numbers = np.flatnonzero(groups == group)
        starts, row = np.unique(source_index[numbers], return_inverse=True)
        goals, column = np.unique(target_index[numbers], return_inverse=True)
        matrix = None
        if group >= 0:
            matrix = _from_prices(
                [layouts[n] for n in starts], [layouts[n] for n in goals], model_of
            )
        if matrix is not None:
            seconds[numbers] = matrix[row, column]
            numbers = numbers[~np.isfinite(seconds[numbers])]
        each = zip(source_index[numbers], target_index[numbers], strict=True)
        seconds[numbers] = [cost(layouts[a], layouts[b]) for a, b in each]
    every: Floats = seconds[at]
    return every


def _from_prices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    model_of: Callable[[DeviceMesh], CostModel],
) -> Floats | None:
    """Return array [source, target] of seconds for one tensor; None if no prices are tabulated."""
    tensor = sources[0]
    if states_of(tensor) > MAX_STATES or not all(x.spec.is_plain for x in (*sources, *targets)):
        return None
    prices = prices_of(tensor, model_of(tensor.mesh))
    if not prices.routed:
        return None
    goals = np.array([prices.space.index.get(state_of(target.spec), -1) for target in targets])
    best: Floats = distances(prices.seconds, [*map(prices.state, sources)])[:, goals]
    best[:, goals < 0] = np.inf  # a pending reduction that the source lacks
    return best


def _ids(values: Iterable[object]) -> Ints:
    """Return an integer per value; equal values have equal integers."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


def _distinct(
    values: Sequence[_End], layout_of: Callable[[_End], Layout]
) -> tuple[list[Layout], Ints]:
    """Return the distinct layouts, and the index of each object's layout among them.

    Objects are compared by identity first, for speed.
    """
    ids, at = _numbered(np.fromiter(map(id, values), np.int64, count=len(values)) >> 3)
    examples = np.empty(len(ids), dtype=np.int64)
    examples[at] = np.arange(len(at))
    objects = [layout_of(values[n]) for n in examples.tolist()]
    return list(dict.fromkeys(objects)), _ids(objects)[at]


def _numbered(values: Ints) -> tuple[Ints, Ints]:
    """Return the distinct numbers, ascending, and the index of each value among them."""
    least, most = int(values.min()), int(values.max())
    if most - least >= _MAX_SPREAD:
        distinct, at = np.unique(values, return_inverse=True)
        return distinct, at
    values = values - least
    present = np.zeros(most - least + 1, dtype=bool)
    present[values] = True
    distinct, places = np.flatnonzero(present), np.empty(len(present), dtype=np.int64)
    places[distinct] = np.arange(len(distinct))
    return distinct + least, places[values]

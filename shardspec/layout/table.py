"""Costs of many conversions at once, as arrays: of all layouts of a tensor, and of given pairs."""

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
"""What has a layout."""

_MAX_BYTES: Final = 1 << 58
"""Of a tensor, so that the sums of a few steps fit in 64 bits."""
_MAX_WORK: Final = 3e8
"""As `shardspec.layout.pricing` counts it: about a minute."""
_MAX_LAYOUTS: Final = 3000
_MAX_SHOWN: Final = 64
"""Layouts whose costs a notebook shows."""
_BYTES_EACH: Final = 200
"""That a pair of layouts takes while a table is made."""
_MAX_SPREAD: Final = 1 << 26
"""Numbers that are told apart by a table of all between the smallest and the largest."""


@dataclass(frozen=True, eq=False, repr=False)
class CostTable:
    """What the cheapest plan between every two layouts of one tensor costs.

    In the arrays (layouts, layouts) a row is a source and a column a target.
    """

    labels: tuple[str, ...]
    """The specs in canonical notation, axes by name where the mesh has names. They label rows and
    columns alike."""
    seconds: npt.NDArray[np.float64]
    """inf where there is no plan: to what is pending and is not so at the source."""
    mesh_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    bytes_received: npt.NDArray[np.int64]
    """By the busiest device in a cheapest plan; -1 where there is no plan."""
    peak_bytes: npt.NDArray[np.int64]
    """The most that a device holds at once; -1 where there is no plan."""
    local_bytes: npt.NDArray[np.int64]
    """Per layout the bytes of the largest shard."""
    axis_names: tuple[str, ...] | None = None
    """Of the mesh; specs may be asked for by these."""

    def __repr__(self) -> str:
        return (
            f"CostTable({len(self.labels)} layouts of {list(self.global_shape)} {self.dtype} on a "
            f"mesh of shape {self.mesh_shape})"
        )

    def _repr_html_(self) -> str:
        """Show the seconds where notebooks show the table, darker where they are more."""
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
        """Return the row and column of a spec, axes by number or by name; raises as `cost`."""
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
    whole = Layout(mesh, spec, global_shape, dtype)
    count = states_of(whole)
    if count > _MAX_LAYOUTS:
        raise LayoutError(
            f"a mesh of {mesh.ndim} axes and a tensor of {len(global_shape)} dims have {count:,} "
            f"layouts, more than the {_MAX_LAYOUTS:,} that a table holds: it would take "
            f"{bytes_text(_BYTES_EACH * count * count)}; ask for single costs"
        )
    prices = table_prices(whole, model)
    specs = map(spec_of, prices.space.states)
    labels = tuple(str(whole.with_spec(spec).labelled_spec) for spec in specs)
    seconds, received, peak = _along_paths(prices, whole, model)
    return CostTable(
        labels,
        seconds,
        mesh.shape,
        whole.global_shape,
        whole.dtype,
        received,
        peak,
        prices.local_bytes.astype(np.int64),
        mesh.axis_names,
    )


def table_prices(whole: Layout, model: CostModel) -> Prices:
    """Price all moves of a tensor, permute and exchange too; `LayoutError` if too many."""
    if prod(whole.global_shape) * item_bytes(whole.dtype) > _MAX_BYTES:
        raise LayoutError(
            f"prices of all conversions count bytes in 64 bits, so they are for tensors of up to "
            f"2^58 bytes, not for {list(whole.global_shape)} {whole.dtype}; ask for single costs"
        )
    prices, count = prices_of(whole, model, _MAX_WORK), states_of(whole)
    if not prices.routed:
        raise LayoutError(
            f"prices between {count:,} layouts on the {whole.mesh.size()} devices of mesh "
            f"{whole.mesh} would take {bytes_text(_BYTES_EACH * count * count)} and many minutes; "
            "ask for single costs"
        )
    return prices


def _along_paths(prices: Prices, whole: Layout, model: CostModel) -> tuple[Floats, Ints, Ints]:
    """Search from one spec of each kind where dims divide evenly, else from every spec."""
    joined, space = prices.with_slices_joined(), prices.space
    move, count = joined.seconds + TIE_SECONDS, len(space.states)
    every = sources = place = np.arange(count)
    relabelled = np.broadcast_to(every, (count, count))
    if is_symmetric(whole.global_shape, whole.mesh.shape):
        stands_for, relabelled = orbits(space, alike_axes(model), first=model.copy_s > 0)
        sources, place = np.unique(stands_for, return_inverse=True)
    received_in = bytes_of_moves(joined, whole)
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
            here = at[goal]
            seconds[row, goal] += of_move[0][here]
            received[row, goal] += of_move[1][here]
            peak[row, goal] = np.maximum(peak[row, goal], of_move[2][here])
            at[goal] = last[here]
    nowhere = ~np.isfinite(best)
    seconds[nowhere], received[nowhere], peak[nowhere] = np.inf, -1, -1

    def of_all(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.take_along_axis(rows[place], relabelled, axis=1)

    return of_all(seconds), of_all(received), of_all(peak)


def _last_moves(move: Floats, best: Floats, source: int) -> Ints:
    """Return per state the one before it on a cheapest path from the source."""
    last = np.full(len(best), source)
    further = np.flatnonzero(best < move[source])
    further = further[further != source]
    if further.size:
        last[further] = (best[:, None] + move[:, further]).argmin(axis=0)
    return last


def bytes_of_moves(prices: Prices, whole: Layout) -> Callable[[Ints], Ints]:
    """Return what tells the bytes the busiest device receives in moves from given states to all."""
    space, mesh_shape = prices.space, whole.mesh.shape
    local, lists = prices.local_bytes.astype(np.int64), space.list_index
    every = np.arange(len(local))
    sides = [intervals(mesh_shape, space.lists, size) for size in whole.global_shape]
    of_steps = np.zeros(prices.seconds.shape, dtype=np.int64)
    known = cache(bytes_received)  # many states have the same step and bytes
    for ends, step in prices.steps.items():
        of_steps[ends] = known(step, mesh_shape, int(local[ends[0]]))

    def received(source: Ints) -> Ints:
        found: Ints = of_steps[source, every]
        routed = np.flatnonzero(prices.kind[source, every])
        kept = wanted = np.ones((len(routed), 1), dtype=np.int64)
        for dim, (lo, hi) in enumerate(sides):
            a, b = lists[source[routed], dim], lists[routed, dim]
            kept = kept * shared((lo[a], hi[a]), (lo[b], hi[b]))
            wanted = wanted * (hi[b] - lo[b])
        found[routed] = np.max(wanted - kept, axis=-1, initial=0) * item_bytes(whole.dtype)
        return found

    return received


def pair_costs(
    sources: Sequence[_End],
    targets: Sequence[_End],
    model_of: Callable[[DeviceMesh], CostModel],
    cost: Callable[[Layout, Layout], float],
    layout_of: Callable[[_End], Layout],
) -> Floats:
    """Return the seconds of pairs, by `cost` where no matrix has them; see `LayoutConverter`.

    What layouts they are is asked once of each object.
    """
    if len(sources) != len(targets):
        raise LayoutError(f"{len(sources)} sources for {len(targets)} targets; give pairs")
    if not len(sources):
        return np.zeros(0)
    layouts, ends = _distinct([*sources, *targets], layout_of)
    left, right = ends[: len(sources)], ends[len(sources) :]
    tensors = _ids((x.global_shape, x.dtype) for x in layouts)
    wrong = tensors[left] != tensors[right]
    if wrong.any():
        edge = int(wrong.argmax())
        raise LayoutError(
            f"edge {edge} is between two tensors: {sources[edge]} and {targets[edge]}; both ends "
            "need one shape and dtype"
        )
    pairs, at = _numbered(left * len(layouts) + right)
    left, right = np.divmod(pairs, len(layouts))
    # Those of one tensor with the same reductions pending are looked up in one matrix of prices.
    meshes = _ids(x.mesh for x in layouts)
    alike = _ids((x.mesh, x.global_shape, x.dtype, x.spec.partials) for x in layouts)
    groups = np.where(meshes[left] == meshes[right], alike[left], -1)
    seconds = np.empty(len(pairs))
    for group in np.unique(groups):
        numbers = np.flatnonzero(groups == group)
        starts, row = np.unique(left[numbers], return_inverse=True)
        goals, column = np.unique(right[numbers], return_inverse=True)
        found = None
        if group >= 0:
            found = _from_prices(
                [layouts[n] for n in starts], [layouts[n] for n in goals], model_of
            )
        if found is not None:
            seconds[numbers] = found[row, column]
            numbers = numbers[~np.isfinite(seconds[numbers])]
        each = zip(left[numbers], right[numbers], strict=True)
        seconds[numbers] = [cost(layouts[a], layouts[b]) for a, b in each]
    every: Floats = seconds[at]
    return every


def _from_prices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    model_of: Callable[[DeviceMesh], CostModel],
) -> Floats | None:
    """Return the seconds from all to all of one tensor; None where these are not in a matrix."""
    tensor = sources[0]
    if states_of(tensor) > MAX_STATES or not all(x.spec.is_plain for x in (*sources, *targets)):
        return None
    prices = prices_of(tensor, model_of(tensor.mesh))
    if not prices.routed:
        return None
    goals = np.array([prices.space.index.get(state_of(target.spec), -1) for target in targets])
    best: Floats = distances(prices.seconds, [*map(prices.state, sources)])[:, goals]
    best[:, goals < 0] = np.inf  # what is pending there is not so at the source
    return best


def _ids(values: Iterable[object]) -> Ints:
    """Return numbers for values, the same for equal ones."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values])


def _distinct(
    ends: Sequence[_End], layout_of: Callable[[_End], Layout]
) -> tuple[list[Layout], Ints]:
    """Return the distinct layouts, and which of them each one is; by identity first, for speed."""
    ids, at = _numbered(np.fromiter(map(id, ends), np.int64, count=len(ends)) >> 3)
    some = np.empty(len(ids), dtype=np.int64)
    some[at] = np.arange(len(at))
    objects = [layout_of(ends[n]) for n in some.tolist()]
    return list(dict.fromkeys(objects)), _ids(objects)[at]


def _numbered(values: Ints) -> tuple[Ints, Ints]:
    """Return the distinct numbers, ascending, and the place of each one among them."""
    least, most = int(values.min()), int(values.max())
    if most - least >= _MAX_SPREAD:
        distinct, at = np.unique(values, return_inverse=True)
        return distinct, at
    values = values - least
    there = np.zeros(most - least + 1, dtype=bool)
    there[values] = True
    distinct, places = np.flatnonzero(there), np.empty(len(there), dtype=np.int64)
    places[distinct] = np.arange(len(distinct))
    return distinct + least, places[values]

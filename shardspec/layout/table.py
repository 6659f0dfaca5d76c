"""Costs of many conversions at once, as arrays: of all layouts of a tensor, and of given pairs."""

import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import kind_of, share
from shardspec.comm.curves import whole as whole_of
from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import item_bytes
from shardspec.errors import AxisError, LayoutError
from shardspec.layout.graph import (
    MAX_STATES,
    Floats,
    Ints,
    PartialState,
    count_states,
    is_symmetric,
    spec_of,
    state_of,
)
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.pricing import TIE_SECONDS, Prices, alike_axes, prices_of
from shardspec.layout.routed import geometry_of, shared
from shardspec.layout.search import all_distances
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.text import bytes_text

_MOST_WORK: Final = 3e8
"""As `shardspec.layout.pricing` counts it: about a minute."""
_MOST_LAYOUTS: Final = 3000
_BYTES_EACH: Final = 200
"""That a pair of layouts takes while a table is made."""
_MOST_SPREAD: Final = 1 << 26
"""Numbers that are told apart by a table of all between the smallest and the largest."""

_ARRAYS: Final = {
    "labels": ("U", 1),
    "seconds": ("f", 2),
    "mesh_shape": ("i", 1),
    "global_shape": ("i", 1),
    "dtype": ("U", 0),
    "bytes_received": ("i", 2),
    "peak_bytes": ("i", 2),
    "local_bytes": ("i", 1),
    "axis_names": ("U", 1),
}
"""Kind and number of dims of what is saved."""
_BY_LAYOUT: Final = {"labels", "seconds", "bytes_received", "peak_bytes", "local_bytes"}


@dataclass(frozen=True, eq=False)
class CostTable:
    """What the cheapest plan between every two layouts of one tensor costs.

    In the arrays (layouts, layouts) a row is a source and a column a target.
    """

    labels: tuple[str, ...]
    """The specs in canonical notation; axes by number. They label rows and columns alike."""
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
    _places: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places = {label: place for place, label in enumerate(self.labels)}
        object.__setattr__(self, "_places", places)

    def cost(self, source: SpecLike, target: SpecLike) -> float:
        """Return the seconds from one spec to another; `LayoutError` if one is not in the table."""
        return float(self.seconds[self.index(source), self.index(target)])

    def index(self, spec: SpecLike) -> int:
        """Return the row and column of a spec, axes by number or by name; raises as `cost`."""
        place = self._places.get(spec) if isinstance(spec, str) else None
        if place is None:
            mesh = DeviceMesh(
                range(prod(self.mesh_shape)), self.mesh_shape, axis_names=self.axis_names
            )
            why = "pending reductions are in it where cost_table is given partial="
            try:
                place = self._places.get(
                    str(Layout(mesh, spec, self.global_shape, self.dtype).spec)
                )
            except (AxisError, LayoutError) as error:
                why = str(error)
            if place is None:
                raise LayoutError(
                    f"spec {spec} is not in the table of {len(self.labels)} layouts on a mesh of "
                    f"shape {self.mesh_shape}: {why}"
                )
        return place

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as a compressed numpy archive; the name should end in ``.npz``.

        It appears under its name when it is complete, and replaces what was there.
        """
        kinds = {"U": np.str_, "f": np.float64, "i": np.int64}
        arrays: dict[str, Any] = {}
        for name, (kind, _) in _ARRAYS.items():
            value = getattr(self, name)
            arrays[name] = np.array(() if value is None else value, kinds[kind])
        goal = Path(path)
        unfinished = goal.with_name(f".{goal.name}.{token_hex(4)}.tmp")
        try:
            with open(unfinished, "xb") as file:
                np.savez_compressed(file, **arrays)
            unfinished.replace(goal)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CostTable":
        """Read a table that `save` wrote; `LayoutError` if the file is not such a table."""
        try:
            return cls(*_contents(path))
        except Exception as error:  # numpy and zipfile raise a dozen kinds, each for a damage
            raise LayoutError(
                f"{os.fspath(path)} is not a saved cost table: {' '.join(str(error).split())}; "
                "make it again with LayoutConverter.cost_table and save"
            ) from None


def _contents(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    """Return the fields of a saved table, each checked; raises whatever tells that one is wrong."""
    # numpy leaves a damaged file open that it opened itself.
    with open(path, "rb") as raw:
        # A file that is no archive would be taken for a pickle or a single array.
        if not zipfile.is_zipfile(raw):
            raise ValueError("it is no zip archive")
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as file:
            found = {name: file[name] for name in _ARRAYS}
    for name, (kind, ndim) in _ARRAYS.items():
        array = found[name]
        if not isinstance(array, np.ndarray) or array.dtype.kind != kind or array.ndim != ndim:
            raise ValueError(f"its {name} are not what a table has")
    labels = tuple(found["labels"].tolist())
    for name, (_, ndim) in _ARRAYS.items():
        shape = found[name].shape
        if name in _BY_LAYOUT and shape != (len(set(labels)),) * ndim:
            raise ValueError(f"{len(labels)} labels do not fit an array of shape {shape}")
    seconds = found["seconds"].astype(np.float64)
    if not (seconds >= 0).all():
        raise ValueError("some of its seconds are negative or no numbers")
    mesh_shape, global_shape = (tuple(found[n].tolist()) for n in ("mesh_shape", "global_shape"))
    numbers = (found[n].astype(np.int64) for n in ("bytes_received", "peak_bytes", "local_bytes"))
    names = tuple(found["axis_names"].tolist()) or None
    return labels, seconds, mesh_shape, global_shape, str(found["dtype"]), *numbers, names


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
    count = count_states(mesh.ndim, len(global_shape), len(pending))
    if count > _MOST_LAYOUTS:
        raise LayoutError(
            f"a mesh of {mesh.ndim} axes and a tensor of {len(global_shape)} dims have {count:,} "
            f"layouts, more than the {_MOST_LAYOUTS:,} that a table holds: it would take "
            f"{bytes_text(_BYTES_EACH * count * count)}; ask for single costs"
        )
    prices = prices_of(whole, model, _MOST_WORK)
    if not prices.routed:
        raise LayoutError(
            f"a table for the {mesh.size} devices of mesh {mesh} and {count:,} layouts would take "
            f"{bytes_text(_BYTES_EACH * count * count)} and many minutes; ask for single costs"
        )
    labels = tuple(str(spec_of(state)) for state in prices.space.states)
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


def _along_paths(prices: Prices, whole: Layout, model: CostModel) -> tuple[Floats, Ints, Ints]:
    """Search from one spec of each kind where dims divide evenly, else from every spec."""
    joined, space = prices.with_slices_joined(), prices.space
    move, count = joined.cheapest(), len(space.states)
    place, relabelled = np.arange(count), np.broadcast_to(np.arange(count), (count, count))
    sources = place
    if is_symmetric(whole.global_shape, whole.mesh.shape):
        alike = alike_axes(whole.mesh.shape, model)
        stands_for, relabelled = space.orbits(alike, first=model.copy_s > 0)
        sources, place = np.unique(stands_for, return_inverse=True)
    moved = _Moved(joined, whole, move)
    local = prices.local_bytes.astype(np.int64)
    best = all_distances(move, sources)
    seconds = np.full((len(sources), count), np.inf)
    received, peak = np.full((2, len(sources), count), -1, dtype=np.int64)
    for row, source in enumerate(sources.tolist()):
        reached = np.flatnonzero(np.isfinite(best[row]))
        last = _last_moves(move, best[row], source)
        each = moved.bytes(last, np.arange(count))
        at = reached.copy()
        seconds[row, reached], received[row, reached], peak[row, reached] = 0.0, 0, local[source]
        for _ in range(count):
            going = at != source
            if not going.any():
                break
            goal, here = reached[going], at[going]
            seconds[row, goal] += move[last[here], here] - TIE_SECONDS
            received[row, goal] += each[here]
            live = local[last[here]] + local[here]
            peak[row, goal] = np.maximum(peak[row, goal], live)
            at[going] = last[here]

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


class _Moved:
    """Bytes that the busiest device receives in the cheapest single move between two states."""

    def __init__(self, prices: Prices, whole: Layout, move: Floats) -> None:
        space, mesh_shape = prices.space, whole.mesh.shape
        self._local, self._lists = prices.local_bytes.astype(np.int64), space.list_index
        # As a fraction of what is held before.
        self._parts, self._wholes = np.zeros((2, *move.shape), dtype=np.int64)
        known: dict[tuple[str | None, int], tuple[int, int]] = {}
        for ends, step in space.steps.items():
            kind, n = kind_of(step), prod(mesh_shape[axis] for axis in step.axes)
            if (kind, n) not in known:
                part = share(kind, n) * whole_of(kind, n) if kind else Fraction(0)
                known[kind, n] = part.as_integer_ratio()
            self._parts[ends], self._wholes[ends] = known[kind, n]
        # A collective is taken where it is as cheap.
        self._wholes[prices.collective > (move - TIE_SECONDS) * (1 + 1e-12)] = 0
        geometry = geometry_of(mesh_shape)
        self._sides = [geometry.intervals(space.lists, size) for size in whole.global_shape]
        self._item = item_bytes(whole.dtype)

    def bytes(self, source: Ints, target: Ints) -> Ints:
        """Return the bytes of moves, each from a state to one."""
        wholes = self._wholes[source, target]
        held = self._local[source] * self._parts[source, target]
        received: Ints = -(-held // np.maximum(wholes, 1))
        sent = wholes == 0
        received[sent] = self._lacking(source[sent], target[sent])
        return received

    def _lacking(self, source: Ints, target: Ints) -> Ints:
        kept = wanted = np.ones((len(source), 1), dtype=np.int64)
        for dim, (lo, hi) in enumerate(self._sides):
            a, b = self._lists[source, dim], self._lists[target, dim]
            kept = kept * shared((lo[a], hi[a]), (lo[b], hi[b]))
            wanted = wanted * (hi[b] - lo[b])
        lacking = np.max(wanted - kept, axis=-1, initial=0)
        return np.asarray(lacking * self._item, dtype=np.int64)


def pair_costs(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    model_of: Callable[[DeviceMesh], CostModel],
    cost: Callable[[Layout, Layout], float],
) -> Floats:
    """Return the seconds from each source to the target beside it; see `LayoutConverter.costs`.

    `model_of` returns the prices on a mesh; `cost` prices one pair: those between two meshes, and
    of tensors with too many layouts.
    """
    if len(sources) != len(targets):
        raise LayoutError(f"{len(sources)} sources for {len(targets)} targets; give pairs")
    if not len(sources):
        return np.zeros(0)
    (here, at_here), (there, at_there) = _distinct(sources), _distinct(targets)
    tensor_here, tensor_there = _ids([(x.global_shape, x.dtype) for x in e] for e in (here, there))
    wrong = tensor_here[at_here] != tensor_there[at_there]
    if wrong.any():
        edge = int(wrong.argmax())
        raise LayoutError(
            f"edge {edge} is between two tensors: {sources[edge]} and {targets[edge]}; both ends "
            "need one shape and dtype"
        )
    pairs, at = _numbered(at_here * len(there) + at_there)
    left, right = np.divmod(pairs, len(there))
    # Those of one tensor with the same reductions pending are looked up in one matrix of prices.
    mesh_here, mesh_there = _ids([x.mesh for x in ends] for ends in (here, there))
    (alike,) = _ids([[(x.mesh, x.global_shape, x.dtype, x.spec.partials) for x in here]])
    group = np.where(mesh_here[left] == mesh_there[right], alike[left], -1)
    order = np.argsort(group, kind="stable")
    seconds = np.empty(len(pairs))
    for numbers in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        starts, row = np.unique(left[numbers], return_inverse=True)
        ends, column = np.unique(right[numbers], return_inverse=True)
        found = None
        if group[numbers[0]] >= 0:
            found = _from_prices([here[n] for n in starts], [there[n] for n in ends], model_of)
        if found is not None:
            seconds[numbers] = found[row, column]
        else:
            each = zip(left[numbers], right[numbers], strict=True)
            seconds[numbers] = [cost(here[a], there[b]) for a, b in each]
    every: Floats = seconds[at]
    return every


def _from_prices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    model_of: Callable[[DeviceMesh], CostModel],
) -> Floats | None:
    """Return the seconds from all to all of one tensor; None where these are not in a matrix."""
    tensor = sources[0]
    states = count_states(tensor.mesh.ndim, tensor.spec.dims, len(tensor.spec.partials))
    if states > MAX_STATES or not all(x.spec.is_plain for x in (*sources, *targets)):
        return None
    prices = prices_of(tensor, model_of(tensor.mesh))
    index = prices.space.index
    goals = [index.get(state_of(target.spec), -1) for target in targets]
    if not prices.routed or min(goals) < 0:
        return None
    starts = np.array([index[state_of(source.spec)] for source in sources])
    best: Floats = all_distances(prices.cheapest() - TIE_SECONDS, starts)[:, goals]
    return best


def _ids(lists: Iterable[Sequence[object]]) -> list[Ints]:
    """Return numbers for the values in all lists, the same for equal ones."""
    known: dict[object, int] = {}
    return [np.array([known.setdefault(v, len(known)) for v in values]) for values in lists]


def _distinct(layouts: Sequence[Layout]) -> tuple[list[Layout], Ints]:
    """Return the distinct layouts, and which of them each one is.

    Millions of edges are among a few objects; so these are told apart by identity before they are
    compared.
    """
    ids, at = _numbered(np.fromiter(map(id, layouts), np.int64, count=len(layouts)) >> 3)
    some = np.empty(len(ids), dtype=np.int64)
    some[at] = np.arange(len(at))
    places: dict[Layout, int] = {}
    place_of = np.array([places.setdefault(layouts[n], len(places)) for n in some.tolist()])
    return list(places), place_of[at]


def _numbered(values: Ints) -> tuple[Ints, Ints]:
    """Return the distinct numbers, ascending, and the place of each one among them."""
    least, most = int(values.min()), int(values.max())
    if most - least >= _MOST_SPREAD:
        distinct, at = np.unique(values, return_inverse=True)
        return distinct, at
    values = values - least
    there = np.zeros(most - least + 1, dtype=bool)
    there[values] = True
    distinct, places = np.flatnonzero(there), np.empty(len(there), dtype=np.int64)
    places[distinct] = np.arange(len(distinct))
    return distinct + least, places[values]

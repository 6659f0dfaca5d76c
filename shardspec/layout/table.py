"""What every conversion of one tensor costs: all layouts against all layouts, as one array."""

import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import kind_of, share
from shardspec.comm.curves import whole as whole_of
from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import item_bytes
from shardspec.errors import AxisError, LayoutError
from shardspec.layout.graph import PartialState, spec_of
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.pricing import TIE_SECONDS, Prices, alike_axes, prices_of
from shardspec.layout.routed_cost import geometry_of
from shardspec.layout.search import all_distances
from shardspec.layout.space import count_states, is_symmetric
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.text import bytes_text

__all__ = ["CostTable", "cost_table"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    MemoryError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    TypeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What numpy and zipfile raise for damaged files, each for a damage of its own."""

_MOST_WORK: Final = 3e8
"""As `shardspec.layout.pricing` counts it: about a minute."""
_MOST_LAYOUTS: Final = 3000
_BYTES_EACH: Final = 200
"""That a pair of layouts takes while a table is made."""

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

    Attributes
    ----------
    labels
        The specs in canonical notation; axes by number. They label rows and columns alike.
    seconds : array (layouts, layouts)
        Row: source. Column: target. inf where there is no plan: to what is pending and is not so
        at the source.
    mesh_shape, global_shape, dtype
        What the table is for.
    bytes_received, peak_bytes : arrays (layouts, layouts)
        Bytes that the busiest device receives in a cheapest plan, and the most that a device holds
        at once; -1 where there is no plan.
    local_bytes : array (layouts)
        Bytes of the largest shard.
    axis_names
        Of the mesh; specs may be asked for by these.
    """

    labels: tuple[str, ...]
    seconds: npt.NDArray[np.float64]
    mesh_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    bytes_received: npt.NDArray[np.int64]
    peak_bytes: npt.NDArray[np.int64]
    local_bytes: npt.NDArray[np.int64]
    axis_names: tuple[str, ...] | None = None
    _places: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places = {label: place for place, label in enumerate(self.labels)}
        object.__setattr__(self, "_places", places)

    def cost(self, source: SpecLike, target: SpecLike) -> float:
        """Return the seconds from one spec to another.

        Raises
        ------
        LayoutError
            If a spec is not in the table.
        """
        return float(self.seconds[self.index(source), self.index(target)])

    def index(self, spec: SpecLike) -> int:
        """Return the row and column of a spec, axes by number or by name.

        Raises
        ------
        LayoutError
            If the spec is not in the table.
        """
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

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        goal = Path(path)
        unfinished = goal.with_name(f".{goal.name}.{token_hex(4)}.tmp")
        try:
            with open(unfinished, "xb") as file:
                np.savez_compressed(
                    file,
                    labels=np.array(self.labels),
                    seconds=self.seconds,
                    bytes_received=self.bytes_received,
                    peak_bytes=self.peak_bytes,
                    local_bytes=self.local_bytes,
                    axis_names=np.array(self.axis_names or (), dtype=np.str_),
                    mesh_shape=np.array(self.mesh_shape, dtype=np.int64),
                    global_shape=np.array(self.global_shape, dtype=np.int64),
                    dtype=np.array(self.dtype),
                )
            unfinished.replace(goal)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CostTable":
        """Read a table that `save` wrote.

        Raises
        ------
        LayoutError
            If the file cannot be read or is not such a table.
        """
        try:
            return cls(*_contents(path))
        except _UNREADABLE as error:
            raise LayoutError(
                f"{os.fspath(path)} is not a saved cost table: {' '.join(str(error).split())}; "
                "make it again with LayoutConverter.cost_table and save"
            ) from None


def _contents(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    """Return the fields of a saved table, each checked; raises one of `_UNREADABLE`."""
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
    prices = prices_of(mesh.shape, pending, whole.global_shape, whole.dtype, model, _MOST_WORK)
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
    return (
        np.take_along_axis(seconds[place], relabelled, axis=1),
        np.take_along_axis(received[place], relabelled, axis=1),
        np.take_along_axis(peak[place], relabelled, axis=1),
    )


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
        self._bounds = [
            np.stack([geometry.intervals(axes, size) for axes in space.lists], axis=1)
            for size in whole.global_shape
        ]
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
        for dim, (lo, hi) in enumerate(self._bounds):
            a, b = self._lists[source, dim], self._lists[target, dim]
            kept = kept * np.maximum(np.minimum(hi[a], hi[b]) - np.maximum(lo[a], lo[b]), 0)
            wanted = wanted * (hi[b] - lo[b])
        lacking = np.max(wanted - kept, axis=-1, initial=0)
        return np.asarray(lacking * self._item, dtype=np.int64)

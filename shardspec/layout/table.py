"""What every conversion of one tensor costs: all layouts against all layouts, as one array."""

import os
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.errors import LayoutError
from shardspec.layout.graph import spec_of
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.pricing import TIE_SECONDS, Prices, alike_axes, prices_of
from shardspec.layout.search import all_distances
from shardspec.layout.space import MAX_STATES, count_states, is_symmetric
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["CostTable", "cost_table"]

Floats: TypeAlias = npt.NDArray[np.float64]

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

_MOST_WORK = 3e8
"""As `shardspec.layout.pricing` counts it: about a minute."""


@dataclass(frozen=True, eq=False)
class CostTable:
    """Seconds of the cheapest plan between every two layouts of one tensor.

    Attributes
    ----------
    labels
        The specs in canonical notation; axes by number. They label rows and columns alike.
    seconds : array (layouts, layouts)
        Row: source. Column: target.
    mesh_shape, global_shape, dtype
        What the table is for.
    """

    labels: tuple[str, ...]
    seconds: npt.NDArray[np.float64]
    mesh_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
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
        return float(self.seconds[self._place(source), self._place(target)])

    def _place(self, spec: SpecLike) -> int:
        place = self._places.get(spec) if isinstance(spec, str) else None
        if place is None:
            text = str(ShardingSpec.of(spec))
            place = self._places.get(text)
        if place is None:
            raise LayoutError(
                f"spec {text} is not in the table of {len(self.labels)} layouts on a mesh of shape "
                f"{self.mesh_shape}; give axes by number, and nothing pending"
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


def _contents(
    path: str | os.PathLike[str],
) -> tuple[tuple[str, ...], Floats, tuple[int, ...], tuple[int, ...], str]:
    """Return the fields of a saved table, each checked; raises one of `_UNREADABLE`."""
    kinds = {"labels": "U", "seconds": "f", "mesh_shape": "i", "global_shape": "i", "dtype": "U"}
    # numpy leaves a damaged file open that it opened itself.
    with open(path, "rb") as raw:
        # A file that is no archive would be taken for a pickle or a single array.
        if not zipfile.is_zipfile(raw):
            raise ValueError("it is no zip archive")
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as file:
            found = {name: file[name] for name in kinds}
    for name, kind in kinds.items():
        ndim = {"seconds": 2, "dtype": 0}.get(name, 1)
        array = found[name]
        if not isinstance(array, np.ndarray) or array.dtype.kind != kind or array.ndim != ndim:
            raise ValueError(f"its {name} are not what a table has")
    labels, seconds = tuple(found["labels"].tolist()), found["seconds"].astype(np.float64)
    if seconds.shape != (len(labels), len(labels)) or len(set(labels)) != len(labels):
        raise ValueError(f"{len(labels)} labels do not fit an array of shape {seconds.shape}")
    if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
        raise ValueError("some of its seconds are negative or no numbers")
    mesh_shape, global_shape = (tuple(found[n].tolist()) for n in ("mesh_shape", "global_shape"))
    return labels, seconds, mesh_shape, global_shape, str(found["dtype"])


def cost_table(
    mesh: DeviceMesh, global_shape: tuple[int, ...], dtype: object, model: CostModel
) -> CostTable:
    """Price every conversion of a tensor; see `LayoutConverter.cost_table`."""
    whole = Layout(mesh, ShardingSpec(len(global_shape)), global_shape, dtype)
    count = count_states(mesh.ndim, len(global_shape), 0)
    if count > MAX_STATES:
        raise LayoutError(
            f"a mesh of {mesh.ndim} axes and a tensor of {len(global_shape)} dims have {count} "
            f"layouts, more than the {MAX_STATES} that a table holds; ask for single costs"
        )
    prices = prices_of(mesh.shape, (), whole.global_shape, whole.dtype, model, _MOST_WORK)
    if not prices.routed:
        raise LayoutError(
            f"a table for the {mesh.size} devices of mesh {mesh} and {count} layouts would take "
            "minutes; ask for single costs"
        )
    labels = tuple(str(spec_of(state)) for state in prices.space.states)
    return CostTable(
        labels, _all_seconds(prices, whole, model), mesh.shape, whole.global_shape, whole.dtype
    )


def _all_seconds(prices: Prices, whole: Layout, model: CostModel) -> npt.NDArray[np.float64]:
    """Search from one spec of each kind where dims divide evenly, else from every spec."""
    space, move = prices.space, prices.cheapest() - TIE_SECONDS
    count = len(space.states)
    if not is_symmetric(whole.global_shape, whole.mesh.shape):
        return all_distances(move, np.arange(count))
    stands_for, relabelled = space.orbits(alike_axes(whole.mesh.shape, model))
    sources, place = np.unique(stands_for, return_inverse=True)
    seconds = all_distances(move, sources)
    return np.take_along_axis(seconds[place], relabelled, axis=1)

"""What every conversion of one tensor costs: all layouts against all layouts, as one array."""

import os
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.errors import LayoutError
from shardspec.layout.graph import spec_of
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.pricing import TIE_SECONDS, Prices, alike_axes, prices_of
from shardspec.layout.search import all_distances
from shardspec.layout.space import MAX_STATES, count_states
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["CostTable", "cost_table"]

_MOST_WORK = 2e9
"""As `shardspec.layout.pricing` counts it: some ten seconds."""


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

    def cost(self, source: SpecLike, target: SpecLike) -> float:
        """Return the seconds from one spec to another.

        Raises
        ------
        LayoutError
            If a spec is not in the table.
        """
        return float(self.seconds[self._place(source), self._place(target)])

    def _place(self, spec: SpecLike) -> int:
        text = str(ShardingSpec.of(spec))
        if text not in self.labels:
            raise LayoutError(
                f"spec {text} is not in the table of {len(self.labels)} layouts on a mesh of shape "
                f"{self.mesh_shape}; give axes by number, and nothing pending"
            )
        return self.labels.index(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as a compressed numpy archive; the name should end in ``.npz``."""
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                labels=np.array(self.labels),
                seconds=self.seconds,
                mesh_shape=np.array(self.mesh_shape, dtype=np.int64),
                global_shape=np.array(self.global_shape, dtype=np.int64),
                dtype=np.array(self.dtype),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CostTable":
        """Read a table that `save` wrote.

        Raises
        ------
        LayoutError
            If the file is not such a table.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(
                    tuple(file["labels"].tolist()),
                    file["seconds"],
                    tuple(file["mesh_shape"].tolist()),
                    tuple(file["global_shape"].tolist()),
                    str(file["dtype"]),
                )
        except (KeyError, ValueError, EOFError) as error:
            raise LayoutError(f"{os.fspath(path)} is not a saved cost table: {error}") from None


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
    if any(size == 0 or size % prod(whole.mesh.shape) for size in whole.global_shape):
        return all_distances(move, np.arange(count))
    stands_for, relabelled = space.orbits(alike_axes(whole.mesh.shape, model))
    sources, place = np.unique(stands_for, return_inverse=True)
    seconds = all_distances(move, sources)
    return np.take_along_axis(seconds[place], relabelled, axis=1)

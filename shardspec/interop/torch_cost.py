"""Prices redistributions for planners that use torch's `DTensorSpec`, such as AutoParallel.

`redistribute_cost` has the signature and the unit (microseconds) of torch's function of that name;
its method `many` prices a list of conversions at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor import Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardspec.comm.cost import CostModel
from shardspec.errors import LossyConversionError
from shardspec.interop.torch_dtensor import layout_of_spec
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.layout.table import pair_costs


@dataclass(frozen=True, slots=True)
class RedistributeCost:
    """A function like torch's ``redistribute_cost`` that uses the prices of a `LayoutConverter`.

    Examples
    --------
    With links of your own, in place of torch's function in a search::

        cluster = CostModel.from_presets(mesh, ["ib-ndr-per-gpu", "h100-nvswitch"])
        redistribute_cost = RedistributeCost(LayoutConverter(cluster))
        microseconds = redistribute_cost(strategy.output_spec, wanted)
    """

    converter: LayoutConverter = field(default_factory=LayoutConverter)

    def __call__(self, current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
        """Return the microseconds of the cheapest plan from one spec to another.

        As in torch, the tensor is that of the current spec, and a masked sum costs as much as a
        sum. The result is inf if the meshes differ, if the target has a pending reduction that the
        current spec lacks, or if a spec cannot express the placements.

        Raises
        ------
        LayoutError
            If the current spec has no `tensor_meta`, or the target is of another tensor.
        """
        both = zip(current_spec.placements, target_spec.placements, strict=True)
        if current_spec.mesh != target_spec.mesh or any(b.is_partial() and a != b for a, b in both):
            return inf
        meta = target_spec.tensor_meta or current_spec.tensor_meta
        specs = [current_spec, DTensorSpec(target_spec.mesh, target_spec.placements, meta)]
        if target_spec.tensor_meta is not None:
            specs[1] = target_spec  # with its order of axes
        if not all(map(_has_plain_sums, specs)):
            specs = list(map(_with_sums, specs))
        try:
            source, target = map(layout_of_spec, specs)
        except LossyConversionError:
            return inf
        return self._microseconds(source, target)

    def many(
        self, sources: Sequence[DTensorSpec], targets: Sequence[DTensorSpec]
    ) -> npt.NDArray[np.float64]:
        """Return the microseconds from each source to the corresponding target, as an array.

        Each distinct pair is priced once and each object is examined once, so that millions of
        pairs take seconds. The values are those of single calls, except that it raises
        `LossyConversionError` for placements that a spec cannot express.
        """
        every = {id(spec): spec for spec in (*sources, *targets)}.values()
        if not all(spec.tensor_meta and _has_plain_sums(spec) for spec in every):
            each = zip(sources, targets, strict=True)
            return np.fromiter((self(a, b) for a, b in each), np.float64, count=len(sources))
        seconds = pair_costs(
            sources,
            targets,
            lambda mesh: self.converter.cost_model or CostModel.of_mesh(mesh),
            lambda source, target: self._microseconds(source, target) / 1e6,
            layout_of_spec,
        )
        return seconds * 1e6

    def tables(
        self, edges: Iterable[tuple[Sequence[DTensorSpec], Sequence[DTensorSpec]]]
    ) -> list[npt.NDArray[np.float64]]:
        """Return for each edge the microseconds from each of its sources to each of its targets.

        The sources of an edge in the graph are the output specs that its producer may choose, and
        the targets are the input specs that its consumer may choose; specs may repeat. The work
        grows with the number of specs rather than pairs. Edges with equal lists of specs share one
        read-only array. Values and errors are those of `many`.
        """
        numbers: dict[object, int] = {}
        specs: list[DTensorSpec] = []

        def numbered(side: Sequence[DTensorSpec]) -> tuple[int, ...]:
            of_side = []
            for spec in side:
                number = numbers.setdefault(_facts(spec), len(specs))
                if number == len(specs):
                    specs.append(spec)
                of_side.append(number)
            return tuple(of_side)

        every = [(numbered(sources), numbered(targets)) for sources, targets in edges]
        distinct = {edge: tuple(map(np.unique, edge)) for edge in every}
        pairs = [
            (specs[a], specs[b]) for rows, cols in distinct.values() for a in rows for b in cols
        ]
        prices = self.many(*zip(*pairs, strict=True)) if pairs else np.zeros(0)
        tables, first = {}, 0
        for edge, (rows, cols) in distinct.items():
            own = prices[first : first + len(rows) * len(cols)].reshape(len(rows), len(cols))
            table = own[np.ix_(np.searchsorted(rows, edge[0]), np.searchsorted(cols, edge[1]))]
            table.flags.writeable = False
            tables[edge] = table
            first += own.size
        return [tables[edge] for edge in every]

    def _microseconds(self, source: Layout, target: Layout) -> float:
        starts = set(target.spec.partials) - set(source.spec.partials)
        if starts or source.mesh != target.mesh:
            return inf
        return self.converter.cost(source, target) * 1e6


def _has_plain_sums(spec: DTensorSpec) -> bool:
    """Return True if a `ShardingSpec` can express the pending reductions of a spec."""
    pending = [placement for placement in spec.placements if placement.is_partial()]
    ops = {placement.reduce_op for placement in pending if type(placement) is Partial}
    known = all(type(placement) is Partial for placement in pending) and "premul_sum" not in ops
    return known and (len(ops) < 2 or ops <= {"sum", "avg"})


def _with_sums(spec: DTensorSpec) -> DTensorSpec:
    """Replace masked, scaled and mixed reductions by sums, which move the same bytes."""
    placements = tuple(Partial() if p.is_partial() else p for p in spec.placements)
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta)


def _facts(spec: DTensorSpec) -> tuple[object, ...]:
    """Return the properties that determine a spec's layout; cheaper than the spec's own hash."""
    return spec.mesh, spec.placements, getattr(spec, "shard_order", None), spec.tensor_meta


redistribute_cost: Final = RedistributeCost()
"""Prices by the default links, with nodes of eight devices."""

"""Costs for programs that search with torch's `DTensorSpec`, as torch's planners and AutoParallel.

`redistribute_cost` has the signature of torch's function of that name and is in microseconds as
well; its method `many` answers all edges of a graph at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardspec.comm.cost import CostModel
from shardspec.errors import LossyConversionError
from shardspec.interop.torch_dtensor import layout_of_spec
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.layout.table import pair_costs


@dataclass(frozen=True, slots=True)
class RedistributeCost:
    """A function like torch's ``redistribute_cost``, which prices by the links of a converter.

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

        It is inf, as in torch, where the meshes are not the same, where there is no plan, as to
        what is pending and was not so before, and of placements that a spec cannot express.

        Raises
        ------
        LayoutError
            If a spec has no `tensor_meta`, or the two are of two tensors.
        """
        if current_spec.mesh != target_spec.mesh:
            return inf
        try:
            source, target = layout_of_spec(current_spec), layout_of_spec(target_spec)
        except LossyConversionError:
            return inf
        return self._microseconds(source, target)

    def many(
        self, sources: Sequence[DTensorSpec], targets: Sequence[DTensorSpec]
    ) -> npt.NDArray[np.float64]:
        """Return the microseconds from each spec to the one beside it, as an array.

        Each distinct pair is priced once, and what an object stands for is looked up once, so that
        millions of pairs take seconds. Where one call gives inf, so does this; but it raises
        `LossyConversionError` for placements that a spec cannot express.
        """
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
        """Return, per edge, the microseconds from each spec of its first end to each of its second.

        An edge of a graph has at one end the specs that the strategies of the producer put out,
        and at the other those that the strategies of the consumer want; a spec may be there often.
        Specs are looked at one by one, not their pairs. Edges between equal lists of specs share
        one array, which cannot be written to. It is inf where `many` says inf, and raises as that.
        """
        numbers: dict[object, int] = {}
        specs: list[DTensorSpec] = []

        def numbered(some: Sequence[DTensorSpec]) -> tuple[int, ...]:
            found = []
            for spec in some:
                number = numbers.setdefault(_facts(spec), len(specs))
                if number == len(specs):
                    specs.append(spec)
                found.append(number)
            return tuple(found)

        every = [(numbered(sources), numbered(targets)) for sources, targets in edges]
        distinct = {ends: tuple(map(np.unique, ends)) for ends in every}
        pairs = [
            (specs[a], specs[b]) for here, there in distinct.values() for a in here for b in there
        ]
        prices = self.many(*zip(*pairs, strict=True)) if pairs else np.zeros(0)
        tables, start = {}, 0
        for ends, (here, there) in distinct.items():
            own = prices[start : start + len(here) * len(there)].reshape(len(here), len(there))
            table = own[np.ix_(np.searchsorted(here, ends[0]), np.searchsorted(there, ends[1]))]
            table.flags.writeable = False
            tables[ends] = table
            start += own.size
        return [tables[ends] for ends in every]

    def _microseconds(self, source: Layout, target: Layout) -> float:
        starts = set(target.spec.partials) - set(source.spec.partials)
        if starts or source.mesh != target.mesh:
            return inf
        return self.converter.cost(source, target) * 1e6


def _facts(spec: DTensorSpec) -> tuple[object, ...]:
    """Return what a spec's layout depends on; cheaper than the spec's own hash."""
    return spec.mesh, spec.placements, getattr(spec, "shard_order", None), spec.tensor_meta


redistribute_cost: Final = RedistributeCost()
"""With the links that are assumed of a mesh; its nodes have eight devices each."""

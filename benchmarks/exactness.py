"""Every plan against the optimum found by brute force, and the memory that plans need.

``python -m benchmarks.exactness`` plans every conversion, pending sums at source and target
included, on the meshes (2,2), (2,4), (2,3) and (2,2,2), for tensors of rank 2 and 3, under four
cost models and at four sizes, and for sizes that do not divide. It prints how many plans cost more
or less than the optimum over all chains of declared moves, have a step at another price than the
declared one, or differ from the cost table; how often a detour would be cheaper (the triangle
inequality); and where a plan holds more than the shards at both ends. Plans under `max_bytes` are
compared, on (2,2,2), at every bound that makes a difference. The optimum is that of
`tests/layout/brute_force.py`, which shares no code with the library.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import isfinite, prod

import click
import numpy as np

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec
from shardspec.comm.curves import Link
from shardspec.errors import LayoutError
from shardspec.text import table_text
from tests.layout.brute_force import Brute, Model, chains

FAST, SLOW, BUS = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9), Link(2e-6, 1 / 10e9)
SIZES = (2**16, 2**20, 2**26, 2**30)
MESHES = ((2, 2), (2, 4), (2, 3), (2, 2, 2))
UNEVEN = {2: ((5, 3), (1000, 777)), 3: ((5, 7, 1), (13, 6, 29))}
TOLERANCE = 1e-9
TIES_S = 2e-11
"""What tie-breakers of a whole plan may add up to."""


@dataclass(slots=True)
class Result:
    """What was found for one mesh and rank."""

    mesh: tuple[int, ...]
    dims: int
    plans: int = 0
    entries: int = 0
    """Of cost tables."""
    wrong: list[str] = field(default_factory=list)
    triples: int = 0
    detours: int = 0
    shortest: float = 0.0
    """Seconds that the best detour saves, 0 where none saves any."""
    above: dict[str, dict[str, float]] = field(default_factory=dict)
    """By model the conversions that hold more than both shards, with the largest ratio."""
    seconds: float = 0.0

    @property
    def pairs_above(self) -> dict[str, float]:
        """The same whatever the model."""
        ratios: dict[str, float] = {}
        for by_pair in self.above.values():
            for pair, ratio in by_pair.items():
                ratios[pair] = max(ratio, ratios.get(pair, 0.0))
        return ratios


def models(mesh: tuple[int, ...]) -> Iterator[tuple[str, CostModel]]:
    """Yield the cost models: two tiers, without copies and with them, one tier, and one bus."""
    yield "two-tier", CostModel(mesh, (SLOW, *[FAST] * (len(mesh) - 1)))
    yield "copies", CostModel(mesh, (SLOW, *[FAST] * (len(mesh) - 1)), copy_s=2 / 3.35e12)
    yield "uniform", CostModel(mesh, (FAST,) * len(mesh))
    yield "shared-bus", CostModel(mesh, (BUS,) * len(mesh), "shared-bus")


def shapes(mesh: tuple[int, ...], dims: int) -> Iterator[tuple[int, ...]]:
    """Yield float32 shapes of the four sizes that the mesh divides, then uneven ones."""
    side = 6 if 3 in mesh else 16
    for num_bytes in SIZES:
        rest = side ** (dims - 1)
        yield (num_bytes // 4 // rest // side * side, *[side] * (dims - 1))
    yield from UNEVEN[dims]


def oracle_of(model: CostModel) -> Model:
    """Return the model in the words of the brute force."""
    return Model(
        tuple(link.latency_s for link in model.links),
        tuple(link.seconds_per_byte for link in model.links),
        model.link_model == "shared-bus",
        model.copy_s,
    )


def layouts_of(brute: Brute) -> list[Layout]:
    """Return the layout of every state."""
    mesh = DeviceMesh(range(prod(brute.mesh)), brute.mesh)
    return [
        Layout(
            mesh,
            ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=dict.fromkeys(left, "sum")),
            brute.shape,
            "float32",
        )
        for cuts, left in brute.states
    ]


def differs(found: float, wanted: float) -> bool:
    """Tell whether two costs differ by more than rounding and tie-breakers."""
    return not abs(found - wanted) <= TOLERANCE * wanted + TIES_S


def convertible(brute: Brute) -> Iterator[tuple[int, int]]:
    """Yield the pairs of states where the target wants no sum that the source lacks."""
    for i, (_, pending) in enumerate(brute.states):
        for j, (_, left) in enumerate(brute.states):
            if set(left) <= set(pending):
                yield i, j


def check(result: Result, shape: tuple[int, ...]) -> None:
    """Plan every conversion of one tensor under every model."""
    brute = Brute(result.mesh, shape)
    layouts = layouts_of(brute)
    place = {layout.spec: i for i, layout in enumerate(layouts)}
    for name, model in models(result.mesh):
        move = brute.moves(oracle_of(model), 4)
        best = chains(move)
        above = result.above.setdefault(name, {})
        converter = LayoutConverter(model)
        found = np.full(best.shape, np.inf)
        for i, j in convertible(brute):
            plan = converter.plan(layouts[i], layouts[j])
            found[i, j] = plan.cost_seconds
            result.plans += 1
            pair = f"{plan.source.spec} → {plan.target.spec}"
            where = f"{pair} of {list(shape)}, {name}"
            if differs(found[i, j], best[i, j]):
                result.wrong.append(f"{where}: {found[i, j]} s, at best {best[i, j]} s")
            at = [place[layout.spec] for layout in plan.layouts]
            declared = sum(float(move[a, b]) for a, b in pairwise(at))
            if at[0] != i or at[-1] != j or differs(found[i, j], declared):
                result.wrong.append(f"{where}: {found[i, j]} s, its moves {declared} s")
            ends = plan.source.max_local_bytes + plan.target.max_local_bytes
            if plan.peak_bytes > ends:
                above[pair] = max(plan.peak_bytes / ends, above.get(pair, 0.0))
        plain = len(brute.cuts)
        table = found[:plain, :plain]
        _check_table(result, converter, layouts[:plain], best[:plain, :plain], name)
        for middle in range(plain):
            slack = table[:, [middle]] + table[[middle]] - table
            result.shortest = max(result.shortest, -float(slack.min()))
            result.detours += int((slack < -TOLERANCE * table - TIES_S).sum())
            result.triples += slack.size


def _check_table(
    result: Result,
    converter: LayoutConverter,
    layouts: list[Layout],
    best: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    name: str,
) -> None:
    shape = layouts[0].global_shape
    table = converter.cost_table(layouts[0].mesh, shape, "float32")
    label = {text: i for i, text in enumerate(table.labels)}
    order = [label[str(layout.spec)] for layout in layouts]
    off = ~(np.abs(table.seconds[np.ix_(order, order)] - best) <= TOLERANCE * best + TIES_S)
    result.entries += off.size
    for i, j in np.argwhere(off):
        result.wrong.append(f"table, {layouts[i].spec} → {layouts[j].spec} of {shape}, {name}")


def check_bounds(shape: tuple[int, ...], every: int) -> tuple[int, int, list[str]]:
    """Plan under every bound on live bytes: how many plans, how many refused, which are wrong."""
    brute = Brute((2, 2, 2), shape)
    layouts = layouts_of(brute)
    live = brute.live(4)
    bounds = np.unique(live)
    tried, refused = 0, 0
    wrong: list[str] = []
    for name, model in models(brute.mesh):
        converter = LayoutConverter(model)
        move = brute.moves(oracle_of(model), 4)
        best = [chains(np.where(live <= bound, move, np.inf)) for bound in bounds]
        for i, j in list(convertible(brute))[::every]:
            least = next(b for b, costs in zip(bounds, best, strict=True) if isfinite(costs[i, j]))
            for bound, costs in zip(bounds, best, strict=True):
                tried += 1
                wanted = float(costs[i, j])
                where = f"{layouts[i]} → {layouts[j].spec}, {name}, max_bytes={int(bound)}"
                try:
                    plan = converter.plan(layouts[i], layouts[j], max_bytes=int(bound))
                except LayoutError as error:
                    refused += 1
                    if isfinite(wanted) or not str(error).endswith(f" needs is {int(least)}"):
                        wrong.append(f"{where}: {error}")
                    continue
                held = max(plan.live_bytes, default=0)
                if not isfinite(wanted) or held > bound or differs(plan.cost_seconds, wanted):
                    wrong.append(f"{where}: {plan.cost_seconds} s, {held} bytes, not {wanted} s")
    return tried, refused, wrong


@click.command()
@click.option("--worst", default=20, show_default=True, help="Pairs to name per mesh and rank.")
@click.option("--every", default=41, show_default=True, help="Under bounds, one pair of so many.")
def main(worst: int, every: int) -> None:
    """Compare every plan with the optimum, and report the memory that plans need."""
    results = []
    for mesh, dims in product(MESHES, (2, 3)):
        result = Result(mesh, dims)
        started = time.perf_counter()
        for shape in shapes(mesh, dims):
            check(result, shape)
        result.seconds = time.perf_counter() - started
        results.append(result)
    _print_optimality(results, worst)
    for shape in ((64, 64), (13, 5), (16, 16, 16), (5, 7, 3)):
        started = time.perf_counter()
        tried, refused, wrong = check_bounds(shape, 1 if shape == (64, 64) else every)
        print(
            f"max_bytes, mesh 2x2x2, {list(shape)}: {tried:,} bounds, {refused:,} refused, "
            f"{len(wrong)} wrong, {time.perf_counter() - started:.1f} s"
        )
        for text in wrong[:worst]:
            print(f"WRONG {text}")
    _print_peaks(results, worst)


def _print_optimality(results: list[Result], worst: int) -> None:
    rows = [
        [
            "x".join(map(str, r.mesh)),
            str(r.dims),
            f"{r.plans:,}",
            f"{r.entries:,}",
            f"{len(r.wrong):,}",
            f"{r.triples:,}",
            f"{r.detours:,}",
            f"{r.shortest:.1e} s",
            f"{r.seconds:.1f} s",
        ]
        for r in results
    ]
    header = ["mesh", "rank", "plans", "in tables", "wrong", "triples", "detours", "best detour"]
    print(table_text([*header, "took"], rows))
    sums = [sum(x) for x in zip(*((r.plans, r.entries, r.triples) for r in results), strict=True)]
    print(
        f"four models, {len(SIZES)} sizes and {len(UNEVEN[2])} uneven shapes: {sums[0]:,} plans "
        f"and {sums[1]:,} entries of tables, {sum(len(r.wrong) for r in results):,} wrong; "
        f"{sums[2]:,} triples, {sum(r.detours for r in results):,} cheaper by a detour"
    )
    for r in results:
        for text in r.wrong[:worst]:
            print(f"WRONG {r.mesh}: {text}")


def _print_peaks(results: list[Result], worst: int) -> None:
    print("\npeak of a plan over source shard plus target shard, where above 1 at some size:")
    for r in results:
        counts = ", ".join(f"{name} {len(pairs):,}" for name, pairs in r.above.items())
        ranked = sorted(r.pairs_above.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{pair} ×{ratio:.3g}" for pair, ratio in ranked[:worst])
        more = f" and {len(ranked) - worst:,} more" if len(ranked) > worst else ""
        print(
            f"mesh {'x'.join(map(str, r.mesh))}, rank {r.dims}: {len(ranked):,} pairs ({counts}), "
            f"worst ×{max(r.pairs_above.values(), default=1.0):.3f}: {shown or 'none'}{more}"
        )


if __name__ == "__main__":
    main()

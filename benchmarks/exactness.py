"""Every plan against the optimum found by brute force, and the memory that plans need.

``python -m benchmarks.exactness`` plans every conversion, pending sums at source and target
included, on the meshes (2,2), (2,4), (2,3) and (2,2,2), for tensors of rank 2 and 3, under three
cost models and at four sizes, and for sizes that do not divide. It prints how many plans cost more
than the optimum over all chains of declared moves, how often a detour would be cheaper (the
triangle inequality), and where a plan holds more than the shards at both ends. The optimum is that
of `tests/layout/brute_force.py`, which shares no code with the library.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import click
import numpy as np

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, Link, ShardingSpec
from shardspec.text import table_text
from tests.layout.brute_force import Brute, Model

FAST, SLOW, BUS = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9), Link(2e-6, 1 / 10e9)
SIZES = (2**16, 2**20, 2**26, 2**30)
MESHES = ((2, 2), (2, 4), (2, 3), (2, 2, 2))
UNEVEN = {2: ((5, 3), (1000, 777)), 3: ((5, 7, 1), (13, 6, 29))}
TOLERANCE = 1e-9


@dataclass(slots=True)
class Result:
    """What was found for one mesh and rank."""

    mesh: tuple[int, ...]
    dims: int
    plans: int = 0
    wrong: list[str] = field(default_factory=list)
    triples: int = 0
    detours: int = 0
    above: dict[str, float] = field(default_factory=dict)
    """Conversions that hold more than both shards, with the largest ratio."""
    seconds: float = 0.0


def models(mesh: tuple[int, ...]) -> Iterator[tuple[str, CostModel]]:
    """Yield the three cost models: two tiers of links, one, and one bus."""
    yield "two-tier", CostModel(mesh, (SLOW, *[FAST] * (len(mesh) - 1)))
    yield "uniform", CostModel(mesh, (FAST,) * len(mesh))
    yield "shared-bus", CostModel(mesh, (BUS,) * len(mesh), "shared-bus")


def shapes(dims: int) -> Iterator[tuple[int, ...]]:
    """Yield float32 shapes of the four sizes that every mesh divides, then uneven ones."""
    for num_bytes in SIZES:
        first = num_bytes // 4 // 24 ** (dims - 1) // 24 * 24
        yield (max(24, first), *[24] * (dims - 1))
    yield from UNEVEN[dims]


def check(result: Result, shape: tuple[int, ...]) -> None:
    """Plan every conversion of one tensor under every model."""
    brute = Brute(result.mesh, shape)
    mesh = DeviceMesh(range(prod(result.mesh)), result.mesh)
    layouts = [
        Layout(
            mesh,
            ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=dict.fromkeys(left, "sum")),
            shape,
            "float32",
        )
        for cuts, left in brute.states
    ]
    for name, model in models(result.mesh):
        oracle = Model(
            tuple(link.latency_s for link in model.links),
            tuple(link.seconds_per_byte for link in model.links),
            model.link_model == "shared-bus",
        )
        best = brute.optimum(oracle, 4)
        converter = LayoutConverter(model)
        found = np.full(best.shape, np.inf)
        for i, (_, pending) in enumerate(brute.states):
            for j, (_, left) in enumerate(brute.states):
                if not set(left) <= set(pending):
                    continue
                plan = converter.plan(layouts[i], layouts[j])
                found[i, j] = plan.cost_seconds
                result.plans += 1
                where = f"{plan.source.spec} → {plan.target.spec} of {list(shape)}, {name}"
                if abs(found[i, j] - best[i, j]) > TOLERANCE * best[i, j] + 2e-11:
                    result.wrong.append(f"{where}: {found[i, j]} s, at best {best[i, j]} s")
                ends = plan.source.max_local_bytes + plan.target.max_local_bytes
                if plan.peak_bytes > ends:
                    pair = f"{plan.source.spec} → {plan.target.spec}"
                    ratio = plan.peak_bytes / ends
                    result.above[pair] = max(ratio, result.above.get(pair, 0.0))
        plain = len(brute.cuts)
        table = found[:plain, :plain]
        for middle in range(plain):
            slack = table[:, [middle]] + table[[middle]] - table
            result.detours += int((slack < -TOLERANCE * table - 2e-11).sum())
            result.triples += slack.size


@click.command()
@click.option("--worst", default=12, show_default=True, help="Pairs to name per mesh and rank.")
def main(worst: int) -> None:
    """Compare every plan with the optimum, and report the memory that plans need."""
    results = []
    for mesh in MESHES:
        for dims in (2, 3):
            result = Result(mesh, dims)
            started = time.perf_counter()
            for shape in shapes(dims):
                check(result, shape)
            result.seconds = time.perf_counter() - started
            results.append(result)
    rows = [
        [
            "x".join(map(str, r.mesh)),
            str(r.dims),
            f"{r.plans:,}",
            f"{len(r.wrong):,}",
            f"{r.triples:,}",
            f"{r.detours:,}",
            f"{max(r.above.values(), default=1.0):.3f}",
            f"{len(r.above):,}",
            f"{r.seconds:.1f} s",
        ]
        for r in results
    ]
    header = ["mesh", "rank", "plans", "not optimal", "triples", "detours"]
    print(table_text([*header, "worst peak", "pairs above 1", "took"], rows))
    print(
        f"plans: {sum(r.plans for r in results):,}, not optimal: "
        f"{sum(len(r.wrong) for r in results):,}; triples: {sum(r.triples for r in results):,}, "
        f"cheaper by a detour: {sum(r.detours for r in results):,}"
    )
    for r in results:
        for text in r.wrong[:worst]:
            print(f"NOT OPTIMAL {r.mesh}: {text}")
    print("\npeak of a plan over source shard plus target shard, where above 1:")
    for r in results:
        ranked = sorted(r.above.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{pair} ×{ratio:.3g}" for pair, ratio in ranked[:worst])
        more = f" and {len(ranked) - worst} more" if len(ranked) > worst else ""
        print(f"mesh {'x'.join(map(str, r.mesh))}, rank {r.dims}: {shown or 'none'}{more}")


if __name__ == "__main__":
    main()

"""Planning beside torch's planners: how long it takes, what the plans cost, what they hold.

``python -m benchmarks.planning`` runs both in one process, on a mesh of fake ranks for torch:
queries whose answer is known already, first plans of a tensor, and all pairs of layouts, where
torch's transforms are priced step by step by this library's model. Tables and plans on large meshes
are timed in processes of their own, with their peak memory.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import exp, log, prod
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos_non_cached,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec
from shardspec.comm.presets import link_preset
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step
from shardspec.interop.torch_cost import RedistributeCost
from shardspec.layout.pricing import large_prices, small_prices
from shardspec.layout.search import cheapest_plan
from shardspec.text import bytes_text, seconds_text, table_text
from tests.conversions import plain_specs

WORLD = 16
# ru_maxrss counts the parent on Linux; the high-water mark of the address space does not.
PEAK = """
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
"""
TABLE = """
import time
from shardspec import DeviceMesh, LayoutConverter
started = time.perf_counter()
mesh = DeviceMesh(range(16), (2, 2, 2, 2))
table = LayoutConverter().cost_table(mesh, (64, 64, 64, 64), "f32")
print(time.perf_counter() - started, table.seconds.size, peak())
"""
LARGE = """
import time, sys
from shardspec import DeviceMesh, Layout, LayoutConverter
shape = (16,) * int(sys.argv[1])
mesh = DeviceMesh(range(16 ** len(shape)), shape)
last = len(shape) - 1
source = Layout(mesh, f"[S0{last},R,R]", (8192, 8192, 64), "bf16")
started = time.perf_counter()
plan = LayoutConverter().plan(source, f"[R,S{last}0,R]")
print(time.perf_counter() - started, plan.cost_seconds, peak())
"""


@dataclass(frozen=True, slots=True)
class Compared:
    """Plans of all pairs of one mesh and rank, torch's by one of its planners."""

    mesh: str
    rank: int
    planner: str
    pairs: int
    refused: int
    """Pairs that torch raises an error for."""
    cost_geomean: float
    """torch's cost over ours, where ours is not 0."""
    cost_worst: float
    free: int
    """Pairs that cost nothing here but something there."""
    peak_geomean: float
    peak_worst: float
    plan_ms: float
    """torch's median time for a first plan."""
    our_plan_ms: float
    faster: float
    """Geometric mean over the pairs of torch's time over ours."""


def links(shape: tuple[int, ...]) -> CostModel:
    """Return InfiniBand along the first axis and NVLink along the others."""
    names = ["ib-ndr-per-gpu", *["h100-nvswitch"] * (len(shape) - 1)]
    return CostModel(shape, tuple(link_preset(name).link for name in names))


def torch_spec(mesh: TorchMesh, spec: ShardingSpec, shape: tuple[int, ...]) -> DTensorSpec:
    """Return torch's words for a spec, the order of axes beside the placements."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    order = []
    for dim, axes in sorted(spec.dim_partition_dict.items()):
        numbers = tuple(int(axis) for axis in axes)
        order.append(ShardOrderEntry(tensor_dim=dim, mesh_dims=numbers))
        for axis in numbers:
            placements[axis] = Shard(dim)
    for partial in spec.partials:
        placements[int(partial.axis)] = Partial(partial.op)
    size = torch.Size(shape)
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(size, stride, torch.float32)
    return DTensorSpec(
        mesh,
        tuple(placements),
        tensor_meta=meta,
        shard_order=tuple(order),
        use_strided_shard_as_shard_order=False,
    )


def torch_steps(infos: list[Any]) -> Iterator[Step]:
    """Yield what torch's transforms are in the words of this library."""
    for info in infos:
        axes = (info.mesh_dim,)
        match info.src_dst_placements:
            case (Shard() as before, Replicate()):
                yield AllGather(before.dim, axes)
            case (Shard() as before, Shard() as after):
                yield AllToAll(before.dim, after.dim, axes, axes)
            case (Partial() as before, Replicate()):
                yield AllReduce(axes, "sum")
            case (Partial() as before, Shard() as after):
                yield ReduceScatter(after.dim, axes, "sum")
            case (Replicate(), Shard() as after):
                yield Slice(after.dim, axes)
            case other:
                raise AssertionError(f"{other} is no conversion")


def priced(steps: list[Step], source: Layout, model: CostModel) -> tuple[float, int]:
    """Return seconds and peak bytes of steps along one axis each, all sizes even."""
    seconds, peak, held = 0.0, source.max_local_bytes, source.max_local_bytes
    for step in steps:
        seconds += model.step_seconds(step, held)
        n = prod(source.mesh.shape[axis] for axis in step.axes)
        after = held
        if isinstance(step, AllGather):
            after = held * n
        elif isinstance(step, Slice | ReduceScatter):
            after = held // n
        peak, held = max(peak, held + after), after
    return seconds, peak


def first_plan(converter: LayoutConverter, source: Layout, target: ShardingSpec) -> float:
    """Return the seconds of planning a tensor that nothing is known of."""
    cheapest_plan.cache_clear()
    small_prices.cache_clear()
    large_prices.cache_clear()
    started = time.perf_counter()
    converter.plan(source, target)
    return time.perf_counter() - started


def torch_first_plan(source: DTensorSpec, target: DTensorSpec, graph: bool) -> tuple[float, Any]:
    """Return the seconds of torch's planning, and its transforms."""
    clear_redistribute_planner_cache()
    started = time.perf_counter()
    infos = _gen_transform_infos_non_cached(source, target, use_graph_based_transform=graph)
    return time.perf_counter() - started, infos


def compare(shape: tuple[int, ...], rank: int, every: int) -> list[Compared]:
    """Compare plans of all pairs, or of every so-manieth."""
    model = links(shape)
    mesh, converter = DeviceMesh(range(prod(shape)), shape), LayoutConverter(model)
    in_torch = TorchMesh("cpu", torch.arange(prod(shape)).reshape(shape))
    size = (4096, 4096) if rank == 2 else (256, 256, 256)  # 64 MiB of float32
    specs = plain_specs(rank, len(shape))
    pairs = [pair for pair in product(specs, specs) if pair[0] != pair[1]][::every]
    theirs = {spec: torch_spec(in_torch, spec, size) for spec in specs}
    layouts = {spec: Layout(mesh, spec, size, "float32") for spec in specs}
    first_plan(converter, layouts[specs[0]], specs[1])  # the structure of the mesh
    ours = {pair: converter.plan(layouts[pair[0]], pair[1]) for pair in pairs}
    our_times = {(a, b): first_plan(converter, layouts[a], b) for a, b in pairs}
    results = []
    for planner, graph in (("default", False), ("graph search", True)):
        costs, peaks, times, faster, refused, free = [], [], [], [], 0, 0
        for (a, b), plan in ours.items():
            try:
                seconds, infos = torch_first_plan(theirs[a], theirs[b], graph)
            # torch has no error of its own for what it cannot plan; such pairs are counted.
            except (AssertionError, RuntimeError, ValueError, KeyError, NotImplementedError):
                refused += 1
                continue
            times.append(seconds)
            faster.append(seconds / our_times[a, b])
            cost, peak = priced(list(torch_steps(infos)), layouts[a], model)
            peaks.append(peak / plan.peak_bytes)
            if plan.cost_seconds:
                costs.append(cost / plan.cost_seconds)
            elif cost:
                free += 1
        results.append(
            Compared(
                "x".join(map(str, shape)),
                rank,
                planner,
                len(pairs),
                refused,
                geomean(costs),
                max(costs),
                free,
                geomean(peaks),
                max(peaks),
                median(times) * 1e3,
                median(our_times.values()) * 1e3,
                geomean(faster),
            )
        )
    return results


def geomean(values: list[float]) -> float:
    """Return the geometric mean."""
    return exp(sum(map(log, values)) / len(values))


def rate(call: Callable[[], object], seconds: float = 0.3) -> float:
    """Return the least seconds of a call, over rounds of many."""
    count, best = 1, float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(count):
            call()
        took = time.perf_counter() - started
        best = min(best, took / count)
        if took < 0.01:
            count *= 2
    return best


def warm_queries() -> dict[str, float]:
    """Return microseconds of a query whose answer is known, ours and torch's."""
    shape = (2, 2, 2)
    mesh = DeviceMesh(range(8), shape)
    in_torch = TorchMesh("cpu", torch.arange(8).reshape(shape))
    source = Layout(mesh, "[S01,R,S2]", (256, 256, 256), "float32")
    target = ShardingSpec.parse("[R,S01,S2]")
    converter = LayoutConverter(links(shape))
    before, after = (torch_spec(in_torch, s, source.global_shape) for s in (source.spec, target))
    converter.cost(source, target)
    redistribute_cost(before, after)
    table = converter.cost_table(mesh, source.global_shape, "float32")
    by_specs = RedistributeCost(converter)
    by_specs(before, after)
    return {
        "specs_us": rate(lambda: by_specs(before, after)) * 1e6,
        "ours_us": rate(lambda: converter.cost(source, target)) * 1e6,
        "torch_us": rate(lambda: redistribute_cost(before, after)) * 1e6,
        "table_us": rate(lambda: table.cost(source.spec, target)) * 1e6,
    }


def first_plans() -> list[dict[str, object]]:
    """Return milliseconds of first plans on meshes of two to four axes, ours and torch's."""
    rows: list[dict[str, object]] = []
    for shape, source, target in (
        ((2, 4), "[S01,R,R]", "[R,S0,S1]"),
        ((2, 2, 2), "[S01,R,S2]", "[R,S01,S2]"),
        ((2, 2, 2), "[S01,S2,R]", "[S2,R,S10]"),
        ((2, 2, 2, 2), "[S01,S2,R]", "[S3,R,S01]"),
    ):
        size = (256, 256, 256)
        mesh, converter = DeviceMesh(range(prod(shape)), shape), LayoutConverter(links(shape))
        in_torch = TorchMesh("cpu", torch.arange(prod(shape)).reshape(shape))
        layout, goal = Layout(mesh, source, size, "float32"), ShardingSpec.parse(target)
        before, after = (torch_spec(in_torch, s, size) for s in (layout.spec, goal))
        started = time.perf_counter()
        converter.plan(layout, goal)
        structure = time.perf_counter() - started
        ours = min(first_plan(converter, layout, goal) for _ in range(20))
        graph = min(torch_first_plan(before, after, True)[0] for _ in range(3))
        greedy = min(torch_first_plan(before, after, False)[0] for _ in range(20))
        rows.append(
            {
                "mesh": "x".join(map(str, shape)),
                "conversion": f"{source} → {target}",
                "structure_ms": structure * 1e3,
                "ours_ms": ours * 1e3,
                "graph_ms": graph * 1e3,
                "default_ms": greedy * 1e3,
            }
        )
    return rows


def alone(script: str, *args: str, times: int = 3) -> tuple[float, float, float]:
    """Run a script in processes of its own; return its numbers from the fastest run."""
    runs = []
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", PEAK + script, *args], capture_output=True, text=True, check=True
        )
        seconds, other, memory = map(float, done.stdout.split())
        runs.append((seconds, other, memory))
    return min(runs)


@click.command()
@click.option("--every", default=7, show_default=True, help="Of the 11,130 pairs of 2x2x2, rank 3.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(every: int, as_json: bool) -> None:
    """Time planning and compare plans with those of torch."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    firsts = first_plans()  # before anything is known of these meshes
    query = warm_queries()
    table = alone(TABLE)
    large = {axes: alone(LARGE, str(axes)) for axes in (2, 3, 4)}
    compared = [
        *compare((2, 4), 2, 1),
        *compare((2, 2, 2), 2, 1),
        *compare((2, 2, 2), 3, every),
    ]
    if as_json:
        record = {
            "query": query,
            "first_plans": firsts,
            "table": table,
            "large": large,
            "pairs": [asdict(row) for row in compared],
        }
        print(json.dumps(record, indent=1))
        return
    print(
        f"a query whose answer is known: {query['ours_us']:.2f} µs, torch's redistribute_cost "
        f"{query['torch_us']:.1f} µs: ×{query['torch_us'] / query['ours_us']:.0f}; by torch's "
        f"specs {query['specs_us']:.2f} µs; by table {query['table_us']:.2f} µs\n"
    )
    _print_first_plans(firsts)
    seconds, pairs, memory = table
    print(
        f"\ntable of mesh 2x2x2x2, rank 4: {int(pairs):,} pairs in {seconds:.2f} s, graph building "
        f"included, {bytes_text(memory)} of memory in all"
    )
    for axes, (took, cost, peak) in large.items():
        print(
            f"one plan on {16**axes:,} devices ({axes} axes): {seconds_text(took)}, "
            f"{bytes_text(peak)} of memory in all (a conversion of {seconds_text(cost)})"
        )
    print()
    _print_compared(compared)


def _print_first_plans(rows: list[dict[str, Any]]) -> None:
    print(
        table_text(
            [
                "mesh",
                "first plan of a tensor",
                "ours",
                "graph search",
                "ratio",
                "default",
                "new mesh",
            ],
            [
                [
                    row["mesh"],
                    row["conversion"],
                    f"{row['ours_ms']:.3f} ms",
                    f"{row['graph_ms']:.2f} ms",
                    f"×{row['graph_ms'] / row['ours_ms']:.0f}",
                    f"{row['default_ms']:.3f} ms",
                    f"{row['structure_ms']:.1f} ms",
                ]
                for row in rows
            ],
            numbers_from=2,
        )
    )


def _print_compared(rows: list[Compared]) -> None:
    header = ["mesh", "rank", "torch's planner", "pairs", "refused", "cost", "worst", "free here"]
    print(
        table_text(
            [*header, "peak", "worst", "torch plans in", "ours", "faster"],
            [
                [
                    row.mesh,
                    str(row.rank),
                    row.planner,
                    f"{row.pairs:,}",
                    f"{row.refused:,}",
                    f"×{row.cost_geomean:.2f}",
                    f"×{row.cost_worst:.1f}",
                    f"{row.free:,}",
                    f"×{row.peak_geomean:.2f}",
                    f"×{row.peak_worst:.1f}",
                    f"{row.plan_ms:.2f} ms",
                    f"{row.our_plan_ms:.3f} ms",
                    f"×{row.faster:.1f}",
                ]
                for row in rows
            ],
            numbers_from=3,
        )
    )
    print(
        "cost and peak: torch's plan over ours, by this library's model, geometric mean and worst"
    )


if __name__ == "__main__":
    main()

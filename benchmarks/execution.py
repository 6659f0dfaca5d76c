"""Redistribution over gloo, side by side with torch's own, in the same processes.

``python -m benchmarks.execution`` starts 4 and then 8 processes. Each pair of layouts is converted
by `torch.distributed.tensor` with its default planner, by the same with its graph search, and by
this library. The three take turns within every repetition, start together behind a barrier, and the
time of a turn is that of the slowest process. Every result is compared with what the box map says.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan
from torch.distributed.tensor.placement_types import _StridedShard

from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter
from shardspec.boxes import slices_within
from shardspec.comm.process_group import ProcessGroupCommunicator

__all__ = ["PAIRS", "Row", "main"]

_WORDS: Final = """
S0,R→R,R S01,R→R,R R,S01→R,R R,R→S01,R S0,R→R,S0 S01,R→R,S01 S0,S1→S01,R S0,S1→S1,S0
S01,R→S10,R S01,R→R,S10 S01,R→S1,R S0,R→S1,R R,R|P0→S0,R R,R|P01→S01,R R,R|P01→R,R
S0,R|P1→R,S01
"""


def pair_of(word: str) -> tuple[str, str]:
    """Return source and target of a pair in text.

    Examples
    --------
    >>> pair_of("S0,R->R,R")
    ('S0,R', 'R,R')
    """
    source, target = word.replace("->", "→").split("→")
    return source, target


PAIRS: Final = tuple(map(pair_of, _WORDS.split()))
SWAPS: Final = frozenset({("S0,S1", "S1,S0"), ("S01,R", "S10,R")})
"""Swap and reorder: the same dims stay cut, by each other's axes or in another order of axes."""
SIZES: Final[dict[tuple[int, ...], tuple[int, int]]] = {
    (2, 2): (2048, 2048),
    (2, 4): (2048, 4096),
}
"""Global shape of the float32 tensor by mesh: 16 MiB on four processes, 32 MiB on eight."""
SECONDS_PER_BYTE: Final = 1 / 10e9
"""For the planner: all processes of a host share its memory. Notes to several peers go out at once
and take microseconds, so latency is left out, and plans of equal bytes differ in steps alone."""
CONTENDERS: Final = ("torch", "torch graph", "messages", "shardspec")
"""`messages` is this library with everything sent through gloo."""


@dataclass(frozen=True, slots=True)
class Row:
    """Median milliseconds of one pair."""

    mesh: str
    source: str
    target: str
    torch_ms: float
    torch_graph_ms: float
    messages_ms: float
    """Ours with everything sent through gloo."""
    shardspec_ms: float
    plan: str
    """The steps of ours."""

    @property
    def ratio(self) -> float:
        """How many times faster than torch's default."""
        return self.torch_ms / self.shardspec_ms

    @property
    def graph_ratio(self) -> float:
        """How many times faster than torch with its graph search."""
        return self.torch_graph_ms / self.shardspec_ms


def placements_of(layout: Layout) -> list[Placement]:
    """Return torch's placements of a layout; the order of axes as `_StridedShard`."""
    placements: list[Placement] = [Replicate()] * layout.mesh.ndim
    for dim, axes in layout.spec.dim_partition_dict.items():
        for at, axis in enumerate(map(int, axes)):
            later = [int(other) for other in axes[:at] if int(other) > axis]
            factor = prod(layout.mesh.shape[other] for other in later)
            placements[axis] = _StridedShard(dim, split_factor=factor) if later else Shard(dim)
    for partial in layout.spec.partials:
        placements[int(partial.axis)] = Partial(partial.op)
    return placements


def addend(layout: Layout, whole: torch.Tensor, device: int) -> torch.Tensor:
    """Return the shard a device starts from: addends of a pending sum are multiples of the whole.

    The values are whole numbers so small that sums are exact in any order.
    """
    at = layout.mesh.coordinates(device)
    factor = 1 + sum(at[int(partial.axis)] for partial in layout.spec.partials)
    cut = whole[_index(layout, device)] * factor
    return cut.clone(memory_format=torch.contiguous_format)


def total_factor(layout: Layout) -> int:
    """Return what the whole is multiplied by once the pending sums are finished."""
    axes = [int(partial.axis) for partial in layout.spec.partials]
    if not axes:
        return 1
    grid = torch.ones([layout.mesh.shape[axis] for axis in axes], dtype=torch.int64)
    for place in range(len(axes)):
        view = [-1 if other == place else 1 for other in range(len(axes))]
        grid = grid + torch.arange(layout.mesh.shape[axes[place]]).view(view)
    return int(grid.sum())


def _index(layout: Layout, device: int) -> tuple[slice, ...]:
    return slices_within(layout.box(device), tuple((0, size) for size in layout.global_shape))


def _runs(
    rank: int,
    mesh: DeviceMesh,
    torch_meshes: Sequence[TorchMesh],
    communicators: Sequence[ProcessGroupCommunicator],
    source: str,
    target: str,
    whole: torch.Tensor,
) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor, str]:
    """Return what each contender runs on one pair, the shard wanted, and our plan."""
    before = Layout(mesh, source, tuple(whole.shape), whole.dtype)
    plan = LayoutConverter().plan(before, target)
    local = addend(before, whole, rank)
    wanted = (whole * total_factor(before))[_index(plan.target, rank)]
    default, graph = (
        TorchDTensor.from_local(
            local,
            torch_mesh,
            placements_of(before),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        for torch_mesh in torch_meshes
    )
    placements = placements_of(plan.target)
    ours, through_gloo = (
        DTensor.from_local(
            local, mesh, before.spec, global_shape=whole.shape, communicator=communicator
        )
        for communicator in communicators
    )

    def by_graph() -> torch.Tensor:
        with use_min_cost_redistribution_plan():
            return graph.redistribute(placements=placements).to_local()

    runs = {
        "torch": lambda: default.redistribute(placements=placements).to_local(),
        "torch graph": by_graph,
        "messages": lambda: through_gloo.redistribute(target).to_local(),
        "shardspec": lambda: ours.redistribute(target).to_local(),
    }
    return runs, wanted, " ".join(f"{type(s).__name__}{list(s.axes)}" for s in plan.steps)


def _time(run: Callable[[], torch.Tensor], wanted: torch.Tensor, name: str) -> float:
    dist.barrier()
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    if not torch.equal(result, wanted):
        raise SystemExit(f"{name}: wrong result on rank {dist.get_rank()}")
    return seconds


def _rank(rank: int, world: int, store: str, options: argparse.Namespace, out: Any) -> None:  # noqa: ANN401
    """Time every pair on one mesh; rank 0 hands the rows back."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # its advice about plans, once a process
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    shape = tuple(options.mesh)
    mesh = DeviceMesh(
        range(world),
        shape,
        mesh_alpha=(0.0,) * len(shape),
        mesh_beta=(SECONDS_PER_BYTE,) * len(shape),
        link_model="shared-bus",
    )
    ids = torch.arange(world).reshape(shape)
    # Names of their own keep the two planners' cached plans apart.
    torch_meshes = [
        TorchMesh("cpu", ids, mesh_dim_names=tuple(f"{name}{axis}" for axis in range(len(shape))))
        for name in ("default", "graph")
    ]
    communicators = [ProcessGroupCommunicator.of(mesh)]
    with mock.patch.dict(os.environ, SHARDSPEC_TRANSPORT="messages"):
        communicators.append(ProcessGroupCommunicator(mesh))
    rows, columns = options.size
    whole = (torch.arange(rows * columns) % 1021).to(torch.float32).reshape(rows, columns)
    found = []
    for source, target in options.pairs:
        runs, wanted, steps = _runs(rank, mesh, torch_meshes, communicators, source, target, whole)
        names = list(runs)
        times: dict[str, list[float]] = {name: [] for name in names}
        for repetition in range(options.warmup + options.repetitions):
            for turn in range(len(names)):
                name = names[(repetition + turn) % len(names)]
                times[name].append(_time(runs[name], wanted, f"{name} {source}→{target}"))
        slowest = torch.tensor([times[name][options.warmup :] for name in CONTENDERS])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        ms = dict(zip(CONTENDERS, (slowest.median(dim=1).values * 1e3).tolist(), strict=True))
        found.append(
            Row(
                "x".join(map(str, shape)),
                source,
                target,
                torch_ms=ms["torch"],
                torch_graph_ms=ms["torch graph"],
                messages_ms=ms["messages"],
                shardspec_ms=ms["shardspec"],
                plan=steps,
            )
        )
    if rank == 0:
        out.put(found)
    dist.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the report on one mesh."""
    names = ("pair", "torch", "graph", "messages", "ours", "ratio", "/graph", "/messages")
    widths = (20, 9, 9, 9, 9, 7, 7, 9)
    yield "".join(
        f"{n:<{w}}" if n == "pair" else f"{n:>{w}}" for n, w in zip(names, widths, strict=True)
    )
    for row in rows:
        numbers = (
            row.torch_ms,
            row.torch_graph_ms,
            row.messages_ms,
            row.shardspec_ms,
            row.ratio,
            row.graph_ratio,
            row.messages_ms / row.shardspec_ms,
        )
        columns = zip(numbers, widths[1:], strict=True)
        pair = f"{row.source} → {row.target}"
        yield f"{pair:<20}{''.join(f'{n:>{w}.2f}' for n, w in columns)}  {row.plan}"
    of_swaps = [row.ratio for row in rows if (row.source, row.target) in SWAPS]
    means = {
        "against torch's default": [row.ratio for row in rows],
        "on swap and reorder": of_swaps,
        "against its graph search": [row.graph_ratio for row in rows],
        "by messages alone": [row.torch_ms / row.messages_ms for row in rows],
    }
    said = [f"{statistics.geometric_mean(v):.2f} {name}" for name, v in means.items() if v]
    yield f"geomean {', '.join(said)}; least {min(row.ratio for row in rows):.2f}"


def measure(mesh: tuple[int, ...], options: argparse.Namespace) -> list[Row]:
    """Start the processes of one mesh and return their rows."""
    world = prod(mesh)
    given = argparse.Namespace(**vars(options))
    given.mesh, given.size = mesh, options.size or SIZES[mesh]
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (world, str(Path(folder) / "store"), given, out)
        processes = [context.Process(target=_rank, args=(rank, *args)) for rank in range(world)]
        try:
            for process in processes:
                process.start()
            while out.empty():
                if any(process.exitcode for process in processes):
                    raise SystemExit("a process failed; what it printed is above")
                time.sleep(0.2)
            rows: list[Row] = out.get()
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
    return rows


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.execution", description=__doc__)
    parser.add_argument(
        "--mesh",
        type=_numbers,
        action="append",
        choices=list(SIZES),
        help="2x2 or 2x4; both unless given",
    )
    parser.add_argument("--size", type=_numbers, help="rows x columns of the float32 tensor")
    parser.add_argument("--repetitions", type=int, default=15, help="timed, after the warm-up")
    parser.add_argument("--warmup", type=int, default=3, help="repetitions that do not count")
    parser.add_argument("--pair", type=pair_of, action="append", dest="pairs", help="as S0,R→R,R")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(arguments)
    options.pairs = options.pairs or PAIRS
    found = []
    for mesh in options.mesh or SIZES:
        rows = measure(mesh, options)
        found += rows
        if not options.json:
            lines, columns = options.size or SIZES[mesh]
            mib = lines * columns * 4 / 2**20
            print(
                f"{'x'.join(map(str, mesh))}, {mib:g} MiB float32, median ms of "
                f"{options.repetitions}, {os.cpu_count()} cores, torch {torch.__version__}, "
                f"Python {platform.python_version()}"
            )
            print("\n".join(table(rows)), flush=True)
    if options.json:
        json.dump([asdict(row) | {"ratio": row.ratio} for row in found], sys.stdout, indent=1)


if __name__ == "__main__":
    main()

"""Whole models to other meshes over gloo: a reshard plan beside what is done without one.

``python -m benchmarks.state`` converts every tensor of a model in three ways, which take turns in
the same processes: by a `ReshardPlan`, by torch's ``full_tensor`` and a slice, and by one message
for each pair of ranks, packed by hand. The time of a turn is that of the slowest process. All
results are compared with slices of the whole tensors. ``--paper`` plans DeepSeek-V3-like shapes
from 1,024 to 512 devices; ``--copy MIB`` compares a state dict with a copy through shared memory.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from math import prod
from multiprocessing import shared_memory
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TypeAlias, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.multiprocessing.spawn import spawn

from benchmarks.execution import placements_of
from benchmarks.state_models import ROWS, Row, deepseek, specs_of
from shardspec import DeviceMesh, Layout, ReshardPlan, plan_reshard
from shardspec.boxes import Box, box_size, intersect, slices_within
from shardspec.comm.cluster import Cluster
from shardspec.comm.curves import Link
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.mesh.job import current_job

__all__ = ["main"]

State: TypeAlias = dict[str, torch.Tensor]
T = TypeVar("T")
Run: TypeAlias = Callable[[], None]
"""Converts once, into tensors that are there."""


def _whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    start = sum(name.encode()) % 997
    return torch.arange(start, start + prod(shape), dtype=torch.float32).reshape(shape)


def _index(layout: Layout, rank: int) -> tuple[slice, ...]:
    return slices_within(layout.box(rank), tuple((0, size) for size in layout.global_shape))


def _shards(layouts: dict[str, Layout], rank: int) -> State:
    return {
        name: _whole(name, layout.global_shape)[_index(layout, rank)].contiguous()
        for name, layout in layouts.items()
        if rank in layout.mesh
    }


def _other(layouts: dict[str, Layout], rank: int) -> State:
    """Return weights to be replaced; the system has given their memory, as to those of a model."""
    return {
        name: torch.full(layout.local_shape(rank), 7.0)
        for name, layout in layouts.items()
        if rank in layout.mesh
    }


def by_hand(before: dict[str, Layout], after: dict[str, Layout], state: State, out: State) -> Run:
    """Return what sends one message to each peer; which boxes it has is worked out once."""
    rank = dist.get_rank()
    sends: dict[int, list[tuple[str, tuple[slice, ...]]]] = defaultdict(list)
    receives: dict[int, list[tuple[str, tuple[slice, ...]]]] = defaultdict(list)
    kept: list[tuple[str, tuple[slice, ...], tuple[slice, ...]]] = []
    sent: Counter[int] = Counter()
    for name in before:
        holders: dict[Box, list[int]] = defaultdict(list)
        for device, box in before[name].boxes().items():
            holders[box].append(device)
        for receiver, wanted in after[name].boxes().items():
            for box, devices in holders.items():
                part = intersect(box, wanted)
                if part is None:
                    continue
                sender = min(devices, key=lambda d: (d != receiver, sent[d]))
                mine, own_index = slices_within(part, box), slices_within(part, wanted)
                if sender == receiver == rank:
                    kept.append((name, mine, own_index))
                elif sender != receiver:
                    sent[sender] += box_size(part)
                    if rank == sender:
                        sends[receiver].append((name, mine))
                    if rank == receiver:
                        receives[sender].append((name, own_index))

    def run() -> None:
        incoming, works = {}, []
        for peer, places in receives.items():
            incoming[peer] = torch.empty(sum(out[name][at].numel() for name, at in places))
            works.append((peer, dist.irecv(incoming[peer], peer)))
        going = []
        for peer, places in sends.items():
            packed = torch.cat([state[name][at].reshape(-1) for name, at in places])
            going.append((packed, dist.isend(packed, peer)))
        for name, mine, own_index in kept:
            out[name][own_index] = state[name][mine]
        for peer, work in works:
            _wait(work)
            at = 0
            for name, own_index in receives[peer]:
                place = out[name][own_index]
                place.copy_(incoming[peer][at : at + place.numel()].view(place.shape))
                at += place.numel()
        for _, work in going:
            _wait(work)

    return run


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def by_full_tensor(row: Row, state: State, out: State) -> Run:
    """Return what gathers each tensor by torch, sends it to ranks outside, and cuts it."""
    rank = dist.get_rank()
    before, after = row.layouts(row.source), row.layouts(row.target)
    mesh = row.source[0]
    torch_mesh = TorchMesh("cpu", torch.tensor(mesh.ids).reshape(mesh.shape))
    cut = {
        name: TorchDTensor.from_local(
            shard,
            torch_mesh,
            placements_of(before[name]),
            run_check=False,
            shape=torch.Size(row.shapes[name]),
            stride=torch.empty(row.shapes[name], device="meta").stride(),
        )
        for name, shard in state.items()
    }
    outside = set(row.target[0].ids) - set(mesh.ids)

    def run() -> None:
        for name, shape in row.shapes.items():
            whole = cut[name].full_tensor() if name in cut else torch.empty(shape)
            if outside:
                dist.broadcast(whole, mesh.ids[0])
            if name in out:
                out[name].copy_(whole[_index(after[name], rank)])

    return run


def _run(plan: ReshardPlan, state: State, out: State) -> None:
    plan.run(state, out)


def _by_messages(plan: ReshardPlan, state: State, out: State) -> None:
    """Run a plan as it runs where no process may read another one's memory."""
    mesh = DeviceMesh(plan.copies.devices, (len(plan.copies.devices),))
    communicators = current_job().communicators
    usual = ProcessGroupCommunicator.of(mesh)
    communicators[mesh] = _without_reading(mesh)
    plan.run(state, out)
    communicators[mesh] = usual


@cache
def _without_reading(mesh: DeviceMesh) -> ProcessGroupCommunicator:
    with mock.patch.dict(os.environ, SHARDSPEC_TRANSPORT="messages"):
        return ProcessGroupCommunicator(mesh)


def _timed(run: Run) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _same(out: State, expected: State) -> None:
    assert out.keys() == expected.keys()
    for name, shard in out.items():
        assert torch.equal(shard, expected[name]), f"{name} is not what it should be"
        shard.zero_()


def measure(rank: int, row: Row, times: int) -> dict[str, float]:
    """Return the seconds of a row on one process, the slowest one's."""
    torch.set_num_threads(1)
    before, after = row.layouts(row.source), row.layouts(row.target)
    state, out, expected = _shards(before, rank), _other(after, rank), _shards(after, rank)

    def first() -> None:
        plan_reshard(before, after).run(state, out)

    seconds_of_ways = {"first": _timed(first)}
    _same(out, expected)
    plan = plan_reshard(before, after)
    ways: dict[str, Run] = {
        "plan": lambda: _run(plan, state, out),
        "messages": lambda: _by_messages(plan, state, out),
        "hand": by_hand(before, after, state, out),
        "full": by_full_tensor(row, state, out),
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(times + 1):
        for name, run in ways.items():
            seconds = _timed(run)
            _same(out, expected)
            if number:
                taken[name].append(seconds)
    return seconds_of_ways | {name: statistics.median(seconds) for name, seconds in taken.items()}


def _process(
    rank: int,
    world: int,
    at: str,
    work: Callable[..., T],
    out: "SimpleQueue[T]",
    *args: object,
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=world)
    result = work(rank, *args)
    if rank == 0:
        out.put(result)
    dist.barrier()
    dist.destroy_process_group()


def in_processes(world: int, work: Callable[..., T], *args: object) -> T:
    """Return what a function gives on the first of some processes."""
    with tempfile.TemporaryDirectory() as folder:
        out: SimpleQueue[T] = mp.get_context("spawn").SimpleQueue()
        given = (world, str(Path(folder) / "at"), work, out, *args)
        # torch leaves this function untyped.
        spawn(_process, given, nprocs=world)  # type: ignore[no-untyped-call]
        return out.get()


def copied(rank: int, num_bytes: int, times: int) -> tuple[float, float]:
    """Return the seconds of a plan, and of a copy of what it moves through shared memory."""
    torch.set_num_threads(1)
    side = 4096
    shapes = {f"w{i}": (side, side) for i in range(num_bytes // (4 * side * side))}
    line = DeviceMesh(range(4), (4,))
    before = {name: Layout(line, "[S0,R]", shape, "float32") for name, shape in shapes.items()}
    turned = DeviceMesh([1, 2, 3, 0], (4,))
    after = {name: Layout(turned, "[S0,R]", shape, "float32") for name, shape in shapes.items()}
    state = {name: torch.full((side // 4, side), float(rank)) for name in shapes}
    out = {name: torch.zeros(side // 4, side) for name in shapes}
    plan = plan_reshard(before, after)
    size = side * side
    name = [f"shardspec-{dist.get_world_size()}-{id(out)}" if rank == 0 else ""]
    dist.broadcast_object_list(name)
    mine = shared_memory.SharedMemory(f"{name[0]}-{rank}", create=True, size=size)
    dist.barrier()
    peer = shared_memory.SharedMemory(f"{name[0]}-{(rank - 1) % 4}")
    seen = [
        torch.frombuffer(memory.buf, dtype=torch.float32, count=size // 4)
        for memory in (mine, peer)
    ]

    def bare() -> None:
        for key, shard in state.items():
            seen[0].copy_(shard.view(-1))
            out[key].view(-1).copy_(seen[1])

    ways: dict[str, Run] = {"plan": lambda: _run(plan, state, out), "bare": bare}
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(times + 1):
        for way, run in ways.items():
            seconds = _timed(run)
            if way == "plan":
                assert all(bool((t == (rank - 1) % 4).all()) for t in out.values())
            if number:
                taken[way].append(seconds)
    seen.clear()
    peer.close()
    dist.barrier()
    mine.close()
    mine.unlink()
    return statistics.median(taken["plan"]), statistics.median(taken["bare"])


def on_paper() -> None:
    """Plan the large model, and say how even the work is."""
    shapes = deepseek()
    source = DeviceMesh(range(1024), (32, 32))
    target = DeviceMesh(range(1024, 1536), (16, 32))
    cpu = time.process_time()
    ends = []
    for mesh, specs in (
        (source, specs_of(shapes, "[S01,R]", "[S0,S1]", "[R]")),
        (target, specs_of(shapes, "[S1,R]", "[R,S1]", "[R]")),
    ):
        end = mesh, specs
        ends.append(Row("", 0, shapes, end, end).layouts(end))
    plan = plan_reshard(ends[0], ends[1], links=Cluster(Link(0.0, 1e-9, "one host")))
    sent, received = plan.sent, plan.received
    seconds = time.process_time() - cpu
    senders, receivers = len(source.ids), len(target.ids)
    total = sum(sent.values())
    first, turns = _others(plan)
    print(f"{len(shapes):,} tensors, 1,024 → 512 devices: {seconds:.1f} s of one core, ", end="")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    cpu = time.process_time()
    staged = plan_reshard(ends[0], ends[1])
    print(f"on {staged.copies.num_hosts} hosts, in {len(staged.copies.stages)} stages: ", end="")
    print(f"{time.process_time() - cpu:.1f} s")
    print("| busiest, of the even share | sender | receiver |\n| --- | ---: | ---: |")
    share = total / senders
    most = max(received.values()) / (total / receivers)
    for name, value in (
        ("plan", max(sent.values())),
        ("first holder", max(first.values())),
        ("holders in turn", max(turns.values())),
    ):
        print(f"| {name} | {value / share:.3f} | {most:.3f} |")


def _others(plan: ReshardPlan) -> tuple[Counter[int], Counter[int]]:
    """Return what devices send if the first holder does, and if holders take turns."""
    first: Counter[int] = Counter()
    turns: Counter[int] = Counter()
    (stage,) = plan.copies.stages
    for number, copy in enumerate(stage.groups[0]):
        first[copy.holders[0]] += copy.num_bytes
        turns[copy.holders[number % len(copy.holders)]] += copy.num_bytes
    return first, turns


def main(args: list[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state", description=__doc__)
    parser.add_argument(
        "--times", type=int, default=7, help="repetitions, the first one not counted"
    )
    parser.add_argument("--rows", type=int, nargs="*", help="which rows, from 0")
    parser.add_argument("--paper", action="store_true", help="plan the large model")
    parser.add_argument("--copy", type=int, metavar="MIB", help="beside a copy of memory")
    given = parser.parse_args(args)
    if given.paper:
        on_paper()
        return 0
    if given.copy:
        plan, bare = in_processes(4, copied, given.copy << 20, given.times)
        print(
            f"{given.copy} MiB from 4 to 4 processes: {plan:.2f} s; through shared memory ", end=""
        )
        print(f"{bare:.2f} s; speed {bare / plan:.2f} of it")
        return 0
    print("| model | plan, ms | by messages | by hand | full_tensor | faster | first ÷ second |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for number, row in enumerate(ROWS):
        if given.rows and number not in given.rows:
            continue
        seconds = in_processes(row.world, measure, row, given.times)
        plan, hand, full = seconds["plan"], seconds["hand"], seconds["full"]
        print(
            f"| {row.name} | {plan * 1e3:.0f} | {seconds['messages'] * 1e3:.0f} | {hand * 1e3:.0f} "
            f"({plan / hand:.2f}) | {full * 1e3:.0f} | {full / plan:.1f} × | "
            f"{seconds['first'] / plan:.1f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

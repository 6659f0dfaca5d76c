"""Conversions by the hundred thousand, each compared with what the box map says.

``python -m benchmarks.right_results`` converts every pair of layouts on the meshes (2,3) and
(2,2,2) in one process, and many on 4, 6 and 8 gloo processes, where torch's own DTensor converts
the same tensor where it can say both layouts. Sizes with remainders, shards shorter than the mesh,
empty shards and tensors, scalars, device ids in any order, shards with gaps in memory, pending
reductions. Without a reduction results are compared bit for bit; with one, values are whole numbers
that every order of reducing gives the same. Where torch's result is another one, the box map
decides who is wrong; meshes whose ids are not in order are left to the box map, since torch's
groups are sorted.
"""

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import click
import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec import DeviceMesh, DTensor, Layout, ShardingSpec
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.interop.notations import to_placements
from shardspec.text import table_text
from tests.conversions import (
    partial_specs,
    plain_specs,
    reduced,
    same_bits,
    shard_of,
    stack_of,
    strided,
    targets_of,
)
from tests.dist.processes import run_ranks

DTYPES = (
    "float32",
    "bfloat16",
    "int64",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float64",
)
SIX = (DeviceMesh(range(6), (2, 3)), DeviceMesh([4, 0, 5, 2, 1, 3], (2, 3)))
EIGHT = (DeviceMesh(range(8), (2, 2, 2)), DeviceMesh([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2)))
SMALL = ((6, 12), (7, 5), (13, 8), (1, 4), (5, 1), (0, 5), (7,), (2,), ())
LARGE = ((8, 16), (11, 5), (3, 2), (1, 13), (0, 5), (9,), ())
CUBES = ((8, 8, 8), (5, 3, 7), (2, 1, 3), (0, 4, 4))
OTHER_MESHES = (
    DeviceMesh([7], (1,)),
    DeviceMesh([7], (1, 1)),
    DeviceMesh([2, 0, 1], (3,)),
    DeviceMesh(range(5), (5,)),
    DeviceMesh([9, 4, 2], (1, 3)),
    DeviceMesh([5, 3, 1], (3, 1)),
    DeviceMesh([3, 1, 2, 0], (2, 1, 2)),
    SIX[1],
)
OTHER_SHAPES = ((), (1,), (0,), (13,), (3, 0), (5, 1), (0, 0), (3, 2, 5, 4), (2, 0, 3, 4))


def simulated() -> Iterator[tuple[str, Layout, ShardingSpec]]:
    """Yield what is converted in one process: a category, a layout and a target."""
    number = 0
    for meshes, shapes in ((SIX, SMALL), (EIGHT, LARGE)):
        for mesh, shape in product(meshes, shapes):
            specs = plain_specs(len(shape), mesh.ndim)
            for dtype in DTYPES if mesh.size() == 6 else (None, None):
                for source, target in product(specs, specs):
                    number += 1
                    chosen = dtype or DTYPES[number % len(DTYPES)]
                    yield _category(mesh, shape), Layout(mesh, source, shape, chosen), target
    for mesh, shape in product((*SIX, EIGHT[0]), CUBES):
        specs = plain_specs(3, mesh.ndim)
        for source, target in product(specs, specs):
            number += 1
            dtype = DTYPES[number % len(DTYPES)]
            yield _category(mesh, shape), Layout(mesh, source, shape, dtype), target
    for mesh, shape in product(OTHER_MESHES, OTHER_SHAPES):
        specs = plain_specs(len(shape), mesh.ndim)
        for source, target in product(specs, specs):
            number += 1
            layout = Layout(mesh, source, shape, DTYPES[number % len(DTYPES)])
            yield "other meshes, rank 0 to 4", layout, target
    for mesh, shape in product((SIX[1], EIGHT[0]), ((6, 12), (7, 5), (1, 3))):
        for source in partial_specs(2, mesh.ndim, mixed=mesh.size() == 6):
            for target in targets_of(source, mesh.ndim)[number % 3 :: 3]:
                number += 1
                yield "a reduction pending", Layout(mesh, source, shape, "float64"), target


def _category(mesh: DeviceMesh, shape: tuple[int, ...]) -> str:
    order = "" if mesh.ids == tuple(sorted(mesh.ids)) else ", ids shuffled"
    kind = "empty" if 0 in shape else "scalar" if not shape else "even"
    if kind == "even" and any(size % prod(mesh.shape) for size in shape):
        short = any(size < max(mesh.shape) for size in shape)
        kind = "shorter than the mesh" if short else "with remainders"
    return f"{'x'.join(map(str, mesh.shape))}, {kind}{order}"


def in_one_process() -> tuple[Counter[str], list[str]]:
    """Convert all of `simulated`, shards with gaps in memory every other time."""
    done: Counter[str] = Counter()
    wrong: list[str] = []
    for number, (category, before, target) in enumerate(simulated()):
        stack = stack_of(before)
        shards = {device: shard_of(before, stack, device) for device in before.mesh.ids}
        if number % 2:
            shards = {device: strided(shard) for device, shard in shards.items()}
        tensor = DTensor.from_shards(shards, before, SimulatedCommunicator(before.mesh))
        result = tensor.redistribute(target)
        expected = reduced(stack, before.spec, result.layout.spec)
        done[category] += 1
        if not all(
            same_bits(result.shards[device], shard_of(result.layout, expected, device))
            for device in before.mesh.ids
        ):
            wrong.append(f"{before} → {target}")
    return done, wrong


def _on_a_rank(
    rank: int, meshes: list[DeviceMesh], every: int
) -> tuple[int, int, list[str], list[str]]:
    """Convert pairs on real processes; and by torch where its placements are plain."""
    logging.disable(logging.WARNING)  # torch's, about its own collectives
    done = by_torch = 0
    wrong: list[str] = []
    torch_wrong: list[str] = []
    for mesh in meshes:
        in_order = mesh.ids == tuple(sorted(mesh.ids))
        in_torch = (
            TorchMesh("cpu", torch.tensor(mesh.ids).reshape(mesh.shape)) if in_order else None
        )
        for shape in ((8, 12), (7, 5), (1, 3), (0, 4), (5, 3, 7), (9,), ()):
            specs = plain_specs(len(shape), mesh.ndim)
            pairs = list(product(specs, specs))
            for number, (source, target) in enumerate(pairs[:: max(1, len(pairs) // every)]):
                before = Layout(mesh, source, shape, DTYPES[number % len(DTYPES)])
                stack = stack_of(before)
                shard = shard_of(before, stack, rank)
                given = strided(shard) if number % 2 else shard
                tensor = DTensor.from_local(given, mesh, source, global_shape=shape)
                result = tensor.redistribute(target)
                done += 1
                right = shard_of(result.layout, stack, rank)
                if not same_bits(result.to_local(), right):
                    wrong.append(f"{before} → {target}")
                plain = all(
                    axes == sorted(axes, key=int)
                    for spec in (source, target)
                    for axes in spec.dim_partition_dict.values()
                )
                if in_torch and plain and not before.dtype.startswith("float8") and 0 not in shape:
                    theirs: Any = TorchDTensor.from_local(
                        shard,
                        in_torch,
                        to_placements(source, mesh),
                        shape=torch.Size(shape),
                        stride=torch.empty(shape).stride(),
                    ).redistribute(in_torch, to_placements(target, mesh))
                    by_torch += 1
                    if not same_bits(theirs.to_local().contiguous(), right):
                        torch_wrong.append(f"{before} → {target}")
        reductions, bad = _reductions_on_a_rank(rank, mesh, every)
        done += reductions
        wrong += bad
    return done, by_torch, wrong, torch_wrong


def _reductions_on_a_rank(rank: int, mesh: DeviceMesh, every: int) -> tuple[int, list[str]]:
    """Convert from pending sums, means, minima, maxima and products, finished or kept."""
    wrong: list[str] = []
    pairs = [
        (source, target)
        for source in partial_specs(2, mesh.ndim)
        for target in targets_of(source, mesh.ndim)
    ]
    chosen = pairs[:: max(1, len(pairs) // (2 * every))]
    for number, (source, target) in enumerate(chosen):
        shape = ((8, 12), (7, 5), (1, 3))[number % 3]
        before = Layout(mesh, source, shape, ("float64", "float32")[number % 2])
        stack = stack_of(before)
        shard = shard_of(before, stack, rank)
        tensor = DTensor.from_local(
            strided(shard) if number % 2 else shard, mesh, source, global_shape=shape
        )
        result = tensor.redistribute(target)
        expected = reduced(stack, before.spec, result.layout.spec)
        if not same_bits(result.to_local(), shard_of(result.layout, expected, rank)):
            wrong.append(f"{before} → {target}")
    return len(chosen), wrong


@click.command()
@click.option("--every", default=60, show_default=True, help="Pairs per mesh and shape on gloo.")
@click.option("--only", type=click.Choice(["simulated", "gloo"]), help="One half.")
def main(every: int, only: str | None) -> None:
    """Count conversions, and those whose result is not what the box map says."""
    wrong = [] if only == "gloo" else _simulated()
    if only != "simulated":
        wrong += _gloo(every)
    for text in wrong[:40]:
        print(f"WRONG {text}")


def _simulated() -> list[str]:
    started = time.perf_counter()
    done, wrong = in_one_process()
    rows = [[category, f"{count:,}"] for category, count in sorted(done.items())]
    print(table_text(["simulated", "conversions"], rows))
    print(
        f"simulated: {sum(done.values()):,} conversions, {len(wrong)} wrong, in "
        f"{time.perf_counter() - started:.0f} s"
    )
    return wrong


def _gloo(every: int) -> list[str]:
    wrong: list[str] = []
    worlds = {
        4: [DeviceMesh(range(4), (2, 2)), DeviceMesh([2, 0, 3, 1], (2, 2))],
        6: list(SIX),
        8: [*EIGHT, DeviceMesh(range(8), (2, 4))],
    }
    for world, meshes in worlds.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_ranks(world, Path(folder), _on_a_rank, meshes, every, timeout_s=600)
        count, by_torch, *_ = outcomes[0]
        ours = [text for *_, texts, _ in outcomes for text in texts]
        torchs = sorted({text for *_, texts in outcomes for text in texts})
        print(
            f"{world} gloo processes: {count:,} conversions, {len(ours)} wrong, in "
            f"{time.perf_counter() - started:.0f} s; torch's own: {by_torch:,}, "
            f"{len(torchs)} wrong"
        )
        for text in torchs[:8]:
            print(f"  torch is wrong on {text}")
        wrong += ours
    return wrong


if __name__ == "__main__":
    main()

"""Costs of all edges of a graph as large as the one that AutoParallel published.

    python -m benchmarks.edge_costs

LLaMA-3 8B with 32 layers on 64 GPUs, mesh 8x8, has 8.4 million keys there: of each edge every
placement that strategies of the producer put out, with every one that those of the consumer want.
Here each layer has an edge for the model's tensors in turn, forward and backward, with 89 specs at
either end, and every spec is an object of its own, as strategies have them.
"""

import random
import time
from itertools import accumulate, product
from operator import mul
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost as torchs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardspec.interop.torch_cost import RedistributeCost

BATCH, LENGTH, WIDTH, INNER, HEADS, GROUPS, WORDS = 16, 8192, 4096, 14336, 32, 8, 128256
LAYERS, EDGES, SPECS = 32, 33, 89
KEPT, NARROW = (BATCH, LENGTH), WIDTH // HEADS * GROUPS
SHAPES = [
    *((*KEPT, n) for n in (WIDTH, NARROW, INNER, WORDS)),
    *((BATCH * LENGTH, n) for n in (WIDTH, NARROW, INNER, WORDS)),
    *((BATCH, n, LENGTH, WIDTH // HEADS) for n in (HEADS, GROUPS)),
    *((*KEPT, n, WIDTH // HEADS) for n in (HEADS, GROUPS)),
    *((WIDTH, n) for n in (WIDTH, NARROW, INNER, WORDS)),
    *((n, WIDTH) for n in (NARROW, INNER, WORDS)),
    KEPT,
    (WIDTH,),
]

Placements: TypeAlias = tuple[Placement, ...]
Edge: TypeAlias = tuple[list[DTensorSpec], list[DTensorSpec]]


def graph(mesh: DeviceMesh) -> list[Edge]:
    """Return the edges, each time of new objects."""
    chosen = random.Random(0)
    ends: list[tuple[tuple[int, ...], list[Placements], list[Placements]]] = []
    for shape in (SHAPES * 2)[:EDGES]:
        ways: tuple[Placement, ...] = (Replicate(), *map(Shard, range(len(shape))), Partial())
        pairs = list(product(ways, repeat=mesh.ndim))
        outputs, inputs = (chosen.choices(pairs, k=SPECS) for _ in range(2))
        ends.append((shape, outputs, inputs))
    edges = []
    for _ in range(LAYERS):
        for shape, outputs, inputs in ends:
            strides = tuple(accumulate((1, *reversed(shape[1:])), mul))[::-1]
            meta = TensorMeta(torch.Size(shape), strides, torch.bfloat16)
            some = (
                [DTensorSpec(mesh, p, tensor_meta=meta) for p in end] for end in (outputs, inputs)
            )
            edges.append((next(some), next(some)))
    return edges


def main() -> None:
    """Price all edges twice, and some of the pairs by torch's own function."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    mesh = DeviceMesh("cpu", torch.arange(64).reshape(8, 8))
    cost = RedistributeCost()
    for which in ("first", "again"):
        edges = graph(mesh)
        start = time.process_time()
        tables = cost.tables(edges)
        spent = time.process_time() - start
        print(f"{sum(table.size for table in tables):,} keys, {which}: {spent:.2f} s of CPU time")
    pairs = [
        (a, b) for sources, targets in edges[:EDGES] for a, b in zip(sources, targets, strict=True)
    ]
    start = time.process_time()
    for pair in pairs:
        torchs(*pair)
    each = (time.process_time() - start) / len(pairs)
    print(f"torch's redistribute_cost, {len(pairs):,} pairs one by one: {each * 1e6:.1f} µs each")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

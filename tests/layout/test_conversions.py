"""Every edge and every pair of layouts, simulated: each device ends with its box of the tensor."""

from itertools import product
from math import prod

import pytest
import torch

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    LayoutConverter,
    ShardingSpec,
    SimulatedCommunicator,
)
from shardspec.comm.steps import ReduceOp
from shardspec.layout.graph import explore, spec_of
from shardspec.layout.moving import transfers_of


def every_spec(num_axes: int, dims: int) -> list[ShardingSpec]:
    graph = explore(num_axes, ShardingSpec(dims))
    return sorted((spec_of(state) for state in graph.nodes), key=str)


def shards_of(whole: torch.Tensor, layout: Layout) -> dict[int, torch.Tensor]:
    return {
        device: whole[tuple(slice(lo, hi) for lo, hi in layout.box(device))]
        for device in layout.mesh.ids
    }


def wrong_pairs(
    mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, every: int = 1
) -> tuple[int, list[str]]:
    whole = (torch.arange(prod(shape)) * 37 % 251).reshape(shape).to(dtype)
    specs = every_spec(mesh.ndim, len(shape))
    right = [shards_of(whole, Layout(mesh, spec, shape, dtype)) for spec in specs]
    wrong = []
    pairs = list(product(zip(specs, right, strict=True), repeat=2))[::every]
    for (source, held), (target, wanted) in pairs:
        layout = Layout(mesh, source, shape, dtype)
        start = DTensor.from_shards(held, layout, SimulatedCommunicator(mesh))
        got = start.redistribute(target).shards
        if any(not torch.equal(got[device], wanted[device]) for device in mesh.ids):
            wrong.append(f"{source} → {target}")
    return len(pairs), wrong


@pytest.mark.parametrize(
    ("ids", "mesh_shape", "shape", "pairs"),
    [
        (range(6), (2, 3), (6, 12), 121),
        (range(6), (2, 3), (7, 5), 121),
        (range(6), (2, 3), (1, 4), 121),
        (range(6), (2, 3), (0, 5), 121),
        ([4, 0, 5, 2, 1, 3], (2, 3), (13, 8), 121),
        (range(6), (2, 3), (6, 6, 6), 361),
        (range(6), (2, 3), (5, 7, 3), 361),
        (range(6), (2, 3), (4, 1, 2), 361),
        (range(8), (2, 2, 2), (8, 16), 343),
        ([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2), (11, 5), 343),
        (range(8), (2, 2, 2), (5, 3, 7), 661),
        (range(2), (1, 2), (6, 12), 121),
        (range(2), (2, 1), (7, 5), 121),
        ([5], (1, 1), (3, 2), 121),
        ([2, 0, 1], (1, 3, 1), (7, 5), 343),
        (range(6), (1, 3, 2), (6, 12), 343),
        (range(6), (1, 3, 2), (7, 5), 343),
    ],
)
def test_every_pair_against_the_box_map(ids, mesh_shape, shape, pairs):
    """Every pair of two axes; of three axes some, see below."""
    every = {(3, 2): 7, (3, 3): 17}.get((len(mesh_shape), len(shape)), 1)
    mesh = DeviceMesh(ids, mesh_shape)
    assert wrong_pairs(mesh, shape, torch.int16, every) == (pairs, [])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ids", "mesh_shape", "shape", "pairs"),
    [
        (range(8), (2, 2, 2), (8, 16), 2401),
        ([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2), (11, 5), 2401),
        (range(8), (2, 2, 2), (5, 3, 7), 11236),
        ([2, 0, 1], (1, 3, 1), (7, 5), 2401),
        (range(6), (1, 3, 2), (6, 12), 2401),
        (range(6), (1, 3, 2), (7, 5), 2401),
    ],
)
def test_every_pair_of_three_axes(ids, mesh_shape, shape, pairs):
    assert wrong_pairs(DeviceMesh(ids, mesh_shape), shape, torch.int16) == (pairs, [])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64],
    ids=str,
)
def test_every_pair_with_every_kind_of_dtype(dtype):
    assert wrong_pairs(DeviceMesh(range(6), (2, 3)), (7, 5), dtype) == (121, [])


def result_of(op: ReduceOp, addends: torch.Tensor) -> torch.Tensor:
    match op:
        case "sum":
            return addends.sum(0)
        case "avg":
            return addends.mean(0)
        case "prod":
            return addends.prod(0)
        case "min":
            return addends.amin(0)
        case "max":
            return addends.amax(0)


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "prod"])
@pytest.mark.parametrize("shape", [(6, 12), (7, 5), (1, 2)])
@pytest.mark.parametrize("pending", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 3), (1, 2), (2, 1), (1, 1)], ids=str)
def test_every_pair_with_a_pending_source(op, shape, pending, mesh_shape):
    """Every source with `pending`, and every target with nothing or a part of it still pending."""
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    count = prod(mesh.shape[axis] for axis in pending)
    generator = torch.Generator().manual_seed(7)
    addends = torch.randint(-2, 3, (count, *shape), generator=generator).double()
    whole = result_of(op, addends)
    sources = [
        ShardingSpec(spec.dims, spec.dim_partition_dict, partial=dict.fromkeys(pending, op))
        for spec in every_spec(2, 2)
        if not set(spec.axes) & set(pending)
    ]
    wrong, tried = [], 0
    for source in sources:
        layout = Layout(mesh, source, shape, torch.float64)
        held = {}
        for device in mesh.ids:
            at = mesh.coordinates(device)
            index = 0
            for axis in pending:
                index = index * mesh.shape[axis] + at[axis]
            held[device] = shards_of(addends[index], layout)[device]
        start = DTensor.from_shards(held, layout, SimulatedCommunicator(mesh))
        for target in every_spec(2, 2):
            tried += 1
            got = start.redistribute(target).shards
            wanted = shards_of(whole, layout.with_spec(target))
            if any(
                not torch.allclose(got[device], wanted[device], rtol=1e-12, atol=0)
                for device in mesh.ids
            ):
                wrong.append(f"{source} → {target}")
        kept = start.redistribute(source.with_dims({0: [], 1: []}))
        assert kept.sharding_spec.partials == source.partials
        tried += 1
        if not torch.allclose(kept.to_global(), whole, rtol=1e-12, atol=0):
            wrong.append(f"{source} → {kept.sharding_spec}")
    assert tried == len(sources) * 12
    assert len(sources) == {1: 3, 2: 1}[len(pending)]
    assert wrong == []


@pytest.mark.parametrize(
    "mesh_shape", [(2, 3), (2, 2, 2), (1, 2), (2, 1), (1, 1), (1, 3, 2)], ids=str
)
@pytest.mark.parametrize("shape", [(6, 12), (7, 5), (5, 3, 7)], ids=str)
def test_every_edge_of_the_graph(mesh_shape, shape):
    """Each step alone does what its edge says."""
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    communicator = SimulatedCommunicator(mesh)
    graph = explore(mesh.ndim, ShardingSpec(len(shape)))
    whole = torch.arange(prod(shape)).reshape(shape)
    edges = 0
    for before, after, step in graph.edges(data="step"):
        source = Layout(mesh, spec_of(before), shape, "int64")
        target = source.with_spec(spec_of(after))
        got = communicator.run(transfers_of(step, source, target), shards_of(whole, source))
        wanted = shards_of(whole, target)
        assert all(torch.equal(got[device], wanted[device]) for device in mesh.ids), step
        edges += 1
    assert edges == {(2, 2): 48, (2, 3): 126, (3, 2): 390, (3, 3): 1278}[mesh.ndim, len(shape)]


def test_a_plan_is_what_redistribute_runs():
    mesh = DeviceMesh(range(6), (2, 3))
    start = DTensor(torch.arange(35).reshape(7, 5), mesh, "[S01,R]")
    plan = LayoutConverter().plan(start.layout, "[S1,S0]")
    converted = start.convert(plan)
    assert converted.layout == plan.target == start.redistribute("[S1,S0]").layout
    assert converted.to_global().tolist() == start.to_global().tolist()

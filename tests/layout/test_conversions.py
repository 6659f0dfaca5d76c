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

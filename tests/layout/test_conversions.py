"""Every pair of layouts, simulated: each device ends with its box of the tensor."""

from itertools import product
from math import prod

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter, ShardingSpec
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.layout.graph import explore, spec_of


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


CASES = [
    (range(6), (2, 3), (6, 12)),
    (range(6), (2, 3), (7, 5)),
    (range(6), (2, 3), (1, 4)),
    (range(6), (2, 3), (0, 5)),
    ([4, 0, 5, 2, 1, 3], (2, 3), (13, 8)),
    (range(6), (2, 3), (6, 6, 6)),
    (range(6), (2, 3), (5, 7, 3)),
    (range(6), (2, 3), (4, 1, 2)),
    (range(8), (2, 2, 2), (8, 16)),
    ([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2), (11, 5)),
    (range(8), (2, 2, 2), (5, 3, 7)),
    (range(2), (1, 2), (6, 12)),
    (range(2), (2, 1), (7, 5)),
    ([5], (1, 1), (3, 2)),
    ([2, 0, 1], (1, 3, 1), (7, 5)),
    (range(6), (1, 3, 2), (6, 12)),
    (range(6), (1, 3, 2), (7, 5)),
]
PAIRS = {(2, 2): 121, (2, 3): 361, (3, 2): 2401, (3, 3): 11236}
"""By axes and dims."""
SAMPLED = {(2, 3): 5, (3, 2): 29, (3, 3): 97}
"""Of so many pairs `make test` takes one, where there are more than 121."""


def cases():
    for ids, mesh_shape, shape in CASES:
        pairs = PAIRS[len(mesh_shape), len(shape)]
        every = SAMPLED.get((len(mesh_shape), len(shape)), 1)
        if every > 1:
            yield ids, mesh_shape, shape, every, -(-pairs // every)
        marks = [pytest.mark.exhaustive] if every > 1 else []
        yield pytest.param(ids, mesh_shape, shape, 1, pairs, marks=marks)


@pytest.mark.parametrize(("ids", "mesh_shape", "shape", "every", "pairs"), list(cases()))
def test_every_pair_against_the_box_map(ids, mesh_shape, shape, every, pairs):
    mesh = DeviceMesh(ids, mesh_shape)
    assert wrong_pairs(mesh, shape, torch.int16, every) == (pairs, [])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64],
    ids=str,
)
def test_every_pair_with_every_kind_of_dtype(dtype):
    assert wrong_pairs(DeviceMesh(range(6), (2, 3)), (7, 5), dtype) == (121, [])


def test_a_plan_is_what_redistribute_runs():
    mesh = DeviceMesh(range(6), (2, 3))
    start = DTensor(torch.arange(35).reshape(7, 5), mesh, "[S01,R]")
    plan = LayoutConverter().plan(start.layout, "[S1,S0]")
    converted = start.convert(plan)
    assert converted.layout == plan.target == start.redistribute("[S1,S0]").layout
    assert converted.to_global().tolist() == start.to_global().tolist()

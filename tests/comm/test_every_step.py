"""Every single step there is between small layouts, run by itself, against the box map."""

from math import prod

import pytest
import torch

from shardspec import DeviceMesh, Layout, SimulatedCommunicator
from shardspec.comm.steps import Permute
from tests.conversions import (
    collectives,
    partial_specs,
    plain_specs,
    routed,
    run_moves,
)

# mesh, and per shape how many steps there are: collectives of the graph, permutes and exchanges.
# More layouts hold the same boxes where dims are even or empty, so there are more permutes.
PLAIN = {
    ((2, 3), (6, 12)): (48, 4, 110),
    ((2, 3), (7, 5)): (48, 2, 110),
    ((2, 3), (1, 2)): (48, 4, 110),
    ((2, 3), (0, 5)): (48, 26, 110),
    ((2, 3), (5, 7, 3)): (126, 4, 342),
    ((2, 2, 2), (11, 5)): (390, 222, 2352),
    ((2, 2, 2), (1, 3)): (390, 222, 2352),
    ((1, 1), (7, 5)): (48, 110, 110),
    ((1, 2), (6, 4)): (48, 30, 110),
    ((2, 1), (7, 5)): (48, 30, 110),
    ((1, 3, 2), (7, 5)): (390, 224, 2352),
}


def shuffled(mesh_shape):
    ids = torch.randperm(prod(mesh_shape), generator=torch.Generator().manual_seed(1))
    return DeviceMesh(ids + 3, mesh_shape)


def cases():
    """Yield meshes, shapes, and the stride of exchanges that are tried: on three axes, some."""
    for mesh_shape, shape in PLAIN:
        if len(mesh_shape) < 3:
            yield mesh_shape, shape, 1
            continue
        if shape != (11, 5):
            yield mesh_shape, shape, 8
        yield pytest.param(mesh_shape, shape, 1, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("mesh_shape", "shape", "every"), list(cases()), ids=str)
def test_every_step_gives_each_device_its_box(mesh_shape, shape, every):
    mesh = shuffled(mesh_shape)
    layouts = [Layout(mesh, s, shape, "int32") for s in plain_specs(len(shape), mesh.ndim)]
    moves = [move for layout in layouts for move in collectives(layout)]
    others = [move for a in layouts for b in layouts for move in routed(a, b)]
    permutes = [move for move in others if isinstance(move.step, Permute)]
    counts = (len(moves), len(permutes), len(others) - len(permutes))
    tried = moves + others[::every]
    outcome = run_moves(SimulatedCommunicator(mesh), tried)
    assert outcome.wrong == ()
    assert outcome.shards == mesh.size() * len(tried)
    assert counts == PLAIN[mesh_shape, shape]


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "ops", "count"),
    [
        ((2, 3), (7, 5), ("sum", "avg", "min", "max", "prod"), 205),
        ((2, 3), (1, 0), ("sum", "avg", "min", "max", "prod"), 205),
        ((2, 3), (5, 3, 4), ("sum", "max"), 142),
        ((2, 2, 2), (3, 5), ("sum", "prod"), 794),
        ((1, 1), (7, 5), ("sum", "avg", "min", "max", "prod"), 205),
        ((1, 2), (7, 5), ("sum", "avg", "min", "max", "prod"), 205),
        ((2, 1), (6, 4), ("sum", "avg", "min", "max", "prod"), 205),
        ((1, 3, 2), (7, 5), ("sum", "max"), 794),
    ],
    ids=str,
)
def test_steps_with_a_reduction_pending(mesh_shape, shape, ops, count):
    """Reductions, and moves of what is still pending, which keep every addend apart."""
    mesh = shuffled(mesh_shape)
    specs = partial_specs(len(shape), mesh.ndim, ops)
    layouts = [Layout(mesh, spec, shape, "float32") for spec in specs]
    moves = [move for layout in layouts for move in collectives(layout)]
    outcome = run_moves(SimulatedCommunicator(mesh), moves)
    assert outcome.wrong == ()
    assert outcome.shards == mesh.size() * len(moves)
    assert len(moves) == count


def test_sum_and_mean_pending_together():
    mesh = shuffled((2, 3, 2))
    specs = list(partial_specs(2, 3, mixed=True))
    moves = [m for s in specs for m in collectives(Layout(mesh, s, (5, 7), "float64"))]
    outcome = run_moves(SimulatedCommunicator(mesh), moves)
    assert outcome.wrong == ()
    assert (len(specs), len(moves)) == (24, 228)


DTYPES = {
    "float32": ("sum", "avg", "min", "max", "prod"),
    "float64": ("sum", "avg", "min", "max", "prod"),
    "bfloat16": ("sum", "avg", "min", "max", "prod"),
    "float16": ("sum", "avg", "min", "max", "prod"),
    "int64": ("sum", "min", "max", "prod"),
    "int8": ("sum", "min", "max", "prod"),
    "bool": ("sum", "min", "max", "prod"),
    "complex64": ("sum", "avg", "prod"),
    "float8_e4m3fn": (),
    "float8_e5m2": (),
}


@pytest.mark.parametrize(("dtype", "ops"), DTYPES.items(), ids=str)
def test_dtypes_and_shards_with_gaps(dtype, ops):
    mesh = shuffled((2, 3))
    sources = plain_specs(2, 2) + list(partial_specs(2, 2, ops))
    moves = [move for s in sources for move in collectives(Layout(mesh, s, (7, 5), dtype))]
    start = Layout(mesh, "[S01,R]", (7, 5), dtype)
    moves += [move for s in plain_specs(2, 2) for move in routed(start, start.with_spec(s))]
    outcome = run_moves(SimulatedCommunicator(mesh), moves, with_gaps=True)
    assert outcome.wrong == ()
    assert outcome.shards == 6 * len(moves)
    assert len(moves) == 58 + len(ops) * 41


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "prod"])
def test_every_step_of_a_scalar(op):
    mesh = shuffled((2, 3))
    specs = list(partial_specs(0, 2, [op]))
    moves = [move for s in specs for move in collectives(Layout(mesh, s, (), "float32"))]
    assert [str(spec) for spec in specs] == [
        f"[|P{op if op != 'sum' else ''}{axes}]" for axes in ("0", "1", "01")
    ]
    assert len(moves) == 5
    assert run_moves(SimulatedCommunicator(mesh), moves) == run_moves(
        SimulatedCommunicator(mesh), moves, with_gaps=True
    )
    assert run_moves(SimulatedCommunicator(mesh), moves).wrong == ()

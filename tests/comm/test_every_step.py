"""Every single step there is between small layouts, run by itself, against the box map."""

from collections import Counter
from itertools import permutations
from math import prod

import pytest
import torch

from shardspec import DeviceMesh, Layout
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.comm.steps import Exchange, Permute, ReduceOp
from tests.conversions import (
    Move,
    collectives,
    of_each_kind,
    partial_specs,
    plain_specs,
    routed,
    run_moves,
)

# mesh, and per shape how many steps there are: collectives of the graph and permutes.
# More layouts hold the same boxes where dims are even or empty, so there are more permutes.
PLAIN = {
    ((2, 3), (6, 12)): (48, 4),
    ((2, 3), (7, 5)): (48, 2),
    ((2, 3), (1, 2)): (48, 4),
    ((2, 3), (0, 5)): (48, 26),
    ((2, 3), (5, 7, 3)): (126, 4),
    ((2, 2, 2), (11, 5)): (390, 222),
    ((2, 2, 2), (1, 3)): (390, 222),
    ((2, 2, 2), (5, 3, 7)): (1278, 498),
    ((1, 1), (7, 5)): (48, 110),
    ((1, 2), (6, 4)): (48, 30),
    ((2, 1), (7, 5)): (48, 30),
    ((1, 3, 2), (7, 5)): (390, 224),
}


def shuffled(mesh_shape):
    ids = torch.randperm(prod(mesh_shape), generator=torch.Generator().manual_seed(1))
    return DeviceMesh(ids + 3, mesh_shape)


def cases():
    """Yield meshes and shapes, and one of how many steps is tried."""
    for mesh_shape, shape in PLAIN:
        every = {2: 1, 3: 9}[len(mesh_shape)] if len(shape) == 2 else {2: 3, 3: 29}[len(mesh_shape)]
        yield mesh_shape, shape, every
        if every > 1:
            yield pytest.param(mesh_shape, shape, 1, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("mesh_shape", "shape", "every"), list(cases()), ids=str)
def test_every_step_gives_each_device_its_box(mesh_shape, shape, every):
    """Of exchanges, which are most, five times fewer."""
    mesh = shuffled(mesh_shape)
    layouts = [Layout(mesh, s, shape, "int32") for s in plain_specs(len(shape), mesh.ndim)]
    moves = [move for layout in layouts for move in collectives(layout)]
    boxes = {layout: Counter(layout.boxes().values()) for layout in layouts}
    pairs = list(permutations(layouts, 2))
    axes = tuple(range(mesh.ndim))
    permutes = [Move(Permute(axes), a, b) for a, b in pairs if boxes[a] == boxes[b]]
    assert (len(moves), len(permutes)) == PLAIN[mesh_shape, shape]
    exchanges = [Move(Exchange(axes), a, b) for a, b in pairs[:: every * 5 if every > 1 else 1]]
    tried = of_each_kind(moves + permutes, every) + exchanges
    outcome = run_moves(SimulatedCommunicator(mesh), tried)
    assert outcome.wrong == ()
    assert outcome.shards == mesh.size() * len(tried)


SAMPLED = pytest.mark.parametrize(
    "sampled", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)
OPS_OF: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[ReduceOp, ...], int]] = {
    ((2, 3), (7, 5)): (("sum", "avg", "min", "max", "prod"), 205),
    ((2, 3), (1, 0)): (("sum", "avg", "min", "max", "prod"), 205),
    ((2, 3), (5, 3, 4)): (("sum", "max"), 142),
    ((2, 2, 2), (3, 5)): (("sum", "prod"), 794),
    ((1, 1), (7, 5)): (("sum", "avg", "min", "max", "prod"), 205),
    ((1, 2), (7, 5)): (("sum", "avg", "min", "max", "prod"), 205),
    ((2, 1), (6, 4)): (("sum", "avg", "min", "max", "prod"), 205),
    ((1, 3, 2), (7, 5)): (("sum", "max"), 794),
}
"""What is reduced, and in how many steps."""


@SAMPLED
@pytest.mark.parametrize(("mesh_shape", "shape"), OPS_OF, ids=str)
def test_steps_with_a_reduction_pending(mesh_shape, shape, sampled):
    """Reductions, and moves of what is still pending, which keep every addend apart."""
    mesh = shuffled(mesh_shape)
    ops, count = OPS_OF[mesh_shape, shape]
    specs = partial_specs(len(shape), mesh.ndim, ops)
    layouts = [Layout(mesh, spec, shape, "float32") for spec in specs]
    moves = [move for layout in layouts for move in collectives(layout)]
    assert len(moves) == count
    if sampled and (mesh_shape, shape) != ((2, 3), (7, 5)):
        moves = of_each_kind(moves, 7 if mesh.ndim == 3 else 3)
    outcome = run_moves(SimulatedCommunicator(mesh), moves)
    assert outcome.wrong == ()
    assert outcome.shards == mesh.size() * len(moves)


def test_sum_and_mean_pending_together():
    mesh = shuffled((2, 3, 2))
    specs = list(partial_specs(2, 3, mixed=True))
    moves = [m for s in specs for m in collectives(Layout(mesh, s, (5, 7), "float64"))]
    assert (len(specs), len(moves)) == (24, 228)
    assert run_moves(SimulatedCommunicator(mesh), of_each_kind(moves, 3)).wrong == ()


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


@SAMPLED
@pytest.mark.parametrize(("dtype", "ops"), DTYPES.items(), ids=str)
def test_dtypes_and_shards_with_gaps(dtype, ops, sampled):
    mesh = shuffled((2, 3))
    sources = plain_specs(2, 2) + list(partial_specs(2, 2, ops))
    moves = [move for s in sources for move in collectives(Layout(mesh, s, (7, 5), dtype))]
    start = Layout(mesh, "[S01,R]", (7, 5), dtype)
    moves += [move for s in plain_specs(2, 2) for move in routed(start, start.with_spec(s))]
    assert len(moves) == 58 + len(ops) * 41
    if sampled and dtype != "float32":
        moves = of_each_kind(moves, 3)
    outcome = run_moves(SimulatedCommunicator(mesh), moves, with_gaps=True)
    assert outcome.wrong == ()
    assert outcome.shards == 6 * len(moves)


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

"""Meshes with axes of one device, as data parallelism of one: every step, by both ways.

`make test` takes every 23rd step and conversion, and `make exhaustive` takes all.
"""

from itertools import product
from typing import Any

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.steps import ReduceOp
from tests.conversions import (
    OPS,
    Move,
    collectives,
    partial_specs,
    plain_specs,
    reduced,
    routed,
    run_moves,
    same_bits,
    shard_of,
    stack_of,
    targets_of,
)
from tests.dist.processes import communicator_by, run_ranks

pytestmark = pytest.mark.dist

MESHES = {
    "1x2": DeviceMesh([4, 1], (1, 2)),
    "2x1": DeviceMesh([0, 3], (2, 1)),
    "1x1": DeviceMesh([2], (1, 1)),
    "1x3x2": DeviceMesh([5, 0, 3, 1, 4, 2], (1, 3, 2)),
}
SHAPE = (7, 5)


def _steps(
    name: str, mesh: DeviceMesh, communicator: ProcessGroupCommunicator, sampled: int
) -> tuple[int, Any]:
    """Run every step there is; of three axes those with a pending sum and a part of the rest."""
    ops, every = (OPS, 1) if mesh.ndim == 2 else (("sum",), 7)
    plain = [Layout(mesh, spec, SHAPE, "float32") for spec in plain_specs(2, mesh.ndim)]
    pending = [Layout(mesh, s, SHAPE, "float32") for s in partial_specs(2, mesh.ndim, ops)]
    moves: list[Move] = [move for layout in pending for move in collectives(layout)]
    moves += [move for layout in plain for move in collectives(layout)][::every]
    moves += [move for a, b in list(product(plain, plain))[::every] for move in routed(a, b)]
    outcome = run_moves(communicator, moves[::sampled], with_gaps=name == "2x1")
    return outcome.shards, outcome.wrong


def _conversions(
    rank: int, mesh: DeviceMesh, by: ProcessGroupCommunicator, sampled: int
) -> list[str]:
    """Convert from every source with something pending, and bring gradients back."""
    wrong = []
    ops: tuple[ReduceOp, ...] = ("sum", "avg") if mesh.ndim == 2 else ("sum",)
    pairs = [
        (source, target)
        for source in partial_specs(2, mesh.ndim, ops)
        for target in targets_of(source, mesh.ndim)
    ]
    for source, target in pairs[:: sampled if mesh.ndim == 2 else 11 * sampled]:
        layout = Layout(mesh, source, SHAPE, "float32")
        stack = stack_of(layout)
        local = shard_of(layout, stack, rank).requires_grad_()
        end = DTensor.from_shards({rank: local}, layout, by).redistribute(target)
        expected = shard_of(end.layout, reduced(stack, source, target), rank)
        if not same_bits(end.to_local().detach(), expected):
            wrong.append(f"{source} → {target} on {mesh}")
        if not end.sharding_spec.partials:
            end.to_global().sum().backward()
            scale = 1.0
            for axis, op in source.partial.items():
                scale /= mesh.shape[int(axis)] if op == "avg" else 1
            if local.grad is None or not torch.allclose(local.grad, torch.full_like(local, scale)):
                wrong.append(f"gradient of {source} → {target} on {mesh}")
    return wrong


def _crossing(rank: int) -> list[str]:
    """Convert to another mesh, and from it, with a sum pending over the axis of one."""
    wrong = []
    for here, there in product(MESHES.values(), repeat=2):
        for source in ("[S1,R]", "[R,R|P0]", "[S1,R|P0]"):
            before = Layout(here, source, SHAPE, "float64")
            stack = stack_of(before)
            if here != there and (rank in here or rank in there):
                shards = {rank: shard_of(before, stack, rank)} if rank in here else {}
                result = DTensor.from_shards(shards, before).redistribute(
                    "[S10,R]", device_mesh=there
                )
                expected = reduced(stack, before.spec, result.layout.spec)
                if rank in there and not same_bits(
                    result.to_local(), shard_of(result.layout, expected, rank)
                ):
                    wrong.append(f"{source} on {here} → {there}")
    return wrong


def _run(rank: int, sampled: int) -> tuple[dict[tuple[str, bool], tuple[int, Any]], list[str]]:
    torch.set_num_threads(1)
    found, wrong = {}, []
    for (name, mesh), reads_peers in product(MESHES.items(), (True, False)):
        if rank in mesh:
            communicator = communicator_by(mesh, reads_peers=reads_peers)
            found[name, reads_peers] = _steps(name, mesh, communicator, sampled)
            wrong += _conversions(rank, mesh, communicator, sampled)
            assert (communicator.transport_name == "memory") == (reads_peers and mesh.size() > 1)
        else:
            communicator_by(mesh, reads_peers=reads_peers)
    return found, wrong + _crossing(rank)


@pytest.mark.parametrize("sampled", [23, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_step_by_both_ways(tmp_path, sampled):
    counts = {"1x2": 393, "2x1": 393, "1x1": 473, "1x3x2": 817}
    for rank, (found, wrong) in enumerate(run_ranks(6, tmp_path, _run, sampled)):
        assert wrong == []
        assert [outcome for _, outcome in found.values()] == [()] * len(found)
        assert {key: count for key, (count, _) in found.items()} == {
            (name, reads): -(-counts[name] // sampled)
            for name, mesh in MESHES.items()
            for reads in (True, False)
            if rank in mesh
        }

"""The backend's own collectives, over gloo: they do the steps they say they fit, as the box map."""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, Layout
from shardspec.comm.transports.messages import has_collective, run_collective
from shardspec.layout.moving import transfers_of
from tests.conversions import (
    collectives,
    partial_specs,
    plain_specs,
    reduced,
    same_bits,
    shard_of,
    stack_of,
)
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

ORDERED = DeviceMesh(range(6), (2, 3))
SHUFFLED = DeviceMesh([4, 0, 5, 1, 2, 3], (2, 3))
SHAPES = [(12, 18), (7, 5), (6, 1), (1, 6), (0, 6)]
# Per rank on both meshes how many all-gathers and reduce-scatters fit; those whose parts are not in
# the order of the ranks, or not equally long, do not.
STEPS = [
    [39, 54, 16, 20],
    [37, 50, 17, 22],
    [37, 50, 33, 42],
    [38, 52, 17, 22],
    [36, 48, 0, 0],
    [36, 48, 0, 0],
]


def _run(rank: int) -> tuple[dict[tuple[bool, str], int], list[str]]:
    groups = {}
    for mesh in (ORDERED, SHUFFLED):
        for axes in ([0], [1], [0, 1]):
            for members in mesh.groups(axes):
                key = tuple(sorted(members))
                if key not in groups:
                    groups[key] = dist.new_group(list(key))
    done: Counter[tuple[bool, str]] = Counter()
    wrong = []
    specs = [*plain_specs(2, 2), *partial_specs(2, 2, ("sum", "avg", "max"))]
    # An all-gather carries bytes of any dtype.
    plain = [(mesh, (12, 18), dtype) for mesh in (ORDERED, SHUFFLED) for dtype in ("bool", "bf16")]
    for mesh, shape, dtype in [*product((ORDERED, SHUFFLED), SHAPES, ["float32"]), *plain]:
        some = specs if dtype == "float32" else plain_specs(2, 2)
        layouts = [Layout(mesh, spec, shape, dtype) for spec in some]
        for move in (move for layout in layouts for move in collectives(layout)):
            step, before, after = move.step, move.before, move.after
            schedule = transfers_of(step, before, after).of(rank)
            if not has_collective(schedule, getattr(torch, before.dtype)):
                continue
            done[mesh is ORDERED, type(step).__name__] += dtype == "float32"
            stack = stack_of(before)
            group = groups[tuple(sorted(schedule.members))]
            result = run_collective(schedule, shard_of(before, stack, rank), group)
            wanted = shard_of(after, reduced(stack, before.spec, after.spec), rank)
            if not same_bits(result, wanted):
                wrong.append(f"{shape} {before.spec} → {after.spec}")
    return dict(done), wrong


def test_steps_that_fit(tmp_path):
    for rank, (done, wrong) in enumerate(run_ranks(6, tmp_path, _run)):
        assert wrong == []
        kinds = ("AllGather", "ReduceScatter")
        counts = [done.get((ordered, kind), 0) for ordered in (True, False) for kind in kinds]
        assert counts == STEPS[rank]

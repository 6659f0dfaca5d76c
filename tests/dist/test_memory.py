"""What a step needs besides the shards before and after it: measured, on real processes.

Linux keeps the most memory that a process has had, and forgets it when told to (man 5 proc,
`clear_refs`).

`make test` measures each step in one way, and `make exhaustive` in all three.
"""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from shardspec import CostModel, DeviceMesh, Layout
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from shardspec.comm.transports.messages import STAGED_BYTES
from shardspec.comm.transports.peer_memory import BUFFER_BYTES
from shardspec.layout.moving import transfers_of
from shardspec.layout.plan import ConversionPlan
from tests.dist.processes import communicator_by, run_ranks

pytestmark = pytest.mark.dist

MIB = 1 << 20
MESH = DeviceMesh(range(4), (2, 2))
OTHER_BYTES = 6 * MIB
"""The allocator's own, rounding to large pages, and what Python does meanwhile."""
ALLOWED = {True: 2 * BUFFER_BYTES + OTHER_BYTES, False: STAGED_BYTES + OTHER_BYTES}
"""By whether peers are read: the buffers of one step, one for runs and one for addends."""
SHAPE = (4096, 4096)
STEPS: list[tuple[Step, str, str]] = [
    (Slice(1, (0,)), "[R,R]", "[R,S0]"),
    (AllGather(1, (0, 1)), "[R,S01]", "[R,R]"),
    (AllGather(0, (0,)), "[S0,R]", "[R,R]"),
    (AllToAll(0, 1, (0,), (0,)), "[S0,R]", "[R,S0]"),
    (AllToAll(1, 0, (0, 1), (1, 0)), "[R,S01]", "[S10,R]"),
    (ReduceScatter(1, (0,), "sum"), "[R,R|P0]", "[R,S0]"),
    (ReduceScatter(0, (0, 1), "max"), "[R,R|Pmax01]", "[S01,R]"),
    (AllReduce((0,), "sum"), "[R,R|P0]", "[R,R]"),
    (AllReduce((0, 1), "prod"), "[R,R|Pprod01]", "[R,R]"),
    (Permute((0, 1)), "[R,S0]", "[R,S1]"),
    (Exchange((0, 1)), "[R,S01]", "[S1,R]"),
]
WAYS = [(True, False), (True, True), (False, True)]
"""Whether peers are read, and whether the shard has gaps in memory."""


def _status(field: str) -> int:
    """Return bytes from what the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _grown(
    communicator: ProcessGroupCommunicator, step: Step, before: Layout, after: Layout, gaps: bool
) -> int:
    """Return the bytes by which this process has grown at most while it carries out a step."""
    (device,) = communicator.addressable
    rows, columns = before.local_shape(device)
    # With gaps: every second element of a row, so that nothing that is sent lies in one piece.
    whole = torch.ones(rows, columns * (2 if gaps else 1))
    shards = {device: whole[:, :: 2 if gaps else 1]}
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to serve now
    Path("/proc/self/clear_refs").write_text("5")
    start = _status("VmRSS")
    communicator.run(transfers_of(step, before, after), shards)
    return _status("VmHWM") - start


def _measure(rank: int, every: int) -> list[tuple[str, bool, int, int]]:
    torch.set_num_threads(1)
    os.environ.pop("SHARDSPEC_CHECK", None)  # it takes memory of its own
    measured = []
    for reads_peers in (True, False):
        communicator = communicator_by(MESH, reads_peers=reads_peers)
        assert communicator.addressable == (rank,)
        for number, (step, source, target) in enumerate(STEPS):
            for _, gaps in (way for way in WAYS[number % every :: every] if way[0] == reads_peers):
                for shape in ((256, 256), SHAPE):  # what is loaded when first used is not counted
                    before = Layout(MESH, source, shape, "float32")
                    plan = ConversionPlan(
                        (step,), (before, before.with_spec(target)), CostModel.of_mesh(MESH)
                    )
                    grown = _grown(communicator, step, before, plan.target, gaps)
                planned = plan.live_bytes[0] - before.max_local_bytes
                name = f"{step}{' with gaps' if gaps else ''}"
                measured.append((name, reads_peers, grown, planned))
    return measured


@pytest.mark.parametrize("every", [len(WAYS), pytest.param(1, marks=pytest.mark.exhaustive)])
def test_no_step_needs_more_than_the_plan_says(tmp_path, every):
    for rank, measured in enumerate(run_ranks(4, tmp_path, _measure, every)):
        assert len(measured) == len(WAYS) * len(STEPS) // every
        for name, reads_peers, grown, planned in measured:
            # Shards are of 16 to 64 MiB, so a whole one too much would show.
            assert planned - MIB <= grown, (rank, name, reads_peers)
            assert grown <= planned + ALLOWED[reads_peers], (rank, name, reads_peers)

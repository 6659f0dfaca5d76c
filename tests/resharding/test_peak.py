"""Resharding takes no more memory than the plan says: what is held, what is made, and buckets."""

import ctypes
import os
from itertools import product
from pathlib import Path

import pytest
import torch

from shardspec import DeviceMesh, Layout, plan_reshard
from tests.dist.processes import communicator_by, run_ranks, substitute

pytestmark = pytest.mark.dist

MESH = DeviceMesh(range(3), (3,))
MIB = 1 << 20


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


BUCKETS = (8 * MIB, 32 * MIB)
ROWS = 2048


def _grown(rank: int) -> list[tuple[int, int, int, int]]:
    """Return bounds, by how much a process grows, of that for results, and what the plan says."""
    torch.set_num_threads(1)
    os.environ.pop("SHARDSPEC_CHECK", None)  # it takes memory of its own
    found = []
    for max_bytes, reads_peers in product(BUCKETS, (False, True)):
        substitute(communicator_by(MESH, reads_peers=reads_peers))
        for rows in (32, ROWS):  # what is loaded when first used is not counted
            names = [f"w{number}" for number in range(6)]
            before = {name: Layout(MESH, "[S0,R]", (rows, 3072), "float32") for name in names}
            after = {name: layout.with_spec("[R,S0]") for name, layout in before.items()}
            plan = plan_reshard(before, after, max_bytes=max_bytes)
            state = {n: torch.ones(layout.local_shape(rank)) for n, layout in before.items()}
            held = sum(tensor.nbytes for tensor in state.values())
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to serve now
            Path("/proc/self/clear_refs").write_text("5")
            start = _status("VmRSS")
            out = plan.run(state)
            grown = _status("VmHWM") - start
            made = sum(tensor.to_local().nbytes for tensor in out.values())
        found.append((max_bytes, grown, made, plan.peak_bytes - held))
    return found


def test_the_peak_is_source_and_target_and_buckets(tmp_path):
    for found in run_ranks(3, tmp_path, _grown):
        assert len(found) == 4
        for max_bytes, grown, made, planned in found:
            assert made == 6 * ROWS * 1024 * 4
            # Some ranks have a row more than others.
            assert made <= planned <= made + 2 * max_bytes + MIB
            # A MiB is Python's and gloo's own.
            assert 0.9 * made < grown < planned + MIB

"""A small run of the benchmark of saving: every way saves, and has its line."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
def test_a_small_run_has_a_line_for_every_way_and_leaves_nothing(tmp_path):
    places = ("--at", tmp_path, "--memory", tmp_path)
    options = (*places, "--gib", 1 / 128, "--tensor-mib", 4, "--rounds", 1)
    command = [sys.executable, "-m", "benchmarks.saving", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    size, _, _, *rows = done.stdout.splitlines()
    assert size == "0.008 GiB in 2 tensors, 1 turns, s"
    names = ["write and flush", "shardspec", "safetensors", "torch.save", "torch DCP"]
    assert [row.partition(",")[0].split("  ")[0] for row in rows] == names
    for row in rows:
        middle, least, most, ratio = map(float, row.split()[-4:])
        assert 0 <= least == middle == most
        assert ratio == 1 or "shardspec" not in row
    assert list(tmp_path.iterdir()) == []

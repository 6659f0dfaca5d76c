"""The seed example of the field, as written there, in a job of four; and under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardspec import DeviceMesh, DTensor
from shardspec.errors import CommunicatorError
from tests.jobs import run_examples, run_python

pytestmark = pytest.mark.dist

SEED = """
import torch
from shardspec import DeviceMesh, DTensor, ShardingSpec
import torch.distributed as dist

a = torch.arange(30.0).reshape(5, 6)
device_mesh = DeviceMesh(torch.arange(0, 4), (2, 2), init_process_group=True)
sharding_spec = ShardingSpec(a.dim(), {0: [0]})
d_tensor = DTensor(a, device_mesh, sharding_spec)
global_tensor = d_tensor.to_global()
assert torch.equal(global_tensor, a)
rows = d_tensor.to_local().shape[0]
print(f"rank {dist.get_rank()} {d_tensor.sharding_spec} holds {rows} rows\\n", end="", flush=True)
dist.destroy_process_group()
"""
PRINTED = [
    "rank 0 [S0,R] holds 3 rows",
    "rank 1 [S0,R] holds 3 rows",
    "rank 2 [S0,R] holds 2 rows",
    "rank 3 [S0,R] holds 2 rows",
]


@pytest.fixture
def seed(tmp_path):
    script = tmp_path / "seed.py"
    script.write_text(SEED)
    return script


def test_the_seed_example(seed, tmp_path):
    (output,) = run_examples(4, tmp_path, [(seed,)])
    assert sorted(output.splitlines()) == PRINTED


@pytest.mark.exhaustive
def test_the_seed_example_under_torchrun(seed, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")
    output, _ = run_python(*torchrun, seed, cwd=tmp_path)
    assert sorted(output.splitlines()) == PRINTED


def test_an_error_of_a_command_goes_where_torchrun_reads_it(tmp_path):
    report = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-m", "shardspec", "plan", "[S0]", "[S9]", "--mesh", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(report)},
        check=False,
    )
    assert done.returncode == 2
    # torchrun's own reader of these files.
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(report))
    assert failure.message == done.stderr.strip()
    assert failure.message.startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("merge", "nowhere", "-o", "out"), "without torchrun"),
        (("plan", "[S0]", "[S9]", "--mesh", "2", "--shape", "4"), "[S9]"),
    ],
    ids=["merge", "plan"],
)
@pytest.mark.exhaustive
def test_torchrun_prints_an_error_of_a_command_last(tmp_path, arguments, words):
    """Below the launcher's own traceback, also if it interrupts a rank before that fails."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "shardspec", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode != 0
    *_, last, ruler = done.stderr.strip().splitlines()
    assert set(ruler) == {"="}
    assert "Error: " in last
    assert words in last


def test_a_job_that_did_not_start_torch_distributed_is_told_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CommunicatorError) as caught:
        DTensor(torch.ones(4), DeviceMesh(range(2), (2,)), "[S0]")
    assert "one of 2 processes of a job" in str(caught.value)
    assert "init_process_group=True" in str(caught.value)

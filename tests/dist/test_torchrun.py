"""The seed example of the field, as written there, under torchrun."""

import subprocess
import sys

import pytest

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


def test_the_seed_example(tmp_path):
    script = tmp_path / "seed.py"
    script.write_text(SEED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [
        "rank 0 [S0,R] holds 3 rows",
        "rank 1 [S0,R] holds 3 rows",
        "rank 2 [S0,R] holds 2 rows",
        "rank 3 [S0,R] holds 2 rows",
    ]


def test_a_job_that_did_not_start_torch_distributed_is_told_so(tmp_path):
    script = tmp_path / "forgot.py"
    script.write_text(
        "import torch\nfrom shardspec import DeviceMesh, DTensor\n"
        "DTensor(torch.ones(4), DeviceMesh(range(2), (2,)), '[S0]')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"WORLD_SIZE": "2", "RANK": "0", "PATH": ""},
    )
    assert done.returncode == 1
    assert "one of 2 processes of a job" in done.stderr
    assert "init_process_group=True" in done.stderr

"""No way of reading or writing a checkpoint needs torch, whatever its form."""

import argparse
import subprocess
import sys

import pytest
import torch

from shardspec import DeviceMesh, merge, reshard
from tests.checkpoint.writers.states import save

PROGRAM = """
import sys
from pathlib import Path
from click.testing import CliRunner
from shardspec.cli.main import cli

def run(*args):
    result = CliRunner().invoke(cli, [*map(str, args)], prog_name="shardspec")
    assert result.exit_code == 0, (args, result.output)
    return result.output

here = Path(sys.argv[1])
forms = ("own", "dcp", "hub", "whole.safetensors", "whole.pt", "ranks", "megatron")
rules = (("--rule", "*.w", "[S10,R]"), ("--rule", "*linear*", "[S10,R]"))
for form in forms:
    ckpt, out = here / form, here / f"out-{form}"
    run("inspect", ckpt)
    run("inspect", ckpt, "--json")
    run("inspect", ckpt, "--tensor", "*.w*", "--picture")
    run("diff", ckpt, ckpt)
    run("diff", ckpt, ckpt, "--atol", "1e-3")
    run("merge", ckpt, "-o", f"{out}.safetensors", "--dtype", "bf16")
    run("merge", ckpt, "-o", f"{out}.pt")
    run("merge", ckpt, "-o", f"{out}.dcp", "--to", "dcp")
    run("merge", ckpt, "-o", f"{out}.hub", "--max-shard-size", "2000", "--threads", "2")
    run("reshard", ckpt, "-o", f"{out}.cut", "--mesh", "3x2", *rules[form == "megatron"])
    run("reshard", ckpt, "-o", f"{out}.again", "--like", f"{out}.cut", "--to", "dcp")
    run("diff", f"{out}.again", ckpt)
    assert "torch" not in sys.modules, form
print("without torch:", *forms)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    here = tmp_path_factory.mktemp("forms")
    state = {"a.w": torch.randn(37, 11), "b.w": torch.randn(5, 3).half(), "n": torch.arange(4)}
    save(here / "own", state)
    merge(here / "own", here / "hub", max_shard_bytes=100)
    merge(here / "own", here / "whole.safetensors")
    merge(here / "own", here / "whole.pt")
    rules = {"a.w": "[S0,R]"}
    mesh = DeviceMesh(range(4), (4,))
    reshard(here / "own", here / "dcp", device_mesh=mesh, rules=rules, format="dcp")
    (here / "ranks").mkdir()
    for rank in range(2):
        torch.save({**state, "step": 7}, here / "ranks" / f"model_world_size_2_rank_{rank}.pt")
        at = here / "megatron" / f"mp_rank_{rank:02d}"
        at.mkdir(parents=True)
        layer = "decoder.layers.0.self_attention.linear_proj.weight"
        model = {layer: torch.randn(6, 4), "decoder.final_layernorm.weight": torch.ones(3)}
        sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
        args = argparse.Namespace(**sizes, swiglu=False)
        torch.save({"model": model, "args": args}, at / "model_optim_rng.pt")
    return here


def test_commands_on_every_form(checkpoints):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(checkpoints)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("without torch: own dcp")

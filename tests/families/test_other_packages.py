"""Families of other packages, found by their entry points."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILY = """
like = "qwen3"
model_types = ["mine"]
without = ["self_attn.q_norm.weight"]

[defaults]
hidden_size = 16
"""
SCRIPT = """
from shardspec import model_layouts
from shardspec.families.family import family_names, shipped_family
from shardspec.families.maps import chain_of
from shardspec.families.model import model_of
from shardspec.resharding.total import apply_map

config = {"model_type": "mine", "vocab_size": 32, "num_hidden_layers": 2, "head_dim": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12}
model = model_of(shipped_family("my-model"), config)
files = model.shapes()
for place in ("megatron", "torch_dist", "fused", "live"):
    state = files
    for source, target in (("hf", place), (place, "hf")):
        for map_ in chain_of(model, source, target):
            made = apply_map(map_, state, {})
            made.report.require_total()
            state = made.shapes
    assert state == files, place
assert "model.layers.1.self_attn.k_norm.weight" in files
assert "model.layers.1.self_attn.q_norm.weight" not in files
print(family_names()[-1], model_layouts(config, "vllm:tp=2")["model.norm.weight"].global_shape)
"""


def run(place: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run the script where a package with a family is installed."""
    (place / "mine.py").write_text(text)
    (place / "mine-1.dist-info").mkdir()
    points = "[shardspec.families]\nmy-model = mine:FAMILY\n"
    (place / "mine-1.dist-info" / "entry_points.txt").write_text(points)
    (place / "mine-1.dist-info" / "METADATA").write_text("Name: mine\nVersion: 1\n")
    paths = os.pathsep.join([str(place), str(Path(__file__).parents[2])])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_family_of_another_package_has_maps_and_layouts(tmp_path):
    done = run(tmp_path, f"FAMILY = {FAMILY!r}")
    assert (done.returncode, done.stdout) == (0, "my-model (16,)\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("FAMILY = 3", "it is a int, not text"),
        ("raise OSError('no disk')", "OSError: no disk"),
        ("FAMILY = 'attic = 3'", "family 'my-model', line 1: unknown key 'attic'"),
    ],
)
def test_a_family_that_cannot_be_read_is_an_error_that_names_it(tmp_path, text, says):
    done = run(tmp_path, text)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]

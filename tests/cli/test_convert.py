"""`shardspec convert`, as it is called."""

import json

import pytest
from click.testing import CliRunner

from shardspec.cli.main import cli


def run(*args):
    return CliRunner().invoke(cli, ["convert", *args])


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("torch", "[_StridedShard(0, split_factor=2), Shard(0)]"),
        ("jax", "P(('y', 'x'))"),
        ("shardy", '#sdy.sharding<@mesh, [{"y", "x"}, {}]>   sdy.mesh @mesh = <["x"=2, "y"=2]>'),
    ],
)
def test_one_language(language, text):
    done = run("[S10,R]", "--mesh", "x=2,y=2", "--to", language)
    assert (done.output, done.exit_code) == (f"{text}\n", 0)


def test_all_of_them():
    done = run("[S(y,x),R]", "--mesh", "x=2,y=2")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "torch     [_StridedShard(0, split_factor=2), Shard(0)]"
    assert lines[1] == "jax       P(('y', 'x'))"
    assert lines[3].startswith("oneflow   – spec [S(y,x),R]: OneFlow splits dim 0 over axes [0, 1]")
    assert lines[4].startswith("colossal  – spec [S(y,x),R]: Colossal-AI knows dims as R, S0, S1")
    assert len(lines) == 5


def test_json():
    done = run("[S0,R|P1]", "--mesh", "2x3", "--json")
    said = json.loads(done.output)
    assert said["torch"] == '[Shard(0), Partial("sum")]'
    assert said["oneflow"] == "(S(0),P)"
    assert said["jax"] is None
    assert said["refused"]["jax"].startswith("JAX knows mesh axes by name, but mesh 2x3 has none")
    assert set(said["refused"]) == {"jax", "colossal"}
    one = run("[S0,R]", "--mesh", "2x3", "--to", "colossal", "--json")
    assert json.loads(one.output) == {"colossal": "{0: [0]}"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("[S10,R]", "--mesh", "2x2", "--to", "oneflow"), "OneFlow splits dim 0 over axes [0, 1]"),
        (("[S01,R]", "--mesh", "x=2,y=2", "--to", "jax", "--shape", "7x3"), "pad it to 8"),
        (("[S0]", "--mesh", "2x2", "--shape", "7x3"), "is for 1 dim, but the tensor"),
        (("[S5]", "--mesh", "2x2"), "axis 5 is out of range"),
        (("[S0", "--mesh", "2x2"), "at the end of '[S0'"),
        (("[S0]",), "Missing option '--mesh'"),
    ],
)
def test_bad_input(args, message):
    done = run(*args)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output

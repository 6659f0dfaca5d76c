"""The commands `verify` and `diff`: what they print, and which tensors they compare."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from rich.cells import cell_len

from shardspec import merge
from shardspec.checkpoint.compare.diff import Difference, diff_checkpoints
from shardspec.checkpoint.open import open_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.test_verify import flip, save


def shardspec(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)), prog_name="shardspec")


def test_verify_and_diff_print_what_they_find(tmp_path):
    ckpt = save(tmp_path / "ckpt", w=(torch.arange(7.0), "[S1]"))
    merge(ckpt, tmp_path / "m")
    done = shardspec("verify", ckpt)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "1 tensor in 3 boxes, 28 B, all with digests; no problems found" in done.stdout
    assert shardspec("diff", ckpt, tmp_path / "m").stdout == "no difference: 1 tensor, 28 B\n"
    flip(open_checkpoint(ckpt).tensor("w").boxes[1], 0)
    bad = shardspec("verify", ckpt)
    assert (bad.exit_code, bad.stdout, bad.stderr.count("\n")) == (3, "", 1)
    for options in (("--json",), ("--all", "--json")):
        listed = shardspec("verify", ckpt, *options)
        assert listed.exit_code == 3
        assert len(json.loads(listed.stdout)["flaws"]) == 1
    differing = shardspec("diff", ckpt, tmp_path / "m", "--json")
    assert differing.exit_code == 1
    record = json.loads(differing.stdout)
    assert (record["a"], record["b"], record["tensors"]) == (str(ckpt), str(tmp_path / "m"), 1)
    assert [found["index"] for found in record["differences"]] == [[3]]
    alike = shardspec("diff", ckpt, ckpt, "--json")
    assert (alike.exit_code, json.loads(alike.stdout)["differences"]) == (0, [])
    assert "\n1 of 1 tensor differs: 1 of 7 elements differs, by up to " in (
        shardspec("diff", ckpt, tmp_path / "m").stdout
    )


def test_a_merge_of_some_tensors_is_compared_with_what_it_was_made_of(tmp_path):
    ckpt = save(
        tmp_path / "ckpt",
        **{name: (torch.arange(7.0) + at, "[S1]") for at, name in enumerate(["m.a", "m.b", "o.a"])},
    )
    out = tmp_path / "out"
    chosen = ("--include", "m.*", "--rename", "^m[.]", "")
    assert shardspec("merge", ckpt, "-o", out, *chosen).exit_code == 0
    assert shardspec("diff", ckpt, out, *chosen).stdout == "no difference: 2 tensors, 56 B\n"
    assert list(diff_checkpoints(ckpt, out, include="m.*", rename={"^m[.]": ""})) == []
    assert shardspec("diff", ckpt, out, "--include", "m.*").exit_code == 1
    alone = shardspec("verify", ckpt, *chosen)
    assert (alone.exit_code, alone.stdout, "--digests" in alone.stderr) == (2, "", True)
    # What the patterns leave out of the first is not looked for in the second, all else is.
    merge(ckpt, tmp_path / "all")
    assert list(diff_checkpoints(ckpt, tmp_path / "all", include="m.*")) == []
    assert list(diff_checkpoints(ckpt, tmp_path / "all", exclude=["m.b", "o.*"])) == []
    assert list(diff_checkpoints(tmp_path / "out", ckpt, exclude=["b"], rename={"a": "m.a"})) == [
        Difference("m.b", f"is only in {ckpt}", one_side=True),
        Difference("o.a", f"is only in {ckpt}", one_side=True),
    ]
    beside, found = diff_checkpoints(ckpt, tmp_path / "all", include="m.a", rename={"^m": "o"})
    assert beside == Difference("m.a", f"is only in {tmp_path / 'all'}", one_side=True)
    assert (found.name, found.index) == ("o.a", (0,))
    with pytest.raises(CheckpointError, match=r"pattern 'x\*' matches nothing"):
        list(diff_checkpoints(ckpt, out, include="x*"))
    assert shardspec("diff", ckpt, out, "--include", "x*").exit_code == 3
    twice = shardspec("diff", ckpt, out, "--rename", ".*", "w")
    assert (twice.exit_code, twice.stderr.count("\n")) == (3, 1)


def test_what_forms_do_not_say_is_said_of_either(tmp_path):
    path = tmp_path / "hf" / "shard-00001-model-00001-of-00001.safetensors"
    path.parent.mkdir()
    note = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0]}}'}
    safetensors.torch.save_file({"w": torch.arange(7.0)}, path, note)
    ckpt = save(tmp_path / "ckpt", w=(torch.arange(7.0), "[S1]"))
    for first, second in ((ckpt, path), (path.parent, ckpt)):
        assert shardspec("diff", first, second).exit_code == 3
        done = shardspec("diff", first, second, "--ranks", "1")
        assert (done.exit_code, done.stdout) == (0, "no difference: 1 tensor, 28 B\n")
    assert "no digests stored, so altered bytes cannot be detected; no problems found" in (
        shardspec("verify", path, "--ranks", "1").stdout
    )
    assert "records it" in shardspec("diff", ckpt, ckpt, "--ranks", "1").stderr


def test_names_that_differ_by_how_they_begin(tmp_path):
    """And the words that are printed are those that compare."""
    tensors = {f"layers.{i}.w": torch.ones(3) * i for i in range(12)}
    safetensors.torch.save_file(tensors, tmp_path / "plain")
    named = {f"model.{n}": t for n, t in tensors.items()} | {"head": torch.ones(2)}
    safetensors.torch.save_file(named, tmp_path / "named")
    other = {f"module.{n}": t for n, t in tensors.items()}
    safetensors.torch.save_file(other, tmp_path / "other")
    for first, second, words in [
        ("named", "plain", ["^model\\.", ""]),
        ("plain", "other", ["^", "module."]),
        ("other", "named", ["^module\\.", "model."]),
    ]:
        done = shardspec("diff", tmp_path / first, tmp_path / second)
        assert done.exit_code == 1
        hint = done.stdout.splitlines()[-1]
        start = "the names differ in how they begin; compare with "
        assert hint.startswith(start)
        assert shlex.split(hint.removeprefix(start)) == ["--rename", *words]
        given = shlex.split(hint.removeprefix(start))
        again = shardspec("diff", tmp_path / first, tmp_path / second, *given, "--json")
        alone = [found["name"] for found in json.loads(again.stdout)["differences"]]
        assert alone == (["head"] if "named" in (first, second) else [])
        assert json.loads(again.stdout)["rename"] is None


def test_names_on_one_side_are_shown_by_layers_in_their_order(tmp_path):
    many = {f"layers.{i}.w": torch.ones(2) for i in range(12)}
    safetensors.torch.save_file({**many, "head": torch.ones(1)}, tmp_path / "a")
    safetensors.torch.save_file({"head": torch.zeros(1), "tail": torch.ones(1)}, tmp_path / "b")
    done = shardspec("diff", tmp_path / "a", tmp_path / "b")
    _, _, head, _, _, _, layers, tail, total = map(str.split, done.stdout.splitlines())
    assert head == ["head", "1", "inf", "1", "1"]
    assert layers == ["layers.{0..11}.w", "12", "A"]
    assert tail == ["tail", "1", "B"]
    assert total[:5] == ["14", "of", "14", "tensors", "differ:"]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_comparison_fits_the_terminal(tmp_path, columns):
    names = (
        "x" * 500,
        "模型.权重." + "层" * 60,
        "layers.0.self_attention.linear_qkv.layer_norm_weight",
    )
    for file, number in ("a", 1.0), ("b", 1e-9):
        tensors = {name: torch.full((9,), number) for name in names}
        safetensors.torch.save_file(
            {**tensors, f"{file}.{'y' * 90}": torch.ones(1)}, tmp_path / file
        )
    ours, theirs = os.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "shardspec", "diff", "a", "b"]
    done = subprocess.run(command, stdout=theirs, env=environment, cwd=tmp_path)
    os.close(theirs)
    lines = os.read(ours, 10_000).decode().splitlines()
    os.close(ours)
    assert done.returncode == 1
    assert max(map(cell_len, lines)) <= columns
    assert "5 of 5 tensors differ: 27 of 27 elements differ" in " ".join(lines)


def test_values_in_lists_are_the_same_however_formats_nest_them(tmp_path):
    groups = [{"lr": 0.5, "betas": (0.9, 0.99)}, {"lr": 0.25, "params": ["w"]}]
    state = {"w": torch.ones(2), "optim": {"param_groups": groups}, "seen": [1, 2]}
    torch.save(state, tmp_path / "nested.pt")
    merge(tmp_path / "nested.pt", tmp_path / "dcp", format="dcp")  # flattens as torch does
    same = shardspec("diff", tmp_path / "nested.pt", tmp_path / "dcp")
    assert (same.exit_code, same.stdout) == (0, "no difference: 1 tensor, 8 B, and 5 values\n")
    groups[1]["lr"] = 0.125
    torch.save(state, tmp_path / "later.pt")
    changed = shardspec("diff", tmp_path / "later.pt", tmp_path / "dcp")
    assert changed.stdout.splitlines() == [
        "value 'optim.param_groups.1.lr' is 0.125 in the first, 0.25 in the second",
        "0 of 1 tensor and 1 of 5 values differs",
    ]


def test_the_share_of_what_differs_by_group(tmp_path):
    tensors = {f"m.layers.{i}.w": torch.ones(10) for i in range(3)} | {"m.embed": torch.zeros(5)}
    safetensors.torch.save_file(tensors, tmp_path / "a")
    tensors["m.layers.1.w"] = torch.tensor([1.0] * 8 + [2.0, 0.5])
    safetensors.torch.save_file(tensors, tmp_path / "b")
    done = shardspec("diff", tmp_path / "a", tmp_path / "b", "--stats")
    assert done.exit_code == 1
    *_, embed, layers, total = done.stdout.splitlines()
    assert embed.split() == ["m", "0", "of", "1", "0.000%"]
    assert re.split(" {2,}", layers) == ["m.layers", "1 of 3", "6.667%", "1 (relative 1)"]
    assert total == "1 of 4 tensors differs: 2 of 35 elements differ, by up to 1 (relative 1)"
    record = json.loads(
        shardspec("diff", tmp_path / "a", tmp_path / "b", "--stats", "--json").stdout
    )
    assert record["groups"]["m.layers"]["share"] == 2 / 30
    assert record["differences"][0]["extent"]["differing"] == 2
    same = shardspec("diff", tmp_path / "a", tmp_path / "a", "--stats")
    assert same.exit_code == 0
    assert "0 of 3" in same.stdout

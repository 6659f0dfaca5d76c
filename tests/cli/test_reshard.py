"""The command `shardspec reshard`."""

import json
import re

import numpy as np
import safetensors.numpy
from click.testing import CliRunner

from shardspec.cli.main import cli
from tests.checkpoint.handmade import handmade, sample


def run(*args):
    return CliRunner().invoke(cli, [*map(str, args)], prog_name="shardspec")


def test_to_another_mesh_and_back(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    rules = tmp_path / "rules.toml"
    rules.write_text('w = "[S(tp),R]"\n')
    result = run(
        "reshard", ckpt, "-o", tmp_path / "cut", "--mesh", "dp=2,tp=4", "--rules", rules,
        "--rule", "b", "[S(dp)]", "--json", "--threads", "2",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert (report["format"], report["tensors"], len(report["files"])) == ("shardspec", 2, 6)
    shown = " ".join(run("inspect", tmp_path / "cut").stdout.split())
    assert "saved on mesh dp=2,tp=4 (8 devices)" in shown
    assert "[S(tp),R]" in shown
    assert run("diff", tmp_path / "cut", ckpt).exit_code == 0
    assert run("merge", tmp_path / "cut", "-o", tmp_path / "out").exit_code == 0
    merged = safetensors.numpy.load_file(tmp_path / "out")
    for name, (_, array) in sample().items():
        np.testing.assert_array_equal(merged[name], array)


def test_a_dry_run(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    result = run("reshard", ckpt, "-o", tmp_path / "cut", "--mesh", "4", "--dry-run")
    assert result.exit_code == 0
    assert "cut: would hold 2 tensors" in result.stdout
    assert "252 B of 6 files in the format of shardspec would be read" in result.stdout
    read, written = re.findall(
        r"^file +(?:read|written)\n─+\n((?:[^ ]+ +\d.*\n)+)", result.stdout, re.M
    )
    assert {line.split()[0] for line in read.splitlines()} == {
        p.name for p in ckpt.glob("*.safetensors")
    }
    assert len(written.splitlines()) == 2  # a replicated tensor each, on two of the devices
    assert not (tmp_path / "cut").exists()


def test_what_does_not_go_together(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    for args, code, problem in [
        ([], 2, "give either --mesh, with rules, or --like"),
        (["--mesh", "2", "--like", ckpt], 2, "give either --mesh, with rules, or --like"),
        (["--like", ckpt, "--rule", "w", "[R,R]"], 2, "omit --rules and --rule"),
        (["--mesh", "2", "--rule", "w", "[S0,"], 2, "[S0,"),
        (["--mesh", "2", "--rule", "v", "[S0]"], 2, "rule 'v' matches no tensor"),
        (["--mesh", "2", "--rules", tmp_path / "none"], 3, "cannot be read"),
        (["--mesh", "2", "--include", "v"], 3, "pattern 'v' matches nothing"),
        (["--mesh", "2", "--dtype", "int8"], 2, "cannot cast to int8"),
        (["--like", tmp_path], 3, "is not a checkpoint itself, but there is one in it: name"),
    ]:
        result = run("reshard", ckpt, "-o", tmp_path / "out", *args)
        assert (result.exit_code, result.stdout) == (code, "")
        assert problem in result.stderr
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out").exists()


def test_nothing_is_cut_without_rules_and_that_is_said(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    result = run("reshard", ckpt, "-o", tmp_path / "a", "--mesh", "3")
    assert result.exit_code == 0
    note = "note: no rules were given, so every tensor is replicated on every device\n"
    assert result.stderr == note
    quiet = run("reshard", ckpt, "-o", tmp_path / "b", "--mesh", "3", "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")
    cut = run("reshard", ckpt, "-o", tmp_path / "c", "--mesh", "3", "--rule", "w", "[S0,R]")
    assert (cut.exit_code, cut.stderr) == (0, "")


def test_values_that_would_be_lost_are_named_and_dropped_if_asked(tmp_path):
    import torch

    ckpt = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "epoch": 3, "seen": {1, 2}}, ckpt)
    to = ("-o", tmp_path / "out", "--mesh", "2", "--rule", "w", "[S0]")
    lost = run("reshard", ckpt, *to)
    assert lost.exit_code == 3
    assert re.fullmatch(r"Error: .*'seen' would be lost.*--drop-values.*--exclude\n", lost.stderr)
    kept = run("reshard", ckpt, *to, "--drop-values", "--json")
    assert json.loads(kept.stdout)["left_out"] == ["seen"]
    assert "epoch         3" in run("inspect", tmp_path / "out").stdout
    difference = run("diff", ckpt, tmp_path / "out")
    assert difference.exit_code == 1
    assert difference.stdout.splitlines()[2].split() == ["seen", "1", "A"]
    assert difference.stdout.endswith("\n0 of 1 tensor and 1 of 2 values differs\n")
    same = run("diff", ckpt, tmp_path / "out", "--exclude", "seen")
    assert (same.exit_code, same.stdout) == (0, "no difference: 1 tensor, 8 B, and 1 value\n")


def model(tmp_path):
    """A model whose norms have one dim, as a safetensors file."""
    shapes: dict[str, tuple[int, ...]] = {f"layers.{i}.up.weight": (4, 6) for i in range(12)}
    shapes |= {f"layers.{i}.norm.weight": (4,) for i in range(12)} | {"embed": (8, 4), "scale": ()}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({n: np.ones(s, np.float32) for n, s in shapes.items()}, path)
    return path


def test_a_rule_for_tensors_of_any_number_of_dims(tmp_path):
    path = model(tmp_path)
    to = ("-o", tmp_path / "out", "--mesh", "tp=2", "--rule")
    narrow = run("reshard", path, *to, "*.weight", "[S(tp),R]")
    assert narrow.exit_code == 2
    assert "tensor 'layers.0.norm.weight' has 1; write [S(tp),...]" in narrow.stderr
    assert not (tmp_path / "out").exists()
    done = run("reshard", path, *to, "*", "[S(tp),...]", "--rule", "*.up.weight", "[...,S(tp)]")
    assert (done.exit_code, done.stderr) == (0, "")
    found = {
        t["name"]: t
        for t in json.loads(run("inspect", tmp_path / "out", "--json").stdout)["tensors"]
    }
    assert {found[n]["spec"] for n in found if n.endswith("up.weight")} == {"[R,S0]"}
    assert [found[n]["spec"] for n in ("embed", "scale", "layers.3.norm.weight")] == [
        "[S0,R]",
        "[]",
        "[S0]",
    ]


def test_a_dry_run_shows_the_rule_of_every_tensor(tmp_path):
    path, rules = model(tmp_path), tmp_path / "rules.toml"
    rules.write_text('"layers.*" = "[S(tp),...]"\n"*.norm.weight" = "[R]"\n')
    to = ("-o", tmp_path / "out", "--mesh", "tp=2", "--dry-run", "--rules", rules)
    text = run("reshard", path, *to, "--rule", "layers.7.up.*", "[R,R]").stdout
    table = text[text.index("tensor  ") :].splitlines()[2:]
    assert [re.split(" {3,}", line) for line in table] == [
        ["embed", "none, so replicated", "[R,R]"],
        ["layers.{0..11}.norm.weight", "*.norm.weight", "[R]"],
        ["layers.{0..6,8..11}.up.weight", "layers.*", "[S(tp),R]"],
        ["layers.7.up.weight", "layers.7.up.*", "[R,R]"],
        ["scale", "none, so replicated", "[]"],
    ]
    report = json.loads(run("reshard", path, *to, "--json").stdout)
    assert report["sharding"]["layers.11.up.weight"] == {"rule": "layers.*", "spec": "[S(tp),R]"}
    assert report["sharding"]["scale"] == {"rule": None, "spec": "[]"}
    like = run("reshard", path, "-o", tmp_path / "b", "--mesh", "2", "--dry-run").stdout
    assert "tensor" in like
    assert " rule " not in like
    assert not (tmp_path / "out").exists()


def test_rules_of_which_one_would_not_count_are_refused(tmp_path):
    path, rules = model(tmp_path), tmp_path / "rules.toml"
    rules.write_text('"*" = "[S0,...]"\n')
    to = ("-o", tmp_path / "out", "--mesh", "2", "--rules", rules)
    for more, problem in [
        (("--rules", rules), "--rules is given twice; put the rules in one file"),
        (("--rule", "*", "[...]"), "the pattern '*' has 2 rules, but only one applies"),
        (("--rule", "**", "[...]"), "rule '*' has no effect, since later rules win and '**'"),
        (("--rule", "embed", "[...,...]"), "rule 'embed': '...' may stand once in a spec"),
    ]:
        result = run("reshard", path, *to, *more)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert problem in result.stderr

"""`shardspec show`: pictures of layouts in the terminal, as SVG and as HTML."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree as ET
from math import prod

import pytest
import torch
from click.testing import CliRunner

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    model_layouts,
    model_names,
    plan_reshard,
    save_sharded,
)
from shardspec.cli.main import cli
from shardspec.families.glance import glance

ROWS = ("[S01,R]", "--mesh", "2x2", "--shape", "4x4")


def run(*args, color=False, **env):
    return CliRunner().invoke(cli, ["show", *args], color=color, env=env)


def test_piped_it_is_the_plain_picture():
    done = run(*ROWS, COLORTERM="truecolor")
    layout = Layout(DeviceMesh(range(4), (2, 2)), "[S01,R]", (4, 4), "float32")
    assert (done.output, done.exit_code) == (f"{layout.picture()}\n", 0)


@pytest.mark.parametrize(("terminal", "start"), [("truecolor", "48;2;"), ("", "48;5;")])
def test_in_the_terminal_every_box_has_its_color(terminal, start):
    done = run(*ROWS, color=True, COLORTERM=terminal, NO_COLOR=None, TERM="xterm")
    colors = {part.split("m")[0] for part in done.output.split("\x1b[")[1:]}
    assert len({color for color in colors if color.startswith(start)}) == 4


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colors_can_be_refused(env):
    assert run(*ROWS, color=True, **env).output == run(*ROWS).output


def test_axes_are_called_by_their_names():
    done = run("[S1,S0|P2]", "--mesh", "dp=2,tp=3,pp=1", "--shape", "4x6")
    first, *_, last = done.output.splitlines()
    assert first == "[S(tp),S(dp)|P(pp)] of [4, 6] float32 on dp=2,tp=3,pp=1"
    assert last == "pending over axis pp: the sum of what its devices hold"


def test_a_terminal_too_narrow_is_told():
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    command = [
        sys.executable,
        "-m",
        "shardspec",
        "show",
        "[R,S0]",
        "--mesh",
        "8",
        "--shape",
        "9x99",
    ]
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(command, stdout=follower, stderr=subprocess.PIPE, env=env)
    os.close(follower)
    os.close(leader)
    assert (done.returncode, done.stderr.decode()) == (
        0,
        "the picture is 53 columns wide, this terminal 40: give -o layout.svg, or pipe it to "
        "'less -S'\n",
    )


@pytest.mark.parametrize(
    ("spec", "mesh", "shape", "cells"),
    [
        ("[S0]", "3", "7", 3),
        ("[S0]", "5", "7", 4),  # the fifth holds nothing
        ("[S10,S2]", "2x2x2", "8x6", 8),
        ("[S0,R,S1]", "2x3", "4x1x5", 6),
        ("[S0,S1,S2,S3]", "2x2x2x2", "3x3x3x3", 16),
        ("[]", "2x2", "", 1),
    ],
)
def test_svg_has_every_box_with_its_holders(tmp_path, spec, mesh, shape, cells):
    path = tmp_path / "layout.svg"
    done = run(spec, "--mesh", mesh, "--shape", shape, "-o", str(path))
    assert (done.exit_code, done.output.startswith(f"{path}: {spec} of [")) == (0, True)
    root = ET.fromstring(path.read_text("utf-8"))
    name = "{http://www.w3.org/2000/svg}"
    drawn = [rect for rect in root.iter(f"{name}rect") if rect.get("class") == "cell"]
    assert len(drawn) == cells
    assert len({rect.get("fill") for rect in drawn}) == cells
    sizes = tuple(map(int, mesh.split("x")))
    layout = Layout(
        DeviceMesh(range(prod(sizes)), sizes),
        spec,
        tuple(map(int, shape.split("x"))) if shape else (),
        "float32",
    )
    titles = {str(title.text) for rect in drawn for title in rect.iter(f"{name}title")}
    for device, box in layout.boxes().items():
        where = "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]"
        held = [title for title in titles if title.startswith(f"{where} on ")]
        empty = any(lo == hi for lo, hi in box)
        assert len(held) == (0 if empty else 1), device
    # Cells do not lie on each other.
    places = {(rect.get("x"), rect.get("y")) for rect in drawn}
    assert len(places) == cells


def test_html_is_one_page_without_anything_from_outside(tmp_path):
    path = tmp_path / "layout.html"
    assert run(*ROWS, "-o", str(path)).exit_code == 0
    page = path.read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert page.count('class="cell"') == 4
    assert "src=" not in page
    assert "href=" not in page


def test_notebooks_show_the_picture():
    layout = Layout(DeviceMesh(range(4), (2, 2)), "[S01,R]", (4, 4), "float32")
    # What it says of text and rectangles holds for itself alone, not for the page around it.
    style = layout._repr_html_().partition("<style>")[2].partition("</style>")[0]
    light, _, dark = style.partition("@media(prefers-color-scheme:dark){")
    for rules in (light, dark.removesuffix("}")):
        assert rules.count("}") >= 5
        assert all(rule.startswith(".shardspec-layout") for rule in rules.split("}")[:-1])
    assert layout._repr_html_().count('class="cell"') == 4
    many = Layout(DeviceMesh(range(5000), (5000,)), "[S0]", (5000,), "float32")
    assert many._repr_html_() == "<pre>[S0] of [5000] float32 on 5000</pre>"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((*ROWS, "-o", "layout.png"), 2, "ends in .svg or .html"),
        ((*ROWS, "-o", "nowhere/layout.svg"), 3, "cannot be written"),
        (("[S0]", "--mesh", "100x100", "--shape", "4"), 2, "too large to draw; the limit is 4096"),
        (("[S0,R]", "--mesh", "2", "--shape", "4"), 2, "is for 2 dims, but the tensor"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, args, code, message):
    monkeypatch.chdir(tmp_path)
    done = run(*args)
    assert done.exit_code == code
    assert message in done.output
    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_kept(tmp_path):
    path = tmp_path / "layout.svg"
    path.write_text("mine")
    done = run(*ROWS, "-o", str(path))
    assert (done.exit_code, path.read_text()) == (3, "mine")
    assert run(*ROWS, "-o", str(path), "--overwrite").exit_code == 0
    assert path.read_text().startswith("<svg ")


CONFIG = {"model_type": "llama", "vocab_size": 64, "num_hidden_layers": 4, "hidden_size": 8}
CONFIG |= {"num_attention_heads": 4, "intermediate_size": 12}


def test_a_model_is_summarized(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("--model", str(tmp_path), "--layout", "megatron:tp=2,pp=2")
    done = run(*words, "--optimizer", "adamw", "--dtype", "float32")
    want = glance(model_layouts(CONFIG, words[-1], dtype="float32"), optimizer="adamw")
    assert (done.output, done.exit_code) == (f"{want}\n", 0)
    named = run(*words, "--mesh", "2x2", "--ids", "7,5,3,1")
    # The last stage, of ranks 3 and 1, has the head and one more norm.
    assert "4 ranks; rank 1 has the most" in named.output


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (["--layout", "megatron:tp=3"], 3, ["tp=3"]),
        (["--layout", "fsdp"], 3, ["fsdp"]),
        ([], 2, ["--layout"]),
        (["--layout", "fsdp:2", "--links", "ib-ndr-per-gpu"], 2, ["--to"]),
        (["--layout", "fsdp:2", "--rule", "*", "[R]"], 2, ["--rules"]),
        (["--layout", "fsdp:2", "--to", "fsdp:2", "--links", "1:1"], 2, ["presets"]),
        (["--layout", "fsdp:2", "--to", "megatron:tp=3"], 3, ["tp=3"]),
        (["--layout", "fsdp:2", "--shape", "4"], 2, ["--shape"]),
        (["--layout", "fsdp:2", "--mesh", "3"], 3, ["3"]),
        (["--layout", "fsdp:2", "--optimizer", "sgd"], 2, ["sgd", "adamw"]),
    ],
)
def test_what_is_wrong_with_a_model_is_one_line(tmp_path, words, code, names):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = run("--model", str(tmp_path), *words)
    assert done.exit_code == code
    assert all(name in done.output for name in names)
    assert len(done.output.splitlines()) == 1 + ("Usage" in done.output)


def test_the_move_of_a_model_is_planned(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("--model", str(tmp_path), "--layout", "fsdp:4")
    layouts = [model_layouts(CONFIG, text) for text in ("fsdp:4", "fsdp:2", "megatron:tp=2")]
    done = run(*words, "--to", "fsdp:2")
    assert done.exit_code == 0
    plan = plan_reshard(layouts[0], layouts[1])
    assert str(plan) in done.output
    # Rank 0 has a quarter of every tensor and gets another from rank 1.
    whole = sum(2 * prod(at.global_shape) for at in layouts[0].values())
    assert plan.received[0] == whole // 4
    done = run(*words, "--to", "megatron:tp=2", "--links", "ib-ndr-per-gpu")
    names = model_names(CONFIG, "sharded")
    expected = plan_reshard(layouts[0], layouts[2], names=names, links="ib-ndr-per-gpu")
    assert str(expected) in done.output


def test_layouts_of_rules_and_of_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "rules.toml").write_text('"*.weight" = "[S0,...]"')
    model = ("--model", str(tmp_path))
    by_rules = run(*model, "--rules", str(tmp_path / "rules.toml"), "--mesh", "2")
    assert by_rules.exit_code == 0
    assert "[S0,R]" in by_rules.output
    mesh = DeviceMesh(range(2), (2,))
    state = {
        name: DTensor(
            torch.zeros(at.global_shape), mesh, f"[S0{',R' * (len(at.global_shape) - 1)}]"
        )
        for name, at in model_layouts(CONFIG, "fsdp:1").items()
    }
    save_sharded(state, tmp_path / "ckpt")
    saved = run(*model, "--layout", str(tmp_path / "ckpt"))
    float32 = run(*model, "--rule", "*", "[S0,...]", "--mesh", "2", "--dtype", "float32")
    assert (saved.output, saved.exit_code) == (float32.output, 0)
    to = run(*model, "--layout", "fsdp:4", "--dtype", "fp32", "--to", str(tmp_path / "ckpt"))
    assert to.exit_code == 0
    assert "on 4 devices" in to.output


def test_a_spec_needs_a_mesh_and_a_shape():
    assert run("[S0]", "--mesh", "2").exit_code == 2
    assert run().exit_code == 2

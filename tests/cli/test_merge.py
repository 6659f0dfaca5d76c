"""The command `shardspec merge`."""

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner

from shardspec import merge, save_sharded
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.handmade import handmade, sample


def run(*args):
    return CliRunner().invoke(cli, ["merge", *map(str, args)], prog_name="shardspec")


def crc_of(path):
    return f"{zlib.crc32(path.read_bytes()):08x}"


def check(path):
    merged = safetensors.numpy.load_file(path)
    assert merged.keys() == sample().keys()
    for name, (_, array) in sample().items():
        np.testing.assert_array_equal(merged[name], array)


def test_says_what_it_has_written(tmp_path):
    ckpt, out = handmade(sample()).write(tmp_path / "ckpt"), tmp_path / "model.safetensors"
    result = run(ckpt, "-o", out)
    assert (result.exit_code, result.stderr) == (0, "")
    size = out.stat().st_size
    assert re.fullmatch(
        rf"{out}: 2 tensors, {size} B in [^ ]+ m?s \([^ ]+ [kM]B/s\), CRC-32 {crc_of(out)}\n",
        result.stdout,
    )
    check(out)


def test_json(tmp_path):
    ckpt, out = handmade(sample()).write(tmp_path / "ckpt"), tmp_path / "out"
    result = run(ckpt, "--output", out, "--json")
    report = json.loads(result.stdout)
    assert 0 < report.pop("seconds") < 60
    reads = report.pop("reads")
    assert len(reads) == 6
    assert sum(reads.values()) == 252
    assert all(0 < size < (ckpt / name).stat().st_size for name, size in reads.items())
    assert report == {
        "path": str(out),
        "format": "safetensors",
        "read": "shardspec",
        "read_files": 6,
        "read_bytes": 252,
        "writes": {"out": out.stat().st_size},
        "tensors": 2,
        "files": ["out"],
        "bytes": out.stat().st_size,
        "crc32": crc_of(out),
        "digest": None,
        "cast": None,
        "left_out": [],
        "sidecars": [],
        "not_copied": [],
        "filled": [],
        "summed": [],
        "written": True,
        "sharding": {},
        "weight_files": 1,
    }


LOSSY = {"w": torch.tensor([70000.0, 1.0, 1e-9, 0.0]), "v": torch.tensor([[-1e6] * 400] * 8)}


def test_says_what_a_cast_did_not_keep_and_refuses_it_if_asked(tmp_path):
    ckpt, out = tmp_path / "ckpt", tmp_path / "out"
    save_sharded(LOSSY, ckpt)
    result = run(ckpt, "-o", out, "--dtype", "fp16")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1] == (
        "numbers that the cast did not keep: 3201 too large, 1 too small (now 0)"
    )
    before = out.read_bytes()
    result = run(ckpt, "-o", out, "--dtype", "fp16", "--strict-cast", "--overwrite")
    assert result.exit_code == 3
    assert "tensor 'v': the cast would change values: 3200 too large; " in result.stderr
    assert result.stderr.count("\n") == 1
    assert out.read_bytes() == before
    result = run(ckpt, "-o", out, "--dtype", "bf16", "--strict-cast", "--overwrite", "--json")
    assert json.loads(result.stdout)["cast"] == {"overflows": 0, "underflows": 0, "nans": 0}


def test_several_processes_of_torchrun_are_refused_in_one_line(tmp_path, monkeypatch):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        result = run(ckpt, "-o", tmp_path / "out")
        assert result.exit_code == 2
        assert "without torchrun" in result.stderr
        assert "load_sharded and save_sharded" in result.stderr
        assert not (tmp_path / "out").exists()
    # Processes of other launchers are not told apart from single ones, nor those of one process.
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run(ckpt, "-o", tmp_path / "out").exit_code == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert run(ckpt, "-o", tmp_path / "out", "--overwrite").exit_code == 0


def test_quiet(tmp_path):
    result = run(handmade(sample()).write(tmp_path / "ckpt"), "-o", tmp_path / "out", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    check(tmp_path / "out")


def test_an_existing_output_is_kept_unless_forced(tmp_path):
    ckpt, out = handmade(sample()).write(tmp_path / "ckpt"), tmp_path / "out"
    out.write_text("precious")
    result = run(ckpt, "-o", out)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"Error: {out}: exists; choose another name, or overwrite it with --overwrite\n"
    )
    assert out.read_text() == "precious"
    assert run(ckpt, "-o", out, "--overwrite").exit_code == 0
    check(out)


def test_a_name_that_ends_in_a_slash_is_a_directory(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    assert run(f"{ckpt}/", "-o", f"{tmp_path}/out/").exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    check(tmp_path / "out" / "model.safetensors")
    for form in ("safetensors", "torch"):
        refused = run(ckpt, "-o", f"{tmp_path}/file/", "--to", form)
        assert refused.exit_code == 3
        assert f"is named as a directory, but the format '{form}' is one file" in refused.stderr
    for name in ("a.pt", "a.safetensors", "a.bin"):
        refused = run(ckpt, "-o", tmp_path / name, "--max-shard-size", "1KB")
        assert refused.exit_code == 3
        assert (
            f"{name}: files of at most 1000 bytes (--max-shard-size): the format" in refused.stderr
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]
    options = ("--to", "huggingface", "--max-shard-size", "1KB")
    assert run(ckpt, "-o", tmp_path / "a.pt", *options).exit_code == 0
    assert (tmp_path / "a.pt").is_dir()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-shard-size", "0"], ["'--max-shard-size'", "the limit is 0 bytes"]),
        (["--rename", "(", "x"], ["'--rename'", "'(' is not a regular expression"]),
    ],
)
def test_wrong_usage(tmp_path, options, words):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    refused = run(ckpt, "-o", tmp_path / "out", *options)
    assert refused.exit_code == 2
    assert [word for word in words if word not in refused.stderr] == []
    assert len(refused.stderr.splitlines()) == 1


def test_an_empty_text_is_no_path(tmp_path, monkeypatch):
    """As that of a variable that is not set: the working directory is not what was meant."""
    handmade(sample()).write(tmp_path / "ckpt")
    monkeypatch.chdir(tmp_path / "ckpt")
    assert run("", "-o", tmp_path / "out").exit_code == 2
    assert run(".", "-o", "").exit_code == 3
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"an empty text is not a path"):
        save_sharded({"w": torch.ones(2)}, "")
    for place in (None, b"ckpt", 7):
        with pytest.raises(CheckpointError, match=f"a {type(place).__name__} is not a path"):
            merge(tmp_path / "ckpt", place)  # type: ignore[arg-type]  # on purpose


def test_no_verify_leaves_digests_alone(tmp_path):
    ckpt = tmp_path / "ckpt"
    save_sharded({"w": torch.arange(6.0)}, ckpt)
    (shard,) = ckpt.glob("*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert run(ckpt, "-o", tmp_path / "a").exit_code == 3
    assert run(ckpt, "-o", tmp_path / "a", "--no-verify").exit_code == 0


def test_what_is_left_out_is_named(tmp_path):
    state = {"w": torch.ones(1), **{f"n{i}": i for i in range(5)}, "one tensor": torch.ones(())}
    torch.save(state, tmp_path / "in.pt")
    lines = run(tmp_path / "in.pt", "-o", tmp_path / "out").stdout.splitlines()
    assert lines[1:] == [
        "not written (not tensors): 'n0', 'n1', 'n2' and 2 more; see 'shardspec inspect'"
    ]
    lines = run(tmp_path / "in.pt", "-o", tmp_path / "out.pt", "--include", "w").stdout
    assert lines.startswith(f"{tmp_path}/out.pt: 1 tensor, ")


def test_what_holds_no_tensor_is_not_merged_into_nothing(tmp_path):
    torch.save({"seed": 3}, tmp_path / "rng_state.pth")
    result = run(tmp_path / "rng_state.pth", "-o", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "has no tensor to write, but entries such as 'seed'" in result.stderr
    assert not (tmp_path / "out").exists()
    assert run(tmp_path / "rng_state.pth", "-o", tmp_path / "out.pt").exit_code == 0


BAR = """
import sys, time
from shardspec.cli.output import progress_bar

with progress_bar(True, "merge") as update:
    for at in range(int(sys.argv[1])):
        if update is not None:
            update(at << 30, 4 << 30)
        time.sleep(0.4)
"""


@pytest.mark.parametrize(
    ("times", "term", "columns", "shown"),
    [
        (1, "xterm", 100, False),  # done within a second
        (4, "xterm", 100, True),
        (4, "xterm", 40, True),
        (4, "dumb", 100, False),
    ],
)
def test_a_bar_appears_on_a_terminal_after_a_second(times, term, columns, shown):
    ours, theirs = os.openpty()
    ended = subprocess.run(
        [sys.executable, "-c", BAR, str(times)],
        stderr=theirs,
        env=os.environ | {"TERM": term, "COLUMNS": str(columns)},
    )
    os.set_blocking(ours, False)
    try:
        drawn = os.read(ours, 1 << 16).decode()
    except BlockingIOError:
        drawn = ""
    os.close(ours)
    os.close(theirs)
    assert ended.returncode == 0
    assert ("GiB" in drawn) == shown, drawn
    assert ("\x1b" in drawn) == shown
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn))
    assert all(len(line) <= columns for line in lines)
    assert all("GiB" in line for line in lines if line), "one line, drawn over itself"


@pytest.mark.parametrize("name", ["m.gguf", "m.onnx", "model-v1.5"])
def test_a_name_that_stands_for_no_format(tmp_path, name):
    """What was asked for is not guessed: such a name wrote safetensors once."""
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    result = run(ckpt, "-o", tmp_path / name)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"no format has files that end in '{Path(name).suffix}'; give --to" in result.stderr
    assert not (tmp_path / name).exists()
    assert run(ckpt, "-o", tmp_path / name, "--to", "safetensors").exit_code == 0
    assert (tmp_path / name).is_file()

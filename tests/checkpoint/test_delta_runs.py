"""Deltas of state dicts, of tied and of fused tensors, and runs that are killed at a write."""

import os
import signal
from itertools import count

import torch

from shardspec import (
    DTensor,
    apply_delta,
    delta,
    digest,
    merge,
    save_sharded,
)
from tests.checkpoint.test_delta import INDEX, MESH, run, state
from tests.faults.forks import DONE, KILLED, Fork


def test_tied_tensors_are_each_changed_or_kept(tmp_path):
    w, kept = torch.randn(5, 4), torch.randn(3)
    for name, value in (("old", w), ("new", w * 2)):
        torch.save({"a": value, "b": value, "c": kept, "d": kept}, tmp_path / f"{name}.pt")
    delta(tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "d", version=1)
    for out in ("out", "out.safetensors"):
        apply_delta(tmp_path / "old.pt", [tmp_path / "d"], tmp_path / out)
        assert digest(tmp_path / out) == digest(tmp_path / "new.pt")


UNFUSED = """
[[map]]
source = ["qkv", "(p r) c", "p[:q]"]
target = ["q", "(q r) c"]
[[map]]
source = ["qkv", "(p r) c", "p[q:]"]
target = ["k", "(k r) c"]
[sizes]
p = 6
q = 4
r = 2
"""


def test_names_of_the_trainer_become_those_of_the_base(tmp_path):
    (tmp_path / "m.toml").write_text(UNFUSED)
    q, k = torch.randn(8, 3), torch.randn(4, 3)
    save_sharded({"q": q, "k": k}, tmp_path / "base")
    k = k + 1
    save_sharded({"qkv": DTensor(torch.cat([q, k]), MESH, "[S0,S1]")}, tmp_path / "new")
    done = run(
        "delta",
        "make",
        tmp_path / "base",
        tmp_path / "new",
        "-o",
        tmp_path / "d",
        "--version",
        1,
        "--map",
        tmp_path / "m.toml",
    )
    assert done.exit_code == 0, done.output
    apply_delta(tmp_path / "base", [tmp_path / "d"], tmp_path / "out")
    assert digest(tmp_path / "out") == digest({"q": q, "k": k})


def killed_at(number, act):
    """Do something in a fork of this process that is killed at its n-th write; return its end."""
    write, counted = os.pwrite, count(1)

    def pwrite(*args):
        if next(counted) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    def run():
        vars(os)["pwrite"] = pwrite
        act()

    return Fork(run).end()


def test_a_run_that_is_killed_at_any_write_leaves_the_old_or_the_new(tmp_path):
    for version in (0, 1, 3):
        save_sharded(state(version), tmp_path / f"v{version}")
    merge(tmp_path / "v0", tmp_path / "old.safetensors")
    delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", version=1)

    def apply():
        base, out = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
        apply_delta(base, [tmp_path / "d"], out, overwrite=True)

    def make():
        delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "made", version=7, overwrite=True)

    for what in ("apply", "delta"):
        out = tmp_path / ("new.safetensors" if what == "apply" else "made")
        if what == "apply":
            merge(tmp_path / "v3", out, format="safetensors")
        else:
            delta(tmp_path / "v0", tmp_path / "v1", out, version=6)
        old = digest(out).value if what == "apply" else (out / INDEX).read_text()
        act = apply if what == "apply" else make
        for number in range(1, 99):
            end = killed_at(number, act)
            if end == DONE:
                break
            assert end == KILLED
            assert (digest(out).value if what == "apply" else (out / INDEX).read_text()) == old
        assert number > 3
        if what == "apply":
            assert digest(out) == digest(state(1))
        else:
            apply_delta(tmp_path / "v0", [out], tmp_path / "again")
            assert digest(tmp_path / "again") == digest(state(1))

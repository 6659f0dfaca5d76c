"""Universal Checkpoints written of ZeRO runs: every file as torch loads it, and read back."""

import argparse
import os
import shutil
import stat
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from shardspec import DeviceMesh, digest, merge, reshard
from shardspec.checkpoint.compare.digest import read_digests
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import assert_same, bits, read_whole
from tests.checkpoint.formats.test_deepspeed import KINDS, SHAPES, write
from tests.checkpoint.test_together import in_processes

FORMAT = "deepspeed-universal"
NAMES = [f"p{at}" for at in range(len(SHAPES))]


def universal(run, out, **options):
    return reshard(run, out, format=FORMAT, **options)


def files_in(place):
    return {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    "ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 5))]
)
@pytest.mark.parametrize(("stage", "gaps", "split"), [(1, 3, False), (2, 0, False), (3, 0, True)])
def test_every_file_is_what_deepspeed_loads(tmp_path, ranks, stage, gaps, split):
    run, out = tmp_path / "run", tmp_path / "out"
    due = write(run, ranks, stage, ranks, gaps, split)
    report = universal(run, out, digests=tmp_path / "digests.json")
    assert report.left_out == ()
    assert set(report.files) == files_in(out)
    assert report.digests == digest(out) == read_digests(tmp_path / "digests.json")
    models = {path.name for path in run.glob("*_model_states.pt")}
    of_all = {f"zero/{n}/{kind or 'fp32'}.pt" for n in NAMES for kind in (*KINDS, "step")}
    beside = set() if stage == 3 else {"zero/cold/fp32.pt", "zero/twin/fp32.pt"}
    twin = {"zero/twin/fp32.pt"} if stage < 3 else set()
    assert files_in(out) == of_all | beside | twin | models | {
        "latest_universal",
        "zero/optimizer_state.pt",
    }
    for model in models:
        assert (out / model).read_bytes() == (run / model).read_bytes()
    assert (out / "latest_universal").read_text() == "."
    for name in NAMES:
        for kind in KINDS:
            held = torch.load(out / "zero" / name / f"{kind or 'fp32'}.pt", weights_only=True)
            tensor = due[f"optimizer.{kind}.{name}" if kind else name]
            if stage < 3:
                assert list(held) == ["cat_dim", "param"]
                assert held["cat_dim"] == 0
                held = held["param"]
            assert held.shape == (tensor.shape if stage < 3 else (tensor.numel(),))
            assert bits(held) == bits(tensor)
        step = torch.load(out / "zero" / name / "step.pt", weights_only=True)
        assert (step.shape, step.dtype, step.item()) == ((), torch.float32, 7.0)
    if stage < 3:
        held = torch.load(out / "zero" / "cold" / "fp32.pt", weights_only=True)
        assert list(held) == ["param"]
        due["cold"] = due["cold"].float()
        assert_same(held, {"param": due["cold"]})
    assert_same(read_whole(out), due)
    assert verify_checkpoint(out, every=True).flaws == ()


@pytest.mark.parametrize("stage", [2, 3])
def test_several_processes_write_the_same_files(tmp_path, stage):
    run = tmp_path / "run"
    write(run, 3, stage, 0)
    universal(run, tmp_path / "alone")
    (answers,) = in_processes(tmp_path, partial(universal, run, tmp_path / "out"))
    assert [problem for problem, *_ in answers] == [None] * 3
    names = files_in(tmp_path / "alone")
    assert files_in(tmp_path / "out") == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["alone", "out", "run"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("at", [0, 1, 30, -1])
def test_when_it_is_stopped_the_old_one_stays(tmp_path, overwrite, at):
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2, 3, 0)
    calls = []
    universal(run, out, progress=lambda *done: calls.append(done))
    assert universal(run, tmp_path / "dry", dry_run=True).files
    before = {name: (out / name).read_bytes() for name in files_in(out)}
    stop = len(calls) - 1 if at < 0 else at
    if not overwrite:
        shutil.rmtree(out)
    seen: list[object] = []

    def interrupt(*done):
        if len(seen) == stop:
            raise KeyboardInterrupt
        seen.append(done)

    with pytest.raises(KeyboardInterrupt):
        universal(run, out, overwrite=overwrite, progress=interrupt)
    assert sorted(os.listdir(tmp_path)) == (["out", "run"] if overwrite else ["run"])
    if overwrite:
        assert {name: (out / name).read_bytes() for name in files_in(out)} == before


def test_what_the_optimizer_keeps_besides(tmp_path):
    """Of stages 1 and 2 with steps as numbers, as DeepSpeed's own Adam has them."""
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2, 1, 0)
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}, {"lr": torch.tensor(0.5)}]
    for path in run.glob("*optim_states.pt"):
        state = torch.load(path, weights_only=True)
        inner = state["optimizer_state_dict"]
        for held in inner["base_optimizer_state"]["state"].values():
            held["step"] = 7
        inner["base_optimizer_state"]["param_groups"] = groups
        inner |= {"overflow": False, "group_paddings": [0, 3], "ds_version": "0.19.8"}
        inner["seen"] = {(1, 2.5, None), "é"}
        torch.save(state, path)
    universal(run, out)
    held = torch.load(out / "zero" / "optimizer_state.pt", weights_only=False)
    assert held == {
        "seen": {(1, 2.5, None), "é"},
        "zero_stage": 1,
        "partition_count": [2, 2],
        "param_alignment_paddings": [[0] * 5, [0] * 4],
        "overflow": False,
        "group_paddings": [0, 0],
        "ds_version": "0.19.8",
        "param_groups": groups,
    }
    steps = [torch.load(out / "zero" / name / "step.pt", weights_only=True) for name in NAMES]
    assert steps == [7] * len(NAMES)


def test_of_stage_3_the_step_is_kept_and_flat_tensors_are_not(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2, 3, 0)
    universal(run, out)
    held = torch.load(out / "zero" / "optimizer_state.pt", weights_only=True)
    step = {"step": torch.tensor(7.0)}
    assert held == {
        "zero_stage": 3,
        "partition_count": 2,
        "optimizer_state_dict": {"state": {0: step, 1: step}},
        "param_groups": None,
    }


def test_an_old_one_is_replaced_and_nothing_else(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 3, 3, 0)
    universal(run, out)
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        universal(run, out)
    os.chmod(out, 0o750)
    os.chmod(out / "zero", 0o710)
    for name in files_in(out):
        os.chmod(out / name, 0o640)
    # A parameter that the new one lacks.
    shutil.copytree(out / "zero" / "p1", out / "zero" / "p99")
    other = tmp_path / "other"
    state = write(other, 2, 2, 1)
    for stranger in ("notes.md", "zero/notes.md", "zero/p1/notes.md", "zero/more/x", "data/x.csv"):
        (out / stranger).parent.mkdir(exist_ok=True)
        (out / stranger).write_text(stranger)
        before = files_in(out)
        with pytest.raises(CheckpointError, match=f"holds '{stranger}', which no checkpoint"):
            universal(other, out, overwrite=True)
        assert files_in(out) == before
        (out / stranger).unlink()
        if stranger in ("zero/more/x", "data/x.csv"):
            (out / stranger).parent.rmdir()
    universal(other, out, overwrite=True)
    fresh = tmp_path / "fresh"
    universal(other, fresh)
    assert files_in(out) == files_in(fresh)
    assert_same(read_whole(out), state | {"cold": state["cold"].float()})
    modes = {stat.S_IMODE((out / name).stat().st_mode) for name in files_in(out)}
    assert modes == {0o640}
    assert [stat.S_IMODE(at.stat().st_mode) for at in (out, out / "zero")] == [0o750, 0o710]
    assert sorted(os.listdir(tmp_path)) == ["fresh", "other", "out", "run"]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda out: (out / "zero").write_text("x"), "holds 'zero', which"),
        (lambda out: (out / "zero").symlink_to("/"), "holds 'zero', which"),
        (lambda out: (out / "zero/p1/fp32.pt").mkdir(parents=True), "holds 'zero/p1/fp32.pt/', "),
        (lambda out: (out / "latest_universal").mkdir(), "holds 'latest_universal/', which"),
        (lambda out: (out / "x.safetensors").write_text(""), "holds 'x.safetensors', which"),
        (lambda out: (out / "mp_rank_01_model_states.pt").write_text(""), "holds 'mp_rank_01_mode"),
    ],
)
def test_what_cannot_be_replaced_is_named_before_anything_is_written(tmp_path, make, named):
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2, 2, 0)
    out.mkdir()
    make(out)
    before = files_in(out)
    with pytest.raises(CheckpointError, match=named):
        universal(run, out, overwrite=True)
    assert files_in(out) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_parts_of_one_that_is_damaged_are_not_mixed_with_new_ones(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    write(run, 2, 2, 0)
    universal(run, out)
    fresh = files_in(out)
    shutil.copytree(out / "zero" / "p1", out / "zero" / "p99")
    (out / "zero" / "p1" / "fp32.pt").unlink()
    universal(run, out, overwrite=True)
    assert files_in(out) == fresh


def optimizer(change):
    def changed(run):
        for path in run.glob("*optim_states.pt"):
            state = torch.load(path, weights_only=True)
            change(state["optimizer_state_dict"])
            torch.save(state, path)

    return changed


def model(change):
    def changed(run):
        for path in run.glob("*model_states.pt"):
            state = torch.load(path, weights_only=False)
            change(state)
            torch.save(state, path)

    return changed


def keep_buf(inner):
    for held in inner["base_optimizer_state"]["state"].values():
        held["momentum_buffer"] = held.pop("exp_avg")


def never_updated(inner):
    del inner["base_optimizer_state"]["state"][1]


def with_rules(state):
    state["universal_checkpoint_info"] = {"vocabulary_parameter_patterns": ["p1"]}


def of_experts(state):
    state["ds_autoep_layers"] = [{"ep_rank": 0}]


def with_a_view(inner):
    inner["odd"] = torch.ones(2, 3).t()


def with_a_complex_number(inner):
    inner["odd"] = 1j


def with_an_endless_value(inner):
    value: list[object] = []
    for _ in range(60):
        value = [value, value]
    inner["odd"] = argparse.Namespace(value=value)


def named(new):
    def change(state):
        (shapes, *_) = state["param_shapes"]
        old = next(iter(shapes))
        state["param_shapes"][0] = {new if name == old else name: shapes[name] for name in shapes}
        state["module"] = {new if k == old else k: v for k, v in state["module"].items()}
        state["shared_params"] = {}
        state["module"].pop("twin")

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (optimizer(keep_buf), "keeps momentum_buffer of"),
        (optimizer(never_updated), "and DeepSpeed loads all or none"),
        (optimizer(with_a_view), "besides the tensors of parameters, a tensor that is not"),
        (optimizer(with_an_endless_value), "more than 1,000,000 parts, the limit for a copy"),
        (optimizer(with_a_complex_number), "is a Complex, which cannot be carried along"),
        (model(with_rules), "use python -m deepspeed.checkpoint.ds_to_universal"),
        (model(of_experts), "use python -m deepspeed.checkpoint.ds_to_universal"),
        (model(named("a/b")), "the parameter 'a/b' would need a directory of that name"),
        (model(named("..")), "the parameter '..' would need a directory"),
        (model(named("x" * 300)), "would need a directory of that name"),
        (model(named("optimizer_state.pt")), "would need a directory of that name"),
        (
            lambda run: (run / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
            "partition_count is 2, but .* has files of 1 ranks; restore the others",
        ),
        (
            lambda run: shutil.copy(
                run / "mp_rank_00_model_states.pt", run / "mp_rank_01_model_states.pt"
            ),
            "ds_to_universal",
        ),
    ],
)
def test_what_cannot_be_carried_is_refused(tmp_path, change, told):
    run = tmp_path / "run"
    write(run, 2, 2, 0)
    change(run)
    with pytest.raises(CheckpointError, match=told) as caught:
        universal(run, tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bf16"},
        {"include": "p1"},
        {"exclude": ["p1"]},
        {"rename": {"p": "q"}},
        {"names": {"p1": "p1"}},
        {"device_mesh": DeviceMesh(range(2), (2,))},
        {"rules": {"p1": "[S0]"}},
    ],
)
def test_it_is_of_a_whole_run(tmp_path, options):
    write(tmp_path / "run", 2, 2, 0)
    with pytest.raises(CheckpointError, match=r"a Universal Checkpoint .*; leave out"):
        universal(tmp_path / "run", tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["run"]


def test_other_checkpoints_and_stores_are_refused(tmp_path):
    write(tmp_path / "run", 2, 2, 0)
    with pytest.raises(CheckpointError, match="has files in directories, which are not written"):
        universal(tmp_path / "run", "memory://universal-out")
    merge(tmp_path / "run", tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match="is in the format of safetensors, but"):
        universal(tmp_path / "one.safetensors", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["one.safetensors", "run"]


def test_the_command_writes_for_any_number_of_ranks(tmp_path):
    write(tmp_path / "run", 2, 3, 0)
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    call = ["reshard", run, "-o", out, "--to", FORMAT]
    done = CliRunner().invoke(cli, [*call, "--mesh", "2"])
    assert done.exit_code == 2
    assert "is for any number of ranks; leave out --mesh" in done.output
    done = CliRunner().invoke(cli, [*call, "--threads", "3"])
    assert done.exit_code == 0, done.output
    assert "no rules" not in done.output
    assert_same(read_whole(out), read_whole(run))

"""Outputs that replace others, through merge and reshard: what is of others is never touched."""

import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.storage import storage_path
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import assert_same, read_whole
from tests.checkpoint.writers.states import save

STATE = {"w": torch.arange(12.0).view(4, 3), "v": torch.arange(70_000)}
MESH = DeviceMesh(range(2), (2,))
OUTPUTS: dict[str, dict[str, Any]] = {
    "x.safetensors": {},
    "x.pt": {},
    "hub": {"max_shard_bytes": 100},
    "one": {"format": "huggingface"},
    "dcp": {"format": "dcp"},
}


def write(ckpt, out, name, **options):
    """Merge into one of `OUTPUTS`, or reshard."""
    if name == "cut":
        return reshard(ckpt, out, device_mesh=MESH, rules={"v": "[S0]"}, **options)
    return merge(ckpt, out, **OUTPUTS[name], **options)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return save(tmp_path_factory.mktemp("commit") / "ckpt", STATE)


DIRECTORIES = ["hub", "one", "dcp", "cut"]


def content(directory):
    """Every file below a directory, by its relative name."""
    files = (path for path in directory.rglob("*") if not path.is_dir())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def refused(ckpt, out, name, problem, **options):
    """Check that nothing is replaced, and that the error says why."""
    before = content(out)
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=problem):
            write(ckpt, out, name, overwrite=True, dry_run=dry_run, **options)
    assert content(out) == before
    assert not [name for name in os.listdir(out.parent) if "shardspec-" in name]


@pytest.mark.parametrize("old", DIRECTORIES)
def test_a_checkpoint_of_any_format_is_replaced_by_any_other(ckpt, tmp_path, old):
    """With what lies beside the weights: that belongs to it, whoever wrote it."""
    out = tmp_path / "out"
    for name in DIRECTORIES:
        write(ckpt, out, old)
        for beside in ("config.json", "generation_config.json", "tokenizer.json", "merges.txt"):
            (out / beside).write_text("{}")
        write(ckpt, out, name, overwrite=True)
        write(ckpt, tmp_path / "fresh", name)
        assert len(os.listdir(out)) == len(os.listdir(tmp_path / "fresh"))
        assert_same(read_whole(out), STATE)
        subprocess.run(["rm", "-r", out, tmp_path / "fresh"], check=True)


STRANGERS = {
    "notes.md": "mine",
    "README.md": "# Model card",
    ".gitattributes": "*.safetensors lfs",
    "training_args.bin": "",
    "optimizer.pt": "",
    "credentials.json": "key",
    "helpers.py": "",
    "other.safetensors.index.json": "{}",
    "latest": "global_step5",
    "zero_to_fp32.py": "",
    "data/x.csv": "1",
}


@pytest.mark.parametrize("old", DIRECTORIES)
def test_a_file_that_no_checkpoint_owns_is_named_and_nothing_is_replaced(ckpt, tmp_path, old):
    out = tmp_path / "out"
    write(ckpt, out, old)
    for stranger, text in STRANGERS.items():
        place = out / stranger
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
        refused(ckpt, out, "one", f"contains '{stranger}', not part of a checkpoint")
        place.unlink()
    (out / "data").rmdir()
    (out / "more").symlink_to(tmp_path)
    refused(ckpt, out, "one", "contains 'more', not")
    (out / "more").unlink()
    (out / "empty").mkdir()
    refused(ckpt, out, "one", "contains 'empty/', not")
    (out / "empty").rmdir()
    write(ckpt, out, "one", overwrite=True)
    assert_same(read_whole(out), STATE)


def test_where_there_is_no_checkpoint_only_what_is_written_anew_is_replaced(ckpt, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    refused(ckpt, out, "one", "contains 'config.json', not part of a checkpoint")
    (out / "config.json").rename(out / "model.safetensors")
    write(ckpt, out, "one", overwrite=True)
    assert_same(read_whole(out), STATE)
    # Two together are named, and more than three in part.
    for name in "edcba":
        (out / name).write_text("")
    refused(ckpt, out, "one", "contains 'a', 'b', 'c' and more, not part")


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ((".metadata", "__0_0.distcp"), "one"),
        (("__3_0.distcp",), "cut"),
        (("sharding_info.json", f"shard-00000-{'0' * 16}.safetensors"), "dcp"),
        ((f"shard-00000-{'0' * 16}.safetensors", f".shardspec-save-{'0' * 16}.tmp"), "hub"),
        (("model.safetensors.index.json", "model-00001-of-00002.safetensors"), "cut"),
        (("pytorch_model-00001-of-00002.bin",), "one"),
    ],
)
def test_what_is_left_of_a_damaged_checkpoint_is_replaced(ckpt, tmp_path, names, name):
    """No reader lists its files, but their names are those of parts."""
    out = tmp_path / "out"
    out.mkdir()
    for left in names:
        (out / left).write_bytes(b"{}")
    (out / "notes.md").write_text("mine")
    refused(ckpt, out, name, "contains 'notes.md', not part")
    (out / "notes.md").unlink()
    write(ckpt, out, name, overwrite=True)
    assert_same(read_whole(out), STATE)


def test_weights_that_an_index_does_not_list_are_not_lost(ckpt, tmp_path):
    out = tmp_path / "out"
    write(ckpt, out, "hub")
    merge(ckpt, out / "adapter_model.safetensors", include="w")
    refused(ckpt, out, "cut", "contains 'adapter_model.safetensors', not part")


def test_a_second_checkpoint_in_the_directory_is_not_lost(ckpt, tmp_path):
    out = tmp_path / "out"
    write(ckpt, out, "dcp")
    write(ckpt, tmp_path / "hub", "hub")
    for file in (tmp_path / "hub").iterdir():
        file.rename(out / file.name)
    refused(ckpt, out, "cut", "contains 'model-00001-of-0000")


def test_what_a_list_of_files_names_is_not_removed_for_that(ckpt, tmp_path):
    out = tmp_path / "out"
    merge(ckpt, out, max_shard_bytes=100)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    (out / "train.log").write_text("mine")
    index["weight_map"]["z"] = "train.log"
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(ckpt, out, "cut", "contains 'train.log', not part")


def test_a_file_that_appears_while_a_merge_runs_is_not_lost(ckpt, tmp_path):
    out = tmp_path / "out"
    write(ckpt, out, "one")
    with pytest.raises(CheckpointError, match=r"'late.txt' was put there during this run"):
        write(
            ckpt,
            out,
            "cut",
            overwrite=True,
            progress=lambda *_: (out / "late.txt").write_text("late"),
        )
    assert sorted(os.listdir(out)) == ["late.txt", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def test_the_checkpoint_of_a_run_is_replaced_and_the_run_is_not(ckpt, tmp_path):
    """Megatron-core's files beside DCP belong to it; those of the trainer around it do not."""
    out = tmp_path / "out"
    write(ckpt, out, "dcp")
    (out / "common.pt").write_bytes(b"")
    (out / "metadata.json").write_text("{}")
    (out / "latest_checkpointed_iteration.txt").write_text("5")
    refused(ckpt, out, "one", "contains 'latest_checkpointed_iteration.txt', not part")
    (out / "latest_checkpointed_iteration.txt").unlink()
    write(ckpt, out, "one", overwrite=True)
    assert os.listdir(out) == ["model.safetensors"]


@pytest.mark.parametrize("name", [*OUTPUTS, "cut"])
def test_mode_and_owner_are_kept(ckpt, tmp_path, name):
    out = tmp_path / name
    write(ckpt, out, name)
    files = [out] if out.is_file() else list(out.iterdir())
    umask = os.umask(0o022)
    os.umask(umask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}
    for file in files:
        file.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(tmp_path, 1234, 1234)
            os.chown(out, 1234, 1234)
            os.chown(file, 1234, 1234)
    write(ckpt, out, name, overwrite=True)
    files = [out] if out.is_file() else list(out.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    if os.geteuid() == 0:
        assert {file.stat().st_uid for file in files} == {1234}


def test_a_new_directory_has_the_usual_mode(ckpt, tmp_path):
    write(ckpt, tmp_path / "out", "cut")
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


PLANT = """
import os, sys, time
if os.geteuid() == 0:
    os.setgid(4321)
    os.setuid(4321)
place, victim = sys.argv[1:]
print("ready", flush=True)
planted = 0
while os.path.isdir(place):
    for root, _, names in os.walk(place):
        for name in names:
            if "shardspec" in name or root != place:
                try:
                    os.unlink(os.path.join(root, name))
                    os.symlink(victim, os.path.join(root, name))
                    planted += 1
                except OSError:
                    pass
    if os.path.exists(os.path.join(place, "stop")):
        break
"""


@pytest.mark.parametrize("name", [*OUTPUTS, "cut"])
def test_a_link_that_another_user_plants_is_not_followed(ckpt, tmp_path, name):
    """A second user who may write into the directory plants links wherever a name appears."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for above in (tmp_path, *tmp_path.parents):
        if above.owner() == Path("~").expanduser().owner() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    victim = tmp_path / "victim"
    victim.write_text("private")
    victim.chmod(0o600)
    # Names of former versions, too.
    for former in (f".{name}.shardspec", f".{name}.shardspec-team"):
        (shared / former).symlink_to(victim)
    planter = subprocess.Popen(
        [sys.executable, "-c", PLANT, shared, victim], stdout=subprocess.PIPE, text=True
    )
    assert planter.stdout is not None
    assert planter.stdout.readline() == "ready\n"
    planter.stdout.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(3):
            try:
                write(ckpt, shared / name, name, overwrite=True)
            except CheckpointError:
                # To be stopped by somebody who may write there is no harm to a file elsewhere.
                continue
    (shared / "stop").write_text("")
    assert planter.wait(60) == 0
    assert victim.read_text() == "private"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


def test_what_a_killed_run_left_is_cleared(ckpt, tmp_path):
    out = tmp_path / "out"
    merge(ckpt, out, max_shard_bytes=100)

    child = os.fork()
    if not child:
        merge(
            ckpt,
            out,
            max_shard_bytes=100,
            overwrite=True,
            progress=lambda *_: os.kill(os.getpid(), 9),
        )
    os.waitpid(child, 0)
    assert len(os.listdir(tmp_path)) > 1
    assert_same(read_whole(out), STATE)
    merge(ckpt, out, max_shard_bytes=100, overwrite=True)
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_written_at_once_keeps_its_mode(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o640)
    storage_path(path).write(3, [b"new"], overwrite=True)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)

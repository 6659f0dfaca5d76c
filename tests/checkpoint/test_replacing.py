"""Outputs that replace others, through merge and reshard: what is of others is never touched."""

import json
import os
import signal
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.commit import write_atomically
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


@pytest.mark.parametrize("name", ["hub", "one", "dcp", "cut"])
def test_only_files_of_the_old_checkpoint_are_replaced(ckpt, tmp_path, name):
    """Every other one is kept; those too that are put there while a merge runs."""
    out = tmp_path / "out"
    for old in ("hub", "one", "dcp", "cut"):
        write(ckpt, out, old)
        strangers = {"config.json": "{}", "credentials.json": "key", "notes.md": "mine"}
        for stranger, text in strangers.items():
            (out / stranger).write_text(text)
        (out / "data").mkdir()
        (out / "data" / "x.csv").write_text("1")
        late: list[int] = []

        def put(_done, _total, late=late, out=out):
            if not late:
                late.append((out / "late.txt").write_text("late"))

        write(ckpt, out, name, overwrite=True, progress=put)
        write(ckpt, tmp_path / "fresh", name)
        ours = {path.name for path in out.iterdir()} - {*strangers, "data", "late.txt"}
        assert len(ours) == len(list((tmp_path / "fresh").iterdir()))
        assert {n: (out / n).read_text() for n in strangers} == strangers
        assert (out / "late.txt").read_text() == "late"
        assert (out / "data" / "x.csv").read_text() == "1"
        assert_same(read_whole(out), STATE)
        subprocess.run(["rm", "-r", out, tmp_path / "fresh"], check=True)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("stranger", "problem"),
    [
        ("other.safetensors.index.json", "would count as parts of"),
        ("x.safetensors", "would count as parts of"),
        (".metadata", "would be read instead of"),
        ("sharding_info.json", "would be read instead of"),
    ],
)
def test_what_would_count_instead_is_refused(ckpt, tmp_path, stranger, problem, dry_run):
    out = tmp_path / "out"
    out.mkdir()
    (out / stranger).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=f"holds '{stranger}', which {problem} what is"):
        merge(ckpt, out, format="huggingface", overwrite=True, dry_run=dry_run)
    assert os.listdir(out) == [stranger]


def test_a_second_checkpoint_in_the_directory_is_not_read_instead(ckpt, tmp_path):
    """Of two in one directory one counts and is replaced; then the other would count."""
    out = tmp_path / "out"
    write(ckpt, out, "dcp")
    write(ckpt, tmp_path / "cut", "cut")
    for file in (tmp_path / "cut").iterdir():
        file.rename(out / file.name)
    before = sorted(os.listdir(out))
    with pytest.raises(CheckpointError, match=r"would be read instead of what is written there"):
        write(ckpt, out, "one", overwrite=True)
    assert sorted(os.listdir(out)) == before
    write(ckpt, out, "cut", overwrite=True)
    assert_same(read_whole(out), STATE)


def test_what_a_list_of_files_names_is_not_removed_for_that(ckpt, tmp_path):
    out = tmp_path / "out"
    merge(ckpt, out, max_shard_bytes=100)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    (out / "train.log").write_text("mine")
    index["weight_map"]["z"] = "train.log"
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    write(ckpt, out, "cut", overwrite=True)
    assert (out / "train.log").read_text() == "mine"
    assert_same(read_whole(out), STATE)


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

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

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
    write_atomically(path, 3, [b"new"], overwrite=True)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)

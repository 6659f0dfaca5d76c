"""Several processes write to a store: the same files as one, one commit, and they fail together."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from shardspec import merge, reshard, save_sharded
from shardspec.checkpoint.coordinate import Member
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import assert_same, read_whole
from tests.checkpoint.remote_ranks import write
from tests.checkpoint.stores import MESH, RULES, STATE, names, upload
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.usefixtures("s3")


def in_processes(tmp_path, source, out, size=2, **options):
    """Merge or reshard in several processes; return what each has to say, in their order."""
    where = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    meet = tmp_path / os.urandom(4).hex()
    meet.mkdir()
    return run_ranks(size, meet, write, size, str(source), str(out), options, where)


def contents(url):
    store = fsspec.filesystem("s3")
    return {name: store.cat_file(f"{url}/{name}") for name in names(url)}


OUTPUTS: dict[str, dict[str, Any]] = {
    "x.pt": {"verify": False},
    "hub": {"max_shard_bytes": 50},
    "dcp": {"format": "dcp", "device_mesh": [2, 3], "rules": RULES},
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_same_bytes_as_alone(forms, tmp_path, kind):
    options = OUTPUTS[kind]
    alone = dict(options)
    if "device_mesh" in alone:
        alone["device_mesh"] = MESH
    act = reshard if "device_mesh" in alone else merge
    report = act(forms / "own", f"s3://models/alone/{kind}", **alone)
    size = 3 if kind == "hub" else 2
    answers = in_processes(tmp_path, forms / "own", f"s3://models/out/{kind}", size, **options)
    assert answers == [[None, report.crc32, list(report.files)]] * size
    due = {name: data for name, data in contents("s3://models/alone").items() if kind in name}
    assert {k: v for k, v in contents("s3://models/out").items() if kind in k} == due
    assert not [name for name in names("s3://models") if "shardspec-" in name]
    assert fsspec.filesystem("s3").list_multipart_uploads("models") == []


def test_what_is_there_is_replaced_in_the_end(forms, tmp_path):
    out = "s3://models/replaced/hub"
    merge(forms / "own", out, max_shard_bytes=100, dtype="bf16")
    before = contents(out)
    answers = in_processes(tmp_path, forms / "own", out, max_shard_bytes=100)
    assert answers[0][0] == "OutputExistsError"
    assert "exists; choose another name, or overwrite it" in answers[0][1]
    assert answers[0][1] == answers[1][1]
    assert contents(out) == before
    answers = in_processes(tmp_path, forms / "own", out, max_shard_bytes=100, overwrite=True)
    assert [answer[0] for answer in answers] == [None, None]
    assert_same(read_whole(out), STATE)
    assert names("s3://models/replaced") == [f"hub/{name}" for name in sorted(before)]


def test_a_changed_byte_fails_all_and_nothing_stays(tmp_path):
    tensors = {name: torch.arange(70_000.0) + ord(name) for name in "abc"}
    save_sharded(tensors, tmp_path / "own")
    out = "s3://models/failed/cut"
    merge(tmp_path / "own", out, format="dcp")
    before = contents(out)
    for stored in (open_checkpoint(tmp_path / "own").tensor(name).boxes[0] for name in "ac"):
        data = bytearray(stored.path.read_bytes())
        data[stored.offset + 5] ^= 1
        stored.path.write_bytes(data)
        options = {"max_shard_bytes": 300_000, "overwrite": True}
        answers = in_processes(tmp_path, tmp_path / "own", out, **options)
        assert {answer[0] for answer in answers} == {"CheckpointError"}
        assert len({answer[1] for answer in answers}) == 1
        assert answers[0][1].startswith("rank ")
        assert "its bytes were changed" in answers[0][1]
        assert contents(out) == before
        assert len(names("s3://models/failed")) == len(before)
        data[stored.offset + 5] ^= 1
        stored.path.write_bytes(data)
    assert fsspec.filesystem("s3").list_multipart_uploads("models") == []


def test_where_others_do_not_see_it(forms):
    with pytest.raises(CheckpointError, match="memory:// is the memory of one process"):
        merge(forms / "own", "memory://models/x", member=Member(0, 2))
    with pytest.raises(CheckpointError, match="is a bucket; name a file or a directory in it"):
        merge(forms / "own", "s3://models", member=Member(0, 2), max_shard_bytes=100)


@pytest.mark.dist
def test_under_torchrun(forms, tmp_path):
    upload(forms / "own", "s3://models/own")
    merge(forms / "own", tmp_path / "alone", max_shard_bytes=50)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    args = ["merge", "s3://models/own", "-o", "s3://models/run", "--max-shard-size", "50"]
    done = subprocess.run(
        [*command, "-m", "shardspec", *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("s3://models/run: 4 tensors, ")
    assert done.stdout.count("\n") == 1
    due = {file.name: file.read_bytes() for file in (tmp_path / "alone").iterdir()}
    assert contents("s3://models/run") == due

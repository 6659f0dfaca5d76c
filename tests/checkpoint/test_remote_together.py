"""Several processes write to a store: the same files as one, one commit, and they fail together."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from shardspec import merge, reshard, save_sharded
from shardspec.checkpoint.open import open_checkpoint
from tests.checkpoint.formats.reading import assert_same, read_whole
from tests.checkpoint.merging_ranks import write_all
from tests.checkpoint.stores import MESH, RULES, STATE, names, upload
from tests.dist.processes import run_ranks
from tests.jobs import run_command

pytestmark = pytest.mark.usefixtures("s3")


def of_store():
    """Return the variables of the environment that say where the store is."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def in_processes(tmp_path, *acts, size=2):
    """Merge or reshard in several processes; return for each what the ranks answer."""
    meet = tmp_path / os.urandom(4).hex()
    meet.mkdir()
    return list(zip(*run_ranks(size, meet, write_all, acts, of_store()), strict=True))


def contents(url):
    store = fsspec.filesystem("s3")
    return {name: store.cat_file(f"{url}/{name}") for name in names(url)}


OUTPUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "x.pt": (merge, {"verify": False}),
    "hub": (merge, {"max_shard_bytes": 50}),
    "dcp": (reshard, {"format": "dcp", "device_mesh": MESH, "rules": RULES}),
}


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_bytes_as_alone(forms, tmp_path, size):
    own, out = forms / "own", f"s3://models/of-{size}"
    acts = [partial(act, own, f"{out}/{kind}", **more) for kind, (act, more) in OUTPUTS.items()]
    answers = in_processes(tmp_path, *acts, size=size)
    for (kind, (act, options)), answer in zip(OUTPUTS.items(), answers, strict=True):
        report = act(own, f"s3://models/alone-{size}/{kind}", **options)
        assert list(answer) == [[None, report.crc32, list(report.files)]] * size
    assert contents(out) == contents(f"s3://models/alone-{size}")
    assert not [name for name in names("s3://models") if "shardspec-" in name]
    assert fsspec.filesystem("s3").list_multipart_uploads("models") == []


def test_what_is_there_is_replaced_in_the_end(forms, tmp_path):
    out = "s3://models/replaced/hub"
    merge(forms / "own", out, max_shard_bytes=100, dtype="bf16")
    before = contents(out)
    act = partial(merge, forms / "own", out, max_shard_bytes=100)
    (refused,) = in_processes(tmp_path, act)
    assert refused[0][0] == "OutputExistsError"
    assert "exists; choose another name, or overwrite it" in refused[0][1]
    assert refused[0] == refused[1]
    assert contents(out) == before
    (answers,) = in_processes(tmp_path, partial(act, overwrite=True))
    assert [kind for kind, *_ in answers] == [None, None]
    assert_same(read_whole(out), STATE)
    assert names("s3://models/replaced") == [f"hub/{name}" for name in sorted(before)]


def test_a_changed_byte_fails_all_and_nothing_stays(tmp_path):
    tensors = {name: torch.arange(70_000.0) + ord(name) for name in "abc"}
    out, acts = "s3://models/failed/cut", []
    for name in "ac":
        save_sharded(tensors, tmp_path / name)
        stored = open_checkpoint(tmp_path / name).tensor(name).boxes[0]
        data = bytearray(Path(stored.path).read_bytes())
        data[stored.offset + 5] ^= 1
        Path(stored.path).write_bytes(data)
        more: dict[str, Any] = {"max_shard_bytes": 300_000, "overwrite": True}
        acts += [partial(merge, tmp_path / name, at, **more) for at in (out, f"{out}-new")]
    save_sharded(tensors, tmp_path / "own")
    merge(tmp_path / "own", out, format="dcp")
    before = contents("s3://models/failed")
    for answers in in_processes(tmp_path, *acts):
        assert {kind for kind, *_ in answers} == {"CheckpointError"}
        assert len({text for _, text, _ in answers}) == 1
        assert answers[0][1].startswith("rank ")
        assert "its bytes were changed" in answers[0][1]
    assert contents("s3://models/failed") == before
    assert fsspec.filesystem("s3").list_multipart_uploads("models") == []


def test_memory_of_one_process_is_refused(forms, tmp_path):
    (answers,) = in_processes(tmp_path, partial(merge, forms / "own", "memory://models/x"))
    assert {kind for kind, *_ in answers} == {"CheckpointError"}
    assert "memory:// is the memory of one process" in answers[0][1]


@pytest.mark.dist
def test_the_command_in_a_job(forms, tmp_path):
    upload(forms / "own", "s3://models/own")
    merge(forms / "own", tmp_path / "alone", max_shard_bytes=50)
    args = ("merge", "s3://models/own", "-o", "s3://models/run", "--max-shard-size", "50")
    first, second = run_command(2, tmp_path, *args, environment=of_store())
    assert (first.exit_code, first.stderr) == (0, "")
    assert first.stdout.startswith("s3://models/run: 4 tensors, ")
    assert first.stdout.count("\n") == 1
    assert second == (0, "", "")
    due = {file.name: file.read_bytes() for file in (tmp_path / "alone").iterdir()}
    assert contents("s3://models/run") == due

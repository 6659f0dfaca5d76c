"""Several processes write to a store: the same files as one, one commit, and they fail together."""

import os
from dataclasses import dataclass
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


def spoiled(directory):
    """Save into a directory what is sound, and the same with a byte changed in `a` and in `c`."""
    tensors = {name: torch.arange(70_000.0) + ord(name) for name in "abc"}
    for name in "ac":
        save_sharded(tensors, directory / name)
        stored = open_checkpoint(directory / name).tensor(name).boxes[0]
        data = bytearray(Path(stored.path).read_bytes())
        data[stored.offset + 5] ^= 1
        Path(stored.path).write_bytes(data)
    save_sharded(tensors, directory / "sound")


@dataclass(frozen=True)
class Job:
    """What the ranks of a job answered, and what was in the store before."""

    size: int
    outputs: list[tuple[Any, ...]]
    refused: tuple[Any, ...]
    replaced: tuple[Any, ...]
    failed: list[tuple[Any, ...]]
    in_memory: tuple[Any, ...]
    before: dict[str, dict[str, bytes]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.exhaustive)])
def job(request, forms, tmp_path_factory):
    """Run all of it in one job, as ranks take long to import what speaks to stores."""
    own, size, place = forms / "own", request.param, tmp_path_factory.mktemp("together")
    url = f"s3://models/of-{size}"
    for name in ("kept", "replaced"):
        merge(own, f"{url}/{name}/hub", max_shard_bytes=100, dtype="bf16")
    spoiled(place)
    merge(place / "sound", f"{url}/failed/cut", format="dcp")
    before = {name: contents(f"{url}/{name}") for name in ("kept", "replaced", "failed")}
    again = partial(merge, own, max_shard_bytes=100)
    broken = [
        partial(merge, place / name, f"{url}/failed/{at}", max_shard_bytes=300_000, overwrite=True)
        for name in "ac"
        for at in ("cut", "new")
    ]
    answers = in_processes(
        place,
        *(partial(act, own, f"{url}/out/{kind}", **more) for kind, (act, more) in OUTPUTS.items()),
        partial(again, f"{url}/kept/hub"),
        partial(again, f"{url}/replaced/hub", overwrite=True),
        *broken,
        partial(merge, own, "memory://models/x"),
        size=size,
    )
    *outputs, refused, replaced = answers[: len(OUTPUTS) + 2]
    return Job(
        size, outputs, refused, replaced, answers[len(OUTPUTS) + 2 : -1], answers[-1], before
    )


def test_the_same_bytes_as_alone(forms, job):
    alone, out = f"s3://models/alone-{job.size}", f"s3://models/of-{job.size}/out"
    for (kind, (act, options)), answer in zip(OUTPUTS.items(), job.outputs, strict=True):
        report = act(forms / "own", f"{alone}/{kind}", **options)
        assert list(answer) == [[None, report.crc32, list(report.files)]] * job.size
    assert contents(out) == contents(alone)
    assert not [name for name in names("s3://models") if "shardspec-" in name]
    assert fsspec.filesystem("s3").list_multipart_uploads("models") == []


def test_what_is_there_is_replaced_in_the_end(job):
    url = f"s3://models/of-{job.size}"
    first = job.refused[0]
    assert first[0] == "OutputExistsError"
    assert "exists; choose another name, or overwrite it" in first[1]
    assert list(job.refused) == [first] * job.size
    assert contents(f"{url}/kept") == job.before["kept"]
    assert [kind for kind, *_ in job.replaced] == [None] * job.size
    assert_same(read_whole(f"{url}/replaced/hub"), STATE)
    assert names(f"{url}/replaced") == sorted(job.before["replaced"])


def test_a_changed_byte_fails_all_and_nothing_stays(job):
    assert len(job.failed) == 4
    for answers in job.failed:
        assert {kind for kind, *_ in answers} == {"CheckpointError"}
        assert len({text for _, text, _ in answers}) == 1
        assert answers[0][1].startswith("rank ")
        assert "its bytes were changed" in answers[0][1]
    assert contents(f"s3://models/of-{job.size}/failed") == job.before["failed"]
    assert fsspec.filesystem("s3").list_multipart_uploads("models") == []


def test_memory_of_one_process_is_refused(job):
    assert {kind for kind, *_ in job.in_memory} == {"CheckpointError"}
    assert "memory:// is the memory of one process" in job.in_memory[0][1]


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

"""Checkpoints written to URLs: the same bytes as on disk, whole or not at all."""

import io
import signal
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.state_dict_loader import load

from shardspec import DeviceMesh, DTensor, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.object_store import ObjectPath
from shardspec.checkpoint.storage.path import Staging
from shardspec.errors import CheckpointError, OutputExistsError
from tests.checkpoint.formats.reading import assert_same, read_whole
from tests.checkpoint.stores import MESH, ROOTS, RULES, STATE, CountingStore, failed, names, upload
from tests.forked import run_forked

pytestmark = pytest.mark.usefixtures("s3")


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_what_is_written_is_what_is_written_here(forms, root, tmp_path):
    report = merge(forms / "own", f"{root}/out.safetensors", dtype="bf16")
    local = merge(forms / "own", tmp_path / "out.safetensors", dtype="bf16")
    assert (report.num_bytes, report.crc32) == (local.num_bytes, local.crc32)
    store = fsspec.core.url_to_fs(root)[0]
    assert store.cat_file(f"{root}/out.safetensors") == (tmp_path / "out.safetensors").read_bytes()
    merge(forms / "own", f"{root}/hub", max_shard_bytes=100, threads=3)
    for file in (forms / "hub").iterdir():
        assert store.cat_file(f"{root}/hub/{file.name}") == file.read_bytes()
    reshard(f"{root}/hub", f"{root}/cut", device_mesh=MESH, rules=RULES)
    assert verify_checkpoint(f"{root}/cut").digested_bytes > 37 * 11 * 4
    assert_same(read_whole(f"{root}/cut"), STATE)
    shards = load_sharded(f"{root}/cut", DeviceMesh(range(5)), {"a.w": "[R,S0]", "b.w": "[R,R]"})
    assert shards["a.w"].to_local(2).equal(STATE["a.w"][:, 6:9])
    merge(f"{root}/cut", tmp_path / "back.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "back.safetensors"), STATE)


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_what_is_there_is_kept_or_replaced_as_a_whole(forms, root):
    merge(forms / "own", f"{root}/a.safetensors")
    merge(forms / "own", f"{root}/hub", max_shard_bytes=100)
    kinds: dict[str, dict[str, Any]] = {"a.safetensors": {}, "hub": {"max_shard_bytes": 900}}
    for out, options in kinds.items():
        before = names(root)
        with pytest.raises(OutputExistsError, match=r"exists; choose another name, or overwrite"):
            merge(forms / "own", f"{root}/{out}", **options)
        assert names(root) == before
        merge(forms / "own", f"{root}/{out}", overwrite=True, include=("a.*",), **options)
        assert list(read_whole(f"{root}/{out}")) == ["a.w"]
    assert names(f"{root}/hub") == ["model-00001-of-00001.safetensors"] or names(f"{root}/hub") == [
        "model.safetensors"
    ]
    merge(forms / "own", f"{root}/hub", max_shard_bytes=100, overwrite=True)
    # The same names again: none of the old ones may stand beside new ones.
    merge(forms / "own", f"{root}/hub", max_shard_bytes=100, overwrite=True, dtype="bf16")
    assert read_whole(f"{root}/hub")["a.w"].dtype == torch.bfloat16
    reshard(forms / "own", f"{root}/hub", device_mesh=MESH, rules=RULES, overwrite=True)
    assert open_checkpoint(f"{root}/hub").format == "shardspec"
    assert not any("model" in name for name in names(f"{root}/hub"))
    merge(forms / "hub", f"{root}/hub", format="dcp", overwrite=True)
    assert open_checkpoint(f"{root}/hub").format == "torch distributed checkpoint"


ALL_ROOTS = [pytest.param(at, marks=[pytest.mark.exhaustive] * (at[:2] == "s3")) for at in ROOTS]


@pytest.mark.parametrize("root", ALL_ROOTS, indirect=True)
def test_what_is_of_no_checkpoint_or_of_the_source_is_kept(forms, root):
    store = fsspec.core.url_to_fs(root)[0]
    merge(forms / "own", f"{root}/a.safetensors")
    merge(forms / "hub", f"{root}/hub", format="dcp")
    for stranger in ("notes.txt", "data.safetensors", "more/notes.txt"):
        store.pipe_file(f"{root}/hub/{stranger}", b"mine")
        before = names(root)
        named = "more/" if "/" in stranger else stranger
        with pytest.raises(CheckpointError, match=f"contains '{named}', not part of a checkpoint"):
            reshard(forms / "own", f"{root}/hub", device_mesh=MESH, rules=RULES, overwrite=True)
        assert names(root) == before
        store.rm_file(f"{root}/hub/{stranger}")
    before = names(root)
    refusals: tuple[tuple[str, str, str], ...] = (
        ("hub", "safetensors", "is a directory; name a file to write"),
        ("a.safetensors", "huggingface", "is a file; name a directory to write"),
    )
    for output, form, problem in refusals:
        with pytest.raises(CheckpointError, match=problem):
            merge(forms / "own", f"{root}/{output}", format=form, overwrite=True)
    for source in (f"{root}/a.safetensors", root):
        with pytest.raises(CheckpointError, match="contains the checkpoint itself"):
            merge(f"{root}/a.safetensors", source, format="huggingface", overwrite=True)
    assert names(root) == before


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_ranks_save_into_a_store(root):
    cut = {name: DTensor(v, MESH, "[S10,R]") if v.dim() == 2 else v for name, v in STATE.items()}
    save_sharded(cut, f"{root}/save")
    first = names(f"{root}/save")
    assert len(first) == 7
    assert_same(read_whole(f"{root}/save"), STATE)
    with pytest.raises(OutputExistsError, match="contains a finished save"):
        save_sharded(cut, f"{root}/save")
    assert names(f"{root}/save") == first
    save_sharded({"n": STATE["n"] + 1}, f"{root}/save", overwrite=True)
    assert_same(read_whole(f"{root}/save"), {"n": STATE["n"] + 1})
    assert len(names(f"{root}/save")) == 2


def test_what_was_sent_is_not_fetched(counted, tmp_path):
    save_sharded({"w": torch.arange(1 << 20, dtype=torch.int32)}, tmp_path / "own")
    CountingStore.requests.clear()
    merge(tmp_path / "own", f"{counted}/out.safetensors")
    assert sum(CountingStore.requests) == 0


def test_source_bytes_that_were_changed_are_found(forms):
    root = "s3://models/changed"
    upload(forms / "own", f"{root}/own")
    file = next(f for f in names(f"{root}/own") if "shard-00000" in f)
    store = fsspec.filesystem("s3")
    data = bytearray(store.cat_file(f"{root}/own/{file}"))
    data[-1] ^= 1
    store.pipe_file(f"{root}/own/{file}", bytes(data))
    for form in ("safetensors", "huggingface"):
        with pytest.raises(CheckpointError, match=r"has CRC-32 .* was saved; its bytes were"):
            merge(f"{root}/own", f"{root}/out", format=form)
    assert names(root) == sorted(f"own/{name}" for name in names(f"{root}/own"))
    assert store.list_multipart_uploads("models") == []


IMPORTS = """
import os, signal, sys
import s3fs
from shardspec.checkpoint.convert.output import merge
from shardspec.checkpoint.storage import object_store
"""
KILLED = """
# What is started in the background by a shell is told to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
def progress(done, total):
    if done >= total * 3 // 4:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
size = int(sys.argv[4])
merge(sys.argv[1], sys.argv[2], progress=progress, overwrite=True, max_shard_bytes=size or None)
"""


def test_killed_runs_leave_the_old_or_none(tmp_path):
    root = "s3://models/killed"
    store = fsspec.filesystem("s3")
    state = {name: torch.full((3 << 20,), n, dtype=torch.int8) for n, name in enumerate("abcd")}
    source = tmp_path / "big.safetensors"
    safetensors.torch.save_file(state, source)
    for name in ("replaced", "kept"):
        store.pipe_file(f"{root}/{name}", b"the old one")
    runs = (
        ("new", "SIGKILL", 0),
        ("replaced", "SIGKILL", 0),
        ("kept", "SIGINT", 0),
        ("hub", "SIGINT", 4_000_000),
        ("cut", "SIGKILL", 4_000_000),
    )
    words = [(source, f"{root}/{name}", how, size) for name, how, size in runs]
    ends = run_forked(IMPORTS, KILLED, words, together=True)
    for (name, how, _), end in zip(runs, ends, strict=True):
        assert end.returncode == -getattr(signal, how), (name, end)
    left = [name for name in names(root) if not name.startswith("cut/")]
    assert left == ["kept", "replaced"]
    for name in left:
        assert store.cat_file(f"{root}/{name}") == b"the old one"
    # What was sent of a killed run's file stays with the store until it drops it, under no name.
    begun = {upload["Key"] for upload in store.list_multipart_uploads("models")}
    assert {"killed/new", "killed/replaced"} <= begun
    assert not any(name.startswith("cut/") for name in names(root))
    merge(source, f"{root}/cut", max_shard_bytes=4_000_000, overwrite=True)
    assert_same(read_whole(f"{root}/cut"), state)


@pytest.mark.parametrize("size", [1000, (9 << 20) + 1])
def test_of_two_writers_one_wins(size):
    path = ObjectPath(f"s3://models/two/{size}")
    late = path.stage(Staging({"": size}, directory=False, overwrite=False))
    with late.__enter__().file("") as write:
        write(0, bytes(size))
    path.write(size, [b"\1" * size], overwrite=False)
    with pytest.raises(OutputExistsError, match="exists; choose another name"):
        late.__exit__(None, None, None)
    assert fsspec.filesystem("s3").cat_file(str(path)) == b"\1" * size
    path.write(3, [b"ab", b"c"], overwrite=True)
    assert fsspec.filesystem("s3").cat_file(str(path)) == b"abc"


def test_outputs_that_cannot_be(forms):
    own = forms / "own"
    assert "The specified bucket does not exist" in failed("merge", own, "-o", "s3://no-one/m")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_zips_of_torch_are_written(forms, root, tmp_path):
    merge(forms / "whole.pt", f"{root}/x.pt")
    merge(forms / "whole.pt", tmp_path / "x.pt")
    store = fsspec.core.url_to_fs(root)[0]
    data = store.cat_file(f"{root}/x.pt")
    assert data == (tmp_path / "x.pt").read_bytes()
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found.pop("step") == 7
    assert_same(found, STATE)
    cut: dict[str, Any] = {"device_mesh": MESH, "rules": RULES, "format": "dcp"}
    report = reshard(f"{root}/x.pt", f"{root}/dcp", threads=2, **cut)
    local = reshard(forms / "whole.pt", tmp_path / "dcp", **cut)
    assert (report.num_bytes, report.crc32) == (local.num_bytes, local.crc32)
    assert names(f"{root}/dcp") == sorted(report.files) == sorted(local.files)
    found = {name: torch.ones_like(value) for name, value in STATE.items()}
    load(found, storage_reader=FsspecReader(f"{root}/dcp"), no_dist=True)
    assert_same(found, STATE)
    assert_same(read_whole(f"{root}/dcp"), STATE)
    assert read_whole(f"{root}/x.pt").keys() == STATE.keys()


KINDS: dict[str, dict[str, Any]] = {
    "x.safetensors": {},
    "x.pt": {},
    "hub": {"max_shard_bytes": 100},
    "dcp": {"format": "dcp"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_run_leaves_the_old(forms, counted, kind):
    out, options = f"{counted}/{kind}", KINDS[kind]
    merge(forms / "own", out, **options)
    store = fsspec.filesystem("counted")
    before = {name: store.cat_file(f"{counted}/{name}") for name in names(counted)}

    def fail(done, total):
        if done >= total:
            raise KeyboardInterrupt

    for threads in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            merge(forms / "own", out, overwrite=True, progress=fail, threads=threads, **options)
        assert {name: store.cat_file(f"{counted}/{name}") for name in names(counted)} == before
    merge(forms / "own", out, dtype="bf16", overwrite=True, **options)
    assert read_whole(out)["a.w"].dtype == torch.bfloat16
    # A killed run of an earlier version may have left a file.
    if kind in ("hub", "dcp"):
        store.pipe_file(f"{out}/.model-00001-of-00002.safetensors.0a.shardspec-tmp", b"1")
        assert read_whole(out)["a.w"].dtype == torch.bfloat16
    merge(forms / "own", out, overwrite=True, **options)
    assert {name: store.cat_file(f"{counted}/{name}") for name in names(counted)} == before


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_do_not_arrive_whole_are_removed(forms, counted, kind):
    """The store is asked for the size of what it has."""
    CountingStore.lose.add(kind)
    with pytest.raises(CheckpointError, match=r"has \d+ bytes in the store, but \d+ were sent"):
        merge(forms / "own", f"{counted}/{kind}", **KINDS[kind])
    CountingStore.lose.clear()
    assert names(counted) == []

"""What will be read of stores is asked for ahead: in that order, once, and not too much."""

import time
from functools import partial
from threading import Barrier

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from shardspec import DeviceMesh, DTensor, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.object_store import RangePrefetcher
from shardspec.checkpoint.storage.path import FileStretch
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import assert_same, read_whole
from tests.checkpoint.stores import FORMS, STATE, CountingStore, SharedStore, upload

MIB = 1 << 20
DATA = np.random.default_rng(0).bytes(40 * MIB)


@pytest.fixture
def files(shared):
    """Three files, all of them in memory."""
    store = fsspec.filesystem("together")
    paths = [storage_path(f"{shared}/{name}") for name in "abc"]
    for path in paths:
        store.pipe_file(str(path), DATA)
    return paths


def requests(count):
    """Return the sizes of requests, once so many were made."""
    deadline = time.monotonic() + 60
    while len(CountingStore.requests) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    return CountingStore.requests


def stretches(*found):
    return [FileStretch(path, start, num_bytes) for path, start, num_bytes in found]


def test_a_plan_that_fails_ends(files):
    a, b, _ = files

    def wanted():
        yield from stretches((a, 0, 9), (b, 0, 9))
        raise CheckpointError("the tensor after it is damaged")

    planned = RangePrefetcher(a.store, wanted())
    assert planned.find(a, 3) == (0, DATA[:9])
    assert planned.find(b, 3) == (0, DATA[:9])
    assert planned.find(a, 9) is None
    with OpenFiles() as opened:
        opened.will_read(a.parent, wanted())
        assert opened.file(a).read(0, 9) == DATA[:9]
        assert opened.file(b).read(4, 9) == DATA[4:13]


def test_what_ends_too_early_or_is_gone_is_said_when_it_is_read(files):
    a, b, c = files
    with OpenFiles() as opened:
        opened.file(a)
        opened.file(b)
        store = fsspec.filesystem("together")
        store.pipe_file(str(a), DATA[:MIB])
        store.rm_file(str(b))
        opened.will_read(a.parent, stretches((a, 0, 2 * MIB), (b, 0, MIB), (c, 0, MIB)))
        with pytest.raises(CheckpointError, match=r"/a: ends at byte 1048576, but bytes up to "):
            opened.file(a).read(0, 2 * MIB)
        with pytest.raises(CheckpointError, match=r"/b: cannot be read: "):
            opened.file(b).read(0, MIB)
        assert opened.file(c).read(0, MIB) == DATA[:MIB]


STATE_OF_MANY = {
    "columns": torch.arange(768 * 1024.0).view(768, 1024),
    "long": torch.arange(3 << 20, dtype=torch.int32),
    "rows": torch.arange(1200 * 600.0).view(1200, 600),
    "whole": torch.arange(70_000.0),
}
CUTS = {"columns": "[R,S0]", "long": "[S0]", "rows": "[S10,R]", "whole": "[R]"}
MESH = DeviceMesh(range(6), (3, 2))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A checkpoint of six ranks, whose boxes are long enough to be asked for one by one."""
    at = tmp_path_factory.mktemp("many")
    save_sharded({n: DTensor(v, MESH, CUTS[n]) for n, v in STATE_OF_MANY.items()}, at / "own")
    reshard(at / "own", at / "dcp", like=at / "own", format="dcp")
    merge(at / "own", at / "hub", max_shard_bytes=4 * MIB)
    return at


NUM_BYTES = sum(value.nbytes for value in STATE_OF_MANY.values())
AROUND_BYTES = {"own": 7 << 17, "dcp": 22 * 2 << 17, "hub": 4 << 17}
"""What headers and pickles come to, at most: 128 KiB for each request."""


def asked(call):
    """Return how many bytes of a store were asked for by a call."""
    CountingStore.requests.clear()
    call()
    return sum(CountingStore.requests)


@pytest.mark.parametrize("form", AROUND_BYTES)
def test_every_byte_is_asked_for_once(many, shared, tmp_path, form):
    url, out = f"{shared}/{form}", tmp_path / "out.safetensors"
    upload(many / form, url)
    due = NUM_BYTES + AROUND_BYTES[form]
    merges = (
        (True, None, list(STATE_OF_MANY)),
        (False, None, list(STATE_OF_MANY)),
        (True, "float16", ["rows", "whole"]),
    )
    # Whether the output is verified makes no difference to what the forms are asked for.
    for verify, dtype, names in merges if form == "own" else merges[1:]:
        asked_for = asked(
            partial(merge, url, out, overwrite=True, verify=verify, dtype=dtype, include=names)
        )
        assert asked_for <= due
        found = load_file(out)
        assert sorted(found) == names
        for name, value in found.items():
            assert torch.equal(value, STATE_OF_MANY[name].to(value.dtype))
    assert asked(partial(verify_checkpoint, url)) <= due
    assert asked(partial(merge, url, f"{shared}/out", max_shard_bytes=4 * MIB)) <= due + NUM_BYTES
    assert list(diff_checkpoints(f"{shared}/out", many / "own")) == []
    loaded = {}

    def load():
        loaded.update(load_sharded(url, MESH, CUTS))

    # Of whole rows, each third of the columns is read with what lies between.
    again = 2 * STATE_OF_MANY["columns"].nbytes if form == "hub" else 0
    assert asked(load) <= due + again
    for name, tensor in loaded.items():
        assert torch.equal(tensor.to_global(), STATE_OF_MANY[name])


@pytest.mark.parametrize("form", ["own", "dcp"])
def test_what_is_read_next_is_on_its_way(many, tmp_path, form):
    url = f"together://{tmp_path.name}"
    upload(many / form, url)
    source = open_checkpoint(url)
    for name in source.names:
        source.tensor(name)
    # Boxes of rows and of what is long; without a plan there is one request at a time.
    barrier = Barrier(6)
    SharedStore.meeting[:] = [barrier] * 6
    merge(source, tmp_path / "out.safetensors", include=["long", "rows"])
    assert not SharedStore.meeting
    assert not barrier.broken
    found = load_file(tmp_path / "out.safetensors")
    assert_same(found, {name: STATE_OF_MANY[name] for name in ("long", "rows")})
    SharedStore.store.clear()


def test_files_are_looked_into_side_by_side(many, forms, tmp_path):
    url = f"together://{tmp_path.name}"
    for form in ("own", "dcp", "hub"):
        upload(many / form, f"{url}/{form}")
    for form in ("ranks", "megatron", "sharded"):
        upload(forms / form, f"{url}/{form}")

    def meet(count, call):
        barrier = Barrier(count)
        SharedStore.meeting[:] = [barrier] * count
        found = call()
        assert not SharedStore.meeting
        assert not barrier.broken
        return found

    info = open_checkpoint(f"{url}/own").files
    assert len(info) == 7
    # The first request is of what describes all files, and is made alone.
    for form, count in (("own", 5), ("hub", 3)):
        SharedStore.meeting[:] = [*[Barrier(count)] * count, Barrier(1)]
        assert_same(read_whole(f"{url}/{form}"), STATE_OF_MANY)
        assert not SharedStore.meeting
    source = open_checkpoint(f"{url}/dcp")
    tensor = meet(5, partial(source.tensor, "rows"))
    assert [box.box for box in tensor.boxes] == [
        box.box for box in open_checkpoint(many / "dcp").tensor("rows").boxes
    ]
    for form in ("ranks", "megatron", "sharded"):
        state = {"w": STATE["n"]} if form == "megatron" else STATE
        assert_same(read_whole(f"{url}/{form}", **FORMS[form]), state)
    SharedStore.store.clear()


def test_headers_that_are_there_are_not_asked_for_again(forms, shared):
    upload(forms / "ranks", shared)
    source = open_checkpoint(shared)
    first, *others = source.names
    here = {name: open_checkpoint(forms / "ranks").tensor(name) for name in others}
    source.tensor(first)
    CountingStore.requests.clear()
    for name in others:
        found = source.tensor(name)
        assert [box.offset for box in found.boxes] == [box.offset for box in here[name].boxes]
    # All of a small file came with its first header.
    assert CountingStore.requests == []


def test_who_reads_past_the_end_is_told_and_no_other(shared):
    store = fsspec.filesystem("together")
    state = {name: torch.arange(200_000, dtype=torch.int32) for name in "abcd"}
    data = safetensors.torch.save(state)
    store.pipe_file(f"{shared}/m.safetensors", data)
    source = open_checkpoint(f"{shared}/m.safetensors")
    store.pipe_file(f"{shared}/m.safetensors", data[:-900_000])
    report = verify_checkpoint(source, every=True)
    ends = len(data) - 900_000
    starts = [source.tensor(name).boxes[0].offset for name in "abcd"]
    assert starts[2] < ends < starts[3]
    assert len(report.flaws) == 3
    assert "changed while it was read" in report.flaws[2]
    assert f"ends at byte {ends}, but bytes up to {starts[3]} are needed" in report.flaws[0]
    assert f"bytes up to {starts[3] + 800_000} are needed" in report.flaws[1]

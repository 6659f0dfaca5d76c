"""Checkpoints behind URLs: every form read in ranges, three written whole or not at all."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardspec import DeviceMesh, DTensor, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.copy import Buffers, MemorySink, copy_box
from shardspec.checkpoint.diff import diff_checkpoints
from shardspec.checkpoint.files import OpenFiles, SourceFile
from shardspec.checkpoint.merge import MERGED_FORMS, MergedForm
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.ranges import MOST_AHEAD
from shardspec.checkpoint.remote import RemotePath, as_path
from shardspec.checkpoint.team import Member
from shardspec.checkpoint.upload import Upload
from shardspec.checkpoint.verify import verify_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError, OutputExistsError
from tests.checkpoint.formats.reading import assert_same, read_whole, refused
from tests.checkpoint.stores import CountingStore, names, s3_server, upload

STATE = {
    "a.w": torch.randn(37, 11, generator=torch.Generator().manual_seed(1)),
    "b.w": torch.arange(15.0).view(5, 3).half(),
    "n": torch.arange(4),
    "s": torch.tensor(2.5),
}
MESH = DeviceMesh(range(6), (2, 3))
RULES = {"*.w": "[S10,R]"}
ROOTS = ("memory://models", "s3://models")


@pytest.fixture(scope="module", autouse=True)
def s3():
    with s3_server():
        yield


@pytest.fixture
def root(request, tmp_path):
    """A place of its own in a store, empty."""
    return f"{request.param}/{tmp_path.name}"


@pytest.fixture
def counted(tmp_path):
    CountingStore.requests.clear()
    yield f"counted://{tmp_path.name}"
    CountingStore.store.clear()
    CountingStore.spoil.clear()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A checkpoint in every form: folder or file name to what has to be said to open it."""
    at = tmp_path_factory.mktemp("forms")
    cut = {name: DTensor(v, MESH, "[S10,R]") if v.dim() == 2 else v for name, v in STATE.items()}
    save_sharded(cut, at / "own")
    merge(at / "own", at / "whole.safetensors")
    merge(at / "own", at / "hub", max_shard_bytes=100)
    torch.save({**STATE, "step": 7}, at / "whole.pt")
    with warnings.catch_warnings():
        # That there is no process group.
        warnings.simplefilter("ignore")
        dcp_save(dict(STATE), checkpoint_id=at / "dcp", no_dist=True)
    (at / "ranks").mkdir()
    (at / "bin").mkdir()
    (at / "sharded").mkdir()
    for rank in range(2):
        torch.save({**STATE, "step": 7}, at / "ranks" / f"model_world_size_2_rank_{rank}.pt")
        place = at / "megatron" / "iter_0000003" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        torch.save({"model": {"w": STATE["n"]}}, place / "model_optim_rng.pt")
    (at / "megatron" / "latest_checkpointed_iteration.txt").write_text("3")
    torch.save(STATE, at / "bin" / "pytorch_model.bin")
    offsets = {name: {"saved_offsets": [0] * v.dim()} for name, v in STATE.items()}
    safetensors.torch.save_file(
        STATE,
        at / "sharded" / "shard-00001-model-00001-of-00001.safetensors",
        {"DCP_SHARDING_INFO": str(offsets).replace("'", '"'), "DCP_VERSION": "1.0"},
    )
    return at


FORMS: dict[str, dict[str, Any]] = {
    "own": {},
    "whole.safetensors": {},
    "hub": {},
    "hub/model.safetensors.index.json": {},
    "whole.pt": {},
    "dcp": {},
    "ranks": {},
    "ranks/model_world_size_2_rank_1.pt": {},
    "bin": {},
    "sharded": {"ranks": 1},
    "megatron": {"ranks": 2, "rules": {"w": "[R]"}},
}


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_every_form_is_read(here, root):
    for form in ("own", "whole.safetensors", "hub", "whole.pt", "dcp", "ranks", "bin", "sharded",
                 "megatron"):  # fmt: skip
        upload(here / form, f"{root}/{form}")
    for form, options in FORMS.items():
        found = read_whole(f"{root}/{form}", **options)
        assert_same(found, {"w": STATE["n"]} if form == "megatron" else STATE)
        source = open_checkpoint(f"{root}/{form}", **options)
        assert all(str(file).startswith(root) for file in source.files)
        assert source.format == open_checkpoint(here / form, **options).format
    assert list(diff_checkpoints(f"{root}/own", here / "whole.pt")) == []
    assert verify_checkpoint(f"{root}/own").flaws == ()


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_what_is_written_is_what_is_written_here(here, root, tmp_path):
    report = merge(here / "own", f"{root}/out.safetensors", dtype="bf16")
    local = merge(here / "own", tmp_path / "out.safetensors", dtype="bf16")
    assert (report.num_bytes, report.crc32) == (local.num_bytes, local.crc32)
    store = fsspec.core.url_to_fs(root)[0]
    assert store.cat_file(f"{root}/out.safetensors") == (tmp_path / "out.safetensors").read_bytes()
    merge(here / "own", f"{root}/hub", max_shard_bytes=100, threads=3)
    for file in (here / "hub").iterdir():
        assert store.cat_file(f"{root}/hub/{file.name}") == file.read_bytes()
    reshard(f"{root}/hub", f"{root}/cut", mesh=MESH, rules=RULES)
    assert verify_checkpoint(f"{root}/cut").digested_bytes > 37 * 11 * 4
    assert_same(read_whole(f"{root}/cut"), STATE)
    shards = load_sharded(f"{root}/cut", DeviceMesh(range(5)), {"a.w": "[R,S0]", "b.w": "[R,R]"})
    assert shards["a.w"].to_local(2).equal(STATE["a.w"][:, 6:9])
    merge(f"{root}/cut", tmp_path / "back.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "back.safetensors"), STATE)


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_what_is_there_is_kept_or_replaced_as_a_whole(here, root):
    store = fsspec.core.url_to_fs(root)[0]
    merge(here / "own", f"{root}/a.safetensors")
    merge(here / "own", f"{root}/hub", max_shard_bytes=100)
    kinds: dict[str, dict[str, Any]] = {"a.safetensors": {}, "hub": {"max_shard_bytes": 900}}
    for out, options in kinds.items():
        before = names(root)
        with pytest.raises(OutputExistsError, match=r"exists; choose another name, or overwrite"):
            merge(here / "own", f"{root}/{out}", **options)
        assert names(root) == before
        merge(here / "own", f"{root}/{out}", force=True, include=("a.*",), **options)
        assert list(read_whole(f"{root}/{out}")) == ["a.w"]
    assert names(f"{root}/hub") == ["model-00001-of-00001.safetensors"] or names(f"{root}/hub") == [
        "model.safetensors"
    ]
    merge(here / "own", f"{root}/hub", max_shard_bytes=100, force=True)
    # The same names again: none of the old ones may stand beside new ones.
    merge(here / "own", f"{root}/hub", max_shard_bytes=100, force=True, dtype="bf16")
    assert read_whole(f"{root}/hub")["a.w"].dtype == torch.bfloat16
    reshard(here / "own", f"{root}/hub", mesh=MESH, rules=RULES, force=True)
    assert open_checkpoint(f"{root}/hub").format == "shardspec"
    assert not any("model" in name for name in names(f"{root}/hub"))
    store.pipe_file(f"{root}/hub/notes.txt", b"mine")
    before = names(root)
    refusals: tuple[tuple[str, MergedForm, str], ...] = (
        ("hub", "huggingface", "holds 'notes.txt', which is no part of a checkpoint"),
        ("hub", "safetensors", "is a directory; name a file to write"),
        ("a.safetensors", "huggingface", "is a file; name a directory to write"),
    )
    for output, form, problem in refusals:
        with pytest.raises(CheckpointError, match=problem):
            merge(here / "own", f"{root}/{output}", form=form, force=True)
    for source in (f"{root}/a.safetensors", root):
        with pytest.raises(CheckpointError, match="holds the checkpoint itself"):
            merge(f"{root}/a.safetensors", source, form="huggingface", force=True)
    assert names(root) == before


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_ranks_save(root):
    cut = {name: DTensor(v, MESH, "[S10,R]") if v.dim() == 2 else v for name, v in STATE.items()}
    save_sharded(cut, f"{root}/save")
    first = names(f"{root}/save")
    assert len(first) == 7
    assert_same(read_whole(f"{root}/save"), STATE)
    with pytest.raises(OutputExistsError, match="holds a finished save"):
        save_sharded(cut, f"{root}/save")
    assert names(f"{root}/save") == first
    save_sharded({"n": STATE["n"] + 1}, f"{root}/save", overwrite=True)
    assert_same(read_whole(f"{root}/save"), {"n": STATE["n"] + 1})
    assert len(names(f"{root}/save")) == 2


def test_headers_are_read_and_no_data(counted):
    big = {"w": torch.arange(3 << 20, dtype=torch.int32), "tail": torch.ones(5)}
    data = safetensors.torch.save(big)
    fsspec.filesystem("counted").pipe_file(f"{counted}/m.safetensors", data)
    open_checkpoint(f"{counted}/m.safetensors")
    assert sum(CountingStore.requests) <= 512 << 10 < len(data) // 20


def test_a_shard_is_read_and_not_the_whole(counted):
    rows, columns = 1 << 13, 521
    whole = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    data = safetensors.torch.save({"w": torch.from_numpy(whole)})
    fsspec.filesystem("counted").pipe_file(f"{counted}/m.safetensors", data)
    tensor = open_checkpoint(f"{counted}/m.safetensors").tensor("w")
    CountingStore.requests.clear()
    size = rows // 8 * columns * 4
    out = np.zeros(size, np.uint8)
    with OpenFiles() as files:
        box = ((3 * rows // 8, 4 * rows // 8), (0, columns))
        copy_box(tensor, box, MemorySink(out), files, Buffers())
    assert (out.view(np.int32).reshape(-1, columns) == whole[3 * rows // 8 : rows // 2]).all()
    assert size <= sum(CountingStore.requests) <= 2 * size < len(data) // 3
    # Columns with little between them come in few requests.
    CountingStore.requests.clear()
    out = np.zeros(rows * 7 * 4, np.uint8)
    with OpenFiles() as files:
        copy_box(tensor, ((0, rows), (2, 9)), MemorySink(out), files, Buffers())
    assert (out.view(np.int32).reshape(rows, 7) == whole[:, 2:9]).all()
    assert len(CountingStore.requests) < 20
    assert max(CountingStore.requests) <= MOST_AHEAD


def test_many_files_keep_little(counted):
    store = fsspec.filesystem("counted")
    data = np.random.default_rng(0).bytes(6 << 20)
    paths = [as_path(f"{counted}/{n}") for n in range(40)]
    for path in paths:
        store.pipe_file(str(path), data)
    buffer = memoryview(bytearray(1 << 20))
    with OpenFiles() as files:
        for path in paths:
            files.file(path).read(0, 1)
        CountingStore.requests.clear()
        for at in range(0, len(data), len(buffer)):
            for path in paths[::7]:
                files.file(path).read_into(buffer, at)
                assert buffer == data[at : at + len(buffer)]
        # 32 MiB for all of them.
        assert max(CountingStore.requests) <= (32 << 20) // 40
        assert sum(CountingStore.requests) <= 6 * len(data)
    with SourceFile(paths[0]) as file:
        assert file.descriptor is None
        for start, length in ((5, 70_000), (0, 5), (len(data) - 3, 3), (1 << 20, 5 << 20)):
            assert file.read(start, length) == data[start : start + length]
        store.pipe_file(str(paths[0]), data[: 1 << 20])
        with pytest.raises(CheckpointError, match=r"ends at byte .* was cut short while being"):
            file.read(1 << 19, 5 << 20)
        with pytest.raises(CheckpointError, match=r"ends at byte"):
            file.read(len(data), 1)


@pytest.mark.parametrize("out", ["x.safetensors", "hub"])
def test_bytes_that_come_back_otherwise_are_found(here, counted, out):
    options: dict[str, Any] = {} if out == "x.safetensors" else {"max_shard_bytes": 100}
    CountingStore.spoil |= {"x.safetensors", "model-00002-of-00002.safetensors"}
    with pytest.raises(CheckpointError, match=r"tensor '.*' was read back differently") as caught:
        merge(here / "own", f"{counted}/{out}", **options)
    assert len(str(caught.value).splitlines()) == 1
    assert names(counted) == []
    merge(here / "own", f"{counted}/{out}", verify=False, **options)


def test_source_bytes_that_were_changed_are_found(here):
    root = "s3://models/changed"
    upload(here / "own", f"{root}/own")
    file = next(f for f in names(f"{root}/own") if "shard-00000" in f)
    store = fsspec.filesystem("s3")
    data = bytearray(store.cat_file(f"{root}/own/{file}"))
    data[-1] ^= 1
    store.pipe_file(f"{root}/own/{file}", bytes(data))
    for form in MERGED_FORMS[:2]:
        with pytest.raises(CheckpointError, match=r"has CRC-32 .* was saved; its bytes were"):
            merge(f"{root}/own", f"{root}/out", form=form)
    assert names(root) == sorted(f"own/{name}" for name in names(f"{root}/own"))
    assert store.list_multipart_uploads("models") == []


KILLED = """
import os, signal, sys
from shardspec.checkpoint.merge import merge
def progress(done, total):
    if done >= total * 3 // 4:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
size = int(sys.argv[4])
merge(sys.argv[1], sys.argv[2], progress=progress, force=True, max_shard_bytes=size or None)
"""


def test_killed_runs_leave_the_old_or_none(tmp_path):
    root = "s3://models/killed"
    store = fsspec.filesystem("s3")
    state = {name: torch.full((3 << 20,), n, dtype=torch.int8) for n, name in enumerate("abcd")}
    source = tmp_path / "big.safetensors"
    safetensors.torch.save_file(state, source)
    for name in ("replaced", "kept"):
        store.pipe_file(f"{root}/{name}", b"the old one")
    runs = {
        (name, how): subprocess.Popen(
            [sys.executable, "-c", KILLED, source, f"{root}/{name}", how, size],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, how, size in (
            ("new", "SIGKILL", "0"),
            ("replaced", "SIGKILL", "0"),
            ("kept", "SIGINT", "0"),
            ("hub", "SIGINT", "4000000"),
            ("cut", "SIGKILL", "4000000"),
        )
    }
    for (name, how), run in runs.items():
        said = run.communicate()[1]
        assert run.returncode == -getattr(signal, how), (name, said)
    left = [name for name in names(root) if not name.startswith("cut/")]
    assert left == ["kept", "replaced"]
    for name in left:
        assert store.cat_file(f"{root}/{name}") == b"the old one"
    # What was sent of a killed run's file stays with the store until it drops it, under no name.
    begun = {upload["Key"] for upload in store.list_multipart_uploads("models")}
    assert begun == {"killed/new", "killed/replaced"}
    assert "missing, by the numbers of the others" in refused(f"{root}/cut")
    merge(source, f"{root}/cut", max_shard_bytes=4_000_000, force=True)
    assert_same(read_whole(f"{root}/cut"), state)


@pytest.mark.parametrize("size", [1000, (9 << 20) + 1])
def test_of_two_writers_one_wins(size):
    path = RemotePath(f"s3://models/two/{size}")
    late = Upload(path, size, overwrite=False).__enter__()
    late.write(bytes(size))
    with Upload(path, size, overwrite=False) as early:
        early.write(b"\1" * size)
    with pytest.raises(OutputExistsError, match="exists; choose another name"):
        late.__exit__(None, None, None)
    assert fsspec.filesystem("s3").cat_file(str(path)) == b"\1" * size
    with Upload(path, 3, overwrite=True) as again:
        again.write(b"abc")
    assert fsspec.filesystem("s3").cat_file(str(path)) == b"abc"


ERRORS = {
    "s3://models/none": "s3://models/none: there is no such checkpoint; check the path",
    "s3://no-bucket/x": "s3://no-bucket/x: cannot be read: The specified bucket does not exist",
    "s3://models": "has no sharding_info.json",
    "s3://b d/x": "cannot be read: Parameter validation failed: Invalid bucket name",
    "memory://none": "memory://none: there is no such checkpoint; check the path",
    "gs://models/x": "gs:// needs a package that is not there: Please install gcsfs",
    "nope://models/x": "Protocol not known: nope; URLs start with s3://, gs:// or another name",
    "https://models/x": "a web server does not list its files; download them",
}


def failed(*args):
    """Return the one line with which a command ends."""
    result = CliRunner().invoke(cli, [*map(str, args)], prog_name="shardspec")
    assert result.exit_code == 3, result.output
    lines = result.output.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    return lines[0]


@pytest.mark.parametrize("url", ERRORS)
def test_errors_of_stores_are_one_line(url, tmp_path):
    fsspec.filesystem("s3").pipe_file("s3://models/one", b"1")
    assert ERRORS[url] in failed("inspect", url)
    assert ERRORS[url] in failed("diff", tmp_path, url) or not any(tmp_path.iterdir())
    assert ERRORS[url] in failed("verify", url)
    assert ERRORS[url] in failed("merge", url, "-o", tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_cannot_be(here):
    own = here / "own"
    assert "The specified bucket does not exist" in failed("merge", own, "-o", "s3://no-one/m")
    for form in ("torch", "dcp"):
        line = failed("merge", own, "-o", "s3://models/late", "--to", form)
        assert "is not written to a URL; write it to a disk and copy it there" in line
    with pytest.raises(CheckpointError, match="several processes write together on a file system"):
        merge(own, "s3://models/late", member=Member(0, 2))
    assert not [name for name in names("s3://models") if name.startswith("late")]


def test_stores_that_do_not_answer(here):
    program = [sys.executable, "-m", "shardspec"]
    silent = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    nobody = {k: v for k, v in os.environ.items() if "KEY" not in k} | {"HOME": str(here)}
    runs = [
        subprocess.Popen(
            [*program, *args], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for env in (silent, nobody)
        for args in (
            ["verify", "s3://models/x"],
            ["merge", str(here / "own"), "-o", "s3://models/none"],
        )
    ]
    said = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [3] * 4, said
    causes = ["Could not connect"] * 2 + ["locate credentials"] * 2
    for (out, err), due in zip(said, causes, strict=True):
        assert out == ""
        assert len(err.splitlines()) == 1
        assert due in err


def test_a_url_is_no_file_of_this_machine():
    url = as_path("s3://models/llama/x.safetensors")
    assert isinstance(url, RemotePath)
    assert str(url) == "s3://models/llama/x.safetensors"
    assert (url.name, url.suffix) == ("x.safetensors", ".safetensors")
    assert str(url.parent) == "s3://models/llama"
    assert url == url.parent / url.name
    assert hash(url) == hash(url.parent / url.name)
    assert url.parent in url.parents
    for act in (url.stat, url.read_bytes, url.mkdir, lambda: os.path.exists(url)):
        with pytest.raises(TypeError, match="is no file of this machine"):
            act()
    for text in ("a/b", "/a/b", "s3:/a/b", "C://x", "://a"):
        assert type(as_path(text)) is type(Path())


def test_nothing_is_imported_without_a_url(here, tmp_path):
    script = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from shardspec.cli.main import cli\n"
        f"for args in (['merge', {str(here / 'own')!r}, '-o', {str(tmp_path / 'm')!r}],\n"
        f"             ['inspect', {str(here / 'own')!r}], ['verify', {str(here / 'dcp')!r}]):\n"
        "    result = CliRunner().invoke(cli, args)\n"
        "    assert result.exit_code == 0, result.output\n"
        "print(sorted({'fsspec', 's3fs', 'asyncio', 'aiohttp'} & set(sys.modules)))\n"
        "result = CliRunner().invoke(cli, ['inspect', 'memory://x'])\n"
        "assert result.exit_code == 3, result.output\n"
        "print(sorted({'fsspec', 's3fs', 'aiohttp', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "['fsspec']"]

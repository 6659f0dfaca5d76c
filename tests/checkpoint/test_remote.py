"""Checkpoints behind URLs: every form is read in ranges, and what stores refuse is one line."""

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch

from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.convert.copy import Buffers, read_box_into
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.object_store import MAX_REQUEST_BYTES, ObjectPath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import assert_same, read_whole
from tests.checkpoint.stores import (
    FORMS,
    ROOTS,
    STATE,
    CountingStore,
    failed,
    upload,
)
from tests.forked import run_forked

pytestmark = pytest.mark.usefixtures("s3")


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_every_form_is_read(forms, root):
    for form in ("own", "whole.safetensors", "hub", "whole.pt", "dcp", "ranks", "bin", "sharded",
                 "megatron"):  # fmt: skip
        upload(forms / form, f"{root}/{form}")
    for form, options in FORMS.items():
        found = read_whole(f"{root}/{form}", **options)
        assert_same(found, {"w": STATE["n"]} if form == "megatron" else STATE)
        source = open_checkpoint(f"{root}/{form}", **options)
        assert all(str(file).startswith(root) for file in source.files)
        assert source.format == open_checkpoint(forms / form, **options).format
    found = diff_checkpoints(f"{root}/own", forms / "whole.pt")
    assert [difference.name for difference in found] == ["step"]  # a value of that file alone
    assert verify_checkpoint(f"{root}/own").flaws == ()


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
        read_box_into(tensor, box, out.data, files, Buffers())
    assert (out.view(np.int32).reshape(-1, columns) == whole[3 * rows // 8 : rows // 2]).all()
    assert size <= sum(CountingStore.requests) <= 2 * size < len(data) // 3
    # Columns with little between them come in few requests.
    CountingStore.requests.clear()
    out = np.zeros(rows * 7 * 4, np.uint8)
    with OpenFiles() as files:
        read_box_into(tensor, ((0, rows), (2, 9)), out.data, files, Buffers())
    assert (out.view(np.int32).reshape(rows, 7) == whole[:, 2:9]).all()
    assert len(CountingStore.requests) < 20
    assert max(CountingStore.requests) <= MAX_REQUEST_BYTES


def test_many_files_keep_little(counted):
    store = fsspec.filesystem("counted")
    data = np.random.default_rng(0).bytes(6 << 20)
    paths = [storage_path(f"{counted}/{n}") for n in range(40)]
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
        # What was asked for is not kept; what is read ahead of it is 512 KiB at most.
        assert max(CountingStore.requests) <= len(buffer)
        assert sum(CountingStore.requests) <= 6 * len(data)
    with storage_path(paths[0]).open() as file:
        for start, length in ((5, 70_000), (0, 5), (len(data) - 3, 3), (1 << 20, 5 << 20)):
            assert file.read(start, length) == data[start : start + length]
        store.pipe_file(str(paths[0]), data[: 1 << 20])
        with pytest.raises(CheckpointError, match=r"ends at byte .* was cut short while being"):
            file.read(1 << 19, 5 << 20)
        with pytest.raises(CheckpointError, match=r"ends at byte"):
            file.read(len(data), 1)


ERRORS = {
    "s3://models/none": "s3://models/none: there is no such checkpoint; check the path",
    "s3://no-bucket/x": "s3://no-bucket/x: cannot be read: The specified bucket does not exist",
    "s3://models": "has no sharding_info.json",
    "s3://b d/x": "cannot be read: Parameter validation failed: Invalid bucket name",
    "memory://none": "memory://none: there is no such checkpoint; check the path",
    "abfs://models/x": "abfs:// needs a package that is not installed: Install adlfs",
    "nope://models/x": "Protocol not known: nope; URLs start with s3://, gs:// or another name",
    "https://models/x": "a web server does not list its files; download them",
}


@pytest.mark.parametrize("url", ERRORS)
def test_errors_of_stores_are_one_line(url, tmp_path):
    fsspec.filesystem("s3").pipe_file("s3://models/one", b"1")
    assert ERRORS[url] in failed("inspect", url)
    assert ERRORS[url] in failed("diff", tmp_path, url) or not any(tmp_path.iterdir())
    assert ERRORS[url] in failed("verify", url)
    assert ERRORS[url] in failed("merge", url, "-o", tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_stores_that_do_not_answer(forms, step):
    silent = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(forms)}
    calls = (["verify", "s3://models/x"], ["merge", forms / "own", "-o", "s3://models/none"])
    imports = "import s3fs\nfrom shardspec.cli.main import main"
    runs = [
        (call, environment, due)
        for environment, due in ((silent, "Could not connect"), (nobody, "locate credentials"))
        for call in calls
    ][::step]
    words, environments, causes = zip(*runs, strict=True)
    ends = run_forked(imports, "main()", words, environments=environments, together=True)
    for end, due in zip(ends, causes, strict=True):
        assert (end.returncode, end.stdout) == (3, ""), end
        assert len(end.stderr.splitlines()) == 1
        assert due in end.stderr


def test_a_url_is_no_file_of_this_machine():
    url = storage_path("s3://models/llama/x.safetensors")
    assert isinstance(url, ObjectPath)
    assert str(url) == "s3://models/llama/x.safetensors"
    assert (url.name, url.suffix) == ("x.safetensors", ".safetensors")
    assert str(url.parent) == "s3://models/llama"
    assert url == url.parent / url.name
    assert hash(url) == hash(url.parent / url.name)
    assert url.parent in url.parents
    assert url not in url.parents
    assert [str(place) for place in url.parent.parents] == ["s3://models", "s3://", "."]
    with pytest.raises(TypeError, match="is not a file of this machine"):
        os.path.exists(url)
    for text in ("a/b", "/a/b", "s3:/a/b", "C://x", "://a"):
        assert isinstance(storage_path(text).public(), Path)


def test_nothing_is_imported_without_a_url(forms, tmp_path):
    script = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from shardspec.cli.main import cli\n"
        f"for args in (['merge', {str(forms / 'own')!r}, '-o', {str(tmp_path / 'm')!r}],\n"
        f"             ['inspect', {str(forms / 'own')!r}], ['verify', {str(forms / 'dcp')!r}]):\n"
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("bkt/own"), "FileNotFoundError: bkt/own"),
        (PermissionError("bkt/own"), "PermissionError: bkt/own"),
        (IsADirectoryError("bkt/own"), "IsADirectoryError: bkt/own"),
        (FileNotFoundError("The specified bucket does not exist"), None),
        (OSError(5, "Input/output error"), "Input/output error"),
        (OSError("timeout"), "OSError: timeout"),
        (ValueError(), "ValueError"),
        (OSError(f"long {'x' * 1000}"), f"long {'x' * 295}…"),
    ],
)
def test_what_a_store_says_is_told_in_words(error, said):
    path = storage_path("s3://bkt/own")
    with pytest.raises(CheckpointError) as caught, path.errors("read"):
        raise error
    assert str(caught.value) == f"s3://bkt/own: cannot be read: {said or error}"


def test_mistakes_of_programs_stay_what_they_are():
    with (
        pytest.raises(TypeError, match="mistake"),
        storage_path("s3://bkt/own").errors("read"),
    ):
        raise TypeError("mistake")

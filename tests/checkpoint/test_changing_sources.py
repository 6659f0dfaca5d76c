"""A source that is written again while it is read: refused by every command, for every format."""

import os
import shutil
from functools import partial
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch

import shardspec.checkpoint.open as opening
from shardspec import DeviceMesh, load_sharded, merge, reshard
from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.stores import FORMS, ROOTS, upload

CHANGED = "while it was read, so the data may be a mixture of two saves"


def rewritten(path):
    """Write the bytes of a file over it."""
    path.write_bytes(path.read_bytes())


def replaced(path):
    """Put a copy of a file in its place, as old as it is."""
    times = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    copy.replace(path)


def removed(path):
    path.unlink()


@pytest.mark.parametrize("name", ["a.safetensors", "pytorch_model-00001-of-00001.bin"])
def test_files_that_go_before_they_are_listed(tmp_path, monkeypatch, name):
    file = tmp_path / "ckpt" / name
    file.parent.mkdir()
    write = safetensors.torch.save_file if name.startswith("a") else torch.save
    write({"w": torch.ones(3)}, file)
    found = opening._find

    def found_and_removed(place):
        result = found(place)
        file.unlink()
        return result

    monkeypatch.setattr(opening, "_find", found_and_removed)
    with pytest.raises(CheckpointError, match="its files were removed while it was opened"):
        merge(file.parent, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def data_file(at, form):
    """Return a file of a checkpoint that holds tensors."""
    place = at / form
    if place.is_dir():
        files = [file for file in place.rglob("*") if file.is_file()]
        return max(files, key=lambda file: (file.stat().st_size, file.name))
    return place if place.suffix != ".json" else data_file(at, place.parent.name)


@pytest.fixture
def saved(forms, tmp_path):
    """Checkpoints in all formats, which may be changed."""
    shutil.copytree(forms, tmp_path / "forms")
    return tmp_path / "forms"


@pytest.mark.parametrize("change", [rewritten, replaced, removed])
@pytest.mark.parametrize("form", FORMS)
def test_every_format_is_told(saved, form, change):
    source = open_checkpoint(saved / form, **FORMS[form])
    source.check_unchanged()
    # What is written beside it is no matter.
    place = source.directory if source.directory.is_dir() else source.directory.parent
    Path(place / "notes.txt").write_text("mine")
    source.check_unchanged()
    file = data_file(saved, form)
    assert file in source.files
    change(file)
    with pytest.raises(CheckpointError) as caught:
        source.check_unchanged()
    done = "was removed" if change is removed else "changed"
    assert str(caught.value) == f"{file}: {done} {CHANGED}; run again when nothing writes to it"


MESH = DeviceMesh(range(2), (2,))
COMMANDS = {
    "merge": lambda source, out: merge(source, out / "m.safetensors"),
    "merge to dcp": lambda source, out: merge(source, out / "m", format="dcp"),
    "reshard": lambda source, out: reshard(
        source, out / "m", device_mesh=MESH, rules={"*.w": "[S0,R]"}
    ),
    "load": lambda source, _: load_sharded(source, MESH, {"*.w": "[S0,R]"}),
    "verify": lambda source, _: verify_checkpoint(source),
    "diff": lambda source, _: list(diff_checkpoints(source, source)),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_told(saved, command, tmp_path, monkeypatch):
    """A second save of the same shapes comes while the first is read."""
    first = saved / "hub"
    out = tmp_path / "out"
    out.mkdir()
    files = sorted(first.glob("*.safetensors"))
    saves = [1]
    tensor = Catalog.tensor

    def save_again():
        for file in files:
            state = safetensors.torch.load_file(file)
            new = {name: value + 1 for name, value in state.items()}
            safetensors.torch.save_file(new, file, {"format": "pt"})

    def opened_then_saved(self, name):
        if saves:
            saves.pop()
            save_again()
        return tensor(self, name)

    monkeypatch.setattr(Catalog, "tensor", opened_then_saved)
    with pytest.raises(CheckpointError, match=CHANGED):
        COMMANDS[command](first, out)
    assert not saves
    assert list(out.iterdir()) == []


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_objects_in_stores_are_told_by_what_the_store_says(forms, root):
    for form in ("own", "hub", "whole.safetensors", "megatron", "whole.pt", "ranks"):
        upload(forms / form, f"{root}/{form}")
        source = open_checkpoint(f"{root}/{form}", **FORMS[form])
        source.check_unchanged()
        store, file = fsspec.core.url_to_fs(str(source.files[-1]))
        data = store.cat_file(file)
        store.pipe_file(file, data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{source.files[-1]}: changed {CHANGED}"):
            source.check_unchanged()


def test_an_object_that_is_overwritten_while_it_is_merged(counted, tmp_path, monkeypatch):
    store = fsspec.filesystem("counted")
    url = f"{counted}/m.safetensors"
    old, new = ({n: torch.full((1 << 20,), v) for n in "ab"} for v in (1.0, 2.0))
    store.pipe_file(url, safetensors.torch.save(old))
    cat_file = type(store).cat_file

    def overwrite(self, path, start=None, end=None, **kwargs):
        data = cat_file(self, path, start, end, **kwargs)
        if start and start > 1 << 20:
            store.pipe_file(url, safetensors.torch.save(new))
        return data

    monkeypatch.setattr(type(store), "cat_file", overwrite)
    with pytest.raises(CheckpointError, match=f"{url}: changed {CHANGED}"):
        merge(url, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []


def whole(store, path, start=None, end=None):  # noqa: ARG001  # as stores are asked
    return store.store[store._strip_protocol(path)].getvalue()


def more(store, path, start=None, end=None):
    return whole(store, path)[start or 0 : end and end + 1]


@pytest.mark.parametrize(
    ("root", "answer"), [("counted", whole), ("counted", more), ("shared", whole)]
)
def test_a_store_that_does_not_keep_to_ranges_is_refused(
    request, root, answer, tmp_path, monkeypatch
):
    url = f"{request.getfixturevalue(root)}/m.safetensors"
    store = fsspec.core.url_to_fs(url)[0]
    state = {name: torch.randn(100_000) for name in "abc"}
    store.pipe_file(url, safetensors.torch.save(state))
    merge(url, tmp_path / "right.safetensors")
    source = open_checkpoint(url)
    monkeypatch.setattr(type(store), "cat_file", answer)
    said = "m.safetensors: the store answered a request for .* bytes with .*: it ignores ranges"
    for call in (
        partial(open_checkpoint, url),
        partial(merge, source, tmp_path / "out.safetensors"),
        partial(load_sharded, source, MESH, {"*": "[S0]"}),
        partial(verify_checkpoint, source),
    ):
        with pytest.raises(CheckpointError, match=said):
            call()
    assert [file.name for file in tmp_path.iterdir()] == ["right.safetensors"]

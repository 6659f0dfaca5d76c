"""What lies beside the weights goes along, as it is, and appears with them."""

import json
import os

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shardspec.checkpoint.convert import merge, reshard
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError, OutputExistsError
from shardspec.mesh import DeviceMesh

WEIGHTS = {"w": torch.arange(12.0).view(4, 3)}
BESIDE = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"\xff" * (3 * 2**20 + 5),
    "tokenizer.model": b"",
    "modeling_own.py": b"raise SystemExit",
}
OTHERS = {"notes.txt": b"x", "metadata.json": b"{}", "common.pt": b"y", "meta.pt": b"z"}


@pytest.fixture
def ckpt(tmp_path):
    place = tmp_path / "ckpt"
    place.mkdir()
    save_file(WEIGHTS, place / "model.safetensors")
    for name, data in (BESIDE | OTHERS).items():
        (place / name).write_bytes(data)
    return place


def run(*args):
    return CliRunner().invoke(cli, list(map(str, args)), catch_exceptions=False)


def beside(place):
    """Return what is there and was not made for the output itself."""
    made = (".safetensors", ".distcp", ".metadata", "sharding_info.json")
    return {
        path.name: path.read_bytes() for path in place.iterdir() if not path.name.endswith(made)
    }


def test_into_each_format(ckpt, tmp_path):
    report = merge(ckpt, tmp_path / "hf", format="huggingface")
    assert report.sidecars == tuple(sorted(BESIDE))
    assert beside(tmp_path / "hf") == BESIDE
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], WEIGHTS["w"])
    merge(ckpt, tmp_path / "dcp", format="dcp")
    readers_of_dcp = {name: OTHERS[name] for name in ("metadata.json", "common.pt", "meta.pt")}
    assert beside(tmp_path / "dcp") == BESIDE | readers_of_dcp
    mesh = DeviceMesh(range(2), (2,))
    assert reshard(ckpt, tmp_path / "cut", device_mesh=mesh).sidecars == tuple(sorted(BESIDE))
    # And on from there.
    merge(tmp_path / "cut", tmp_path / "back", format="huggingface")
    assert beside(tmp_path / "cut") == beside(tmp_path / "back") == BESIDE
    # metadata.json says nothing without what it describes.
    (ckpt / "common.pt").unlink()
    merge(ckpt, tmp_path / "dcp", format="dcp", overwrite=True)
    assert reshard(ckpt, tmp_path / "c", device_mesh=mesh, format="dcp").sidecars == (
        *("config.json", "generation_config.json", "meta.pt", "modeling_own.py"),
        *("tokenizer.json", "tokenizer.model"),
    )


def test_one_file_has_no_room_and_they_can_be_left(ckpt, tmp_path):
    assert merge(ckpt, tmp_path / "model.safetensors").sidecars == ()
    out = tmp_path / "out"
    assert merge(ckpt, out, format="huggingface", sidecars=False).sidecars == ()
    assert beside(out) == {}
    assert merge(ckpt, out, format="huggingface", overwrite=True, dry_run=True).sidecars
    assert beside(out) == {}


def test_the_last_line_says_what_went_along(ckpt, tmp_path):
    said = run("merge", ckpt, "-o", f"{tmp_path}/out/").stdout.splitlines()
    assert said[-1] == f"also copied: {', '.join(sorted(BESIDE))}"
    assert len(run("merge", ckpt, "-o", f"{tmp_path}/o/", "--no-sidecars").stdout.splitlines()) == 1
    report = json.loads(run("merge", ckpt, "-o", f"{tmp_path}/p/", "--json").stdout)
    assert report["sidecars"] == sorted(BESIDE)


def test_existing_files_are_replaced_when_asked_only(ckpt, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_bytes(b"mine")
    with pytest.raises(OutputExistsError):
        merge(ckpt, out, format="huggingface")
    assert beside(out) == {"config.json": b"mine"}
    (out / "other.md").write_bytes(b"mine")
    merge(ckpt, out, format="huggingface", overwrite=True)
    assert beside(out) == BESIDE | {"other.md": b"mine"}


def test_links_out_of_the_folder_and_large_files_are_refused(ckpt, tmp_path):
    (tmp_path / "secret").write_bytes(b"s")
    (ckpt / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        merge(ckpt, tmp_path / "out", format="huggingface")
    assert not (tmp_path / "out").exists()
    (ckpt / "vocab.json").unlink()
    (ckpt / "vocab.json").symlink_to("config.json")
    merge(ckpt, tmp_path / "out", format="huggingface")
    assert (tmp_path / "out" / "vocab.json").read_bytes() == BESIDE["config.json"]
    os.truncate(ckpt / "tokenizer.json", 2**28 + 1)
    with pytest.raises(CheckpointError, match="--no-sidecars"):
        merge(ckpt, tmp_path / "more", format="huggingface")
    assert not (tmp_path / "more").exists()


def test_files_that_change_meanwhile_are_noticed(ckpt, tmp_path):
    def change(done, total):  # noqa: ARG001
        (ckpt / "config.json").write_bytes(b"later")

    with pytest.raises(CheckpointError, match=r"config\.json"):
        merge(ckpt, tmp_path / "out", format="huggingface", progress=change)
    assert not (tmp_path / "out").exists()


def test_an_adapter_keeps_its_name(tmp_path):
    place = tmp_path / "adapter"
    place.mkdir()
    save_file(WEIGHTS, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text("{}")
    merge(place, tmp_path / "out", format="huggingface")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    # Also by way of another format, whose files have other names.
    reshard(place, tmp_path / "two", device_mesh=DeviceMesh(range(2)), rules={})
    merge(tmp_path / "two", tmp_path / "back", format="huggingface")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    # A model with an adapter's config beside is a model.
    (tmp_path / "two" / "config.json").write_text("{}")
    merge(tmp_path / "two", tmp_path / "model", format="huggingface")
    assert (tmp_path / "model" / "model.safetensors").exists()

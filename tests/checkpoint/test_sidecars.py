"""What lies beside the weights goes along, as it is, and appears with them."""

import json
import os

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shardspec import DeviceMesh, merge, reshard, save_sharded
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError, OutputExistsError

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
    assert " files" not in said[0]  # there is one file of weights
    assert len(run("merge", ckpt, "-o", f"{tmp_path}/o/", "--no-sidecars").stdout.splitlines()) == 1
    report = json.loads(run("merge", ckpt, "-o", f"{tmp_path}/p/", "--json").stdout)
    assert report["sidecars"] == sorted(BESIDE)


def bin_folder(place):
    torch.save(WEIGHTS, place / "pytorch_model.bin")


def numbered_bin_folder(place):
    torch.save(WEIGHTS, place / "pytorch_model-00001-of-00001.bin")


def indexed_folder(place):
    save_file(WEIGHTS, place / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def own_folder(place):
    save_sharded(WEIGHTS, place)


def dcp_folder(place):
    save_file(WEIGHTS, place / "weights.safetensors")
    merge(place / "weights.safetensors", place / "dcp", format="dcp")
    for file in (place / "dcp").iterdir():
        file.rename(place / file.name)
    (place / "dcp").rmdir()
    (place / "weights.safetensors").unlink()


FOLDERS = (bin_folder, numbered_bin_folder, indexed_folder, own_folder, dcp_folder)


@pytest.mark.parametrize("write", FOLDERS)
def test_a_folder_of_any_format_keeps_what_lies_beside_and_names_the_rest(tmp_path, write):
    place = tmp_path / "ckpt"
    place.mkdir()
    write(place)
    assert merge(place, tmp_path / "alone", format="huggingface").not_copied == ()
    for name, data in BESIDE.items():
        (place / name).write_bytes(data)
    (place / "README.md").write_bytes(b"read me")
    (place / "runs").mkdir()
    report = merge(place, tmp_path / "out", format="huggingface")
    assert beside(tmp_path / "out") == BESIDE
    assert report.sidecars == tuple(sorted(BESIDE))
    assert report.not_copied == ("README.md", "runs/")
    # One file has no room for any of it.
    report = merge(place, tmp_path / "out.safetensors")
    assert report.not_copied == tuple(sorted((*BESIDE, "README.md", "runs/")))
    said = run("merge", place, "-o", tmp_path / "other.safetensors").stdout.splitlines()
    assert said[-1].startswith("not copied, though beside the weights: 'README.md', 'conf")
    (place / "README.md").unlink()
    (place / "runs").rmdir()
    assert merge(place, tmp_path / "rest", format="huggingface").not_copied == ()


def test_a_file_that_is_named_itself_has_the_config_beside_it(tmp_path):
    place = tmp_path / "ckpt"
    place.mkdir()
    bin_folder(place)
    (place / "vocab.txt").write_bytes(b"a")
    (place / "other.md").write_bytes(b"b")
    report = merge(place / "pytorch_model.bin", tmp_path / "plain", format="huggingface")
    assert (report.sidecars, report.not_copied) == ((), ())
    (place / "config.json").write_bytes(b"{}")
    report = merge(place / "pytorch_model.bin", tmp_path / "model", format="huggingface")
    assert (report.sidecars, report.not_copied) == (("config.json", "vocab.txt"), ())


def test_the_files_of_every_tokenizer_and_the_code_of_a_model_go_along(tmp_path):
    place = tmp_path / "ckpt"
    place.mkdir()
    save_file(WEIGHTS, place / "model.safetensors")
    known = {
        *("config.json", "generation_config.json", "preprocessor_config.json", "params.json"),
        *("processor_config.json", "video_preprocessor_config.json", "hf_quant_config.json"),
        *("tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json", "vocab.bpe"),
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
        *("vocab.txt", "merges.txt", "bpe.codes", "dict.txt", "spiece.model", "spm.model"),
        *("sentencepiece.bpe.model", "source.spm", "target.spm", "qwen.tiktoken", "emoji.json"),
        *("tiktoken.model", "chat_template.jinja", "chat_template.json", "vocab-src.json"),
        *("normalizer.json", "entity_vocab.json", "prophetnet.tokenizer", "spm_char.model"),
        *("configuration_own.py", "modeling_own.py", "tokenization_own.py"),
    }
    others = {"training_args.bin", "optimizer.pt", "trainer_state.json", "LICENSE", "helpers.py"}
    for name in known | others:
        (place / name).write_bytes(b"{}")
    report = merge(place, tmp_path / "out", format="huggingface")
    assert set(report.sidecars) == known
    assert set(report.not_copied) == others
    # Code that a config names may import any other.
    (place / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_own.Own"}}')
    report = merge(place, tmp_path / "code", format="huggingface")
    assert set(report.sidecars) == known | {"helpers.py"}


def test_existing_files_are_replaced_when_asked_only(ckpt, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_bytes(b"mine")
    with pytest.raises(OutputExistsError):
        merge(ckpt, out, format="huggingface")
    assert beside(out) == {"config.json": b"mine"}
    merge(ckpt, out, format="huggingface", overwrite=True)
    assert beside(out) == BESIDE
    # What an earlier run carried along belongs to the checkpoint that is replaced.
    for sidecars in (False, True):
        merge(ckpt, out, format="dcp", overwrite=True)
        merge(ckpt, out, format="huggingface", overwrite=True, sidecars=sidecars)
        assert beside(out) == (BESIDE if sidecars else {})
    (out / "other.md").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"contains 'other\.md', not part of a checkpoint"):
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
    with pytest.raises(CheckpointError, match="with sidecars=False"):
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

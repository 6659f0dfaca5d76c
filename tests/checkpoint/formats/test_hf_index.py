"""Hugging Face's safetensors in several files, with an index and without."""

import json

import pytest
import safetensors.torch
import torch

from shardspec import merge
from shardspec.checkpoint.open import open_checkpoint
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    read_whole,
    refused,
)

MODEL = {
    "embed.weight": torch.arange(35, dtype=torch.bfloat16).view(7, 5),
    "norm.weight": torch.randn(5, generator=torch.Generator().manual_seed(0)),
    "head.weight": torch.arange(6, dtype=torch.int64).view(3, 2),
    "step": torch.tensor(17),
    "mask": torch.tensor([True, False, True]),
    "none": torch.zeros(3, 0),
}
PARTS = {
    "model-00001-of-00003.safetensors": ["embed.weight"],
    "model-00002-of-00003.safetensors": ["norm.weight", "step", "none"],
    "model-00003-of-00003.safetensors": ["head.weight", "mask"],
}


def write(directory, parts=PARTS, index="model.safetensors.index.json"):
    directory.mkdir(parents=True)
    for file, names in parts.items():
        part = {name: MODEL[name] for name in names}
        safetensors.torch.save_file(part, directory / file, metadata={"format": "pt"})
    if index is not None:
        table = {
            # A float, as some writers have it: nothing may depend on it.
            "metadata": {"total_size": 1.5},
            "weight_map": {name: file for file, names in parts.items() for name in names},
        }
        (directory / index).write_text(json.dumps(table))
    return directory


def edit(directory, change):
    path = directory / "model.safetensors.index.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_an_index_and_its_files_are_read_whole(tmp_path):
    ckpt = write(tmp_path / "ckpt")
    # What else people keep beside the files: none of it is in the index.
    safetensors.torch.save_file({"other": torch.ones(2)}, ckpt / "consolidated.safetensors")
    (ckpt / "config.json").write_text("{}")
    assert_same(read_whole(ckpt), MODEL)
    assert_same(read_whole(ckpt / "model.safetensors.index.json"), MODEL)
    source = open_checkpoint(ckpt)
    assert source.format == "safetensors"
    assert source.directory == ckpt
    assert source.mesh is None
    assert source.extras == {}
    assert [path.name for path in source.files] == ["model.safetensors.index.json", *PARTS]
    merge(ckpt, tmp_path / "out.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "out.safetensors"), MODEL)


def test_without_an_index_all_files_count(tmp_path):
    ckpt = write(tmp_path / "ckpt", index=None)
    (ckpt / ".half.safetensors").write_text("x")
    assert_same(read_whole(ckpt), MODEL)
    assert [path.name for path in open_checkpoint(ckpt).files] == list(PARTS)
    one = write(tmp_path / "one", {"model.safetensors": list(MODEL)}, index=None)
    assert_same(read_whole(one), MODEL)


def test_merging_needs_no_torch(tmp_path):
    assert_merged_without_torch(write(tmp_path / "ckpt"), tmp_path / "out.safetensors")


@pytest.mark.parametrize("lost", PARTS)
def test_a_missing_file_is_named(tmp_path, lost):
    ckpt = write(tmp_path / "ckpt")
    (ckpt / lost).unlink()
    assert refused(ckpt) == (
        f"{ckpt}/{lost}: is missing, but model.safetensors.index.json puts "
        f"{len(PARTS[lost])} tensors into it, {min(PARTS[lost])!r} first; restore it"
    )
    (ckpt / "model.safetensors.index.json").unlink()
    assert refused(ckpt) == f"{ckpt}: {lost} is missing from the numbered files; restore it"


def test_swapped_files_are_found(tmp_path):
    ckpt = write(tmp_path / "ckpt")
    first, second, _ = (ckpt / file for file in PARTS)
    first.rename(ckpt / "x")
    second.rename(first)
    (ckpt / "x").rename(second)
    assert refused(ckpt) == (
        f"{first}: lacks tensor 'embed.weight', which model.safetensors.index.json lists for it; "
        "index and files are not of one save, restore them"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("weight_map"), "weight_map is missing"),
        (lambda t: t.update(weight_map=[]), "weight_map should be an object but is []"),
        (
            lambda t: t["weight_map"].update(step=3),
            "weight_map['step'] should be a string but is 3",
        ),
        (
            lambda t: t["weight_map"].update(step="../x.safetensors"),
            "file name '../x.safetensors' is not a plain name; files of a checkpoint are in its "
            "own directory",
        ),
        (
            lambda t: t["weight_map"].update(extra="model-00003-of-00003.safetensors"),
            "model-00003-of-00003.safetensors: lacks tensor 'extra', which "
            "model.safetensors.index.json lists for it; index and files are not of one save, "
            "restore them",
        ),
        (
            lambda t: t["weight_map"].pop("mask"),
            "model-00003-of-00003.safetensors: has tensor 'mask', which "
            "model.safetensors.index.json does not list for it; index and files are not of one "
            "save, restore them",
        ),
    ],
)
def test_an_index_that_is_wrong(tmp_path, change, problem):
    ckpt = write(tmp_path / "ckpt")
    edit(ckpt, change)
    assert refused(ckpt).endswith(problem)


def test_an_index_that_is_no_json(tmp_path):
    ckpt = write(tmp_path / "ckpt")
    (ckpt / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b", "a": "c"}}')
    assert refused(ckpt).endswith(
        "the index has the key 'a' twice; the file is damaged, restore it"
    )


def test_two_indexes_want_a_choice(tmp_path):
    ckpt = write(tmp_path / "ckpt")
    other = ckpt / "model.fp16.safetensors.index.json"
    other.write_text((ckpt / "model.safetensors.index.json").read_text())
    assert refused(ckpt) == (
        f"{ckpt}: has the indexes model.fp16.safetensors.index.json, model.safetensors.index.json;"
        " name the one to read instead of the directory"
    )
    assert_same(read_whole(other), MODEL)


def test_one_name_in_two_files(tmp_path):
    ckpt = write(tmp_path / "ckpt", {"a.safetensors": ["step"], "b.safetensors": ["step"]}, None)
    assert refused(ckpt) == (
        f"{ckpt}: a.safetensors and b.safetensors both have tensor 'step', and no index says "
        "which to read; name the file to read, or move the other away"
    )


@pytest.mark.parametrize("number", ["00000", "00004"])
def test_a_number_past_the_last(tmp_path, number):
    parts = {**PARTS, f"model-{number}-of-00003.safetensors": []}
    ckpt = write(tmp_path / "ckpt", parts, None)
    assert refused(ckpt) == (
        f"{ckpt}: model-{number}-of-00003.safetensors has a number that is not from 1 to 3; move "
        "that file away"
    )


def test_links_lead_into_a_hub_cache_or_to_weights_anywhere(tmp_path):
    real = write(tmp_path / "real")
    snapshot = tmp_path / "hub" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    for path in real.iterdir():
        path.rename(tmp_path / "hub" / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert_same(read_whole(snapshot), MODEL)
    link = snapshot / "model-00001-of-00003.safetensors"
    (tmp_path / "hub" / "blobs" / link.name).rename(tmp_path / "elsewhere")
    link.unlink()
    link.symlink_to("../../../elsewhere")
    assert_same(read_whole(snapshot), MODEL)
    index = snapshot / "model.safetensors.index.json"
    index.resolve().rename(tmp_path / "other")
    index.unlink()
    assert_same(read_whole(snapshot), MODEL)
    index.symlink_to("../../../other")
    assert refused(snapshot) == (
        f"{snapshot}: file {index.name!r} is a link to {tmp_path}/other, outside the checkpoint; "
        "put the file itself into the directory"
    )


def test_a_shard_under_a_plain_name(tmp_path):
    metadata = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, 3]}}),
    }
    path = tmp_path / "ckpt" / "model.safetensors"
    path.parent.mkdir()
    safetensors.torch.save_file({"w": torch.ones(2, 3)}, path, metadata)
    assert refused(path.parent) == (
        f"{path}: has a shard of tensor 'w' from index [0, 3] on, but is not named as one; "
        "rename it, as shard-00001-model-00001-of-00001.safetensors"
    )


def test_what_is_added_needlessly_is_refused(tmp_path):
    ckpt = write(tmp_path / "ckpt")
    assert refused(ckpt, ranks=2) == (
        f"{ckpt}: ranks= was given, but a checkpoint of this format (safetensors) records it; "
        "omit this argument"
    )

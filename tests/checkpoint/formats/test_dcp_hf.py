"""torch's per-rank safetensors, written by torch itself on gloo ranks, and then spoiled."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardspec import merge
from shardspec.checkpoint.open import open_checkpoint
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    read_whole,
    refused,
)
from tests.dist.processes import run_ranks

NAME = "shard-{:05}-model-{:05}-of-{:05}.safetensors"
FLOATS = {
    "even": torch.arange(40, dtype=torch.bfloat16).view(8, 5),
    "odd": torch.randn(7, 3, generator=torch.Generator().manual_seed(0)),
    "few": torch.arange(3.0),
    "whole": torch.arange(5.0),
    "plain": torch.arange(6.0).view(2, 3),
}
MODEL = {
    **FLOATS,
    "grid": torch.arange(35, dtype=torch.int64).view(5, 7),
    "mask": torch.arange(11) % 3 == 0,
    "scale": torch.tensor(2.5),
    "step": torch.tensor(17),
    "none": torch.zeros(0, 4),
}
LINE = dict.fromkeys(("even", "odd", "few", "grid", "mask"), (Shard(0),))
# FSDP2 (axis 0) around tensor parallel (axis 1), HSDP, and tensor parallel alone.
SQUARE = {
    "even": (_StridedShard(0, split_factor=2), Shard(0)),
    "odd": (Shard(0), Shard(1)),
    "few": (Replicate(), Shard(0)),
    "grid": (Shard(0), Shard(1)),
    "mask": (Shard(0), Shard(0)),
}
INDEX = {name: 1 + place % 2 for place, name in enumerate(["even", "odd", "grid", "mask"])}


def state_on(mesh, model, placements):
    rest = (Replicate(),) * mesh.ndim
    return {
        name: tensor
        if name == "plain"
        else distribute_tensor(tensor, mesh, placements.get(name, rest))
        for name, tensor in model.items()
    }


def save(rank, directory):
    # Imported here: it takes seconds, and only the ranks need it.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    saves: list[tuple[Any, ...]] = [
        ("line", line, MODEL, LINE, {}),
        ("square", square, MODEL, SQUARE, {}),
        ("split", line, {n: MODEL[n] for n in INDEX}, LINE, {"fqn_to_index_mapping": INDEX}),
        ("both", line, FLOATS, LINE, {"enable_consolidation": True}),
    ]
    for name, mesh, model, placements, options in saves:
        writer = HuggingFaceStorageWriter(str(directory / name), save_distributed=True, **options)
        save_distributed(state_on(mesh, model, placements), storage_writer=writer)
    # The other way of that writer: one rank has everything and writes whole tensors and an index.
    writer = HuggingFaceStorageWriter(str(directory / "alone"), fqn_to_index_mapping=INDEX)
    whole = {name: MODEL[name] for name in INDEX} if rank == 0 else {}
    save_distributed(whole, storage_writer=writer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dcp_hf")
    run_ranks(4, directory, save, directory)
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return lambda name: shutil.copytree(saved / name, tmp_path / name)


@pytest.mark.parametrize("name", ["line", "square"])
def test_what_torch_saves_is_read_whole(saved, name):
    ckpt = saved / name
    names = sorted(path.name for path in ckpt.iterdir())
    assert names == [NAME.format(rank + 1, 1, 1) for rank in range(4)]
    assert_same(read_whole(ckpt, ranks=4), MODEL)
    source = open_checkpoint(ckpt, ranks=4)
    assert source.format == "torch DCP, Hugging Face format"
    assert [path.name for path in source.files] == names
    for box in source.tensor("odd").boxes:
        assert box.path.name == NAME.format(box.rank + 1, 1, 1)


def test_files_by_tensor(saved):
    assert len(list((saved / "split").iterdir())) == 8
    assert_same(read_whole(saved / "split", ranks=4), {name: MODEL[name] for name in INDEX})


def test_what_one_rank_saves_whole_is_read_by_its_index(saved):
    source = open_checkpoint(saved / "alone")
    assert source.format == "safetensors"
    assert len(source.files) == 3
    assert_same(read_whole(saved / "alone"), {name: MODEL[name] for name in INDEX})


def test_the_merged_model_confirms_the_shapes(saved, tmp_path):
    ckpt = saved / "both" / "sharded"
    merge(ckpt, tmp_path / "out.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "out.safetensors"), FLOATS)
    assert_same(read_whole(saved / "both"), FLOATS)
    assert_merged_without_torch(ckpt, tmp_path / "other.safetensors")


@pytest.mark.parametrize("name", ["line", "square"])
def test_shards_that_fit_together_are_read_and_what_was_assumed_is_said(saved, name):
    assert_same(read_whole(saved / name), read_whole(saved / name, ranks=4))
    assert open_checkpoint(saved / name, ranks=4).facts.notes == ()
    assert open_checkpoint(saved / name).facts.notes == (
        "assuming that 4 ranks wrote it: their shards leave no gap, but no file says that "
        "there was no later one; give the number of ranks to have it checked",
    )


@pytest.mark.parametrize("name", ["line", "square"])
@pytest.mark.parametrize("lost", range(1, 15))
def test_every_set_of_missing_shards_is_refused(copied, name, lost):
    ckpt = copied(name)
    left = []
    for rank in range(4):
        if lost >> rank & 1:
            (ckpt / NAME.format(rank + 1, 1, 1)).unlink()
        else:
            left.append(rank + 1)
    missing = min({1, 2, 3, 4} - set(left))
    held = f"{ckpt}: has shards of {len(left)} rank{'s' * (len(left) > 1)}, but "
    unknown = "no file says how many ranks there were"
    remedy = "restore what is missing, or give the number of ranks that wrote a shard: ranks="
    assert refused(ckpt, ranks=4) == (
        f"{held}4 are expected; shard {missing} is not there; {remedy}{len(left)}"
    )
    if missing < left[-1]:
        assert (
            refused(ckpt) == f"{held}{unknown}; shard {missing} is not there; {remedy}{len(left)}"
        )
    elif left == [1]:
        assert refused(ckpt) == f"{held}{unknown}; {remedy}{len(left)}"
    elif name == "square":
        assert "no file contains box" in refused(ckpt)
    else:
        # Nothing in such files tells them from a smaller model; the user is told what was assumed.
        (note,) = open_checkpoint(ckpt).facts.notes
        assert note.startswith(f"assuming that {len(left)} ranks wrote it")


def test_parts_that_torch_does_not_make_are_refused(tmp_path):
    for number, (start, rows) in enumerate([(0, 3), (3, 3), (6, 2), (8, 2)], 1):
        said = json.dumps({"w": {"saved_offsets": [start, 0]}})
        safetensors.torch.save_file(
            {"w": torch.zeros(rows, 2)},
            tmp_path / NAME.format(number, 1, 1),
            {"DCP_SHARDING_INFO": said, "DCP_VERSION": "1.0", "format": "pt"},
        )
    assert refused(tmp_path) == (
        f"{tmp_path}: tensor 'w' has 4 shards along dim 0, of 3 to 2 elements, but torch "
        "splits 10 over 4 ranks differently; restore missing shards, or give the number of ranks: "
        "ranks="
    )
    assert read_whole(tmp_path, ranks=4)["w"].shape == (10, 2)


def test_a_missing_middle_shard_leaves_a_hole_whatever_is_said(copied):
    ckpt = copied("line")
    (ckpt / NAME.format(2, 1, 1)).unlink()
    assert "no file contains box [2:4, 0:5]; restore the missing file" in refused(ckpt, ranks=3)


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_a_shard_that_the_merged_model_misses(copied, lost):
    ckpt = copied("both")
    (ckpt / "sharded" / NAME.format(lost, 1, 1)).unlink()
    message = refused(ckpt / "sharded")
    if lost == 4:
        assert message == (
            "tensor 'even' is bfloat16 of shape [6, 5] in the shards and bfloat16 of shape [8, 5] "
            "in the merged files above them; a shard is missing, or the files are of different "
            "saves"
        )
    else:
        assert ("no file contains box" in message) or ("absent in the shards" in message)


def test_a_missing_file_of_a_shard_with_several(copied):
    ckpt = copied("split")
    (ckpt / NAME.format(4, 1, 2)).unlink()
    assert refused(ckpt, ranks=4) == (
        f"{ckpt}: {NAME.format(4, 1, 2)} is missing; restore it, or put the merged files of the "
        "same save above a folder 'sharded' to show that no such shard was written"
    )


def test_swapped_names_change_nothing(copied):
    """The file says where a box belongs, not its name."""
    ckpt = copied("line")
    first, last = ckpt / NAME.format(1, 1, 1), ckpt / NAME.format(4, 1, 1)
    first.rename(ckpt / "x")
    last.rename(first)
    (ckpt / "x").rename(last)
    assert_same(read_whole(ckpt, ranks=4), MODEL)


def test_a_copy_in_place_of_another_shard(copied):
    ckpt = copied("line")
    shutil.copy(ckpt / NAME.format(1, 1, 1), ckpt / NAME.format(4, 1, 1))
    assert refused(ckpt, ranks=4) == (
        f"tensor 'grid': {ckpt}/{NAME.format(1, 1, 1)} and {ckpt}/{NAME.format(4, 1, 1)} both have "
        "box [0:2, 0:7], which torch stores once; one is a copy, restore the right file"
    )


def respoil(ckpt, change, rank=2):
    """Write a shard of the line again, its metadata and tensors changed."""
    path = ckpt / NAME.format(rank, 1, 1)
    with safetensors.safe_open(path, "pt") as file:
        shard = SimpleNamespace(metadata=file.metadata(), tensors=safetensors.torch.load_file(path))
    shard.info = json.loads(shard.metadata["DCP_SHARDING_INFO"])
    change(shard)
    if "DCP_SHARDING_INFO" in shard.metadata:
        shard.metadata["DCP_SHARDING_INFO"] = json.dumps(shard.info)
    safetensors.torch.save_file(shard.tensors, path, shard.metadata)
    return path


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda s: s.metadata.update(DCP_VERSION="2.0"),
            "{path}: its metadata has DCP_VERSION '2.0', but only '1.0' can be read; "
            "save again with a version of torch that writes it",
        ),
        (
            lambda s: s.metadata.pop("DCP_SHARDING_INFO"),
            "{path}: is named like a shard but does not say where its tensors belong (no "
            "DCP_SHARDING_INFO in its metadata); the file was changed, restore it",
        ),
        (
            lambda s: s.info.pop("even"),
            "{path}: DCP_SHARDING_INFO lacks tensor 'even'; the file was changed, restore it",
        ),
        (
            lambda s: s.info.update(other={}),
            "{path}: DCP_SHARDING_INFO names tensor 'other', which the file lacks; the "
            "file was changed, restore it",
        ),
        (
            lambda s: s.info["even"].update(saved_offsets=[2]),
            "{path}: DCP_SHARDING_INFO['even'].saved_offsets is [2], but the tensor has shape "
            "[2, 5]; the file was changed, restore it",
        ),
        (
            lambda s: s.info["even"].update(saved_offsets=[-2, 0]),
            "{path}: DCP_SHARDING_INFO['even'].saved_offsets should be a list of whole numbers "
            "from 0 to 2**63 - 1 but is [-2, 0]",
        ),
        (
            lambda s: s.tensors.update(even=s.tensors["even"].float()),
            "tensor 'even' is bfloat16 of 2 dims in {first} and float32 of 2 in {path}; the files "
            "are of different saves",
        ),
        (
            lambda s: s.info["even"].update(saved_offsets=[3, 0]),
            "tensor 'even' of shape [8, 5]: no file contains box [2:3, 0:5]; restore the missing "
            "file or save again",
        ),
        (
            lambda s: s.tensors.update(even=torch.zeros(3, 5, dtype=torch.bfloat16)),
            "tensor 'even': rank 1's box [2:5, 0:5] in {path} and rank 2's box [4:6, 0:5] in "
            "{third} partially overlap; the checkpoint is inconsistent, save it again",
        ),
    ],
)
def test_a_shard_that_contradicts_the_others(copied, change, problem):
    ckpt = copied("line")
    path = respoil(ckpt, change)
    places = {"first": ckpt / NAME.format(1, 1, 1), "third": ckpt / NAME.format(3, 1, 1)}
    assert refused(ckpt, ranks=4) == problem.format(path=path, **places)


def test_files_of_two_saves(copied):
    ckpt = copied("line")
    (ckpt / NAME.format(4, 1, 1)).rename(ckpt / NAME.format(4, 1, 2))
    assert refused(ckpt, ranks=4) == (
        f"{ckpt}: {NAME.format(1, 1, 1)} and {NAME.format(4, 1, 2)} are of different saves; "
        "move the files of one save away"
    )


def test_one_number_written_in_two_ways(copied):
    ckpt = copied("line")
    (ckpt / NAME.format(4, 1, 1)).rename(ckpt / "shard-1-model-00001-of-00001.safetensors")
    assert refused(ckpt, ranks=4) == (
        f"{ckpt}: {NAME.format(1, 1, 1)} and shard-1-model-00001-of-00001.safetensors are of "
        "different saves; move the files of one save away"
    )


def test_other_files_beside_the_shards(copied):
    ckpt = copied("line")
    safetensors.torch.save_file(MODEL, ckpt / "model.safetensors")
    assert refused(ckpt, ranks=4) == (
        f"{ckpt}: contains shards and other safetensors files; name the file to read, or move the "
        "shards to another folder, called 'sharded' if the others are merged"
    )

"""Whole state dicts in files of torch.save."""

import json

import pytest
import torch

from shardspec import merge
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.open import open_checkpoint
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    read_whole,
    refused,
)

MODEL = {
    "w": torch.arange(35, dtype=torch.bfloat16).view(7, 5),
    "turned": torch.arange(35.0).view(7, 5).T,
    "every second": torch.arange(22)[::2],
    "mask": torch.tensor([True, False, True]),
    "step": torch.tensor(17),
    "none": torch.zeros(3, 0),
}
PARTS = {
    "pytorch_model-00001-of-00002.bin": ["w", "step"],
    "pytorch_model-00002-of-00002.bin": ["turned", "every second", "mask", "none"],
}


def write(directory):
    directory.mkdir()
    for file, names in PARTS.items():
        torch.save({name: MODEL[name] for name in names}, directory / file)
    table = {"weight_map": {name: file for file, names in PARTS.items() for name in names}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(table))
    return directory


def test_tensors_with_attributes(tmp_path):
    """As what `keep_vars=True` leaves of a module, and as trainers note things."""
    module = torch.nn.Linear(3, 2)
    module.seen = torch.nn.Buffer(torch.arange(4))
    noted = torch.arange(5.0)
    noted.sequence_parallel = True  # type: ignore[attr-defined]  # as trainers do
    state = {**module.state_dict(keep_vars=True), "noted": noted}
    torch.save(state, tmp_path / "m.pt")
    due = {name: tensor.detach() for name, tensor in state.items()}
    assert_same(read_whole(tmp_path / "m.pt"), due)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "any name"])
def test_one_file_of_torch_is_read_whole(tmp_path, name):
    path = tmp_path / name
    torch.save({"model": MODEL, "epoch": 3, "args": {"lr": 0.1}}, path)
    due = {f"model.{key}": tensor for key, tensor in MODEL.items()}
    assert_same(read_whole(path), due)
    source = open_checkpoint(path)
    assert (source.format, source.directory, source.files) == ("torch file", path, (path,))
    assert source.extras == {"epoch": 3, "args.lr": 0.1}
    merge(path, tmp_path / "out.safetensors")
    assert_same(read_whole(tmp_path / "out.safetensors"), due)
    assert_merged_without_torch(path, tmp_path / "other.safetensors")


def test_a_directory_with_one_file(tmp_path):
    torch.save(MODEL, tmp_path / "pytorch_model.bin")
    assert_same(read_whole(tmp_path), MODEL)


def test_files_of_torch_with_an_index_are_read_whole(tmp_path):
    ckpt = write(tmp_path / "ckpt")
    assert_same(read_whole(ckpt), MODEL)
    assert_same(read_whole(ckpt / "pytorch_model.bin.index.json"), MODEL)
    names = [path.name for path in open_checkpoint(ckpt).files]
    assert names == ["pytorch_model.bin.index.json", *PARTS]
    assert_merged_without_torch(ckpt, tmp_path / "out.safetensors")


def test_an_index_and_files_that_disagree(tmp_path):
    ckpt = write(tmp_path / "ckpt")
    first, second = (ckpt / file for file in PARTS)
    torch.save({"w": MODEL["w"]}, first)
    assert refused(ckpt) == (
        f"{first}: lacks tensor 'step', which pytorch_model.bin.index.json lists for it; index "
        "and files are not of one save, restore them"
    )
    second.unlink()
    assert refused(ckpt) == (
        f"{second}: is missing, but pytorch_model.bin.index.json puts 4 tensors into it, "
        "'every second' first; restore it"
    )


def test_a_model_in_one_storage_is_checked_once(tmp_path):
    """As buffers for gradients leave it; each digest costs a reading of the whole storage."""
    flat = torch.arange(60.0)
    model = {f"w{i}": flat[12 * i : 12 * i + 12].view(4, 3) for i in range(5)}
    path = tmp_path / "model.pt"
    torch.save({**model, "flat": flat}, path)
    assert_same(read_whole(path), {**model, "flat": flat})
    source = open_checkpoint(path)
    digested = [name for name in source.names if source.tensor(name).boxes[0].digest is not None]
    assert digested == ["flat", "w0"]
    at = source.tensor("w3").boxes[0].offset
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    report = verify_checkpoint(path, every=True)
    assert len(report.flaws) == 2
    assert all("CRC-32" in flaw for flaw in report.flaws)


@pytest.mark.parametrize("index", [True, False])
def test_numbered_files_are_one_model(tmp_path, index):
    names = [f"pytorch_model-{number:05d}-of-00003.bin" for number in (1, 2, 3)]
    parts = [dict(list(MODEL.items())[at::3]) for at in range(3)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, tmp_path / name)
    if index:
        where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "training_args.bin").write_bytes(b"something else")
    assert_same(read_whole(tmp_path), MODEL)
    for name in names:
        held = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        assert name in refused(tmp_path)
        (tmp_path / name).write_bytes(held)
    if not index:
        torch.save(parts[0], tmp_path / names[1])
        assert "another file of the same model also has tensor" in refused(tmp_path)


ZERO = "DeepSpeed ZeRO, which are not read one by one; name the directory with the files of all"
EXPERTS = "DeepSpeed's mixture of experts, which are not read one by one; put the weights together"
PIPELINE = "DeepSpeed's pipeline, which are not read one by one; load it in a run of as many stages"
TENSOR_PARALLEL = "DeepSpeed's tensor parallel, which are not read one by one; load it in a run of"
META = "Meta's model parallel, which are not read one by one; name the directory with the files"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("layer_3_expert_0_mp_rank_00_model_states.pt",), EXPERTS),
        (("expert_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"), EXPERTS),
        (("expp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"), EXPERTS),
        (("layer_00-model_states.pt", "mp_rank_00_model_states.pt"), PIPELINE),
        (("layer_00-model_01-model_states.pt",), PIPELINE),
        (("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), TENSOR_PARALLEL),
        (("mp_rank_01_model_states.pt",), TENSOR_PARALLEL),
    ],
)
def test_one_file_of_several_is_told_by_its_name_and_those_beside_it(tmp_path, names, told):
    for name in names:
        torch.save(MODEL, tmp_path / name)
    for name in names:
        assert f"{tmp_path / name}: is one of several files of {told}" in refused(tmp_path / name)
    assert f"{tmp_path}: {names[0]} is one of several files of {told}" in refused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "consolidated.00.pth"])
def test_one_file_that_is_alone_is_read(tmp_path, name):
    torch.save(MODEL, tmp_path / name)
    assert_same(read_whole(tmp_path / name), MODEL)


def of_meta(ranks):
    weight = torch.zeros(8, 8 // ranks)
    return {"layers.0.attention.wo.weight": weight, "rope.freqs": torch.zeros(2)}


def of_deepspeed(size, ranks=1, **more):
    shapes = [{"w": torch.Size((3, 2))}, {"v": torch.Size(())}]
    module = {"w": torch.zeros(size), "v": torch.zeros(())}
    said = {"param_shapes": shapes, "ds_version": "0.19", "mp_world_size": ranks}
    return {"module": module, **said, **more}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (of_deepspeed((0,)), ZERO),
        (of_deepspeed((3, 2)), None),
        (of_deepspeed((3, 2), 2), TENSOR_PARALLEL),
        (of_deepspeed((3, 2), num_experts=[2]), EXPERTS),
        (of_deepspeed((3, 2), num_experts=[]), None),
        (of_meta(1), None),
        (of_meta(2), META),
    ],
)
def test_one_file_of_several_is_told_by_what_it_holds(tmp_path, state, told):
    """Whatever it is called."""
    path = tmp_path / "model.pt"
    torch.save(state, path)
    if told is None:
        assert open_checkpoint(path).names
    else:
        assert f"{path}: is one of several files of {told}" in refused(path)


def test_a_file_cut_short(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(MODEL, path)
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(path) == (
        f"{path}: is not a whole zip of torch.save, from torch 1.6 on; restore it, or load it with "
        "torch.load and save it again"
    )

"""What a path may mean, and what is said where it means nothing."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.formats import formats
from shardspec.checkpoint.open import open_checkpoint, open_checkpoints
from shardspec.errors import CheckpointError
from tests.checkpoint.handmade import handmade

TENSORS = {"w": ("[S0,R]", np.arange(35, dtype=np.float32).reshape(7, 5))}


@pytest.fixture
def ckpt(tmp_path):
    return handmade(TENSORS, (3,)).write(tmp_path / "ckpt")


@pytest.fixture
def dcp(ckpt, tmp_path):
    reshard(ckpt, tmp_path / "dcp", device_mesh=DeviceMesh(range(2), (2,)), format="dcp")
    return tmp_path / "dcp"


@pytest.fixture
def file(ckpt, tmp_path):
    merge(ckpt, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def refused(path, **options):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


OPENED = """
import sys
from shardspec.checkpoint.open import open_checkpoint
source = open_checkpoint(sys.argv[1])
for name in source.names:
    source.tensor(name)
root = "shardspec.checkpoint."
print(*(m.removeprefix(root).split(".")[-1] for m in sys.modules if m.startswith(root)))
print("numpy" in sys.modules)
"""


@pytest.mark.parametrize(
    ("form", "needed", "others"),
    [
        ("ckpt", "native", ("dcp", "megatron", "unpickler")),
        ("dcp", "dcp", ("megatron", "rank_files", "torch_file")),
        ("file", "safetensors", ("native", "dcp", "megatron", "torch_file", "unpickler")),
    ],
)
def test_only_what_a_format_needs_is_imported(request, form, needed, others):
    place = request.getfixturevalue(form)
    command = [sys.executable, "-c", OPENED, str(place)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    imported, with_numpy = run.stdout.splitlines()
    assert needed in imported.split()
    assert not set(imported.split()) & set(others)
    assert with_numpy == "False"


def test_a_file_of_a_checkpoint_means_all_of_it(ckpt, dcp):
    assert open_checkpoint(ckpt / "sharding_info.json").directory == ckpt
    for name in (".metadata", "__0_0.distcp"):
        assert open_checkpoint(dcp / name).directory == dcp
        assert open_checkpoint(dcp / name).names == ("w",)


def test_what_one_rank_saved_is_not_taken_for_whole_tensors(ckpt):
    shard = min(ckpt.glob("*.safetensors"))
    assert refused(shard) == (
        f"{shard}: has the tensors of one rank, which may be shards; name its directory, {ckpt}"
    )


def test_a_checkpoint_one_or_two_directories_down_is_named(ckpt, tmp_path):
    run = tmp_path / "run"
    (run / "global_step_9").mkdir(parents=True)
    (run / "latest").write_text("9")
    ckpt.rename(run / "global_step_9" / "actor")
    there = run / "global_step_9" / "actor"
    assert refused(run) == (
        f"{run}: cannot be opened: it is not a checkpoint itself, but there is one in "
        f"it: name {there} (shardspec)"
    )
    for step in (10, 1000, 200):
        merge(there, run / f"step-{step}.d", format="huggingface")
    # The nearest count, in the order of their numbers; one that was killed does not.
    (run / "step-200.d").rename(run / ".step-200.d")
    assert refused(run) == (
        f"{run}: cannot be opened: it is not a checkpoint itself, but there are some in "
        "it: step-10.d (safetensors), step-1000.d (safetensors); name one of them"
    )


def test_files_that_could_be_meant_are_named(tmp_path):
    for name in ("optimizer.pt", "scheduler.pt", "args.bin", "rng.pth", "config.json"):
        (tmp_path / name).touch()
    assert refused(tmp_path) == (
        f"{tmp_path}: cannot be opened: it is not a checkpoint itself, but there are files of "
        "torch in it: args.bin, optimizer.pt, rng.pth and 1 more; name one of them"
    )
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert refused(tmp_path) == (
        f"{tmp_path}: pytorch_model-00002-of-00002.bin is missing from the numbered files; "
        "restore it"
    )


def test_a_directory_with_nothing_of_the_kind(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "src").mkdir()
    message = refused(tmp_path)
    assert message.endswith(
        "this is not a checkpoint of a format that is known, or its save did not finish"
    )
    for format in formats():
        assert format.known_by in message


def test_files_that_are_none(tmp_path):
    old = tmp_path / "old.pt"
    torch.save({"w": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    assert refused(old) == (
        f"{old}: is in the format of torch.save before torch 1.6, which cannot be read; "
        "load it with torch.load(weights_only=True) and save it again"
    )
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    assert "is neither a safetensors file nor one of torch.save" in refused(
        tmp_path / "config.json"
    )
    # By its name this one should be: it is told what is wrong with it.
    (tmp_path / "m.safetensors").write_text('{"hidden_size": 64}')
    assert "has 19 bytes and a header of" in refused(tmp_path / "m.safetensors")


def test_of_several_each_is_told_what_it_lacks(ckpt, tmp_path):
    shards = tmp_path / "hf"
    shards.mkdir()
    merge(ckpt, shards / "shard-00001-model-00001-of-00001.safetensors")
    one = shards / "shard-00001-model-00001-of-00001.safetensors"
    raw = one.read_bytes()
    note = b'"format":"pt","DCP_VERSION":"1.0","DCP_SHARDING_INFO":"{\\"w\\":{\\"saved_offsets\\":'
    head = raw[8 : 8 + int.from_bytes(raw[:8], "little")].rstrip()
    head = head.replace(b'"format":"pt"', note + b'[0,0]}}"')
    assert b"DCP" in head
    one.write_bytes(len(head).to_bytes(8, "little") + head + raw[-140:])
    assert "ranks=1" in refused(shards)
    opened = open_checkpoints((ckpt, shards), ranks=1)
    assert [source.names for source in opened] == [("w",), ("w",)]
    with pytest.raises(CheckpointError, match="ranks= was given, but a checkpoint of this format"):
        open_checkpoints((ckpt, ckpt), ranks=1)


WHOLE = "load it with the tool that wrote it, and save whole tensors as safetensors"


@pytest.mark.parametrize(
    ("names", "kind", "remedy"),
    [
        (("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"), "orbax (OCDBT)", WHOLE),
        (("manifest.ocdbt", "d"), "orbax (OCDBT)", WHOLE),
        (("flax_model.msgpack", "config.json"), "Flax", WHOLE),
        (("tf_model.h5", "config.json"), "TensorFlow", WHOLE),
        (("llama-q4.gguf",), "llama.cpp (GGUF)", "name the checkpoint that it was made of"),
        (("model.nemo",), "NeMo", "tar -xf"),
        (("distrib_optim.pt",), "the optimizer of data parallel ranks", "torch_dist"),
        ((".zgroup", "w"), "zarr", "save it as torch_dist"),
    ],
)
def test_what_is_known_and_not_read_is_named_with_what_helps(tmp_path, names, kind, remedy):
    for name in names:
        (tmp_path / name).write_bytes(b"data")
    for place in (tmp_path, tmp_path / names[0]):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(place)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert message.startswith(f"{place}: cannot be opened: it is of {kind}")
        assert "which is not read; " in message
        assert remedy in message

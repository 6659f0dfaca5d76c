"""docs/format.md holds: its example is a checkpoint, and its reader reads what is written."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from shardspec import DeviceMesh, DTensor, Layout, load_sharded, merge, save_sharded
from shardspec.checkpoint.formats.native import VERSION, info_lines, read_info
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.dtypes import to_safetensors
from tests.checkpoint.handmade import handmade

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
W = np.arange(15, dtype=np.int32).reshape(3, 5)


def block(language):
    (text,) = re.findall(rf"```{language}\n(.*?)```", DOC, re.DOTALL)
    return text


def reader():
    names: dict[str, object] = {}
    exec(block("python"), names)
    read = names["read"]
    assert callable(read)
    return read


def write_example(directory):
    """Store the boxes that the example lists, by the words around it."""
    info = json.loads(block("json"))
    arrays: dict[str, Any] = {
        "w": W,
        "p": np.array([1, 2], np.int32),
        "step": np.array(7, np.int64),
    }
    directory.mkdir()
    for file in info["files"]:
        boxes = {
            name: np.array(arrays[name][tuple(slice(lo, hi) for lo, hi in entry["box"])])
            for name, entry in file["boxes"].items()
        }
        metadata = {
            "format": "pt",
            "shardspec.save": info["save"],
            "shardspec.rank": str(file["rank"]),
        }
        data = safetensors.numpy.save(boxes, metadata)
        assert len(data) == file["bytes"], (file["name"], len(data))
        (directory / file["name"]).write_bytes(data)
    (directory / "sharding_info.json").write_text(block("json"))
    return directory


def test_the_example_is_a_checkpoint(tmp_path):
    ckpt = write_example(tmp_path / "ckpt")
    merge(ckpt, tmp_path / "out")
    merged = safetensors.numpy.load_file(tmp_path / "out")
    np.testing.assert_array_equal(merged["w"], W)
    assert merged["p"].tolist() == [2, 4]
    assert merged["step"] == np.array(7)
    assert load_sharded(ckpt)["p"].to_global().tolist() == [2, 4]


def test_the_example_is_written_as_shardspec_writes_it(tmp_path):
    (tmp_path / "sharding_info.json").write_text(block("json"))
    assert "".join(info_lines(read_info(LocalPath(tmp_path)))) == block("json")
    assert f"version {VERSION}" in DOC.splitlines()[0]


def test_the_reader_of_the_document_reads_what_shardspec_saves(tmp_path):
    read = reader()
    assert {
        name: array.tolist() for name, array in read(write_example(tmp_path / "a")).items()
    } == {
        "p": [2, 4],
        "step": 7,
        "w": W.tolist(),
    }
    ckpt = tmp_path / "ckpt"
    mesh = DeviceMesh([5, 1, 0, 4, 3, 2], (2, 3))
    w = torch.arange(35).view(5, 7)
    addends = {rank: torch.full((2,), rank % 2) for rank in mesh.ids}
    pending = DTensor.from_shards(addends, Layout(mesh, "[S1|P0]", (6,), "int64"))
    parts = DTensor(w, mesh, "[S0{3,2},S1{4,3/1}*2]")
    state = {"w": DTensor(w, mesh, "[S10,R]"), "p": pending, "s": torch.tensor(2.5), "q": parts}
    save_sharded(state, ckpt)
    found = read(ckpt)
    assert (found["q"] == w.numpy()).all()
    assert (found["w"] == w.numpy()).all()
    assert (found["p"] == pending.to_global().numpy()).all()
    assert found["s"] == 2.5
    made = handmade({"r": ("[R,S0]", W)}, replicas=True).write(tmp_path / "replicas")
    assert (read(made)["r"] == W).all()


def test_every_dtype_is_listed():
    (listed,) = re.findall(r"as in safetensors: `([^`]*)`", DOC)
    names = [
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("float4_e2m1fn_x2", "complex64", "int64", "int32"),
        *("int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    ]
    assert listed.split() == [to_safetensors(name) for name in names]


def test_every_key_is_in_the_table():
    pending = ("[R|P0]", {(i,): np.zeros(2, np.int32) for i in range(2)})
    info = handmade({"p": pending}, (2,)).info
    file = info["files"][0] | {"bytes": 0}
    keys = [*info, *(f"mesh.{key}" for key in info["mesh"])]
    keys += [f"tensors[…].{key}" for key in info["tensors"]["p"]]
    keys += [f"files[…].{key}" for key in file]
    keys += [f"files[…].boxes[…].{key}" for key in file["boxes"]["p"]]
    missing = [key for key in keys if f"| `{key}` |" not in DOC and key != "mesh"]
    assert missing == []

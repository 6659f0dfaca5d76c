"""Saving in one process: what lands on the disk, who writes what, and what happens on failure."""

import errno
import json
import os
import resource
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from shardspec import DeviceMesh, DTensor, Layout, load_sharded, merge, save_sharded
from shardspec.boxes import box_size
from shardspec.checkpoint.catalog import assign_boxes, replica_keys
from shardspec.checkpoint.compare.inspect import inspect_checkpoint
from shardspec.checkpoint.formats.native import INFO_NAME, info_lines, read_info
from shardspec.checkpoint.storage import system_calls
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, OutputExistsError
from tests.faults.forks import Fork

MESH = DeviceMesh([4, 1, 0, 5, 3, 2], (2, 3), axis_names=("dp", "tp"))


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_every_box_is_stored_once_and_the_info_says_where(tmp_path):
    w = torch.arange(35.0).view(5, 7)
    state = {"w": DTensor(w, MESH, "[R,S(tp)]"), "b": DTensor(w[0], MESH, "[S01]")}
    save_sharded(state, tmp_path)
    info = json.loads((tmp_path / "sharding_info.json").read_text())
    assert info["mesh"] == {"ids": [4, 1, 0, 5, 3, 2], "shape": [2, 3], "axis_names": ["dp", "tp"]}
    assert info["tensors"] == {
        "b": {"shape": [7], "dtype": "F32", "spec": "[S01]"},
        "w": {"shape": [5, 7], "dtype": "F32", "spec": "[R,S1]"},
    }
    stored: dict[tuple[str, str], int] = {}
    for file in info["files"]:
        path = tmp_path / file["name"]
        assert file["name"] == f"shard-{file['rank']:05d}-{info['save']}.safetensors"
        assert path.stat().st_size == file["bytes"]
        arrays = safetensors.numpy.load_file(path)
        assert arrays.keys() == file["boxes"].keys()
        for name, array in arrays.items():
            box = file["boxes"][name]["box"]
            assert state[name].layout.box(file["rank"]) == tuple(map(tuple, box))
            index = tuple(slice(lo, hi) for lo, hi in box)
            assert (array == (w if name == "w" else w[0])[index].numpy()).all()
            assert stored.setdefault((name, str(box)), file["rank"]) == file["rank"]
    assert len(stored) == 3 + 5  # of the six devices one gets nothing of seven elements cut 4+3
    assert len(names_in(tmp_path)) == 1 + len(info["files"])


def test_the_info_reads_back_as_it_was_written(tmp_path):
    save_sharded({"a\n": DTensor(torch.zeros(4, 3), MESH, "[S1,R]")}, tmp_path)
    info = read_info(LocalPath(tmp_path))
    text = "".join(info_lines(info))
    assert (tmp_path / "sharding_info.json").read_text() == text
    (tmp_path / "sharding_info.json").write_text(text)
    assert read_info(LocalPath(tmp_path)) == info
    assert info.mesh == MESH


@pytest.mark.parametrize("spec", ["[R,R]", "[S0,R]", "[R,S1]", "[S01,R]"])
def test_the_bytes_are_spread_evenly_over_those_that_hold_them(spec):
    layouts = {f"t{n}": Layout(MESH, spec, (n + 4, 12), "bfloat16") for n in range(60)}
    chosen = assign_boxes(MESH, layouts)
    load = {}
    for rank, entries in chosen.items():
        assert [entry.tensor for entry in entries] == sorted(entry.tensor for entry in entries)
        for entry in entries:
            assert (entry.box, entry.addend) in replica_keys(layouts[entry.tensor], rank)
        load[rank] = sum(box_size(e.box) * item_bytes("bfloat16") for e in entries)
    assert sum(load.values()) == sum(layout.global_bytes for layout in layouts.values())
    if spec != "[S01,R]":
        assert max(load.values()) <= 1.2 * min(load.values())


def test_boxes_of_one_holder_count_before_the_shared_ones_are_spread():
    mesh = DeviceMesh(range(2), (2,))
    layouts = {
        "cut": Layout(mesh, "[S0]", (3,), "int8"),  # two bytes and one
        "whole": Layout(mesh, "[R]", (1,), "int8"),
    }
    chosen = assign_boxes(mesh, layouts)
    assert [[entry.tensor for entry in chosen[rank]] for rank in (0, 1)] == [
        ["cut"],
        ["cut", "whole"],
    ]


def test_boxes_of_other_holders_count_when_a_whole_one_is_given_away():
    mesh = DeviceMesh(range(4), (2, 2))
    layouts = {
        "cut": Layout(mesh, "[S0]", (8,), "int8"),  # four bytes on 0 and 1, four on 2 and 3
        "whole": Layout(mesh, "[R]", (4,), "int8"),
    }
    chosen = assign_boxes(mesh, layouts)
    assert [[entry.tensor for entry in chosen[rank]] for rank in mesh.ids] == [
        ["cut"],
        ["whole"],
        ["cut"],
        [],
    ]


def test_plain_tensors_scalars_empty_strided_and_tied_ones(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    state: dict[str, Any] = {
        "d": DTensor(base, MESH, "[S0,S1]"),
        "t": base.t(),
        "every_other": base[:, ::2],
        "tied": base,
        "parameter": torch.nn.Parameter(base.clone()),
        "scalar": torch.tensor(2.5),
        "step": torch.tensor(7),
        "empty": torch.zeros(3, 0, 2, dtype=torch.bfloat16),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "expanded": torch.tensor([3]).expand(5),
    }
    save_sharded(state, tmp_path / "ckpt")
    merge(tmp_path / "ckpt", tmp_path / "out")
    from safetensors.torch import load_file

    merged = load_file(tmp_path / "out")
    for name, value in state.items():
        expected = value.to_global() if isinstance(value, DTensor) else value.detach()
        assert merged[name].shape == expected.shape
        assert merged[name].dtype == expected.dtype
        assert torch.equal(merged[name], expected), name
    loaded = load_sharded(tmp_path / "ckpt")
    assert torch.equal(loaded["t"].to_global(), base.t())


def test_without_dtensors_this_process_is_the_mesh_unless_one_is_given(tmp_path):
    save_sharded({"a": torch.ones(3)}, tmp_path / "alone")
    assert read_info(LocalPath(tmp_path / "alone")).mesh.ids == (0,)
    save_sharded({}, tmp_path / "nothing")
    assert load_sharded(tmp_path / "nothing") == {}
    assert names_in(tmp_path / "nothing") == ["sharding_info.json"]
    save_sharded({"a": torch.ones(3)}, tmp_path / "given", communicator=SimulatedCommunicator(MESH))
    assert read_info(LocalPath(tmp_path / "given")).mesh == MESH


def test_pending_addends_are_kept_one_by_one(tmp_path):
    shards = {rank: torch.full((2,), float(MESH.coordinates(rank)[1])) for rank in MESH.ids}
    layout = Layout(MESH, "[S0|P1]", (4,), "float32")
    save_sharded({"p": DTensor.from_shards(shards, layout)}, tmp_path / "ckpt")
    files = read_info(LocalPath(tmp_path / "ckpt")).files
    assert sorted(entry.addend for file in files for entry in file.boxes) == [
        *[(0,)] * 2,
        *[(1,)] * 2,
        *[(2,)] * 2,
    ]
    assert load_sharded(tmp_path / "ckpt")["p"].to_global().tolist() == [3.0] * 4
    merge(tmp_path / "ckpt", tmp_path / "out")
    assert safetensors.numpy.load_file(tmp_path / "out")["p"].tolist() == [3.0] * 4


class TwoHalves(torch.Tensor):
    """A tensor whose bytes lie in others."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "TwoHalves":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


def test_nested_states_and_plain_values_come_back_as_they_were(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "w.x": DTensor(torch.arange(6), MESH, "[S0]"),
        "epoch": 3,
        "best": float("-inf"),
        "losses": [0.5, float("inf")],
        "name": 'a "b"\n',
        "none": None,
        "yes": True,
        "empty": {},
        "list": [torch.ones(2), {"deep": [torch.zeros(1), (1, 2)]}, []],
        "shape": torch.Size([2, 3]),
    }
    save_sharded(state, tmp_path / "ckpt")
    loaded = load_sharded(tmp_path / "ckpt")

    def whole(value):
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        if isinstance(value, list):
            return [whole(item) for item in value]
        if isinstance(value, DTensor):
            value = value.to_global()
        return value.tolist() if isinstance(value, torch.Tensor) else value

    assert whole(loaded) == whole(state)
    assert type(loaded["optim"]["param_groups"][0]["betas"]) is tuple
    assert list(loaded["optim"]["state"]) == [0, 1]
    inspected = inspect_checkpoint(tmp_path / "ckpt")
    assert inspected.extras["optim.param_groups.0.lr"] == 1e-3
    assert inspected.names[:2] == ("list.0", "list.1.deep.0")
    # What merges for torch take along.
    merge(tmp_path / "ckpt", tmp_path / "out.pt")
    merged = torch.load(tmp_path / "out.pt", weights_only=True)
    assert merged["epoch"] == 3
    assert merged["optim.param_groups.0.betas"] == (0.9, 0.999)
    optimizer.load_state_dict(load_sharded(tmp_path / "ckpt", into=state)["optim"])


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({3: torch.ones(1)}, r"the key 3 at \[3\] is a int; name tensors by text"),
        ({"a": 3j}, "value 'a': sharding_info.json cannot store a complex, only numbers"),
        ({"a": object()}, "'a' is a object, neither a tensor nor a plain value"),
        ({"a": {(0,): 1}}, r"the key \(0,\) at \['a'\]\[\(0,\)\] is a tuple; name tensors by text"),
        ({"a": {"b": {3.5: 1}}}, r"the key 3.5 at \['a'\]\['b'\]\[3.5\] is a float"),
        ({"a": {"b": 1}, "a.b": 2}, r"both be named 'a.b': the ones at \['a'\]\['b'\] and"),
        ({"a": [torch.ones(1), 3j]}, "value 'a.1': sharding_info.json cannot store a complex"),
        ({"a": (1, {2})}, "value 'a': sharding_info.json cannot store a set"),
        ({"a": ["\ud800"]}, "value 'a' is a text that UTF-8 cannot express"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "tensor 'a' is complex128, .* DCP"),
        (
            {"a": torch.eye(2).to_sparse()},
            r"tensor 'a' is a .*, not a plain dense .*sparse_coo, on cpu\); save its to",
        ),
        (
            {"a": TwoHalves(torch.ones(2))},
            r"tensor 'a' is a .*TwoHalves, not a plain dense tensor .*; save the plain tensors",
        ),
        ({"a": torch.ones(2, device="meta")}, "not a plain dense tensor .*on meta.*exclude it"),
        ({"__metadata__": torch.ones(1)}, "cannot be named '__metadata__'"),
        ({"\ud800": torch.ones(0)}, "which UTF-8 cannot express; rename the tensor"),
        (
            {
                "a": DTensor(torch.ones(2), MESH, "[R]"),
                "b": DTensor(torch.ones(2), DeviceMesh(range(2), (2,)), "[R]"),
            },
            r"tensor 'b' is on mesh 2 with ids \(0, 1\), but the save is on mesh dp=2,tp=3",
        ),
    ],
)
def test_what_cannot_be_saved(tmp_path, state, problem):
    with pytest.raises(CheckpointError, match=problem) as caught:
        save_sharded(state, tmp_path / "ckpt")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "ckpt").exists()


def test_a_finished_save_is_kept_unless_overwriting(tmp_path):
    save_sharded({"a": torch.ones(3)}, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OutputExistsError, match=r"contains a finished save; .* overwrite=True"):
        save_sharded({"a": torch.zeros(3)}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "notes.txt").write_text("mine")
    save_sharded({"a": DTensor(torch.zeros(6), MESH, "[S01]")}, tmp_path, overwrite=True)
    names = names_in(tmp_path)
    assert len(names) == 2 + 6  # the new files, the info and the notes; the old file is gone
    assert not before.keys() - {"sharding_info.json"} & set(names)
    assert load_sharded(tmp_path)["a"].to_global().tolist() == [0.0] * 6


def test_only_shards_of_ours_are_removed_whatever_an_older_info_names(tmp_path):
    save_sharded({"a": torch.ones(3)}, tmp_path)
    (old,) = (path for path in tmp_path.iterdir() if path.name.startswith("shard-"))
    info = json.loads((tmp_path / "sharding_info.json").read_text())
    strangers = {
        "notes.md": b"mine",
        "train.log": b"step 1",
        "shard-00000-0123456789abcdef.safetensors": b"named like one",
        "shard-00001-0123456789abcdef.safetensors": safetensors.numpy.save({"x": np.ones(2)}),
        # A shard of ours, but not the one that its name says.
        "shard-00002-0123456789abcdef.safetensors": old.read_bytes(),
    }
    for name, data in strangers.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "shard-00003-0123456789abcdef.safetensors").symlink_to(old)
    info["files"] += [
        {**info["files"][0], "name": name, "boxes": {}}
        for name in [*strangers, "shard-00003-0123456789abcdef.safetensors", "sharding_info.json"]
    ]
    (tmp_path / "sharding_info.json").write_text(json.dumps(info))
    save_sharded({"a": torch.zeros(3)}, tmp_path, overwrite=True)
    assert load_sharded(tmp_path)["a"].to_global().tolist() == [0.0] * 3
    assert {name: (tmp_path / name).read_bytes() for name in strangers} == strangers
    assert (tmp_path / "shard-00003-0123456789abcdef.safetensors").is_symlink()
    assert not old.exists()
    assert len(names_in(tmp_path)) == 2 + 6


def test_what_unfinished_saves_have_left_goes_with_the_next_one(tmp_path):
    save_sharded({"a": torch.ones(3)}, tmp_path)
    (tmp_path / "sharding_info.json").unlink()
    (tmp_path / ".shardspec-save-0123456789abcdef.tmp").write_text("half")
    # Of a merge beside it, which may be at work.
    (tmp_path / ".shardspec-0123456789abcdef.tmp").write_text("half")
    save_sharded({"a": torch.zeros(3)}, tmp_path)
    names = names_in(tmp_path)
    assert names[0] == ".shardspec-0123456789abcdef.tmp"
    assert [name[:6] for name in names[1:]] == ["shard-", "shardi"]


def test_a_replaced_save_keeps_its_mode(tmp_path):
    save_sharded({"a": torch.ones(3)}, tmp_path)
    (tmp_path / "sharding_info.json").chmod(0o600)
    save_sharded({"a": torch.zeros(3)}, tmp_path, overwrite=True)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_overwriting_a_damaged_save_and_finishing_a_directory_without_one(tmp_path):
    (tmp_path / "shard-00000-0123.safetensors").write_text("left over")
    save_sharded({"a": torch.ones(3)}, tmp_path)
    (tmp_path / "sharding_info.json").write_text("{damaged")
    save_sharded({"a": torch.zeros(3)}, tmp_path, overwrite=True)
    assert load_sharded(tmp_path)["a"].to_global().tolist() == [0.0] * 3


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: cannot be made a directory: File exists"):
        save_sharded({"a": torch.ones(3)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be made a directory: Not a directory"):
        save_sharded({"a": torch.ones(3)}, tmp_path / "file" / "in")


@pytest.mark.parametrize(
    ("rows", "names", "file"),
    [(500, 0, "shard-0000"), (4, 100, "sharding_info.json")],  # what no longer fits
)
def test_a_full_disk_keeps_the_older_save(tmp_path, rows, names, file):
    save_sharded({"old": torch.ones(1)}, tmp_path)
    before = names_in(tmp_path)
    state: dict[str, object] = {f"{n:0400d}": torch.ones(0) for n in range(names)}
    state["w"] = DTensor(torch.zeros(rows, 100), DeviceMesh(range(4), (4,)), "[S0,R]")

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        save_sharded(state, tmp_path, overwrite=True)

    end = Fork(full).end()
    assert end.startswith(f"Error: {tmp_path}/{file}")
    assert "cannot be written: File too large" in end
    assert names_in(tmp_path) == before
    assert load_sharded(tmp_path)["old"].to_global().tolist() == [1.0]


def test_files_get_the_permissions_that_the_user_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        save_sharded({"a": torch.ones(3)}, tmp_path / "ckpt")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "ckpt").iterdir()}
    assert modes == {0o640}


def test_a_single_element_with_a_stride(tmp_path):
    column = torch.arange(6.0).view(3, 2)[:1, 1]
    assert column.is_contiguous()
    assert column.stride() == (2,)
    save_sharded({"a": column}, tmp_path)
    assert load_sharded(tmp_path)["a"].to_global().tolist() == [1.0]


@pytest.mark.parametrize(
    "state",
    [
        {"box": [[0, 2], [1, 3]]},
        {"box": [[0, 2]], "addend": [1], "crc32": "0123abcd"},
        {"box": [], "addend": []},
    ],
)
def test_values_with_the_names_that_a_box_has(tmp_path, state):
    save_sharded(state, tmp_path)
    assert load_sharded(tmp_path) == state


@pytest.mark.parametrize("call", ["open", "close", "sync"])
@pytest.mark.parametrize("older", [False, True])
def test_an_error_after_the_save_is_published_removes_no_file(tmp_path, monkeypatch, call, older):
    """Of the last calls of a save, those on the directory or on the file that has its name."""
    place, mesh = tmp_path / "a", DeviceMesh(range(2))
    old, new = (DTensor(torch.full((4, 2), n), mesh, "[S0,R]") for n in (1.0, 2.0))
    if older:
        save_sharded({"w": old}, place)
    before = (place / INFO_NAME).read_text() if older else None
    owner = system_calls if call == "sync" else os
    real = getattr(owner, call)

    def fail(*args, **kwargs):
        info = place / INFO_NAME
        if info.exists() and info.read_text() != before:
            monkeypatch.setattr(owner, call, real)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **kwargs)

    with suppress(CheckpointError):
        monkeypatch.setattr(owner, call, fail)
        save_sharded({"w": new}, place, overwrite=older)
    monkeypatch.undo()
    assert torch.equal(load_sharded(place)["w"].to_global(), new.to_global())

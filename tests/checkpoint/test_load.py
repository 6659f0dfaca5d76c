"""Loading in one process: every saved cut into every other, on the same mesh and on others."""

import os
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from shardspec import DeviceMesh, DTensor, Layout, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.convert.copy import Buffers, read_box_into
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.errors import CheckpointError, LayoutError
from tests.checkpoint.handmade import all_specs, handmade, sample


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (2, 7, 3)])
def test_every_cut_loads_as_every_other_on_other_meshes(tmp_path, shape):
    whole = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    mesh = DeviceMesh(range(6), (2, 3))
    saved = {str(spec): DTensor(whole, mesh, spec) for spec in all_specs(len(shape), 2)}
    save_sharded(saved, tmp_path)
    count = 0
    for target in (mesh, DeviceMesh([7, 2, 3, 5, 1], (5,)), DeviceMesh(range(4), (2, 2))):
        for spec in all_specs(len(shape), target.ndim):
            loaded = load_sharded(tmp_path, target, {"*": spec})
            assert list(loaded) == sorted(saved)
            for tensor in loaded.values():
                expected = DTensor(whole, target, spec)
                assert tensor.layout == expected.layout
                for device in target.ids:
                    assert torch.equal(tensor.shards[device], expected.shards[device])
                    assert tensor.shards[device].is_contiguous()
                    count += 1
    assert count >= len(saved) * 15


def test_as_saved_where_nothing_else_is_said(tmp_path):
    mesh = DeviceMesh([3, 1, 0, 2], (2, 2))
    state: dict[str, Any] = {
        "w": DTensor(torch.arange(35).view(5, 7), mesh, "[S10,R]"),
        "n": torch.tensor(3),
    }
    save_sharded(state, tmp_path)
    loaded = load_sharded(tmp_path)
    assert loaded["w"].layout == state["w"].layout
    assert str(loaded["n"].layout) == "[] of [] int64 on 2x2"
    # On a mesh of another shape, axes of the same numbers.
    loaded = load_sharded(tmp_path, DeviceMesh(range(3), (1, 3)))
    assert str(loaded["w"].layout) == "[S10,R] of [5, 7] int64 on 1x3"
    assert loaded["w"].to_local(2).tolist() == [[28, 29, 30, 31, 32, 33, 34]]


def test_axes_are_found_by_name_where_both_meshes_have_names(tmp_path):
    mesh = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
    save_sharded({"w": DTensor(torch.arange(12), mesh, "[S(tp)]")}, tmp_path)
    turned = DeviceMesh(range(4), (4, 1), axis_names=("tp", "dp"))
    assert str(load_sharded(tmp_path, turned)["w"].layout.spec) == "[S0]"
    unnamed = DeviceMesh(range(6), (2, 3))
    assert str(load_sharded(tmp_path, unnamed)["w"].layout.spec) == "[S1]"
    other = DeviceMesh(range(4), (4, 1), axis_names=("tensor", "data"))
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'w' was saved as \[S1\] on mesh dp=2,tp=3: .* no axis named 'tp'.* a rule",
    ):
        load_sharded(tmp_path, other)
    assert load_sharded(tmp_path, other, {"w": "[S(tensor)]"})["w"].to_local(1).tolist() == [
        3,
        4,
        5,
    ]


def test_specs_that_do_not_fit(tmp_path):
    save_sharded(
        {"w": DTensor(torch.ones(4, 4), DeviceMesh(range(4), (2, 2)), "[S0,S1]")}, tmp_path
    )
    line = DeviceMesh(range(2), (2,))
    for mesh, specs, problem in [
        (line, None, r"tensor 'w' was saved as \[S0,S1\] on mesh 2x2: .* axis 1 is out of range"),
        (line, {"x*": "[S0,R]"}, "rule 'x\\*' matches no tensor"),
        (line, {"w": "[S0]"}, "rule 'w' has spec"),
        (line, {"w": "[S0,R", "*": "[R,R]"}, "expected"),
        (line, {"w": "[S1,R]"}, "axis 1 is out of range"),
        (line, {"w": "[R,R|P0]"}, "has pending reductions"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            load_sharded(tmp_path, mesh, specs)


def test_shards_of_equal_boxes_share_no_memory(tmp_path):
    save_sharded({"w": torch.zeros(3)}, tmp_path)
    loaded = load_sharded(tmp_path, DeviceMesh(range(2), (2,)))["w"]
    loaded.shards[0] += 1
    assert loaded.shards[1].tolist() == [0.0] * 3


def test_a_communicator_brings_its_mesh(tmp_path):
    save_sharded({"w": torch.arange(3)}, tmp_path)
    mesh = DeviceMesh([8, 6], (2,))
    communicator = SimulatedCommunicator(mesh)
    loaded = load_sharded(tmp_path, rules={"w": "[S0]"}, communicator=communicator)["w"]
    assert loaded.communicator is communicator
    assert {rank: shard.tolist() for rank, shard in loaded.shards.items()} == {8: [0, 1], 6: [2]}


def test_a_pending_mean_is_finished_and_cut_anew(tmp_path):
    values = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    made = handmade({"p": ("[S0,R|Pavg1]", {(i,): values[i] for i in range(3)})})
    ckpt = made.write(tmp_path / "ckpt")
    loaded = load_sharded(ckpt, DeviceMesh(range(2), (2,)), {"p": "[R,S0]"})["p"]
    assert not loaded.layout.spec.partials
    np.testing.assert_allclose(loaded.to_global().numpy(), values.mean(0), rtol=1e-6)
    assert str(load_sharded(ckpt)["p"].layout.spec) == "[S0,R]"


def test_handmade_checkpoints_load_whole(tmp_path):
    loaded = load_sharded(handmade(sample()).write(tmp_path / "ckpt"))
    for name, (spec, array) in sample().items():
        assert str(loaded[name].layout.spec) == spec
        assert torch.equal(loaded[name].to_global(), torch.from_numpy(array))


@pytest.mark.parametrize("form", ["own", "dcp", "hub", "whole.pt", "whole.safetensors"])
def test_a_rank_reads_no_more_than_its_part_from_any_form(tmp_path, monkeypatch, form):
    value = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
    mesh = DeviceMesh(range(4), (4,))
    save_sharded({"w": DTensor(value, mesh, "[S0,R]")}, tmp_path / "own")
    reshard(
        tmp_path / "own", tmp_path / "dcp", device_mesh=mesh, rules={"w": "[S0,R]"}, format="dcp"
    )
    merge(tmp_path / "own", tmp_path / "hub", format="huggingface")
    merge(tmp_path / "own", tmp_path / "whole.pt")
    merge(tmp_path / "own", tmp_path / "whole.safetensors")
    read = 0
    real = os.preadv

    def counting(fd, buffers, offset):
        nonlocal read
        count = real(fd, buffers, offset)
        read += count
        return count

    # Counts what is asked of the system; the reading itself is real.
    monkeypatch.setattr(os, "preadv", counting)
    # One device of a mesh of eight, in this process: it takes one row in eight, or a column.
    for spec, least in (("[S0,R]", value.nbytes // 8), ("[R,S0]", value.nbytes // 8)):
        read = 0
        one = DeviceMesh(range(8), (8,))
        here = SimulatedCommunicator(one)
        source = open_checkpoint(tmp_path / form)
        box = Layout(one, spec, value.shape, value.dtype).box(3)
        out = np.empty(least, np.uint8)
        with OpenFiles() as files:
            read_box_into(source.tensor("w"), box, out.data, files, Buffers())
        assert least <= read <= least + 12_000
        loaded = load_sharded(source, one, {"w": spec}, communicator=here)["w"]
        assert out.tobytes() == loaded.to_local(3).numpy().tobytes()


def test_what_says_no_cut_is_whole_where_no_pattern_matches(tmp_path):
    state = {"up.weight": torch.arange(14.0).view(7, 2), "up.bias": torch.arange(7.0)}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    mesh = DeviceMesh(range(3), (3,))
    loaded = load_sharded(tmp_path / "m.safetensors", mesh, {"*.weight": "[S0,R]"})
    for name, spec in (("up.weight", "[S0,R]"), ("up.bias", "[R]")):
        assert str(loaded[name].layout.spec) == spec
        assert torch.equal(loaded[name].to_global(), state[name])
    # Without any pattern nobody has thought about it.
    with pytest.raises(CheckpointError, match=r"'up\.bias' was saved without a spec"):
        load_sharded(tmp_path / "m.safetensors", mesh)


def test_what_is_wanted_is_loaded_under_other_names(tmp_path):
    mesh = DeviceMesh(range(2), (2,))
    state = {
        "model": {
            "layers.0": DTensor(torch.arange(4), mesh, "[S0]"),
            "layers.1": DTensor(torch.arange(5), mesh, "[S0]"),
            "head": torch.ones(2),
        },
        "groups": [{"w": torch.zeros(1)}, {"w": torch.ones(1)}],
        "step": 7,
    }
    save_sharded(state, tmp_path)
    loaded = load_sharded(tmp_path, include=["model.*", "step"], exclude="*head")
    assert loaded.keys() == {"model", "step"}
    assert loaded["model"].keys() == {"layers.0", "layers.1"}
    assert loaded["step"] == 7
    loaded = load_sharded(tmp_path, exclude=["groups.0.*", "s*", "model.l*"])
    assert loaded["groups"][0] is None
    assert loaded["groups"][1]["w"].to_global().tolist() == [1.0]
    assert loaded.keys() == {"model", "groups"}
    loaded = load_sharded(
        tmp_path,
        rules={"blocks.*": "[R]"},
        include="model.layers.*",
        rename={"^model.layers": "blocks"},
    )
    assert list(loaded) == ["blocks.0", "blocks.1"]
    assert str(loaded["blocks.1"].layout.spec) == "[R]"
    assert loaded["blocks.1"].to_global().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match=r"pattern 'modle.*' matches nothing"):
        load_sharded(tmp_path, include="modle.*")
    with pytest.raises(CheckpointError, match="would both be named 'step'"):
        load_sharded(tmp_path, rename={"^model.head$": "step"})


def test_loading_into_tensors_that_are_there(tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    whole = torch.arange(35.0).view(5, 7)
    save_sharded(
        {"a": DTensor(whole, mesh, "[S0,S1]"), "b": whole[0], "c": whole[1], "n": [1, 2]}, tmp_path
    )
    other = DeviceMesh(range(3), (3,))
    nowhere = torch.full((5, 7), -1.0)
    column = torch.zeros(7, 2)
    state: dict[str, Any] = {
        "c": column[:, 1],
        "a": DTensor(nowhere, other, "[R,S0]"),
        "b": torch.zeros(7, requires_grad=True),
        "n": 0,
    }
    returned = load_sharded(tmp_path, into=state)
    assert list(returned) == ["c", "a", "b", "n"]
    assert all(returned[name] is state[name] for name in "abc")
    assert returned["n"] == [1, 2]
    assert torch.equal(state["a"].to_global(), whole)
    assert torch.equal(state["b"], whole[0])
    assert torch.equal(column, torch.stack([torch.zeros(7), whole[1]], 1))

    wrongs: list[tuple[dict[str, Any], str]] = [
        (
            {"a": torch.zeros(5, 6)},
            r"tensor 'a' is \[5, 6\] float32, but the checkpoint has \[5, 7",
        ),
        ({"a": torch.zeros(5, 7).double()}, r"\[5, 7\] float64, but the checkpoint has .* float32"),
        ({"d": torch.zeros(5)}, "has no tensor 'd'; remove it"),
        ({"m": 5}, "has no value 'm'; remove it"),
        (
            {"b": DTensor.from_shards({0: whole[0], 1: whole[0]}, pending())},
            r"spec \[R\|P0\] has pending reductions, but a loaded tensor has none",
        ),
    ]
    for wrong, problem in wrongs:
        with pytest.raises(CheckpointError, match=problem):
            load_sharded(tmp_path, into=wrong)
    with pytest.raises(LayoutError, match="either a state dict to load into, or a mesh and rules"):
        load_sharded(tmp_path, mesh, into=state)
    # What is excluded stays, and what is named otherwise is found.
    kept: dict[str, Any] = {"x": torch.zeros(7), "d": torch.zeros(5), "m": 5}
    returned = load_sharded(
        tmp_path, into=kept, rename={"^b$": "x"}, exclude=["a", "n"], include=["[abcn]"]
    )
    assert kept["x"].tolist() == whole[0].tolist()
    assert kept["d"].tolist() == [0.0] * 5


def pending():
    return Layout(DeviceMesh(range(2), (2,)), "[R|P0]", (7,), "float32")


def test_progress_counts_every_byte_once(tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    tensors = {"w": torch.arange(35.0).view(5, 7), "r": torch.arange(6), "e": torch.zeros(0)}
    state = {"w": DTensor(tensors["w"], mesh, "[S1,S0]"), "n": 3}
    state |= {name: DTensor(tensors[name], mesh, "[R]") for name in ("r", "e")}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def shown(act):
        calls: list[tuple[int, int]] = []
        act(lambda *call: calls.append(call))
        done, totals = [call[0] for call in calls], {call[1] for call in calls}
        assert done == sorted(done)
        assert totals == {done[-1]}
        return done[-1]

    saved = tmp_path / "saved"
    written = shown(lambda each: save_sharded(state, saved, progress=each))
    assert written == sum(file.stat().st_size for file in saved.glob("*.safetensors")) > num_bytes
    other = tmp_path / "other"
    again = shown(lambda each: save_sharded(state, other, progress=each, asynchronous=True).wait())
    assert again == written
    assert shown(lambda each: load_sharded(saved, progress=each)) == num_bytes
    assert shown(lambda each: load_sharded(saved, into=state, progress=each)) == num_bytes

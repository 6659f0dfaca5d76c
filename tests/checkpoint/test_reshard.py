"""Any mesh to any other, on disk."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardspec import DeviceMesh, DTensor, Layout, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.formats.cut_rules import cut_rules
from shardspec.cli.checkpoint_options import read_rules
from shardspec.errors import CheckpointError, LayoutError, OutputExistsError
from tests.checkpoint.handmade import all_specs
from tests.checkpoint.writers.states import check_same, save, state


def test_meshes_that_grow_shrink_and_share_no_divisor(tmp_path):
    whole = {"w": torch.arange(143.0).view(11, 13), "b": torch.arange(7), "s": torch.tensor(3)}
    meshes = [(1,), (3,), (2, 2), (7,), (2, 3)]
    for count, (a, b) in enumerate(product(meshes, meshes)):
        first = DeviceMesh(range(torch.tensor(a).prod()), a)
        second = DeviceMesh(range(torch.tensor(b).prod()), b)
        rules = {"w": "[S1,S0]" if len(b) == 2 else "[S0,R]", "b": "[S0]"}
        source = save(tmp_path / f"{count}", whole, first, "S01" if len(a) == 2 else "S0")
        reshard(source, tmp_path / f"{count}-cut", device_mesh=second, rules=rules)
        # Every device holds what its layout says, in a file of its own.
        loaded = load_sharded(tmp_path / f"{count}-cut")
        for name, value in whole.items():
            tensor = loaded[name]
            assert tensor.layout == Layout(second, rules.get(name, "[]"), value.shape, value.dtype)
            assert tensor.to_global().equal(value)
        assert verify_checkpoint(tmp_path / f"{count}-cut").flaws == ()


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_cut_of_a_small_mesh_to_every_other(tmp_path, every):
    mesh = DeviceMesh(range(6), (2, 3))
    value = torch.arange(35, dtype=torch.int16).view(7, 5)
    specs = [str(spec) for spec in all_specs(2, 2)]
    assert len(specs) == 11
    for place, spec in enumerate(specs):
        save_sharded({"w": DTensor(value, mesh, spec)}, tmp_path / f"{place}")
    expected = {p: [s.tolist() for s in load_sharded(tmp_path / f"{p}")["w"].shards.values()]
                for p in range(len(specs))}  # fmt: skip
    for a, b in list(product(range(len(specs)), repeat=2))[::every]:
        out = tmp_path / f"{a}-{b}"
        reshard(tmp_path / f"{a}", out, device_mesh=mesh, rules={"w": specs[b]})
        found = load_sharded(out)["w"]
        assert str(found.sharding_spec) == specs[b]
        assert [s.tolist() for s in found.shards.values()] == expected[b]


def test_resharding_keeps_every_dtype(tmp_path):
    source = save(tmp_path / "ckpt", state())
    mesh = DeviceMesh(range(4), (4,))
    reshard(source, tmp_path / "cut", device_mesh=mesh, rules={"of.*": "[R,S0]"})
    merge(tmp_path / "cut", tmp_path / "out.safetensors")
    check_same(load_file(tmp_path / "out.safetensors"), state())


def test_pending_sums_are_reduced(tmp_path):
    mesh = DeviceMesh(range(6), (2, 3))
    shards = {rank: torch.full((4, 3), float(rank)) for rank in range(6)}
    tensor = DTensor.from_shards(shards, Layout(mesh, "[R,R|P0,P1]", (4, 3), torch.float32))
    save_sharded({"w": tensor}, tmp_path / "ckpt")
    reshard(tmp_path / "ckpt", tmp_path / "cut", device_mesh=mesh, rules={"w": "[S0,S1]"})
    assert load_sharded(tmp_path / "cut")["w"].to_global().tolist() == [[15.0] * 3] * 4


def test_like_another_checkpoint(tmp_path):
    whole = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5)}
    save_file(whole, tmp_path / "model.safetensors")
    like = save(tmp_path / "like", whole, DeviceMesh([5, 3, 1, 0], (2, 2)))
    reshard(tmp_path / "model.safetensors", tmp_path / "out", like=like)
    info = json.loads((tmp_path / "out" / "sharding_info.json").read_text())
    wanted = json.loads((like / "sharding_info.json").read_text())
    assert info["mesh"] == wanted["mesh"]
    assert info["tensors"] == wanted["tensors"]
    with pytest.raises(CheckpointError, match="its mesh and specs; give device_mesh="):
        reshard(like, tmp_path / "out2", like=tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor 'x\.a' with a spec"):
        reshard(like, tmp_path / "out2", like=like, rename=[("^", "x.")])
    with pytest.raises(CheckpointError, match="either a checkpoint to shard like, or a mesh"):
        reshard(like, tmp_path / "out2", like=like, device_mesh=DeviceMesh(range(2), (2,)))
    with pytest.raises(CheckpointError, match="give the mesh to shard for"):
        reshard(like, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_rules_that_do_not_fit(tmp_path):
    ckpt = save(tmp_path / "ckpt", {"w": torch.ones(4, 3), "b": torch.ones(4)})
    mesh = DeviceMesh(range(4), (2, 2))
    for rules, problem in [
        ({"v": "[S0]"}, "rule 'v' matches no tensor"),
        ({"*": "[S0]"}, "tensor 'w' has 2"),
        ({"w": "[S0,R]", "w*": "[R,R]"}, r"rule 'w' has no effect, .* 'w\*' matches every"),
        ({"w": "[S2,R]"}, "tensor 'w': .*axis 2"),
        ({"w": "[S0,R|P1]"}, "has pending reductions"),
    ]:
        with pytest.raises(LayoutError, match=problem):
            reshard(ckpt, tmp_path / "out", device_mesh=mesh, rules=rules)
        assert not (tmp_path / "out").exists()


def test_files_of_rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text('"*.up" = "[S0,R]"\nplain = "[R]"\n')
    assert read_rules(path) == {"*.up": "[S0,R]", "plain": "[R]"}
    # As some editors begin what they save.
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_rules(path) == {"*.up": "[S0,R]", "plain": "[R]"}
    for text, problem in [
        ("a = 1", "the rule of 'a' is 1, not a spec in quotes"),
        ("a.b = '[R]'", "the rule of 'a' is {'b': '\\[R\\]'}, not a spec"),
        ("a = [", "is not TOML"),
    ]:
        path.write_text(text)
        with pytest.raises(CheckpointError, match=problem):
            read_rules(path)
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not TOML"):
        read_rules(path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_rules(tmp_path / "none")


def test_an_output_that_exists(tmp_path):
    ckpt = save(tmp_path / "ckpt", {"w": torch.ones(4)})
    mesh = DeviceMesh(range(2), (2,))
    reshard(ckpt, tmp_path / "out", device_mesh=mesh, rules={"w": "[S0]"})
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(OutputExistsError, match="out: exists"):
        reshard(ckpt, tmp_path / "out", device_mesh=mesh)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    reshard(ckpt, tmp_path / "out", device_mesh=mesh, overwrite=True)
    assert str(load_sharded(tmp_path / "out")["w"].sharding_spec) == "[R]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"contains 'notes\.txt', not part of a checkpoint"):
        reshard(ckpt, tmp_path / "out", device_mesh=mesh, overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert len(list((tmp_path / "out").iterdir())) == 3
    for bad in (ckpt, tmp_path):
        with pytest.raises(CheckpointError, match="contains the checkpoint itself"):
            reshard(ckpt, bad, device_mesh=mesh, overwrite=True)
    assert load_sharded(ckpt)["w"].to_global().tolist() == [1] * 4


@pytest.mark.parametrize(
    "text", [f"w = {'9' * 5000}", "w = " + "[" * 5000, '"w" = "[S0]"\n' * 90_000]
)
@pytest.mark.parametrize("read", [read_rules, cut_rules])
def test_rules_that_are_too_much(tmp_path, read, text):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("read", [read_rules, cut_rules])
def test_rules_without_an_end(read):
    with pytest.raises(CheckpointError, match="/dev/zero: is not a regular file"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize("read", [read_rules, cut_rules])
def test_rules_that_are_too_long(tmp_path, read):
    path = tmp_path / "rules.toml"
    path.write_text("#" * (1 << 20) + "#")
    with pytest.raises(CheckpointError, match="has more than 1,048,576 bytes"):
        read(path)

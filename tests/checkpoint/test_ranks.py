"""Saving and loading by real processes over gloo; every failure reaches every rank."""

import os
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout, NameMap, load_sharded, merge, save_sharded
from shardspec.checkpoint.formats.native import read_info
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.comm.consensus import agree
from shardspec.comm.process_group import communicator_of as of
from shardspec.errors import CheckpointError, OutputExistsError
from tests.dist.processes import run_ranks

IDS, SHAPE = [3, 1, 0, 2], (2, 2)


def whole():
    return {
        "w": torch.arange(35.0).view(5, 7).bfloat16(),
        "b": torch.arange(3),
        "r": torch.arange(6.0).view(2, 3),
        "f": torch.arange(18).view(6, 3),
    }


SPECS = {"w": "[S0,S1]", "b": "[S10]", "r": "[R,R]", "f": "[S0{4,2/1},R]"}


def state(mesh):
    cut = {name: DTensor(tensor, mesh, SPECS[name]) for name, tensor in whole().items()}
    rank = dist.get_rank()
    addend = torch.full((4,), float(mesh.coordinates(rank)[1] + 1))
    pending = DTensor.from_shards({rank: addend}, Layout(mesh, "[R|P1]", (4,), "float32"))
    return {**cut, "p": pending, "step": torch.tensor(7)}


def outcome(act):
    """Return the error that a rank got, as text, or None."""
    try:
        act()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return None


def on_every_rank(mesh, act):
    """Run on each rank, and return what all of them got."""
    found: list[str | None] = [None] * mesh.size()
    dist.all_gather_object(found, outcome(act))
    return found


def save_and_load(directory, mesh):
    ckpt = directory / "ckpt"
    save_sharded(state(mesh), ckpt)
    loaded = load_sharded(ckpt)
    for name, tensor in whole().items():
        assert loaded[name].layout == Layout(mesh, SPECS[name], tensor.shape, tensor.dtype)
        assert torch.equal(loaded[name].to_global(), tensor)
    assert loaded["p"].to_global().tolist() == [3.0] * 4
    line = DeviceMesh(range(4), (4,))
    for name, tensor in load_sharded(ckpt, line, {"[wrf]": "[R,S0]", "b": "[S0]"}).items():
        assert list(tensor.shards) == [dist.get_rank()]
        if name in whole():
            assert torch.equal(tensor.to_global(), whole()[name])
    turned = NameMap(((("f", "x y"), ("g", "y x")),))
    found = load_sharded(ckpt, line, {"g": "[R,S0{4,2}]"}, names=turned, include="f")
    assert torch.equal(found["g"].to_global(), whole()["f"].T)
    # Two of the four ranks load; the others hold nothing.
    pair = DeviceMesh([2, 1], (2,))
    part = load_sharded(ckpt, pair, {"w": "[S0,R]", "b": "[R]"})["w"]
    assert list(part.shards) == ([dist.get_rank()] if dist.get_rank() in pair else [])


def existing(directory, mesh):
    save_sharded(state(mesh), directory / "ckpt")
    found = on_every_rank(mesh, lambda: save_sharded(state(mesh), directory / "ckpt"))
    assert len(set(found)) == 1
    assert str(found[0]).startswith(f"{OutputExistsError.__name__}: rank 3: ")
    save_sharded(state(mesh) | {"step": torch.tensor(8)}, directory / "ckpt", overwrite=True)
    assert load_sharded(directory / "ckpt")["step"].to_global() == 8
    assert len(list((directory / "ckpt").iterdir())) == 5


def disagreeing(directory, mesh):
    rank = dist.get_rank()
    mine = state(mesh)
    if rank == 2:
        mine["step"] = torch.tensor(7.0)
    found = on_every_rank(mesh, lambda: save_sharded(mine, directory / "ckpt"))
    assert (
        found
        == [
            "CheckpointError: ranks differ in tensor 'step': rank 3 has [] of [] int64 but "
            "rank 2 has [] of [] float32; save the same on every rank"
        ]
        * 4
    )
    missing = state(mesh) | ({} if rank == 0 else {"extra": torch.ones(2)})
    found = on_every_rank(mesh, lambda: save_sharded(missing, directory / "ckpt"))
    assert len(set(found)) == 1
    assert "tensor 'extra': rank 3 has [R] of [2] float32 but rank 0 has no such" in str(found[0])
    counted = state(mesh) | {"count": {"seen": rank}}
    found = on_every_rank(mesh, lambda: save_sharded(counted, directory / "ckpt"))
    assert len(set(found)) == 1
    assert "value 'count.seen': rank 3 has 3 at ('count', 'seen') but rank 1" in str(found[0])
    other = DeviceMesh([3, 1, 0, 2], (4,)) if rank == 2 else mesh
    cut = {"w": DTensor(whole()["w"], other, "[S0,R]", src_rank=None, communicator=of(other))}
    found = on_every_rank(mesh, lambda: save_sharded(cut, directory / "ckpt"))
    assert len(set(found)) == 1
    assert "the mesh: rank 3 has 2x2 of ids (3, 1, 0, 2) but rank 2 has 4 of ids" in str(found[0])
    found = on_every_rank(
        mesh,
        lambda: save_sharded(
            state(mesh), directory / "ckpt", replicas="first" if rank == 1 else "equal"
        ),
    )
    assert len(set(found)) == 1
    assert "replicas: rank 3 has 'equal' but rank 1 has 'first'" in str(found[0])
    digests = directory / "digests.json" if rank == 1 else None
    part = {"w": state(mesh)["w"]}
    found = on_every_rank(mesh, lambda: save_sharded(part, directory / "ckpt", digests=digests))
    assert len(set(found)) == 1
    assert "option digests: rank 3 has None but rank 1 has" in str(found[0])
    bad = state(mesh) | ({"x": {1}} if rank == 1 else {"x": torch.ones(1)})
    found = on_every_rank(mesh, lambda: save_sharded(bad, directory / "ckpt"))
    assert len(set(found)) == 1
    assert str(found[0]).startswith("CheckpointError: rank 1: value 'x': sharding_info.json cannot")
    assert not (directory / "ckpt").exists()


def one_rank_makes_a_mistake(_, mesh):
    """What nobody foresaw on one rank does not keep the others waiting."""

    def act():
        if dist.get_rank() == 1:
            raise KeyError("x")
        return 5

    try:
        agree(of(mesh), act)
    except (KeyError, CheckpointError) as error:
        found = f"{type(error).__name__}: {error}"
    own, others = "KeyError: 'x'", "CheckpointError: rank 1: KeyError: 'x'"
    assert found == (own if dist.get_rank() == 1 else others)


def replicas_that_differ(directory, mesh):
    rank = dist.get_rank()
    ckpt = directory / "ckpt"
    plain = {"x": torch.full((4,), float(rank)), "y": torch.ones(2)}
    found = on_every_rank(mesh, lambda: save_sharded(plain, ckpt))
    assert len(set(found)) == 1
    assert "tensor 'x': its copies of box [0:4] differ: one is on rank 0, another on rank 1, " in (
        str(found[0])
    )
    assert "another on rank 2, and more" in str(found[0])
    assert 'replicas="first"' in str(found[0])
    # Devices 3 and 0 have coordinate 0 along the second axis; device 2 holds another value.
    column = torch.zeros(3) + (rank == 2)
    part = DTensor.from_local(column, mesh, "[S1]")
    found = on_every_rank(mesh, lambda: save_sharded({"y": part, "z": part}, ckpt))
    assert len(set(found)) == 1
    assert (
        "tensor 'y': its copies of box [3:6] differ: one is on rank 1, another on rank 2 "
        "(1 other tensor too)"
    ) in str(found[0])
    assert not ckpt.exists()
    dist.barrier()
    # Those of the mesh's first device count, where that is meant: here device 3.
    state = {"x": DTensor.from_local(plain["x"], mesh, "[R]"), "y": part, "seed": rank}
    save_sharded(state, ckpt, replicas="first")
    loaded = load_sharded(ckpt)
    assert loaded["x"].to_global().tolist() == [3.0] * 4
    assert loaded["y"].to_global().tolist() == [0.0] * 6
    assert loaded["seed"] == 3


def torch_states(directory, mesh):
    """What torch makes is saved as it is, and comes back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model[0], torch_mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(model, mesh=torch_mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 6)).sum().backward()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}
    save_sharded(state, directory / "first")
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 4}
    save_sharded(state, directory / "second")

    loaded = load_sharded(directory / "first")
    assert loaded["epoch"] == 3
    for name, value in before.items():
        assert torch.equal(loaded["model"][name].to_global(), value)
    group = loaded["optim"]["param_groups"][0]
    assert (group["lr"], group["betas"], group["params"]) == (0.25, (0.9, 0.999), [0, 1, 2, 3])

    # Into the tensors that are there: a model that was trained goes back to where it was.
    empty: dict[str, Any] = {"model": model.state_dict(), "epoch": 0}
    places = [t.to_local().data_ptr() for t in empty["model"].values()]
    returned = load_sharded(directory / "first", into=empty)
    assert returned["epoch"] == 3
    assert [t.to_local().data_ptr() for t in returned["model"].values()] == places
    for name, value in model.state_dict().items():
        assert isinstance(value, TorchDTensor)
        assert torch.equal(value.full_tensor(), before[name])
    again = load_sharded(directory / "second", into=state)
    optimizer.load_state_dict(again["optim"])
    assert optimizer.state_dict()["state"][0]["step"] == 1

    # One mesh for all, or slices of it.
    line = init_device_mesh("cpu", (4,))
    rows = distribute_tensor(torch.arange(8.0), line, [Shard(0)])
    save_sharded({"rows": rows}, directory / "third")
    assert load_sharded(directory / "third")["rows"].to_global().tolist() == list(range(8))
    found = on_every_rank(mesh, lambda: save_sharded({**state, "rows": rows}, directory / "no"))
    assert "convert it to one mesh first" in str(found[0])


def one_rank_cannot_write(directory, mesh):
    import resource

    save_sharded(state(mesh), directory / "ckpt")
    dist.barrier()
    before = sorted(path.name for path in (directory / "ckpt").iterdir())
    unlimited = resource.RLIM_INFINITY
    dist.barrier()
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited))
    found = on_every_rank(
        mesh, lambda: save_sharded(state(mesh), directory / "ckpt", overwrite=True)
    )
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    assert len(set(found)) == 1
    assert str(found[0]).startswith(f"CheckpointError: rank 2: {directory}/ckpt/shard-00002-")
    assert "cannot be written: File too large" in str(found[0])
    dist.barrier()
    # The older save is whole, and nothing of the newer one is left.
    assert sorted(path.name for path in (directory / "ckpt").iterdir()) == before
    assert torch.equal(load_sharded(directory / "ckpt")["w"].to_global(), whole()["w"])


def one_rank_sees_another_directory(directory, mesh):
    mine = directory / ("elsewhere" if dist.get_rank() == 2 else "ckpt")
    found = on_every_rank(mesh, lambda: save_sharded(state(mesh), mine))
    assert len(set(found)) == 1
    assert "rank 2 has written this file, but the first rank of the mesh does not" in str(found[0])
    dist.barrier()
    assert list(mine.iterdir()) == []


def one_rank_cannot_read(directory, mesh):
    ckpt = directory / "ckpt"
    save_sharded(state(mesh), ckpt)
    mine = directory / "no" if dist.get_rank() == 0 else ckpt
    found = on_every_rank(mesh, lambda: load_sharded(mine))
    assert len(set(found)) == 1
    assert str(found[0]).startswith("CheckpointError: rank 0: ")
    assert "no: there is no such checkpoint" in str(found[0])


SCENES = [
    save_and_load,
    existing,
    disagreeing,
    one_rank_makes_a_mistake,
    replicas_that_differ,
    torch_states,
    one_rank_cannot_write,
    one_rank_sees_another_directory,
    one_rank_cannot_read,
]


def play(rank, directory):
    torch.set_num_threads(1)
    mesh = DeviceMesh(IDS, SHAPE)
    for scene in SCENES:
        place = directory / scene.__name__
        place.mkdir(exist_ok=True)
        scene(place, mesh)
        dist.barrier()
        (place / f"done-{rank}").touch()


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(4, directory, play, directory)
    return directory


@pytest.mark.dist
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_every_rank_came_to_the_end(played, scene):
    done = [name for name in os.listdir(played / scene.__name__) if name.startswith("done-")]
    assert sorted(done) == [f"done-{rank}" for rank in range(4)]


@pytest.mark.dist
def test_what_ranks_saved_merges_whole(played, tmp_path):
    ckpt = played / "save_and_load" / "ckpt"
    assert sorted(file.rank for file in read_info(LocalPath(ckpt)).files) == [0, 1, 2, 3]
    merge(ckpt, tmp_path / "out")
    merged = safetensors.torch.load_file(tmp_path / "out")
    expected = whole() | {"p": torch.full((4,), 3.0), "step": torch.tensor(7)}
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor)

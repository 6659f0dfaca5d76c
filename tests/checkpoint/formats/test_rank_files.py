"""Files of torch.save, one per rank: written by torch on gloo ranks, and then spoiled."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardspec import load_sharded, merge, reshard
from shardspec.checkpoint.catalog import OpaqueValue, replica_keys
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    read_whole,
    refused,
)
from tests.dist.processes import run_ranks

NAME = "model_world_size_4_rank_{}.pt"
MODEL = {
    "rows": torch.arange(35, dtype=torch.bfloat16).view(7, 5),
    "columns": torch.randn(3, 7, generator=torch.Generator().manual_seed(0)),
    "grid": torch.arange(35, dtype=torch.int64).view(5, 7),
    "turned": torch.arange(35.0).view(7, 5),
    "nested": torch.arange(24.0).view(8, 3),
    "fused": torch.arange(40.0).view(8, 5),
    "stacked": torch.arange(96).view(4, 24),
    "few": torch.arange(3.0),
    "copied": torch.arange(11) % 3 == 0,
    "slice": torch.arange(5.0),
    "scalar": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
}
SQUARE = {
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(1)),
    "grid": (Shard(0), Shard(1)),
    "turned": (Shard(1), Shard(0)),
    # FSDP2 around tensor parallel: the axis of the latter is the major one.
    "nested": (_StridedShard(0, split_factor=2), Shard(0)),
    # Gate and up stacked in one dim, each sharded by itself, as transformers shards experts.
    "fused": (Shard(1), _StridedShard(0, split_factor=2)),
    "stacked": (_StridedShard(1, split_factor=3), Shard(0)),
    "few": (Shard(0), Shard(0)),
    "copied": (Replicate(), Replicate()),
    "scalar": (Replicate(), Replicate()),
    "none": (Shard(1), Shard(0)),
}
PLAIN = {"buffer": torch.arange(6.0).view(2, 3), "step": torch.tensor(3)}


def state_of(mesh):
    state = {name: distribute_tensor(MODEL[name], mesh, how) for name, how in SQUARE.items()}
    # As FSDP leaves what tensor parallel does not know: on the mesh of one axis, twice.
    state["slice"] = distribute_tensor(MODEL["slice"], mesh["dp"], (Shard(0),))
    return {**state, **PLAIN}


def train(mesh):
    """Two steps of FSDP2 around tensor parallel, with Adam, on sizes that do not divide."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 5), nn.LayerNorm(5))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        adam.zero_grad()
        model(torch.ones(3, 7)).square().sum().backward()
        adam.step()
    return {"model": model.state_dict(), "optimizer": adam.state_dict()}


def flat(state, prefix=""):
    """Return the tensors of nested dicts, whole, by another way than the library's."""
    whole = {}
    for key, value in state.items():
        if isinstance(value, dict):
            whole.update(flat(value, f"{prefix}{key}."))
        elif isinstance(value, DTensor):
            whole[f"{prefix}{key}"] = value.full_tensor().detach().clone()
        elif isinstance(value, torch.Tensor):
            whole[f"{prefix}{key}"] = value
    return whole


def save(rank, directory):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("verl", "trained", "pending"):
        (directory / name).mkdir(exist_ok=True)
    placed = state_of(mesh)
    torch.save(placed, directory / "verl" / NAME.format(rank))
    if rank == 3:
        for name, (local, how, size) in STRAYS.items():
            shape, stride = torch.Size(size), (size[1], 1)
            stray = DTensor.from_local(local.clone(), mesh, how, shape=shape, stride=stride)
            torch.save({**placed, "grid": stray}, directory / "verl" / f"{name}.stray")
    state = train(mesh)
    torch.save(state, directory / "trained" / f"rank-{rank}.pt")
    whole = flat(state)
    # Every rank holds an addend, and their sum is 0 + 1 + 2 + 3 for all elements.
    addend = DTensor.from_local(torch.full((3,), float(rank)), mesh, (Partial(), Partial()))
    torch.save({"p": addend}, directory / "pending" / f"rank_{rank}.pth")
    if rank == 0:
        torch.save(whole, directory / "whole.pt")


# What rank 3 may say of `grid` against the others: its part, its placements, the global shape.
GRID = MODEL["grid"][3:, 4:].clone()
STRAYS = {
    "dtype": (GRID.int(), (Shard(0), Shard(1)), (5, 7)),
    "placements": (GRID, (Shard(1), Shard(0)), (5, 7)),
    "shape": (GRID, (Shard(0), Shard(1)), (5, 8)),
    "part": (GRID[1:], (Shard(0), Shard(1)), (5, 7)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rank_files")
    run_ranks(4, directory, save, directory)
    return directory


@pytest.fixture
def ckpt(saved, tmp_path):
    return shutil.copytree(saved / "verl", tmp_path / "ckpt")


def test_dtensors_of_every_placement_are_read_whole(saved, tmp_path):
    ckpt = saved / "verl"
    due = {**MODEL, **PLAIN}
    assert_same(read_whole(ckpt), due)
    assert_same(read_whole(ckpt / NAME.format(3)), due)
    report = verify_checkpoint(ckpt)
    assert report.digested_bytes == report.num_bytes > 0
    merge(ckpt, tmp_path / "out.safetensors")
    assert_same(read_whole(tmp_path / "out.safetensors"), due)


def test_what_is_said_of_it(saved):
    source = open_checkpoint(saved / "verl")
    assert source.format == "torch files per rank"
    assert [path.name for path in source.files] == [NAME.format(rank) for rank in range(4)]
    assert source.mesh is not None
    assert (source.mesh.ids, source.mesh.shape) == ((0, 1, 2, 3), (2, 2))
    assert source.mesh.axis_names == ("dp", "tp")
    specs = {name: str(source.tensor(name).spec) for name in source.names}
    assert specs["nested"] == "[S10,R]"
    assert specs["fused"] == "[S1{4,4},S0]"
    assert specs["stacked"] == "[S1,S0{8,8,8}]"
    assert specs["turned"] == "[S1,S0]"
    # On a slice of the mesh, whose axes have other numbers; and plain, but whole on all ranks.
    assert (specs["slice"], specs["buffer"]) == ("[S0]", "[R,R]")
    assert [box.rank for box in source.tensor("few").boxes] == [0, 1, 2]


def test_a_model_trained_with_fsdp_and_tensor_parallel(saved, tmp_path):
    whole = torch.load(saved / "whole.pt")
    ckpt = saved / "trained"
    assert "optimizer.state.0.exp_avg" in whole
    assert_same(read_whole(ckpt), whole)
    groups = open_checkpoint(ckpt).extras["optimizer.param_groups"]
    assert isinstance(groups, list)
    assert groups[0]["lr"] == 0.1
    assert_merged_without_torch(ckpt, tmp_path / "out.safetensors")
    assert_same(read_whole(tmp_path / "out.safetensors"), whole)


def test_others_are_cut_like_it_and_it_is_loaded_as_it_was(saved, tmp_path):
    ckpt = saved / "verl"
    merge(ckpt, tmp_path / "whole.safetensors")
    reshard(tmp_path / "whole.safetensors", tmp_path / "cut", like=ckpt)
    assert not list(diff_checkpoints(tmp_path / "cut", ckpt))
    loaded = load_sharded(ckpt)
    for source in (open_checkpoint(ckpt), open_checkpoint(tmp_path / "cut")):
        for name in source.names:
            assert str(source.tensor(name).spec) == str(loaded[name].layout.spec)
            for stored in source.tensor(name).boxes:
                assert (stored.box, ()) in replica_keys(loaded[name].layout, stored.rank)


def test_pending_sums_are_finished(saved):
    assert_same(read_whole(saved / "pending"), {"p": torch.full((3,), 6.0)})


@pytest.mark.parametrize("lost", range(1, 15))
@pytest.mark.parametrize("said", [True, False])
def test_every_set_of_missing_ranks_is_named(ckpt, lost, said):
    for rank in range(4):
        path = ckpt / NAME.format(rank)
        if lost >> rank & 1:
            path.unlink()
        elif not said:
            path.rename(ckpt / f"rank_{rank}.pt")
    missing = [rank for rank in range(4) if lost >> rank & 1]
    ranks = ", ".join(map(str, missing))
    due = f"the files of ranks {ranks} of 4 are missing; restore them"
    if len(missing) == 1:
        due = f"the file of rank {ranks} of 4 is missing; restore it"
    assert refused(ckpt) == f"{ckpt}: rank files do not match: {due}"


def test_swapped_files_are_refused(ckpt):
    first, second = ckpt / NAME.format(1), ckpt / NAME.format(2)
    first.rename(ckpt / "x")
    second.rename(first)
    (ckpt / "x").rename(second)
    assert refused(ckpt) == (
        f"{first}: tensor 'columns' was saved by rank 2, not by rank 1 as the name of the file "
        "says; restore the name of the file"
    )


def test_a_copy_in_place_of_another_file(ckpt):
    shutil.copy(ckpt / NAME.format(0), ckpt / NAME.format(3))
    assert "was saved by rank 0, not by rank 3 as the name of the file says" in refused(ckpt)


@pytest.mark.parametrize(
    ("stray", "problem"),
    [
        (
            "dtype",
            "tensor 'grid' is [S0,S1] of [5, 7] int64 on dp=2,tp=2 in {0}, but [S0,S1] of [5, 7] "
            "int32 on dp=2,tp=2 in {3}; the files are of different saves",
        ),
        (
            "placements",
            "tensor 'grid' is [S0,S1] of [5, 7] int64 on dp=2,tp=2 in {0}, but [S1,S0] of [5, 7] "
            "int64 on dp=2,tp=2 in {3}; the files are of different saves",
        ),
        (
            "shape",
            "{3}: rank 3 has a part of shape [2, 3] of tensor 'grid', but by [S0,S1] of [5, 8] "
            "int64 on dp=2,tp=2 it should have [2, 4]; the file is inconsistent",
        ),
        (
            "part",
            "{3}: rank 3 has a part of shape [1, 3] of tensor 'grid', but by [S0,S1] of [5, 7] "
            "int64 on dp=2,tp=2 it should have [2, 3]; the file is inconsistent",
        ),
    ],
)
def test_a_rank_that_contradicts_the_others(ckpt, stray, problem):
    (ckpt / f"{stray}.stray").rename(ckpt / NAME.format(3))
    paths = [ckpt / NAME.format(rank) for rank in range(4)]
    assert refused(ckpt) == problem.format(*paths)


def test_one_file_too_many(ckpt):
    shutil.copy(ckpt / NAME.format(0), ckpt / NAME.format(4))
    assert refused(ckpt) == (
        f"{ckpt}: rank files do not match: {NAME.format(4)}: not of a rank from 0 to "
        "3, or of one that has two files; move away what is of another save"
    )


def test_two_files_of_one_rank(ckpt):
    shutil.copy(ckpt / NAME.format(0), ckpt / NAME.format("00"))
    assert refused(ckpt) == (
        f"{ckpt}: rank files do not match: {NAME.format(0)}, {NAME.format('00')}: not of a "
        "rank from 0 to 3, or of one that has two files; move away what is of another save"
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("model_world_size_2_rank_0.pt", "2 and 4 ranks"),
        ("model_rank_0.pt", "4 and an unknown number of ranks"),
    ],
)
def test_files_of_two_saves(ckpt, other, said):
    shutil.copy(ckpt / NAME.format(0), ckpt / other)
    assert f"are of saves by {said}" in refused(ckpt)


def test_other_families_are_listed_or_chosen(ckpt):
    for rank in range(4):
        shutil.copy(ckpt / NAME.format(rank), ckpt / f"optim_world_size_4_rank_{rank}.pt")
    assert open_checkpoint(ckpt).files[0].name == NAME.format(0)
    assert open_checkpoint(ckpt).extras == {
        "(optim_world_size_4_rank_0.pt)": OpaqueValue(
            "4 files of another family; name one to read it"
        )
    }
    chosen = open_checkpoint(ckpt / "optim_world_size_4_rank_1.pt")
    assert chosen.files[1].name == "optim_world_size_4_rank_1.pt"
    for rank in range(4):
        (ckpt / NAME.format(rank)).rename(ckpt / f"extra_rank{rank}.pt")
    assert refused(ckpt) == (
        f"{ckpt}: has rank files of several families (extra_rank0.pt, optim_world_size_4_rank_0"
        ".pt); instead of the directory, name one file of the family to read"
    )


def write(directory, *states):
    directory.mkdir()
    for rank, state in enumerate(states):
        torch.save(state, directory / f"rank{rank}.pt")
    return directory


def test_plain_tensors_are_whole_and_alike_on_all_ranks(tmp_path):
    w = torch.arange(6.0).view(2, 3)
    state = {"m": {"w": w, "t": w.T, "v": w[:, 1]}, "list": [w, {"x": w}], "lr": 0.5, "e": {}}
    ckpt = write(tmp_path / "ckpt", state, {**state, "lr": 0.25})
    due = {"m.w": w, "m.t": w.T, "m.v": w[:, 1], "list.0": w, "list.1.x": w}
    assert_same(read_whole(ckpt), due)
    source = open_checkpoint(ckpt)
    assert source.mesh is None
    assert source.extras == {"lr": {"rank 0": 0.5, "rank 1": 0.25}, "e": {}}
    assert [box.rank for box in source.tensor("m.w").boxes] == [0, 1]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (
            {"w": torch.tensor([1.0, 2.0])},
            "tensor 'w': ranks 0 and 1 claim different data for box [0:2], first at index [1], in "
            "{0} and {1}; keep the right one "
            "of the two if they should be equal, as plain tensors are on all ranks; if each rank "
            "has a part, save it as a DTensor, and what is its own under a name for each rank",
        ),
        ({}, "{1}: lacks tensor 'w', which {0} has; the files are of different saves"),
        (
            {"w": torch.ones(2), "x": torch.ones(1)},
            "{0}: lacks tensor 'x', which {1} has; the files are of different saves",
        ),
        (
            {"w": torch.ones(3)},
            "tensor 'w' is [R] of [2] float32 on 2 in {0}, but [R] of [3] float32 on 2 in {1}; the "
            "files are of different saves",
        ),
        (
            {"w": torch.ones(2, dtype=torch.int32)},
            "tensor 'w' is [R] of [2] float32 on 2 in {0}, but [R] of [2] int32 on 2 in {1}; the "
            "files are of different saves",
        ),
        ([torch.ones(2)], "{1}: contains a list, not a dict of tensors; save a state dict"),
        (
            {"w": torch.ones(2), "a": {"b": 1}, "a.b": 2},
            "{1}: two entries have the name 'a.b' once their dicts are joined with dots; rename "
            "one of them and save again",
        ),
    ],
)
def test_plain_files_that_contradict_each_other(tmp_path, other, problem):
    ckpt = write(tmp_path / "ckpt", {"w": torch.ones(2)}, other)
    assert refused(ckpt) == problem.format(ckpt / "rank0.pt", ckpt / "rank1.pt")


def test_a_dict_that_holds_itself(tmp_path):
    state: dict[str, object] = {"w": torch.ones(2)}
    state["again"] = state
    ckpt = write(tmp_path / "ckpt", state)
    assert refused(ckpt) == (
        f"{ckpt}/rank0.pt: its dicts nest more than 64 deep or repeat themselves without end; "
        "save a plain state dict"
    )


def test_flipped_bits_are_found(ckpt):
    stored = open_checkpoint(ckpt).tensor("grid").boxes[2]
    with Path(stored.path).open("r+b") as file:
        file.seek(stored.offset)
        byte = file.read(1)[0]
        file.seek(stored.offset)
        file.write(bytes([byte ^ 4]))
    assert str(stored.path) in refused(ckpt)


def test_flat_parameters_of_fsdp1_are_refused(tmp_path):
    for rank in range(2):
        torch.save({"layer._flat_param": torch.ones(3)}, tmp_path / f"model_rank_{rank}.pt")
    with pytest.raises(CheckpointError, match=r"layer\._flat_param.* SHARDED_STATE_DICT"):
        merge(tmp_path, tmp_path / "out.safetensors")

"""Tensors in objects and of dtypes that are not read: carried as they are, or refused by name."""

import argparse
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardspec import load_sharded, merge, plan_reshard
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.test_values import MESH, loaded, save_as, save_dcp
from tests.faults.checks import command


@pytest.mark.parametrize("target", ["safetensors", "torch", "dcp"])
def test_tensors_in_objects_are_never_lost_in_silence(tmp_path, target):
    state = {"w": torch.ones(2), "held": argparse.Namespace(weights=[torch.ones(3)])}
    for kind in ("torch", "dcp"):
        place, out = save_as(kind, state, tmp_path / kind), tmp_path / f"{kind}-out"
        if (kind, target) == ("dcp", "dcp"):
            assert merge(place, out, format="dcp").left_out == ()
            assert loaded(out, "dcp")["held"].weights[0].equal(torch.ones(3))
            continue
        with pytest.raises(CheckpointError, match="'held' may contain tensors"):
            merge(place, out, format=target)
        assert merge(place, out, format=target, exclude="held").tensors == 1
        other = {"w": torch.ones(2), "held": argparse.Namespace(weights=[torch.zeros(3)])}
        (found,) = diff_checkpoints(place, save_as(kind, other, tmp_path / f"{kind}-{target}"))
        assert found.name == "held"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x.to(torch.complex64).conj(), "conjugates or negates"),
        (lambda x: x.to(torch.complex64)._neg_view(), "conjugates or negates"),
        (lambda x: x.to(torch.complex32), "torch.complex32, which is not supported"),
        (lambda x: x.to(torch.uint8).view(torch.bits8), "torch.bits8, which is not supported"),
        (lambda x: torch.nn.Parameter(x.to(torch.complex32)), "torch.complex32, which is not"),
        (lambda x: x.to("meta"), "on the meta device"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "_rebuild_qtensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_are_not_read_do_not_keep_others_from_it(tmp_path, make, text):
    path, out = tmp_path / "a.pt", tmp_path / "out"
    torch.save({"w": torch.ones(2), "more": [make(torch.ones(4))]}, path)
    with pytest.raises(CheckpointError, match=f"'more.*{text}.*exclude=") as caught:
        merge(path, out)
    assert "restore" not in str(caught.value)
    assert not out.exists()
    rules = {"*": "[R]"}
    for lost in (
        lambda: load_sharded(path, MESH, rules),
        lambda: plan_reshard(path, (MESH, rules)),
    ):
        with pytest.raises(CheckpointError, match=f"'more.*{text}"):
            lost()
    assert merge(path, out, include="w").tensors == 1
    assert load_file(out)["w"].equal(torch.ones(2))
    assert list(load_sharded(path, MESH, rules, exclude="more*")) == ["w"]
    code, _, said = command(["plan-state", path, "--mesh", "2"])
    assert (code, text.split(",")[0] in said) == (3, True), said
    assert not list(diff_checkpoints(path, path))
    assert verify_checkpoint(path).tensors == 1


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_changes_of_tensors_that_are_not_read_are_differences(tmp_path, dtype):
    values = {"a": [1, 2], "b": [1, 3], "c": [1, 2, 3]}
    for name, numbers in values.items():
        view = torch.tensor(numbers, dtype=dtype).conj()
        torch.save({"w": torch.ones(2), "more": view}, tmp_path / f"{name}.pt")
    for other in "bc":
        (found,) = diff_checkpoints(tmp_path / "a.pt", tmp_path / f"{other}.pt")
        assert found.name == "more"


def test_a_pickle_of_tensors_is_not_cast_in_silence(tmp_path):
    place = save_dcp({"w": torch.ones(2), "ema": (torch.ones(3),)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"entry 'ema' .*'ema.0' in its pickle is not cast"):
        merge(place, tmp_path / "b", format="dcp", dtype="bf16")
    merge(place, tmp_path / "b", format="dcp", dtype="bf16", exclude="ema")
    merge(place, tmp_path / "c", dtype="bf16")
    assert {x.dtype for x in load_file(tmp_path / "c").values()} == {torch.bfloat16}


def test_only_the_part_of_a_rank_in_a_pickle_is_refused_by_name(tmp_path):
    part = _dtensor_of_two_ranks()
    place = save_dcp({"w": torch.ones(2), "model": {"x": part}}, tmp_path / "a", flat=False)
    with pytest.raises(CheckpointError, match=r"'model\.x'.*part of a tensor"):
        merge(place, tmp_path / "out")
    assert merge(place, tmp_path / "out", exclude="model.x").tensors == 1


def _dtensor_of_two_ranks() -> Any:
    """Return a DTensor as one of two ranks has it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    finally:
        dist.destroy_process_group()

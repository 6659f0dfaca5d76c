"""What is written for torch.distributed.checkpoint is read by it."""

import tracemalloc
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load

from shardspec import DeviceMesh, Layout, ShardingSpec, merge, reshard
from shardspec.checkpoint.catalog import OutputTensor
from shardspec.checkpoint.torch_files.dcp_target import dcp_target
from tests.checkpoint.writers.states import check_same, save, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def loaded(path, like):
    """Load with torch into tensors full of something else."""
    found = {name: torch.ones_like(value) for name, value in like.items()}
    load(found, checkpoint_id=path, no_dist=True)
    return found


def test_whole(tmp_path):
    ckpt = save(tmp_path / "ckpt", state())
    report = merge(ckpt, tmp_path / "dcp", format="dcp")
    assert report.files == ("__0_0.distcp", ".metadata")
    check_same(loaded(tmp_path / "dcp", state()), state())


def test_cut_for_a_mesh_and_back(tmp_path):
    ckpt = save(tmp_path / "ckpt", state())
    mesh = DeviceMesh(range(6), (3, 2))
    rules = {"of.*": "[S10,R]", "empty": "[S0,S1]"}
    report = reshard(ckpt, tmp_path / "dcp", device_mesh=mesh, rules=rules, format="dcp", threads=2)
    assert len(report.files) == 7
    check_same(loaded(tmp_path / "dcp", state()), state())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "torch.pt")
    check_same(torch.load(tmp_path / "torch.pt"), state())
    merge(ckpt, tmp_path / "a.safetensors")
    merge(tmp_path / "dcp", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_plain_values_go_along(tmp_path):
    values = {"step": 7, "name": "x", "flags": [True, None]}
    torch.save({"w": torch.ones(2), **values}, tmp_path / "in.pt")
    merge(tmp_path / "in.pt", tmp_path / "dcp", format="dcp")
    found: dict[str, Any] = {"w": torch.zeros(2), "step": 0, "name": "", "flags": []}
    load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert found["w"].tolist() == [1, 1]
    assert (found["step"], found["name"]) == (7, "x")


def test_memory_of_many_tensors():
    """What is planned takes less than a kilobyte a tensor, though each has an archive of more."""
    count = 4000
    mesh = DeviceMesh(range(2), (2,))
    layout = Layout(mesh, ShardingSpec.parse("[S0]"), (4,), "float32")
    tensors = [OutputTensor(f"layers.{n}.weight", f"{n}", (4,), "float32") for n in range(count)]
    layouts = dict.fromkeys((tensor.name for tensor in tensors), layout)
    dcp_target(mesh, tensors[:2], dict(list(layouts.items())[:2]), {})
    tracemalloc.start()
    target = dcp_target(mesh, tensors, layouts, {"step": 7})
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A box on each device; the metadata has 0.3 KiB for each, and grows by doubling.
    boxes = 2 * count
    assert [len(file.extents) for file in target.files] == [count, count]
    assert kept <= 1024 * boxes
    assert peak <= 1536 * boxes
    for file in target.files:
        assert file.trailer is not None
        pieces = [*file.raw, *file.trailer([0] * count)]
        sizes = sum(len(piece.made()) for piece in pieces)
        assert sizes + sum(slot.num_bytes for slot in file.extents) == file.num_bytes

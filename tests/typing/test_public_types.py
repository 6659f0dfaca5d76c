"""What a type checker says of public calls; mypy reads this file, and pytest runs it."""

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import pytest
import torch

import shardspec
from shardspec import (
    CostModel,
    DeviceMesh,
    DTensor,
    Layout,
    LayoutConverter,
    NameMap,
    ReshardPlan,
    ShardingSpec,
)
from shardspec.checkpoint.convert.output import WriteReport
from shardspec.layout.plan import ConversionPlan
from shardspec.layout.table import CostTable

MESH = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))


def test_layouts_and_plans() -> None:
    layout = Layout(MESH, "[S0,R]", (8, 8), "bf16")
    assert_type(layout.spec, ShardingSpec)
    assert_type(layout.mesh, DeviceMesh)
    assert_type(MESH.submesh({"dp": 0}), DeviceMesh)
    converter = LayoutConverter()
    plan = converter.plan(layout, "[R,S0]")
    assert_type(plan, ConversionPlan)
    assert_type(plan.cost_seconds, float)
    assert_type(converter.cost(layout, "[R,S0]"), float)
    assert_type(CostModel.from_presets(MESH, ["h100-nvswitch", "h100-nvswitch"]), CostModel)
    table = converter.cost_table(MESH, (8, 8), "bf16")
    assert_type(table, CostTable)
    assert_type(table.seconds, npt.NDArray[np.float64])


def test_types_of_tensors() -> None:
    tensor = DTensor(torch.ones(8, 8), MESH, "[S0,R]")
    assert_type(tensor.redistribute("[R,S0]"), DTensor)
    assert_type(tensor.to_global(), torch.Tensor)
    assert_type(tensor.to_local(3), torch.Tensor)
    assert_type(tensor.layout, Layout)
    assert_type(shardspec.zeros(8, 8, device_mesh=MESH), DTensor)
    assert_type(tensor + tensor * 2, torch.Tensor)
    assert_type(torch.relu(torch.matmul(tensor, tensor)), torch.Tensor)
    total = tensor.sum()
    assert isinstance(total, DTensor)
    assert_type(total.to_global(), torch.Tensor)


def test_state_dicts_and_checkpoints(tmp_path: Path) -> None:
    state = {"weight": DTensor(torch.ones(8, 8), MESH, "[S0,R]")}
    plan = shardspec.plan_reshard(state, {"weight": Layout(MESH, "[R,S0]", (8, 8), "fp32")})
    assert_type(plan, ReshardPlan)
    shardspec.save_sharded(state, tmp_path / "saved")
    loaded = shardspec.load_sharded(tmp_path / "saved", device_mesh=MESH, rules={"*": "[R,R]"})
    assert_type(loaded, dict[str, Any])
    assert_type(shardspec.NameMap.parse(""), NameMap)
    report = shardspec.merge(tmp_path / "saved", tmp_path / "m.pt", include="*", threads=2)
    assert_type(report, WriteReport)


def test_options_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    """The type checker reports each of these calls, or the comment would be in vain."""
    with pytest.raises(TypeError, match="'thread'"):
        shardspec.merge(tmp_path, tmp_path / "m.pt", thread=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'thread'"):
        shardspec.reshard(tmp_path, tmp_path, device_mesh=MESH, thread=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'includes'"):
        shardspec.load_sharded(tmp_path, MESH, includes="*")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'includes'"):
        shardspec.digest(tmp_path, includes="*")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'names'"):
        DeviceMesh(range(4), names=("a",))  # type: ignore[call-arg]

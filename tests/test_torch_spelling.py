"""Placements of torch wherever a spec is taken, all devices in one process."""

import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import shardspec
from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    LayoutConverter,
    ShardSpecError,
    distribute_tensor,
    load_sharded,
    match_rules,
    plan_reshard,
    reshard,
    reshard_state,
    save_sharded,
)
from shardspec.errors import LayoutError, LossyConversionError, SpecSyntaxError
from shardspec.interop.notations import to_placements
from tests.conversions import partial_specs, plain_specs

MESH = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
WHOLE = torch.arange(35.0).reshape(5, 7)


def test_every_spec_of_small_meshes_is_the_same_by_its_placements():
    for mesh in (MESH, DeviceMesh(range(4)), DeviceMesh(range(12), (2, 3, 2))):
        for spec in [*plain_specs(2, mesh.ndim), *partial_specs(2, mesh.ndim)]:
            placements = to_placements(spec, mesh)
            layout = Layout(mesh, spec, (5, 7), "float32")
            assert Layout(mesh, placements, (5, 7), "float32") == layout
            assert layout.with_spec(list(placements)) == layout


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_tensors_by_placements(every):
    specs = list(plain_specs(2, 2))
    for place, spec in enumerate(specs):
        placements = list(to_placements(spec, MESH))
        tensor = DTensor(WHOLE, MESH, spec)
        for made in (
            DTensor(WHOLE, MESH, placements),
            DTensor(WHOLE, MESH, placements=placements),
            distribute_tensor(WHOLE, MESH, placements),
            distribute_tensor(WHOLE, MESH, placements=tuple(placements)),
            DTensor.from_local(tensor.shards, MESH, placements),
            DTensor.from_local(tensor.shards, MESH, placements=placements),
        ):
            assert made.layout == tensor.layout
            assert made.placements == tuple(placements)
            assert torch.equal(made.full_tensor(), WHOLE)
        # Of one spec these, of the next one others.
        for other in specs[place % every :: every]:
            target = list(to_placements(other, MESH))
            for moved in (
                tensor.redistribute(target),
                tensor.redistribute(MESH, target),
                tensor.redistribute(None, target),
                tensor.redistribute(placements=target),
                tensor.redistribute(device_mesh=MESH, placements=target),
            ):
                assert moved.layout == tensor.layout.with_spec(other)
                assert torch.equal(moved.full_tensor(), WHOLE)


def test_what_is_given_no_placements_is_replicated_as_in_torch():
    for tensor in (DTensor(WHOLE, MESH), distribute_tensor(WHOLE, MESH)):
        assert tensor.placements == (Replicate(), Replicate())
    local = dict.fromkeys(MESH.ids, WHOLE)
    assert DTensor.from_local(local, MESH).placements == (Replicate(), Replicate())


def test_addends_and_parts_by_placements():
    addends = {device: torch.full((2, 3), 1.0 + device) for device in MESH.ids}
    tensor = DTensor.from_local(addends, MESH, [Partial(), Shard(1)])
    assert tensor.shape == (2, 9)
    assert tensor.full_tensor()[0].tolist() == [5.0] * 3 + [7.0] * 3 + [9.0] * 3
    line = DeviceMesh(range(3))
    fused = DTensor(WHOLE, line, [_StridedShard(1, split_factor=2)])
    assert str(fused.sharding_spec) == "[R,S0{4,3}]"
    parts = [_StridedShard(1, split_factor=2)]
    again = DTensor.from_local(fused.shards, line, parts, global_shape=(5, 7))
    assert torch.equal(again.full_tensor(), WHOLE)
    with pytest.raises(LayoutError, match="makes parts of dim 1, whose size is not given"):
        DTensor.from_local(fused.shards, line, [_StridedShard(1, split_factor=2)])


@pytest.mark.parametrize("make", ["empty", "zeros", "ones", "rand", "randn"])
def test_factories_by_placements(make):
    tensor = getattr(shardspec, make)(5, 7, device_mesh=MESH, placements=[Shard(1), Shard(0)])
    assert tensor.layout == Layout(MESH, "[S1,S0]", (5, 7), "float32")
    with pytest.raises(LayoutError, match="give device_mesh"):
        getattr(shardspec, make)(5, 7, placements=[Shard(0)])
    with pytest.raises(TypeError) as caught:
        getattr(shardspec, make)(5, 7, device_mesh=MESH, placement=[Shard(0)])
    assert str(caught.value).startswith(f"{make}() has no keyword 'placement'; it takes device_")


def test_plans_and_prices_by_placements():
    source = Layout(MESH, [Shard(0), Replicate()], (5, 7), "float32")
    converter = LayoutConverter()
    assert converter.plan(source, [Replicate(), Shard(1)]) == converter.plan(source, "[R,S1]")
    assert converter.cost(source, [Replicate(), Shard(1)]) == converter.cost(source, "[R,S1]")
    table = converter.cost_table(MESH, (5, 7), "float32")
    assert table.cost([Shard(0), Replicate()], [Replicate(), Shard(1)]) == table.cost(
        "[S(dp),R]", "[R,S(tp)]"
    )


def test_rules_by_placements(tmp_path):
    rules = {"*": [Shard(0), Replicate()], "w": [Replicate(), Shard(-1)]}
    shapes = {"w": 2, "b": 1, "scale": 0, "deep": 3}
    by_text = {"*": "[S0,...]", "w": "[R,S1]"}
    for given in (shapes, {name: (4,) * dims for name, dims in shapes.items()}):
        assert match_rules(rules, given) == match_rules(by_text, given)
        assert match_rules(rules, given, MESH) == match_rules(by_text, given)
    state = {"w": DTensor(WHOLE, MESH, "[R,R]"), "b": DTensor(WHOLE[0].clone(), MESH, "[R]")}
    assert plan_reshard(state, (MESH, rules)) == plan_reshard(state, (MESH, by_text))
    moved = reshard_state(state, rules, device_mesh=MESH)
    assert moved["w"].placements == (Replicate(), Shard(1))
    assert moved["b"].placements == (Shard(0), Replicate())
    save_sharded(state, tmp_path / "saved")
    loaded = load_sharded(tmp_path / "saved", MESH, rules)
    assert loaded["w"].layout == moved["w"].layout
    reshard(tmp_path / "saved", tmp_path / "out", device_mesh=MESH, rules=rules)
    assert load_sharded(tmp_path / "out")["w"].layout == moved["w"].layout
    line = DeviceMesh(range(3))
    strided = {"w": [_StridedShard(1, split_factor=2)]}
    assert str(match_rules(strided, {"w": (5, 7)}, line)["w"]) == "[R,S0{4,3}]"


def test_rules_whose_placements_do_not_fit():
    cases: list[tuple[Any, dict[str, int], str]] = [
        ({"w": [Shard(0)]}, {"w": 2}, "rule 'w', tensor 'w': 1 placement for a mesh of 2 axes"),
        ({"*": [Shard(1), Replicate()]}, {"b": 1}, "rule '*', tensor 'b': the placement of axis 0"),
        ({"w": ["S0", "R"]}, {"w": 2}, "rule 'w': 'S0' is not a placement"),
        ({"w": Shard(0)}, {"w": 2}, "rule 'w': Shard(dim=0) is the placement of one mesh axis"),
    ]
    for rules, tensors, start in cases:
        with pytest.raises(LayoutError) as caught:
            match_rules(rules, tensors, MESH)
        assert str(caught.value).startswith(start)
        assert "\n" not in str(caught.value)
    with pytest.raises(LayoutError, match="_StridedShard depends on the mesh; give device_mesh="):
        match_rules({"w": [_StridedShard(0, split_factor=2)]}, {"w": (4, 4)})


def test_placements_that_do_not_fit_are_refused_in_one_line():
    tensor = DTensor(WHOLE, MESH, "[S0,R]")
    mask = _MaskPartial(offset_shape=torch.Size([2]), offset_dim=0)
    axes = "for a mesh of 2 axes (2x3); give one per axis"
    cases: list[tuple[Any, str]] = [
        ([Shard(0)], f"1 placement {axes}"),
        ([], f"0 placements {axes}"),
        ([Shard(0)] * 3, f"3 placements {axes}"),
        (
            [Shard(2), Replicate()],
            "the placement of axis 0 splits dim 2, but the tensor has 2 dims",
        ),
        ([Shard(-3), Replicate()], "the placement of axis 0 splits dim -3, but the tensor has"),
        (Shard(0), "Shard(dim=0) is the placement of one mesh axis; give a list with one per axis"),
        (
            ["S0", "R"],
            "'S0' is not a placement; give Shard, Replicate or Partial of torch for each",
        ),
        ([Shard(0), None], "None is not a placement"),
        (
            [Partial(), Replicate()],
            "a new tensor cannot be sharded as [R,R|P0]: a pending reduction",
        ),
        ([mask, Replicate()], "placement MaskP("),
    ]
    for placements, start in cases:
        with pytest.raises((LayoutError, LossyConversionError)) as caught:
            DTensor(WHOLE, MESH, placements)
        assert str(caught.value).startswith(start), placements
        assert "\n" not in str(caught.value)
        with pytest.raises(ShardSpecError):
            tensor.redistribute(placements)
    for call in (
        lambda: DTensor(WHOLE, MESH, "[S0,R]", placements=[Shard(0), Replicate()]),
        lambda: tensor.redistribute("[S0,R]", [Shard(0), Replicate()]),
        lambda: shardspec.zeros(4, device_mesh=MESH, sharding_spec="[S0]", placements=[Shard(0)]),
    ):
        with pytest.raises(LayoutError, match="sharding_spec and placements mean the same; give"):
            call()
    for call in (
        lambda: tensor.redistribute(MESH, "[R,R]", device_mesh=MESH),
        lambda: tensor.redistribute("[R,R]", MESH),  # type: ignore[arg-type]  # refused
    ):
        with pytest.raises(LayoutError, match="give one mesh, before the placements or by name"):
            call()
    with pytest.raises(LayoutError, match=r"redistribute: give a spec, as '\[S0,R\]'"):
        tensor.redistribute(MESH)
    for given in (None, 3):
        with pytest.raises(SpecSyntaxError, match="a spec is text such as"):
            Layout(MESH, given, (5, 7), "float32")  # type: ignore[arg-type]  # refused


def test_what_is_distributed_already_is_returned_or_refused():
    tensor = distribute_tensor(WHOLE, MESH, [Shard(0), Replicate()])
    assert distribute_tensor(tensor, MESH, "[S(dp),R]") is tensor
    assert distribute_tensor(tensor, MESH) is tensor
    for mesh, spec in [(MESH, "[R,S0]"), (DeviceMesh(range(6), (3, 2)), "[S0,R]")]:
        with pytest.raises(LayoutError, match=r"the tensor is distributed already, as \[S0,R\]"):
            distribute_tensor(tensor, mesh, spec)


def test_uneven_and_empty_shards_by_placements():
    for shape, placements in product([(1, 7), (0, 3), (5, 1)], [[Shard(0)] * 2, [Shard(1)] * 2]):
        whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
        tensor = DTensor(whole, MESH, placements)
        assert torch.equal(tensor.full_tensor(), whole)
        moved = tensor.redistribute(MESH, [Replicate(), Shard(0)])
        assert torch.equal(moved.full_tensor(), whole)


def test_planning_by_text_imports_no_torch():
    script = (
        "import sys; from shardspec import DeviceMesh, Layout, LayoutConverter, match_rules;"
        "m = DeviceMesh('cuda', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'));"
        "LayoutConverter().plan(Layout(m, '[S0,R]', (4, 4), 'f32'), '[R,S0]');"
        "match_rules({'*': '[S0,...]'}, {'w': 2}, m); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_reprs_are_one_short_line_however_large_the_mesh():
    mesh = DeviceMesh(list(range(256, 0, -1)), (16, 16))
    tensor = shardspec.empty(32, 32, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    plan = LayoutConverter().plan(tensor.layout, "[R,R]")
    state_plan = plan_reshard({"w": tensor.layout}, (DeviceMesh([0]), {}))
    assert repr(state_plan) == "ReshardPlan(1 tensor on 257 devices)"
    assert repr(tensor).startswith(
        "DTensor([S0,S1] of [32, 32] float32 on 16x16; shard of device 256:\n"
    )
    for value in (mesh, tensor.layout, plan):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 300, repr(value)


CUT = [Shard(0), Replicate()]
WORDS: dict[str, Any] = {
    "mesh of from_local": lambda: DTensor.from_local(WHOLE),
    "mesh of DTensor": lambda: DTensor(WHOLE),
    "mesh of distribute_tensor": lambda: distribute_tensor(WHOLE),
    "mesh of distribute_module": lambda: shardspec.distribute_module(torch.nn.Linear(2, 2)),
    "run_check": lambda: DTensor.from_local(WHOLE, MESH, run_check=True),
    "shape": lambda: DTensor.from_local(WHOLE, MESH, shape=(5, 7), global_shape=(5, 7)),
    "grad_placements of from_local": lambda: DTensor.from_local(WHOLE, MESH, grad_placements=CUT),
    "forward_dtype": lambda: DTensor(WHOLE, MESH).redistribute(CUT, forward_dtype=torch.bfloat16),
    "backward_dtype": lambda: DTensor(WHOLE, MESH).redistribute(CUT, backward_dtype=torch.half),
    "src_data_rank 2": lambda: distribute_tensor(WHOLE, MESH, src_data_rank=2),
    "src_data_rank -1": lambda: DTensor(WHOLE, MESH, src_data_rank=-1),
    "src_data_rank '1'": lambda: DTensor(WHOLE, MESH, src_data_rank="1"),  # type: ignore[arg-type]
    "src_rank": lambda: distribute_tensor(WHOLE, MESH, src_data_rank=1, src_rank=4),
    "backend_override": lambda: DeviceMesh("cpu", [0], backend_override=(1,)),  # type: ignore[arg-type]
    "backend_override of": lambda: shardspec.init_device_mesh("cpu", (2,), backend_override={}),  # type: ignore[arg-type]
    "from_group": lambda: DeviceMesh.from_group([], "cpu"),
    "to_local": lambda: DTensor(WHOLE, MESH).full_tensor(grad_placements=[Partial(), Partial()]),
}


@pytest.mark.parametrize("word", WORDS)
def test_words_of_torch_are_refused_in_one_line_that_names_them(word):
    with pytest.raises(ShardSpecError, match=word.split(" ")[0]) as caught:
        WORDS[word]()
    assert len(str(caught.value)) <= 160
    assert "\n" not in str(caught.value)


def test_words_of_torch_have_the_same_meaning_in_one_process():
    """tests/dist/test_torch_dtensor.py compares them with torch in a job."""
    tensor = DTensor(WHOLE.clone().requires_grad_(), MESH, CUT, src_data_rank=1)
    same: Any = {"async_op": True, "forward_dtype": torch.float32, "backward_dtype": torch.float32}
    moved = tensor.redistribute(MESH, [Replicate(), Shard(1)], **same)
    moved.full_tensor(grad_placements=[Replicate(), Replicate()]).pow(2).sum().backward()
    gradient: Any = tensor.grad
    assert torch.equal(gradient.full_tensor(), 2 * WHOLE)

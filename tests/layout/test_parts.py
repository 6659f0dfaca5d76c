"""Parts and blocks: dims that are several things, each cut by itself, against index arithmetic."""

import pickle
from itertools import product
from math import prod

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    LayoutConverter,
    ShardingSpec,
    distribute_tensor,
    load_sharded,
    merge,
    reshard,
    save_sharded,
)
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.errors import (
    AxisError,
    CheckpointError,
    LayoutError,
    LossyConversionError,
    SpecSyntaxError,
)
from shardspec.layout.placements import placements_of
from shardspec.layout.spec import DimSpec, Part

SHAPE = (12, 6)
WHOLE = torch.arange(prod(SHAPE)).reshape(SHAPE)
SPECS = (
    "[R,R]",
    "[S0,R]",
    "[S1,S0]",
    "[R,S10]",
    "[S0{6,4,2},R]",
    "[S01{6,4,2},R]",
    "[S10{8,4/1},R]",
    "[S0*4,R]",
    "[S01{8,4}*2,R]",
    "[S1{7,5},S0{4,2/1}]",
    "[S1{3,9}*2,S0*5]",
    "[R,S01{3,1,2}]",
)


def indices(size: int, cut: DimSpec, mesh: tuple[int, ...], at: tuple[int, ...]) -> list[int]:
    """Return the indices of a dim that one device holds, element by element."""
    devices, place = 1, 0
    axes = [int(axis) for axis in cut.axes]
    for axis in axes:
        devices, place = devices * mesh[axis], place * mesh[axis] + at[axis]
    found, start = [], 0
    for length, shares in [(p.size, p.shares) for p in cut.parts] or [(size, 0)]:
        end = start + length
        blocks = [list(range(lo, min(lo + cut.block, end))) for lo in range(start, end, cut.block)]
        if shares:
            each = -(-len(blocks) // shares)
            share = place // (devices // shares)
            blocks = blocks[share * each : (share + 1) * each]
        else:
            for axis in axes:
                each = -(-len(blocks) // mesh[axis])
                blocks = blocks[at[axis] * each : (at[axis] + 1) * each]
        found += [index for block in blocks for index in block]
        start = end
    return found


def shard_by_index(whole: torch.Tensor, layout: Layout, device: int) -> torch.Tensor:
    at = layout.mesh.coordinates(device)
    for dim, cut in enumerate(layout.spec.dim_specs):
        held = indices(whole.shape[dim], cut, layout.mesh.shape, at)
        whole = whole.index_select(dim, torch.tensor(held, dtype=torch.long))
    return whole


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("shape", [(2, 3), (1, 2), (2, 1, 3)])
def test_every_conversion_against_index_arithmetic(shape, every):
    mesh = DeviceMesh(range(prod(shape)), shape)
    layouts = {spec: Layout(mesh, spec, SHAPE, "int64") for spec in SPECS}
    shards = {
        spec: {device: shard_by_index(WHOLE, layout, device) for device in mesh.ids}
        for spec, layout in layouts.items()
    }
    for a, b in list(product(SPECS, SPECS))[::every]:
        source, target = layouts[a], layouts[b]
        before = DTensor(WHOLE, mesh, a)
        after = before.redistribute(b)
        lacking = []
        for device in mesh.ids:
            assert torch.equal(before.shards[device], shards[a][device])
            assert torch.equal(after.shards[device], shards[b][device]), (a, b, device)
            held, wanted = (set(shards[spec][device].flatten().tolist()) for spec in (a, b))
            lacking.append(len(wanted - held))
        assert torch.equal(after.to_global(), WHOLE)
        plan = LayoutConverter().plan(source, target)
        if not (source.spec.is_plain and target.spec.is_plain):
            assert plan.bytes_received == max(lacking) * 8
            assert (plan.cost_seconds > 0) == (max(lacking) > 0)


def test_parts_of_unequal_sizes_move_to_another_mesh():
    left, right = DeviceMesh([0, 1, 2, 3], (2, 2)), DeviceMesh([5, 2, 4], (3,))
    for a, b in product(SPECS, ["[S0{6,4,2},R]", "[S0*5,R]", "[R,S0{4,2/1}]", "[S0,R]"]):
        target = Layout(right, b, SHAPE, "int64")
        got = DTensor(WHOLE, left, a).redistribute(b, device_mesh=right)
        for device in right.ids:
            wanted = shard_by_index(WHOLE, target, device)
            assert torch.equal(got.shards[device], wanted), (a, b, device)


def test_pending_sums_are_finished_on_the_way():
    mesh = DeviceMesh(range(4), (2, 2))
    addends = {
        d: shard_by_index(WHOLE, Layout(mesh, "[S0{8,4},R]", SHAPE, "int64"), d) for d in mesh.ids
    }
    got = DTensor.from_local(addends, mesh, "[S0{8,4},R|P1]").redistribute("[S1,R]")
    assert torch.equal(got.to_global(), 2 * WHOLE)


def test_gradients_go_back_to_the_parts():
    mesh = DeviceMesh(range(2), (2,))
    whole = torch.randn(6, 4, requires_grad=True)
    t = DTensor(whole, mesh, "[S0{4,2},R]")
    weight = torch.arange(24.0).reshape(6, 4)
    (t.redistribute("[R,S0]").to_global() * weight).sum().backward()
    assert t.grad is not None
    assert torch.equal(t.grad.to_global(), weight)


def test_text_and_dict_forms():
    for text in SPECS:
        spec = ShardingSpec.parse(text)
        assert str(spec) == text
        assert ShardingSpec.parse(str(spec)) == spec
        assert pickle.loads(pickle.dumps(spec)) == spec
    given = {"axes": [1], "parts": [8, (2, 1), "2/2"], "block": 2}
    spec = ShardingSpec(2, {0: given})
    assert str(spec) == "[S1{8,2/1,2/2}*2,R]"
    assert spec == ShardingSpec.parse(" [ S1 { 8 , 2/1,2 / 2 } * 2 , R ] ")
    assert str(ShardingSpec(1, {0: DimSpec(("tp",), (Part(4), Part(2)))})) == "[S(tp){4,2}]"
    assert spec != ShardingSpec.parse("[S1,R]")
    assert str(spec.without_partial().with_dims({1: [0]})) == "[S1{8,2/1,2/2}*2,S0]"
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    assert str(Layout(mesh, spec, (12, 2), "f32").labelled_spec) == "[S(tp){8,2/1,2/2}*2,R]"


def test_heads_that_are_fewer_than_devices():
    """Two heads of keys for four devices: neighbors share one."""
    layout = Layout(DeviceMesh(range(4), (4,)), "[S0{8,2/2}]", (10,), "f32")
    assert [layout.local_boxes(d) for d in range(4)] == [
        [((0, 2),), ((8, 9),)],
        [((2, 4),), ((8, 9),)],
        [((4, 6),), ((9, 10),)],
        [((6, 8),), ((9, 10),)],
    ]
    assert layout.local_shape(3) == (3,)


def test_blocks_are_one_box():
    layout = Layout(DeviceMesh(range(3), (3,)), "[S0*128]", (300,), "f32")
    assert [layout.box(d) for d in range(3)] == [((0, 128),), ((128, 256),), ((256, 300),)]


def test_the_picture_shows_each_part():
    layout = Layout(DeviceMesh(range(2), (2,)), "[S0{4,2/1}]", (6,), "f32")
    assert "0,1" in layout.picture()
    assert "<svg" in layout.drawing().svg()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[S0{}]", "expected the size of a part"),
        ("[S0{4]", "expected ',' or '}'"),
        ("[S0{4/0}]", "expected a number of shares"),
        ("[S0*]", "expected the size of a block"),
        ("[R*2]", "expected ',' or '|' or ']'"),
        ("[S0{4}{4}]", "expected ',' or '|' or ']'"),
        ("[S0{1e3}]", "expected ',' or '}'"),
    ],
)
def test_parts_that_cannot_be_read_are_refused(text, says):
    with pytest.raises(SpecSyntaxError) as error:
        ShardingSpec.parse(text)
    assert says in str(error.value)


def test_what_is_refused_by_name():
    mesh = DeviceMesh(range(4), (2, 2))
    with pytest.raises(LayoutError, match="add up to 6, not to its size 7"):
        Layout(mesh, "[S0{4,2}]", (7,), "f32")
    with pytest.raises(LayoutError, match="give a divisor"):
        Layout(mesh, "[S0{4,2/3}]", (6,), "f32")
    with pytest.raises(LayoutError, match=r"redistribute to \[S0\] first"):
        Layout(mesh, "[S0{4,2}]", (6,), "f32").box(0)
    many = Layout(DeviceMesh(range(2**15), (2**15,)), "[S0*2]", (8,), "f32")
    with pytest.raises(LayoutError, match=r"32,768 devices is .*; use at most 16,384"):
        _ = LayoutConverter().plan(many, "[R]").step_bytes
    for cut in (
        {"axes": [0], "parts": [0]},
        {"axes": [0], "block": 0},
        {"parts": [4]},
        {"axes": [], "parts": [4]},
        {"axes": [0], "parts": [[1, 2, 3]]},
    ):
        with pytest.raises(AxisError):
            ShardingSpec(1, {0: cut})
    with pytest.raises(LossyConversionError, match=r"redistribute to \[S0\] first"):
        placements_of(ShardingSpec.parse("[S0{4,2}]"), (2, 2))
    t = distribute_tensor(torch.randn(6), mesh, "[S0{4,2}]")
    plan = LayoutConverter().plan(t.layout, "[R]")
    with pytest.raises(LayoutError, match=f"give at least {plan.peak_bytes}"):
        LayoutConverter().plan(t.layout, "[R]", max_bytes=plan.peak_bytes - 1)


def test_a_checkpoint_is_loaded_into_parts_and_saved_from_one_box(tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    plain = DTensor(WHOLE, mesh, "[S01,R]")
    save_sharded({"w": plain}, tmp_path / "a")
    for text in SPECS:
        loaded = load_sharded(tmp_path / "a", device_mesh=mesh, rules={"w": text})["w"]
        assert str(loaded.sharding_spec) == text
        for device in mesh.ids:
            wanted = shard_by_index(WHOLE, loaded.layout, device)
            assert torch.equal(loaded.shards[device], wanted), (text, device)


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [5, 2, 7, 3]])
def test_every_cut_is_saved_merged_and_resharded(tmp_path, ids):
    mesh, other = DeviceMesh(ids, (2, 2)), DeviceMesh(range(3), (3,))
    state = {f"w{at}": DTensor(WHOLE, mesh, text) for at, text in enumerate(SPECS)}
    save_sharded(state, tmp_path / "a")
    assert verify_checkpoint(tmp_path / "a").flaws == ()
    merge(tmp_path / "a", tmp_path / "a.safetensors")
    merged = load_file(tmp_path / "a.safetensors")
    assert set(merged) == set(state)
    assert all(torch.equal(tensor, WHOLE) for tensor in merged.values())
    for name, tensor in load_sharded(tmp_path / "a").items():
        assert tensor.layout == state[name].layout
        for device in mesh.ids:
            assert torch.equal(tensor.shards[device], shard_by_index(WHOLE, tensor.layout, device))
    into = {name: DTensor(torch.zeros_like(WHOLE), mesh, "[S0{4,8/1}*2,S1]") for name in state}
    load_sharded(tmp_path / "a", into=into)
    assert all(torch.equal(tensor.to_global(), WHOLE) for tensor in into.values())
    # From every cut to every other: with `like`, by rules, and as boxes of torch's format.
    turned = dict(zip(state, [SPECS[-1], *SPECS], strict=False))
    reshard(tmp_path / "a", tmp_path / "b", device_mesh=mesh, rules=turned)
    for name, tensor in load_sharded(tmp_path / "b").items():
        assert tensor.layout == Layout(mesh, turned[name], SHAPE, WHOLE.dtype)
        for device in mesh.ids:
            assert torch.equal(tensor.shards[device], shard_by_index(WHOLE, tensor.layout, device))
    reshard(tmp_path / "b", tmp_path / "c", like=tmp_path / "a")
    for name, tensor in load_sharded(tmp_path / "c").items():
        assert tensor.layout == state[name].layout
        assert torch.equal(tensor.to_global(), WHOLE)
    reshard(
        tmp_path / "b",
        tmp_path / "d",
        device_mesh=other,
        rules={"*": "[S0{6,6/1}*2,R]"},
        format="dcp",
    )
    merge(tmp_path / "d", tmp_path / "d.safetensors")
    assert all(
        torch.equal(tensor, WHOLE) for tensor in load_file(tmp_path / "d.safetensors").values()
    )
    read = {name: torch.zeros_like(WHOLE) for name in state}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp_load(read, checkpoint_id=tmp_path / "d")
    assert all(torch.equal(tensor, WHOLE) for tensor in read.values())


def test_a_dim_of_every_size_is_saved_by_parts(tmp_path):
    """Uneven and empty shares of parts and blocks, and shares that several devices have."""
    mesh = DeviceMesh(range(4), (2, 2))
    cuts = [
        DimSpec(order, parts, block)
        for order in ((0,), (0, 1), (1, 0))
        for first in range(1, 7)
        for parts in ((Part(first), Part(3)), (Part(first), Part(5, 1)), (Part(2), Part(first, 2)))
        for block in (1, 2)
    ]
    state, whole = {}, {}
    for at, cut in enumerate(cuts):
        size = sum(part.size for part in cut.parts)
        name, spec = f"w{at}", ShardingSpec(2, {1: cut})
        whole[name] = torch.arange(2 * size, dtype=torch.int16).view(2, size) + at
        state[name] = DTensor(whole[name], mesh, spec)
    save_sharded(state, tmp_path / "a")
    merge(tmp_path / "a", tmp_path / "a.safetensors")
    for name, tensor in load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(tensor, whole[name]), state[name].layout


def test_copies_of_a_part_are_compared_and_damage_is_found(tmp_path):
    mesh = DeviceMesh(range(2), (2,))
    layout = Layout(mesh, "[S0{4,2/1}]", (6,), "int64")
    shards = {0: torch.tensor([0, 1, 4, 5]), 1: torch.tensor([2, 3, 4, 6])}
    state = {"w": DTensor.from_shards(shards, layout)}
    with pytest.raises(CheckpointError, match=r"'w': its copies of box \[4:6\] differ"):
        save_sharded(state, tmp_path / "a")
    save_sharded(state, tmp_path / "a", replicas="first")
    merge(tmp_path / "a", tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    (first,) = (tmp_path / "a").glob("shard-00000-*")
    damaged = bytearray(first.read_bytes())
    damaged[-1] ^= 1
    first.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"box \[4:6\] .* has CRC-32"):
        merge(tmp_path / "a", tmp_path / "b.safetensors")
    # A list of boxes that the spec does not give to the rank contradicts it.
    info = tmp_path / "a" / "sharding_info.json"
    info.write_text(info.read_text().replace("[[4, 6]]", "[[3, 6]]"))
    with pytest.raises(CheckpointError, match=r"rank 0 is listed with box \[3:6\]"):
        merge(tmp_path / "a", tmp_path / "b.safetensors")

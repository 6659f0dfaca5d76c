"""Plans that quantize weights: in memory where cuts fall on blocks, of a checkpoint anywhere."""

import json
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    NameMap,
    plan_reshard,
    save_sharded,
)
from shardspec.checkpoint.convert.select import mapped
from shardspec.checkpoint.job.load_plan import file_regions, plan_stored
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError, DTypeError, LayoutError
from shardspec.resharding.rows import transfer_rows
from tests.checkpoint.test_low_precision import FP8, SHAPES, merged, written
from tests.checkpoint.test_quantize import fp8_of, same_bytes, weights
from tests.families.maps import load_map
from tests.families.test_commands import saved

TWO, THREE = DeviceMesh(range(2), (2,)), DeviceMesh([5, 7, 6], (3,))
NAME = "layers.0.mlp.up_proj.weight"


def state_of(tensor, spec, mesh=TWO):
    state = {NAME: tensor, "embed.weight": tensor[:4, :4].clone(), "norm": tensor[0, :8].clone()}
    specs = {NAME: spec}
    return {
        name: DTensor(value, mesh, specs.get(name, f"[{','.join('R' * value.dim())}]"))
        for name, value in state.items()
    }


@pytest.mark.parametrize(
    ("before", "after", "sender"),
    [
        ("[S0,R]", "[S0*128,R]", True),
        ("[S0{512,128/1},R]", "[S0*128,R]", True),
        ("[R,S0]", "[S0,R]", True),  # the target is cut inside of blocks, and has all scales
        ("[S0{300,340},R]", "[S0*128,R]", False),
        ("[S0{300,340},R]", "[R,S0*128]", False),
        ("[S0{300,340},R]", "[R,R]", False),
        ("[R,R]", "[S0{256,384},R]", True),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_weights_are_quantized_where_cuts_fall_on_blocks(before, after, sender, given):
    shape = (640, 512) if "640" in before or "340" in before or "512" in before else (512, 512)
    shape = (640, 512) if "256" in after else shape
    weight = weights(shape)
    state = state_of(weight, before)
    plan = plan_reshard(state, (THREE, {NAME: after}), dtype="fp8-128x128")
    assert plan.quantized == (() if sender else (NAME,))
    traveling = {move.source.dtype for move in plan.moves if move.target_name == NAME}
    assert traveling == {"float8_e4m3fn" if sender else "bfloat16"}
    codes, scales = fp8_of(weight)
    out = None
    if given:
        out = {}
        for name, value in plan.run(state).items():
            shards = {d: torch.zeros_like(shard) for d, shard in value.shards.items()}
            out[name] = DTensor.from_shards(shards, value.layout)
    found = plan.run(state, out)
    assert found.keys() == {NAME, f"{NAME}_scale_inv", "embed.weight", "norm"}
    if out is not None:
        assert all(found[name] is out[name] for name in found)
    same_bytes(found[NAME].full_tensor(), codes)
    same_bytes(found[f"{NAME}_scale_inv"].full_tensor(), scales)
    assert found["embed.weight"].dtype == torch.bfloat16
    # A device has the scales of its codes.
    layout, grid = found[NAME].layout, found[f"{NAME}_scale_inv"].layout
    for device in THREE.ids:
        for held, numbers in zip(layout.intervals(device), grid.intervals(device), strict=True):
            for lo, hi in held:
                if lo < hi:
                    assert any(a <= lo // 128 and -(-hi // 128) <= b for a, b in numbers)
    assert str(plan).splitlines()[-1] == "quantizes weights"
    with pytest.raises(LayoutError, match="this plan quantizes"):
        plan.transfers(5)
    with pytest.raises(LayoutError, match="gives no receipt"):
        plan.run(state, receipt=True)


def test_half_the_bytes_travel_if_senders_quantize():
    source = {NAME: Layout(TWO, "[S0,R]", (512, 1024), "bfloat16")}
    target = DeviceMesh([8], (1,)), {NAME: "[R,R]"}
    plan = plan_reshard(source, target, dtype="fp8-128x128")
    assert plan.received[8] == 512 * 1024 + 4 * 4 * 8
    assert plan.digest != plan_reshard(source, target).digest


def test_cuts_inside_of_blocks_on_both_sides_are_refused():
    source = {NAME: Layout(TWO, "[S0,R]", (384, 64), "bfloat16")}
    with pytest.raises(LayoutError, match=r"neither \[S0,R\] in the source nor \[S0,R\]"):
        plan_reshard(source, (DeviceMesh(range(4)), {NAME: "[S0,R]"}), dtype="fp8-128x128")
    assert plan_reshard(source, (DeviceMesh(range(3)), {NAME: "[S0,R]"}), dtype="fp8-128x128")


def test_what_a_map_makes_is_quantized_where_it_arrives():
    halves = {"gate": weights((256, 128)), "up": weights((256, 128)) * 2}
    state = {name: DTensor(tensor, TWO, "[S0,R]") for name, tensor in halves.items()}
    names = NameMap.parse(
        '[[map]]\nsource = ["gate", "f h"]\ntarget = ["fc1.weight", "(two f) h", "two[0]"]\n'
        '[[map]]\nsource = ["up", "f h"]\ntarget = ["fc1.weight", "(two f) h", "two[1]"]\n'
        "[sizes]\ntwo = 2\n"
    )
    rules = {"fc1.weight": "[S0{256,256},R]"}
    plan = plan_reshard(state, (TWO, rules), names=names, dtype="fp8-128x128")
    assert plan.quantized == ("fc1.weight",)
    found = plan.run(state)
    codes, scales = fp8_of(torch.cat(list(halves.values())))
    same_bytes(found["fc1.weight"].full_tensor(), codes)
    same_bytes(found["fc1.weight_scale_inv"].full_tensor(), scales)


def test_weights_that_are_not_finite_or_quantized_already():
    weight = weights((256, 128))
    weight[200, 100] = float("nan")
    state = {NAME: DTensor(weight, TWO, "[S0,R]")}
    plan = plan_reshard(state, (TWO, {NAME: "[R,R]"}), dtype="fp8-128x128")
    with pytest.raises(LayoutError, match="has NaN or infinity"):
        plan.run(state)
    codes = {NAME: Layout(TWO, "[S0,R]", (256, 128), "float8_e4m3fn")}
    codes[f"{NAME}_scale_inv"] = Layout(TWO, "[S0,R]", (2, 1), "float32")
    targets: list[Any] = [(TWO, {}), codes]
    for target in targets:
        with pytest.raises(DTypeError, match="is quantized already"):
            plan_reshard(codes, target, dtype="fp8-128x128")


def test_stacks_and_empty_shards():
    experts = weights((3, 256, 200))
    name = "mlp.experts.gate_up_proj"
    state = {name: DTensor(experts, TWO, "[S0,R,R]")}
    mesh = DeviceMesh(range(4), (4,))
    plan = plan_reshard(state, (mesh, {name: "[R,S0*128,R]"}), dtype="fp8-128x128")
    found = plan.run(state)
    for place, expert in enumerate(experts):
        codes, scales = fp8_of(expert)
        same_bytes(found[name].full_tensor()[place], codes)
        same_bytes(found[f"{name}_scale_inv"].full_tensor()[place], scales)


@pytest.mark.parametrize("before", ["[R,R]", "[S0{100,200},R]"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_codes_are_of_the_numbers_in_the_source_whatever_the_target_states(before, dtype):
    weight = weights((300, 200), torch.float32)
    state = {NAME: DTensor(weight, TWO, before)}
    codes, scales = fp8_of(weight)
    target = {NAME: Layout(THREE, "[S0*128,R]", (300, 200), dtype)}
    grid = Layout(THREE, "[S0*1,R]", (3, 2), "float32")
    for stated in (target, target | {f"{NAME}_scale_inv": grid}):
        made = plan_reshard(state, stated, dtype="fp8-128x128").run(state)
        same_bytes(made[NAME].full_tensor(), codes)
        same_bytes(made[f"{NAME}_scale_inv"].full_tensor(), scales)


def test_scales_that_a_target_states():
    state = {NAME: Layout(TWO, "[S0*128,R]", (300, 200), "bfloat16")}
    late = {NAME: Layout(TWO, "[S0{100,200},R]", (300, 200), "bfloat16")}
    weight, scales = Layout(THREE, "[R,S0*128]", (300, 200), "float8_e4m3fn"), f"{NAME}_scale_inv"
    whole = Layout(THREE, "[R,R]", (3, 2), "float32")
    plan = plan_reshard(state, {NAME: weight, scales: whole}, dtype="fp8-128x128")
    assert {move.target_name: move.target for move in plan.moves} == {NAME: weight, scales: whole}
    for source, stated, says in (
        (late, {NAME: weight, scales: whole}, "but the target has"),
        (state, {NAME: weight, scales: Layout(THREE, "[R,R]", (3, 3), "float32")}, "in the target"),
        (state, {NAME: weight, "norm": whole, "norm_scale_inv": whole}, "the source lacks"),
    ):
        with pytest.raises(LayoutError, match=says):
            plan_reshard(source, stated, dtype="fp8-128x128")


@pytest.fixture
def model(tmp_path):
    """Save weights with ragged blocks, and what is not quantized."""
    tensors = {
        f"layers.{number}.up_proj.weight": weights(shape)
        for number, shape in enumerate(((576, 700), *SHAPES[1:]))
    }
    tensors["layers.0.down_proj.weight"] = weights((260, 130)).clamp(-6e4, 6e4).half()
    tensors["layers.1.down_proj.weight"] = weights((130, 260), torch.float32)
    tensors["layers.2.down_proj.weight"] = weights((5, 6), torch.float64)
    tensors["mlp.experts.gate_up_proj"] = weights((3, 256, 200))
    tensors |= {"embed.weight": weights((6, 4)), "layers.0.norm.weight": weights((9,))}
    tensors |= {"layers.0.up_proj.bias": weights((6,)), "layers.9.up_proj.weight": weights((0, 4))}
    tensors |= {"layers.8.up_proj.weight": weights((4, 0))}
    return written(tmp_path / "model", tensors)


def wanted_of(source, place, **how):
    return merged(source, place.with_suffix(".safetensors"), quantize="fp8-128x128", **how)


def require_same(made, wanted):
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        same_bytes(made[name].full_tensor(), tensor)


@pytest.mark.parametrize("cut", ["[S0,...]", "[...,S0]", "[R,...]"])
def test_a_checkpoint_is_quantized_to_what_merge_writes_wherever_it_is_cut(tmp_path, model, cut):
    wanted = wanted_of(model, tmp_path / "merged")
    target = THREE, {"layers.*proj.weight": cut, "mlp.*": cut, "embed.*": "[S0,R]"}
    plan = plan_reshard(model, target, dtype="fp8-128x128", max_bytes=1 << 16)
    plan = pickle.loads(pickle.dumps(plan))
    made = plan.run({})
    require_same(made, wanted)
    out = {
        name: DTensor.from_shards(
            {d: torch.zeros_like(s) for d, s in tensor.shards.items()}, tensor.layout
        )
        for name, tensor in made.items()
    }
    assert plan.run({}, out) == out
    require_same(out, wanted)
    # A state dict gives the same tensors in the same layouts.
    whole = load_file(model / "model.safetensors")
    state = {
        name: DTensor(tensor, TWO, f"[{','.join('R' * tensor.dim())}]")
        for name, tensor in whole.items()
    }
    in_memory = plan_reshard(state, target, dtype="fp8-128x128")
    require_same(in_memory.run(state), wanted)
    layouts = {move.target_name: move.target for move in plan.moves}
    assert {move.target_name: move.target for move in in_memory.moves} == layouts
    # What the plan says is what is made.
    assert plan.received == {
        device: sum(of.shards[device].nbytes for of in made.values() if device in of.shards)
        for device in plan.copies.devices
    }


def test_what_a_plan_that_quantizes_a_checkpoint_says(model):
    plan = plan_reshard(str(model), (TWO, {}), dtype="fp8-128x128")
    assert plan != plan_reshard(model, (TWO, {}))
    assert str(plan).splitlines()[-1] == f"reads the checkpoint {model} and quantizes weights"
    for call, says in (
        (lambda: plan.transfers(0), "this plan quantizes, so it is more than byte copies"),
        (lambda: plan.run({}, receipt=True), "quantizes weights gives no receipt"),
        (lambda: plan.run({"w": 1}), "takes no tensors"),
    ):
        with pytest.raises(LayoutError, match=says) as error:
            call()
        assert "\n" not in str(error.value)
    tensors = load_file(model / "model.safetensors")
    for changed, says in (
        (torch.zeros(4, 4), "has changed since"),
        (torch.zeros(SHAPES[1]).to(torch.float8_e4m3fn), "is quantized already"),
    ):
        tensors["layers.1.up_proj.weight"] = changed
        save_file(tensors, model / "model.safetensors")
        with pytest.raises(CheckpointError, match=says):
            plan.run({})


def test_checkpoints_that_are_quantized_or_not_finite_are_refused(tmp_path):
    weight = weights((256, 128))
    codes = {"up.weight": weight.to(torch.float8_e4m3fn), "up.weight_scale_inv": torch.ones(2, 1)}
    source = written(tmp_path / "codes", codes | {"down.weight": weight}, FP8)
    with pytest.raises(DTypeError, match=r"'up.weight' is quantized already .*; leave out dtype="):
        plan_reshard(source, (TWO, {}), dtype="fp8-128x128")
    # What a map renames is no less quantized.
    for how in ({"names": {"up.weight": "x.weight"}}, {}):
        for call in (
            lambda how=how: plan_reshard(source, (TWO, {}), dtype="fp8-128x128", **how),
            lambda how=how: wanted_of(source, tmp_path / "no", **how),
        ):
            with pytest.raises(DTypeError, match=r"'up.weight' is quantized already"):
                call()
    assert not (tmp_path / "no.safetensors").exists()
    # What is left behind may be.
    plan = plan_reshard(source, (TWO, {}), dtype="fp8-128x128", drop=["up.*"])
    assert plan.dropped == ("up.weight", "up.weight_scale_inv")
    wanted = wanted_of(source, tmp_path / "out", exclude="up.*")
    require_same(plan.run({}), wanted)
    weight[200, 100] = float("inf")
    source = written(tmp_path / "infinite", {"up.weight": weight})
    plan = plan_reshard(source, (TWO, {"*": "[S0,R]"}), dtype="fp8-128x128")
    with pytest.raises(CheckpointError, match=r"'up.weight' has NaN or infinity"):
        plan.run({})
    pending = DTensor.from_local({0: torch.ones(4, 4), 1: torch.ones(4, 4)}, TWO, "[R,R|P0]")
    save_sharded({"up.weight": pending}, tmp_path / "pending")
    with pytest.raises(LayoutError, match="stored with a reduction pending"):
        plan_reshard(tmp_path / "pending", (TWO, {}), dtype="fp8-128x128")


def test_names_maps_and_families_of_a_checkpoint(tmp_path):
    folder, _ = saved(tmp_path / "model", "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    for number, (names, rules) in enumerate(
        (
            (None, {"*.q_proj.weight": "[S0,R]"}),
            ({"lm_head.weight": "model.layers.0.mlp.up_proj_too.weight"}, {}),
            (load_map("qwen3-moe-hf-to-fused", config), {"*.qkv_proj.weight": "[S0,R]"}),
            (load_map("qwen3-moe-hf-to-megatron", config), {"*.linear_qkv.weight": "[R,S0]"}),
        )
    ):
        wanted = wanted_of(folder, tmp_path / f"{number}", names=names)
        plan = plan_reshard(folder, (THREE, rules), names=names, dtype="fp8-128x128")
        require_same(plan.run({}), wanted)
        assert sum(name.endswith("_scale_inv") for name in wanted) >= 8
    # Of a target's own state dict, scales lie as it says.
    layouts = {
        name: Layout(TWO, f"[{','.join('R' * tensor.dim())}]", tensor.shape, tensor.dtype)
        for name, tensor in wanted.items()
    }
    plan = plan_reshard(folder, layouts, names=names, dtype="fp8-128x128")
    require_same(plan.run({}), wanted)
    layouts |= dict.fromkeys(("other", "other_scale_inv"), layouts[min(layouts)])
    with pytest.raises(LayoutError, match="the source lacks 'other'"):
        plan_reshard(folder, layouts, names=names, dtype="fp8-128x128")


def test_what_a_map_fills_with_zeros(tmp_path):
    name_map = NameMap.parse(
        "[sizes]\nrows = 150\nhigh = 300\n"
        + "".join(
            f'[[map]]\nsource = ["{name}", "r c"]\ntarget = ["{name}", "high c", "high[:rows]"]\n'
            f'[[zeros]]\ntarget = ["{name}", "high c", "high[rows:]"]\n'
            for name in ("embed.weight", "up.weight")
        )
    )
    tensors = {"embed.weight": weights((150, 6)), "up.weight": weights((150, 200))}
    source = written(tmp_path / "model", tensors)
    plan = plan_reshard(source, (THREE, {"*": "[S0,R]"}), names=name_map, dtype="fp8-128x128")
    require_same(plan.run({}), wanted_of(source, tmp_path / "out", names=name_map))
    # What reads rows finds zeros in the file of that name.
    same = NameMap.parse("".join(f'[[map]]\nsource = "{n}"\ntarget = "{n}"\n' for n in tensors))
    catalog, plan, _, files = plan_stored(
        mapped(open_checkpoint(source), name_map), (TWO, {}), same, None, None
    )
    assert files == {2: "/dev/zero", 3: "model.safetensors"}
    made = {name: bytearray(2 * tensor.numel() * 2) for name, tensor in tensors.items()}
    for row in transfer_rows(plan.copies, 1, files=file_regions(catalog, 2)):
        target = made[plan.moves[row["tensor"]].target_name]
        with (source / files[int(row["sender"])]).open("rb") as file:
            for step in range(row["count"]):
                file.seek(int(row["source_offset"] + step * row["source_step"]))
                at = int(row["target_offset"] + step * row["target_step"])
                target[at : at + row["run_bytes"]] = file.read(int(row["run_bytes"]))
    for name, tensor in tensors.items():
        wanted = torch.nn.functional.pad(tensor, (0, 0, 0, 150))
        assert torch.frombuffer(made[name], dtype=torch.bfloat16).equal(wanted.flatten())


def test_what_a_config_lists_is_not_quantized_nor_what_is_dropped_read(tmp_path):
    tensors = {f"a.{name}.weight": weights((130, 4)) for name in "pqr"}
    source = written(tmp_path / "model", tensors, {"modules_to_not_convert": ["a.q"]})
    plan = plan_reshard(source, (TWO, {"a.*": "[S0,R]"}), dtype="fp8-128x128", drop="a.r.*")
    require_same(plan.run({}), wanted_of(source, tmp_path / "out", exclude="a.r.*"))
    assert [move.target_name for move in plan.moves] == [
        "a.p.weight",
        "a.p.weight_scale_inv",
        "a.q.weight",
    ]
    for option, says in (({"drop": "no.*"}, "'no.*'"), ({"names": {"no": "a"}}, "'no', which")):
        with pytest.raises((CheckpointError, LayoutError), match=says):
            plan_reshard(source, (TWO, {}), dtype="fp8-128x128", **option)

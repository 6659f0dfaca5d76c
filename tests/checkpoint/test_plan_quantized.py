"""Plans in memory that quantise weights, where cuts fall on blocks."""

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, NameMap, plan_reshard
from shardspec.errors import DTypeError, LayoutError
from tests.checkpoint.test_quantising import fp8_of, same_bytes, weights

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
def test_weights_are_quantised_where_cuts_fall_on_blocks(before, after, sender, given):
    shape = (640, 512) if "640" in before or "340" in before or "512" in before else (512, 512)
    shape = (640, 512) if "256" in after else shape
    weight = weights(shape)
    state = state_of(weight, before)
    plan = plan_reshard(state, (THREE, {NAME: after}), dtype="fp8-128x128")
    assert plan.quantised == (() if sender else (NAME,))
    travelling = {move.source.dtype for move in plan.moves if move.target_name == NAME}
    assert travelling == {"float8_e4m3fn" if sender else "bfloat16"}
    codes, scales = fp8_of(weight, "transformers")
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
    with pytest.raises(LayoutError, match="this plan quantises"):
        plan.transfers(5)
    with pytest.raises(LayoutError, match="gives no receipt"):
        plan.run(state, receipt=True)


def test_half_the_bytes_travel_if_senders_quantise():
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


def test_what_a_map_makes_is_quantised_where_it_arrives():
    halves = {"gate": weights((256, 128)), "up": weights((256, 128)) * 2}
    state = {name: DTensor(tensor, TWO, "[S0,R]") for name, tensor in halves.items()}
    names = NameMap.parse(
        '[[map]]\nsource = ["gate", "f h"]\ntarget = ["fc1.weight", "(two f) h", "two[0]"]\n'
        '[[map]]\nsource = ["up", "f h"]\ntarget = ["fc1.weight", "(two f) h", "two[1]"]\n'
        "[sizes]\ntwo = 2\n"
    )
    rules = {"fc1.weight": "[S0{256,256},R]"}
    plan = plan_reshard(state, (TWO, rules), names=names, dtype="fp8-128x128")
    assert plan.quantised == ("fc1.weight",)
    found = plan.run(state)
    codes, scales = fp8_of(torch.cat(list(halves.values())), "transformers")
    same_bytes(found["fc1.weight"].full_tensor(), codes)
    same_bytes(found["fc1.weight_scale_inv"].full_tensor(), scales)


def test_weights_that_are_not_finite_or_quantised_already():
    weight = weights((256, 128))
    weight[200, 100] = float("nan")
    state = {NAME: DTensor(weight, TWO, "[S0,R]")}
    plan = plan_reshard(state, (TWO, {NAME: "[R,R]"}), dtype="fp8-128x128")
    with pytest.raises(LayoutError, match="has NaN or infinity"):
        plan.run(state)
    codes = {NAME: Layout(TWO, "[S0,R]", (256, 128), "float8_e4m3fn")}
    with pytest.raises(DTypeError, match="is quantised already"):
        plan_reshard(codes, (TWO, {}), dtype="fp8-128x128")
    with pytest.raises(LayoutError, match="is quantised as it is written"):
        plan_reshard("somewhere", (TWO, {}), dtype="fp8-128x128")


def test_stacks_and_empty_shards():
    experts = weights((3, 256, 200))
    name = "mlp.experts.gate_up_proj"
    state = {name: DTensor(experts, TWO, "[S0,R,R]")}
    mesh = DeviceMesh(range(4), (4,))
    plan = plan_reshard(state, (mesh, {name: "[R,S0*128,R]"}), dtype="fp8-128x128")
    found = plan.run(state)
    for place, expert in enumerate(experts):
        codes, scales = fp8_of(expert, "transformers")
        same_bytes(found[name].full_tensor()[place], codes)
        same_bytes(found[f"{name}_scale_inv"].full_tensor()[place], scales)

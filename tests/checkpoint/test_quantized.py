"""Quantized tensors are kept as they are: not cast, and not cut inside what shares a scale."""

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    NameMap,
    ShardSpecError,
    load_sharded,
    merge,
    plan_reshard,
    reshard,
)
from shardspec.cli.main import cli
from shardspec.errors import DTypeError, LayoutError

TWO = DeviceMesh(range(2), (2,))
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def zeros(dtype, *shape):
    return torch.zeros(shape, dtype=torch.float32).to(getattr(torch, dtype))


def written(place, tensors, config=None, name="model.safetensors"):
    """Write tensors, given as dtype and sizes, and a config with a quantization beside them."""
    place.mkdir(exist_ok=True)
    save_file({key: zeros(*value) for key, value in tensors.items()}, place / name)
    if config is not None:
        (place / "config.json").write_text(json.dumps({"quantization_config": config}))
    return place


def run(*args):
    return CliRunner().invoke(cli, list(map(str, args)), catch_exceptions=False)


NORM: dict[str, tuple[Any, ...]] = {"norm.weight": ("float32", 8)}
SCHEMES: dict[str, dict[str, tuple[Any, ...]]] = {
    "FP8 blocks": {"a.weight": ("float8_e4m3fn", 8, 8), "a.weight_scale_inv": ("float32", 1, 1)},
    "FP8 of experts": {
        "mlp.experts.down_proj": ("float8_e4m3fn", 2, 8, 8),
        "mlp.experts.down_proj_scale_inv": ("float32", 2, 1, 1),
    },
    "FP8 tensor": {
        "a.weight": ("float8_e5m2", 8, 8),
        "a.weight_scale": ("float32",),
        "a.input_scale": ("float32",),
    },
    "FP8 alone": {"a.weight": ("float8_e4m3fn", 8, 8)},
    "scales alone": {"a.weight_scale_inv": ("float32", 1, 1)},
    "ComfyUI": {"a.weight": ("float8_e4m3fn", 8, 8), "a.scale_weight": ("float32",)},
    "GPTQ": {
        "a.qweight": ("int32", 4, 8),
        "a.qzeros": ("int32", 1, 1),
        "a.scales": ("float16", 1, 8),
        "a.g_idx": ("int32", 32),
    },
    "AWQ": {
        "a.qweight": ("int32", 32, 1),
        "a.qzeros": ("int32", 1, 1),
        "a.scales": ("float16", 1, 8),
    },
    "compressed-tensors": {
        "a.weight_packed": ("int32", 8, 4),
        "a.weight_scale": ("bfloat16", 8, 1),
        "a.weight_shape": ("int64", 2),
    },
    "compressed-tensors int8": {
        "a.weight": ("int8", 8, 8),
        "a.weight_scale": ("bfloat16", 8, 1),
        "a.weight_zero_point": ("int8", 8, 1),
    },
    "NVFP4": {
        "a.weight": ("uint8", 8, 8),
        "a.weight_scale": ("float8_e4m3fn", 8, 1),
        "a.weight_scale_2": ("float32",),
    },
    "MXFP4": {
        "x.down_proj_blocks": ("uint8", 2, 8, 1, 16),
        "x.down_proj_scales": ("uint8", 2, 8, 1),
    },
    "MLX": {
        "a.weight": ("uint32", 8, 4),
        "a.scales": ("bfloat16", 8, 1),
        "a.biases": ("bfloat16", 8, 1),
    },
    "bitsandbytes NF4": {
        "a.weight": ("uint8", 32, 1),
        "a.weight.absmax": ("float32", 1),
        "a.weight.quant_map": ("float32", 16),
        "a.weight.quant_state.bitsandbytes__nf4": ("uint8", 9),
    },
    # Kept in bfloat16, so that FSDP takes it.
    "bitsandbytes NF4 in another dtype": {
        "a.weight": ("bfloat16", 16, 1),
        "a.weight.absmax": ("float32", 1),
    },
    "bitsandbytes int8": {"a.weight": ("int8", 8, 8), "a.SCB": ("float32", 8)},
    "optimizer": {"s.state1": ("uint8", 8, 8), "s.absmax1": ("float32", 1)},
    "torchao": {"a._weight_qdata": ("int8", 8, 8), "a._weight_scale": ("float32", 8, 1)},
    "quanto": {"a.weight._data": ("int8", 8, 8), "a.weight._scale": ("bfloat16", 8, 1)},
    "HQQ": {
        "a.W_q": ("uint8", 4, 8),
        "a.scale": ("float16", 8, 1),
        "a.zero": ("float16", 8, 1),
    },
    "EETQ": {"a.weight": ("int8", 8, 8), "a.weight_scales": ("float16", 8)},
    "FBGEMM": {
        "x.gate_up_proj": ("float8_e4m3fn", 2, 8, 8),
        "x.gate_up_proj_scale": ("float32", 2, 1, 8),
    },
    "AQLM": {
        "a.codes": ("int8", 8, 1, 1),
        "a.codebooks": ("float16", 1, 256, 1, 8),
        "a.scales": ("float16", 8, 1, 1, 1),
    },
    "FP4": {"a.weight": ("float8_e8m0fnu", 8, 8)},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_neither_codes_nor_scales_are_cast(tmp_path, scheme):
    tensors = SCHEMES[scheme]
    source = written(tmp_path / "model", {**tensors, **NORM})
    for name in tensors:
        # Each alone: where the rest of it is left out.
        if any(dtype.startswith(("float", "bfloat")) for dtype, *_ in tensors.values()):
            with pytest.raises(DTypeError, match="is quantized"):
                merge(source, tmp_path / "out.safetensors", dtype="float64", include=[name])
    with pytest.raises(DTypeError, match=r"is quantized.*; omit dtype="):
        reshard(source, tmp_path / "out", device_mesh=TWO, dtype="bf16")
    with pytest.raises(DTypeError, match=r"is quantized.*; omit dtype="):
        plan_reshard(source, (TWO, {}), dtype="bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    merge(source, tmp_path / "norm.safetensors", dtype="float64", exclude=list(tensors))
    assert load_file(tmp_path / "norm.safetensors")["norm.weight"].dtype == torch.float64
    merge(source, tmp_path / "same.safetensors")
    found = load_file(tmp_path / "same.safetensors")
    assert {name: str(found[name].dtype) for name in tensors} == {
        name: f"torch.{dtype}" for name, (dtype, *_) in tensors.items()
    }


def test_at_the_command_line_a_cast_is_one_line(tmp_path):
    source = written(tmp_path / "model", SCHEMES["quanto"])
    for args in (
        ("merge", source, "-o", tmp_path / "o.safetensors", "--strict-cast"),
        ("reshard", source, "-o", tmp_path / "o", "--mesh", "2", "--rule", "*", "[R,R]"),
        ("plan-state", source, "--mesh", "2"),
    ):
        done = run(*args, "--dtype", "bf16")
        assert done.exit_code == 2
        remedy = "exclude these tensors"
        if args[0] == "plan-state":
            remedy = "give these their own dtypes"
        assert done.stderr == (
            "Error: cannot cast to bfloat16: tensor 'a.weight._data' is quantized "
            "('a.weight._scale' goes with it), and a cast would corrupt codes and scales; "
            f"omit --dtype, {remedy}, or dequantize first with the tool that wrote them\n"
        )


def test_what_only_looks_alike_is_cast(tmp_path):
    plain = {
        "norm.weight": ("float32", 8),
        "norm.scale": ("float32", 8),
        "layer_scale.scale": ("float32", 8),
        "logit_scale": ("float32",),
        "bn.weight": ("float32", 8),
        "bn.num_batches_tracked": ("int64",),
        "attn.masked_bias": ("float32",),
        "attn.bias": ("uint8", 1, 1, 8, 8),
        "rel.weight": ("float32", 8, 8),
        "rel.biases": ("float32", 8),
        "q.output_scale": ("float32",),
    }
    source = written(tmp_path / "model", plain)
    merge(source, tmp_path / "out.safetensors", dtype="bf16")
    found = load_file(tmp_path / "out.safetensors")
    assert {name for name in plain if found[name].dtype == torch.bfloat16} == {
        name for name, (dtype, *_) in plain.items() if dtype == "float32"
    }


def test_a_config_marks_modules_of_unknown_names(tmp_path):
    tensors = {"a.strange": ("uint8", 8, 8), "a.factors": ("float16", 8), "a.bias": ("float32", 8)}
    source = written(tmp_path / "model", {**tensors, **NORM}, {"quant_method": "new"})
    with pytest.raises(DTypeError, match=r"'a\.factors' is quantized \(the config says"):
        merge(source, tmp_path / "out.safetensors", dtype="bf16")
    merge(source, tmp_path / "out.safetensors", dtype="bf16", include=["a.bias", "norm.*"])
    written(tmp_path / "model", {**tensors, **NORM})
    (tmp_path / "model" / "config.json").write_text("{}")
    merge(source, tmp_path / "other.safetensors", dtype="bf16")


def test_plans_between_layouts_in_memory():
    def state(spec, dtypes=("float8_e4m3fn", "float32"), mesh=TWO):
        codes, scales = dtypes
        return {
            "a.weight": Layout(mesh, spec, (256, 256), codes),
            "a.weight_scale_inv": Layout(mesh, "[R,R]", (2, 2), scales),
            "norm": Layout(mesh, "[R]", (4,), "float32"),
        }

    targets: list[tuple[DeviceMesh, dict[str, str]]] = [(TWO, {}), (DeviceMesh(range(4), (4,)), {})]
    for target in targets:
        with pytest.raises(DTypeError, match="is quantized"):
            plan_reshard(state("[R,R]"), target, dtype="bf16")
    for dtypes in (("bfloat16", "float32"), ("float8_e4m3fn", "bfloat16")):
        with pytest.raises(DTypeError, match="is quantized"):
            plan_reshard(state("[R,R]"), state("[R,R]", dtypes))
    norm = {**state("[S0,R]"), "norm": Layout(TWO, "[R]", (4,), "bfloat16")}
    assert len(plan_reshard(state("[R,R]"), norm).moves) == 3
    four = DeviceMesh(range(4), (4,))
    with pytest.raises(LayoutError, match="inside a block of 128 elements"):
        plan_reshard(state("[S0,R]"), state("[S0,R]", mesh=four))
    # Parts of blocks are no use but to be gathered, as where they come from.
    assert plan_reshard(state("[S0,R]", mesh=four), state("[R,S0]", mesh=four)).moves


def fp8_model(place, rows=512, cols=256):
    tensors = {
        "a.weight": ("float8_e4m3fn", rows, cols),
        "a.weight_scale_inv": ("float32", -(-rows // 128), -(-cols // 128)),
    }
    return written(place, tensors, FP8)


def every_way(source, mesh, rules, tmp_path):
    """Return the errors of all ways to cut a checkpoint, each once."""
    into = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        spec = rules.get(name, f"[{','.join('R' * tensor.dim())}]")
        layout = Layout(mesh, spec, tuple(tensor.shape), tensor.dtype)
        shards = {d: torch.empty(layout.local_shape(d), dtype=tensor.dtype) for d in mesh.ids}
        into[name] = DTensor.from_shards(shards, layout)
    said = set()
    for act in (
        lambda: reshard(source, tmp_path / "out", device_mesh=mesh, rules=rules, dry_run=True),
        lambda: load_sharded(source, mesh, rules),
        lambda: load_sharded(source, into=into),
        lambda: plan_reshard(source, (mesh, rules)).run({}),
        lambda: plan_reshard(source, {name: value.layout for name, value in into.items()}),
    ):
        try:
            act()
        except ShardSpecError as error:
            said.add(str(error))
        else:
            said.add("")
    return said


def test_all_ways_to_cut_look_at_blocks_and_name_a_spec_that_works(tmp_path):
    source, mesh = fp8_model(tmp_path / "model"), DeviceMesh(range(3), (3,))
    (said,) = every_way(source, mesh, {"a.weight": "[S0,R]"}, tmp_path)
    assert "'a.weight': spec [S0,R] splits dim 0 at 0:171, inside a block of 128 elements" in said
    (said,) = every_way(source, TWO, {"a.weight": "[S0{192,320},R]"}, tmp_path)
    assert "splits dim 0 at 0:96, inside a block of 128 elements" in said
    source, mesh = fp8_model(tmp_path / "more", rows=1000), DeviceMesh(range(4), (4,))
    (said,) = every_way(source, mesh, {"a.weight": "[S0,R]"}, tmp_path)
    better = said.rpartition("split at multiples of 128, as ")[2]
    assert better == "[S0*128,R]"
    assert every_way(source, mesh, {"a.weight": better}, tmp_path) == {""}


def test_parts_that_end_on_blocks_are_cut(tmp_path):
    source = fp8_model(tmp_path / "model", rows=1024)
    for spec in ("[S0{512,256,256},R]", "[S0{512,512/1},R]", "[R,S0]", "[S0,R]"):
        assert every_way(source, TWO, {"a.weight": spec}, tmp_path) == {""}
    four = DeviceMesh(range(4), (4,))
    (said,) = every_way(source, four, {"a.weight": "[S0{512,256,256},R]"}, tmp_path)
    assert "splits dim 0 at 512:576, inside a block of 128 elements that share a scale" in said


def test_scales_that_are_cut_otherwise_than_their_codes_are_refused(tmp_path):
    source = fp8_model(tmp_path / "model", rows=1024)
    rules = {"a.weight": "[S0{512,256,256},R]", "a.weight_scale_inv": "[S0,R]"}
    (said,) = every_way(source, TWO, rules, tmp_path)
    assert "[S0{512,256,256},R]" in said
    assert "its scales 'a.weight_scale_inv'" in said
    rules["a.weight_scale_inv"] = "[S0{4,2,2},R]"
    assert every_way(source, TWO, rules, tmp_path) == {""}


def test_scales_of_rows_are_cut_as_the_rows(tmp_path):
    tensors = {"a.weight": ("float8_e4m3fn", 8, 8), "a.weight_scale": ("float32", 8, 1)}
    source = written(tmp_path / "model", tensors)
    for spec, fits in (("[S0,R]", True), ("[R,R]", True), ("[S0*3,R]", False)):
        rules = {"a.weight": "[S0,R]", "a.weight_scale": spec}
        said = every_way(source, TWO, rules, tmp_path)
        assert (said == {""}) == fits, said


def test_codes_that_a_map_changes_are_not_cut(tmp_path):
    tensors = {"a.weight": ("float8_e4m3fn", 256, 128), "b.weight": ("float8_e4m3fn", 256, 128)}
    source = written(tmp_path / "model", tensors, FP8)
    fused = NameMap.parse(
        '[[map]]\nsource = ["a.weight", "r c"]\ntarget = ["ab", "(two r) c", "two[0]"]\n'
        '[[map]]\nsource = ["b.weight", "r c"]\ntarget = ["ab", "(two r) c", "two[1]"]\n'
        "[sizes]\ntwo = 2\n"
    )
    four = DeviceMesh(range(4), (4,))
    assert plan_reshard(source, (four, {}), names=fused).moves
    out = reshard(source, tmp_path / "o", device_mesh=four, rules={}, names=fused)
    assert out.tensors == 1
    for act in (
        lambda: plan_reshard(source, (four, {"ab": "[S0,R]"}), names=fused),
        lambda: load_sharded(source, four, {"ab": "[S0,R]"}, names=fused),
    ):
        with pytest.raises(ShardSpecError, match=r"'ab'.* splits dim 0 at 0:128.*replicate it"):
            act()
    renamed = {"a.weight": "c.weight"}
    for names in (renamed, NameMap((((("a.weight",), ("c.weight",))), (("b.weight",), ("b",))))):
        assert plan_reshard(source, (TWO, {"c.weight": "[S0,R]"}), names=names).moves
        with pytest.raises(LayoutError, match="a block of 128"):
            plan_reshard(source, (four, {"c.weight": "[S0,R]"}), names=names)
    with pytest.raises(DTypeError, match=r"'a\.weight' is quantized"):
        plan_reshard(source, (four, {}), names=fused, dtype="bf16")
    with pytest.raises(DTypeError, match=r"'a\.weight' is quantized"):
        merge(source, tmp_path / "m.safetensors", names=fused, dtype="bf16")


def test_scales_in_another_file_leave_the_blocks_that_the_config_states(tmp_path):
    place = tmp_path / "model"
    written(place, {"a.weight": ("float8_e4m3fn", 256, 256)}, FP8, "codes.safetensors")
    with pytest.raises(LayoutError, match="inside a block of 128"):
        plan_reshard(place / "codes.safetensors", (DeviceMesh(range(4)), {"a.weight": "[S0,R]"}))
    assert plan_reshard(place / "codes.safetensors", (TWO, {"a.weight": "[S0,R]"})).moves


UNKNOWN = [name for name in SCHEMES if not name.startswith(("FP8", "scales", "MXFP4", "FP4"))]


@pytest.mark.parametrize("scheme", UNKNOWN)
def test_codes_of_other_schemes_are_moved_whole(tmp_path, scheme):
    tensors = SCHEMES[scheme]
    source = written(tmp_path / "model", {**tensors, **NORM})
    for name, (dtype, *shape) in tensors.items():
        if not shape or max(shape) == 1 or not ("int" in dtype or dtype.startswith("float8")):
            continue
        for dim, size in enumerate(shape):
            spec = ",".join("S0" if at == dim else "R" for at in range(len(shape)))
            for act in (
                lambda rules: plan_reshard(source, (TWO, rules)),
                lambda rules: load_sharded(source, TWO, rules),
                lambda rules: reshard(source, tmp_path / "cut", device_mesh=TWO, rules=rules),
            ):
                if size > 1:
                    with pytest.raises(ShardSpecError, match=f"{name}.* dim {dim}.*replicate"):
                        act({name: f"[{spec}]"})
    assert not (tmp_path / "cut").exists()
    reshard(source, tmp_path / "whole", device_mesh=TWO, rules={"norm.weight": "[S0]"})
    merge(tmp_path / "whole", tmp_path / "back.safetensors")
    found = load_file(tmp_path / "back.safetensors")
    stored = load_file(source / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in stored.items()
    }


def test_sizes_that_nothing_states_are_not_guessed(tmp_path):
    # 1000 rows and 8 scales: blocks of 128; 4 scales: of a size that nothing states.
    tensors = {
        "a.weight": ("float8_e4m3fn", 1000, 128),
        "a.weight_scale_inv": ("float32", 8, 1),
    }
    source, eight = written(tmp_path / "model", tensors), DeviceMesh(range(8), (8,))
    assert plan_reshard(source, (eight, {"a.weight": "[S0*128,R]"})).moves
    for spec in ("[S0,R]", "[S0*125,R]"):
        with pytest.raises(LayoutError, match="a block of 128 elements"):
            plan_reshard(source, (eight, {"a.weight": spec}))
    other = {**tensors, "a.weight_scale_inv": ("float32", 4, 1)}
    written(tmp_path / "model", other)
    for spec in ("[S0,R]", "[S0*128,R]", "[S0*256,R]"):
        with pytest.raises(LayoutError, match="replicate it"):
            plan_reshard(source, (eight, {"a.weight": spec}))
    written(tmp_path / "model", tensors, FP8)
    assert plan_reshard(source, (eight, {"a.weight": "[S0*128,R]"})).moves


def test_other_files_state_blocks_too(tmp_path):
    tensors = {"a.weight": ("float8_e4m3fn", 4, 96), "a.weight_scale": ("uint8", 4, 3)}
    source = written(tmp_path / "model", tensors)
    stated = {"quantization": {"quant_algo": "MXFP8", "group_size": 32}}
    (source / "hf_quant_config.json").write_text(json.dumps(stated))
    with pytest.raises(LayoutError, match=r"a block of 32 elements.*as \[R,S0\*32\]"):
        plan_reshard(source, (TWO, {"a.weight": "[R,S0]"}))
    assert plan_reshard(source, (TWO, {"a.weight": "[R,S0*32]"})).moves

"""Outputs that other libraries read: configs state what is written, or the output is refused."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardspec import DeviceMesh, load_sharded, merge, plan_reshard, reshard
from shardspec.errors import CheckpointError, DTypeError, ShardSpecError
from tests.checkpoint.test_low_precision import FP8, TWO, compressed, merged, run, spread, written

E4M3 = torch.float8_e4m3fn
LAYER = "model.layers.0."


def model(place, tensors, config):
    written(place, tensors)
    (place / "config.json").write_text(json.dumps(config))
    return place


def config_in(place):
    return json.loads((place / "config.json").read_text())


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({"dtype": "float32"}, {"dtype": "bfloat16"}),
    "torch_dtype": ({"torch_dtype": "torch.float16"}, {"torch_dtype": "bfloat16"}),
    "nested": (
        {"dtype": "float32", "text_config": {"dtype": "float32"}, "v": {"torch_dtype": "float16"}},
        {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"},
         "v": {"torch_dtype": "bfloat16"}},
    ),
    "none": ({"hidden_size": 8}, {"hidden_size": 8}),
    "auto": ({"dtype": "auto"}, {"dtype": "auto"}),
    "of the state of a layer": ({"mamba_ssm_dtype": "float32"}, {"mamba_ssm_dtype": "float32"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("quantized", [False, True])
def test_configs_state_the_dtype_that_is_written(tmp_path, kind, quantized):
    before, after = CONFIGS[kind]
    tensors = {"norm.weight": torch.ones(8)}
    if quantized:
        tensors |= {"a.weight": torch.ones(8, 8).to(E4M3), "a.weight_scale_inv": torch.ones(1, 1)}
        before = {**before, "quantization_config": FP8}
    source = model(tmp_path / "in", tensors, before)
    (source / "generation_config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    merge(source, f"{tmp_path}/out/", dtype="bf16")
    assert config_in(tmp_path / "out") == after
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"torch_dtype": "bfloat16"}
    reshard(source, tmp_path / "cut", device_mesh=TWO, dtype="bf16")
    assert config_in(tmp_path / "cut") == after
    merge(source, f"{tmp_path}/same/")
    assert config_in(tmp_path / "same") == before


def test_a_cast_to_codes_names_what_makes_scales(tmp_path):
    source = model(tmp_path / "in", {"a.weight": torch.randn(128, 128)}, {})
    for dtype in ("fp8", "float8_e5m2"):
        for act in (
            lambda: merge(source, tmp_path / "out.safetensors", dtype=dtype),  # noqa: B023
            lambda: reshard(source, tmp_path / "out", device_mesh=TWO, dtype=dtype),  # noqa: B023
            lambda: load_sharded(source, TWO, {}, dtype=dtype),  # noqa: B023
            lambda: plan_reshard(source, (TWO, {}), dtype=dtype),  # noqa: B023
        ):
            with pytest.raises(ShardSpecError, match="quantize="):
                act()
        done = run("merge", source, "-o", f"{tmp_path}/out/", "--dtype", dtype)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert "--quantize" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("kind", ["fp8-128x128", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("include", [None, "*experts*"])
def test_stacked_experts_are_refused(tmp_path, kind, include):
    tensors = {
        f"{LAYER}mlp.experts.gate_up_proj": torch.randn(2, 128, 256),
        f"{LAYER}self_attn.q_proj.weight": torch.randn(128, 128),
    }
    source = model(tmp_path / "in", tensors, {"hidden_size": 128})
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.experts.gate_up_proj' stacks"):
        merge(source, f"{tmp_path}/out/", quantize=kind, quantize_include=include)
    of_gpt_oss = model(tmp_path / "oss", tensors, {"model_type": "gpt_oss"})
    if kind != "mxfp4":
        with pytest.raises(CheckpointError, match="transformers reads in mxfp4"):
            merge(of_gpt_oss, f"{tmp_path}/out/", quantize=kind, quantize_include=include)
    assert not (tmp_path / "out").exists()


def test_kernels_of_convolutions_stay_as_they_are(tmp_path):
    tensors = {"conv1d.weight": torch.randn(256, 1, 4), "a_proj.weight": torch.randn(128, 128)}
    source = model(tmp_path / "in", tensors, {})
    merge(source, f"{tmp_path}/out/", quantize="fp8-128x128")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name, each in found.items() if each.dtype == E4M3} == {"a_proj.weight"}


def test_matrices_of_other_sides_than_blocks_stay_with_those_they_are_fused_with(tmp_path):
    sizes = {
        "self_attn.q_proj": (256, 128),
        "self_attn.k_proj": (64, 128),
        "self_attn.v_proj": (64, 128),
        "self_attn.o_proj": (128, 256),
        "mlp.gate_proj": (384, 128),
        "mlp.up_proj": (384, 128),
        "mlp.down_proj": (128, 384),
    }
    tensors = {f"{LAYER}{name}.weight": torch.randn(size) for name, size in sizes.items()}
    source = model(tmp_path / "in", tensors, {})
    merge(source, f"{tmp_path}/out/", quantize="fp8-128x128")
    found = load_file(tmp_path / "out" / "model.safetensors")
    kept = {f"{LAYER}self_attn.{one}_proj" for one in "qkv"}
    assert {name for name in found if found[name].dtype == torch.float32} == {
        *(f"{name}.weight" for name in kept),
        *(f"{name}_scale_inv" for name in found if found[name].dtype == E4M3),
    }
    assert {*config_in(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]} == kept
    for which in ("quantize_include", "include"):
        how: dict[str, Any] = {"quantize": "fp8-128x128", which: "*k_proj*"}
        with pytest.raises(CheckpointError, match=r"64x128.*k_proj.*mxfp8"):
            merge(source, f"{tmp_path}/no/", **how)


def test_an_output_that_would_not_state_its_blocks_is_refused(tmp_path):
    source = model(tmp_path / "in", {"up_proj.weight": torch.randn(128, 128)}, {})
    places = {"out.safetensors": True, "out.pt": True, "out/": False}
    for kind in ("fp8-128x128", "mxfp8", "mxfp4"):
        for place, sidecars in places.items():
            remedy = "name a directory" if sidecars else "omit sidecars=False"
            with pytest.raises(CheckpointError, match=f"{kind} .*{remedy}"):
                merge(source, f"{tmp_path}/{place}", quantize=kind, sidecars=sidecars)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    # Formats of shards have a config, too, and are read back.
    mesh = DeviceMesh(range(2))
    reshard(source, tmp_path / "cut", device_mesh=mesh, quantize="fp8-128x128")
    back = merged(tmp_path / "cut", tmp_path / "back.safetensors", dtype="bf16")
    assert back.keys() == {"up_proj.weight"}


def test_embeddings_are_not_quantized(tmp_path):
    source = model(tmp_path / "in", {"embed_tokens.weight": torch.randn(128, 128)}, {})
    with pytest.raises(CheckpointError, match="is no linear layer"):
        merge(source, f"{tmp_path}/out/", quantize="fp8-128x128", quantize_include="*")


SKIPPED = {
    "weight": ["model.layers.0.mlp.down_proj.weight"],
    "a part of the end": ["down_proj"],
    "the end": ["mlp.down_proj"],
    "the start": ["model.layers.0.mlp"],
    "the whole name": ["model.layers.0.mlp.down_proj"],
    "a shell pattern": ["model.layers.*.mlp"],
    "a regular expression": ["re:.*down.*"],
}


@pytest.mark.parametrize("form", SKIPPED)
@pytest.mark.parametrize(
    "key", ["modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules"]
)
def test_modules_that_a_config_skips_in_any_form(tmp_path, form, key):
    names = ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj")
    tensors = {f"{name}.weight": torch.randn(128, 128) for name in names}
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], key: SKIPPED[form]}
    source = model(tmp_path / "in", tensors, {"quantization_config": section})
    merge(source, f"{tmp_path}/out/", quantize="fp8-128x128")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found[f"{names[0]}.weight"].dtype == torch.float32
    assert found[f"{names[1]}.weight"].dtype == E4M3
    written_section = config_in(tmp_path / "out")["quantization_config"]
    assert written_section["modules_to_not_convert"] == [names[0]]


@pytest.mark.timeout(60)
def test_a_pattern_that_takes_too_long_is_refused(tmp_path):
    tensors = {f"{'a' * 60}.weight": torch.randn(128, 128)}
    section = {"quant_method": "fp8", "ignore": ["re:(a+)+$"]}
    source = model(tmp_path / "in", tensors, {"quantization_config": section})
    with pytest.raises(ShardSpecError, match="list them by name"):
        merge(source, f"{tmp_path}/out/", quantize="fp8-128x128")


def test_scales_of_caches_go_with_the_codes(tmp_path):
    names = ("k_scale", "v_scale", "kv_scale", "kv_cache_scaling_factor", "k_proj.k_zero_point")
    cache = {f"{LAYER}self_attn.{name}": torch.ones(()) for name in names}
    cache[f"{LAYER}self_attn.q_scale"] = torch.ones(1)
    weight = {"a.weight": torch.ones(128, 128).to(E4M3), "a.weight_scale_inv": torch.ones(1, 1)}
    learned = {"b.q_scale": torch.ones(8)}  # one of several numbers may be a parameter
    source = model(tmp_path / "in", {**cache, **weight, **learned}, {"quantization_config": FP8})
    found = merged(source, tmp_path / "out.safetensors", dtype="bf16")
    assert found.keys() == {"a.weight", "b.q_scale"}


@pytest.mark.parametrize("shape", ["matrix", "four dims"])
def test_blocks_of_modelopt(tmp_path, shape):
    codes, scales = torch.randn(256, 384).to(E4M3), torch.rand(2, 3)
    stored = scales if shape == "matrix" else scales.view(2, 1, 3, 1)
    source = written(tmp_path / "in", {"a.weight": codes, "a.weight_scale": stored})
    stated = {"producer": {}, "quantization": {"quant_algo": "FP8_PB_WO"}}
    (source / "hf_quant_config.json").write_text(json.dumps(stated))
    found = merged(source, tmp_path / "out.safetensors", dtype="bf16")
    assert torch.equal(found["a.weight"], (codes.float() * spread(scales, codes.shape)).bfloat16())


AXES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], bool]] = [
    ((64, 64), (64, 1), compressed("channel"), True),
    ((64, 64), (64,), compressed("channel"), True),
    ((64, 64), (1, 64), compressed("channel"), False),
    ((4, 64, 64), (4, 1, 64), compressed("channel"), False),
    ((4, 64, 64), (4, 64, 1), compressed("channel"), True),
    ((4, 64, 64), (4, 64, 1), {"quant_method": "fbgemm_fp8"}, False),
    ((64, 64), (1, 64), {"quant_method": "fbgemm_fp8"}, False),
    ((64, 64), (1, 64), {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, False),
    ((64, 64), (2, 64), compressed("group", group_size=32), False),
    ((64, 64), (64, 2), compressed("group", group_size=32), True),
    ((1, 64), (1,), compressed("channel"), True),
    ((4, 64, 64), (4, 64), compressed("channel"), False),
    ((4, 64, 32), (4, 64), compressed("channel"), True),
    ((4, 8, 8), (4,), compressed("tensor"), True),
    ((4, 8, 8), (4, 1, 1), compressed("tensor"), True),
    ((1, 8, 8), (), compressed("tensor"), True),
    ((8, 8, 8), (1, 8, 1), compressed("tensor"), False),
    ((8, 8, 8), (1, 1, 8), compressed("tensor"), False),
]


@pytest.mark.parametrize("case", range(len(AXES)))
def test_the_shape_of_scales_says_their_axis_or_is_refused(tmp_path, case):
    shape, of_scales, config, fits = AXES[case]
    codes, scales = (torch.randn(shape) * 40).to(E4M3), torch.rand(of_scales)
    source = written(tmp_path / "in", {"w": codes, "w_scale": scales}, config)
    if not fits:
        with pytest.raises(CheckpointError, match="'w' is quantized"):
            merge(source, tmp_path / "out.safetensors", dtype="f32")
        return
    found = merged(source, tmp_path / "out.safetensors", dtype="f32")["w"]
    by = scales.reshape(*of_scales, *[1] * (len(shape) - len(of_scales)))
    by = by.repeat_interleave(shape[-1] // by.shape[-1], -1)
    assert torch.equal(found, codes.float() * by)


@pytest.mark.parametrize("symmetric", [True, False, None])
def test_zero_points_of_fp8(tmp_path, symmetric):
    stated = {} if symmetric is None else {"symmetric": symmetric}
    codes, scales = torch.randn(8, 8).to(E4M3), torch.rand(8, 1)
    zeros = {"a.weight_zero_point": torch.zeros(8, 1).to(E4M3)}
    tensors = {"a.weight": codes, "a.weight_scale": scales, **zeros}
    source = written(tmp_path / "in", tensors, compressed("channel", **stated))
    if symmetric is False:
        with pytest.raises(DTypeError, match="zero points"):
            merge(source, tmp_path / "out.safetensors", dtype="f32")
        return
    found = merged(source, tmp_path / "out.safetensors", dtype="f32")
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], codes.float() * scales)

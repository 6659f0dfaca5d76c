"""Numbers become codes and scales, bit for bit as the formulas of torch and of the tools say."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shardspec import (
    load_sharded,
    merge,
    reshard,
)
from shardspec.errors import CheckpointError, DTypeError, LayoutError
from tests.checkpoint.test_low_precision import (
    E2M1,
    SHAPES,
    TWO,
    equal,
    merged,
    run,
    spread,
    written,
)

# --- the other way


def weights(shape, dtype=torch.bfloat16):
    random = np.random.default_rng(2)
    found = random.standard_normal(shape, dtype=np.float32)
    found *= np.exp(3 * random.standard_normal((*shape[:-1], 1), dtype=np.float32))
    found[random.random(shape) < 0.05] = 0
    if len(shape) > 1:
        found[: shape[0] // 3, :128] = 0  # some blocks are 0
    return torch.from_numpy(found).to(dtype)


def fp8_of(weight):
    """Return codes and scales by torch's operations."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 128, -(-columns // 128), 128)
    amax = tiles.abs().amax((1, 3))
    safe = torch.where(amax > 0, amax, torch.ones_like(amax))
    factors = torch.where(amax > 0, 448.0 / safe, torch.ones_like(amax))
    scales, scaled = 1.0 / factors, weight.float() * spread(factors, weight.shape)
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scales


def same_bytes(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_fp8_in_blocks(tmp_path):
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    tensors = {
        f"{n}.weight": weights(shape, dtypes[n % 3]).clamp(-6e4, 6e4)
        for n, shape in enumerate(SHAPES)
    }
    source = written(tmp_path / "model", tensors)
    place = tmp_path / "out.safetensors"
    found = merged(source, place, quantize="fp8-128x128", threads=2)
    for name, weight in tensors.items():
        codes, scales = fp8_of(weight)
        same_bytes(found.pop(name), codes)
        same_bytes(found.pop(f"{name}_scale_inv"), scales)
    assert not found
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    how = {"quantize": "fp8-128x128", "dtype": "bf16"}
    found = merged(source, tmp_path / "narrow.safetensors", **how)
    for name, weight in narrow.items():
        same_bytes(found[name], fp8_of(weight)[0])


def test_a_block_of_zeros_or_nearly_so_has_no_nan(tmp_path):
    tiny = torch.full((128, 256), 1e-40)
    tiny[:, 128:] = 0
    source = written(tmp_path / "model", {"a.weight": tiny})
    found = merged(source, tmp_path / "out.safetensors", quantize="fp8-128x128")
    assert not found["a.weight"].float().isnan().any()
    assert (found["a.weight_scale_inv"] > 0).all()


@pytest.mark.parametrize("four", [False, True])
def test_microscaling_formats_take_powers_of_two_below_the_largest(tmp_path, four):
    weight = weights((130, 4096))
    weight[5, :32], weight[6, 32:64] = 0, 2.0**120
    source = written(tmp_path / "model", {"a.weight": weight})
    kind = "mxfp4" if four else "mxfp8"
    found = merged(source, tmp_path / "out.safetensors", quantize=kind)
    tiles = weight.float().view(130, 128, 32)
    amax = tiles.abs().amax(-1)
    exponents = torch.floor(torch.log2(amax.double())).clamp(min=-127) - (2 if four else 8)
    stored = (exponents + 127).clamp(min=0).to(torch.uint8)
    powers = torch.exp2(stored.double() - 127)[..., None]
    if four:
        sizes = (tiles.double() / powers).abs().clamp(max=6)
        # Even codes come first, and are taken where an odd one is as near.
        evens = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        codes = evens[(sizes[..., None] - E2M1[evens].double()).abs().argmin(-1)]
        codes = (codes + 8 * torch.signbit(tiles)).view(130, 4096).to(torch.uint8)
        same_bytes(found["a.weight_packed"], codes[:, 0::2] | codes[:, 1::2] << 4)
        same_bytes(found["a.weight_scale"], stored)
    else:
        codes = (tiles.double() / powers).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        same_bytes(found["a.weight"], codes.view(130, 4096))
        same_bytes(found["a.weight_scale_inv"], stored)


MODEL = {
    "model.embed_tokens.weight": (64, 128),
    "lm_head.weight": (64, 128),
    "model.norm.weight": (128,),
    "model.layers.0.self_attn.q_norm.weight": (1, 128),
    "model.layers.0.self_attn.q_proj.weight": (256, 128),
    "model.layers.0.self_attn.q_proj.bias": (256,),
    "model.layers.0.mlp.experts.0.down_proj.weight": (128, 384),
    "model.layers.0.mlp.gate.weight": (8, 128),
}
LINEAR = {name for name in MODEL if name.endswith("_proj.weight")}


@pytest.mark.parametrize("kind", ["fp8-128x128", "mxfp8", "mxfp4"])
def test_linear_layers_are_quantized_and_the_config_says_so(tmp_path, kind):
    tensors = {name: weights(shape) for name, shape in MODEL.items()}
    source = written(tmp_path / "model", tensors)
    (source / "config.json").write_text(json.dumps({"hidden_size": 128}))
    done = run("merge", source, "-o", f"{tmp_path}/low/", "--quantize", kind)
    assert done.exit_code == 0, done.stderr
    low = load_file(tmp_path / "low" / "model.safetensors")
    kept = {name for name in low if name in tensors and low[name].dtype == torch.bfloat16}
    assert kept == MODEL.keys() - LINEAR
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    section = config.pop("quantization_config")
    assert config == {"hidden_size": 128}
    others = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
    others.append("model.layers.0.self_attn.q_norm")
    assert section["ignore" if kind == "mxfp4" else "modules_to_not_convert"] == others
    # There and back again nothing more is lost.
    done = run("merge", tmp_path / "low", "-o", f"{tmp_path}/back/", "--dtype", "bf16")
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {"hidden_size": 128}
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name in kept:
        equal(back[name], tensors[name])
    again = merged(tmp_path / "back", tmp_path / "again.safetensors", quantize=kind)
    assert again.keys() == low.keys()
    for name, tensor in low.items():
        same_bytes(again[name], tensor)
    # What is quantized already has its scales.
    done = run("merge", tmp_path / "low", "-o", f"{tmp_path}/twice/", "--quantize", kind)
    assert done.exit_code == 3
    assert "is quantized already" in done.stderr
    assert not (tmp_path / "twice").exists()
    other = merged(tmp_path / "low", tmp_path / "o.safetensors", quantize="mxfp8", dtype="bf16")
    assert {name for name in other if other[name].dtype == torch.float8_e4m3fn} == LINEAR


def test_patterns_say_what_is_quantized(tmp_path):
    source = written(tmp_path / "model", {name: weights(shape) for name, shape in MODEL.items()})
    how: dict[str, Any] = {"quantize": "fp8-128x128", "quantize_include": ["*embed*", "*gate*"]}
    found = merged(source, tmp_path / "out.safetensors", exclude="lm_head*", **how)
    assert {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn} == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
    }
    assert "lm_head.weight" not in found
    with pytest.raises(CheckpointError, match=r"linear layer.*quantize_include"):
        merge(source, tmp_path / "x.safetensors", quantize="mxfp8", quantize_include="nothing")


@pytest.mark.parametrize("include", [(), ("--quantize-include", "model.layers.*_proj.weight")])
def test_new_names_decide_what_is_quantized_and_stand_in_the_config(tmp_path, include):
    tensors = {name: weights(shape) for name, shape in MODEL.items()}
    states = {f"optim.state.w.{name}.exp_avg": tensors[name].clone() for name in LINEAR}
    longer = {f"w.{name}": tensor for name, tensor in tensors.items()}
    how = ("--quantize", "fp8-128x128", *include)
    found = []
    for number, (named, renames) in enumerate(
        [(tensors, ()), (longer | states, ("--rename", r"^w\.", ""))]
    ):
        source = written(tmp_path / f"{number}", named)
        (source / "config.json").write_text(json.dumps({"hidden_size": 128}))
        out = tmp_path / f"out{number}"
        done = run("merge", source, "-o", f"{out}/", *how, *renames)
        assert done.exit_code == 0, done.stderr
        config = json.loads((out / "config.json").read_text())
        found.append((load_file(out / "model.safetensors"), config))
    (wanted, config), (renamed, its_config) = found
    assert its_config == config
    for name, tensor in wanted.items():
        same_bytes(renamed[name], tensor)


@pytest.mark.parametrize("kind", ["fp8-128x128", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_not_quantized(tmp_path, kind, value):
    weight = weights((256, 384))
    weight[255, 383] = value
    source = written(tmp_path / "model", {"a.weight": weight})
    done = run("merge", source, "-o", f"{tmp_path}/out/", "--quantize", kind)
    assert done.exit_code == 3
    assert "'a.weight' has NaN or infinity" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_quantized_cuts_fall_on_blocks_or_are_refused(tmp_path):
    weight = weights((512, 384))
    source = written(tmp_path / "model", {"a.weight": weight})
    codes, scales = fp8_of(weight)
    for spec in ("[S0,R]", "[R,S0{256,128}]", "[S0{256,128,128},R]"):
        how: dict[str, Any] = {"device_mesh": TWO, "rules": {"a.weight": spec}}
        if "256,128}" in spec and "R,S0" in spec:
            with pytest.raises(LayoutError, match="inside a block of 128 elements"):
                reshard(source, tmp_path / "no", quantize="fp8-128x128", **how)
            continue
        if "128,128" in spec:
            with pytest.raises(LayoutError, match="inside a block of 128 elements"):
                reshard(source, tmp_path / "no", quantize="fp8-128x128", **how)
            continue
        reshard(source, tmp_path / "cut", quantize="fp8-128x128", **how)
        found = merged(tmp_path / "cut", tmp_path / "cut.safetensors")
        loaded = load_sharded(tmp_path / "cut")
        assert loaded["a.weight_scale_inv"].to_local(1).shape == (2, 3)
        same_bytes(found["a.weight"], codes)
        same_bytes(found["a.weight_scale_inv"], scales)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"quantize": "int8"}, "unknown quantization scheme 'int8'"),
        ({"quantize_include": "*"}, "is for quantize"),
    ],
)
def test_ways_to_quantize_that_are_not_known(tmp_path, how, says):
    source = written(tmp_path / "model", {"a.weight": weights((4, 32))})
    with pytest.raises(DTypeError, match=says):
        merge(source, tmp_path / "out.safetensors", **how)


def test_microscaling_formats_refuse_a_last_dim_that_32_does_not_divide(tmp_path):
    source = written(tmp_path / "model", {"a.weight": weights((4, 40))})
    for kind in ("mxfp8", "mxfp4"):
        with pytest.raises(CheckpointError, match=r"has 40 columns, not a multiple of 32"):
            merge(source, f"{tmp_path}/out/", quantize=kind)

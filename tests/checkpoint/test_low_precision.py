"""Quantized weights become numbers, and numbers codes, bit for bit as torch's formulas say."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    NameMap,
    load_sharded,
    merge,
    plan_reshard,
    reshard,
)
from shardspec.checkpoint.convert.select import Choice, config_of
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.quantization import mapped_source
from shardspec.checkpoint.quantization.quantize import quantize_of, quantized_as
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
SHAPES = ((576, 7168), (200, 520), (130, 130), (1, 128), (1, 1), (256, 384))
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TWO = DeviceMesh(range(2), (2,))


def compressed(strategy, format="float-quantized", **more):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


def written(place, tensors, config=None):
    place.mkdir(exist_ok=True)
    save_file(tensors, place / "model.safetensors")
    if config is not None:
        (place / "config.json").write_text(json.dumps({"quantization_config": config}))
    return place


def as_codes(source, kind, include=None, names=None, **which):
    """Return a checkpoint with codes and scales of weights of any shape."""
    opened, choice = open_checkpoint(source), Choice(**which)
    found, _ = mapped_source(opened, names, choice)
    how = quantize_of(kind, include)
    assert how is not None
    left = choice if names is None else Choice()
    return quantized_as(found, how._replace(in_files=False), left, config_of(opened, names))


def merged(source, out, *, quantize=None, **how) -> dict[str, Any]:
    if quantize is not None:
        include = how.pop("quantize_include", None)
        names = how.pop("names", None)
        which = {key: how.pop(key) for key in ("dtype", "exclude") if key in how}
        source = as_codes(source, quantize, include, names, **which)
    merge(source, out, **how)
    return load_file(out)


def run(*args):
    return CliRunner().invoke(cli, list(map(str, args)), catch_exceptions=False)


def codes_of(shape, seed=0):
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8))


def spread(scales, shape, high=128, wide=128):
    """Repeat scales for the numbers of their blocks."""
    rows = scales.repeat_interleave(high, -2)[..., : shape[-2], :]
    return rows.repeat_interleave(wide, -1)[..., : shape[-1]]


def equal(one, other):
    """Compare bits, but for the payloads and signs of NaN."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    kinds = {2: torch.int16, 4: torch.int32}
    kind = kinds[one.element_size()]
    same = (one.contiguous().view(kind) == other.contiguous().view(kind)) | (
        one.isnan() & other.isnan()
    )
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_code_times_every_kind_of_scale_is_rounded_once(tmp_path, dtype):
    special = [0.0, 1.0, 1e-38, 1e-45, 3e38, float("inf"), float("nan"), -1.5, 1 / 3, 448.0]
    scales = torch.cat([torch.tensor(special), torch.exp2(torch.arange(-126.0, 128.0))])
    scales = torch.cat([scales, 1 + torch.rand(24, generator=torch.Generator().manual_seed(1))])
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).repeat(1, len(scales))
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        weight = {"a.weight": codes.view(kind), "a.weight_scale_inv": scales[None]}
        config = {**FP8, "weight_block_size": [2, 128]}
        source = written(tmp_path / str(kind), weight, config)
        found = merged(source, tmp_path / f"{kind}.safetensors", dtype=dtype)
        wanted = codes.view(kind).float() * spread(scales[None], codes.shape, 2)
        equal(found["a.weight"], wanted.to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_code_of_microscaling_formats_times_every_scale(tmp_path, dtype):
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)
    eight = torch.arange(256, dtype=torch.uint8).repeat(16 * 32)[None]
    four = torch.arange(256, dtype=torch.uint8).repeat(16 * 16)[None]
    # 255 is NaN, as torch and torchao have it.
    powers = scales.view(torch.float8_e8m0fnu).float()[None]
    tensors = {
        "a.weight": eight.view(torch.float8_e4m3fn),
        "a.weight_scale_inv": scales[None],
    }
    found = merged(written(tmp_path / "8", tensors, MXFP8), tmp_path / "8.safetensors", dtype=dtype)
    wanted = eight.view(torch.float8_e4m3fn).float() * powers.repeat_interleave(32, 1)
    equal(found["a.weight"], wanted.to(getattr(torch, dtype)))

    tensors = {"x_blocks": four.view(1, 1, -1, 16), "x_scales": scales.view(1, 1, -1)}
    source = written(tmp_path / "4", tensors, {"quant_method": "mxfp4"})
    found = merged(source, tmp_path / "4.safetensors", dtype=dtype)
    pairs = torch.stack([E2M1[(four & 15).long()], E2M1[(four >> 4).long()]], -1)
    wanted = (pairs.view(1, -1) * powers.repeat_interleave(32, 1)).to(getattr(torch, dtype))
    assert found["x"].shape == (1, wanted.shape[1], 1)
    equal(found["x"][:, :, 0], wanted)


def test_edges_of_blocks_are_those_that_the_config_states(tmp_path):
    tensors, wanted = {}, {}
    for number, shape in enumerate(SHAPES):
        scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128))
        codes = codes_of(shape).view(torch.float8_e4m3fn)
        tensors[f"{number}.weight"], tensors[f"{number}.weight_scale_inv"] = codes, scales
        wanted[f"{number}.weight"] = (codes.float() * spread(scales, shape)).bfloat16()
    source = written(tmp_path / "model", tensors, FP8)
    found = merged(source, tmp_path / "out.safetensors", dtype="bf16", threads=2)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        equal(found[name], tensor)


ROW = torch.rand(6, 1)
STATED = {
    "tensor": (compressed("tensor"), "_scale", torch.rand(())),
    "tensor as one number": (compressed("tensor"), "_scale", torch.rand(1)),
    "rows": (compressed("channel"), "_scale", ROW.bfloat16()),
    "rows as one dim": ({"quant_method": "fbgemm_fp8"}, "_scale", ROW[:, 0].clone()),
    "groups": (compressed("group", group_size=32), "_scale", torch.rand(6, 3)),
    "blocks": (compressed("block", block_structure=[4, 32]), "_scale", torch.rand(2, 3)),
    "without blocks": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", ROW[0]),
    "no block": ({"quant_method": "fp8", "weight_block_size": None}, "_scale_inv", ROW[0]),
    "powers of two": (
        {**FP8, "scale_fmt": "ue8m0"},
        "_scale_inv",
        torch.full((1, 1), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", torch.rand(())),
}


@pytest.mark.parametrize("kind", STATED)
def test_scales_of_tensors_rows_and_groups(tmp_path, kind):
    config, end, scales = STATED[kind]
    codes = codes_of((6, 96)).view(torch.float8_e4m3fn)
    activations = {"a.input_scale": torch.rand(()), "a.self_attn.k_scale": torch.rand(())}
    tensors = {"a.weight": codes, f"a.weight{end}": scales, **activations}
    source = written(tmp_path / "model", tensors, config)
    found = merged(source, tmp_path / "out.safetensors", dtype="bf16")
    numbers = scales.float()
    if numbers.dim() < 2:
        numbers = numbers.view(-1, 1)
    high, wide = -(-6 // numbers.shape[0]), -(-96 // numbers.shape[1])
    if kind == "blocks":
        high = 4
    equal(found.pop("a.weight"), (codes.float() * spread(numbers, (6, 96), high, wide)).bfloat16())
    # Nothing reads the scale of a cache beside 16-bit weights.
    assert not found


def experts(count=3, rows=96, columns=160):
    blocks = codes_of((count, rows, columns // 32, 16))
    scales = 100 + codes_of((count, rows, columns // 32), 1) % 50
    pairs = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1)
    powers = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    numbers = (pairs.view(count, rows, columns) * powers).bfloat16().transpose(1, 2).contiguous()
    return {"x_blocks": blocks, "x_scales": scales}, numbers


def test_experts_of_gpt_oss_are_transposed_through_any_map(tmp_path):
    tensors, numbers = experts()
    source = written(tmp_path / "model", tensors, {"quant_method": "mxfp4"})
    equal(merged(source, tmp_path / "hf.safetensors", dtype="bf16")["x"], numbers)
    halves = NameMap.parse(
        '[[map]]\nsource = ["x", "e h (f two)", "e[{e}]"]\ntarget = ["fc1.{e}", "(two f) h"]\n'
        "[sizes]\ntwo = 2\n"
    )
    found = merged(source, tmp_path / "fc1.safetensors", dtype="bf16", names=halves)
    for expert in range(3):
        equal(found[f"fc1.{expert}"], torch.cat([numbers[expert].T[0::2], numbers[expert].T[1::2]]))
    for spec in ("[S0,R,R]", "[R,S0,R]", "[R,R,S0]", "[R,R,S0{40,56}]"):
        reshard(source, tmp_path / spec, device_mesh=TWO, rules={"x": spec}, dtype="bf16")
        equal(merged(tmp_path / spec, tmp_path / f"{spec}.safetensors")["x"], numbers)


def test_large_experts_are_transposed_in_parts(tmp_path):
    tensors, numbers = experts(1, 2880, 2880)
    source = written(tmp_path / "model", tensors, {"quant_method": "mxfp4"})
    found = merged(source, tmp_path / "out.safetensors", dtype="bf16", threads=2)
    equal(found["x"], numbers)


MAPS = {
    "fused": (
        '[[map]]\nsource = ["{i}", "r c"]\ntarget = ["all", "(i r) c", "i[{i}]"]\n[sizes]\ni = 2\n',
        lambda a, b: {"all": torch.cat([a, b])},
    ),
    "interleaved and transposed": (
        '[[map]]\nsource = ["{i}", "(g r) c"]\ntarget = ["all", "c (g i r)", "i[{i}]"]\n'
        "[sizes]\ng = 5\ni = 2\n",
        lambda a, b: {
            "all": torch.cat([a.view(5, -1, 300), b.view(5, -1, 300)], 1).reshape(-1, 300).T
        },
    ),
    "columns apart": (
        '[[map]]\nsource = ["{i}", "r (c two)", "two[0]"]\ntarget = ["even.{i}", "r c"]\n'
        '[[map]]\nsource = ["{i}", "r (c two)", "two[1]"]\ntarget = ["odd.{i}", "r c"]\n'
        "[sizes]\ntwo = 2\n",
        lambda a, b: {
            "even.0": a[:, 0::2],
            "odd.0": a[:, 1::2],
            "even.1": b[:, 0::2],
            "odd.1": b[:, 1::2],
        },
    ),
    "flat": (
        '[[map]]\nsource = ["{i}", "r c"]\ntarget = ["flat.{i}", "(r c)"]\n[sizes]\nc = 300\n',
        lambda a, b: {"flat.0": a.reshape(-1), "flat.1": b.reshape(-1)},
    ),
}


@pytest.mark.parametrize("kind", MAPS)
def test_maps_and_cuts_of_numbers_that_are_codes_in_files(tmp_path, kind):
    text, wanted_of = MAPS[kind]
    tensors: dict[str, torch.Tensor] = {}
    numbers = []
    for name in "01":
        codes = codes_of((260, 300), int(name)).view(torch.float8_e4m3fn)
        scales = torch.rand(3, 3)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        numbers.append((codes.float() * spread(scales, (260, 300))).bfloat16())
    source = written(tmp_path / "model", tensors, FP8)
    wanted = wanted_of(*numbers)
    names = NameMap.parse(text)
    found = merged(source, tmp_path / "out.safetensors", dtype="bf16", names=names)
    assert found.keys() == wanted.keys()
    mesh = DeviceMesh(range(3), (3,))
    rules = {name: "[S0]" if tensor.dim() == 1 else "[R,S0]" for name, tensor in wanted.items()}
    reshard(source, tmp_path / "cut", device_mesh=mesh, rules=rules, dtype="bf16", names=names)
    back = merged(tmp_path / "cut", tmp_path / "back.safetensors")
    loaded = load_sharded(source, mesh, rules, dtype="bf16", names=names)
    for name, tensor in wanted.items():
        equal(found[name], tensor)
        equal(back[name], tensor)
        equal(loaded[name].full_tensor(), tensor)


def test_loads_and_plans_of_what_is_quantized_in_a_checkpoint(tmp_path):
    codes, scales = codes_of((300, 200)).view(torch.float8_e4m3fn), torch.rand(3, 2)
    norm = torch.rand(8)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales, "norm": norm}
    source = written(tmp_path / "model", tensors, FP8)
    wanted = (codes.float() * spread(scales, (300, 200))).bfloat16()
    rules = {"a.weight": "[S0,R]"}
    mesh = DeviceMesh(range(3), (3,))
    into = {"a.weight": DTensor.from_shards({
        device: torch.zeros(100, 200, dtype=torch.bfloat16) for device in mesh.ids
    }, Layout(mesh, "[S0,R]", (300, 200), "bfloat16"))}  # fmt: skip
    load_sharded(source, into=into, dtype="bf16")
    plan = plan_reshard(str(source), (mesh, rules), dtype="bf16")
    for found in (load_sharded(source, mesh, rules, dtype="bf16"), into, plan.run({})):
        equal(found["a.weight"].full_tensor(), wanted)
        assert "a.weight_scale_inv" not in found
        if "norm" in found:
            equal(found["norm"].full_tensor(), norm.bfloat16())
    with pytest.raises(CheckpointError, match="computed from codes and scales"):
        plan.transfers(0)
    said = run("plan-state", source, "--mesh", "2", "--dtype", "bf16")
    assert said.exit_code == 0
    assert "2 tensors on 2 devices" in said.stdout


BAD: dict[str, tuple[dict[str, torch.Tensor], Any, str]] = {
    "no config": (
        {"a.weight_scale_inv": torch.rand(2, 2)},
        None,
        "no config beside it gives the block",
    ),
    "no block size": (
        {"a.weight_scale_inv": torch.rand(2, 2)},
        {"quant_method": "fp8"},
        "its scales 'a.weight_scale' are missing",
    ),
    "a block of text": (
        {"a.weight_scale_inv": torch.rand(2, 2)},
        {"quant_method": "fp8", "weight_block_size": "128x128"},
        "no config beside it gives the block",
    ),
    "no scales": ({}, FP8, "its scales 'a.weight_scale_inv' are missing"),
    "a scale too few": (
        {"a.weight_scale_inv": torch.rand(2, 1)},
        FP8,
        r"are \[2, 1\], where blocks of 128x128 have \[2, 2\]",
    ),
    "scales of other blocks": (
        {"a.weight_scale_inv": torch.rand(2, 4)},
        FP8,
        r"are \[2, 4\], where blocks of 128x128 have \[2, 2\]",
    ),
    "scales that are whole numbers": (
        {"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)},
        FP8,
        "are int32, where the config says float32 or bfloat16",
    ),
    "powers of two that the config does not say": (
        {"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.uint8)},
        FP8,
        "are uint8, where the config says float32 or bfloat16",
    ),
    "floats in a microscaling format": (
        {"a.weight_scale_inv": torch.rand(256, 8)},
        MXFP8,
        "are float32, where the config says float8_e8m0fnu or uint8",
    ),
    "a last dim that 32 does not divide": (
        {"a.weight": torch.zeros(256, 200).to(torch.float8_e4m3fn)}
        | {"a.weight_scale_inv": torch.ones(256, 7, dtype=torch.uint8)},
        MXFP8,
        "its last dim, 200, is not a multiple of 32",
    ),
    "a row too few": (
        {"a.weight_scale": torch.rand(255, 1)},
        compressed("channel"),
        r"are \[255, 1\], where blocks of 1x250 have \[256, 1\]",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_scales_that_are_missing_or_do_not_fit_are_refused(tmp_path, kind):
    tensors, config, says = BAD[kind]
    weight = {"a.weight": torch.zeros(256, 250).to(torch.float8_e4m3fn)}
    source = written(tmp_path / "model", weight | tensors | {"norm": torch.ones(4)}, config)
    for act in (
        lambda: merge(source, tmp_path / "out", dtype="bf16", format="huggingface"),
        lambda: reshard(source, tmp_path / "out", device_mesh=TWO, dtype="bf16"),
        lambda: load_sharded(source, TWO, {}, dtype="bf16"),
        lambda: plan_reshard(str(source), (TWO, {}), dtype="bf16"),
    ):
        with pytest.raises(CheckpointError, match=f"'a.weight' is quantized .*{says}"):
            act()
    done = run("merge", source, "-o", f"{tmp_path}/out/", "--dtype", "bf16")
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    # What is not wanted need not fit.
    found = merged(source, tmp_path / "norm.safetensors", dtype="bf16", include="norm")
    assert found["norm"].dtype == torch.bfloat16

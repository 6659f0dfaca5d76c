"""FP8 and microscaling formats beside transformers and torchao, bit for bit, in both directions."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from tests.tools.commands import shardspec
from tests.tools.table import Row, write_rows

SHAPES = ((640, 7168), (1024, 4096), (128, 128), (256, 384))
UNEVEN = ((576, 256), (130, 130), (1, 128))
"""Sides that 128 does not divide: transformers would not read codes, so these stay as they are."""
CONFIG = SimpleNamespace(
    quantization_config=SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
)


def weights(shape: tuple[int, int]) -> torch.Tensor:
    found = torch.randn(shape) * torch.exp(3 * torch.randn(shape[0], 1))
    found[: shape[0] // 3, :128] = 0
    return found.bfloat16()


def same(one: torch.Tensor, other: torch.Tensor, what: object) -> None:
    """Compare numbers; a NaN is like any other."""
    a, b = one.float(), other.float()
    assert a.shape == b.shape, what
    assert bool(((a == b) | (a.isnan() & b.isnan())).all()), what


def fp8(place: Path) -> None:
    tensors = {f"{n}.up_proj.weight": weights(shape) for n, shape in enumerate(SHAPES + UNEVEN)}
    (place / "fp8").mkdir()
    save_file(tensors, place / "fp8" / "model.safetensors")
    (place / "fp8" / "config.json").write_text("{}")
    shardspec("merge", place / "fp8", "-o", f"{place}/fp8-low/", "--quantize", "fp8-128x128")
    low = load_file(place / "fp8-low" / "model.safetensors")
    shardspec("merge", place / "fp8-low", "-o", place / "fp8.safetensors", "--dtype", "bf16")
    back = load_file(place / "fp8.safetensors")
    quantize, dequantize = Fp8Quantize(CONFIG), Fp8Dequantize(CONFIG)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) in UNEVEN:
            assert torch.equal(low[name], tensor), name
            assert torch.equal(back[name], tensor), name
            assert f"{name}_scale_inv" not in low, name
            continue
        theirs = quantize._quantize_one(name, tensor)
        codes, scales = theirs[name], theirs[f"{name}_scale_inv"]
        same(low[name], codes, name)
        assert torch.equal(low[f"{name}_scale_inv"], scales), name
        numbers = dequantize._dequantize_one(codes, scales, torch.bfloat16)
        same(back[name], numbers, name)


def microscaling(place: Path) -> None:
    weight = weights((512, 4096))
    weight[7, :32] = 2.0**120
    (place / "mx").mkdir()
    save_file({"a.up_proj.weight": weight}, place / "mx" / "model.safetensors")
    (place / "mx" / "config.json").write_text("{}")
    for kind, dtype, ends in (
        ("mxfp8", torch.float8_e4m3fn, ("", "_scale_inv")),
        ("mxfp4", torch.float4_e2m1fn_x2, ("_packed", "_scale")),
    ):
        shardspec("merge", place / "mx", "-o", f"{place}/{kind}/", "--quantize", kind)
        low = load_file(place / kind / "model.safetensors")
        codes, scales = (low[f"a.up_proj.weight{end}"].view(torch.uint8) for end in ends)
        powers, numbers = to_mx(weight, dtype, 32, ScaleCalculationMode.FLOOR)
        assert torch.equal(scales, powers.view(torch.uint8).view(scales.shape)), kind
        assert torch.equal(codes, numbers.view(torch.uint8).view(codes.shape)), kind
        shardspec("merge", place / kind, "-o", place / f"{kind}.safetensors", "--dtype", "bf16")
        back = load_file(place / f"{kind}.safetensors")["a.up_proj.weight"]
        stored = codes.view(torch.int8) if kind == "mxfp4" else low["a.up_proj.weight"]
        wanted = Fp8Dequantize(CONFIG)._dequantize_one(stored, scales, torch.bfloat16)
        same(back, wanted, kind)


def gpt_oss(place: Path) -> None:
    blocks = torch.randint(0, 256, (4, 96, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (4, 96, 5), dtype=torch.uint8)
    (place / "oss").mkdir()
    tensors = {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}
    save_file(tensors, place / "oss" / "model.safetensors")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (place / "oss" / "config.json").write_text(json.dumps(config))
    shardspec("merge", place / "oss", "-o", f"{place}/oss-back/", "--dtype", "bf16")
    found = load_file(place / "oss-back" / "model.safetensors")["mlp.experts.down_proj"]
    same(found, _convert_moe_packed_tensors(blocks, scales), "gpt-oss")


def main(place: Path, rows_file: str) -> None:
    torch.manual_seed(0)
    fp8(place)
    microscaling(place)
    gpt_oss(place)
    ways = "the same bits as transformers' and torchao's functions, both ways"
    rows = [
        Row(
            *("transformers", version("transformers"), f"{kind} of matrices, both ways"),
            *("yes", "yes, by the bits", f"`--quantize {kind}`, `--dtype`"),
            ways,
        )
        for kind in ("fp8-128x128", "mxfp8", "mxfp4")
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

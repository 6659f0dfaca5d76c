"""Quantized checkpoints are kept to the bit, and not cut through their blocks."""

import json

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from shardspec import DeviceMesh, merge, reshard
from shardspec.errors import LayoutError

TWO = DeviceMesh(range(2), (2,))


def test_torchao_is_kept_to_the_bit_with_its_metadata(real, tmp_path):
    source = real("torchao-int8") / "torchao-int8.safetensors"
    merge(source, tmp_path / "out.safetensors")
    reshard(source, tmp_path / "cut", device_mesh=TWO, rules={"*norm*": "[S0]"})
    merge(tmp_path / "cut", tmp_path / "back.safetensors")
    held = load_file(source)
    assert sum(tensor.dtype == torch.int8 for tensor in held.values()) == 30
    for out in ("out", "back"):
        found = load_file(tmp_path / f"{out}.safetensors")
        assert found.keys() == held.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in held.items())
        with (
            safetensors.safe_open(source, "pt") as one,
            safetensors.safe_open(tmp_path / f"{out}.safetensors", "pt") as other,
        ):
            assert one.metadata().items() <= other.metadata().items()
            assert len(one.metadata()) > 1


def test_codes_of_torchao_are_not_cut(real, tmp_path):
    source = real("torchao-int8") / "torchao-int8.safetensors"
    for spec in ("[S0,R]", "[R,S0]"):
        with pytest.raises(LayoutError, match="replicate it"):
            reshard(source, tmp_path / "cut", device_mesh=TWO, rules={"lm_head*_qdata": spec})
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize(
    ("size", "ranks", "fits"), [(8, 2, True), (10, 2, False), (12, 3, True), (9, 2, False)]
)
def test_blocks_of_fp8_weights_are_not_cut(tmp_path, size, ranks, fits):
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    weight = torch.arange(size * 4.0).view(size, 4).to(torch.float8_e4m3fn)
    save_file(
        {"w": weight, "w_scale_inv": torch.ones(-(-size // 4), 1)}, ckpt / "model.safetensors"
    )
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    (ckpt / "config.json").write_text(json.dumps(said))
    mesh = DeviceMesh(range(ranks), (ranks,))
    if not fits:
        with pytest.raises(LayoutError, match="a block of 4 elements"):
            reshard(ckpt, tmp_path / "cut", device_mesh=mesh, rules={"w": "[S0,R]"})
        return
    reshard(ckpt, tmp_path / "cut", device_mesh=mesh, rules={"w": "[S0,R]"})
    merge(tmp_path / "cut", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")["w"]
    assert torch.equal(found.view(torch.uint8), weight.view(torch.uint8))

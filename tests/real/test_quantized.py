"""Quantized checkpoints are kept to the bit, and not cut through their blocks."""

import json
import math

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
    reshard(source, tmp_path / "cut", device_mesh=TWO, rules={"*_qdata": "[S0,R]"})
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


def test_rows_of_torchao_that_have_one_scale_are_cut_anywhere(real, tmp_path):
    source = real("torchao-int8") / "torchao-int8.safetensors"
    reshard(source, tmp_path / "cut", device_mesh=TWO, rules={"lm_head*_qdata": "[R,S0]"})
    merge(tmp_path / "cut", tmp_path / "back.safetensors")
    held, found = load_file(source), load_file(tmp_path / "back.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())


def test_groups_of_torchao_are_not_cut(real, tmp_path):
    held = load_file(real("torchao-int8") / "torchao-int8.safetensors")
    name = "lm_head._weight_qdata"
    with safetensors.safe_open(real("torchao-int8") / "torchao-int8.safetensors", "pt") as file:
        metadata = file.metadata()
    described = json.loads(metadata["lm_head.weight"])
    assert described["_data"]["block_size"] == [1, 64]
    described["_data"]["block_size"] = [1, 16]
    source = tmp_path / "groups.safetensors"
    scales = torch.ones(held[name].shape[0], 4)
    save_file(
        {name: held[name], "lm_head._weight_scale": scales},
        source,
        {**metadata, "lm_head.weight": json.dumps(described)},
    )
    reshard(source, tmp_path / "two", device_mesh=TWO, rules={name: "[R,S0]"})
    three = DeviceMesh(range(3), (3,))
    with pytest.raises(LayoutError) as caught:
        reshard(source, tmp_path / "cut", device_mesh=three, rules={name: "[R,S0]"})
    assert str(caught.value) == (
        f"tensor {name!r}: spec [R,S0] cuts dim 1 at 0:22, inside a block of 16 elements that "
        "share a scale; cut another dim, or over fewer devices"
    )
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


@pytest.mark.parametrize(
    ("tensors", "name", "fits", "cut"),
    [
        # GPTQ: eight numbers of 4 bits down each int32, a scale for 32 of them.
        ({"w.qweight": (16, 6), "w.scales": (4, 6)}, "w.qweight", (2, 4), (8, 3)),
        # AWQ: eight numbers of 4 bits along a row.
        ({"w.qweight": (128, 3), "w.scales": (2, 24)}, "w.qweight", (2,), (4, 3)),
        # bitsandbytes: two numbers a byte, a scale for 64 of them, the last block not full.
        ({"w": (4000, 1), "w.absmax": (125,)}, "w", (5,), (2, 3)),
        ({"w": (4010, 1), "w.absmax": (126,)}, "w", (), (2, 5)),
    ],
)
def test_blocks_of_packed_weights_are_not_cut(tmp_path, tensors, name, fits, cut):
    source = tmp_path / "packed.safetensors"
    held = {key: torch.arange(math.prod(shape)).reshape(shape) for key, shape in tensors.items()}
    save_file(held, source)
    for ranks in (*fits, *cut):
        mesh = DeviceMesh(range(ranks), (ranks,))
        out = tmp_path / f"on-{ranks}"
        if ranks in fits:
            reshard(source, out, device_mesh=mesh, rules={name: "[S0,R]"})
            merge(out, tmp_path / f"{ranks}.safetensors")
            back = load_file(tmp_path / f"{ranks}.safetensors")
            assert all(torch.equal(back[key], tensor) for key, tensor in held.items())
        else:
            with pytest.raises(LayoutError, match="elements that share a scale"):
                reshard(source, out, device_mesh=mesh, rules={name: "[S0,R]"})
            assert not out.exists()

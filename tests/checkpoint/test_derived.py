"""Checkpoints that are made of others keep what holds for these."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from shardspec.checkpoint.convert.model_names import Assembled
from shardspec.checkpoint.convert.select import Choice, mapped
from shardspec.checkpoint.deltas.apply import with_deltas
from shardspec.checkpoint.deltas.make import delta
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.quantization.dequantize import dequantized
from shardspec.checkpoint.quantization.quantize import quantize_of, quantized_as
from shardspec.errors import CheckpointError


def written(folder, value=1.0):
    folder.mkdir()
    save_file({"w": torch.full((4, 4), value)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def base(tmp_path):
    return written(tmp_path / "base")


def find_quantized(source):
    how = quantize_of("fp8-128x128", "w")
    assert how is not None
    return quantized_as(source, how._replace(in_files=False), Choice())


def filled(source, other):
    return Assembled(source, {"w": (source, "w"), "v": (other, "w")})


def test_a_file_that_changes_is_noticed_whatever_is_made_of_its_checkpoint(tmp_path, base):
    other = written(tmp_path / "other", 2.0)
    delta(base, other, tmp_path / "delta", version=1)
    ways = {
        "opened": lambda a, _: a,
        "mapped": lambda a, _: mapped(a, {"w": "x"}),
        "quantized": lambda a, _: find_quantized(a),
        "with a delta": lambda a, _: with_deltas(a, [tmp_path / "delta"]),
        "filled": filled,
        "filling": lambda a, b: filled(b, a),
        "filled, mapped": lambda a, b: mapped(filled(a, b), {"v": "x"}),
        "filled, mapped, quantized": lambda a, b: find_quantized(mapped(filled(a, b), {"v": "x"})),
        "mapped, filled": lambda a, b: filled(mapped(a, {}), b),
    }
    for way, make in ways.items():
        made = make(open_checkpoint(base), open_checkpoint(other))
        made.check_unchanged()
        os.utime(base / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"base/model\.safetensors: changed while"):
            made.check_unchanged()
        assert made.names, way


def test_what_lies_beside_the_weights_is_checked_too(base):
    (base / "config.json").write_text("{}")
    made = find_quantized(mapped(open_checkpoint(base), {}))
    beside = [made.directory / "config.json"]
    made.check_unchanged(beside)
    (base / "config.json").write_text("{ }")
    made.check_unchanged()
    with pytest.raises(CheckpointError, match=r"base/config\.json: changed while"):
        made.check_unchanged(beside)


def test_what_configs_say_of_codes_goes_with_the_numbers_that_are_made_of_them(tmp_path, base):
    """The scale of a cache, too, keeps its dtype however often its tensor is put together."""
    scheme = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    (base / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    codes = {
        "w": torch.ones(4, 4, dtype=torch.float8_e4m3fn),
        "w_scale_inv": torch.ones(2, 2),
        "k_scale": torch.ones(2),
    }
    save_file(codes, base / "model.safetensors")
    numbers = dequantized(open_checkpoint(base), "bf16")
    other = open_checkpoint(written(tmp_path / "other"))
    made = Assembled(numbers, {n: (numbers, n) for n in numbers.names} | {"v": (other, "w")})
    for source in (numbers, made, mapped(made, {"v": "x"})):
        assert source.facts.quantization == {}
        assert source.facts.keeps_dtype == {"k_scale"}
    assert open_checkpoint(base).facts.quantization is None

"""Names in memory that are those of files: what is left out stays out, and shapes are compared."""

import json
from itertools import product

import pytest
from safetensors.numpy import load_file

from shardspec import merge
from shardspec.checkpoint.convert.model_names import model_names
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from shardspec.families.family import family_of
from shardspec.families.maps import chain_of
from shardspec.families.model import model_of
from tests.families.test_commands import saved
from tests.families.test_shapes import HF


def test_every_chain_has_a_map_that_looks_at_all_tensors():
    for family in HF.values():
        model = model_of(family_of(family["config"]), family["config"])
        for source, target in product(("hf", "live"), repeat=2):
            assert chain_of(model, source, target), (family["config"], source, target)


def test_what_is_excluded_is_not_written_under_the_same_names(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3")
    catalog, name = open_checkpoint(folder), "model.layers.0.self_attn.q_proj.weight"
    names = model_names(folder, "live")
    merge(catalog, tmp_path / "out.safetensors", names=names, exclude=name)
    written = load_file(tmp_path / "out.safetensors")
    assert written.keys() == arrays.keys() - {name}
    assert all((written[n] == arrays[n]).all() for n in written)
    assert catalog.facts.described_in is None


def test_a_config_that_does_not_fit_is_refused_for_the_same_names(tmp_path):
    folder, _ = saved(tmp_path / "hf", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] *= 2
    with pytest.raises(CheckpointError, match="is no model of the family 'qwen3' with this config"):
        merge(folder, tmp_path / "out.safetensors", names=model_names(config, "live"))
    assert not (tmp_path / "out.safetensors").exists()

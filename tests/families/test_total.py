"""Nothing of a model is lost or made up in any direction: what differs from its config is an error.

Catalogs here have names and shapes alone, which is all that is looked at before anything is read.
"""

from random import Random

import pytest

from shardspec import model_names
from shardspec.checkpoint.catalog import Catalog, StoredTensor
from shardspec.checkpoint.convert.select import Choice
from shardspec.checkpoint.storage import storage_path
from shardspec.errors import CheckpointError
from shardspec.families.family import NamesOf
from shardspec.families.maps import chain_of
from tests.families.test_shapes import HF, Shapes, model, shapes, through

REMEDY = "give the config|correct the config"
WAYS: list[tuple[NamesOf, NamesOf]] = [
    *(("megatron", "hf"), ("fused", "hf"), ("hf", "fused"), ("hf", "megatron")),
    *(("live", "fused"), ("torch_dist", "hf"), ("sharded", "megatron")),
]


def names_of(config: dict[str, object], state: Shapes, target: NamesOf) -> set[str]:
    """Return what a checkpoint of some shapes is called under other names."""
    tensors = {n: StoredTensor(n, shape, "float32", None, (), ()) for n, shape in state.items()}
    source = Catalog("test", storage_path("nowhere"), tensors, ())
    return {*model_names(config, target).applied(source, Choice(), ()).names}


def states(name: str, count: int) -> list[tuple[Shapes, NamesOf]]:
    """Return a model as it is called in places, the next families' in others, and where to."""
    own, files = model(HF[name]["config"]), shapes(HF[name]["files"])
    elsewhere = {"megatron", "torch_dist", "sharded"} if "megatron" in own.family.refused else set()
    at = count * [*HF].index(name)
    ways = [way for way in (WAYS * 6)[at:] if not elsewhere.intersection(way)]
    return [
        (through(chain_of(own, "hf", source), files), target) for source, target in ways[:count]
    ]


COUNTS = pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.exhaustive)])


@COUNTS
@pytest.mark.parametrize("name", HF)
def test_what_is_missing_is_an_error_in_every_direction(name, count):
    config = HF[name]["config"]
    for state, target in states(name, count):
        assert names_of(config, state, target)
        last = f".{config['num_hidden_layers'] - 1}."
        lost = [{one} for one in Random(name).sample(sorted(state), 2)]
        lost += [{key for key in state if word in key} for word in (last, ".experts.1.")]
        for gone in filter(None, lost):
            less = {key: shape for key, shape in state.items() if key not in gone}
            with pytest.raises(CheckpointError, match=REMEDY):
                names_of(config, less, target)


@COUNTS
@pytest.mark.parametrize("name", HF)
def test_what_is_strange_is_an_error_that_names_its_families(name, count):
    config = HF[name]["config"]
    for state, target in states(name, count):
        last = config["num_hidden_layers"]
        more = {key.replace(f".{last - 1}.", f".{last}.", 1): shape for key, shape in state.items()}
        if more.keys() != state.keys():
            with pytest.raises(CheckpointError, match=REMEDY):
                names_of(config, state | more, target)
        with pytest.raises(CheckpointError, match=r"no known family; .*drop"):
            names_of(config, {**state, "lm_head.bias": (4,)}, target)
        # Engines call LLaMA's tensors what Phi-3's are called in files.
        other = "deepseek_v3" if name in ("llama-tied", "phi3") else "llama-tied"
        if HF[other]["config"]["model_type"] != config["model_type"]:
            with pytest.raises(CheckpointError, match=REMEDY):
                names_of(HF[other]["config"], state, target)

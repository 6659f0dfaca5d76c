"""Families against names and shapes of transformers, Megatron-core and vLLM, and published sizes.

``shapes.json`` has what these tools show of small models: transformers 5.24, Megatron-core
0.16.1, vLLM 0.33.
"""

import json
from math import prod
from pathlib import Path
from time import process_time

import pytest

from shardspec import model_layouts
from shardspec.errors import LayoutError
from shardspec.families.family import family_names, family_of, shipped_family
from shardspec.families.maps import chain_of
from shardspec.families.model import Model, model_of
from shardspec.families.recognise import recognise
from shardspec.resharding.maps import apply_map
from shardspec.resharding.name_map import NameMap

Shapes = dict[str, tuple[int, ...]]
SAMPLES = json.loads((Path(__file__).parent / "shapes.json").read_text())
HF = {name: sample for name, sample in SAMPLES["hf"].items() if name != "llama4_text"}
PUBLISHED = SAMPLES["published"]
# What reports of the makers say; the others are computed from published configs.
SEEN = {"DeepSeek-V3": 671, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "GLM-4.5-Air": 106}


def shapes(found: dict[str, list[int]]) -> Shapes:
    return {name: tuple(sizes) for name, sizes in found.items()}


def through(maps: tuple[NameMap, ...], state: Shapes) -> Shapes:
    """Return what maps make of names and shapes, each proven to be total."""
    for map_ in maps:
        made = apply_map(map_, state, {})
        made.report.require_total()
        state = made.shapes
    return state


def model(config: dict[str, object]) -> Model:
    return model_of(family_of(config), config)


@pytest.mark.parametrize("name", HF)
def test_files_and_memory_of_transformers_and_every_way_there_and_back(name):
    own = model(HF[name]["config"])
    files, memory = shapes(HF[name]["files"]), shapes(HF[name]["memory"])
    places = ["hf", "live", "fused"]
    if "megatron" not in own.family.refused:
        places += ["megatron", "torch_dist", "sharded"]
    made = {place: through(chain_of(own, "hf", place), files) for place in places}
    assert made["hf"] == files
    tied = {tensor.side[0] for tensor in own.copies}
    assert made["live"] == {n: shape for n, shape in memory.items() if n not in tied}
    assert through(chain_of(own, "live", "hf"), memory) == files
    for one in places:
        for other in ("hf", places[-1]):
            assert through(chain_of(own, one, other), made[one]) == made[other], (one, other)
        wanted = {"live": "hf", "torch_dist": "megatron", "sharded": "megatron"}.get(one, one)
        assert recognise(own, made[one], "here").format == wanted


@pytest.mark.parametrize("name", SAMPLES["megatron"])
@pytest.mark.parametrize("saved", ["memory", "torch_dist"])
def test_every_spelling_of_megatron_leads_to_the_files(name, saved):
    sample = SAMPLES["megatron"][name]
    own = model(sample["config"])
    state = shapes(sample.get(saved, sample["memory"]))
    assert through(chain_of(own, "megatron", "hf"), state) == own.shapes()
    words = [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        (".transformer_layer.", ".mtp_model_layer."),
        ("local_experts.{}.linear_fc1.weight", "linear_fc1.weight{}"),
    ]
    for old, new in words:
        for number in ["", *range(8)]:
            a, b = old.format(number), new.format(number)
            state = {one.replace(a, b): shape for one, shape in state.items()}
    assert through(chain_of(own, "megatron", "hf"), state) == own.shapes()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_legacy_grouped_experts_of_megatron_are_cut_apart(name):
    own = model(HF[name]["config"])
    state = through(chain_of(own, "hf", "megatron"), shapes(HF[name]["files"]))
    grouped: Shapes = {}
    for key, shape in state.items():
        before, expert, after = key.partition(".local_experts.")
        if not expert:
            grouped[key] = shape
            continue
        first = after.endswith("linear_fc1.weight")
        place = f"{before}.weight{1 if first else 2}"
        rows, columns = grouped.get(place, (shape[1], 0) if first else (0, shape[0]))
        more = (0, shape[0]) if first else (shape[1], 0)
        grouped[place] = (rows + more[0], columns + more[1])
    assert through(chain_of(own, "megatron", "hf"), grouped) == shapes(HF[name]["files"])


@pytest.mark.parametrize("name", SAMPLES["vllm"])
def test_each_rank_of_vllm_holds_what_the_layout_says(name):
    sample = SAMPLES["vllm"][name]
    layouts = model_layouts(HF[sample["family"]]["config"], sample["layout"])
    tied = {tensor.side[0] for tensor in model(HF[sample["family"]]["config"]).copies}
    for rank, every in sample["ranks"].items():
        held = {name: shape for name, shape in every.items() if name not in tied}
        assert {n: layout.local_shape(int(rank)) for n, layout in layouts.items()} == shapes(held)


@pytest.mark.parametrize("name", SAMPLES["megatron ranks"])
def test_each_rank_of_megatron_holds_as_much_as_the_layout_says(name):
    sample = SAMPLES["megatron ranks"][name]
    layouts = model_layouts(sample["config"], sample["layout"])
    for rank, elements in sample["elements"].items():
        held = (layout for layout in layouts.values() if int(rank) in layout.mesh)
        assert sum(prod(layout.local_shape(int(rank))) for layout in held) == elements


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_model_has_as_many_tensors_and_parameters_as_published(name):
    sample, start = PUBLISHED[name], process_time()
    own = model(sample["config"])
    tensors = own.shapes()
    files = through(tuple(chain_of(own, "hf", "hf")[-1:]), tensors)
    assert len(files) == sample["file_tensors"]
    count = sum(map(prod, files.values()))
    assert count == sample["params"] + sample["buffers_saved"]
    if name in SEEN:
        assert abs(count / 1e9 - SEEN[name]) < 1
    target = "fused" if "megatron" in own.family.refused else "megatron"
    made = through(chain_of(own, "hf", target, tensors), tensors)
    assert sum(map(prod, made.values())) == count
    assert process_time() - start < 15


def test_families_that_are_refused_say_why():
    with pytest.raises(LayoutError, match="Llama 4 is not supported"):
        model(SAMPLES["hf"]["llama4_text"]["config"])
    with pytest.raises(LayoutError, match="no layers of OLMo 2"):
        chain_of(model(HF["olmo2"]["config"]), "hf", "megatron")
    assert set(family_names()) == {
        *("deepseek-v2", "deepseek-v3", "gemma3", "glm4-moe", "gpt-neox", "gpt-oss", "gpt2"),
        *("llama", "llama4", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3-moe"),
    }
    for name in family_names():
        assert shipped_family(name).model_types

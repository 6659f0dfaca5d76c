"""Families against names and shapes of transformers, Megatron-core and vLLM, and published sizes.

``shapes.json`` has what these tools show of small models: transformers 5.24, Megatron-core
0.16.1, vLLM 0.33.
"""

import json
import re
from itertools import product
from math import prod
from pathlib import Path
from time import process_time

import pytest

import shardspec.families
from shardspec import DeviceMesh, Layout, NameMap, model_layouts
from shardspec.errors import LayoutError
from shardspec.families.family import family_names, family_of, read_family, shipped_family
from shardspec.families.layouts import TensorPlan
from shardspec.families.maps import chain_of
from shardspec.families.model import Model, model_of
from shardspec.families.recognize import recognize
from shardspec.resharding.total import apply_map

Shapes = dict[str, tuple[int, ...]]
SAMPLES = json.loads((Path(__file__).parent / "shapes.json").read_text())
HF = {name: sample for name, sample in SAMPLES["hf"].items() if name != "llama4_text"}
PUBLISHED = SAMPLES["published"]
LARGE = [name for name, sample in PUBLISHED.items() if sample["file_tensors"] > 20_000]
"""Of those `make exhaustive` alone has all under other names."""
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


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", HF)
def test_files_and_memory_of_transformers_and_every_way_there_and_back(name, every):
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
    ways = list(product(places, ("hf", places[-1])))
    # Of one model these, of the next ones others.
    for one, other in ways[[*HF].index(name) % every :: every]:
        assert through(chain_of(own, one, other), made[one]) == made[other], (one, other)
    for one in places:
        wanted = {"live": "hf", "torch_dist": "megatron", "sharded": "megatron"}.get(one, one)
        # Engines have the names of Phi-3's files.
        alike = one == "fused" and made[one] == files
        assert recognize(own, made[one], "here").format == ("hf" if alike else wanted)


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


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_tensors_that_megatron_saves_one_by_one_lead_to_the_files(name):
    own = model(HF[name]["config"])
    state = through(chain_of(own, "hf", "megatron"), shapes(HF[name]["files"]))
    apart: Shapes = {}
    for key, shape in state.items():
        place = key.replace(".local_experts.", ".experts.")
        if ".linear_fc1." in key and "layer_norm" not in key:
            apart |= {f"{place}_{half}": (shape[0] // 2, *shape[1:]) for half in "wv"}
        else:
            apart[place] = shape
    assert through(chain_of(own, "megatron", "hf"), apart) == own.shapes()
    assert recognize(own, apart, "here").format == "megatron"
    half = next(key for key in apart if key.endswith("_v"))
    with pytest.raises(LayoutError):
        through(chain_of(own, "megatron", "hf"), {n: s for n, s in apart.items() if n != half})


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


@pytest.mark.parametrize("name", LARGE)
def test_a_large_released_model_has_as_many_tensors_and_parameters_as_published(name):
    tensors = model(PUBLISHED[name]["config"]).shapes()
    assert len(tensors) == PUBLISHED[name]["file_tensors"]
    count = sum(map(prod, tensors.values()))
    assert count == PUBLISHED[name]["params"] + PUBLISHED[name]["buffers_saved"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in LARGE else [])
        for name in PUBLISHED
    ],
)
def test_a_released_model_has_as_much_under_its_names_elsewhere(name):
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
    files = Path(shardspec.families.__path__[0]).glob("*.toml")
    assert set(family_names()) == {file.stem.replace("_", "-") for file in files}
    for name in family_names():
        assert shipped_family(name).model_types


@pytest.mark.parametrize("name", SAMPLES["transformers ranks"])
def test_each_rank_of_transformers_holds_what_its_plan_says(name):
    sample, config = SAMPLES["transformers ranks"][name], HF[name]["config"]
    plan = TensorPlan(sample["styles"], 2, 1)
    mesh = DeviceMesh(range(2), axis_names=("tp",))
    for tensor, locals_ in sample["local"].items():
        shape = tuple(HF[name]["memory"][tensor])
        layout = Layout(mesh, plan.spec(tensor, len(shape), shape), shape, "bfloat16")
        wanted = [shape, shape] if locals_ is None else [tuple(one) for one in locals_]
        assert [layout.local_shape(rank) for rank in range(2)] == wanted, tensor
    assert config["model_type"] in family_of(config).model_types


def test_plans_that_transformers_could_load_but_not_run_are_refused():
    plan = TensorPlan({"model.layers.*.self_attn.k_proj": "colwise", "x": "brain"}, 4, 16)
    with pytest.raises(LayoutError, match="2 heads are not divisible by 4 ranks"):
        plan.spec("model.layers.0.self_attn.k_proj.weight", 2, (32, 8))
    with pytest.raises(LayoutError, match="transformers' style 'brain' is not"):
        plan.spec("x.weight", 2, (32, 8))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("foo:3", "unknown layout 'foo:3'; give one of hf-tp:N"),
        ("megatron:tp=2,x=3", "'x=3' is unknown or repeated"),
        ("megatron:tp=0", "'tp=0' is not a number from 1 on"),
        pytest.param("hf-tp:" + "9" * 5000, "is not a number from 1 on", id="long number"),
        pytest.param(
            "megatron:layers=" + "9" * 5000, "is not a number from 1 on", id="long layers"
        ),
        ("megatron:tp=3", "are not divisible by tp=3"),
        ("megatron:pp=2", "3 layers do not fill pp=2 stages"),
        ("megatron:pp=2,layers=2+2", "3 layers do not fill pp=2 stages of 2, 2"),
        ("megatron:ep=3", "8 experts are not divisible by ep=3"),
        ("megatron:tp=2,ep=2,dp=1,etp=2", "does not divide tp=2 × dp=1"),
        ("vllm:tp=4,ep=2", "all 4 ranks"),
        ("vllm:tp=8", "4 heads are not divisible by tp=8"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout, says):
    with pytest.raises(LayoutError, match=re.escape(says)):
        model_layouts(HF["glm4_moe"]["config"], layout)


def test_a_mesh_has_as_many_devices_as_the_layout():
    config = HF["qwen3"]["config"]
    mesh = DeviceMesh(range(4, 12), (4, 2), axis_names=("dp", "tp"))
    layouts = model_layouts(config, "vllm:tp=2", device_mesh=mesh)
    assert layouts["model.norm.weight"].mesh.ids == tuple(range(4, 12))
    assert layouts["model.layers.0.mlp.down_proj.weight"].local_shape(11)[1] * 2 == 48
    with pytest.raises(LayoutError, match="the layout is for 2 devices, the mesh has 8"):
        model_layouts(config, "vllm:tp=2", device_mesh=DeviceMesh(range(8)))


def test_stages_have_their_layers_and_the_last_one_the_head():
    layouts = model_layouts(HF["deepseek_v3"]["config"], "megatron:tp=2,pp=2,layers=1+2")
    ids = {name: tuple(layout.mesh.ids) for name, layout in layouts.items()}
    assert ids["embedding.word_embeddings.weight"] == (0, 1)
    assert ids["decoder.layers.0.self_attention.linear_proj.weight"] == (0, 1)
    assert ids["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"] == (2, 3)
    assert ids["output_layer.weight"] == (2, 3)
    assert layouts["decoder.layers.1.mlp.router.expert_bias"].dtype == "float32"
    tied = model_layouts(HF["llama-tied"]["config"], "megatron:pp=2")
    assert tied["embedding.word_embeddings.weight"].mesh.ids == (0, 1)


def test_a_family_that_contradicts_itself_says_the_line():
    head = 'like = "llama"\nmodel_types = ["x"]\nlayer = [\n'
    row = '{ hf = "a.weight", view = "h", cut = "replicated", megatron = "b" },'
    for wrong, says in (
        (row.replace("replicated", "sideways"), "line 4: 'a.weight' is cut by 'sideways'"),
        (row.replace('"h"', '"h brain"'), "line 4: 'a.weight': unknown size 'brain'"),
        (row.replace('"h"', '"(h"'), "line 4: 'a.weight': a parenthesis"),
        (row.replace(', megatron = "b"', ""), "line 4: 'a.weight' has no name in megatron"),
        (row.replace("cut", "knife"), "line 4: row 'a.weight': unknown key 'knife'"),
        (row.replace("cut =", 'when = "tuesday", cut ='), "line 4: 'a.weight' depends on"),
        (row.replace("cut =", 'in = "attic", cut ='), "line 4: 'a.weight' is in 'attic' layers"),
        (row.replace("cut =", 'copy_of = "c", cut ='), "line 4: 'a.weight' is a copy of 'c'"),
        (row.replace('"replicated"', '{ attic = "rows" }'), "line 4: 'a.weight' is cut in 'attic'"),
        (row.replace('"b"', '["b", "two h", "three[0]"]'), "line 4: 'a.weight': 'three[0]' does"),
        (row.replace("a.w", "a.{e}.w"), "line 4: 'a.{e}.weight': add {e} to [sizes]"),
        (f"{row}\n{row}", "line 5: two rows have the name 'a.weight' in hf"),
        (f"{row}\n{row.replace('a.w', 'c.w')}", "line 5: two rows have the name 'b' in megatron"),
    ):
        with pytest.raises(LayoutError, match=re.escape(says)):
            read_family(f"{head}{wrong}\n]", "x")
    assert read_family(f"{head}{row}\n]", "x").rows["layer"][-1].side == ("a.weight", "h")


def test_what_a_family_says_of_another_kind_says_the_line():
    head = 'model_types = ["x"]\nprefix = { hf = "", megatron = "" }\n'
    for wrong, says in (
        ('like = "attic"', "line 3: there is no family 'attic'"),
        ("like = 3", "line 3: like is the name of a family, not 3"),
        ("layer = 3", "line 3: layer is a list"),
        ("sizes = []", "line 3: sizes is a table"),
        ('without = "a"', "line 3: without is a list"),
        ("without = [3]", "line 3: without is a list of texts"),
        ('unused = [["a", "b"]]', "line 3: unused is a list of texts"),
        ('refused = { attic = "" }', "line 3: unknown place 'attic'"),
        ("attic = 3", "line 3: unknown key 'attic'"),
    ):
        with pytest.raises(LayoutError, match=re.escape(says)):
            read_family(head + wrong, "x")


def test_layers_without_experts_are_those_that_the_defaults_say():
    config = {n: v for n, v in HF["deepseek_v3"]["config"].items() if n != "first_k_dense_replace"}
    names = model({**config, "num_hidden_layers": 4}).shapes()
    dense = {layer for layer in range(4) if f"model.layers.{layer}.mlp.up_proj.weight" in names}
    assert dense == {0, 1, 2}


# Rows: the key missing at the top, true, false; columns: the same in the text model's config.
@pytest.mark.parametrize(
    ("wrapper", "text", "tied"),
    [
        ("mistral3", "mistral", "TTT TTT FFF"),
        ("gemma3", "gemma3_text", "TTT TTT FFF"),
        ("llava_next", "qwen3", "FFF TTT FFF"),
        ("llava", "qwen3", "FTF TTT FTF"),
        ("llava", "gemma3_text", "TTF TTT TTF"),
        ("blip-2", "qwen3", "FTF FTF FTF"),
        ("voxtral", "qwen3", "FFF FFF FFF"),
        ("anything", "qwen3", "FTF TTT FFF"),
    ],
)
def test_the_type_of_the_config_around_a_text_model_says_if_its_head_is_tied(wrapper, text, tied):
    every = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
    sizes = {**HF["qwen3"]["config"], "model_type": text}
    del sizes["tie_word_embeddings"]
    for top, row in zip(({}, *every), tied.split(), strict=True):
        for inner, letter in zip(({}, *every), row, strict=True):
            own = model({"model_type": wrapper, **top, "text_config": {**sizes, **inner}})
            assert ("lm_head.weight" in own.shapes()) == (letter == "F"), (top, inner)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("label", "wins", "loses"),
    [
        ("qwen3_moe", "num_local_experts", "num_experts"),
        ("deepseek_v2", "num_experts", "n_routed_experts"),
        ("deepseek_v3", "num_local_experts", "n_routed_experts"),
        ("glm4_moe", "num_local_experts", "n_routed_experts"),
        ("mixtral", "num_experts", "num_local_experts"),
        ("gpt_oss", "num_experts", "num_local_experts"),
        ("glm4_moe", "num_nextn_predict_layers", "num_mtp_layers"),
        ("gpt2", "num_hidden_layers", "n_layer"),
        ("gpt2", "hidden_size", "n_embd"),
    ],
)
def test_of_two_names_of_a_key_that_counts_which_transformers_takes(label, wins, loses, wrapped):
    gpt2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 8, "n_layer": 2, "n_head": 4}
    every = gpt2 if label == "gpt2" else HF[label]["config"]
    config = {name: value for name, value in every.items() if name not in (wins, loses)}

    def of(**keys: int) -> Shapes:
        text = {**config, **keys}
        return model({"model_type": "x", "text_config": text} if wrapped else text).shapes()

    four, eight = of(**{wins: 4}), of(**{wins: 8})
    assert four != eight
    assert of(**{loses: 4}) == four
    assert of(**{loses: 8, wins: 4}) == of(**{wins: 4, loses: 8}) == four


@pytest.mark.parametrize("label", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_zero_shared_experts_have_matrices_without_rows_and_null_has_none(label):
    config = {**HF[label]["config"], "n_shared_experts": 0}
    files = model(config).shapes()
    name, hidden = "model.layers.1.mlp.shared_experts.{}_proj.weight", config["hidden_size"]
    assert files[name.format("gate")] == files[name.format("up")] == (0, hidden)
    assert files[name.format("down")] == (hidden, 0)
    own = model(config)
    for place in ("live", "fused", "megatron", "torch_dist", "sharded"):
        there = through(chain_of(own, "hf", place), files)
        assert through(chain_of(own, place, "hf"), there) == files
    without = model({**config, "n_shared_experts": None}).shapes()
    assert {**files, **without} == files
    assert not any("shared_experts" in own_name for own_name in without)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("value", [2.5, "8", -1, 2**63, 10**4000, [8]])
def test_a_config_with_a_size_that_is_none_is_refused_by_its_key(key, value):
    config = {**HF["qwen3"]["config"], key: value}
    for read in (model, lambda config: model_layouts(config, "megatron:tp=2")):
        with pytest.raises(LayoutError, match=f"{key}.*whole number"):
            read(config)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads"])
def test_layouts_of_a_config_without_a_size_are_refused_by_its_key(key):
    config = {**HF["qwen3"]["config"], key: None}
    with pytest.raises(LayoutError, match=f"lacks '{key}'"):
        model_layouts(config, "megatron:tp=2")

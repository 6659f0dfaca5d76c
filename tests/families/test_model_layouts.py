"""Models cut by the layouts of trainers and engines: what each device has."""

import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from shardspec import DeviceMesh, DTensor, Layout, model_layouts, plan_reshard
from shardspec.checkpoint.convert.model_names import model_names
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import LayoutError
from shardspec.families.layouts import padded_config, parse_layout
from tests.families.test_commands import run, same, saved
from tests.families.test_shapes import HF


def test_who_reads_what_under_a_layout(tmp_path):
    folder, _ = saved(tmp_path / "hf", "qwen3_moe")
    for layout in ("vllm:tp=2,ep=2", "megatron:tp=2,ep=2,etp=1", "fsdp:2"):
        call = ("plan-state", folder, "--model", folder / "config.json", "--layout", layout)
        plan = json.loads(run(*call, "--json"))
        layouts = model_layouts(HF["qwen3_moe"]["config"], layout, dtype="float32")
        for rank in range(2):
            held = (one for one in layouts.values() if rank in one.mesh.ids)
            num_bytes = sum(4 * prod(one.local_shape(rank)) for one in held)
            assert plan["received"][str(rank)] == num_bytes, layout
        run(*call, "--mesh", "2")
        run(*call, "--mesh", "3", code=3)
    assert "unknown layout" in run(*call[:-1], "foo:2", code=3)
    assert "--map" in run(*call, "--map", folder / "config.json", code=2)


@pytest.mark.parametrize(
    ("layout", "mesh", "to"),
    [
        ("vllm:tp=2,ep=2", "2", "shardspec"),
        ("vllm:tp=2,ep=4,dp=2", "dp=2,tp=2", "shardspec"),
        ("megatron:tp=2,ep=2,etp=1", "2", "shardspec"),
        ("megatron:tp=2,ep=2,etp=1,dp=2", "4", "shardspec"),
        ("megatron:tp=2,ep=2,etp=1,pp=3", "6", "dcp"),
        ("fsdp:3", "3", "shardspec"),
    ],
)
def test_resharding_by_a_layout_gives_every_device_what_the_layout_says(tmp_path, layout, mesh, to):
    folder, arrays = saved(tmp_path / "hf", "qwen3_moe")
    call = ("reshard", folder, "-o", tmp_path / "run", "--model", folder, "--layout", layout)
    run(*call, "--to", to)
    layouts = model_layouts(HF["qwen3_moe"]["config"], layout)
    run(*call, "--to", to, "--mesh", mesh, "--overwrite")
    catalog = open_checkpoint(tmp_path / "run")
    assert {*catalog.names} == layouts.keys()
    for name, wanted in layouts.items():
        outline = catalog.outline(name)
        assert outline.shape == wanted.global_shape
        boxes = {box for device in wanted.mesh.ids for box in wanted.local_boxes(device)}
        assert {stored.box for stored in outline.boxes} == {box for box in boxes if prod_of(box)}
        if to == "shardspec":
            assert outline.spec is not None
            assert catalog.mesh is not None
            again = Layout(catalog.mesh, outline.spec, outline.shape, outline.dtype)
            for device in wanted.mesh.ids:
                assert again.local_boxes(device) == wanted.local_boxes(device), name
    run("merge", tmp_path / "run", "-o", f"{tmp_path}/back/", "--model", folder)
    same(tmp_path / "back", arrays)
    assert (tmp_path / "run" / "tokenizer.json").exists()


@pytest.mark.parametrize("family", sorted(HF))
def test_the_maps_between_two_layouts_are_one_plan(family):
    """One plan through all maps moves what the maps move one after the other."""
    config = HF[family]["config"]
    try:
        source = model_layouts(config, "megatron:tp=2", dtype="float32")
    except LayoutError:  # Megatron-core has no such layers
        source = model_layouts(config, "fsdp:2", dtype="float32")
    names = {name: at.global_shape for name, at in source.items()}
    whole = {name: torch.arange(prod(shape)).float().view(shape) for name, shape in names.items()}
    state = {name: DTensor(whole[name], at.mesh, at.spec) for name, at in source.items()}
    for text in ("vllm:tp=2", "fsdp:3"):
        parsed = parse_layout(text)
        naming = model_names(config, parsed.place)
        naming = replace(naming, config=padded_config(naming.config, parsed))
        target = {
            name: Layout(at.mesh, at.spec.without_partial(), at.global_shape, at.dtype)
            for name, at in model_layouts(config, text, dtype="float32").items()
        }
        got = plan_reshard(state, target, names=naming).run(state)
        wanted = state
        for map_ in naming.maps(names):
            wanted = plan_reshard(wanted, (DeviceMesh([9], (1,)), {}), names=map_).run(wanted)
        assert got.keys() == wanted.keys() == target.keys()
        for name, tensor in got.items():
            assert torch.equal(tensor.to_global(), wanted[name].to_global()), name


def prod_of(box: tuple[tuple[int, int], ...]) -> int:
    return prod(high - low for low, high in box)


def test_a_layout_that_no_mesh_can_stand_for_needs_a_format_of_boxes(tmp_path):
    folder, _ = saved(tmp_path / "hf", "qwen3_moe")
    call = ("reshard", folder, "-o", tmp_path / "run", "--model", folder, "--layout")
    said = run(*call, "megatron:tp=1,pp=3", code=3)
    assert "'dcp'" in said
    assert "is for 2 devices, the mesh has 3" in run(*call, "vllm:tp=2", "--mesh", "3", code=3)
    for beside in (("--names", "fused"), ("--rule", "*", "[R]"), ("--like", folder)):
        assert "omit" in run(*call, "vllm:tp=2", *beside, code=2)
    said = run("reshard", folder, "-o", tmp_path / "run", "--layout", "vllm:tp=2", code=2)
    assert "give --model" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "layout", "says"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, "vllm:tp=2", "3 key-value heads"),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 6},
            "megatron:tp=2",
            "3 key-value heads",
        ),
        ({"vocab_size": 101}, "megatron:tp=2", "padded_vocab"),
        ({}, "vllm:tp=2,ep=2,dp=3", "all 6 ranks"),
        ({"num_experts": 7}, "vllm:tp=2,ep=2", "7 experts are not divisible by ep=2"),
        ({"num_experts": 7}, "megatron:ep=2", "7 experts are not divisible by ep=2"),
        ({"moe_intermediate_size": 13}, "megatron:tp=2", "are not divisible by"),
        ({"num_hidden_layers": 4}, "megatron:pp=3", "4 layers do not fill pp=3 stages"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_anything_is_written(
    tmp_path, changes, layout, says
):
    folder, _ = saved(tmp_path / "hf", "qwen3_moe", **changes)
    for command in (("reshard", folder, "-o", tmp_path / "run"), ("plan-state", folder)):
        said = run(*command, "--model", folder, "--layout", layout, code=3)
        *notes, problem = said.splitlines()
        assert says in problem
        assert all(note.startswith("note: ") for note in notes)
    assert not (tmp_path / "run").exists()


def test_a_stated_padding_of_the_vocabulary_divides(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3", vocab_size=101, padded_vocab=104)
    call = ("reshard", folder, "-o", tmp_path / "run", "--model", folder)
    run(*call, "--layout", "megatron:tp=2")
    found = open_checkpoint(tmp_path / "run").outline("output_layer.weight")
    assert found.shape[0] == 104
    run("merge", tmp_path / "run", "-o", f"{tmp_path}/back/", "--model", folder)
    same(tmp_path / "back", arrays)


def test_from_one_trainer_to_another_and_to_an_engine_with_a_padded_vocabulary(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3", vocab_size=101)
    padded = {**HF["qwen3"]["config"], "vocab_size": 101, "padded_vocab": 104}
    (tmp_path / "padded.json").write_text(json.dumps(padded))
    model = ("--model", tmp_path / "padded.json")
    run("reshard", folder, "-o", tmp_path / "run", *model, "--layout", "megatron:tp=2")
    for layout, name, rows in (
        ("megatron:tp=4", "output_layer.weight", 104),
        ("vllm:tp=2", "lm_head.weight", 128),
        ("fsdp:2", "lm_head.weight", 101),
    ):
        call = ("--model", folder, "--layout", layout)
        run("reshard", tmp_path / "run", "-o", tmp_path / layout, *call)
        run("plan-state", tmp_path / "run", *call)
        assert open_checkpoint(tmp_path / layout).outline(name).shape[0] == rows
        run("merge", tmp_path / layout, "-o", f"{tmp_path}/{layout}-back/", "--model", folder)
        same(tmp_path / f"{layout}-back", arrays)


@pytest.mark.parametrize("layout", ["megatron:tp=1", "vllm:tp=1"])
def test_rows_beyond_the_vocabulary_are_dropped_only_if_they_are_padding(tmp_path, layout):
    folder, arrays = saved(tmp_path / "hf", "qwen3", vocab_size=300)
    run("reshard", folder, "-o", tmp_path / "run", "--model", folder, "--layout", layout)
    run("merge", tmp_path / "run", "-o", tmp_path / "same.safetensors", "--model", folder)
    for vocab in (257, 296, 299):
        config = tmp_path / f"{vocab}.json"
        config.write_text(json.dumps({**HF["qwen3"]["config"], "vocab_size": vocab}))
        call = ("merge", tmp_path / "run", "-o", tmp_path / f"{vocab}.safetensors", "--model")
        rows = (300 if "megatron" in layout else 320) - vocab
        said = run(*call, config, code=3)
        assert f"{rows} rows of " in said
        assert "drop" in said
        assert not (tmp_path / f"{vocab}.safetensors").exists()
        run(*call, config, "--drop-rows")
        kept = load_file(tmp_path / f"{vocab}.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert (kept[name] == arrays[name][:vocab]).all()


@pytest.mark.parametrize(("extra", "refused"), [("zero", False), ("equal", False), ("one", True)])
def test_padding_is_zero_or_rows_that_are_equal(tmp_path, extra, refused):
    folder, arrays = saved(tmp_path / "hf", "qwen3", vocab_size=30)
    run(
        "merge", folder, "-o", tmp_path / "mc.safetensors", "--model", folder, "--names", "megatron"
    )
    weights = load_file(tmp_path / "mc.safetensors")
    for name, rows in (("embedding.word_embeddings.weight", 2), ("output_layer.weight", 1)):
        more = np.zeros((rows, weights[name].shape[1]), weights[name].dtype)
        if (extra == "equal" and rows > 1) or (extra == "one" and rows == 1):
            more += weights[name][7]
        weights[name] = np.concatenate([weights[name], more])
    save_file(weights, tmp_path / "padded.safetensors")
    call = ("merge", tmp_path / "padded.safetensors", "-o", tmp_path / "out.safetensors")
    said = run(*call, "--model", folder, code=3 if refused else 0)
    assert ("1 rows of 'output_layer.weight'" in said) == refused
    if not refused:
        back = load_file(tmp_path / "out.safetensors")
        assert all((back[name] == arrays[name]).all() for name in arrays)

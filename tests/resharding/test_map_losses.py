"""Maps lose nothing: what they have no use for, what they name and is missing, other models."""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shardspec import (
    DeviceMesh,
    Layout,
    NameMap,
    check_map,
    load_sharded,
    merge,
    model_names,
    plan_reshard,
    reshard,
)
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError, LayoutError
from shardspec.resharding.map_file import known_sizes
from shardspec.resharding.name_map import target_shapes
from tests.families.maps import by_maps, load_map, map_chain

MESH = DeviceMesh(range(2), (2,))
SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 6,
    "num_hidden_layers": 2,
    "intermediate_size": 10,
}
LAYER = {
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (10, 8),
    "mlp.up_proj.weight": (10, 8),
    "mlp.down_proj.weight": (8, 10),
}
SHAPES = {
    "model.embed_tokens.weight": (6, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (6, 8),
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
}
Q_NORM = "model.layers.1.self_attn.q_norm.weight"
TWO = NameMap.parse(
    """
    [sizes]
    "{i}" = "layers"
    [[map]]
    source = "a.{i}.w"
    target = ["w", "l x", "l[{i}]"]
    [[map]]
    source = "a.{i}.b"
    target = "b.{i}"
    [[map]]
    source = "a.{i}.{e}.x"
    target = ["x.{i}", "e x", "e[{e}]"]
    [[map]]
    source = "a.{i}.router"
    target = "router.{i}"
    [[unused]]
    source = "head"
    """
)
OWN = """
model_types = ["llama"]
[sizes]
"{i}" = "num_hidden_layers"
""" + "".join(
    f'[[map]]\nsource = "{name}"\ntarget = "own.{name}"\n'
    for name in (*(f"model.layers.{{i}}.{name}" for name in LAYER), *list(SHAPES)[:3])
)
WHOLE = {
    **{f"a.{i}.w": (3,) for i in range(3)},
    **{f"a.{i}.b": (2,) for i in range(3)},
    **{f"a.{i}.{e}.x": (4,) for i in range(3) for e in range(2)},
    **{f"a.{i}.router": (2,) for i in range(3)},
    "head": (1,),
}


def problems(map_: NameMap, source: Mapping[str, tuple[int, ...]]) -> str:
    map_ = map_.with_sizes({"l": 3, "e": 2})
    report = check_map(map_, source, target_shapes(map_, source))
    assert bool(report) == (not report.problems and not report.unused)
    return "; ".join((*report.problems, *report.unused))


def test_every_tensor_that_a_map_names_must_be_there():
    assert problems(TWO, WHOLE) == ""
    for name in ("a.0.w", "a.1.b", "a.0.router", "a.2.0.x"):
        lacking = {n: shape for n, shape in WHOLE.items() if n != name}
        assert f"lacks {name!r}, which the map names" in problems(TWO, lacking), name


def test_numbers_run_as_far_as_a_size_says():
    assert problems(TWO.with_sizes({"layers": 3}), WHOLE) == ""
    assert "lacks 'a.3.w', which" in problems(TWO.with_sizes({"layers": 4}), WHOLE)
    said = problems(TWO.with_sizes({"layers": 2}), WHOLE)
    assert "has 'a.2.w', but {i} ends at 1, as layers is 2" in said
    assert "lacks 'a.0.w'" in problems(TWO, {"head": (1,)})


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", ["megatron", "fused", "torch_dist"])
def test_no_tensor_of_a_model_may_lack(name, way):
    config = {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": False}
    lacking = {n: shape for n, shape in SHAPES.items() if n != name}
    source = {n: Layout(MESH, f"[{','.join('R' * len(s))}]", s, "int8") for n, s in lacking.items()}
    first, *_ = map_chain(f"llama-hf-to-{way}", config)
    with pytest.raises(LayoutError, match=f"the source lacks '{name}'"):
        plan_reshard(source, (MESH, {}), names=first)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "hf"
    place.mkdir()
    torch.manual_seed(0)
    state = {name: torch.randn(shape) for name, shape in {**SHAPES, Q_NORM: (2,)}.items()}
    save_file(state, place / "model.safetensors")
    return place


def test_wherever_a_map_is_taken_what_it_has_no_use_for_is_refused_or_dropped(folder, tmp_path):
    names, says = (
        load_map("llama-hf-to-fused", SIZES),
        f"does not use '{Q_NORM}'.*by name with drop=",
    )
    layouts = {
        n: Layout(MESH, f"[{','.join('R' * len(s))}]", s, "float32")
        for n, s in {**SHAPES, Q_NORM: (2,)}.items()
    }
    out = tmp_path / "out.safetensors"
    rules = {"*qkv*": "[S0{8,4,4},R]"}
    calls = [
        lambda **more: merge(folder, out, names=names, **more),
        lambda **more: reshard(
            folder, tmp_path / "cut", device_mesh=MESH, rules=rules, names=names, **more
        ),
        lambda **more: load_sharded(folder, MESH, rules, names=names, **more),
        lambda **more: plan_reshard(folder, (MESH, rules), names=names, **more).run({}),
        lambda **more: plan_reshard(layouts, (MESH, rules), names=names, **more),
    ]
    for call in calls:
        with pytest.raises((LayoutError, CheckpointError), match=says):
            call()
        with pytest.raises((LayoutError, CheckpointError), match="k_norm"):
            call(drop=["*.q_norm.*", "*.k_norm.*"])
        call(drop="*.q_norm.*")
    assert Q_NORM not in load_file(out)
    assert len(load_file(out)) == len(SHAPES) - 2 * 3
    with pytest.raises((LayoutError, CheckpointError), match="is only for maps"):
        merge(folder, tmp_path / "other", drop="*.q_norm.*")


def own_map():
    """Return the text of a map that fuses q, k and v and gives all tensors other names."""
    rows = {"q": "rows[:8]", "k": "rows[8:12]", "v": "rows[12:]"}
    lines = ['sizes = { "{i}" = "layers", layers = 2, rows = 16 }']
    for name in [*list(SHAPES)[:3], *(f"model.layers.{{i}}.{part}" for part in LAYER)]:
        part = re.search(r"self_attn\.([qkv])_proj", name)
        target = f'"{name.replace("model.", "decoder.")}"'
        if part is not None:
            target = f'["decoder.layers.{{i}}.qkv.weight", "rows h", "{rows[part[1]]}"]'
        source = f'["{name}", "n h"]' if part is not None else f'"{name}"'
        lines += ["[[map]]", f"source = {source}", f"target = {target}"]
    return "\n".join(lines)


def test_on_the_command_line(folder, tmp_path):
    (tmp_path / "map.toml").write_text(own_map())
    by = ["--map", str(tmp_path / "map.toml")]
    out = tmp_path / "out.safetensors"

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        return result.exit_code, result.output

    for call in (
        ["merge", folder, "-o", out, "--dry-run", *by],
        ["merge", folder, "-o", out, "--quiet", *by],
        ["plan-state", folder, "--mesh", 2, *by],
    ):
        code, said = run(*call)
        assert (code in (2, 3), f"does not use '{Q_NORM}'" in said) == (True, True), said
        assert "Traceback" not in said
        assert run(*call, "--drop", "*.nothing")[0] in (2, 3)
        code, said = run(*call, "--drop", "*q_norm*")
        assert code == 0, said
    assert run("merge", folder, "-o", tmp_path / "x", "--drop", "*")[0] == 2
    # Patterns are of the names before the map, new names of those after it.
    more = ["--exclude", "*q_norm*", "--exclude", "lm_head*", "--rename", "r[.]norm", "r.last"]
    assert run("merge", folder, "-o", tmp_path / "y.safetensors", *by, *more)[0] == 0
    written = load_file(tmp_path / "y.safetensors")
    assert "lm_head.weight" not in written
    assert "decoder.last.weight" in written
    some = ["--include", "model.layers.1.*", "--exclude", "*q_norm*"]
    assert run("merge", folder, "-o", tmp_path / "z.safetensors", *by, *some)[0] == 0
    names = set(load_file(tmp_path / "z.safetensors"))
    assert {name.split(".")[2] for name in names} == {"1"}
    code, said = run("merge", folder, "-o", tmp_path / "q", *by, "--exclude", "*q_*")
    assert (code in (2, 3), "nothing is written at index" in said) == (True, True)


def test_what_is_dropped_stays_dropped_along_a_chain(folder, tmp_path):
    to_megatron, out = tmp_path / "megatron.safetensors", tmp_path / "out.safetensors"
    merge(by_maps(folder, map_chain("llama-hf-to-megatron", SIZES), Q_NORM), to_megatron)
    chain = map_chain("llama-megatron-to-fused", SIZES)
    merge(by_maps(to_megatron, chain, "output_layer.weight"), out)
    assert "lm_head.weight" not in load_file(out)
    less = by_maps(to_megatron, chain, "*.0.mlp.linear_fc1.weight")
    merge(less, tmp_path / "x.safetensors")
    left = load_file(out).keys() | {"lm_head.weight"}
    left -= load_file(tmp_path / "x.safetensors").keys()
    assert left == {"model.layers.0.mlp.gate_up_proj.weight"}
    into = {"lm_head.weight": torch.zeros(6, 8), "model.norm.weight": torch.zeros(8)}
    names = model_names({**SIZES, "model_type": "llama"}, "fused")
    load_sharded(to_megatron, into=into, names=names, drop="output_layer.weight")
    assert not into["lm_head.weight"].any()
    assert torch.equal(into["model.norm.weight"], load_file(out)["model.norm.weight"])


def test_a_config_beside_the_weights_says_type_and_counts(folder, tmp_path):
    mine = NameMap.parse(OWN)

    def merged(config: dict[str, object]) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        merge(folder, tmp_path / "o", names=mine, drop=Q_NORM, overwrite=True)

    config = {**SIZES, "model_type": "llama", "num_hidden_layers": 2}
    merged(config)
    merged({"model_type": "llava", "text_config": config})
    merged({key: value for key, value in config.items() if key != "model_type"})
    for other, says in (
        ({**config, "model_type": "gemma2"}, "of type 'gemma2', the map is for 'llama'"),
        ({**config, "num_hidden_layers": 3}, "the source lacks 'model.layers.2."),
        ({**config, "num_hidden_layers": 1}, "has 'model.layers.1.*num_hidden_layers is 1"),
    ):
        with pytest.raises(LayoutError, match=says):
            merged(other)
        (folder / "config.json").unlink()
        with pytest.raises(LayoutError, match=says):
            merge(folder, tmp_path / "x", names=mine.with_sizes(other), drop=Q_NORM)
    untyped = NameMap.parse('[[map]]\nsource = "a"\ntarget = "b"')
    assert known_sizes(untyped.with_sizes({"model_type": "anything", "n": 1}).sizes) == {"n": 1}


def test_sizes_in_the_words_of_a_config():
    """One without grouped heads, one that keeps sizes in text_config."""
    plain = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": None}
    for config in (plain, {"hidden_size": 3, "text_config": plain}):
        known = known_sizes(load_map("llama-hf-to-megatron", config).sizes)
        assert (known["g"], known["q"], known["d"]) == (4, 1, 2)
    with pytest.raises(LayoutError) as error:
        target_shapes(load_map("llama-hf-to-megatron", {**SIZES, "num_key_value_heads": 4}), SHAPES)
    assert "the factors num_key_value_heads head_dim give" in str(error.value)
    with pytest.raises(LayoutError, match="divides by num_key_value_heads, which is 0"):
        known_sizes(load_map("llama-hf-to-megatron", {**SIZES, "num_key_value_heads": 0}).sizes)


@pytest.mark.parametrize("shape", [(-3,), (2.5,), ("x",), (1,) * 1200, 3, None])
def test_odd_shapes_are_refused(shape):
    map_ = NameMap.parse('[[map]]\nsource = "a"\ntarget = "b"')
    with pytest.raises(LayoutError, match=r"shape|dims"):
        check_map(map_, {"a": shape}, {"b": shape})


@pytest.mark.parametrize("dims", [63, 64, 65])
def test_as_many_dims_as_numpy_indexes_are_checked(dims):
    map_ = NameMap.parse('[[map]]\nsource = "a"\ntarget = "b"')
    shapes = {"a": (2,) * dims}, {"b": (2,) * dims}
    if dims == 63:
        assert check_map(map_, *shapes)
    else:
        with pytest.raises(LayoutError, match=f"{dims} dims"):
            check_map(map_, *shapes)


def test_names_that_are_not_text_are_refused():
    odd: Any = {3: (2,)}
    map_ = NameMap.parse('[[map]]\nsource = "a"\ntarget = "b"')
    with pytest.raises(LayoutError, match="3 is not the name"):
        check_map(map_, odd, {"b": (2,)})


def test_numbers_without_end_and_odd_braces_are_refused_at_once():
    started = time.process_time()
    text = '[[map]]\nsource = "a.{i}.{j}"\ntarget = "b.{i}.{j}"\n[sizes]\n'
    for sizes, lost in (("i", "a.1.0"), ("j", "a.0.2")):
        endless = f'{text}"{{{sizes}}}" = {2**63 - 1}\n'
        shapes = {"a.0.0": (3,), "a.0.1": (3,)}
        target = {name.replace("a", "b"): shape for name, shape in shapes.items()}
        problems = check_map(NameMap.parse(endless), shapes, target).problems
        assert any(lost in problem for problem in problems), problems
    huge = 2**63 - 1
    whole = NameMap.parse('[[map]]\nsource = "a"\ntarget = "b"')
    assert check_map(whole, {"a": (huge,)}, {"b": (huge,)})
    with pytest.raises(LayoutError, match="brace"):
        NameMap.parse('[[map]]\nsource = "a.{x²}"\ntarget = "b"')
    assert time.process_time() - started < 5

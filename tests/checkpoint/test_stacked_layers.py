"""Maps from and to checkpoints of Megatron-core whose layers are stacked, against numpy."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardspec import NameMap, merge
from shardspec.cli.main import cli
from shardspec.errors import LayoutError
from tests.families.maps import by_maps, load_map, map_chain
from tests.resharding.test_shipped import CASES, EXPERTS, LAYERS, State, V, sizes_of

MODELS = [name.removesuffix("-hf-to-megatron") for name in CASES if name.endswith("megatron")]
VOCAB = V + 6
LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""What Megatron-core's own layers name otherwise than those of Transformer Engine."""


def stacked(state: State) -> State:
    """Stack layers and experts by their names."""
    out, found = {}, {}
    for name, array in state.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*?)(?:local_experts\.(\d+)\.(.*))?", name)
        if match is None:
            out[name] = array
        else:
            i, rest, e, last = match.groups()
            key = f"decoder.layers.{rest}" + (f"experts.{last}" if e else "")
            found[key, int(i), int(e or -1)] = array
    for key in {key for key, _, _ in found}:
        rows = [
            [array for (k, i, _), array in sorted(found.items()) if (k, i) == (key, layer)]
            for layer in range(LAYERS)
        ]
        whole = np.array(rows)
        out[key] = whole if ".experts.experts." in key else whole[:, 0]
    return out


def renamed(state: State, words: dict[str, str]) -> State:
    for old, new in words.items():
        state = {name.replace(old, new): array for name, array in state.items()}
    return state


def saved_ways(model: str) -> dict[str, State]:
    """Return what Megatron-core would save, in all the ways it does."""
    state, convert = CASES[f"{model}-hf-to-megatron"]
    numbered = convert(state, VOCAB)
    experts = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if model == "mixtral" else {}
    stacks = stacked(numbered)
    return {
        "numbered": numbered,
        "stacked": stacks,
        "numbered, its own layers": renamed(numbered, LOCAL),
        "stacked, its own layers": renamed(stacks, experts),
    }


def save(state: State, path: Path) -> Path:
    save_file({name: np.ascontiguousarray(array) for name, array in state.items()}, path)
    return path


def same(path: Path, wanted: State) -> None:
    found = load_file(path)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("model", MODELS)
def test_both_ways(tmp_path, model, every):
    hf, _ = CASES[f"{model}-hf-to-megatron"]
    sizes, padded = sizes_of(model), {**sizes_of(model), "padded_vocab": VOCAB}
    out = tmp_path / "out.safetensors"

    tied = {"lm_head.weight"} if model == "gpt2" else set()
    back = {name: array for name, array in hf.items() if name not in tied}
    fused = CASES[f"{model}-hf-to-fused"][1](hf, V)
    ways = saved_ways(model)
    merges: list[tuple[Path, Callable[[], tuple[NameMap, ...]], State]] = []

    def chain(name: str, sizes: dict[str, int], reverse: bool = False) -> Callable[[], Any]:
        return partial(map_chain, f"{model}-{name}", sizes, reverse=reverse)

    for way, state in ways.items():
        source = save(state, tmp_path / f"{way}.safetensors")
        for format in ("megatron", "torch_dist"):
            merges += [
                (source, chain(f"{format}-to-hf", sizes), back),
                (source, chain(f"hf-to-{format}", sizes, reverse=True), back),
                (source, chain(f"{format}-to-fused", sizes), fused),
            ]
        merges.append((source, chain("megatron-to-torch_dist", sizes), ways["stacked"]))
        merges.append((source, chain("torch_dist-to-megatron", sizes), ways["numbered"]))
    source = save(hf, tmp_path / "hf.safetensors")
    merges.append((source, chain("hf-to-torch_dist", padded), ways["stacked"]))
    merges.append((source, chain("torch_dist-to-hf", padded, reverse=True), ways["stacked"]))
    # Of one model these, of the next one others.
    for source, maps, wanted in merges[MODELS.index(model) % every :: every]:
        report = merge(by_maps(source, maps()), out, overwrite=True)
        assert set(report.left_out) <= {"lm_head.weight"}
        same(out, wanted)


def in_memory(model: str, hf: State) -> State:
    """Name and stack tensors as models of transformers 5 do, where these differ from its files."""
    if model == "gpt-neox":
        masks = {
            f"gpt_neox.layers.{i}.attention.bias": np.ones((1, 1, 9, 9), np.float32)
            for i in range(LAYERS)
        }
        return renamed(hf, {"embed_out": "lm_head"}) | masks
    out = {name: array for name, array in hf.items() if ".experts." not in name}
    for i in range(LAYERS):
        at = f"model.layers.{i}.block_sparse_moe.experts."
        w1, w2, w3 = (
            np.stack([hf[f"{at}{e}.{w}.weight"] for e in range(EXPERTS)])
            for w in ("w1", "w2", "w3")
        )
        out[f"model.layers.{i}.mlp.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        out[f"model.layers.{i}.mlp.experts.down_proj"] = w2
    return renamed(out, {"block_sparse_moe.gate": "mlp.gate"})


@pytest.mark.parametrize("model", ["gpt-neox", "mixtral"])
def test_what_a_trainer_saves_of_a_model_of_transformers(tmp_path, model):
    hf, convert = CASES[f"{model}-hf-to-megatron"]
    source = save(in_memory(model, hf), tmp_path / "live.safetensors")
    out = tmp_path / "out.safetensors"
    padded = {**sizes_of(model), "padded_vocab": VOCAB}
    for target, wanted in (
        ("megatron", convert(hf, VOCAB)),
        ("torch_dist", stacked(convert(hf, VOCAB))),
        ("fused", CASES[f"{model}-hf-to-fused"][1](hf, V)),
    ):
        config = sizes_of(model) if target == "fused" else padded
        names = map_chain(f"{model}-hf-to-{target}", config)
        assert merge(by_maps(source, names), out, overwrite=True).left_out == ()
        same(out, wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_of_stacks_with_an_optimizer_on_the_command_line(tmp_path):
    hf, convert = CASES["llama-hf-to-megatron"]
    stacks = stacked(convert(hf, VOCAB))
    moments = {f"optimizer.state.exp_avg.{name}": array for name, array in stacks.items()}
    both = {name: torch.tensor(array) for name, array in {**stacks, **moments}.items()}
    save_dcp(both, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "hf").mkdir()
    config = {**sizes_of("llama"), "model_type": "llama"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    words = ["merge", str(tmp_path / "ckpt"), "-o", f"{out}/", "--model", str(tmp_path / "hf")]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert f"{len(moments)} tensors of the optimizer's state left out" in result.output
    assert (out / "config.json").exists()
    same(out / "model.safetensors", hf)


def test_stacks_are_refused_by_a_map_of_numbered_layers(tmp_path):
    """Else only the embeddings and the last norm came through."""
    hf, convert = CASES["llama-hf-to-megatron"]
    source = save(stacked(convert(hf, VOCAB)), tmp_path / "stacked.safetensors")
    map_ = load_map("llama-hf-to-megatron", {**sizes_of("llama"), "padded_vocab": VOCAB}).reversed()
    with pytest.raises(LayoutError, match=r"lacks 'decoder\.layers\.0\.self_attention"):
        merge(source, tmp_path / "out", names=map_)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"num_hidden_layers": LAYERS + 1}, r"the source lacks 'model\.layers\.2\."),
        ({"num_hidden_layers": LAYERS - 1}, r"has 'model\.layers\.1\..*num_hidden_layers is 1"),
    ],
)
def test_a_wrong_number_of_layers_is_refused(tmp_path, given, problem):
    hf, _ = CASES["llama-hf-to-megatron"]
    source = save(hf, tmp_path / "hf.safetensors")
    maps = map_chain("llama-hf-to-torch_dist", {**sizes_of("llama"), **given})
    with pytest.raises(LayoutError, match=problem):
        merge(by_maps(source, maps), tmp_path / "out")
    assert not (tmp_path / "out").exists()

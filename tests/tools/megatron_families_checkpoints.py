"""Families of models in Megatron-core: its logits are those of transformers after one command.

What it saves comes back bit by bit, and two of its ranks hold what the layout says.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from shardspec import model_layouts
from tests.tools.commands import in_process, leave
from tests.tools.language_models import answers, loaded
from tests.tools.megatron_gpt import gpt, is_latent, randomised
from tests.tools.megatron_models_checkpoints import (
    CLOSE,
    load,
    megatron_answers,
    on_a_cpu,
    sharded,
)
from tests.tools.megatron_world import pieces_of, same_bits
from tests.tools.models_checkpoints import MODELS, there_and_back, type_of
from tests.tools.table import FUSED, LOGITS, MEGATRON, THERE_AND_BACK, Cell, write_rows

_OLDER: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 8,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "intermediate_size": 112,
        "max_position_embeddings": 64,
        # Megatron's layers are not parallel.
        "use_parallel_residual": False,
    },
}
"""Families that transformers does not shard on ranks, or not by heads."""
_MODELS = {**MODELS, **_OLDER}
_WITHOUT = ("gemma3_text", "olmo2")
"""Families of whose layers Megatron-core lacks some."""
_AHEAD = ("deepseek_v3", "glm4_moe")
_LOCAL = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
"""Names of Transformer Engine, and of layers that run on a CPU."""


def local(name: str) -> str:
    """Return what layers that run on a CPU call a tensor."""
    for old, new in _LOCAL:
        name = name.replace(old, new)
    return name


def saved_model(label: str, folder: Path) -> torch.Tensor:
    """Save a model whose norms are far from 1; return its logits."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(type_of(label), **_MODELS[label])
    if label == "qwen3_moe":
        config.norm_topk_prob = True
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name:
                scale = 0.5 if "norm" in name or "bias" in name else 0.1
                tensor.add_(torch.randn(tensor.shape) * scale)
    model.eval().save_pretrained(folder)
    return answers(loaded(folder))


def renames(config: PretrainedConfig, names: set[str]) -> list[str]:
    """Return the options that give tensors of `torch_dist` the names of layers on a CPU.

    These differ from those in memory, but where attention goes by latent vectors.
    """
    pairs = _LOCAL[1:] if is_latent(config) else [_LOCAL[1][::-1]]
    found = []
    for old, new in pairs:
        if any(old in name for name in names):
            found += ["--rename", re.escape(old), new]
    return found


def to_torch_dist(folder: Path, place: Path, saved: Path, config: PretrainedConfig) -> None:
    """Write what Megatron loads by `dist_checkpointing`."""
    names = {*load_file(place.parent / "megatron" / "model.safetensors")}
    way = ("--model", folder, "--names", "megatron", "--to", "dcp")
    in_process("reshard", folder, "-o", place, *way, *renames(config, names))
    for name in ("common.pt", "metadata.json"):
        shutil.copy(saved / name, place)


def try_one(label: str, place: Path) -> float:
    """Take a model to Megatron and back; return how far the logits are apart."""
    folder, saved = place / "hf", place / "saved"
    wanted = saved_model(label, folder)
    assert float(wanted.std()) > 0.1, "the logits say nothing"
    in_process(
        "merge", folder, "-o", f"{place}/megatron/", "--model", folder, "--names", "megatron"
    )
    tensors = load_file(place / "megatron" / "model.safetensors")
    config = loaded(folder).config
    model = gpt(config)
    load(model, {local(name): tensor for name, tensor in tensors.items()})
    apart = float((megatron_answers(model, wanted.shape[-1]) - wanted).abs().max())
    first = load_file(folder / "model.safetensors")
    for way, told in ((saved, {}), (place / "single", {"singleton_local_shards": True})):
        way.mkdir()
        dist_checkpointing.save(model.sharded_state_dict(metadata=told), str(way))
        back = Path(f"{way}-back")
        in_process("merge", way, "-o", f"{back}/", "--model", folder)
        again = load_file(back / "model.safetensors")
        assert first.keys() == again.keys(), first.keys() ^ again.keys()
        for name, tensor in first.items():
            assert same_bits(tensor, again[name]), name
    to_torch_dist(folder, place / "run", saved, config)
    other = gpt(config)
    load(other, dist_checkpointing.load(sharded(other), str(place / "run")))
    assert torch.equal(megatron_answers(other, 96), megatron_answers(model, 96))
    return apart


def look_ahead(label: str, place: Path) -> None:
    """Take a model that predicts further tokens from Megatron to files and back: the same bits."""
    config = AutoConfig.for_model(type_of(label), **MODELS[label])
    config.num_nextn_predict_layers = 1
    home, saved = place / "ahead", place / "ahead-saved"
    config.save_pretrained(home)
    saved.mkdir()
    model = randomised(gpt(config, ahead=1), seed=5)
    dist_checkpointing.save(model.sharded_state_dict(), str(saved))
    in_process("merge", saved, "-o", f"{place}/ahead-hf/", "--model", home)
    files = load_file(place / "ahead-hf" / "model.safetensors")
    assert f"model.layers.{config.num_hidden_layers}.eh_proj.weight" in files
    to_torch_dist(place / "ahead-hf", place / "ahead-run", saved, config)
    other = gpt(config, ahead=1)
    load(other, dist_checkpointing.load(sharded(other), str(place / "ahead-run")))
    state = other.state_dict()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert same_bits(tensor, state[name]), name


def layout_of(label: str) -> str:
    experts = any("expert" in word for word in _MODELS[label])
    return f"megatron:tp=2,{'ep=2,etp=1,' if experts else ''}spec=local"


def held(rank: int, labels: list[str], place: Path) -> None:
    """Compare what each of two ranks of Megatron loads with the layout and the model's tensors."""
    on_a_cpu(rank, 2, place / "store", expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    for label in labels:
        config = loaded(place / label / "hf").config
        layout = layout_of(label)
        model = gpt(config, tp=2, ep=2 if "ep=" in layout else 1)
        load(model, dist_checkpointing.load(sharded(model), str(place / label / "saved")))
        tensors = load_file(place / label / "layout.safetensors")
        whole = {local(name): tensor for name, tensor in tensors.items()}
        found: dict[str, Any] = {}
        for piece in pieces_of(sharded(model), legacy=False):
            name, offset, tensor = piece.name, piece.offset, piece.tensor
            if "layers." in name and not re.search(r"layers\.\d", name):
                name = name.replace("layers.", f"layers.{offset[0]}.", 1)
                offset, tensor = offset[1:], tensor[0]
            box = tuple((at, at + size) for at, size in zip(offset, tensor.shape, strict=True))
            part = whole[local(name)][tuple(slice(*side) for side in box)]
            assert same_bits(part, tensor), (label, name)
            found.setdefault(local(name), set()).add(box)
        layouts = model_layouts(place / label / "hf", layout)
        assert {local(name) for name in layouts} == found.keys()
        for name, one in layouts.items():
            boxes = found[local(name)]
            elements = sum(volume(box) for box in boxes)
            assert elements == sum(map(volume, one.local_boxes(rank))), (label, name)
            assert inside(boxes, one.local_boxes(rank)), (label, name)
    leave()


def volume(box: tuple[tuple[int, int], ...]) -> int:
    size = 1
    for low, high in box:
        size *= high - low
    return size


def inside(boxes: set[Any], others: list[Any]) -> bool:
    """Return whether every box lies in one of others."""
    return all(
        any(
            all(a <= low and high <= b for (low, high), (a, b) in zip(box, other, strict=True))
            for other in others
        )
        for box in boxes
    )


def main(place: Path, rows_file: str, labels: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    on_a_cpu(0, 1, place / "store-of-one")
    cells, found = [], {}
    for label in labels:
        found[label] = try_one(label, place / label)
        print(f"{label}: logits apart by {found[label]:.1e}", file=sys.stderr)
        if label in _AHEAD:
            look_ahead(label, place / label)
        if label in _OLDER:
            hf, ways = place / label / "hf", place / label / "ways"
            ways.mkdir()
            there_and_back(hf, ways, answers(loaded(hf)), ("megatron",))
            cells.append(Cell(label, THERE_AND_BACK, "bits, logits"))
            # Fused, GPT-2 has the names of transformers; tests.tools.transformers tries the maps.
            cells.append(Cell(label, FUSED, "the way back only"))
        run, whole = place / label / "layout", place / label / "layout.safetensors"
        folder = place / label / "hf"
        in_process("reshard", folder, "-o", run, "--model", folder, "--layout", layout_of(label))
        in_process("merge", run, "-o", whole)
    assert max(found.values()) < CLOSE, json.dumps(found)
    parallel_state.destroy_model_parallel()
    spawn(held, (labels, place), nprocs=2)
    for label in labels:
        logits = "within 1e-5, norms far from 1; what it saves comes back as the same bits"
        cells.append(Cell(type_of(label), LOGITS, logits))
        cells.append(Cell(type_of(label), MEGATRON, f"bytes of 2 ranks, `{layout_of(label)}`"))
    cells += [Cell(label, LOGITS, "not run: Megatron-core lacks its layers") for label in _WITHOUT]
    write_rows(rows_file, cells)


if __name__ == "__main__":
    built = [label for label in _MODELS if label not in _WITHOUT]
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or built)
    leave()

"""Families of models: transformers' own models go to every place and back by one command each."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardspec import model_layouts
from tests.tools.commands import shardspec
from tests.tools.language_models import answers, loaded
from tests.tools.table import Row, write_rows

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    **_COMMON,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**_COMMON, "head_dim": 16},
    "qwen3_moe": {
        **_COMMON,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    },
    "glm4_moe": {**_EXPERTS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": _LATENT,
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None},
    "gpt_oss": {**_COMMON, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**_COMMON, "head_dim": 16},
    "phi3": _COMMON,
    "olmo2": _COMMON,
    "mixtral": {**_COMMON, "num_local_experts": 4},
}


def saved_model(model_type: str, folder: Path) -> torch.Tensor:
    """Save a model of a family whose every number is random; return its logits."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MODELS[model_type]))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.ndim:
                tensor.add_(torch.randn(tensor.shape) * 0.1)
    model.eval().save_pretrained(folder)
    return answers(loaded(folder))


def there_and_back(folder: Path, place: Path, wanted: torch.Tensor, ways: tuple[str, ...]) -> None:
    """Take a model to every place and back, where each number has to be the same bits."""
    first = load_file(folder / "model.safetensors")
    for names in ways:
        made, again = place / names, place / f"{names}-back"
        shardspec("merge", folder, "-o", f"{made}/", "--model", folder, "--names", names)
        shardspec("merge", made, "-o", f"{again}/", "--model", folder)
        back = load_file(again / "model.safetensors")
        assert back.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(back[name], tensor), name
        assert torch.equal(answers(loaded(again)), wanted)
    if "megatron" in ways:
        run, again = place / "run", place / "run-back"
        way = ("--names", "megatron", "--to", "dcp")
        shardspec("reshard", folder, "-o", run, "--model", folder, *way)
        shardspec("merge", run, "-o", f"{again}/", "--model", folder)
        assert torch.equal(answers(loaded(again)), wanted)


def tensor_parallel(folder: Path) -> None:
    """Compare names and shapes of a layout with those of the model in memory."""
    config = json.loads((folder / "config.json").read_text())
    model = loaded(folder)
    layouts = model_layouts(config, "hf-tp:2")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}
    assert {name: layout.global_shape for name, layout in layouts.items()} == shapes


def main(place: Path, rows_file: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for model_type in MODELS:
        here = place / model_type
        wanted = saved_model(model_type, here / "hf")
        ways = ("fused",) if model_type == "olmo2" else ("megatron", "fused")
        there_and_back(here / "hf", here, wanted, ways)
        tensor_parallel(here / "hf")
        print(f"{model_type}: the same bits by {', '.join(ways)}", file=sys.stderr)
        rows.append(
            Row(
                *("transformers", transformers.__version__, f"{model_type}: `--model`, `--names`"),
                *("yes", f"yes, by {' and '.join(ways)} and back", "`--to huggingface`"),
                "yes, the logits are equal",
            )
        )
    write_rows(rows_file, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

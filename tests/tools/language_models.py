"""Small language models of transformers, made from configs, and what they answer."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

__all__ = ["CONFIGS", "TOKENS", "answers", "loaded", "model_of"]

TOKENS = torch.arange(48).reshape(2, 24) * 5 % 96
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 112}
_GPT2: dict[str, Any] = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 8}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**_GROUPED),
    "llama, tied": transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "llama, with biases": transformers.LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True),
    "qwen2": transformers.Qwen2Config(**_GROUPED),
    "mistral": transformers.MistralConfig(**_GROUPED, head_dim=16),
    "gpt2": transformers.GPT2Config(**_GPT2, n_positions=32, bos_token_id=1, eos_token_id=2),
    "gpt-neox": transformers.GPTNeoXConfig(**_COMMON, intermediate_size=112),
    "mixtral": transformers.MixtralConfig(**_GROUPED, num_local_experts=4),
}


def model_of(config: PretrainedConfig, seed: int = 1) -> PreTrainedModel:
    """Return a model whose every parameter is random: norms and biases too, which start alike."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


def loaded(folder: Path) -> PreTrainedModel:
    """Load a folder, of which nothing may be missing or too much."""
    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()


def answers(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits for `TOKENS`."""
    with torch.no_grad():
        logits = model(TOKENS).logits
    assert isinstance(logits, torch.Tensor)
    return logits

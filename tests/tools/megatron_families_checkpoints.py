"""Families of models in Megatron-core: its logits are those of transformers after one command."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from safetensors.torch import load_file
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tools.commands import leave, shardspec
from tests.tools.language_models import answers, loaded
from tests.tools.megatron_models_checkpoints import load, megatron_answers, on_a_cpu
from tests.tools.models_checkpoints import MODELS
from tests.tools.table import Row, write_rows

_CLOSE = 1e-5
_KINDS = ("qwen3", "qwen3_moe")
_LOCAL = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
"""Names of Transformer Engine, and of layers that run on a CPU."""


def saved_model(model_type: str, folder: Path) -> torch.Tensor:
    """Save a model whose norms are far from 1; return its logits."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    if model_type == "qwen3_moe":
        config.norm_topk_prob = True
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.5 if "norm" in name else 0.1
            tensor.add_(torch.randn(tensor.shape) * scale)
    model.eval().save_pretrained(folder)
    return answers(loaded(folder))


def gpt(config: transformers.PretrainedConfig) -> GPTModel:
    """Build Megatron's model of the same sizes."""
    experts = config.model_type == "qwen3_moe"
    more = {}
    if experts:
        layers = range(config.num_hidden_layers)
        more = {
            "num_moe_experts": MODELS["qwen3_moe"]["num_experts"],
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [int(layer not in config.mlp_only_layers) for layer in layers],
        }
    layers_config = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        activation_func=silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        use_cpu_initialization=True,
        attention_dropout=0,
        hidden_dropout=0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **more,
    )
    return GPTModel(
        layers_config,
        get_gpt_decoder_block_spec(
            layers_config, use_transformer_engine=False, normalization="RMSNorm"
        ),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
    ).eval()


def apart(folder: Path, place: Path, wanted: torch.Tensor) -> float:
    """Return how far the logits of Megatron-core are from those of transformers."""
    shardspec("merge", folder, "-o", f"{place}/", "--model", folder, "--names", "megatron")
    tensors = load_file(place / "model.safetensors")
    for old, new in _LOCAL:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    model = gpt(loaded(folder).config)
    load(model, tensors)
    return float((megatron_answers(model, wanted.shape[-1]) - wanted).abs().max())


def main(place: Path, rows_file: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    on_a_cpu(0, 1, place / "store-of-one")
    found = {}
    for kind in _KINDS:
        wanted = saved_model(kind, place / kind / "hf")
        assert float(wanted.std()) > 0.1, "the logits say nothing"
        found[kind] = apart(place / kind / "hf", place / kind / "megatron", wanted)
        print(f"{kind}: logits apart by {found[kind]:.1e}", file=sys.stderr)
    assert max(found.values()) < _CLOSE, json.dumps(found)
    row = Row(
        *("transformers", transformers.__version__, f"`--names megatron`: {', '.join(_KINDS)}"),
        *("yes", "by their logits", "`--to huggingface`"),
        f"by Megatron-core {version('megatron-core')}: the logits are equal within 1e-5",
    )
    write_rows(rows_file, [row])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave()

"""Megatron-core's model for a config of transformers, of its own layers, which run on a CPU."""

from functools import partial
from typing import Any

import torch
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn.functional import gelu, silu
from transformers import PretrainedConfig

__all__ = ["gpt", "is_latent", "randomised"]


class _Attention(DotProductAttention):  # type: ignore[misc]  # its package has no types
    """Attention whose values are of another width than its keys, which 0.16 has in kernels only."""

    def __init__(
        self,
        config: Any,
        *rest: Any,
        k_channels: int = 0,
        v_channels: int = 0,
        **more: Any,
    ) -> None:
        super().__init__(config, *rest, **more)
        # It is built twice: without widths too, and then thrown away.
        if k_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def is_latent(config: PretrainedConfig) -> bool:
    """Return whether attention goes by latent vectors (MLA)."""
    return hasattr(config, "kv_lora_rank")


_LAYER_NORMS = {
    "gpt2": "layer_norm_epsilon",
    "gpt_neox": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}
"""Models whose norms have biases and whose feed-forward has no gate, and what they call epsilon."""


def _experts(config: PretrainedConfig, count: int) -> dict[str, Any]:
    """Return how tokens are sent to experts, and which layers have some."""
    layers = range(config.num_hidden_layers)
    dense = [*range(getattr(config, "first_k_dense_replace", 0))]
    dense += getattr(config, "mlp_only_layers", [])
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    found = {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": [int(layer not in dense) for layer in layers] if dense else 1,
    }
    if shared := getattr(config, "n_shared_experts", 0):
        found["moe_shared_expert_intermediate_size"] = shared * width
        found["moe_router_topk_scaling_factor"] = config.routed_scaling_factor
    if config.model_type in ("deepseek_v3", "glm4_moe"):
        found |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    elif config.model_type == "deepseek_v2":
        found["moe_router_pre_softmax"] = True
    return found


def _attention(config: PretrainedConfig) -> dict[str, Any]:
    """Return the sizes of heads."""
    if is_latent(config):
        return {
            "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_head_dim": config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "rope_type": "rope",
            "rotary_base": config.rope_parameters["rope_theta"],
            "qk_layernorm": True,
        }
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind = config.model_type
    bias = kind in ("qwen2", "starcoder2") or (kind == "glm4_moe" and config.attention_bias)
    return {
        "num_query_groups": getattr(config, "num_key_value_heads", None),
        "kv_channels": head,
        "add_qkv_bias": bias,
        "qk_layernorm": kind.startswith("qwen3") or getattr(config, "use_qk_norm", False),
    }


def gpt(
    config: PretrainedConfig, *, tp: int = 1, ep: int = 1, ahead: int = 0, padded_vocab: int = 0
) -> GPTModel:
    """Build Megatron's model of the same sizes, for some ranks, with layers that look ahead."""
    more = _attention(config)
    words = ("num_local_experts", "n_routed_experts", "num_experts")
    if experts := next((one for word in words if (one := getattr(config, word, 0))), 0):
        more |= _experts(config, experts)
        more |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    if config.model_type == "gpt_oss":
        more |= {"softmax_type": "learnable", "activation_func": quick_gelu}
        more |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
    norms, epsilon = "RMSNorm", "rms_norm_eps"
    if not (gated := config.model_type not in _LAYER_NORMS):
        norms, epsilon = "LayerNorm", _LAYER_NORMS[config.model_type]
        exact = config.model_type == "gpt_neox"
        more["activation_func"] = gelu if exact else partial(gelu, approximate="tanh")
    kind = MLATransformerConfig if is_latent(config) else TransformerConfig
    layers = kind(
        **{"activation_func": silu, **more},
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        ffn_hidden_size=getattr(config, "intermediate_size", None),
        tensor_model_parallel_size=tp,
        mtp_num_layers=ahead or None,
        gated_linear_unit=gated,
        add_bias_linear=getattr(config, "mlp_bias", config.model_type == "gpt_oss" or not gated),
        normalization=norms,
        layernorm_epsilon=getattr(config, epsilon),
        use_cpu_initialization=True,
        attention_dropout=0,
        hidden_dropout=0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    block = get_gpt_decoder_block_spec(layers, use_transformer_engine=False, normalization=norms)
    for spec in block.layer_specs if is_latent(config) else ():
        spec.submodules.self_attention.submodules.core_attention = _Attention
    positions: dict[str, Any] = {}
    if rope := getattr(config, "rope_parameters", None):
        positions = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
        positions["rotary_percent"] = rope.get("partial_rotary_factor", 1)
    return GPTModel(
        layers,
        block,
        vocab_size=padded_vocab or config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        **positions,
        mtp_block_spec=get_gpt_mtp_block_spec(layers, block, use_transformer_engine=False)
        if ahead
        else None,
    ).eval()


def randomised(model: GPTModel, seed: int) -> GPTModel:
    """Give every number of a model another value, those of norms far from 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.ndim:
                tensor.add_(torch.randn(tensor.shape) * 0.3)
    return model

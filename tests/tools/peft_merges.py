"""Adapters merged by shardspec and by `merge_and_unload` of peft, number by number."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tools.commands import in_process
from tests.tools.language_models import CONFIGS, model_of

__all__ = ["KINDS", "compare"]

_LINEAR = ["q_proj", "down_proj"]
_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "lora": ("llama", {"target_modules": _LINEAR}),
    "rank-stabilized": ("llama", {"target_modules": _LINEAR, "use_rslora": True}),
    "dora": ("llama", {"target_modules": _LINEAR, "use_dora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": _LINEAR,
            "rank_pattern": {"layers.0.self_attn.q_proj": 2},
            "alpha_pattern": {"down_proj": 3},
        },
    ),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "expression": ("llama", {"target_modules": r".*layers\.1\..*(q|v)_proj"}),
    "trained head": ("llama", {"target_modules": _LINEAR, "modules_to_save": ["lm_head"]}),
    "embedding": ("llama", {"target_modules": [*_LINEAR, "embed_tokens"]}),
    "embedding, dora": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "tied embedding": ("llama, tied", {"target_modules": [*_LINEAR, "embed_tokens"]}),
    "tied head": ("llama, tied", {"target_modules": [*_LINEAR, "lm_head"]}),
    "tied, trained": (
        "llama, tied",
        {
            "target_modules": _LINEAR,
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "inputs first": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "inputs first, dora": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    "parameter": ("llama", {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
}


def compare(kind: str, place: Path, dtype: torch.dtype) -> int:
    """Merge an adapter of a kind both ways and compare; return the number of changed tensors."""
    config, options = KINDS[kind]
    base = model_of(CONFIGS[config]).to(dtype)
    base.save_pretrained(place / "base")
    more = {"r": 4, "lora_alpha": 10, "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(base, LoraConfig(**more))
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape) * 0.1).to(parameter.dtype))
    model.save_pretrained(str(place / "adapter"))
    read = AutoModelForCausalLM.from_pretrained(place / "base", dtype=dtype)
    PeftModel.from_pretrained(read, str(place / "adapter")).merge_and_unload().save_pretrained(
        place / "expected"
    )
    in_process("merge", place / "base", "--lora", place / "adapter", "-o", place / "out")
    got, before = load_file(place / "out"), load_file(place / "base" / "model.safetensors")
    expected = load_file(place / "expected" / "model.safetensors")
    assert got.keys() == expected.keys(), kind
    for name, tensor in got.items():
        want = expected[name].to(tensor.dtype)
        # One unit in the last place, or 1e-6 of the largest number in float32.
        apart = (tensor.double() - want.double()).abs()
        most = 1e-6 * want.double().abs().max()
        if dtype == torch.bfloat16:
            exponent = want.double().abs().clamp_min(2.0**-126).log2().floor()
            most = 2.0 ** (exponent - 7)
        assert (apart <= most).all(), (kind, name, dtype, apart.max())
    return sum(not torch.equal(got[name], before[name]) for name in got)

"""Models with a tensor, a layer or an expert missing, or one too much, by `model_names`."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import pytest

from shardspec import model_names
from shardspec.errors import ShardSpecError
from shardspec.families.family import NamesOf
from shardspec.resharding.total import apply_map
from tests.faults.checks import one_line
from tests.faults.harness import Case

__all__ = ["losses"]

_Shapes = dict[str, tuple[int, ...]]
_LAYERS, _EXPERTS, _V, _H, _F = 3, 3, 10, 16, 12
_WAYS: Final[tuple[NamesOf, ...]] = ("megatron", "torch_dist", "fused")
_COMMON: Final[dict[str, object]] = {
    "hidden_size": _H,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": _LAYERS,
    "vocab_size": _V,
    "intermediate_size": _F,
    "tie_word_embeddings": False,
}
_GPT2: Final = {"vocab_size": _V, "n_positions": 7}
_CONFIGS: Final[dict[str, dict[str, object]]] = {
    "llama": {**_COMMON, "attention_bias": True, "mlp_bias": True},
    "qwen2": _COMMON,
    "mistral": _COMMON,
    "mixtral": {**_COMMON, "num_local_experts": _EXPERTS},
    "gpt2": {"n_embd": _H, "n_head": 4, "n_layer": _LAYERS, "n_inner": _F, **_GPT2},
    "gpt-neox": {**_COMMON, "attention_bias": True},
}
_FOREIGN: Final[_Shapes] = {
    "model.layers.1.self_attn.q_norm.weight": (4,),
    "model.layers.1.self_attn.q_proj.weight_scale_inv": (1, 1),
    "model.layers.1.self_attn.q_proj.qweight": (2, _H),
    "model.layers.1.self_attn.q_proj.lora_A.default.weight": (2, _H),
    "model.layers.1.self_attn.sinks": (4,),
    "model.layers.1.pre_feedforward_layernorm.weight": (_H,),
    "model.layers.1.mlp.shared_expert.up_proj.weight": (_F, _H),
    "model.layers.1.block_sparse_moe.gate.bias": (_EXPERTS,),
    "model.layers.1._checkpoint_wrapped_module.input_layernorm.weight": (_H,),
    "transformer.h.1.crossattention.c_attn.weight": (_H, _H),
    "decoder.layers.1.self_attention.q_layernorm.weight": (4,),
    "decoder.layers.self_attention.k_layernorm.weight": (_LAYERS, 4),
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (2 * _F, _H),
    "decoder.layers.1.mlp.router.expert_bias": (_EXPERTS,),
    "decoder.layers.1.mlp.linear_fc1.weight_w": (_F, _H),
    "decoder.layers.1.mlp.linear_fc1.weight_v": (_F, _H),
    "mtp.layers.0.eh_proj.weight": (_H, 2 * _H),
    f"model.layers.{_LAYERS}.eh_proj.weight": (_H, 2 * _H),
    "optimizer.state.exp_avg.w": (4,),
}


def _llama(model: str) -> _Shapes:
    shapes: _Shapes = {
        "model.embed_tokens.weight": (_V, _H),
        "model.norm.weight": (_H,),
        "lm_head.weight": (_V, _H),
    }
    for i in range(_LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{norm}_layernorm.weight": (_H,) for norm in ("input", "post_attention")}
        sizes = {"q": (_H, _H), "k": (8, _H), "v": (8, _H), "o": (_H, _H)}
        shapes |= {f"{at}self_attn.{x}_proj.weight": shape for x, shape in sizes.items()}
        biased = {"llama": "qkvo", "qwen2": "qkv"}.get(model, "")
        shapes |= {f"{at}self_attn.{x}_proj.bias": sizes[x][:1] for x in biased}
        sizes = {"gate": (_F, _H), "up": (_F, _H), "down": (_H, _F)}
        if model == "mixtral":
            shapes[f"{at}block_sparse_moe.gate.weight"] = (_EXPERTS, _H)
            for e in range(_EXPERTS):
                for name, shape in zip(("w1", "w3", "w2"), sizes.values(), strict=True):
                    shapes[f"{at}block_sparse_moe.experts.{e}.{name}.weight"] = shape
            continue
        shapes |= {f"{at}mlp.{x}_proj.weight": shape for x, shape in sizes.items()}
        if model == "llama":
            shapes |= {f"{at}mlp.{x}_proj.bias": shape[:1] for x, shape in sizes.items()}
    return shapes


def _gpt2(_: str) -> _Shapes:
    shapes: _Shapes = {"transformer.wte.weight": (_V, _H), "transformer.wpe.weight": (7, _H)}
    norms = ["transformer.ln_f"]
    for i in range(_LAYERS):
        at = f"transformer.h.{i}."
        norms += [f"{at}ln_1", f"{at}ln_2"]
        sizes = {"attn.c_attn": (_H, 3 * _H), "attn.c_proj": (_H, _H)}
        sizes |= {"mlp.c_fc": (_H, _F), "mlp.c_proj": (_F, _H)}
        shapes |= {f"{at}{name}.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{at}{name}.bias": shape[1:] for name, shape in sizes.items()}
    return shapes | {f"{norm}.{kind}": (_H,) for norm in norms for kind in ("weight", "bias")}


def _neox(_: str) -> _Shapes:
    shapes: _Shapes = {"gpt_neox.embed_in.weight": (_V, _H), "embed_out.weight": (_V, _H)}
    norms = ["gpt_neox.final_layer_norm"]
    for i in range(_LAYERS):
        at = f"gpt_neox.layers.{i}."
        norms += [f"{at}input_layernorm", f"{at}post_attention_layernorm"]
        sizes = {"attention.query_key_value": (3 * _H, _H), "attention.dense": (_H, _H)}
        sizes |= {"mlp.dense_h_to_4h": (_F, _H), "mlp.dense_4h_to_h": (_H, _F)}
        shapes |= {f"{at}{name}.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{at}{name}.bias": shape[:1] for name, shape in sizes.items()}
    return shapes | {f"{norm}.{kind}": (_H,) for norm in norms for kind in ("weight", "bias")}


_MODELS: Final = {**dict.fromkeys(_CONFIGS, _llama), "gpt2": _gpt2, "gpt-neox": _neox}


def _spoiled(
    shapes: _Shapes, config: dict[str, object]
) -> Iterator[tuple[str, _Shapes, dict[str, object]]]:
    """Yield every loss: what it is, and what then is there, with which config."""
    for name in shapes:
        yield f"without {name}", {n: s for n, s in shapes.items() if n != name}, config
        if ".layers." in name and not re.search(r"\.\d+\.", name):
            for dim in range(2 if ".experts." in name else 1):
                short = tuple(n - (at == dim) for at, n in enumerate(shapes[name]))
                yield f"{name} as {short}", {**shapes, name: short}, config
    for part in (r"\.(layers|h)\.{}\.", r"experts\.{}\.", r"\.1\..*experts\.{}\."):
        for number in range(_LAYERS):
            some = re.compile(part.format(number))
            kept = {name: shape for name, shape in shapes.items() if not some.search(name)}
            if len(kept) < len(shapes):
                yield f"without {some.pattern}", kept, config
    for name, shape in _FOREIGN.items():
        yield f"with {name}", {**shapes, name: shape}, config
    for key in ("num_hidden_layers", "n_layer", "num_local_experts"):
        for by in (-1, 1):
            if isinstance(count := config.get(key), int):
                yield f"{key} {by:+}", shapes, {**config, key: count + by}
    yield "another type", shapes, {**config, "model_type": "gemma2"}


def _lost(target: NamesOf, shapes: _Shapes, config: dict[str, object]) -> None:
    with pytest.raises(ShardSpecError) as error:
        _made(target, shapes, config)
    one_line(f"Error: {error.value}\n")


def _made(target: NamesOf, shapes: _Shapes, config: dict[str, object]) -> _Shapes:
    """Return what a model's config makes of tensors."""
    for map_ in model_names(config, target).maps(shapes):
        made = apply_map(map_, shapes, {})
        made.report.require_total()
        shapes = made.shapes
    return shapes


def losses(_: Path, whole: bool) -> Iterator[Case]:
    """Lose something of every family in every direction."""
    random = Random(8)
    for model, make in _MODELS.items():
        config = {**_CONFIGS[model], "model_type": model.replace("-", "_")}
        shapes = make(model)
        for way in _WAYS:
            ways: tuple[tuple[NamesOf, _Shapes], ...]
            ways = (way, shapes), ("hf", _made(way, shapes, config))
            for target, source in ways:
                cases = list(_spoiled(source, config))
                for label, spoiled, said in cases if whole else random.sample(cases, 1):
                    act = partial(_lost, target, spoiled, said)
                    yield Case(f"{model} {way} to {target} {label}", act)

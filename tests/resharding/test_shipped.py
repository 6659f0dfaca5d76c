"""The maps of families, compared with conversions written by hand in numpy."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    check_map,
    plan_reshard,
)
from shardspec.resharding.name_map import target_shapes
from tests.families.maps import load_map

Array = npt.NDArray[np.float32]
State = dict[str, Array]
HEADS, GROUPS, D, C, F, V, LAYERS, EXPERTS = 6, 2, 4, 24, 10, 14, 2, 3
SIZES = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": D,
    "hidden_size": C,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "vocab_size": V,
    "num_local_experts": EXPERTS,
    "n_head": HEADS,
    "n_embd": C,
    "n_inner": F,
    "n_layer": LAYERS,
    "n_positions": 9,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
"""As LLaMA's configs say that all matrices have biases."""


def state_of(shapes: Mapping[str, tuple[int, ...]]) -> State:
    random = np.random.default_rng(0)
    return {n: random.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


def llama(*, biases: str = "", experts: bool = False) -> State:
    """LLaMA's tensors; `biases` is ``"qkv"``, ``"all"`` or none."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, C),
        "model.norm.weight": (C,),
        "lm_head.weight": (V, C),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{n}_layernorm.weight": (C,) for n in ("input", "post_attention")}
        for x, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            shapes[f"{at}self_attn.{x}_proj.weight"] = (heads * D, C)
            if biases:
                shapes[f"{at}self_attn.{x}_proj.bias"] = (heads * D,)
        shapes[f"{at}self_attn.o_proj.weight"] = (C, HEADS * D)
        if biases == "all":
            shapes[f"{at}self_attn.o_proj.bias"] = shapes[f"{at}mlp.down_proj.bias"] = (C,)
            shapes |= {f"{at}mlp.{x}_proj.bias": (F,) for x in ("gate", "up")}
        if experts:
            shapes[f"{at}block_sparse_moe.gate.weight"] = (EXPERTS, C)
            for e in range(EXPERTS):
                expert = f"{at}block_sparse_moe.experts.{e}."
                shapes |= {f"{expert}w1.weight": (F, C), f"{expert}w3.weight": (F, C)}
                shapes[f"{expert}w2.weight"] = (C, F)
        else:
            shapes |= {f"{at}mlp.{x}_proj.weight": (F, C) for x in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = (C, F)
    return state_of(shapes)


def gpt2() -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (V, C),
        "transformer.wpe.weight": (9, C),
        "transformer.ln_f.weight": (C,),
        "transformer.ln_f.bias": (C,),
        "lm_head.weight": (V, C),
    }
    for i in range(LAYERS):
        at = f"transformer.h.{i}."
        shapes |= {f"{at}{n}.{k}": (C,) for n in ("ln_1", "ln_2") for k in ("weight", "bias")}
        for name, a, b in (
            ("attn.c_attn", C, 3 * C),
            ("attn.c_proj", C, C),
            ("mlp.c_fc", C, F),
            ("mlp.c_proj", F, C),
        ):
            shapes |= {f"{at}{name}.weight": (a, b), f"{at}{name}.bias": (b,)}
    return state_of(shapes)


def neox() -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "gpt_neox.embed_in.weight": (V, C),
        "embed_out.weight": (V, C),
        "gpt_neox.final_layer_norm.weight": (C,),
        "gpt_neox.final_layer_norm.bias": (C,),
    }
    for i in range(LAYERS):
        at = f"gpt_neox.layers.{i}."
        for n in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{at}{n}.{k}": (C,) for k in ("weight", "bias")}
        for name, a, b in (
            ("attention.query_key_value", 3 * C, C),
            ("attention.dense", C, C),
            ("mlp.dense_h_to_4h", F, C),
            ("mlp.dense_4h_to_h", C, F),
        ):
            shapes |= {f"{at}{name}.weight": (a, b), f"{at}{name}.bias": (a,)}
    return state_of(shapes)


def grouped(q: Array, k: Array, v: Array) -> Array:
    """Megatron's rows: of each group its queries, its key, its value."""
    rows = []
    each = HEADS // GROUPS * D
    for g in range(GROUPS):
        rows += [q[g * each : (g + 1) * each], k[g * D : (g + 1) * D], v[g * D : (g + 1) * D]]
    return np.concatenate(rows)


def padded(weight: Array, rows: int) -> Array:
    return np.concatenate([weight, np.zeros((rows - len(weight), C), np.float32)])


def llama_to_megatron(state: State, vocab: int) -> State:
    out = {
        "embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"], vocab),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": padded(state["lm_head.weight"], vocab),
    }
    for i in range(LAYERS):
        a, b = f"model.layers.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            if f"{a}self_attn.q_proj.{kind}" in state:
                parts = [state[f"{a}self_attn.{x}_proj.{kind}"] for x in "qkv"]
                out[f"{b}self_attention.linear_qkv.{kind}"] = grouped(*parts)
            if f"{a}self_attn.o_proj.{kind}" in state:
                out[f"{b}self_attention.linear_proj.{kind}"] = state[f"{a}self_attn.o_proj.{kind}"]
            if f"{a}mlp.gate_proj.{kind}" in state:
                gate, up = (state[f"{a}mlp.{x}_proj.{kind}"] for x in ("gate", "up"))
                out[f"{b}mlp.linear_fc1.{kind}"] = np.concatenate([gate, up])
                out[f"{b}mlp.linear_fc2.{kind}"] = state[f"{a}mlp.down_proj.{kind}"]
        out[f"{b}self_attention.linear_qkv.layer_norm_weight"] = state[f"{a}input_layernorm.weight"]
        norm = state[f"{a}post_attention_layernorm.weight"]
        if f"{a}mlp.gate_proj.weight" in state:
            out[f"{b}mlp.linear_fc1.layer_norm_weight"] = norm
            continue
        out[f"{b}pre_mlp_layernorm.weight"] = norm
        out[f"{b}mlp.router.weight"] = state[f"{a}block_sparse_moe.gate.weight"]
        for e in range(EXPERTS):
            c, d = f"{a}block_sparse_moe.experts.{e}.", f"{b}mlp.experts.local_experts.{e}."
            both = [state[f"{c}w1.weight"], state[f"{c}w3.weight"]]
            out[f"{d}linear_fc1.weight"] = np.concatenate(both)
            out[f"{d}linear_fc2.weight"] = state[f"{c}w2.weight"]
    return out


def llama_to_fused(state: State, vocab: int) -> State:
    assert vocab == V, "serving pads nothing here"
    out = dict(state)
    for i in range(LAYERS):
        a = f"model.layers.{i}."
        for kind in ("weight", "bias"):
            if f"{a}self_attn.q_proj.{kind}" in out:
                parts = [out.pop(f"{a}self_attn.{x}_proj.{kind}") for x in "qkv"]
                out[f"{a}self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
            if f"{a}mlp.gate_proj.{kind}" in out:
                both = [out.pop(f"{a}mlp.{x}_proj.{kind}") for x in ("gate", "up")]
                out[f"{a}mlp.gate_up_proj.{kind}"] = np.concatenate(both)
        if f"{a}mlp.down_proj.weight" in out:
            continue
        moe = f"{a}block_sparse_moe.experts."
        w1, w2, w3 = (
            np.stack([out.pop(f"{moe}{e}.{w}.weight") for e in range(EXPERTS)])
            for w in ("w1", "w2", "w3")
        )
        routed = f"{moe}routed_experts."
        out[f"{routed}w13_weight"] = np.concatenate([w1, w3], axis=1)
        out[f"{routed}w2_weight"] = w2
    return out


def interleaved(rows: Array) -> Array:
    """From q, k, v below each other to q, k, v of each head below each other."""
    q, k, v = np.split(rows, 3)
    parts = [x[h * D : (h + 1) * D] for h in range(HEADS) for x in (q, k, v)]
    return np.concatenate(parts)


def gpt2_to_megatron(state: State, vocab: int) -> State:
    out = {
        "embedding.word_embeddings.weight": padded(state["transformer.wte.weight"], vocab),
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"decoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for i in range(LAYERS):
            a, b = f"transformer.h.{i}.", f"decoder.layers.{i}."
            out[f"{b}self_attention.linear_qkv.layer_norm_{kind}"] = state[f"{a}ln_1.{kind}"]
            out[f"{b}mlp.linear_fc1.layer_norm_{kind}"] = state[f"{a}ln_2.{kind}"]
            out[f"{b}self_attention.linear_qkv.{kind}"] = interleaved(
                state[f"{a}attn.c_attn.{kind}"].T
            )
            for x, y in (
                ("attn.c_proj", "self_attention.linear_proj"),
                ("mlp.c_fc", "mlp.linear_fc1"),
                ("mlp.c_proj", "mlp.linear_fc2"),
            ):
                out[f"{b}{y}.{kind}"] = state[f"{a}{x}.{kind}"].T
    return out


def gpt2_to_fused(state: State, vocab: int) -> State:
    assert vocab == V, "serving pads nothing here"
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    rest = {name: array for name, array in state.items() if name != "lm_head.weight"}
    return {name: array.T if name.endswith(linear) else array for name, array in rest.items()}


def neox_to_megatron(state: State, vocab: int) -> State:
    words = (
        ("gpt_neox.layers", "decoder.layers"),
        ("gpt_neox.final_layer_norm", "decoder.final_layernorm"),
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
        ("attention.query_key_value", "self_attention.linear_qkv"),
        ("attention.dense", "self_attention.linear_proj"),
        ("dense_h_to_4h", "linear_fc1"),
        ("dense_4h_to_h", "linear_fc2"),
        ("gpt_neox.embed_in", "embedding.word_embeddings"),
        ("embed_out", "output_layer"),
    )
    out = {}
    for name, array in state.items():
        given = padded(array, vocab) if "embed" in name else array
        for old, new in words:
            name = name.replace(old, new)
        out[name] = given
    return out


def neox_to_fused(state: State, vocab: int) -> State:
    assert vocab == V, "serving pads nothing here"
    out = {}
    for name, array in state.items():
        if "query_key_value" in name:
            heads = [array[h * D : (h + 1) * D] for h in range(3 * HEADS)]
            array = np.concatenate([*heads[0::3], *heads[1::3], *heads[2::3]])
        out[name.replace("query_key_value", "qkv_proj")] = array
    return out


def sizes_of(name: str) -> dict[str, int]:
    """Return the config of the case of a name."""
    return {**SIZES, **(BIASED if name.startswith("llama") else {})}


Convert = Callable[[State, int], State]
CASES: dict[str, tuple[State, Convert]] = {
    "llama-hf-to-megatron": (llama(biases="all"), llama_to_megatron),
    "llama-hf-to-fused": (llama(biases="all"), llama_to_fused),
    "mistral-hf-to-megatron": (llama(), llama_to_megatron),
    "mistral-hf-to-fused": (llama(), llama_to_fused),
    "qwen2-hf-to-megatron": (llama(biases="qkv"), llama_to_megatron),
    "qwen2-hf-to-fused": (llama(biases="qkv"), llama_to_fused),
    "mixtral-hf-to-megatron": (llama(experts=True), llama_to_megatron),
    "mixtral-hf-to-fused": (llama(experts=True), llama_to_fused),
    "gpt2-hf-to-megatron": (gpt2(), gpt2_to_megatron),
    "gpt2-hf-to-fused": (gpt2(), gpt2_to_fused),
    "gpt-neox-hf-to-megatron": (neox(), neox_to_megatron),
    "gpt-neox-hf-to-fused": (neox(), neox_to_fused),
}
ONE, TWO = DeviceMesh([0, 3], (2,)), DeviceMesh([1, 3, 2], (3,))


def cut_first(shape: tuple[int, ...]) -> str:
    return f"[{','.join(['S0'] + ['R'] * (len(shape) - 1))}]"


def carried_out(state: State, map_, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Move a state dict from two devices to three others by a map."""
    source = {n: DTensor(torch.tensor(a), ONE, cut_first(a.shape)) for n, a in state.items()}
    target = {n: Layout(TWO, cut_first(shape), shape, "float32") for n, shape in shapes.items()}
    got = plan_reshard(source, target, names=map_).run(source)
    return {name: tensor.to_global().numpy() for name, tensor in got.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab", [V, V + 6])
def test_against_numpy_both_ways(name, vocab):
    state, convert = CASES[name]
    if vocab != V and name.endswith("fused"):
        vocab = V
    wanted = convert(state, vocab)
    map_ = load_map(name, {**sizes_of(name), "padded_vocab": vocab})
    shapes = {n: array.shape for n, array in state.items()}
    implied = target_shapes(map_, shapes)
    assert implied == {n: array.shape for n, array in wanted.items()}
    report = check_map(map_, shapes, implied)
    assert report.problems == ()
    assert report.unused == ()
    got = carried_out(state, map_, implied)
    assert got.keys() == wanted.keys()
    for n, array in wanted.items():
        assert np.array_equal(got[n], array), n
    tied = {n: shape for n, shape in shapes.items() if n in {e.source for e in report.equations}}
    back = carried_out(wanted, map_.reversed(), tied)
    for n in tied:
        assert np.array_equal(back[n], state[n]), n

"""Name maps that come with shardspec, for models that many people train and serve."""

import re
from dataclasses import replace
from importlib.resources import files
from typing import Final, TypeAlias

from shardspec.errors import LayoutError
from shardspec.resharding.maps import NameMap, Side

_LIKE_LLAMA: Final = ("mistral", "qwen2")


def shipped_maps() -> tuple[str, ...]:
    """Return the names of the maps that come with shardspec.

    Examples
    --------
    >>> "llama-hf-to-megatron" in shipped_maps()
    True
    """
    found = (files("shardspec.resharding") / "models").iterdir()
    names = [file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml")]
    alike = [name.replace("llama", model, 1) for name in names for model in _LIKE_LLAMA]
    return tuple(sorted({*names, *alike}))


def load_map(name: str, sizes: dict[str, int] | None = None) -> NameMap:
    """Return a map that comes with shardspec.

    Parameters
    ----------
    name
        One of `shipped_maps`.
    sizes
        Whole numbers of the model's config, such as ``num_attention_heads``.

    Raises
    ------
    LayoutError
        If there is no such map.

    Examples
    --------
    >>> sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    >>> load_map("llama-hf-to-megatron", sizes).known_sizes()["head_dim"]
    8
    """
    if name not in shipped_maps():
        raise LayoutError(f"there is no map {name!r}; choose among {', '.join(shipped_maps())}")
    model, way = name.split("-", 1)
    file = f"llama-{way}.toml" if model in _LIKE_LLAMA else f"{name}.toml"
    text = (files("shardspec.resharding") / "models" / file).read_text(encoding="utf-8")
    return NameMap.parse(text).with_sizes(sizes or {})


_LAYER: Final = "model.layers.{i}."
_STACK: Final = (f"{_LAYER}mlp.experts.gate_up_proj", "e (two f) c", "e[{e}]")
_EXPERT: Final = f"{_LAYER}block_sparse_moe.experts.{{e}}."
_IN_MEMORY: Final = {
    "gpt-neox": ((("lm_head.weight",), ("embed_out.weight",)),),
    "mixtral": (
        ((f"{_LAYER}mlp.gate.weight",), (f"{_LAYER}block_sparse_moe.gate.weight",)),
        ((*_STACK, "two[0]"), (f"{_EXPERT}w1.weight", "f c")),
        ((*_STACK, "two[1]"), (f"{_EXPERT}w3.weight", "f c")),
        (
            (f"{_LAYER}mlp.experts.down_proj", "e c f", "e[{e}]"),
            (f"{_EXPERT}w2.weight", "c f"),
        ),
    ),
}
"""Where models of transformers 5 differ from its files, which a trainer that saves them shows."""

_FORMATS: Final = re.compile(
    "(.+)-(hf|megatron|torch_dist|fused)-to-(hf|megatron|torch_dist|fused)"
)
_MEGATRON: Final = ("megatron", "torch_dist")


def map_chain(
    name: str, sizes: dict[str, int] | None = None, *, reverse: bool = False
) -> tuple[NameMap, ...]:
    """Return the maps that lead from one format of a model to another, one after the other.

    A name such as ``"llama-megatron-to-fused"`` is a map to Hugging Face's names and one from them.
    Layers of Megatron-core may be numbered or stacked where it is the source; as a target they are
    numbered in ``megatron``, and stacked in ``torch_dist``, which needs their number in `sizes`.
    From Hugging Face, what models of transformers name otherwise than its files is taken too.

    Raises
    ------
    LayoutError
        If there is no such map.

    Examples
    --------
    >>> [len(map_chain(name)) for name in ("llama-hf-to-fused", "llama-megatron-to-fused")]
    [1, 3]
    """
    found = _FORMATS.fullmatch(name)
    if found is None or found[2] == found[3]:
        return (load_map(name, sizes),)
    model, *ends = found.groups()
    source, target = reversed(ends) if reverse else ends
    layered = dict.fromkeys(_MEGATRON, "megatron")
    sizes = sizes or {}
    maps = []
    if source == "hf" and model in _IN_MEMORY:
        on_disk = load_map(f"{model}-hf-to-megatron")
        kept = {side[:1]: side[:1] for side, _ in on_disk.rules}
        rules = (*kept.items(), *_IN_MEMORY[model])
        maps.append(NameMap(rules, {"two": 2}, unused=on_disk.unused))
    if source in _MEGATRON:
        maps.append(_numbered_layers(experts=_has_experts(model)))
    if not (source in _MEGATRON and target in _MEGATRON):
        if source != "hf":
            back = load_map(f"{model}-hf-to-{layered.get(source, source)}", sizes).reversed()
            # How far a vocabulary was padded, its tensor says.
            own = {k: v for k, v in back.sizes.items() if k != "padded_vocab" or k in sizes}
            maps.append(replace(back, sizes=own))
        if target != "hf":
            maps.append(load_map(f"{model}-hf-to-{layered.get(target, target)}", sizes))
    if target == "torch_dist":
        # GPT-2's config has a word of its own for the number of layers.
        layers = {"num_hidden_layers": sizes["n_layer"]} if "n_layer" in sizes else {}
        maps.append(_stacked_layers(experts=_has_experts(model)).with_sizes({**sizes, **layers}))
    return tuple(maps)


def _has_experts(model: str) -> bool:
    return any(".experts." in name for (name, *_), _ in load_map(f"{model}-hf-to-megatron").rules)


_Rule: TypeAlias = tuple[Side, Side]

# Megatron-core's layers are numbered, with the names of Transformer Engine, or stacked as
# `torch_dist` saves them: one row a layer, and for experts one row an expert besides. Layers built
# without Transformer Engine have other names for their norms.
_WHOLE: Final = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "output_layer.weight",
)
_MATRICES: Final = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_NORMS: Final = ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
_MLP_NORMS: Final = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def _numbered_layers(*, experts: bool) -> NameMap:
    """Return the map to numbered layers from what Megatron-core saves, numbered or stacked.

    With experts, the norm before them is not that of a matrix.
    """
    rules: list[_Rule] = [((name,), (name,)) for name in _WHOLE]
    for names, dims in _layer(experts=experts):
        for name in names:
            numbered, stacked = _places(names[0], name, dims)
            rules += [((f"decoder.layers.{{i}}.{name}",), numbered[:1]), (stacked, numbered)]
    for numbered, stacked, of_layer in _experts():
        rules += [(numbered[:1], numbered[:1]), (stacked, numbered), (of_layer, numbered)]
    return NameMap(tuple(rules))


def _stacked_layers(*, experts: bool) -> NameMap:
    """Return the map from numbered layers to those of ``torch_dist``."""
    rules: list[_Rule] = [((name,), (name,)) for name in _WHOLE]
    rules += [_places(names[0], names[0], dims) for names, dims in _layer(experts=experts)]
    rules += [(numbered, stacked) for numbered, stacked, _ in _experts()]
    return NameMap(tuple(rules), {"l": "num_hidden_layers", "e": "num_local_experts"})


def _places(name: str, saved: str, dims: str) -> _Rule:
    """Return a tensor of a layer, and where it lies in the stack of a name."""
    stacked = (f"decoder.layers.{saved}", f"l {dims}", "l[{i}]")
    return (f"decoder.layers.{{i}}.{name}", dims), stacked


def _layer(*, experts: bool) -> list[tuple[Side, str]]:
    """Return the names of each tensor of a layer, the one that maps use first, and its dims."""
    found = [((f"{name}.weight",), "a b") for name in (*_MATRICES, "mlp.router")]
    found += [((f"{name}.bias",), "a") for name in _MATRICES]
    norms = (_NORMS, _MLP_NORMS[::-1] if experts else _MLP_NORMS)
    kinds = ("weight", "bias")
    return found + [(tuple(f"{name}{k}" for name in names), "a") for names in norms for k in kinds]


def _experts() -> list[tuple[Side, Side, Side]]:
    """Return the matrices of an expert, and where they lie in stacks of all, or of a layer's."""
    return [
        (
            (f"decoder.layers.{{i}}.mlp.experts.local_experts.{{e}}.{name}.weight", "a b"),
            (f"decoder.layers.mlp.experts.experts.{name}.weight", "l e a b", "l[{i}]", "e[{e}]"),
            (f"decoder.layers.{{i}}.mlp.experts.experts.{name}.weight", "e a b", "e[{e}]"),
        )
        for name in ("linear_fc1", "linear_fc2")
    ]

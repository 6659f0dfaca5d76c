"""Name maps that come with shardspec, for models that many people train and serve."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from itertools import chain
from typing import Final

from shardspec.errors import LayoutError
from shardspec.resharding.name_map import NameMap
from shardspec.resharding.patterns import Side

_LIKE_LLAMA: Final[dict[str, dict[str, int]]] = {"mistral": {}, "qwen2": {"qkv_bias": 1}}
"""Models with LLaMA's tensors, and what of them their configs do not say."""


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


def load_map(name: str, sizes: Mapping[str, object] | None = None) -> NameMap:
    """Return a map that comes with shardspec.

    Parameters
    ----------
    name
        One of `shipped_maps`.
    sizes
        The model's config, or numbers of it such as ``num_attention_heads``.

    Raises
    ------
    LayoutError
        If there is no such map, or the config is of a model of another type.

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
    map_ = NameMap.parse(text)
    if model in _LIKE_LLAMA:
        map_ = replace(map_, model_types=(model,)).with_sizes(_LIKE_LLAMA[model])
    return map_.with_sizes(sizes or {})


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
    name: str, sizes: Mapping[str, object] | None = None, *, reverse: bool = False
) -> tuple[NameMap, ...]:
    """Return the maps that lead from one format of a model to another, one after the other.

    A name such as ``"llama-megatron-to-fused"`` is a map to Hugging Face's names and one from them.
    Layers of Megatron-core may be numbered or stacked where it is the source; as a target they are
    numbered in ``megatron``, and stacked in ``torch_dist``, which needs their number in `sizes`.
    From Hugging Face, what models of transformers name otherwise than its files is taken too.

    Raises
    ------
    LayoutError
        If there is no such map, or the config is of a model of another type.

    Examples
    --------
    >>> [len(map_chain(name)) for name in ("llama-hf-to-fused", "llama-megatron-to-fused")]
    [1, 3]
    """
    found = _FORMATS.fullmatch(name)
    if found is None or found[2] == found[3]:
        return (load_map(name, sizes),)
    model, *ends = found.groups()
    if f"{model}-hf-to-megatron" not in shipped_maps():
        raise LayoutError(f"there is no map {name!r}; choose among {', '.join(shipped_maps())}")
    source, target = reversed(ends) if reverse else ends
    layered = dict.fromkeys(_MEGATRON, "megatron")
    to_megatron = load_map(f"{model}-hf-to-megatron", sizes)
    maps = []
    if source == "hf" and model in _IN_MEMORY:
        kept = {side[:1]: side[:1] for side, _ in to_megatron.rules}
        maps.append(_as_named(to_megatron, (*kept.items(), *_IN_MEMORY[model])))
    if source in _MEGATRON:
        rules = tuple((place, one) for one, places in _tensors(model) for place in (one, *places))
        maps.append(replace(_as_named(to_megatron, rules), unused=()))
    if not (source in _MEGATRON and target in _MEGATRON):
        if source != "hf":
            back = load_map(f"{model}-hf-to-{layered.get(source, source)}", sizes).reversed()
            # How far a vocabulary was padded, its tensor says.
            padded = {"padded_vocab": "vocab_size"}.items()
            maps.append(replace(back, sizes=dict(back.sizes.items() - padded)))
        if target != "hf":
            maps.append(load_map(f"{model}-hf-to-{layered.get(target, target)}", sizes))
    if target in _MEGATRON and (target == "torch_dist" or source in _MEGATRON):
        maps.append(_placed(to_megatron, _tensors(model), stacked=target == "torch_dist"))
    return tuple(maps)


def _as_named(model: NameMap, rules: tuple[tuple[Side, Side], ...]) -> NameMap:
    """Return a map from whatever names there are to those of a model; the next map misses some."""
    by_itself = {place: side[0] for place, (side, _) in enumerate(rules)}
    return replace(
        model, rules=rules, sizes={**model.sizes, "two": 2}, zeros=(), optional=by_itself
    )


def _placed(
    model: NameMap, tensors: Iterable[tuple[Side, list[Side]]], *, stacked: bool
) -> NameMap:
    """Return the map from numbered tensors of a model of Megatron-core to where they are saved."""
    groups = {right[0]: model.optional.get(at) for at, (_, right) in enumerate(model.rules)}
    rules = tuple(
        (one, places[0]) if stacked and places else (one, one)
        for one, places in tensors
        if one[0] in groups
    )
    optional = {at: group for at, (one, _) in enumerate(rules) if (group := groups[one[0]])}
    stacks = {"l": model.sizes["{i}"], "e": model.sizes.get("{e}", 1)}
    return NameMap(
        rules, {**model.sizes, **stacks}, optional=optional, model_types=model.model_types
    )


_ATTENTION_NORMS: Final = ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
_MLP_NORMS: Final = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
"""Names of Transformer Engine, and of layers that are built without it."""


def _tensors(model: str) -> Iterator[tuple[Side, list[Side]]]:
    """Yield the tensors of Megatron-core, numbered by layer, and where else each may be saved.

    First as `torch_dist` stacks it: one row a layer, and for experts one row an expert besides.
    With experts, the norm before them is not that of a matrix.
    """
    known = [name for name in shipped_maps() if name.endswith("-hf-to-megatron")]
    names = {name: [target[0] for _, target in load_map(name).rules] for name in known}
    experts = any(".experts." in name for name in names[f"{model}-hf-to-megatron"])
    norms = dict([_ATTENTION_NORMS, _MLP_NORMS[::-1] if experts else _MLP_NORMS])
    others = {other: norm for norm, other in norms.items()}
    for name in dict.fromkeys(_replaced(name, others) for name in chain(*names.values())):
        dims = "a" if "norm" in name or name.endswith("bias") else "a b"
        if "{e}" in name:
            stack = name.replace("local_experts.{e}", "experts")
            every = (stack.replace(".{i}", ""), f"l e {dims}", "l[{i}]", "e[{e}]")
            yield (name, dims), [every, (stack, f"e {dims}", "e[{e}]")]
        elif "{i}" in name:
            numbered = dict.fromkeys((name, _replaced(name, norms)))
            stacks = [(one.replace(".{i}", ""), f"l {dims}", "l[{i}]") for one in numbered]
            yield (name, dims), [*stacks, *((one, dims) for one in numbered if one != name)]
        else:
            yield (name,), []


def _replaced(name: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        name = name.replace(old, new)
    return name

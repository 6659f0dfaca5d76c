"""Megatron-core's layers: numbered, with the names of Transformer Engine; or as they are saved.

Its format ``torch_dist`` stacks the layers, with one row a layer, and experts with one row an
expert besides. Layers built without Transformer Engine have other names for their norms.
"""

from typing import Final, TypeAlias

from shardspec.resharding.maps import NameMap

__all__ = ["numbered_layers", "stacked_layers"]

_Side: TypeAlias = tuple[str, ...]
_Rule: TypeAlias = tuple[_Side, _Side]

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


def numbered_layers(*, experts: bool) -> NameMap:
    """Return the map to numbered layers from what Megatron-core saves, numbered or stacked.

    Parameters
    ----------
    experts
        Whether the model has experts: the norm before them is not that of a matrix.

    Examples
    --------
    >>> map_ = numbered_layers(experts=False)
    >>> map_.target_shapes({"decoder.layers.mlp.linear_fc2.bias": (2, 4)})
    {'decoder.layers.0.mlp.linear_fc2.bias': (4,), 'decoder.layers.1.mlp.linear_fc2.bias': (4,)}
    """
    rules: list[_Rule] = [((name,), (name,)) for name in _WHOLE]
    for names, dims in _layer(experts=experts):
        for name in names:
            numbered, stacked = _places(names[0], name, dims)
            rules += [((f"decoder.layers.{{i}}.{name}",), numbered[:1]), (stacked, numbered)]
    for numbered, stacked, of_layer in _experts():
        rules += [(numbered[:1], numbered[:1]), (stacked, numbered), (of_layer, numbered)]
    return NameMap(tuple(rules))


def stacked_layers(*, experts: bool) -> NameMap:
    """Return the map from numbered layers to those of ``torch_dist``.

    Examples
    --------
    >>> map_ = stacked_layers(experts=False).with_sizes({"num_hidden_layers": 2})
    >>> map_.target_shapes({"decoder.layers.0.mlp.linear_fc2.bias": (4,)})
    {'decoder.layers.mlp.linear_fc2.bias': (2, 4)}
    """
    rules: list[_Rule] = [((name,), (name,)) for name in _WHOLE]
    rules += [_places(names[0], names[0], dims) for names, dims in _layer(experts=experts)]
    rules += [(numbered, stacked) for numbered, stacked, _ in _experts()]
    return NameMap(tuple(rules), {"l": "num_hidden_layers", "e": "num_local_experts"})


def _places(name: str, saved: str, dims: str) -> _Rule:
    """Return a tensor of a layer, and where it lies in the stack of a name."""
    stacked = (f"decoder.layers.{saved}", f"l {dims}", "l[{i}]")
    return (f"decoder.layers.{{i}}.{name}", dims), stacked


def _layer(*, experts: bool) -> list[tuple[_Side, str]]:
    """Return the names of each tensor of a layer, the one that maps use first, and its dims."""
    found = [((f"{name}.weight",), "a b") for name in (*_MATRICES, "mlp.router")]
    found += [((f"{name}.bias",), "a") for name in _MATRICES]
    norms = (_NORMS, _MLP_NORMS[::-1] if experts else _MLP_NORMS)
    kinds = ("weight", "bias")
    return found + [(tuple(f"{name}{k}" for name in names), "a") for names in norms for k in kinds]


def _experts() -> list[tuple[_Side, _Side, _Side]]:
    """Return the matrices of an expert, and where they lie in stacks of all, or of a layer's."""
    return [
        (
            (f"decoder.layers.{{i}}.mlp.experts.local_experts.{{e}}.{name}.weight", "a b"),
            (f"decoder.layers.mlp.experts.experts.{name}.weight", "l e a b", "l[{i}]", "e[{e}]"),
            (f"decoder.layers.{{i}}.mlp.experts.experts.{name}.weight", "e a b", "e[{e}]"),
        )
        for name in ("linear_fc1", "linear_fc2")
    ]

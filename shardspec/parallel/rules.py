"""Ready-made rules for common ways of sharding a model's parameters.

A set of rules is a dict from name pattern to spec, as saving, resharding and the command line
accept; if several match a name, the last one counts. Join sets by ``|``; `with_fsdp` adds an axis
to a set. Weights are those of `torch.nn.Linear`, output features first.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from shardspec.layout.layout import SpecLike
from shardspec.layout.rules import match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import Axis

ModuleRules: TypeAlias = dict[str, ShardingSpec]


def column_parallel(
    modules: Iterable[str], axis: Axis = "tp", *, bias: bool = False
) -> ModuleRules:
    """Return rules that shard linear layers, and optionally their biases, by outputs.

    Examples
    --------
    >>> {name: str(spec) for name, spec in column_parallel(["*.up"], bias=True).items()}
    {'*.up.weight': '[S(tp),R]', '*.up.bias': '[S(tp)]'}
    """
    rules = {f"{name}.weight": ShardingSpec(2, {0: [axis]}) for name in modules}
    biases = {f"{name}.bias": ShardingSpec(1, {0: [axis]}) for name in modules}
    return rules | biases if bias else rules


def row_parallel(modules: Iterable[str], axis: Axis = "tp") -> ModuleRules:
    """Return rules that shard linear layers by their inputs: outputs are sums over the axis.

    They follow layers of `column_parallel`. Biases are replicated.
    """
    return {f"{name}.weight": ShardingSpec(2, {1: [axis]}) for name in modules}


def sequence_parallel(modules: Iterable[str], axis: Axis = "tp", *, dim: int = 1) -> ModuleRules:
    """Return rules that shard outputs of (batch, sequence, features) by the sequence.

    They go into the argument ``outputs`` of `distribute_module`, for the layers before a norm or a
    dropout: embeddings, and those of `row_parallel`, whose sums a reduce-scatter then finishes.
    """
    return {name: ShardingSpec(3, {dim: [axis]}) for name in modules}


def llama_rules(axis: Axis = "tp") -> ModuleRules:
    """Return rules for LLaMA and similar models, by the names of Hugging Face's models.

    Attention is sharded by heads, the feed-forward layers by their inner features, embedding and
    head by the vocabulary. Norms are replicated.
    """
    columns = [*(f"*self_attn.{name}_proj" for name in "qkv"), "*mlp.gate_proj", "*mlp.up_proj"]
    return {
        **column_parallel([*columns, "*lm_head", "*embed_tokens"], axis),
        **row_parallel(["*self_attn.o_proj", "*mlp.down_proj"], axis),
    }


def gpt_rules(axis: Axis = "tp") -> ModuleRules:
    """Return rules for GPT-J, CodeGen and GPT-NeoX of Hugging Face, and for nanoGPT.

    A layer that fuses query, key and value is sharded by its outputs too. Where these are ordered
    by heads, as in GPT-NeoX, attention is sharded by heads. Where all queries come first, as in
    nanoGPT, torch gathers them when the module splits them, and each device computes all heads;
    three separate layers avoid that.
    """
    plain = [*(f"*attn.{name}_proj" for name in ("q", "k", "v", "qkv")), "*wte", "*lm_head"]
    fused = ["*attn.c_attn", "*attention.query_key_value"]
    inner = [f"*mlp.{name}" for name in ("fc_in", "c_fc", "dense_h_to_4h")]
    outer = [f"*mlp.{name}" for name in ("fc_out", "c_proj", "dense_4h_to_h")]
    return {
        **column_parallel([*plain, "*embed_in", "*embed_out"], axis),
        **column_parallel([*fused, *inner], axis, bias=True),
        **row_parallel(["*attn.out_proj", "*attn.c_proj", "*attention.dense", *outer], axis),
    }


def gpt2_rules(axis: Axis = "tp") -> ModuleRules:
    """Return `gpt_rules` for GPT-2 of Hugging Face, whose weights have input features first."""
    columns, rows = ["*attn.c_attn", "*mlp.c_fc"], ["*attn.c_proj", "*mlp.c_proj"]
    return {
        **row_parallel(columns, axis),
        **{f"{name}.bias": ShardingSpec(1, {0: [axis]}) for name in columns},
        **column_parallel([*rows, "*wte", "*lm_head"], axis),
    }


def only_matching(rules: Mapping[str, SpecLike], module: nn.Module) -> dict[str, SpecLike]:
    """Return the rules that match a tensor of the module; other functions refuse the rest."""
    names = list(module.state_dict())
    return {
        pattern: spec
        for pattern, spec in rules.items()
        if any(fnmatchcase(n, pattern) for n in names)
    }


def with_fsdp(
    module: nn.Module, axis: Axis = "dp", rules: Mapping[str, SpecLike] | None = None
) -> ModuleRules:
    """Return rules for all parameters with a dim that additionally shard dim 0, innermost.

    This is the layout that torch's `fully_shard` gives to parameters sharded by `rules` before. For
    HSDP, leave the other axis out: parameters are replicated along it.

    Examples
    --------
    >>> layer = nn.Linear(4, 6)
    >>> {name: str(spec) for name, spec in with_fsdp(layer, "dp", {"weight": "[S(tp),R]"}).items()}
    {'weight': '[S(tp,dp),R]', 'bias': '[S(dp)]'}
    """
    shapes = {name: p.dim() for name, p in module.named_parameters(remove_duplicate=False)}
    before = match_rules(rules or {}, shapes)
    specs = {name: before.get(name, ShardingSpec(dims)) for name, dims in shapes.items() if dims}
    return {
        name: spec.with_dims({0: [*spec.dim_specs[0].axes, axis]}) for name, spec in specs.items()
    }

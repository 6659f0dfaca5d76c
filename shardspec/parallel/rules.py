"""Ready rules: which parameters the usual ways of sharding a model shard, and how.

A set of rules is a dict from name pattern to spec, the same that saving, resharding and the
command line take. Sets for other tensors are joined by ``|``; `with_fsdp` adds an axis to one.
Weights are those of `torch.nn.Linear`, output features first.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from shardspec.layout.layout import SpecLike, match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis

__all__ = [
    "Rules",
    "column_parallel",
    "gpt2_rules",
    "gpt_rules",
    "llama_rules",
    "only_matching",
    "row_parallel",
    "sequence_parallel",
    "with_fsdp",
]

Rules: TypeAlias = dict[str, ShardingSpec]


def column_parallel(modules: Iterable[str], axis: Axis = "tp", *, bias: bool = False) -> Rules:
    """Return rules that shard linear layers by their outputs: each device computes some of them.

    Examples
    --------
    >>> {name: str(spec) for name, spec in column_parallel(["*.up"], bias=True).items()}
    {'*.up.weight': '[S(tp),R]', '*.up.bias': '[S(tp)]'}
    """
    rules = {f"{name}.weight": ShardingSpec(2, {0: [axis]}) for name in modules}
    biases = {f"{name}.bias": ShardingSpec(1, {0: [axis]}) for name in modules}
    return rules | biases if bias else rules


def row_parallel(modules: Iterable[str], axis: Axis = "tp") -> Rules:
    """Return rules that shard linear layers by their inputs: outputs are sums over the axis.

    They follow layers of `column_parallel`. Biases are replicated.

    Examples
    --------
    >>> rules = column_parallel(["*.up"]) | row_parallel(["*.down"])
    >>> {name: str(spec) for name, spec in rules.items()}
    {'*.up.weight': '[S(tp),R]', '*.down.weight': '[R,S(tp)]'}
    """
    return {f"{name}.weight": ShardingSpec(2, {1: [axis]}) for name in modules}


def sequence_parallel(modules: Iterable[str], axis: Axis = "tp", *, dim: int = 1) -> Rules:
    """Return rules for outputs of (batch, sequence, features): the axis shards the sequence.

    For the layers before a norm or a dropout: embeddings, and those of `row_parallel`, whose sums
    are then finished by a reduce-scatter. They go into the argument ``outputs`` of
    `distribute_module`.

    Examples
    --------
    >>> sequence_parallel(["*.down"])
    {'*.down': ShardingSpec.parse('[R,S(tp),R]')}
    """
    return {name: ShardingSpec(3, {dim: [axis]}) for name in modules}


def llama_rules(axis: Axis = "tp") -> Rules:
    """Return rules for LLaMA and its kin, by the names of Hugging Face's models.

    Attention is sharded by heads, the feed-forward layers by their inner features, embedding and
    head by the vocabulary. Norms are replicated.

    Examples
    --------
    >>> str(llama_rules()["*self_attn.o_proj.weight"])
    '[R,S(tp)]'
    """
    attention = [f"*self_attn.{name}_proj" for name in "qkv"]
    return {
        **column_parallel([*attention, "*mlp.gate_proj", "*mlp.up_proj", "*lm_head"], axis),
        **row_parallel(["*self_attn.o_proj", "*mlp.down_proj"], axis),
        "*embed_tokens.weight": ShardingSpec(2, {0: [axis]}),
    }


def gpt_rules(axis: Axis = "tp") -> Rules:
    """Return rules for GPT blocks of linear layers.

    The names are those of GPT-J, CodeGen and GPT-NeoX in Hugging Face's models, and of nanoGPT.
    A layer that fuses query, key and value is sharded by its outputs like any other, and results
    stay right. Where its outputs lie head by head, as in GPT-NeoX, attention is sharded by heads.
    Where all queries come first, as in nanoGPT, torch gathers them when the module splits them, and
    each device computes all heads: to shard these too, give the module three layers.

    Examples
    --------
    >>> rules = gpt_rules()
    >>> str(rules["*mlp.fc_in.bias"]), str(rules["*attn.c_attn.weight"])
    ('[S(tp)]', '[S(tp),R]')
    """
    attention = [f"*attn.{name}_proj" for name in ("q", "k", "v", "qkv")]
    columns = ["fc_in", "c_fc", "dense_h_to_4h"]
    rows = ["fc_out", "c_proj", "dense_4h_to_h"]
    fused = ["*attn.c_attn", "*attention.query_key_value"]
    return {
        **column_parallel(attention, axis),
        **column_parallel([*fused, *(f"*mlp.{name}" for name in columns)], axis, bias=True),
        **row_parallel(["*attn.out_proj", "*attn.c_proj", "*attention.dense"], axis),
        **row_parallel([f"*mlp.{name}" for name in rows], axis),
        **column_parallel(["*wte", "*embed_in", "*embed_out", "*lm_head"], axis),
    }


def gpt2_rules(axis: Axis = "tp") -> Rules:
    """Return rules for GPT-2 in Hugging Face's models, whose weights have input features first.

    They are those of `gpt_rules`, turned; what is said there of fused layers holds here too.

    Examples
    --------
    >>> rules = gpt2_rules()
    >>> str(rules["*attn.c_attn.weight"]), str(rules["*mlp.c_proj.weight"])
    ('[R,S(tp)]', '[S(tp),R]')
    """
    columns, rows = ["*attn.c_attn", "*mlp.c_fc"], ["*attn.c_proj", "*mlp.c_proj"]
    return {
        **{f"{name}.weight": ShardingSpec(2, {1: [axis]}) for name in columns},
        **{f"{name}.bias": ShardingSpec(1, {0: [axis]}) for name in columns},
        **{f"{name}.weight": ShardingSpec(2, {0: [axis]}) for name in rows},
        **column_parallel(["*wte", "*lm_head"], axis),
    }


def only_matching(rules: Mapping[str, SpecLike], module: nn.Module) -> Rules:
    """Return those of ready rules that match a tensor of a module.

    A rule that matches nothing is an error elsewhere; ready rules name layers that not every model
    has.
    """
    names = list(module.state_dict())
    return {
        pattern: ShardingSpec.of(spec)
        for pattern, spec in rules.items()
        if any(fnmatchcase(name, pattern) for name in names)
    }


def with_fsdp(
    module: nn.Module, axis: Axis = "dp", rules: Mapping[str, SpecLike] | None = None
) -> Rules:
    """Return rules that shard every parameter by one more axis, as FSDP does: dim 0, innermost.

    That is where torch's `fully_shard` leaves parameters that `rules` have sharded before. For HSDP
    the other axis is not mentioned: parameters are replicated along it. There is one rule for each
    parameter with a dim, by its name.

    Examples
    --------
    >>> layer = nn.Linear(4, 6)
    >>> {name: str(spec) for name, spec in with_fsdp(layer, "dp", {"weight": "[S(tp),R]"}).items()}
    {'weight': '[S(tp,dp),R]', 'bias': '[S(dp)]'}
    """
    shapes = {name: p.dim() for name, p in module.named_parameters(remove_duplicate=False)}
    before = match_rules(rules or {}, shapes)
    found = {name: before.get(name, ShardingSpec(dims)) for name, dims in shapes.items() if dims}
    return {
        name: spec.with_dims({0: [*spec.dim_specs[0].axes, axis]}) for name, spec in found.items()
    }

"""Gives the tensor-parallel rules of the rank files of Megatron and Meta, by name of the tensor."""

from functools import lru_cache
from typing import Final

from shardspec.families.family import family_names, rows_in, shipped_family
from shardspec.resharding.views import parse_view

_OF_EVERY_MODEL: Final = {
    **dict.fromkeys(("*norm.weight", "*norm.bias"), "[R]"),
    **dict.fromkeys(("*.layer_norm_weight", "*.layer_norm_bias"), "[R]"),
    "*rotary_pos_emb.inv_freq": "[R]",
    "*tokentype_embeddings.weight": "[R,R]",
}
_OLD: Final = (
    ("linear_qkv.", "query_key_value."),
    ("linear_proj.", "attention.dense."),
    ("linear_fc1.", "dense_h_to_4h."),
    ("linear_fc2.", "dense_4h_to_h."),
    ("output_layer.", "word_embeddings_for_head."),
)
"""Pairs of words in names: of Megatron-core, and of older Megatron."""
_META: Final = {
    "*.attention.wq.weight": "self_attn.q_proj.weight",
    "*.attention.wk.weight": "self_attn.k_proj.weight",
    "*.attention.wv.weight": "self_attn.v_proj.weight",
    "*.attention.wo.weight": "self_attn.o_proj.weight",
    "*.feed_forward.w1.weight": "mlp.gate_proj.weight",
    "*.feed_forward.w2.weight": "mlp.down_proj.weight",
    "*.feed_forward.w3.weight": "mlp.up_proj.weight",
    "output.weight": "lm_head.weight",
    "*norm.weight": "model.norm.weight",
}


def _spec(cut: str, dims: int) -> str:
    """Return the spec over the axis tp of a tensor with `dims` dims; `cut` is one of `CUTS`."""
    cuts = ["R"] * dims
    if cut not in ("replicated", "summed"):
        cuts[-1 if cut == "rows" else 0] = "S(tp)"
    return f"[{','.join(cuts)}]"


@lru_cache(2)
def megatron_rules(*, gated: bool) -> dict[str, object]:
    """Return the rules for the files of Megatron's ranks: pattern -> spec, or spec and parts.

    The first matrix of `gated` feed-forward layers has two parts that are sharded separately. Rows
    of q, k and v are sorted by groups of heads, so each rank has whole groups.

    Examples
    --------
    >>> megatron_rules(gated=True)["*linear_fc1.weight"]
    {'spec': '[S(tp),R]', 'parts': 2}
    >>> megatron_rules(gated=False)["*attention.dense.weight"]
    '[R,S(tp)]'
    """
    rules: dict[str, object] = dict(_OF_EVERY_MODEL)
    halves = set()
    for family in map(shipped_family, family_names()):
        for _, row in rows_in(family):
            side, cut = row.places["megatron"], row.cut.get("megatron", "replicated")
            # Transformer Engine's layers do not shard latent tensors.
            if side is None or cut == "latent":
                continue
            dims = parse_view(side[1])
            name = ".".join(side[0].split(".")[-2:])
            for old, new in (("", ""), *_OLD):
                if old in name:
                    pattern = f"*{name.replace(old, new)}"
                    rules[pattern] = _spec(cut, len(dims))
                    halves |= {pattern} if "two" in dims[0] else set()
    for pattern in halves if gated else ():
        rules[pattern] = {"spec": rules[pattern], "parts": 2}
    return rules


@lru_cache(1)
def meta_rules() -> dict[str, object]:
    """Return the rules for the files of Meta's LLaMA, except for the embedding.

    >>> meta_rules()["*.attention.wo.weight"]
    '[R,S(tp)]'
    """
    rows = {row.side[0]: row for _, row in rows_in(shipped_family("llama"))}
    cuts = {pattern: rows[name] for pattern, name in _META.items()}
    rules: dict[str, object] = {"rope.freqs": "[R]"}
    for pattern, row in cuts.items():
        rules[pattern] = _spec(row.cut["megatron"], len(parse_view(row.side[1])))
    return rules

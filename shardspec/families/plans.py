"""Reads the tensor-parallel plan of the installed transformers for a model."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from shardspec.errors import LayoutError
from shardspec.layout.spec import DimSpec, Part, ShardingSpec
from shardspec.text import shown

_COLUMNS: Final = {"colwise", "colwise_rep", "colwise_gather_output"}
_ROWS: Final = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_PACKED: Final = {"packed_colwise": -2, "packed_rowwise": -1}
_REPLICATED: Final = {
    *("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts"),
    *("moe_identity_expert", "ep_router", "gather", "sequence_parallel", "activation"),
}
_HEADS: Final = re.compile(r"(.+\.)?[qkv]_proj\.(weight|bias)")


class TensorPlan(NamedTuple):
    """Styles of a model's tensors by patterns of names; ``*`` stands for a number.

    >>> plan = TensorPlan({"layers.*.up_proj": "colwise"}, ranks=2, head_dim=4)
    >>> str(plan.spec("layers.0.up_proj.weight", 2, (8, 4)))
    '[S(tp),R]'
    """

    styles: Mapping[str, str]
    ranks: int
    head_dim: int

    def spec(self, name: str, dims: int, shape: tuple[int, ...]) -> ShardingSpec:
        """Return the spec of a tensor; raises `LayoutError` for unknown styles and uneven sizes."""
        module, _, last = name.rpartition(".")
        keys = (name, module) if last in ("weight", "bias") else (name,)
        style = next((self.styles[key] for key in map(_numberless, keys) if key in self.styles), "")
        bias = last == "bias"
        cut: int | None = None
        if style in _COLUMNS or style in _PACKED:
            cut = dims + _PACKED.get(style, -2) if dims > 1 else 0
        elif style in _ROWS:
            cut = None if bias else dims - 1
        elif style in ("embedding_rowwise", "grouped_gemm"):
            cut = 0
        elif style and style not in _REPLICATED:
            raise LayoutError(f"{name!r}: the style {shown(style)} of transformers is not known")
        if cut is None or self.ranks == 1:
            return ShardingSpec(dims)
        size = shape[cut]
        if style in _COLUMNS and _HEADS.fullmatch(name) and size % (self.ranks * self.head_dim):
            raise LayoutError(
                f"{name!r}: {size // self.head_dim} heads do not divide by {self.ranks} ranks; "
                "transformers loads such a model, but cannot run it"
            )
        parts: tuple[Part, ...] = ()
        if style in _PACKED:
            if size % (2 * self.ranks):
                raise LayoutError(f"{name!r}: {size // 2} rows do not divide by {self.ranks} ranks")
            parts = (Part(size // 2), Part(size // 2))
        return ShardingSpec(dims, {cut: DimSpec(("tp",), parts)})


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def plan_specs(config: Mapping[str, object], ranks: int, head_dim: int) -> TensorPlan:
    """Return transformers' plan for a model, which is built on the meta device."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise LayoutError("the layout hf-tp needs the package transformers; install it") from None
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = AutoConfig.for_model(str(config.get("model_type")), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    styles = {str(key): str(style) for key, style in dict(model.tp_plan).items()}
    return TensorPlan(styles, ranks, max(1, head_dim))

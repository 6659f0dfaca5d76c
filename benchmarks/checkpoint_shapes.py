"""The checkpoints that are measured: LLaMA-shaped, bfloat16, 201 tensors in any size."""

import re
from dataclasses import dataclass
from math import prod
from typing import Final

__all__ = ["CUTS", "INDEX_FILES", "Cut", "Model", "model_of"]

INDEX_FILES: Final = 4
"""Files of the safetensors with an index."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model; those of TinyLlama 1.1B are (2048, 32000), 2.05 GiB."""

    hidden: int
    """A multiple of 128, so that eight ranks cut every matrix evenly."""
    vocab: int
    layers: int = 22

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by its name."""
        wide, narrow, inner = self.hidden, self.hidden // 8, self.hidden * 11 // 4
        layer = {
            "self_attn.q_proj": (wide, wide),
            "self_attn.k_proj": (narrow, wide),
            "self_attn.v_proj": (narrow, wide),
            "self_attn.o_proj": (wide, wide),
            "mlp.gate_proj": (inner, wide),
            "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner),
            "input_layernorm": (wide,),
            "post_attention_layernorm": (wide,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, wide)}
        for number in range(self.layers):
            for name, shape in layer.items():
                shapes[f"model.layers.{number}.{name}.weight"] = shape
        return {**shapes, "model.norm.weight": (wide,), "lm_head.weight": (self.vocab, wide)}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in bfloat16."""
        return 2 * sum(map(prod, self.shapes.values()))

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return 2 * max(map(prod, self.shapes.values()))


def model_of(gib: float, *, big: bool = False) -> Model:
    """Return the model nearest to a size; `big` gives it tensors over 1 GiB.

    Examples
    --------
    >>> model_of(2), len(model_of(2).shapes), model_of(2).num_bytes / 2**30
    (Model(hidden=2048, vocab=32000, layers=22), 201, 2.0490798950195312)
    """
    models = [Model(128 * step, 32_000) for step in range(1, 80)]
    found = min(models, key=lambda model: abs(model.num_bytes - gib * 2**30))
    return Model(found.hidden, (9 << 30) // 16 // found.hidden // 8 * 8) if big else found


@dataclass(frozen=True, slots=True)
class Cut:
    """How the ranks of a job share the tensors, in torch's words."""

    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    what: str


CUTS: Final = {
    "fsdp+tp": Cut((2, 2), ("dp", "tp"), "4 ranks, FSDP2 over tensor parallel"),
    "tp8": Cut((8,), ("tp",), "8 ranks, tensor parallel"),
    "rows": Cut((4,), ("tp",), "4 ranks, every matrix by rows"),
    "columns": Cut((4,), ("tp",), "4 ranks, every matrix by columns"),
}

_ROWWISE: Final = re.compile(r"o_proj|down_proj")


def tensor_parallel_dim(name: str) -> int | None:
    """Return the dim of a weight that tensor parallelism cuts, as people cut LLaMA.

    Examples
    --------
    >>> [tensor_parallel_dim(name) for name in ("mlp.up_proj", "mlp.down_proj", "model.norm")]
    [0, 1, None]
    """
    if "norm" in name:
        return None
    return 1 if _ROWWISE.search(name) else 0

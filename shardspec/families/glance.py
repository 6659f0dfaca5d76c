"""Summarizes a model's layouts: specs, parameters and bytes per rank, by kind of tensor.

>>> from shardspec import model_layouts
>>> sizes = {"hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 12}
>>> config = {"model_type": "llama", "vocab_size": 32, "num_hidden_layers": 2, **sizes}
>>> print(glance(model_layouts(config, "megatron:tp=2"), optimizer="adamw"))
group       spec        count   params    max/rank    min/rank   copies
───────────────────────────────────────────────────────────────────────
embedding   [S(tp),R]       1      256       256 B       256 B        1
attention   [S(tp),R]       2      384       384 B       384 B        1
            [R,S(tp)]       2      128       128 B       128 B        1
mlp         [S(tp),R]       2      384       384 B       384 B        1
            [R,S(tp)]       2      192       192 B       192 B        1
norm        [R]             5       40        80 B        80 B        2
head        [S(tp),R]       1      256       256 B       256 B        1
───────────────────────────────────────────────────────────────────────
total                      15    1.64K   1.641 KiB   1.641 KiB
2 ranks; rank 0 has the most weights: 1.641 KiB
adamw: 9.844 KiB to 9.844 KiB per rank for states and master weights
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.text import bytes_text, counted, html_table, shown, table_text

_GROUPS: Final = {
    "norm": r"norm|ln_|\.ln\d",
    "experts": r"experts?\b",
    "router": r"router|\bgate\.",
    "attention": r"attn|attention",
    "embedding": r"embed_tokens|embeddings|wte|wpe|embed_in",
    "head": r"lm_head|output_layer|embed_out",
    "mlp": r"mlp|feed_forward|dense",
}
"""Group -> pattern for names of its tensors, in order of precedence."""
_ORDER: Final = ("embedding", "attention", "router", "experts", "mlp", "norm", "head", "other")
_STATE_BYTES: Final = {"adamw": 8}
"""Optimizer -> bytes of its states per parameter, kept in float32."""
_HEADER: Final = ("group", "spec", "count", "params", "max/rank", "min/rank", "copies")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one kind with the same spec."""

    name: str
    """Kind of tensor: embedding, attention, router, experts, mlp, norm, head or other."""
    spec: str
    """Sharding spec, axes by name, without sizes of parts."""
    tensors: int
    parameters: int
    """Elements of all global tensors."""
    bytes_by_rank: Mapping[int, int]
    copies: float
    """Elements on all ranks, divided by `parameters`."""


@dataclass(frozen=True, slots=True)
class Glance:
    """Summary of a model on a mesh: its groups of tensors, and bytes per rank."""

    groups: tuple[TensorGroup, ...]
    ranks: tuple[int, ...]
    weight_bytes: Mapping[int, int]
    """Rank -> bytes of its weights."""
    state_bytes: Mapping[int, int]
    """Rank -> bytes of optimizer states and float32 master weights; empty without an optimizer."""
    padding: int
    """Elements that layouts add to the model's own, such as rows of a padded vocabulary."""
    optimizer: str = ""

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        before = ""
        for group in self.groups:
            rank_bytes = [group.bytes_by_rank.get(rank, 0) for rank in self.ranks]
            name, before = "" if group.name == before else group.name, group.name
            sizes = (str(group.tensors), _count_text(group.parameters), *_extremes(rank_bytes))
            rows.append((name, group.spec, *sizes, f"{group.copies:.4g}"))
        return rows

    def _totals(self) -> list[tuple[str, ...]]:
        tensors = sum(group.tensors for group in self.groups)
        parameters = sum(group.parameters for group in self.groups)
        weights = _extremes(list(self.weight_bytes.values()))
        return [("total", "", str(tensors), _count_text(parameters), *weights, "")]

    def __str__(self) -> str:
        (total,) = self._totals()
        lines = [table_text(_HEADER, self._rows(), footer=total, numbers_from=2, optional=(2, 6))]
        busiest = max(self.ranks, key=self.weight_bytes.__getitem__)
        lines.append(
            f"{counted(len(self.ranks), 'rank')}; rank {busiest} has the most weights: "
            f"{bytes_text(self.weight_bytes[busiest])}"
        )
        if self.padding:
            lines.append(f"{_count_text(self.padding)} of the parameters are padding")
        if self.state_bytes:
            largest, smallest = _extremes(list(self.state_bytes.values()))
            lines.append(
                f"{self.optimizer}: {smallest} to {largest} per rank for states and master weights"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = counted(len(self.ranks), "rank")
        return html_table(title, _HEADER, [*self._rows(), *self._totals()])


def _count_text(number: int) -> str:
    """Return a number of parameters in thousands (K), millions (M) or billions (B).

    >>> _count_text(950), _count_text(235_093_634_560)
    ('950', '235.1B')
    """
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.4g}{letter}"
    return str(number)


def _extremes(sizes: list[int]) -> tuple[str, str]:
    return bytes_text(max(sizes)), bytes_text(min(sizes))


class ModelLayouts(dict[str, Layout]):
    """Name of a tensor -> layout; prints as its `glance`."""

    def __init__(self, layouts: Mapping[str, Layout], padding: Mapping[str, int]) -> None:
        super().__init__(layouts)
        self.padding = padding
        """Name -> elements of the tensor that are padding."""

    def __str__(self) -> str:
        return str(glance(self))

    def _repr_html_(self) -> str:
        return glance(self)._repr_html_()


def group_of(name: str) -> str:
    """Return the kind of a tensor by its name.

    >>> group_of("model.layers.3.mlp.gate.weight"), group_of("decoder.final_layernorm.weight")
    ('router', 'norm')
    """
    matches = (group for group, pattern in _GROUPS.items() if re.search(pattern, name))
    return next(matches, "other")


def glance(layouts: Mapping[str, Layout], *, optimizer: str = "") -> Glance:
    """Return a summary of layouts by kind of tensor; the module's docstring shows one.

    Parameters
    ----------
    layouts
        Name to layout, as of `model_layouts`.
    optimizer
        ``"adamw"`` adds its two states, and float32 master weights of 16-bit parameters, sharded
        like the weights.

    Raises
    ------
    LayoutError
        If there are no layouts, or the optimizer is unknown.
    """
    if not layouts:
        raise LayoutError("there are no layouts to summarize; give those of a model")
    if optimizer and optimizer not in _STATE_BYTES:
        known = ", ".join(_STATE_BYTES)
        raise LayoutError(f"the optimizer {shown(optimizer)} is unknown; choose {known}")
    counts: dict[tuple[str, str], Counter[Layout]] = {}
    for name, layout in layouts.items():
        key = (group_of(name), re.sub(r"\{.*?\}", "", str(layout.labelled_spec)))
        counts.setdefault(key, Counter())[layout] += 1
    weights: Counter[int] = Counter()
    states: Counter[int] = Counter()
    groups = []
    for (kind, spec), of_layout in sorted(
        counts.items(), key=lambda item: _ORDER.index(item[0][0])
    ):
        bytes_by_rank: Counter[int] = Counter()
        parameters = elements = 0
        for layout, count in of_layout.items():
            width = item_bytes(layout.dtype)
            extra = _STATE_BYTES.get(optimizer, 0) + (4 if width < 4 else 0)
            parameters += count * prod(layout.global_shape)
            for rank in layout.mesh.ids:
                here = count * prod(layout.local_shape(rank))
                elements += here
                bytes_by_rank[rank] += here * width
                states[rank] += here * extra
        weights.update(bytes_by_rank)
        tensors = sum(of_layout.values())
        copies = elements / max(1, parameters)
        groups.append(TensorGroup(kind, spec, tensors, parameters, dict(bytes_by_rank), copies))
    ranks = tuple(sorted(weights))
    return Glance(
        tuple(groups),
        ranks,
        {rank: weights[rank] for rank in ranks},
        {rank: states[rank] for rank in ranks} if optimizer else {},
        sum(layouts.padding.values()) if isinstance(layouts, ModelLayouts) else 0,
        optimizer,
    )

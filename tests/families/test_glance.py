"""Summaries of models: every rank's bytes are those of its boxes, whatever the layout."""

from math import prod

import pytest
import torch

from shardspec import DeviceMesh, Layout, model_layouts
from shardspec.errors import LayoutError
from shardspec.families.glance import Glance, glance

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    "text", ["megatron:tp=2,pp=2,ep=4", "vllm:tp=4", "fsdp:5", "vllm:tp=2,ep=4"]
)
def test_bytes_of_ranks_are_those_of_their_boxes(text):
    layouts = model_layouts(CONFIG, text)
    found = glance(layouts, optimizer="adamw")
    for rank in found.ranks:
        held = {n: layout for n, layout in layouts.items() if rank in layout.mesh}
        sizes = {
            name: prod(sum(hi - lo for lo, hi in side) for side in layout.intervals(rank))
            for name, layout in held.items()
        }
        width = {n: getattr(torch, layout.dtype).itemsize for n, layout in held.items()}
        assert found.weight_bytes[rank] == sum(sizes[n] * width[n] for n in held)
        assert found.state_bytes[rank] == sum(sizes[n] * (12 if width[n] < 4 else 8) for n in held)
    assert sum(group.tensors for group in found.groups) == len(layouts)
    every = sum(prod(layout.global_shape) for layout in layouts.values())
    assert sum(group.parameters for group in found.groups) == every
    in_groups = sum(size for group in found.groups for size in group.bytes_by_rank.values())
    assert in_groups == sum(found.weight_bytes.values())
    assert max(map(len, str(found).splitlines())) <= 80


def test_copies_padding_and_kinds():
    found = glance(model_layouts(CONFIG, "vllm:tp=4"))
    by_kind: dict[str, set[float]] = {}
    for group in found.groups:
        by_kind.setdefault(group.name, set()).add(group.copies)
    assert by_kind["norm"] == by_kind["router"] == {4}
    assert by_kind["experts"] == by_kind["embedding"] == by_kind["head"] == {1}
    # 28 rows of 16 elements, in the embedding and in the head.
    assert found.padding == 2 * 28 * 16
    assert "896 of the parameters are padding" in str(found)


def test_layouts_of_any_names_are_summarized():
    mesh = DeviceMesh(range(2))
    found = glance(
        {"a": Layout(mesh, "[S0]", (3,), "float32"), "b": Layout(mesh, "[R]", (1,), "int8")}
    )
    assert isinstance(found, Glance)
    assert found.weight_bytes == {0: 9, 1: 5}
    assert [group.name for group in found.groups] == ["other", "other"]
    assert "<table>" in found._repr_html_()


def test_what_cannot_be_summarized_is_refused():
    with pytest.raises(LayoutError, match="no layouts"):
        glance({})
    with pytest.raises(LayoutError, match=r"'sgd'.*adamw"):
        glance(model_layouts(CONFIG, "fsdp:2"), optimizer="sgd")

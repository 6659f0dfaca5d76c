"""Every row of the pages for those who come from other libraries means what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardspec import DTensor, ShardingSpec
from shardspec.interop.notations import from_partition_spec, to_partition_spec
from tests.test_readme import ROOT

DOCS = Path(ROOT) / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


def rows(text: str, heading: str) -> list[tuple[str, str]]:
    """Return the cells of every table with a heading, each cell one piece of code."""
    found = []
    for table in re.findall(rf"^\| {heading} \|.*\n\|[- |]*\n((?:\|.*\n)+)", text, re.MULTILINE):
        for line in table.splitlines():
            cells = re.findall(r"`((?:[^`])*)`", line.replace(r"\|", "|"))
            found.append(tuple(cells))
    return found


def names_of(text: str) -> dict[str, Any]:
    """Return what the first block of a page defines."""
    block = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def same(left: Any, right: Any) -> bool:
    if isinstance(left, DTensor):
        equal = left.layout == right.layout and left.shards.keys() == right.shards.keys()
        return equal and all(torch.equal(left.shards[d], right.shards[d]) for d in left.shards)
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


@pytest.mark.parametrize(
    ("name", "heading", "count"),
    [
        ("from-torch", "in torch, and here", 24),
        ("from-colossal-alpa", "in Colossal-AI, and here", 8),
    ],
)
def test_both_spellings_of_a_row_are_the_same(name, heading, count):
    text = page(name)
    table = rows(text, heading)
    assert len(table) == count
    for left, right in table:
        names = names_of(text)
        assert same(eval(left, names), eval(right, names)), (left, right)


def test_rows_of_partition_specs():
    text = page("from-jax")
    mesh = names_of(text)["mesh"]
    table = [row for row in rows(text, "in JAX") if row[0].startswith("P(")]
    assert len(table) == 7
    for left, right in table:
        entries, pending = eval(left, {"P": lambda *e, unreduced=(): (e, frozenset(unreduced))})
        assert str(from_partition_spec(entries, 2, unreduced=pending)) == right
        assert to_partition_spec(right, mesh) == (entries, pending)


def test_rows_of_alpas_specs():
    every = rows(page("from-colossal-alpa"), "in Alpa")
    table = [row for row in every if re.fullmatch(r"[RS\d]+", row[0])]
    assert len(table) == 5
    for left, right in table:
        dims = re.findall(r"R|S\d+", left)
        assert str(ShardingSpec.parse(",".join(dims))) == right


@pytest.mark.parametrize(
    ("name", "heading", "kinds"),
    [
        ("from-jax", "in JAX", ["DeviceMesh", "Layout", "dict", "DTensor", "DTensor", "Tensor"]),
        ("from-colossal-alpa", "in Colossal-AI", ["Layout", "ConversionPlan", "DTensor"]),
        ("from-colossal-alpa", "in Alpa", ["DeviceMesh", "float", "CostTable", "ConversionPlan"]),
    ],
)
def test_what_a_row_says_to_write_runs(name, heading, kinds):
    text = page(name)
    cells = [row[-1] for row in rows(text, heading) if "(" in row[-1] and row[-1][0] != "["]
    assert [type(eval(cell, names_of(text))).__name__ for cell in cells] == kinds

"""What is tried with the tools themselves: rows of the tables in docs/compatibility.md."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    *("FUSED", "HF_TP", "LOGITS", "MEGATRON", "PUBLISHED", "THERE_AND_BACK"),
    *("Cell", "Row", "as_markdown", "families_as_markdown", "read_rows", "write_rows"),
]

THERE_AND_BACK: Final = "to Megatron-core and back"
LOGITS: Final = "logits against Megatron-core"
FUSED: Final = "fused and back"
HF_TP: Final = "`hf-tp`"
MEGATRON: Final = "`megatron` layout"
PUBLISHED: Final = "published sizes"
_COLUMNS: Final = (THERE_AND_BACK, LOGITS, FUSED, HF_TP, MEGATRON, PUBLISHED)


class Row(NamedTuple):
    """One kind of checkpoint of one tool; each member is what the table says of it."""

    tool: str
    version: str
    checkpoint: str
    """What was saved: format, mesh, model."""
    read: str
    bit_identical: str
    """Compared with what."""
    written: str
    loaded: str
    """By the tool, and what it then did."""


class Cell(NamedTuple):
    """What was tried of a family of models; the table of families has a column for each kind."""

    model_type: str
    column: str
    text: str


def write_rows(path: str, rows: Sequence[Row | Cell]) -> None:
    """Hand rows and cells to the process that prints the tables."""
    Path(path).write_text("".join("\t".join(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row | Cell]:
    """Return what another process has handed over."""
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    return [Cell(*line) if len(line) == len(Cell._fields) else Row(*line) for line in lines]


def families_as_markdown(cells: Iterable[Cell]) -> str:
    """Return the table of families.

    Examples
    --------
    >>> print(families_as_markdown([Cell("a", FUSED, "bits"), Cell("a", FUSED, "more")]))
    ... # doctest: +ELLIPSIS
    | `model_type` | to Megatron-core and back | ... | published sizes |
    | --- | --- | --- | --- | --- | --- | --- |
    | `a` |  |  | bits; more |  |  |  |
    """
    found: dict[str, dict[str, dict[str, None]]] = {}
    for model_type, column, text in cells:
        found.setdefault(model_type, {}).setdefault(column, {})[text] = None
    rows = [
        (f"`{model_type}`", *("; ".join(columns.get(one, ())) for one in _COLUMNS))
        for model_type, columns in sorted(found.items())
    ]
    return _markdown([("`model_type`", *_COLUMNS), ("---",) * (1 + len(_COLUMNS)), *rows])


def as_markdown(rows: list[Row]) -> str:
    """Return the table.

    Examples
    --------
    >>> print(as_markdown([Row("a", "1", "x", "yes", "yes", "no", "")]))
    | tool | version | checkpoint | read | bit-identical | written | loaded by the tool |
    | --- | --- | --- | --- | --- | --- | --- |
    | a | 1 | x | yes | yes | no |  |
    """
    head = (
        "tool",
        "version",
        "checkpoint",
        "read",
        "bit-identical",
        "written",
        "loaded by the tool",
    )
    return _markdown([head, ("---",) * len(head), *rows])


def _markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

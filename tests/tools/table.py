"""What is tried with the tools themselves: rows of the table in docs/compatibility.md."""

from pathlib import Path
from typing import NamedTuple

__all__ = ["Row", "as_markdown", "write_rows"]


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


def write_rows(path: str, rows: list[Row]) -> None:
    """Hand rows to the process that prints the table."""
    Path(path).write_text("".join("\t".join(row) + "\n" for row in rows))


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
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

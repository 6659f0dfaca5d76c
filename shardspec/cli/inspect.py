"""The command `shardspec inspect`."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Final

import click

from shardspec.checkpoint.catalog import box_text
from shardspec.checkpoint.inspect import (
    CheckpointSummary,
    TensorSummary,
    inspect_checkpoint,
    other_text,
)
from shardspec.cli.arguments import parse_index, parsed
from shardspec.cli.options import CheckpointPath, json_option, open_both, source_options
from shardspec.cli.output import path_text, say
from shardspec.errors import CheckpointError
from shardspec.layout.picture import Picture, ids_text
from shardspec.text import bytes_text, counted, printable, shown, table_text

__all__ = ["command"]

_MOST_CELLS: Final = 1024
"""Boxes beyond which a picture is no help."""
_MOST_VALUE: Final = 60
"""Characters of a value that is no tensor, beyond which a line is no help either."""


@click.command(
    "inspect",
    epilog="""\b
Examples:
  shardspec inspect ckpt
  shardspec inspect ckpt --tensor 'layers.0.*'               with the box and file of every rank
  shardspec inspect ckpt --tensor embed.weight --index 17    which rank holds row 17
  shardspec inspect ckpt --tensor embed.weight --picture     who holds what
  shardspec inspect ckpt --only uneven
  shardspec inspect ckpt --json
""",
)
@click.argument("checkpoint", type=CheckpointPath(), metavar="CKPT")
@click.option(
    "--tensor",
    "pattern",
    metavar="PATTERN",
    help="Only tensors whose name matches (*, ? and [abc] as in a shell), with all their boxes.",
)
@click.option(
    "--index",
    callback=parsed(parse_index),
    metavar="I,J,…",
    help="Say which ranks hold this element, row or block of the tensors that match.",
)
@click.option("--picture", is_flag=True, help="Draw how the tensors that match are cut.")
@click.option(
    "--only",
    type=click.Choice(("replicated", "uneven")),
    help="Only tensors of which several ranks hold the same, or whose boxes differ in shape.",
)
@source_options
@json_option("Print everything as JSON.")
def command(
    checkpoint: Path,
    ranks: int | None,
    source_rules: Path | None,
    as_json: bool,
    pattern: str | None,
    index: tuple[int, ...] | None,
    picture: bool,
    only: str | None,
) -> None:
    """Show mesh, tensors, specs and sizes of the checkpoint CKPT, and what each rank stored.

    Reads what describes the checkpoint, the header of every file where that does, and checks that
    all of it agrees; no data. Of several ranks that hold the same, some formats store what one
    holds, and show that one.
    """
    if (index is not None or picture) and pattern is None and only is None:
        raise click.UsageError("--index and --picture are about some tensors; name them: --tensor")
    whole = inspect_checkpoint(open_both(checkpoint, None, ranks, source_rules)[0])
    summary = whole
    if pattern is not None:
        summary = _only(summary, pattern)
    if only is not None:
        kept = tuple(t for t in summary.tensors if (t.uneven if only == "uneven" else t.replicated))
        summary = replace(summary, tensors=kept)
    if only is not None and not summary.tensors and not as_json:
        say(_some(summary, only, len(whole.tensors)))
    elif index is not None:
        _say_holders(summary, index, as_json)
    elif as_json:
        say(json.dumps(summary.to_json()))
    elif picture:
        say("\n\n".join(_picture(tensor) for tensor in summary.tensors))
    elif pattern is not None:
        say("\n\n".join(_boxes(tensor) for tensor in summary.tensors))
    elif only is not None:
        say(_some(summary, only, len(whole.tensors)))
    else:
        say(_overview(summary))


def _say_holders(summary: CheckpointSummary, index: tuple[int, ...], as_json: bool) -> None:
    """Print who holds a part of the tensors."""
    # A pattern may take in biases beside matrices: those that have no such index do not count.
    fitting = [tensor for tensor in summary.tensors if tensor.has(index)]
    found = [(t.outline.name, t.holders(index)) for t in fitting or summary.tensors[:1]]
    if as_json:
        boxes = [
            {"name": name, "box": [list(side) for side in box], "ranks": list(ranks)}
            for name, cells in found
            for box, ranks in cells.items()
        ]
        say(json.dumps({"index": list(index), "holders": boxes}))
        return
    for name, cells in found:
        for box, ranks in cells.items():
            who = f"rank{'s' if len(ranks) > 1 else ''} {ids_text(ranks)}"
            say(f"{_name(name)}[{', '.join(map(str, index))}]: {who}, in {box_text(box)}")


def _picture(tensor: TensorSummary) -> str:
    """Draw who holds what; a table of boxes where they make up no grid."""
    outline = tensor.outline
    if tensor.layout is not None:
        return f"{_name(outline.name)}\n{tensor.layout.picture()}"
    cells = tensor.cells
    sides = [{box[dim] for box in cells} for dim in range(len(outline.shape))]
    if prod(map(len, sides)) != len(cells) or len(cells) > _MOST_CELLS:
        return _boxes(tensor)
    title = f"{_title(tensor)} {list(outline.shape)}"
    return Picture(title, cells).text()


def _only(summary: CheckpointSummary, pattern: str) -> CheckpointSummary:
    found = tuple(t for t in summary.tensors if fnmatchcase(t.outline.name, pattern))
    if not found:
        names = ", ".join(shown(t.outline.name) for t in summary.tensors[:3])
        raise CheckpointError(
            f"{summary.directory}: no tensor matches {shown(pattern)}; the names start with "
            f"{names or '(there are none)'}"
        )
    return replace(summary, tensors=found)


def _overview(summary: CheckpointSummary) -> str:
    facts = [counted(len(summary.tensors), "tensor"), bytes_text(summary.num_bytes)]
    facts.append(f"in the format of {summary.format}")
    if summary.mesh is not None:
        devices = counted(summary.mesh.size, "device")
        facts.append(f"saved on mesh {summary.mesh} ({devices})")
    parts = [f"{path_text(summary.directory)}: {', '.join(facts)}"]
    if summary.tensors:
        parts += [_tensors(summary), _ranks(summary)]
    if summary.extras:
        rows = [
            [_name(name), _name(other_text(at, _MOST_VALUE))]
            for name, at in sorted(summary.extras.items())
        ]
        parts.append(table_text(["no tensor", "value"], rows, text_from=1))
    return "\n\n".join(parts)


def _some(summary: CheckpointSummary, only: str, of: int) -> str:
    found = f"{len(summary.tensors) or 'none'} of {counted(of, 'tensor')}"
    verb = "are" if len(summary.tensors) > 1 else "is"
    line = f"{path_text(summary.directory)}: {found} {verb} {only}"
    if only == "replicated" and summary.mesh is None:
        line += f", as far as {summary.format} says: what ranks hold alike may be stored once"
    return f"{line}\n\n{_tensors(summary)}" if summary.tensors else line


def _tensors(summary: CheckpointSummary) -> str:
    return _table(
        ["tensor", "spec", "dtype", "shape", "size", "remarks"],
        [
            [
                *_facts(t),
                "×".join(map(str, t.outline.shape)) or "scalar",
                bytes_text(t.num_bytes),
                ", ".join(_remarks(t)),
            ]
            for t in summary.tensors
        ],
        numbers=range(3, 5),
    )


def _ranks(summary: CheckpointSummary) -> str:
    mesh, files = summary.mesh, summary.files_by_rank
    return _table(
        ["rank", "coordinates", "stored", "file"],
        [
            [
                str(rank),
                "" if mesh is None else str(mesh.coordinates(rank)),
                bytes_text(num_bytes),
                files.get(rank, "none"),
            ]
            for rank, num_bytes in summary.bytes_by_rank.items()
        ],
        numbers=range(2, 3),
    )


def _table(header: list[str], rows: list[list[str]], numbers: range) -> str:
    """Return a table without the columns in which nothing stands."""
    kept = [at for at in range(len(header)) if any(row[at] for row in rows)]
    return table_text(
        [header[at] for at in kept],
        [[row[at] for at in kept] for row in rows],
        numbers_from=sum(at < numbers.start for at in kept),
        text_from=sum(at < numbers.stop for at in kept),
    )


def _remarks(tensor: TensorSummary) -> list[str]:
    """Say what is worth noting about the cut."""
    remarks = []
    if tensor.layout is None and len(tensor.cells) > 1:
        remarks.append(f"{len(tensor.cells)} boxes")
    if tensor.replicated:
        remarks.append("replicated")
    if tensor.uneven:
        remarks.append("uneven")
    return remarks


def _facts(tensor: TensorSummary) -> list[str]:
    outline = tensor.outline
    spec = outline.spec if tensor.layout is None else tensor.layout.labelled_spec
    return [_name(outline.name), "" if spec is None else str(spec), outline.dtype]


def _title(tensor: TensorSummary) -> str:
    return " ".join(filter(None, _facts(tensor)))


def _name(name: str) -> str:
    """Return a name that cannot upset the terminal, and that is seen."""
    return printable(name) or "''"


def _boxes(tensor: TensorSummary) -> str:
    stored = tensor.stored
    title = (
        f"{_title(tensor)} {list(stored.shape)}: {bytes_text(tensor.num_bytes)}, "
        f"{bytes_text(tensor.stored_bytes)} stored"
    )
    rows = [
        [
            box_text(box.box) + (f" addend {list(box.addend)}" if box.addend else ""),
            str(box.rank),
            bytes_text(tensor.box_bytes(box)),
            str(box.offset),
            tensor.file(box),
        ]
        for box in stored.boxes
    ]
    table = table_text(["box", "rank", "size", "offset", "file"], rows, text_from=4)
    return f"{title}\n{table}" if rows else title

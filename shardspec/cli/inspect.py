"""The command `shardspec inspect`, which shows the tensors, sharding and sizes of a checkpoint."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import PurePath
from typing import Final

import click

from shardspec.checkpoint.catalog import AnyOutline, box_text
from shardspec.checkpoint.compare.inspect import (
    CheckpointSummary,
    inspect_checkpoint,
    optimizer_kind,
    other_text,
    repeated_layers,
)
from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.command import Command, Option, flag, refuse_if
from shardspec.cli.output import name_text, path_text, say, say_json, say_parts
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.layout.picture import Picture, ids_text
from shardspec.text import (
    bytes_text,
    counted,
    natural_order,
    shown,
    table_lines,
    table_text,
    terminal_width,
    wrapped,
)

_MAX_CELLS: Final = 1024
"""Boxes of the largest picture."""
_MAX_VALUE: Final = 60
"""Characters shown of a value that is not a tensor."""
_MAX_ROWS: Final = 1000
"""Rows of a table of tensors; with ``--full`` another one follows."""
_SHARD: Final = re.compile(r"/shard_[0-9.]+_[0-9.]+\Z")
"""End of the name of an object that Megatron-core stores for each layer."""
_INDEX: Final = opts.numbers_kind(
    "I,J,…", "index", "give one position for each of the first dims, as in 17 or 3,0"
)


@click.command(cls=Command)
@ckpt.checkpoint_argument
@Option(
    "tensor",
    "Input",
    "Only tensors whose name matches (*, ? and [abc] as in a shell), with all their boxes.",
    {"metavar": "PATTERN"},
)
@Option(
    "index",
    "Output",
    "Print which ranks hold this element, row or block of the tensors that match.",
    {"type": _INDEX},
)
@flag("picture", "Output", "Draw how the tensors that match are sharded.")
@Option(
    "only",
    "Input",
    "Only tensors with equal boxes on several ranks, or with boxes of different shapes.",
    {"type": click.Choice(("replicated", "uneven"))},
)
@flag("full", "Output", "A row for every tensor, even if layers are alike.")
@ckpt.source_options
@opts.as_json.but("Print everything as JSON.")
def inspect_command(
    checkpoint: PurePath,
    tensor: str | None,
    index: tuple[int, ...] | None,
    picture: bool,
    only: str | None,
    full: bool,
    source: ckpt.SourceOptions,
    as_json: bool,
) -> None:
    """Show mesh, tensors, specs and sizes of the checkpoint CKPT, and what each rank stored.

    Reads the metadata of the checkpoint, and the header of every file if the format has headers,
    and checks that they agree; reads no data. Tensors of layers that are alike share a row, as
    layers.{0..31}.up.weight. If several ranks hold the same box, some formats store that of one
    rank, and only this one is shown.

    Examples:
      shardspec inspect ckpt
      shardspec inspect ckpt --full                              a row for every tensor
      shardspec inspect ckpt --tensor 'layers.0.*'               with the box and file of every rank
      shardspec inspect ckpt --tensor embed.weight --index 17    which rank holds row 17
      shardspec inspect ckpt --tensor embed.weight --picture     who holds what
      shardspec inspect ckpt --only uneven
      shardspec inspect ckpt --json
    """
    unnamed = (index is not None or picture) and tensor is None and only is None
    refuse_if(unnamed, "--index and --picture need some tensors; name them with --tensor")
    (catalog,) = source.open(checkpoint)
    summary = _chosen(inspect_checkpoint(catalog), tensor, only)
    if only is not None and not as_json and not (summary.names and (index or picture or tensor)):
        say_parts(_overview(summary, full, only, len(catalog.names)))
    elif index is not None:
        _say_holders(summary, index, as_json)
    elif as_json:
        say_parts(_json(summary), "")
    elif picture or tensor is not None:
        draw = _picture if picture else _boxes
        say_parts((draw(summary, name) for name in summary.names), "\n\n")
    else:
        say_parts(_overview(summary, full))


def _chosen(summary: CheckpointSummary, pattern: str | None, only: str | None) -> CheckpointSummary:
    """Return a summary of the tensors that match `pattern` and `only`, such as ``uneven``."""
    names = summary.names
    if pattern is not None:
        names = tuple(name for name in names if fnmatchcase(name, pattern))
        if not names:
            first = ", ".join(map(shown, summary.names[:3]))
            hint = f"the names start with {first}" if first else "it has no tensors"
            raise CheckpointError(
                f"{summary.source.directory}: no tensor matches {shown(pattern)}; {hint}"
            )
    summary = replace(summary, names=names)
    if only is None:
        return summary
    fitting = (tensor.name for tensor in summary.outlines if getattr(summary.holders(tensor), only))
    return replace(summary, names=tuple(fitting))


def _json(summary: CheckpointSummary) -> Iterator[str]:
    """Yield the JSON of a summary in pieces: for 100,000 tensors it has 200 MiB."""
    yield f'{json.dumps(summary.facts())[:-1]}, "tensors": ['
    for at, name in enumerate(summary.names):
        yield f"{', ' if at else ''}{json.dumps(summary.tensor_facts(name))}"
    yield "]}"


def _say_holders(summary: CheckpointSummary, index: tuple[int, ...], as_json: bool) -> None:
    """Print the ranks that have the element at an index, for each tensor."""
    # A pattern may match biases beside matrices: tensors that lack the index are skipped.
    holders = [
        (tensor.name, box, ranks)
        for tensor in summary.outlines
        if len(index) <= len(tensor.shape)
        for box, ranks in summary.holders(tensor).cells.items()
        if all(lo <= at < hi for at, (lo, hi) in zip(index, box, strict=False))
    ]
    if summary.names and not holders:
        tensor = next(summary.outlines)
        raise CheckpointError(
            f"tensor {tensor.name!r}: index {list(index)} is outside shape {list(tensor.shape)}"
        )
    if as_json:
        records = [
            {"name": name, "box": [list(side) for side in box], "ranks": list(ranks)}
            for name, box, ranks in holders
        ]
        say_json({"index": list(index), "holders": records})
        return
    for name, box, ranks in holders:
        who = f"rank{'s' if len(ranks) > 1 else ''} {ids_text(ranks)}"
        say(f"{name_text(name)}[{', '.join(map(str, index))}]: {who}, in {box_text(box)}")


def _picture(summary: CheckpointSummary, name: str) -> str:
    """Return a drawing of boxes and their ranks; a table if the boxes are not a grid."""
    tensor = summary.source.outline(name)
    layout = summary.layout(tensor)
    if layout is not None:
        return f"{name_text(name)}\n{layout.picture()}"
    cells = summary.holders(tensor).cells
    sides = [{box[dim] for box in cells} for dim in range(len(tensor.shape))]
    if prod(map(len, sides)) != len(cells) or len(cells) > _MAX_CELLS:
        return _boxes(summary, name)
    return Picture(f"{_title(tensor, layout)} {list(tensor.shape)}", cells).text()


def _overview(
    summary: CheckpointSummary, full: bool, only: str | None = None, of: int = 0
) -> Iterator[str]:
    """Yield the lines of text about a checkpoint; with `only`, the table of its tensors."""
    count, mesh, format = len(summary.names), summary.source.mesh, summary.source.format
    model, states = summary.apart()
    if only is None:
        run = [f"{k if k == 'iteration' else k.upper()} {n}" for k, n in summary.run.items()]
        (_, parameters, model_bytes), (_, moments, state_bytes) = model.total(), states.total()
        facts = f"{counted(count, 'tensor')}, {parameters:,} parameter{'s' * (parameters != 1)}"
        facts += f", {moments:,} element{'s' * (moments != 1)} of an optimizer" if moments else ""
        facts += f", {bytes_text(model_bytes + state_bytes)}, in the format of {format}"
        facts += f", of Megatron: {', '.join(run)}" if run else ""
        if mesh is not None:
            facts += f", saved on mesh {mesh} ({counted(mesh.size(), 'device')})"
    else:
        facts = (
            f"{count or 'none'} of {counted(of, 'tensor')} {'are' if count > 1 else 'is'} {only}"
        )
        if only == "replicated" and mesh is None:
            facts += f", as far as {format} says: what ranks hold alike may be stored once"
    width = terminal_width()
    yield from wrapped(f"{path_text(summary.source.directory)}: {facts}", width)
    if full:
        yield from _every_tensor("tensor", model)
        yield from _every_tensor("optimizer", states)
        num_rows = len(model.names)
    else:
        rows = _rows(model, full)
        yield from _tensors("tensor", rows[:_MAX_ROWS])
        num_rows = len(rows)
        if num_rows > _MAX_ROWS:
            yield f"and {num_rows - _MAX_ROWS:,} more; --full prints a row for every tensor"
    if states.names and not full:
        yield ""
        header = ["optimizer", "tensors", "elements", "size", "dtype"]
        yield table_text(header, _states(states), text_from=4, optional=(4, 1))
    groups = model.groups()
    if 1 < len(groups) < min(num_rows, _MAX_ROWS):
        yield ""
        lines = []
        for name, group in groups.items():
            tensors, parameters, num_bytes = group.total()
            lines.append([name_text(name), str(tensors), f"{parameters:,}", bytes_text(num_bytes)])
        yield table_text(["group", "tensors", "parameters", "size"], lines, optional=(1, 3))
    if only is not None:
        return
    if count:
        yield ""
        rows = [
            [
                str(rank),
                "" if mesh is None else str(mesh.coordinates(rank)),
                bytes_text(num_bytes),
                file or "none",
            ]
            for rank, num_bytes, file in summary.rank_files
        ]
        header = ["rank", "coordinates", "stored", "file"]
        yield from table_lines(
            header, lambda: rows, numbers=(2,), empty_columns=False, fits=width, flexible=3
        )
    if summary.extras:
        yield ""
        # Megatron stores an object a layer.
        shards: dict[tuple[str, str], list[str]] = {}
        for name in natural_order(summary.extras):
            text = name_text(other_text(summary.extras[name], min(_MAX_VALUE, width // 2)))
            shards.setdefault((_SHARD.sub("/…", name), text), []).append(name)
        rows = [
            [name_text(title if len(names) > 1 else names[0]), _count(names), text]
            for (title, text), names in shards.items()
        ]
        yield from table_lines(
            ["other entry", "count", "value"],
            lambda: rows,
            numbers=(1,),
            empty_columns=False,
            fits=width,
        )


def _every_tensor(title: str, summary: CheckpointSummary) -> Iterator[str]:
    """Yield tables with a row for every tensor, each as soon as its rows are known."""
    for at in range(0, len(summary.names), _MAX_ROWS):
        part = replace(summary, names=summary.names[at : at + _MAX_ROWS])
        yield from _tensors(title, _rows(part, full=True))


def _tensors(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield an empty line and the table of tensors, if there are any."""
    if not rows:
        return
    each = "size each" if any(row[1] for row in rows) else "size"
    yield ""
    yield from table_lines(
        [title, "count", "spec", "dtype", "shape", each, "remarks"],
        lambda: rows,
        numbers=(1, 4, 5),
        empty_columns=False,
        fits=terminal_width(),
        optional=(6, 5, 3),
    )


def _rows(summary: CheckpointSummary, full: bool) -> list[list[str]]:
    """Return the rows of the table of tensors; equal layers share a row."""
    # Most of 100,000 tensors share a layout, or are unsharded and have a shape and dtype in common.
    rows: dict[object, tuple[str, ...]] = {}
    cells: dict[str, tuple[str, ...]] = {}
    for tensor in summary.outlines:
        layout = summary.layout(tensor)
        key: object = layout
        if layout is None and len(tensor.boxes) < 2:
            key = tensor.shape, tensor.dtype, tensor.spec
        row = rows.get(key) or _cells(summary, tensor, layout)
        if key is not None:
            rows[key] = row
        cells[tensor.name] = row
    if full:
        return [[name_text(name), "", *row] for name, row in cells.items()]
    return [
        [name_text(title), _count(names), *cells[names[0]]]
        for title, names in repeated_layers(cells)
    ]


def _count(names: Sequence[str]) -> str:
    return str(len(names)) if len(names) > 1 else ""


def _states(summary: CheckpointSummary) -> list[list[str]]:
    """Return a table row for each kind of optimizer state, such as ``exp_avg``."""
    kinds: dict[str, list[AnyOutline]] = {}
    for tensor in summary.outlines:
        kinds.setdefault(optimizer_kind(tensor.name) or "", []).append(tensor)
    return [
        [
            kind,
            str(len(tensors)),
            f"{sum(prod(tensor.shape) for tensor in tensors):,}",
            bytes_text(sum(tensor.num_bytes for tensor in tensors)),
            ", ".join(dict.fromkeys(tensor.dtype for tensor in tensors)),
        ]
        for kind, tensors in kinds.items()
    ]


def _cells(
    summary: CheckpointSummary, tensor: AnyOutline, layout: Layout | None
) -> tuple[str, ...]:
    """Return the cells of a tensor's table row after its name."""
    holders = summary.holders(tensor)
    remarks = [word for word in ("replicated", "uneven") if getattr(holders, word)]
    if layout is None and len(holders.cells) > 1:
        remarks.insert(0, f"{len(holders.cells)} boxes")
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    return (
        _spec(tensor, layout),
        tensor.dtype,
        shape,
        bytes_text(tensor.num_bytes),
        ", ".join(remarks),
    )


def _spec(tensor: AnyOutline, layout: Layout | None) -> str:
    return str((tensor.spec if layout is None else layout.labelled_spec) or "")


def _title(tensor: AnyOutline, layout: Layout | None) -> str:
    return " ".join(filter(None, [name_text(tensor.name), _spec(tensor, layout), tensor.dtype]))


def _boxes(summary: CheckpointSummary, name: str) -> str:
    tensor = summary.source.tensor(name)
    facts = summary.tensor_facts(name)
    title = (
        f"{_title(tensor, summary.layout(tensor))} {facts['shape']}: "
        f"{bytes_text(facts['bytes'])}, {bytes_text(facts['stored_bytes'])} stored"
    )
    rows = [
        [
            box_text(box["box"]) + (f" addend {box['addend']}" if box["addend"] else ""),
            str(box["rank"]),
            bytes_text(box["bytes"]),
            str(box["offset"]),
            box["file"],
        ]
        for box in facts["boxes"]
    ]
    table = table_text(
        ["box", "rank", "size", "offset", "file"], rows, text_from=4, optional=(3,), flexible=4
    )
    return f"{title}\n{table}" if rows else title

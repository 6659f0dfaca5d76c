"""The commands that read checkpoints: `shardspec inspect`, `verify` and `diff`."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import click

from shardspec.checkpoint.catalog import AnyOutline, box_text
from shardspec.checkpoint.inspect import CheckpointSummary, inspect_checkpoint, other_text
from shardspec.checkpoint.layers import groups_of, prefix_change, repeated_layers
from shardspec.checkpoint.verify import (
    Difference,
    DiffExtent,
    amount_text,
    diff_checkpoints,
    names_to_compare,
    total_extent,
    values_to_compare,
    verify_checkpoint,
)
from shardspec.cli import options as opts
from shardspec.cli.checkpoint_options import (
    CHECKPOINT,
    OTHER,
    MapOptions,
    SourceOptions,
    choice_options,
    map_options,
    source_options,
)
from shardspec.cli.output import path_text, progress_bar, say, say_json, say_parts
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.layout.picture import Picture, ids_text
from shardspec.text import bytes_text, counted, printable, shown, table_lines, table_text

_NOT_THE_SAME: Final = 3
"""Exit code where there are flaws or differences."""
_MOST_CELLS: Final = 1024
"""Boxes of the largest picture."""
_MOST_VALUE: Final = 60
"""Characters that are shown of a value that is not a tensor."""
_TOLERANCE: Final = opts.Kind("NUMBER", opts.parse_number)
_INDEX: Final = opts.numbers_kind(
    "I,J,…", "index", "give one position for each of the first dims, as in 17 or 3,0"
)


@click.command(cls=opts.Command)
@click.argument("checkpoint", type=CHECKPOINT, metavar="CKPT")
@click.option(
    "--tensor",
    metavar="PATTERN",
    help="Only tensors whose name matches (*, ? and [abc] as in a shell), with all their boxes.",
)
@click.option(
    "--index",
    type=_INDEX,
    help="Say which ranks hold this element, row or block of the tensors that match.",
)
@click.option("--picture", is_flag=True, help="Draw how the tensors that match are sharded.")
@click.option(
    "--only",
    type=click.Choice(("replicated", "uneven")),
    help="Only tensors of which several ranks hold the same, or whose boxes differ in shape.",
)
@click.option("--full", is_flag=True, help="A row for every tensor, also where layers are alike.")
@source_options
@opts.json_option("Print everything as JSON.")
def inspect_command(
    checkpoint: PurePath,
    tensor: str | None,
    index: tuple[int, ...] | None,
    picture: bool,
    only: str | None,
    full: bool,
    source: SourceOptions,
    as_json: bool,
) -> None:
    """Show mesh, tensors, specs and sizes of the checkpoint CKPT, and what each rank stored.

    Reads what describes the checkpoint, the header of every file where that does, and checks that
    all of it agrees; no data. Tensors of layers that are alike share a row, as
    layers.{0..31}.up.weight. Of several ranks that hold the same, some formats store what one
    holds, and show that one.

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
    opts.refuse_if(unnamed, "--index and --picture are about some tensors; name them: --tensor")
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
    """Return a summary of the tensors that match both."""
    names = summary.names
    if pattern is not None:
        names = tuple(name for name in names if fnmatchcase(name, pattern))
        if not names:
            first = ", ".join(map(shown, summary.names[:3]))
            there = f"the names start with {first}" if first else "it has no tensors"
            raise CheckpointError(
                f"{summary.source.directory}: no tensor matches {shown(pattern)}; {there}"
            )
    summary = replace(summary, names=names)
    if only is None:
        return summary
    alike = (one.name for one in summary.outlines if getattr(summary.holders(one), only))
    return replace(summary, names=tuple(alike))


def _json(summary: CheckpointSummary) -> Iterator[str]:
    """Yield the JSON text of a summary in pieces: of 100,000 tensors, all of it takes 200 MiB."""
    yield f'{json.dumps(summary.facts())[:-1]}, "tensors": ['
    for at, name in enumerate(summary.names):
        yield f"{', ' if at else ''}{json.dumps(summary.tensor_facts(name))}"
    yield "]}"


def _say_holders(summary: CheckpointSummary, index: tuple[int, ...], as_json: bool) -> None:
    """Print who holds a part of the tensors."""
    # A pattern may take in biases beside matrices: those that have no such index do not count.
    found = [
        (tensor.name, box, ranks)
        for tensor in summary.outlines
        if len(index) <= len(tensor.shape)
        for box, ranks in summary.holders(tensor).cells.items()
        if all(lo <= at < hi for at, (lo, hi) in zip(index, box, strict=False))
    ]
    if summary.names and not found:
        tensor = next(summary.outlines)
        raise CheckpointError(
            f"tensor {tensor.name!r}: index {list(index)} does not lie in the shape "
            f"{list(tensor.shape)}"
        )
    if as_json:
        holders = [
            {"name": name, "box": [list(side) for side in box], "ranks": list(ranks)}
            for name, box, ranks in found
        ]
        say_json({"index": list(index), "holders": holders})
        return
    for name, box, ranks in found:
        who = f"rank{'s' if len(ranks) > 1 else ''} {ids_text(ranks)}"
        say(f"{_name(name)}[{', '.join(map(str, index))}]: {who}, in {box_text(box)}")


def _picture(summary: CheckpointSummary, name: str) -> str:
    """Draw who holds what; a table of boxes where they make up no grid."""
    tensor = summary.source.outline(name)
    layout = summary.layout(tensor)
    if layout is not None:
        return f"{_name(name)}\n{layout.picture()}"
    cells = summary.holders(tensor).cells
    sides = [{box[dim] for box in cells} for dim in range(len(tensor.shape))]
    if prod(map(len, sides)) != len(cells) or len(cells) > _MOST_CELLS:
        return _boxes(summary, name)
    return Picture(f"{_title(tensor, layout)} {list(tensor.shape)}", cells).text()


def _overview(
    summary: CheckpointSummary, full: bool, only: str | None = None, of: int = 0
) -> Iterator[str]:
    """Yield the lines about a checkpoint; those about its tensors if `only` some of them count."""
    count, mesh, format = len(summary.names), summary.source.mesh, summary.source.format
    groups = summary.groups()
    if only is None:
        parameters = sum(group.parameters for group in groups.values())
        facts = f"{counted(count, 'tensor')}, {_parameters(parameters)}"
        facts += f", {bytes_text(summary.num_bytes)}"
        facts += f", in the format of {format}"
        if mesh is not None:
            facts += f", saved on mesh {mesh} ({counted(mesh.size(), 'device')})"
    else:
        facts = (
            f"{count or 'none'} of {counted(of, 'tensor')} {'are' if count > 1 else 'is'} {only}"
        )
        if only == "replicated" and mesh is None:
            facts += f", as far as {format} says: what ranks hold alike may be stored once"
    yield f"{path_text(summary.source.directory)}: {facts}"
    rows = _rows(summary, full)
    if count:
        each = "size each" if any(row[1] for row in rows) else "size"
        header = ["tensor", "count", "spec", "dtype", "shape", each, "remarks"]
        yield ""
        yield from table_lines(header, lambda: rows, numbers=(1, 4, 5), empty_columns=False)
    if 1 < len(groups) < len(rows):
        yield ""
        lines = [
            [_name(name), str(group.tensors), f"{group.parameters:,}", bytes_text(group.num_bytes)]
            for name, group in groups.items()
        ]
        yield table_text(["group", "tensors", "parameters", "size"], lines)
    if count and only is None:
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
        yield from table_lines(header, lambda: rows, numbers=(2,), empty_columns=False)
    if summary.extras and only is None:
        yield ""
        values = sorted(summary.extras.items())
        rows = [[_name(name), _name(other_text(value, _MOST_VALUE))] for name, value in values]
        yield from table_lines(["other entry", "value"], lambda: rows)


def _parameters(number: int) -> str:
    return f"{number:,} parameter{'' if number == 1 else 's'}"


def _rows(summary: CheckpointSummary, full: bool) -> list[list[str]]:
    """Return the rows of a table of tensors: one for every tensor, or for layers that are alike."""
    known: dict[Layout | None, tuple[str, ...]] = {}  # most of 100,000 tensors share a layout
    cells: dict[str, tuple[str, ...]] = {}
    for tensor in summary.outlines:
        layout = summary.layout(tensor)
        row = known.get(layout) or _cells(summary, tensor, layout)
        if layout is not None:
            known[layout] = row
        cells[tensor.name] = row
    if full:
        return [[_name(name), "", *row] for name, row in cells.items()]
    return [
        [_name(title), str(len(names)) if len(names) > 1 else "", *cells[names[0]]]
        for title, names in repeated_layers(cells)
    ]


def _cells(
    summary: CheckpointSummary, tensor: AnyOutline, layout: Layout | None
) -> tuple[str, ...]:
    """Return the row of a tensor without its name."""
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
    return " ".join(filter(None, [_name(tensor.name), _spec(tensor, layout), tensor.dtype]))


def _name(name: str) -> str:
    """Return a name that cannot upset the terminal, and that is seen."""
    return printable(name) or "''"


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
    table = table_text(["box", "rank", "size", "offset", "file"], rows, text_from=4)
    return f"{title}\n{table}" if rows else title


@click.command(cls=opts.Command)
@click.argument("checkpoint", type=CHECKPOINT, metavar="CKPT")
@click.option(
    "--against",
    type=OTHER,
    help="Compare the bits of every tensor with this checkpoint or safetensors file too.",
)
@click.option(
    "--digests",
    "digests_file",
    type=opts.FILE_PATH,
    help="Compare digests with this file of 'shardspec digest', merge, reshard or save_sharded.",
)
@click.option("--all", "every", is_flag=True, help="List all flaws, not only the first.")
@map_options
@choice_options
@source_options
@opts.json_option("Print what was found as JSON, all flaws.")
def verify_command(
    checkpoint: PurePath,
    against: PurePath | None,
    digests_file: PurePath | None,
    every: bool,
    maps: MapOptions,
    choice: dict[str, Any],
    source: SourceOptions,
    as_json: bool,
) -> None:
    """Check that every byte of CKPT is there and, where digests were saved, as it was saved.

    Boxes tile every tensor, files are complete, replicas agree. Exits with 3 at a flaw.
    With --against, patterns choose and name the tensors that are compared, as by diff; with
    --digests also a map.

    Examples:
      shardspec verify ckpt
      shardspec verify ckpt --all --json
      shardspec verify ckpt --against model.safetensors
      shardspec verify ckpt --against model.safetensors --exclude 'optim.*'
      shardspec verify ckpt --digests digests.json
    """
    from shardspec.checkpoint.digest import digest, read_digests
    from shardspec.checkpoint.verify import diff_checkpoints

    chosen = against is None and digests_file is None and any(choice.values())
    opts.refuse_if(chosen, "patterns choose what is compared; give --against or --digests too")
    both = against is not None and digests_file is not None
    opts.refuse_if(both, "give --against or --digests, not both")
    opts.refuse_if(
        maps.map is not None and digests_file is None, "--map is for --digests; give it too"
    )
    names, expected = (
        maps.read() or None,
        None if digests_file is None else read_digests(digests_file),
    )
    every |= as_json
    catalog, *others = source.open(checkpoint, against)
    with progress_bar(not as_json, "verify") as progress:
        report = verify_checkpoint(catalog, every=every, progress=progress)
    flaws = list(report.flaws)
    for catalog_b in others:
        with progress_bar(not as_json, "compare") as progress:
            found = diff_checkpoints(catalog, catalog_b, **choice, progress=progress)
            for difference in found:
                flaws.append(f"{difference.kind} {shown(difference.name)} {difference.problem}")
                if not every:
                    raise CheckpointError(f"{checkpoint} and {against}: {flaws[-1]}")
    if expected is not None and not flaws:
        how = {"names": names, "drop": maps.drop, "seed": expected.seed, **choice}
        with progress_bar(not as_json, "digest") as progress:
            flaws += digest(catalog, progress=progress, **how).differences(expected)
        if flaws and not every:
            raise CheckpointError(f"{checkpoint} and {digests_file}: {flaws[0]}")
    if as_json:
        say_json({**report.to_json(), "flaws": flaws})
    else:
        for flaw in flaws:
            say(printable(flaw))
        other = against or digests_file
        if not report.num_bytes:
            digests = "no data to check"
        elif report.digested_bytes == report.num_bytes:
            digests = "all with digests"
        elif report.digested_bytes:
            digests = f"{bytes_text(report.digested_bytes)} of them with digests"
        else:
            digests = "no digests stored"
            digests += ", so altered bytes cannot be detected" if digests_file is None else ""
        part = "what was chosen is " if choice["include"] or choice["exclude"] else ""
        same = "" if other is None or flaws else f", and {part}the same as {path_text(other)}"
        say(
            f"{path_text(checkpoint)}: {counted(report.tensors, 'tensor')} in "
            f"{counted(report.boxes, 'box', 'boxes')}, {bytes_text(report.num_bytes)}, "
            f"{digests}; {counted(len(flaws), 'problem') if flaws else 'no problems found'}{same}"
        )
    if flaws:
        click.get_current_context().exit(_NOT_THE_SAME)


@click.command(cls=opts.Command)
@click.argument("a", type=CHECKPOINT, metavar="A")
@click.argument("b", type=CHECKPOINT, metavar="B")
@click.option(
    "--atol", type=_TOLERANCE, default="0", help="Ignore absolute differences up to NUMBER."
)
@click.option("--rtol", type=_TOLERANCE, default="0", help="Ignore differences up to NUMBER × |B|.")
@click.option("--stats", is_flag=True, help="Print the share of elements that differ, by group.")
@choice_options
@source_options
@opts.json_option("Print what was found as JSON.")
def diff_command(
    a: PurePath,
    b: PurePath,
    atol: float,
    rtol: float,
    stats: bool,
    choice: dict[str, Any],
    source: SourceOptions,
    as_json: bool,
) -> None:
    """Compare two checkpoints of any formats tensor by tensor; exits with 3 if they differ.

    Says of each tensor where it differs first, how many elements do and by how much.

    Values beside the tensors are compared too, where both formats have places for such.

    Without tolerances bits are compared: equal NaNs are the same, 0 and -0 are not. With any, NaN
    is the same as any NaN, and floating point numbers of two dtypes are compared too. Tensors of A
    are chosen and renamed as by merge; what the patterns leave out is not looked for in B.

    Examples:
      shardspec diff ckpt model.safetensors
      shardspec diff step-100 step-200 --rtol 1e-3 --json
      shardspec diff step-100 step-200 --stats                which groups of tensors changed
      shardspec diff ckpt model-bf16.safetensors --rtol 1e-2
      shardspec diff ckpt model.safetensors --include 'model.*' --rename '^model[.]' ''
    """
    from shardspec.checkpoint.choice import Choice

    one, other = source.open(a, b)
    chosen, others = names_to_compare(one, other, Choice(**choice))
    values, other_values = values_to_compare(one, other, Choice(**choice))
    with progress_bar(not as_json, "diff") as progress:
        options = {**choice, "atol": atol, "rtol": rtol}
        found = list(diff_checkpoints(one, other, **options, progress=progress))
    count, value_count = len(chosen.keys() | others), len(values.keys() | other_values.keys())
    beside = counted(value_count, "value")
    sizes = {name: prod(one.outline(old).shape) for name, old in chosen.items() if name in others}
    extents = {difference.name: difference.extent for difference in found if difference.extent}
    groups = _changes(sizes, extents)
    rename = prefix_change(chosen, others)
    if as_json:
        differences = list(map(asdict, found))
        counts = {"tensors": count, "values": value_count}
        more = {"groups": {name: change._asdict() for name, change in groups.items()}}
        expression = None if rename is None else [f"^{re.escape(rename[0])}", rename[1]]
        rest = {"differences": differences, "rename": expression, **(more if stats else {})}
        say_json({"a": str(a), "b": str(b), **counts, **rest})
        if found:
            click.get_current_context().exit(_NOT_THE_SAME)
        return
    for line in _difference_lines(found):
        say(line)
    if rename is not None:
        words = shlex.join(["--rename", f"^{re.escape(rename[0])}", rename[1]])
        say(f"the names differ in how they begin; compare with {words}")
    if stats:
        rows = [
            [_name(name), f"{one.differing} of {one.tensors}", f"{one.share:.3%}", one.largest]
            for name, one in groups.items()
        ]
        say(table_text(["group", "tensors differ", "elements differ", "by up to"], rows))
    if found:
        differing = sum(difference.kind == "tensor" for difference in found)
        total = f"{differing} of {counted(count, 'tensor')}"
        if value_count:
            total += f" and {len(found) - differing} of {beside}"
        total += f" differ{'s' if len(found) == 1 else ''}"
        if extents:
            extent = replace(total_extent(extents.values()), elements=sum(sizes.values()))
            total += f": {extent}"
        say(total)
    else:
        num_bytes = sum(one.outline(name).num_bytes for name in chosen.values())
        end = f", and {beside}" if value_count else ""
        say(f"no difference: {counted(len(chosen), 'tensor')}, {bytes_text(num_bytes)}{end}")
    if found:
        click.get_current_context().exit(_NOT_THE_SAME)


def _difference_lines(found: Iterable[Difference]) -> Iterator[str]:
    """Yield what differs; names that are on one side only come last, those of layers in one."""
    alone: dict[str, dict[str, str]] = {"tensor": {}, "value": {}}
    for difference in found:
        if difference.one_side:
            alone[difference.kind][difference.name] = difference.problem
        else:
            yield f"{difference.kind} {shown(difference.name)} {difference.problem}"
    for kind, problems in alone.items():
        for title, names in repeated_layers(problems):
            problem = problems[names[0]]
            if len(names) == 1:
                yield f"{kind} {shown(title)} {problem}"
            else:
                yield f"{len(names)} {kind}s {shown(title)} {problem.replace('is', 'are', 1)}"


class _Change(NamedTuple):
    """How much of a group of tensors differs."""

    tensors: int
    differing: int
    share: float
    """Of the elements that were compared."""
    largest: str


def _changes(sizes: Mapping[str, int], extents: Mapping[str, DiffExtent]) -> dict[str, _Change]:
    """Return by group how much of the tensors that both checkpoints have differs."""
    found = {}
    for group, names in groups_of(sizes).items():
        changed = [extents[name] for name in names if name in extents]
        extent = total_extent(changed)
        share = extent.differing / max(sum(sizes[name] for name in names), 1)
        largest = amount_text(extent) if changed else ""
        found[group] = _Change(len(names), len(changed), share, largest)
    return found

"""The commands that plan and price conversions: `shardspec plan` and `shardspec cost`."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.command import Command, Option, flag, refuse_if
from shardspec.cli.output import path_text, say, say_json, say_styled, styled
from shardspec.errors import InputFileError, LayoutError, ShardSpecError, SpecSyntaxError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan, difference_text, known_error, plans_table
from shardspec.layout.search import naive_plan
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import (
    bytes_text,
    counted,
    printable,
    seconds_text,
    shown,
    table_text,
    terminal_width,
    wrapped,
)

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog
    from shardspec.layout.layout import Layout


_MAX_ALTERNATIVES: Final = 100


@click.command(cls=Command)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@opts.cluster_options
@opts.shape
@opts.dtype
@Option(
    "target_mesh",
    "Input",
    "Another mesh for TO, on the same cluster.",
    {"type": opts.MESH},
)
@Option(
    "target_ids", "Input", "Physical ids of the target mesh; by default from 0.", {"type": opts.IDS}
)
@opts.max_bytes.but(
    "Only plans in which no device holds more than SIZE: 64MiB, 1.5GB, or a number of bytes."
)
@Option(
    "alternatives",
    "Output",
    "Also show this many of the next best plans.",
    {"metavar": "COUNT", "type": click.IntRange(1, _MAX_ALTERNATIVES)},
)
@flag(
    "explain",
    "Output",
    "Compare with the naive plan: finish reductions, gather everything, then slice.",
)
@opts.as_json.but("Print the plan as JSON.")
def plan_command(
    source: str,
    target: str,
    cluster: opts.ClusterOptions,
    shape: tuple[int, ...],
    dtype: str,
    target_mesh: opts.MeshShape | None,
    target_ids: tuple[int, ...] | None,
    max_bytes: int | None,
    alternatives: int | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Plan the cheapest conversion of a tensor from the spec FROM to the spec TO.

    Needs no process group, no GPU and no tensor. Without --links, nodes of eight H100
    are assumed, as the last lines of the plan say.

    Examples:
      shardspec plan "[S0,R]" "[R,S01]" --mesh 2x4 --shape 4096x4096 --dtype bf16
      shardspec plan "[S(dp),R]" "[R,S(tp)]" --mesh dp=2,tp=4 --shape 4096x4096 --explain
      shardspec plan "[S0]" "[R]" --mesh 4x8 --shape 8192 --links ib-ndr-per-gpu,h100-nvswitch
      shardspec plan "[S01,R]" "[S10,R]" --mesh 2x4 --shape 4096x4096 --alternatives 5
      shardspec plan "[S0,S1]" "[S1,S0]" --mesh 2x4 --shape 4096x4096 --max-bytes 20MiB
      shardspec plan "[R|P01]" "[S0]" --mesh 2x4 --shape 1000 --links 1e-5:4e-11,3e-6:3e-12
      shardspec plan "[S0,R]" "[S0,S1]" --mesh 2x4 --target-mesh 3x4 --shape 4096x4096
      shardspec plan "[R|P0]" "[R]" --mesh 8 --shape 1000 --link-model shared-bus --json

    A spec says how each dim of the tensor is sharded: R is replicated, S0 is sharded over axis 0 of
    the mesh, S01 over axis 0 and inside each block over axis 1. |P0 is a pending sum over axis 0.
    """
    refuse_if(not target_mesh and target_ids is not None, "--target-ids needs --target-mesh")
    refuse_if(
        target_mesh is not None and max_bytes is not None,
        "--max-bytes is for conversions on one mesh; omit it, or --target-mesh",
    )
    other = [] if target_mesh is None else [(target_mesh, target_ids)]
    (devices, model), *targets = cluster.build_all(*other)
    before = Layout(devices, source, shape, dtype)
    devices, target_model = targets[0] if targets else (devices, None)
    after = Layout(devices, target, shape, dtype)
    converter = LayoutConverter(model, target_model=target_model)
    count = 1 + (alternatives or 0)
    plans = converter.alternatives(before, after, count, max_bytes=max_bytes)
    best, *others = plans
    naive = naive_plan(before, after, best.model, best.target_model) if explain else None
    if as_json:
        record = best.as_dict()
        if max_bytes is not None:
            record["max_bytes"] = max_bytes
        if alternatives is not None:
            record["alternatives"] = [_beside(plan, best) for plan in others]
        if naive is not None:
            record["naive"] = _beside(naive, best)
            record["explanation"] = difference_text(best, naive)
        say_json(record)
        return
    say_styled(_styled(str(best)))
    if alternatives is not None:
        numbers = [str(number) for number in range(1, len(plans) + 1)]
        table = _first_green(plans_table(plans, numbers)) if others else "there is no other plan"
        say_styled(f"\n{table}")
        if 1 < len(plans) < count:
            say("there are no more plans")
    if naive is not None:
        say("\n".join(["", *wrapped(difference_text(best, naive), terminal_width())]))
        say_styled(_first_green(plans_table([best, naive], ["chosen", "naive"])))


def _beside(plan: ConversionPlan, best: ConversionPlan) -> dict[str, object]:
    """Return the JSON of an alternative plan: what differs from `best`, and the ratio of costs."""
    record = plan.as_dict()
    own = {key: record[key] for key in ("steps", "cost_seconds", "bytes_received", "peak_bytes")}
    return own | {"ratio": plan.cost_seconds / best.cost_seconds if best.cost_seconds else None}


def _first_green(table: str) -> str:
    """Return a table with its first row, the cheapest plan, in green."""
    header, rule, first, *lines = table.split("\n")
    more = list(takewhile(lambda line: line.startswith(" "), lines))
    green = (styled(line, fg="green") for line in (first, *more))
    return "\n".join([header, rule, *green, *lines[len(more) :]])


def _styled(text: str) -> str:
    """Return a plan's text; on a terminal the title is bold, and assumptions are dim."""
    first, *lines = printable(text, keep="\n").split("\n")
    aside = ("per device; ", "accuracy: ", "nothing to do: ", "  ")
    texts = (styled(line, dim=True) if line.startswith(aside) else line for line in lines)
    return "\n".join([styled(first, bold=True), *texts])


_MAX_PAIRS: Final = 1_000_000
_MAX_CHARACTERS: Final = 1 << 16  # in a line of the file

_COLUMNS: Final = ("source", "target", "cost_seconds", "bytes_received", "peak_bytes")
"""Columns of the CSV, and members of a pair in JSON."""

_Pair: TypeAlias = tuple[str, str, str]  # two specs, and where they are from, for errors
_Cost: TypeAlias = tuple[dict[str, object], list[str], ConversionPlan]
"""The cost of a pair as JSON and as a row, and its plan."""


@click.command(cls=Command)
@click.argument("specs", metavar="[FROM TO]...", nargs=-1)
@Option(
    "pairs",
    "Input",
    "Pairs from a file, one per line, after those of the arguments; '-' for standard input.",
    {"metavar": "FILE", "type": click.Path(allow_dash=True)},
)
@opts.cluster_options
@opts.shape
@opts.dtype
@flag("as_csv", "Output", "Print CSV: seconds and bytes.", "--csv")
@opts.as_json
def cost_command(
    specs: tuple[str, ...],
    pairs: str | None,
    cluster: opts.ClusterOptions,
    shape: tuple[int, ...],
    dtype: str,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Print the cost of the cheapest plan from each spec FROM to the spec TO after it.

    'shardspec plan' also shows the steps.

    Examples:
      shardspec cost "[S0,R]" "[R,S0]" "[S01,R]" "[S10,R]" --mesh 2x4 --shape 4096x4096 --dtype bf16
      shardspec cost "[S0]" "[R]" --mesh 4x8 --shape 8192 --links ib-ndr-per-gpu,h100-nvswitch --csv
      shardspec cost --pairs pairs.txt --mesh dp=2,tp=4 --shape 4096x4096 --json

    A line of the file has two specs with blanks between them; '#' starts a comment. Up to a
    million pairs are priced at once.
    """
    refuse_if(as_csv and as_json, "give --csv or --json, not both")
    if len(specs) % 2:
        raise click.UsageError(f"specs come in pairs FROM TO; {shown(specs[-1])} has no TO")
    nothing = not specs and pairs is None
    refuse_if(nothing, "nothing to price; give specs in pairs FROM TO, or --pairs FILE")
    mesh, model = cluster.build()
    costs = _price(LayoutConverter(model), _pairs(specs, pairs), mesh, shape, dtype)
    distinct = {id(cost): cost for cost in costs}
    accuracy = known_error(plan for *_, plan in distinct.values())
    records = (record for record, *_ in costs)
    if as_csv:
        output = io.StringIO()
        written = csv.DictWriter(output, _COLUMNS, lineterminator="\n")
        written.writeheader()
        written.writerows(records)
        say_styled(output.getvalue(), nl=False)
    elif as_json:
        answer = {
            "mesh": list(mesh.shape),
            "shape": list(shape),
            "dtype": dtype,
            "link_model": model.link_model,
            "links": [link.as_dict() for link in model.links],
            "known_error": accuracy,
            "pairs": list(records),
        }
        say_json(answer)
    else:
        titles = ["from", "to", "steps", "receives", "time", "peak"]
        rows = [row for _, row, _ in distinct.values()]
        table = table_text(titles, rows, numbers_from=2, optional=(2, 5, 3))
        header, rule, *lines = table.split("\n")
        line_of = dict(zip(distinct, lines, strict=True))
        links = model.links_text(mesh.axis_labels())
        say("\n".join([header, rule, *(line_of[id(cost)] for cost in costs)]))
        for note in f"per device; {model.link_model} model; {links}", f"accuracy: {accuracy}":
            say("\n".join(wrapped(note, terminal_width(), "  ")))


def _pairs(specs: Sequence[str], file: str | None) -> Iterator[_Pair]:
    """Yield the pairs of specs in the arguments and in a file; specs may contain blanks."""
    for number, (source, target) in enumerate(zip(specs[::2], specs[1::2], strict=True), 1):
        yield source, target, f"pair {number}"
    origin, pairs = "standard input" if file == "-" else path_text(file or ""), 0
    for number, line in enumerate(() if file is None else _lines(file), 1):
        place = f"{origin}, line {number}"
        if len(line) > _MAX_CHARACTERS:
            raise InputFileError(f"{place}: is longer than {_MAX_CHARACTERS:,} characters")
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pair = re.findall(r"\[[^\]]*\]|\S+", text)
        if len(pair) != 2:
            raise LayoutError(
                f"{place}: {counted(len(pair), 'spec')} where two are needed, FROM and TO: "
                f"{text[:200]}"
            )
        pairs += 1
        if pairs > _MAX_PAIRS:
            raise InputFileError(
                f"{place}: more than {_MAX_PAIRS:,} pairs; price them in several runs"
            )
        yield pair[0], pair[1], place


def _lines(file: str) -> Iterator[str]:
    """Yield the lines of a file, read in pieces, since a pipe may never end."""
    try:
        # Bytes that are not UTF-8 become a character that no spec has: an error with its line.
        with click.open_file(file, encoding="utf-8-sig", errors="replace") as opened:
            while line := opened.readline(_MAX_CHARACTERS + 1):
                yield line
    except OSError as error:
        raise InputFileError(
            f"{path_text(file)}: the pairs cannot be read: {error.strerror}"
        ) from None


def _price(
    converter: LayoutConverter,
    pairs: Iterable[_Pair],
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dtype: str,
) -> list[_Cost]:
    """Return the cost of every pair; equal pairs are planned once."""
    layout = cache(lambda spec: Layout(mesh, spec, shape, dtype))
    cost = cache(lambda source, target: _cost(converter.plan(source, target)))
    costs = []
    for source, target, place in pairs:
        try:
            costs.append(cost(layout(source), layout(target)))
        except SpecSyntaxError as error:
            problem = f"{place}: {error.problem}"
            raise SpecSyntaxError(problem, error.text, error.position) from None
        except ShardSpecError as error:
            # All of these are wrong usage, and have one exit code.
            raise LayoutError(f"{place}: {error}") from error
    return costs


def _cost(plan: ConversionPlan) -> _Cost:
    specs = str(plan.source.spec), str(plan.target.spec)
    seconds, received, peak = plan.cost_seconds, plan.bytes_received, plan.peak_bytes
    labels = [str(layout.labelled_spec) for layout in (plan.source, plan.target)]
    row = [str(len(plan.steps)), bytes_text(received), seconds_text(seconds), bytes_text(peak)]
    record = dict(zip(_COLUMNS, (*specs, seconds, received, peak), strict=True))
    return record, [*labels, *row], plan


@click.command(cls=Command)
@ckpt.checkpoint_argument
@opts.cluster_options
@ckpt.rule_options
@ckpt.compared_map_options
@ckpt.layout_option
@opts.dtype.but(
    "Cast floating-point tensors to this dtype.", type=str, default=None, show_default=False
).under("Precision")
@opts.max_bytes.but("Limit the bytes in buckets of each device.")
@Option(
    "transfers",
    "Output",
    "Write which bytes each device reads from which file into this directory.",
    {"type": click.Path(path_type=Path), "metavar": "DIR"},
)
@ckpt.source_options
@opts.as_json.but("Print the plan as JSON.")
def plan_state_command(
    checkpoint: PurePath,
    cluster: opts.ClusterOptions,
    rules: dict[str, str] | None,
    maps: ckpt.MapOptions,
    layout: str | None,
    dtype: str | None,
    max_bytes: int | None,
    transfers: Path | None,
    source: ckpt.SourceOptions,
    as_json: bool,
) -> None:
    """Plan how the devices of a mesh read a model from the checkpoint CKPT.

    Prints which device reads how much from which files. No tensor is read.

    Examples:
      shardspec plan-state ckpt --mesh 8 --rules rules.toml
      shardspec plan-state ckpt --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),...]' --json
      shardspec plan-state ckpt --mesh 8 --model config.json --names fused
      shardspec plan-state ckpt --model config.json --layout vllm:tp=8,ep=8
      shardspec plan-state ckpt --mesh 8 --rules rules.toml --transfers rows/
    """
    from shardspec.checkpoint.job.load_plan import file_regions, plan_stored, write_transfers
    from shardspec.resharding.plan import text_of

    if layout is not None:
        ckpt.check_layout(maps, rules)
        mesh = None if cluster.mesh is None else opts.plain_mesh(cluster.mesh, cluster.ids)
        (catalog,) = source.open(checkpoint)
        catalog, target = _under_layout(catalog, layout, maps, mesh, dtype)
        planned = plan_stored(catalog, target, None, dtype, max_bytes)
    else:
        mesh = _with_links(cluster)
        (catalog,) = source.open(checkpoint)
        names = maps.read(catalog.home)
        planned = plan_stored(catalog, (mesh, rules or {}), names, dtype, max_bytes, maps.drop)
    catalog, plan, _, files = planned
    if transfers is not None:
        write_transfers(plan.copies, transfers, file_regions(catalog, planned.first), files)
    if as_json:
        named = {str(number): name for number, name in files.items()}
        say_json({**plan.as_dict(), "files": named})
    else:
        say(text_of(plan, files))


def _with_links(cluster: opts.ClusterOptions) -> DeviceMesh:
    """Return the mesh in the options; if they describe links, it has these."""
    mesh, model = cluster.build()
    if cluster.links is None:
        return mesh
    return DeviceMesh(mesh.ids, mesh.shape, axis_names=mesh.axis_names, links=model.cluster)


def _under_layout(
    catalog: "Catalog",
    layout: str,
    maps: ckpt.MapOptions,
    mesh: DeviceMesh | None,
    dtype: str | None,
) -> "tuple[Catalog, dict[str, Layout]]":
    """Rename a checkpoint as a trainer or engine does; return it, and the layout of each tensor."""
    from shardspec.checkpoint.convert.select import Choice
    from shardspec.checkpoint.quantization import mapped_source
    from shardspec.dtypes import dtype_name, is_cast, keeps_dtype
    from shardspec.layout.layout import Layout

    named, layouts = ckpt.under_layout(layout, maps, catalog, mesh)
    catalog, _ = mapped_source(catalog, named, Choice(dtype=dtype, drop=maps.drop))
    target = {}
    for name in catalog.names:
        at, own = layouts[name], catalog.outline(name).dtype
        casts = dtype is not None and is_cast(own, dtype_name(dtype)) and not keeps_dtype(name)
        target[name] = Layout(at.mesh, at.spec, at.global_shape, dtype if casts else own)
    return catalog, target

"""The command `shardspec cost`."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from shardspec.cli.arguments import (
    MeshShape,
    build_mesh,
    build_model,
    mesh_options,
    tensor_options,
)
from shardspec.comm.cost import CostModel
from shardspec.comm.presets import KNOWN_ERROR
from shardspec.errors import LayoutError, ShardSpecError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan
from shardspec.mesh import DeviceMesh, LinkModel
from shardspec.text import bytes_text, seconds_text, table_text

__all__ = ["command"]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two specs, and the place they stand at, for errors."""

    source: str
    target: str
    place: str


@click.command(
    "cost",
    epilog="""\b
Examples:
  shardspec cost "[S0,R]" "[R,S0]" "[S01,R]" "[S10,R]" --mesh 2x4 --shape 4096x4096 --dtype bf16
  shardspec cost "[S0]" "[R]" --mesh 4x8 --shape 8192 --links ib-ndr-per-gpu,h100-nvswitch --csv
  shardspec cost --pairs pairs.txt --mesh dp=2,tp=4 --shape 4096x4096 --json

\b
A line of the file holds two specs with blanks between them; '#' starts a comment.
""",
)
@click.argument("specs", nargs=-1, metavar="[FROM TO]...")
@click.option(
    "--pairs",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Pairs from a file, one per line, after those of the arguments; '-' for standard input.",
)
@mesh_options
@tensor_options
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: seconds and bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    specs: tuple[str, ...],
    file: str | None,
    mesh: MeshShape,
    ids: tuple[int, ...] | None,
    alpha: tuple[float, ...] | None,
    beta: tuple[float, ...] | None,
    links: tuple[str, ...] | None,
    link_model: LinkModel,
    shape: tuple[int, ...],
    dtype: str,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Say what the cheapest plan costs from each spec FROM to the spec TO after it.

    Works on paper, as 'shardspec plan' does, which also shows the steps.
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    if len(specs) % 2:
        raise click.UsageError(f"{specs[-1]!r} has no partner; give specs in pairs FROM TO")
    if not specs and file is None:
        raise click.UsageError("nothing to price; give specs in pairs FROM TO, or --pairs FILE")
    devices = build_mesh(mesh, ids, alpha, beta, link_model)
    model = build_model(devices, links)
    pairs = [*_given(specs), *(() if file is None else _read(file))]
    converter = LayoutConverter(model)
    plans = [_plan(converter, pair, devices, shape, dtype) for pair in pairs]
    if as_csv:
        click.echo(_csv(plans), nl=False)
    elif as_json:
        click.echo(json.dumps(_as_dict(plans, devices, shape, dtype, model)))
    else:
        click.echo(_table(plans, devices, model))


def _given(specs: Sequence[str]) -> Iterator[_Pair]:
    for number, (source, target) in enumerate(zip(specs[::2], specs[1::2], strict=True), 1):
        yield _Pair(source, target, f"pair {number}")


def _read(file: str) -> Iterator[_Pair]:
    """Read a pair per line; blanks inside brackets belong to a spec."""
    # What is no text becomes a sign that no spec has, and an error of its line.
    with click.open_file(file, encoding="utf-8-sig", errors="replace") as opened:
        lines = opened.readlines()
    for number, line in enumerate(lines, 1):
        place = f"{'standard input' if file == '-' else file}, line {number}"
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = re.findall(r"\[[^\]]*\]|\S+", text)
        if len(found) != 2:
            count = f"{len(found)} spec{'' if len(found) == 1 else 's'}"
            raise LayoutError(f"{place}: {count} where two are needed, FROM and TO: {text}")
        source, target = found
        yield _Pair(source, target, place)


def _plan(
    converter: LayoutConverter,
    pair: _Pair,
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dtype: str,
) -> ConversionPlan:
    try:
        return converter.plan(Layout(mesh, pair.source, shape, dtype), pair.target)
    except ShardSpecError as error:
        # Of the same exit code, whichever error it is: wrong usage.
        raise LayoutError(f"{pair.place}: {error}") from error


def _csv(plans: Sequence[ConversionPlan]) -> str:
    output = io.StringIO()
    rows = csv.writer(output, lineterminator="\n")
    rows.writerow(["source", "target", "cost_seconds", "bytes_received", "peak_bytes"])
    for plan in plans:
        specs = plan.source.spec, plan.target.spec
        rows.writerow([*specs, plan.cost_seconds, plan.bytes_received, plan.peak_bytes])
    return output.getvalue()


def _as_dict(
    plans: Sequence[ConversionPlan],
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dtype: str,
    model: CostModel,
) -> dict[str, object]:
    return {
        "mesh": list(mesh.shape),
        "shape": list(shape),
        "dtype": dtype,
        "link_model": model.link_model,
        "links": [
            {
                "name": link.name,
                "latency_s": link.latency_s,
                "seconds_per_byte": link.seconds_per_byte,
            }
            for link in model.links
        ],
        "known_error": KNOWN_ERROR,
        "pairs": [
            {
                "source": str(plan.source.spec),
                "target": str(plan.target.spec),
                "cost_seconds": plan.cost_seconds,
                "bytes_received": plan.bytes_received,
                "peak_bytes": plan.peak_bytes,
            }
            for plan in plans
        ],
    }


def _table(plans: Sequence[ConversionPlan], mesh: DeviceMesh, model: CostModel) -> str:
    table = table_text(
        ["from", "to", "steps", "receives", "time", "peak"],
        [
            [
                str(plan.source.labelled_spec),
                str(plan.target.labelled_spec),
                str(len(plan.steps)),
                bytes_text(plan.bytes_received),
                seconds_text(plan.cost_seconds),
                bytes_text(plan.peak_bytes),
            ]
            for plan in plans
        ],
        numbers_from=2,
    )
    links = model.links_text([mesh.axis_label(axis) for axis in range(mesh.ndim)])
    assumed = f"per device; {model.link_model} model; {links}"
    return f"{table}\n{assumed}\nknown error: {KNOWN_ERROR}"

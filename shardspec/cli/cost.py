"""The command `shardspec cost`."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Unpack

import click

from shardspec.cli.options import (
    ClusterOptions,
    build_cluster,
    cluster_options,
    json_option,
    tensor_options,
)
from shardspec.cli.output import path_text, say
from shardspec.comm.cost import CostModel
from shardspec.errors import InputFileError, LayoutError, ShardSpecError, SpecSyntaxError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan, StepError, errors_text
from shardspec.mesh import DeviceMesh
from shardspec.text import bytes_text, counted, seconds_text, shown, table_text

__all__ = ["command"]

_MOST_PAIRS: Final = 1_000_000
_MOST_CHARACTERS: Final = 1 << 16
"""In a line of the file."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two specs, and the place they stand at, for errors."""

    source: str
    target: str
    origin: str
    number: int

    @property
    def place(self) -> str:
        return f"{self.origin} {self.number}"


@dataclass(frozen=True, slots=True)
class _Cost:
    """What is printed about one pair."""

    source: Layout
    target: Layout
    steps: int
    seconds: float
    bytes_received: int
    peak_bytes: int
    errors: tuple[StepError, ...]

    @classmethod
    def of(cls, plan: ConversionPlan) -> "_Cost":
        return cls(
            plan.source,
            plan.target,
            len(plan.steps),
            plan.cost_seconds,
            plan.bytes_received,
            plan.peak_bytes,
            plan.errors,
        )

    def as_dict(self) -> dict[str, object]:
        return {
            "source": str(self.source.spec),
            "target": str(self.target.spec),
            "cost_seconds": self.seconds,
            "bytes_received": self.bytes_received,
            "peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True, slots=True)
class _Answers:
    """The pairs that are asked for, each one priced once however often it is."""

    distinct: list[_Cost]
    order: list[int]
    """Per pair its place in `distinct`."""

    @property
    def known_error(self) -> str:
        return errors_text(chain.from_iterable(cost.errors for cost in self.distinct))


@click.command(
    "cost",
    epilog="""\b
Examples:
  shardspec cost "[S0,R]" "[R,S0]" "[S01,R]" "[S10,R]" --mesh 2x4 --shape 4096x4096 --dtype bf16
  shardspec cost "[S0]" "[R]" --mesh 4x8 --shape 8192 --links ib-ndr-per-gpu,h100-nvswitch --csv
  shardspec cost --pairs pairs.txt --mesh dp=2,tp=4 --shape 4096x4096 --json

\b
A line of the file holds two specs with blanks between them; '#' starts a comment. Up to a million
pairs are priced at once.
""",
)
@click.argument("specs", nargs=-1, metavar="[FROM TO]...")
@click.option(
    "--pairs",
    "file",
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help="Pairs from a file, one per line, after those of the arguments; '-' for standard input.",
)
@cluster_options
@tensor_options
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: seconds and bytes.")
@json_option()
def command(
    specs: tuple[str, ...],
    file: str | None,
    shape: tuple[int, ...],
    dtype: str,
    as_csv: bool,
    as_json: bool,
    **cluster: Unpack[ClusterOptions],
) -> None:
    """Say what the cheapest plan costs from each spec FROM to the spec TO after it.

    Works on paper, as 'shardspec plan' does, which also shows the steps.
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    if len(specs) % 2:
        raise click.UsageError(f"{shown(specs[-1])} has no partner; give specs in pairs FROM TO")
    if not specs and file is None:
        raise click.UsageError("nothing to price; give specs in pairs FROM TO, or --pairs FILE")
    devices, model = build_cluster(**cluster)
    pairs = chain(_given(specs), () if file is None else _read(file))
    answers = _answers(LayoutConverter(model), pairs, devices, shape, dtype)
    if as_csv:
        click.echo(_csv(answers), nl=False)
    elif as_json:
        say(json.dumps(_as_dict(answers, devices, shape, dtype, model)))
    else:
        say(_table(answers, devices, model))


def _given(specs: Sequence[str]) -> Iterator[_Pair]:
    for number, (source, target) in enumerate(zip(specs[::2], specs[1::2], strict=True), 1):
        yield _Pair(source, target, "pair", number)


def _read(file: str) -> Iterator[_Pair]:
    """Read a pair per line; blanks inside brackets belong to a spec."""
    origin = f"{'standard input' if file == '-' else path_text(file)}, line"
    pairs = 0
    for number, line in enumerate(_lines(file), 1):
        if len(line) > _MOST_CHARACTERS:
            raise InputFileError(
                f"{origin} {number}: is longer than {_MOST_CHARACTERS:,} characters"
            )
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = re.findall(r"\[[^\]]*\]|\S+", text)
        if len(found) != 2:
            raise LayoutError(
                f"{origin} {number}: {counted(len(found), 'spec')} where two are needed, FROM and "
                f"TO: {text[:200]}"
            )
        pairs += 1
        if pairs > _MOST_PAIRS:
            raise InputFileError(
                f"{origin} {number}: more than {_MOST_PAIRS:,} pairs; price them in several runs"
            )
        source, target = found
        yield _Pair(source, target, origin, number)


def _lines(file: str) -> Iterator[str]:
    """Yield the lines of a file that may have no end, nor one of its lines."""
    try:
        # What is no text becomes a sign that no spec has, and an error of its line.
        with click.open_file(file, encoding="utf-8-sig", errors="replace") as opened:
            while line := opened.readline(_MOST_CHARACTERS + 1):
                yield line
    except OSError as error:
        raise InputFileError(
            f"{path_text(file)}: the pairs cannot be read: {error.strerror}"
        ) from None


def _answers(
    converter: LayoutConverter,
    pairs: Iterable[_Pair],
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dtype: str,
) -> _Answers:
    """Read each spec once and plan each pair once: many pairs are few different ones."""
    layouts: dict[str, Layout] = {}
    places: dict[tuple[Layout, Layout], int] = {}
    answers = _Answers([], [])
    for pair in pairs:
        try:
            for text in (pair.source, pair.target):
                if text not in layouts:
                    layouts[text] = Layout(mesh, text, shape, dtype)
            ends = layouts[pair.source], layouts[pair.target]
            if ends not in places:
                places[ends] = len(places)
                answers.distinct.append(_Cost.of(converter.plan(*ends)))
        except SpecSyntaxError as error:
            problem = f"{pair.place}: {error.problem}"
            raise SpecSyntaxError(problem, error.text, error.position) from None
        except ShardSpecError as error:
            # Of the same exit code, whichever error it is: wrong usage.
            raise LayoutError(f"{pair.place}: {error}") from error
        answers.order.append(places[ends])
    return answers


def _csv(answers: _Answers) -> str:
    output = io.StringIO()
    rows = csv.writer(output, lineterminator="\n")
    rows.writerow(["source", "target", "cost_seconds", "bytes_received", "peak_bytes"])
    values = [list(cost.as_dict().values()) for cost in answers.distinct]
    rows.writerows(values[place] for place in answers.order)
    return output.getvalue()


def _as_dict(
    answers: _Answers,
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dtype: str,
    model: CostModel,
) -> dict[str, object]:
    pairs = [cost.as_dict() for cost in answers.distinct]
    return {
        "mesh": list(mesh.shape),
        "shape": list(shape),
        "dtype": dtype,
        "link_model": model.link_model,
        "links": [link.as_dict() for link in model.links],
        "known_error": answers.known_error,
        "pairs": [pairs[place] for place in answers.order],
    }


def _table(answers: _Answers, mesh: DeviceMesh, model: CostModel) -> str:
    table = table_text(
        ["from", "to", "steps", "receives", "time", "peak"],
        [
            [
                str(cost.source.labelled_spec),
                str(cost.target.labelled_spec),
                str(cost.steps),
                bytes_text(cost.bytes_received),
                seconds_text(cost.seconds),
                bytes_text(cost.peak_bytes),
            ]
            for cost in answers.distinct
        ],
        numbers_from=2,
    )
    header, rule, *lines = table.split("\n")
    rows = [lines[place] for place in answers.order]
    links = model.links_text([mesh.axis_label(axis) for axis in range(mesh.ndim)])
    assumed = f"per device; {model.link_model} model; {links}"
    return "\n".join([header, rule, *rows, assumed, f"known error: {answers.known_error}"])

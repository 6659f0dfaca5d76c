"""What the commands share that write a checkpoint: options, progress, and the line in the end."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from shardspec.checkpoint.digests import crc_text
from shardspec.checkpoint.fill import Progress
from shardspec.checkpoint.report import WriteReport
from shardspec.cli.paths import CheckpointPath
from shardspec.text import bytes_text, seconds_text

__all__ = ["progress_bar", "report_written", "writing_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def writing_options(command: _Command) -> _Command:
    """Add the options that say what is written of a checkpoint, and how."""
    options = (
        click.option(
            "--dtype", metavar="DTYPE", help="Cast floating point tensors to this dtype, as bf16."
        ),
        click.option(
            "--include",
            multiple=True,
            metavar="PATTERN",
            help="Only tensors whose name matches (as in a shell); may be given several times.",
        ),
        click.option(
            "--exclude",
            multiple=True,
            metavar="PATTERN",
            help="No tensors whose name matches; may be given several times.",
        ),
        click.option(
            "--rename",
            multiple=True,
            nargs=2,
            metavar="REGEX NEW",
            help="Replace the first match of REGEX in every name by NEW; may be given several "
            "times.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(1),
            default=1,
            metavar="N",
            help="Write N files at once.",
        ),
        click.option("--force", is_flag=True, help="Replace OUT if it exists."),
        click.option(
            "--no-verify",
            is_flag=True,
            help="Do not compare bytes with the digests that were saved, nor read OUT again.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Check everything, say what would be done, and stop."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON."),
        click.option("--quiet", is_flag=True, help="Print nothing but errors."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def report_written(report: WriteReport, *, as_json: bool, quiet: bool) -> None:
    """Say what was written, or would be."""
    if as_json:
        click.echo(json.dumps(report.to_json()))
        return
    if quiet:
        return
    files = f" in {len(report.files)} files" if len(report.files) > 1 else ""
    what = f"{report.tensors} tensors, {bytes_text(report.num_bytes)}{files}"
    if not report.written:
        source = f"{report.read_files} file{'' if report.read_files == 1 else 's'}"
        click.echo(
            f"{report.path}: would hold {what}; {bytes_text(report.read_bytes)} of {source} in "
            f"the form of {report.read} would be read"
        )
    else:
        rate = bytes_text(report.num_bytes / max(report.seconds, 1e-9))
        digest = "" if report.crc32 is None else f", CRC-32 {crc_text(report.crc32)}"
        click.echo(f"{report.path}: {what} in {seconds_text(report.seconds)} ({rate}/s){digest}")
    if report.left_out:
        shown = ", ".join(map(repr, report.left_out[:3]))
        more = f" and {len(report.left_out) - 3} more" if len(report.left_out) > 3 else ""
        click.echo(f"left out, as they are no tensors: {shown}{more}")


@contextmanager
def progress_bar(shown: bool, title: str) -> Iterator[Progress | None]:
    """Give a callback that draws a bar on the terminal, or none."""
    if not (shown and sys.stderr.isatty()):
        yield None
        return
    # Only here, so that scripts do not pay for it.
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def output_option(what: str) -> Callable[[_Command], _Command]:
    """Return the option that names the output."""
    return click.option(
        "-o",
        "--output",
        type=CheckpointPath(),
        required=True,
        metavar="OUT",
        help=what,
    )

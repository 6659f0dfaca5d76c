"""What the commands share that write a checkpoint: options, progress, and the line in the end.

A command takes what `writing_options` adds as ``**options``, and hands it on as it is: the names
are those that `merge` and `reshard` give their parameters.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypedDict, TypeVar

import click

from shardspec.checkpoint.moving.digests import crc_text
from shardspec.checkpoint.report import WriteReport
from shardspec.checkpoint.writing.fill import Progress
from shardspec.checkpoint.writing.member import Member
from shardspec.text import bytes_text, counted, rate_text, seconds_text

__all__ = [
    "WritingOptions",
    "choosing_options",
    "output_option",
    "progress_bar",
    "write",
    "writing_options",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SHOWN: Final = 3


class WritingOptions(TypedDict):
    """What `writing_options` adds."""

    dtype: str | None
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    rename: tuple[tuple[str, str], ...]
    threads: int
    strict_cast: bool
    force: bool
    verify: bool
    reread: bool
    dry_run: bool


def _if_any(
    _: click.Context, __: click.Parameter, patterns: tuple[str, ...]
) -> tuple[str, ...] | None:
    return patterns or None


def _expressions(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except re.error as error:
            raise click.BadParameter(
                f"{pattern!r} is no regular expression: {error}.", ctx, param
            ) from None
    return pairs


def choosing_options(command: _Command) -> _Command:
    """Add ``include``, ``exclude`` and ``rename``."""
    options = (
        click.option(
            "--include",
            multiple=True,
            callback=_if_any,
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
            callback=_expressions,
            metavar="REGEX NEW",
            help="Replace the first match of REGEX in every name by NEW; may be given several "
            "times.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def writing_options(command: _Command) -> _Command:
    """Add the options of `WritingOptions`, and those of `write`."""
    options = (
        click.option(
            "--dtype", metavar="DTYPE", help="Cast floating point tensors to this dtype, as bf16."
        ),
        choosing_options,
        click.option(
            "--threads",
            type=click.IntRange(1),
            default=1,
            metavar="N",
            help="Write N files at once.",
        ),
        click.option(
            "--strict-cast",
            is_flag=True,
            help="Refuse a cast that turns numbers into infinity, 0 or NaN; else they are counted.",
        ),
        click.option("--force", is_flag=True, help="Replace OUT if it exists."),
        click.option(
            "--no-verify",
            "verify",
            flag_value=False,
            default=True,
            help="Do not compare bytes with the digests that were saved, nor read OUT again.",
        ),
        click.option(
            "--no-reread",
            "reread",
            flag_value=False,
            default=True,
            help="Compare bytes with the digests that were saved, but do not read OUT again.",
        ),
        click.option(
            "--dry-run",
            is_flag=True,
            help="Check what describes CKPT, say what would be done, and stop.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON."),
        click.option("--quiet", is_flag=True, help="Print nothing but errors."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def write(
    title: str,
    written: Callable[[Progress | None, Member | None], WriteReport],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Have something written, with a bar while that takes time, and say what was written.

    Parameters
    ----------
    title
        Stands beside the bar.
    written
        Writes, given whom to tell how far it is, and which of several processes this one is.
    as_json, quiet
        How to say it, if at all; of several processes the first one does.
    """
    member = Member.of_environment()
    quiet = quiet or (member is not None and member.rank > 0)
    with progress_bar(not (quiet or as_json), title) as progress:
        report = written(progress, member)
    if not quiet:
        click.echo(json.dumps(report.to_json()) if as_json else _text(report))


def _text(report: WriteReport) -> str:
    what = f"{counted(report.tensors, 'tensor')}, {bytes_text(report.num_bytes)}"
    if len(report.files) > 1:
        what += f" in {len(report.files)} files"
    if report.written:
        rate = rate_text(report.num_bytes / max(report.seconds, 1e-9))
        digest = "" if report.crc32 is None else f", CRC-32 {crc_text(report.crc32)}"
        line = f"{report.path}: {what} in {seconds_text(report.seconds)} ({rate}){digest}"
    else:
        line = (
            f"{report.path}: would hold {what}; {bytes_text(report.read_bytes)} of "
            f"{counted(report.read_files, 'file')} in the form of {report.read} would be read"
        )
    if report.cast_losses:
        line += f"\nnumbers that the cast did not keep: {report.cast_losses}"
    if report.left_out:
        shown = ", ".join(map(repr, report.left_out[:_SHOWN]))
        rest = len(report.left_out) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        line += f"\nleft out: {shown}{more}; 'shardspec inspect' says what they are"
    return line


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
    bars = rich.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bars as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def output_option(what: str) -> Callable[[_Command], _Command]:
    """Return the option that names the output."""
    return click.option(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help=what,
    )

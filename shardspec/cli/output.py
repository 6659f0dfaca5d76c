"""What commands print and write: lines that are safe to print, whole files, progress, reports."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from shardspec.text import bytes_text, counted, printable, rate_text, seconds_text, shown

if TYPE_CHECKING:
    from shardspec.checkpoint.coordinate import Member
    from shardspec.checkpoint.write import WriteReport

__all__ = [
    "Progress",
    "path_text",
    "progress_bar",
    "say",
    "say_parts",
    "write_file",
    "write_report",
]

Progress: TypeAlias = Callable[[int, int], None]
"""Told how many bytes are done, and how many there are."""

_SHOWN: Final = 3
_PARTS: Final = 256
"""Parts of a long text that are printed at once."""


def say(text: str, *, err: bool = False) -> None:
    """Print lines; what could upset a terminal is printed as escapes."""
    click.echo(printable(text, keep="\n"), err=err)


def say_parts(parts: Iterable[str], between: str = "\n") -> None:
    """Print a text that may be long as it is made; what could upset a terminal as escapes."""
    parts, first = iter(parts), True
    while some := list(islice(parts, _PARTS)):
        text = printable(between.join(some), keep="\n")
        click.echo(text if first else between + text, nl=False)
        first = False
    click.echo()


def path_text(path: Path | str) -> str:
    """Return a path for a line: its name may hold anything."""
    return printable(str(path))


def write_file(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file that appears when it is complete.

    Raises
    ------
    OutputExistsError
        If there is such a file and `overwrite` is not set.
    CheckpointError
        If it cannot be written.
    """
    from shardspec.checkpoint.commit import write_atomically

    content = text.encode()

    def fill(descriptor: int) -> None:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]

    write_atomically(path, len(content), fill, overwrite=overwrite)


def write_report(
    title: str,
    written: "Callable[[Progress | None, Member | None], WriteReport]",
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Have a checkpoint written, with a bar while that takes time, and say what was written.

    Parameters
    ----------
    title
        Stands beside the bar.
    written
        Writes, given whom to tell how far it is, and which of several processes this one is.
    as_json, quiet
        How to say it, if at all; of several processes the first one does.
    """
    from shardspec.checkpoint.coordinate import Member

    member = Member.of_environment()
    quiet = quiet or (member is not None and member.rank > 0)
    with progress_bar(not (quiet or as_json), title) as progress:
        report = written(progress, member)
    if not quiet:
        say(json.dumps(report.to_json()) if as_json else _report_text(report))


def _report_text(report: "WriteReport") -> str:
    what = f"{counted(report.tensors, 'tensor')}, {bytes_text(report.num_bytes)}"
    if len(report.files) > 1:
        what += f" in {len(report.files)} files"
    if report.written:
        rate = rate_text(report.num_bytes / max(report.seconds, 1e-9))
        digest = "" if report.crc32 is None else f", CRC-32 {report.crc32:08x}"
        line = (
            f"{path_text(report.path)}: {what} in {seconds_text(report.seconds)} ({rate}){digest}"
        )
    else:
        line = (
            f"{path_text(report.path)}: would hold {what}; {bytes_text(report.read_bytes)} of "
            f"{counted(report.read_files, 'file')} in the format of {report.read} would be read"
        )
    if report.cast_losses:
        line += f"\nnumbers that the cast did not keep: {report.cast_losses}"
    if report.left_out:
        some = ", ".join(map(shown, report.left_out[:_SHOWN]))
        rest = len(report.left_out) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        line += f"\nleft out: {some}{more}; 'shardspec inspect' says what they are"
    if report.sidecars:
        names = ", ".join(map(shown, report.sidecars))
        line += f"\nalong with it: {names}"
    return line


@contextmanager
def progress_bar(shows: bool, title: str) -> Iterator[Progress | None]:
    """Give a callback that draws a bar on the terminal, or none."""
    if not (shows and sys.stderr.isatty()):
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

"""Prints text and JSON, writes files and shows progress bars for the commands."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Final

import click

from shardspec.text import bytes_text, printable, rate_text, seconds_text, terminal_width, wrapped

QUIET: Final = "shardspec.quiet"
"""Key in a click context's `meta`: True after ``--quiet``."""
VERBOSE: Final = "shardspec.verbose"
"""Key in a click context's `meta`: True after ``--verbose``."""

_PROGRESS_S: Final = 10
"""Seconds between two lines of progress where there is no terminal."""
_BAR_S: Final = 1
"""Seconds after which a progress bar appears."""
_WIDE: Final = 60
"""Columns from which a line of progress has a title and a bar."""


def is_quiet() -> bool:
    """Return True if the current command prints only errors."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def say(text: str, *, err: bool = False, **style: Any) -> None:  # noqa: ANN401  # for click.style
    """Print lines, with control characters escaped; a terminal gets them wrapped at words."""
    text = printable(text, keep="\n")
    if (sys.stderr if err else sys.stdout).isatty():
        width = terminal_width()
        text = "\n".join(part for line in text.split("\n") for part in wrapped(line, width))
    if not is_quiet():
        click.echo(styled(text, **style) if style else text, err=err)


def say_styled(text: str, *, nl: bool = True) -> None:
    """Print a text unchanged; the caller has made sure that it is safe to print."""
    if not is_quiet():
        click.echo(text, nl=nl)


def styled(text: str, **style: Any) -> str:  # noqa: ANN401  # passed to click unchanged
    """Return a text in a style of `click.style`, or unchanged if output has no colors."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else click.style(text, **style)


def say_json(record: object) -> None:
    """Print a record as one line of JSON."""
    say_styled(json.dumps(record))  # without control characters


def say_parts(parts: Iterable[str], between: str = "\n") -> None:
    """Print the parts of a long text while they are made, with control characters escaped."""
    if is_quiet():
        return
    parts, size = iter(parts), 1  # the first ones at once
    while batch := list(islice(parts, min(size, 256))):
        text = between.join(printable(part, keep="\n") for part in batch)
        click.echo(text if size == 1 else between[1:] + text, nl=bool(between))
        size *= 2
    if not between:
        click.echo()


def name_text(name: str) -> str:
    """Return a name with control characters escaped; ``''`` if it is empty."""
    return printable(name) or "''"


def path_text(path: PurePath | str) -> str:
    """Return a path with control characters escaped, line breaks too."""
    return printable(str(path))


def write_file(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file that appears once it is complete; raises `CheckpointError` if it cannot."""
    from shardspec.checkpoint.storage import storage_path

    content = text.encode()
    storage_path(path).write(len(content), [content], overwrite=overwrite)


def _say_progress(title: str, times: list[float], done: int, total: int) -> None:
    """Print a line of progress every 10 s; `times` has the start, and the time of the last line."""
    now = time.monotonic()
    if now - times[1] < _PROGRESS_S:
        return
    times[1] = now
    rate = done / (now - times[0])
    left = f", {seconds_text((total - done) / rate)} left" if rate else ""
    text = f"{title}: {bytes_text(done)} of {bytes_text(total)}, {rate_text(rate)}{left}"
    click.echo(text, err=True)


@contextmanager
def progress_bar(shows: bool, title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of bytes done and total bytes that updates a progress bar; None if quiet.

    The bar appears after a second, so that short commands show none.
    """
    context = click.get_current_context(silent=True)
    if is_quiet() or not shows:
        yield None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        verbose = context is not None and bool(context.meta.get(VERBOSE))
        yield partial(_say_progress, title, [time.monotonic()] * 2) if verbose else None
        return
    # Imported here, as scripts show no bar and start faster without.
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    fitting = columns if terminal_width() >= _WIDE else columns[2:]
    bar = rich.Progress(
        *fitting,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task, start = bar.add_task(title, total=None), time.monotonic()

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - start >= _BAR_S:
            bar.start()

    try:
        yield update
    finally:
        bar.stop()

"""The command `shardspec merge`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from shardspec.checkpoint.merge import Progress, merge
from shardspec.text import bytes_text, seconds_text

__all__ = ["command"]


@click.command(
    "merge",
    epilog="""\b
Examples:
  shardspec merge ckpt -o model.safetensors
  shardspec merge ckpt -o model.safetensors --force --json
""",
)
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CKPT")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="OUT",
    help="The safetensors file to write.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--no-verify", is_flag=True, help="Do not compare bytes with the digests that were saved."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    checkpoint: Path, output: Path, force: bool, no_verify: bool, as_json: bool, quiet: bool
) -> None:
    """Write the whole tensors of the checkpoint CKPT into one safetensors file.

    Checks first that headers agree with the sharding info, that the boxes of every tensor tile it
    and that boxes stored twice agree; finishes pending reductions. OUT appears when it is complete.
    """
    with _progress(sys.stderr.isatty() and not (quiet or as_json)) as progress:
        report = merge(checkpoint, output, force=force, verify=not no_verify, progress=progress)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    elif not quiet:
        rate = bytes_text(report.num_bytes / max(report.seconds, 1e-9))
        click.echo(
            f"{report.path}: {report.tensors} tensors, {bytes_text(report.num_bytes)} in "
            f"{seconds_text(report.seconds)} ({rate}/s)"
        )


@contextmanager
def _progress(shown: bool) -> Iterator[Progress | None]:
    """Give a callback that draws a bar on the terminal, or none."""
    if not shown:
        yield None
        return
    # Only here, so that scripts do not pay for it.
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("merge", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

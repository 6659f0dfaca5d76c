"""The command `shardspec verify`."""

import json
from pathlib import Path

import click

from shardspec.checkpoint.diff import diff_checkpoints
from shardspec.checkpoint.verify import VerifyReport, verify_checkpoint
from shardspec.cli.checkpoint_options import (
    CheckpointPath,
    choosing_options,
    open_both,
    source_options,
)
from shardspec.cli.options import json_option
from shardspec.cli.output import path_text, progress_bar, say
from shardspec.errors import CheckpointError
from shardspec.text import bytes_text, counted, printable, shown

__all__ = ["command"]

_FLAWED = 3


@click.command(
    "verify",
    epilog="""\b
Examples:
  shardspec verify ckpt
  shardspec verify ckpt --all --json
  shardspec verify ckpt --against model.safetensors
  shardspec verify ckpt --against model.safetensors --exclude 'optim.*'
""",
)
@click.argument("checkpoint", type=CheckpointPath(), metavar="CKPT")
@click.option(
    "--against",
    type=CheckpointPath(),
    metavar="OTHER",
    help="Compare the bits of every tensor with this checkpoint or safetensors file too.",
)
@click.option("--all", "every", is_flag=True, help="List all flaws, not only the first.")
@choosing_options
@source_options
@json_option("Print what was found as JSON, all flaws.")
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: Path,
    against: Path | None,
    every: bool,
    include: tuple[str, ...] | None,
    exclude: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    ranks: int | None,
    source_rules: Path | None,
    as_json: bool,
) -> None:
    """Check that every byte of CKPT is there and, where digests were saved, as it was saved.

    Boxes tile every tensor, files are whole, replicas agree. Exits with 3 at a flaw.
    With --against, patterns choose and name the tensors that are compared, as by diff.
    """
    if against is None and (include or exclude or rename):
        raise click.UsageError("patterns choose what is compared; give --against too")
    every = every or as_json
    source, other = open_both(checkpoint, against, ranks, source_rules)
    with progress_bar(not as_json, "verify") as progress:
        report = verify_checkpoint(source, every=every, progress=progress)
    flaws = list(report.flaws)
    if other is not None:
        with progress_bar(not as_json, "compare") as progress:
            for difference in diff_checkpoints(
                source, other, include=include, exclude=exclude, rename=rename, progress=progress
            ):
                flaws.append(f"tensor {shown(difference.name)} {difference.problem}")
                if not every:
                    raise CheckpointError(f"{checkpoint} and {against}: {flaws[-1]}")
    if as_json:
        say(json.dumps({**report.to_json(), "flaws": flaws}))
    else:
        for flaw in flaws:
            say(printable(flaw))
        chosen = "what was chosen is " if include or exclude else ""
        same = "" if against is None or flaws else f", and {chosen}the same as {path_text(against)}"
        say(
            f"{path_text(checkpoint)}: {counted(report.tensors, 'tensor')} in "
            f"{counted(report.boxes, 'box', 'boxes')}, {bytes_text(report.num_bytes)}, "
            f"{_digests(report)}; {counted(len(flaws), 'flaw') if flaws else 'no flaws'}{same}"
        )
    if flaws:
        ctx.exit(_FLAWED)


def _digests(report: VerifyReport) -> str:
    """Say how much of what was read could be compared with what was saved."""
    if report.digested_bytes == report.num_bytes:
        return "all with digests"
    if report.digested_bytes:
        return f"{bytes_text(report.digested_bytes)} of them with digests"
    return "none with digests, so that changed bytes cannot be told"

"""The command `shardspec verify`."""

import json
from pathlib import Path

import click

from shardspec.checkpoint.diff import diff_checkpoints
from shardspec.checkpoint.verify import verify_checkpoint
from shardspec.cli.paths import CheckpointPath
from shardspec.cli.source import open_source, source_options
from shardspec.errors import CheckpointError
from shardspec.text import bytes_text

__all__ = ["command"]

_FLAWED = 3


@click.command(
    "verify",
    epilog="""\b
Examples:
  shardspec verify ckpt
  shardspec verify ckpt --all --json
  shardspec verify ckpt --against model.safetensors
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
@source_options
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: Path,
    against: Path | None,
    every: bool,
    ranks: int | None,
    source_rules: Path | None,
    as_json: bool,
) -> None:
    """Check that every byte of CKPT is there and, where digests were saved, as it was saved.

    Boxes tile every tensor, files are whole, replicas agree. Exits with 3 at a flaw.
    """
    source = open_source(checkpoint, ranks, source_rules)
    report = verify_checkpoint(source, every=every)
    flaws = list(report.flaws)
    if against is not None:
        for difference in diff_checkpoints(source, against):
            flaws.append(f"tensor {difference.name!r} {difference.problem}")
            if not every:
                raise CheckpointError(f"{checkpoint} and {against}: {flaws[-1]}")
    if as_json:
        click.echo(json.dumps({**report.to_json(), "flaws": flaws}))
    else:
        for flaw in flaws:
            click.echo(flaw)
        click.echo(
            f"{checkpoint}: {report.tensors} tensors in {report.boxes} boxes, "
            f"{bytes_text(report.num_bytes)}, {bytes_text(report.digested_bytes)} of them with "
            f"digests; {len(flaws) or 'no'} flaw{'' if len(flaws) == 1 else 's'}"
        )
    if flaws:
        ctx.exit(_FLAWED)

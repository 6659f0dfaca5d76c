"""The command `shardspec diff`."""

import json
from pathlib import Path

import click

from shardspec.checkpoint.diff import diff_checkpoints
from shardspec.cli.paths import CheckpointPath

__all__ = ["command"]

_DIFFERENT = 3


@click.command(
    "diff",
    epilog="""\b
Examples:
  shardspec diff ckpt model.safetensors
  shardspec diff step-100 step-200 --rtol 1e-3 --json
""",
)
@click.argument("a", type=CheckpointPath())
@click.argument("b", type=CheckpointPath())
@click.option("--atol", type=click.FloatRange(0), default=0.0, help="Largest absolute difference.")
@click.option("--rtol", type=click.FloatRange(0), default=0.0, help="Largest one relative to B.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.pass_context
def command(ctx: click.Context, a: Path, b: Path, atol: float, rtol: float, as_json: bool) -> None:
    """Compare two checkpoints or safetensors files tensor by tensor; exits with 3 if they differ.

    Without tolerances bits are compared: equal NaNs are the same, 0 and -0 are not. With any, NaN
    is the same as any NaN.
    """
    found = list(diff_checkpoints(a, b, atol=atol, rtol=rtol))
    if as_json:
        click.echo(json.dumps([difference.to_json() for difference in found]))
    else:
        for difference in found:
            click.echo(f"tensor {difference.name!r} {difference.problem}")
        if not found:
            click.echo("no difference")
    if found:
        ctx.exit(_DIFFERENT)

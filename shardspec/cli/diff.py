"""The command `shardspec diff`."""

import json
from math import isfinite, prod
from pathlib import Path

import click

from shardspec.checkpoint.diff import diff_checkpoints, names_to_compare
from shardspec.checkpoint.select import Choice
from shardspec.cli.checkpoint_options import (
    CheckpointPath,
    choosing_options,
    open_both,
    source_options,
)
from shardspec.cli.options import json_option
from shardspec.cli.output import progress_bar, say
from shardspec.dtypes import item_bytes
from shardspec.text import bytes_text, counted, shown

__all__ = ["command"]

_DIFFERENT = 3


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not isfinite(value):
        raise click.BadParameter(f"{value} is not finite.", ctx, param)
    return value


@click.command(
    "diff",
    epilog="""\b
Examples:
  shardspec diff ckpt model.safetensors
  shardspec diff step-100 step-200 --rtol 1e-3 --json
  shardspec diff ckpt model-bf16.safetensors --rtol 1e-2
  shardspec diff ckpt model.safetensors --include 'model.*' --rename '^model[.]' ''
""",
)
@click.argument("a", type=CheckpointPath())
@click.argument("b", type=CheckpointPath())
@click.option(
    "--atol",
    type=click.FloatRange(0),
    callback=_finite,
    default=0.0,
    metavar="NUMBER",
    help="Largest absolute difference that is none.",
)
@click.option(
    "--rtol",
    type=click.FloatRange(0),
    callback=_finite,
    default=0.0,
    metavar="NUMBER",
    help="Largest one relative to B.",
)
@choosing_options
@source_options
@json_option("Print what was found as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    a: Path,
    b: Path,
    atol: float,
    rtol: float,
    include: tuple[str, ...] | None,
    exclude: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    ranks: int | None,
    source_rules: Path | None,
    as_json: bool,
) -> None:
    """Compare two checkpoints of any formats tensor by tensor; exits with 3 if they differ.

    Without tolerances bits are compared: equal NaNs are the same, 0 and -0 are not. With any, NaN
    is the same as any NaN, and floating point numbers of two dtypes are compared too. Tensors of A
    are chosen and renamed as by merge; what the patterns leave out is not looked for in B.
    """
    one, other = open_both(a, b, ranks, source_rules)
    assert other is not None, "it was named"
    chosen, others = names_to_compare(one, other, Choice(include, exclude, rename))
    with progress_bar(not as_json, "diff") as progress:
        found = list(
            diff_checkpoints(
                one,
                other,
                include=include,
                exclude=exclude,
                rename=rename,
                atol=atol,
                rtol=rtol,
                progress=progress,
            )
        )
    compared = len(chosen.keys() | others)
    if as_json:
        differences = [difference.to_json() for difference in found]
        record = {"a": str(a), "b": str(b), "tensors": compared, "differences": differences}
        say(json.dumps(record))
    elif found:
        for difference in found:
            say(f"tensor {shown(difference.name)} {difference.problem}")
        verb = "differs" if len(found) == 1 else "differ"
        say(f"{len(found)} of {counted(compared, 'tensor')} {verb}")
    else:
        tensors = [one.outline(name) for name in chosen.values()]
        num_bytes = sum(prod(tensor.shape) * item_bytes(tensor.dtype) for tensor in tensors)
        say(f"no difference: {counted(len(tensors), 'tensor')}, {bytes_text(num_bytes)}")
    if found:
        ctx.exit(_DIFFERENT)

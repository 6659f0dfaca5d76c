"""The commands that compare bytes: `shardspec verify` and `shardspec diff`."""

import json
from dataclasses import asdict
from math import isfinite, prod
from pathlib import Path
from typing import Final

import click

from shardspec.checkpoint.select import Choice
from shardspec.checkpoint.verify import (
    VerifyReport,
    diff_checkpoints,
    names_to_compare,
    verify_checkpoint,
)
from shardspec.cli.checkpoint_options import CHECKPOINT, OTHER, ChoiceOptions, SourceOptions
from shardspec.cli.options import Declared, argument, command, flag, json_flag, option
from shardspec.cli.output import path_text, progress_bar, say
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.text import bytes_text, counted, printable, shown

_NOT_THE_SAME: Final = 3
"""Exit code where there are flaws or differences."""


@command
def verify_command(
    *,
    checkpoint: Path = argument(CHECKPOINT),
    against: Path | None = option(
        OTHER,
        "Compare the bits of every tensor with this checkpoint or safetensors file too.",
    ),
    every: bool = flag("List all flaws, not only the first.", "--all"),
    choice: ChoiceOptions,
    source: SourceOptions,
    as_json: bool = json_flag("Print what was found as JSON, all flaws."),
) -> None:
    """Check that every byte of CKPT is there and, where digests were saved, as it was saved.

    Boxes tile every tensor, files are whole, replicas agree. Exits with 3 at a flaw.
    With --against, patterns choose and name the tensors that are compared, as by diff.

    Examples:
      shardspec verify ckpt
      shardspec verify ckpt --all --json
      shardspec verify ckpt --against model.safetensors
      shardspec verify ckpt --against model.safetensors --exclude 'optim.*'
    """
    if against is None and any(vars(choice).values()):
        raise click.UsageError("patterns choose what is compared; give --against too")
    every |= as_json
    catalog, *others = source.open(checkpoint, against)
    with progress_bar(not as_json, "verify") as progress:
        report = verify_checkpoint(catalog, every=every, progress=progress)
    flaws = list(report.flaws)
    for other in others:
        with progress_bar(not as_json, "compare") as progress:
            for difference in diff_checkpoints(
                catalog, other, **choice.arguments(), progress=progress
            ):
                flaws.append(f"tensor {shown(difference.name)} {difference.problem}")
                if not every:
                    raise CheckpointError(f"{checkpoint} and {against}: {flaws[-1]}")
    if as_json:
        say(json.dumps({**report.to_json(), "flaws": flaws}))
    else:
        for flaw in flaws:
            say(printable(flaw))
        chosen = "what was chosen is " if choice.include or choice.exclude else ""
        same = "" if against is None or flaws else f", and {chosen}the same as {path_text(against)}"
        say(
            f"{path_text(checkpoint)}: {counted(report.tensors, 'tensor')} in "
            f"{counted(report.boxes, 'box', 'boxes')}, {bytes_text(report.num_bytes)}, "
            f"{_digests(report)}; {counted(len(flaws), 'flaw') if flaws else 'no flaws'}{same}"
        )
    if flaws:
        click.get_current_context().exit(_NOT_THE_SAME)


def _digests(report: VerifyReport) -> str:
    """Say how much of what was read could be compared with what was saved."""
    if report.digested_bytes == report.num_bytes:
        return "all with digests"
    if report.digested_bytes:
        return f"{bytes_text(report.digested_bytes)} of them with digests"
    return "none with digests, so that changed bytes cannot be told"


def _tolerance(text: str) -> Declared:
    def finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
        if not isfinite(value):
            raise click.BadParameter(f"{value} is not finite", ctx, param)
        return value

    return option("NUMBER", text, type=click.FloatRange(0), callback=finite, default=0.0)


@command
def diff_command(
    *,
    a: Path = argument(CHECKPOINT._replace(name="A")),
    b: Path = argument(CHECKPOINT._replace(name="B")),
    atol: float = _tolerance("Largest absolute difference that is none."),
    rtol: float = _tolerance("Largest one relative to B."),
    choice: ChoiceOptions,
    source: SourceOptions,
    as_json: bool = json_flag("Print what was found as JSON."),
) -> None:
    """Compare two checkpoints of any formats tensor by tensor; exits with 3 if they differ.

    Without tolerances bits are compared: equal NaNs are the same, 0 and -0 are not. With any, NaN
    is the same as any NaN, and floating point numbers of two dtypes are compared too. Tensors of A
    are chosen and renamed as by merge; what the patterns leave out is not looked for in B.

    Examples:
      shardspec diff ckpt model.safetensors
      shardspec diff step-100 step-200 --rtol 1e-3 --json
      shardspec diff ckpt model-bf16.safetensors --rtol 1e-2
      shardspec diff ckpt model.safetensors --include 'model.*' --rename '^model[.]' ''
    """
    one, other = source.open(a, b)
    chosen, others = names_to_compare(one, other, Choice(**choice.arguments()))
    with progress_bar(not as_json, "diff") as progress:
        compared = diff_checkpoints(
            one, other, **choice.arguments(), atol=atol, rtol=rtol, progress=progress
        )
        found = list(compared)
    count = len(chosen.keys() | others)
    if as_json:
        differences = list(map(asdict, found))
        places = {"a": str(a), "b": str(b)}
        say(json.dumps({**places, "tensors": count, "differences": differences}))
    elif found:
        for difference in found:
            say(f"tensor {shown(difference.name)} {difference.problem}")
        say(f"{len(found)} of {counted(count, 'tensor')} differ{'s' if len(found) == 1 else ''}")
    else:
        tensors = [one.outline(name) for name in chosen.values()]
        num_bytes = sum(prod(tensor.shape) * item_bytes(tensor.dtype) for tensor in tensors)
        say(f"no difference: {counted(len(tensors), 'tensor')}, {bytes_text(num_bytes)}")
    if found:
        click.get_current_context().exit(_NOT_THE_SAME)

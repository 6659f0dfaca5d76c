"""The commands `shardspec delta make` and `delta apply`, for changes between checkpoints."""

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import click

from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.command import Command, CommandGroup, Option, refuse_if
from shardspec.cli.output import path_text, progress_bar, say, say_json
from shardspec.text import bytes_text, counted

if TYPE_CHECKING:
    from shardspec.checkpoint.deltas.make import Checksum

_CHECKSUMS: "Final[dict[str, Checksum]]" = {"slime": "xxh3-128", "modelexpress": "adler32"}
"""Reader of deltas -> the checksum that it expects."""


@click.group(cls=CommandGroup)
def delta_command() -> None:
    """Write the changes from one checkpoint to the next, and apply them."""


@delta_command.command("make", cls=Command)
@click.argument("base", type=ckpt.CHECKPOINT, metavar="BASE")
@click.argument("new", type=ckpt.CHECKPOINT, metavar="NEW")
@opts.output.but("The directory or URL to write, as weight_v000001.", type=ckpt.OUTPUT)
@Option(
    "version",
    "Output",
    "Version of NEW.",
    {"type": click.IntRange(0, 999_999), "required": True},
)
@Option(
    "base_version",
    "Output",
    "Version of BASE; by default --version minus 1.",
    {"type": click.IntRange(0, 999_999)},
)
@Option(
    "reader",
    "Output",
    "The reader: checksums are xxh3-128 for slime, adler32 for ModelExpress.",
    {"type": click.Choice(list(_CHECKSUMS)), "default": "slime", "show_default": True},
    ("--for",),
)
@Option(
    "encoding",
    "Output",
    "How changes are encoded: as XOR, or as positions and values, which only slime reads.",
    {"type": click.Choice(("xor", "overwrite")), "default": "xor", "show_default": True},
)
@ckpt.compared_map_options
@ckpt.source_options
@opts.overwrite
@opts.as_json.but("Print what was written as JSON.")
def make_command(
    base: PurePath,
    new: PurePath,
    output: PurePath,
    reader: str,
    maps: ckpt.MapOptions,
    source: ckpt.SourceOptions,
    as_json: bool,
    **how: Any,  # noqa: ANN401  # as `delta` takes it
) -> None:
    """Write the changes from the checkpoint BASE to NEW, as slime and ModelExpress read them.

    Both may be of any format and sharding. If NEW has other names than BASE, a map or a model gives
    its tensors those of BASE.

    Examples:
      shardspec delta make model step_1 -o weight_v000001 --version 1
      shardspec delta make model step_1 -o weight_v000001 --version 1 --for modelexpress
      shardspec delta make hf iter_0000100 -o weight_v000001 --version 1 --model hf
    """
    from shardspec.checkpoint.convert.select import Choice, mapped_choice
    from shardspec.checkpoint.deltas.make import delta

    wrong = reader == "modelexpress" and how["encoding"] != "xor"
    refuse_if(wrong, "ModelExpress reads the encoding xor alone")
    before, after = source.open(base, new)
    renamed, _ = mapped_choice(after, maps.read(after.home), Choice(drop=maps.drop))
    with progress_bar(not as_json, "delta") as progress:
        checksum = _CHECKSUMS[reader]
        report = delta(before, renamed, output, checksum=checksum, progress=progress, **how)
    if as_json:
        say_json(report.to_json())
        return
    share = report.written_bytes / max(1, report.num_bytes)
    say(
        f"{path_text(output)}: {report.changed} of {counted(report.tensors, 'tensor')} changed, "
        f"{bytes_text(report.written_bytes)} for {bytes_text(report.num_bytes)} ({share:.2%}), "
        f"digest {report.digest}"
    )


@delta_command.command("apply", cls=Command)
@click.argument("base", type=ckpt.CHECKPOINT, metavar="BASE")
@click.argument("deltas", type=ckpt.CHECKPOINT, metavar="DELTA...", nargs=-1, required=True)
@opts.output.but(
    "The file to write if it ends in .safetensors, else a directory.",
    type=opts.PLACE,
    metavar="OUT",
)
@opts.threads.but(default=1)
@ckpt.source_options
@opts.overwrite
@opts.as_json.but("Print what was written as JSON.")
def apply_command(
    base: PurePath,
    deltas: tuple[PurePath, ...],
    output: str,
    threads: int,
    source: ckpt.SourceOptions,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint BASE with deltas applied in order; OUT appears when it is complete.

    Versions must follow each other, and checksums must match. If shardspec wrote the deltas, BASE
    must be the checkpoint from which the first one was made.

    Examples:
      shardspec delta apply model weight_v000001 weight_v000002 -o model_v2
      shardspec delta apply model.safetensors weight_v000001 -o new.safetensors --threads 2
    """
    from shardspec.checkpoint.deltas.make import apply_delta

    (catalog,) = source.open(base)
    with progress_bar(not as_json, "apply") as progress:
        report = apply_delta(
            catalog, deltas, output, threads=threads, overwrite=overwrite, progress=progress
        )
    if as_json:
        say_json(report.to_json())
    else:
        what = f"{counted(report.tensors, 'tensor')}, {bytes_text(report.num_bytes)}"
        on = f"{counted(len(deltas), 'delta')} on {path_text(base)}"
        say(f"{path_text(output)}: {what}, with {on}")

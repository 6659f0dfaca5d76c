"""The commands about deltas between checkpoints: `shardspec delta` and `shardspec apply`."""

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

import click

from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.output import path_text, progress_bar, say, say_json
from shardspec.text import bytes_text, counted

if TYPE_CHECKING:
    from shardspec.checkpoint.deltas.make import Checksum, Encoding

_CHECKSUMS: "Final[dict[str, Checksum]]" = {"slime": "xxh3-128", "modelexpress": "adler32"}
"""The readers of deltas, and the checksum that each expects."""


@click.command(cls=opts.Command)
@click.argument("base", type=ckpt.CHECKPOINT, metavar="BASE")
@click.argument("new", type=ckpt.CHECKPOINT, metavar="NEW")
@opts.output_option(
    "The directory to write, as weight_v000001.", type=opts.STORED_FILE, required=True
)
@click.option("--version", type=click.IntRange(0, 999_999), required=True, help="That of NEW.")
@click.option(
    "--base-version",
    type=click.IntRange(0, 999_999),
    help="That of BASE; by default the one before.",
)
@click.option(
    "--for",
    "reader",
    type=click.Choice(list(_CHECKSUMS)),
    default="slime",
    show_default=True,
    help="The reader: checksums are xxh3-128 for slime, adler32 for ModelExpress.",
)
@click.option(
    "--encoding",
    type=click.Choice(("xor", "overwrite")),
    default="xor",
    show_default=True,
    help="How changes are encoded: as XOR, or as positions and values, which only slime reads.",
)
@ckpt.map_options
@ckpt.source_options
@opts.overwrite_option
@opts.json_option("Print what was written as JSON.")
def delta_command(
    base: PurePath,
    new: PurePath,
    output: PurePath,
    version: int,
    base_version: int | None,
    reader: str,
    encoding: "Encoding",
    maps: ckpt.MapOptions,
    source: ckpt.SourceOptions,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the changes from the checkpoint BASE to NEW, as slime and ModelExpress read them.

    Both may be of any format and sharding. If NEW has other names than BASE, a map or a model gives
    its tensors those of BASE.

    Examples:
      shardspec delta model step_1 -o weight_v000001 --version 1
      shardspec delta model step_1 -o weight_v000001 --version 1 --for modelexpress
      shardspec delta hf iter_0000100 -o weight_v000001 --version 1 --map llama-megatron-to-hf
    """
    from shardspec.checkpoint.deltas.make import delta
    from shardspec.checkpoint.select.choice import Choice
    from shardspec.checkpoint.select.mapped import mapped_choice

    opts.refuse_if(
        reader == "modelexpress" and encoding != "xor", "ModelExpress reads the encoding xor alone"
    )
    before, after = source.open(base, new)
    renamed, _ = mapped_choice(after, maps.read(after.home), Choice(drop=maps.drop))
    with progress_bar(not as_json, "delta") as progress:
        report = delta(
            before,
            renamed,
            output,
            version=version,
            base_version=base_version,
            encoding=encoding,
            checksum=_CHECKSUMS[reader],
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        say_json(report.to_json())
        return
    share = report.written_bytes / max(1, report.num_bytes)
    say(
        f"{path_text(output)}: {report.changed} of {counted(report.tensors, 'tensor')} changed, "
        f"{bytes_text(report.written_bytes)} for {bytes_text(report.num_bytes)} ({share:.2%}), "
        f"digest {report.digest}"
    )


@click.command(cls=opts.Command)
@click.argument("base", type=ckpt.CHECKPOINT, metavar="BASE")
@click.argument("deltas", type=opts.STORED_FILE, metavar="DELTA...", nargs=-1, required=True)
@opts.output_option(
    "The file to write if it ends in .safetensors, else a directory.",
    type=str,
    metavar="OUT",
    required=True,
)
@click.option("--threads", metavar="N", type=click.IntRange(1), default=1, help="Copy with N.")
@ckpt.source_options
@opts.overwrite_option
@opts.json_option("Print what was written as JSON.")
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

    Versions must follow each other and checksums match. Of deltas that shardspec has written, BASE
    must be the checkpoint that the first one was made from.

    Examples:
      shardspec apply model weight_v000001 weight_v000002 -o model_v2
      shardspec apply model.safetensors weight_v000001 -o new.safetensors --threads 2
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

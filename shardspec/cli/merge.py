"""The command `shardspec merge`."""

from pathlib import Path, PurePath
from typing import Final, Unpack

import click

from shardspec.checkpoint.coordinate import Member
from shardspec.checkpoint.merge import MERGED_FORMATS, MergedFormat, merge
from shardspec.checkpoint.write import WriteReport
from shardspec.cli.arguments import parse_bytes, parsed
from shardspec.cli.check_map import map_options, maps_of
from shardspec.cli.checkpoint_options import (
    CheckpointPath,
    WritingOptions,
    open_both,
    output_option,
    source_options,
    writing_options,
)
from shardspec.cli.output import Progress, write_report
from shardspec.text import shown

__all__ = ["command"]

_KNOWN_SUFFIXES: Final = ("", ".safetensors", ".pt", ".pth", ".bin")


def _size(text: str) -> int:
    size = parse_bytes(text)
    if not size:
        raise ValueError("files of no bytes hold nothing")
    return size


@click.command(
    "merge",
    epilog="""\b
Examples:
  shardspec merge ckpt -o model.safetensors
  shardspec merge ckpt -o model.safetensors --dtype bf16 --exclude 'optim.*'
  shardspec merge ckpt -o model --max-shard-size 5GB --threads 2
  shardspec merge ckpt -o model.pt
  shardspec merge ckpt -o model.safetensors --force --json
  torchrun --nproc_per_node 4 -m shardspec merge ckpt -o model.safetensors
""",
)
@click.argument("checkpoint", type=CheckpointPath(), metavar="CKPT")
@output_option("The file to write; a directory for the formats huggingface and dcp.")
@click.option(
    "--to",
    "form",
    type=click.Choice(MERGED_FORMATS),
    help="The format of OUT: one safetensors file (default), safetensors files with an index "
    "(default with --max-shard-size, or if OUT ends in /), a file for torch.load (default if OUT "
    "ends in .pt, .pth or .bin), or a directory for torch.distributed.checkpoint.",
)
@click.option(
    "--max-shard-size",
    "max_shard_bytes",
    callback=parsed(_size),
    metavar="SIZE",
    help="Most bytes of tensors in a file, as 5GB or 500MiB.",
)
@click.option(
    "--no-metadata",
    "metadata",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Leave out what safetensors files say in their metadata.",
)
@map_options
@source_options
@writing_options
def command(
    checkpoint: Path,
    output: str,
    form: MergedFormat | None,
    max_shard_bytes: int | None,
    metadata: bool,
    map_: str | None,
    sizes: Path | None,
    reverse_map: bool,
    ranks: int | None,
    source_rules: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Unpack[WritingOptions],
) -> None:
    """Write the whole tensors of the checkpoint CKPT into one file, or files of a limited size.

    CKPT may be of any format that can be read. Checks first that what describes it agrees with its
    files, that the boxes of every tensor tile it and that boxes stored twice agree; finishes
    pending reductions. OUT appears when it is complete and was read again.
    """
    suffix = "" if output.endswith("/") else PurePath(output).suffix.lower()
    if form is None and max_shard_bytes is None and suffix not in _KNOWN_SUFFIXES:
        raise click.UsageError(
            f"{shown(output)}: no format is known whose files end in {shown(suffix)}; give --to "
            f"({', '.join(MERGED_FORMATS)}), or a name that ends in .safetensors or .pt"
        )

    names = maps_of({"map_": map_, "sizes": sizes, "reverse_map": reverse_map})

    def written(progress: Progress | None, member: Member | None) -> WriteReport:
        return merge(
            open_both(checkpoint, None, ranks, source_rules)[0],
            output,
            format=form,
            max_shard_bytes=max_shard_bytes,
            metadata=metadata,
            names=names,
            progress=progress,
            member=member,
            **options,
        )

    write_report("merge", written, as_json=as_json, quiet=quiet)

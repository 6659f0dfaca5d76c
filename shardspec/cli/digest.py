"""The command `shardspec digest`."""

from pathlib import PurePath
from typing import Any

import click

from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.output import path_text, progress_bar, say, say_json
from shardspec.text import bytes_text, counted


@click.command(cls=opts.Command)
@click.argument("checkpoint", type=ckpt.CHECKPOINT, metavar="CKPT")
@opts.output_option("A file for the digest of every tensor; 'shardspec verify' takes it.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    help="Choose other keys; digests are compared with those of the same seed.",
)
@ckpt.map_options
@ckpt.source_options
@ckpt.choice_options
@opts.overwrite_option
@opts.json_option("Print all digests as JSON.")
def digest_command(
    checkpoint: PurePath,
    output: PurePath | None,
    seed: int,
    maps: ckpt.MapOptions,
    source: ckpt.SourceOptions,
    choice: dict[str, Any],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Digest the tensors of the checkpoint CKPT, whatever its format and sharding.

    Equal weights have equal digests: sharded or merged, in any format and, by way of a map, under
    the names of another model. Prints one value of all tensors. Digests detect accidents; they are
    not signatures.

    Examples:
      shardspec digest ckpt
      shardspec digest ckpt -o digests.json
      shardspec digest megatron_ckpt --map llama-hf-to-megatron --reverse-map --sizes config.json
    """
    from shardspec.checkpoint.digest import check_digests_file, digest, write_digests
    from shardspec.checkpoint.storage.from_text import storage_path

    place = None if output is None else storage_path(output)
    if place is not None:
        check_digests_file(place, None, overwrite=overwrite)
    names = maps.read() or None
    (catalog,) = source.open(checkpoint)
    with progress_bar(not as_json, "digest") as progress:
        found = digest(catalog, names=names, drop=maps.drop, seed=seed, progress=progress, **choice)
    if place is not None:
        write_digests(place, found, overwrite=overwrite)
    if as_json:
        say_json(found.to_json())
    else:
        size = bytes_text(sum(one.num_bytes for one in found.values()))
        what = f"{counted(len(found), 'tensor')}, {size}"
        say(f"{path_text(checkpoint)}: {what}, digest {found.value}")

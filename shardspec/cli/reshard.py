"""The command `shardspec reshard`."""

from pathlib import Path
from typing import Unpack

import click

from shardspec.checkpoint.coordinate import Member
from shardspec.checkpoint.reshard import RESHARDED_FORMATS, ReshardedFormat, read_rules, reshard
from shardspec.checkpoint.write import WriteReport
from shardspec.cli.arguments import MeshShape, parse_mesh, parsed
from shardspec.cli.check_map import map_options, maps_of
from shardspec.cli.checkpoint_options import (
    CheckpointPath,
    WritingOptions,
    open_both,
    output_option,
    rules_option,
    source_options,
    writing_options,
)
from shardspec.cli.options import plain_mesh
from shardspec.cli.output import Progress, say, write_report

__all__ = ["command"]


@click.command(
    "reshard",
    epilog="""\b
Examples:
  shardspec reshard ckpt -o cut --mesh 4x2 --rules rules.toml
  shardspec reshard model.safetensors -o cut --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),R]'
  shardspec reshard ckpt -o cut --like other_ckpt
  shardspec reshard ckpt -o cut --mesh 2 --rules r.toml --map llama-hf-to-fused --sizes config.json
  shardspec reshard zero_run -o universal --to deepspeed-universal

\b
A file of rules has a line for each pattern of names:
  "*.up.weight" = "[S1,R]"
  "*.down.weight" = "[R,S1]"
What no rule matches is kept whole on every device.
""",
)
@click.argument("checkpoint", type=CheckpointPath(), metavar="CKPT")
@output_option("The directory to write.")
@click.option(
    "--mesh",
    callback=parsed(parse_mesh),
    metavar="SHAPE",
    help="Devices to cut for, outermost axis first: 2x4, or with names dp=2,tp=4.",
)
@rules_option("--rules", "rules_file", "TOML file with name patterns and specs.")
@click.option(
    "--rule",
    "rule_pairs",
    multiple=True,
    nargs=2,
    metavar="PATTERN SPEC",
    help="One more rule; may be given several times.",
)
@click.option(
    "--like",
    type=CheckpointPath(),
    metavar="OTHER",
    help="Cut as this checkpoint is, which says its mesh and specs.",
)
@click.option(
    "--to",
    "form",
    type=click.Choice(RESHARDED_FORMATS),
    default="shardspec",
    show_default=True,
    help="The format of OUT: shardspec's own, that of torch.distributed.checkpoint, or of "
    "a run of DeepSpeed's ZeRO its Universal Checkpoint, for any number of ranks.",
)
@map_options
@source_options
@writing_options
def command(
    checkpoint: Path,
    output: str,
    mesh: MeshShape | None,
    rules_file: Path | None,
    rule_pairs: tuple[tuple[str, str], ...],
    like: Path | None,
    form: ReshardedFormat,
    map_: str | None,
    sizes: Path | None,
    reverse_map: bool,
    ranks: int | None,
    source_rules: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Unpack[WritingOptions],
) -> None:
    """Write the checkpoint CKPT as the ranks of another mesh would have saved it.

    CKPT may be of any format that can be read; pending reductions are finished. OUT appears when it
    is complete and was read again.
    """
    universal = form == "deepspeed-universal"
    if universal and (mesh is not None or like is not None or rules_file or rule_pairs):
        raise click.UsageError(
            "a Universal Checkpoint is for any number of ranks; leave out --mesh, --rules, --rule "
            "and --like"
        )
    if not universal and (mesh is None) == (like is None):
        raise click.UsageError("give either --mesh, with rules, or --like")
    if like is not None and (rules_file is not None or rule_pairs):
        raise click.UsageError("--like says how to cut; leave out --rules and --rule")
    rules = dict(rule_pairs)
    if rules_file is not None:
        rules = {**read_rules(rules_file), **rules}

    names = maps_of({"map_": map_, "sizes": sizes, "reverse_map": reverse_map})

    def written(progress: Progress | None, member: Member | None) -> WriteReport:
        source, pattern = open_both(checkpoint, like, ranks, source_rules)
        return reshard(
            source,
            output,
            device_mesh=None if mesh is None else plain_mesh(mesh),
            rules=None if universal or like is not None else rules,
            like=pattern,
            format=form,
            names=names,
            progress=progress,
            member=member,
            **options,
        )

    write_report("reshard", written, as_json=as_json, quiet=quiet)
    if not universal and like is None and not rules and not quiet:
        say("note: no rules were given, so every tensor is whole on every device", err=True)

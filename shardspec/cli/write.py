"""The commands that write checkpoints: `shardspec merge` and `shardspec reshard`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

import click

from shardspec.checkpoint.convert import (
    MERGED_FORMATS,
    RESHARDED_FORMATS,
    MergedFormat,
    ReshardedFormat,
    merge,
    reshard,
)
from shardspec.checkpoint.coordinate import Member
from shardspec.checkpoint.write import WriteReport
from shardspec.cli.arguments import MESH, Kind, MeshShape, parse_bytes
from shardspec.cli.checkpoint_options import (
    CHECKPOINT,
    OTHER,
    ChoiceOptions,
    MapOptions,
    RuleOptions,
    SourceOptions,
)
from shardspec.cli.options import (
    Declared,
    argument,
    command,
    flag,
    json_flag,
    option,
    overwrite_flag,
    plain_mesh,
    unless,
)
from shardspec.cli.output import path_text, progress_bar, say
from shardspec.text import bytes_text, counted, rate_text, seconds_text, shown

_KNOWN_SUFFIXES: Final = ("", ".safetensors", ".pt", ".pth", ".bin")
_SHOWN: Final = 3
"""Names of what was left out."""


@dataclass(frozen=True, kw_only=True)
class _HowToWrite:
    """Options of both commands, by the names that the library gives them."""

    dtype: str | None = option("DTYPE", "Cast floating point tensors to this dtype, as bf16.")
    threads: int = option("N", "Write N files at once.", type=click.IntRange(1), default=1)
    strict_cast: bool = flag(
        "Refuse a cast that turns numbers into infinity, 0 or NaN; else they are counted."
    )
    overwrite: bool = overwrite_flag()
    verify: bool = unless(
        "Do not compare bytes with the digests that were saved, nor read OUT again."
    )
    reread: bool = unless(
        "Compare bytes with the digests that were saved, but do not read OUT again."
    )
    dry_run: bool = flag("Check what describes CKPT, say what would be done, and stop.")
    sidecars: bool = unless(
        "Leave behind what lies beside the weights, such as config.json and a tokenizer."
    )


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What `merge` and `reshard` have in common, but for the target."""

    map: MapOptions
    source: SourceOptions
    choice: ChoiceOptions
    how: _HowToWrite
    as_json: bool = json_flag("Print what was written as JSON.")
    quiet: bool = flag("Print nothing but errors.")


def _write(title: str, options: _Options, convert: Callable[..., WriteReport]) -> None:
    """Have a checkpoint written, with a bar while that takes time, and say what was written."""
    names, member = options.map.read(), Member.of_environment()
    # Of several processes the first one says it.
    quiet = options.quiet or (member is not None and member.rank > 0)
    with progress_bar(not (quiet or options.as_json), title) as progress:
        report = convert(
            names=names,
            progress=progress,
            member=member,
            **options.choice.arguments(),
            **vars(options.how),
        )
    if not quiet:
        say(json.dumps(report.to_json()) if options.as_json else _report_text(report))


def _report_text(report: WriteReport) -> str:
    what = f"{counted(report.tensors, 'tensor')}, {bytes_text(report.num_bytes)}"
    if len(report.files) > 1:
        what += f" in {len(report.files)} files"
    if report.written:
        rate = rate_text(report.num_bytes / max(report.seconds, 1e-9))
        digest = "" if report.crc32 is None else f", CRC-32 {report.crc32:08x}"
        did = f"{what} in {seconds_text(report.seconds)} ({rate}){digest}"
    else:
        did = (
            f"would hold {what}; {bytes_text(report.read_bytes)} of "
            f"{counted(report.read_files, 'file')} in the format of {report.read} would be read"
        )
    lines = [f"{path_text(report.path)}: {did}"]
    if report.cast_losses:
        lines.append(f"numbers that the cast did not keep: {report.cast_losses}")
    if report.left_out:
        some = ", ".join(map(shown, report.left_out[:_SHOWN]))
        rest = len(report.left_out) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"left out: {some}{more}; 'shardspec inspect' says what they are")
    if report.sidecars:
        lines.append(f"along with it: {', '.join(map(shown, report.sidecars))}")
    return "\n".join(lines)


def _output_option(text: str) -> Declared:
    return option("OUT", text, "-o", "--output", required=True)


def _size(text: str) -> int:
    size = parse_bytes(text)
    if not size:
        raise ValueError("files of no bytes hold nothing")
    return size


@command
def merge_command(
    *,
    checkpoint: Path = argument(CHECKPOINT),
    output: str = _output_option(
        "The file to write; a directory for the formats huggingface and dcp."
    ),
    to: MergedFormat | None = option(
        click.Choice(MERGED_FORMATS),
        "The format of OUT: one safetensors file (default), safetensors files with an index "
        "(default with --max-shard-size, or if OUT ends in /), a file for torch.load (default if "
        "OUT ends in .pt, .pth or .bin), or a directory for torch.distributed.checkpoint.",
    ),
    max_shard_size: int | None = option(
        Kind("SIZE", _size), "Most bytes of tensors in a file, as 5GB or 500MiB."
    ),
    metadata: bool = unless("Leave out what safetensors files say in their metadata."),
    options: _Options,
) -> None:
    """Write the whole tensors of the checkpoint CKPT into one file, or files of a limited size.

    CKPT may be of any format that can be read. Checks first that what describes it agrees with its
    files, that the boxes of every tensor tile it and that boxes stored twice agree; finishes
    pending reductions. OUT appears when it is complete and was read again.

    Examples:
      shardspec merge ckpt -o model.safetensors
      shardspec merge ckpt -o model.safetensors --dtype bf16 --exclude 'optim.*'
      shardspec merge ckpt -o model --max-shard-size 5GB --threads 2
      shardspec merge ckpt -o model.pt
      shardspec merge ckpt -o model.safetensors --force --json
      torchrun --nproc_per_node 4 -m shardspec merge ckpt -o model.safetensors
    """
    limit = max_shard_size
    suffix = "" if output.endswith("/") else PurePath(output).suffix.lower()
    if to is None and limit is None and suffix not in _KNOWN_SUFFIXES:
        raise click.UsageError(
            f"{shown(output)}: no format is known whose files end in {shown(suffix)}; give --to "
            f"({', '.join(MERGED_FORMATS)}), or a name that ends in .safetensors or .pt"
        )

    def convert(**more: Declared) -> WriteReport:
        (source,) = options.source.open(checkpoint, quiet=options.quiet)
        return merge(source, output, format=to, max_shard_bytes=limit, metadata=metadata, **more)

    _write("merge", options, convert)


@command
def reshard_command(
    *,
    checkpoint: Path = argument(CHECKPOINT),
    output: str = _output_option("The directory to write."),
    mesh: MeshShape | None = option(
        MESH, "Devices to cut for, outermost axis first: 2x4, or with names dp=2,tp=4."
    ),
    rules: RuleOptions,
    like: Path | None = option(OTHER, "Cut as this checkpoint is, which says its mesh and specs."),
    to: ReshardedFormat = option(
        click.Choice(RESHARDED_FORMATS),
        "The format of OUT: shardspec's own, that of torch.distributed.checkpoint, or of a run of "
        "DeepSpeed's ZeRO its Universal Checkpoint, for any number of ranks.",
        default="shardspec",
        show_default=True,
    ),
    options: _Options,
) -> None:
    """Write the checkpoint CKPT as the ranks of another mesh would have saved it.

    CKPT may be of any format that can be read; pending reductions are finished. OUT appears when it
    is complete and was read again.

    Examples:
      shardspec reshard ckpt -o cut --mesh 4x2 --rules rules.toml
      shardspec reshard model.safetensors -o cut --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),R]'
      shardspec reshard ckpt -o cut --like other_ckpt
      shardspec reshard ckpt -o cut --mesh 2 --rules r.toml --map llama-hf-to-fused --sizes c.json
      shardspec reshard zero_run -o universal --to deepspeed-universal

    A file of rules has a line for each pattern of names:
      "*.up.weight" = "[S1,R]"
      "*.down.weight" = "[R,S1]"
    What no rule matches is kept whole on every device.
    """
    cuts = rules.rules is not None or bool(rules.rule)
    universal = to == "deepspeed-universal"
    if universal and (mesh is not None or like is not None or cuts):
        raise click.UsageError(
            "a Universal Checkpoint is for any number of ranks; leave out --mesh, --rules, --rule "
            "and --like"
        )
    if not universal and (mesh is None) == (like is None):
        raise click.UsageError("give either --mesh, with rules, or --like")
    if like is not None and cuts:
        raise click.UsageError("--like says how to cut; leave out --rules and --rule")
    specs = rules.read()

    def convert(**more: Declared) -> WriteReport:
        source, *others = options.source.open(checkpoint, like, quiet=options.quiet)
        return reshard(
            source,
            output,
            device_mesh=None if mesh is None else plain_mesh(mesh),
            rules=None if mesh is None else specs,
            like=others[0] if others else None,
            format=to,
            **more,
        )

    _write("reshard", options, convert)
    if mesh is not None and not specs and not options.quiet:
        say("note: no rules were given, so every tensor is whole on every device", err=True)

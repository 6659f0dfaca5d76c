"""The commands for whole models: `shardspec merge`, `reshard`, `check-map` and `plan-state`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

import click

from shardspec.checkpoint import convert as conversion
from shardspec.checkpoint.convert import WriteReport
from shardspec.checkpoint.coordinate import Member
from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.options import argument, command, flag, option, unless
from shardspec.cli.output import path_text, progress_bar, say, say_json
from shardspec.errors import InputFileError, LayoutError
from shardspec.mesh import DeviceMesh
from shardspec.text import (
    bytes_text,
    counted,
    printable,
    rate_text,
    seconds_text,
    shown,
    table_text,
)

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog
    from shardspec.resharding.maps import MapReport
    from shardspec.resharding.name_map import NameMap

_KNOWN_SUFFIXES: Final = ("", ".safetensors", ".pt", ".pth", ".bin")
_SHOWN: Final = 3
"""Names of what was left out."""
_SHOWN_BESIDE: Final = 10
"""Names of what was not copied."""
_MOST_ROWS: Final = 32
"""Files in a table."""


def _usable_cores() -> int:
    """Return this process's share of the cores that it may use, 4 at most."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun
    share = int(processes) if processes.isdecimal() else 1
    return max(1, min(4, len(os.sched_getaffinity(0)) // max(1, share)))


@dataclass(frozen=True, kw_only=True)
class _HowToWrite:
    """Options of both commands, by the names that the library gives them."""

    dtype: str | None = option("DTYPE", "Cast floating point tensors to this dtype, as bf16.")
    threads: int = option(
        "N",
        "Copy with N threads; by default one a usable core, 4 at most.",
        type=click.IntRange(1),
        default=_usable_cores(),
    )
    strict_cast: bool = flag(
        "Refuse a cast that turns numbers into infinity, 0 or NaN; else they are counted."
    )
    overwrite: bool = opts.overwrite_flag()
    verify: bool = unless(
        "Do not compare bytes with the digests that were saved, nor read OUT again."
    )
    reread: bool = unless(
        "Compare bytes with the digests that were saved, but do not read OUT again."
    )
    dry_run: bool = flag("Check the headers of CKPT, say what would be done, and stop.")
    sidecars: bool = unless(
        "Do not copy the files next to the weights, such as config.json and a tokenizer."
    )


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What `merge` and `reshard` have in common, but for the target."""

    map: ckpt.MapOptions
    source: ckpt.SourceOptions
    choice: ckpt.ChoiceOptions
    how: _HowToWrite
    as_json: bool = opts.json_flag("Print what was written as JSON.")
    quiet: bool = flag("Print nothing but errors.")


def _write(title: str, options: _Options, convert: Callable[..., WriteReport]) -> None:
    """Have a checkpoint written, with a bar while that takes time, and say what was written."""
    names, member = options.map.read(), Member.of_environment()
    # Of several processes the first one says it.
    quiet = options.quiet or (member is not None and member.rank > 0)
    with progress_bar(not (quiet or options.as_json), title) as progress:
        report = convert(
            names=names or None,
            drop=options.map.drop,
            progress=progress,
            member=member,
            **options.choice.arguments(),
            **vars(options.how),
        )
    if options.as_json and not quiet:
        say_json(report.to_json())
    elif not quiet:
        say(_report_text(report))


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
    if not report.written:
        ends = (report.reads.items(), "read"), (report.writes.items(), "written")
        for files, did in ends:
            rows = [[path_text(name), bytes_text(size)] for name, size in islice(files, _MOST_ROWS)]
            if len(files) > _MOST_ROWS:
                rows.append([f"… and {len(files) - _MOST_ROWS} more", ""])
            lines.append(table_text(["file", did], rows))
    if report.cast_losses:
        lines.append(f"numbers that the cast did not keep: {report.cast_losses}")
    if report.left_out:
        some = ", ".join(map(shown, report.left_out[:_SHOWN]))
        rest = len(report.left_out) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"left out: {some}{more}; 'shardspec inspect' says what they are")
    if report.not_copied:
        some = ", ".join(map(shown, report.not_copied[:_SHOWN_BESIDE]))
        rest = len(report.not_copied) - _SHOWN_BESIDE
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"not copied, though it lies beside the weights: {some}{more}")
    if report.sidecars:
        lines.append(f"also copied: {', '.join(map(printable, report.sidecars))}")
    return "\n".join(lines)


def _size(text: str) -> int:
    size = opts.parse_bytes(text)
    if not size:
        raise ValueError("files of no bytes hold nothing")
    return size


@command
def merge_command(
    *,
    checkpoint: Path = argument(ckpt.CHECKPOINT),
    output: str = opts.output_option(
        "The file to write; a directory for the formats huggingface and dcp.", "OUT", required=True
    ),
    to: conversion.MergedFormat | None = option(
        click.Choice(conversion.MERGED_FORMATS),
        "The format of OUT: one safetensors file (default), safetensors files with an index "
        "(default with --max-shard-size, or if OUT ends in /), a file for torch.load (default if "
        "OUT ends in .pt, .pth or .bin), or a directory for torch.distributed.checkpoint.",
    ),
    max_shard_size: int | None = option(
        opts.Kind("SIZE", _size), "Most bytes of tensors in a file, as 5GB or 500MiB."
    ),
    metadata: bool = unless("Leave out what safetensors files say in their metadata."),
    options: _Options,
) -> None:
    """Write the global tensors of the checkpoint CKPT into one file, or files of a limited size.

    CKPT may be of any format that can be read. Checks first that headers agree with files, that
    the boxes of every tensor tile it and that replicas agree; finishes pending reductions. OUT
    appears when it is complete and was read again.

    Examples:
      shardspec merge ckpt -o model.safetensors
      shardspec merge ckpt -o model.safetensors --dtype bf16 --exclude 'optim.*'
      shardspec merge ckpt -o model --max-shard-size 5GB --threads 2
      shardspec merge ckpt -o model.pt
      shardspec merge ckpt -o model.safetensors --overwrite --json
      torchrun --nproc_per_node 4 -m shardspec merge ckpt -o model.safetensors
    """
    limit = max_shard_size
    suffix = "" if output.endswith("/") else PurePath(output).suffix.lower()
    opts.refuse_if(
        to is None and limit is None and suffix not in _KNOWN_SUFFIXES,
        f"{shown(output)}: no format is known whose files end in {shown(suffix)}; give --to "
        f"({', '.join(conversion.MERGED_FORMATS)}), or a name that ends in .safetensors or .pt",
    )

    def convert(**more: opts.Declared) -> WriteReport:
        (source,) = options.source.open(checkpoint, quiet=options.quiet)
        return conversion.merge(
            source, output, format=to, max_shard_bytes=limit, metadata=metadata, **more
        )

    _write("merge", options, convert)


@command
def reshard_command(
    *,
    checkpoint: Path = argument(ckpt.CHECKPOINT),
    output: str = opts.output_option("The directory to write.", "OUT", required=True),
    mesh: opts.MeshShape | None = option(
        opts.MESH, "Devices to shard for, outermost axis first: 2x4, or with names dp=2,tp=4."
    ),
    rules: ckpt.RuleOptions,
    like: Path | None = option(ckpt.OTHER, "Shard as this checkpoint, which has a mesh and specs."),
    to: conversion.ReshardedFormat = option(
        click.Choice(conversion.RESHARDED_FORMATS),
        "The format of OUT: shardspec's own, that of torch.distributed.checkpoint, or of a run of "
        "DeepSpeed's ZeRO its Universal Checkpoint, for any number of ranks.",
        default="shardspec",
        show_default=True,
    ),
    drop_values: bool = flag(
        "Leave out entries that OUT has no place for, such as pickled objects; else an error."
    ),
    options: _Options,
) -> None:
    """Write the checkpoint CKPT as the ranks of another mesh would have saved it.

    CKPT may be of any format that can be read; pending reductions are finished. OUT appears when it
    is complete and was read again.

    Examples:
      shardspec reshard ckpt -o sharded --mesh 4x2 --rules rules.toml
      shardspec reshard model.safetensors -o sharded --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),R]'
      shardspec reshard ckpt -o sharded --like other_ckpt
      shardspec reshard ckpt -o out --mesh 2 --rules r.toml --map llama-hf-to-fused --sizes c.json
      shardspec reshard zero_run -o universal --to deepspeed-universal

    A file of rules has a line for each pattern of names:
      "*.up.weight" = "[S1,R]"
      "*.down.weight" = "[R,S1]"
    What no rule matches is replicated on every device.
    """
    cuts = rules.rules is not None or bool(rules.rule)
    universal = to == "deepspeed-universal"
    opts.refuse_if(
        universal and (mesh is not None or like is not None or cuts),
        "a Universal Checkpoint is for any number of ranks; leave out --mesh, --rules, --rule and "
        "--like",
    )
    one = (mesh is None) == (like is None)
    opts.refuse_if(not universal and one, "give either --mesh, with rules, or --like")
    opts.refuse_if(
        like is not None and cuts, "--like says how to shard; leave out --rules and --rule"
    )
    specs = rules.read()

    def convert(**more: opts.Declared) -> WriteReport:
        source, *others = options.source.open(checkpoint, like, quiet=options.quiet)
        return conversion.reshard(
            source,
            output,
            device_mesh=None if mesh is None else opts.plain_mesh(mesh),
            rules=None if mesh is None else specs,
            like=others[0] if others else None,
            format=to,
            drop_values=drop_values,
            **more,
        )

    _write("reshard", options, convert)
    if mesh is not None and not specs and not options.quiet:
        say("note: no rules were given, so every tensor is replicated on every device", err=True)


@command
def check_map_command(
    *,
    map: str = argument("MAP"),
    source: str = option("CKPT", "A checkpoint, or a file of shapes.", required=True),
    target: str | None = option("CKPT", "The same, of what is to be written."),
    sizes: Path | None = ckpt.sizes_option(),
    reverse: bool = flag("Check the map the other way round."),
    drop: tuple[str, ...] = ckpt.drop_option(),
    as_json: bool = opts.json_flag(),
) -> None:
    """Prove that a map writes every element of a target exactly once, and uses all of the source.

    Exit code 3 says that it does not, or that the source lacks what the map names; the first holes
    and overlaps, and what has no use, are printed.

    Examples:
      shardspec check-map map.toml --source ckpt --target shapes.json
      shardspec check-map llama-hf-to-megatron --sizes config.json --source ckpt

    MAP is a TOML file, or the name of a map that comes with shardspec, as llama-hf-to-megatron or,
    by way of hf, llama-megatron-to-fused. A file of shapes has names and lists of sizes:
    {"embed.weight": [32000, 4096]}. Without --target, the names and shapes that the map implies are
    checked, and printed with --json.
    """
    from shardspec.resharding.maps import apply_map, dropped_by, report_of

    before, catalog = _shapes(source)
    dropped = dropped_by(drop, before)
    *firsts, last = _configured(catalog, ckpt.read_maps(map, sizes, reverse=reverse))
    for one in firsts:
        between, dropped, report = apply_map(one, before, dropped)
        _refuse_losses(report)
        before = {**between, **dropped}
    if target is None:
        after, _, report = apply_map(last, before, dropped)
    else:
        after, _ = _shapes(target)
        report = report_of(last, before, after, dropped)
    if as_json:
        say_json(
            {
                "total": bool(report),
                "equations": len(report.equations),
                "problems": list(report.problems),
                "unused": list(report.unused),
                "target": {name: list(shape) for name, shape in after.items()},
            }
        )
    else:
        say(f"{counted(len(report.equations), 'equation')} to {counted(len(after), 'tensor')}")
        for name in report.unused:
            say(f"not used, at least in part: {shown(name)}")
    _refuse_losses(report)
    if not as_json:
        say("every element of the target is written exactly once, and the source is used up")


def _refuse_losses(report: "MapReport") -> None:
    try:
        report.require_total()
    except LayoutError as error:
        raise InputFileError(*error.parts) from None


def _configured(catalog: "Catalog | None", maps: "Sequence[NameMap]") -> "list[NameMap]":
    """Return maps with what the config.json beside a checkpoint says."""
    from shardspec.checkpoint.mapped import configured

    return list(maps) if catalog is None else [configured(catalog, one) for one in maps]


def _shapes(place: str) -> "tuple[dict[str, tuple[int, ...]], Catalog | None]":
    """Return shapes by name, of a checkpoint or of a file of shapes; and the checkpoint."""
    from shardspec.checkpoint.open import open_checkpoint
    from shardspec.checkpoint.store import path_exists

    if not (place.endswith(".json") and path_exists(Path(place))):
        catalog = open_checkpoint(Path(place))
        return {name: catalog.outline(name).shape for name in catalog.names}, catalog
    found = {}
    for name, sizes in ckpt.read_json(Path(place)).items():
        if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
            raise InputFileError(f"{place}: {shown(name)} has {shown(sizes)}, no list of sizes")
        found[name] = tuple(sizes)
    return found, None


@command
def plan_state_command(
    *,
    checkpoint: Path = argument(ckpt.CHECKPOINT),
    cluster: opts.ClusterOptions,
    rules: ckpt.RuleOptions,
    maps: ckpt.MapOptions,
    dtype: str | None = option("NAME", "What floating-point tensors become."),
    max_bytes: int | None = option(opts.BYTES, "Bytes in buckets of each device."),
    source: ckpt.SourceOptions,
    as_json: bool = opts.json_flag("Print the plan as JSON."),
) -> None:
    """Plan on paper how the devices of a mesh get a model from the checkpoint CKPT.

    Says which device reads how much from which files. No tensor is read.

    Examples:
      shardspec plan-state ckpt --mesh 8 --rules rules.toml
      shardspec plan-state ckpt --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),R]' --json
      shardspec plan-state ckpt --mesh 8 --map llama-hf-to-fused --sizes config.json
    """
    from shardspec.checkpoint.check_quantized import check_stored_plan
    from shardspec.checkpoint.choice import Choice
    from shardspec.checkpoint.load import stored_layouts
    from shardspec.checkpoint.mapped import mapped
    from shardspec.resharding.plan import plan_state

    mesh, model = cluster.build()
    if cluster.links is not None or cluster.profile is not None:
        mesh = DeviceMesh(
            mesh.ids,
            mesh.shape,
            axis_names=mesh.axis_names,
            mesh_alpha=[link.latency_s + link.start_s for link in model.links],
            mesh_beta=[link.seconds_per_byte for link in model.links],
        )
    (catalog,) = source.open(checkpoint)
    chain = _configured(catalog, maps.read())
    firsts, last = chain[:-1], chain[-1] if chain else None
    if firsts:
        # What is dropped has the names of the checkpoint, and the last map those in between.
        catalog = mapped(catalog, firsts, Choice(drop=maps.drop))
    stored, files = stored_layouts(catalog, max(mesh.ids) + 1)
    plan = plan_state(
        stored,
        (mesh, rules.read()),
        last,
        dtype,
        max_bytes,
        drop=() if firsts else maps.drop,
        dropped=catalog.dropped,
    )
    check_stored_plan(catalog, plan, last, dtype)
    if as_json:
        named = {str(number): name for number, name in files.items()}
        say_json({**plan.as_dict(), "files": named})
    else:
        say(plan.text(files))

"""The commands that write checkpoints: `shardspec merge` and `shardspec reshard`."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import click

from shardspec.checkpoint.compare.inspect import repeated_layers
from shardspec.checkpoint.convert import output as conversion
from shardspec.checkpoint.convert.output import WriteReport
from shardspec.checkpoint.convert.select import Choice
from shardspec.checkpoint.formats import (
    Way,
    default_format,
    formats,
    written_format,
    written_names,
)
from shardspec.checkpoint.quantization import with_numbers
from shardspec.checkpoint.quantization.schemes import QUANTIZATIONS
from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.command import Command, Option, flag, refuse_if, stacked, unless
from shardspec.cli.output import path_text, progress_bar, say, say_json
from shardspec.errors import CheckpointError
from shardspec.text import (
    bytes_text,
    counted,
    first_of,
    printable,
    rate_text,
    seconds_text,
    shown,
    table_text,
)

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog
    from shardspec.layout.layout import Layout

_MAX_LEFT_OUT: Final = 3
"""Maximum names shown of entries that were not written."""
_MAX_NOT_COPIED: Final = 10
"""Names shown of files that were not copied."""
_MAX_ROWS: Final = 32
"""Files shown in a table."""


def _usable_cores() -> int:
    """Return the number of usable cores, at most 4."""
    return min(4, len(os.sched_getaffinity(0)))


def _size(text: str) -> int:
    size = opts.parse_bytes(text)
    if not size:
        raise ValueError("the limit is 0 bytes; give a size above 0")
    return size


class _FormatName(click.ParamType[str]):
    """The type of an option that names a format to write, also one of an installed package."""

    name = "format"

    def __init__(self, way: Way) -> None:
        self.way = way

    def _choice(self) -> "click.Choice[str]":
        return click.Choice(written_names(self.way))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Return the names as a choice in the help."""
        return self._choice().get_metavar(param, ctx)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the name; fails if no format of that name is written this way."""
        if not any(format.name == value for format in formats()):
            return self._choice().convert(value, param, ctx)
        try:
            return written_format(str(value), self.way).name
        except CheckpointError as error:  # it is only read; the error names another
            self.fail(str(error), param, ctx)


_write_options: Final = stacked(
    ckpt.sum_options,
    ckpt.map_options,
    ckpt.source_options,
    ckpt.choice_options,
    opts.dtype.but(
        "Cast floating point tensors to this dtype, such as bf16; quantized weights are "
        "dequantized to it.",
        type=str,
        metavar="DTYPE",
        default=None,
        show_default=False,
    ).under("Precision"),
    Option(
        "quantize",
        "Precision",
        "Quantize the weights of linear layers; the model's family says which these are.",
        {"type": click.Choice(list(QUANTIZATIONS))},
    ),
    Option(
        "quantize_include",
        "Precision",
        "Quantize only tensors whose names in OUT match; may be given several times.",
        {"multiple": True, "metavar": "PATTERN"},
    ),
    flag(
        "strict_cast",
        "Precision",
        "Refuse a cast that turns numbers into infinity, 0 or NaN; by default these are counted.",
    ),
    opts.overwrite,
    unless(
        "sidecars",
        "Output",
        "Do not copy the files next to the weights, such as config.json and a tokenizer.",
    ),
    opts.digests.but(
        "Write digests of OUT's tensors to this file, for 'shardspec verify --digests'."
    ).under("Output"),
    opts.as_json.but("Print what was written as JSON."),
    opts.threads.but(
        "Copy with N threads; by default one for each usable core, at most 4.",
        default=_usable_cores(),
    ),
    unless("verify", "Running", "Do not compare bytes with the digests in the checkpoint."),
    flag(
        "dry_run",
        "Running",
        "Check CKPT's headers and the map, and print what would be written, without writing it.",
    ),
)
"""The options that `merge` and `reshard` share; each is an argument of both in the library."""


def _refuse_jobs(title: str) -> None:
    """Raise `click.UsageError` under torchrun, where every process would write the same output."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    raise click.UsageError(
        f"{title} runs in one process, with --threads: start it without torchrun, or call "
        "load_sharded and save_sharded in the job"
    )


def _write(
    convert: Callable[..., WriteReport],
    checkpoints: tuple[PurePath, ...],
    *others: PurePath | None,
    maps: ckpt.MapOptions,
    sums: ckpt.SumOptions,
    source: ckpt.SourceOptions,
    choice: dict[str, Any],
    as_json: bool,
    stacked: bool = False,
    **how: Any,  # noqa: ANN401  # as `merge` and `reshard` take it
) -> None:
    """Write an output with a progress bar, and print a report.

    `convert` is called with the checkpoints to sum, or the only one, and with the `others`.
    `stacked` says whether Megatron-core would stack layers and experts in the output.
    """
    title = click.get_current_context().info_name or ""
    _refuse_jobs(title)
    how["quantize_include"] = how["quantize_include"] or None
    places = sums.places(checkpoints)
    opened = source.open(*places, *others)
    sources = opened[: len(places)]
    checkpoint = sources if len(sources) > 1 else sources[0]
    names = maps.read(sources[0].home, stacked=stacked)
    if maps.model is not None and maps.map is None:
        from shardspec.checkpoint.convert.model_names import ModelNames

        assert isinstance(names, ModelNames)
        chosen = Choice(**choice, drop=maps.drop)
        for each in sources:
            numbers = with_numbers(each, how["dtype"], chosen, names.config)
            for note in names.notes(numbers, chosen):
                say(f"note: {each.directory}: {note}", err=True)
    how |= {**choice, **sums.keywords(), "names": names, "drop": maps.drop}
    with progress_bar(not as_json, title) as progress:
        report = convert(checkpoint, *opened[len(places) :], progress=progress, **how)
    for note in report.summed:
        say(f"note: {note}", err=True)
    if as_json:
        say_json(report.to_json())
    else:
        say(_report_text(report))


def _report_text(report: WriteReport) -> str:
    what = f"{counted(report.tensors, 'tensor')}, {bytes_text(report.num_bytes)}"
    if len(report.files) > 1:
        what += f" in {counted(report.weight_files, 'file')} of weights"
    if report.written:
        rate = rate_text(report.num_bytes / max(report.seconds, 1e-9))
        digest = "" if report.crc32 is None else f", CRC-32 {report.crc32:08x}"
        if report.digests is not None:
            digest += f", digest {report.digests.value}"
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
            rows = [[path_text(name), bytes_text(size)] for name, size in islice(files, _MAX_ROWS)]
            if len(files) > _MAX_ROWS:
                rows.append([f"… and {len(files) - _MAX_ROWS} more", ""])
            lines.append(table_text(["file", did], rows))
        if report.sharding:
            lines.append(_sharding_text(report.sharding))
    if report.cast_losses:
        lines.append(f"numbers that the cast did not keep: {report.cast_losses}")
    if report.left_out:
        names = first_of([*map(shown, report.left_out)], _MAX_LEFT_OUT)
        lines.append(f"not written (not tensors): {names}; see 'shardspec inspect'")
    if report.filled:
        lines.append(f"taken from elsewhere: {', '.join(map(shown, report.filled))}")
    if report.not_copied:
        names = first_of([*map(shown, report.not_copied)], _MAX_NOT_COPIED)
        lines.append(f"not copied, though beside the weights: {names}")
    if report.sidecars:
        lines.append(f"also copied: {', '.join(map(printable, report.sidecars))}")
    return "\n".join(lines)


def _sharding_text(sharding: Mapping[str, tuple[str, str]]) -> str:
    """Return a table of the spec of each tensor, and the rule that gave it; layers share a row."""
    rows = []
    for title, names in repeated_layers(sharding):
        rule, spec = sharding[names[0]]
        rows.append([title, rule or "none, so replicated", spec])
    by_rules = any(rule for rule, _ in sharding.values())
    header = ["tensor", "rule", "spec"]
    if not by_rules:  # sharded as another checkpoint, or replicated
        header, rows = header[::2], [row[::2] for row in rows]
    return table_text(header, rows, text_from=0, optional=(1,) if by_rules else ())


@click.command(cls=Command)
@ckpt.checkpoints_argument
@opts.output.but(
    "The file to write; a directory for the formats huggingface and dcp.",
    type=opts.PLACE,
    metavar="OUT",
)
@opts.to.but(
    "The format of OUT: one safetensors file (default), safetensors files with an index (default "
    "with --max-shard-size, or if OUT ends in /), a file for torch.load (default if OUT ends in "
    ".pt, .pth or .bin), or a directory for torch.distributed.checkpoint.",
    type=_FormatName("merged"),
)
@Option(
    "max_shard_size",
    "Output",
    "Limit the bytes of tensors in a file: 5GB, 500MiB.",
    {"type": opts.Kind("SIZE", _size)},
)
@_write_options
def merge_command(
    checkpoints: tuple[PurePath, ...],
    output: str,
    to: str | None,
    max_shard_size: int | None,
    **options: Any,  # noqa: ANN401  # those of `_write`
) -> None:
    """Write the global tensors of the checkpoint CKPT into one file, or files of a limited size.

    CKPT may be of any format that can be read; several are summed by --weights. Before writing, it
    checks that headers agree with files, that the boxes of every tensor tile it and that replicas
    agree. Pending reductions are finished. OUT appears when it is complete.

    Examples:
      shardspec merge ckpt -o model.safetensors
      shardspec merge ckpt -o model.safetensors --dtype bf16 --exclude 'optim.*'
      shardspec merge ckpt -o model --max-shard-size 5GB --threads 2
      shardspec merge ckpt -o model.pt
      shardspec merge ckpt -o model.safetensors --overwrite --json
      shardspec merge ckpt -o model.safetensors --map map.toml --dry-run      check a map
      shardspec merge step_1 step_2 step_3 -o avg/ --weights 0.2,0.3,0.5
      shardspec merge base --plus new --minus old --scale 0.8 -o out/
    """
    limit = max_shard_size
    suffix = "" if output.endswith("/") else PurePath(output).suffix.lower()
    if to is None and limit is None and suffix:
        refuse_if(
            not any(suffix in format.extensions for format in formats() if format.writes),
            f"{shown(output)}: no format has files that end in {shown(suffix)}; give --to "
            f"({', '.join(written_names('merged'))}), or a name that ends in .safetensors or .pt",
        )
    convert = partial(conversion.merge, output=output, format=to, max_shard_bytes=limit)
    stacked = to is not None and written_format(to, "merged").stacks_layers
    _write(convert, checkpoints, stacked=stacked, **options)


@click.command(cls=Command)
@ckpt.checkpoints_argument
@opts.output.but("The directory to write.", type=opts.PLACE, metavar="OUT")
@opts.mesh.but("Devices to shard for, outermost axis first: 2x4, or with names dp=2,tp=4.").under(
    "Output"
)
@ckpt.rule_options
@ckpt.layout_option
@Option(
    "like",
    "Output",
    "Shard like this checkpoint, which has a mesh and specs.",
    {"type": ckpt.OTHER},
)
@opts.to.but(
    "The format of OUT: shardspec's own, or that of torch.distributed.checkpoint.",
    type=_FormatName("sharded"),
    default=default_format("sharded").name,
    show_default=True,
)
@flag(
    "drop_values",
    "Output",
    "Drop entries that OUT cannot store, such as pickled objects; by default these are an error.",
)
@_write_options
def reshard_command(
    checkpoints: tuple[PurePath, ...],
    output: str,
    mesh: opts.MeshShape | None,
    rules: dict[str, str] | None,
    layout: str | None,
    like: PurePath | None,
    to: str,
    drop_values: bool,
    **options: Any,  # noqa: ANN401  # those of `_write`
) -> None:
    """Write the checkpoint CKPT as the ranks of another mesh would have saved it.

    CKPT may be of any format that can be read; pending reductions are finished. OUT appears when it
    is complete.

    Examples:
      shardspec reshard ckpt -o sharded --mesh 4x2 --rules rules.toml
      shardspec reshard model.safetensors -o sharded --mesh tp=4 --rule '*.weight' '[S(tp),...]'
      shardspec reshard ckpt -o sharded --like other_ckpt
      shardspec reshard ckpt -o out --mesh 2 --rules r.toml --model hf --names fused
      shardspec reshard ckpt -o served --model config.json --layout vllm:tp=8,ep=8

    A file of rules has a line for each pattern of names; the last one that matches counts:
      "*" = "[S0,...]"             the first dim of every tensor, however many it has
      "*.down.weight" = "[R,S0]"
    A tensor without a matching rule is replicated. --dry-run shows the spec of each tensor.
    """
    format = written_format(to, "sharded")
    maps: ckpt.MapOptions = options["maps"]
    if layout is not None:
        ckpt.check_layout(maps, rules)
        refuse_if(like is not None, "--layout says how to shard; omit --like")
    alone = mesh is None and like is None and maps.model is not None and layout is None
    if alone:
        mesh = ((1,), None)
    neither_or_both = layout is None and (mesh is None) == (like is None)
    refuse_if(neither_or_both, "give either --mesh, with rules, or --like")
    refuse_if(
        like is not None and rules is not None,
        "--like says how to shard; omit --rules and --rule",
    )

    def convert(
        source: "Catalog | list[Catalog]",
        other: "Catalog | None" = None,
        **more: Any,  # noqa: ANN401
    ) -> WriteReport:
        onto = None if mesh is None else opts.plain_mesh(mesh)
        pattern: Catalog | dict[str, Layout] | None = other
        if layout is not None:
            first = source[0] if isinstance(source, list) else source
            more["names"], pattern = ckpt.under_layout(layout, maps, first, onto)
            onto = None
        return conversion.reshard(
            source,
            output,
            device_mesh=onto,
            rules=rules,
            like=pattern,
            format=to,
            drop_values=drop_values,
            **more,
        )

    _write(convert, checkpoints, like, stacked=format.stacks_layers, **options)
    if mesh is not None and not (rules or alone or layout):
        say("note: no rules were given, so every tensor is replicated on every device", err=True)

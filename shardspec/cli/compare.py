"""The commands that compare checkpoints: `shardspec verify`, `diff` and `digest`."""

import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from math import inf, prod
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import click

from shardspec.checkpoint.catalog import AnyOutline
from shardspec.checkpoint.compare.diff import (
    Difference,
    DiffExtent,
    amount_text,
    diff_checkpoints,
    names_to_compare,
    total_extent,
    values_to_compare,
)
from shardspec.checkpoint.compare.inspect import groups_of, prefix_change, repeated_layers
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.convert.select import Choice
from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.command import Command, Option, flag, refuse_if
from shardspec.cli.output import (
    name_text,
    path_text,
    progress_bar,
    say,
    say_json,
)
from shardspec.errors import CheckpointError
from shardspec.text import (
    bytes_text,
    counted,
    printable,
    shown,
    table_lines,
    table_text,
    terminal_width,
    wrapped,
)

_DIFFERENT: Final = 1
"""Exit code of `diff` for differences."""
_FLAWED: Final = 3
"""Exit code of `verify` for flaws."""
_TOLERANCE: Final = opts.Kind("NUMBER", opts.parse_number)


@click.command(cls=Command)
@ckpt.checkpoint_argument
@opts.digests.but(
    "Compare digests with this file of 'shardspec digest', merge, reshard or save_sharded."
)
@flag("every", "Output", "List all flaws, not only the first.", "--all")
@ckpt.compared_map_options
@ckpt.choice_options
@ckpt.source_options
@opts.as_json.but("Print all flaws as JSON.")
def verify_command(
    checkpoint: PurePath,
    digests: PurePath | None,
    every: bool,
    maps: ckpt.MapOptions,
    choice: dict[str, Any],
    source: ckpt.SourceOptions,
    as_json: bool,
) -> None:
    """Check that the checkpoint CKPT is complete and matches the digests stored in it, if any.

    Boxes must tile every tensor, files be complete, and replicas agree. The exit code is 3 if there
    is a flaw. With --digests, patterns, a map or a model choose and rename the tensors to compare.

    Examples:
      shardspec verify ckpt
      shardspec verify ckpt --all --json
      shardspec verify ckpt --digests digests.json
      shardspec verify iter_0000100 --digests digests.json --model hf
    """
    from shardspec.checkpoint.compare.digest import digest, read_digests

    chosen = any(choice.values()) or maps.map is not None or maps.model is not None
    refuse_if(
        chosen and digests is None,
        "patterns, --map and --model choose tensors to compare with --digests; give --digests too",
    )
    expected = None if digests is None else read_digests(digests)
    every |= as_json
    (catalog,) = source.open(checkpoint)
    names = maps.read(catalog.home)
    with progress_bar(not as_json, "verify") as progress:
        report = verify_checkpoint(catalog, every=every, progress=progress)
    flaws = list(report.flaws)
    if expected is not None and not flaws:
        how = {"names": names, "drop": maps.drop, "seed": expected.seed, **choice}
        with progress_bar(not as_json, "digest") as progress:
            flaws += digest(catalog, progress=progress, **how).differences(expected)
        if flaws and not every:
            raise CheckpointError(f"{checkpoint} does not match {digests}: {flaws[0]}")
    if as_json:
        say_json({**report.to_json(), "flaws": flaws})
    else:
        for flaw in flaws:
            say(printable(flaw))
        if not report.num_bytes:
            stored = "no data to check"
        elif report.digested_bytes == report.num_bytes:
            stored = "all with digests"
        elif report.digested_bytes:
            stored = f"{bytes_text(report.digested_bytes)} of them with digests"
        else:
            stored = "no digests stored"
            stored += ", so altered bytes cannot be detected" if digests is None else ""
        part = "what was chosen is " if choice["include"] or choice["exclude"] else ""
        same = "" if digests is None or flaws else f", and {part}the same as {path_text(digests)}"
        say(
            f"{path_text(checkpoint)}: {counted(report.tensors, 'tensor')} in "
            f"{counted(report.boxes, 'box', 'boxes')}, {bytes_text(report.num_bytes)}, "
            f"{stored}; {counted(len(flaws), 'problem') if flaws else 'no problems found'}{same}"
        )
    if flaws:
        click.get_current_context().exit(_FLAWED)


@click.command(cls=Command)
@click.argument("a", type=ckpt.CHECKPOINT, metavar="A")
@click.argument("b", type=ckpt.CHECKPOINT, metavar="B")
@Option(
    "atol",
    "Precision",
    "Ignore absolute differences up to NUMBER.",
    {"type": _TOLERANCE, "default": "0"},
)
@Option(
    "rtol",
    "Precision",
    "Ignore differences up to NUMBER × |B|.",
    {"type": _TOLERANCE, "default": "0"},
)
@flag("stats", "Output", "Print the share of elements that differ, by group.")
@ckpt.model_option.but(
    "Compare under the names of this model's files: its directory or config.json."
)
@ckpt.choice_options
@ckpt.source_options
@opts.as_json.but("Print all differences as JSON.")
def diff_command(
    a: PurePath,
    b: PurePath,
    atol: float,
    rtol: float,
    stats: bool,
    model: Path | None,
    choice: dict[str, Any],
    source: ckpt.SourceOptions,
    as_json: bool,
) -> None:
    """Compare two checkpoints of any formats tensor by tensor; the exit code is 1 if they differ.

    Prints a row for each tensor that differs, the largest difference first. --json adds the first
    element that differs, and its ranks. With --model, names of Megatron-core or of engines are
    compared with those of transformers. Values beside the tensors are compared too, if both formats
    can store them.

    Without tolerances, bits are compared: NaNs with equal bits are the same, 0 and -0 are not. With
    a tolerance, all NaNs are the same, and floating point numbers of two dtypes are compared too.
    Tensors of A are chosen and renamed as for merge; B may lack those that patterns exclude.

    Examples:
      shardspec diff ckpt model.safetensors
      shardspec diff step-100 step-200 --rtol 1e-3 --json
      shardspec diff step-100 step-200 --stats                which groups of tensors changed
      shardspec diff ckpt model-bf16.safetensors --rtol 1e-2
      shardspec diff ckpt model.safetensors --include 'model.*' --rename '^model[.]' ''
    """
    catalog_a, catalog_b = source.open(a, b)
    if model is not None:
        from shardspec.checkpoint.convert.model_names import model_names
        from shardspec.checkpoint.convert.select import mapped_choice

        named = (mapped_choice(x, model_names(model), Choice())[0] for x in (catalog_a, catalog_b))
        catalog_a, catalog_b = named
    wanted = Choice(**choice)
    chosen, names_b = names_to_compare(catalog_a, catalog_b, wanted)
    values, other_values = values_to_compare(catalog_a, catalog_b, wanted)
    with progress_bar(not as_json, "diff") as progress:
        options = {**choice, "atol": atol, "rtol": rtol}
        differences = list(diff_checkpoints(catalog_a, catalog_b, **options, progress=progress))
    count, value_count = len(chosen.keys() | names_b), len(values.keys() | other_values.keys())
    beside = counted(value_count, "value")
    shared = {name: catalog_a.outline(old) for name, old in chosen.items() if name in names_b}
    sizes = {name: prod(outline.shape) for name, outline in shared.items()}
    extents = {each.name: each.extent for each in differences if each.extent}
    groups = _changes(sizes, extents)
    rename = prefix_change(chosen, names_b)
    if as_json:
        records = list(map(asdict, differences))
        counts = {"tensors": count, "values": value_count}
        more = {"groups": {name: change._asdict() for name, change in groups.items()}}
        expression = None if rename is None else [f"^{re.escape(rename[0])}", rename[1]]
        rest = {"differences": records, "rename": expression, **(more if stats else {})}
        say_json({"a": str(a), "b": str(b), **counts, **rest})
    else:
        others = {name: catalog_b.outline(name) for name in shared}
        for line in _difference_lines(differences, shared, others, chosen.keys() | values.keys()):
            say(line)
        if stats:
            rows = [
                [name_text(group), f"{x.differing} of {x.tensors}", f"{x.share:.3%}", x.largest]
                for group, x in groups.items()
            ]
            say(table_text(["group", "tensors differ", "elements differ", "by up to"], rows))
    if differences and not as_json:
        differing = sum(difference.kind == "tensor" for difference in differences)
        total = f"{differing} of {counted(count, 'tensor')}"
        if value_count:
            total += f" and {len(differences) - differing} of {beside}"
        total += f" differ{'s' if len(differences) == 1 else ''}"
        if extents:
            extent = replace(total_extent(extents.values()), elements=sum(sizes.values()))
            total += f": {extent}"
        say(total, fg="red")
        if rename is not None:
            words = shlex.join(["--rename", f"^{re.escape(rename[0])}", rename[1]])
            say(f"the names differ in how they begin; compare with {words}")
        elif model is None and chosen and names_b and not shared:
            say("no name is in both; if they are one model's names, compare with --model DIR")
    elif not as_json:
        num_bytes = sum(catalog_a.outline(name).num_bytes for name in chosen.values())
        end = f", and {beside}" if value_count else ""
        same = f"no difference: {counted(len(chosen), 'tensor')}, {bytes_text(num_bytes)}{end}"
        say(same, fg="green")
    if differences:
        click.get_current_context().exit(_DIFFERENT)


def _difference_lines(
    differences: Iterable[Difference],
    first: Mapping[str, AnyOutline],
    second: Mapping[str, AnyOutline],
    in_a: Container[str],
) -> Iterator[str]:
    """Yield a table of the tensors that differ, the largest difference first.

    Values follow, and tables of names on one side only; layers of one side share a row.
    """
    alone: dict[str, dict[str, str]] = {"tensor": {}, "value": {}}
    tensors: list[Difference] = []
    values: list[Difference] = []
    for difference in differences:
        if difference.one_side:
            alone[difference.kind][difference.name] = "A" if difference.name in in_a else "B"
        else:
            (tensors if difference.kind == "tensor" else values).append(difference)
    width = terminal_width()
    sizes = {x.name: inf if x.extent is None else x.extent.max_abs for x in tensors}
    rows = [
        _row(each, first[each.name], second[each.name])
        for each in sorted(tensors, key=lambda each: (-sizes[each.name], each.name))
    ]
    if rows:
        header = ["tensor", "A | B", "largest", "relative", "differ", "of", "NaN"]
        yield from table_lines(
            header,
            lambda: rows,
            numbers=range(2, 7),
            empty_columns=False,
            fits=width,
            optional=(5, 3, 6, 4),
        )
    for difference in values:
        name = shown(difference.name, width - len("value "))
        yield from wrapped(f"value {name} {difference.problem}", width)
    above = bool(rows or values)
    for kind, sides in alone.items():
        layers = repeated_layers(sides)
        sided = [[name_text(x.title), str(len(x.names)), sides[x.names[0]]] for x in layers]
        if sided:
            yield "\n" * above + table_text([kind, "count", "only in"], sided, text_from=2)
            above = True


def _row(difference: Difference, a: AnyOutline, b: AnyOutline) -> list[str]:
    """Return the row of a tensor in the table of differences."""
    kinds = [] if a.dtype == b.dtype else [f"{a.dtype} | {b.dtype}"]
    kinds += [] if a.shape == b.shape else [f"{list(a.shape)} | {list(b.shape)}"]
    cells = [name_text(difference.name), ", ".join(kinds)]
    extent = difference.extent
    if extent is None:
        return [*cells, *[""] * 5]
    nans = "" if not any(extent.nans) else f"{extent.nans[0]:,} | {extent.nans[1]:,}"
    numbers = [f"{extent.max_abs:.3g}", f"{extent.max_rel:.3g}"]
    return [*cells, *numbers, f"{extent.differing:,}", f"{extent.elements:,}", nans]


class _Change(NamedTuple):
    """The difference of a group of tensors."""

    tensors: int
    differing: int
    share: float
    """The share of the compared elements that differ."""
    largest: str


def _changes(sizes: Mapping[str, int], extents: Mapping[str, DiffExtent]) -> dict[str, _Change]:
    """Return the difference of each group of tensors; tensors of one checkpoint are ignored."""
    changes = {}
    for group, names in groups_of(sizes).items():
        changed = [extents[name] for name in names if name in extents]
        extent = total_extent(changed)
        share = extent.differing / max(sum(sizes[name] for name in names), 1)
        largest = amount_text(extent) if changed else ""
        changes[group] = _Change(len(names), len(changed), share, largest)
    return changes


@click.command(cls=Command)
@click.argument("checkpoints", type=ckpt.CHECKPOINT, metavar="CKPT", nargs=-1, required=True)
@flag("add", "Input", "Add up files of digests, of parts that cover each tensor once.")
@opts.output.but(
    "Write the digest of every tensor to a file or URL, for 'shardspec verify'.",
    type=ckpt.OUTPUT,
    required=False,
)
@Option(
    "seed",
    "Running",
    "Use other keys; only digests of the same seed can be compared.",
    {"type": click.IntRange(0, 2**64 - 1), "default": 0},
)
@ckpt.compared_map_options
@ckpt.source_options
@ckpt.choice_options
@opts.overwrite
@opts.as_json.but("Print all digests as JSON.")
def digest_command(
    checkpoints: tuple[PurePath, ...],
    add: bool,
    output: PurePath | None,
    seed: int,
    maps: ckpt.MapOptions,
    source: ckpt.SourceOptions,
    choice: dict[str, Any],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Digest the tensors of the checkpoint CKPT, independently of its format and sharding.

    Equal weights have equal digests: sharded or merged, in any format and, with a map or a model,
    under other names. Prints one value for all tensors. Digests detect accidents; they are not
    signatures.

    Examples:
      shardspec digest ckpt
      shardspec digest ckpt -o digests.json
      shardspec digest iter_0000100 --model hf               under the names of transformers
      shardspec digest --add rank0.json rank1.json -o all.json
    """
    from shardspec.checkpoint.compare.digest import (
        check_digests_file,
        digest,
        read_digests,
        write_digests,
    )
    from shardspec.checkpoint.storage import storage_path

    refuse_if(len(checkpoints) > 1 and not add, "give one CKPT, or --add for files of digests")
    chosen = any(choice.values()) or maps.map is not None or maps.model is not None or seed
    refuse_if(add and bool(chosen), "--add takes no names; give them to make the files")
    place = None if output is None else storage_path(output)
    if place is not None:
        check_digests_file(place, None, overwrite=overwrite)
    if add:
        digests = sum(map(read_digests, checkpoints[1:]), read_digests(checkpoints[0]))
        digests.require_complete()
    else:
        (catalog,) = source.open(*checkpoints)
        names = maps.read(catalog.home)
        with progress_bar(not as_json, "digest") as progress:
            digests = digest(
                catalog, names=names, drop=maps.drop, seed=seed, progress=progress, **choice
            )
    if place is not None:
        write_digests(place, digests, overwrite=overwrite)
    if as_json:
        say_json(digests.to_json())
    else:
        size = bytes_text(sum(entry.num_bytes for entry in digests.values()))
        what = f"{counted(len(digests), 'tensor')}, {size}"
        where = " + ".join(map(path_text, checkpoints))
        say(f"{where}: {what}, digest {digests.value}")

"""The commands that read no data of models: `shardspec check-map` and `shardspec plan-state`."""

import os
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import click

from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.output import say, say_json
from shardspec.errors import InputFileError, LayoutError
from shardspec.input_files import read_json_object
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import counted, shown

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog
    from shardspec.layout.layout import Layout
    from shardspec.resharding.total import MapReport


@click.command(cls=opts.Command)
@click.argument("map", metavar="MAP", type=opts.PLACE)
@click.option("--source", type=opts.PLACE, required=True, help="A checkpoint, or a file of shapes.")
@click.option("--target", type=opts.PLACE, help="The same, of the output.")
@ckpt.sizes_option
@click.option("--reverse", is_flag=True, help="Check the map the other way round.")
@ckpt.drop_option
@opts.json_option()
def check_map_command(
    map: str,
    source: str,
    target: str | None,
    sizes: Path | None,
    reverse: bool,
    drop: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check that a name map writes every target element exactly once, and uses all of the source.

    The exit code is 3 if it does not, or if the source lacks a tensor that the map names; the first
    holes and overlaps, and unused tensors, are printed.

    Examples:
      shardspec check-map map.toml --source ckpt --target shapes.json

    MAP is a TOML file. A file of shapes has names and lists of sizes:
    {"embed.weight": [32000, 4096]}. Without --target, the names and shapes that the map implies are
    checked, and printed with --json.
    """
    from shardspec.checkpoint.select.mapped import configured
    from shardspec.resharding.total import apply_map, dropped_by, report_of

    before, catalog = _shapes(source)
    dropped = dropped_by(drop, before)
    last = ckpt.read_maps(map, sizes, reverse=reverse)
    if catalog is not None:
        last = configured(catalog, last)
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


def _shapes(place: str) -> "tuple[dict[str, tuple[int, ...]], Catalog | None]":
    """Return the shapes in a checkpoint or a file of shapes by name, and the checkpoint."""
    from shardspec.checkpoint.open import open_checkpoint

    if not (place.endswith(".json") and os.path.exists(place)):
        catalog = open_checkpoint(place)
        return {name: catalog.outline(name).shape for name in catalog.names}, catalog
    shapes = {}
    for name, sizes in read_json_object(Path(place)).items():
        if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
            raise InputFileError(f"{place}: {shown(name)} has {shown(sizes)}, not a list of sizes")
        shapes[name] = tuple(sizes)
    return shapes, None


@click.command(cls=opts.Command)
@ckpt.checkpoint_argument
@opts.cluster_options
@ckpt.rule_options
@ckpt.map_options
@ckpt.layout_option
@click.option("--dtype", metavar="NAME", help="Cast floating-point tensors to this dtype.")
@click.option("--max-bytes", type=opts.BYTES, help="Limit the bytes in buckets of each device.")
@click.option(
    "--transfers",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write which bytes each device reads from which file into this directory.",
)
@ckpt.source_options
@opts.json_option("Print the plan as JSON.")
def plan_state_command(
    checkpoint: PurePath,
    cluster: opts.ClusterOptions,
    rules: dict[str, str] | None,
    maps: ckpt.MapOptions,
    layout: str | None,
    dtype: str | None,
    max_bytes: int | None,
    transfers: Path | None,
    source: ckpt.SourceOptions,
    as_json: bool,
) -> None:
    """Plan how the devices of a mesh read a model from the checkpoint CKPT.

    Prints which device reads how much from which files. No tensor is read.

    Examples:
      shardspec plan-state ckpt --mesh 8 --rules rules.toml
      shardspec plan-state ckpt --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),...]' --json
      shardspec plan-state ckpt --mesh 8 --map llama-hf-to-fused --sizes config.json
      shardspec plan-state ckpt --model config.json --layout vllm:tp=8,ep=8
      shardspec plan-state ckpt --mesh 8 --rules rules.toml --transfers rows/
    """
    from shardspec.checkpoint.job.load_plan import plan_stored
    from shardspec.checkpoint.job.rows import file_regions, write_transfers

    if layout is not None:
        ckpt.check_layout(maps, rules)
        mesh = None if cluster.mesh is None else opts.plain_mesh(cluster.mesh, cluster.ids)
        (catalog,) = source.open(checkpoint)
        catalog, target = _under_layout(catalog, layout, maps, mesh, dtype)
        planned = plan_stored(catalog, target, None, dtype, max_bytes)
    else:
        mesh = _with_links(cluster)
        (catalog,) = source.open(checkpoint)
        names = maps.read(catalog.home)
        planned = plan_stored(catalog, (mesh, rules or {}), names, dtype, max_bytes, maps.drop)
    catalog, plan, _, files = planned
    if transfers is not None:
        write_transfers(plan, transfers, file_regions(catalog, planned.first), files)
    if as_json:
        named = {str(number): name for number, name in files.items()}
        say_json({**plan.as_dict(), "files": named})
    else:
        say(plan.text(files))


def _with_links(cluster: opts.ClusterOptions) -> DeviceMesh:
    """Return the mesh of a cluster with its links, if any were given."""
    mesh, model = cluster.build()
    if cluster.links is None and cluster.profile is None:
        return mesh
    return DeviceMesh(
        mesh.ids,
        mesh.shape,
        axis_names=mesh.axis_names,
        mesh_alpha=[link.latency_s + link.start_s for link in model.links],
        mesh_beta=[link.seconds_per_byte for link in model.links],
    )


def _under_layout(
    catalog: "Catalog",
    layout: str,
    maps: ckpt.MapOptions,
    mesh: DeviceMesh | None,
    dtype: str | None,
) -> "tuple[Catalog, dict[str, Layout]]":
    """Return a checkpoint under the names of a layout, and the layout of each of its tensors."""
    from shardspec.checkpoint.select.choice import Choice
    from shardspec.checkpoint.select.dequantized import mapped_source
    from shardspec.dtypes import dtype_name, is_cast, keeps_dtype
    from shardspec.layout.layout import Layout

    named, layouts = ckpt.under_layout(layout, maps, catalog, mesh)
    catalog, _ = mapped_source(catalog, named, Choice(dtype=dtype, drop=maps.drop))
    target = {}
    for name in catalog.names:
        at, own = layouts[name], catalog.outline(name).dtype
        casts = dtype is not None and is_cast(own, dtype_name(dtype)) and not keeps_dtype(name)
        target[name] = Layout(at.mesh, at.spec, at.global_shape, dtype if casts else own)
    return catalog, target

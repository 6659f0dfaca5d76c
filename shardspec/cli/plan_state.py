"""The command `shardspec plan-state`."""

from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import click

from shardspec.cli import checkpoint_options as ckpt
from shardspec.cli import options as opts
from shardspec.cli.command import Command, Option
from shardspec.cli.output import say, say_json
from shardspec.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog
    from shardspec.layout.layout import Layout


@click.command(cls=Command)
@ckpt.checkpoint_argument
@opts.cluster_options
@ckpt.rule_options
@ckpt.compared_map_options
@ckpt.layout_option
@opts.dtype.but(
    "Cast floating-point tensors to this dtype.", type=str, default=None, show_default=False
).under("Precision")
@opts.max_bytes.but("Limit the bytes in buckets of each device.")
@Option(
    "transfers",
    "Output",
    "Write which bytes each device reads from which file into this directory.",
    {"type": click.Path(path_type=Path), "metavar": "DIR"},
)
@ckpt.source_options
@opts.as_json.but("Print the plan as JSON.")
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
      shardspec plan-state ckpt --mesh 8 --model config.json --names fused
      shardspec plan-state ckpt --model config.json --layout vllm:tp=8,ep=8
      shardspec plan-state ckpt --mesh 8 --rules rules.toml --transfers rows/
    """
    from shardspec.checkpoint.job.load_plan import plan_stored
    from shardspec.checkpoint.job.rows import file_regions, write_transfers
    from shardspec.resharding.plan import text_of

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
        write_transfers(plan.copies, transfers, file_regions(catalog, planned.first), files)
    if as_json:
        named = {str(number): name for number, name in files.items()}
        say_json({**plan.as_dict(), "files": named})
    else:
        say(text_of(plan, files))


def _with_links(cluster: opts.ClusterOptions) -> DeviceMesh:
    """Return the mesh of a cluster with its links, if any were given."""
    mesh, model = cluster.build()
    if cluster.links is None:
        return mesh
    return DeviceMesh(mesh.ids, mesh.shape, axis_names=mesh.axis_names, links=model.cluster)


def _under_layout(
    catalog: "Catalog",
    layout: str,
    maps: ckpt.MapOptions,
    mesh: DeviceMesh | None,
    dtype: str | None,
) -> "tuple[Catalog, dict[str, Layout]]":
    """Return a checkpoint under the names of a layout, and the layout of each of its tensors."""
    from shardspec.checkpoint.convert.select import Choice
    from shardspec.checkpoint.quantization import mapped_source
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

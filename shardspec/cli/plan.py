"""The command `shardspec plan`."""

import click

from shardspec.cli.arguments import (
    MeshShape,
    build_mesh,
    build_model,
    mesh_options,
    tensor_options,
)
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.mesh import LinkModel

__all__ = ["command"]


@click.command(
    "plan",
    epilog="""\b
Examples:
  shardspec plan "[S0,R]" "[R,S01]" --mesh 2x4 --shape 4096x4096 --dtype bf16
  shardspec plan "[S(dp),R]" "[R,S(tp)]" --mesh dp=2,tp=4 --shape 4096x4096
  shardspec plan "[S0,R]" "[R,R]" --mesh 4x8 --shape 8192x512 --links ib-ndr-per-gpu,h100-nvswitch
  shardspec plan "[R|P01]" "[S0]" --mesh 2x4 --shape 1000 --alpha 1e-5,3e-6 --beta 4e-11,3e-12
  shardspec plan "[R|P0]" "[R]" --mesh 8 --shape 1000 --link-model shared-bus --json

\b
A spec says how each dim of the tensor is cut: R is whole, S0 is cut over axis 0 of the mesh, S01
over axis 0 and inside each block over axis 1. |P0 is a sum over axis 0 that is still pending.
""",
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@mesh_options
@tensor_options
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    source: str,
    target: str,
    mesh: MeshShape,
    ids: tuple[int, ...] | None,
    alpha: tuple[float, ...] | None,
    beta: tuple[float, ...] | None,
    links: tuple[str, ...] | None,
    link_model: LinkModel,
    shape: tuple[int, ...],
    dtype: str,
    as_json: bool,
) -> None:
    """Plan the cheapest conversion of a tensor from the spec FROM to the spec TO.

    Works on paper: it needs no process group, no GPU and no tensor. Without --links, or
    --alpha and --beta, the links of one H100 node are assumed; the last line of the plan says so.
    """
    devices = build_mesh(mesh, ids, alpha, beta, link_model)
    converter = LayoutConverter(build_model(devices, links))
    plan = converter.plan(Layout(devices, source, shape, dtype), target)
    click.echo(plan.to_json() if as_json else _styled(str(plan)))


def _styled(text: str) -> str:
    """Make the title stand out and the assumptions stand back; click does so on terminals only."""
    first, *table, last = text.split("\n")
    return "\n".join([click.style(first, bold=True), *table, click.style(last, dim=True)])

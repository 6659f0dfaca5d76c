"""The command `shardspec plan`."""

import json
from collections.abc import Sequence
from typing import Final, Unpack

import click

from shardspec.cli.arguments import MeshShape, parse_bytes, parse_ids, parse_mesh, parsed
from shardspec.cli.options import (
    ClusterOptions,
    build_cluster,
    cluster_options,
    json_option,
    plain_mesh,
    tensor_options,
)
from shardspec.cli.output import say
from shardspec.comm.cost import CostModel, Link
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan, difference_text, naive_plan, plans_table
from shardspec.mesh import DeviceMesh
from shardspec.text import printable

__all__ = ["command"]

_MOST_ALTERNATIVES: Final = 100


@click.command(
    "plan",
    epilog="""\b
Examples:
  shardspec plan "[S0,R]" "[R,S01]" --mesh 2x4 --shape 4096x4096 --dtype bf16
  shardspec plan "[S(dp),R]" "[R,S(tp)]" --mesh dp=2,tp=4 --shape 4096x4096 --explain
  shardspec plan "[S0,R]" "[R,R]" --mesh 4x8 --shape 8192x512 --links ib-ndr-per-gpu,h100-nvswitch
  shardspec plan "[S01,R]" "[S10,R]" --mesh 2x4 --shape 4096x4096 --alternatives 5
  shardspec plan "[S0,S1]" "[S1,S0]" --mesh 2x4 --shape 4096x4096 --max-bytes 20MiB
  shardspec plan "[R|P01]" "[S0]" --mesh 2x4 --shape 1000 --alpha 1e-5,3e-6 --beta 4e-11,3e-12
  shardspec plan "[S0,R]" "[S0,S1]" --mesh 2x4 --target-mesh 3x4 --shape 4096x4096
  shardspec plan "[R|P0]" "[R]" --mesh 8 --shape 1000 --link-model shared-bus --json

\b
A spec says how each dim of the tensor is cut: R is whole, S0 is cut over axis 0 of the mesh, S01
over axis 0 and inside each block over axis 1. |P0 is a sum over axis 0 that is still pending.
""",
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@cluster_options
@tensor_options
@click.option(
    "--target-mesh",
    callback=parsed(parse_mesh),
    metavar="SHAPE",
    help="Another mesh for TO; its links are those of --mesh where both have as many axes, else "
    "the slowest of them.",
)
@click.option(
    "--target-ids",
    callback=parsed(parse_ids),
    metavar="IDS",
    help="Physical ids of the target mesh; counted from 0 if left out.",
)
@click.option(
    "--max-bytes",
    callback=parsed(parse_bytes),
    metavar="SIZE",
    help="The cheapest plan whose devices never hold more: 64MiB, 1.5GB, or a number of bytes.",
)
@click.option(
    "--alternatives",
    type=click.IntRange(1, _MOST_ALTERNATIVES),
    metavar="COUNT",
    help="Show so many of the next best plans too.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Show what the plan avoids: finishing reductions, gathering everything, then slicing.",
)
@json_option("Print the plan as JSON.")
def command(
    source: str,
    target: str,
    shape: tuple[int, ...],
    dtype: str,
    target_mesh: MeshShape | None,
    target_ids: tuple[int, ...] | None,
    max_bytes: int | None,
    alternatives: int | None,
    explain: bool,
    as_json: bool,
    **cluster: Unpack[ClusterOptions],
) -> None:
    """Plan the cheapest conversion of a tensor from the spec FROM to the spec TO.

    Works on paper: it needs no process group, no GPU and no tensor. Without --links, or
    --alpha and --beta, the links of one H100 node are assumed; the plan's last lines say so.
    """
    devices, model = build_cluster(**cluster)
    layout = Layout(devices, source, shape, dtype)
    there, target_model = devices, None
    if target_mesh is not None:
        there, target_model = _other_mesh(target_mesh, target_ids, model)
    elif target_ids is not None:
        raise click.UsageError("--target-ids needs --target-mesh")
    goal = Layout(there, target, shape, dtype)
    converter = LayoutConverter(model, target_model=target_model)
    plans = converter.alternatives(layout, goal, 1 + (alternatives or 0), max_bytes=max_bytes)
    best, *others = plans
    naive = naive_plan(layout, goal, best.model, best.target_model) if explain else None
    if as_json:
        record = best.as_dict()
        if max_bytes is not None:
            record["max_bytes"] = max_bytes
        if alternatives is not None:
            record["alternatives"] = [_beside(plan, best) for plan in others]
        if naive is not None:
            record["naive"] = _beside(naive, best)
            record["explanation"] = difference_text(best, naive)
        say(json.dumps(record))
        return
    click.echo(_styled(str(best)))
    if alternatives is not None:
        say(f"\n{_next_best(plans, alternatives)}")
    if naive is not None:
        say(f"\n{difference_text(best, naive)}")
        say(plans_table([best, naive], ["chosen", "naive"]))


def _other_mesh(
    mesh: MeshShape, ids: tuple[int, ...] | None, model: CostModel
) -> tuple[DeviceMesh, CostModel]:
    """Return the target's mesh, with the links of the source's mesh or the slowest of them."""
    devices, links = plain_mesh(mesh, ids), model.links
    shape = devices.shape
    if len(shape) != len(links):
        name, start = "slowest of the other mesh", max(link.start_s for link in links)
        slowest = Link(*model.slowest(range(len(links))), name, start)
        links = (links[0] if len(set(links)) == 1 else slowest,) * len(shape)
    return devices, CostModel(shape, links, model.link_model, copy_s=model.copy_s)


def _beside(plan: ConversionPlan, best: ConversionPlan) -> dict[str, object]:
    """Return what is a plan's own, and its seconds as a multiple of the best plan's."""
    keys = ("steps", "cost_seconds", "bytes_received", "peak_bytes")
    record = plan.as_dict()
    ratio = plan.cost_seconds / best.cost_seconds if best.cost_seconds else None
    return {**{key: record[key] for key in keys}, "ratio": ratio}


def _next_best(plans: Sequence[ConversionPlan], wanted: int) -> str:
    if len(plans) == 1:
        return "there is no other plan"
    table = plans_table(plans, [str(number) for number in range(1, len(plans) + 1)])
    missing = wanted - (len(plans) - 1)
    return f"{table}\nthere are no more plans" if missing else table


def _styled(text: str) -> str:
    """Make the title stand out and the assumptions stand back; click does so on terminals only."""
    first, *lines = printable(text, keep="\n").split("\n")
    aside = ("per device; ", "known error: ", "nothing to do: ")
    return "\n".join(
        [
            click.style(first, bold=True),
            *(click.style(line, dim=True) if line.startswith(aside) else line for line in lines),
        ]
    )

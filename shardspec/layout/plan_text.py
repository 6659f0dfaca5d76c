"""Plans as tables that a person can read."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from shardspec.text import bytes_text, seconds_text, table_text

if TYPE_CHECKING:
    from shardspec.layout.plan import ConversionPlan
    from shardspec.mesh import DeviceMesh

__all__ = ["plan_text", "plans_table", "route_text", "step_text"]


def step_text(step: Step) -> str:
    """Say in a few words what a step does.

    Examples
    --------
    >>> step_text(AllGather(0, (1,)))
    'all-gather dim 0'
    """
    match step:
        case Slice(dim, _):
            return f"slice dim {dim}"
        case AllGather(dim, _):
            return f"all-gather dim {dim}"
        case AllToAll(src_dim, dst_dim, _, _):
            return f"all-to-all dim {src_dim} → {dst_dim}"
        case ReduceScatter(dim, _, op):
            return f"reduce-scatter {op} dim {dim}"
        case AllReduce(_, op):
            return f"all-reduce {op}"
        case Permute():
            return "permute"
        case Exchange():
            return "exchange"


def plan_text(plan: "ConversionPlan") -> str:
    """Return a plan as a table: a row per step, then the totals and the links assumed."""
    source, target = plan.source, plan.target
    meshes = f"on mesh {source.mesh}"
    if target.mesh != source.mesh:
        meshes = f"from mesh {source.mesh} to mesh {target.mesh}"
    title = (
        f"{source.labelled_spec} → {target.labelled_spec}   {list(source.global_shape)} "
        f"{source.dtype} ({bytes_text(source.global_bytes)}) {meshes}"
    )
    if not plan.steps:
        return f"{title}\nnothing to do: both are the same layout"
    rows = zip(
        plan.steps,
        pairwise(plan.layouts),
        plan.step_bytes,
        plan.step_seconds,
        plan.live_bytes,
        strict=True,
    )
    table = table_text(
        ["step", "axes", "layout after", "receives", "time", "live"],
        [
            [
                step_text(step),
                ",".join(before.mesh.axis_label(axis) for axis in step.axes),
                str(after.labelled_spec),
                bytes_text(received),
                seconds_text(seconds),
                bytes_text(live),
            ]
            for step, (before, after), received, seconds, live in rows
        ],
        footer=[
            "total",
            "",
            "",
            bytes_text(plan.bytes_received),
            seconds_text(plan.cost_seconds),
            f"peak {bytes_text(plan.peak_bytes)}",
        ],
        numbers_from=3,
    )
    links = f"{plan.model.link_model} model; {plan.model.links_text(_labels(source.mesh))}"
    if plan.target_model is not None:
        there = plan.target_model
        links += f"; then {there.link_model} model; {there.links_text(_labels(target.mesh))}"
    return f"{title}\n{table}\nper device; {links}\nknown error: {plan.known_error}"


def _labels(mesh: "DeviceMesh") -> list[str]:
    return [mesh.axis_label(axis) for axis in range(mesh.ndim)]


def route_text(plan: "ConversionPlan") -> str:
    """Return the steps of a plan in a line.

    Examples
    --------
    >>> from shardspec import DeviceMesh, Layout, LayoutConverter
    >>> mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
    >>> source = Layout(mesh, "[S(dp),R|P(tp)]", (4096, 4096), "bf16")
    >>> route_text(LayoutConverter().plan(source, "[R,R]"))
    'all-reduce tp, all-gather dp'
    """
    moves = zip(plan.steps, plan.layouts, strict=False)
    return ", ".join(_short_text(step, before.mesh) for step, before in moves) or "nothing to do"


def _short_text(step: Step, mesh: "DeviceMesh") -> str:
    labels = [mesh.axis_label(axis) for axis in step.axes]
    axes = labels[0] if len(labels) == 1 else f"({','.join(labels)})"
    return f"{step_text(step).split()[0]} {axes}" if labels else step_text(step)


def plans_table(plans: Sequence["ConversionPlan"], names: Sequence[str]) -> str:
    """Return plans between the same layouts as a table, a row each, beside the first.

    Parameters
    ----------
    plans
        The first is what the seconds of all are compared with.
    names
        What to call each of them.
    """
    best = plans[0].cost_seconds
    rows = [
        [
            name,
            route_text(plan),
            ", ".join(str(layout.labelled_spec) for layout in plan.layouts[1:-1]),
            bytes_text(plan.bytes_received),
            seconds_text(plan.cost_seconds),
            f"{plan.cost_seconds / best:.2f}×" if best else "",
            bytes_text(plan.peak_bytes),
        ]
        for name, plan in zip(names, plans, strict=True)
    ]
    header = ["plan", "steps", "through", "receives", "time", "ratio", "peak"]
    return table_text(header, rows, numbers_from=3)

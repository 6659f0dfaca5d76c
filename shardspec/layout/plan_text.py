"""A plan as a table that a person can read."""

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

__all__ = ["plan_text", "step_text"]


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
    source, mesh = plan.source, plan.source.mesh
    title = (
        f"{source.labelled_spec} → {plan.target.labelled_spec}   {list(source.global_shape)} "
        f"{source.dtype} ({bytes_text(source.global_bytes)}) on mesh {mesh}"
    )
    if not plan.steps:
        return f"{title}\nnothing to do: both are the same layout"
    rows = zip(
        plan.steps,
        plan.layouts[1:],
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
                ",".join(mesh.axis_label(axis) for axis in step.axes),
                str(after.labelled_spec),
                bytes_text(received),
                seconds_text(seconds),
                bytes_text(live),
            ]
            for step, after, received, seconds, live in rows
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
    links = plan.model.links_text([mesh.axis_label(axis) for axis in range(mesh.ndim)])
    return f"{title}\n{table}\nper device; {plan.model.link_model} model; {links}"

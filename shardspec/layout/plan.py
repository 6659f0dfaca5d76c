"""A plan: the ordered steps from one layout to another, what they cost, and plans as tables."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import Band, copies, kind_of
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
from shardspec.layout.cross import common_model
from shardspec.layout.layout import Layout
from shardspec.layout.move_cost import live_bytes, step_bytes, step_seconds
from shardspec.mesh import DeviceMesh
from shardspec.text import bytes_text, seconds_text, table_text

__all__ = ["ConversionPlan", "StepError", "errors_text", "plans_table", "route_text", "step_text"]


StepError: TypeAlias = tuple[str, Band | None]
"""A kind of step, and how far its price is off; None if not known."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The ordered steps from one layout to another. A plain value: it holds no group or tensor.

    Examples
    --------
    >>> from shardspec import DeviceMesh, LayoutConverter
    >>> source = Layout(DeviceMesh(range(8), (2, 4)), "[S0,R]", (4096, 4096), "bf16")
    >>> plan = LayoutConverter().plan(source, "[R,S0]")
    >>> plan.steps
    (AllToAll(src_dim=0, dst_dim=1, src_axes=(0,), dst_axes=(0,)),)
    >>> plan.bytes_received
    8388608
    """

    steps: tuple[Step, ...]
    """What to do, in order; empty where source and target are the same."""
    layouts: tuple[Layout, ...]
    """Source, then the layout after every step; the last one is the target."""
    model: CostModel
    """What the steps on the source's mesh are priced by."""
    target_model: CostModel | None = None
    """What the steps on the target's mesh are priced by, where that is another one."""

    @property
    def source(self) -> Layout:
        """The layout the plan starts from."""
        return self.layouts[0]

    @property
    def target(self) -> Layout:
        """The layout the plan arrives at."""
        return self.layouts[-1]

    @property
    def moves(self) -> tuple[tuple[Step, Layout, Layout], ...]:
        """Every step with the layouts before and after it."""
        ends = zip(self.steps, pairwise(self.layouts), strict=True)
        return tuple((step, before, after) for step, (before, after) in ends)

    @property
    def communicating(self) -> tuple[tuple[Step, Layout, Layout], ...]:
        """The moves that are no slices: slices move nothing, and may come in any order."""
        return tuple(move for move in self.moves if not isinstance(move[0], Slice))

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Modelled seconds of every step."""
        return tuple(step_seconds(*move, self.model_between(*move[1:])) for move in self.moves)

    @property
    def step_bytes(self) -> tuple[int, ...]:
        """Bytes the busiest device receives in every step, by a bandwidth-optimal algorithm."""
        return tuple(step_bytes(*move) for move in self.moves)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes the fullest device holds during every step: its shard before and after."""
        return tuple(live_bytes(before, after) for before, after in pairwise(self.layouts))

    @property
    def cost_seconds(self) -> float:
        """Modelled seconds of the whole plan."""
        return sum(self.step_seconds)

    @property
    def bytes_received(self) -> int:
        """Bytes the busiest device receives in all steps together."""
        return sum(self.step_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes a device holds at once."""
        return max(self.live_bytes, default=self.source.max_local_bytes)

    def model_between(self, before: Layout, after: Layout) -> CostModel:
        """Return what a step from one layout to the next, or back, is priced by."""
        if self.target_model is None:
            return self.model
        of_mesh = {self.target.mesh: self.target_model, self.source.mesh: self.model}
        if before.mesh == after.mesh:
            return of_mesh[before.mesh]
        return common_model(before.mesh, after.mesh, of_mesh[before.mesh], of_mesh[after.mesh])

    @property
    def known_error(self) -> str:
        """How far the modelled seconds of each kind of step are off, as far as that is known."""
        return errors_text(self.errors)

    @property
    def errors(self) -> tuple[StepError, ...]:
        """How far the price of every step that communicates is off; None where nobody measured."""
        found: list[StepError] = []
        for step, before, after in self.communicating:
            model = self.model_between(before, after)
            found.append((_what(step, before), model.error(step, before.max_local_bytes)))
            if model.copy_s and copies(step, 2):
                # Their rate is the vendor's.
                found.append(("local copies", None))
        return tuple(found)

    def as_dict(self) -> dict[str, object]:
        """Return the plan as plain lists, numbers and text, ready for JSON."""
        rows = zip(self.moves, self.step_seconds, self.step_bytes, self.live_bytes, strict=True)
        return {
            "source": str(self.source.spec),
            "target": str(self.target.spec),
            "mesh": list(self.source.mesh.shape),
            "target_mesh": list(self.target.mesh.shape),
            "shape": list(self.source.global_shape),
            "dtype": self.source.dtype,
            "link_model": self.model.link_model,
            "links": [link.as_dict() for link in self.model.links],
            "known_error": self.known_error,
            "steps": [
                {
                    "step": type(step).__name__,
                    **{name: _plain(getattr(step, name)) for name in step.__slots__},
                    "layout": str(after.spec),
                    "bytes_received": received,
                    "seconds": seconds,
                    "live_bytes": live,
                }
                for (step, _, after), seconds, received, live in rows
            ],
            "cost_seconds": self.cost_seconds,
            "bytes_received": self.bytes_received,
            "peak_bytes": self.peak_bytes,
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.as_dict(), indent=indent)

    def __str__(self) -> str:
        return _plan_text(self)


def errors_text(errors: Iterable[StepError]) -> str:
    """Say how far prices of steps are off, each kind of step once, at its worst.

    Examples
    --------
    >>> from shardspec import DeviceMesh, LayoutConverter
    >>> source = Layout(DeviceMesh(range(8), (8,)), "[S0]", (2**20,), "bf16")
    >>> errors_text(LayoutConverter().plan(source, "[R]").errors)
    'all-gather of 8: 3 % off at the median, 9 % at the 90th percentile'
    """
    worst: dict[str, Band] = {}
    unknown: dict[str, None] = {}
    for what, band in errors:
        if band is None:
            unknown[what] = None
        elif what not in worst or band.most > worst[what].most:
            worst[what] = band
    parts = [f"{what}: {band}" for what, band in worst.items()]
    if unknown:
        parts.append(f"no measurement of {', '.join(unknown)}")
    return "; ".join(parts) or "none, nothing is sent"


def _what(step: Step, before: Layout) -> str:
    kind = kind_of(step)
    if kind is None:
        return step_text(step)
    return f"{kind} of {prod(before.mesh.shape[axis] for axis in step.axes)}"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


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


def _plan_text(plan: ConversionPlan) -> str:
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
    rows = zip(plan.moves, plan.step_bytes, plan.step_seconds, plan.live_bytes, strict=True)
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
            for (step, before, after), received, seconds, live in rows
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


def _labels(mesh: DeviceMesh) -> list[str]:
    return [mesh.axis_label(axis) for axis in range(mesh.ndim)]


def route_text(plan: ConversionPlan) -> str:
    """Return the steps of a plan in a line.

    Examples
    --------
    >>> from shardspec import DeviceMesh, Layout, LayoutConverter
    >>> mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
    >>> source = Layout(mesh, "[S(dp),R|P(tp)]", (4096, 4096), "bf16")
    >>> route_text(LayoutConverter().plan(source, "[R,R]"))
    'reduce-scatter tp, all-gather (dp,tp)'
    """
    steps = (_short_text(step, before.mesh) for step, before, _ in plan.moves)
    return ", ".join(steps) or "nothing to do"


def _short_text(step: Step, mesh: DeviceMesh) -> str:
    labels = [mesh.axis_label(axis) for axis in step.axes]
    axes = labels[0] if len(labels) == 1 else f"({','.join(labels)})"
    return f"{step_text(step).split()[0]} {axes}" if labels else step_text(step)


def plans_table(plans: Sequence[ConversionPlan], names: Sequence[str]) -> str:
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

"""Defines conversion plans: the steps between two layouts in order, with seconds and bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from html import escape
from itertools import chain, pairwise
from typing import Final, TypeAlias

from shardspec.comm.cost import CostModel, accuracy_text, measured_link
from shardspec.comm.curves import Link, bytes_received, copies, kind_of
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
from shardspec.layout.cross import (
    common_model,
    exchange_seconds,
    live_bytes,
    received_bytes,
)
from shardspec.layout.layout import Layout
from shardspec.layout.picture import notebook_html, row_svg
from shardspec.layout.pricing import pair_prices
from shardspec.text import bytes_text, seconds_text, table_text, terminal_width, wrapped

Move: TypeAlias = tuple[Step, Layout]
"""A step and the layout after it."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The ordered steps from one layout to another, as a plain value without process groups.

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
    """The steps in order; empty if source and target are the same."""
    layouts: tuple[Layout, ...]
    """The source, then the layout after each step; the last one is the target."""
    model: CostModel
    """The cost model of the source's mesh."""
    target_model: CostModel | None = None
    """The cost model of the target's mesh if that differs from the source's."""

    @property
    def source(self) -> Layout:
        """The layout before the first step."""
        return self.layouts[0]

    @property
    def target(self) -> Layout:
        """The layout after the last step."""
        return self.layouts[-1]

    @property
    def moves(self) -> tuple[tuple[Step, Layout, Layout], ...]:
        """Every step with the layouts before and after it."""
        layout_pairs = zip(self.steps, pairwise(self.layouts), strict=True)
        return tuple((step, before, after) for step, (before, after) in layout_pairs)

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Modeled seconds of every step."""
        return tuple(step_seconds(*move, model_between(self, *move[1:])) for move in self.moves)

    @property
    def step_bytes(self) -> tuple[int, ...]:
        """Bytes that the busiest device receives in each step, by bandwidth-optimal algorithms."""
        return tuple(step_bytes(*move) for move in self.moves)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes on the fullest device during each step: its shards before and after."""
        return tuple(live_bytes(before, after) for before, after in pairwise(self.layouts))

    @property
    def cost_seconds(self) -> float:
        """Modeled seconds of the whole plan."""
        return sum(self.step_seconds)

    @property
    def bytes_received(self) -> int:
        """Sum over all steps of the bytes that the busiest device receives."""
        return sum(self.step_bytes)

    @property
    def peak_bytes(self) -> int:
        """Maximum bytes of shards on a device during any step."""
        return max(self.live_bytes, default=self.source.max_local_bytes)

    @property
    def known_error(self) -> str:
        """A sentence about the accuracy of the modeled seconds."""
        return known_error([self])

    @property
    def _between_hosts(self) -> Link | None:
        """The link between hosts; None unless the two meshes are on several hosts."""
        cluster = None if self.target_model is None else self.model.cluster
        ids = {*self.source.mesh.ids, *self.target.mesh.ids}
        return cluster.between if cluster and len(cluster.by_host(ids)) > 1 else None

    def as_dict(self) -> dict[str, object]:
        """Return the plan as plain lists, numbers and text, ready for JSON."""

        def plain(value: object) -> object:
            return list(value) if isinstance(value, tuple) else value

        between = self._between_hosts
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
            **({"between": between.as_dict()} if between else {}),
            "known_error": self.known_error,
            "steps": [
                {
                    "step": type(step).__name__,
                    **{name: plain(getattr(step, name)) for name in step.__slots__},
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

    def svg(self) -> str:
        """Draw the layouts and the steps between them as one SVG element.

        Raises LayoutError for layouts of more than 4,096 boxes.
        """
        layouts = (self.source, *(after for _, _, after in self.moves))
        titles = [self.source.title, *(str(layout.labelled_spec) for layout in layouts[1:])]
        pictures = [
            replace(layout.drawing(), title=title)
            for layout, title in zip(layouts, titles, strict=True)
        ]
        return row_svg(pictures, [step_text(step) for step, _, _ in self.moves])

    def _repr_html_(self) -> str:
        """Show a drawing of the plan above its text in notebooks."""
        text = str(self)
        devices = max(layout.mesh.size() for layout in self.layouts)
        return notebook_html(lambda: f"{self.svg()}<pre>{escape(text)}</pre>", text, devices)

    def __repr__(self) -> str:
        steps = ", ".join(map(repr, self.steps)) or "nothing to do"
        target = self.target.title if self.target.mesh != self.source.mesh else self.target.spec
        return f"ConversionPlan({self.source} → {target}: {steps})"

    def __str__(self) -> str:
        source, target = self.source, self.target
        meshes = f"on mesh {source.mesh}"
        if target.mesh != source.mesh:
            meshes = f"from mesh {source.mesh} to mesh {target.mesh}"
        title = (
            f"{source.labelled_spec} → {target.labelled_spec}   {list(source.global_shape)} "
            f"{source.dtype} ({bytes_text(source.global_bytes)}) {meshes}"
        )
        if not self.steps:
            title = "\n".join(wrapped(title, terminal_width(), "  "))
            return f"{title}\nnothing to do: both are the same layout"
        rows = zip(self.moves, self.step_bytes, self.step_seconds, self.live_bytes, strict=True)
        table = table_text(
            ["step", "axes", "layout after", "receives", "time", "live"],
            [
                [
                    step_text(step),
                    ",".join(before.mesh.axis_labels(step.axes)),
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
                bytes_text(self.bytes_received),
                seconds_text(self.cost_seconds),
                f"peak {bytes_text(self.peak_bytes)}",
            ],
            numbers_from=3,
            optional=(5, 1, 3, 2),
            wraps=True,
        )
        links = "; then ".join(
            f"{model.link_model} model; {model.links_text(layout.mesh.axis_labels())}"
            for model, layout in ((self.model, source), (self.target_model, target))
            if model is not None
        )
        if between := self._between_hosts:
            links += f"; between hosts {between}"
        width = terminal_width()
        lines = (f"per device; {links}", f"accuracy: {self.known_error}")
        notes = chain.from_iterable(wrapped(line, width, "  ") for line in lines)
        return "\n".join([*wrapped(title, width, "  "), table, *notes])


def plan_of_moves(
    source: Layout,
    moves: Iterable[Move],
    model: CostModel,
    target_model: CostModel | None = None,
) -> ConversionPlan:
    """Return the plan that consists of some moves from a layout."""
    moves = list(moves)
    layouts = (source, *(layout for _, layout in moves))
    return ConversionPlan(tuple(step for step, _ in moves), layouts, model, target_model)


def communicating_moves(plan: ConversionPlan) -> tuple[tuple[Step, Layout, Layout], ...]:
    """Return the moves of a plan except slices, which are local.

    >>> from shardspec import DeviceMesh, LayoutConverter
    >>> source = Layout(DeviceMesh(range(4), (2, 2)), "[S0,R]", (8, 8), "f32")
    >>> plan = LayoutConverter().plan(source, "[R,S1]")
    >>> step_text(plan.steps[0]), len(plan.moves), len(communicating_moves(plan))
    ('slice dim 1', 2, 1)
    >>> route_text(plan), difference_text(plan, plan)
    ('slice 1, all-gather 0', 'this is the naive plan: here no other is cheaper')
    """
    return tuple(move for move in plan.moves if not isinstance(move[0], Slice))


def model_between(plan: ConversionPlan, before: Layout, after: Layout) -> CostModel:
    """Return the model that prices a step between two layouts of a plan, or the step back."""
    if plan.target_model is None:
        return plan.model
    of_mesh = {plan.target.mesh: plan.target_model, plan.source.mesh: plan.model}
    if before.mesh == after.mesh:
        return of_mesh[before.mesh]
    return common_model(before.mesh, after.mesh, of_mesh[before.mesh], of_mesh[after.mesh])


def step_seconds(step: Step, before: Layout, after: Layout, model: CostModel) -> float:
    """Return the modeled seconds of a step; `model` is that of the `common_mesh`."""
    plain = before.spec.is_plain and after.spec.is_plain
    if before.mesh != after.mesh or (isinstance(step, Exchange) and not plain):
        return exchange_seconds(before, after, model)
    if isinstance(step, Permute | Exchange):
        permute, exchange = pair_prices(before, after, model)
        return permute if isinstance(step, Permute) else exchange
    return model.step_seconds(step, before.max_local_bytes)


def step_bytes(step: Step, before: Layout, after: Layout) -> int:
    """Return the bytes that the busiest device receives in a step.

    Collectives count as bandwidth-optimal: an all-gather of 100 bytes over 4 devices receives 300.
    In a permute or exchange, a device receives the bytes that it lacks.
    """
    if isinstance(step, Permute | Exchange):
        return received_bytes(before, after)
    return bytes_received(step, before.mesh.shape, before.max_local_bytes)


def known_error(plans: Iterable[ConversionPlan]) -> str:
    """Return a sentence about the accuracy of plans: errors of links, and unmeasured steps."""
    links: dict[Link, None] = {}
    unknown: dict[str, None] = {}
    for plan in plans:
        for step, before, after in communicating_moves(plan):
            if not step_bytes(step, before, after):  # for example over an axis of one device
                continue
            model = model_between(plan, before, after)
            link = measured_link(model, step, before.max_local_bytes)
            if link is not None:
                links[link] = None
            else:
                kind = kind_of(step)
                unknown[f"{kind} of {_group_text(model, step)}" if kind else step_text(step)] = None
            if model.copy_s and copies(step, 2):
                # The rate of copies is the vendor's figure, not a measurement.
                unknown["local copies"] = None
    missing = f"not measured: {', '.join(unknown)}" if unknown else ""
    return "; ".join(filter(None, (accuracy_text(links), missing))) or "exact, nothing is sent"


def _group_text(model: CostModel, step: Step) -> str:
    """Return the size of a step's groups as text: '8', or '2 nodes × 4 (priced from tiers)'."""
    nodes, per_node = model.group(step.axes)
    return str(per_node) if nodes == 1 else f"{nodes} nodes × {per_node} (priced from tiers)"


def step_text(step: Step) -> str:
    """Return a step in words, its kind first, as in 'all-gather dim 0'."""
    return _WORDS[type(step)].format(step)


def step_kind(step: Step) -> str:
    """Return the kind of a step in words, a key of `STEP_COLORS`."""
    return step_text(step).split()[0]


STEP_COLORS: Final[Mapping[str, str]] = {
    "slice": "#56b4e9",
    "all-gather": "#0072b2",
    "all-to-all": "#d55e00",
    "reduce-scatter": "#009e73",
    "all-reduce": "#cc79a7",
    "permute": "#b58900",
    "exchange": "#222222",
}
"""Colors by kind of step, chosen for color-blind readers too."""


_WORDS: Final = {
    Slice: "slice dim {0.dim}",
    AllGather: "all-gather dim {0.dim}",
    AllToAll: "all-to-all dim {0.src_dim} → {0.dst_dim}",
    ReduceScatter: "reduce-scatter {0.op} dim {0.dim}",
    AllReduce: "all-reduce {0.op}",
    Permute: "permute",
    Exchange: "exchange",
}


def route_text(plan: ConversionPlan) -> str:
    """Return the steps of a plan in one line: 'reduce-scatter tp, all-gather (dp,tp)'."""
    each = []
    for step, before, _ in plan.moves:
        labels = before.mesh.axis_labels(step.axes)
        axes = labels[0] if len(labels) == 1 else f"({','.join(labels)})"
        each.append(f"{step_text(step).split()[0]} {axes}" if labels else step_text(step))
    return ", ".join(each) or "nothing to do"


def plans_table(plans: Sequence[ConversionPlan], names: Sequence[str]) -> str:
    """Return a text table of plans between the same layouts; the first is the reference."""
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
    optional = (2, 6, 3, 5)
    return table_text(header, rows, numbers_from=3, optional=optional, flexible=1, wraps=True)


def difference_text(plan: ConversionPlan, naive: ConversionPlan) -> str:
    """Return a sentence that compares a plan with the naive one."""
    if not plan.steps:
        return "nothing to do, and nothing to avoid"
    if communicating_moves(plan) == communicating_moves(naive):
        return "this is the naive plan: here no other is cheaper"
    gathers_all = any(layout.spec.dim_partition_dict == {} for layout in plan.layouts)
    lead = "takes another way" if gathers_all else "avoids gathering the whole tensor"
    return (
        f"{lead}: {_speed(plan.cost_seconds, naive.cost_seconds)}, "
        f"receives {_share(plan.bytes_received, naive.bytes_received, 'of the bytes')}, "
        f"holds {_share(plan.peak_bytes, naive.peak_bytes, 'at its peak')}"
    )


def _speed(seconds: float, naive: float) -> str:
    if abs(seconds - naive) < 0.005 * naive:
        return "about as fast"
    if seconds == 0:
        return "free"
    if seconds < naive:
        return f"{naive / seconds:.3g}× faster"
    return f"{seconds / naive:.3g}× slower" if naive else "slower, for the naive plan is free"


def _share(amount: int, naive: int, of_what: str) -> str:
    """Return a ratio in words: '1/4 of the bytes', '37 % of the bytes', or '2× the bytes'."""
    if amount == naive:
        return "as many bytes" if of_what == "of the bytes" else "as much at its peak"
    if amount == 0:
        return "nothing"
    if amount > naive:
        return f"{amount / naive:.3g}× {of_what.replace('of ', '')}" if naive else "more"
    share = Fraction(amount, naive)
    close = share.limit_denominator(64)
    if close and abs(close - share) <= share / 200 and close.numerator <= 9 and close < 1:
        return f"{close} {of_what}"
    return f"{float(share):.0%} {of_what}".replace("%", " %")

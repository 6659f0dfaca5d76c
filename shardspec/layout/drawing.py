"""Drawings of the transition graph, as Graphviz's language and as SVG.

Specs are nodes, in columns: first those with more reductions pending, then by how many axes shard
the tensor. Edges have the colour of their kind of step. Where a path is marked, the rest is faint,
and numbers on its steps refer to a list below. Permute and exchange join any two specs with nothing
pending, so only those on the path are drawn. In SVG, steps to the right and to the left are drawn
apart, steps within a column bow out of it, and a step that skips columns passes between their
specs: so no label lies on another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final, TypeAlias
from xml.etree.ElementTree import Element

from shardspec.comm.steps import Exchange, Permute, ReduceOp, Step
from shardspec.errors import LayoutError
from shardspec.layout.graph import (
    MAX_STATES,
    State,
    count_states,
    space_of,
    spec_of,
    state_of,
    successors,
)
from shardspec.layout.layout import Layout, resolve_axes
from shardspec.layout.picture import draw, svg_page
from shardspec.layout.plan import ConversionPlan, step_text
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh
from shardspec.text import counted, seconds_text

COLOURS: Final[Mapping[str, str]] = {
    "slice": "#56b4e9",
    "all-gather": "#0072b2",
    "all-to-all": "#d55e00",
    "reduce-scatter": "#009e73",
    "all-reduce": "#cc79a7",
    "permute": "#b58900",
    "exchange": "#222222",
}
"""By kind of step; most people who see few colours can tell these apart."""


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """One step between two specs, given by their labels."""

    before: str
    after: str
    step: Step
    text: str
    """What it does, and along which axes."""
    number: int = 0
    """Its place on the path, from 1; 0 where it is not on it."""

    @property
    def kind(self) -> str:
        """The kind of step, as `COLOURS` has it."""
        return kind_of(self.step)

    @property
    def routed(self) -> bool:
        """Whether it is a permute or an exchange, which the graph has no edges for."""
        return isinstance(self.step, Permute | Exchange)

    def __str__(self) -> str:
        return f"{self.before} → {self.after}: {self.text}"


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn: specs in columns, and the steps among them."""

    title: str
    columns: tuple[tuple[str, ...], ...]
    """Labels of the nodes of each column."""
    edges: tuple[DrawnEdge, ...]
    """Every step of the graph."""
    path: tuple[DrawnEdge, ...] = ()
    """The steps of the plan that is marked."""
    ends: tuple[str, str] | None = None
    """Both ends of the plan."""
    known_error: str = ""
    """How far the seconds in the title are from measured ones; empty without a plan."""

    @property
    def on_path(self) -> frozenset[str]:
        """Labels of the specs that the plan comes to."""
        return frozenset(end for edge in self.path for end in (edge.before, edge.after))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of step that are drawn, in the order of `COLOURS`."""
        drawn = {edge.kind for edge in (*self.edges, *self.path)}
        return tuple(kind for kind in COLOURS if kind in drawn)

    @property
    def beside_path(self) -> list[DrawnEdge]:
        """The edges that are not on the path."""
        marked = {(edge.before, edge.after) for edge in self.path}
        return [edge for edge in self.edges if (edge.before, edge.after) not in marked]

    def as_dict(self) -> dict[str, object]:
        """Return nodes, edges and path as plain lists and text, ready for JSON."""

        def plain(edge: DrawnEdge) -> dict[str, str]:
            return {"source": edge.before, "target": edge.after, "step": edge.text}

        return {
            "title": self.title,
            "nodes": [label for column in self.columns for label in column],
            "edges": [plain(edge) for edge in self.edges],
            "path": [plain(edge) for edge in self.path],
            "known_error": self.known_error,
        }


def kind_of(step: Step) -> str:
    """Return the kind of a step in words, as `COLOURS` has it."""
    return step_text(step).split()[0]


def draw_transitions(mesh: DeviceMesh, dims: int, plan: ConversionPlan | None = None) -> Drawing:
    """Return what is to be drawn of the specs of a mesh and a tensor of so many dims.

    A plan is marked, and specs with the reductions that are pending at its source are drawn too.
    Raises `LayoutError` for more specs than `MAX_STATES`, or a plan of another mesh or rank.
    """
    pending: dict[Axis, ReduceOp] = {}
    if plan is not None:
        if (plan.source.mesh, plan.target.mesh, plan.source.spec.dims) != (mesh, mesh, dims):
            raise LayoutError(f"the plan is not of mesh {mesh} and {dims} dims; draw its own")
        pending = plan.source.spec.partial
    count = count_states(mesh.ndim, dims, len(pending))
    if count > MAX_STATES:
        raise LayoutError(
            f"{count} specs (mesh {mesh}, {counted(dims, 'dim')}) are too many to draw, "
            f"the limit is {MAX_STATES}; draw fewer mesh axes or dims"
        )
    pairs = state_of(resolve_axes(ShardingSpec(dims, partial=pending), mesh))[1]
    states = sorted(space_of(mesh.ndim, dims, pairs).states, key=lambda s: (_column(s), s))
    # A tensor of any size has these specs.
    tensor = Layout(mesh, ShardingSpec(dims), (1,) * dims, "float32")
    labels = {state: str(tensor.with_spec(spec_of(state)).labelled_spec) for state in states}
    columns = [tuple(map(labels.__getitem__, some)) for _, some in groupby(states, _column)]
    edges = tuple(
        DrawnEdge(labels[state], labels[reached], step, _text(step, mesh))
        for state in states
        for step, reached in successors(state, range(mesh.ndim))
    )
    title = f"{counted(count, 'spec')} of {counted(dims, 'dim')} on mesh {mesh}"
    if plan is None:
        return Drawing(title, tuple(columns), edges)
    # Cuts by parts and blocks are not states of the graph.
    passed = dict.fromkeys(str(layout.labelled_spec) for layout in plan.layouts)
    if beside := tuple(label for label in passed if label not in labels.values()):
        columns.append(beside)
    path: list[DrawnEdge] = []
    for (step, before, after), seconds in zip(plan.moves, plan.step_seconds, strict=True):
        text = f"{_text(step, mesh)}, {seconds_text(seconds)}"
        ends = str(before.labelled_spec), str(after.labelled_spec)
        path.append(DrawnEdge(*ends, step, text, len(path) + 1))
    ends = str(plan.source.labelled_spec), str(plan.target.labelled_spec)
    title = f"{ends[0]} → {ends[1]}, {seconds_text(plan.cost_seconds)}; {title}"
    return Drawing(title, tuple(columns), edges, tuple(path), ends, plan.known_error)


def _column(state: State) -> tuple[int, int]:
    cuts, pending = state
    return -len(pending), sum(map(len, cuts))


def _text(step: Step, mesh: DeviceMesh) -> str:
    return f"{step_text(step)} over {','.join(mesh.axis_labels(step.axes))}"


_FADED: Final = "28"
"""The opacity of what is not on the path, as Graphviz writes it after a colour."""


def dot_text(drawing: Drawing) -> str:
    """Return a drawing in Graphviz's language."""
    lines = [
        "digraph transitions {",
        f"  label={_quoted(drawing.title)}; labelloc=t; rankdir=LR; ranksep=2;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="monospace"];',
        '  edge [fontname="sans-serif", fontsize=9];',
    ]
    lines += [f"  {{ rank=same; {' '.join(map(_quoted, column))} }}" for column in drawing.columns]
    for label in sorted(drawing.on_path):
        width = 3 if label in (drawing.ends or ()) else 2
        lines.append(f'  {_quoted(label)} [fillcolor="#fff3bf", penwidth={width}];')
    lines += [_dot_edge(edge, faded=bool(drawing.path)) for edge in drawing.beside_path]
    lines += [_dot_edge(edge, faded=False) for edge in drawing.path]
    return "\n".join([*lines, "}", ""])


def _dot_edge(edge: DrawnEdge, *, faded: bool) -> str:
    colour = COLOURS[edge.kind]
    if faded:
        style = [f'color="{colour}{_FADED}"']
    else:
        text = f"{edge.number}: {edge.text}" if edge.number else edge.text
        style = [f'color="{colour}"', f'fontcolor="{colour}"', f"label={_quoted(text)}"]
    if edge.number:
        style.append("penwidth=3")
    if edge.routed:
        style.append("style=dashed")
    return f"  {_quoted(edge.before)} -> {_quoted(edge.after)} [{', '.join(style)}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_Point: TypeAlias = tuple[float, float]
_Curve: TypeAlias = tuple[_Point, _Point, _Point, _Point]

# All in pixels.
_CHAR: Final = 7.3
"""Width of a letter of 12 pixels."""
_HEIGHT: Final = 24
_ROW: Final = 46
_GAP: Final = 230
"""Between two columns."""
_BOW: Final = 125
"""How far a step within a column may bow out of it."""
_LEFT: Final = 30
_HEAD: Final = 104
"""Room for the title and the legend."""
_APART: Final = 5
"""Half the distance between steps to the right and to the left."""


class _Places:
    """Where the nodes are."""

    def __init__(self, columns: Sequence[Sequence[str]]) -> None:
        most = max(map(len, columns))
        self.half = max(len(label) for column in columns for label in column) * _CHAR / 2 + 9
        """Half the width of a node."""
        self.x = [_LEFT + self.half + at * (2 * self.half + _GAP) for at in range(len(columns))]
        """The middle of each column."""
        self.rows: list[list[float]] = []
        """Of each column the heights of its nodes, from the top."""
        self.column: dict[str, int] = {}
        self.at: dict[str, _Point] = {}
        for place, column in enumerate(columns):
            top = _HEAD + (most - len(column)) / 2 * _ROW
            self.rows.append([top + at * _ROW for at in range(len(column))])
            for label, y in zip(column, self.rows[-1], strict=True):
                self.column[label], self.at[label] = place, (self.x[place], y)


def svg_text(drawing: Drawing) -> str:
    """Return a drawing as SVG."""
    places, ends = _Places(drawing.columns), drawing.ends or ()
    root = Element(
        "svg", {"font-family": "DejaVu Sans Mono, Menlo, Consolas, monospace", "font-size": "12"}
    )
    box = {"viewBox": "0 0 8 8", "refX": 7, "refY": 4, "orient": "auto"}
    size = {"markerWidth": 8, "markerHeight": 8, "markerUnits": "userSpaceOnUse"}
    for kind in drawing.kinds:  # heads of arrows
        head = draw(root, "marker", id=kind, **box, **size)
        draw(head, "path", d="M0,0.5 L8,4 L0,7.5 z", fill=COLOURS[kind])
    draw(root, "rect", width="100%", height="100%", fill="white")
    draw(root, "text", drawing.title, x=20, y=30, font_size=14, font_weight="bold")
    right = 20.0
    for kind in drawing.kinds:
        routed = any(edge.routed and edge.kind == kind for edge in drawing.path)
        _draw_line(root, f"M{right:.1f},52 h34", kind, 2.4, routed=routed)
        draw(root, "text", kind, x=right + 42, y=56)
        right += 66 + _CHAR * len(kind)
    for edges, width, opacity in (
        (drawing.beside_path, 1.1, "0.13" if drawing.path else "0.6"),
        (drawing.path, 2.8, None),
    ):
        group = draw(root, "g", fill="none", opacity=opacity)
        for edge in edges:
            curves = _curves(edge, places)
            path = "M{:.1f},{:.1f}".format(*curves[0][0])
            for _, *points in curves:
                path += " C" + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            line = _draw_line(group, path, edge.kind, width, routed=edge.routed)
            draw(line, "title", str(edge))
    for label, (x, y) in places.at.items():
        bright = label in ends or label in drawing.on_path
        ink = "#111" if bright or drawing.ends is None else "#888"
        sides = {"x": x - places.half, "y": y - _HEIGHT / 2, "width": 2 * places.half}
        colours = {"fill": "#fff3bf" if bright else "white", "stroke": ink}
        stroke = 2.4 if label in ends else 1.2
        box = {**sides, "height": _HEIGHT, "rx": 6, **colours, "stroke_width": stroke}
        draw(root, "rect", class_="node", **box)
        draw(root, "text", label, x=x, y=y + 4, text_anchor="middle", fill=ink)
    y = max(y for _, y in places.at.values()) + _ROW + 8
    for edge in drawing.path:
        for x, at in (_badge(edge, places), (30.0, y)):
            disc = {"fill": COLOURS[edge.kind], "stroke": "white", "stroke_width": 2}
            draw(root, "circle", cx=x, cy=at, r=10, **disc)
            style = {"text_anchor": "middle", "fill": "white", "font_weight": "bold"}
            draw(root, "text", str(edge.number), x=x, y=at + 4, **style)
        draw(root, "text", str(edge), x=46, y=y + 4)
        y += 22
    listed = [60 + _CHAR * len(str(edge)) for edge in drawing.path]
    title = 40 + _CHAR * 1.2 * len(drawing.title)
    width = max(places.x[-1] + places.half + _BOW + 25, title, right, *listed)
    return svg_page(root, round(width), round(y + (10 if listed else -8)))


def _curves(edge: DrawnEdge, places: _Places) -> list[_Curve]:
    """Return the way of an edge: one curve, or one up to each column that it skips and beyond."""
    (x, y), (end_x, end_y) = places.at[edge.before], places.at[edge.after]
    here, there = places.column[edge.before], places.column[edge.after]
    if here == there:
        # Down on the right, up on the left.
        side = 1 if end_y > y else -1
        start, end = (x + side * places.half, y), (end_x + side * places.half, end_y)
        # A curve reaches three quarters of the way to where it is drawn.
        pulled = start[0] + side * min(26 + 0.32 * abs(end_y - y), _BOW) * 4 / 3
        return [(start, (pulled, y), (pulled, end_y), end)]
    side = 1 if there > here else -1
    stops = [(x + side * places.half, y - side * _APART)]
    for column in range(here + side, there, side):
        middle, rows = places.x[column], places.rows[column]
        straight = y + (middle - x) / (end_x - x) * (end_y - y)
        # The nearest height with no node of the column.
        gaps = [rows[0] - _ROW / 2, *(row + _ROW / 2 for row in rows)]
        _, free = min((abs(gap - straight), gap) for gap in gaps)
        free -= side * _APART / 2
        stops += [(middle - side * places.half, free), (middle + side * places.half, free)]
    stops.append((end_x - side * places.half, end_y - side * _APART))
    curves = []
    for start, end in pairwise(stops):
        half_way = (start[0] + end[0]) / 2
        curves.append((start, (half_way, start[1]), (half_way, end[1]), end))
    return curves


def _badge(edge: DrawnEdge, places: _Places) -> _Point:
    """Return where the number of an edge stands: on its first curve, before others cross it."""
    t = 0.5 if places.column[edge.before] == places.column[edge.after] else 0.36
    shares = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
    points = _curves(edge, places)[0]
    x, y = (sum(s * p[i] for s, p in zip(shares, points, strict=True)) for i in (0, 1))
    return x, y


def _draw_line(parent: Element, path: str, kind: str, width: float, *, routed: bool) -> Element:
    style = {"stroke": COLOURS[kind], "stroke_width": width, "marker_end": f"url(#{kind})"}
    return draw(parent, "path", d=path, stroke_dasharray="8 5" if routed else None, **style)

"""The transition graph in Graphviz's language.

Specs are nodes, in columns: first those with more reductions pending, then by how many axes shard
the tensor. Edges have the colour of their kind of step. Where a plan is marked, the rest is faint.
Permute and exchange join any two specs with nothing pending, so only those of the plan are drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from shardspec.comm.steps import Exchange, Permute, Step
from shardspec.errors import LayoutError
from shardspec.layout.graph import SpecState, state_of
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan, step_text
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import counted, seconds_text

if TYPE_CHECKING:
    import networkx as nx

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
    """The step as text, with its axes."""
    number: int = 0
    """The position on the path, from 1; 0 for an edge beside the path."""

    @property
    def kind(self) -> str:
        """The kind of step, as `COLOURS` has it."""
        return step_kind(self.step)


@dataclass(frozen=True, slots=True)
class GraphDrawing:
    """A drawing of specs in columns, and the steps among them."""

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
    """The accuracy of the seconds in the title; empty without a plan."""

    @property
    def on_path(self) -> frozenset[str]:
        """Labels of the specs that the plan visits."""
        return frozenset(end for edge in self.path for end in (edge.before, edge.after))

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


def step_kind(step: Step) -> str:
    """Return the kind of a step in words, as `COLOURS` has it."""
    return step_text(step).split()[0]


def draw_graph(
    graph: "nx.DiGraph", mesh: DeviceMesh, dims: int, plan: ConversionPlan | None = None
) -> GraphDrawing:
    """Return the drawing of a graph of specs, with the steps of a plan marked.

    Nodes are `ShardingSpec` with numbered axes, edges have a `step`, as `LayoutConverter.graph`
    and `transitions` return them. Raises `LayoutError` for a plan of another mesh or rank.
    """
    tensor = Layout(mesh, ShardingSpec(dims), (1,) * dims, "float32")  # any size has these specs
    labels = {spec: str(tensor.with_spec(spec).labelled_spec) for spec in graph}
    states = {spec: state_of(spec) for spec in graph}
    specs = sorted(graph, key=lambda spec: (_column(states[spec]), states[spec]))
    columns = [
        tuple(map(labels.__getitem__, column))
        for _, column in groupby(specs, lambda spec: _column(states[spec]))
    ]
    edges = tuple(
        DrawnEdge(labels[spec], labels[reached], edge["step"], _text(edge["step"], mesh))
        for spec in specs
        for reached, edge in graph[spec].items()
        if not isinstance(edge["step"], Permute | Exchange)
    )
    title = f"{counted(len(specs), 'spec')} of {counted(dims, 'dim')} on mesh {mesh}"
    if plan is None:
        return GraphDrawing(title, tuple(columns), edges)
    if (plan.source.mesh, plan.target.mesh, plan.source.spec.dims) != (mesh, mesh, dims):
        raise LayoutError(f"the plan is not of mesh {mesh} and {dims} dims; draw its own")
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
    return GraphDrawing(title, tuple(columns), edges, tuple(path), ends, plan.known_error)


def _column(state: SpecState) -> tuple[int, int]:
    cuts, pending = state
    return -len(pending), sum(map(len, cuts))


def _text(step: Step, mesh: DeviceMesh) -> str:
    return f"{step_text(step)} over {','.join(mesh.axis_labels(step.axes))}"


_FADED: Final = "28"
"""The opacity of edges beside the path, as Graphviz writes it after a colour."""


def dot_text(drawing: GraphDrawing) -> str:
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
    if isinstance(edge.step, Permute | Exchange):  # the graph has no such edges
        style.append("style=dashed")
    return f"  {_quoted(edge.before)} -> {_quoted(edge.after)} [{', '.join(style)}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

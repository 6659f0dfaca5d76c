"""The transition graph to look at: what is drawn, and its text in Graphviz's language.

Specs are nodes, in columns: first those with more reductions pending, then by how many axes cut the
tensor. Edges have the colour of their kind of step. Where a path is marked, the rest stands back.
Permute and exchange join any two specs with nothing pending, so only those on the path are drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shardspec.comm.steps import Exchange, Permute, ReduceOp, Step
from shardspec.errors import LayoutError
from shardspec.layout.graph import MAX_STATES, State, TransitionGraph, count_states, spec_of
from shardspec.layout.layout import Layout, resolve_axes
from shardspec.layout.plan import ConversionPlan, step_text
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh
from shardspec.text import seconds_text

__all__ = ["COLOURS", "Drawing", "DrawnEdge", "dot_text", "draw_transitions", "kind_of"]

COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "slice": "#56b4e9",
        "all-gather": "#0072b2",
        "all-to-all": "#d55e00",
        "reduce-scatter": "#009e73",
        "all-reduce": "#cc79a7",
        "permute": "#b58900",
        "exchange": "#222222",
    }
)
"""By kind of step; most people who see few colours can tell these apart."""


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """One step between two specs."""

    before: str
    """Label of the node it leaves."""
    after: str
    """Label of the node it leads to."""
    step: Step
    text: str
    """What it does, and along which axes."""
    number: int = 0
    """Its place on the path, from 1; 0 where it is not on it."""

    @property
    def routed(self) -> bool:
        """Whether it is a permute or an exchange, which the graph has no edges for."""
        return isinstance(self.step, Permute | Exchange)


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn: specs in columns, and the steps among them."""

    title: str
    columns: tuple[tuple[str, ...], ...]
    """Labels of the nodes of each column."""
    edges: tuple[DrawnEdge, ...]
    """Every step of the graph."""
    path: tuple[DrawnEdge, ...] = ()
    """The steps of the plan that is marked; several slices of one dim are one of these."""
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
        drawn = {kind_of(edge.step) for edge in (*self.edges, *self.path)}
        return tuple(kind for kind in COLOURS if kind in drawn)

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
    """Return the kind of a step in words, as `COLOURS` has it.

    Examples
    --------
    >>> kind_of(Exchange((0, 1)))
    'exchange'
    """
    return step_text(step).split()[0]


def draw_transitions(mesh: DeviceMesh, dims: int, plan: ConversionPlan | None = None) -> Drawing:
    """Return what is to be drawn of the specs of a mesh and a rank.

    Parameters
    ----------
    mesh
        Its number of axes counts, and their names.
    dims
        The tensor's rank.
    plan
        Marked if given. Specs with the reductions that are pending at its source are drawn too.

    Raises
    ------
    LayoutError
        If there are more specs than `MAX_STATES`, or the plan is of another mesh or rank.

    Examples
    --------
    >>> drawing = draw_transitions(DeviceMesh(range(4), (2, 2)), 2)
    >>> [len(column) for column in drawing.columns], len(drawing.edges)
    ([1, 4, 6], 48)
    """
    pending: dict[Axis, ReduceOp] = {}
    if plan is not None:
        if (plan.source.mesh, plan.target.mesh, plan.source.spec.dims) != (mesh, mesh, dims):
            raise LayoutError(f"the plan is not of mesh {mesh} and {dims} dims; draw its own")
        pending = plan.source.spec.partial
    count = count_states(mesh.ndim, dims, len(pending))
    if count > MAX_STATES:
        raise LayoutError(
            f"{count} specs (mesh {mesh}, {_count(dims, 'dim')}) are too many to draw, "
            f"the limit is {MAX_STATES}; draw fewer mesh axes or dims"
        )
    whole = resolve_axes(ShardingSpec(dims, partial=pending), mesh)
    graph = TransitionGraph(mesh.ndim).explore(whole)
    states = sorted(graph.nodes, key=_column_and_place)
    # A tensor of any size has these specs.
    tensor = Layout(mesh, ShardingSpec(dims), (1,) * dims, "float32")
    labels = {state: str(tensor.with_spec(spec_of(state)).labelled_spec) for state in states}
    columns: dict[tuple[int, int], list[str]] = {}
    for state in states:
        columns.setdefault(_column_and_place(state)[:2], []).append(labels[state])
    edges = tuple(
        DrawnEdge(labels[a], labels[b], step, _text(step, mesh))
        for a in states
        for b, step in ((b, graph.edges[a, b]["step"]) for b in graph.adj[a])
    )
    title = f"{_count(count, 'spec')} of {_count(dims, 'dim')} on mesh {mesh}"
    in_columns = tuple(map(tuple, columns.values()))
    if plan is None:
        return Drawing(title, in_columns, edges)
    ends = str(plan.source.labelled_spec), str(plan.target.labelled_spec)
    title = f"{ends[0]} → {ends[1]}, {seconds_text(plan.cost_seconds)}; {title}"
    return Drawing(title, in_columns, edges, _path(plan), ends, plan.known_error)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _column_and_place(state: State) -> tuple[int, int, State]:
    cuts, pending = state
    return -len(pending), sum(map(len, cuts)), state


def _text(step: Step, mesh: DeviceMesh) -> str:
    return f"{step_text(step)} over {','.join(mesh.axis_label(axis) for axis in step.axes)}"


def _path(plan: ConversionPlan) -> tuple[DrawnEdge, ...]:
    moves = zip(plan.moves, plan.step_seconds, strict=True)
    return tuple(
        DrawnEdge(
            str(before.labelled_spec),
            str(after.labelled_spec),
            step,
            f"{_text(step, plan.source.mesh)}, {seconds_text(seconds)}",
            number,
        )
        for number, ((step, before, after), seconds) in enumerate(moves, 1)
    )


_FADED: Final = "28"
"""The opacity of what is not on the path, as Graphviz writes it after a colour."""


def dot_text(drawing: Drawing) -> str:
    """Return a drawing in Graphviz's language.

    Examples
    --------
    >>> text = dot_text(draw_transitions(DeviceMesh(range(2), (2,)), 1))
    >>> print(text.splitlines()[-2])
      "[S0]" -> "[R]" [color="#0072b2", fontcolor="#0072b2", label="all-gather dim 0 over 0"];
    """
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
    marked = {(edge.before, edge.after) for edge in drawing.path}
    others = (edge for edge in drawing.edges if (edge.before, edge.after) not in marked)
    lines += [_dot_edge(edge, faded=bool(drawing.path)) for edge in others]
    lines += [_dot_edge(edge, faded=False) for edge in drawing.path]
    return "\n".join([*lines, "}", ""])


def _dot_edge(edge: DrawnEdge, *, faded: bool) -> str:
    colour = COLOURS[kind_of(edge.step)]
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

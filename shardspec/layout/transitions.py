"""Makes the graph of a tensor's specs and the steps between them, for networkx and Graphviz.

`LayoutConverter.graph` and `LayoutConverter.to_dot` show examples.
"""

from typing import TYPE_CHECKING

import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Exchange, Permute, Step
from shardspec.errors import LayoutError
from shardspec.layout.graph import MAX_STATES, Cuts, spec_of, state_of
from shardspec.layout.layout import Layout
from shardspec.layout.plan import STEP_COLORS, ConversionPlan, step_kind, step_text
from shardspec.layout.pricing import states_of
from shardspec.layout.table import bytes_of_moves, table_prices
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import counted, seconds_text

if TYPE_CHECKING:
    import networkx as nx


def priced_graph(tensor: Layout, model: CostModel) -> "nx.DiGraph":
    """Return the graph of all specs of a tensor, priced; see `LayoutConverter.graph`."""
    import networkx as nx

    start = state_of(tensor.spec)  # refuses parts and blocks
    _check_size(states_of(tensor), tensor.mesh, tensor.spec.dims)
    replicated = tensor.with_spec(spec_of((((),) * tensor.spec.dims, start[1])))
    prices = table_prices(replicated, model)
    received, specs = bytes_of_moves(prices, replicated), [spec_of(s) for s in prices.space.states]
    places = [_places(cuts, tensor.mesh.ndim) for cuts, _ in prices.space.states]
    changes = np.array(places, dtype=np.int64).reshape(len(specs), tensor.mesh.ndim)
    bits = 1 << np.arange(tensor.mesh.ndim)
    routed_steps: dict[tuple[int, ...], Step] = {}  # a few, on millions of edges
    graph = nx.DiGraph()
    graph.add_nodes_from(specs)
    for source, (cuts, _) in enumerate(prices.space.states):
        targets = np.flatnonzero(np.isfinite(prices.seconds[source]))
        seconds, kinds = prices.seconds[source, targets], prices.kind[source, targets]
        num_bytes = received(np.full(len(specs), source))[targets]
        changed = (changes[targets] != changes[source]) @ bits
        sharded = sum(1 << axis for axes in cuts for axis in axes)
        rows = zip(
            *(x.tolist() for x in (targets, seconds, num_bytes, kinds, changed)), strict=True
        )
        for target, edge_seconds, edge_bytes, kind, axes_changed in rows:
            if kind == 0:
                step = prices.steps[source, target]
            else:
                key = kind, axes_changed, sharded
                if key not in routed_steps:
                    routed_steps[key] = prices.step(source, target)
                step = routed_steps[key]
            graph.add_edge(
                specs[source], specs[target], step=step, seconds=edge_seconds, bytes=edge_bytes
            )
    return graph


def _places(cuts: Cuts, num_axes: int) -> list[int]:
    """Return a number per axis that encodes its dim and position in a spec; 0 if unused."""
    places = [0] * num_axes
    for dim, axes in enumerate(cuts):
        for index, axis in enumerate(axes):
            places[axis] = 1 + dim * num_axes + index
    return places


def _check_size(count: int, mesh: DeviceMesh, dims: int) -> None:
    if count > MAX_STATES:
        raise LayoutError(
            f"the graph of mesh {mesh} and {counted(dims, 'dim')} has {count:,} specs, more than "
            f"{MAX_STATES:,}; use fewer mesh axes or dims"
        )


def dot_text(layout: Layout, model: CostModel, plan: ConversionPlan | None = None) -> str:
    """Return the graph of a tensor's specs, with the steps of a plan in bold; see `to_dot`."""
    graph = priced_graph(layout, model)
    labels = {spec: _quoted(layout.with_spec(spec).labelled_spec) for spec in graph}

    def edge(nodes: tuple[str, str], step: Step, seconds: float, style: str) -> str:
        color = STEP_COLORS[step_kind(step)]
        axes = ",".join(layout.mesh.axis_labels(step.axes))
        text = _quoted(f"{step_text(step)} over {axes}, {seconds_text(seconds)}")
        return f'  {nodes[0]} -> {nodes[1]} [label={text}, color="{color}"{style}];'

    lines = ["digraph transitions {", "  rankdir=LR; node [shape=box];"]
    path: dict[tuple[str, str], str] = {}
    if plan is not None:
        for (step, before, after), seconds in zip(plan.moves, plan.step_seconds, strict=True):
            nodes = _quoted(before.labelled_spec), _quoted(after.labelled_spec)
            path[nodes] = edge(nodes, step, seconds, ", penwidth=3")
    for spec in sorted(graph, key=state_of):
        lines.append(f"  {labels[spec]};")
        for reached, of in graph[spec].items():
            nodes = labels[spec], labels[reached]
            # Permute and exchange connect any two specs; the picture has those of the plan.
            if nodes not in path and not isinstance(of["step"], Permute | Exchange):
                lines.append(edge(nodes, of["step"], of["seconds"], ""))
    return "\n".join([*lines, *path.values(), "}", ""])


def _quoted(text: object) -> str:
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

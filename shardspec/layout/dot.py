"""The transition graph of a tensor in Graphviz's language."""

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Exchange, Permute, Step
from shardspec.layout.graph import state_of
from shardspec.layout.layout import Layout
from shardspec.layout.plan import STEP_COLORS, ConversionPlan, step_kind, step_text
from shardspec.layout.transitions import priced_graph
from shardspec.text import seconds_text


def dot_text(layout: Layout, model: CostModel, plan: ConversionPlan | None = None) -> str:
    """Return the graph of a tensor's specs, with the steps of a plan in bold; see `to_dot`."""
    graph = priced_graph(layout, model)
    labels = {spec: _quoted(layout.with_spec(spec).labelled_spec) for spec in graph}

    def edge(ends: tuple[str, str], step: Step, seconds: float, style: str) -> str:
        color = STEP_COLORS[step_kind(step)]
        axes = ",".join(layout.mesh.axis_labels(step.axes))
        text = _quoted(f"{step_text(step)} over {axes}, {seconds_text(seconds)}")
        return f'  {ends[0]} -> {ends[1]} [label={text}, color="{color}"{style}];'

    lines = ["digraph transitions {", "  rankdir=LR; node [shape=box];"]
    path: dict[tuple[str, str], str] = {}
    if plan is not None:
        for (step, before, after), seconds in zip(plan.moves, plan.step_seconds, strict=True):
            ends = _quoted(before.labelled_spec), _quoted(after.labelled_spec)
            path[ends] = edge(ends, step, seconds, ", penwidth=3")
    for spec in sorted(graph, key=state_of):
        lines.append(f"  {labels[spec]};")
        for reached, of in graph[spec].items():
            ends = labels[spec], labels[reached]
            # Permute and exchange join any two specs; the picture has those of the plan.
            if ends not in path and not isinstance(of["step"], Permute | Exchange):
                lines.append(edge(ends, of["step"], of["seconds"], ""))
    return "\n".join([*lines, *path.values(), "}", ""])


def _quoted(text: object) -> str:
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

"""The transition graph as DOT: what is in it."""

import json
import os
import re
import subprocess
import sys
from math import prod

import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, Link, ShardingSpec
from shardspec.errors import LayoutError
from shardspec.layout.dot import COLOURS, dot_text, draw_graph, step_kind
from shardspec.layout.graph import count_states, explore, spec_of
from shardspec.layout.transitions import transitions

FAST, SLOW = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9)
SVG = "{http://www.w3.org/2000/svg}"


def mesh_of(shape, names=None):
    return DeviceMesh(range(prod(shape)), shape, axis_names=names)


def draw(mesh, dims, plan=None):
    """Draw the graph of a mesh, with what is pending at the plan's source."""
    pending = plan.source.spec.partial if plan is not None else {}
    return draw_graph(transitions(mesh, dims, pending), mesh, dims, plan)


def plan_of(mesh, source, target, sizes=(600, 1200)):
    converter = LayoutConverter(CostModel(mesh.shape, (SLOW, *[FAST] * (mesh.ndim - 1))))
    return converter.plan(Layout(mesh, source, sizes, "float32"), target)


@pytest.mark.parametrize(("shape", "dims"), [((2, 3), 2), ((2, 3), 3), ((2, 2, 3), 2), ((4,), 1)])
def test_nodes_and_edges_are_those_of_the_graph(shape, dims):
    mesh = mesh_of(shape)
    drawing = draw(mesh, dims)
    graph = explore(mesh.ndim, ShardingSpec(dims))
    assert {label for column in drawing.columns for label in column} == {
        str(spec_of(state)) for state in graph
    }
    assert sum(map(len, drawing.columns)) == count_states(mesh.ndim, dims, 0)
    assert {(edge.before, edge.after, edge.step) for edge in drawing.edges} == {
        (str(spec_of(a)), str(spec_of(b)), step) for a, b, step in graph.edges(data="step")
    }
    assert (drawing.path, drawing.ends) == ((), None)
    assert json.loads(json.dumps(drawing.as_dict())) == drawing.as_dict()


def test_pending_specs_are_drawn_with_a_plan_from_one():
    mesh = mesh_of((2, 3), ("dp", "tp"))
    plan = plan_of(mesh, "[S(dp),R|P(tp)]", "[R,S(dp,tp)]")
    drawing = draw(mesh, 2, plan)
    assert drawing.columns[0] == ("[R,R|P(tp)]",)
    assert drawing.columns[1] == ("[R,S(dp)|P(tp)]", "[S(dp),R|P(tp)]")
    assert [len(column) for column in drawing.columns] == [1, 2, 1, 4, 6]
    assert drawing.ends == ("[S(dp),R|P(tp)]", "[R,S(dp,tp)]")
    assert {"reduce-scatter", "all-reduce"} < {edge.kind for edge in drawing.edges}
    assert [edge.number for edge in drawing.path] == list(range(1, len(plan.steps) + 1))
    assert drawing.path[0].text == "all-reduce sum over tp, 18.9 µs"


def test_the_path_has_permutes_exchanges_and_joined_slices():
    mesh = DeviceMesh(range(8), (2, 4))
    layout = Layout(mesh, "[S01,R]", (4096, 4096), "bf16")
    converter = LayoutConverter(CostModel(mesh.shape, (FAST,) * 2))
    for source, target, kind in [
        ("[S01,R]", "[S10,R]", "permute"),
        ("[S0,R]", "[R,S01]", "exchange"),
        ("[R,R]", "[S01,R]", "slice"),
    ]:
        plan = converter.plan(layout.with_spec(source), target)
        drawing = draw(mesh, 2, plan)
        (edge,) = drawing.path
        assert (edge.before, edge.after, step_kind(edge.step)) == (source, target, kind)
        assert ("style=dashed" in dot_text(drawing)) == (kind != "slice")
        assert edge.kind == kind
        assert (f"  {json.dumps(source)} -> {json.dumps(target)} [" in dot_text(drawing)) is True


def test_dot_has_a_line_for_each_node_and_edge():
    mesh = mesh_of((2, 3))
    drawing = draw(mesh, 2, plan_of(mesh, "[S01,R]", "[R,S1]"))
    lines = dot_text(drawing).splitlines()
    assert (lines[0], lines[-1]) == ("digraph transitions {", "}")
    edge = re.compile(r'  ("[^"]+") -> ("[^"]+") \[(color="#[0-9a-f]{6,8}".*)\];')
    found = [match.groups() for line in lines if (match := edge.fullmatch(line))]
    assert len(found) == len(drawing.edges) == 48
    marked = [(a, b) for a, b, style in found if "penwidth=3" in style]
    assert marked == [(json.dumps(e.before), json.dumps(e.after)) for e in drawing.path]
    assert all(("label=" in style) == ("penwidth=3" in style) for _, _, style in found)
    assert sum('fillcolor="#fff3bf"' in line for line in lines) == len(drawing.on_path) >= 2
    unmarked = dot_text(draw(mesh, 2))
    assert unmarked.count("label=") == 1 + 48
    for kind in ("slice", "all-gather", "all-to-all"):
        assert f'color="{COLOURS[kind]}"' in unmarked


def test_a_conversion_to_itself_marks_no_step():
    mesh = mesh_of((2,))
    same = draw(mesh, 1, plan_of(mesh, "[S0]", "[S0]", (4,)))
    assert (same.title, same.path) == ("[S0] → [S0], 0 s; 2 specs of 1 dim on mesh 2", ())
    assert "1 spec of 0 dims" in draw(mesh, 0).title


def test_cuts_by_parts_and_blocks_have_a_column_of_their_own():
    mesh = mesh_of((2, 3))
    for source, target, others in [
        ("[S0,R]", "[S0*2,R]", ("[S0*2,R]",)),
        ("[S0{400,200},R]", "[R,S1]", ("[S0{400,200},R]",)),
        ("[S0{400,200},R]", "[S0*2,R]", ("[S0{400,200},R]", "[S0*2,R]")),
        ("[S0*2,R]", "[S0*2,R]", ("[S0*2,R]",)),
    ]:
        plan = plan_of(mesh, source, target)
        drawing = draw(mesh, 2, plan)
        assert drawing.columns[-1] == others
        assert {source, target} <= {label for column in drawing.columns for label in column}


SCRIPT = """
from shardspec import DeviceMesh
from shardspec.layout.dot import dot_text, draw_graph
from shardspec.layout.transitions import transitions
mesh = DeviceMesh(range(12), (2, 2, 3))
print(dot_text(draw_graph(transitions(mesh, 2), mesh, 2)))
"""


def test_drawings_are_the_same_in_every_process():
    texts = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(texts) == 1
    assert texts.pop().count("-> ") == 390


def test_what_is_not_drawn():
    with pytest.raises(LayoutError) as caught:
        draw(mesh_of((2,) * 5), 4)
    assert str(caught.value) == (
        "the graph of mesh 2x2x2x2x2 and 4 dims has 12,341 specs; graphs of up to 1,500 are laid "
        "out whole: take fewer mesh axes or dims"
    )
    plan = plan_of(mesh_of((2, 3)), "[S0,R]", "[R,R]")
    with pytest.raises(LayoutError, match="the plan is not of mesh 3x2 and 2 dims; draw its own"):
        draw(mesh_of((3, 2)), 2, plan)


def test_columns_have_the_same_order_as_the_search():
    assert draw(mesh_of((2, 3)), 2).columns[1] == ("[R,S0]", "[R,S1]", "[S0,R]", "[S1,R]")

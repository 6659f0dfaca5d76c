"""The transition graph as DOT and SVG: what is in it, and that nothing lies on anything else."""

import json
import os
import re
import subprocess
import sys
from itertools import combinations, pairwise, product
from math import hypot, prod
from xml.etree import ElementTree

import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, Link
from shardspec.errors import LayoutError
from shardspec.layout.drawing import COLOURS, dot_text, draw_transitions, kind_of, svg_text
from shardspec.layout.graph import count_states, explore, spec_of
from shardspec.layout.spec import ShardingSpec

FAST, SLOW = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9)
SVG = "{http://www.w3.org/2000/svg}"


def mesh_of(shape, names=None):
    return DeviceMesh(range(prod(shape)), shape, axis_names=names)


def plan_of(mesh, source, target, sizes=(600, 1200)):
    converter = LayoutConverter(CostModel(mesh.shape, (SLOW, *[FAST] * (mesh.ndim - 1))))
    return converter.plan(Layout(mesh, source, sizes, "float32"), target)


@pytest.mark.parametrize(("shape", "dims"), [((2, 3), 2), ((2, 3), 3), ((2, 2, 3), 2), ((4,), 1)])
def test_nodes_and_edges_are_those_of_the_graph(shape, dims):
    mesh = mesh_of(shape)
    drawing = draw_transitions(mesh, dims)
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
    drawing = draw_transitions(mesh, 2, plan)
    assert drawing.columns[0] == ("[R,R|P(tp)]",)
    assert drawing.columns[1] == ("[R,S(dp)|P(tp)]", "[S(dp),R|P(tp)]")
    assert [len(column) for column in drawing.columns] == [1, 2, 1, 4, 6]
    assert drawing.ends == ("[S(dp),R|P(tp)]", "[R,S(dp,tp)]")
    assert {"reduce-scatter", "all-reduce"} < set(drawing.kinds)
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
        drawing = draw_transitions(mesh, 2, plan)
        (edge,) = drawing.path
        assert (edge.before, edge.after, kind_of(edge.step)) == (source, target, kind)
        assert edge.routed == (kind != "slice")
        assert kind in drawing.kinds
        assert (f"  {json.dumps(source)} -> {json.dumps(target)} [" in dot_text(drawing)) is True


def test_dot_has_a_line_for_each_node_and_edge():
    mesh = mesh_of((2, 3))
    drawing = draw_transitions(mesh, 2, plan_of(mesh, "[S01,R]", "[R,S1]"))
    lines = dot_text(drawing).splitlines()
    assert (lines[0], lines[-1]) == ("digraph transitions {", "}")
    edge = re.compile(r'  ("[^"]+") -> ("[^"]+") \[(color="#[0-9a-f]{6,8}".*)\];')
    found = [match.groups() for line in lines if (match := edge.fullmatch(line))]
    assert len(found) == len(drawing.edges) == 48
    marked = [(a, b) for a, b, style in found if "penwidth=3" in style]
    assert marked == [(json.dumps(e.before), json.dumps(e.after)) for e in drawing.path]
    assert all(("label=" in style) == ("penwidth=3" in style) for _, _, style in found)
    assert sum('fillcolor="#fff3bf"' in line for line in lines) == len(drawing.on_path) >= 2
    unmarked = dot_text(draw_transitions(mesh, 2))
    assert unmarked.count("label=") == 1 + 48
    for kind in ("slice", "all-gather", "all-to-all"):
        assert f'color="{COLOURS[kind]}"' in unmarked


def numbers(element, *names):
    return [float(element.attrib[name]) for name in names]


def points_of(path):
    """Yield points along a path of cubic curves."""
    words = [tuple(map(float, w.split(","))) for w in re.findall(r"[-\d.]+,[-\d.]+", path)]
    for start in range(0, len(words) - 1, 3):
        a, b, c, d = words[start : start + 4]
        for step in range(1, 40):
            t = step / 40
            shares = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            yield tuple(
                sum(s * p[i] for s, p in zip(shares, (a, b, c, d), strict=True)) for i in (0, 1)
            )


def check_picture(text, nodes, on_path):
    """Nothing lies on a node but what ends there, no number on another, all on the page."""
    root = ElementTree.fromstring(text)
    width, height = numbers(root, "width", "height")
    boxes = [
        (x, y, x + w, y + h)
        for x, y, w, h in (
            numbers(rect, "x", "y", "width", "height")
            for rect in root.iter(f"{SVG}rect")
            if rect.get("class") == "node"
        )
    ]
    assert len(boxes) == nodes
    for a, b in combinations(boxes, 2):
        assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]
    circles = [numbers(circle, "cx", "cy", "r") for circle in root.iter(f"{SVG}circle")]
    assert len(circles) == 2 * on_path  # on the path, and in the list
    for (x, y, r), (left, top, right, bottom) in product(circles, boxes):
        assert hypot(max(left - x, 0, x - right), max(top - y, 0, y - bottom)) > r
    for (x, y, r), (x2, y2, r2) in combinations(circles, 2):
        assert hypot(x - x2, y - y2) > r + r2
    for x, y, r in circles:
        assert r <= x <= width - r
        assert r <= y <= height - r
    for path in root.iter(f"{SVG}path"):
        if "C" in path.attrib["d"]:
            for x, y in points_of(path.attrib["d"]):
                assert 0 < x < width
                assert 0 < y < height
                assert not any(a < x < c and b < y < d for a, b, c, d in boxes)
    for label in root.iter(f"{SVG}text"):
        x, _ = numbers(label, "x", "y")
        if "text-anchor" not in label.attrib:
            wide = 1.2 if label.get("font-size") else 1.0
            assert x + 7.2 * wide * len(label.text or "") <= width


@pytest.mark.parametrize(("shape", "dims"), [((2, 3), 2), ((2, 3), 3), ((2, 2, 2), 2), ((3,), 1)])
def test_nothing_overlaps(shape, dims):
    mesh = mesh_of(shape, ("data", "tensor", "p")[: len(shape)])
    drawing = draw_transitions(mesh, dims)
    check_picture(svg_text(drawing), count_states(mesh.ndim, dims, 0), 0)


def test_nothing_overlaps_on_any_path_of_two_axes():
    """Every pair of rank 2, and from a source with a sum pending."""
    mesh = mesh_of((2, 3))
    specs = [label for column in draw_transitions(mesh, 2).columns for label in column]
    pairs = [*product(specs, specs), *(("[S0,R|P1]", s) for s in specs)]
    most = 0
    for source, target in pairs:
        plan = plan_of(mesh, source, target)
        text = svg_text(draw_transitions(mesh, 2, plan))
        check_picture(text, 14 if "P" in source else 11, len(plan.steps))
        most = max(most, len(plan.steps))
    assert most >= 2


def test_scalars_and_ends_that_are_the_same():
    mesh = mesh_of((2,))
    check_picture(svg_text(draw_transitions(mesh, 0)), 1, 0)
    check_picture(svg_text(draw_transitions(mesh, 0, plan_of(mesh, "[|P0]", "[]", ()))), 2, 1)
    same = draw_transitions(mesh, 1, plan_of(mesh, "[S0]", "[S0]", (4,)))
    check_picture(svg_text(same), 2, 0)
    assert same.title == "[S0] → [S0], 0 s; 2 specs of 1 dim on mesh 2"
    assert "1 spec of 0 dims" in draw_transitions(mesh, 0).title


def test_cuts_by_parts_and_blocks_have_a_column_of_their_own():
    mesh = mesh_of((2, 3))
    for source, target, others in [
        ("[S0,R]", "[S0*2,R]", ("[S0*2,R]",)),
        ("[S0{400,200},R]", "[R,S1]", ("[S0{400,200},R]",)),
        ("[S0{400,200},R]", "[S0*2,R]", ("[S0{400,200},R]", "[S0*2,R]")),
        ("[S0*2,R]", "[S0*2,R]", ("[S0*2,R]",)),
    ]:
        plan = plan_of(mesh, source, target)
        drawing = draw_transitions(mesh, 2, plan)
        assert drawing.columns[-1] == others
        assert {source, target} <= {label for column in drawing.columns for label in column}
        check_picture(svg_text(drawing), 11 + len(others), len(plan.steps))


def test_what_is_not_on_the_path_is_faint():
    mesh = mesh_of((2, 3))
    plan = plan_of(mesh, "[S0,R]", "[R,S1]")
    assert 'opacity="0.13"' in svg_text(draw_transitions(mesh, 2, plan))
    assert 'opacity="0.6"' in svg_text(draw_transitions(mesh, 2))


SCRIPT = """
from shardspec import DeviceMesh
from shardspec.layout.drawing import dot_text, draw_transitions, svg_text
drawing = draw_transitions(DeviceMesh(range(12), (2, 2, 3)), 2)
print(dot_text(drawing), svg_text(drawing))
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
        draw_transitions(mesh_of((2,) * 5), 4)
    assert str(caught.value) == (
        "12341 specs (mesh 2x2x2x2x2, 4 dims) are too many to draw, the limit is 1500; "
        "draw fewer mesh axes or dims"
    )
    plan = plan_of(mesh_of((2, 3)), "[S0,R]", "[R,R]")
    with pytest.raises(LayoutError, match="the plan is not of mesh 3x2 and 2 dims; draw its own"):
        draw_transitions(mesh_of((3, 2)), 2, plan)


def test_columns_have_the_same_order_as_the_search():
    drawing = draw_transitions(mesh_of((2, 3)), 2)
    assert drawing.columns[1] == ("[R,S0]", "[R,S1]", "[S0,R]", "[S1,R]")
    root = ElementTree.fromstring(svg_text(drawing))
    labels = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("[")]
    at = {label.text: numbers(label, "x", "y") for label in labels}
    for column in drawing.columns:
        assert len({at[label][0] for label in column}) == 1
        assert all(at[a][1] < at[b][1] for a, b in pairwise(column))

"""The transition graph in Graphviz's language."""

import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest

from shardspec import DeviceMesh, Layout, LayoutConverter
from shardspec.errors import LayoutError, LossyConversionError
from shardspec.layout.graph import explore, spec_of
from shardspec.layout.plan import STEP_COLORS

MESH = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
EDGE = re.compile(r'  "([^"]+)" -> "([^"]+)" \[label="([^"]+)", color="([^"]+)"(, penwidth=3)?\];')


def edges_of(text):
    return [match.groups() for line in text.splitlines() if (match := EDGE.fullmatch(line))]


@pytest.mark.parametrize("spec", ["[R,R]", "[S(dp),R|P(tp)]", "[R,R|P(dp,tp)]"])
def test_nodes_and_edges_are_those_of_the_graph(spec):
    layout = Layout(MESH, spec, (600, 1200), "float32")
    text = LayoutConverter().to_dot(layout)
    graph = explore(2, layout.spec.with_dims({0: (), 1: ()}))
    labels = {state: str(layout.with_spec(spec_of(state)).labelled_spec) for state in graph}
    assert set(re.findall(r'^  "([^"]+)";$', text, re.MULTILINE)) == set(labels.values())
    found = edges_of(text)
    assert {(a, b) for a, b, *_ in found} == {(labels[a], labels[b]) for a, b in graph.edges}
    for _, _, label, color, bold in found:
        assert STEP_COLORS[label.split()[0]] == color
        assert not bold


@pytest.mark.parametrize(
    ("source", "target"),
    [("[S(dp,tp),R]", "[S(tp,dp),R]"), ("[S(dp),R|P(tp)]", "[R,S(dp,tp)]"), ("[S(dp),R]",) * 2],
)
def test_the_steps_of_the_plan_are_bold(source, target):
    layout = Layout(MESH, source, (600, 1200), "float32")
    plan = LayoutConverter().plan(layout, target)
    specs = [str(each.labelled_spec) for each in plan.layouts]
    found = edges_of(LayoutConverter().to_dot(layout, target))
    assert [(a, b) for a, b, *_, bold in found if bold] == list(pairwise(specs))


def test_drawings_are_the_same_in_every_process():
    script = (
        "from shardspec import DeviceMesh, Layout, LayoutConverter\n"
        "layout = Layout(DeviceMesh(range(12), (2, 2, 3)), '[S0,R]', (24, 24), 'f32')\n"
        "print(LayoutConverter().to_dot(layout, '[R,S01]'))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(texts) == 1


def test_what_is_not_drawn():
    wide = Layout(DeviceMesh(range(32), (2,) * 5), "[R,R,R,R]", (8,) * 4, "f32")
    with pytest.raises(LayoutError, match="12,341 specs"):
        LayoutConverter().to_dot(wide)
    with pytest.raises(LossyConversionError):
        LayoutConverter().to_dot(Layout(MESH, "[S(dp)*2,R]", (600, 1200), "f32"))

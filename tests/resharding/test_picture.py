"""Plans as drawings: who sends how much to whom."""

import re
from xml.etree import ElementTree

import pytest

from shardspec import DeviceMesh, Layout, LayoutConverter, plan_reshard
from shardspec.errors import LayoutError
from shardspec.resharding.picture import plan_html, plan_svg
from shardspec.text import bytes_text

SVG = "{http://www.w3.org/2000/svg}"


def plan_between(senders: int, receivers: int, rows: int = 12):
    source = {"w": Layout(DeviceMesh(range(senders)), "[S0,R]", (rows, 6), "float32")}
    target = DeviceMesh(range(senders, senders + receivers)), {"w": "[S0,R]"}
    return plan_reshard(source, target)


def titles(root: ElementTree.Element, kind: str) -> list[str]:
    return [
        rect.findtext(f"{SVG}title") or ""
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class") == kind
    ]


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (4, 2), (3, 5), (2, 40)])
def test_every_pair_has_its_square_and_every_device_its_bar(senders, receivers):
    plan = plan_between(senders, receivers, rows=40)
    root = ElementTree.fromstring(plan_svg(plan))
    expected = [f"{a} → {b}: {bytes_text(n)}" for (a, b), n in sorted(plan.traffic.items()) if n]
    assert titles(root, "bytes") == expected
    assert len(titles(root, "empty")) == senders * receivers - len(expected)
    bars = [
        bytes_text(moved[one])
        for moved in (plan.sent, plan.received)
        for one in plan.devices
        if moved[one]
    ]
    assert titles(root, "bar") == bars
    shades = [
        float(r.get("fill-opacity", 0))
        for r in root.iter(f"{SVG}rect")
        if r.get("class") == "bytes"
    ]
    assert max(shades) == 1
    assert min(shades) > 0.1


def test_a_plan_that_sends_nothing_is_drawn():
    mesh = DeviceMesh(range(2))
    layout = Layout(mesh, "[S0]", (4,), "float32")
    root = ElementTree.fromstring(plan_reshard({"w": layout}, (mesh, {"w": "[S0]"})).svg())
    assert titles(root, "bytes") == titles(root, "bar") == []
    assert root.get("aria-label") == "1 tensor, 0 B sent"


def test_a_page_names_files_and_escapes_them():
    page = plan_html(plan_between(2, 2), {0: "<a>.safetensors", 1: "b" * 40})
    assert "&lt;a&gt;.safetensors" in page
    assert "<a>" not in page
    assert f"…{'b' * 23}<" in page
    assert "busiest sender" in page


def test_too_many_ends_are_refused_and_a_notebook_gets_text():
    plan = plan_between(300, 1, rows=300)
    with pytest.raises(LayoutError, match="the plan has 300 senders, and up to 256 can be drawn"):
        plan.svg()
    assert plan._repr_html_().startswith("<pre>1 tensor on 301 devices")
    assert plan_between(2, 2)._repr_html_().startswith("<svg")


def test_a_conversion_is_drawn_layout_by_layout():
    mesh = DeviceMesh(range(4), (2, 2))
    plan = LayoutConverter().plan(Layout(mesh, "[S01,R]", (4096, 4096), "bf16"), "[S10,R]")
    root = ElementTree.fromstring(plan.svg())
    inner = [part.get("aria-label") for part in root.findall(f"{SVG}svg")]
    assert inner == [plan.source.title, *(str(a.spec) for _, _, a in plan.moves)]
    assert len(root.findall(f"{SVG}path")) == len(plan.steps)
    assert len(re.findall("<style>", plan.svg())) == 1

"""`shardspec explore`: what it writes, and what it refuses. The page itself: tests/explorer."""

import json
import re

import pytest
from click.testing import CliRunner

from shardspec import DeviceMesh
from shardspec.cli.main import cli
from shardspec.explorer import (
    MAX_CONVERSIONS,
    MAX_PAGE_DEVICES,
    MAX_PAGE_DIMS,
    all_layouts,
    count_conversions,
    explorer_page,
)

SMALL = ("--mesh", "2", "--shape", "4x4", "--links", "unit")


def run(*args):
    return CliRunner().invoke(cli, ["explore", *args])


def tables(path):
    page = path.read_text("utf-8")
    found = re.search(
        r'<script type="application/json" id="tables">(.*?)</script>', page, re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("options", "links", "line", "grid"),
    [
        # Of what cannot be added up there are fewer layouts.
        (["--dtype", "float8_e4m3fn", "--links", "unit"], (1, 1), 3**2, 11**2),
        pytest.param([], (2, 3), 13, 223, marks=pytest.mark.exhaustive),
    ],
)
def test_without_options_there_is_something_to_pick(tmp_path, options, links, line, grid):
    path = tmp_path / "page.html"
    done = run("-o", str(path), *options)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{path}: every conversion on 4, 2x2, 2x4, ")
    # As the documentation says; 4,092 conversions.
    assert path.stat().st_size < 400_000
    data = tables(path)
    assert [mesh["name"] for mesh in data["meshes"]] == ["4", "2x2", "2x4"]
    assert [len(mesh["links"]) for mesh in data["meshes"]] == [links[0], links[1], links[1]]
    assert all(len(mesh["tensors"]) == 3 for mesh in data["meshes"])
    pairs = sum(
        plans is not None
        for mesh in data["meshes"]
        for tensor in mesh["tensors"]
        for of_links in tensor["plans"]
        for row in of_links
        for plans in row
    )
    assert pairs == 3 * (links[0] * line + 2 * links[1] * grid)


def test_help_says_the_limits():
    text = " ".join(run("-h").output.split())
    assert (
        f"Limits are {MAX_PAGE_DEVICES} devices a mesh, {MAX_PAGE_DIMS} dims a tensor and" in text
    )
    assert f"{MAX_CONVERSIONS:,} conversions" in text


def test_nothing_comes_from_outside(tmp_path):
    path = tmp_path / "page.html"
    assert run(*SMALL, "-o", str(path)).exit_code == 0
    page = path.read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"%[A-Z]+%", page)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,", "#field"}
    assert "url(http" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_names_of_axes_cannot_end_the_script():
    mesh = DeviceMesh(range(2), (2,), axis_names=("x",))
    page = explorer_page([mesh], [(4,)], [("unit",)], "int8")
    assert page.count("</script>") == 2
    assert "[S(x)]" in page


def test_a_dtype_without_sums_has_no_pending_ones():
    mesh = DeviceMesh(range(4), (2, 2))
    assert len(all_layouts(mesh, (4, 4), "float8_e4m3fn")) == 11
    assert len(all_layouts(mesh, (4, 4), "bfloat16")) == 18


@pytest.mark.parametrize(("axes", "dims", "pending"), [(1, 1, 1), (2, 2, 2), (2, 3, 2), (3, 1, 3)])
def test_conversions_are_counted_as_they_are(axes, dims, pending):
    layouts = all_layouts(DeviceMesh(range(2**axes), (2,) * axes), (8,) * dims, "float32")
    assert max(len(layout.spec.partials) for layout in layouts) == pending
    pairs = sum(
        set(target.spec.partials) <= set(source.spec.partials)
        for source in layouts
        for target in layouts
    )
    assert pairs == count_conversions(axes, dims)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--mesh", "8x8"), "a mesh of 64 devices is too large to draw; the limit is 32"),
        (("--mesh", "1024x1024"), "too large to draw; the limit is 32"),
        (("--mesh", "2x2x2x2"), "conversions, the limit is 50,000; give meshes of fewer axes"),
        (("--mesh", "2", "--shape", "2x2x2x2"), "cannot be drawn; give one of 1 to 3 dims"),
        (("--mesh", "2", "--shape", ""), "cannot be drawn; give one of 1 to 3 dims"),
        (("--mesh", "2", "--shape", "0x4"), "give one of 1 to 3 dims that has elements"),
        (("--mesh", "2", "--links", "nowhere"), "no link preset 'nowhere'"),
        (("--mesh", "2", "--links", "unit,unit"), "links unit,unit fit no mesh"),
        (
            ("--mesh", "2", "--mesh", "2x2", "--links", "unit,unit"),
            "no links fit mesh 2: give one preset for all axes, or 1 of them",
        ),
        (("--mesh", "2y2"), "is not a whole number"),
    ],
)
def test_bad_input(tmp_path, args, message):
    path = tmp_path / "page.html"
    done = run(*args, "-o", str(path))
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_kept(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("mine")
    done = run(*SMALL, "-o", str(path))
    assert (done.exit_code, path.read_text()) == (3, "mine")
    assert run(*SMALL, "-o", str(path), "--overwrite").exit_code == 0
    assert path.read_text("utf-8").startswith("<!DOCTYPE html>")

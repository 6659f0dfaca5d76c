"""Profiles in JSON, as versions before files of links wrote them."""

import json

import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.comm.steps import AllToAll
from shardspec.errors import ProfileError

RING = {"links": [{"latency_s": 4e-6, "seconds_per_byte": 5.6e-11}]}
LINES = {
    "all-gather": [5e-5, 4.5e-11],
    "reduce-scatter": [5e-5, 4.5e-11],
    "all-reduce": [6e-5, 9e-11],
    "all-to-all": [6e-5, 5.6e-11],
}


def profile(**changed):
    curves = [
        {"axes": [0], "collective": kind, "devices": 8, "lines": [line], "sizes": [1024, 2**30]}
        for kind, line in LINES.items()
    ]
    root = {
        "format": "shardspec profile",
        "version": 1,
        "mesh_shape": [8],
        "axis_names": None,
        "link_model": "ring",
        "fits": {"ring": RING, "shared-bus": RING},
        "curves": curves,
    }
    return {**root, **changed}


def test_the_measured_all_to_all_has_its_price_and_is_not_undercut(tmp_path):
    file = tmp_path / "old.json"
    file.write_text(json.dumps(profile()))
    source = Layout(DeviceMesh(range(8)), "[S0,R]", (8192, 8192), "bfloat16")
    plan = LayoutConverter(CostModel.from_profile(file)).plan(source, "[R,S0]")
    assert [type(step) for step in plan.steps] == [AllToAll]
    fixed, slope = LINES["all-to-all"]
    assert plan.cost_seconds == pytest.approx(fixed + slope * 8192 * 8192 * 2 / 8)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "another"},
        {"version": 2},
        {"link_model": "torus"},
        {"mesh_shape": 8},
        {"fits": {}},
        {"fits": {"ring": {"links": [{"latency_s": -1, "seconds_per_byte": 1}]}}},
        {"curves": [{"axes": [0]}]},
    ],
)
def test_a_damaged_profile_is_refused(tmp_path, changed):
    file = tmp_path / "old.json"
    file.write_text(json.dumps(profile(**changed)))
    with pytest.raises(ProfileError, match=r"old\.json"):
        CostModel.from_profile(file)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.json"):
        CostModel.from_profile(tmp_path / "none.json")

"""Named links: every record complete, and near published times that no fit has seen."""

import json
import re
from dataclasses import FrozenInstanceError, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardSpecError
from shardspec.comm.cluster_file import Basis, Confidence
from shardspec.comm.cost import measured_link, pair_line
from shardspec.comm.curves import KINDS, Link
from shardspec.comm.presets import link_between, link_preset, preset_names
from shardspec.comm.steps import Exchange, Permute
from shardspec.errors import MeshError, ProfileError
from shardspec.layout.plan import step_seconds
from shardspec.profiling.fit import step_of

NAMES = preset_names()
PRESETS = dict(zip(NAMES, map(link_preset, NAMES), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_file_says_where_it_comes_from_and_how_far_it_holds(name, tmp_path):
    preset = PRESETS[name]
    assert preset.name == name
    assert preset.basis in get_args(Basis)
    assert preset.confidence in get_args(Confidence)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", preset.read_on)
    assert preset.source
    assert preset.valid_for
    assert (preset.inside is None) == (preset.link.port is not None)
    assert not preset.link.curves or (preset.basis, bool(preset.link.error)) == ("measured", True)
    assert json.loads(json.dumps(preset.as_dict()))["name"] == name
    again = tmp_path / f"{name}.toml"
    again.write_text(preset.text(), "utf-8")
    assert link_preset(str(again)) == preset


def test_records_are_values():
    with pytest.raises(FrozenInstanceError):
        PRESETS["unit"].per_node = 2  # type: ignore[misc]  # frozen, as is tested
    assert hash(PRESETS["unit"]) == hash(replace(PRESETS["unit"]))


def test_a_link_is_in_seconds():
    ndr = Link(1.4e-5, 1 / 48e9, "ib-ndr-per-gpu", 8.4 / 1e6, port="device")
    assert link_preset("ib-ndr-per-gpu").link == ndr
    assert link_preset("unit").link == Link(0.0, 1e-9, "unit")


def test_the_default_is_a_preset_that_was_assumed():
    (link,) = CostModel.of_mesh(DeviceMesh(range(2))).links
    assert link == replace(link_preset("h100-nvswitch").link, name="assumed h100-nvswitch")


@pytest.mark.parametrize(
    ("ids", "shape", "groups"),
    [
        (range(8), (2, 4), [(1, 2), (1, 4), (1, 8)]),
        (range(16), (4, 4), [(2, 2), (1, 4), (2, 8)]),
        (range(16), (16,), [(2, 8), (2, 8)]),
        (range(100, 116), (2, 8), [(2, 1), (2, 4), (4, 4)]),
        (range(12), (12,), [(3, 4), (3, 4)]),  # the second host is used in part
        (range(24), (3, 2, 4), [(3, 1), (1, 2), (1, 4), (3, 8)]),
        ([0, 8, 16, 24], (4,), [(4, 1), (4, 1)]),
        ([0, 8, 1, 9], (2, 2), [(1, 2), (2, 1), (2, 2)]),
    ],
)
def test_which_devices_are_in_one_node_follows_from_their_ids(ids, shape, groups):
    model = CostModel.from_presets(DeviceMesh(ids, shape), ["h100-nvswitch"])
    axes = range(len(shape))
    assert [*(model.group([axis]) for axis in axes), model.group(axes)] == groups
    assert model.group([]) == (1, 1)


def test_a_mesh_whose_nodes_are_unknown_is_refused():
    for ids, shape, name, why in (
        ([0, 1, 2, 8, 9], (5,), "h100-nvswitch", "its axes do not fill nodes evenly"),
        (range(16), (2, 8), "pcie5-x16", "no link joins its nodes"),
    ):
        with pytest.raises(MeshError) as caught:
            CostModel.from_presets(DeviceMesh(ids, shape), [name])
        assert f"but a node of {name} has 8 devices, and {why}; " in str(caught.value)
    # Nothing is said of the mesh, so that every axis joins nodes.
    (link,) = CostModel.of_mesh(DeviceMesh([0, 1, 2, 8, 9], (5,))).links
    assert (link.name, link.port) == ("assumed ib-ndr-per-gpu", "device")


def test_links_over_nodes_that_nobody_gave_are_said_to_be_assumed():
    assert CostModel.of_mesh(DeviceMesh(range(16), (2, 8))).links_text(["dp", "tp"]) == (
        "no links given: assuming ib-ndr-per-gpu for dp: 22.4 µs, 48 GB/s; "
        "no links given: assuming h100-nvswitch for tp (measured for 2, 4, 8 devices; otherwise "
        "23 µs + 249 GB/s); 2 hosts of 8 devices; local copies at 1675 GB/s"
    )


def test_a_preset_names_what_joins_its_hosts():
    assert PRESETS["h100-nvswitch"].between == "ib-ndr-per-gpu"
    assert link_between(PRESETS["h100-nvswitch"]) == PRESETS["ib-ndr-per-gpu"].link
    assert link_between(PRESETS["pcie5-x16"]) is None
    for preset in PRESETS.values():
        assert not isinstance(preset.between, str) or PRESETS[preset.between].link.port


@pytest.mark.parametrize("between", ["nowhere", "h100-nvswitch"])
def test_a_file_that_names_no_link_between_hosts(tmp_path, between):
    path = tmp_path / "own.toml"
    text = PRESETS["h100-nvswitch"].text().replace('"ib-ndr-per-gpu"', f'"{between}"')
    path.write_text(text, "utf-8")
    with pytest.raises(ProfileError, match=f"own: .*{between}"):
        CostModel.of_mesh(DeviceMesh(range(16)), str(path))


def test_the_file_of_links_in_the_docs(tmp_path):
    docs = Path(__file__).parents[2] / "docs" / "plans.md"
    (text,) = re.findall(r"^```toml\n(.*?)^```$", docs.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    file = tmp_path / "own.toml"
    file.write_text(text)
    source = Layout(DeviceMesh(range(8), (8,)), "[S0]", (1 << 28,), "bf16")
    seconds = {
        first: LayoutConverter(links=str(file))
        .plan(source, Layout(DeviceMesh(range(first, first + 8), (8,)), "[S0]", (1 << 28,), "bf16"))
        .cost_seconds
        for first in (4, 8)
    }
    # 64 MiB through a port of each device; half of the devices of the other mesh share its host.
    assert seconds[8] == pytest.approx(25e-6 + 2**26 / 45e9, rel=1e-3)
    assert seconds[4] == pytest.approx(seconds[8], rel=1e-3)


def test_groups_over_nodes_say_that_nobody_measured_them():
    mesh = DeviceMesh(range(16), (4, 4))
    plan = LayoutConverter(CostModel.from_presets(mesh, ["h100-nvswitch"])).plan(
        Layout(mesh, "[S0]", (1 << 20,), "float32"), "[R]"
    )
    assert plan.known_error == "not measured: all-gather of 2 nodes × 8 (priced from tiers)"


SIZES = 2 ** np.arange(10, 33.1, 0.5)
NODES, RANKS = (1, 2, 3, 4, 8, 32), (*range(1, 9), 16, 36, 72)
INNER = [name for name, preset in PRESETS.items() if preset.scope in ("node", "rack")]
JOINING = [name for name, preset in PRESETS.items() if preset.link.port]
CHAINS = [*product(JOINING, INNER), *(("unit", n) for n in PRESETS if n not in (*JOINING, *INNER))]


def times_of(model, kind):
    lines = model.lines(step_of(kind, tuple(range(len(model.links)))))
    return np.min([fixed + slope * SIZES for fixed, slope in lines], axis=0)


@pytest.mark.parametrize("names", CHAINS)
def test_prices_of_all_groups_are_ordered(names):
    """By the bytes that a device holds, from 1 KiB to 8 GiB, over nodes and devices in each."""
    room = 72 if names[-1] == "gb200-nvl72" else 8
    ranks_of = [ranks for ranks in RANKS if ranks <= room]
    shapes = [shape for shape in product(NODES, ranks_of) if prod(shape) > 1]
    meshes = {s: DeviceMesh(range(prod(s)), s) for s in shapes}
    models = {s: CostModel.from_presets(meshes[s], names, copies=False) for s in shapes}
    prices = {(kind, s): times_of(models[s], kind) for kind in KINDS for s in shapes}
    for times in prices.values():
        assert (times > 0).all()
        assert (np.diff(times) >= 0).all()
    for nodes, ranks in shapes:
        gather = prices["all-gather", (nodes, ranks)]
        assert (
            prices["reduce-scatter", (nodes, ranks)] <= prices["all-reduce", (nodes, ranks)]
        ).all()
        larger = [(n, ranks) for n in NODES if n > nodes][:1]
        larger += [(nodes, n) for n in ranks_of if n > ranks][:1]
        for shape in larger:
            assert (prices["all-gather", shape] >= gather * (1 - 1e-9)).all(), shape
        joined = nodes > 1 and nodes * ranks <= room and names[0] in JOINING
        for kind in KINDS if joined else ():
            inside = times_of(CostModel((nodes * ranks,), (link_preset(names[1]).link,)), kind)
            assert (prices[kind, (nodes, ranks)] >= inside * (1 - 1e-9)).all()


@pytest.mark.parametrize("names", [[name] for name in PRESETS if name not in JOINING])
def test_no_detour_is_cheaper_at_any_preset(names):
    mesh = DeviceMesh(range(8), (2, 4))
    for chain in (names, ["ib-ndr-per-gpu", *names]):
        converter = LayoutConverter(CostModel.from_presets(mesh, chain))
        for rows in (2**8, 2**20):
            seconds = converter.cost_table(mesh, (rows, 512), "bf16", partial=("sum",)).seconds
            detours = (seconds[:, :, None] + seconds[None]).min(axis=1)
            assert (seconds <= detours + 1e-9).all()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(MeshError) as caught:
        link_preset("h100")
    assert isinstance(caught.value, ShardSpecError)
    assert str(caught.value).startswith("no link preset 'h100'; 'shardspec links list'")
    assert all(name in str(caught.value) for name in NAMES[:5])


# Times in µs that no curve was fitted to, by collective and bytes of the whole buffer: nccl-tests
# tables of the ML Engineering Open Book (8 devices), and AutoParallel's nccl_cost_model.py (H100).
GIB = 2**30
PUBLISHED = [
    ("a100-nvswitch", 8, "all-reduce", 8203.9),
    ("h200-nvswitch", 8, "all-reduce", 1.75 * GIB / 463.58e3),
    ("b200-nvswitch", 8, "all-reduce", 1.75 * GIB / 723.34e3),
    *(("h100-nvswitch", n, "all-gather", GIB / x / 1e3) for n, x in ((2, 537), (4, 434), (8, 394))),
    *(("h100-nvswitch", n, "reduce-scatter", GIB / x / 1e3) for n, x in ((4, 434), (8, 394))),
    *(("h100-nvswitch", n, "all-reduce", GIB / x / 1e3) for n, x in ((2, 324), (4, 236), (8, 267))),
]
# Over several nodes: also mscclpp's perf_ndmv5.jsonl (2 x 8 H100). How far off is said in the docs.
H100, B200 = ("ib-ndr-per-gpu", "h100-nvswitch"), ("efa-v4-per-gpu", "b200-nvswitch")
MULTI_NODE = [
    (B200, (4, 8), "all-reduce", 2**20, 1.9375 * 2**20 / 5.37e3, 0.02),
    (B200, (4, 8), "all-reduce", 2**24, 1.9375 * 2**24 / 64.4e3, -0.08),
    (B200, (4, 8), "all-reduce", 2**28, 1.9375 * 2**28 / 229e3, -0.22),
    (B200, (4, 8), "all-reduce", 2**32, 1.9375 * 2**32 / 377e3, 0.03),
    (H100, (2, 8), "all-gather", 3 * GIB, 7480, 0.26),
    (H100, (2, 8), "all-to-all", GIB, 11076, 0.02),
]


def seconds(names, shape, kind, num_bytes):
    # What is published packs nothing.
    model = CostModel.from_presets(DeviceMesh(range(prod(shape)), shape), names, copies=False)
    held = num_bytes // prod(shape) if kind == "all-gather" else num_bytes
    return model.step_seconds(step_of(kind, tuple(range(len(shape)))), held)


@pytest.mark.parametrize(("name", "devices", "kind", "published"), PUBLISHED)
def test_published_times_of_one_node(name, devices, kind, published):
    assert seconds([name], (devices,), kind, GIB) * 1e6 == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(("names", "shape", "kind", "num_bytes", "published", "off"), MULTI_NODE)
def test_published_times_of_several_nodes(names, shape, kind, num_bytes, published, off):
    found = seconds(names, shape, kind, num_bytes) * 1e6 / published - 1
    assert found == pytest.approx(off, abs=0.02)


def test_errors_are_known_where_something_was_measured():
    """For every collective on 2 to 8 devices from 512 bytes to 512 MiB, and nowhere else."""
    for devices in (*range(2, 9), 16):
        model = CostModel.from_presets(DeviceMesh(range(devices), (devices,)), ["h100-nvswitch"])
        for kind in KINDS:
            step = step_of(kind, (0,))
            least, most = -(-512 // devices) if kind == "all-gather" else 512, 2**29 // devices
            for held in (least, 2**17, 2**20, most):
                link = measured_link(model, step, held)
                assert (link is not None) == (devices <= 8)
                assert (
                    link is None
                    or link.error is None
                    or 0 < link.error[0] <= 0.065 < link.error[1] <= 0.2
                )
            assert measured_link(model, step, least - 1) is None
            assert measured_link(model, step, 2**29 + 1) is None


def test_an_axis_of_two_is_not_priced_as_one_of_eight():
    """All-gather of 1 GiB: 537 GB/s on two devices, 394 on eight, not what rings have in common."""
    two, eight = (seconds(["h100-nvswitch"], (n,), "all-gather", GIB) for n in (2, 8))
    assert 0.7 < two / eight < 0.8


@pytest.mark.parametrize("kind", KINDS)
def test_more_devices_never_take_less(kind):
    for size in (2**12, 2**20, 2**28):
        times = [seconds(["b200-nvswitch"], (n,), kind, size) for n in (2, 3, 4, 6, 8, 16, 32)]
        if kind != "all-to-all":
            assert times == sorted(times)
        assert min(times) > 0


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.link.curves])
def test_an_exchange_never_undercuts_a_collective_that_sends_as_much(name):
    """What was measured is preferred to what was not; and devices that hold all send nothing."""
    for devices in range(2, 1 + max(curve.devices for curve in PRESETS[name].link.curves)):
        mesh = DeviceMesh(range(devices), (devices,))
        model = CostModel.from_presets(mesh, [name])
        for rows in (24 << k for k in range(0, 24, 2)):
            layout = Layout(mesh, "[S0,R]", (rows, 24), "bf16")
            for target, kind in (("[R,R]", "all-gather"), ("[R,S0]", "all-to-all")):
                ends = layout, layout.with_spec(target)
                alone = step_seconds(Exchange((0,)), *ends, model)
                assert alone >= step_seconds(step_of(kind, (0,)), *ends, model)


def test_a_port_of_a_node_is_shared_by_its_devices():
    mesh = DeviceMesh(range(16), (2, 8))
    own, shared = (
        CostModel.from_presets(mesh, [name, "h100-nvswitch"])
        for name in ("ib-ndr-per-gpu", "ib-ndr-per-node")
    )
    outer, both = step_of("all-reduce", (0,)), step_of("all-reduce", (0, 1))
    for model, ports in ((own, 8), (shared, 1)):
        # Eight groups at once, then all devices of a node on one ring.
        for step, carried in ((outer, 1.0 * 8), (both, 1.875)):
            rate = 1 / model.lines(step)[-1][1]
            assert rate <= ports * 48e9 / carried * (1 + 1e-9)
    assert own.lines(outer)[0][1] * 8 == pytest.approx(shared.lines(outer)[0][1])
    assert shared.step_seconds(both, GIB) > 5 * own.step_seconds(both, GIB)


def test_presets_by_axis():
    mesh = DeviceMesh(range(8), (2, 4))
    assert CostModel.from_presets(mesh, ["unit"]).links == (link_preset("unit").link,) * 2
    wrong_number = "presets for the 2 axes of mesh 2x4; give one per axis"
    for names in (["unit"] * 3, []):
        with pytest.raises(MeshError, match=wrong_number):
            CostModel.from_presets(mesh, names)
    with pytest.raises(MeshError, match=r"no link preset 'warp'; .*: a100-nvswitch, "):
        CostModel.from_presets(mesh, ["warp"])


def test_a_profile_in_json_is_answered_by_the_file_that_takes_its_place(tmp_path):
    file = tmp_path / "old.json"
    file.write_text('{"format": "shardspec profile", "version": 1}')
    for path in (file, tmp_path / "none.json"):
        with pytest.raises(MeshError, match=r"\.json .*'shardspec profile'"):
            CostModel.of_mesh(DeviceMesh(range(2)), str(path))


@pytest.mark.parametrize(
    ("name", "microseconds"),
    [("h100-nvswitch", 966.12), ("a100-nvswitch", 1635.3)],
)
def test_a_permute_is_the_all_to_all_of_a_pair(name, microseconds):
    """Each of two devices sends half of its 512 MiB to the other, by nccl-tests."""
    mesh = DeviceMesh(range(2), (2,))
    model = CostModel.from_presets(mesh, [name])
    fixed, per_byte = pair_line(model, 0)
    assert fixed + (256 << 20) * per_byte == pytest.approx(microseconds / 1e6, rel=0.08)
    # Another order of the ids is the same boxes on other devices.
    here = Layout(DeviceMesh(range(8), (2, 4)), "[S01]", (1 << 30,), "int8")
    plan = LayoutConverter(CostModel.from_presets(here.mesh, [name])).plan(here, "[S10]")
    assert [type(step) for step in plan.steps] == [Permute]
    assert plan.cost_seconds == pytest.approx(fixed + (128 << 20) * per_byte, rel=1e-9)

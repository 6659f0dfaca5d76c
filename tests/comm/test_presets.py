"""Named links: every record complete, and as far from published times as the model says."""

import json
import re
from dataclasses import FrozenInstanceError, replace
from typing import get_args

import pytest

from shardspec.comm.cost import DEFAULT_LINK, FITTED_ERROR, CostModel, Link
from shardspec.comm.presets import PRESETS, Basis, Confidence, link_preset
from shardspec.comm.steps import AllReduce
from shardspec.errors import MeshError, ShardSpecError

# Rate in GB/s and latency of a step in µs, as published.
EXPECTED = {
    "a100-nvswitch": (235, 3.4),
    "h100-nvswitch": (362, 3.4),
    "h200-nvswitch": (362, 3.4),
    "b200-nvswitch": (682, 3.4),
    "gb200-nvl72": (680, 3.4),
    "ib-hdr-per-gpu": (24, 14),
    "ib-ndr-per-gpu": (48, 14),
    "efa-v4-per-gpu": (37, 14),
    "tpu-v4": (90, 1),
    "tpu-v5e": (90, 1),
    "tpu-v5p": (180, 1),
    "tpu-v6e": (180, 1),
    "pcie5-x16": (40, 5.7),
    "unit": (1, 0),
}


def test_the_numbers():
    assert {name: (p.gb_per_s, p.latency_us) for name, p in PRESETS.items()} == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_every_record_says_where_it_comes_from_and_how_far_it_holds(name):
    preset = PRESETS[name]
    assert preset.name == name
    assert preset.basis in get_args(Basis)
    assert preset.confidence in get_args(Confidence)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", preset.read_on)
    assert preset.source
    assert preset.valid_for
    fewest, most = preset.devices
    assert most is None or fewest < most
    if preset.sizes is not None:
        assert preset.basis == "measured"
        assert preset.sizes[0] <= preset.sizes[1]
    assert json.loads(json.dumps(preset.as_dict()))["devices"] == [fewest, most]


def test_records_are_values():
    with pytest.raises(FrozenInstanceError):
        PRESETS["unit"].gb_per_s = 2  # type: ignore[misc]  # frozen, as is tested
    assert hash(PRESETS["unit"]) == hash(replace(PRESETS["unit"]))


def test_a_link_is_in_seconds():
    assert link_preset("ib-ndr-per-gpu") == Link(1.4e-5, 1 / 48e9, "ib-ndr-per-gpu")
    assert link_preset("unit") == Link(0.0, 1e-9, "unit")


def test_the_default_is_a_preset_that_was_assumed():
    assert replace(link_preset("h100-nvswitch"), name="assumed h100-nvswitch") == DEFAULT_LINK


def test_a_link_beyond_its_preset_says_so():
    assert link_preset("h100-nvswitch", 8).name == "h100-nvswitch"
    assert link_preset("h100-nvswitch", 9).name == "h100-nvswitch beyond its 8 devices"
    assert link_preset("ib-ndr-per-gpu", 4096).name == "ib-ndr-per-gpu"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(MeshError) as caught:
        link_preset("h100")
    assert isinstance(caught.value, ShardSpecError)
    assert str(caught.value) == f"no link preset 'h100'; known: {', '.join(EXPECTED)}"


# Published all-reduce times of 8 devices, in µs: nccl-tests tables of the ML Engineering Open Book.
PUBLISHED = [
    ("a100-nvswitch", 2**30, 8203.9),
    ("a100-nvswitch", 2**16, 46.8),
    ("h200-nvswitch", 2**30, 1.75 * 2**30 / 463.58e3),
    ("h200-nvswitch", 2**16, 1.75 * 2**16 / 2.93e3),
    ("b200-nvswitch", 2**30, 1.75 * 2**30 / 723.34e3),
    ("b200-nvswitch", 2**16, 1.75 * 2**16 / 2.17e3),
]


@pytest.mark.parametrize(("name", "num_bytes", "published"), PUBLISHED)
def test_published_times_lie_within_the_known_error(name, num_bytes, published):
    worst = int(re.findall(r"(\d+) % at worst", FITTED_ERROR)[0])
    model = CostModel((8,), (link_preset(name),))
    modelled = model.step_seconds(AllReduce((0,), "sum"), num_bytes) * 1e6
    assert abs(modelled / published - 1) < worst / 100


def test_without_a_switch_that_adds_up_the_model_is_close():
    model = CostModel((8,), (link_preset("a100-nvswitch"),))
    for _, num_bytes, published in PUBLISHED[:2]:
        modelled = model.step_seconds(AllReduce((0,), "sum"), num_bytes) * 1e6
        assert modelled == pytest.approx(published, rel=0.03)

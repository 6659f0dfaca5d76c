"""The numbers of presets follow from measured times."""

from pathlib import Path

import pytest

from benchmarks.links import fit_curves, preset_text, read
from shardspec.comm.presets import link_preset

TIMES = read(Path(__file__).parents[2] / "benchmarks" / "nccl-single-node.csv")


@pytest.mark.parametrize("name", TIMES)
def test_a_preset_with_times_is_what_the_fit_makes_of_them(name):
    curves, errors = fit_curves(TIMES[name])
    text = preset_text(name, curves, [error for _, error in errors])
    title, table = "[inside]", link_preset(name).text().split("[about]")[0]
    assert table[table.index(title) :].strip() == text[text.index(title) :].strip()

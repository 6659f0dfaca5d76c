"""The numbers of presets follow from measured times."""

import pytest

from benchmarks.links import MACHINES, exchange_row, read
from shardspec.comm.presets import PRESETS


@pytest.mark.parametrize(("machine", "name"), MACHINES.items())
def test_rate_and_start_follow_from_the_curves(machine, name):
    preset = PRESETS[name]
    numbers = f"gb_per_s {preset.gb_per_s} start_us {preset.start_us:g}"
    assert exchange_row(machine, preset.curves) == f"{name} {numbers}"


def test_times_of_an_unknown_machine_are_refused(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(
        "machine,nccl,collective,devices,buffer_bytes,microseconds\nabacus,2,all_reduce,2,512,9\n"
    )
    with pytest.raises(SystemExit, match="no preset for 'abacus'; known: a100_sxm, h100_sxm"):
        read(path)

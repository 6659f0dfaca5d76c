"""The command `shardspec links list`."""

import json
import re

from click.testing import CliRunner

from shardspec.cli.main import cli
from shardspec.comm.presets import link_preset, preset_names

PRESETS = {name: link_preset(name) for name in preset_names()}


def run(*args):
    return CliRunner().invoke(cli, ["links", "list", *args], prog_name="shardspec")


def test_the_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == [
        *("preset", "scope", "basis", "confidence", "devices", "latency", "rate")
    ]
    assert [line.split()[0] for line in lines[2 : 2 + len(PRESETS)]] == list(PRESETS)
    assert re.search(
        r"^efa-v4-per-gpu +cross-node +measured +medium +any +65.4 µs +47 GB/s$",
        result.stdout,
        re.MULTILINE,
    )
    assert max(map(len, lines)) <= 100


def test_each_preset_has_its_source_and_what_it_is_valid_for():
    plain = " ".join(run().stdout.split())
    for preset in PRESETS.values():
        assert f" {preset.name} for {preset.valid_for} " in plain
        assert f" from {preset.source}; read {preset.read_on}" in plain
    assert " off h100-nvswitch is 4 % off at the median, 13 % at the 90th percentile from " in plain
    assert plain.endswith("plans print the errors of these. This project measured none of them.")


def test_json():
    result = run("--json")
    assert (result.exit_code, result.stderr) == (0, "")
    read = json.loads(result.stdout)
    assert read["presets"] == [preset.as_dict() for preset in PRESETS.values()]
    (ndr,) = (preset for preset in read["presets"] if preset["name"] == "ib-ndr-per-gpu")
    assert (ndr["between"]["gb_per_s"], ndr["basis"]) == (48, "arithmetic")

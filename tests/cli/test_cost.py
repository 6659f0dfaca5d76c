"""The command `shardspec cost`."""

import csv
import io
import json
import time
from itertools import product

import pytest
from click.testing import CliRunner

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.cli.main import cli
from shardspec.comm.presets import link_preset

TENSOR = ["--mesh", "2x3", "--shape", "7x5", "--dtype", "bf16"]
SPECS = ["[R,R]", "[S0,R]", "[R,S01]", "[S10,R]", "[S1,S0]"]
PAIRS = list(product(SPECS, SPECS))


def run(*args, stdin=None):
    return CliRunner().invoke(cli, ["cost", *map(str, args)], input=stdin, prog_name="shardspec")


def expected(pairs, converter=None, mesh=None):
    mesh = mesh or DeviceMesh(range(6), (2, 3))
    plans = [
        (converter or LayoutConverter()).plan(Layout(mesh, source, (7, 5), "bf16"), target)
        for source, target in pairs
    ]
    return [
        {
            "source": str(plan.source.spec),
            "target": str(plan.target.spec),
            "cost_seconds": plan.cost_seconds,
            "bytes_received": plan.bytes_received,
            "peak_bytes": plan.peak_bytes,
        }
        for plan in plans
    ]


def test_json_of_many_pairs():
    link = link_preset("h100-nvswitch").link
    result = run(*(spec for pair in PAIRS for spec in pair), *TENSOR, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "mesh": [2, 3],
        "shape": [7, 5],
        "dtype": "bfloat16",
        "link_model": "ring",
        "links": [link.as_dict() | {"name": "assumed h100-nvswitch"}] * 2,
        "known_error": json.loads(result.stdout)["known_error"],
        "pairs": expected(PAIRS),
    }


def test_csv_reads_back_exactly():
    result = run(*(spec for pair in PAIRS for spec in pair), *TENSOR, "--csv")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("source,target,cost_seconds,bytes_received,peak_bytes\n")
    rows = [
        {key: value if key in ("source", "target") else float(value) for key, value in row.items()}
        for row in csv.DictReader(io.StringIO(result.stdout))
    ]
    assert rows == expected(PAIRS)


def test_a_table_on_named_links():
    result = run(
        *("[S(dp),R]", "[R,R]", "[R,R]", "[R,S(tp,dp)]", "--mesh", "dp=2,tp=4", "--shape", "64x64"),
        *("--links", "ib-ndr-per-gpu,h100-nvswitch"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    # One step over dp: 8.4 µs to start, 14 µs, and 32 * 64 * 4 bytes at 48 GB/s.
    assert result.stdout.splitlines() == [
        "from        to             steps   receives       time     peak",
        "───────────────────────────────────────────────────────────────",
        "[S(dp),R]   [R,R]              1      8 KiB   22.57 µs   24 KiB",
        "[R,R]       [R,S(tp,dp)]       1        0 B        0 s   18 KiB",
        "per device; ring model; axis dp ib-ndr-per-gpu: 22.4 µs, 48 GB/s; axis tp",
        "  h100-nvswitch (measured for 2, 4, 8 devices; otherwise 23 µs + 249 GB/s); 2",
        "  hosts of 4 devices; local copies at 1675 GB/s",
        "accuracy: not measured: all-gather of 2 nodes × 1 (priced from tiers)",
    ]


def test_every_option_arrives():
    mesh = DeviceMesh(
        [5, 3, 1, 0, 2, 4],
        (2, 3),
        mesh_alpha=(1e-5, 2e-6),
        mesh_beta=(4e-11, 4e-11),
        link_model="shared-bus",
    )
    result = run(
        *("[S0,R]", "[S1,R]", *TENSOR, "--json", "--ids", "5,3,1,0,2,4"),
        *("--links", "1e-5:4e-11,2e-6:4e-11", "--link-model", "shared-bus"),
    )
    read = json.loads(result.stdout)
    assert read["pairs"] == expected([("[S0,R]", "[S1,R]")], mesh=mesh)
    assert read["link_model"] == "shared-bus"
    assert [link["latency_s"] for link in read["links"]] == [1e-5, 2e-6]


FILE = (
    "\ufeff[S0,R] [R,R]\r\n\n  # a comment\n[S0, R]\t[ R,S01 ]  # more\nR,R S1,S0\n[S0,R|P1] [R,R]"
)
IN_FILE = [
    ("[S0,R]", "[R,R]"),
    ("[S0,R]", "[R,S01]"),
    ("[R,R]", "[S1,S0]"),
    ("[S0,R|P1]", "[R,R]"),
]


def test_pairs_from_a_file_follow_those_of_the_arguments(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text(FILE, "utf-8", newline="")
    model = CostModel((2, 3), (link_preset("unit").link,) * 2)
    args = ("[S1,R]", "[R,R]", "--pairs", path, *TENSOR, "--links", "unit", "--json")
    pairs = [("[S1,R]", "[R,R]"), *IN_FILE]
    assert json.loads(run(*args).stdout)["pairs"] == expected(pairs, LayoutConverter(model))


def test_pairs_from_standard_input():
    result = run("--pairs", "-", *TENSOR, "--json", stdin=FILE.removeprefix("\ufeff"))
    assert json.loads(result.stdout)["pairs"] == expected(IN_FILE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[R,R] [S0,R]\n\n[S0,R]\n",
            "line 3: 1 spec where two are needed, FROM and TO: [S0,R]",
        ),
        (
            "R,R R,S0 R,S1  # three",
            "line 1: 3 specs where two are needed, FROM and TO: R,R R,S0 R,S1",
        ),
        ("[R,R] [S0,X]", "line 1: expected R or S and its axes (character 5 of '[S0,X]')"),
        (
            "# first\n[R,R] [R]",
            "line 2: spec [R] is for 1 dim, but the tensor of shape (7, 5) has 2 dims",
        ),
        (
            "[S2,R] [R,R]",
            "line 1: spec [S2,R]: axis 2 is out of range: mesh 2x3 has 2 axes, numbered from 0",
        ),
        (
            "[R,R] [R,R|P0]",
            "line 1: cannot convert [R,R] to [R,R|P0]: the target has a pending sum that the "
            "source lacks; a conversion only finishes reductions, it never starts one",
        ),
    ],
)
def test_an_error_names_the_line(tmp_path, text, message):
    path = tmp_path / "pairs.txt"
    path.write_text(text)
    for args, place, stdin in (((path,), f"{path}", None), (("-",), "standard input", text)):
        result = run("--pairs", *args, *TENSOR, stdin=stdin)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"Error: {place}, {message}\n"


def test_bytes_that_are_no_text_are_an_error_of_their_line(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_bytes(b"[R,R] [S0,R]\n\xff\xfe [R,R]\n")
    result = run("--pairs", path, *TENSOR)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {path}, line 2: expected R or S and its axes (")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["[R,R]"], "specs come in pairs FROM TO; '[R,R]' has no TO; see 'shardspec cost -h'"),
        (
            [],
            "nothing to price; give specs in pairs FROM TO, or --pairs FILE; "
            "see 'shardspec cost -h'",
        ),
        (
            ["[R,R]", "[R,R]", "--csv", "--json"],
            "give --csv or --json, not both; see 'shardspec cost -h'",
        ),
        (
            ["[R,R]", "[R,R]", "--links", "unit,1:1"],
            "Invalid value for '--links': 'unit' is not a number; give "
            "SECONDS:SECONDS_PER_BYTE as in 1e-5:4e-11; see 'shardspec cost -h'",
        ),
        (
            ["[R,R]", "[S0,R]", "[R,R]", "[S7,R]"],
            "pair 2: spec [S7,R]: axis 7 is out of range: mesh 2x3 has 2 axes, numbered from 0",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args, message):
    result = run(*args, *TENSOR)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: {message}\n"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.txt", "nowhere.txt: the pairs cannot be read: No such file or directory"),
        (".", ".: the pairs cannot be read: Is a directory"),
        ("/dev/zero", "/dev/zero, line 1: is longer than 65,536 characters"),
    ],
)
def test_a_file_of_pairs_that_cannot_be_read(file, message):
    """As with a file of rules that is missing, the exit code is that of bad input."""
    result = run("--pairs", file, *TENSOR)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == f"Error: {message}\n"


def test_more_pairs_than_are_priced_at_once(monkeypatch):
    monkeypatch.setattr("shardspec.cli.plan._MAX_PAIRS", 3)
    result = CliRunner().invoke(
        cli, ["cost", "--pairs", "-", *TENSOR], input="[R,R] [S0,R]\n" * 5, prog_name="shardspec"
    )
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        "Error: standard input, line 4: more than 3 pairs; price them in several runs\n"
    )


def test_a_file_without_pairs(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("# none yet\n")
    result = run("--pairs", path, *TENSOR, "--csv")
    assert result.exit_code == 0
    assert result.stdout == "source,target,cost_seconds,bytes_received,peak_bytes\n"
    assert json.loads(run("--pairs", path, *TENSOR, "--json").stdout)["pairs"] == []
    assert run("--pairs", path, *TENSOR).stdout.split()[:6] == (
        ["from", "to", "steps", "receives", "time", "peak"]
    )


def test_a_pair_that_comes_again_is_priced_once_and_printed_each_time(tmp_path):
    """A hundred thousand pairs take little longer than the few different ones among them."""
    path = tmp_path / "pairs.txt"
    texts = [f"{a} {b}" for a, b in PAIRS]
    path.write_text("\n".join([*texts, *reversed(texts)]))
    once = run("--pairs", path, *TENSOR).stdout.splitlines()
    rows = once[2 : 2 + len(PAIRS)]
    assert [row.split()[:2] for row in rows] == [list(pair) for pair in PAIRS]
    assert once[2 + len(PAIRS) : 2 + 2 * len(PAIRS)] == rows[::-1]
    assert once[2 + 2 * len(PAIRS)].startswith("per device; ")
    path.write_text("\n".join(texts * 4000))
    start = time.perf_counter()
    result = run("--pairs", path, *TENSOR, "--csv")
    assert time.perf_counter() - start < 15  # one second where nothing else runs
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 100_000
    assert lines[1:26] == lines[-25:]
    assert len(set(lines)) == 1 + len(PAIRS)


def test_spellings_of_a_spec_are_one_spec():
    result = run("R,R", "[S0, R]", "[R,R]", "S0,R", *TENSOR, "--json")
    first, second = json.loads(result.stdout)["pairs"]
    assert first == second == expected([("[R,R]", "[S0,R]")])[0]


def test_help_has_examples_that_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.txt").write_text("[S(dp),R] [R,S(tp)]\n")
    text = run("-h").stdout
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 3
    for line in examples:
        words = [word.strip('"') for word in line.split()]
        assert words[:2] == ["shardspec", "cost"]
        result = run(*words[2:])
        assert (result.exit_code, result.stderr) == (0, ""), line

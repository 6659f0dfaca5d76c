"""The command `shardspec plan`."""

import json

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.cli.main import cli
from shardspec.cli.options import parse_bytes
from shardspec.comm.presets import preset_names
from shardspec.layout.plan import difference_text
from shardspec.layout.search import naive_plan

README_EXAMPLE = ["[S0,R]", "[R,S01]", "--mesh", "2x4", "--shape", "4096x4096", "--dtype", "bf16"]


def run(*args, **env):
    return CliRunner().invoke(cli, ["plan", *args], prog_name="shardspec", env=env)


def flat(text):
    """The text without breaks of lines."""
    return " ".join(text.split())


def notes(result):
    return flat(result.stdout[result.stdout.index("per device; ") :])


def test_prints_the_plan():
    layout = Layout(DeviceMesh(range(8), (2, 4)), "[S0,R]", (4096, 4096), "bf16")
    result = run(*README_EXAMPLE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{LayoutConverter().plan(layout, '[R,S01]')}\n"
    assert "all-to-all dim 0 → 1   0,1    [R,S01]         3.5 MiB" in result.stdout


def test_on_a_terminal_only_the_style_differs():
    args = [*README_EXAMPLE, "--explain", "--alternatives", "3"]
    plain = run(*args, COLUMNS="120").stdout
    env = {"NO_COLOR": None, "TERM": "xterm", "COLUMNS": "120"}
    styled = CliRunner().invoke(cli, ["plan", *args], color=True, env=env).stdout
    assert styled.startswith("\x1b[1m[S0,R] → [R,S01]")
    assert styled.count("\x1b[32m") == 2  # the cheapest of each table
    for code in ("\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[0m"):
        assert code in styled
        styled = styled.replace(code, "")
    assert styled == plain
    for unwanted in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        found = CliRunner().invoke(cli, ["plan", *args], color=True, env=env | unwanted)
        assert found.stdout == plain


LONG_AXES = ["--mesh", f"{'data' * 12}=2,{'数据' * 12}=4", "--shape", "4096x4096"]


@pytest.mark.parametrize("args", [README_EXAMPLE, ["[S0,R|P1]", "[R,S01]", *LONG_AXES]])
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_what_is_printed_fits_the_terminal(args, columns):
    def fits(command, *more):
        env = {"COLUMNS": str(columns)}
        result = CliRunner().invoke(cli, [command, *args, *more], env=env)
        assert result.exit_code == 0
        # Words are not cut, so a name that is longer than the terminal stands alone.
        words = {
            line: max(map(cell_len, line.split()), default=0) for line in result.stdout.split("\n")
        }
        lines = [line for line, longest in words.items() if longest <= columns - 2]
        assert max(map(cell_len, lines)) <= columns
        assert "28.53 µs" in result.stdout or args != README_EXAMPLE
        return result.stdout

    fits("plan", "--explain", "--alternatives", "5")
    fits("cost")


def test_json():
    layout = Layout(DeviceMesh(range(8), (2, 4)), "[S0,R]", (4096, 4096), "bf16")
    result = run(*README_EXAMPLE, "--json")
    assert result.exit_code == 0
    plan = LayoutConverter().plan(layout, "[R,S01]")
    assert json.loads(result.stdout) == json.loads(json.dumps(plan.as_dict()))
    assert json.loads(result.stdout)["known_error"] == (
        "h100-nvswitch is 4 % off at the median, 13 % at the 90th percentile; "
        "not measured: local copies"
    )
    assert [step["layout"] for step in json.loads(result.stdout)["steps"]] == ["[S01,R]", "[R,S01]"]


def test_every_option_arrives():
    mesh = DeviceMesh(
        [5, 3, 1, 0, 2, 4],
        (2, 3),
        mesh_alpha=(1e-5, 2e-6),
        mesh_beta=(4e-11, 4e-11),
        axis_names=("dp", "tp"),
        link_model="shared-bus",
    )
    layout = Layout(mesh, "[S(dp),R|P(tp)]", (7, 5), "float32")
    result = run(
        *("[S(dp),R|P(tp)]", "[R,S(tp)]", "--mesh", "dp=2,tp=3", "--ids", "5,3,1,0,2,4"),
        *("--links", "1e-5:4e-11,2e-6:4e-11", "--link-model", "shared-bus"),
        *("--shape", "7x5"),
    )
    assert result.stdout == f"{LayoutConverter().plan(layout, '[R,S(tp)]')}\n"
    assert "shared-bus model; " in result.stdout
    assert "given: 10 µs, 25 GB/s" in result.stdout


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        (("--links", "h100-nvswitch", "--memory", "preset"), 3.35e12),
        (("--links", "h100-nvswitch"), 3.35e12),
        ((), 3.35e12),
        (("--links", "1e-5:1e-11", "--memory", "2000"), 2e12),
    ],
)
def test_memory_prices_local_copies(given, rate):
    without = (*given[: given.index("--memory") if "--memory" in given else None], "--memory")
    found = [
        json.loads(
            run("[R,S0]", "[R,R]", "--mesh", "8", "--shape", "4096x4096", *some, "--json").stdout
        )
        for some in (given, (*without, "none"))
    ]
    more = found[0]["cost_seconds"] - found[1]["cost_seconds"]
    assert more == pytest.approx(4096 * 4096 * 4 * 2 / rate, rel=1e-9)
    text = run("[R,S0]", "[R,R]", "--mesh", "8", "--shape", "4096x4096", *given).stdout
    assert f"; local copies at {rate / 2e9:.4g} GB/s accuracy" in flat(text)


def test_named_links():
    mesh = DeviceMesh(range(8), (2, 4))
    model = CostModel.from_presets(mesh, ["ib-ndr-per-gpu", "h100-nvswitch"])
    layout = Layout(mesh, "[S0,R]", (4096, 4096), "bf16")
    result = run(*README_EXAMPLE, "--links", "ib-ndr-per-gpu, h100-nvswitch")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{LayoutConverter(model).plan(layout, '[R,S01]')}\n"
    assert notes(result) == (
        "per device; ring model; axis 0 ib-ndr-per-gpu: 22.4 µs, 48 GB/s; "
        "axis 1 h100-nvswitch (measured for 2, 4, 8 devices; otherwise 23 µs + 249 GB/s); "
        "2 hosts of 4 devices; local copies at 1675 GB/s "
        "accuracy: not measured: all-to-all of 2 nodes × 4 (priced from tiers), local copies"
    )
    links = json.loads(run(*README_EXAMPLE, "--links", "efa-v4-per-gpu", "--json").stdout)["links"]
    assert [link["name"] for link in links] == ["efa-v4-per-gpu"] * 2


def test_a_preset_on_an_axis_that_is_too_long_for_a_node():
    args = ("--mesh", "2x16", "--shape", "64", "--links", "a100-nvswitch")
    result = run("[S1]", "[R]", *args)
    inside = "a100-nvswitch (measured for 2, 4, 8 devices; otherwise 39.5 µs + 144 GB/s)"
    assert notes(result) == (
        "per device; ring model; axis 0 ib-hdr-per-gpu: 22.4 µs, 24 GB/s; axis 1 ib-hdr-per-gpu: "
        f"22.4 µs, 24 GB/s; in nodes of 8 each, {inside}; 4 hosts of 8 devices; local copies at "
        "1020 GB/s "
        "accuracy: not measured: all-gather of 2 nodes × 8 (priced from tiers)"
    )
    bus = run("[S1]", "[R]", *args, "--link-model", "shared-bus")
    assert f"shared-bus model; axes 0,1 {inside}; " in notes(bus)
    refused = run("[S1]", "[R]", "--mesh", "2x9", "--shape", "64", "--links", "a100-nvswitch")
    assert refused.exit_code == 2
    assert "mesh 2x9 has ids 0 to 17, but a node of a100-nvswitch has 8 devices" in refused.stderr


def test_a_scalar_has_nothing_to_convert():
    result = run("[]", "[]", "--mesh", "2", "--shape", "")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "[] → []   [] float32 (4 B) on mesh 2\nnothing to do: both are the same layout\n"
    )


def test_a_pending_scalar():
    result = run("[|P0]", "[]", "--mesh", "3", "--shape", "", "--json")
    assert [step["step"] for step in json.loads(result.stdout)["steps"]] == ["AllReduce"]


ALTERNATIVES = [
    *("[S(tp,dp),R]", "[R,S(tp)]", "--mesh", "dp=2,tp=4", "--shape", "4096x4096"),
    *("--dtype", "bf16", "--links", "ib-ndr-per-gpu,h100-nvswitch", "--alternatives"),
]
# By hand: dp starts in 8.4 + 14 µs and gathers 4 MiB at 48 GB/s; the third sends 7 of 8 parts of 4
# MiB in the first step, half of them between nodes, and gathers 4 MiB over dp again. A MiB that is
# copied takes 0.626 µs: the first packs 8, the second 4 and 8, the third 4 and 8.
THREE = """\
plan   steps                               through        receives       time   ratio     peak
──────────────────────────────────────────────────────────────────────────────────────────────
1      all-gather dp, all-to-all tp        [S(tp),R]        10 MiB   149.4 µs   1.00×   16 MiB
2      exchange (dp,tp)                                      7 MiB   186.5 µs   1.25×   12 MiB
3      all-to-all (tp,dp), all-gather dp   [R,S(tp,dp)]    7.5 MiB   197.2 µs   1.32×   12 MiB
"""


def test_alternatives_follow_the_plan():
    plain = run(*ALTERNATIVES[:-1], COLUMNS="120")
    result = run(*ALTERNATIVES, "2", COLUMNS="120")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{plain.stdout}\n{THREE}"


def test_fewer_alternatives_than_asked_for():
    result = run("[S0,R]", "[R,S0]", "--mesh", "2", "--shape", "512x512", "--alternatives", "9")
    assert result.stdout.endswith("   1 MiB\nthere are no more plans\n")
    result = run("[S0]", "[R]", "--mesh", "2", "--shape", "8", "--alternatives", "1")
    assert result.stdout.endswith("\n\nthere is no other plan\n")


def test_explained_beside_the_naive_plan():
    result = run(*README_EXAMPLE, "--explain", COLUMNS="120")
    assert (result.exit_code, result.stderr) == (0, "")
    # Naive: half of 32 MiB is gathered; then 32 MiB and an eighth of it are held.
    plain = run(*README_EXAMPLE, COLUMNS="120").stdout
    assert result.stdout.removeprefix(plain) == (
        "\n"
        "avoids gathering the whole tensor: 3.1× faster, receives 7/32 of the bytes, "
        "holds 5/12 at its peak\n"
        "plan     steps                       through   receives       time   ratio     peak\n"
        "───────────────────────────────────────────────────────────────────────────────────\n"
        "chosen   slice 1, all-to-all (0,1)   [S01,R]    3.5 MiB   28.53 µs   1.00×   20 MiB\n"
        "naive    all-gather 0, slice (0,1)   [R,R]       16 MiB   88.32 µs   3.10×   48 MiB\n"
    )


def test_everything_together_in_json():
    result = run(*ALTERNATIVES, "3", "--explain", "--max-bytes", "12MiB", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    read = json.loads(result.stdout)
    mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
    model = CostModel.from_presets(mesh, ["ib-ndr-per-gpu", "h100-nvswitch"])
    layout = Layout(mesh, "[S10,R]", (4096, 4096), "bf16")
    converter = LayoutConverter(model)
    best, *others = converter.alternatives(layout, "[R,S1]", 4, max_bytes=12 << 20)
    assert read["cost_seconds"] == best.cost_seconds
    assert read["max_bytes"] == 12 << 20 >= best.peak_bytes == read["peak_bytes"]
    assert [way["steps"] for way in read["alternatives"]] == [
        json.loads(json.dumps(plan.as_dict()))["steps"] for plan in others
    ]
    for way, plan in zip(read["alternatives"], others, strict=True):
        assert way["cost_seconds"] == plan.cost_seconds
        assert way["ratio"] == plan.cost_seconds / best.cost_seconds >= 1
        assert way["bytes_received"] == plan.bytes_received
        assert way["peak_bytes"] == plan.peak_bytes <= 12 << 20
    naive = naive_plan(layout, best.target, model)
    assert [step["step"] for step in read["naive"]["steps"]] == ["AllGather", "Slice"]
    assert read["naive"]["cost_seconds"] == naive.cost_seconds
    assert read["explanation"] == difference_text(best, naive)
    assert read["known_error"] == best.known_error


def test_a_ratio_to_nothing_is_none():
    args = ("[R]", "[S0]", "--mesh", "2", "--shape", "8", "--explain", "--json")
    assert json.loads(run(*args).stdout)["naive"]["ratio"] is None


def test_max_bytes_finds_a_plan_or_says_the_least():
    args = ("[S0,R]", "[R,S0]", "--mesh", "2", "--shape", "8x8", "--link-model", "shared-bus")
    free = json.loads(run(*args, "--json").stdout)
    assert free["peak_bytes"] == 256
    assert json.loads(run(*args, "--max-bytes", "256", "--json").stdout)["steps"] == free["steps"]
    result = run(*args, "--max-bytes", "0.2KiB")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: every plan from [S0,R] to [R,S0] needs more than 204 bytes on a device; "
        "give at least 256\n"
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("0", 0), ("1000", 1000), ("7B", 7), ("64MiB", 64 << 20), ("64 mib", 64 << 20)),
        *(("2KiB", 2048), ("1.5GiB", 3 << 29), ("1TiB", 1 << 40)),
        *(("2kB", 2000), ("2.5MB", 2_500_000), ("3GB", 3 * 10**9), ("1TB", 10**12)),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e6", "64MiBs", "6 4MiB", "64 M", "1_000", "٣", "nan", "9" * 19]
)
def test_no_sizes(text):
    result = run(*README_EXAMPLE, "--max-bytes", text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"Error: Invalid value for '--max-bytes': {text!r} is not a size; give bytes as in "
        "1000000, or as in 64MiB or 1.5GB; see 'shardspec plan -h'\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "[S0] [R] --mesh 2 --target-mesh 4 --shape 4 --max-bytes 1KB",
            "--max-bytes is for conversions on one mesh; omit it, or --target-mesh; "
            "see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --alternatives 0",
            "Invalid value for '--alternatives': 0 is not in the range 1<=x<=100; "
            "see 'shardspec plan -h'",
        ),
        (
            "[S0,R] [R,R] --mesh 2x2x2x2x2x2 --shape 64x64 --alternatives 1",
            "alternatives: 11743 layouts (mesh 2x2x2x2x2x2, 2 dims) are too many for this search, "
            "whose limit is 1500; ask for the plan alone",
        ),
        (
            "[S0,R] [R,R] --mesh 2y4 --shape 4x4",
            "Invalid value for '--mesh': mesh '2y4': '2y4' is not a whole number; "
            "give sizes as in 2x4, or named axes as in dp=2,tp=4; see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 0 --shape 4",
            "mesh shape (0,): give at least one axis, each of at least 1 device",
        ),
        (
            "[S0] [R] --mesh a=2,a=3 --shape 4",
            "axis names ('a', 'a') repeat; every name must be distinct",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4x4",
            "spec [S0] is for 1 dim, but the tensor of shape (4, 4) has 2 dims",
        ),
        (
            "[S0] [R] --mesh 2 --shape four",
            "Invalid value for '--shape': shape 'four': 'four' is not a whole number; "
            "give sizes as in 4096x4096, or \"\" for a scalar; see 'shardspec plan -h'",
        ),
        (
            "[S1] [R] --mesh 2 --shape 4",
            "spec [S1]: axis 1 is out of range: mesh 2 has 1 axis, numbered from 0",
        ),
        (
            "[S(tp)] [R] --mesh 2 --shape 4",
            "spec [S(tp)]: mesh 2 has no axis named 'tp'; its names: none, only numbers",
        ),
        (
            "[S00] [R] --mesh 2 --shape 4",
            "axis 0 is used twice, by dim 0 and by dim 0; a mesh axis can shard a tensor only once",
        ),
        (
            "[R] [R|P0] --mesh 2 --shape 4",
            "cannot convert [R] to [R|P0]: the target has a pending sum that the source lacks; "
            "a conversion only finishes reductions, it never starts one",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --ids 1,1",
            "device id 1 appears more than once; every id must be distinct",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --links 1e-5:1,1:2",
            "--links has 2 values for 1 axis; give one per axis, or one for all; "
            "see 'shardspec plan -h'",
        ),
        *(
            (
                f"[S0] [R] --mesh 2 --shape 4 --links {text}",
                f"Invalid value for '--links': '{wrong}' is not a number; give "
                "SECONDS:SECONDS_PER_BYTE as in 1e-5:4e-11; see 'shardspec plan -h'",
            )
            for text, wrong in (
                ("fast:1", "fast"),
                ("1:", ""),
                ("1:1,unit", "unit"),
                ("1:2:3", "2:3"),
            )
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --links -1:1",
            "Invalid value for '--links': '-1' must be finite and not negative; "
            "see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --memory fast",
            "Invalid value for '--memory': 'fast': give a rate above 0 in GB/s, 'preset' or "
            "'none'; see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --memory nan",
            "Invalid value for '--memory': 'nan': give a rate above 0 in GB/s, 'preset' or "
            "'none'; see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --links 1:1 --memory preset",
            "--memory preset is for known --links; give the rate in GB/s; see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --links unit --memory preset",
            "no memory rate is known for unit, so local copies have no price; known for: "
            "a100-nvswitch, b200-nvswitch, gb200-nvl72, h100-nvswitch, h200-nvswitch",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --links unit,unit",
            "--links has 2 values for 1 axis; give one per axis, or one for all; "
            "see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --links unit,warp",
            "Invalid value for '--links': no link preset 'warp'; "
            f"'shardspec links list' prints them: {', '.join(preset_names()[:5])} and 10 more; "
            "see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --link-model tree",
            "Invalid value for '--link-model': 'tree' is not one of 'ring', 'shared-bus'; "
            "see 'shardspec plan -h'",
        ),
        (
            "[S0] [R] --shape 4",
            "Missing option '--mesh'; see 'shardspec plan -h'",
        ),
        ("[S0] [R] --mesh 2", "Missing option '--shape'; see 'shardspec plan -h'"),
        ("[S0] --mesh 2 --shape 4", "Missing argument 'TO'; see 'shardspec plan -h'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message):
    result = run(*args.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: {message}\n"


def test_an_unknown_dtype_names_the_known_ones():
    result = run("[S0]", "[R]", "--mesh", "2", "--shape", "4", "--dtype", "bf17")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "Error: Invalid value for '--dtype': unknown dtype 'bf17'; known: float64, float32, "
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [["[S0,X]", "[R,R]"], ["[R,R]", "[S0,X]"]])
def test_a_syntax_error_has_its_caret(args):
    result = run(*args, "--mesh", "2", "--shape", "4x4")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: expected R or S and its axes (character 5 of '[S0,X]')\n"


def test_plan_to_another_mesh():
    mesh, other = DeviceMesh(range(8), (2, 4)), DeviceMesh(range(4, 16), (3, 4))
    args = ("[S0,R|P1]", "[S0,S1]", "--mesh", "2x4", "--target-mesh", "3x4", "--shape", "96x96")
    ids = ("--target-ids", ",".join(map(str, other.ids)))
    result = run(*args, *ids, "--links", "ib-ndr-per-gpu,h100-nvswitch", "--explain")
    assert (result.exit_code, result.stderr) == (0, "")
    links = ["ib-ndr-per-gpu", "h100-nvswitch"]
    converter = LayoutConverter(
        CostModel.from_presets(mesh, links), target_model=CostModel.from_presets(other, links)
    )
    source = Layout(mesh, "[S0,R|P1]", (96, 96), "float32")
    plan = converter.plan(source, Layout(other, "[S0,S1]", (96, 96), "float32"))
    assert result.stdout.startswith(f"{plan}\n\n")
    assert "from mesh 2x4 to mesh 3x4" in result.stdout
    naive = naive_plan(source, plan.target, plan.model, plan.target_model)
    assert difference_text(plan, naive) in flat(result.stdout)
    read = json.loads(run(*args, *ids, "--json").stdout)
    assert (read["mesh"], read["target_mesh"]) == ([2, 4], [3, 4])


def test_a_target_mesh_with_other_axes_is_on_the_same_cluster():
    args = ("[S0]", "[S0]", "--mesh", "2x4", "--shape", "8", "--target-mesh", "8")
    given = ("--links", "2e-5:1e-9,1e-6:3e-9")
    result = run(*args, "--target-ids", "8,9,10,11,12,13,14,15", *given)
    assert "; then ring model; axis 0 slowest of all meshes: 20 µs, 0.3333 GB/s" in flat(
        result.stdout
    )
    by_name = ("--links", "ib-ndr-per-gpu,h100-nvswitch")
    result = run(*args, "--target-ids", "4,5,6,7,8,9,10,11", *by_name)
    # By the axes of --mesh, ids 4 to 7 and 8 to 11 are two hosts.
    assert "; then ring model; axis 0 ib-ndr-per-gpu: 22.4 µs, 48 GB/s; in nodes of 4" in (
        flat(result.stdout)
    )


def test_help_has_examples_that_run():
    text = run("-h").stdout
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 8
    for line in examples:
        words = [word.strip('"') for word in line.split()]
        assert words[:2] == ["shardspec", "plan"]
        result = run(*words[2:])
        assert (result.exit_code, result.stderr) == (0, ""), line


def test_a_plan_between_hosts_names_the_network():
    args = ["[S0,R]", "[S0,R]", "--mesh", "dp=8", "--target-mesh", "tp=8", "--shape", "64x8"]
    args += ["--links", "h100-nvswitch", "--between", "efa-v4-per-gpu"]
    for ids, named in (("8,9,10,11,12,13,14,15", True), ("7,6,5,4,3,2,1,0", False)):
        done = run(*args, "--target-ids", ids)
        assert ("efa-v4-per-gpu" in done.stdout) == named
        told = json.loads(run(*args, "--target-ids", ids, "--json").stdout)
        assert ("between" in told) == named
        if named:
            assert told["between"]["name"].startswith("efa-v4-per-gpu")

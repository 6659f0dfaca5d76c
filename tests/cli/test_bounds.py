"""Whatever is asked: one clear line, bounded time and memory, nothing raw on the terminal."""

import json
import time

import pytest
from click.testing import CliRunner

from shardspec.cli.main import cli
from tests.checkpoint.handmade import handmade, sample
from tests.forked import run_forked

HUGE = f"[S({'9' * 5000})]"
RAW = "a\x1b[31m\x07\u202e\u2066\x9b"
ESCAPED = r"a\x1b[31m\x07\u202e\u2066\x9b"


def run(*args, stdin=None):
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="shardspec", input=stdin)


def is_safe(text):
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize(
    "args",
    [
        ["show", HUGE, "--mesh", "2", "--shape", "4"],
        ["plan", HUGE, "[R]", "--mesh", "2", "--shape", "4"],
        ["cost", "[R]", HUGE, "--mesh", "2", "--shape", "4"],
    ],
    ids=lambda args: args[0],
)
def test_an_axis_number_of_thousands_of_digits(args):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "an axis number has 9 digits at most, this has 5000 (character" in result.stderr
    assert len(result.stderr) < 500


def test_such_a_number_in_a_rule_or_a_checkpoint(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    result = run("reshard", ckpt, "-o", tmp_path / "out", "--mesh", "2", "--rule", "*", HUGE)
    assert result.exit_code == 2
    assert "an axis number has 9 digits at most, this has 5000" in result.stderr
    info = json.loads((ckpt / "sharding_info.json").read_text())
    text = json.dumps(info)
    spec = next(entry["spec"] for entry in info["tensors"].values())
    (ckpt / "sharding_info.json").write_text(text.replace(json.dumps(spec), json.dumps(HUGE)))
    for args in (["inspect", ckpt], ["verify", ckpt], ["merge", ckpt, "-o", tmp_path / "out"]):
        result = run(*args)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
        assert "a spec of 5005 characters, more than the limits 64 and 4096" in result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["plan", f"[S0,{RAW}]", "[R,R]", "--mesh", "2", "--shape", "4x4"], 2),
        (["plan", "[R]", "[R]", "--mesh", RAW, "--shape", "4"], 2),
        (["plan", "[R]", "[R]", "--mesh", "2", "--shape", "4", f"--{RAW}"], 2),
        (["plan", "[R]", "[R]", "--mesh", "2", "--shape", "4", "--links", RAW], 2),
        (["plan", "[R]", "[R]", "--mesh", "2", "--shape", "4", "--links", f"{RAW}.toml"], 3),
        (["plan", "[R]", "[R]", "--mesh", f"{RAW}=2", "--shape", "4"], 2),
        (["cost", "--pairs", RAW, "--mesh", "2", "--shape", "4"], 3),
        (["cost", "[R]", RAW, "--mesh", "2", "--shape", "4"], 2),
        (["show", "[R]", "--mesh", "2", "--shape", "4", "-o", f"/no/{RAW}.svg"], 3),
        (["show", "[R]", "--mesh", "2", "--shape", "4", "-o", RAW], 2),
        (["explore", "--mesh", "2", "--shape", "4", "-o", f"/no/{RAW}"], 3),
        (["inspect", RAW], 3),
        (["verify", f"{RAW}\nError: all is well"], 3),
        (["diff", RAW, RAW], 3),
        (["merge", RAW, "-o", RAW], 3),
        (["reshard", RAW, "-o", RAW, "--mesh", "2", "--rules", RAW], 3),
        ([RAW], 2),
    ],
)
def test_arguments_and_file_names_are_escaped(args, code):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert is_safe(result.stderr)
    assert result.stderr.count("\n") == 1


def test_names_in_what_is_printed_are_escaped(tmp_path):
    ckpt = handmade({f"{RAW}\n.w": sample()["w"]}).write(tmp_path / f"ckpt{RAW}")
    out = tmp_path / f"{RAW}.safetensors"
    other = handmade({"v": sample()["w"]}).write(tmp_path / "other")
    for args, code in [
        (["inspect", ckpt], 0),
        (["inspect", ckpt, "--tensor", "*"], 0),
        (["inspect", ckpt, "--tensor", "*", "--index", "0"], 0),
        (["inspect", ckpt, "--tensor", "*", "--picture"], 0),
        (["inspect", ckpt, "--only", "uneven"], 0),
        (["inspect", ckpt, "--tensor", RAW], 3),
        (["merge", ckpt, "-o", out], 0),
        (["merge", ckpt, "-o", out], 3),
        (["diff", ckpt, out], 0),
        (["diff", ckpt, other], 1),
        (["show", "[R]", "--mesh", "2", "--shape", "4", "-o", tmp_path / f"{RAW}.svg"], 0),
        (["explore", "--mesh", "2", "--shape", "4", "-o", tmp_path / f"{RAW}.html"], 0),
    ]:
        result = run(*args)
        assert result.exit_code == code, result.stderr
        assert is_safe(result.stdout + result.stderr), args
        assert (
            ESCAPED in result.stdout + result.stderr or "--only" in args or args[1:] == [ckpt, out]
        )
    listed = run("inspect", ckpt, "--json")
    assert listed.stdout.isascii()
    assert [tensor["name"] for tensor in json.loads(listed.stdout)["tensors"]] == [f"{RAW}\n.w"]


@pytest.mark.parametrize("value", ["x", "9" * 5000, "-1", "", "٣"])
def test_a_job_whose_size_is_no_number(monkeypatch, value, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", value)
    result = run("profile", "--mesh", "2", "-o", tmp_path / "p.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: WORLD_SIZE=")
    assert "is not a number; start it with torchrun" in result.stderr


def test_an_error_is_no_longer_than_a_screen():
    result = run("plan", "[R]", "[R]", "--mesh", "2", "--shape", "4", "x" * 100_000)
    assert result.exit_code == 2
    assert len(result.stderr) < 2100


IMPORTS = """
import resource, sys
from shardspec.cli.main import cli
import shardspec.cli.links, shardspec.cli.plan, shardspec.cli.show
"""
MEASURED = """
try:
    cli(sys.argv[1:], prog_name="shardspec")
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Its own: ru_maxrss counts that of the process it was forked from.
    peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
    print(used.ru_utime + used.ru_stime, peak >> 10, file=sys.stderr)
"""
ACROSS = ["plan", "[R,S2,R,S013]", "[S12,S0,R,R]", "--mesh", "4x1x1x1", "--target-mesh", "2x2x2"]


def large(dims, size, axes):
    """Return calls for tensors and meshes that are large, in several ways."""
    many = "".join(map(str, range(axes)))
    wide = ["--shape", "65536"]
    return [
        [*ACROSS, "--shape", "4x4x11x8"],
        [*ACROSS, "--shape", "4x4x11x8", "--max-bytes", "1"],
        ["plan", "[S0]", "[S1]", "--mesh", f"{size}x{size}", "--shape", f"{size * size}"],
        ["plan", "[S0,R]", "[R,S10]", "--mesh", "x".join("2" * 16), "--shape", "65536x4"],
        ["plan", f"[R|P{many}]", "[S0]", "--mesh", "x".join("2" * axes), "--shape", "4096"],
        ["plan", "[S01]", "[S0]", "--mesh", "128x128", "--target-mesh", "128", *wide],
        ["plan", "[S01]", "[R]", "--mesh", "64x64", "--target-mesh", "64x64", *wide],
        [
            "cost",
            f"[S0,S12,{'R,' * (dims - 3)}S3]",
            f"[{'R,' * (dims - 1)}R]",
            f"[S0,S12,{'R,' * (dims - 3)}S3]",
            f"[R,S21,S3,S0{',R' * (dims - 4)}]",
            *["--mesh", "4x2x2x2", "--shape", "x".join(["2"] * (dims - 4) + ["1"] * 4)],
        ],
        ["plan", "[R]", "[R]", "--mesh", "x".join("1" * 5000), "--shape", "4"],
        ["plan", "[S2*2,S1|P0]", "[R,R]", "--mesh", "2x64x1024", "--shape", "1x3"],
        ["show", "[S0]", "--mesh", "4096", "--shape", "4096"],
    ]


@pytest.mark.parametrize(
    ("dims", "size", "axes"),
    [(18, 512, 8), pytest.param(64, 1024, 10, marks=pytest.mark.exhaustive)],
)
def test_time_and_memory_are_bounded(dims, size, axes):
    calls = large(dims, size, axes)
    for args, done in zip(calls, run_forked(IMPORTS, MEASURED, calls), strict=True):
        *lines, last = done.stderr.splitlines()
        assert done.returncode in (0, 2), (args, done.stderr)
        assert len(lines) <= 1, args
        seconds, memory = map(float, last.split())
        assert seconds < 10, args
        assert memory < 500, args


KEPT = f"""
for size in range(int(sys.argv[1])):
    try:
        cli([*{ACROSS!r}, "--shape", f"4x4x{{11 + size}}x8", "--json"], prog_name="shardspec")
    except SystemExit as end:
        assert end.code == 0
with open("/proc/self/statm") as file:
    print(int(file.read().split()[1]) * resource.getpagesize() >> 20)
"""


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_many_plans_between_meshes_keep_little(count):
    """What is remembered of tensors of one rank, each of which takes some 50 MiB to plan."""
    (done,) = run_forked(IMPORTS, KEPT, [[count]])
    assert int(done.stdout.splitlines()[-1]) < 80 + 27 * count


def test_reading_ids_takes_time_in_proportion():
    text = ",".join(map(str, range(100_000)))
    started = time.process_time()
    result = run("cost", "[R]", "[S0]", "--mesh", "100000", "--shape", "8", "--ids", text)
    assert time.process_time() - started < 5
    assert result.exit_code == 0


@pytest.mark.parametrize(("axes", "dims"), [(4, 65), (4, 200), (33, 2)])
def test_more_axes_or_dims_than_are_planned_for(axes, dims):
    spec = f"[S0{',R' * (dims - 1)}]"
    shape = "x".join("2" * min(dims, 60)) + "x1" * max(0, dims - 60)
    result = run("cost", spec, f"[{'R,' * (dims - 1)}S0]", "--mesh", "x1" * axes, "--shape", shape)
    assert result.exit_code == 2
    result = run(
        "cost", spec, f"[{'R,' * (dims - 1)}S0]", "--mesh", "x".join("1" * axes), "--shape", shape
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"Error: pair 1: cannot plan conversions for {axes} mesh axes and {dims} dims; use at most "
        "32 axes and 64 dims\n"
    )

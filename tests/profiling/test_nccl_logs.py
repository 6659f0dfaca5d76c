"""Logs of nccl-tests become a file of links that predicts what was not in them."""

import csv
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.cli.main import cli
from shardspec.comm.curves import Link
from shardspec.comm.presets import link_preset, preset_cluster
from shardspec.errors import ProfileError
from shardspec.profiling.fit import step_of

TIMES = Path(__file__).parents[2] / "benchmarks" / "nccl-single-node.csv"
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
}
HEADER = """\
# nccl-tests version 2.17.1 nccl-headers=22902 nccl-library={version}
# Collective test starting: {test}_perf
# nThread 1 nGpus {ranks} minBytes 512 maxBytes 536870912 step: 2(factor) warmup iters: 5
#
# Using devices
{devices}
#
#                                                              out-of-place
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
"""

RINGS = 8 * 40e3  # bytes per µs of rings through all eight ports
TWO_HOSTS = {
    "all_gather": (15 / 16, RINGS),
    "reduce_scatter": (15 / 16, RINGS),
    "all_reduce": (30 / 16, RINGS),
    "alltoall": (8 / 16, 45e3),
    "sendrecv": (1, 45e3),
}
"""Test of nccl-tests to bytes per buffer byte, and bytes per µs, of 16 devices on two hosts."""


def log_text(test, ranks, times, *, hosts=1, checked=True, version="22902"):
    """Return what nccl-tests print for some times in µs by bytes, in place as well."""
    each = ranks // hosts
    devices = "\n".join(
        f"#  Rank {n:2} Group  0 Pid {4000 + n} on  node{n // each} device {n % each} [0x1b] H100"
        for n in range(ranks)
    )
    text = HEADER.format(version=version, test=test, ranks=each, devices=devices)
    wrong = "0" if checked else "N/A"
    redop = "sum" if "reduce" in test else "none"
    for size, time in times.items():
        out = f"{time:.2f} 1.0 1.0 {wrong}" if time else "N/A N/A N/A N/A"
        text += f"{size:12} {size // 2:13} half {redop} -1 {out} {2 * (time or 1)} 1 1 {wrong}\n"
    return f"{text}# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100.0\n#\n"


def run(*args):
    return CliRunner().invoke(cli, list(map(str, args)), prog_name="shardspec")


def measured():
    """Return times in µs by preset, test and number of devices."""
    found: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    with TIMES.open() as file:
        for row in csv.DictReader(file):
            key = row["preset"], row["collective"], int(row["devices"])
            found[key][int(row["buffer_bytes"])] = float(row["microseconds"])
    return found


def test_half_of_the_times_predict_the_other_half(tmp_path):
    errors = []
    for machine in ("a100-nvswitch", "h100-nvswitch", "h200-nvswitch", "b200-nvswitch"):
        logs = []
        of_machine = {key[1:]: t for key, t in measured().items() if key[0] == machine}
        for (test, ranks), times in of_machine.items():
            sizes = sorted(times)
            path = tmp_path / f"{machine}-{test}-{ranks}.log"
            half = {size: times[size] for size in sizes[::2]}
            path.write_text(log_text(test, ranks, half, checked=ranks != 4))
            logs.append(path)
        file = tmp_path / f"{machine}.toml"
        done = run("links", "import", *logs, "-o", file)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.count("all-gather") == 3
        for (test, ranks), times in of_machine.items():
            model = CostModel.from_presets(DeviceMesh(range(ranks)), [str(file)])
            kind = KINDS[test]
            for size in sorted(times)[1::2]:
                held = size // ranks if kind == "all-gather" else size
                predicted = model.step_seconds(step_of(kind, (0,)), held) * 1e6
                errors.append(abs(predicted / times[size] - 1))
    median, most = np.quantile(errors, (0.5, 0.9))
    assert len(errors) > 400
    assert median <= 0.06
    assert most <= 0.20


def two_hosts(tmp_path):
    """Write logs of one host and of two, and return the file made of them."""
    sizes = [2**k for k in range(12, 28, 2)]
    paths = []
    for number, (test, ranks, hosts, rate) in enumerate(
        [
            ("all_gather", 4, 1, 100e3),
            ("alltoall", 4, 1, 100e3),
            ("all_gather", 8, 2, 20e3),
            ("sendrecv", 2, 2, 10e3),
        ]
    ):
        path = tmp_path / f"{number}.log"
        times = {size: 20 + size / rate for size in sizes}
        path.write_text(log_text(test, ranks, times, hosts=hosts))
        paths.append(path)
    file = tmp_path / "cluster.toml"
    done = run("links", "import", *paths, "-o", file)
    assert (done.exit_code, done.stderr) == (0, "")
    return file


def test_a_file_prices_any_mesh_shape(tmp_path):
    file = two_hosts(tmp_path)
    cluster = preset_cluster(str(file))
    assert cluster.per_node == 4
    assert cluster.crosses(3, 4)
    for shape in ((8,), (2, 4), (4, 2)):
        mesh = DeviceMesh(range(8), shape)
        for model in (
            CostModel.of_mesh(mesh, str(file)),
            CostModel.of_mesh(DeviceMesh(range(8), shape, links=str(file))),
        ):
            every = tuple(range(len(shape)))
            seconds = model.step_seconds(step_of("all-gather", every), 2**20)
            assert seconds == pytest.approx((20 + 2**23 / 20e3) / 1e6, rel=0.01)
    first, second = DeviceMesh(range(4)), DeviceMesh(range(4, 8))
    source, target = (Layout(mesh, "[S0]", (2**22,), "float32") for mesh in (first, second))
    plan = LayoutConverter(links=str(file)).plan(source, target)
    assert 0.9 < plan.cost_seconds / (2**22 / 10e9) < 1.1
    shown = run("plan", "[S0]", "[R]", "--mesh", "2x4", "--shape", "4096", "--links", file)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "cluster between hosts" in shown.stdout


@pytest.mark.parametrize("tests", [*TWO_HOSTS, *combinations(TWO_HOSTS, 2), tuple(TWO_HOSTS)])
def test_any_logs_of_two_hosts_tell_the_rate_of_a_port(tmp_path, tests):
    """Two hosts of 8 devices, each with a port of 45 GB/s: whichever collectives were measured."""
    tests = (tests,) if isinstance(tests, str) else tests
    for test in tests:
        for hosts in (1, 2):
            ratio, rate = (7 / 8, 370e3) if hosts == 1 else TWO_HOSTS[test]
            times = {2**k: 20 + 2**k * ratio / rate for k in range(12, 30, 2)}
            if test != "sendrecv" or hosts == 2:
                log = log_text(test, 8 * hosts, times, hosts=hosts)
                (tmp_path / f"{test}{hosts}.log").write_text(log)
    inside = log_text("all_gather", 8, {2**k: 20 + 2**k / 400e3 for k in range(12, 30, 2)})
    (tmp_path / "inside.log").write_text(inside)
    done = run("links", "import", *tmp_path.glob("*.log"), "-o", tmp_path / "own.toml")
    assert (done.exit_code, done.stderr) == (0, "")
    between = link_preset(str(tmp_path / "own.toml")).between
    assert isinstance(between, Link)
    assert 35 < 1e-9 / between.seconds_per_byte < 46


def test_logs_of_reductions_alone_price_exchanges_too(tmp_path):
    times = {2**k: 20 + 2**k / 200e3 for k in range(12, 30, 2)}
    (tmp_path / "a.log").write_text(log_text("all_reduce", 8, times))
    done = run("links", "import", tmp_path / "a.log", "-o", tmp_path / "own.toml")
    assert (done.exit_code, done.stderr) == (0, "")
    link = link_preset(str(tmp_path / "own.toml")).inside
    assert link is not None
    assert 1e-9 / link.seconds_per_byte == pytest.approx(200 * 14 / 8, rel=0.01)


def test_times_that_do_not_grow_have_no_rate(tmp_path):
    times = {2**k: 20.0 for k in range(9, 20)}
    (tmp_path / "a.log").write_text(log_text("all_gather", 8, times))
    done = run("links", "import", tmp_path / "a.log", "-o", tmp_path / "own.toml")
    assert (done.exit_code, done.stderr) == (0, "")
    link = link_preset(str(tmp_path / "own.toml")).inside
    assert link is not None
    assert link.seconds_per_byte < 1e-20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("all_gather_perf", "broadcast_perf"), "broadcast_perf"),
        (
            lambda text: text.replace("# Collective test starting: all_gather_perf", "#"),
            "known collective",
        ),
        (lambda text: text.split("#       size")[0], "0 out-of-place times"),
        (lambda _: log_text("all_gather", 4, {4096: None, 8192: None}), "0 out-of-place times"),
        (lambda text: text + "# NCCL version 2.20.5\n", "two NCCL versions"),
        (lambda text: text.replace("Rank", "Process"), "0 lines with ranks"),
    ],
)
def test_logs_that_say_too_little(tmp_path, change, message):
    path = tmp_path / "a.log"
    path.write_text(change(log_text("all_gather", 4, {4096: 10.0, 8192: 11.0, 16384: 12.0})))
    done = run("links", "import", path, "-o", tmp_path / "cluster.toml")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert message in done.stderr
    assert not (tmp_path / "cluster.toml").exists()


def test_logs_of_two_versions(tmp_path):
    for number, version in enumerate(("22902", "22703")):
        text = log_text("all_gather", 2 + 2 * number, {4096: 10.0, 8192: 11.0}, version=version)
        (tmp_path / f"{number}.log").write_text(text)
    done = run("links", "import", *tmp_path.glob("*.log"), "-o", tmp_path / "cluster.toml")
    assert done.exit_code == 3
    assert "22703 and 22902" in done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("latency_us = 0", "latency_us = -1"),
        ("latency_us = 0", ""),
        ("devices = 4", "devices = 0"),
        ('"all-gather"', '"gather"'),
        ("lines = [[", "lines = [[-1.0, "),
        ("version = 1", "version = 2"),
        ("[inside]", "[outside]"),
        ("per_node = 4", "per_node = 0"),
        ("per_node = 4", "per_node = 4.5"),
        ("gb_per_s = ", "gb_per_s = -"),
        ("start_us = ", "start_ms = 1\nstart_us = "),
        ("[between]", "[about]\nsource = 1\n[between]"),
        ("start_us = ", 'start_us = "1" #'),
        ("sizes = [", "sizes = [0, "),
        ("error_percent = [", "error_percent = [1, "),
        ("[inside]", "[inside"),
    ],
)
def test_files_with_holes_or_negative_times(tmp_path, old, new):
    file = two_hosts(tmp_path)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ProfileError, match=r"cluster\.toml"):
        link_preset(str(file))
    done = run("plan", "[S0]", "[R]", "--mesh", "4", "--shape", "8", "--links", file)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (3, "", 1)

"""The links that `shardspec profile` measures: files of links, priced, and on real processes."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.cli.main import cli
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.comm.curves import EXCHANGE_KIND, KINDS, PERMUTE_KIND
from shardspec.comm.presets import link_preset, preset_cluster
from shardspec.comm.steps import AllToAll, Exchange
from shardspec.layout.plan import step_seconds
from shardspec.profiling.fit import Timing, fitted_links
from shardspec.profiling.measure import measure
from tests.jobs import run_command
from tests.profiling.test_fit import runs

PLANS = Path(__file__).parents[2] / "docs" / "plans.md"


def run(*args):
    return CliRunner().invoke(cli, args, prog_name="shardspec")


def written(tmp_path, preset):
    path = tmp_path / "cluster.toml"
    path.write_text(preset.text(), "utf-8")
    return str(path)


def test_a_file_there_and_back(tmp_path):
    """Numbers have six digits; what was read is written as it was read."""
    read = link_preset(written(tmp_path, fitted_links("own", runs(0.1), source='a "b" \\ c')))
    assert (read.name, read.per_node, read.source) == ("cluster", 4, 'a "b" \\ c')
    assert link_preset(written(tmp_path, read)) == read
    cluster = preset_cluster(read)
    assert cluster.per_node == 4
    assert CostModel.of_mesh(DeviceMesh(range(8), (2, 4)), cluster) == CostModel.of_mesh(
        DeviceMesh(range(8), (2, 4)), preset_cluster(str(tmp_path / "cluster.toml"))
    )


def test_one_file_prices_every_mesh_shape(tmp_path):
    path = written(tmp_path, fitted_links("own", runs()))
    for shape in ((8,), (2, 4), (2, 2, 2)):
        mesh = DeviceMesh(range(8), shape)
        source = Layout(mesh, "[S0,R]", (600, 600), "float32")
        plan = LayoutConverter(links=path).plan(source, "[R,S0]")
        shown = run(
            *("plan", "[S0,R]", "[R,S0]", "--shape", "600x600"),
            *("--mesh", "x".join(map(str, shape)), "--links", path),
        )
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert shown.stdout == f"{plan}\n"


@pytest.mark.parametrize("share", [0.1, 1.0, 3.0])
def test_an_exchange_is_never_priced_below_the_all_to_all_that_moves_the_same(tmp_path, share):
    """Whatever was measured of exchanges: a plan prefers the collective."""
    times = {kind: run for run in runs() for kind in [run.kind]}
    measured = [
        run._replace(times={s: t * share for s, t in run.times.items()})
        if run.kind == EXCHANGE_KIND
        else run
        for run in runs()
        if run.nodes == 1
    ]
    assert set(times) == {*KINDS, PERMUTE_KIND, EXCHANGE_KIND}
    path = written(tmp_path, fitted_links("own", measured))
    for n in (2, 3, 4):
        mesh = DeviceMesh(range(n))
        model = CostModel.of_mesh(mesh, path)
        for rows in (12, 1200, 24_000):
            source = Layout(mesh, "[S0,R]", (rows, 2400), "bf16")
            target = source.with_spec("[R,S0]")
            collective = step_seconds(AllToAll(0, 1, (0,), (0,)), source, target, model)
            assert step_seconds(Exchange((0,)), source, target, model) >= collective * (1 - 1e-9)
            (step,) = LayoutConverter(model).plan(source, target).steps
            assert isinstance(step, AllToAll)


def test_a_measured_permute_prices_permutes(tmp_path):
    path = written(tmp_path, fitted_links("own", [r for r in runs() if r.nodes == 1]))
    source = Layout(DeviceMesh(range(4), (2, 2)), "[S01]", (1 << 24,), "int8")
    plan = LayoutConverter(links=path).plan(source, "[S10]")
    assert plan.cost_seconds == pytest.approx(4e-5 + (1 << 22) / 5e10, rel=0.01)
    assert "not measured" not in plan.known_error


def test_groups_beyond_the_data_are_not_measured(tmp_path):
    path = written(tmp_path, fitted_links("own", runs()))

    def accuracy(ids, spec, size):
        source = Layout(DeviceMesh(ids), spec, (size,), "float32")
        return LayoutConverter(links=path).plan(source, "[R]").known_error

    measured = r"^cluster.* is \d+ % off at the median, \d+ % at the 90th percentile$"
    assert re.match(measured, accuracy(range(4), "[S0]", 1 << 16))
    assert re.match(measured, accuracy([0, 1, 4, 5], "[S0]", 1 << 16))  # on two hosts
    assert accuracy(range(8), "[S0]", 1 << 16).startswith("not measured: ")  # 4 a host
    assert accuracy([0, 4, 8, 12], "[R|P0]", 1 << 16) == (
        "not measured: all-reduce of 4 nodes × 1 (priced from tiers)"
    )
    assert accuracy(range(4), "[S0]", 1 << 30) == "not measured: all-gather of 4"
    assert accuracy(range(1), "[S0]", 1 << 16) == "exact, nothing is sent"
    rack = Layout(DeviceMesh(range(72)), "[R|P0]", (1 << 29,), "float32")
    plan = LayoutConverter(links="gb200-nvl72").plan(rack, "[R]")
    assert "not measured: " in plan.known_error
    assert " of 72" in plan.known_error


def test_measuring_one_process_that_holds_all_devices(monkeypatch):
    monkeypatch.setattr("shardspec.profiling.measure._SECONDS_EACH", 0.0)
    communicator = SimulatedCommunicator(DeviceMesh(range(6), (2, 3)))
    seen = []
    found = measure(
        communicator,
        [4096, 65536],
        1,
        device=torch.device("cpu"),
        per_node=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    kinds = (*KINDS, PERMUTE_KIND, EXCHANGE_KIND)
    groups = [(2, 2), (3, 1), (6, 2)]  # devices and hosts of a group
    assert [(r.kind, r.devices, r.nodes) for r in found] == [
        (kind, *group) for group in groups for kind in kinds
    ]
    for each in found:
        held = [size / (each.devices if each.kind == "all-gather" else 1) for size in each.times]
        assert held == [pytest.approx(size, rel=0.4) for size in (4096, 65536)]
        assert min(each.times.values()) > 0
    assert seen == [(i, 18) for i in range(1, 19)]
    assert isinstance(found[0], Timing)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        # Two sizes, as fast as can be; and the command as it stands there.
        (["--max-bytes", "16KiB", "--repeats", "1"], 2),
        pytest.param([], 7, marks=pytest.mark.exhaustive),
    ],
)
def test_commands_of_the_docs(tmp_path, monkeypatch, options, sizes):
    blocks = re.findall(r"^```sh\n(.*?)^```$", PLANS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "shardspec profile" in block]
    profiling, planning = map(shlex.split, block.splitlines())
    start = ["torchrun", "--nproc_per_node", "4", "-m", "shardspec"]
    assert profiling[: len(start)] == start
    assert planning[0] == "shardspec"
    done, *others = run_command(4, tmp_path, *profiling[len(start) :], *options)
    assert [done.exit_code, *others] == [0] + [(0, "", "")] * 3, done.stderr
    monkeypatch.chdir(tmp_path)
    planned = run(*planning[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]
    preset = link_preset("cluster.toml")
    assert preset.inside is not None
    assert "gloo" in preset.source
    measured = {(curve.kind, curve.devices) for curve in preset.inside.curves}
    assert measured == {(kind, n) for kind in (*KINDS, PERMUTE_KIND, EXCHANGE_KIND) for n in (2, 4)}
    assert all(curve.sizes[0] <= 4096 * 5 for curve in preset.inside.curves)
    assert (preset.inside.error is None) == (sizes == 1)
    assert "cluster.toml: links inside one host" in done.stdout
    assert (planned.exit_code, planned.stderr) == (0, "")
    source = Layout(DeviceMesh(range(4), (2, 2)), "[S0,R]", (4096, 4096), "float32")
    plan = LayoutConverter(links="cluster.toml").plan(source, "[R,S01]")
    assert planned.stdout == f"{plan}\n"


@pytest.mark.parametrize(
    ("env", "args", "message"),
    [
        ({}, (), "mesh 2x2 has 4 devices, but this is not a job; start it as in 'torchrun"),
        ({"WORLD_SIZE": "3"}, (), "mesh 2x2 has 4 devices, but this job has 3 processes"),
        ({"WORLD_SIZE": "4"}, ("--min-bytes", "1MiB", "--max-bytes", "1MiB"), "more than it"),
    ],
)
def test_a_job_of_another_size_is_wrong_usage(monkeypatch, env, args, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = run("profile", "--mesh", "2x2", "-o", "cluster.toml", *args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_places_that_cannot_be_written_are_refused_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    for name, code, message in (
        ("nowhere/cluster.toml", 3, "nowhere does not exist; make it first"),
        ("there.toml", 3, "exists; choose another name"),
        ("cluster.json", 2, "ends in .toml"),
    ):
        (tmp_path / "there.toml").write_text("mine")
        done = run("profile", "--mesh", "2x2", "-o", str(tmp_path / name))
        assert (done.exit_code, message in done.stderr) == (code, True)

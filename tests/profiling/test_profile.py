"""Profiles as files and on the command line; and measured on real processes."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.cli.main import cli
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.comm.curves import KINDS
from shardspec.errors import ProfileError
from shardspec.profiling.fit import Measurement, fit_links, step_of
from shardspec.profiling.measure import measure
from shardspec.profiling.profile import Profile
from tests.jobs import run_command
from tests.profiling.test_fit import LINKS, SHAPE, times

PLANS = Path(__file__).parents[2] / "docs" / "plans.md"


@pytest.fixture(scope="module")
def profile():
    measured = times(CostModel(SHAPE, LINKS), noise=lambda index: 1.0 + 0.05 * (index % 3 - 1))
    return Profile(SHAPE, ("dp", "tp"), tuple(measured), {"backend": "gloo", "ranks": "6"})


def written(tmp_path, profile):
    path = tmp_path / "cluster.json"
    path.write_text(profile.to_json(), "utf-8")
    return path


def run(*args):
    return CliRunner().invoke(cli, args, prog_name="shardspec")


def test_file_there_and_back(tmp_path, profile):
    path = written(tmp_path, profile)
    assert CostModel.from_profile(path) == CostModel.from_profile(str(path)) == profile.cost_model


def test_a_file_of_the_first_release_has_links_alone(tmp_path, profile):
    record = json.loads(profile.to_json())
    del record["curves"]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(record))
    assert CostModel.from_profile(path) == profile.fit.model


def test_file_says_what_was_measured_and_how_well_it_fits(profile):
    record = json.loads(profile.to_json())
    assert (record["format"], record["version"]) == ("shardspec profile", 1)
    assert record["mesh_shape"] == [2, 3]
    assert record["facts"] == {"backend": "gloo", "ranks": "6"}
    assert len(record["measurements"]) == len(profile.measurements) == 84
    chosen = record["fits"][record["link_model"]]
    assert chosen["typical_error"] == profile.fit.typical_error
    model = profile.cost_model
    for item in record["measurements"]:
        step = step_of(item["kind"], tuple(item["axes"]))
        assert item["fitted_seconds"] == model.step_seconds(step, item["num_bytes"])


def test_errors_are_those_of_sizes_left_out(profile):
    """Noise of 5 % shows as such, in every group of axes that was measured and nowhere else."""
    model = profile.cost_model
    for kind in KINDS:
        for axes in ((0,), (1,), (0, 1)):
            step = step_of(kind, axes)
            for held in (4096, 1 << 23):
                band = model.error(step, held)
                assert 0.01 < band.median < 0.1
                assert band.median <= band.most < 0.2
            assert model.error(step, 1024) is model.error(step, 1 << 30) is None
    assert model.known_error.endswith("of 2, 3, 6 devices; others have not been measured")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(format="other"), "format is 'other', but this release reads"),
        (lambda r: r.update(version=2), "version is 2, but this release reads 1"),
        (lambda r: r.update(mesh_shape=[]), "mesh shape (): need at least one axis"),
        (lambda r: r.update(mesh_shape=[2**40, 3]), "more than 1,048,576 devices"),
        (lambda r: r.update(mesh_shape=[2], axis_names=None), "2 links for the 1 axes of mesh 2"),
        (lambda r: r.update(axis_names=["dp"]), "1 axis name given for a mesh with 2 axes"),
        (lambda r: r.update(axis_names=["dp", "dp"]), "axis names ('dp', 'dp') repeat"),
        (lambda r: r.update(axis_names=[1, 2]), "axis name"),
        (lambda r: r.update(link_model="bus"), "link_model is 'bus', but this release reads"),
        (lambda r: r.pop("fits"), "'fits' is missing"),
        (lambda r: r["fits"].pop("ring"), "'ring' is missing"),
        (lambda r: r["fits"]["ring"]["links"][0].update(latency_s=-1.0), "links is [-1.0, "),
        (lambda r: r["fits"]["ring"]["links"].pop(), "1 links for the 2 axes"),
        (lambda r: r.update(curves=[5]), "is not a profile"),
        (lambda r: r["curves"][0].update(axes=[2]), "axis is 2, but this release reads 0 or 1"),
        (lambda r: r["curves"][0].update(axes=[0, 0]), "devices is 2, but this release reads 4"),
        (lambda r: r["curves"][0].update(devices=3), "devices is 3, but this release reads 2"),
        (lambda r: r["curves"][0].update(collective="gather"), "collective is 'gather', but this"),
        (lambda r: r["curves"][0].update(lines=[]), "lines is (), but"),
        (lambda r: r["curves"][0].update(lines=[[0, "1"]]), "lines is [0, '1'], but should be"),
        (lambda r: r["curves"][0].update(lines=[[0, 10**400]]), "lines is [0, 1000"),
        (lambda r: r["curves"][0].update(lines=[[0, float("nan")]]), "lines is [0, nan], but"),
        (lambda r: r["curves"][0].update(lines=[[0, 1, 2]]), "is not a profile"),
        (lambda r: r["curves"][0].pop("sizes"), "'sizes' is missing"),
        (lambda r: r["curves"][0].update(errors=[None]), "is not a profile"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, profile, change, message):
    record = json.loads(profile.to_json())
    change(record)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ProfileError) as caught:
        CostModel.from_profile(path)
    assert message in str(caught.value)
    done = run("plan", "[S0]", "[R]", "--shape", "8", "--links", str(path))
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1


def test_damaged_and_missing_files(tmp_path):
    path = tmp_path / "cluster.json"
    with pytest.raises(ProfileError, match="there is no such file"):
        CostModel.from_profile(path)
    for content in (b"", b"{", b"[]", b"\xff", b'{"format": NaN}'):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match="cluster"):
            CostModel.from_profile(path)


def test_plans_with_a_profile_use_its_mesh_and_links(tmp_path, profile):
    path = written(tmp_path, profile)
    args = ("plan", "[S(dp),R]", "[R,S(tp)]", "--shape", "600x600", "--links", str(path))
    done = run(*args)
    assert (done.exit_code, done.stderr) == (0, "")
    mesh = DeviceMesh(range(6), SHAPE, axis_names=("dp", "tp"))
    source = Layout(mesh, "[S(dp),R]", (600, 600), "float32")
    plan = LayoutConverter(profile.cost_model).plan(source, "[R,S(tp)]")
    assert done.stdout == f"{plan}\n"
    links = profile.cost_model.links_text(["dp", "tp"])
    assert links.startswith("axis dp measured: ")
    assert links in done.stdout
    assert json.loads(run(*args, "--json").stdout)["known_error"] == plan.known_error
    costs = run("cost", "[S0]", "[R]", "--shape", "60", "--links", str(path), "--mesh", "2x3")
    assert costs.exit_code == 0
    assert "axis 0 measured" in costs.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--mesh", "2x4"), "--mesh has the shape 2x4, but the profile was measured on 2x3"),
        (("--between", "ib-ndr-per-gpu"), "--between and --per-node need one name"),
        (("--link-model", "ring"), "a profile has measured links"),
        (("--memory", "preset"), "a profile has timed steps with their copies; leave out --memory"),
    ],
)
def test_links_are_given_in_one_way(tmp_path, profile, args, message):
    path = written(tmp_path, profile)
    done = run("plan", "[S0]", "[R]", "--shape", "8", "--links", str(path), *args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_measuring_one_process_that_holds_all_devices(monkeypatch):
    monkeypatch.setattr("shardspec.profiling.measure._SECONDS_EACH", 0.0)
    communicator = SimulatedCommunicator(DeviceMesh(range(6), (2, 3)))
    seen = []
    found = measure(
        communicator,
        [4096, 65536],
        1,
        device=torch.device("cpu"),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [(m.kind, m.axes) for m in found] == [
        (kind, axes) for axes in ((0,), (1,), (0, 1)) for kind in KINDS for _ in range(2)
    ]
    for m, size in zip(found, [4096, 65536] * 12, strict=True):
        assert 0.7 * size < m.num_bytes < 1.4 * size
        assert m.seconds > 0
    assert seen == [(i, 24) for i in range(1, 25)]


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
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
    record = json.loads((tmp_path / "cluster.json").read_text("utf-8"))
    measured = [
        Measurement(m["kind"], tuple(m["axes"]), m["num_bytes"], m["seconds"])
        for m in record["measurements"]
    ]
    facts = record["facts"]
    profile = Profile(tuple(record["mesh_shape"]), record["axis_names"], tuple(measured), facts)
    assert (profile.mesh_shape, profile.axis_names) == ((2, 2), None)
    assert (facts["backend"], facts["ranks"]) == ("gloo", "4")
    # Three groups of axes, four kinds, and sizes from 4 KiB that grow fourfold.
    assert len(profile.measurements) == 3 * 4 * sizes
    for model in ("ring", "shared-bus"):
        fit = profile.ring if model == "ring" else profile.shared_bus
        assert fit == fit_links((2, 2), profile.measurements, model)
    better = min((profile.ring, profile.shared_bus), key=lambda fit: fit.mean_error)
    assert profile.fit.mean_error <= better.mean_error + 1e-6
    assert done.stdout.startswith(profile.table())
    assert f"accuracy: {profile.cost_model.known_error}" in " ".join(done.stdout.split())
    assert (planned.exit_code, planned.stderr) == (0, "")
    mesh = DeviceMesh(range(4), (2, 2))
    assert CostModel.from_profile(tmp_path / "cluster.json") == profile.cost_model
    source = Layout(mesh, "[S0,R]", (4096, 4096), "float32")
    assert planned.stdout == f"{LayoutConverter(profile.cost_model).plan(source, '[R,S01]')}\n"
    assert profile.cost_model.links_text(["0", "1"]) in " ".join(planned.stdout.split())


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
    done = run("profile", "--mesh", "2x2", "-o", "cluster.json", *args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_places_that_cannot_be_written_are_refused_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    done = run("profile", "--mesh", "2x2", "-o", str(tmp_path / "nowhere" / "cluster.json"))
    assert (done.exit_code, "nowhere does not exist; make it first" in done.stderr) == (3, True)
    (tmp_path / "there.json").write_text("mine")
    done = run("profile", "--mesh", "2x2", "-o", str(tmp_path / "there.json"))
    assert (done.exit_code, "exists; choose another name" in done.stderr) == (3, True)

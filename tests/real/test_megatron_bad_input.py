"""Megatron's checkpoints, damaged: one line, exit code 3, and nothing is written."""

import pickle
import shutil
import sys
from types import ModuleType

import pytest
from click.testing import CliRunner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shardspec.cli.main import cli

ORIGINAL = "nd_reformulated_orig_global_shape"
DESCRIBED = '{"sharded_backend": "%s", "sharded_backend_version": 1}'


def refused(source, place, *, dcp):
    """Return the line that refuses a checkpoint, which has to be the only one."""
    before = sorted(place.rglob("*"))
    out = ["-o", str(place / "out"), "--to", "dcp"] if dcp else ["-o", f"{place}/out.safetensors"]
    result = CliRunner().invoke(cli, ["merge", str(source), *out], catch_exceptions=False)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert (result.exit_code, result.stdout, len(lines)) == (3, "", 1), result.output
    assert sorted(place.rglob("*")) == before
    return lines[0]


@pytest.fixture
def ckpt(real, tmp_path):
    return shutil.copytree(real("megatron-0.16") / "megatron-0.16", tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda c: (c / "common.pt").unlink(), "common.pt is missing, and Megatron-core would not"),
        (lambda c: (c / "metadata.json").unlink(), "metadata.json is missing, and Megatron-core"),
        (
            lambda c: (c / "common.pt").write_bytes((c / "common.pt").read_bytes()[:-1]),
            "common.pt: is not a whole zip of torch.save",
        ),
        (lambda c: (c / "metadata.json").write_text("{"), "description is not JSON"),
        (lambda c: (c / "metadata.json").write_text("{}"), "sharded_backend None, and not"),
        (
            lambda c: (c / "metadata.json").write_text(DESCRIBED % "zarr"),
            "metadata.json says sharded_backend 'zarr', and not 'torch_dist'",
        ),
    ],
)
def test_what_megatron_needs_beside_the_tensors(ckpt, tmp_path, damage, problem):
    damage(ckpt)
    assert problem in refused(ckpt, tmp_path, dcp=True)
    # The tensors are all there, and can be had.
    for options in (["--to", "dcp", "--no-sidecars"], ["--to", "huggingface"]):
        out = tmp_path / options[-1]
        result = CliRunner().invoke(cli, ["merge", str(ckpt), "-o", str(out), *options])
        assert result.exit_code == 0, result.output
        assert not {"common.pt", "metadata.json"} & {path.name for path in out.iterdir()}


@pytest.mark.parametrize("dcp", [False, True])
def test_files_and_metadata_of_two_versions(real, ckpt, tmp_path, dcp):
    other = real("megatron-0.15") / "megatron-0.15"
    for name in (".metadata", "__0_0.distcp", "__2_0.distcp", "__2_1.distcp"):
        was = (ckpt / name).read_bytes()
        shutil.copyfile(other / name, ckpt / name)
        line = refused(ckpt, tmp_path, dcp=dcp)
        assert "restore" in line, name
        (ckpt / name).write_bytes(was)


def test_every_file_missing_or_cut(ckpt, tmp_path):
    for path in [*sorted(ckpt.glob("*.distcp")), ckpt / ".metadata"]:
        data = path.read_bytes()
        path.unlink()
        assert path.name in refused(ckpt, tmp_path, dcp=False)
        for size in (0, 1, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            assert path.name in refused(ckpt, tmp_path, dcp=False)
        path.write_bytes(data)


def test_two_iterations_and_trackers_that_name_neither(ckpt, tmp_path):
    run = tmp_path / "run"
    for number in (10, 20):
        shutil.copytree(ckpt, run / f"iter_00000{number}")
    tracker = run / "latest_checkpointed_iteration.txt"
    assert "iter_0000010, iter_0000020" in refused(run, tmp_path, dcp=True)
    for said in ("30", "../ckpt", "release", "-10"):
        tracker.write_text(said)
        assert f"{said!r}, but no such checkpoint" in refused(run, tmp_path, dcp=True)


@pytest.fixture
def megatron(monkeypatch):
    """Stand in for the module that the metadata names, so that it can be changed."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    words = name.split(".")
    for end in range(1, len(words) + 1):
        monkeypatch.setitem(sys.modules, ".".join(words[:end]), ModuleType(words[end - 1]))
    for kind in ("MCoreSavePlan", "MCoreMetadata"):
        setattr(sys.modules[name], kind, type(kind, (), {"__module__": name}))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        ({ORIGINAL: (4, 3, 5)}, "into blocks"),
        ({ORIGINAL: (16, 1)}, "into blocks"),
        ({ORIGINAL: (-4, 16)}, "sizes are not whole numbers"),
        ({"other": (4, 16)}, "fully_reshardable"),
        ({ORIGINAL: (4, 16), 1: 2}, "fully_reshardable"),
        (7, "fully_reshardable"),
        ({}, "does not record how it was flattened"),
    ],
)
def test_flat_shapes_that_do_not_add_up(real, tmp_path, spoil, problem):
    ckpt = shutil.copytree(real("megatron-0.15") / "megatron-0.15", tmp_path / "ckpt")
    said = FileSystemReader(ckpt).read_metadata()
    data = vars(said)["mcore_data"]
    data[next(name for name, found in data.items() if found)] = spoil
    (ckpt / ".metadata").write_bytes(pickle.dumps(said))
    for dcp in (False, True):
        assert problem in refused(ckpt, tmp_path, dcp=dcp)

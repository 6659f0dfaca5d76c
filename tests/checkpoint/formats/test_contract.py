"""What every format keeps to: those that come along, and the example's of another package."""

import json
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from shardspec import DeviceMesh, load_sharded, merge, reshard
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.formats import (
    MODULES,
    Format,
    default_format,
    format_called,
    formats,
    installed,
    never,
    written_format,
    written_names,
)
from shardspec.checkpoint.open import open_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.formats import test_deepspeed, test_meta
from tests.checkpoint.formats.reading import assert_same, read_whole, refused
from tests.checkpoint.writers.states import save, state

EXAMPLES = Path(__file__).parents[3] / "examples"
MESH = DeviceMesh(range(6), (2, 3))
WRITTEN = [(form.name, way) for form in formats() for way in form.writes]
PLUGIN = [("npz", "merged"), ("npz", "sharded")]
NOT_OF_NUMPY = ("bfloat16", "float8")


def install(place, points, package="a-package"):
    """Make the metadata of an installed package with formats; return where it lies."""
    home = place / f"{package.replace('-', '_')}-1.0.dist-info"
    home.mkdir(parents=True)
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (home / "entry_points.txt").write_text(f"[shardspec.formats]\n{lines}")
    return place


@pytest.fixture
def path(monkeypatch):
    """Directories put on the path; packages in them are found, and forgotten in the end."""

    def add(*places):
        for place in places:
            monkeypatch.syspath_prepend(place)
        installed.cache_clear()

    yield add
    installed.cache_clear()


@pytest.fixture(autouse=True)
def _plugin(path, tmp_path):
    path(EXAMPLES, install(tmp_path / "installed", {"npz": "format_plugin:FORMAT"}))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What outputs are made of: tensors of every dtype; those that NumPy has."""
    at = tmp_path_factory.mktemp("sources")
    whole = {**state(), "one": torch.ones(1, 1), "none": torch.zeros(3, 0, 2, dtype=torch.int8)}
    of_numpy = {n: t for n, t in whole.items() if not any(kind in n for kind in NOT_OF_NUMPY)}
    save(at / "every", whole)
    save(at / "numpy", of_numpy)
    places = {"every": whole, "numpy": of_numpy}
    return {name: (at / name, due) for name, due in places.items()}


def kind(name):
    """Return which source a format can be written of."""
    return "numpy" if name == "npz" else "every"


def write(sources, place, name, way, **options):
    """Write a format; return the output and the tensors that it should hold."""
    form = written_format(name, way)
    source, due = sources[kind(name)]
    out = place / f"out{form.extensions[0] if form.extensions and way == 'merged' else ''}"
    if way == "merged":
        merge(source, out, format=name, **options)
    else:
        rules = {"of.*": "[S10,R]", "empty": "[S0,S1]", "none": "[S1,R,R]"}
        reshard(source, out, device_mesh=MESH, rules=rules, format=name, **options)
    return out, due


def check_whole(out, due):
    """Check the tensors that an output should hold."""
    whole = read_whole(out)
    assert_same({key: whole[key] for key in due}, due)


def below(place):
    """Return the files of an output."""
    return [place] if place.is_file() else sorted(at for at in place.rglob("*") if at.is_file())


each_written = pytest.mark.parametrize(("name", "way"), [*WRITTEN, *PLUGIN])


@each_written
def test_what_is_written_is_read(sources, tmp_path, name, way):
    out, due = write(sources, tmp_path, name, way)
    found = read_whole(out)
    assert_same({key: found[key] for key in due}, due)
    assert found.keys() == due.keys()
    source = open_checkpoint(out)
    form = written_format(name, way)
    assert source.format == form.called
    assert verify_checkpoint(out).flaws == ()
    if way == "sharded":
        merge(out, tmp_path / "a.safetensors")
        merge(sources[kind(name)][0], tmp_path / "b.safetensors")
        same = [(tmp_path / f"{one}.safetensors").read_bytes() for one in "ab"]
        assert same[0] == same[1]
    names = ["one", "step"]
    loaded = load_sharded(out, DeviceMesh(range(1)), {names[0]: "[R,R]"}, include=names)
    whole = {key: tensor.to_local(0) for key, tensor in loaded.items()}
    assert_same(whole, {key: due[key] for key in whole})


@each_written
def test_only_its_own_files_are_replaced(sources, tmp_path, name, way):
    out, due = write(sources, tmp_path, name, way)
    first = {file: file.read_bytes() for file in below(out)}
    beside = out.parent if out.is_file() else out
    (beside / "notes.md").write_text("mine")
    check_whole(out, due)
    if out.is_dir():
        with pytest.raises(
            CheckpointError, match=r"contains 'notes\.md', not part of a checkpoint"
        ):
            write(sources, tmp_path, name, way, overwrite=True)
        assert {file: file.read_bytes() for file in first} == first
        (out / "notes.md").unlink()
    with pytest.raises(CheckpointError, match="exists; choose another name, or overwrite it"):
        write(sources, tmp_path, name, way)
    write(sources, tmp_path, name, way, overwrite=True)
    assert (beside / "notes.md").exists() == out.is_file()
    check_whole(out, due)
    assert len(below(out)) == len(first)


def refuse_spoiled(place, files, **options):
    """Check that a checkpoint is refused if any of its files is cut short or missing."""
    for file in files:
        data = file.read_bytes()
        for size in {0, 1, len(data) // 2, len(data) - 2}:
            file.write_bytes(data[:size])
            assert refused(place, **options)
        file.unlink()
        # A description of the model that need not be there; what the model's file has too.
        if file.name != "params.json" and file.parent.name not in ("cold", "twin"):
            assert refused(place, **options)
        file.write_bytes(data)


@each_written
def test_a_file_that_is_cut_short_or_missing_is_noticed(sources, tmp_path, name, way):
    out, due = write(sources, tmp_path, name, way)
    files = [Path(file) for file in open_checkpoint(out).files]
    assert files
    # Of many files that are alike some.
    refuse_spoiled(out, files[:: -(-len(files) // 8)])
    check_whole(out, due)


@each_written
def test_what_a_format_cannot_have_is_refused_before_anything_is_written(tmp_path, name, way):
    torch.save({"w": torch.ones(2), "step": 7}, tmp_path / "in.pt")
    if name == "npz":
        torch.save({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "in.pt")
        act = merge if way == "merged" else partial(reshard, device_mesh=MESH)
        with pytest.raises(CheckpointError, match="NumPy has no bfloat16, of 'w'; cast it"):
            act(tmp_path / "in.pt", tmp_path / "out", format=name)
    elif way == "sharded":
        with pytest.raises(CheckpointError, match="give the mesh to shard for, device_mesh="):
            reshard(tmp_path / "in.pt", tmp_path / "out", format=name)
    else:
        with pytest.raises(CheckpointError, match=r"pattern 'x' matches nothing of .*in\.pt"):
            merge(tmp_path / "in.pt", tmp_path / "out", format=name, include="x")
    assert sorted(at.name for at in tmp_path.iterdir()) == ["in.pt", "installed"]


# --- formats that are only read


def write_deepspeed(place):
    return test_deepspeed.write(place, 2, 3, 1), {}


def write_meta(place):
    whole = test_meta.model()
    test_meta.write(place, whole, 2)
    return whole, {}


def write_megatron(place):
    parts = torch.arange(12.0).view(4, 3).chunk(2)
    for rank, part in enumerate(parts):
        (place / f"mp_rank_{rank:02d}").mkdir(parents=True)
        file = place / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        torch.save({"model": {"w": part.clone(), "s": torch.tensor(1)}}, file)
    rules = {"w": "[S(tp),R]", "s": "[]"}
    return {"w": torch.cat(parts), "s": torch.tensor(1)}, {"ranks": 2, "source_rules": rules}


def write_dcp_hf(place):
    place.mkdir()
    parts = torch.arange(12.0).view(4, 3).chunk(2)
    for rank, part in enumerate(parts):
        note = json.dumps({"w": {"saved_offsets": [2 * rank, 0]}})
        metadata = {"DCP_SHARDING_INFO": note, "DCP_VERSION": "1.0"}
        file = place / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file({"w": part.clone()}, file, metadata)
    return {"w": torch.cat(parts)}, {"ranks": 2}


def write_rank_files(place):
    place.mkdir()
    whole = {"w": torch.arange(12.0), "e": torch.ones(0, 2), "s": torch.tensor(1)}
    for rank in range(2):
        torch.save(whole, place / f"model_world_size_2_rank_{rank}.pt")
    return whole, {}


READ = {
    "deepspeed": write_deepspeed,
    "meta": write_meta,
    "megatron": write_megatron,
    "dcp-huggingface": write_dcp_hf,
    "rank-files": write_rank_files,
}


@pytest.mark.parametrize("name", READ)
def test_a_format_that_is_only_read(tmp_path, name):
    place = tmp_path / "in"
    due, options = READ[name](place)
    (place / "notes.md").write_text("mine")
    source = open_checkpoint(place, **options)
    form = format_called(source.format)
    assert form is not None
    assert (form.name, form.writes) == (name, ())
    found = read_whole(place, **options)
    assert_same({key: found[key] for key in due}, due)
    refuse_spoiled(place, [Path(file) for file in source.files], **options)
    merge(open_checkpoint(place, **options), tmp_path / "out.pt")
    assert read_whole(tmp_path / "out.pt").keys() == found.keys()


def test_every_format_goes_through_these_tests():
    assert {name for name, _ in WRITTEN} | READ.keys() == {form.name for form in formats()} - {
        "npz"
    }
    assert len({form.name for form in formats()}) == len(MODULES) + 1
    for form in formats():
        assert (form.lay_out is None) == (form.writes == ()) == (form.instead != "")
        assert form.known_by or form.extensions, form.name
        assert not form.owns("notes.md")


@pytest.mark.parametrize("name", READ)
def test_a_format_that_is_only_read_says_what_to_write_instead(tmp_path, name):
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    with pytest.raises(
        CheckpointError, match=rf"the format '{name}' is only read; \S.*; choose one of"
    ):
        merge(tmp_path / "in.pt", tmp_path / "out", format=name)
    with pytest.raises(
        CheckpointError, match=rf"the format '{name}' is only read; \S.*; choose one of"
    ):
        reshard(tmp_path / "in.pt", tmp_path / "out", format=name, device_mesh=MESH)
    for command in ("merge", "reshard"):
        call = [command, str(tmp_path / "in.pt"), "-o", str(tmp_path / "out"), "--to", name]
        done = CliRunner().invoke(cli, call)
        assert done.exit_code == 2
        assert f"the format '{name}' is only read; " in done.output
    assert not (tmp_path / "out").exists()


# --- which checkpoint a file or directory leads to

# Formats of directories whose files are no checkpoints by themselves; their names say so.
LEADING = ["shardspec", "dcp", "dcp-huggingface", "megatron", "deepspeed", "meta"]


@pytest.mark.parametrize("name", LEADING)
def test_a_file_that_is_a_part_leads_to_its_checkpoint(sources, tmp_path, name):
    options = {}
    if name in READ:
        place = tmp_path / "in"
        _, options = READ[name](place)
    else:
        place, _ = write(sources, tmp_path, name, "sharded")
    form = next(form for form in formats() if form.name == name)
    whole = open_checkpoint(place, **options)
    leading = [file for file in whole.files if form.directory_of(file) is not None]
    assert leading
    for file in leading:
        assert form.directory_of(file) == whole.directory
        found = open_checkpoint(str(file), **options)
        assert (found.format, found.directory, found.names) == (
            whole.format,
            whole.directory,
            whole.names,
        )
    # One of another name, and one of that name in a directory of another name, lead nowhere.
    other = whole.directory / "notes.md"
    assert form.directory_of(other) is None
    assert {form.directory_of(file.parent.parent / "x" / file.name) for file in leading} <= {
        None,
        whole.directory.parent / "x",
    }


def test_files_that_are_checkpoints_lead_to_no_directory(sources, tmp_path):
    assert {form.name for form in formats()} - {*LEADING} == {
        *("safetensors", "huggingface", "torch", "rank-files", "npz")
    }
    for name, way in (("safetensors", "merged"), ("huggingface", "merged"), ("torch", "merged")):
        (tmp_path / name).mkdir()
        out, _ = write(sources, tmp_path / name, name, way)
        for file in open_checkpoint(out).files:
            assert [form.directory_of(file) for form in formats()] == [None] * (len(MODULES) + 1)
            assert file in open_checkpoint(str(file)).files


NESTED = """
from shardspec.checkpoint.catalog import Catalog, unsharded_tensor
from shardspec.checkpoint.formats import Format

def open_raw(place, options):
    file = place / "parts" / "w.raw"
    return Catalog("raw", place, {"w": unsharded_tensor("w", (3,), "int8", file, 0)}, [file])

FORMAT = Format(
    name="raw",
    recognizes=lambda names: "parts" in names,
    open=open_raw,
    part_of=lambda path: path.parent.parent if path.parent.name == "parts" else None,
    nested=True,
    instead="nothing else is",
    known_by="parts",
)
"""


def test_a_file_may_be_a_part_of_a_checkpoint_of_another_package(tmp_path, path):
    (tmp_path / "nested_format.py").write_text(NESTED)
    path(tmp_path, install(tmp_path / "more", {"raw": "nested_format:FORMAT"}, "some-package"))
    (tmp_path / "in" / "parts").mkdir(parents=True)
    for file in ("in/parts/w.raw", "in/w.raw"):
        (tmp_path / file).write_bytes(b"\1\2\3")
    for place in (tmp_path / "in", tmp_path / "in" / "parts" / "w.raw"):
        source = open_checkpoint(place)
        assert (source.format, source.directory.name, source.names) == ("raw", "in", ("w",))
        assert_same(read_whole(place), {"w": torch.tensor([1, 2, 3], dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"w\.raw: is neither a safetensors file nor one"):
        open_checkpoint(tmp_path / "in" / "w.raw")


# --- the registry


def test_the_command_line_offers_what_is_written():
    """Of the package beside those that come along."""
    offered = {"merge": written_names("merged"), "reshard": written_names("sharded")}
    for command, names in offered.items():
        assert "npz" in names
        text = " ".join(CliRunner().invoke(cli, [command, "--help"]).output.split())
        assert f"--to [{'|'.join(names)}]" in text
        done = CliRunner().invoke(cli, [command, "x", "-o", "y", "--to", "nothing"])
        assert done.exit_code == 2
        assert all(repr(name) in done.output for name in names)


def test_a_name_says_which_format_is_meant():
    endings = {"": "safetensors", ".safetensors": "safetensors", ".unknown": "safetensors"}
    endings |= {".pt": "torch", ".pth": "torch", ".bin": "torch", ".PT": "torch", ".npz": "npz"}
    for suffix, name in endings.items():
        assert default_format("merged", suffix).name == name
        assert default_format("merged", suffix, directory=True).name == "huggingface"
    assert default_format("sharded").name == "shardspec"


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ({"x": "no_such_module:FORMAT"}, r"cannot be loaded \(ModuleNotFoundError.*repair or"),
        ({"x": "format_plugin:NOTHING"}, r"cannot be loaded \(AttributeError: .*\); repair or"),
        ({"x": "format_plugin:DTYPES"}, r"leads to a str; it should lead to a .*\.Format$"),
        ({"x": "format_plugin:FORMAT"}, r"'npz' is taken by another format; uninstall one"),
        ({"x": "shardspec.checkpoint.formats.dcp:FORMAT"}, r"'dcp' is taken by another format"),
    ],
)
def test_a_package_that_spoils_the_registry_is_named(tmp_path, path, points, problem):
    path(install(tmp_path / "more", points, "some-package"))
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    with pytest.raises(
        CheckpointError, match=rf"^the format 'x' of the package some-package:? {problem}"
    ):
        merge(tmp_path / "in.pt", tmp_path / "out", format="npz")
    # What comes along is read and written as before.
    merge(tmp_path / "in.pt", tmp_path / "hub", format="huggingface")
    assert_same(read_whole(tmp_path / "hub"), {"w": torch.ones(2)})


@pytest.mark.parametrize("words", [{"keeps": "nothing"}, {"writes": ("sharded", "whole")}])
def test_a_format_with_an_unknown_word_is_refused_when_it_is_made(words):
    with pytest.raises(CheckpointError, match=r"the format 'mine' .*'(nothing|whole)'"):
        Format(name="mine", recognizes=never, open=next(formats()).open, **words)

"""ZeRO checkpoints with files missing, cut, changed, or of another rank, save or stage."""

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tests
from shardspec import merge
from shardspec.checkpoint.open import open_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.test_deepspeed import write

REMEDIES = (
    *("restore", "move ", "name the directory", "save it again", "ds_to_universal"),
    *("check the file", "check the path"),
)
TAG = "global_step2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """DeepSpeed's own files as zero2 and zero3, of 4 ranks; small ones by hand as tiny1 to 3."""
    place = tmp_path_factory.mktemp("deepspeed")
    archive = Path(tests.__file__).parent / "real" / "data" / "deepspeed.tar.xz"
    with tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
    for stage in (1, 2, 3):
        (place / f"tiny{stage}").mkdir()
        write(place / f"tiny{stage}" / TAG, 3, stage, seed=stage)
        (place / f"tiny{stage}" / "latest").write_text(TAG)
    return place


@pytest.fixture
def run(saved, tmp_path):
    return lambda name: shutil.copytree(saved / name, tmp_path / "run", dirs_exist_ok=True)


def refused(place):
    """Return the line that refuses it; nothing is written, by the command neither."""
    out = place.parent / "out.safetensors"
    with pytest.raises(CheckpointError) as caught:
        merge(place, out)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert str(place) in message, message
    assert any(remedy in message for remedy in REMEDIES), message
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    return message


def refused_by_command(place):
    message = refused(place)
    ended = CliRunner().invoke(cli, ["merge", str(place), "-o", f"{place}.safetensors"])
    assert (ended.exit_code, ended.stderr) == (3, f"Error: {message}\n")
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    return message


def files(place):
    return sorted((place / TAG).iterdir())


def change(path, what):
    """Write a file again, changed."""
    state = torch.load(path, weights_only=True)
    what(state)
    torch.save(state, path)


@pytest.mark.parametrize("name", ["zero2", "tiny1", "tiny3"])
def test_every_set_of_missing_files_is_refused(run, name):
    place = run(name)
    held = {path: path.read_bytes() for path in files(place)}
    for lost in range(1, 2 ** len(held) - 1):
        for at, (path, data) in enumerate(held.items()):
            if lost >> at & 1:
                path.unlink(missing_ok=True)
            elif not path.exists():
                path.write_bytes(data)
        refused(place)
    shutil.rmtree(place / TAG)
    (place / TAG).mkdir()
    refused_by_command(place)


@pytest.mark.parametrize(("name", "other"), [("zero2", "zero3"), ("zero3", "zero2")])
def test_files_of_two_stages_are_refused(saved, run, name, other):
    place = run(name)
    for path in files(saved / other):
        target = place / TAG / path.name
        data = target.read_bytes() if target.exists() else None
        shutil.copyfile(path, target)
        refused_by_command(place)
        target.unlink()
        if data is not None:
            target.write_bytes(data)
    for path in files(saved / other):
        shutil.copyfile(path, place / TAG / path.name)
    refused_by_command(place)


def a_step_later(state):
    if "optimizer_state_dict" not in state:
        state["global_steps"] += 1
        return
    inner = state["optimizer_state_dict"]
    for key in ("optimizer_state_dict", "base_optimizer_state"):
        for group in inner.get(key, {}).get("state", {}).values():
            group["step"] += 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_of_another_step_is_refused(run, stage):
    place = run(f"tiny{stage}")
    for path in files(place):
        if path.name.startswith("mp_rank"):
            continue
        data = path.read_bytes()
        change(path, a_step_later)
        assert "of different saves, restore those of one" in refused_by_command(place)
        path.write_bytes(data)


def shapes_that_do_not_add_up(shapes):
    """Yield how lists of shapes could be wrong."""
    for at, group in enumerate(shapes):
        for name, shape in group.items():
            # Three ranks of stage 3 have one element each of as few as these: 2 would do for 1.
            others = [torch.Size((*shape, 4)), torch.Size((*shape[:-1], 40)), torch.Size((-1,))]
            if 0 not in shape and len(shape) > 0:
                others.append(torch.Size((0, *shape[1:])))
            for other in (*others, "x", None):
                if other != shape and not (0 in shape and isinstance(other, torch.Size)):
                    yield [*shapes[:at], {**group, name: other}, *shapes[at + 1 :]]
            yield [
                *shapes[:at],
                {k: v for k, v in group.items() if k != name or 0 in shape},
                *shapes[at + 1 :],
            ]
        yield [*shapes[:at], {**group, "more": torch.Size((50,))}, *shapes[at + 1 :]]
        yield [*shapes[:at], list(group), *shapes[at + 1 :]]
        yield shapes[:at] + shapes[at + 1 :]
    yield [*shapes, {"more": torch.Size((50,))}]
    yield None


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_param_shapes_that_do_not_add_up_are_refused(run, stage, every):
    place = run(f"tiny{stage}")
    models = [path for path in files(place) if "model" in path.name]
    shapes = torch.load(models[0], weights_only=True)["param_shapes"]
    for wrong in list(shapes_that_do_not_add_up(shapes))[::every]:
        if wrong == shapes:
            continue
        for path in models:
            change(path, lambda state, wrong=wrong: state.update(param_shapes=wrong))
        refused(place)
    refused_by_command(place)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flat_tensors_of_two_dtypes_are_refused(run, stage):
    place = run(f"tiny{stage}")
    path = place / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def cast(state):
        inner = state["optimizer_state_dict"]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        inner[key] = [flat.detach().bfloat16() for flat in inner[key]]

    change(path, cast)
    assert "but should be a flat tensor of float32" in refused_by_command(place)


@pytest.mark.parametrize("gap", ["x", -1, None])
def test_paddings_that_are_no_counts_are_refused(run, gap):
    place = run("tiny2")
    path = place / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"

    def pad(state):
        state["optimizer_state_dict"]["param_alignment_paddings"][0][0] = gap

    change(path, pad)
    assert "param_alignment_paddings has" in refused_by_command(place)


def test_a_rank_that_says_other_shapes_is_refused(run):
    place = run("tiny3")
    path = place / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    change(path, lambda state: state["param_shapes"][0].update(more=torch.Size((0,))))
    assert ": param_shapes is" in refused_by_command(place)


@pytest.mark.parametrize(
    "said",
    ["", "global_step7", "../run", f"{TAG}/..", f"/{TAG}", ".", "zero\0", "\xff", "x" * 9999],
)
def test_a_latest_that_names_nothing_is_refused(run, said):
    place = run("zero2")
    (place / "latest").write_text(said)
    message = refused_by_command(place)
    assert message.startswith(f"{place / 'latest'}: ")
    assert message.endswith("name the directory of a checkpoint")


def test_a_latest_that_names_a_file_or_another_directory_is_refused(run):
    place = run("zero2")
    (place / "latest").write_text("notes")
    (place / "notes").write_text("x")
    assert "name the directory of a checkpoint" in refused_by_command(place)
    (place / "notes").unlink()
    (place / "notes").mkdir()
    refused_by_command(place)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_what_a_path_of_a_run_means(run, name):
    place = run(name)
    (place / "zero_to_fp32.py").touch()
    first = next(path for path in files(place) if "optim" in path.name)
    for path in (place, place / "zero_to_fp32.py", place / TAG, first):
        found = open_checkpoint(path)
        assert found.directory == place / TAG
        told = path.parent in (place, place.parent) and path != place / TAG
        assert found.facts.notes == ((f"reading {TAG}, which latest names",) if told else ())
    (place / "latest").unlink()
    assert open_checkpoint(place).facts.notes == (f"reading {TAG}, which is the only one",)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_two_tags_without_latest_are_refused(run, name):
    place = run(name)
    shutil.copytree(place / TAG, place / "best")
    (place / "latest").unlink()
    assert refused_by_command(place) == (
        f"{place}: has the checkpoints best, {TAG} and no latest that names the latest; name "
        "the directory of one"
    )

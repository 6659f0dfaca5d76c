"""Megatron's checkpoints that lack files, or whose files contradict each other or their places."""

import shutil
from argparse import Namespace

import pytest
import torch

from shardspec.checkpoint.open import open_checkpoint
from tests.checkpoint.formats.megatron_files import core, write
from tests.checkpoint.formats.reading import assert_same, read_whole, refused

MODEL = core(gated=True)
SPLITS = [[0, 1, 2], [3, 4]]
SAMPLE = {*(1 << rank for rank in range(6)), *range(5, 63, 7)}
"""Sets of missing files that are tried each time: each file alone, and some of several."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("megatron")
    write(directory / "ckpt", MODEL, 3, SPLITS)
    write(directory / "told", MODEL, 3, SPLITS, args=False)
    return directory


@pytest.fixture
def ckpt(saved, tmp_path):
    return shutil.copytree(saved / "ckpt", tmp_path / "ckpt") / "iter_0000010"


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(lost, marks=[] if lost in SAMPLE else pytest.mark.exhaustive)
        for lost in range(1, 63)
    ],
)
def test_every_set_of_missing_ranks_is_refused(ckpt, lost):
    places = [f"mp_rank_{rank:02d}_{stage:03d}" for stage in range(2) for rank in range(3)]
    missing = [place for at, place in enumerate(places) if lost >> at & 1]
    for place in missing:
        shutil.rmtree(ckpt / place)
    message = refused(ckpt)
    assert f"{ckpt}/" in message or message.startswith(f"{ckpt}: ")
    assert any(f"{place}: is missing" in message for place in missing) or (
        "was saved with tensor_model_parallel_size 3, but" in message
        or "was saved with pipeline_model_parallel_size 2, but" in message
    )


def test_files_without_arguments_want_to_be_counted(saved):
    ckpt = saved / "told" / "iter_0000010"
    assert refused(ckpt) == (
        f"{ckpt}/mp_rank_00_000/model_optim_rng.pt: does not say how many ranks there were (it has "
        "no args), so files of later ranks may be missing; if none are, confirm it "
        "with ranks=6"
    )
    assert refused(ckpt, ranks=8) == (
        f"{ckpt}: contains the files of 6 ranks, but 8 are expected; restore the "
        "others, or correct the number"
    )
    # Whether the first layers are gated is not said either.
    assert "no rule says how tensor 'decoder.layers.0.mlp.linear_fc1.bias' is" in refused(
        ckpt, ranks=6
    )
    rules = {
        "*.linear_fc1.weight": {"spec": "[S(tp),R]", "parts": 2},
        "*.linear_fc1.bias": {"spec": "[S(tp)]", "parts": 2},
    }
    assert_same(read_whole(ckpt, ranks=6, source_rules=rules), MODEL)


@pytest.mark.parametrize(("a", "b"), [("00_000", "01_000"), ("01_000", "01_001")])
def test_swapped_ranks_are_refused(ckpt, a, b):
    one, other = ckpt / f"mp_rank_{a}", ckpt / f"mp_rank_{b}"
    one.rename(ckpt / "x")
    other.rename(one)
    (ckpt / "x").rename(other)
    assert "files are swapped, copied or of different saves; restore them" in refused(ckpt)


def test_a_copy_in_place_of_another_rank(ckpt):
    shutil.rmtree(ckpt / "mp_rank_02_001")
    shutil.copytree(ckpt / "mp_rank_01_001", ckpt / "mp_rank_02_001")
    assert "files are swapped, copied or of different saves; restore them" in refused(ckpt)


UNSAID = [
    pytest.param({"spoil": lambda *at: setattr(at[2]["args"], "rank", 0)}, id="0"),
    pytest.param({"args": False}, id="none"),
]
OPTIONS = {
    "ranks": 6,
    "source_rules": {
        "*.linear_fc1.weight": {"spec": "[S(tp),R]", "parts": 2},
        "*.linear_fc1.bias": {"spec": "[S(tp)]", "parts": 2},
    },
}


@pytest.mark.parametrize("how", UNSAID)
def test_ranks_that_are_not_said(tmp_path, how):
    """Copies are found by their digests; that ranks were swapped cannot be told."""
    ckpt = write(tmp_path / "ckpt", MODEL, 3, SPLITS, **how) / "iter_0000010"
    assert_same(read_whole(ckpt, **OPTIONS), MODEL)
    paths = [ckpt / f"mp_rank_{rank:02d}_001" / "model_optim_rng.pt" for rank in range(3)]
    first, _, last = (path.read_bytes() for path in paths)
    paths[2].write_bytes(first)
    error = refused(ckpt, **OPTIONS)
    assert error.startswith(f"{paths[2]}: ")
    assert str(paths[0]) in error
    paths[0].write_bytes(last)
    found = read_whole(ckpt, **OPTIONS)
    parts = MODEL["output_layer.weight"].chunk(3)
    assert found["output_layer.weight"].equal(torch.cat([parts[2], parts[1], parts[0]]))
    assert found["decoder.final_layernorm.weight"].equal(MODEL["decoder.final_layernorm.weight"])


def test_all_files_are_those_of_one_rank(ckpt):
    for rank in range(3):
        for stage in range(2):
            if (rank, stage) != (1, 0):
                shutil.rmtree(ckpt / f"mp_rank_{rank:02d}_{stage:03d}")
                shutil.copytree(ckpt / "mp_rank_01_000", ckpt / f"mp_rank_{rank:02d}_{stage:03d}")
    assert "was saved by rank 1, and " in refused(ckpt)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("iteration", 9, "iteration is 9, but 10"),
        # Before 2.0 the rows of q, k and v lie in another order.
        ("checkpoint_version", 1.0, "checkpoint_version is 1.0, but 3.0"),
        ("checkpoint_version", 0, "checkpoint_version is 0, but 3.0"),
    ],
)
def test_a_rank_of_another_iteration_or_version(tmp_path, key, value, problem):
    def spoil(rank, stage, state):
        if (rank, stage) == (2, 0):
            state[key] = value

    ckpt = write(tmp_path / "ckpt", MODEL, 3, SPLITS, spoil=spoil) / "iter_0000010"
    other = f"{ckpt}/mp_rank_02_000/model_optim_rng.pt"
    assert refused(ckpt) == (
        f"{other}: {problem} in {ckpt}/mp_rank_00_000/model_optim_rng.pt; the files are of "
        "different saves, restore those of one"
    )


def test_ranks_that_are_alike_are_no_copies(tmp_path):
    """Where rules cut nothing, all ranks hold the same."""
    for rank in range(2):
        path = tmp_path / "ckpt" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"model": {"norm": torch.arange(3.0)}}, path)
    found = read_whole(tmp_path / "ckpt", ranks=2, source_rules={"norm": "[R]"})
    assert_same(found, {"norm": torch.arange(3.0)})


NORM = "decoder.layers.0.pre_mlp_layernorm.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda m: m.update({NORM: m[NORM] * 2}),
            "tensor 'decoder.layers.3.pre_mlp_layernorm.weight': ranks 3 and 4 claim different "
            "data for box [0:6], first at index [0], in {0} and {1}; keep the right one "
            "of the two if they should be equal, as plain tensors are on all ranks; if each rank "
            "has a part, save it as a DTensor, and what is its own under a name for each rank",
        ),
        (
            lambda m: m.update({FC2: m[FC2].float()}),
            f"{{1}}: tensor '{FC2}' is float32 of shape [6, 3], but bfloat16 of shape [6, 3] in "
            "{0}; the files are of different saves, restore those of one",
        ),
        (
            lambda m: m.update({FC2: m[FC2][:, :2].clone()}),
            f"{{1}}: tensor '{FC2}' is bfloat16 of shape [6, 2], but bfloat16 of shape [6, 3] in "
            "{0}; the files are of different saves, restore those of one",
        ),
        (
            lambda m: m.pop(FC2),
            f"{{1}}: lacks tensor '{FC2}', which {{0}} has; the files are of different saves",
        ),
        (
            lambda m: m.update({"x": m[FC2]}),
            "{0}: lacks tensor 'x', which {1} has; the files are of different saves",
        ),
    ],
)
def test_a_rank_that_contradicts_the_others(tmp_path, change, problem):
    def spoil(rank, stage, state):
        if (rank, stage) == (1, 1):
            change(state["model"])

    ckpt = write(tmp_path / "ckpt", MODEL, 3, SPLITS, spoil=spoil) / "iter_0000010"
    paths = [ckpt / f"mp_rank_{rank}_001" / "model_optim_rng.pt" for rank in ("00", "01")]
    assert refused(ckpt) == problem.format(*paths)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda s: s.update(model1=s["model"]),
            "{0}: has the models model, model1, but should have model, or model0, model1 and so "
            "on; the file was changed, restore it",
        ),
        (
            lambda s: s.update(model3=s.pop("model")),
            "{0}: has the models model3, but should have model, or model0, model1 and so on; the "
            "file was changed, restore it",
        ),
        (
            lambda s: s["model"].update({"decoder.layers.7.x": torch.ones(1)}),
            "{0}: has no layer decoder.layers.3, but decoder.layers.7; each file counts "
            "layers from 0; the file was changed, restore it",
        ),
        (
            lambda s: setattr(s["args"], "num_layers", 6),
            "{0}: num_layers is 6, but 5 in the stages of {ckpt}; the files are of different "
            "saves, restore those of one",
        ),
        (
            lambda s: setattr(s["args"], "expert_model_parallel_size", 2),
            "{0}: was saved with expert_model_parallel_size 2, but the files are of 1; restore "
            "what is missing",
        ),
    ],
)
def test_files_that_are_not_as_megatron_writes_them(tmp_path, change, problem):
    ckpt = write(tmp_path / "ckpt", MODEL, 3, SPLITS, spoil=lambda *at: change(at[2]))
    place = ckpt / "iter_0000010"
    first = place / "mp_rank_00_000" / "model_optim_rng.pt"
    assert refused(ckpt) == problem.format(first, ckpt=place)


def test_which_iteration_counts(saved, tmp_path):
    root = shutil.copytree(saved / "ckpt", tmp_path / "ckpt")
    shutil.copytree(root / "iter_0000010", root / "iter_0000020")
    shutil.copytree(root / "iter_0000010", root / "release")
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("20\n")
    assert open_checkpoint(root).directory == root / "iter_0000020"
    tracker.write_text("release")
    assert open_checkpoint(root).directory == root / "release"
    tracker.write_text("30")
    assert refused(root) == (
        f"{tracker}: names '30', but no such checkpoint is beside this file; name the "
        "directory of a checkpoint"
    )
    tracker.unlink()
    assert refused(root) == (
        f"{root}: has the checkpoints iter_0000010, iter_0000020, release and no "
        "latest_checkpointed_iteration.txt that names the latest; name the directory of one"
    )
    shutil.rmtree(root / "iter_0000020")
    shutil.rmtree(root / "release")
    assert open_checkpoint(root).directory == root / "iter_0000010"
    for path in (root / "iter_0000010").iterdir():
        shutil.rmtree(path)
    assert (
        refused(root)
        == f"{root}/iter_0000010: is empty, so there is no checkpoint in it; check the path"
    )


def test_names_of_directories_that_do_not_fit(ckpt):
    shutil.copytree(ckpt / "mp_rank_00_000", ckpt / "mp_rank_000_000")
    assert refused(ckpt).endswith("are of different saves; move the files of one save away")
    (ckpt / "mp_rank_000_000").rename(ckpt / "mp_rank_00")
    assert refused(ckpt).endswith("are of different saves; move the files of one save away")
    (ckpt / "mp_rank_00").rename(ckpt / "mp_rank_00_000_001")
    assert refused(ckpt).endswith("are of different saves; move the files of one save away")
    shutil.rmtree(ckpt / "mp_rank_00_000_001")
    (ckpt / "mp_rank_999999_999999").mkdir()
    assert refused(ckpt) == f"{ckpt}/mp_rank_03_000: is missing; restore it"
    (ckpt / "mp_rank_999999_999999").rmdir()
    (ckpt / "mp_rank_00_000" / "model_optim_rng.pt").unlink()
    assert refused(ckpt) == (f"{ckpt}/mp_rank_00_000/model_optim_rng.pt: is missing; restore it")


def of_experts(place, names):
    """Write two expert parallel ranks that hold tensors of these names."""
    for rank in range(2):
        path = place / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        args = Namespace(
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            expert_model_parallel_size=2,
            rank=rank,
        )
        model = {f"decoder.layers.{name}": torch.tensor([float(rank)]) for name in names}
        torch.save({"model": model, "args": args}, path)
    return place


FC1 = "mlp.experts.local_experts.{}.linear_fc1.weight"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            [f"0.{FC1.format(0)}", f"0.{FC1.format(2)}"],
            f"has no expert decoder.layers.0.{FC1.format(1)}, but decoder.layers.0.{FC1.format(2)}",
        ),
        (
            [f"0.{FC1.format(0)}", f"0.{FC1.format(1)}", f"1.{FC1.format(0)}"],
            "has layers with 1 and with 2 experts, but all layers should have the same number",
        ),
        (["0.mlp.experts.weight1"], "old grouped kernels store them"),
    ],
)
def test_experts_that_do_not_add_up(tmp_path, names, problem):
    assert problem in refused(of_experts(tmp_path / "ckpt", names))


def test_experts_of_later_ranks_count_on(tmp_path):
    ckpt = of_experts(tmp_path / "ckpt", [f"0.{FC1.format(at)}" for at in range(2)])
    due = {f"decoder.layers.0.{FC1.format(at)}": torch.tensor([at // 2 * 1.0]) for at in range(4)}
    assert_same(read_whole(ckpt), due)

"""What DeepSpeed 0.19.8 has written, against what its own zero_to_fp32.py makes of it."""

import enum
import hashlib
import json
import shutil
import sys
import types

import pytest
import torch

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import assert_same, bits, read_whole
from tests.real.conftest import DATA

DUE = json.loads((DATA / "deepspeed.json").read_text())
HOMES = {
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "fragment_address": "deepspeed.utils.tensor_fragment",
}


class Stage(enum.IntEnum):
    """By this its pickles say the stage."""

    one, two, three = 1, 2, 3


@pytest.fixture
def deepspeed(monkeypatch):
    """Stand-ins for what its pickles name, so that torch reads and writes them."""
    for name, home in HOMES.items():
        kind = Stage if name == "ZeroStageEnum" else type(name, (), {})
        kind.__module__, kind.__qualname__ = home, name
        parts = home.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType("stand-in"))
        setattr(sys.modules[home], name, kind)


def described(tensors):
    """As the digests of the oracles are written."""
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            hashlib.sha256(bits(tensor)).hexdigest()[:16],
        ]
        for name, tensor in tensors.items()
    }


def weights(tensors):
    return {name: found for name, found in tensors.items() if not name.startswith("optimizer.")}


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_weights_are_what_zero_to_fp32_gives(real, name):
    place = real("deepspeed") / name
    whole = read_whole(place)
    assert described(weights(whole)) == DUE[name]
    assert_same(read_whole(place / "global_step2"), whole)
    one_file = next((place / "global_step2").glob("*rank_1_mp_rank_00_optim_states.pt"))
    assert_same(read_whole(one_file), whole)
    # After two steps, as every parameter says.
    steps = [found for key, found in whole.items() if key.startswith("optimizer.step.")]
    assert len(steps) == len({key for key in DUE[name] if key != "lm_head.weight"})
    assert all(step == 2 for step in steps)
    assert verify_checkpoint(place, every=True).flaws == ()


def test_metas_files_are_what_was_put_together_by_hand(real):
    assert described(read_whole(real("deepspeed") / "meta")) == DUE["meta"]


@pytest.mark.parametrize("name", ["zero2", "zero3", "meta"])
def test_resharded_it_has_the_same_tensors(real, tmp_path, name):
    mesh = DeviceMesh(range(4), (4,), axis_names=("tp",))
    rules = {"layers.*.wk.weight" if name == "meta" else "model.*.k_proj.weight": "[R,S(tp)]"}
    reshard(
        real("deepspeed") / name,
        tmp_path / "out",
        device_mesh=mesh,
        rules=rules,
        drop_values=name.startswith("zero"),  # the loss scaler and the like are objects
    )
    assert_same(read_whole(tmp_path / "out"), read_whole(real("deepspeed") / name))


def test_moments_are_those_of_the_parameters(real):
    """Cut by torch: of each, every rank has a quarter."""
    place = real("deepspeed") / "zero3"
    whole = read_whole(place)
    shapes = {name: shape for name, (_, shape, _) in DUE["zero3"].items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {key for key in whole if key.startswith(f"optimizer.{kind}.")} == {
            f"optimizer.{kind}.{name}" for name in shapes
        }
        for name in shapes:
            moment, value = whole[f"optimizer.{kind}.{name}"], whole[name]
            assert moment.shape == value.shape
            assert (moment != 0).any()


def spoiled(place, name, change):
    """Write a file again, changed."""
    path = place / "global_step2" / name
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def optimizer(rank):
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def longer(state):
    (flat,) = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flat.data = torch.cat([flat.data, torch.zeros(8)])


def shorter(state):
    (flat,) = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flat.data = flat.data[:-8].clone()


def other_step(state):
    state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1


def other_version(state):
    state["ds_version"] = "0.18.0"


def other_shape(state):
    state["param_shapes"][0]["model.norm.weight"] = torch.Size((63,))


def larger_shape(state):
    state["param_shapes"][0]["model.norm.weight"] = torch.Size((640,))


def no_shapes(state):
    del state["param_shapes"]


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (optimizer(1), longer, "by param_shapes it should have"),
        (optimizer(1), shorter, "by param_shapes it should have"),
        (optimizer(0), longer, "by param_shapes it should have"),
        (optimizer(3), longer, "by param_shapes it should have"),
        (optimizer(3), shorter, "by param_shapes it should have"),
        (optimizer(2), other_step, "of different saves"),
        (optimizer(2), other_version, "of different saves"),
        ("mp_rank_00_model_states.pt", other_shape, "of another rank or save"),
        ("mp_rank_00_model_states.pt", larger_shape, "by param_shapes it should have"),
        ("mp_rank_00_model_states.pt", no_shapes, "param_shapes"),
    ],
)
def test_what_does_not_add_up_is_refused(real, tmp_path, name, change, told):
    place = shutil.copytree(real("deepspeed") / "zero2", tmp_path / "run")
    spoiled(place, name, change)
    with pytest.raises(CheckpointError, match=told) as caught:
        merge(place, tmp_path / "out.safetensors")
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("deepspeed")
def test_round_robin_changes_the_order_of_parameters(real, tmp_path):
    """Then ranks say where parameters lay before; where they lie is in param_shapes alone."""
    one, two = (f"model.layers.{layer}.input_layernorm.weight" for layer in range(2))
    place = shutil.copytree(real("deepspeed") / "zero2", tmp_path / "run")

    def other_order(state):
        (shapes,) = state["param_shapes"]
        names = {one: two, two: one}
        state["param_shapes"] = [{names.get(name, name): shapes[name] for name in shapes}]

    def round_robin(state):
        state["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

    spoiled(place, "mp_rank_00_model_states.pt", other_order)
    with pytest.raises(CheckpointError, match="of another rank or save"):
        read_whole(place)
    spoiled(place, "mp_rank_00_model_states.pt", round_robin)
    due = read_whole(real("deepspeed") / "zero2")
    due[one], due[two] = due[two], due[one]
    assert_same(read_whole(place), due)


def swap(place):
    one, two = (place / "global_step2" / optimizer(rank) for rank in (1, 2))
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)


def remove(name):
    return lambda place: (place / "global_step2" / name).unlink()


def copy(source, target):
    return lambda place: shutil.copyfile(
        place / "global_step2" / source, place / "global_step2" / target
    )


def cut(name):
    def change(place):
        path = place / "global_step2" / name
        path.write_bytes(path.read_bytes()[:-1000])

    return change


def two_tags(place):
    shutil.copytree(place / "global_step2", place / "global_step4")
    (place / "latest").unlink()


STAGE3 = "zero_pp_rank_2_mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("zero2", swap, "of another rank or save"),
        *(
            (name, remove(optimizer(rank)), "restore")
            for rank in range(4)
            for name in DUE
            if "zero" in name
        ),
        ("zero2", remove("mp_rank_00_model_states.pt"), "missing"),
        ("zero3", remove(STAGE3), "missing"),
        ("zero3", copy(optimizer(1), optimizer(2)), "copy of the other"),
        ("zero2", copy(optimizer(1), optimizer(2)), "copy of the other"),
        ("zero2", copy(optimizer(1), optimizer(4)), "of 5 ranks; move those of another save away"),
        ("zero2", copy(optimizer(1), optimizer(1)[5:]), "optim_states.pt is of another save"),
        ("zero2", copy(optimizer(1), "layer_3_expert_0_mp_rank_00_model_states.pt"), "put the w"),
        ("zero2", copy("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), "ds_to_uni"),
        ("zero2", copy("mp_rank_00_model_states.pt", STAGE3), "move it away"),
        *(("zero3", cut(name), "restore it") for name in (optimizer(0), STAGE3)),
        ("zero2", two_tags, "global_step2, global_step4 and no latest"),
        (
            "zero2",
            lambda place: (place / "latest").write_text("global_step7"),
            "'global_step7'",
        ),
        ("zero2", lambda place: (place / "latest").write_text("../zero2"), "latest"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(real, tmp_path, name, change, told):
    place = shutil.copytree(real("deepspeed") / name, tmp_path / "run")
    change(place)
    with pytest.raises(CheckpointError, match=told) as caught:
        merge(place, tmp_path / "out.safetensors")
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

"""Plain values: which there are, and when two are equal."""

import pickle
from collections import OrderedDict
from enum import Enum, Flag, IntEnum
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    ShardingSpec,
    digest,
    plan_reshard,
    reshard_state,
    save_sharded,
)
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from shardspec.resharding.state import flat_state, is_plain, plain_key


class Color(Enum):
    RED = 1
    BLUE = 2


class Level(IntEnum):
    LOW = 1


class Kinds(Flag):
    A = 1
    B = 2


NAN = float("nan")
DIFFERENT: list[object] = [
    None,
    *(0, 1, False, True, 0.0, -0.0, 1.0, NAN, float("inf"), "1", b"1", 1j, complex(-0.0, 1)),
    *(np.float32(1), np.float64(1), np.int64(1), np.float32(NAN), np.bool_(True)),
    *(Color.RED, Color.BLUE, Level.LOW, Kinds.A, Kinds.A | Kinds.B),
    *([], (), set(), frozenset(), {}, OrderedDict(), [[]], [0.0], [-0.0], [NAN], [1], [True], (1,)),
    *({1}, {"a": 1}, {"a": 1.0}, {"b": 1}, {1: "a"}, {True: "a"}, torch.Size([1]), 10**5000),
]


def test_values_are_equal_by_type_and_value_alone():
    for (i, one), (j, other) in product(enumerate(DIFFERENT), repeat=2):
        assert is_plain(one)
        assert (plain_key(one) == plain_key(pickle.loads(pickle.dumps(other)))) == (i == j)


def test_identity_and_order_do_not_count():
    text = "".join(["a", "b"])
    assert plain_key([text, text]) == plain_key(["ab", "".join("ab")])
    assert plain_key([{"x": 1, "y": {3, 2}}]) == plain_key([{"y": {2, 3}, "x": 1}])


@pytest.mark.parametrize("value", [object(), torch.zeros(1), np.zeros(1), [torch.zeros(1)], len])
def test_what_is_not_plain(value):
    assert not is_plain(value)


def test_memory_and_checkpoints_mean_the_same_by_plain(tmp_path):
    """What a format has no place for, the format refuses."""
    tensor = torch.ones(2)
    for number, value in enumerate(v for v in DIFFERENT if not isinstance(v, dict)):
        assert digest({"w": tensor, "v": value}) == digest({"w": tensor})
        problem = ""
        try:
            save_sharded({"w": tensor, "v": {"": value}}, tmp_path / f"{number}")
        except CheckpointError as error:
            problem = str(error)
        kept = isinstance(value, bytes | str | int | float | list | tuple | None)
        kept = kept and not (type(value) is int and value > 2**64)
        assert problem.startswith("value 'v.': sharding_info.json cannot store a ") != kept
        assert bool(problem) != kept
    with pytest.raises(CheckpointError, match="'v' is a object, neither a tensor nor a plain"):
        digest({"w": tensor, "v": object()})


def test_a_list_that_holds_itself_is_not_plain():
    endless: list[object] = []
    endless.append(endless)
    assert not is_plain(endless)


def test_names_in_memory_are_those_of_a_checkpoint(tmp_path):
    """Also where a tensor or a mapping lies in a list, as groups of an optimizer do."""
    state = {
        "model": {"layers": [torch.ones(2), {"w": torch.ones(3)}]},
        "optim": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
        "betas": (0.9, 0.99),
        "empty": {},
    }
    save_sharded(state, tmp_path / "saved")
    catalog = open_checkpoint(tmp_path / "saved")
    assert sorted(flat_state(state)) == sorted([*catalog.names, *catalog.extras])


def test_a_list_of_tensors_is_resharded():
    mesh = DeviceMesh(range(2))
    rows = [DTensor(torch.arange(4.0) + n, mesh, "[S0]") for n in range(2)]
    got = reshard_state({"rows": rows, "step": 3}, {"rows.1": "[R]"}, device_mesh=mesh)
    assert got["rows.1"].to_local(1).tolist() == [1, 2, 3, 4]
    assert (got["rows.0"].layout.spec, got["step"]) == (ShardingSpec(1), 3)
    layouts = [Layout(mesh, "[S0]", (4,), "f32"), Layout(mesh, "[S0]", (4,), "f32")]
    assert [move.target_name for move in plan_reshard({"rows": layouts}, (mesh, {})).moves] == [
        "rows.0",
        "rows.1",
    ]


def test_keys_of_every_kind_become_names():
    state: dict[Any, object] = {0: 1, "a": {1: {"b": 2}}}
    assert flat_state(state) == {"0": 1, "a.1.b": 2}

"""Plain values: which there are, and when two are equal."""

import pickle
from collections import OrderedDict
from enum import Enum, Flag, IntEnum
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from shardspec.resharding.state import flat_state, is_plain, plain_key


class Colour(Enum):
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
    *(Colour.RED, Colour.BLUE, Level.LOW, Kinds.A, Kinds.A | Kinds.B),
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


def test_a_list_that_holds_itself_is_not_plain():
    endless: list[object] = []
    endless.append(endless)
    assert not is_plain(endless)


def test_keys_of_every_kind_become_names():
    state: dict[Any, object] = {0: 1, "a": {1: {"b": 2}}}
    assert flat_state(state) == {"0": 1, "a.1.b": 2}

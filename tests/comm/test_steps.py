import dataclasses
import pickle
from typing import get_args

import pytest

from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceOp,
    ReduceScatter,
    Slice,
    Step,
    backward,
)

ONE_OF_EACH = {
    Slice(0, (1, 2)): AllGather(0, (1, 2)),
    AllGather(1, (2, 0)): Slice(1, (2, 0)),
    AllToAll(0, 1, (0, 2), (2, 0)): AllToAll(1, 0, (2, 0), (0, 2)),
    ReduceScatter(2, (1,), "max"): AllGather(2, (1,)),
    AllReduce((0, 1), "avg"): None,
    Permute((0, 2)): Permute((0, 2)),
    Exchange((1,)): Exchange((1,)),
}


def test_the_table_has_every_step():
    assert {type(step) for step in ONE_OF_EACH} == set(get_args(Step))


@pytest.mark.parametrize(("step", "back"), ONE_OF_EACH.items())
def test_the_backward_of_a_step_is_a_step(step, back):
    assert backward(step) == back


@pytest.mark.parametrize("step", [s for s in ONE_OF_EACH if not hasattr(s, "op")])
def test_moves_without_a_reduction_go_back_and_forth(step):
    back = backward(step)
    assert back is not None
    assert backward(back) == step


@pytest.mark.parametrize("step", ONE_OF_EACH)
def test_a_step_is_a_value(step):
    again = pickle.loads(pickle.dumps(step))
    assert again == step
    assert again is not step
    assert hash(again) == hash(step)
    assert eval(repr(step)) == step
    name = dataclasses.fields(step)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(step, name, 3)
    assert dataclasses.replace(step, **{name: (7,)}) != step


def test_steps_of_different_kinds_are_never_equal():
    assert Slice(0, (1,)) != AllGather(0, (1,))
    assert Permute((1,)) != Exchange((1,))
    assert len({Slice(0, (1,)), AllGather(0, (1,)), Slice(0, (1,))}) == 2


def test_an_all_to_all_moves_along_the_axes_in_their_order_of_arrival():
    assert AllToAll(0, 1, (0, 2), (2, 0)).axes == (2, 0)


def test_there_are_five_reductions():
    assert get_args(ReduceOp) == ("sum", "avg", "min", "max", "prod")

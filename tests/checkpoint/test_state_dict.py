"""Nested state dicts: names, encodings, and what a sharding info may say of them."""

import json
from typing import Any

import pytest
import torch

from shardspec import load_sharded, save_sharded
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.state.state_dict import (
    decode_path,
    decode_value,
    encode_path,
    encode_value,
    flatten,
    unflatten,
)
from shardspec.errors import CheckpointError
from shardspec.resharding.state import leaves


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -7, 2**70, 0.1, -0.0, 1e300, "", 'a"\n', [], (), {}),
        *(float("inf"), float("-inf"), (1, [2, (3,)], {"a": {1: None}}), {"float": "1"}),
        {"tuple": [1]},
        {"dict": [["a", 1]]},
    ],
)
def test_values_come_back_through_json(value):
    found = decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))
    assert found == value
    assert repr(found) == repr(value)


def test_numbers_of_numpy_become_plain_ones_and_nan_stays():
    import numpy as np

    assert type(decode_value(encode_value(np.float64(0.5)))) is float
    nan: Any = decode_value(encode_value(float("nan")))
    assert nan != nan


def test_names_and_paths_lead_back():
    state = {"a": {"b.c": {0: 1, "d": [torch.ones(1), {"e": 2}]}}, "f": [1, 2], "g": {}}
    flat = flatten(state)
    assert list(flat.tensors) == ["a.b.c.d.0"]
    assert flat.values == {"a.b.c.0": 1, "a.b.c.d.1.e": 2, "f": [1, 2], "g": {}}
    paths = {name: decode_path(encode_path(path)) for name, path in flat.paths.items()}
    assert paths == flat.paths
    every = {**flat.tensors, **flat.values}
    back = unflatten({name: paths.get(name, (name,)) for name in every}, every.__getitem__)
    assert back == state
    assert [path for path, _ in leaves(state)][-1] == ("g",)


def test_what_holds_itself_is_refused():
    circle: dict[str, Any] = {}
    circle["again"] = circle
    rounds: list[Any] = [torch.ones(1)]
    rounds.append(rounds)
    for state in (circle, {"a": rounds}):
        with pytest.raises(CheckpointError, match="neither a tensor nor a plain value"):
            flatten(state)


BAD: dict[str, list[Any]] = {
    "values": [
        *([1], {"a": {"b": 1}}, {"a": {"float": 1}}, {"a": {"float": "x"}}, {"a": {"tuple": 1}}),
        *({"a": {"dict": [[1]]}}, {"a": {"dict": [[[1], 2]]}}, {"w": 1}),
        {"a": {"tuple": [], "dict": []}},
    ],
    "paths": [
        *([], {"w": "w"}, {"w": []}, {"w": [1]}, {"w": [None]}, {"w": [True]}, {"w": ["a", [-1]]}),
        *({"w": ["a", [1, 2]]}, {"w": ["a", 1.5]}, {"w": ["a"] * 65}, {"x": ["a", "b"]}),
    ],
}


@pytest.mark.parametrize(("key", "value"), [(key, bad) for key in BAD for bad in BAD[key]])
def test_infos_that_say_nonsense_are_refused(tmp_path, key, value):
    save_sharded({"w": torch.ones(2)}, tmp_path)
    path = tmp_path / "sharding_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=f"sharding_info.json: .*({key}|both)") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "paths",
    [
        {"w": ["a", [1]], "v": ["a", [2]]},
        {"w": ["a", [0]], "v": ["a", "b"]},
        {"w": ["a"], "v": ["a", "b"]},
        {"w": ["a", "b"], "v": ["a"]},
        {"w": ["a", "b"], "v": ["a", "b"]},
        {"w": ["a", [10**15]], "v": ["v"]},
    ],
)
def test_nestings_that_contradict_themselves_are_refused_when_loading(tmp_path, paths):
    save_sharded({"w": torch.ones(2), "v": 3}, tmp_path)
    path = tmp_path / "sharding_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "paths": paths}))
    with pytest.raises(CheckpointError, match=r"has the same keys|do not form a list"):
        load_sharded(tmp_path)
    # The names are good.
    assert verify_checkpoint(tmp_path).flaws == ()
    assert load_sharded(tmp_path, into={"w": torch.zeros(2), "v": 0})["v"] == 3

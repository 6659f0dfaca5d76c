"""What is not a tensor: of every kind, from every format to every other, kept, named or refused."""

import argparse
import datetime
import enum
import io
import math
import pickle
import random
import warnings
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from shardspec import DeviceMesh, DTensor, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError


class Color(enum.Enum):
    """Of this module, which nobody else has."""

    RED = 1
    BLUE = 2


class Note(list[object]):
    """A list of a class that nobody else has."""


PLAIN: Final[dict[str, Any]] = {
    "int": 3,
    "large": 2**70,
    "negative": -(2**40),
    "float": 0.1,
    "nan": math.nan,
    "inf": -math.inf,
    "zero": -0.0,
    "str": "ä\n",
    "none": None,
    "bool": True,
    "bytes": b"\x80\x00state",
    "no bytes": b"",
    "list": [1, [2.5, None]],
    "tuple": (0.9, (0.999,)),
    "empty": {},
    "keys": [{(1, "a"): 2, None: 3}],
    "size": torch.Size((2, 3)),
    "random": random.Random(3).getstate(),
}
"""Kept wherever there is a place for values."""
FOREIGN: Final[dict[str, Any]] = {
    "stream": io.BytesIO(b"abc"),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "enum": Color.RED,
    "scalar": np.float64(0.5),
    "array": np.arange(3),
    "time": datetime.datetime(2026, 1, 2),
    "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
    "numpy": np.random.RandomState(3).get_state(),
    "set": {1, 2},
    "note": Note([1]),
    "complex": 1 + 2j,
    "within": [1, Color.BLUE],
    "member": (2, [np.float32(1.5)]),
    "path": Path("a/b"),
}
"""Only what torch has pickled can stand for these."""
TENSORS: Final[dict[str, Any]] = {
    "w": torch.arange(6.0).view(2, 3),
    "ema": (torch.ones(3), torch.zeros(2, dtype=torch.int64)),
    "deep": {"a": [torch.full((2,), 7.0)], "b": OrderedDict(c=5)},
}
TENSOR_NAMES: Final = ["deep.a.0", "ema.0", "ema.1", "w"]
SOURCES: Final = ("dcp", "dcp unflattened", "torch", "ranks", "own")
SKIPPED: Final = {"dcp": {"empty", "keys"}, "dcp unflattened": {"empty", "keys"}, "own": {"keys"}}
"""What torch leaves out or takes apart as it saves, and what `save_sharded` refuses."""


MERGED: Final = ("safetensors", "huggingface", "torch", "dcp")
MESH: Final = DeviceMesh(range(2), (2,))


def plain(source: str) -> dict[str, Any]:
    """Return the plain values that are saved as they are."""
    return {name: x for name, x in PLAIN.items() if name not in SKIPPED.get(source, ())}


def named(source: str) -> dict[str, Any]:
    """Return all plain values by their flat names."""
    return {**plain(source), "deep.b.c": 5}


def foreign(source: str) -> dict[str, Any]:
    """Return what else is saved."""
    return {} if source == "own" else FOREIGN


def save_dcp(state: dict[str, Any], place: Path, *, flat: bool = True) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultSavePlanner(flatten_state_dict=flat)
        save(state, checkpoint_id=place, planner=planner, no_dist=True)
    return place


def save_as(kind: str, state: dict[str, Any], place: Path) -> Path:
    """Save as the tools do."""
    match kind:
        case "dcp" | "dcp unflattened":
            return save_dcp(state, place, flat=kind == "dcp")
        case "torch":
            place = place.with_suffix(".pt")
            torch.save(state, place)
        case "ranks":
            place.mkdir()
            for rank in range(2):
                torch.save(state, place / f"model_world_size_2_rank_{rank}.pt")
        case _:
            save_sharded(state, place)
    return place


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each source, with all that it can hold."""
    home = tmp_path_factory.mktemp("values")
    return {
        kind: save_as(kind, {**TENSORS, **plain(kind), **foreign(kind)}, home / kind[-4:])
        for kind in SOURCES
    }


def loaded(path: Path, format: str) -> Any:
    """Return what the owner of a format reads, nested as it says."""
    if format == "torch":
        return torch.load(path, weights_only=True)
    if format == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(path, path.with_suffix(".loaded"))
        return torch.load(path.with_suffix(".loaded"), weights_only=False)
    return load_sharded(path)


def at(state: Any, name: str) -> Any:
    """Return what a flat name means in a state dict that may be nested."""
    if not name:
        return state
    if isinstance(state, dict) and name in state:
        return state[name]
    first, _, rest = name.partition(".")
    return at(state[int(first) if isinstance(state, list | tuple) else first], rest)


def whole(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = tensor.to_global() if isinstance(tensor, DTensor) else tensor
    return values


def entries(place: Path) -> dict[str, bytes]:
    """Return the bytes that torch stores of each entry that is not a tensor."""
    metadata = pickle.loads((place / ".metadata").read_bytes())
    found = {}
    for index, info in metadata.storage_data.items():
        if type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
            data = (place / info.relative_path).read_bytes()
            found[index.fqn] = data[info.offset : info.offset + info.length]
    return found


def check_kept(state: dict[str, Any], source: str, *, tuples: bool = False) -> None:
    """Check all plain values and tensors."""
    for name, value in named(source).items():
        found = at(state, name)
        assert repr(found) == repr(tuple(value) if name == "size" and not tuples else value), name
    for name in TENSOR_NAMES:
        assert whole(at(state, name)).equal(at(TENSORS, name)), name


@pytest.mark.parametrize(("source", "target"), [*product(SOURCES, MERGED)])
def test_merging_keeps_or_names(saved, tmp_path, source, target):
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    report = merge(saved[source], out, format=target)
    assert report.tensors == len(TENSOR_NAMES)
    if target in ("safetensors", "huggingface"):
        file = out if target == "safetensors" else out / "model.safetensors"
        assert sorted(load_file(file)) == TENSOR_NAMES
        assert set(report.left_out) == named(source).keys() | foreign(source).keys()
    elif target == "dcp" and source.startswith("dcp"):
        assert report.left_out == ()
        assert entries(out) == entries(saved[source])
        check_kept(loaded(out, "dcp"), source, tuples=True)
        assert loaded(out, "dcp")["enum"] is Color.RED
        assert list(diff_checkpoints(saved[source], out)) == []
    else:
        assert report.left_out == tuple(sorted(foreign(source)))
        check_kept(loaded(out, target), source)
    # Of what has a place, what was left out is a difference, by its name.
    differ = {found.name for found in diff_checkpoints(saved[source], out)}
    no_place = target in ("safetensors", "huggingface")
    assert differ == (set() if no_place else set(report.left_out))


@pytest.mark.parametrize(("source", "target"), [*product(SOURCES, ("shardspec", "dcp"))])
def test_resharding_keeps_or_refuses(saved, tmp_path, source, target):
    out = tmp_path / "out"
    options: Any = {"device_mesh": MESH, "rules": {"w": "[R,S0]"}}
    lost = set(FOREIGN)
    if source == "own" or (target == "dcp" and source.startswith("dcp")):
        lost = set()
    else:
        for name in sorted(FOREIGN)[:1]:
            with pytest.raises(
                CheckpointError, match=f"'{name}' .*would be lost.*drop_values=True"
            ):
                reshard(saved[source], out, format=target, **options)
        assert not out.exists()
    # Where there is nothing to lose, it may be allowed too.
    report = reshard(saved[source], out, format=target, drop_values=True, **options)
    assert set(report.left_out) == lost
    check_kept(loaded(out, target), source, tuples=target == "dcp" and source.startswith("dcp"))
    if lost:
        named = reshard(saved[source], tmp_path / "named", exclude=list(FOREIGN), **options)
        assert set(named.left_out) == lost
    if target == "shardspec":
        # And back, for torch.
        merge(out, tmp_path / "back", format="dcp")
        check_kept(loaded(tmp_path / "back", "dcp"), source)


def test_each_foreign_kind_is_refused_by_name(tmp_path):
    for name, value in FOREIGN.items():
        for kind in ("dcp", "torch"):
            place = save_as(kind, {"w": torch.ones(2), name: value}, tmp_path / f"{name}-{kind}")
            with pytest.raises(CheckpointError, match=f"'{name}' would be lost"):
                reshard(place, tmp_path / "out", device_mesh=MESH)
            assert merge(place, tmp_path / f"{name}-{kind}.pt.safetensors").left_out == (name,)


CHANGED: Final = [
    ("int", 4),
    ("int", 3.0),
    ("bool", 1),
    ("zero", 0.0),
    ("float", 0.2),
    ("nan", None),
    ("tuple", [0.9, (0.999,)]),
    ("list", [1, [2.5, 0]]),
    ("bytes", b"\x80\x00other"),
    ("keys", [{(1, "a"): 2, None: 4}]),
    ("enum", Color.BLUE),
    ("stream", io.BytesIO(b"abd")),
    ("array", np.array([0, 1, 3])),
    ("scalar", np.float64(0.25)),
    ("args", argparse.Namespace(lr=0.1, layers=[1, 3])),
    ("time", datetime.datetime(2026, 1, 3)),
    ("dtype", torch.float16),
    ("set", {1, 3}),
    ("note", Note([2])),
    ("within", [1, Color.RED]),
    ("member", (2, [np.float32(2.5)])),
    ("complex", 1 + 3j),
]


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_values_that_differ_are_differences(tmp_path, kind):
    every = {"w": torch.ones(2), **plain(kind), **FOREIGN}
    first = save_as(kind, every, tmp_path / "first")
    again = save_as(kind, every, tmp_path / "again")
    assert list(diff_checkpoints(first, again)) == []
    for number, (name, value) in enumerate(CHANGED):
        if name not in every:
            continue
        other = save_as(kind, {**every, name: value}, tmp_path / f"other-{number}")
        (found,) = diff_checkpoints(first, other)
        assert (found.name, found.kind) == (name, "value")
        assert found.problem
    fewer = save_as(kind, {"w": torch.ones(2)}, tmp_path / "fewer")
    lacking = {difference.name for difference in diff_checkpoints(first, fewer)}
    assert lacking == every.keys() - {"w"}
    assert list(diff_checkpoints(first, fewer, exclude=sorted(lacking))) == []


def test_tolerances_are_for_numbers_beside_tensors_too(tmp_path):
    a = save_as("dcp", {"w": torch.ones(2), "lr": [0.1, math.nan], "n": 3}, tmp_path / "a")
    b = save_as("own", {"w": torch.ones(2), "lr": [0.1001, math.nan], "n": 3.001}, tmp_path / "b")
    assert [found.name for found in diff_checkpoints(a, b)] == ["lr", "n"]
    assert list(diff_checkpoints(a, b, rtol=0.01)) == []
    assert [found.name for found in diff_checkpoints(a, b, atol=0.0005)] == ["n"]


def test_whole_numbers_too_large_for_a_float_are_compared_as_they_are(tmp_path):
    a, b = (
        save_as("own", {"w": torch.ones(2), "n": 10**400 + more}, tmp_path / str(more))
        for more in (0, 1)
    )
    assert [found.name for found in diff_checkpoints(a, b, atol=1.0)] == ["n"]
    assert list(diff_checkpoints(a, a, atol=1.0)) == []


@pytest.mark.parametrize("kind", ["dcp", "dcp unflattened", "torch", "own"])
def test_training_resumes_after_resharding(tmp_path, kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        schedule.step()

    def state() -> dict[str, Any]:
        parts: dict[str, Any] = {"model": model, "optim": optimizer, "schedule": schedule}
        return {"epoch": 2, **{name: part.state_dict() for name, part in parts.items()}}

    before = state()
    place = save_as(kind, before, tmp_path / "ckpt")
    reshard(place, tmp_path / "out", device_mesh=MESH, rules={"model.weight": "[R,S0]"})
    nested = load_sharded(tmp_path / "out")
    assert nested["epoch"] == 2
    assert nested["optim"]["param_groups"] == before["optim"]["param_groups"]
    assert nested["schedule"] == before["schedule"]
    assert whole(nested["model"]["weight"]).equal(before["model"]["weight"])
    # Into another model, of other numbers.
    kept: dict[str, Any] = {
        "model": {name: value.clone() for name, value in before["model"].items()},
        "groups": str(before["optim"]["param_groups"]),
    }
    with torch.no_grad():
        model.weight.zero_()
    optimizer.param_groups[0]["lr"] = 7.0
    state_now = state()
    state_now["epoch"] = 0
    for source in (tmp_path / "out", place):
        found = load_sharded(source, into=state_now)
        assert found["epoch"] == 2
        assert found["model"]["weight"].equal(kept["model"]["weight"])
        assert str(found["optim"]["param_groups"]) == kept["groups"]
        assert found["optim"]["state"].keys() == before["optim"]["state"].keys()
        optimizer.load_state_dict(found["optim"])
        assert optimizer.param_groups[0]["lr"] == before["optim"]["param_groups"][0]["lr"]


def test_a_list_that_lacks_items_gives_flat_names(tmp_path):
    save_sharded({"a": [torch.ones(1), torch.zeros(1)], "b": {"c": 3}}, tmp_path / "own")
    reshard(tmp_path / "own", tmp_path / "out", device_mesh=MESH, exclude="a.0")
    found = load_sharded(tmp_path / "out")
    assert sorted(found) == ["a.1", "b.c"]
    assert found["b.c"] == 3


def test_renamed_values_keep_their_nesting_below(tmp_path):
    groups = [{"lr": 0.5, "params": [0, 1]}]
    torch.save({"w": torch.ones(2), "optim": {"groups": groups}}, tmp_path / "a.pt")
    reshard(tmp_path / "a.pt", tmp_path / "out", device_mesh=MESH, rename={"^optim[.]": ""})
    assert load_sharded(tmp_path / "out")["groups"] == groups


def test_what_would_run_is_left_out_and_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    state = {"w": torch.ones(2), "attack": Attack()}
    for kind in ("dcp", "torch"):
        place = save_as(kind, state, tmp_path / kind)
        assert merge(place, tmp_path / f"{kind}.safetensors").left_out == ("attack",)
        assert "exec>, not read and not run" in str(open_checkpoint(place).extras["attack"])
        reshard(place, tmp_path / f"{kind}-own", device_mesh=MESH, drop_values=True)
        merge(place, tmp_path / f"{kind}-flat.pt")
        assert b"exec" not in (tmp_path / f"{kind}-flat.pt").read_bytes()
    assert not (tmp_path / "ran").exists()


def test_a_damaged_entry_is_not_copied(tmp_path):
    value = bytes(range(100)) * (3 << 13)  # several pieces
    place = save_dcp({"w": torch.ones(2), "blob": io.BytesIO(value)}, tmp_path / "a")
    merge(place, tmp_path / "b", format="dcp")
    assert entries(tmp_path / "b") == entries(place)
    assert loaded(tmp_path / "b", "dcp")["blob"].getvalue() == value
    data = (place / "__0_0.distcp").read_bytes()
    spoiled = data.index(bytes(range(100)), len(data) // 2)
    (place / "__0_0.distcp").write_bytes(data[:spoiled] + b"\xff" + data[spoiled + 1 :])
    with pytest.raises(CheckpointError, match=r"CRC-32"):
        merge(place, tmp_path / "c", format="dcp")
    assert not (tmp_path / "c").exists()


def test_entries_with_numbers_as_keys_are_compared_one_by_one(tmp_path):
    """As a save names them, which has no nesting."""

    def state(step):
        return {"w": torch.ones(2), "state": {0: {"step": step}, 1: {"step": 4, "lr": 0.5}}}

    torch.save(state(3), tmp_path / "a.pt")
    torch.save(state(7), tmp_path / "b.pt")
    save_sharded(state(3), tmp_path / "saved")
    (found,) = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (found.name, found.problem) == ("state.0.step", "is 3 in the first, 7 in the second")
    assert list(diff_checkpoints(tmp_path / "a.pt", tmp_path / "saved")) == []
    assert list(diff_checkpoints(tmp_path / "saved", tmp_path / "a.pt")) == []

"""Transfers as rows, played by the reference player of the docs: the same bits as `plan.run`."""

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, NameMap, load_sharded, plan_reshard, save_sharded
from shardspec.errors import LayoutError
from shardspec.resharding.rows import Declared
from tests.resharding.states import random_case

DOC = Path(__file__).parents[2] / "docs" / "transfers.md"
FOUR = DeviceMesh([2, 0, 3, 1], (2, 2))
PROJECTIONS = {"q": 32, "k": 8, "v": 8}
BEHIND_EACH_OTHER = """
[sizes]
q = 32
kv = 8
rows = "q + 2 * kv"
[[map]]
source = ["q", "q c"]
target = ["qkv", "rows c", "rows[:q]"]
[[map]]
source = ["k", "kv c"]
target = ["qkv", "rows c", "rows[q:q+kv]"]
[[map]]
source = ["v", "kv c"]
target = ["qkv", "rows c", "rows[q+kv:]"]
"""
BY_GROUPS = """
[sizes]
g = 2
q = 4
r = "q + 2"
[[map]]
source = ["q", "(g q d) c"]
target = ["qkv", "c (g r d)", "r[:q]"]
[[map]]
source = ["k", "(g d) c"]
target = ["qkv", "c (g r d)", "r[q]"]
[[map]]
source = ["v", "(g d) c"]
target = ["qkv", "c (g r d)", "r[q+1]"]
"""


@pytest.fixture(scope="module")
def player():
    """Return the names that the page on transfers defines."""
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text("utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if "def play(" in block)
    names: dict[str, object] = {}
    exec(text, names)
    return names


def flat(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def played(plan, state, player):
    """Return what the player makes of a state, by device and tensor of the plan."""
    given = {
        (device, place): flat(state[move.source_name].shards[device])
        for place, move in enumerate(plan.moves)
        for device in move.source.mesh.ids
    }
    by_name: dict[tuple[int, str], np.ndarray] = {}
    made = {}
    for place, move in enumerate(plan.moves):
        for device in move.target.mesh.ids:
            shape = torch.empty(
                move.target.local_shape(device), dtype=getattr(torch, move.target.dtype)
            )
            padded = move.target_name in plan.padded
            new = np.full(shape.nbytes, 0 if padded else 0xA5, np.uint8)
            made[device, place] = by_name.setdefault((device, move.target_name), new)
    player["play_all"](plan, lambda d, t: given[d, t], lambda d, t: made[d, t])
    return made


def assert_played(plan, state, player):
    """Compare with `plan.run`, the two ends with each other, and bytes with the plan."""
    made, wanted = played(plan, state, player), plan.run(state)
    for place, move in enumerate(plan.moves):
        for device in move.target.mesh.ids:
            shard = flat(wanted[move.target_name].shards[device])
            assert (made[device, place] == shard).all(), (str(plan), move)
    ends = [
        np.sort(np.concatenate([plan.transfers(device, end) for device in plan.copies.devices]))
        for end in ("receiver", "sender")
    ]
    assert (ends[0] == ends[1]).all()
    moved = ends[0][ends[0]["sender"] != ends[0]["receiver"]]
    sizes = moved["run_bytes"] * moved["count"]
    for device in plan.copies.devices:
        assert sizes[moved["receiver"] == device].sum() == plan.received[device]
        both = plan.transfers(device, "both")
        one = [plan.transfers(device, "receiver"), plan.transfers(device, "sender")]
        assert set(both.tolist()) == {row for rows in one for row in rows.tolist()}


@pytest.mark.parametrize(
    "seeds", [range(0, 140, 3), pytest.param(range(700), marks=pytest.mark.exhaustive)], ids=len
)
def test_random_states_are_played_as_the_plan_runs(seeds, player):
    """Uneven and empty shards, parts, shares, blocks, replicas, permuted ids, hosts."""
    stages = set()
    for seed in seeds:
        whole, source, target = random_case(seed, ids=8)
        # Bytes are copied, so nothing is cast here.
        target = {
            n: Layout(t.mesh, t.spec, t.global_shape, source[n].dtype) for n, t in target.items()
        }
        plan = plan_reshard(source, target)
        state = {n: DTensor(w, source[n].mesh, source[n].spec) for n, w in whole.items()}
        assert_played(plan, state, player)
        stages.add(len(plan.copies.stages))
    assert stages == {1, 2, 3}


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 300), marks=pytest.mark.exhaustive)], ids=len
)
def test_maps_are_played_as_the_plan_runs(seeds, player):
    """Fused projections, in parts and with shares; and transposed ones, group by group."""
    for seed in seeds:
        random = Random(seed)
        trainer = DeviceMesh(random.sample(range(8), 4), random.choice([(4,), (2, 2)]))
        engine = DeviceMesh(random.sample(range(8), 2), (2,))
        state = {
            name: DTensor(
                torch.randn(rows, 32), trainer, random.choice(["[S0,R]", "[R,S0]", "[R,R]"])
            )
            for name, rows in PROJECTIONS.items()
        }
        text, specs = random.choice(
            [
                (BEHIND_EACH_OTHER, ["[S0{32,8,8},R]", "[S0{32,8/2,8/1},R]", "[R,S0]", "[S0,R]"]),
                (BY_GROUPS, ["[S0,R]", "[R,S0]", "[R,S0*12]", "[R,R]"]),
            ]
        )
        rules = {"qkv": random.choice(specs)}
        assert_played(
            plan_reshard(state, (engine, rules), names=NameMap.parse(text)), state, player
        )


def test_a_row_is_64_bytes_and_its_runs_are_strided():
    source = {"w": Layout(DeviceMesh(range(2)), "[S0,R]", (256, 384), "bfloat16")}
    rows = plan_reshard(source, (DeviceMesh(range(4, 12)), {"w": "[R,S0]"})).transfers(5)
    assert rows.dtype.itemsize == 64
    assert rows[["sender", "receiver", "source_offset", "run_bytes", "count"]].tolist() == [
        (0, 5, 96, 96, 128),
        (1, 5, 96, 96, 128),
    ]
    assert rows[["target_offset", "source_step", "target_step"]].tolist() == [
        (0, 768, 96),
        (128 * 96, 768, 96),
    ]


def test_declared_strides_are_where_bytes_go(player):
    """A source in column-major order, and a target whose rows are padded on one device only."""
    whole = torch.arange(24.0).reshape(4, 6)
    source = {"w": Layout(DeviceMesh(range(2)), "[S0,R]", (4, 6), "float32")}
    plan = plan_reshard(source, (DeviceMesh([7, 8]), {"w": "[R,S0]"}))
    columns = {d: np.asfortranarray(whole[2 * d : 2 * d + 2].numpy()) for d in range(2)}
    wide = {7: np.zeros((4, 3), "f4"), 8: np.zeros((4, 16), "f4")}
    strides: Declared = {"source": {"w": (4, 8)}, "target": {"w": {7: (12, 4), 8: (64, 4)}}}
    for device, out in wide.items():
        rows = plan.transfers(device, strides=strides)
        player["play"](
            rows,
            lambda d, _: columns[d].ravel("K").view(np.uint8),
            lambda _, __, out=out: out.reshape(-1).view(np.uint8),
            digest=plan.digest,
            planned=plan.digest,
        )
    assert (wide[7] == whole[:, :3].numpy()).all()
    assert (wide[8][:, :3] == whole[:, 3:].numpy()).all()
    assert not wide[8][:, 3:].any()


def test_files_of_a_checkpoint_give_file_and_offset(tmp_path, player):
    whole = torch.randn(8, 6)
    save_sharded(
        {"w": DTensor(whole, FOUR, "[S0,S1]"), "b": DTensor(whole[0], FOUR, "[S10]")},
        tmp_path / "c",
    )
    mesh = DeviceMesh(range(3))
    plan = plan_reshard(tmp_path / "c", (mesh, {"w": "[R,S0]", "b": "[S0]"}))
    wanted = load_sharded(tmp_path / "c", device_mesh=mesh, rules={"w": "[R,S0]", "b": "[S0]"})
    files = dict(
        zip(sorted(plan.copies.files), sorted((tmp_path / "c").glob("*.safetensors")), strict=True)
    )
    for device in mesh.ids:
        made = [np.zeros(wanted[m.target_name].shards[device].nbytes, np.uint8) for m in plan.moves]
        player["play"](
            plan.transfers(device),
            lambda file, _: np.fromfile(files[file], np.uint8),
            lambda _, tensor, made=made: made[tensor],
            digest=plan.digest,
            planned=plan.digest,
        )
        for move, got in zip(plan.moves, made, strict=True):
            assert (got == flat(wanted[move.target_name].shards[device])).all()


def bad_plan(**changes):
    source = {"w": Layout(DeviceMesh(range(2)), "[S0,R]", (4, 6), "float32")}
    return plan_reshard(source, (DeviceMesh([7, 8]), {"w": "[R,S0]"}), **changes)


@pytest.mark.parametrize(
    ("arguments", "strides", "said"),
    [
        ((5,), None, "device 5 is not in the plan, whose devices are (0, 1, 7, 8)"),
        ((True,), None, "device True is not in the plan"),
        ((7, "mine"), None, "end='mine': give 'receiver', 'sender' or 'both'"),
        ((7,), {"there": {}}, "strides= has 'there'; give 'source' and 'target'"),
        ((7,), {"target": {"v": (24, 4)}}, "strides= declares 'v', but the plan's target lacks it"),
        (
            (7,),
            {"target": {"w": {8: (12, 4)}}},
            "target 'w' are not declared for device 7; declare",
        ),
        ((7,), {"source": {"w": (24,)}}, "source 'w' are (24,); give bytes for each of its 2 dims"),
        (
            (7,),
            {"target": {"w": (8, 4)}},
            "the strides (8, 4) of target 'w' let elements of (4, 3)",
        ),
        ((7,), {"target": {"w": (-12, 4)}}, "the strides (-12, 4) of target 'w' let elements"),
    ],
)
def test_what_is_refused(arguments, strides, said):
    with pytest.raises(LayoutError) as caught:
        bad_plan().transfers(*arguments, strides=strides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_casts_are_refused_by_name():
    with pytest.raises(LayoutError, match="'w' is cast from float32 to bfloat16, but transfers"):
        bad_plan(dtype="bfloat16").transfers(7)


def test_rows_of_another_plan_and_short_shards_are_refused(player):
    rows, short = bad_plan().transfers(7), np.zeros(47, np.uint8)
    shards = (lambda *_: np.zeros(48, np.uint8)), (lambda *_: short)
    with pytest.raises(ValueError, match="are not those of plan"):
        player["play"](rows, *shards, digest="a" * 64, planned="b" * 64)
    with pytest.raises(ValueError, match="a shard of 47 bytes is shorter than planned"):
        player["play"](rows, *shards, digest="a", planned="a")

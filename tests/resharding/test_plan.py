"""Reshard plans: what they say, what they refuse, and what they do on simulated devices."""

import pickle
from math import prod
from typing import Any

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, plan_reshard, reshard_state
from shardspec.errors import LayoutError
from tests.resharding.states import random_case, wrong_shards

FOUR = DeviceMesh([2, 0, 3, 1], (2, 2))


@pytest.mark.parametrize("max_bytes", [None, 4096])
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 5600), marks=pytest.mark.exhaustive)], ids=len
)
def test_random_state_dicts_on_simulated_devices(max_bytes, seeds):
    tensors = 0
    for seed in seeds:
        whole, source, target = random_case(seed, ids=8)
        plan = plan_reshard(source, target, max_bytes=max_bytes)
        state = {n: DTensor(w, source[n].mesh, source[n].spec) for n, w in whole.items()}
        got = plan.run(state)
        devices = next(iter(target.values())).mesh.ids
        assert wrong_shards(whole, target, got, devices) == [], seed
        assert sum(plan.sent.values()) == sum(plan.received.values())
        tensors += len(whole)
    assert tensors > 1.5 * len(seeds)


def test_out_is_filled_in_place_again_and_again():
    target_mesh = DeviceMesh([5, 1], (2,))
    source = {"w": Layout(FOUR, "[S01,R]", (6, 4), "float32")}
    plan = plan_reshard(source, (target_mesh, {"w": "[R,S0]"}))
    out = {"w": DTensor(torch.zeros(6, 4), target_mesh, "[R,S0]")}
    kept = {device: shard.data_ptr() for device, shard in out["w"].shards.items()}
    for step in range(3):
        whole = torch.randn(6, 4) + step
        got = plan.run({"w": DTensor(whole, FOUR, "[S01,R]")}, out)
        assert got["w"] is out["w"]
        assert torch.equal(out["w"].to_global(), whole)
    assert {device: shard.data_ptr() for device, shard in out["w"].shards.items()} == kept


def test_only_what_is_lacking_travels_and_replicas_share_the_work():
    mesh = DeviceMesh(range(8), (4, 2))
    source = {f"w{i}": Layout(mesh, "[R,S1]", (64, 32), "float32") for i in range(3)}
    plan = plan_reshard(source, (DeviceMesh([0, 9], (2,)), {"*": "[S0,R]"}))
    # Device 0 has one half of the columns of its rows; 9 has nothing.
    total = 3 * 64 * 32 * 4
    assert plan.received[9] == total // 2
    assert plan.received[0] == total // 4
    assert sum(plan.sent.values()) == total // 2 + total // 4
    # Device 9 wants as much from either half; device 0 only what devices 1, 3, 5, 7 hold.
    assert max(plan.sent.values()) == total // 4 // 4 + total // 4 // 4
    assert plan.sent[9] == 0


def test_names_and_dtypes():
    source = {"model.w": Layout(FOUR, "[S0,S1]", (4, 6), "float32")}
    plan = plan_reshard(
        source, (DeviceMesh([7], (1,)), {}), names={"model.w": "w"}, dtype=torch.bfloat16
    )
    whole = torch.randn(4, 6)
    got = plan.run({"model.w": DTensor(whole, FOUR, "[S0,S1]")})
    assert torch.equal(got["w"].to_local(), whole.bfloat16())
    assert sum(plan.sent.values()) == 4 * 6 * 2  # cast before it is sent


def test_values_and_nested_states_go_along():
    w = DTensor(torch.arange(24.0).reshape(4, 6), FOUR, "[S0,S1]")
    state = {"model": {"w": w}, "optimizer": {"step": 3, "betas": (0.9, 0.99)}, "name": "x"}
    there = DeviceMesh([7, 3], (2,))
    got = plan_reshard(state, (there, {"*": "[S0,R]"}), names={"name": "title"}).run(state)
    assert torch.equal(got.pop("model.w").to_global(), w.to_global())
    assert got == {"optimizer.step": 3, "optimizer.betas": (0.9, 0.99), "title": "x"}


def test_what_is_still_to_be_conjugated():
    numbers = torch.arange(24).reshape(4, 6) * (1 + 2j)
    plan = plan_reshard(
        {"w": Layout(FOUR, "[S0,S1]", (4, 6), "complex64")}, (FOUR, {"w": "[S1,R]"})
    )
    source = DTensor(numbers.to(torch.complex64), FOUR, "[S0,S1]")
    lazy = DTensor.from_shards({d: s.conj() for d, s in source.shards.items()}, source.layout)
    assert torch.equal(plan.run({"w": lazy})["w"].to_global(), numbers.to(torch.complex64).conj())
    shards = {d: torch.zeros(2, 6, dtype=torch.complex64).conj() for d in FOUR.ids}
    out = {"w": DTensor.from_shards(shards, plan.moves[0].target)}
    with pytest.raises(LayoutError, match="conjugates or negates"):
        plan.run({"w": source}, out)


def test_a_tied_tensor_travels_under_each_of_its_names():
    w = DTensor(torch.arange(24.0).reshape(4, 6), FOUR, "[S0,S1]")
    state = {"words": w, "head": w}
    there = DeviceMesh([7, 3], (2,))
    plan = plan_reshard(state, (there, {"*": "[S0,R]"}))
    # Device 3 has the left half of the rows that it gets.
    assert plan.received == {0: 0, 1: 0, 2: 0, 3: 2 * 24, 7: 2 * 48}
    got = plan.run(state)
    assert torch.equal(got["head"].to_global(), w.to_global())
    assert torch.equal(got["words"].to_global(), w.to_global())


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_two_names_of_out_may_be_one_tensor_if_the_source_has_them_equal(dtype):
    w = DTensor(torch.arange(24.0).reshape(4, 6), FOUR, "[S0,S1]")
    same = DTensor(w.to_global().clone(), FOUR, "[S0,S1]")
    other = DTensor(-w.to_global(), FOUR, "[S0,S1]")
    otherwise = DTensor(w.to_global(), FOUR, "[S1,S0]")
    out = DTensor(torch.ones(4, 6, dtype=plan_dtype(dtype)), FOUR, "[R,R]")
    for second in (w, same):
        plan = plan_reshard({"a": w, "b": second}, (FOUR, {}), dtype=dtype)
        got, receipt = plan.run({"a": w, "b": second}, {"a": out, "b": out}, receipt=True)
        assert got == {"a": out, "b": out}
        assert torch.equal(out.to_global().float(), w.to_global())
        assert receipt.digests["a"] == receipt.digests["b"]
    for second in (other, otherwise):
        plan = plan_reshard({"a": w, "b": second}, (FOUR, {}), dtype=dtype)
        with pytest.raises(
            LayoutError, match=r"out\['a'\] and out\['b'\] share memory, but differ"
        ):
            plan.run({"a": w, "b": second}, {"a": out, "b": out})
        assert torch.equal(out.to_global().float(), w.to_global())


def plan_dtype(name):
    return torch.float32 if name is None else torch.bfloat16


def test_the_order_of_names_does_not_count():
    w = Layout(FOUR, "[S0,S1]", (4, 6), "float32")
    source = {"b": w, "a": w, "step": 1, "epoch": 2}
    plans = [
        plan_reshard(dict(order), (FOUR, {}))
        for order in (source.items(), reversed(source.items()))
    ]
    assert plans[0] == plans[1]
    assert plans[0].digest == plans[1].digest


def test_layouts_that_give_each_device_the_same_are_the_same():
    whole = torch.arange(8.0)
    flat, grid = DeviceMesh(range(4)), DeviceMesh(range(4), (2, 2), axis_names=("a", "b"))
    plan = plan_reshard({"w": Layout(flat, "[S0]", (8,), "float32")}, (DeviceMesh([9]), {}))
    got = plan.run({"w": DTensor(whole, grid, "[S(a,b)]")})
    assert torch.equal(got["w"].to_global(), whole)
    with pytest.raises(LayoutError, match=r"'w' has layout \[S10\].*but the plan has \[S0\]"):
        plan.run({"w": DTensor(whole, grid, "[S(b,a)]")})


def test_a_plan_is_a_value():
    source = {"w": Layout(FOUR, "[S0,S1]", (4, 6), "float32")}
    plans = [plan_reshard(source, (DeviceMesh([7, 3], (2,)), {"w": "[S0,R]"})) for _ in range(2)]
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    assert plans[0].digest == plans[1].digest == pickle.loads(pickle.dumps(plans[0])).digest
    said: Any = plans[0].as_dict()
    assert said["tensors"] == 1
    assert said["received"]["7"] == 2 * 6 * 4
    assert "busiest sender" in str(plans[0])
    other = plan_reshard(source, (DeviceMesh([7, 3], (2,)), {"w": "[R,S0]"}))
    assert other.digest != plans[0].digest


def test_peak_bytes_count_source_target_and_buckets():
    source = {"w": Layout(FOUR, "[S0,S1]", (64, 64), "float32")}
    plan = plan_reshard(source, (FOUR, {"w": "[R,R]"}), max_bytes=6400)
    assert plan.peak_bytes == 64 * 64 + 4 * 64 * 64 + 2 * 6400


def bad_calls():
    w = Layout(FOUR, "[S0,R]", (4, 6), "float32")
    one = DeviceMesh([7], (1,))
    yield "the target lacks 'w'", {"w": w}, {}, {}
    yield "the source lacks 'v'", {}, {"v": w}, {}
    yield "(4, 6) in the source", {"w": w}, {"w": Layout(FOUR, "[R]", (4,), "float32")}, {}
    for dtype in ("int32", "complex64"):
        whole = Layout(FOUR, "[S0,R]", (4, 6), dtype)
        yield "only floating-point dtypes are cast", {"w": w}, {"w": whole}, {}
        yield "only floating-point dtypes are cast", {"w": whole}, {"w": w}, {}
    yield "reduction pending", {"w": w.with_spec("[S0,R|P1]")}, {"w": w}, {}
    yield "is a object", {"w": object()}, {"w": w}, {}
    yield "would both be named 'a.w'", {"a": {"w": w}, "a.w": w}, {"a.w": w}, {}
    yield "which the source lacks", {"w": w}, {"w": w}, {"names": {"x": "y"}}
    yield "names= is a", {"w": w}, {"w": w}, {"names": "llama-hf-to-fused"}
    yield "names= is a", {"w": w}, {"w": w}, {"names": []}
    yield "give them different names", {"a": w, "b": w}, {"a": w}, {"names": {"b": "a"}}
    yield "give at least 128", {"w": w}, (one, {}), {"max_bytes": 5}


@pytest.mark.parametrize(
    ("says", "source", "target", "options"), list(bad_calls()), ids=lambda v: str(v)[:20]
)
def test_what_is_refused(says, source, target, options):
    with pytest.raises(LayoutError) as error:
        plan_reshard(source, target, **options)
    assert says in str(error.value)


def _each(tensor: DTensor, made) -> DTensor:
    """Return a tensor of the same layout with other shards."""
    return DTensor.from_shards({d: made(s) for d, s in tensor.shards.items()}, tensor.layout)


def _freed(shard: torch.Tensor) -> torch.Tensor:
    copy = shard.clone()
    copy.untyped_storage().resize_(0)
    return copy


@torch.inference_mode()
def _of_inference(shard: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shard.shape)


def test_a_state_that_is_not_as_planned_is_refused_before_out_is_touched():
    plan = plan_reshard({"w": Layout(FOUR, "[S0,S1]", (4, 6), "float32")}, (FOUR, {"w": "[R,R]"}))
    out = {"w": DTensor(torch.full((4, 6), 7.0), FOUR, "[R,R]")}
    good = DTensor(torch.zeros(4, 6), FOUR, "[S0,S1]")
    for state, says in (
        ({}, "'w' is missing"),
        ({"w": torch.zeros(4, 6)}, "is a Tensor"),
        ({"w": DTensor(torch.zeros(4, 6).double(), FOUR, "[S0,S1]")}, "[4, 6] float64"),
        ({"w": DTensor(torch.zeros(6, 4), FOUR, "[S0,S1]")}, "of [6, 4]"),
        ({"w": good, "x": 1}, "the state dict has 'x', which the plan lacks"),
        ({"w": 3}, "'w' is a int"),
        ({"w": _each(good, lambda shard: shard.to("meta"))}, "has no memory"),
        ({"w": _each(good, _freed)}, "has no memory"),
    ):
        with pytest.raises(LayoutError, match="w") as error:
            plan.run(state, out)
        assert says in str(error.value)
    for given, says in (
        ({}, "'w' is missing from out"),
        ({"w": good}, r"out['w'] has layout [S0,S1]"),
        ({**out, "x": good}, "out has 'x', which the plan lacks"),
        ({"w": _each(out["w"], lambda _: torch.zeros(6).expand(4, 6))}, "share memory, as those"),
        ({"w": _each(out["w"], _of_inference)}, "was made in inference mode"),
    ):
        with pytest.raises(LayoutError) as error:
            plan.run({"w": good}, given)
        assert says in str(error.value)
    same = plan_reshard({"w": good.layout}, {"w": good.layout})
    with pytest.raises(LayoutError, match="shares memory"):
        same.run({"w": good}, {"w": good})
    assert torch.equal(out["w"].to_global(), torch.full((4, 6), 7.0))
    two = plan_reshard({"a": good.layout, "b": good.layout}, {"a": good.layout, "b": good.layout})
    other = DTensor(torch.ones(4, 6), FOUR, "[S0,S1]")
    given = {"a": good, "b": other}
    once = DTensor(torch.full((4, 6), 7.0), FOUR, "[S0,S1]")
    with pytest.raises(LayoutError, match="share memory, but differ"):
        two.run(given, {"a": once, "b": once})
    assert torch.equal(once.to_global(), torch.full((4, 6), 7.0))
    flat = {rank: torch.zeros(12) for rank in range(4)}
    halves = [
        DTensor.from_shards({r: f[at : at + 6].view(2, 3) for r, f in flat.items()}, good.layout)
        for at in (0, 6)
    ]
    two.run(given, {"a": halves[0], "b": halves[1]})
    assert torch.equal(halves[1].to_global(), torch.ones(4, 6))


def test_reshard_state_stays_on_the_mesh_unless_told():
    whole = torch.arange(24.0).reshape(4, 6)
    state = {"w": DTensor(whole, FOUR, "[S0,S1]"), "b": DTensor(whole[0], FOUR, "[S01]")}
    got = reshard_state(state, {"w": "[R,S10]"})
    assert [str(t.sharding_spec) for t in got.values()] == ["[R,S10]", "[R]"]
    assert got["w"].device_mesh == FOUR
    assert torch.equal(got["w"].to_global(), whole)
    assert prod(got["b"].to_local(3).shape) == 6


def test_a_device_talks_to_few_peers_at_once():
    """Of 80 devices that all lack something of each other, each sends to 32 in a wave at most."""
    mesh = DeviceMesh(range(80), (80,))
    whole = torch.arange(160.0 * 80).reshape(160, 80)
    plan = plan_reshard(
        {"w": Layout(mesh, "[S0,R]", whole.shape, "float32")}, (mesh, {"w": "[R,S0]"})
    )
    schedules = {device: plan.copies.schedule(device) for device in mesh.ids}
    waves = sorted({wave for schedule in schedules.values() for wave in schedule.sends})
    assert waves == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    for device, schedule in schedules.items():
        for wave, messages in schedule.sends.items():
            assert 0 < len(messages) <= 32
            for peer, pieces in messages.items():
                assert schedules[peer].receives[wave][device] == pieces
        assert sum(map(len, schedule.sends.values())) == 79
    got = plan.run({"w": DTensor(whole, mesh, "[S0,R]")})
    assert torch.equal(got["w"].to_global(), whole)


def test_complex_tensors_keep_their_dtype():
    source = {"f": Layout(FOUR, "[S0]", (4,), "complex64"), "w": Layout(FOUR, "[S0]", (4,), "f32")}
    plan = plan_reshard(source, (FOUR, {}), dtype="bf16")
    assert [move.target.dtype for move in plan.moves] == ["complex64", "bfloat16"]


def test_planning_that_takes_long_is_announced(monkeypatch, caplog):
    """Before the first copy is listed; below the limit nothing is said."""
    first, second = DeviceMesh(range(16)), DeviceMesh(range(16, 32))
    source = {"w": Layout(first, "[S0,R]", (32, 32), "float32")}
    for most, lines in ((256, 0), (255, 1)):
        monkeypatch.setattr("shardspec.resharding.stages._MANY_COPIES", most)
        assert len(plan_reshard(source, (second, {"w": "[R,S0]"})).copies.traffic) == 256
        assert len(caplog.messages) == lines
    assert "256 copies" in caplog.text
    assert " of memory" in caplog.text
    caplog.clear()
    assert len(plan_reshard(source, (second, {"w": "[S0,R]"})).copies.traffic) == 16
    assert caplog.messages == []

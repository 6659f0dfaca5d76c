"""Receipts of a sync: what arrived is what left, and what went wrong is named."""

from collections.abc import Callable
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, NameMap, digest, plan_reshard
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.resharding import execute
from shardspec.resharding.receipts import receipt_of
from tests.dist.processes import run_ranks
from tests.resharding.states import random_case, shard_at

MESH = DeviceMesh(range(4), (2, 2))
OTHER = DeviceMesh([3, 9, 8], (3,))
FUSED = """
[[map]]
source = ["q", "(t r) c"]
target = ["qk", "(t s r) c", "s[0]"]
[[map]]
source = ["k", "(t r) c"]
target = ["qk", "(t s r) c", "s[1]"]
[[map]]
source = ["up", "i o"]
target = ["up", "o i"]
[[zeros]]
target = ["qk", "(t s r) c", "s[2]"]
[sizes]
t = 2
s = 3
"""


def sharded(whole, source):
    return {
        name: DTensor.from_shards(
            {d: shard_at(w, source[name], d) for d in source[name].mesh.ids}, source[name]
        )
        for name, w in whole.items()
    }


@pytest.mark.parametrize("part", range(4))
def test_what_arrived_has_the_digests_of_what_left(part):
    for seed in range(part, 40, 4):
        whole, source, target = random_case(seed, ids=6)
        state = sharded(whole, source)
        plan = plan_reshard(source, target, max_bytes=(None, 4096)[seed % 2])
        plain, (got, receipt) = plan.run(state), plan.run(state, receipt=True, version=seed)
        assert receipt.version == seed
        assert receipt.digests == digest(whole), seed
        for name, tensor in plain.items():
            assert {d: s.tolist() for d, s in tensor.shards.items()} == {
                d: s.tolist() for d, s in got[name].shards.items()
            }


def test_a_cast_has_the_digests_of_what_it_made():
    state = {
        "w": DTensor(torch.randn(6, 4), MESH, "[S0,S1]"),
        "n": DTensor(torch.arange(3), MESH, "[R]"),
    }
    for dtype in ("bf16", "float64"):
        got, receipt = plan_reshard(state, (OTHER, {"w": "[R,S0]"}), dtype=dtype).run(
            state, receipt=True
        )
        assert receipt.digests == digest(got)
        assert receipt.digests["w"].dtype == {"bf16": "bfloat16"}.get(dtype, dtype)


def test_casts_between_dtypes_of_one_width_and_casts_of_nan_arrive():
    for before, after in permutations((torch.float32, torch.float16, torch.bfloat16), 2):
        value = torch.linspace(-7e4, 7e4, 24).view(4, 6).t().to(before)  # too large for float16
        value[3] = torch.nan
        halves = dict(enumerate(value.chunk(2)))
        state = {"w": DTensor.from_local(halves, DeviceMesh([0, 1]), "[S0,R]")}
        plan = plan_reshard(state, (OTHER, {"w": "[R,S0]"}), dtype=after)
        got, receipt = plan.run(state, receipt=True)
        assert receipt.digests == digest(got)
        cast = got["w"].to_global()
        torch.testing.assert_close(cast, value.to(after), rtol=0, atol=0, equal_nan=True)


def test_fused_and_tied_tensors_have_digests_of_the_target():
    q, k, up = torch.randn(8, 5), torch.randn(8, 5), torch.randn(4, 6)
    whole = {"q": q, "k": k, "up": up}
    state = {n: DTensor(w, MESH, "[S0,S1]") for n, w in whole.items()}
    map_ = NameMap.parse(FUSED)
    got, receipt = plan_reshard(state, (OTHER, {"*": "[S0,R]"}), names=map_).run(
        state, receipt=True
    )
    assert receipt.digests == digest(got) == digest(state, names=map_)
    state = {"w": (w := DTensor(up, MESH, "[S0,R]")), "v": w}
    got, receipt = plan_reshard(state, (OTHER, {"*": "[R,S0]"})).run(state, receipt=True)
    assert receipt.digests == digest({"w": up, "v": up})


@contextmanager
def spoiled(what: Callable[[torch.Tensor], object], device: int):
    """Spoil what a device has received, before receipts are compared."""

    def spoiling(plan, held, gather, wanted):
        if device in held:
            what(held[device].target[0])
        return receipt_of(plan, held, gather, wanted)

    with patch.object(execute, "receipt_of", spoiling):
        yield


def test_a_mismatch_names_the_tensor_and_spoils_what_is_read():
    state = {"w": DTensor(torch.randn(6, 4), MESH, "[S0,R]")}
    plan = plan_reshard(state, (DeviceMesh([8, 9], (2,)), {"w": "[R,S0]"}))
    out = plan.run(state)
    named = r"^version 5: tensor 'w' did not arrive .*[0-9a-f]{32}.*[0-9a-f]{32}.* sync again$"
    with spoiled(lambda t: t[0].add_(1), 9), pytest.raises(CommunicatorError, match=named):
        plan.run(state, out, receipt=True, version=5)
    with pytest.raises(CommunicatorError, match="version 5 did not arrive"):
        out["w"].to_local(8)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("float32", "float32"),
        ("float32", "float64"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
        ("int64", "int64"),
    ],
)
def test_every_flipped_bit_is_seen(before, after):
    """Any bit of any replica, also where the target is wider than the bytes that travelled."""
    types = [getattr(torch, name) for name in (before, after)]
    value = torch.arange(-12, 12).reshape(6, 4).to(types[0])
    state = {"w": DTensor(value, MESH, "[S0,R]")}
    layout = Layout(DeviceMesh([7, 8, 9, 5], (2, 2)), "[R,S1]", (6, 4), after)
    plan = plan_reshard(state, {"w": layout})
    width = types[1].itemsize
    for place, bit in [(n % (12 * width), n % 8) for n in range(0, 96 * width, 5)]:

        def flip(t, place=place, bit=bit):
            data = t.contiguous().view(-1).view(torch.uint8)
            data[place] ^= 1 << bit
            t.copy_(data.view(t.dtype).view(t.shape))

        for device in (7, 9):
            with spoiled(flip, device), pytest.raises(CommunicatorError, match="tensor 'w' d"):
                plan.run(state, receipt=True)


def test_replicas_of_the_source_that_differ_are_named():
    layout = Layout(DeviceMesh([0, 1], (2,)), "[R]", (4,), "float32")
    w = DTensor.from_shards({0: torch.zeros(4), 1: torch.ones(4)}, layout)
    target = Layout(DeviceMesh([0, 1], (2,)), "[R]", (4,), "float32")
    with pytest.raises(CommunicatorError, match="'w' differs on devices 0 and 1"):
        plan_reshard({"w": w}, {"w": target}).run({"w": w}, receipt=True)


def test_a_version_that_was_missed_is_told():
    state = {"w": DTensor(torch.randn(4), MESH, "[S0]")}
    plan = plan_reshard(state, (OTHER, {}))
    _, receipt = plan.run(state, receipt=True, version=6)
    receipt.require(6)
    with pytest.raises(CommunicatorError, match="version 6 has arrived here, not 7"):
        receipt.require(7)
    with pytest.raises(LayoutError, match="version=3 is for a receipt"):
        plan.run(state, version=3)  # type: ignore[call-overload]


def _in_job(rank: int) -> list[str]:
    wrong = []
    for seed in range(12):
        whole, source, target = random_case(seed, ids=4)
        plan = plan_reshard(source, target)
        inside = rank in next(iter(source.values())).mesh
        state = {n: shard_at(w, source[n], rank) for n, w in whole.items()} if inside else {}
        try:
            _, receipt = plan.run(state, receipt=True, version=seed)
            if rank not in plan.copies.devices or receipt.digests != digest_alone(whole):
                wrong.append(f"{seed}: {receipt.digests}")
        except LayoutError as error:
            if rank in plan.copies.devices or "on no mesh of the plan" not in str(error):
                wrong.append(str(error))
    mesh = DeviceMesh(range(4), (4,))
    w = torch.arange(24.0).view(6, 4)
    cut = DTensor(w, mesh, "[S0,R]")
    if digest({"w": cut}) != digest_alone({"w": w}):
        wrong.append("digest of a state dict")
    parts = {"q": torch.randn(8, 5), "k": torch.randn(8, 5), "up": torch.randn(4, 6)}
    for value in parts.values():
        torch.distributed.broadcast(value, 0)
    fused = {name: DTensor(value, mesh, "[S0,R]") for name, value in parts.items()}
    map_ = NameMap.parse(FUSED)
    if digest(fused, names=map_) != digest_alone(parts, names=map_):
        wrong.append("digest of a state dict under other names, with padding")
    plan = plan_reshard({"w": cut}, (DeviceMesh([3, 2], (2,)), {"w": "[R,S0]"}))
    try:
        plan.run({"w": cut}, receipt=True, version=7 + (rank == 1))
        wrong.append("versions differed")
    except CommunicatorError as error:
        wrong += [] if "version" in str(error) else [str(error)]
    out = plan.run({"w": cut})
    with spoiled(lambda t: t[0].add_(1), 2):
        try:
            plan.run({"w": cut}, out, receipt=True, version=9)
            wrong.append("a spoiled tensor was taken")
        except CommunicatorError as error:
            wrong += [] if "'w' did not arrive" in str(error) else [str(error)]
    plan.run({"w": cut}, receipt=True, version=10)
    return wrong


def digest_alone(whole, **how):
    """Digests in this process."""
    from shardspec.comm.communicator import SimulatedCommunicator

    alone = SimulatedCommunicator(DeviceMesh([0], (1,)))
    return digest(whole, communicator=alone, **how)


@pytest.mark.dist
def test_ranks_compare_what_left_and_what_arrived(tmp_path: Path) -> None:
    assert run_ranks(4, tmp_path, _in_job) == [[], [], [], []]

"""Plans on devices of several hosts: no byte goes to a host twice."""

from collections import Counter
from math import prod

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, plan_reshard
from shardspec.resharding.stages import hosts_of
from tests.resharding.states import random_case, shard_at, wrong_shards

NETWORK, NVLINK = (1e-5, 2e-11), (1e-6, 2e-12)


def cluster(ids, shape) -> DeviceMesh:
    """Return a mesh whose first axis joins hosts."""
    links = NETWORK, *[NVLINK] * (len(shape) - 1)
    return DeviceMesh(ids, shape, None, *zip(*links, strict=True))


def lacking(shapes, source, target, number) -> dict[int, int]:
    """Return by host the bytes that its devices lack, by sets of elements."""
    lacked = dict.fromkeys(number.values(), 0)
    for name, shape in shapes.items():
        index = torch.arange(prod(shape)).reshape(shape)
        have, want = (
            {device: set(shard_at(index, at, device).flatten().tolist()) for device in at.mesh.ids}
            for at in (source[name], target[name])
        )
        for host in lacked:
            inside = [device for device, of in number.items() if of == host]
            missing = set[int]().union(*(want.get(device, ()) for device in inside))
            missing = missing.difference(*(have.get(device, ()) for device in inside))
            lacked[host] += len(missing) * getattr(torch, source[name].dtype).itemsize
    return lacked


@pytest.mark.parametrize(
    "seeds", [range(400), pytest.param(range(400, 1500), marks=pytest.mark.exhaustive)], ids=len
)
def test_nothing_comes_twice_in_random_state_dicts(seeds):
    """To a device, nor to a host: counted by sets of elements."""
    stages = [0, 0, 0]
    for seed in seeds:
        whole, source, target = random_case(seed, ids=8)
        plan = plan_reshard(source, target)
        shapes = {name: tensor.shape for name, tensor in whole.items()}
        alone = {device: device for device in plan.devices}
        assert plan.received == lacking(shapes, source, target, alone), seed
        if plan.hosts is None:
            continue
        least = sum(lacking(shapes, source, target, plan.hosts.number).values())
        crossing = plan.bytes_between_hosts or 0
        assert crossing >= least
        if len(plan.stages) == 2:
            assert crossing == least, seed
        stages[len(plan.stages)] += 1
    assert stages[1] > len(seeds) / 30
    assert stages[2] > len(seeds) / 30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_from_a_trainer_to_replicas_on_other_hosts(dtype):
    """Four-way tensor parallelism in pairs on two hosts: each of these lacks all, once."""
    trainer, serving = cluster(range(8), (2, 4)), cluster([9, 8, 12, 10, 11, 15, 14, 13], (2, 2, 2))
    source = {f"w{i}": Layout(trainer, "[S01,R]", (64, 48), "bfloat16") for i in range(2)}
    target = {f"w{i}": Layout(serving, "[R,S1]", (64, 48), dtype) for i in range(2)}
    plan = plan_reshard(source, target)
    assert len(plan.stages) == 2
    wire = min(2, torch.empty(0, dtype=getattr(torch, dtype)).itemsize)
    assert plan.bytes_between_hosts == 2 * 64 * 48 * wire * 2
    across, inside = plan.stages
    # All send as much, and all receive as much from the network.
    for end in (0, 1):
        moved: Counter[int] = Counter()
        for pair, num_bytes in across.traffic.items():
            moved[pair[end]] += num_bytes
        assert set(moved.values()) == {2 * 64 * 48 * wire * 2 // 8}
    assert {sender for sender, _ in inside.traffic} == set(serving.ids)
    whole = {n: torch.randn(64, 48).bfloat16() * 1e4 for n in source}
    state = {n: DTensor(w, trainer, "[S01,R]") for n, w in whole.items()}
    wanted = {n: w.to(getattr(torch, dtype)) for n, w in whole.items()}
    for max_bytes in (None, 2048):
        got = plan_reshard(source, target, max_bytes=max_bytes).run(state)
        assert wrong_shards(wanted, target, got, serving.ids) == []


def test_a_replica_of_the_same_host_sends():
    mesh = cluster(range(8), (2, 4))
    source = {"w": Layout(mesh, "[S1,R]", (64, 48), "float32")}
    plan = plan_reshard(source, (mesh, {"w": "[R,S1]"}))
    assert plan.bytes_between_hosts == 0
    assert len(plan.stages) == 1
    assert set(plan.sent.values()) == {64 * 48 // 4 * 3 // 4 * 4}


def test_few_bytes_go_at_once():
    """Passing on costs the latency of its messages, which few bytes do not save."""
    one, serving = DeviceMesh([0], (1,)), cluster(range(8, 16), (2, 4))
    for rows, stages in ((8, 1), (1 << 20, 2)):
        source = {"w": Layout(one, "[R]", (rows,), "float32")}
        plan = plan_reshard(source, (serving, {}))
        assert len(plan.stages) == stages
        assert plan.cost_seconds > 0
        assert ("each byte once to a host" in str(plan)) == (stages == 2)
        assert plan.as_dict()["bytes_between_hosts"] == rows * 4 * 2 * (1 if stages == 2 else 4)


def test_which_devices_share_a_host():
    a = cluster(range(4), (2, 2))
    # Joined by another mesh: 1 and 2 are neighbours there.
    b = DeviceMesh([1, 2], (2,), None, *zip(NVLINK, strict=True))
    found = hosts_of([a])
    assert found is not None
    assert found.number == {0: 0, 1: 0, 2: 1, 3: 1}
    assert hosts_of([a, b]) is None  # one host: all are joined by fast links
    assert hosts_of([DeviceMesh(range(4), (2, 2))]) is None
    uniform = DeviceMesh(range(4), (2, 2), None, (1e-6, 1e-6), (1e-10, 1e-10))
    assert hosts_of([uniform]) is None
    bus = DeviceMesh(range(4), (2, 2), None, (1e-6, 1e-6), (1e-10, 1e-12), link_model="shared-bus")
    assert hosts_of([bus]) is None
    # An axis of one device joins nothing.
    single = DeviceMesh(range(4), (1, 4), None, *zip(NETWORK, NVLINK, strict=True))
    assert hosts_of([single]) is None

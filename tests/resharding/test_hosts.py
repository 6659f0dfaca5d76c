"""Plans on devices of several hosts: no byte goes to a host twice."""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, ShardingSpec, plan_reshard
from shardspec.comm.cluster import Cluster
from shardspec.comm.curves import Link
from shardspec.resharding.stages import PlanStage, in_stages, near_and_far
from tests.resharding.states import random_case, random_spec, shard_at, wrong_shards

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
    "seeds", [range(120), pytest.param(range(120, 1500), marks=pytest.mark.exhaustive)], ids=len
)
def test_nothing_comes_twice_in_random_state_dicts(seeds):
    """To a device, nor to a host: counted by sets of elements."""
    stages = [0, 0, 0, 0]
    for seed in seeds:
        whole, source, target = random_case(seed, ids=8)
        plan = plan_reshard(source, target)
        shapes = {name: tensor.shape for name, tensor in whole.items()}
        alone = {device: device for device in plan.copies.devices}
        assert plan.received == lacking(shapes, source, target, alone), seed
        if plan.bytes_between_hosts is None:
            continue
        number = {device: plan.copies.cluster.host(device) for device in plan.copies.devices}
        least = sum(lacking(shapes, source, target, number).values())
        assert plan.bytes_between_hosts >= least
        if len(plan.copies.stages) > 1:
            assert plan.bytes_between_hosts == least, seed
        stages[len(plan.copies.stages)] += 1
    assert min(stages[1:]) > len(seeds) / 100


def seconds(stages, cluster) -> float:
    """Return the time of stages: of the device or host's port that is busiest in each."""
    total = 0.0
    for traffic in stages:
        busy: Counter[tuple[str, str, int]] = Counter()
        for (sender, receiver), num_bytes in traffic.items():
            far = cluster.crosses(sender, receiver)
            latency, per_byte = FAR if far else NEAR
            for side, device in (("out", sender), ("in", receiver)):
                busy[side, "device", device] += latency + per_byte * num_bytes
                if far and cluster.between.port == "node":
                    busy[side, "host", device // cluster.per_node] += per_byte * num_bytes
        total += max(busy.values(), default=0.0)
    return total


def least_out(classes: Mapping[tuple[frozenset[int], frozenset[int]], int]) -> float:
    """Return the bytes that the busiest host sends at least, by linear programming.

    What some hosts have and others lack is sent once for each that lacks it, the first time by one
    that has it.
    """
    from scipy.optimize import linprog

    hosts = sorted({host for key in classes for side in key for host in side})
    pairs = [(key, host) for key in classes for host in sorted(key[0] | key[1])]
    scale = sum(classes.values())
    loads = [[host == h for _, h in pairs] + [-1] for host in hosts]
    first = [[-(key == k and h in key[0]) for k, h in pairs] + [0] for key in classes]
    every = [[key == k for k, _ in pairs] + [0] for key in classes]
    solved = linprog(
        [0.0] * len(pairs) + [1.0],
        A_ub=np.array([*loads, *first], float),
        b_ub=[*[0.0] * len(hosts), *(-n / scale for n in classes.values())],
        A_eq=np.array(every, float),
        b_eq=[n * len(key[1]) / scale for key, n in classes.items()],
    )
    assert solved.success
    return float(solved.fun) * scale


SIZES = ((1,), (2,), (4,), (8,), (2, 2), (2, 4), (3, 2), (2, 2, 2))
NEAR, FAR = (4e-6, 1e-11), (4e-5, 8e-10)
SHAPES = {(192, 96): (4096,), (64, 261): (4096,), (4096,): (1 << 14,)}
"""Shapes that are cut, and dims that are not, which make tensors of 256 to 288 MiB of float32."""


def random_pair(seed: int) -> tuple[Cluster, Layout, Layout]:
    """Return layouts of one small tensor on two meshes over 2 to 6 hosts of 1 to 4 devices.

    Devices have a port each, or all of a host share one.
    """
    random_ = random.Random(seed)
    hosts, per_node = random_.randrange(2, 7), random_.randrange(1, 5)
    between = Link(*FAR, "far", port=random_.choice(["device", "node"]))
    cluster = Cluster(Link(*NEAR, "near"), between, per_node)
    shape = random_.choice(list(SHAPES))
    layouts = []
    for _ in range(2):
        chosen = random_.choice([s for s in SIZES if prod(s) <= hosts * per_node])
        ids = random_.sample(range(hosts * per_node), prod(chosen))
        ids = sorted(ids) if random_.random() < 0.5 else ids
        mesh = DeviceMesh(ids, chosen)
        layouts.append(Layout(mesh, random_spec(random_, mesh, shape), shape, "float32"))
    return cluster, layouts[0], layouts[1]


def enlarged(layout: Layout) -> Layout:
    """Return the layout of a tensor of at least 256 MiB that is cut at the same rows."""
    tail = SHAPES[layout.global_shape]
    dims = dict(enumerate(layout.spec.dim_specs))
    spec = ShardingSpec(layout.spec.dims + len(tail), dims)
    return Layout(layout.mesh, spec, (*layout.global_shape, *tail), layout.dtype)


def lacked_by_host(
    cluster: Cluster, source: Layout, target: Layout
) -> Counter[tuple[frozenset[int], frozenset[int]]]:
    """Return how many elements some hosts have and others lack, by these hosts."""
    index = torch.arange(prod(source.global_shape)).reshape(source.global_shape)
    have, want = (defaultdict[int, set[int]](set) for _ in range(2))
    for at, held in ((source, have), (target, want)):
        for device in at.mesh.ids:
            held[cluster.host(device)] |= set(shard_at(index, at, device).flatten().tolist())
    lackers = defaultdict[int, set[int]](set)
    for host, elements in want.items():
        for element in elements - have[host]:
            lackers[element].add(host)
    return Counter(
        (frozenset(host for host in have if element in have[host]), frozenset(hosts))
        for element, hosts in lackers.items()
    )


def at_hosts(stages, cluster) -> tuple[Counter[int], Counter[int]]:
    """Return the bytes that enter every host, and that leave it."""
    entered, left = Counter[int](), Counter[int]()
    for (sender, receiver), num_bytes in traffic_of(stages).items():
        if cluster.crosses(sender, receiver):
            entered[cluster.host(receiver)] += num_bytes
            left[cluster.host(sender)] += num_bytes
    return entered, left


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 1000), marks=pytest.mark.exhaustive)], ids=len
)
def test_hosts_get_what_they_lack_once_and_share_the_sending(seeds):
    """Against sets of elements, a linear program, and the prices of the plan without routing.

    The bytes into and out of the busiest host are least, but where prices are against it: passing
    on takes one stage more, and a host whose devices have a port each may receive twice what it
    would have to copy inside.
    """
    compared = reached = several = 0
    for seed in seeds:
        cluster, small, small_target = random_pair(seed)
        source, target = enlarged(small), enlarged(small_target)
        assert prod(source.global_shape) * 4 >= 256 << 20
        plan = plan_reshard({"w": source}, {"w": target}, links=cluster)
        price = seconds([stage.traffic for stage in plan.copies.stages], cluster)
        lacking = plan_copies({"w": source}, {"w": target})
        assert price <= seconds([PlanStage(lacking).traffic], cluster) * (1 + 1e-9), seed
        tail = 4 * prod(SHAPES[small.global_shape])
        classes = {key: n * tail for key, n in lacked_by_host(cluster, small, small_target).items()}
        if not classes:
            assert plan.bytes_between_hosts in (None, 0), seed
            continue
        lacked = Counter[int]()
        for (_, hosts), num_bytes in classes.items():
            lacked.update(dict.fromkeys(hosts, num_bytes))
        rows = tail * prod(small.global_shape[1:]) * len(plan.copies.devices)
        least = 1.02 * least_out(classes) + rows
        ways = [
            in_stages(*near_and_far(lacking, cluster), cluster, lambda _: 4, passed_on, True)
            for passed_on in (True, False)
        ]
        for stages in ways:
            assert at_hosts(stages, cluster)[0] == lacked, seed
        assert max(at_hosts(ways[0], cluster)[1].values()) <= least, seed
        entered, left = at_hosts(plan.copies.stages, cluster)
        busiest = max(*entered.values(), *left.values())
        compared += 1
        if entered == lacked and busiest <= max(least, *lacked.values()):
            reached += 1
        else:
            once = seconds([stage.traffic for stage in ways[0]], cluster)
            assert price <= once * (1 + 1e-9), seed
        several += len(plan.copies.stages) > 1
    assert reached >= 0.85 * compared
    assert several > len(seeds) / 10


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.exhaustive)], ids=len
)
def test_routed_plans_fill_every_device(seeds):
    """In one process, with links whose messages take no time, so that small tensors are routed."""
    several = 0
    for seed in seeds:
        cluster, source, target = random_pair(seed)
        assert cluster.between is not None
        inside, between = (
            replace(link, latency_s=0.0) for link in (cluster.inside, cluster.between)
        )
        free = replace(cluster, inside=inside, between=between)
        plan = plan_reshard({"w": source}, {"w": target}, links=free)
        whole = {"w": torch.arange(prod(source.global_shape)).reshape(source.global_shape).float()}
        got = plan.run({"w": DTensor(whole["w"], source.mesh, source.spec)})
        assert wrong_shards(whole, {"w": target}, got, target.mesh.ids) == [], seed
        several += len(plan.copies.stages) > 1
    assert several > len(seeds) / 10


def traffic_of(stages) -> dict[tuple[int, int], int]:
    return sum((Counter(stage.traffic) for stage in stages), Counter())


def plan_copies(source, target):
    """Return the copies between devices of a plan on one host, where each comes from any holder."""
    plan = plan_reshard(source, target, links=Cluster(Link(0.0, 1e-9, "one")))
    return plan.copies.stages[0].groups[0]


def test_what_several_hosts_need_leaves_the_source_once():
    cluster = Cluster(Link(4e-6, 1e-11, "near"), Link(4e-5, 8e-10, "far"), 4)
    one, size = DeviceMesh([0]), (1 << 14, 1 << 14)
    source = {"w": Layout(one, "[R,R]", size, "float32")}
    total, alone = 4 << 28, 0.0
    for shape in ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (4, 4)):
        mesh = DeviceMesh(range(4, 4 + prod(shape)), shape)
        plan = plan_reshard(source, (mesh, {}), links=cluster)
        assert plan.sent[0] == total
        assert plan.bytes_between_hosts == total * shape[0]
        if shape == (1, 4):
            alone = plan.cost_seconds
        if shape[0] > 1:
            assert plan.cost_seconds <= 1.25 * alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_from_a_trainer_to_replicas_on_other_hosts(dtype):
    """Four-way tensor parallelism in pairs on two hosts: each of these lacks all, once."""
    trainer, serving = cluster(range(8), (2, 4)), cluster([9, 8, 12, 10, 11, 15, 14, 13], (2, 2, 2))
    source = {f"w{i}": Layout(trainer, "[S01,R]", (64, 48), "bfloat16") for i in range(2)}
    target = {f"w{i}": Layout(serving, "[R,S1]", (64, 48), dtype) for i in range(2)}
    plan = plan_reshard(source, target)
    assert len(plan.copies.stages) == 2
    wire = min(2, torch.empty(0, dtype=getattr(torch, dtype)).itemsize)
    assert plan.bytes_between_hosts == 2 * 64 * 48 * wire * 2
    across, inside = plan.copies.stages
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
    assert len(plan.copies.stages) == 1
    assert set(plan.sent.values()) == {64 * 48 // 4 * 3 // 4 * 4}


def test_few_bytes_go_at_once():
    """Passing on costs the latency of its messages, which few bytes do not save."""
    one, serving = DeviceMesh([0], (1,)), cluster(range(8, 16), (2, 4))
    for rows, stages in ((8, 1), (1 << 22, 2)):
        source = {"w": Layout(one, "[R]", (rows,), "float32")}
        plan = plan_reshard(source, (serving, {}))
        assert min(len(plan.copies.stages), 2) == stages
        assert plan.cost_seconds > 0
        assert ("each byte once to a host" in str(plan)) == (stages == 2)
        assert plan.as_dict()["bytes_between_hosts"] == rows * 4 * 2 * (1 if stages == 2 else 4)


def test_many_tensors_are_planned_as_few_are():
    """Of thousands of copies, some are passed on, and some go at once as nothing can save time."""
    cluster = Cluster(Link(*NEAR, "near"), Link(*FAR, "far"), 4)
    shapes = {f"w{i}": ((1 << 20) + 4096 * i,) for i in range(300)}
    total = sum(4 * size for (size,) in shapes.values())
    meshes = DeviceMesh(range(4)), DeviceMesh(range(4, 12), (2, 4)), DeviceMesh(range(12, 16))
    for source, target, target_spec, stages, least in (
        (meshes[0], meshes[1], "[R]", 2, 0.0),
        (meshes[1], meshes[2], "[S0]", 1, total / 4 * FAR[1]),
    ):
        spec = "[S0]" if source.ndim == 1 else "[S01]"
        layouts = {name: Layout(source, spec, shape, "float32") for name, shape in shapes.items()}
        plan = plan_reshard(layouts, (target, dict.fromkeys(shapes, target_spec)), links=cluster)
        lacking = plan_copies(layouts, (target, dict.fromkeys(shapes, target_spec)))
        assert len(lacking) > 2000
        hosts = {cluster.host(device) for device in target.ids}
        assert plan.bytes_between_hosts == total * len(hosts)
        assert min(len(plan.copies.stages), 2) == stages
        direct = seconds([PlanStage(lacking).traffic], cluster)
        assert least <= plan.cost_seconds <= direct * (0.6 if stages > 1 else 1.001) + 1e-4

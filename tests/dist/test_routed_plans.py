"""Plans that pass bytes on between hosts and inside them, in jobs whose hosts are simulated."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import torch

from shardspec import DeviceMesh, Layout, ReshardPlan, ShardingSpec, plan_reshard
from shardspec.comm.cluster import Cluster
from shardspec.comm.curves import Link
from tests.dist.processes import communicator_by, run_ranks, substitute
from tests.resharding.states import random_spec, shard_at, wrong_shards

pytestmark = pytest.mark.dist

SHAPES = ((1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (1, 4))


def _pair(seed: int, world: int) -> tuple[Layout, Layout, Cluster]:
    """Return layouts on two random meshes, on hosts of one to three, whose messages are free."""
    random_ = random.Random(seed)
    near, far = Link(0.0, 1e-11, "near"), Link(0.0, 8e-10, "far")
    if random_.random() < 0.5:
        far = replace(far, port="node")
    cluster = Cluster(near, far, random_.randrange(1, world // 2 + 1))
    shape = random_.choice([(48, 10), (130,), (7, 6, 8)])
    layouts = []
    for whole in (False, random_.random() < 0.5):
        of_mesh = random_.choice([each for each in SHAPES if prod(each) <= world])
        mesh = DeviceMesh(random_.sample(range(world), prod(of_mesh)), of_mesh)
        spec = ShardingSpec(len(shape)) if whole else random_spec(random_, mesh, shape)
        layouts.append(Layout(mesh, spec, shape, random_.choice(["float32", "bfloat16"])))
    return layouts[0], layouts[1], cluster


def _plan(source: Layout, target: Layout, cluster: Cluster) -> ReshardPlan:
    return plan_reshard({"w": source}, {"w": target}, links=cluster, max_bytes=4096)


def _run(rank: int, world: int, seeds: Sequence[int], reads_peers: bool) -> list[str]:
    wrong = []
    for seed in seeds:
        source, target, cluster = _pair(seed, world)
        plan = _plan(source, target, cluster)
        devices = DeviceMesh(plan.copies.devices, (len(plan.copies.devices),))
        substitute(communicator_by(devices, reads_peers=reads_peers))
        values = torch.arange(prod(source.global_shape)).reshape(source.global_shape) % 251
        whole = values.to(getattr(torch, source.dtype))
        state = {"w": shard_at(whole, source, rank)} if rank in source.mesh else {}
        got = plan.run(state)
        wanted = {"w": whole.to(getattr(torch, target.dtype))}
        wrong += [f"{seed}: {text}" for text in wrong_shards(wanted, {"w": target}, got, [rank])]
    return wrong


@pytest.mark.parametrize("reads_peers", [False, True], ids=["messages", "peer memory"])
@pytest.mark.parametrize(("world", "most_stages"), [(4, 2), (6, 3)])
@pytest.mark.parametrize(
    "pairs", [120, pytest.param(1200, marks=pytest.mark.exhaustive)], ids=["sample", "all"]
)
def test_routed_plans_fill_every_rank(tmp_path, world, most_stages, reads_peers, pairs):
    stages: dict[int, list[int]] = {}
    for seed in range(pairs):
        stages.setdefault(len(_plan(*_pair(seed, world)).copies.stages), []).append(seed)
    assert max(stages) == most_stages  # between hosts, and then inside
    assert all(len(seeds) > 3 for seeds in stages.values())
    seeds = [*stages.pop(1)[:5], *(seed for some in stages.values() for seed in some)]
    assert run_ranks(world, tmp_path, _run, world, seeds, reads_peers) == [[]] * world

"""Meshes that share devices: their links agree about every pair, or are refused."""

from itertools import combinations, permutations

import pytest

from shardspec import DeviceMesh, Layout, LayoutConverter, plan_reshard
from shardspec.comm.cluster import Cluster, check_links
from shardspec.comm.cost import models_on
from shardspec.comm.curves import Link
from shardspec.comm.presets import preset_cluster
from shardspec.errors import MeshError

H100, A100 = DeviceMesh(range(8), links="h100-nvswitch"), "a100-nvswitch"
NETWORK, NVLINK = "ib-ndr-per-gpu", "h100-nvswitch"
TWO_HOSTS = DeviceMesh(range(16), links=NVLINK)
SLOW_NETWORK = Cluster(Link(1e-6, 1e-11), Link(1e-5, 1e-9), per_node=8)


@pytest.mark.parametrize(
    "other",
    [
        DeviceMesh(range(4, 12), links=A100),
        DeviceMesh(range(8), (2, 4), links=A100),
        DeviceMesh(range(8), (2, 4), links=(A100, A100)),
        DeviceMesh(range(6, 10), links=SLOW_NETWORK),
        DeviceMesh(range(8), (2, 4), mesh_alpha=[1e-6, 1e-6], mesh_beta=[1e-9, 1e-9]),
    ],
    ids=str,
)
def test_two_meshes_with_other_links_for_a_pair_are_refused(other):
    with pytest.raises(MeshError, match=r"devices \d and \d .*links=") as refused:
        models_on([H100, other])
    assert "\n" not in str(refused.value)
    with pytest.raises(MeshError):
        models_on([other, H100])
    # One answer for both meshes ends the contradiction.
    assert len({model.cluster for model in models_on([H100, other], NVLINK).values()}) == 1


def test_conversions_and_plans_refuse_them():
    other = DeviceMesh(range(4, 12), links=A100)
    source, target = (Layout(mesh, "[S0]", (64,), "float32") for mesh in (H100, other))
    for attempt in (
        lambda: LayoutConverter().plan(source, target),
        lambda: plan_reshard({"w": source}, {"w": target}),
    ):
        with pytest.raises(MeshError, match="devices 4 and 5"):
            attempt()
    assert plan_reshard({"w": source}, {"w": target}, links=NVLINK).sent


def test_links_between_hosts_count_where_two_meshes_share_a_pair_of_hosts():
    with pytest.raises(MeshError, match="devices 4 and 8"):
        models_on(
            [TWO_HOSTS, DeviceMesh(range(4, 12), links=preset_cluster(NVLINK, "ib-hdr-per-gpu"))]
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (H100, DeviceMesh(range(8, 16), links=A100)),
        (H100, DeviceMesh(range(4, 12))),
        (H100, DeviceMesh([7, 6, 5, 4, 3, 2, 1, 0], (4, 2), links=NVLINK)),
        (
            DeviceMesh(range(16), links=NVLINK),
            DeviceMesh(range(16), (2, 8), links=(NETWORK, NVLINK)),
        ),
        (DeviceMesh(range(16), links=NVLINK), DeviceMesh(range(16), (4, 4), links=NVLINK)),
    ],
    ids=str,
)
def test_meshes_that_agree_or_share_no_pair_are_priced(one, other):
    for meshes in ([one, other], [other, one]):
        clusters = {model.cluster for model in models_on(meshes).values()}
        assert len(clusters) == 1


def test_every_pair_is_compared():
    """All clusters of up to four devices with two links, against a comparison pair by pair."""
    fast, slow = Link(0.0, 1e-12), Link(0.0, 1e-11)
    splits = [(), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 2), (1, 3))]
    clusters = [
        Cluster(*links, hosts=hosts)
        for hosts in splits
        for links in permutations((fast, slow, Link(0.0, 1e-10)), 2)
    ]
    groups = [ids for size in (1, 2, 3, 4) for ids in combinations(range(4), size)]
    for one, other in combinations(clusters, 2):
        if one.hosts != other.hosts:  # refused elsewhere
            continue
        for ids, other_ids in combinations(groups, 2):
            shared = set(ids) & set(other_ids)
            differ = any(one.link(a, b) != other.link(a, b) for a, b in combinations(shared, 2))
            if differ:
                with pytest.raises(MeshError):
                    check_links([(one, ids), (other, other_ids)])
            else:
                check_links([(one, ids), (other, other_ids)])

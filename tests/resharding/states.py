"""Random state dicts on pairs of meshes, and what every device must hold of them."""

import random
from collections.abc import Mapping
from math import prod

import numpy as np
import torch

from shardspec import DeviceMesh, Layout, ShardingSpec
from shardspec.comm.cluster import Cluster
from shardspec.comm.curves import Link
from shardspec.layout.spec import DimSpec, Part
from tests.layout.test_parts import indices

SHAPES = ((1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (2, 3), (2, 1, 3))
INSIDE, BETWEEN = Link(1e-10, 1e-11, "inside"), Link(1e-9, 1e-8, "between")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def random_cluster(random_: random.Random) -> Cluster | None:
    """Return hosts of one to three devices by ids, or in half of the cases nothing."""
    per_node = random_.choice([None, None, None, 1, 2, 3])
    return None if per_node is None else Cluster(INSIDE, BETWEEN, per_node)


def random_mesh(random_: random.Random, ids: int, links: Cluster | None = None) -> DeviceMesh:
    shape = random_.choice([shape for shape in SHAPES if prod(shape) <= ids])
    return DeviceMesh(random_.sample(range(ids), prod(shape)), shape, links=links)


def random_spec(random_: random.Random, mesh: DeviceMesh, shape: tuple[int, ...]) -> ShardingSpec:
    """Return a spec, with parts and blocks in some of its dims."""
    dims = len(shape)
    axes = random_.sample(range(mesh.ndim), mesh.ndim)
    cuts: dict[int, list[int | str]] = {}
    for axis in axes:
        dim = random_.randrange(-1, dims)
        if dim >= 0:
            cuts.setdefault(dim, []).append(axis)
    described: dict[int, DimSpec] = {}
    for dim, by in cuts.items():
        parts: tuple[Part, ...] = ()
        devices = prod(mesh.shape[int(axis)] for axis in by)
        if shape[dim] > 2 and random_.random() < 0.3:
            at = random_.randrange(1, shape[dim])
            shares = random_.choice([0, 1, devices])
            parts = (Part(at), Part(shape[dim] - at, shares))
        described[dim] = DimSpec(tuple(by), parts, random_.choice([1, 1, 1, 2, 3]))
    return ShardingSpec(dims, described)


def random_case(
    seed: int, ids: int
) -> tuple[dict[str, torch.Tensor], dict[str, Layout], dict[str, Layout]]:
    """Return global tensors, and their layouts before and after."""
    random_ = random.Random(seed)
    cluster = random_cluster(random_)
    a, b = random_mesh(random_, ids, cluster), random_mesh(random_, ids, cluster)
    whole, source, target = {}, {}, {}
    for number in range(random_.randrange(1, 6)):
        name, dims = f"t{number}", random_.randrange(4)
        shape = tuple(random_.choice([0, 1, 2, 3, 5, 7, 8]) for _ in range(dims))
        dtype = random_.choice(DTYPES)
        values = torch.arange(prod(shape)).reshape(shape) * 37 % 101 + number
        whole[name] = values % 2 == 0 if dtype == torch.bool else values.to(dtype)
        source[name] = Layout(a, random_spec(random_, a, shape), shape, dtype)
        target[name] = Layout(b, random_spec(random_, b, shape), shape, dtype)
    return whole, source, target


def shard_at(whole: torch.Tensor, layout: Layout, device: int) -> torch.Tensor:
    """Return what a device must hold, by index arithmetic alone."""
    for dim, size in enumerate(whole.shape):
        cut, at = layout.spec.dim_specs[dim], layout.mesh.coordinates(device)
        held = indices(size, cut, layout.mesh.shape, at)
        whole = whole.index_select(dim, torch.tensor(held, dtype=torch.long))
    return whole


def wrong_shards(
    whole: Mapping[str, torch.Tensor], target: Mapping[str, Layout], got, devices
) -> list[str]:
    wrong = []
    for name, tensor in whole.items():
        for device in devices:
            if device not in target[name].mesh:
                continue
            wanted = shard_at(tensor, target[name], device)
            shard = got[name].shards[device]
            if shard.dtype != wanted.dtype or not torch.equal(shard, wanted):
                wrong.append(f"{name} on {device}: {shard}, not {wanted}")
    return wrong


def least_busiest(totals: Mapping[tuple[int, ...], int]) -> float:
    """Return the load of the busiest holder under the best division, by linear programming."""
    # Imported here: the ranks of jobs import this module too, and scipy takes them half a second.
    from scipy.optimize import linprog

    pairs = [(number, one) for number, holders in enumerate(totals) for one in holders]
    given = np.array([[place == number for place, _ in pairs] for number in range(len(totals))])
    ones = sorted({one for _, one in pairs})
    loads = np.array([[holder == one for _, holder in pairs] + [-1] for one in ones], dtype=float)
    given = np.hstack([given, np.zeros((len(totals), 1))])
    scale = sum(totals.values())
    solved = linprog(
        [0.0] * len(pairs) + [1.0],
        A_ub=loads,
        b_ub=np.zeros(len(ones)),
        A_eq=given,
        b_eq=np.array(list(totals.values())) / scale,
    )
    assert solved.success
    return float(solved.fun) * scale

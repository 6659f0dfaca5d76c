"""The busiest sender and receiver, against linear programs over sets of elements.

Plans count the bytes of what replicas share up to a row of a tensor.
"""

import random
from collections import Counter
from collections.abc import Mapping
from math import prod

import numpy as np
import pytest

from shardspec import DeviceMesh, Layout, plan_reshard
from tests.layout.test_parts import indices
from tests.resharding.states import least_busiest, random_spec

SHAPES = ((4,), (8,), (12,), (2, 2), (2, 3), (3, 4), (4, 2), (2, 2, 3))
NETWORK, NVLINK = (1e-5, 2e-11), (1e-6, 2e-12)


def holders_of(layout: Layout) -> np.ndarray:
    """Return by element which devices hold it, as the bits of a number."""
    found = np.zeros(layout.global_shape, np.int64)
    for device in layout.mesh.ids:
        at = layout.mesh.coordinates(device)
        cuts = zip(layout.global_shape, layout.spec.dim_specs, strict=True)
        held = (indices(size, cut, layout.mesh.shape, at) for size, cut in cuts)
        found[np.ix_(*(np.array(some, dtype=int) for some in held))] |= 1 << device
    return found


def bits(number: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(number.bit_length()) if number >> bit & 1)


def lacking(
    source: Mapping[str, Layout], target: Mapping[str, Layout]
) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return how many bytes which devices hold that which devices lack."""
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for name, layout in source.items():
        have, want = holders_of(layout), holders_of(target[name])
        kinds, counts = np.unique(have << 16 | (want & ~have), return_counts=True)
        width = {"float32": 4, "bfloat16": 2}[layout.dtype]
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            found[bits(kind >> 16), bits(kind & 0xFFFF)] += count * width
    return found


def random_mesh(random_: random.Random, ids: int, tiers: bool) -> DeviceMesh:
    shape = random_.choice([shape for shape in SHAPES if prod(shape) <= ids])
    links = [NETWORK, *[NVLINK] * (len(shape) - 1)] if tiers else [NETWORK] * len(shape)
    chosen = random_.sample(range(ids), prod(shape))
    if tiers:  # mostly the same devices on a host
        first = random_.randrange(ids // prod(shape)) * prod(shape)
        chosen = list(range(first, first + prod(shape)))
    return DeviceMesh(chosen, shape, None, *zip(*links, strict=True))


def random_layouts(seed: int, *, tiers: bool) -> tuple[dict[str, Layout], dict[str, Layout]]:
    random_ = random.Random(seed)
    ids = random_.choice([8, 12, 16])
    meshes = [random_mesh(random_, ids, tiers) for _ in range(3)]
    source, target = {}, {}
    for number in range(random_.randrange(1, 7)):
        a, b = random_.choice([meshes[0], meshes[0], meshes[2]]), random_.choice(meshes[1:])
        sides = [
            random_.choice([192, 256, 261, 400, 514]) for _ in range(random_.choice([1, 2, 2]))
        ]
        shape = tuple(sides) if len(sides) > 1 else (4 * sides[0],)
        dtype = random_.choice(["float32", "bfloat16"])
        source[f"t{number}"] = Layout(a, random_spec(random_, a, shape), shape, dtype)
        target[f"t{number}"] = Layout(b, random_spec(random_, b, shape), shape, dtype)
    return source, target


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 500), marks=pytest.mark.exhaustive)], ids=len
)
def test_on_uniform_links(seeds):
    for seed in seeds:
        source, target = random_layouts(seed, tiers=False)
        plan = plan_reshard(source, target)
        totals: Counter[tuple[int, ...]] = Counter()
        received: Counter[int] = Counter()
        for (holders, receivers), num_bytes in lacking(source, target).items():
            totals[holders] += num_bytes * len(receivers)
            received.update(dict.fromkeys(receivers, num_bytes))
        assert {one: n for one, n in plan.received.items() if n} == +received, seed
        if sum(totals.values()):
            assert max(plan.sent.values()) <= 1.01 * least_busiest(+totals), seed

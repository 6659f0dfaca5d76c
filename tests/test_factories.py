"""Tensors that each device makes its own box of."""

import tracemalloc
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import shardspec
from shardspec import (
    DeviceMesh,
    DTensor,
    ShardingSpec,
    arange,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from shardspec.errors import AxisError, DTypeError, LayoutError
from shardspec.layout.graph import explore, spec_of
from shardspec.tensor.factories import BLOCK, box_of, normal, uniform
from tests.conversions import index_of

MESH = DeviceMesh([3, 0, 5, 2, 1, 4], (2, 3))
SPECS = sorted((spec_of(state) for state in explore(2, ShardingSpec(2)).nodes), key=str)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def is_cut_of(tensor: DTensor, whole: torch.Tensor) -> bool:
    return all(
        torch.equal(shard, whole[index_of(tensor.layout, device)])
        for device, shard in tensor.shards.items()
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_device_holds_its_box(spec):
    where: dict[str, Any] = {"device_mesh": MESH, "sharding_spec": spec}
    assert len(SPECS) == 11
    assert is_cut_of(zeros(7, 5, **where), torch.zeros(7, 5))
    assert is_cut_of(ones((7, 5), dtype=torch.int8, **where), torch.ones(7, 5, dtype=torch.int8))
    assert is_cut_of(full((7, 5), 2.5, **where), torch.full((7, 5), 2.5))
    assert is_cut_of(full([7, 5], True, **where), torch.full((7, 5), True))
    made = empty(7, 5, dtype=torch.bfloat16, requires_grad=True, **where)
    assert (made.shape, made.dtype, made.requires_grad) == ((7, 5), torch.bfloat16, True)
    assert made.sharding_spec == spec
    assert {shard.shape for shard in made.shards.values()} == {
        made.layout.local_shape(device) for device in MESH.ids
    }


@pytest.mark.parametrize("spec", ["[R]", "[S0]", "[S1]", "[S01]", "[S10]"])
def test_arange_is_a_cut_of_torchs(spec):
    where: dict[str, Any] = {"device_mesh": MESH, "sharding_spec": spec}
    arguments: tuple[float, ...]
    for arguments in [(7,), (2, 9), (9, 2, -2), (0, 1, 3), (5, 5), (-3, 4, 2)]:
        assert is_cut_of(arange(*arguments, **where), torch.arange(*arguments)), arguments
    for arguments in [(7.0,), (0, 1, 0.1), (1, -1, -0.3), (0.5, 7)]:
        whole = torch.arange(*arguments, dtype=torch.float64)
        made = arange(*arguments, dtype=torch.float64, **where)
        torch.testing.assert_close(made.to_global(), whole, rtol=1e-15, atol=1e-15)
    assert arange(3.0, **where).dtype == torch.float32
    assert is_cut_of(arange(9, dtype=torch.int8, **where), torch.arange(9, dtype=torch.int8))


@pytest.mark.parametrize("make", [rand, randn])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_numbers_are_one_tensor_whatever_the_mesh(make, dtype):
    def seeded(*size, **where):
        return make(*size, dtype=dtype, generator=torch.Generator().manual_seed(5), **where)

    whole = seeded(7, 5, device_mesh=DeviceMesh([0], (1,))).to_local()
    assert len(set(whole.flatten().tolist())) > 25
    for spec in SPECS:
        assert is_cut_of(seeded(7, 5, device_mesh=MESH, sharding_spec=spec), whole)
    line = DeviceMesh(range(4), (4,))
    for text in ("[S0,R]", "[R,S0]"):
        assert is_cut_of(seeded(7, 5, device_mesh=line, sharding_spec=text), whole)
    assert is_cut_of(seeded((0, 5), device_mesh=line, sharding_spec="[S0,R]"), whole[:0])
    scalar = seeded(device_mesh=line, sharding_spec="[]")
    assert is_cut_of(scalar, whole[0, 0])
    # What comes next is another tensor, and torch.manual_seed begins anew.
    torch.manual_seed(8)
    first, second = (make(6, device_mesh=line, dtype=dtype) for _ in range(2))
    assert not torch.equal(first.to_global(), second.to_global())
    torch.manual_seed(8)
    assert is_cut_of(
        make(6, device_mesh=line, sharding_spec="[S0]", dtype=dtype), first.to_global()
    )


@pytest.mark.parametrize("shape", [(3, 5 * BLOCK, 40), (2, 300_000, 2), (700_001,), (9, 1, 70_000)])
def test_large_boxes_of_any_place(shape):
    """Cut between blocks and inside, rows longer and shorter than what is made at a time."""
    last = shape[-1]
    for box in product(*([(0, size), (size // 3, size // 2 + 1)] for size in shape)):
        total, checked = 0, 0
        for index, numbers in box_of(shape, box, 3, uniform(53)):
            total += numbers.size
            at = [
                lo + (place.start if isinstance(place, slice) and place.start else 0)
                for (lo, _), place in zip(box, index, strict=False)
            ]
            at += [lo for lo, _ in box[len(index) :]]
            place = int(np.ravel_multi_index(at, shape))
            words = np.random.Philox(key=3, counter=place // 4).random_raw(4)
            assert numbers.flat[0] == (int(words[place % 4]) >> 11) * 2.0**-53
            checked += 1
        assert total == int(np.prod([hi - lo for lo, hi in box]))
        assert checked > 0
        assert box[-1][1] <= last


def test_numbers_follow_their_distribution():
    torch.manual_seed(1)
    line = DeviceMesh(range(4), (4,))
    where: dict[str, Any] = {"device_mesh": line, "sharding_spec": "[S0]", "dtype": torch.float64}
    flat, bell = (make(200_000, **where).to_global() for make in (rand, randn))
    # Within five standard errors of mean and variance.
    assert abs(float(flat.mean()) - 1 / 2) < 5 / (12 * 200_000) ** 0.5
    assert abs(float(flat.var()) - 1 / 12) < 5 * (1 / 180 / 200_000) ** 0.5
    assert 0 <= float(flat.min()) < 1e-4
    assert 1 - 1e-4 < float(flat.max()) < 1
    assert abs(float(bell.mean())) < 5 / 200_000**0.5
    assert abs(float(bell.var()) - 1) < 5 * (2 / 200_000) ** 0.5
    assert abs(float((bell[::2] * bell[1::2]).mean())) < 5 / 100_000**0.5
    for dtype in DTYPES:
        tensor = rand(100_000, device_mesh=line, dtype=dtype)
        assert float(tensor.to_global().max()) < 1


def test_memory_is_that_of_the_box():
    """A narrow cut of columns of a tensor of 512 MiB."""
    shape, box = (4096, 16384), ((0, 4096), (512, 768))
    tracemalloc.start()
    result = torch.empty(4096, 256, dtype=torch.float64)
    for index, numbers in box_of(shape, box, 3, normal):
        result[index].copy_(torch.from_numpy(numbers))
        del numbers
        if index[0].stop >= 512:
            break
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20


def test_tensors_on_meta_have_shapes_and_no_data():
    where: dict[str, Any] = {"device_mesh": MESH, "sharding_spec": "[S0,S1]", "device": "meta"}
    for tensor in (
        empty(7, 5, **where),
        zeros(7, 5, **where),
        full((7, 5), 3.0, **where),
        rand(7, 5, **where),
        randn(7, 5, **where),
    ):
        assert {shard.device.type for shard in tensor.shards.values()} == {"meta"}
        assert tensor.to_local(5).shape == (4, 1)
    huge = randn(1 << 40, device_mesh=MESH, sharding_spec="[S01]", device="meta")
    assert huge.numel() == 1 << 40
    assert arange(9, device_mesh=MESH, sharding_spec="[S0]", device="meta").to_local(3).shape == (
        5,
    )


def test_what_does_not_fit():
    with pytest.raises(LayoutError, match=r"spec \[S0\] is for 1 dim"):
        zeros(2, 3, device_mesh=MESH, sharding_spec="[S0]")
    with pytest.raises(AxisError, match="axis 2 is out of range"):
        ones(2, device_mesh=MESH, sharding_spec="[S2]")
    with pytest.raises(LayoutError, match="one addend per device"):
        zeros(2, device_mesh=MESH, sharding_spec="[R|P0]")
    with pytest.raises(LayoutError, match="give a sequence of whole numbers"):
        empty(2.5, 3, device_mesh=MESH)  # type: ignore[arg-type]  # the test
    with pytest.raises(LayoutError, match="give a sequence of whole numbers from 0"):
        empty(-2, device_mesh=MESH)
    with pytest.raises(DTypeError, match=r"int64.*float64"):
        rand(3, device_mesh=MESH, dtype=torch.int64)
    for step in (0, -1):
        with pytest.raises(LayoutError, match="never ends"):
            arange(0, 3, step, device_mesh=MESH)


def test_factories_are_in_the_namespace():
    names = ["arange", "empty", "full", "ones", "rand", "randn", "zeros"]
    assert set(names) <= set(shardspec.__all__)

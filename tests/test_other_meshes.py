"""Tensors on their way to another mesh, all devices in one process."""

from itertools import product

import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, LayoutConverter
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.errors import LayoutError
from tests.conversions import (
    partial_specs,
    plain_specs,
    reduced,
    same_bits,
    shard_of,
    stack_of,
    strided,
)

MESHES = {
    "same devices, other shape": (DeviceMesh(range(6), (2, 3)), DeviceMesh(range(6), (3, 2))),
    "same devices, one axis": (DeviceMesh(range(6), (2, 3)), DeviceMesh(range(6), (6,))),
    "same devices, other order": (DeviceMesh(range(4), (2, 2)), DeviceMesh([3, 1, 0, 2], (2, 2))),
    "eight of another shape": (DeviceMesh(range(8), (2, 4)), DeviceMesh(range(8), (2, 2, 2))),
    "more": (DeviceMesh(range(4), (2, 2)), DeviceMesh(range(6), (2, 3))),
    "fewer": (DeviceMesh(range(6), (2, 3)), DeviceMesh([5, 2, 0], (3,))),
    "others": (DeviceMesh(range(4), (2, 2)), DeviceMesh([9, 8, 7, 6, 5, 4], (3, 2))),
    "some others": (DeviceMesh(range(4), (2, 2)), DeviceMesh([2, 3, 9], (3,))),
    "to one": (DeviceMesh(range(6), (2, 3)), DeviceMesh([7], (1,))),
    "from one": (DeviceMesh([7], (1,)), DeviceMesh(range(6), (2, 3))),
    "axes of one": (DeviceMesh([3, 1], (1, 2)), DeviceMesh([1, 3], (2, 1))),
    "to axes of one": (DeviceMesh(range(6), (2, 3)), DeviceMesh(range(6), (1, 3, 2))),
    "from axes of one": (DeviceMesh([2], (1, 1)), DeviceMesh(range(2), (1, 2))),
}
SAMPLED = pytest.mark.parametrize(
    "sampled", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)
DTYPES = ["float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"]


def given(layout):
    stack = stack_of(layout)
    shards = {device: strided(shard_of(layout, stack, device)) for device in layout.mesh.ids}
    return stack, DTensor.from_shards(shards, layout, SimulatedCommunicator(layout.mesh))


def wrong_shards(result, stack, before):
    expected = reduced(stack, before.spec, result.layout.spec)
    return [
        device
        for device in result.device_mesh.ids
        if not same_bits(result.shards[device], shard_of(result.layout, expected, device))
    ]


@SAMPLED
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("shape", [(6, 12), (5, 7), (1, 14), (0, 3)])
def test_every_pair_of_specs(name, shape, sampled):
    """Of many pairs each shape takes others."""
    here, there = MESHES[name]
    pairs = list(product(plain_specs(2, here.ndim), plain_specs(2, there.ndim)))
    if sampled and len(pairs) > 100:
        pairs = pairs[shape[1] % 16 :: 16]
    for index, (spec, target) in enumerate(pairs):
        before = Layout(here, spec, shape, DTYPES[index % len(DTYPES)])
        stack, tensor = given(before)
        result = tensor.redistribute(target, device_mesh=there)
        assert result.layout == Layout(there, target, shape, before.dtype)
        assert list(result.shards) == list(there.ids)
        assert not wrong_shards(result, stack, before), (spec, target)


@pytest.mark.parametrize("name", MESHES)
def test_scalars_and_vectors(name):
    here, there = MESHES[name]
    for shape in [(), (7,)]:
        for spec, target in product(
            plain_specs(len(shape), here.ndim), plain_specs(len(shape), there.ndim)
        ):
            before = Layout(here, spec, shape, "float64")
            stack, tensor = given(before)
            result = tensor.redistribute(target, device_mesh=there)
            assert not wrong_shards(result, stack, before), (spec, target)


@SAMPLED
@pytest.mark.parametrize("name", ["same devices, other shape", "more", "others"])
def test_pending_sums_are_finished(name, sampled):
    here, there = MESHES[name]
    specs = partial_specs(2, here.ndim, ops=("sum", "avg", "max"))
    for spec, target in list(product(specs, plain_specs(2, there.ndim)))[:: 8 if sampled else 1]:
        before = Layout(here, spec, (5, 7), "float32")
        stack, tensor = given(before)
        result = tensor.redistribute(target, device_mesh=there)
        assert not wrong_shards(result, stack, before), (spec, target)


def test_named_axes_are_those_of_the_new_mesh():
    here = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    there = DeviceMesh(range(4), (4,), axis_names=("fsdp",))
    tensor = DTensor(torch.arange(8), here, "[S(tp)]")
    moved = tensor.redistribute("[S(fsdp)]", device_mesh=there)
    assert [moved.to_local(i).tolist() for i in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_gradient_passes_where_the_devices_are_the_same():
    here, there = MESHES["same devices, other order"]
    weights = torch.arange(12.0).reshape(4, 3)
    for source, target in list(product(plain_specs(2, 2), repeat=2))[::3]:
        tensor = DTensor(torch.ones(4, 3, requires_grad=True), here, source)
        moved = tensor.redistribute(target, device_mesh=there)
        (moved.to_global() * weights).sum().backward()
        for device in here.ids:
            box = tensor.layout.box(device)
            expected = weights[tuple(slice(lo, hi) for lo, hi in box)]
            found = tensor.shards[device].grad
            assert found is not None
            assert torch.equal(found, expected), (source, target, device)


def test_gradient_to_other_devices_is_refused():
    here, there = MESHES["more"]
    tensor = DTensor(torch.ones(4, requires_grad=True), here, "[S0]")
    with pytest.raises(LayoutError, match="no gradient passes from mesh 2x2 to other devices"):
        tensor.redistribute("[S1]", device_mesh=there)
    with torch.no_grad():
        moved = tensor.redistribute("[S1]", device_mesh=there)
    assert not moved.requires_grad
    assert torch.equal(moved.to_global(), torch.ones(4))


def test_devices_that_hold_the_same_afterwards_share_their_shards():
    tensor = DTensor(torch.arange(8), DeviceMesh(range(4), (2, 2)), "[S01]")
    moved = tensor.redistribute("[S0]", device_mesh=DeviceMesh(range(4), (4,)))
    for device in range(4):
        assert moved.shards[device].data_ptr() == tensor.shards[device].data_ptr()


def test_plan_made_before_can_be_carried_out():
    here, there = MESHES["fewer"]
    tensor = DTensor(torch.arange(12), here, "[S01]")
    plan = LayoutConverter().plan(tensor.layout, Layout(there, "[S0]", (12,), "int64"))
    moved = tensor.convert(plan)
    assert {d: s.tolist() for d, s in moved.shards.items()} == {
        5: [0, 1, 2, 3],
        2: [4, 5, 6, 7],
        0: [8, 9, 10, 11],
    }

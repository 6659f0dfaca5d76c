"""Boxes against torch's own: what it computes, and where its data really goes.

torch says which order it cuts in by two means, and they part where sizes do not divide. A
`shard_order` cuts a dim by one mesh axis after another, as we do, and `redistribute` moves data by
it (also to `_StridedShard` placements, which it translates first). `distribute_tensor` and the
offset functions instead read `_StridedShard` placements from left to right, and cut what is put
together of several blocks as if it were one. Here all data comes from `redistribute`; the sizes
for which the offset functions say otherwise are listed at the end.
"""

from contextlib import contextmanager
from itertools import filterfalse, permutations
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardspec import DeviceMesh, Layout, ShardingSpec
from shardspec.boxes import box_shape
from tests.layout.test_layout import SHAPES, all_specs

MESH_SHAPES = [(2, 3), (2, 1, 3), (2, 2, 3), (4,), (3, 2), (1, 2), (2, 1), (1, 1), (1, 3, 2)]
# On these `make test` takes some of the layouts.
SAMPLED = {(2, 1, 3): 5, (3, 2): 3, (2, 1): 3, (1, 1): 3}


@contextmanager
def fake_job(rank, size):
    """A process group that moves nothing, for what torch computes without moving anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_and_every():
    """Yield meshes, and the stride of the layouts that are tried on them."""
    for shape in MESH_SHAPES:
        if shape in SAMPLED:
            yield pytest.param(shape, SAMPLED[shape], id=f"{shape} sampled")
        rest = shape in SAMPLED or shape in [(2, 2, 3), (1, 3, 2)]
        yield pytest.param(shape, 1, id=str(shape), marks=[pytest.mark.exhaustive] if rest else [])


EACH_MESH = pytest.mark.parametrize(("mesh_shape", "every"), list(mesh_and_every()))


@contextmanager
def simulated(mesh_shape):
    """Torch's mesh, all of whose ranks it simulates in this process."""
    ids = range(prod(mesh_shape))
    with fake_job(0, len(ids)), LocalTensorMode(len(ids)):
        yield TorchMesh("cpu", torch.tensor(ids).reshape(mesh_shape))


def layouts(mesh):
    for shape in SHAPES:
        for spec in all_specs(len(shape), mesh.ndim):
            yield Layout(mesh, spec, shape, "int64")


def in_default_order(layout):
    return all(axes == sorted(axes) for axes in layout.spec.dim_partition_dict.values())


def shards(layout):
    placements: list[Placement] = [Replicate()] * layout.mesh.ndim
    for dim, axes in layout.spec.dim_partition_dict.items():
        for axis in axes:
            placements[axis] = Shard(dim)
    return placements


def strided_shards(layout):
    """Encode the order by `_StridedShard`: cut by later mesh axes first, so many times."""
    placements = shards(layout)
    for dim, axes in layout.spec.dim_partition_dict.items():
        for at, axis in enumerate(axes):
            before = prod(layout.mesh.shape[other] for other in axes[:at] if other > axis)
            if before > 1:
                placements[axis] = _StridedShard(dim, split_factor=before)
    return placements


def as_box(sizes, starts):
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def whole(layout):
    return torch.arange(prod(layout.global_shape)).reshape(layout.global_shape)


def by_rank(local: torch.Tensor) -> dict[int, torch.Tensor]:
    assert isinstance(local, LocalTensor)
    return local._local_tensors


def check_data(layouts, results):
    """Compare every rank's tensor, whose values say where they come from, with its box."""
    for layout, local in zip(layouts, results, strict=True):
        tensor = whole(layout)
        local_tensors = by_rank(local)
        assert set(local_tensors) == set(layout.mesh.ids)
        for device, shard in local_tensors.items():
            box = layout.box(device)
            expected = tensor[tuple(slice(lo, hi) for lo, hi in box)]
            assert tuple(shard.shape) == box_shape(box), (layout, device)
            assert torch.equal(shard, expected), (layout, device)


@EACH_MESH
def test_offsets_in_default_order(mesh_shape, every):
    ids = torch.randperm(prod(mesh_shape), generator=torch.Generator().manual_seed(1))
    mesh = DeviceMesh(ids, mesh_shape)
    for device in mesh.ids:
        with fake_job(device, mesh.size()):
            torch_mesh = TorchMesh("cpu", ids.reshape(mesh_shape))
            assert tuple(torch_mesh.get_coordinate() or ()) == mesh.coordinates(device)
            for layout in list(filter(in_default_order, layouts(mesh)))[::every]:
                sizes, starts = compute_local_shape_and_global_offset(
                    layout.global_shape, torch_mesh, shards(layout)
                )
                assert as_box(sizes, starts) == layout.box(device), (layout, device)


@EACH_MESH
def test_distribute_tensor_in_default_order(mesh_shape, every):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    tried = list(filter(in_default_order, layouts(mesh)))[::every]
    with simulated(mesh_shape) as torch_mesh:
        wholes = {layout.global_shape: whole(layout) for layout in tried}
        results = [
            distribute_tensor(
                wholes[layout.global_shape], torch_mesh, shards(layout), src_data_rank=None
            ).to_local()
            for layout in tried
        ]
    check_data(tried, results)


def on_all(layouts, torch_mesh):
    """Return by shape torch's DTensor of which every device has all."""
    placements = [Replicate()] * torch_mesh.ndim
    of_shapes = {layout.global_shape: layout for layout in layouts}
    return {
        shape: distribute_tensor(whole(layout), torch_mesh, placements, src_data_rank=None)
        for shape, layout in of_shapes.items()
    }


@EACH_MESH
def test_redistribute_to_every_shard_order(mesh_shape, every):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    tried, results = list(layouts(mesh))[::every], []
    with simulated(mesh_shape) as torch_mesh:
        copied = on_all(tried, torch_mesh)
        for layout in tried:
            copies = copied[layout.global_shape]
            meta = TensorMeta(copies.shape, copies.stride(), copies.dtype)
            order = tuple(
                ShardOrderEntry(dim, tuple(axes))
                for dim, axes in sorted(layout.spec.dim_partition_dict.items())
            )
            target = DTensorSpec(torch_mesh, tuple(shards(layout)), meta, shard_order=order)
            results.append(redistribute_local_tensor(copies.to_local(), copies._spec, target))
    check_data(tried, results)


@EACH_MESH
def test_redistribute_to_strided_shards(mesh_shape, every):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    tried = list(filterfalse(in_default_order, layouts(mesh)))[::every]
    with simulated(mesh_shape) as torch_mesh:
        copied = on_all(tried, torch_mesh)
        results = [
            copied[layout.global_shape].redistribute(placements=strided_shards(layout)).to_local()
            for layout in tried
        ]
    check_data(tried, results)


# Sizes below 25 for which the offset function, given `_StridedShard` placements, says something
# else than where `redistribute` puts the data. All others agree, among them all that divide.
DIFFERENT = {
    (2, 3): {},
    (4,): {},
    (3, 2): {(1, 0): [7, 13, 19]},
    (1, 2): {},
    (2, 1): {},
    (1, 1): {},
    (1, 3, 2): {axes: [7, 13, 19] for axes in [(2, 1), (0, 2, 1), (2, 0, 1), (2, 1, 0)]},
    (2, 2, 3): {
        (1, 2, 0): [7, 9, 10, 13, 14, 15, 16, 19, 20, 21, 22],
        (2, 1, 0): [7, 8, 9, 10, 13, 14, 15, 16, 19, 20, 21, 22],
    },
}


@pytest.mark.parametrize("mesh_shape", DIFFERENT, ids=str)
def test_offsets_of_strided_shards(mesh_shape):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    different: dict[tuple[int, ...], list[int]] = {}
    for count in range(1, mesh.ndim + 1):
        for axes in permutations(range(mesh.ndim), count):
            for size in range(25):
                layout = Layout(mesh, ShardingSpec(1, {0: axes}), (size,), "int64")
                placements = strided_shards(layout)
                for device, box in layout.boxes().items():
                    at = list(mesh.coordinates(device))
                    if box != as_box(
                        *_compute_local_shape_and_global_offset((size,), mesh_shape, at, placements)
                    ):
                        different.setdefault(axes, []).append(size)
                        break
    assert different == DIFFERENT[mesh_shape]
    for axes, sizes in different.items():
        assert all(size % prod(mesh_shape[axis] for axis in axes) for size in sizes)


def test_where_torch_disagrees_with_itself():
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = torch.arange(7)
    with fake_job(0, 6), LocalTensorMode(6):
        torch_mesh = TorchMesh("cpu", torch.arange(6).reshape(3, 2))
        copies = distribute_tensor(tensor, torch_mesh, [Replicate()] * 2, src_data_rank=None)
        moved = copies.redistribute(placements=placements)
        cut = distribute_tensor(tensor, torch_mesh, placements, src_data_rank=None)
    by_redistribute = [by_rank(moved.to_local())[i].tolist() for i in range(6)]
    by_distribute = [by_rank(cut.to_local())[i].tolist() for i in range(6)]
    assert by_redistribute == [[0, 1], [4], [2, 3], [5], [], [6]]
    assert by_distribute == [[0, 1], [4], [2, 3], [5], [6], []]
    boxes = Layout(DeviceMesh(range(6), (3, 2)), "[S10]", (7,), "int64").boxes()
    assert [list(range(*boxes[i][0])) for i in range(6)] == by_redistribute

"""Placements against torch's own rule, for every spec of small meshes."""

from itertools import permutations, product
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from shardspec import DeviceMesh, Layout, ShardingSpec
from shardspec.errors import LayoutError, LossyConversionError
from shardspec.layout.placements import Split, placements_of, spec_of_placements
from shardspec.layout.spec import DimSpec, Part
from tests.conversions import partial_specs, plain_specs


class Sizes:
    """What torch's rule asks of a mesh."""

    def __init__(self, shape):
        self.shape = shape

    def size(self, axis):
        return self.shape[axis]


def in_torchs_words(placement):
    match placement:
        case None:
            return Replicate()
        case Split(dim, 1):
            return Shard(dim)
        case Split(dim, factor):
            return _StridedShard(dim, split_factor=factor)
        case op:
            return Partial(op)


@pytest.mark.parametrize("shape", [(2,), (2, 3), (3, 2), (2, 2, 3), (1, 2, 3), (2, 3, 2, 2)])
@pytest.mark.parametrize("dims", [1, 2])
def test_every_spec_as_torch_writes_it_and_back(shape, dims):
    for spec in plain_specs(dims, len(shape)):
        placements = placements_of(spec, shape)
        order = tuple(
            ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(map(int, axes)))
            for dim, axes in sorted(spec.dim_partition_dict.items())
        )
        plain: list[Any] = [Replicate()] * len(shape)
        for entry in order:
            for axis in entry.mesh_dims:
                plain[axis] = Shard(entry.tensor_dim)
        mesh: Any = Sizes(shape)
        expected = DTensorSpec._convert_shard_order_to_StridedShard(order, tuple(plain), mesh)
        assert tuple(map(in_torchs_words, placements)) == expected, spec
        if 1 not in shape:
            assert spec_of_placements(placements, dims, shape) == spec
        as_shards = [None if p == Replicate() else Split(p.dim) for p in plain]
        beside = {entry.tensor_dim: entry.mesh_dims for entry in order}
        assert spec_of_placements(as_shards, dims, shape, beside) == spec


def test_pending_reductions_there_and_back():
    for spec in partial_specs(2, 2):
        assert spec_of_placements(placements_of(spec, (2, 3)), 2, (2, 3)) == spec
    assert placements_of(ShardingSpec.parse("[S0|Pmax1]"), (2, 3)) == (
        Split(0),
        "max",
    )


def test_dims_may_count_from_the_end():
    assert str(spec_of_placements([Split(-1)], 2, (2,))) == "[R,S0]"


@pytest.mark.parametrize(
    ("placements", "order", "message"),
    [
        ([None], None, "1 placement for a mesh of 2 axes (2x3)"),
        ([Split(2), None], None, "axis 0 splits dim 2, but the tensor has 2 dims"),
        ([Split(0, 2), Split(0)], None, "axis 0 has split factor 2, but .* make \\[3\\] parts"),
        ([Split(0, 3), None], None, "split factor 3 makes parts of dim 0, whose size is not"),
        ([Split(0, 3), Split(0, 2)], None, "axis 0 has split factor 3, but .* make \\[3\\] parts"),
        ([Split(0), Split(0)], {0: [1]}, "shard order {0: [1]} names other dims or axes"),
    ],
)
def test_what_no_spec_says_is_refused(placements, order, message):
    pattern = message if ".*" in message else None
    with pytest.raises(LayoutError, match=pattern) as caught:
        spec_of_placements(placements, 2, (2, 3), order)
    if pattern is None:
        assert message in str(caught.value)


def by_torch(size, shape, placements):
    """Return what every device has of a dim, cut by torch's own rule from left to right."""
    held: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(size)}
    for count, placement in zip(shape, placements, strict=True):
        split = placement if isinstance(placement, _StridedShard) else Shard(0)
        held = {
            (*at, place): part
            for at, tensor in held.items()
            for place, part in enumerate(
                split._split_tensor(tensor, count, with_padding=False, contiguous=True)[0]
            )
        }
    return {at: tensor.tolist() for at, tensor in held.items()}


@pytest.mark.parametrize("shape", [(2,), (3,), (5,), (2, 2), (3, 2)])
def test_strided_shards_of_one_axis_are_parts(shape):
    mesh = DeviceMesh(range(prod(shape)), shape)
    found = refused = 0
    for size in range(1, 25):
        for factors in product(range(1, 7), repeat=len(shape)):
            if factors[-1] == 1:
                continue  # No parts: the order of the axes.
            splits = [Split(0, factor) for factor in factors]
            held = by_torch(size, shape, [_StridedShard(0, split_factor=f) for f in factors])
            try:
                spec = spec_of_placements(splits, (size,), shape)
            except (LayoutError, LossyConversionError):
                refused += 1
                continue
            found += 1
            layout = Layout(mesh, spec, (size,), "int8")
            for device in mesh.ids:
                indices = [i for lo, hi in layout.intervals(device)[0] for i in range(lo, hi)]
                assert indices == held[mesh.coordinates(device)], (size, factors, spec)
            again = placements_of(spec, shape)
            if size >= factors[-1]:
                assert spec_of_placements(again, (size,), shape) == spec
    # torch shards parts over several axes by one rule, and gathers by another.
    assert (found == 0, refused == 0) == (len(shape) > 1, len(shape) == 1)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_parts_are_strided_shards_or_refused(shape):
    """Of every division of a dim, in every order of the axes: right in torch, or an error."""
    mesh = DeviceMesh(range(prod(shape)), shape)
    said = 0
    for size, order, block in product(range(1, 13), permutations(range(len(shape))), (1, 2)):
        for parts in divisions(size):
            for shares in {0, 1, shape[0], prod(shape)}:
                cut = DimSpec(order, tuple(Part(part, shares) for part in parts), block)
                layout = Layout(mesh, ShardingSpec(1, {0: cut}), (size,), "int8")
                try:
                    placements = placements_of(layout.spec, shape)
                except LossyConversionError:
                    continue
                if len(parts) == 1 and len(order) > 1:
                    continue  # The order of the axes.
                said += 1
                held = by_torch(size, shape, tuple(map(in_torchs_words, placements)))
                for device in mesh.ids:
                    indices = [i for lo, hi in layout.intervals(device)[0] for i in range(lo, hi)]
                    assert indices == held[mesh.coordinates(device)], (layout, placements)
    assert (said > 20) == (len(shape) == 1)


def divisions(size):
    """Return the ways to divide a size into at most three parts."""
    found: list[tuple[int, ...]] = [(size,)]
    found += [(a, size - a) for a in range(1, size)]
    found += [(a, b, size - a - b) for a in range(1, size) for b in range(1, size - a)]
    return found


def test_sizes_of_parts_are_needed():
    with pytest.raises(LayoutError, match="split factor 2 makes parts of dim 0"):
        spec_of_placements([Split(0, 2)], 1, (2,))
    assert str(spec_of_placements([Split(0, 2)], (7,), (2,))) == "[S0{4,3}]"
    with pytest.raises(LossyConversionError, match=r"axes \[0, 1\] shard dim 0 with"):
        spec_of_placements([Split(0, 4), Split(0, 2)], (8,), (2, 2))

"""Placements against torch's own rule, for every spec of small meshes."""

from typing import Any

import pytest
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from shardspec import ShardingSpec
from shardspec.errors import LayoutError
from shardspec.layout.placements import (
    PartialPlacement,
    Split,
    Whole,
    placements_of,
    spec_of_placements,
)
from tests.conversions import partial_specs, plain_specs


class Sizes:
    """What torch's rule asks of a mesh."""

    def __init__(self, shape):
        self.shape = shape

    def size(self, axis):
        return self.shape[axis]


def in_torchs_words(placement):
    match placement:
        case Whole():
            return Replicate()
        case PartialPlacement(op):
            return Partial(op)
        case Split(dim, 1):
            return Shard(dim)
        case Split(dim, factor):
            return _StridedShard(dim, split_factor=factor)


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
        as_shards = [Whole() if p == Replicate() else Split(p.dim) for p in plain]
        beside = {entry.tensor_dim: entry.mesh_dims for entry in order}
        assert spec_of_placements(as_shards, dims, shape, beside) == spec


def test_pending_reductions_there_and_back():
    for spec in partial_specs(2, 2):
        assert spec_of_placements(placements_of(spec, (2, 3)), 2, (2, 3)) == spec
    assert placements_of(ShardingSpec.parse("[S0|Pmax1]"), (2, 3)) == (
        Split(0),
        PartialPlacement("max"),
    )


def test_dims_may_count_from_the_end():
    assert str(spec_of_placements([Split(-1)], 2, (2,))) == "[R,S0]"


@pytest.mark.parametrize(
    ("placements", "order", "message"),
    [
        ([Whole()], None, "1 placements for a mesh of 2 axes (2x3)"),
        ([Split(2), Whole()], None, "axis 0 splits dim 2, but the tensor has 2 dims"),
        ([Split(0, 2), Split(0)], None, "axis 0 has split factor 2, but .* make \\[3\\] parts"),
        ([Split(0, 3), Whole()], None, "axis 0 has split factor 3, but .* make no parts"),
        ([Split(0), Split(0)], {0: [1]}, "shard order {0: [1]} names other dims or axes"),
    ],
)
def test_what_no_spec_says_is_refused(placements, order, message):
    pattern = message if ".*" in message else None
    with pytest.raises(LayoutError, match=pattern) as caught:
        spec_of_placements(placements, 2, (2, 3), order)
    if pattern is None:
        assert message in str(caught.value)

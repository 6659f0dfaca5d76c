"""The same layout in everybody's words, and back."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from shardspec import DeviceMesh, Layout, ShardingSpec
from shardspec.errors import AxisError, LayoutError, LossyConversionError, SpecSyntaxError
from shardspec.interop.notations import (
    from_colossal,
    from_partition_spec,
    from_placements,
    to_colossal,
    to_jax_mesh,
    to_partition_spec,
    to_placements,
)
from shardspec.layout.layout import resolve_axes
from tests.conversions import partial_specs, plain_specs

MESH = DeviceMesh(range(4), (2, 2), axis_names=("x", "y"))
TABLE = [
    ("[R,R]", [Replicate(), Replicate()], (), set()),
    ("[S0,R]", [Shard(0), Replicate()], ("x",), set()),
    ("[S01,R]", [Shard(0), Shard(0)], (("x", "y"),), set()),
    ("[S10,R]", [_StridedShard(0, split_factor=2), Shard(0)], (("y", "x"),), set()),
    ("[S0,S1]", [Shard(0), Shard(1)], ("x", "y"), set()),
    ("[S0,R|P1]", [Shard(0), Partial("sum")], ("x",), {"y"}),
]


@pytest.mark.parametrize(("spec", "placements", "entries", "unreduced"), TABLE)
def test_a_spec_is_written_as_each_library_does(spec, placements, entries, unreduced):
    assert list(to_placements(spec, MESH)) == placements
    assert to_partition_spec(spec, MESH) == (entries, unreduced)


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 3)])
def test_torch_and_jax_there_and_back(shape):
    mesh = DeviceMesh(
        range(torch.Size(shape).numel()), shape, axis_names=tuple("xyz"[: len(shape)])
    )
    for spec in [*plain_specs(2, len(shape)), *partial_specs(2, len(shape))]:
        assert from_placements(to_placements(spec, mesh), 2, mesh) == spec
        if set(spec.partial.values()) <= {"sum"}:
            entries, unreduced = to_partition_spec(spec, mesh)
            named = from_partition_spec(entries, 2, unreduced=unreduced)
            assert resolve_axes(named, mesh) == spec


def test_torch_product_is_our_prod():
    assert to_placements("[R|Pprod0]", MESH) == (Partial("product"), Replicate())
    assert str(from_placements([Partial("product"), Replicate()], 1, MESH)) == "[R|Pprod0]"


def test_torch_placements_that_no_spec_has():
    with pytest.raises(LossyConversionError, match="has no counterpart in a spec"):
        from_placements(
            [_MaskPartial(offset_shape=torch.Size([2]), offset_dim=0)], 1, DeviceMesh([0], (1,))
        )
    with pytest.raises(LossyConversionError, match="has no counterpart in a spec"):
        from_placements([Partial("premul_sum"), Replicate()], 1, MESH)
    with pytest.raises(LayoutError, match="1 placement for a mesh of 2 axes"):
        from_placements([Shard(0)], 1, MESH)


def test_what_jax_cannot_write_is_refused():
    with pytest.raises(LossyConversionError, match="mesh 2x2 has none; name them"):
        to_partition_spec("[S0]", DeviceMesh(range(4), (2, 2)))
    with pytest.raises(SpecSyntaxError, match="expected R or S"):
        to_partition_spec("[X]", DeviceMesh(range(4), (2, 2)))
    with pytest.raises(LossyConversionError, match="no pending max, only sums"):
        to_partition_spec("[S0|Pmax1]", MESH)
    with pytest.raises(LossyConversionError, match="dim 0 of size 7 into 4 parts; pad it to 8"):
        to_partition_spec("[S01,R]", MESH, (7, 3))
    with pytest.raises(LayoutError, match=r"for 2 dims, but the tensor of shape \(8,\) has 1 dim"):
        to_partition_spec("[S01,R]", MESH, (8,))
    assert to_partition_spec("[S01,R]", MESH, (8, 3)) == ((("x", "y"),), frozenset())
    with pytest.raises(LossyConversionError, match="entry Ellipsis of dim 1 is neither an axis"):
        from_partition_spec(["x", ...], 2)
    with pytest.raises(LayoutError, match=r"2 entries .* for a tensor of 1 dims"):
        from_partition_spec(["x", None], 1)
    with pytest.raises(AxisError):
        from_partition_spec(["x", "x"], 2)
    with pytest.raises(
        LossyConversionError, match=r"device 0 of mesh x=2,y=2 is not one of JAX's devices"
    ):
        to_jax_mesh(MESH, [])


def test_what_colossal_ai_can_write_comes_back_and_the_rest_is_refused():
    for spec in plain_specs(2, 2):
        if "10" in str(spec):
            with pytest.raises(LossyConversionError, match=r"over axes \[1, 0\]"):
                to_colossal(spec, MESH)
        else:
            assert from_colossal(to_colossal(spec, MESH), 2) == spec
    with pytest.raises(LossyConversionError, match="no pending sum"):
        to_colossal("[R|P0]", MESH)
    with pytest.raises(LossyConversionError, match="R, S0, S1 and S01 only"):
        to_colossal("[S2]", DeviceMesh(range(8), (2, 2, 2)))


def test_nothing_is_approximated():
    """Whatever comes out of a conversion means the boxes that went in."""
    mesh = DeviceMesh(range(6), (2, 3), axis_names=("x", "y"))
    for spec, shape in product(plain_specs(2, 2), [(6, 12), (5, 7)]):
        layout = Layout(mesh, spec, shape, "f32")
        back = from_placements(to_placements(spec, mesh), 2, mesh)
        assert Layout(mesh, back, shape, "f32").boxes() == layout.boxes()
        assert isinstance(back, ShardingSpec)

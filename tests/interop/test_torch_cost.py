"""Costs that torch's own planners and AutoParallel can use in place of theirs."""

import inspect
from itertools import product
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost as torchs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.errors import LayoutError
from shardspec.interop.torch_cost import RedistributeCost, redistribute_cost

OURS = DeviceMesh(range(16), (2, 8))
META = TensorMeta(torch.Size((4096, 1024)), (1024, 1), torch.bfloat16)
WAYS = (Replicate(), Shard(0), Shard(1), Partial())


@pytest.fixture(scope="module", autouse=True)
def job():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    dist.destroy_process_group()


def torch_mesh(*shape):
    return TorchMesh("cpu", torch.arange(16).reshape(shape))


def spec(*placements, meta=META, shape=(2, 8)):
    return DTensorSpec(torch_mesh(*shape), placements, tensor_meta=meta)


def test_it_has_the_signature_of_torchs_and_its_unit():
    assert list(inspect.signature(redistribute_cost).parameters) == list(
        inspect.signature(torchs).parameters
    )
    here, there = spec(Replicate(), Shard(0)), spec(Replicate(), Replicate())
    layout = Layout(OURS, "[S1,R]", (4096, 1024), "bf16")
    assert redistribute_cost(here, there) == LayoutConverter().cost(layout, "[R,R]") * 1e6
    # 8 MiB of eight H100, with the unpacking; torch takes cores of this machine for a node's GPUs.
    assert 30 < redistribute_cost(here, there) < 100
    assert 30 < torchs(here, there) < 1000


def test_the_outer_axis_is_dearer_than_the_inner_one():
    outer = redistribute_cost(spec(Shard(0), Replicate()), spec(Replicate(), Replicate()))
    ends = (spec(Replicate(), p, shape=(8, 2)) for p in (Shard(0), Replicate()))
    assert outer > 1.5 * redistribute_cost(*ends)


def test_links_are_those_of_the_running_job():
    """An equal mesh of torch in an earlier job may have stood for one with other links."""
    costs = []
    for alpha, beta in (((1e-3, 1e-3), (1e-6, 1e-6)), (None, None)):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
        ours = DeviceMesh(range(16), (2, 8), mesh_alpha=alpha, mesh_beta=beta)
        mesh = ours.to_torch("cpu")
        whole, rows = ((Replicate(), last) for last in (Replicate(), Shard(0)))
        ends = (DTensorSpec(mesh, each, tensor_meta=META) for each in (rows, whole))
        costs.append(redistribute_cost(*ends))
    assert costs[0] > 1000 * costs[1] > 0


def test_what_torch_cannot_convert_has_no_price():
    whole = spec(Replicate(), Replicate())
    assert redistribute_cost(spec(Shard(0), Shard(1)), spec(Partial(), Shard(1))) == inf
    assert redistribute_cost(whole, spec(Partial(), Replicate())) == inf
    assert redistribute_cost(whole, spec(Replicate(), Replicate(), shape=(4, 4))) == inf
    with pytest.raises(LayoutError, match="give it a tensor_meta with shape and dtype"):
        redistribute_cost(spec(Shard(0), Shard(0), meta=None), whole)


def test_shards_in_another_order_have_a_price():
    strided = DTensorSpec(
        torch_mesh(2, 8), (_StridedShard(0, split_factor=8), Shard(0)), tensor_meta=META
    )
    layout = Layout(OURS, "[S10,R]", (4096, 1024), "bf16")
    assert redistribute_cost(strided, spec(Replicate(), Replicate())) == pytest.approx(
        LayoutConverter().cost(layout, "[R,R]") * 1e6
    )


@pytest.mark.parametrize("names", [None, ["ib-hdr-per-gpu", "a100-nvswitch"]])
def test_all_edges_at_once_cost_what_each_does(names):
    model = CostModel.from_presets(OURS, names) if names else None
    cost = RedistributeCost(LayoutConverter(model))
    metas = [META, TensorMeta(torch.Size((30, 7)), (7, 1), torch.float32)]
    pairs = [
        (spec(*here, meta=meta), spec(*there, meta=meta))
        for meta in metas
        for here, there in product(product(WAYS, repeat=2), repeat=2)
    ]
    wanted = [cost(*pair) for pair in pairs[::5]]
    every = cost.many(*zip(*pairs * 2, strict=True)).tolist()
    assert every[: len(pairs)] == every[len(pairs) :]
    assert every[: len(pairs) : 5] == pytest.approx(wanted, rel=1e-9)
    # Nothing becomes pending: of 4 placements per axis, 13 pairs of 16 can be.
    assert sum(each < inf for each in every) == 4 * 13**2


def test_tables_of_edges_cost_what_each_pair_does():
    """Lists with repeats, of several tensors, empty ones, and meshes that differ."""
    cost = RedistributeCost()
    small = TensorMeta(torch.Size((30, 7)), (7, 1), torch.float32)
    ways = list(product(WAYS, repeat=2))
    ends = [spec(*here) for here in [*ways, *ways[:3]]], [spec(*there) for there in ways[::-2]]
    again = [spec(*here) for here in [*ways, *ways[:3]]], [spec(*there) for there in ways[::-2]]
    others = (
        [spec(*here, meta=small) for here in ways[:4]],
        [spec(Replicate(), Shard(1), meta=small, shape=(4, 4)), spec(*ways[5], meta=small)],
    )
    nothing = ends[0][:0], ends[1]
    tables = cost.tables(iter([ends, others, again, nothing]))
    assert tables[2] is tables[0]
    assert not tables[0].flags.writeable
    for (sources, targets), table in zip([ends, others, again, nothing], tables, strict=True):
        wanted = [[cost(here, there) for there in targets] for here in sources]
        assert table.shape == (len(sources), len(targets))
        assert table.tolist() == [pytest.approx(row, rel=1e-9) for row in wanted]
    assert (tables[1][:, 0] == inf).all()
    assert cost.tables([]) == []
    with pytest.raises(LayoutError, match="give both the same shape and dtype"):
        cost.tables([ends, (ends[0], others[1])])


def test_a_target_without_meta_is_of_the_current_tensor():
    here = spec(Shard(0), Replicate())
    for placement in (Replicate(), Shard(1)):
        bare = spec(placement, Replicate(), meta=None)
        full = spec(placement, Replicate())
        assert redistribute_cost(here, bare) == redistribute_cost(here, full)
        assert redistribute_cost.many([here], [bare]).tolist() == [redistribute_cost(here, full)]
    with pytest.raises(LayoutError, match="tensor_meta"):
        redistribute_cost(spec(Shard(0), Replicate(), meta=None), here)


def test_masked_and_mixed_sums_cost_what_sums_do():
    masked = _MaskPartial(offset_shape=torch.Size((4096, 1024)), offset_dim=0)
    plain = spec(Replicate(), Partial())
    for ends in ((Replicate(), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))):
        target = spec(*ends)
        price = redistribute_cost(plain, target)
        assert redistribute_cost(spec(Replicate(), masked), target) == price
        assert redistribute_cost.many([spec(Replicate(), masked)], [target]).tolist() == [price]
    both = spec(Partial("max"), Partial("sum"))
    whole = spec(Replicate(), Replicate())
    sums = spec(Partial(), Partial())
    assert redistribute_cost(both, whole) == redistribute_cost(sums, whole)
    half = redistribute_cost(both, spec(Partial("max"), Replicate()))
    assert half == redistribute_cost(plain, whole)
    for pending in (spec(Replicate(), masked), both):
        assert redistribute_cost(pending, pending) == 0
        assert redistribute_cost(whole, pending) == inf
    assert redistribute_cost(both, spec(Partial("sum"), Replicate())) == inf

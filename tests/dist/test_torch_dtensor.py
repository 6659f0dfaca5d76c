"""Our tensors and torch's in a job of four: one storage, one history of gradients.

`make test` tries every fifth conversion with gradients and two random graphs, `make exhaustive`
all of the one and six of the other.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    ShardingSpec,
    ShardSpecError,
    distribute_tensor,
    init_device_mesh,
    redistribute,
)
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.errors import CommunicatorError, LayoutError, LossyConversionError
from shardspec.interop.notations import to_placements
from shardspec.layout.graph import explore, spec_of
from tests.conversions import index_of
from tests.dist.autograd_scenes import SCENES, random_graphs
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

WHOLE = (torch.arange(35.0) * 0.37).sin().reshape(7, 5).double()
SPECS = sorted((spec_of(state) for state in explore(2, ShardingSpec(2)).nodes), key=str)


def told(call) -> str:
    try:
        call()
    except ShardSpecError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def is_box(local, layout, whole, rank) -> bool:
    return torch.equal(local, whole[index_of(layout, rank)])


def storage_is_shared(rank, mesh):
    """Every spec of a matrix, uneven; written on one side, read on the other."""
    for spec in SPECS:
        ours = DTensor(WHOLE, mesh, spec)
        theirs = ours.to_torch()
        assert theirs is ours.to_torch()
        assert theirs.shape == WHOLE.shape
        # torch cannot put together what it has cut in a descending order of uneven parts.
        if not any(isinstance(p, _StridedShard) for p in theirs.placements):
            assert torch.equal(theirs.full_tensor(), WHOLE)
        again = DTensor.from_torch(theirs)
        assert again.layout == ours.layout
        assert again.communicator is ours.communicator
        places = {t.data_ptr() for t in (ours.to_local(), again.to_local(), theirs.to_local())}
        assert len(places) == 1
        ours.to_local().mul_(2)
        assert is_box(theirs.to_local(), ours.layout, 2 * WHOLE, rank)
        assert torch.equal(again.to_global(), 2 * WHOLE)
        theirs.to_local().zero_()
        assert not ours.to_global().any()
        even = torch.arange(32).reshape(8, 4)
        assert torch.equal(DTensor(even, mesh, spec).to_torch().full_tensor(), even)


def what_torch_has_cut(rank, mesh):
    torch_mesh = mesh.to_torch()
    kinds = [Replicate(), Shard(0), Shard(-1)]
    for placements in product(kinds, kinds):
        theirs = torch_distribute(WHOLE, torch_mesh, placements)
        ours = DTensor.from_torch(theirs)
        assert ours.device_mesh == mesh
        assert is_box(ours.to_local(), ours.layout, WHOLE, rank)
        assert torch.equal(ours.to_global(), WHOLE)
        assert torch.equal(
            redistribute(theirs, "[R,S(tp,dp)]").to_local(),
            WHOLE[index_of(Layout(mesh, "[R,S10]", (7, 5), "f64"), rank)],
        )
    pending = TorchDTensor.from_local(WHOLE * (rank + 1), torch_mesh, [Partial(), Partial("sum")])
    assert str(DTensor.from_torch(pending).sharding_spec) == "[R,R|P01]"
    torch.testing.assert_close(DTensor.from_torch(pending).to_global(), WHOLE * 10)
    scalar = torch_distribute(torch.tensor(3.5), torch_mesh, [Replicate(), Replicate()])
    assert DTensor.from_torch(scalar).to_global() == 3.5
    empty = torch_distribute(torch.ones(0, 3), torch_mesh, [Shard(0), Shard(1)])
    assert DTensor.from_torch(empty).to_global().shape == (0, 3)
    # By columns in memory, as a transposed weight is.
    turned = DTensor.from_local(
        WHOLE.t().contiguous().t()[index_of(Layout(mesh, "[S0,R]", (7, 5), "f64"), rank)],
        mesh,
        "[S0,R]",
        global_shape=(7, 5),
    )
    assert turned.to_torch().stride() == (1, 7)
    assert torch.equal(turned.to_torch().full_tensor(), WHOLE)


def orders_beside_placements(rank, mesh):
    """A torch DTensor may say by ``shard_order`` what strided shards say elsewhere."""
    even = torch.arange(48.0).reshape(8, 6)
    for spec in SPECS:
        layout = Layout(mesh, spec, (8, 6), "f32")
        placements = tuple(
            Shard(each.dim) if isinstance(each, _StridedShard) else each
            for each in to_placements(spec, mesh)
        )
        order = {d: tuple(map(int, axes)) for d, axes in layout.spec.dim_partition_dict.items()}
        theirs = TorchDTensor(
            even[index_of(layout, rank)].clone(),
            DTensorSpec(
                mesh.to_torch(),
                placements,
                TensorMeta(torch.Size((8, 6)), (6, 1), torch.float32),
                shard_order=tuple(ShardOrderEntry(dim, axes) for dim, axes in order.items()),
            ),
            requires_grad=False,
        )
        assert torch.equal(theirs.full_tensor(), even)
        ours = DTensor.from_torch(theirs)
        assert ours.layout == layout
        assert torch.equal(ours.to_global(), even)
        assert torch.equal(redistribute(theirs, "[R,S01]").full_tensor(), even)


def gradients_pass_both_ways(rank, mesh, every):
    weights = torch.arange(35.0).reshape(7, 5).double()
    expected = 3 * WHOLE**2 * weights
    # torch's leaf, through our conversion, to a loss on our side.
    cuts: list[list[Placement]] = [[Shard(0), Replicate()], [Shard(1), Shard(0)]]
    for source, target in list(product(cuts, SPECS))[::every]:
        leaf = torch_distribute(WHOLE, mesh.to_torch(), source).requires_grad_()
        ours = DTensor.from_torch(leaf)
        assert (ours.requires_grad, ours.grad) == (True, None)
        whole = ours.redistribute(target).to_global()
        (whole**3 * weights).sum().backward()
        assert isinstance(leaf.grad, TorchDTensor)
        torch.testing.assert_close(leaf.grad.full_tensor(), expected)
        grad = ours.grad
        assert grad is not None
        torch.testing.assert_close(grad.to_global(), expected)
    # Our leaf, through torch's operations, twice.
    for spec in SPECS[::every]:
        start = DTensor(WHOLE.clone().requires_grad_(), mesh, spec)
        factors = DTensor(weights, mesh, spec).to_torch()
        for _ in range(2):
            theirs = start.to_torch() ** 3 * factors
            theirs.sum().backward()
        found = start.grad
        assert found is not None
        assert found.sharding_spec == spec
        assert is_box(found.to_local(), found.layout, 2 * expected, rank) or torch.allclose(
            found.to_local(), 2 * expected[index_of(found.layout, rank)]
        )
    # Addends of a pending sum get the gradient of the sum.
    addend = (WHOLE * (rank + 1)).requires_grad_()
    pending = DTensor.from_local(addend, mesh, "[R,R|P01]").to_torch()
    (pending.redistribute(placements=[Shard(0), Replicate()]) ** 2).sum().backward()
    assert addend.grad is not None
    torch.testing.assert_close(addend.grad, 20 * WHOLE)
    # Without grad mode there is no history; with it there is one again.
    start = DTensor(WHOLE.clone().requires_grad_(), mesh, "[S0,R]")
    with torch.no_grad():
        assert not start.to_torch().requires_grad
    assert start.to_torch().requires_grad
    assert start.requires_grad_(False).to_torch().requires_grad is False


def torch_code_gets_our_plans(rank, mesh):
    torch_mesh = mesh.to_torch()
    theirs = torch_distribute(WHOLE, torch_mesh, [Shard(0), Shard(1)])
    moved = redistribute(theirs, [Shard(1), Shard(1)])
    assert type(moved) is TorchDTensor
    assert moved.device_mesh is torch_mesh
    assert tuple(moved.placements) == (Shard(1), Shard(1))
    assert torch.equal(moved.full_tensor(), WHOLE)
    swapped = redistribute(theirs, ShardingSpec(2, {0: ["tp", "dp"]}))
    assert swapped.placements[0] == _StridedShard(0, split_factor=2)
    assert is_box(swapped.to_local(), Layout(mesh, "[S10,R]", (7, 5), "f64"), WHOLE, rank)
    same = redistribute(theirs, "[S0,S1]")
    assert same.to_local().data_ptr() == theirs.to_local().data_ptr()
    # Other meshes: of ours, of torch's, of other devices.
    line = torch_init("cpu", (4,), mesh_dim_names=("all",))
    on_line = redistribute(theirs, [Shard(1)], line)
    assert on_line.device_mesh is line
    assert torch.equal(on_line.full_tensor(), WHOLE)
    assert torch.equal(
        redistribute(theirs, "[S(all),R]", DeviceMesh.from_torch(line)).full_tensor(), WHOLE
    )
    pair = DeviceMesh([1, 3], (2,))
    two = redistribute(theirs, "[S0,R]", pair)
    assert two.device_mesh is pair.to_torch()
    assert two.to_local().shape == ({1: (4, 5), 3: (3, 5)}.get(rank, (0,)))
    back = redistribute(two, "[S1,S0]", mesh)
    assert torch.equal(back.full_tensor(), WHOLE)
    # Links for the plan come with a mesh of ours; nothing moves between it and torch's.
    linked = DeviceMesh(mesh.ids, mesh.shape, None, (1e-6, 1e-6), (1e-12, 1e-9))
    priced = redistribute(theirs, "[R,S01]", linked)
    assert priced.device_mesh is torch_mesh
    assert torch.equal(priced.full_tensor(), WHOLE)
    # Differentiable, across meshes of the same devices too.
    for target, there in (("[S10,R]", None), ("[R,S0]", line)):
        leaf = torch_distribute(WHOLE, torch_mesh, [Shard(1), Replicate()]).requires_grad_()
        result = redistribute(leaf, target, there)
        (DTensor.from_torch(result).to_global() ** 2).sum().backward()
        assert isinstance(leaf.grad, TorchDTensor)
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * WHOLE)


def refused(mesh):
    torch_mesh = mesh.to_torch()
    theirs = torch_distribute(WHOLE, torch_mesh, [Shard(0), Shard(1)])
    larger = TorchMesh("cpu", torch.arange(8).reshape(2, 4), _init_backend=False)
    stranger = TorchDTensor.from_local(WHOLE, larger, [Replicate(), Replicate()])
    alone = SimulatedCommunicator(mesh)
    mixed = DTensor.from_local(WHOLE.clone(), mesh, "[R,R|P0,Pavg1]")
    across = TorchDTensor.from_local(
        torch.ones(2), torch_mesh, [Shard(0), _StridedShard(0, split_factor=2)]
    )
    scaled = theirs.norm()
    ours = DTensor(WHOLE, mesh, "[R,R]")
    return [
        told(lambda: DTensor.from_torch(WHOLE)),
        told(lambda: DTensor.from_torch(stranger)),
        told(lambda: DTensor.from_torch(theirs, device_mesh=DeviceMesh(range(4), (4,)))),
        told(lambda: DTensor(WHOLE, mesh, "[R,R]", communicator=alone).to_torch()),
        told(lambda: mixed.to_torch()),
        told(lambda: DTensor.from_torch(across)),
        told(lambda: DTensor.from_torch(scaled)),
        told(lambda: redistribute(theirs, [Shard(0)])),
        told(lambda: redistribute(theirs, [Shard(0), Partial()])),
        told(lambda: redistribute(theirs, [Shard(2), Replicate()])),
        told(lambda: redistribute(theirs, "[S0]")),
        told(lambda: redistribute(theirs, "[S(pp),R]")),
        told(lambda: redistribute(ours, "[S0]")),
        told(lambda: DeviceMesh.from_group(mesh.get_all_groups(), "cpu")),
    ]


def keywords_mean_what_they_do_in_torch(rank, mesh):
    torch_mesh = mesh.to_torch()
    own, factor = WHOLE + rank, WHOLE.cos() * (rank + 1)
    cuts: list[list[Placement]] = [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate()] * 2]
    parts: list[list[Placement]] = [[Partial(), Partial()], [Partial("avg"), Replicate()]]
    for source, pending in product(cuts, [None, *parts]):
        for data_rank in (0, 1):
            ours = distribute_tensor(own, mesh, source, src_data_rank=data_rank)
            theirs = torch_distribute(own.clone(), torch_mesh, source, src_data_rank=data_rank)
            assert torch.equal(ours.to_local(), theirs.to_local())
        weight = WHOLE.cos() if pending is None else factor
        leaves: list[Any] = [ours.requires_grad_(), theirs.requires_grad_()]
        for leaf in leaves:
            whole = leaf.full_tensor(grad_placements=pending)
            assert torch.equal(whole, WHOLE + 3)
            (whole**2 * weight).sum().backward()
        mine, other = (leaf.grad.full_tensor() for leaf in leaves)
        assert torch.allclose(mine, other), (source, pending)
    everywhere = distribute_tensor(WHOLE, mesh, cuts[0], src_data_rank=None)
    moved = everywhere.redistribute(mesh, cuts[1], async_op=True)
    there = torch_distribute(WHOLE, torch_mesh, cuts[0]).redistribute(torch_mesh, cuts[1])
    assert torch.equal(moved.to_local(), there.to_local())
    rows = 4 - rank // 2
    layouts: list[tuple[Placement, Placement]] = [(Shard(0), Partial()), (Shard(0), Replicate())]
    for placements in layouts:
        results = []
        for kind, on in ((DTensor, mesh), (TorchDTensor, torch_mesh)):
            local: Any = torch.full((rows, 2), rank + 1.0, requires_grad=True)
            words: Any = {"run_check": False, "shape": torch.Size((7, 2)), "stride": (2, 1)}
            words["grad_placements"] = [Shard(0), Replicate()]
            made: Any = kind.from_local(local, on, placements, **words)
            (made.redistribute(on, [Shard(0), Replicate()]).to_local() ** 2).sum().backward()
            results.append((made.shape, local.grad))
        assert results[0][0] == results[1][0]
        assert torch.equal(results[0][1], results[1][1])


def groups_make_a_mesh(_, mesh):
    everyone: Any = dist.group.WORLD
    assert DeviceMesh.from_group(everyone, "cpu") == DeviceMesh(range(4))
    groups = mesh.get_all_groups()
    again = DeviceMesh.from_group(groups, "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert again == mesh
    assert again.get_group("tp") is groups[1]
    tp = DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("tp",))
    assert tp == mesh["tp"]
    assert torch.equal(DTensor(WHOLE, tp, "[S0,R]").to_global(), WHOLE)


def play(rank, every, seeds):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    for scene in (
        storage_is_shared,
        what_torch_has_cut,
        orders_beside_placements,
        torch_code_gets_our_plans,
        parts_are_strided_shards,
        keywords_mean_what_they_do_in_torch,
        groups_make_a_mesh,
        *SCENES,
    ):
        scene(rank, mesh)
        dist.barrier()
    gradients_pass_both_ways(rank, mesh, every)
    random_graphs(range(seeds), mesh)
    return refused(mesh)


def parts_are_strided_shards(_, mesh):
    """As in a dim that was flattened over a sharded one, and in experts with gate and up."""
    torch_mesh = mesh.to_torch()
    tall = torch.arange(64).view(16, 4)
    flat = torch_distribute(tall, torch_mesh, [Replicate(), Shard(1)]).view(64)
    ours = DTensor.from_torch(flat)
    parts = ",".join(["4"] * 16)
    assert str(ours.sharding_spec) == f"[S1{{{parts}}}]"
    assert torch.equal(ours.to_global(), torch.arange(64))
    for spec, dim in (("[S0{8,8},S1]", 0), ("[S1{4,4,4,4},R]", 0), ("[S0,S1{2,2}]", 1)):
        made = DTensor(tall, mesh, spec)
        theirs = made.to_torch()
        assert any(isinstance(p, _StridedShard) and p.dim == dim for p in theirs.placements)
        assert torch.equal(theirs.full_tensor(), tall), (spec, theirs.placements)
        assert torch.equal(theirs.to_local(), made.to_local())
        assert DTensor.from_torch(theirs).layout == made.layout
    for spec in ("[S01{8,8},R]", "[S0{8,8/1},R]", "[S0{4,12},R]", "[S0*2,R]"):
        with pytest.raises(LossyConversionError, match="redistribute to"):
            DTensor(tall, mesh, spec).to_torch()


SAMPLE = pytest.param((5, 2), id="sample")
ALL = pytest.param((1, 6), id="all", marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=[SAMPLE, ALL])
def refusals(request, tmp_path_factory):
    return run_ranks(4, tmp_path_factory.mktemp("job"), play, *request.param)


REFUSALS = [
    "LayoutError: from_torch takes a DTensor of torch, not a Tensor; use from_local for a shard",
    "MeshError: torch mesh 2x4 has device 7, but this job has 4 ranks",
    "LayoutError: the tensor is on a torch mesh of shape (2, 2), but mesh 4 has shape (4,)",
    "CommunicatorError: this process simulates mesh dp=2,tp=2, but torch's DTensor needs one "
    "process per device; start the program with torchrun, or hand on to_global()",
    "LossyConversionError: torch has no tensor with several kinds of pending reductions, such as "
    "[R,R|P0,Pavg1]",
    "LayoutError: axis 0 has split factor 1",
    "LossyConversionError: placement _NormP(2)",
    "LayoutError: 1 placement for a mesh of 2 axes (2x2); give one per axis",
    "LayoutError: ",
    "LayoutError: the placement of axis 0 splits dim 2, but the tensor has 2 dims",
    "LayoutError: spec [S0] is for 1 dim, but the tensor of shape (7, 5) has 2 dims",
    "AxisError: spec [S(pp),R]: mesh dp=2,tp=2 has no axis named 'pp'",
    "LayoutError: redistribute takes a DTensor of torch, not a DTensor",
    "MeshError: from_group: ",
]


@pytest.mark.parametrize("case", range(len(REFUSALS)))
def test_what_does_not_fit_is_one_line_on_every_rank(refusals, case):
    """And before that, everything that is asserted on the ranks themselves."""
    assert len(refusals) == 4
    for told_here in refusals:
        assert len(told_here) == len(REFUSALS)
        assert "\n" not in told_here[case]
        assert told_here[case].startswith(REFUSALS[case])


def test_without_a_job():
    tensor = DTensor(WHOLE, DeviceMesh(range(4), (2, 2)), "[S0,R]")
    with pytest.raises(CommunicatorError, match="simulates mesh 2x2"):
        tensor.to_torch()
    with pytest.raises(LayoutError, match="not a Tensor"):
        DTensor.from_torch(WHOLE)

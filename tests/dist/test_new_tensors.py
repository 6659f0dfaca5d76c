"""Tensors made from what ranks pass in, which may differ by rank; copies of them, and files."""

import copy
import io
import os
import pickle
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec import (
    DeviceMesh,
    DTensor,
    ShardingSpec,
    ShardSpecError,
    distribute_module,
    distribute_tensor,
    full,
)
from shardspec.comm.process_group import ProcessGroupCommunicator
from tests.conversions import plain_specs
from tests.dist.processes import communicator_by, run_ranks

pytestmark = pytest.mark.dist

MESHES = [
    DeviceMesh([2, 0, 3, 1], (2, 2)),
    DeviceMesh(range(4), (4,)),
    DeviceMesh([3, 1], (1, 2)),
    DeviceMesh([2], (1, 1)),
]
SHAPES = [(7, 5), (1, 2), (0, 3), (3, 700, 600)]
"""The last one is so large that copies are not sent by the source."""


@cache
def numbers(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(1 + rank))


def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that every rank has another of, in an order of its own in memory."""
    return numbers(rank, shape[::-1]).permute(*reversed(range(len(shape)))).to(dtype)


def one_source(rank: int, reads_peers: bool, every: int) -> tuple[int, list[str]]:
    """Every spec on every mesh, or a part of them, gets the boxes of one rank's tensor."""
    tried, wrong = 0, []
    for mesh in MESHES:
        if rank not in mesh.ids:
            assert DTensor(own(rank, (7, 5), torch.int64), mesh, "[S0,R]").shards == {}
            continue
        communicator = (
            ProcessGroupCommunicator.of(mesh)
            if reads_peers
            else communicator_by(mesh, reads_peers=False)
        )
        for number, shape in enumerate(SHAPES):
            # Of the large one a third.
            specs = plain_specs(len(shape), mesh.ndim)[:: 3 if len(shape) == 3 else 1]
            for place, spec in list(enumerate(specs))[::every]:
                dtype = [torch.float32, torch.bool, torch.bfloat16, torch.complex64][place % 4]
                source = (place + number) % mesh.size()
                tensor = own(rank, shape, dtype).requires_grad_(dtype == torch.float32)
                cut = DTensor(tensor, mesh, spec, src_rank=source, communicator=communicator)
                box = tuple(slice(*side) for side in cut.layout.box(rank))
                wanted = own(mesh.ids[source], shape, dtype)[box]
                shard = cut.to_local()
                tried += 1
                if not torch.equal(shard, wanted):
                    wrong.append(f"{spec} of {shape} on {mesh.ids}")
                if not (shard.is_contiguous() and shard.is_leaf and shard.dtype == dtype):
                    wrong.append(f"not new: {spec} of {shape} on {mesh.ids}")
                if shard.requires_grad != tensor.requires_grad:
                    wrong.append(f"gradient: {spec} of {shape} on {mesh.ids}")
    return tried, wrong


def ways_in(rank: int) -> dict[str, Any]:
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    torch.manual_seed(rank)
    found: dict[str, Any] = {}
    by_default = DTensor(torch.rand(4, 6), mesh, "[S(dp),R]")
    found["replicas"] = by_default.to_local().tolist()
    found["global"] = by_default.to_global().tolist()
    found["scalar"] = distribute_tensor(torch.rand(()), mesh, "[]").to_local().item()
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    module.get_buffer("1.running_mean").fill_(float(rank))
    mine = [tensor.tolist() for tensor in module.state_dict().values()]
    distribute_module(module, mesh, {"0.weight": "[S(tp),R]"}, src_rank=1)
    found["mine"] = mine
    found["module"] = [tensor.full_tensor().tolist() for tensor in module.state_dict().values()]
    same = torch.arange(8.0)
    found["trusted"] = DTensor(same, mesh, "[S(tp)]", src_rank=None).to_local().tolist()
    return found


def test_every_way_in_has_a_source(ranks_in):
    """As in the first example of the README, with numbers that are not seeded alike."""
    ranks = ranks_in("ways in")
    torch.manual_seed(0)
    whole = torch.rand(4, 6)
    for rank, found in enumerate(ranks):
        assert found["global"] == whole.tolist()
        assert found["replicas"] == whole[2 * (rank // 2) :][:2].tolist()
        assert found["scalar"] == ranks[0]["scalar"]
        assert found["module"] == ranks[1]["mine"]
        assert found["trusted"] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]][rank % 2]
    assert ranks[0]["mine"] != ranks[1]["mine"]


def said(attempt: Any) -> str:
    try:
        attempt()
    except (ShardSpecError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refused(rank: int) -> dict[str, str]:
    os.environ["SHARDSPEC_CHECK"] = "1"
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    whole = torch.ones(4, 6)
    cut = DTensor(whole, mesh, "[S0,R]")
    return {
        "shape": said(lambda: DTensor(torch.ones(4, 6 + (rank == 2)), mesh, "[S0,R]")),
        "dtype": said(lambda: DTensor(whole.double() if rank == 3 else whole, mesh, "[S0,R]")),
        "spec": said(lambda: DTensor(whole, mesh, "[S1,R]" if rank == 1 else "[S0,R]")),
        "source": said(lambda: DTensor(whole, mesh, "[S0,R]", src_rank=rank // 3)),
        "no source": said(lambda: DTensor(whole, mesh, "[S0,R]", src_rank=4)),
        "not a place": said(lambda: DTensor(whole, mesh, "[S0,R]", src_rank="0")),  # type: ignore[arg-type]  # what is refused
        "differs": said(lambda: DTensor(whole + (rank == 2), mesh, "[S0,R]", src_rank=None)),
        "fill": said(lambda: full((4,), rank // 3, device_mesh=mesh, sharding_spec="[S0]")),
        "number": said(lambda: cut * torch.tensor(1.0 + rank // 2 * (rank - 1))),
        "sparse": said(lambda: DTensor(whole.to_sparse(), mesh, "[S0,R]")),
        "sparse shard": said(lambda: DTensor.from_local(whole.to_sparse(), mesh, "[S0,R]")),
        "ours": said(lambda: DTensor(cut, mesh, "[S0,R]")),
        "torch's": said(lambda: DTensor(cut.to_torch(), mesh, "[S0,R]")),
        "parameter": said(lambda: nn.Parameter(cut)),
        "fully_shard": said(
            lambda: fully_shard(nn.Linear(4, 4), mesh=mesh["tp"])  # type: ignore[call-overload]
        ),
        "from_local": said(lambda: TorchDTensor.from_local(whole, mesh)),  # type: ignore[arg-type]  # refused
        "buffer": said(lambda: nn.Buffer(cut)),
    }


def test_what_cannot_be_made(ranks_in):
    for rank, found in enumerate(ranks_in("refused")):
        assert "rank 2 asks for another conversion than rank 0" in found["shape"]
        assert "[4, 7] where rank 0 has [4, 6]" in found["shape"]
        assert "float64 where rank 0 has float32" in found["dtype"]
        assert "[S1,R] where rank 0 has [S0,R]" in found["spec"]
        assert "src_rank 1 where rank 0 has 0" in found["source"]
        assert "src_rank 4 is no index into the 4 ids (0, 1, 2, 3)" in found["no source"]
        assert "src_rank '0' is no index" in found["not a place"]
        assert "that of rank 2 differs from that of rank 0" in found["differs"]
        assert "that of rank 3 differs from that of rank 0" in found["fill"]
        assert (
            "mul: a plain tensor of one element should be the same on every rank" in found["number"]
        )
        assert "that of rank 2, 3 differs from that of rank 0" in found["number"]
        assert "a sparse_coo tensor cannot be sharded" in found["sparse"]
        assert "to_dense()" in found["sparse shard"]
        remedy = "use torch.as_tensor(...) for arrays and lists, and redistribute"
        assert f"got a DTensor; {remedy}" in found["ours"]
        assert "DTensor.from_torch" in found["torch's"]
        assert "nn.Parameter(tensor.to_torch())" in found["parameter"]
        assert "distribute_module" in found["buffer"]
        assert "pass mesh.to_torch() to torch functions" in found["from_local"]
        assert all("\n" not in message for message in found.values()), rank


def copies(_: int) -> list[str]:
    """Copy and store tensors after a conversion, when the job has links between its processes."""
    mesh = DeviceMesh(range(2), (2,))
    whole = torch.arange(6.0).reshape(3, 2)
    leaf = DTensor(whole.clone().requires_grad_(), mesh, "[S0,R]")
    cut = leaf.redistribute("[R,S0]")
    parameter = nn.Parameter(DTensor(whole, mesh, "[S0,R]").to_torch())
    tensors = {
        "leaf": leaf,
        "computed": DTensor.from_torch((cut.to_torch() * 1).detach()),
        "parameter": DTensor.from_torch(parameter),
        "other way": DTensor(
            whole, mesh, "[S0,R]", communicator=communicator_by(mesh, reads_peers=False)
        ),
    }
    wrong = []
    for name, tensor in tensors.items():
        file = io.BytesIO()
        torch.save({"t": tensor}, file)
        file.seek(0)
        found = {
            "deepcopy": copy.deepcopy(tensor),
            "pickle": pickle.loads(pickle.dumps(tensor)),
            "torch.save": torch.load(file, weights_only=False)["t"],
        }
        for way, again in found.items():
            same = torch.equal(again.redistribute("[R,R]").to_local(), whole)
            if not (same and again.layout == tensor.layout):
                wrong.append(f"{name} by {way}: {again}")
            if again.requires_grad != tensor.requires_grad:
                wrong.append(f"gradient of {name} by {way}")
            with torch.no_grad():
                again.to_local().zero_()
        if not torch.equal(tensor.to_global(), whole):
            wrong.append(f"{name} is shared")
    if not torch.equal(copy.copy(leaf).to_local(), leaf.to_local()):
        wrong.append("copy")
    return wrong


def test_copies_pickles_and_files_in_a_job(tmp_path):
    assert run_ranks(2, tmp_path, copies) == [[], []]


def without_data(rank: int) -> list[str]:
    """Meta tensors in a job: shapes and layouts only."""
    mesh = DeviceMesh(range(4), (2, 2))
    wrong = []
    meta = torch.ones(7, 5, device="meta", requires_grad=True)
    for spec in plain_specs(2, 2):
        for target in plain_specs(2, 2):
            moved = DTensor(meta, mesh, spec).redistribute(target)
            shard = moved.to_local()
            if not shard.is_meta or tuple(shard.shape) != moved.layout.local_shape(rank):
                wrong.append(f"{spec} → {target}: {shard}")
    addend = DTensor.from_local(torch.ones(7, 5, device="meta"), mesh, "[R,R|P01]")
    if tuple(addend.redistribute("[S01,R]").to_local().shape) != (2 if rank < 3 else 1, 5):
        wrong.append("pending")
    leaf = DTensor(meta, mesh, "[S0,R]")
    leaf.redistribute("[R,S1]").to_global().sum().backward()
    if leaf.grad is None or not leaf.grad.to_local().is_meta:
        wrong.append("gradient")
    return wrong


def test_meta_tensors_in_a_job(ranks_in):
    assert ranks_in("meta") == [[]] * 4


def second_derivatives(rank: int, every: int) -> tuple[int, list[str]]:
    """Through some conversions, by both ways that bytes go, and through torch's DTensor."""
    tried, wrong = 0, []
    whole = (torch.arange(35.0) * 0.37).sin().reshape(7, 5).double()
    wanted = 18 * whole**3
    for shape in ((2, 2), (1, 4), (4, 1)):
        mesh = DeviceMesh([2, 0, 3, 1], shape)
        pairs = list(product(plain_specs(2, 2), repeat=2))[:: every * (2 + sum(shape))]
        for number, (source, target) in enumerate(pairs):
            communicator = (
                communicator_by(mesh, reads_peers=False)
                if number % 2
                else ProcessGroupCommunicator.of(mesh)
            )
            leaf = DTensor(whole.clone().requires_grad_(), mesh, source, communicator=communicator)
            shard = leaf.to_local()
            loss = (leaf.redistribute(target).to_global() ** 3).sum()
            (first,) = torch.autograd.grad(loss, shard, create_graph=True)
            gradient = DTensor.from_local(first, mesh, source, communicator=communicator)
            again = (gradient.redistribute(target).to_global() ** 2).sum() / 2
            (second,) = torch.autograd.grad(again, shard)
            expected = wanted[tuple(slice(*side) for side in leaf.layout.box(rank))]
            tried += 1
            if not torch.allclose(second, expected, rtol=1e-12, atol=0):
                wrong.append(f"{source} → {target} on {shape}")
    leaf = DTensor(whole.clone().requires_grad_(), DeviceMesh(range(4), (2, 2)), "[S1,R]")
    cube: Any = leaf * leaf * leaf
    loss = (cube.redistribute("[R,S1]") * 1.0).to_global().sum()
    (first,) = torch.autograd.grad(loss, leaf.to_local(), create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum() / 2, leaf.to_local())
    expected = wanted[tuple(slice(*side) for side in leaf.layout.box(rank))]
    if not torch.allclose(second, expected, rtol=1e-12, atol=0):
        wrong.append("by operations of torch")
    return tried, wrong


def play(rank: int, every: int) -> dict[str, Any]:
    return {
        "reading": one_source(rank, True, every),
        "messages": one_source(rank, False, every),
        "ways in": ways_in(rank),
        "meta": without_data(rank),
        "second derivatives": second_derivatives(rank, every),
        "refused": refused(rank),
    }


@pytest.fixture(scope="module", params=[4, pytest.param(1, marks=pytest.mark.exhaustive)])
def every(request):
    return request.param


@pytest.fixture(scope="module")
def ranks_in(tmp_path_factory, every):
    """Return what each rank has returned from a part of the one job."""
    ranks = run_ranks(4, tmp_path_factory.mktemp("job"), play, every)
    return lambda part: [parts[part] for parts in ranks]


@pytest.mark.parametrize("way", ["reading", "messages"])
def test_boxes_come_from_one_rank(ranks_in, every, way):
    found = ranks_in(way)
    assert [wrong for _, wrong in found] == [[]] * 4
    # 11 specs of two dims and 7 of three on a mesh of two axes; 3 and 2 on one of a single axis.
    assert [tried for tried, _ in found] == {1: [51, 91, 91, 91], 4: [15, 26, 26, 26]}[every]


def test_second_derivatives_in_a_job(ranks_in, every):
    found = ranks_in("second derivatives")
    assert [wrong for _, wrong in found] == [[]] * 4
    assert {tried for tried, _ in found} == {{1: 21 + 18 + 18, 4: 6 + 5 + 5}[every]}


def test_a_simulated_tensor_is_copied_and_stored():
    mesh = DeviceMesh(range(4), (2, 2))
    whole = torch.arange(6.0).reshape(3, 2)
    leaf = DTensor(whole.clone().requires_grad_(), mesh, "[S0,S1]")
    leaf.redistribute("[R,R]").to_global().sum().backward()
    file = io.BytesIO()
    torch.save(leaf, file)
    file.seek(0)
    for again in (copy.deepcopy(leaf), torch.load(file, weights_only=False)):
        assert torch.equal(again.to_global(), whole)
        assert again.requires_grad
        assert again.sharding_spec == ShardingSpec.parse("[S0,S1]")
        again.to_local(0).data.zero_()
    assert torch.equal(leaf.to_global(), whole)

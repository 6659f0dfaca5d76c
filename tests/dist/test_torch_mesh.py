"""Meshes and torch's, each made of the other in a job of four, and the groups they share."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard

from shardspec import DeviceMesh, ShardSpecError, init_device_mesh
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.errors import AxisError, CommunicatorError
from shardspec.mesh.job import current_job
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist


def groups_made() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def told(call) -> str:
    try:
        call()
    except ShardSpecError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def ours_first(rank):
    before = groups_made()
    names, alpha, beta = ("dp", "tp"), (1e-5, 2e-6), (1e-9, 1e-10)
    mesh = init_device_mesh("cpu", (2, 2), axis_names=names, mesh_alpha=alpha, mesh_beta=beta)
    assert mesh == DeviceMesh(range(4), (2, 2), None, alpha, beta, axis_names=names)
    # Of the four groups of two, each rank is in two.
    assert groups_made() == before + 2
    torch_mesh = mesh.to_torch()
    assert isinstance(torch_mesh, TorchMesh)
    assert torch_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert torch_mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.to_torch() is torch_mesh
    assert DeviceMesh.from_torch(torch_mesh) == mesh
    row, column = rank // 2, rank % 2
    rows, columns = mesh["tp"], mesh["dp"]
    assert rows.ids == (2 * row, 2 * row + 1)
    assert columns.ids == (column, column + 2)
    assert (rows.axis_names, rows.shape, rows.mesh_alpha) == (("tp",), (2,), (2e-6,))
    assert mesh["dp", "tp"] == mesh
    assert mesh["tp", "dp"].ids == (0, 2, 1, 3)
    assert rows["tp"] == rows
    # A slice in torch is torch's slice of the same mesh: modules may be cut over several.
    assert rows.to_torch() == torch_mesh["tp"]
    assert rows.to_torch()._get_root_mesh() is torch_mesh
    for axis, members in (("dp", columns.ids), ("tp", rows.ids)):
        group = mesh.get_group(axis)
        assert group is torch_mesh.get_group(axis)
        assert group is mesh[axis].get_group()
        assert group is mesh[axis].to_torch().get_group()
        assert group is current_job().group(members)
        assert tuple(dist.get_process_group_ranks(group)) == members
        total = torch.tensor(rank)
        dist.all_reduce(total, group=group)
        assert total == sum(members)
    DeviceMesh(range(4), (2, 2), init_process_group=True).to_torch()
    DeviceMesh.from_torch(torch_mesh["dp"]).to_torch()
    assert groups_made() == before + 2
    # torch's collectives run over them.
    cut = TorchDTensor.from_local(torch.tensor([[float(rank)]]), torch_mesh, [Shard(0), Shard(1)])
    assert cut.full_tensor().tolist() == [[0.0, 1.0], [2.0, 3.0]]
    # Axes without names get some in torch; on the way back they have none.
    plain = DeviceMesh(range(4), (2, 2))
    assert plain.to_torch().mesh_dim_names == ("axis_0", "axis_1")
    assert DeviceMesh.from_torch(plain.to_torch()) == plain
    # The whole job in one axis is the job's own group; an axis of one device gets one.
    line = DeviceMesh(range(4), (4,), axis_names=("all",))
    assert line.get_group() is dist.group.WORLD
    assert line.to_torch().get_group() is dist.group.WORLD
    assert groups_made() == before + 2
    flat = DeviceMesh(range(4), (1, 4))
    assert flat.to_torch().get_group(0).size() == 1
    assert groups_made() == before + 3
    return told(lambda: mesh.get_group())


def torchs_first(rank):
    """Torch makes the groups, of an arrangement that nobody had before; ours uses them."""
    before = groups_made()
    torch_mesh = TorchMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("a", "b"))
    assert groups_made() == before + 2
    mesh = DeviceMesh.from_torch(torch_mesh)
    assert mesh == DeviceMesh([0, 2, 1, 3], (2, 2), axis_names=("a", "b"))
    assert mesh.to_torch() is torch_mesh
    ProcessGroupCommunicator.of(mesh)
    for axis in "ab":
        members = mesh.group(rank, [axis])
        assert mesh.get_group(axis) is torch_mesh.get_group(axis)
        assert current_job().group(members) is not None
    assert mesh["b"].to_torch() == torch_mesh["b"]
    # A slice that torch made has our value, and is found again.
    part = DeviceMesh.from_torch(torch_mesh["a"])
    assert part == mesh["a"]
    assert part.to_torch()._get_root_mesh() is torch_mesh
    assert groups_made() == before + 2
    torch_init("cpu", (2, 2))  # torch makes its groups again
    return groups_made() - before


def some_ranks(rank):
    """Two of the ranks; all four call."""
    mesh = DeviceMesh([1, 2], (2,), axis_names=("pair",))
    torch_mesh = mesh.to_torch()
    assert torch_mesh.mesh.tolist() == [1, 2]
    inside = rank in mesh
    assert (torch_mesh.get_coordinate() is not None) == inside
    local = torch.tensor([float(rank)])
    cut = TorchDTensor.from_local(local, torch_mesh, [Shard(0)], shape=torch.Size([2]), stride=(1,))
    total = (cut + 1).sum()
    assert isinstance(total, TorchDTensor)
    if inside:
        assert total.full_tensor() == 5
        assert mesh["pair"] == mesh
    theirs = TorchMesh("cpu", torch.tensor([0, 3]))
    assert DeviceMesh.from_torch(theirs) == DeviceMesh([0, 3], (2,))
    assert DeviceMesh([0, 3], (2,)).to_torch() is theirs
    return told(lambda: mesh["pair"]), told(lambda: mesh.get_group())


def refused():
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    twisted = TorchMesh("cpu", torch.tensor([[3, 1], [0, 2]]))
    larger = TorchMesh("cpu", torch.arange(6), _init_backend=False)
    without = TorchMesh("cpu", torch.arange(4), _init_backend=False)
    return [
        told(lambda: mesh["pp"]),
        told(lambda: mesh[0]),  # type: ignore[index]  # the test
        told(lambda: mesh["tp", "tp"]),
        told(lambda: mesh.get_group("pp")),
        told(lambda: DeviceMesh([3, 1, 0, 2], (2, 2)).to_torch()),
        told(lambda: DeviceMesh([1, 7], (2,)).to_torch()),
        told(lambda: DeviceMesh.from_torch(larger)),
        told(lambda: DeviceMesh.from_torch(without)),
        told(lambda: DeviceMesh.from_torch(twisted)),
        told(lambda: init_device_mesh("cpu", (2, 4))),
        told(lambda: init_device_mesh("cpux", (2, 2))),
        told(lambda: init_device_mesh("cpu", (2.5, 2))),  # type: ignore[arg-type]  # the test
    ]


def play(rank):
    return ours_first(rank), torchs_first(rank), some_ranks(rank), refused()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_ranks(4, tmp_path_factory.mktemp("job"), play)


def test_groups_are_shared_whoever_makes_them(outcomes):
    assert len(outcomes) == 4
    for several, again, _, _ in outcomes:
        assert several == ("AxisError: mesh dp=2,tp=2 has 2 axes; name one, as in get_group('dp')")
        assert again == 4
    for rank in (0, 3):
        sliced, group = outcomes[rank][2]
        assert sliced == (
            "CommunicatorError: mesh['pair'] is the slice of the calling rank, but rank "
            f"{rank} is not in mesh pair=2 of ids (1, 2)"
        )
        assert group.startswith("CommunicatorError: get_group returns a group of the calling rank")


REFUSALS = [
    "AxisError: mesh dp=2,tp=2 has no axis named 'pp'; its names: dp, tp",
    "AxisError: mesh[0]: slice a mesh by axis names, as in mesh['tp']",
    "AxisError: axes (1, 1) name one axis twice; name each once",
    "AxisError: mesh dp=2,tp=2 has no axis named 'pp'; its names: dp, tp",
    "MeshError: mesh 2x2 has the ids (3, 0) along an axis, but torch sorts ranks and "
    "would mix up such shards; redistribute(spec, device_mesh=) to a mesh of ascending ids",
    "CommunicatorError: device 7 of mesh 2 is not a rank of this job, which has 4 ranks numbered "
    "from 0",
    "MeshError: torch mesh 6 has device 5, but this job has 4 ranks numbered from 0; make the "
    "mesh in this job",
    "MeshError: torch mesh 4 has no group of the ranks [0, 1, 2, 3] in this job; make the mesh "
    "in this job, with groups",
    "MeshError: mesh 2x2 has the ids (3, 0) along an axis, but torch sorts ranks",
    "CommunicatorError: device 4 of mesh 2x4 is not a rank of this job, which has 4 ranks numbered "
    "from 0",
    "MeshError: init_device_mesh('cpux', (2, 2)): give a device type and whole numbers, as in "
    "init_device_mesh('cpu', (2, 4)): Expected one of cpu",
    "MeshError: init_device_mesh('cpu', (2.5, 2)): give a device type and whole numbers",
]


@pytest.mark.parametrize("case", range(len(REFUSALS)))
def test_what_does_not_fit_is_one_line_on_every_rank(outcomes, case):
    wanted = REFUSALS[case]
    for *_, refusals in outcomes:
        assert len(refusals) == len(REFUSALS)
        assert "\n" not in refusals[case]
        assert refusals[case].startswith(wanted)


def test_without_a_job():
    assert not dist.is_initialized()
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    for call in (mesh.to_torch, lambda: mesh["tp"], lambda: mesh.get_group("tp")):
        with pytest.raises(CommunicatorError, match="distributed is not initialized"):
            call()
    assert init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp")) == mesh
    ended = TorchMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    with pytest.raises(CommunicatorError, match="the job of torch mesh 2 has ended"):
        DeviceMesh.from_torch(ended)


def test_a_mesh_stays_a_value():
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    assert hash(mesh) == hash(DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp")))
    with pytest.raises(AxisError, match="slice a mesh by axis names"):
        list(mesh)  # type: ignore[call-overload]  # a mesh is not a sequence

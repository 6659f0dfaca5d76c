"""Keeps the process groups and torch meshes of the running job, and makes missing ones.

Every process group is made once: communicators use the groups of torch's meshes, and new meshes
reuse existing groups.
"""

import atexit
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.distributed_c10d import Store, _get_default_store

from shardspec.errors import CommunicatorError, MeshError

_RELEASE_SECONDS: Final = 0.05


class _Mesh(Protocol):
    """The members of `DeviceMesh` that a job needs; `DeviceMesh` itself imports this module."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axis_names(self) -> tuple[str, ...] | None: ...
    def group(self, physical_id: int, axes: Iterable[int]) -> tuple[int, ...]: ...
    def groups(self, axes: Iterable[int]) -> tuple[tuple[int, ...], ...]: ...


@dataclass(eq=False)
class Job:
    """The state of a running job in one of its processes."""

    pid: int = field(default_factory=os.getpid)
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    """Ascending ranks -> their group, made by every rank; None for groups without this rank."""
    gloo: dist.ProcessGroup | None = None
    """Process group for notes between ranks, if the default group has only NCCL."""
    communicators: dict[_Mesh, Any] = field(default_factory=dict)
    """Mesh -> its `shardspec.comm.process_group.ProcessGroupCommunicator`."""
    notes: Any = None
    """The `shardspec.comm.notes.Notes` of the process."""
    connections: dict[int, Any] = field(default_factory=dict)
    """Rank -> data that a transport keeps for that peer."""
    joined: dict[_Mesh, None] = field(default_factory=dict)
    """Meshes whose groups exist, in the order of their creation."""
    torch_meshes: list[tuple[_Mesh, TorchMesh]] = field(default_factory=list)
    """Pairs of equivalent meshes, ours and torch's."""
    device_types: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Ids of a mesh -> its device type."""

    def make_groups(self, mesh: _Mesh, least: int = 1) -> None:
        """Make the missing groups of `least` or more ranks along every axis, on every rank."""
        for members in _along_each_axis(mesh):
            ranks = tuple(sorted(members))
            if least <= len(ranks) < dist.get_world_size() and ranks not in self.groups:
                group = dist.new_group(list(ranks))
                self.groups[ranks] = group if dist.get_rank() in ranks else None

    def make_gloo(self) -> None:
        """Make the gloo group if the default group has only NCCL; every rank calls this."""
        if not self.gloo and dist.get_world_size() > 1 and _is_nccl_alone():
            self.gloo = dist.new_group(backend="gloo")

    def torch_mesh(self, mesh: _Mesh, device_type: str | None = None) -> TorchMesh | None:
        """Return the torch mesh that was already made of a mesh; None if there is none."""
        for own_mesh, torch_mesh in self.torch_meshes:
            if _grid(own_mesh) == _grid(mesh) and device_type in (None, torch_mesh.device_type):
                return torch_mesh
        return None

    def group(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the existing group of ranks that include this one; None if missing."""
        if len(members) == dist.get_world_size():
            return dist.group.WORLD
        return self.groups.get(tuple(sorted(members)))


_JOBS: Final[WeakKeyDictionary[dist.ProcessGroup, Job]] = WeakKeyDictionary()
"""Default group -> its job. An entry disappears with its group."""


def _is_nccl_alone() -> bool:
    """Return True if the default group supports only tensors on accelerators."""
    return {part.split(":")[-1] for part in dist.get_backend_config().split(",")} == {"nccl"}


def current_job() -> Job:
    """Return the state of the running job; raises `CommunicatorError` without a job."""
    world = dist.group.WORLD
    if world is None:
        raise CommunicatorError(
            "torch.distributed is not initialized; start the program with torchrun and make "
            "the mesh with init_process_group=True"
        )
    job = _JOBS.get(world)
    if job is None:
        job = _JOBS.setdefault(world, Job())
        # A gloo thread releases tensors some time after a collective. If the interpreter has
        # finished by then, torch aborts the process.
        atexit.register(time.sleep, _RELEASE_SECONDS)
    return job


def job_store() -> Store:
    """Return the key-value store of the running job."""
    return _get_default_store()


def job_of(mesh: _Mesh) -> Job:
    """Return the running job; raises `CommunicatorError` if it lacks a device of the mesh."""
    job, world = current_job(), dist.get_world_size()
    if max(mesh.ids) >= world:
        raise CommunicatorError(
            f"device {next(id_ for id_ in mesh.ids if id_ >= world)} of mesh {mesh} is not a rank "
            f"of this job, which has {world} ranks numbered from 0"
        )
    return job


def join(mesh: _Mesh) -> Job:
    """Return the job of a mesh, and make the groups along its axes if the mesh has all ranks.

    All ranks of such a mesh call this.
    """
    job = job_of(mesh)
    if mesh not in job.joined:
        if len(mesh.ids) == dist.get_world_size():
            job.make_gloo()
            job.make_groups(mesh, least=2)
        job.joined[mesh] = None
    return job


def start(mesh: _Mesh, device_type: str | None = None) -> None:
    """Initialize `torch.distributed` unless it is initialized, and `join` the mesh.

    CUDA tensors use NCCL if CUDA is available and `device_type` is not ``"cpu"``.
    """
    if device_type is not None:
        try:
            torch.device(device_type)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise MeshError(f"device type {device_type!r} cannot be used: {why}") from None
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise CommunicatorError(
                "init_process_group=True needs a job: start the program with 'torchrun "
                f"--nproc_per_node {len(mesh.ids)} PROGRAM', or omit it to simulate the mesh"
            )
        backend = "gloo"
        if device_type != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend)
        except (RuntimeError, ValueError, OSError) as error:  # of torch
            raise CommunicatorError(
                f"the processes of the job did not connect: {str(error).splitlines()[0]}; start "
                "all of them by torchrun"
            ) from error
    job = join(mesh)
    if device_type is not None:
        job.device_types[mesh.ids] = device_type


def rank_in(mesh: _Mesh, use: str) -> int:
    """Return the calling rank and `join` the mesh; raises `CommunicatorError` for other ranks."""
    if not dist.is_initialized():
        raise CommunicatorError(
            f"{use}, but torch.distributed is not initialized; start the program with torchrun, "
            "or name the indices, as in mesh.submesh({'dp': 0})"
        )
    join(mesh)
    rank = dist.get_rank()
    if rank not in mesh.ids:
        raise CommunicatorError(f"{use}, but rank {rank} is not in mesh {mesh} of ids {mesh.ids}")
    return rank


def own_rank() -> int:
    """Return the calling rank; raises `CommunicatorError` without a job."""
    if not dist.is_initialized():
        raise CommunicatorError(
            "torch.distributed is not initialized, so this process has no rank; start the program "
            "with torchrun, or name a device, as in mesh.coordinates(0)"
        )
    return dist.get_rank()


def group_along(mesh: _Mesh, axis: int) -> dist.ProcessGroup:
    """Return the calling rank's process group along an axis."""
    rank, job = rank_in(mesh, "get_group returns a group of the calling rank"), current_job()
    existing = job.torch_mesh(mesh)
    if existing is not None:
        return existing.get_group(axis)
    return job.group(mesh.group(rank, [axis])) or to_torch(mesh).get_group(axis)


def device_type_of(mesh: _Mesh) -> str:
    """Return the device type of a mesh, or of a mesh that contains it; "cpu" by default."""
    if not dist.is_initialized():
        return "cpu"
    job, ids = current_job(), set(mesh.ids)
    existing = job.torch_mesh(mesh)
    if existing is not None:
        return existing.device_type
    return next((kind for outer, kind in job.device_types.items() if ids <= {*outer}), "cpu")


def from_torch(torch_mesh: TorchMesh, make: Callable[..., Any]) -> Any:  # noqa: ANN401  # the result of `make`
    """Return the mesh that a torch mesh was made from, or a new mesh that shares its groups.

    If it has all ranks of the job, every rank calls this at the same point of the program.
    """
    job = current_job() if dist.is_initialized() else None
    for own_mesh, existing in job.torch_meshes if job else ():
        if existing == torch_mesh:
            return own_mesh
    mesh = make(torch_mesh.mesh, axis_names=torch_mesh.mesh_dim_names)
    if job is None:
        raise CommunicatorError(
            f"the job of torch mesh {mesh} has ended, since torch.distributed is not initialized; "
            "make a mesh in a running job"
        )
    world = dist.get_world_size()
    if max(mesh.ids) >= world:
        raise MeshError(
            f"torch mesh {mesh} has device {max(mesh.ids)}, but this job has {world} ranks "
            "numbered from 0; make the mesh in this job"
        )
    check_ascending(mesh)
    _adopt_groups(job, torch_mesh, mesh)
    job.torch_meshes.append((mesh, torch_mesh))
    return mesh


def to_torch(mesh: _Mesh, device_type: str | None = None) -> TorchMesh:
    """Return the torch mesh of a mesh, the same object each time; every rank of the job calls this.

    The call creates missing process groups.
    """
    job, device_type = job_of(mesh), device_type or device_type_of(mesh)
    made = job.torch_mesh(mesh, device_type)
    if made is None:
        check_ascending(mesh)
        made = _slice_in_torch(job, mesh, device_type) or _made_of_groups(job, mesh, device_type)
        job.torch_meshes.append((mesh, made))
    return made


def _grid(mesh: _Mesh) -> object:
    """Return ids, shape and names of a mesh, which are equal for its torch mesh."""
    return mesh.ids, mesh.shape, mesh.axis_names


def _along_each_axis(mesh: _Mesh) -> list[tuple[int, ...]]:
    return [members for axis in range(len(mesh.shape)) for members in mesh.groups([axis])]


def check_ascending(mesh: _Mesh) -> None:
    """Raise `MeshError` if the ids along an axis do not ascend; torch assumes that they do."""
    for members in _along_each_axis(mesh):
        if list(members) != sorted(members):
            raise MeshError(
                f"mesh {mesh} has the ids {members} along an axis, but torch sorts ranks and would "
                "mix up such shards; redistribute(spec, device_mesh=) to a mesh of ascending ids"
            )


def _adopt_groups(job: Job, torch_mesh: TorchMesh, mesh: _Mesh) -> None:
    """Register the groups of a torch mesh of all ranks; raises `MeshError` for another job."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for axis in range(len(mesh.shape)) if rank in mesh.ids else ():
        members = list(mesh.group(rank, [axis]))
        try:
            group = torch_mesh.get_group(axis)
            ranks = dist.get_process_group_ranks(group)
        except (RuntimeError, KeyError, ValueError):
            ranks = []
        if ranks != members:
            raise MeshError(
                f"torch mesh {mesh} has no group of the ranks {members} in this job; make the mesh "
                "in this job, with groups"
            )
        same_backend = dist.get_backend_config(group) == dist.get_backend_config()
        if same_backend and len(members) < world == len(mesh.ids):
            for ranks_of_group in mesh.groups([axis]):
                job.groups.setdefault(ranks_of_group, group if rank in ranks_of_group else None)


def _slice_in_torch(job: Job, mesh: _Mesh, device_type: str) -> TorchMesh | None:
    """Return the torch mesh of a mesh as a slice of a larger torch mesh; None if it is no slice."""
    rank, own = dist.get_rank(), mesh.axis_names or ()
    for root in list(job.joined):
        names = root.axis_names or ()
        axes = [names.index(name) for name in own if name in names]
        larger = own and len(axes) == len(own) < len(names) and axes == sorted(axes)
        if not (larger and rank in root.ids):
            continue
        shape = tuple(root.shape[axis] for axis in axes)
        if (mesh.ids, mesh.shape) == (root.group(rank, axes), shape):
            return to_torch(root, device_type)[own]
    return None


def _made_of_groups(job: Job, mesh: _Mesh, device_type: str) -> TorchMesh:
    """Return a torch mesh over the job's groups; every rank makes the missing ones."""
    job.make_groups(mesh)
    rank, names, axes = dist.get_rank(), mesh.axis_names, range(len(mesh.shape))
    if names is None and len(axes) > 1:  # torch needs names for several axes
        names = tuple(f"axis_{axis}" for axis in axes)
    grid = torch.tensor(mesh.ids, dtype=torch.int).reshape(mesh.shape)
    if rank not in mesh.ids:
        # A rank outside the mesh has no groups, and torch needs none.
        return TorchMesh(device_type, grid, mesh_dim_names=names, _init_backend=False)
    maybe_groups = (job.group(mesh.group(rank, [axis])) for axis in axes)
    groups = [group for group in maybe_groups if group is not None]  # none is None
    if len(axes) == 1:
        return TorchMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return TorchMesh.from_group(groups, device_type, grid, mesh_dim_names=names)

"""Meshes and torch's own `DeviceMesh`: each made of the other, over the same process groups.

The groups belong to the job (`shardspec.comm.process_group`): torch's mesh is made over groups that
are there already, and groups that torch has made serve the communicator.
"""

import operator
from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardspec.comm.process_group import (
    Job,
    ProcessGroupCommunicator,
    check_members,
    current_job,
)
from shardspec.errors import AxisError, CommunicatorError, MeshError
from shardspec.mesh import Axis, DeviceMesh, LinkModel


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    axis_names: Sequence[str] | None = None,
    mesh_alpha: Sequence[float] | None = None,
    mesh_beta: Sequence[float] | None = None,
    link_model: LinkModel = "ring",
) -> DeviceMesh:
    """Start the job where that is still to be done, and return a mesh of its ranks.

    Every rank calls this. The groups of the mesh are made, and torch's mesh of it.

    Parameters
    ----------
    device_type
        Where tensors will be: ``"cpu"`` or ``"cuda"``.
    mesh_shape
        Devices along each axis; the ranks are numbered row by row, as torch does.
    axis_names, mesh_alpha, mesh_beta, link_model
        As for `DeviceMesh`.

    Raises
    ------
    CommunicatorError
        If the program was not started by torchrun and no process group exists, or the job has too
        few ranks.
    MeshError
        If shape, names or links do not describe a mesh, or the device type does not exist.

    Examples
    --------
    In a program of eight processes, started by torchrun::

        mesh = init_device_mesh("cpu", (2, 4), axis_names=("dp", "tp"))
        mesh["tp"].ids, mesh.get_group("tp")
    """
    try:
        torch.device(device_type)
        ids = range(prod(map(operator.index, mesh_shape)))
    except (RuntimeError, TypeError) as error:
        raise MeshError(
            f"init_device_mesh({device_type!r}, {mesh_shape!r}): give a device type and whole "
            f"numbers, as in init_device_mesh('cpu', (2, 4)): {str(error).splitlines()[0]}"
        ) from None
    names, model = axis_names, link_model
    mesh = DeviceMesh(
        ids, mesh_shape, None, mesh_alpha, mesh_beta, axis_names=names, link_model=model
    )
    ProcessGroupCommunicator.create(mesh, device_type)
    to_torch(mesh, device_type)
    return mesh


def from_torch(torch_mesh: TorchMesh) -> DeviceMesh:
    """Return the mesh that torch's describes; of one that `to_torch` made, what it was made of.

    The groups of torch's mesh are used from then on; so where it has all ranks of the job, every
    rank calls this at the same point of the program. A mesh of another job is refused.
    """
    running = dist.is_initialized()
    if running and torch_mesh in current_job().meshes:
        return current_job().meshes[torch_mesh]
    mesh = DeviceMesh(torch_mesh.mesh, axis_names=torch_mesh.mesh_dim_names)
    if not running:
        raise CommunicatorError(
            f"torch.distributed is not initialised, so the job of torch mesh {mesh} has ended; "
            "make a mesh in the running one"
        )
    job, world = current_job(), dist.get_world_size()
    if max(mesh.ids) >= world:
        raise MeshError(
            f"torch mesh {mesh} has device {max(mesh.ids)}, but this job has {world} ranks "
            "numbered from 0; it was made in another job"
        )
    _check_ascending(mesh)
    _adopt_groups(job, torch_mesh, mesh)
    job.torch_meshes.setdefault((mesh, torch_mesh.device_type), torch_mesh)
    job.meshes[torch_mesh] = mesh
    return mesh


def to_torch(mesh: DeviceMesh, device_type: str = "cpu") -> TorchMesh:
    """Return torch's mesh of this one, the same object each time; every rank of the job calls this.

    Groups that the job lacks are made. A slice of a larger mesh is torch's slice of torch's mesh of
    that, so that modules may be sharded over several slices. Axes without names are called
    ``axis_0``, ``axis_1`` and so on.
    """
    check_members(mesh)
    job = current_job()
    key = (_without_links(mesh), device_type)
    if key not in job.torch_meshes:
        _check_ascending(mesh)
        made = _slice_in_torch(job, mesh, device_type)
        job.torch_meshes[key] = made or _made_of_groups(job, mesh, device_type)
        job.meshes.setdefault(job.torch_meshes[key], mesh)
    return job.torch_meshes[key]


def slice_of(mesh: DeviceMesh, axis_names: str | tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh along named axes, in this order, that the calling rank is in."""
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise AxisError(f"mesh[{axis_names!r}]: slice a mesh by axis names, as in mesh['tp']")
    axes = [mesh.axis(name) for name in names]
    rank = _rank_in(mesh, f"mesh[{', '.join(map(repr, names))}] is the slice of the calling rank")
    ProcessGroupCommunicator.of(mesh)  # so that the job knows what this is a slice of
    return mesh.slice_with(rank, axes)


def group_of(mesh: DeviceMesh, axis: Axis | None = None) -> dist.ProcessGroup:
    """Return the calling rank's process group along an axis, which need not be named if alone."""
    if axis is None and mesh.ndim > 1:
        raise AxisError(
            f"mesh {mesh} has {mesh.ndim} axes; name one, as in get_group({mesh.axis_label(0)!r})"
        )
    number = mesh.axis(0 if axis is None else axis)
    rank = _rank_in(mesh, "get_group is about the calling rank")
    job = current_job()
    for (known, _), torch_mesh in job.torch_meshes.items():
        if known == _without_links(mesh):
            return torch_mesh.get_group(number)
    ProcessGroupCommunicator.of(mesh)
    return job.group(mesh.group(rank, [number])) or to_torch(mesh).get_group(number)


def device_type_of(mesh: DeviceMesh) -> str:
    """Return the device type that torch's mesh of this one has been made for, or ``"cpu"``."""
    known = current_job().torch_meshes if dist.is_initialized() else {}
    without = _without_links(mesh)
    return next((device_type for made, device_type in known if made == without), "cpu")


def _rank_in(mesh: DeviceMesh, what: str) -> int:
    """Return the calling rank, which has to be in the mesh."""
    if not dist.is_initialized():
        raise CommunicatorError(
            f"{what}, but torch.distributed is not initialised; start the program with torchrun, "
            "or name the indices, as in mesh.submesh({'dp': 0})"
        )
    check_members(mesh)
    rank = dist.get_rank()
    if rank not in mesh:
        raise CommunicatorError(f"{what}, but rank {rank} is not in mesh {mesh} of ids {mesh.ids}")
    return rank


def _without_links(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh(mesh.ids, mesh.shape, axis_names=mesh.axis_names)


def _check_ascending(mesh: DeviceMesh) -> None:
    for members in (members for axis in range(mesh.ndim) for members in mesh.groups([axis])):
        if list(members) != sorted(members):
            raise MeshError(
                f"mesh {mesh} has the ids {members} along an axis, but torch numbers the ranks of "
                "a group upwards, and mixes up shards there; use a mesh of ascending ids, where "
                "redistribute(spec, device_mesh=) takes a tensor"
            )


def _adopt_groups(job: Job, torch_mesh: TorchMesh, mesh: DeviceMesh) -> None:
    """Check that the groups are of the running job; keep those of a mesh of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for axis in range(mesh.ndim) if rank in mesh else ():
        members = list(mesh.group(rank, [axis]))
        try:
            group = torch_mesh.get_group(axis)
            ranks = dist.get_process_group_ranks(group)
        except (RuntimeError, KeyError, ValueError):
            ranks = []
        if ranks != members:
            raise MeshError(
                f"torch mesh {mesh} has no group of the ranks {members} in this job; it was made "
                "in another job, or without groups"
            )
        same_backend = dist.get_backend_config(group) == dist.get_backend_config()
        if same_backend and len(members) < world == mesh.size:
            for others in mesh.groups([axis]):
                job.groups.setdefault(tuple(sorted(others)), group if rank in others else None)


def _slice_in_torch(job: Job, mesh: DeviceMesh, device_type: str) -> TorchMesh | None:
    """Return torch's slice of torch's mesh of a larger mesh that this one is a slice of."""
    rank, without, own = dist.get_rank(), _without_links(mesh), mesh.axis_names or ()
    for root in list(job.communicators):
        names = root.axis_names or ()
        axes = [names.index(name) for name in own if name in names]
        larger = own and len(axes) == len(own) < len(names) and axes == sorted(axes)
        if larger and rank in root and without == _without_links(root.slice_with(rank, axes)):
            return to_torch(root, device_type)[own]
    return None


def _made_of_groups(job: Job, mesh: DeviceMesh, device_type: str) -> TorchMesh:
    """Make torch's mesh over the job's groups; those that are missing are made by every rank."""
    for axis in range(mesh.ndim):
        for members in mesh.groups([axis]):
            job.make_group(members)
    rank, names = dist.get_rank(), mesh.axis_names
    if names is None and mesh.ndim > 1:  # torch asks for names where there are several axes
        names = tuple(f"axis_{axis}" for axis in range(mesh.ndim))
    grid = torch.tensor(mesh.ids, dtype=torch.int).reshape(mesh.shape)
    if rank not in mesh:
        # torch has no group to make it of here; it asks for none.
        return TorchMesh(device_type, grid, mesh_dim_names=names, _init_backend=False)
    found = (job.group(mesh.group(rank, [axis])) for axis in range(mesh.ndim))
    groups = [group for group in found if group is not None]
    assert len(groups) == mesh.ndim, "they have just been made"
    if mesh.ndim == 1:
        return TorchMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return TorchMesh.from_group(groups, device_type, grid, mesh_dim_names=names)

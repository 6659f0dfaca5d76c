"""Creates a mesh of all ranks of the job, as `init_device_mesh` of torch does."""

import operator
from collections.abc import Sequence
from math import prod

import torch

from shardspec.errors import MeshError
from shardspec.mesh.device_mesh import DeviceMesh, LinkModel, is_in_job
from shardspec.mesh.job import start


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    axis_names: Sequence[str] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    mesh_alpha: Sequence[float] | None = None,
    mesh_beta: Sequence[float] | None = None,
    link_model: LinkModel = "ring",
    backend_override: None = None,
) -> DeviceMesh:
    """Return a mesh of all ranks of the job, and start the job if it is not running yet.

    Every rank calls this. It creates the process groups and torch's mesh. If torchrun did not start
    the program, this process simulates all devices.

    Parameters
    ----------
    device_type
        The device type of tensors: ``"cpu"`` or ``"cuda"``.
    mesh_shape
        Devices along each axis; ranks are numbered in row-major order, as in torch.
    axis_names, mesh_dim_names, mesh_alpha, mesh_beta, link_model, backend_override
        As for `DeviceMesh`.

    Raises
    ------
    CommunicatorError
        If the job has too few ranks, or its processes do not find each other in time.
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
    mesh = DeviceMesh(
        ids,
        mesh_shape,
        mesh_alpha=mesh_alpha,
        mesh_beta=mesh_beta,
        axis_names=axis_names,
        mesh_dim_names=mesh_dim_names,
        link_model=link_model,
        backend_override=backend_override,
    )
    if is_in_job():
        start(mesh, device_type)
        mesh.to_torch(device_type)
    return mesh

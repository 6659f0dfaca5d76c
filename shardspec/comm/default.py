"""Which communicator a mesh gets when the caller names none."""

import os

import torch.distributed as dist

from shardspec.comm.communicator import Communicator
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.simulated import SimulatedCommunicator
from shardspec.errors import CommunicatorError
from shardspec.mesh import DeviceMesh

__all__ = ["communicator_of"]


def communicator_of(mesh: DeviceMesh) -> Communicator:
    """Return the running job's communicator, or a simulated one where there is no job.

    Raises
    ------
    CommunicatorError
        If this is a process of a job that has not initialised `torch.distributed`: simulating the
        whole mesh in every rank would look right and be wasteful.

    Examples
    --------
    >>> communicator_of(DeviceMesh(range(4), (2, 2))).addressable
    (0, 1, 2, 3)
    """
    if dist.is_initialized():
        return ProcessGroupCommunicator.of(mesh)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise CommunicatorError(
            f"this is one of {ranks} processes of a job, but torch.distributed is not initialised; "
            "make the mesh with init_process_group=True"
        )
    return SimulatedCommunicator(mesh)

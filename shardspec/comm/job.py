"""What belongs to a running job: its communicators, its groups, and torch's meshes of it."""

import atexit
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardspec.comm.host_links import HostLink
from shardspec.errors import CommunicatorError
from shardspec.mesh import DeviceMesh

if TYPE_CHECKING:
    from shardspec.comm.process_group import ProcessGroupCommunicator

__all__ = ["Job", "check_members", "current_job"]


@dataclass(frozen=True, slots=True)
class Job:
    """What belongs to a job."""

    communicators: dict[DeviceMesh, "ProcessGroupCommunicator"] = field(default_factory=dict)
    """Two meshes of equal content share their groups."""
    links: dict[int, HostLink] = field(default_factory=dict)
    """To processes of the same host, by rank; shared by all meshes."""
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    """Groups that every rank knows to be there, by their ranks; None where this rank is outside."""
    torch_meshes: dict[tuple[DeviceMesh, str], TorchMesh] = field(default_factory=dict)
    """By mesh without links and device type."""
    meshes: dict[TorchMesh, DeviceMesh] = field(default_factory=dict)
    """The mesh that a torch mesh was made of."""

    def make_group(self, members: Sequence[int]) -> None:
        """Make a group, unless it is there; every rank of the job does so, in the same order.

        Groups that only their members make would be named by what else those have made before, and
        hang where that differs.
        """
        ranks = tuple(sorted(members))
        if len(ranks) < dist.get_world_size() and ranks not in self.groups:
            group = dist.new_group(list(ranks))
            self.groups[ranks] = group if dist.get_rank() in ranks else None

    def group(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of some ranks, this one among them; None where there is none."""
        if len(members) == dist.get_world_size():
            return dist.group.WORLD
        return self.groups.get(tuple(sorted(members)))


_JOBS: Final[WeakKeyDictionary[dist.ProcessGroup, Job]] = WeakKeyDictionary()
"""Kept as long as torch keeps a job's own group.

torch holds the process groups of a job in globals of its own; this is the part of that state that
is ours.
"""


_LETTING_GO_SECONDS: Final = 0.05


def current_job() -> Job:
    """Return what belongs to the running job; `torch.distributed` is initialised."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    if world not in _JOBS:
        _JOBS[world] = Job()
        # A thread of gloo lets go of a tensor some time after its collective has ended, and needs
        # the interpreter for it; where that has begun to end, torch aborts the process.
        atexit.register(time.sleep, _LETTING_GO_SECONDS)
    return _JOBS[world]


def check_members(mesh: DeviceMesh) -> None:
    """Raise `CommunicatorError` unless there is a job and it has every device of the mesh."""
    if not dist.is_initialized():
        raise CommunicatorError(
            "torch.distributed is not initialised; start the program with torchrun and make "
            "the mesh with init_process_group=True"
        )
    world = dist.get_world_size()
    missing = [id_ for id_ in mesh.ids if id_ >= world]
    if missing:
        raise CommunicatorError(
            f"device {missing[0]} of mesh {mesh} is no rank of this job, which has {world} "
            "ranks numbered from 0"
        )

"""What belongs to a running job: channels, communicators, groups, and torch's meshes of it."""

import atexit
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardspec.comm.agreement import NOTE_BYTES, Link, Note, Unanswered
from shardspec.comm.communicator import Communicator
from shardspec.comm.messages import Messages
from shardspec.errors import CommunicatorError
from shardspec.mesh import DeviceMesh


@dataclass(slots=True, eq=False)
class Channel:
    """What one thread's conversions go through, apart from those of other threads.

    The main threads of all ranks have one channel for all meshes, so that ranks which take up two
    meshes in another order are noticed. Any other thread has the channel of its mesh.
    """

    tag: int
    """Of its messages; even."""
    links: dict[int, Link] = field(default_factory=dict)
    """To processes of this host, by rank."""
    linked: set[int] = field(default_factory=set)
    """Checksums of ranks that all have links to each other."""
    numbers: Counter[int] = field(default_factory=Counter)
    """How many notes have been told, by the checksum of the ranks."""
    busy: threading.RLock = field(default_factory=threading.RLock)
    """Held while a thread is in the channel."""

    def exchange(
        self, mine: Note, peers: Sequence[int], device: str, timeout_s: float
    ) -> dict[int, Note]:
        """Tell some ranks a note, and return theirs; all of them call this at once.

        Messages have to be on `device`; where there are links, `timeout_s` is how long to wait.
        `Unanswered` says that a rank has gone, or has not come in time.
        """
        self.numbers[mine.ids] += 1
        packed, deadline = mine.pack(), time.monotonic() + timeout_s
        if mine.ids not in self.linked:
            lengths = dict.fromkeys(peers, NOTE_BYTES)
            records = Messages(self.tag).exchange(packed.ljust(NOTE_BYTES), lengths, device)
            return {peer: Note.unpack(record) for peer, record in records.items()}
        notes: dict[int, Note] = {}
        silent: dict[int, str] = {}
        for peer in peers:
            try:
                self.links[peer].send(packed)
            except CommunicatorError as error:
                silent[peer] = str(error)
        for peer in peers:
            try:
                # Once one is missing it is only looked at who else is.
                data = self.links[peer].receive(0.0 if silent else deadline)
                notes[peer] = mine if data == packed else Note.unpack(data)
            except CommunicatorError as error:
                silent[peer] = str(error)
        if silent:
            self.close()
            raise Unanswered(silent, next(iter(silent.values())))
        return notes

    def close(self) -> None:
        """Close all links, so that nobody waits for this rank."""
        for link in self.links.values():
            link.close()


@dataclass(frozen=True, slots=True)
class Job:
    """What belongs to a job."""

    communicators: dict[DeviceMesh, Communicator] = field(default_factory=dict)
    """Two meshes of equal content share theirs."""
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    """Groups that every rank knows to be there, by their ranks; None where this rank is outside."""
    torch_meshes: dict[tuple[DeviceMesh, str], TorchMesh] = field(default_factory=dict)
    """By mesh without links and device type."""
    meshes: dict[TorchMesh, DeviceMesh] = field(default_factory=dict)
    """The mesh that a torch mesh was made of."""
    channel: Channel = field(default_factory=lambda: Channel(tag=2 * 0x5AD))
    """Of the main thread, for all meshes."""
    making: threading.RLock = field(default_factory=threading.RLock)
    """Held while a communicator is made."""
    accelerator: threading.RLock = field(default_factory=threading.RLock)
    """Held while a thread moves CUDA tensors: NCCL tells two threads not apart."""

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
"""The part that is ours of the state that torch has in globals, as long as its group is there."""
_LETTING_GO_SECONDS: Final = 0.05


def current_job() -> Job:
    """Return what belongs to the running job; `torch.distributed` is initialised."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    job = _JOBS.get(world)
    if job is None:
        job = _JOBS.setdefault(world, Job())
        # A thread of gloo lets go of a tensor some time after its collective has ended, and needs
        # the interpreter for it; where that has begun to end, torch aborts the process.
        atexit.register(time.sleep, _LETTING_GO_SECONDS)
    return job


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

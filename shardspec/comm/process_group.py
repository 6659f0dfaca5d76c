"""Steps over `torch.distributed`: gloo on CPU, NCCL where CUDA is, by the same code.

A step is the same boxes on every backend; how they travel is chosen here. Where all processes of a
mesh run on one host they read each other's memory (`shardspec.comm.peer_memory`). Otherwise boxes
are messages in bounded chunks (`shardspec.comm.messages`), which need no group but the job's own.
CUDA tensors have groups too, where a mesh has all ranks of the job: NCCL's collectives serve where
boxes are such as they need. Every way takes all dtypes, uneven shards and any order of ids.
"""

import os
import pickle
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist

from shardspec.boxes import box_shape
from shardspec.comm.agreement import (
    NOTE_ROOM,
    ORDER_RULE,
    Listener,
    Note,
    Unanswered,
    check_agreement,
    ranks_text,
)
from shardspec.comm.communicator import Communicator
from shardspec.comm.job import Channel, check_members, current_job
from shardspec.comm.messages import Collectives, Messages, has_collective
from shardspec.comm.peer_memory import PeerMemory, readable
from shardspec.comm.results import checked, empty_hugepages
from shardspec.comm.routes import BoxOf, TransferSchedule, schedule_for
from shardspec.comm.simulated import SimulatedCommunicator
from shardspec.comm.steps import AllReduce, ReduceScatter, Step
from shardspec.errors import CommunicatorError
from shardspec.mesh import DeviceMesh

T = TypeVar("T")


class ProcessGroupCommunicator:
    """A `Communicator` that holds the shard of one rank.

    Physical ids are global ranks. Use `create` or `of` rather than the constructor, so that a mesh
    has one communicator per job. Copies and pickles stand for the job's communicator of the mesh.

    Parameters
    ----------
    mesh
        Devices. If these are all ranks of the job, each of them constructs this at the same point
        of the program; otherwise the ranks outside need not.
    reads_peers
        Whether the processes of the mesh may read each other's memory, where they are on one host
        that allows it. If not, or on any of the ranks not, all bytes go through the backend.

    Raises
    ------
    CommunicatorError
        If `torch.distributed` is not initialised, or the mesh has ids that the job lacks. Of its
        methods: if a peer has gone, or does not come within the timeout of the process group.

    Notes
    -----
    The main thread and one thread for each mesh may convert at the same time. A second thread
    that uses the mesh meanwhile, or converts CUDA tensors while another does, gets an error before
    anything moves.

    Examples
    --------
    In a job of four, started by torchrun::

        mesh = DeviceMesh(range(4), (2, 2), init_process_group=True)
        ProcessGroupCommunicator.of(mesh).addressable  # this rank's own id, alone
    """

    def __init__(self, mesh: DeviceMesh, *, reads_peers: bool = True) -> None:
        check_members(mesh)
        self._mesh, self._rank, self._job = mesh, dist.get_rank(), current_job()
        self._peers = tuple(sorted(device for device in mesh.ids if device != self._rank))
        self._ids = zlib.crc32(repr(sorted(mesh.ids)).encode())
        self._note_device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
        self._timeout_s = _timeout_s() if self._note_device == "cpu" else 0.0
        self._joins = self._note_device == "cpu" and bool(self._peers)
        self._may_read_peers = reads_peers
        self._joined: dict[Channel, PeerMemory | None] = {}
        name = f"{mesh.ids} {mesh.shape}".encode()
        self._channel = Channel(tag=1 << 30 | zlib.crc32(name) >> 3 << 1)
        if mesh.size == dist.get_world_size():
            for axis in range(mesh.ndim):
                for members in mesh.groups([axis]):
                    if len(members) > 1:
                        self._job.make_group(members)

    @classmethod
    def create(cls, mesh: DeviceMesh, device_type: str | None = None) -> "ProcessGroupCommunicator":
        """Initialise `torch.distributed` if that is still to be done, and return `of` the mesh.

        Under torchrun every rank calls this; gloo serves CPU tensors and NCCL CUDA tensors, where
        there is CUDA and `device_type` is not ``"cpu"``. Elsewhere it is a `CommunicatorError`.
        """
        if not dist.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                raise CommunicatorError(
                    "init_process_group=True needs a job: start the program with "
                    f"'torchrun --nproc_per_node {mesh.size} PROGRAM', or leave it out to hold "
                    "the whole mesh in this process"
                )
            if device_type != "cpu" and torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
                dist.init_process_group("cpu:gloo,cuda:nccl")
            else:
                dist.init_process_group("gloo")
        return cls.of(mesh)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of a mesh in the running job, made on the first call."""
        check_members(mesh)
        job = current_job()
        with job.making:
            found = job.communicators.get(mesh)
            if not isinstance(found, ProcessGroupCommunicator):
                job.communicators[mesh] = found = cls(mesh)
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return ProcessGroupCommunicator.of, (self._mesh,)

    def __deepcopy__(self, _: object) -> "ProcessGroupCommunicator":
        return self

    @property
    def mesh(self) -> DeviceMesh:
        """The devices among which data moves."""
        return self._mesh

    @property
    def addressable(self) -> tuple[int, ...]:
        """The rank of this process, or nothing where it is not part of the mesh."""
        return (self._rank,) if self._rank in self._mesh else ()

    @property
    def reads_peers(self) -> bool:
        """Whether all ranks of the mesh read each other's memory; found out in the first step."""
        return any(memory is not None for memory in self._joined.values())

    @property
    def peer_memory(self) -> PeerMemory | None:
        """What reads the memory of peers in a `conversion` of this thread, where that may be."""
        main = threading.current_thread() is threading.main_thread()
        return self._joined.get(self._job.channel if main else self._channel)

    def run(
        self, step: Step, shards: Mapping[int, torch.Tensor], before: BoxOf, after: BoxOf
    ) -> dict[int, torch.Tensor]:
        """Carry out one step; see `Communicator.run`."""
        if not self.addressable:
            return {}
        # What lies in memory is to be the values: no conjugation that is still to be done.
        shard = shards[self._rank].detach().resolve_conj().resolve_neg()
        if shard.is_meta:
            return {self._rank: shard.new_empty(box_shape(after(self._rank)))}
        home = shard.device
        with self._own_channel(home.type) as channel:
            if f"{home.type}:gloo" in dist.get_backend_config():
                shard = shard.cpu()  # gloo sends and reads memory of the host alone
            if self._joins and channel not in self._joined:
                self.gather({self._rank: None})  # whatever the step: all ranks of the mesh are here
            schedule = schedule_for(step, self._mesh, self._rank, before, after)
            transport = self._transport(channel, schedule, shard)
            if isinstance(step, AllReduce):
                return {self._rank: transport.all_reduce(schedule, shard, step.op).to(home)}
            result = empty_hugepages(shard, box_shape(schedule.after))
            with checked(step, result):
                if isinstance(step, ReduceScatter):
                    transport.reduce(schedule, shard, result, step.op)
                else:
                    transport.move(schedule, shard, result)
        return {self._rank: result.to(home)}

    def _transport(
        self, channel: Channel, schedule: TransferSchedule, shard: torch.Tensor
    ) -> PeerMemory | Messages | Collectives:
        if shard.device.type == "cpu":
            return self._joined.get(channel) or Messages(channel.tag)
        group = self._job.group(schedule.members)
        if group and has_collective(schedule, shard.dtype):
            return Collectives(group)
        return Messages(channel.tag)

    def on(self, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of another mesh of this job; see `of`."""
        return self if mesh == self._mesh else ProcessGroupCommunicator.of(mesh)

    @contextmanager
    def conversion(self, content: bytes, device: str) -> Iterator[str]:
        """Compare with the other ranks what is to be done; see `Communicator.conversion`."""
        if not self.addressable:
            yield device
            return
        with self._own_channel(device) as channel:
            number = channel.numbers[self._ids]
            try:
                agreed, _ = self._tell(channel, "conversion", content, device)
            except Unanswered as error:
                mine = Note("conversion", 0, number, content=content)
                raise CommunicatorError(
                    f"{ranks_text(error.peers)} did not say what to convert: {error.why}; rank "
                    f"{self._rank} {mine}; {ORDER_RULE}"
                ) from error.__cause__
            yield agreed

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Collect one value per device; see `Communicator.gather`."""
        if not self.addressable:
            return {}
        content = pickle.dumps(values[self._rank])
        with self._own_channel("") as channel:
            try:
                _, notes = self._tell(channel, "value", content, "")
                lengths = {peer: max(0, notes[peer].length - NOTE_ROOM) for peer in self._peers}
                rest = Messages(channel.tag).exchange(
                    content[NOTE_ROOM:], lengths, self._note_device
                )
            except Unanswered as error:
                raise CommunicatorError(
                    f"gathering a value of every rank with {ranks_text(self._peers)} failed: "
                    f"{error.why}; the job cannot go on, see what these ranks say"
                ) from error.__cause__
        found = {peer: pickle.loads(notes[peer].content + rest[peer]) for peer in self._peers}
        found |= values
        return {peer: found[peer] for peer in self._mesh.ids}

    @contextmanager
    def _own_channel(self, device: str) -> Iterator[Channel]:
        """Take the channel of this thread, in which no other thread is."""
        main = threading.current_thread() is threading.main_thread()
        channel = self._job.channel if main else self._channel
        with ExitStack() as stack:
            for lock in (channel.busy, *([self._job.accelerator] if device == "cuda" else [])):
                if not lock.acquire(blocking=False):
                    raise CommunicatorError(
                        f"another thread is converting {device or 'cpu'} tensors on mesh "
                        f"{self._mesh}; on a mesh one thread besides the main one may convert at a "
                        "time, and of CUDA tensors one at all: give each thread a mesh of its own, "
                        "or let one wait"
                    )
                stack.callback(lock.release)
            yield channel

    def _tell(
        self, channel: Channel, kind: str, content: bytes, device: str
    ) -> tuple[str, dict[int, Note]]:
        """Tell all ranks of the mesh a note; return where shards are, and all notes by rank.

        When they do so for the first time, processes of one host find each other.
        """
        first = self._joins and channel not in self._joined
        listening: AbstractContextManager[Listener | None] = (
            Listener(is_read=self._may_read_peers) if first else nullcontext()
        )
        with listening as listener:
            number = channel.numbers[self._ids]
            address = None if listener is None else listener.address
            mine = Note(kind, self._ids, number, device, len(content), content, address)
            told = channel.exchange(mine, self._peers, self._note_device, self._timeout_s)
            notes = {peer: told.get(peer, mine) for peer in self._mesh.ids}
            try:
                agreed = check_agreement(notes)
            except CommunicatorError:
                if any(note.ids != self._ids for note in told.values()):
                    channel.close()  # others of the mesh would wait for those that are elsewhere
                raise
            if listener is not None:
                self._joined[channel] = self._join(channel, listener, notes)
        return agreed, notes

    def _join(
        self, channel: Channel, listener: Listener, notes: Mapping[int, Note]
    ) -> PeerMemory | None:
        """Link the ranks of the mesh if they share a host; return how they read each other."""
        near = {peer: at for peer in self._peers if (at := notes[peer].address) is not None}
        host = listener.address.host
        if not host or [at.host for at in near.values()] != [host] * len(self._peers):
            return None
        new = {peer: at for peer, at in near.items() if peer not in channel.links}
        deadline = time.monotonic() + self._timeout_s
        channel.links |= listener.connect(self._rank, new, deadline)
        channel.linked.add(self._ids)
        reads_all = b"yes" if len(readable(near)) == len(near) else b"no"
        mine = Note("value", self._ids, channel.numbers[self._ids], content=reads_all)
        # Only after this may the content go that others have looked for.
        told = channel.exchange(mine, self._peers, self._note_device, self._timeout_s)
        if any(note.content != b"yes" for note in [mine, *told.values()]):
            return None
        return PeerMemory(self._rank, {peer: channel.links[peer] for peer in near}, self._timeout_s)


def communicator_of(mesh: DeviceMesh) -> Communicator:
    """Return the running job's communicator of a mesh, or a simulated one where there is no job.

    In a process of a job that has not initialised `torch.distributed` it is a `CommunicatorError`:
    simulating the whole mesh in every rank would look right and be wasteful.
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


def _timeout_s() -> float:
    """Return the timeout of the job's group for tensors on the CPU."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    seconds: float = world._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds

"""Runs steps in a job over `torch.distributed`: gloo on CPU, NCCL on CUDA."""

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist

from shardspec.boxes import box_shape
from shardspec.comm.agreement import NOTE_ROOM, Note, check_agreement, is_on_all_ranks
from shardspec.comm.communicator import Communicator, SimulatedCommunicator
from shardspec.comm.execute import run_transfers
from shardspec.comm.notes import Notes
from shardspec.comm.transfers import Transfers
from shardspec.comm.transports import connect, transport_name
from shardspec.comm.transports.messages import Messages, has_collective, run_collective
from shardspec.comm.transports.stage import Transport
from shardspec.errors import CommunicatorError
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.mesh.job import current_job, join

T = TypeVar("T")


class ProcessGroupCommunicator(Communicator):
    """A `Communicator` with the shard of one rank.

    Physical ids are global ranks. Use `of` rather than the constructor, so that a mesh has one
    communicator per job. Copies and pickles give the job's communicator of the mesh.

    Parameters
    ----------
    mesh
        The devices. If they are all ranks of the job, each rank constructs this at the same point
        of the program; otherwise only the ranks of the mesh do.

    Raises
    ------
    CommunicatorError
        If `torch.distributed` is not initialized, the mesh has ids that the job lacks, or
        ``SHARDSPEC_TRANSPORT`` is unknown. Methods raise it if a peer has ended, or does not answer
        within the process group's timeout.

    Notes
    -----
    One thread of a process converts at a time; a second one gets an error at once.

    Examples
    --------
    In a job of four, started by torchrun::

        mesh = DeviceMesh(range(4), (2, 2), init_process_group=True)
        ProcessGroupCommunicator.of(mesh).addressable  # (1,) on rank 1
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._job, self._rank = join(mesh), dist.get_rank()
        self._peers = tuple(sorted(device for device in mesh.ids if device != self._rank))
        self._members = sum(1 << device for device in mesh.ids)
        self._job.notes = self._notes = self._job.notes or Notes(self._job, self._rank)
        self._transport_name = transport_name()
        self._transport_of_mesh: Callable[[], Transport] | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of a mesh in the running job; the first call creates it."""
        communicators = current_job().communicators
        if mesh not in communicators:
            communicators[mesh] = cls(mesh)
        communicator: ProcessGroupCommunicator = communicators[mesh]
        return communicator

    def __reduce__(self) -> tuple[object, ...]:
        return ProcessGroupCommunicator.of, (self.mesh,)

    def __deepcopy__(self, _: object) -> "ProcessGroupCommunicator":
        return self

    @property
    def addressable(self) -> tuple[int, ...]:
        """The rank of this process; empty outside the mesh."""
        return (self._rank,) if self._rank in self.mesh else ()

    @property
    def transport_name(self) -> str:
        """The transport of CPU tensors, "memory" or "messages"; "" before the first conversion."""
        return self._transport_of_mesh().name if self._transport_of_mesh else ""

    def transport(self, device: str, *, casts: bool = False) -> Transport:
        """Return the transport for shards on a type of device; all ranks of the mesh call this.

        Shards that are cast during the transfer are sent as messages.
        """
        if device != "cpu" or casts or not self._peers:
            return Messages()
        if self._transport_of_mesh is None:
            self._transport_of_mesh = connect(
                self._transport_name,
                self._rank,
                self._peers,
                lambda value: self.gather({self._rank: value}),
                self._job.connections,
                self._notes.timeout_s,
            )
        return self._transport_of_mesh()

    @contextmanager
    def moving(self, transport: Transport) -> Iterator[None]:
        """Wrap the movement of data; after an error this rank refuses later conversions."""
        with self._notes.moving(transport, self._peers):
            yield

    def run(
        self, transfers: Transfers, shards: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Execute one step; see `Communicator.run`."""
        if not self.addressable:
            return {}
        # Peers read raw memory, so pending conjugation and negation are resolved first.
        shard = shards[self._rank].detach().resolve_conj().resolve_neg()
        if shard.is_meta:
            return {self._rank: shard.new_empty(box_shape(transfers.of(self._rank).after))}
        home = shard.device
        with self._notes.entered():
            if f"{home.type}:gloo" in dist.get_backend_config():
                shard = shard.cpu()  # gloo sends only host memory
            transport = self.transport(shard.device.type)
            schedule = transfers.of(self._rank)
            on_cpu = shard.device.type == "cpu"
            group = None if on_cpu else self._job.group(schedule.members)
            with self.moving(transport):
                if group and has_collective(schedule, shard.dtype):
                    result = run_collective(schedule, shard, group)
                else:
                    result = run_transfers(transport, schedule, shard)
        return {self._rank: result.to(home)}

    def on(self, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of another mesh of this job; see `of`."""
        return self if mesh == self.mesh else ProcessGroupCommunicator.of(mesh)

    @contextmanager
    def conversion(
        self, content: bytes, device: str, values: Mapping[int, T] | None = None
    ) -> Iterator[tuple[str, Mapping[int, T]]]:
        """Enter a conversion once all ranks agree on it; see `Communicator.conversion`."""
        if not self.addressable:
            yield device, {}
            return
        with self._notes.entered():
            yield self._exchange("conversion", content, device, values or {})

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Collect one value per device; see `Communicator.gather`."""
        if not self.addressable:
            return {}
        with self.telling(), self._notes.entered():
            return self._exchange("value", b"", "", values)[1]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Send errors to the other ranks; see `Communicator.telling`."""
        notes = self._notes
        forked = os.getpid() != self._job.pid
        if forked or not self.addressable or (notes.is_mine and notes.is_telling):
            yield
            return
        try:
            with notes.entered():
                notes.is_telling = True
                try:
                    yield
                finally:
                    notes.is_telling = False
        except BaseException as error:
            if not is_on_all_ranks(error):
                notes.fail(error, Note("failed", self._members), self._peers)
            raise

    def _exchange(
        self, kind: str, content: bytes, device: str, values: Mapping[int, T]
    ) -> tuple[str, dict[int, T]]:
        """Exchange a note with all ranks; return the device type of the shards, and all values."""
        value = pickle.dumps(values[self._rank]) if values else b""
        room = NOTE_ROOM - len(content)
        mine = Note(kind, self._members, device, content, value[:room], len(value))
        received = self._notes.exchange(mine, self._peers)
        notes = {**received, self._rank: mine}
        try:
            agreed = check_agreement({id_: notes[id_] for id_ in self.mesh.ids if id_ in notes})
        except CommunicatorError as error:
            self._notes.fail_for(error, mine, received.values())
            raise
        if not values:
            return agreed, {}
        lengths = {peer: note.length - len(note.value) for peer, note in received.items()}
        rest = self._notes.exchange_values(mine, value[room:], lengths)
        gathered = {peer: pickle.loads(received[peer].value + rest[peer]) for peer in self._peers}
        every = {peer: values[peer] if peer in values else gathered[peer] for peer in self.mesh.ids}
        return agreed, every


def telling_job(devices: Iterable[int] = ()) -> AbstractContextManager[None]:
    """Send errors to ranks of the running job, by default all; see `Communicator.telling`.

    Does nothing without a job.
    """
    if not dist.is_initialized():
        return nullcontext()
    ids = sorted(set(devices)) or range(dist.get_world_size())
    return ProcessGroupCommunicator.of(DeviceMesh(ids)).telling()


def communicator_of(mesh: DeviceMesh) -> Communicator:
    """Return the running job's communicator of a mesh, or a simulated one without a job.

    Raises `CommunicatorError` in a process of a job that has not been initialized.
    """
    if dist.is_initialized():
        return ProcessGroupCommunicator.of(mesh)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:  # simulating the whole mesh in every rank would work, but wastefully
        raise CommunicatorError(
            f"this is one of {ranks} processes of a job, but torch.distributed is not initialized; "
            "make the mesh with init_process_group=True"
        )
    return SimulatedCommunicator(mesh)

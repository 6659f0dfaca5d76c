"""Steps over `torch.distributed`: gloo on CPU, NCCL where CUDA is, by the same code.

Where all processes of a mesh run on one host they read each other's memory. Otherwise boxes are
messages in bounded chunks, or CUDA tensors in NCCL's collectives where these fit: one transport or
the other of `shardspec.comm.transports`.
"""

import operator
import os
import pickle
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from math import prod
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from shardspec.boxes import box_shape
from shardspec.comm.agreement import (
    NOTE_ROOM,
    Listener,
    Note,
    check_agreement,
    failure_text,
    is_on_all_ranks,
    this_host,
)
from shardspec.comm.carry_out import carry_out
from shardspec.comm.channel import Channel, channel_tag
from shardspec.comm.communicator import Communicator, SimulatedCommunicator
from shardspec.comm.transfers import Transfers
from shardspec.comm.transports.collectives import has_collective, run_collective
from shardspec.comm.transports.messages import Messages
from shardspec.comm.transports.peer_memory import PeerMemory, readable
from shardspec.comm.transports.stage import Transport
from shardspec.errors import CommunicatorError, MeshError
from shardspec.mesh.device_mesh import DeviceMesh, LinkModel, is_in_job
from shardspec.mesh.job import current_job, join, start

T = TypeVar("T")

_MAIN_TAG: Final = 2 * 0x5AD
"""Of the main thread's channel."""
_MAKING: Final = threading.RLock()
"""Held while a communicator is made."""
_ACCELERATOR: Final = threading.RLock()
"""Held while a thread moves CUDA tensors: NCCL does not tell threads apart."""


class ProcessGroupCommunicator(Communicator):
    """A `Communicator` that holds the shard of one rank.

    Physical ids are global ranks. Use `of` rather than the constructor, so that a mesh has one
    communicator per job. Copies and pickles stand for the job's communicator of the mesh.

    Parameters
    ----------
    mesh
        The devices. If they are all ranks of the job, each rank constructs this at the same point
        of the program; otherwise ranks outside the mesh need not.
    reads_peers
        Whether the processes of the mesh may read each other's memory if they are on one host that
        allows it. If any rank says no, all bytes go through the backend.

    Raises
    ------
    CommunicatorError
        If `torch.distributed` is not initialised, or the mesh has ids that the job lacks. Methods
        raise it if a peer has ended, or does not answer within the process group's timeout.

    Notes
    -----
    The main thread and one thread for each mesh may convert at the same time. A second thread
    that uses the mesh in the meantime, or converts CUDA tensors while another does, gets an error
    before anything moves.

    Examples
    --------
    In a job of four, started by torchrun::

        mesh = DeviceMesh(range(4), (2, 2), init_process_group=True)
        ProcessGroupCommunicator.of(mesh).addressable  # this rank's own id, alone
    """

    def __init__(self, mesh: DeviceMesh, *, reads_peers: bool = True) -> None:
        super().__init__(mesh)
        self._job, self._rank = join(mesh), dist.get_rank()
        self._peers = tuple(sorted(device for device in mesh.ids if device != self._rank))
        self._ids = zlib.crc32(repr(sorted(mesh.ids)).encode())
        self._may_be_read = reads_peers
        self._memory: dict[Channel, PeerMemory | None] = {}

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of a mesh in the running job; the first call creates it."""
        communicators = current_job().communicators
        with _MAKING:
            if mesh not in communicators:
                communicators[mesh] = cls(mesh)
        communicator: ProcessGroupCommunicator = communicators[mesh]
        return communicator

    def substitute(self) -> None:
        """Make this the communicator that `of` returns for its mesh."""
        current_job().communicators[self.mesh] = self

    def __reduce__(self) -> tuple[object, ...]:
        return ProcessGroupCommunicator.of, (self.mesh,)

    def __deepcopy__(self, _: object) -> "ProcessGroupCommunicator":
        return self

    @property
    def addressable(self) -> tuple[int, ...]:
        """The rank of this process; empty if it is not part of the mesh."""
        return (self._rank,) if self._rank in self.mesh else ()

    @property
    def reads_peers(self) -> bool:
        """Whether all ranks of the mesh read each other's memory; determined in the first step."""
        return any(memory is not None for memory in self._memory.values())

    def transport(self, device: str, *, casts: bool = False) -> Transport:
        """Return the transport for shards on a type of device in this thread's `conversion`.

        Shards that are cast on the way travel as messages.
        """
        channel = self._channel_of([self.mesh])
        memory = self._memory.get(channel) if device == "cpu" and not casts else None
        return memory or Messages(channel.tag + 1)

    def _channel_of(self, meshes: Iterable[DeviceMesh]) -> Channel:
        """Return the channel that the thread is in, else its channel for the given meshes."""
        channel: Channel | None = getattr(self._job.thread, "channel", None)
        if channel is None:
            main = threading.current_thread() is threading.main_thread()
            key = frozenset[DeviceMesh]() if main else frozenset(meshes)
            channel = self._job.channels.get(key) or self._new_channel(key)
        return channel

    def _new_channel(self, meshes: frozenset[DeviceMesh]) -> Channel:
        """Return the channel of some meshes; its tag is the same on all ranks.

        Raises `CommunicatorError` if other meshes have the same tag.
        """
        tag = channel_tag(meshes) if meshes else _MAIN_TAG
        with _MAKING:
            channels = self._job.channels
            for others, channel in channels.items():
                if channel.tag == tag and others != meshes:
                    raise CommunicatorError(
                        f"messages on mesh {self.mesh} would be taken for those of another thread, "
                        f"on mesh {next(iter(others))}; give an axis another name"
                    )
            made: Channel = channels.setdefault(meshes, Channel(tag))
        return made

    def run(
        self, transfers: Transfers, shards: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Carry out one step; see `Communicator.run`."""
        if not self.addressable:
            return {}
        # Peers read raw memory, so pending conjugation and negation are resolved first.
        shard = shards[self._rank].detach().resolve_conj().resolve_neg()
        if shard.is_meta:
            return {self._rank: shard.new_empty(box_shape(transfers.of(self._rank).after))}
        home = shard.device
        with self._locked(home.type) as channel:
            if f"{home.type}:gloo" in dist.get_backend_config():
                shard = shard.cpu()  # gloo sends only host memory
            if self._is_to_join(channel):
                self.gather({self._rank: None})  # connects the ranks, all of which run this step
            schedule = transfers.of(self._rank)
            on_cpu = shard.device.type == "cpu"
            group = None if on_cpu else self._job.group(schedule.members)
            if group and has_collective(schedule, shard.dtype):
                result = run_collective(schedule, shard, group)
            else:
                result = carry_out(self.transport(shard.device.type), schedule, shard)
        return {self._rank: result.to(home)}

    def on(self, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of another mesh of this job; see `of`."""
        return self if mesh == self.mesh else ProcessGroupCommunicator.of(mesh)

    @contextmanager
    def conversion(
        self,
        content: bytes,
        device: str,
        meshes: Iterable[DeviceMesh] = (),
        values: Mapping[int, T] | None = None,
    ) -> Iterator[tuple[str, Mapping[int, T]]]:
        """Enter a conversion once all ranks agree on it; see `Communicator.conversion`."""
        if not self.addressable:
            yield device, {}
            return
        with self._locked(device, meshes) as channel:
            thread = self._job.thread
            before, thread.channel = getattr(thread, "channel", None), channel
            try:
                yield self._tell(channel, "conversion", content, device, values or {})
            finally:
                thread.channel = before

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Collect one value per device; see `Communicator.gather`."""
        if not self.addressable:
            return {}
        with self.telling(), self._locked("") as channel:
            return self._tell(channel, "value", b"", "", values)[1]

    @contextmanager
    def telling(self, meshes: Iterable[DeviceMesh] = ()) -> Iterator[None]:
        """Send errors to the other ranks; see `Communicator.telling`."""
        thread, forked = self._job.thread, os.getpid() != self._job.pid
        if forked or not self.addressable or getattr(thread, "telling", False):
            yield
            return
        thread.telling = True
        try:
            yield
        except BaseException as error:
            if not is_on_all_ranks(error):
                with suppress(CommunicatorError):  # the first error counts
                    channel = self._channel_of([*meshes] or [self.mesh])
                    channel.refused.append((self._failure(error), self._peers))
                    _tell_of_refused(channel)
            raise
        finally:
            thread.telling = False

    def _failure(self, error: BaseException) -> Note:
        content = failure_text(error).encode(errors="replace")[:NOTE_ROOM]
        return Note("failed", self._ids, content=content, length=len(content))

    @contextmanager
    def _locked(self, device: str, meshes: Iterable[DeviceMesh] = ()) -> Iterator[Channel]:
        """Enter the channel of this thread; raises `CommunicatorError` if another is in it."""
        if os.getpid() != self._job.pid:
            raise CommunicatorError(
                f"this process is a forked child of rank {self._rank} and no rank of the job, so "
                "no rank would answer it; convert in the rank itself"
            )
        channel = self._channel_of([*meshes] or [self.mesh])
        with ExitStack() as stack:
            stack.callback(_tell_of_refused, channel)  # when the locks are released
            for lock in (channel.busy, *([_ACCELERATOR] if device == "cuda" else [])):
                if not lock.acquire(blocking=False):
                    raise CommunicatorError(
                        f"another thread is converting {device or 'cpu'} tensors on mesh "
                        f"{self.mesh}; on a mesh one thread besides the main one may convert at a "
                        "time, and of CUDA tensors one at all: give each thread a mesh of its own, "
                        "or let one wait"
                    )
                stack.callback(lock.release)
            channel.depth += 1
            try:
                yield channel
            finally:
                channel.depth -= 1
            if not channel.depth and channel.refused:
                # Other ranks may have met the refused thread instead of this one.
                raise CommunicatorError(
                    f"another thread has come to convert on mesh {self.mesh} meanwhile, so results "
                    "may be of the other one; give each thread a mesh of its own"
                )

    def _is_to_join(self, channel: Channel) -> bool:
        """Return whether the channel's first note, which connects the ranks, is still to come."""
        return channel not in self._memory and channel.timeout_s > 0 and bool(self._peers)

    def _tell(
        self, channel: Channel, kind: str, content: bytes, device: str, values: Mapping[int, T]
    ) -> tuple[str, dict[int, T]]:
        """Exchange a note with every rank; return the device type of shards, and all values."""
        joining = self._is_to_join(channel)
        listens = joining and this_host()
        value = pickle.dumps(values[self._rank]) if values else b""
        room = NOTE_ROOM - len(content)
        with Listener(is_read=self._may_be_read) if listens else nullcontext() as listener:
            address = listener.address if listener else None
            number, length = channel.numbers[self._ids], len(value)
            mine = Note(kind, self._ids, number, device, content, value[:room], length, address)
            received = channel.exchange(mine, self._peers)
            if any(note.ids != self._ids and not note.failure for note in received.values()):
                channel.close()  # else other ranks of the mesh would wait for these
            notes = {peer: received.get(peer, mine) for peer in self.mesh.ids}
            agreed = check_agreement(notes)
            if joining:
                self._memory[channel] = (
                    self._join(channel, listener, received) if listener else None
                )
        if not values:
            return agreed, {}
        lengths = {peer: note.length - len(note.value) for peer, note in received.items()}
        rest = channel.exchange_bytes(mine, value[room:], lengths)
        gathered = {peer: pickle.loads(received[peer].value + rest[peer]) for peer in self._peers}
        every = {peer: values[peer] if peer in values else gathered[peer] for peer in self.mesh.ids}
        return agreed, every

    def _join(
        self, channel: Channel, listener: Listener, received: Mapping[int, Note]
    ) -> PeerMemory | None:
        """Connect the ranks of the mesh if they share a host.

        Return the transport by which they read each other's memory, None if not all can.
        """
        near = {peer: note.address for peer, note in received.items() if note.address is not None}
        if [at.host for at in near.values()] != [listener.address.host] * len(self._peers):
            return None
        new = {peer: at for peer, at in near.items() if peer not in channel.connections}
        deadline = time.monotonic() + channel.timeout_s
        channel.connections |= listener.connect(self._rank, new, deadline)
        channel.connected.add(self._ids)
        reads_all = b"yes" if len(readable(near)) == len(near) else b"no"
        mine = Note("value", self._ids, channel.numbers[self._ids], content=reads_all)
        # The listener closes only after this, when all ranks have tried to read each other.
        answers = channel.exchange(mine, self._peers)
        if any(note.content != b"yes" for note in [mine, *answers.values()]):
            return None
        connections = {peer: channel.connections[peer] for peer in near}
        return PeerMemory(self._rank, connections, channel.timeout_s)


def _tell_of_refused(channel: Channel) -> None:
    """Send the notes of refused threads, once no thread is in the channel."""
    while channel.refused and not channel.depth and channel.busy.acquire(blocking=False):
        try:
            note, peers = channel.refused.popleft()
            with suppress(RuntimeError):  # torch's error if a rank has ended, which needs no note
                channel.fail(note, peers)
        finally:
            channel.busy.release()


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    axis_names: Sequence[str] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    mesh_alpha: Sequence[float] | None = None,
    mesh_beta: Sequence[float] | None = None,
    link_model: LinkModel = "ring",
) -> DeviceMesh:
    """Return a mesh of all ranks of the job, and start the job if it is not running yet.

    Every rank calls this. It creates the process groups and torch's counterpart of the mesh. If
    torchrun did not start the program, this process simulates the whole mesh.

    Parameters
    ----------
    device_type
        The device type of tensors: ``"cpu"`` or ``"cuda"``.
    mesh_shape
        Devices along each axis; the ranks are numbered row by row, as torch does.
    axis_names, mesh_dim_names, mesh_alpha, mesh_beta, link_model
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
    )
    if is_in_job():
        start(mesh, device_type)
        mesh.to_torch(device_type)
    return mesh


def telling_job(devices: Iterable[int] = ()) -> AbstractContextManager[None]:
    """Send errors to ranks of the running job, by default all; see `Communicator.telling`.

    Without a job this does nothing.
    """
    if not dist.is_initialized():
        return nullcontext()
    ids = sorted(set(devices)) or range(dist.get_world_size())
    return ProcessGroupCommunicator.of(DeviceMesh(ids)).telling()


def communicator_of(mesh: DeviceMesh) -> Communicator:
    """Return the running job's communicator of a mesh, or a simulated one without a job.

    Raises `CommunicatorError` in a process of a job that has not been initialised.
    """
    if dist.is_initialized():
        return ProcessGroupCommunicator.of(mesh)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:  # simulating the whole mesh in every rank would work, but wastefully
        raise CommunicatorError(
            f"this is one of {ranks} processes of a job, but torch.distributed is not initialised; "
            "make the mesh with init_process_group=True"
        )
    return SimulatedCommunicator(mesh)

"""Channels: how notes of one thread's conversions travel, by host sockets or messages."""

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardspec.comm.agreement import NOTE_BYTES, ORDER_RULE, Connection, Note, ranks_text
from shardspec.comm.transports.messages import cause_of, failed_with, start_messages
from shardspec.errors import CommunicatorError
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.mesh.job import current_job


def _unanswered(
    mine: Note, peers: Iterable[int], silent: Iterable[int], why: str
) -> CommunicatorError:
    """Return the error for peers that did not answer a note."""
    if mine.kind != "conversion":
        return failed_with("gathering a value of every rank", peers, why)
    return CommunicatorError(
        f"{ranks_text(silent)} did not say what to convert: {why}; rank {dist.get_rank()} {mine}; "
        f"{ORDER_RULE}"
    )


def _timeout_s() -> float:
    """Return the timeout of the job's group for CPU tensors; 0 without such a group."""
    group = current_job().gloo or dist.group.WORLD
    if group is None or "gloo" not in dist.get_backend_config(group):
        return 0.0
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def channel_tag(meshes: Iterable[DeviceMesh]) -> int:
    """Return the tag of the channel of some meshes: an even number, the same on all ranks.

    It is a checksum of everything in the meshes, so different meshes rarely share a tag.
    """
    # The repr of a mesh shortens a long list of ids.
    texts = (
        f"{mesh.ids} {mesh.shape} {mesh.axis_names} {mesh.mesh_alpha} {mesh.mesh_beta} "
        f"{mesh.link_model}"
        for mesh in meshes
    )
    return 1 << 30 | zlib.crc32(" ".join(sorted(texts)).encode()) >> 3 << 1


@dataclass(slots=True, eq=False)
class Channel:
    """Separates the messages of one thread's conversions from those of other threads.

    The main threads of all ranks share one channel for all meshes, which detects ranks that use
    two meshes in different orders. Any other thread has the channel of its meshes. Everything
    sent in a conversion goes through its channel.
    """

    tag: int
    """The tag of notes, an even number; steps use the next one."""
    group: dist.ProcessGroup | None = field(default_factory=lambda: current_job().gloo)
    """The group that carries notes; None is the default group."""
    timeout_s: float = field(default_factory=_timeout_s)
    """How long connections wait; 0 if messages are tensors on the accelerator."""
    connections: dict[int, Connection] = field(default_factory=dict)
    """Connections to processes of this host, by rank."""
    connected: set[int] = field(default_factory=set)
    """Checksums of sets of ranks that are all connected to each other."""
    numbers: Counter[int] = field(default_factory=Counter)
    """How many notes each set of ranks has exchanged, by its checksum."""
    busy: threading.RLock = field(default_factory=threading.RLock)
    """Locked while a thread is in the channel."""
    depth: int = 0
    """How many times that thread has entered the channel."""
    refused: deque[tuple[Note, Sequence[int]]] = field(default_factory=deque)
    """Notes of failure still to be sent for threads that were refused, each with its peers."""
    passed_over: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """How many notes to skip by peer and whether connected: they answer calls that failed here."""
    leaving: list[tuple[torch.Tensor, list[dist.Work]]] = field(default_factory=list)
    """Notes in flight that nobody waits for."""

    def exchange(self, mine: Note, peers: Sequence[int]) -> dict[int, Note]:
        """Exchange notes with some ranks, all of which call this; return theirs by rank.

        Raises `CommunicatorError` if a rank does not answer within the timeout.
        """
        self.numbers[mine.ids] += 1
        if mine.ids not in self.connected:
            lengths = dict.fromkeys(peers, NOTE_BYTES)
            packed = self.exchange_bytes(mine, mine.pack().ljust(NOTE_BYTES), lengths)
            return {peer: Note.unpack(data) for peer, data in packed.items()}
        notes: dict[int, Note] = {}
        silent: dict[int, str] = {}
        deadline = time.monotonic() + self.timeout_s
        for peer in peers:
            self.connections[peer].send(mine)
        for peer in peers:
            try:
                for _ in range(1 + self.passed_over.pop((peer, True), 0)):
                    # Once a peer is missing, do not wait for the others.
                    note = self.connections[peer].receive(0.0 if silent else deadline)
                notes[peer] = note
            except CommunicatorError as error:
                silent[peer] = str(error)
            except BaseException:
                self.close()
                raise
        if silent:
            self.close()
            raise _unanswered(mine, peers, silent, next(iter(silent.values())))
        return notes

    def exchange_bytes(
        self, mine: Note, content: bytes, lengths: Mapping[int, int]
    ) -> dict[int, bytes]:
        """Send bytes of a note to some ranks; return from each as many as `lengths` says."""
        sent = self._tensor(content)
        over = [
            (peer, sent.new_empty(NOTE_BYTES))
            for peer in lengths
            for _ in range(self.passed_over.pop((peer, False), 0))
        ]
        received = {peer: sent.new_zeros(length) for peer, length in lengths.items()}
        sends = [(peer, sent[: len(content)]) for peer in lengths]
        try:
            for work in start_messages(sends, [*over, *received.items()], self.tag, self.group):
                work.wait()
        except RuntimeError as error:
            silent = [peer for peer, data in received.items() if not data.any()] or lengths
            raise _unanswered(mine, lengths, silent, cause_of(error)) from error
        return {peer: data.cpu().numpy().tobytes() for peer, data in received.items()}

    def fail(self, mine: Note, peers: Sequence[int]) -> None:
        """Send a note of failure in place of the next expected note, without waiting."""
        if not self.timeout_s:  # NCCL cannot send without receiving
            self.exchange(mine, peers)
            return
        self.numbers[mine.ids] += 1
        by_connection = mine.ids in self.connected
        self.passed_over.update((peer, by_connection) for peer in peers)
        if by_connection:
            for peer in peers:
                self.connections[peer].send(mine)
            return
        sent = self._tensor(mine.pack().ljust(NOTE_BYTES))
        self.leaving.append(
            (sent, start_messages([(p, sent) for p in peers], [], self.tag, self.group))
        )

    def _tensor(self, content: bytes) -> torch.Tensor:
        sent = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)
        return sent.to("cpu" if self.timeout_s else "cuda")

    def close(self) -> None:
        """Close all connections, so that no rank waits for this one."""
        for connection in self.connections.values():
            connection.close()

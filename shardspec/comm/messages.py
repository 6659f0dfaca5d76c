"""Steps between processes, out of the memory of peers, by messages or by NCCL; and notes.

Both ends of a message cut a box into the same chunks. Parts of a tensor that are not contiguous
pass through buffers, of which a bounded number of bytes is in use at a time.
"""

import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_shape, box_size, chunks, slices_within, split_interval
from shardspec.comm.agreement import NOTE_BYTES, ORDER_RULE, Connection, Note, ranks_text
from shardspec.comm.peer_memory import BUFFER_BYTES, PeerMemory
from shardspec.comm.results import checked, combine_into, empty_hugepages
from shardspec.comm.steps import AllGather, AllReduce, ReduceOp, ReduceScatter
from shardspec.comm.transfers import DeviceTransfers, Parts, all_reduce_halves
from shardspec.errors import CommunicatorError
from shardspec.mesh.job import current_job

STAGED_BYTES: Final = 16 << 20
"""The most that lies in buffers on the CPU, half of it sent and half received; with more than 32
peers, half a MiB for each."""
_ACCELERATOR_BYTES: Final = 64 << 20
"""What is sent in one round between accelerators, whose links want longer messages."""
_LEAST_BYTES: Final = 256 << 10
"""The shortest chunk: shorter messages cost more time than they save memory."""

# Named anew in torch 2.13, which warns of the old names.
_NEW_NAMES: Final = torch.__version__ >= "2.13"  # compares as versions do
_ALL_GATHER: Final = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
_REDUCE_SCATTER: Final = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor
_SUMMED: Final = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes whose sum every backend has, with the rounding of the dtype itself."""

Addressed: TypeAlias = list[tuple[int, torch.Tensor]]
"""Pairs of peer and tensor."""


def _rounds(schedule: DeviceTransfers, most: int) -> Iterator[tuple[Parts, Parts]]:
    """Yield what is sent and received round by round: of each box a chunk of so many elements."""
    sends, receives = (
        zip_longest(*([(peer, part) for part in chunks(box, most)] for peer, box in side))
        for side in (schedule.outgoing, schedule.incoming)
    )
    for sent, received in zip_longest(sends, receives, fillvalue=()):
        yield [part for part in sent if part], [part for part in received if part]


class Buffers(dict[object, torch.Tensor]):
    """Contiguous memory by what it is for, which every round of a step uses again."""

    def like(self, key: object, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor."""
        if key not in self or self[key].numel() < tensor.numel():
            self[key] = tensor.new_empty(tensor.numel())
        return self[key][: tensor.numel()].view(tensor.shape)


@dataclass(frozen=True, slots=True)
class Transport:
    """Moves the boxes of steps between processes: out of the `memory` of peers, else by messages.

    The tag tells threads apart, except with NCCL, where one thread sends at a time. Both ways give
    the same bits.
    """

    tag: int
    memory: PeerMemory | None

    def run(self, schedule: DeviceTransfers, shard: torch.Tensor) -> torch.Tensor:
        """Carry out a step, of any dtype and operation; serve the others."""
        if isinstance(schedule.step, AllReduce):
            return self._all_reduce(schedule, shard)
        result = empty_hugepages(shard, box_shape(schedule.after))
        with checked(schedule.step, result):
            self._move(schedule, shard, result, schedule.op)
        return result

    def _move(
        self,
        schedule: DeviceTransfers,
        shard: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp | None = None,
    ) -> None:
        """Fill the result with boxes of all members, or with their reduction.

        The shard may be a part of the result, or the result of a reduction a part of the shard.
        """
        me, memory, buffers = schedule.device, self.memory, Buffers()
        shares = result.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        if memory:  # what is only moved needs no buffers
            most = 2 * BUFFER_BYTES if op else sys.maxsize
        else:
            most = STAGED_BYTES // 2 if shard.device.type == "cpu" else _ACCELERATOR_BYTES
        each = max(most // max(1, len(schedule.members) - 1), _LEAST_BYTES)
        with memory.session(schedule, shard) if memory else nullcontext() as fetch:
            for sends, parts in _rounds(schedule, each // shard.itemsize):
                filled = []
                for peer, box in parts:
                    place = result[slices_within(box, schedule.after)]
                    own = shard[slices_within(box, schedule.before)] if peer == me else place
                    if op is not None:  # the result may overwrite this device's own addend
                        place = buffers.like(peer, place) if peer != me or shares else own
                    if peer == me and place.data_ptr() != own.data_ptr():
                        place.copy_(own)
                    elif peer != me and fetch:
                        fetch(peer, box, place)
                    filled.append((peer, place))
                if not fetch:
                    leaving = [(p, shard[slices_within(b, schedule.before)]) for p, b in sends]
                    self._exchange(schedule, leaving, [f for f in filled if f[0] != me], buffers)
                if op is not None and filled:
                    place = result[slices_within(parts[0][1], schedule.after)]
                    combine_into(place, [addend for _, addend in filled], op)

    def _exchange(
        self, schedule: DeviceTransfers, sends: Addressed, receives: Addressed, buffers: "Buffers"
    ) -> None:
        """Send and receive tensors, those with gaps through buffers."""
        leaving, landing = [], []
        for number, (peer, part) in enumerate(sends):
            packed = part.is_contiguous()
            copy = part if packed else buffers.like(("sent", number), part).copy_(part)
            leaving.append((peer, copy))
        for number, (peer, place) in enumerate(receives):
            packed = place.is_contiguous()
            landing.append((peer, place if packed else buffers.like(("received", number), place)))
        with _errors_named(schedule):
            for work in start_messages(leaving, landing, self.tag):
                work.wait()
        for (_, place), (_, received) in zip(receives, landing, strict=True):
            if place is not received:
                place.copy_(received)

    def _all_reduce(self, schedule: DeviceTransfers, shard: torch.Tensor) -> torch.Tensor:
        """Let every member reduce a part, then share the parts: as many bytes as on a ring."""
        step = schedule.step
        if shard.is_contiguous():
            flat = shard.view(-1)
            result = empty_hugepages(flat, flat.shape)
        else:
            # The parts are reduced in place: only this rank reads the part that it reduces.
            result = flat = shard.clone(memory_format=torch.contiguous_format).view(-1)
        reducing, sharing = all_reduce_halves(
            step, schedule.device, schedule.members, shard.numel()
        )
        reduced = result[slices_within(reducing.after, sharing.after)]
        with checked(step, result if result is not flat else result[:0]):
            self._move(reducing, flat, reduced, schedule.op)
            self._move(sharing, reduced, result)
        return result.view(shard.shape)


def start_messages(
    sends: Addressed, receives: Addressed, tag: int, group: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """Post contiguous tensors as bytes, so that every dtype travels; empty ones do not."""
    ops = [
        dist.P2POp(act, _as_bytes(tensor), peer, group, tag)
        for act, addressed in ((dist.irecv, receives), (dist.isend, sends))
        for peer, tensor in addressed
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A single element counts as contiguous whatever its stride, but needs stride 1 to be bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def _errors_named(schedule: DeviceTransfers) -> Iterator[None]:
    """Name the step and its ranks where `torch.distributed` raises an error."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and the other errors of torch
        raise _failed(schedule.step, schedule.peers, _cause_of(error)) from error


def _failed(what: object, peers: Iterable[int], why: str) -> CommunicatorError:
    return CommunicatorError(
        f"{what} with {ranks_text(peers)} failed: {why}; the job cannot go on, see what these "
        "ranks say"
    )


def _cause_of(error: RuntimeError) -> str:
    """Return what happened, without the backend's source line and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return re.sub(r"^\[\S+:\d+\] ", "", said).split(". This is typically")[0]


def _unanswered(
    mine: Note, peers: Iterable[int], silent: Iterable[int], why: str
) -> CommunicatorError:
    """Return the error that some of the peers did not answer a note."""
    if mine.kind != "conversion":
        return _failed("gathering a value of every rank", peers, why)
    return CommunicatorError(
        f"{ranks_text(silent)} did not say what to convert: {why}; rank {dist.get_rank()} {mine}; "
        f"{ORDER_RULE}"
    )


def _timeout_s() -> float:
    """Return the timeout of the job's group for tensors on the CPU; 0 where there is none."""
    group = current_job().gloo or dist.group.WORLD
    if group is None or "gloo" not in dist.get_backend_config(group):
        return 0.0
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


@dataclass(slots=True, eq=False)
class Channel:
    """What the conversions of one thread go through, apart from those of other threads.

    The main threads of all ranks have one channel for all meshes, so that ranks which use two
    meshes in different orders are noticed. Any other thread has the channel of its meshes. All
    that is sent in a conversion goes through its channel.
    """

    tag: int
    """Of notes, an even number; the next one is that of steps."""
    group: dist.ProcessGroup | None = field(default_factory=lambda: current_job().gloo)
    """Carries notes; None is the default group."""
    timeout_s: float = field(default_factory=_timeout_s)
    """How long connections wait; 0 where messages are tensors on the accelerator."""
    connections: dict[int, Connection] = field(default_factory=dict)
    """To processes of this host, by rank."""
    connected: set[int] = field(default_factory=set)
    """Checksums of ranks that are all connected to each other."""
    numbers: Counter[int] = field(default_factory=Counter)
    """How many notes have been exchanged, by the checksum of the ranks."""
    busy: threading.RLock = field(default_factory=threading.RLock)
    """Held while a thread is in the channel."""
    depth: int = 0
    """How often that thread has entered it."""
    refused: deque[tuple[Note, Sequence[int]]] = field(default_factory=deque)
    """What others still have to be told of threads that came meanwhile."""
    passed_over: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """Notes that will come from a peer, by a connection or not, for calls that failed here."""
    leaving: list[tuple[torch.Tensor, list[dist.Work]]] = field(default_factory=list)
    """Notes on their way that nobody waits for."""

    def exchange(self, mine: Note, peers: Sequence[int]) -> dict[int, Note]:
        """Exchange notes with some ranks, all of which call this at once."""
        self.numbers[mine.ids] += 1
        if mine.ids not in self.connected:
            lengths = dict.fromkeys(peers, NOTE_BYTES)
            found = self.exchange_bytes(mine, mine.pack().ljust(NOTE_BYTES), lengths)
            return {peer: Note.unpack(data) for peer, data in found.items()}
        notes: dict[int, Note] = {}
        silent: dict[int, str] = {}
        deadline = time.monotonic() + self.timeout_s
        for peer in peers:
            self.connections[peer].send(mine)
        for peer in peers:
            try:
                for _ in range(1 + self.passed_over.pop((peer, True), 0)):
                    # Once one is missing, the others are not waited for.
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
        """Send bytes that belong to a note to some ranks, and return so many of each."""
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
            raise _unanswered(mine, lengths, silent, _cause_of(error)) from error
        return {peer: data.cpu().numpy().tobytes() for peer, data in received.items()}

    def fail(self, mine: Note, peers: Sequence[int]) -> None:
        """Tell some ranks that this one has failed where they say what they do; wait for none."""
        if not self.timeout_s:  # NCCL sends and receives together
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


def run_collective(
    schedule: DeviceTransfers, shard: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Carry out a step that `has_collective` on CUDA tensors by NCCL's collective; see `Transport`.

    It is faster than sends and receives. gloo's are not used: they carry no tag, so threads would
    be mixed up.
    """
    step, result = schedule.step, shard.new_empty(box_shape(schedule.after))
    with checked(step, result), _errors_named(schedule):
        if isinstance(step, AllReduce):
            dist.all_reduce(result.copy_(shard), group=group)
        elif schedule.op is None:
            _ALL_GATHER(_as_bytes(result), _as_bytes(shard.contiguous()), group=group)
        else:
            _REDUCE_SCATTER(result.view(-1), shard.contiguous().view(-1), group=group)
    return result.div_(len(schedule.members)) if schedule.op == "avg" else result


def has_collective(schedule: DeviceTransfers, dtype: torch.dtype) -> bool:
    """Say whether a collective of the backend does a step; all members say the same."""
    match schedule.step:
        case AllGather():
            return _are_in_order(schedule, dict(schedule.incoming), schedule.after)
        case ReduceScatter(op="sum" | "avg"):
            going = {**dict(schedule.outgoing), schedule.device: schedule.after}
            return dtype in _SUMMED and _are_in_order(schedule, going, schedule.before)
        case AllReduce(op="sum" | "avg"):
            return dtype in _SUMMED
        case _:
            return False


def _are_in_order(schedule: DeviceTransfers, parts: Mapping[int, Box], box: Box) -> bool:
    """Say whether the members' parts of a box lie one behind the other in memory, equally long."""
    ranks, shape = sorted(schedule.members), box_shape(box)
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if dim is None or not box_size(box) or shape[dim] % len(ranks):
        return False
    cuts = (split_interval(*box[dim], len(ranks), at) for at in range(len(ranks)))
    return [parts.get(rank) for rank in ranks] == [(*box[:dim], c, *box[dim + 1 :]) for c in cuts]

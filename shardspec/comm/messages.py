"""Boxes and notes over `torch.distributed`: messages, or NCCL's collectives where they fit.

Both ends of a message cut a box into the same chunks. Parts of a tensor that are not contiguous
pass through buffers, of which a bounded number of bytes is in use at a time.
"""

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_shape, box_size, chunks, slices_within
from shardspec.comm.agreement import NOTE_BYTES, Connection, Note, ranks_text
from shardspec.comm.results import checked, combine_into, empty_hugepages
from shardspec.comm.routes import Parts, TransferSchedule, all_reduce_schedules
from shardspec.comm.steps import AllGather, AllReduce, ReduceOp, ReduceScatter
from shardspec.errors import CommunicatorError

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
_MOVED: Final = frozenset({*_SUMMED, torch.bfloat16, torch.float16})
"""Dtypes that every backend's collectives carry."""

Addressed: TypeAlias = list[tuple[int, torch.Tensor]]
"""Pairs of peer and tensor."""
Exchange: TypeAlias = Callable[["Rounds", Parts, list[tuple[int, Box, torch.Tensor]]], None]
"""Sends boxes of the shard to peers, and fills tensors with boxes of theirs."""


class Rounds:
    """The chunks of a step, one of each box in a round, and buffers that all rounds share."""

    def __init__(self, schedule: TransferSchedule, shard: torch.Tensor, round_bytes: int) -> None:
        share = max(round_bytes // max(1, len(schedule.members) - 1), _LEAST_BYTES)
        self._sides, self._most = (schedule.outgoing, schedule.incoming), share // shard.itemsize
        boxes = [box for side in self._sides for _, box in side]
        self._size, self._used = sum(min(self._most, box_size(box)) for box in boxes), 0
        self._shard, self._memory = shard, shard.new_empty(0)

    def __iter__(self) -> Iterator[tuple[Parts, Parts]]:
        """Yield what is sent and received round by round."""
        sends, receives = (
            zip_longest(*([(peer, part) for part in chunks(box, self._most)] for peer, box in side))
            for side in self._sides
        )
        for sent, received in zip_longest(sends, receives, fillvalue=()):
            self._used = 0
            yield [part for part in sent if part], [part for part in received if part]

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return contiguous memory for a tensor, good for this round."""
        if not self._memory.numel():
            self._memory = self._shard.new_empty(self._size)
        start, self._used = self._used, self._used + like.numel()
        return self._memory[start : self._used].view(like.shape)


class Transport(ABC):
    """Moves the boxes of one step between processes; all transports give the same bits."""

    @abstractmethod
    def session(
        self, schedule: TransferSchedule, shard: torch.Tensor
    ) -> AbstractContextManager[Exchange]:
        """Enter a step, in which boxes are exchanged in rounds."""

    @abstractmethod
    def round_bytes(self, shard: torch.Tensor, *, moves: bool) -> int:
        """Return how much is sent to all peers together in one round."""

    def move(
        self,
        schedule: TransferSchedule,
        shard: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp | None = None,
    ) -> None:
        """Fill the result with boxes of all members, or with their reduction; serve the others.

        The shard may be a part of the result, or the result of a reduction a part of the shard.
        """
        me = schedule.device
        shares = result.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        rounds = Rounds(schedule, shard, self.round_bytes(shard, moves=op is None))
        with self.session(schedule, shard) as exchange:
            for sends, parts in rounds:
                filled = []
                for peer, box in parts:
                    place = result[slices_within(box, schedule.after)]
                    own = shard[slices_within(box, schedule.before)] if peer == me else place
                    if op is not None:  # the result may overwrite this device's own addend
                        place = rounds.buffer(place) if peer != me or shares else own
                    if peer == me and place.data_ptr() != own.data_ptr():
                        place.copy_(own)
                    filled.append((peer, box, place))
                exchange(rounds, sends, [each for each in filled if each[0] != me])
                if op is not None and filled:
                    place = result[slices_within(parts[0][1], schedule.after)]
                    combine_into(place, [addend for *_, addend in filled], op)

    def all_reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, op: ReduceOp
    ) -> torch.Tensor:
        """Return the reduction of all members' shards, of any dtype and operation.

        Every member reduces a part, then all share the parts: as many bytes as on a ring.
        """
        step, size = schedule.step, shard.numel()
        if shard.is_contiguous():
            flat = shard.view(-1)
            result = empty_hugepages(flat, flat.shape)
        else:
            # The parts are reduced in place: only this rank reads the part that it reduces.
            result = flat = shard.clone(memory_format=torch.contiguous_format).view(-1)
        reducing, sharing = all_reduce_schedules(step, schedule.device, schedule.members, size)
        reduced = result[slices_within(reducing.after, sharing.after)]
        with checked(step, result if result is not flat else result[:0]):
            self.move(reducing, flat, reduced, op)
            self.move(sharing, reduced, result)
        return result.view(shard.shape)


class Messages(Transport):
    """Moves boxes by `torch.distributed.isend` and `irecv`.

    The tag tells threads apart, except with NCCL, where one thread sends at a time.
    """

    def __init__(self, tag: int) -> None:
        self._tag = tag

    def round_bytes(self, shard: torch.Tensor, *, moves: bool) -> int:  # noqa: ARG002
        """Return how much is sent to all peers together in one round."""
        return STAGED_BYTES // 2 if shard.device.type == "cpu" else _ACCELERATOR_BYTES

    @contextmanager
    def session(self, schedule: TransferSchedule, shard: torch.Tensor) -> Iterator[Exchange]:
        """Enter a step, in which boxes are exchanged in rounds."""

        def exchange(
            rounds: Rounds, sends: Parts, arriving: list[tuple[int, Box, torch.Tensor]]
        ) -> None:
            leaving, landing = [], []
            for peer, box in sends:
                part = shard[slices_within(box, schedule.before)]
                copied = part if part.is_contiguous() else rounds.buffer(part).copy_(part)
                leaving.append((peer, copied))
            for peer, _, place in arriving:
                landing.append((peer, place if place.is_contiguous() else rounds.buffer(place)))
            with _errors_named(schedule):
                for work in start_messages(leaving, landing, self._tag):
                    work.wait()
            for (*_, place), (_, received) in zip(arriving, landing, strict=True):
                if place is not received:
                    place.copy_(received)

        yield exchange


def start_messages(sends: Addressed, receives: Addressed, tag: int) -> list[dist.Work]:
    """Post contiguous tensors as bytes, so that every dtype travels; empty ones do not."""
    ops = [dist.P2POp(dist.irecv, _as_bytes(t), peer, tag=tag) for peer, t in receives if t.numel()]
    ops += [dist.P2POp(dist.isend, _as_bytes(t), peer, tag=tag) for peer, t in sends if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A single element counts as contiguous whatever its stride, but needs stride 1 to be bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def _errors_named(schedule: TransferSchedule) -> Iterator[None]:
    """Name the step and its ranks where `torch.distributed` raises an error."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and the other errors of torch
        raise CommunicatorError(
            f"{schedule.step} with {ranks_text(schedule.peers)} failed: {_cause_of(error)}; the "
            "job cannot go on, see what these ranks say"
        ) from error


def _cause_of(error: RuntimeError) -> str:
    """Return what happened, without the backend's source line and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return re.sub(r"^\[\S+:\d+\] ", "", said).split(". This is typically")[0]


class UnansweredError(Exception):
    """Some ranks did not answer; the arguments are these ranks, and why."""


@dataclass(slots=True, eq=False)
class Channel:
    """What the conversions of one thread go through, apart from those of other threads.

    The main threads of all ranks have one channel for all meshes, so that ranks which use two
    meshes in different orders are noticed. Any other thread has the channel of its mesh.
    """

    tag: int
    """Of notes, an even number; the next one is that of steps."""
    connections: dict[int, Connection] = field(default_factory=dict)
    """To processes of this host, by rank."""
    connected: set[int] = field(default_factory=set)
    """Checksums of ranks that are all connected to each other."""
    numbers: Counter[int] = field(default_factory=Counter)
    """How many notes have been exchanged, by the checksum of the ranks."""
    busy: threading.RLock = field(default_factory=threading.RLock)
    """Held while a thread is in the channel."""

    def exchange(
        self, mine: Note, peers: Sequence[int], device: str, timeout_s: float
    ) -> dict[int, Note]:
        """Exchange notes with some ranks, all of which call this at once.

        Messages have to be on `device`; connections wait for `timeout_s`.
        """
        self.numbers[mine.ids] += 1
        packed, deadline = mine.pack(), time.monotonic() + timeout_s
        if mine.ids not in self.connected:
            lengths = dict.fromkeys(peers, NOTE_BYTES)
            found = self.exchange_bytes(packed.ljust(NOTE_BYTES), lengths, device)
            return {peer: Note.unpack(data) for peer, data in found.items()}
        notes: dict[int, Note] = {}
        silent: dict[int, str] = {}
        for peer in peers:
            self.connections[peer].send(packed)
        for peer in peers:
            try:
                # Once one is missing, the others are not waited for.
                data = self.connections[peer].receive(0.0 if silent else deadline)
                notes[peer] = mine if data == packed else Note.unpack(data)
            except CommunicatorError as error:
                silent[peer] = str(error)
        if silent:
            self.close()
            raise UnansweredError(tuple(silent), next(iter(silent.values())))
        return notes

    def exchange_bytes(
        self, content: bytes, lengths: Mapping[int, int], device: str
    ) -> dict[int, bytes]:
        """Send bytes to some ranks, and return so many of each."""
        mine = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8).to(device)
        received = {peer: mine.new_zeros(length) for peer, length in lengths.items()}
        sends = [(peer, mine[: len(content)]) for peer in lengths]
        try:
            for work in start_messages(sends, [*received.items()], self.tag):
                work.wait()
        except RuntimeError as error:
            silent = [peer for peer, data in received.items() if not data.any()]
            raise UnansweredError(silent or [*lengths], _cause_of(error)) from error
        return {peer: data.cpu().numpy().tobytes() for peer, data in received.items()}

    def close(self) -> None:
        """Close all connections, so that no rank waits for this one."""
        for connection in self.connections.values():
            connection.close()


class Collectives:
    """Moves boxes of CUDA tensors by NCCL's collectives, in steps that have one.

    They are faster than sends and receives, but need parts of equal length, one behind the other in
    the order of the ranks. gloo's are not used: they carry no tag, so threads would be mixed up.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def move(
        self,
        schedule: TransferSchedule,
        shard: torch.Tensor,
        result: torch.Tensor,
        op: ReduceOp | None = None,
    ) -> None:
        """Fill the result with boxes, or with the sum or mean of addends; see `Transport`."""
        function = _ALL_GATHER if op is None else _REDUCE_SCATTER
        self._call(schedule, function, result.view(-1), shard.contiguous().view(-1))
        if op == "avg":
            result /= len(schedule.members)

    def all_reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, op: ReduceOp
    ) -> torch.Tensor:
        """Return the sum or mean of the addends."""
        result = shard.clone(memory_format=torch.contiguous_format)
        self._call(schedule, dist.all_reduce, result)
        return result.div_(len(schedule.members)) if op == "avg" else result

    def _call(
        self, schedule: TransferSchedule, function: Callable[..., object], *tensors: torch.Tensor
    ) -> None:
        with _errors_named(schedule):
            function(*tensors, group=self._group)


def has_collective(schedule: TransferSchedule, dtype: torch.dtype) -> bool:
    """Say whether a collective of the backend does a step; all members say the same."""
    match schedule.step:
        case AllGather():
            coming = dict(schedule.incoming)
            return dtype in _MOVED and _are_in_order(schedule, coming, schedule.after)
        case ReduceScatter(op="sum" | "avg"):
            going = {**dict(schedule.outgoing), schedule.device: schedule.after}
            return dtype in _SUMMED and _are_in_order(schedule, going, schedule.before)
        case AllReduce(op="sum" | "avg"):
            return dtype in _SUMMED
        case _:
            return False


def _are_in_order(schedule: TransferSchedule, parts: Mapping[int, Box], box: Box) -> bool:
    """Say whether the members' parts of a box lie one behind the other in memory, equally long."""
    each, rest = divmod(box_size(box), len(schedule.members))
    if rest or not each or len(parts) < len(schedule.members):
        return False
    memory = torch.empty(box_shape(box), dtype=torch.uint8, device="meta")
    found = [memory[slices_within(parts[peer], box)] for peer in sorted(schedule.members)]
    return all(
        part.is_contiguous() and (part.numel(), part.storage_offset()) == (each, at * each)
        for at, part in enumerate(found)
    )

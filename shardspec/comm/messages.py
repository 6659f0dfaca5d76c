"""Boxes over `torch.distributed`: messages on any backend, or NCCL's collectives where they fit.

Both ends of a message cut a box into the same chunks. Where a part of a tensor is not contiguous
its chunks pass through buffers, and only so many bytes of these are under way at once. So a step
needs little memory besides the shards, and a chunk is copied while the cache still holds it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_shape, box_size, chunks, slices_within, split_interval
from shardspec.comm.agreement import Unanswered, ranks_text
from shardspec.comm.results import checked, combine, combine_into, empty_hugepages
from shardspec.comm.routes import Parts, TransferSchedule
from shardspec.comm.steps import AllGather, AllReduce, ReduceOp, ReduceScatter
from shardspec.errors import CommunicatorError

STAGED_BYTES: Final = 16 << 20
"""The most that lies in buffers at once on the CPU, up to 32 peers; with more, half a MiB for each.
Twice the bytes of a round elsewhere."""
_ROUND_BYTES: Final = {"cpu": STAGED_BYTES // 2}
"""What a device sends to all its peers in one round, and what it receives, by its type."""
_ROUND_BYTES_ELSEWHERE: Final = 64 << 20
"""Links between accelerators want longer messages."""
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
    """Chunks, one for each box in a round, and the memory that all rounds pass through."""

    def __init__(self, schedule: TransferSchedule, shard: torch.Tensor, round_bytes: int) -> None:
        share = max(round_bytes // max(1, len(schedule.members) - 1), _LEAST_BYTES)
        self._outgoing, self._most = schedule.outgoing, share // shard.element_size()
        boxes = [box for _, box in [*schedule.outgoing, *schedule.incoming]]
        self._size, self._used = sum(min(self._most, box_size(box)) for box in boxes), 0
        self._shard, self._memory = shard, shard.new_empty(0)

    def boxes(self, incoming: Parts) -> Iterator[tuple[Parts, Parts]]:
        """Yield what is sent and received round by round."""
        sends, receives = (
            zip_longest(
                *([(peer, part) for part in chunks(box, self._most)] for peer, box in boxes)
            )
            for boxes in (self._outgoing, incoming)
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
    """Moves the boxes of one step between the shards of different processes.

    Results do not depend on the transport, bit for bit. `CommunicatorError` says that a peer has
    gone, or does not come within the timeout of the process group.
    """

    fills_any: bool = False
    """Whether tensors that are not contiguous can be filled."""

    @abstractmethod
    def session(
        self, schedule: TransferSchedule, shard: torch.Tensor
    ) -> AbstractContextManager[Exchange]:
        """Enter a step, in which boxes are exchanged in rounds."""

    @abstractmethod
    def round_bytes(self, shard: torch.Tensor, *, moves: bool) -> int:
        """Return how much all peers together are sent in one round, or send."""

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Put the boxes that this device gets side by side, and serve those that others get.

        The shard, of any strides, is only read. The result is to be filled; where the shard is a
        part of it, it is in place.
        """
        rounds = Rounds(schedule, shard, self.round_bytes(shard, moves=True))
        with self.session(schedule, shard) as exchange:
            for peer, box in schedule.incoming:
                if peer == schedule.device:
                    place = result[slices_within(box, schedule.after)]
                    kept = shard[slices_within(box, schedule.before)]
                    if place.data_ptr() != kept.data_ptr():
                        place.copy_(kept)
            incoming = [(peer, box) for peer, box in schedule.incoming if peer != schedule.device]
            for sends, receives in rounds.boxes(incoming):
                places = [result[slices_within(box, schedule.after)] for _, box in receives]
                arriving = [
                    place if self.fills_any or place.is_contiguous() else rounds.buffer(place)
                    for place in places
                ]
                pairs = zip(receives, arriving, strict=True)
                exchange(rounds, sends, [(peer, box, tensor) for (peer, box), tensor in pairs])
                for place, tensor in zip(places, arriving, strict=True):
                    if place is not tensor:
                        place.copy_(tensor)

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Combine the addends of all members, of the box held after; see `move`.

        The result may lie in the shard, in the place of this device's own addend.
        """
        me, shares = schedule.device, _storage(result) == _storage(shard)
        rounds = Rounds(schedule, shard, self.round_bytes(shard, moves=False))
        with self.session(schedule, shard) as exchange:
            # This device's own addend is among these, so it counts where it is alone too.
            for sends, parts in rounds.boxes(schedule.incoming):
                boxes = [box for _, box in parts][:1]  # of every member the same
                own = [shard[slices_within(box, schedule.before)] for box in boxes]
                addends = {peer: rounds.buffer(own[0]) for peer, _ in parts if peer != me or shares}
                arriving = [(peer, box, addends[peer]) for peer, box in parts if peer != me]
                exchange(rounds, sends, arriving)
                for box, addend in zip(boxes, own, strict=True):
                    # The result may take the place of this device's addend, maybe not the first.
                    addends[me] = addends[me].copy_(addend) if shares else addend
                    place = result[slices_within(box, schedule.after)]
                    combine_into(place, [addends[peer] for peer, _ in parts], op)

    def all_reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, op: ReduceOp
    ) -> torch.Tensor:
        """Return the reduction of all members' shards, of any dtype and operation.

        Every member reduces a part, then all share the parts: as many bytes as on a ring.
        """
        step, me, members = schedule.step, schedule.device, schedule.members
        if len(members) == 1 or shard.numel() == 0:
            return combine([shard], op)
        if shard.is_contiguous():
            flat = shard.view(-1)
            result = empty_hugepages(flat, flat.shape)
        else:
            # The parts are reduced in place: nobody else reads the part that this rank reduces.
            result = flat = shard.clone(memory_format=torch.contiguous_format).view(-1)
        whole: Box = ((0, flat.numel()),)
        parts: dict[int, Box] = {
            peer: (split_interval(0, flat.numel(), len(members), at),)
            for at, peer in enumerate(members)
        }
        filled = {peer: part for peer, part in parts.items() if part[0][0] < part[0][1]}
        mine, others = parts[me], [peer for peer in members if peer != me]
        sent = [(peer, filled[peer]) for peer in others if peer in filled]
        addends = [(peer, mine) for peer in members if me in filled]
        readers = [(peer, mine) for peer in others if me in filled]
        reduced = result[slice(*mine[0])]
        with checked(step, result if result is not flat else result[:0]):
            reducing = TransferSchedule(
                step, me, members, lambda _: whole, whole, mine, sent, addends
            )
            self.reduce(reducing, flat, reduced, op)
            sharing = TransferSchedule(
                step, me, members, parts.__getitem__, mine, whole, readers, [*filled.items()]
            )
            self.move(sharing, reduced, result)
        return result.view(shard.shape)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Messages(Transport):
    """Moves boxes by `torch.distributed.isend` and `irecv`.

    `tag` is an even number, and the one after it is taken too: what two threads send at once
    differs by it. NCCL has no tags, so there one thread sends at a time.
    """

    def __init__(self, tag: int) -> None:
        self._tag = tag

    def round_bytes(self, shard: torch.Tensor, *, moves: bool) -> int:
        """Return how much all peers together are sent in one round, or send."""
        del moves
        return _ROUND_BYTES.get(shard.device.type, _ROUND_BYTES_ELSEWHERE)

    @contextmanager
    def session(self, schedule: TransferSchedule, shard: torch.Tensor) -> Iterator[Exchange]:
        """Enter a step, in which boxes are exchanged in rounds."""
        tag = self._tag + 1

        def exchange(
            rounds: Rounds, sends: Parts, arriving: list[tuple[int, Box, torch.Tensor]]
        ) -> None:
            leaving = []
            for peer, box in sends:
                part = shard[slices_within(box, schedule.before)]
                copied = part if part.is_contiguous() else rounds.buffer(part).copy_(part)
                leaving.append((peer, copied))
            try:
                for work in start_messages(leaving, [(p, t) for p, _, t in arriving], tag):
                    work.wait()
            except RuntimeError as error:  # DistBackendError and the other errors of torch
                raise _failed(schedule, error) from error

        yield exchange

    def exchange(self, content: bytes, lengths: Mapping[int, int], device: str) -> dict[int, bytes]:
        """Send bytes to some ranks, and return so many of each; all of them call this at once.

        `Unanswered` says that one has gone, or has not come within the timeout of the process
        group.
        """
        mine = torch.empty(0, dtype=torch.uint8, device=device)
        if content:
            mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        records = {peer: mine.new_zeros(length) for peer, length in lengths.items()}
        sends = [(peer, mine) for peer in lengths]
        try:
            for work in start_messages(sends, [*records.items()], self._tag):
                work.wait()
        except RuntimeError as error:
            silent = [peer for peer, record in records.items() if not record.any()]
            raise Unanswered(silent or lengths, _cause(error)) from error
        return {peer: record.cpu().numpy().tobytes() for peer, record in records.items()}


def start_messages(sends: Addressed, receives: Addressed, tag: int) -> list[dist.Work]:
    """Post contiguous tensors as bytes, so that every dtype travels; empty ones do not."""
    ops = [dist.P2POp(dist.irecv, _as_bytes(t), peer, tag=tag) for peer, t in receives if t.numel()]
    ops += [dist.P2POp(dist.isend, _as_bytes(t), peer, tag=tag) for peer, t in sends if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Strides are set, not kept: a single element counts as contiguous whatever its stride, but
    # only stride 1 can be seen as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _failed(schedule: TransferSchedule, error: RuntimeError) -> CommunicatorError:
    """Name the step and its ranks where `torch.distributed` has raised an error."""
    return CommunicatorError(
        f"{schedule.step} with {ranks_text(schedule.peers)} failed: {_cause(error)}; the job "
        "cannot go on, see what these ranks say"
    )


def _cause(error: RuntimeError) -> str:
    """Return what happened, without where in the sources of the backend, and without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return re.sub(r"^\[\S+:\d+\] ", "", said).split(". This is typically")[0]


class Collectives:
    """Moves boxes of CUDA tensors by NCCL's collectives, in steps that have one.

    They take tensors in which the parts of all ranks lie one behind the other, equally long, in the
    order of the ranks; NCCL has algorithms for these that its sends and receives do not reach. On
    the CPU they are not used: gloo's carry no tag, so what two threads convert at once would be
    mixed up. The ranks of `group` are the members of the schedules, ascending.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in; see `Transport`."""
        self._call(schedule, _ALL_GATHER, result.view(-1), shard.contiguous().view(-1))

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with the sum or mean of the addends; see `Transport`."""
        self._call(schedule, _REDUCE_SCATTER, result.view(-1), shard.contiguous().view(-1))
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
        try:
            function(*tensors, group=self._group)
        except RuntimeError as error:  # DistBackendError and the other errors of torch are such
            raise _failed(schedule, error) from error


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

"""Boxes over `torch.distributed`: messages on any backend, or NCCL's collectives where they fit.

Both ends of a message cut a box into the same chunks. Where a part of a tensor is not contiguous
its chunks pass through buffers, and only so many bytes of these are under way at once. So a step
needs little memory besides the shards, and a chunk is copied while the cache still holds it.

Collectives take tensors in which the parts of all ranks lie one behind the other, equally long, in
the order of the ranks. NCCL has algorithms for all-gather, reduce-scatter and all-reduce that its
sends and receives do not reach. On the CPU they are not used: gloo's carry no tag, so what two
threads convert at once would be mixed up.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Final, Protocol, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_shape, box_size, slices_within, split_interval
from shardspec.comm.agreement import Unanswered, ranks_text
from shardspec.comm.results import checked, combine, combine_into, empty_hugepages
from shardspec.comm.routes import Incoming, TransferSchedule, chunks
from shardspec.comm.steps import AllGather, AllReduce, ReduceOp, ReduceScatter
from shardspec.errors import CommunicatorError

__all__ = [
    "STAGED_BYTES",
    "Collectives",
    "Messages",
    "Transport",
    "all_reduce",
    "copy_own_part",
    "fits",
]

STAGED_BYTES: Final = 16 << 20
"""The most that lies in buffers at once on the CPU, up to 32 peers; with more, half a MiB for each.
Four times the bytes of a round elsewhere."""
_ROUND_BYTES: Final = {"cpu": STAGED_BYTES // 4}
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
Boxes: TypeAlias = list[tuple[int, Box]]
"""Pairs of peer and box."""


class Transport(Protocol):
    """Moves the boxes of one step between the shards of different processes.

    Results do not depend on the transport, bit for bit. `CommunicatorError` says that a peer has
    gone, or does not come within the timeout of the process group.
    """

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Put the boxes that this device gets side by side, and serve those that others want.

        Parameters
        ----------
        schedule
            What this device does.
        shard
            Shaped as the box held before, of any strides; only read.
        result
            Shaped as the box held after, to be filled. Where the shard is a part of it, it is in
            place.
        """
        ...

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Combine the addends of all members, of the box held after; see `move`.

        The result may lie in the shard, in the place of this device's own addend.
        """
        ...


def all_reduce(
    transport: Transport, schedule: TransferSchedule, shard: torch.Tensor, op: ReduceOp
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
        # The parts are then reduced in place: nobody else reads the part that this rank reduces.
        result = flat = shard.clone(memory_format=torch.contiguous_format).view(-1)
    everything = ((0, flat.numel()),)
    parts = {
        peer: (split_interval(0, flat.numel(), len(members), at),)
        for at, peer in enumerate(members)
    }
    filled = {peer: part for peer, part in parts.items() if part[0][0] < part[0][1]}
    mine = parts[me]
    addends = tuple(Incoming(peer, mine, everything) for peer in members) if me in filled else ()
    sent = tuple((peer, part) for peer, part in filled.items() if peer != me)
    reduced = result[slice(*mine[0])]
    with checked(step, result if result is not flat else result[:0]):
        reducing = TransferSchedule(step, me, members, everything, mine, sent, addends)
        transport.reduce(reducing, flat, reduced, op)
        readers = tuple((peer, mine) for peer in members if peer != me) if me in filled else ()
        coming = tuple(Incoming(peer, part, part) for peer, part in filled.items())
        sharing = TransferSchedule(step, me, members, mine, everything, readers, coming)
        transport.move(sharing, reduced, result)
    return result.view(shard.shape)


def copy_own_part(schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
    """Copy what a device holds and keeps to its place."""
    for part in schedule.incoming:
        if part.peer == schedule.device:
            place = result[slices_within(part.box, schedule.after)]
            kept = shard[slices_within(part.box, schedule.before)]
            if place.data_ptr() != kept.data_ptr():
                place.copy_(kept)


class Messages:
    """Moves boxes by `torch.distributed.isend` and `irecv`; a `Transport`.

    Parameters
    ----------
    tag
        An even number, and the one after it is taken too: what two threads send at once differs by
        it. NCCL has no tags, so there one thread sends at a time.
    """

    def __init__(self, tag: int) -> None:
        self._tag = tag

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in, and send what others want; see `Transport`."""
        rounds = _Rounds(schedule, shard, self._tag)
        incoming = [
            (part.peer, part.box) for part in schedule.incoming if part.peer != schedule.device
        ]
        for sends, receives in rounds.boxes(incoming):
            arriving: Addressed = []
            late: list[Callable[[], object]] = []
            for peer, box in receives:
                place = result[slices_within(box, schedule.after)]
                if place.is_contiguous():
                    arriving.append((peer, place))
                else:
                    arriving.append((peer, rounds.buffer(place)))
                    late.append(partial(place.copy_, arriving[-1][1]))
            rounds.post(sends, arriving, late)
        copy_own_part(schedule, shard, result)
        rounds.finish()

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with what the addends of all members come to; see `Transport`."""
        rounds = _Rounds(schedule, shard, self._tag)
        # This device's own addend is among those that come in, so it counts where it is alone too.
        for sends, parts in rounds.boxes([(part.peer, part.box) for part in schedule.incoming]):
            arriving: Addressed = []
            late: list[Callable[[], object]] = []
            if parts:
                box = parts[0][1]  # of every member the same
                place = result[slices_within(box, schedule.after)]
                own = shard[slices_within(box, schedule.before)]
                if place.data_ptr() == own.data_ptr():
                    # The result takes the place of this device's addend, maybe not the first.
                    own = rounds.buffer(place).copy_(own)
                addends = {
                    peer: own if peer == schedule.device else rounds.buffer(place)
                    for peer, _ in parts
                }
                arriving = [item for item in addends.items() if item[0] != schedule.device]
                late = [partial(combine_into, place, list(addends.values()), op)]
            rounds.post(sends, arriving, late)
        rounds.finish()

    def exchange(self, content: bytes, lengths: Mapping[int, int], device: str) -> dict[int, bytes]:
        """Send bytes to some ranks, and return so many of each; all of them call this at once.

        Raises
        ------
        Unanswered
            If one has gone, or does not come within the timeout of the process group.
        """
        mine = torch.empty(0, dtype=torch.uint8, device=device)
        if content:
            mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        records = {peer: mine.new_zeros(length) for peer, length in lengths.items()}
        try:
            for work in _start([(peer, mine) for peer in lengths], [*records.items()], self._tag):
                work.wait()
        except RuntimeError as error:
            silent = [peer for peer, record in records.items() if not record.any()]
            raise Unanswered(silent or lengths, _cause(error)) from error
        return {peer: record.cpu().numpy().tobytes() for peer, record in records.items()}


class _Rounds:
    """Chunks on their way, one round after the other, and the buffers that these share."""

    def __init__(self, schedule: TransferSchedule, shard: torch.Tensor, tag: int) -> None:
        self._schedule, self._shard, self._tag = schedule, shard, tag + 1
        boxes = [box for _, box in schedule.outgoing] + [part.box for part in schedule.incoming]
        round_bytes = _ROUND_BYTES.get(shard.device.type, _ROUND_BYTES_ELSEWHERE)
        share = max(round_bytes // max(1, len(schedule.members) - 1), _LEAST_BYTES)
        self._most = share // shard.element_size()
        self._buffer_size = min(self._most, max(map(box_size, boxes), default=0))
        self._under_way: deque[Callable[[], None]] = deque()
        self._free: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []

    def boxes(self, incoming: Boxes) -> Iterator[tuple[Boxes, Boxes]]:
        """Yield what is sent and received round by round, while at most one is under way."""
        sends, receives = (
            zip_longest(
                *([(peer, part) for part in chunks(box, self._most)] for peer, box in boxes)
            )
            for boxes in (self._schedule.outgoing, incoming)
        )
        for sent, received in zip_longest(sends, receives, fillvalue=()):
            if len(self._under_way) > 1:
                self._under_way.popleft()()
            yield [part for part in sent if part], [part for part in received if part]

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous buffer shaped as a chunk, for the round that is posted next."""
        flat = self._free.pop() if self._free else self._shard.new_empty(self._buffer_size)
        self._taken.append(flat)
        return flat[: like.numel()].view(like.shape)

    def post(self, sends: Boxes, receives: Addressed, late: Sequence[Callable[[], object]]) -> None:
        """Start a round; parts of the shard that are not contiguous are sent from a copy.

        `late` is done once all chunks are here.
        """
        leaving = []
        for peer, box in sends:
            part = self._shard[slices_within(box, self._schedule.before)]
            leaving.append((peer, part if part.is_contiguous() else self.buffer(part).copy_(part)))
        with _failing(self._schedule):
            works = _start(leaving, receives, self._tag)
        # With the tensors that leave, so that they are there until they have gone.
        self._under_way.append(partial(self._finish, works, late, self._taken, leaving))
        self._taken = []

    def finish(self) -> None:
        """Wait for all rounds."""
        while self._under_way:
            self._under_way.popleft()()

    def _finish(
        self,
        works: Sequence[dist.Work],
        late: Sequence[Callable[[], object]],
        taken: Sequence[torch.Tensor],
        _leaving: Addressed,
    ) -> None:
        with _failing(self._schedule):
            for work in works:
                work.wait()
        for act in late:
            act()
        self._free += taken


def _start(sends: Addressed, receives: Addressed, tag: int) -> list[dist.Work]:
    """Post contiguous tensors as bytes, so that every dtype travels; empty ones do not."""
    ops = [dist.P2POp(dist.irecv, _as_bytes(t), peer, tag=tag) for peer, t in receives if t.numel()]
    ops += [dist.P2POp(dist.isend, _as_bytes(t), peer, tag=tag) for peer, t in sends if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Strides are set, not kept: a single element counts as contiguous whatever its stride, but
    # only stride 1 can be seen as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def _failing(schedule: TransferSchedule) -> Iterator[None]:
    """Turn what `torch.distributed` raises into a `CommunicatorError`."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and the other errors of torch are such
        raise CommunicatorError(
            f"{schedule.step} with {ranks_text(schedule.peers)} failed: {_cause(error)}; the job "
            "cannot go on, see what these ranks say"
        ) from error


def _cause(error: RuntimeError) -> str:
    """Return what happened, without where in the sources of the backend, and without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return re.sub(r"^\[\S+:\d+\] ", "", said).split(". This is typically")[0]


class Collectives:
    """Moves boxes by all-gather and reduce-scatter, in steps that fit; a `Transport`.

    Parameters
    ----------
    group
        The members of the schedules, ranks ascending.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in; see `Transport`."""
        with _failing(schedule):
            _ALL_GATHER(result.view(-1), shard.contiguous().view(-1), group=self._group)

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with the sum or mean of the addends; see `Transport`."""
        with _failing(schedule):
            _REDUCE_SCATTER(result.view(-1), shard.contiguous().view(-1), group=self._group)
        if op == "avg":
            result /= len(schedule.members)

    def all_reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, op: ReduceOp
    ) -> torch.Tensor:
        """Return the sum or mean of the addends."""
        result = shard.clone(memory_format=torch.contiguous_format)
        with _failing(schedule):
            dist.all_reduce(result, group=self._group)
        return result.div_(len(schedule.members)) if op == "avg" else result


def fits(schedule: TransferSchedule, dtype: torch.dtype) -> bool:
    """Say whether a collective of the backend does a step; all members say the same.

    Examples
    --------
    >>> from shardspec.comm.routes import schedule_for
    >>> from shardspec.layout.layout import Layout
    >>> from shardspec.mesh import DeviceMesh
    >>> for shape in ((6, 5), (7, 5)):
    ...     rows = Layout(DeviceMesh(range(2), (2,)), "[S0,R]", shape, "float32")
    ...     full, step = rows.with_spec("[R,R]"), AllGather(0, (0,))
    ...     fits(schedule_for(step, rows.mesh, 1, rows.box, full.box), torch.float32)
    True
    False
    """
    match schedule.step:
        case AllGather():
            coming = {part.peer: part.box for part in schedule.incoming}
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

"""Boxes over `torch.distributed`: messages on any backend, or NCCL's collectives where they fit.

Both ends of a message cut a box into the same chunks. Where a part of a tensor is not contiguous
its chunks pass through buffers, and only so many bytes of these are under way at once. So a step
needs little memory besides the shards, and a chunk is copied while the cache still holds it.

Collectives take tensors in which the parts of all ranks lie one behind the other, equally long, in
the order of the ranks. NCCL has algorithms for all-gather, reduce-scatter and all-reduce that its
sends and receives do not reach. On the CPU they are not used: gloo's carry no tag, so what two
threads convert at once would be mixed up.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_size, slices_within
from shardspec.comm.control import Unanswered
from shardspec.comm.results import combine_into
from shardspec.comm.routes import TransferSchedule, chunks
from shardspec.comm.steps import AllGather, AllReduce, ReduceOp, ReduceScatter
from shardspec.comm.transport import cause, copy_own_part, failing

__all__ = ["STAGED_BYTES", "Collectives", "Messages", "fits", "is_contiguous_partition"]

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
            raise Unanswered(silent or lengths, cause(error)) from error
        return {peer: record.cpu().numpy().tobytes() for peer, record in records.items()}


@dataclass(frozen=True, slots=True)
class _Round:
    """One chunk of every box, on its way."""

    works: Sequence[dist.Work]
    late: Sequence[Callable[[], object]]
    """What is done with the chunks once they are here."""
    tensors: Sequence[torch.Tensor]
    """Kept until they have gone."""
    buffers: Sequence[torch.Tensor]
    """Free for the next round after that."""


class _Rounds:
    """Rounds on their way, the oldest first, and the buffers that they share."""

    def __init__(self, schedule: TransferSchedule, shard: torch.Tensor, tag: int) -> None:
        self._schedule, self._shard, self._tag = schedule, shard, tag + 1
        self._peers = {peer for peer, _ in schedule.outgoing}
        self._peers |= {part.peer for part in schedule.incoming} - {schedule.device}
        self._under_way: deque[_Round] = deque()
        boxes = [box for _, box in schedule.outgoing] + [part.box for part in schedule.incoming]
        peers = max(1, len(schedule.members) - 1)
        self._round_bytes = _ROUND_BYTES.get(shard.device.type, _ROUND_BYTES_ELSEWHERE)
        self._most = max(self._round_bytes // peers, _LEAST_BYTES) // shard.element_size()
        self._buffer_size = min(self._most, max(map(box_size, boxes), default=0))
        self._free: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []

    def boxes(self, incoming: Boxes) -> Iterator[tuple[Boxes, Boxes]]:
        """Yield what is sent and received round by round, once there is room for it."""
        sends, receives = (
            zip_longest(
                *([(peer, part) for part in chunks(box, self._most)] for peer, box in boxes)
            )
            for boxes in (self._schedule.outgoing, incoming)
        )
        room = 2 * self._round_bytes  # for one round more, of what is sent and what comes
        for sent, received in zip_longest(sends, receives, fillvalue=()):
            while self._under_way and self._staged_bytes() > room:
                self._finish_oldest()
            yield [part for part in sent if part], [part for part in received if part]

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous buffer shaped as a chunk, for the round that is posted next."""
        flat = self._free.pop() if self._free else self._shard.new_empty(self._buffer_size)
        self._taken.append(flat)
        return flat[: like.numel()].view(like.shape)

    def post(self, sends: Boxes, receives: Addressed, late: Sequence[Callable[[], object]]) -> None:
        """Start a round; parts of the shard that are not contiguous are sent from a copy."""
        leaving = []
        for peer, box in sends:
            part = self._shard[slices_within(box, self._schedule.before)]
            leaving.append((peer, part if part.is_contiguous() else self.buffer(part).copy_(part)))
        with failing(self._schedule.step, self._peers):
            works = _start(leaving, receives, self._tag)
        kept = [tensor for _, tensor in leaving]
        self._under_way.append(_Round(works, late, kept, self._taken))
        self._taken = []

    def finish(self) -> None:
        """Wait for all rounds."""
        while self._under_way:
            self._finish_oldest()

    def _staged_bytes(self) -> int:
        count = sum(len(one.buffers) for one in self._under_way)
        return count * self._buffer_size * self._shard.element_size()

    def _finish_oldest(self) -> None:
        oldest = self._under_way.popleft()
        with failing(self._schedule.step, self._peers):
            for work in oldest.works:
                work.wait()
        for act in oldest.late:
            act()
        self._free += oldest.buffers


def _start(sends: Addressed, receives: Addressed, tag: int) -> list[dist.Work]:
    """Post contiguous tensors as bytes, so that every dtype travels; empty ones do not."""
    ops = [dist.P2POp(dist.irecv, _as_bytes(t), peer, tag=tag) for peer, t in receives if t.numel()]
    ops += [dist.P2POp(dist.isend, _as_bytes(t), peer, tag=tag) for peer, t in sends if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Strides are set, not kept: a single element counts as contiguous whatever its stride, but
    # only stride 1 can be seen as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
        with failing(schedule.step, schedule.peers):
            _ALL_GATHER(result.view(-1), shard.contiguous().view(-1), group=self._group)

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with the sum or mean of the addends; see `Transport`."""
        with failing(schedule.step, schedule.peers):
            _REDUCE_SCATTER(result.view(-1), shard.contiguous().view(-1), group=self._group)
        if op == "avg":
            result /= len(schedule.members)

    def all_reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, op: ReduceOp
    ) -> torch.Tensor:
        """Return the sum or mean of the addends."""
        result = shard.clone(memory_format=torch.contiguous_format)
        with failing(schedule.step, schedule.peers):
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
    ...     cut = Layout(DeviceMesh(range(2), (2,)), "[S0,R]", shape, "float32")
    ...     whole, step = cut.with_spec("[R,R]"), AllGather(0, (0,))
    ...     fits(schedule_for(step, cut.mesh, 1, cut.box, whole.box), torch.float32)
    True
    False
    """
    members = sorted(schedule.members)
    match schedule.step:
        case AllGather():
            coming = {part.peer: part.box for part in schedule.incoming}
            parts = [coming.get(peer) for peer in members]
            return dtype in _MOVED and is_contiguous_partition(parts, schedule.after)
        case ReduceScatter(op="sum" | "avg"):
            going = {**dict(schedule.outgoing), schedule.device: schedule.after}
            parts = [going.get(peer) for peer in members]
            return dtype in _SUMMED and is_contiguous_partition(parts, schedule.before)
        case AllReduce(op="sum" | "avg"):
            return dtype in _SUMMED
        case _:
            return False


def is_contiguous_partition(parts: Sequence[Box | None], box: Box) -> bool:
    """Say whether parts of a box lie one behind the other in memory, equally long, and fill it.

    Examples
    --------
    >>> box = ((0, 4), (0, 3))
    >>> is_contiguous_partition([((0, 2), (0, 3)), ((2, 4), (0, 3))], box)
    True
    >>> is_contiguous_partition([((2, 4), (0, 3)), ((0, 2), (0, 3))], box)
    False
    """
    size = box_size(box)
    if size == 0 or size % len(parts):
        return False
    each = size // len(parts)
    return all(
        part is not None and _flat_range(part, box) == (at * each, (at + 1) * each)
        for at, part in enumerate(parts)
    )


def _flat_range(part: Box, box: Box) -> tuple[int, int] | None:
    """Return where a part lies in the memory of a box, or None where it has gaps."""
    start = 0
    stride = box_size(box)
    partial = False
    for (lo, hi), (box_lo, box_hi) in zip(part, box, strict=True):
        if partial and (lo, hi) != (box_lo, box_hi):
            return None
        stride //= box_hi - box_lo
        start += (lo - box_lo) * stride
        partial = partial or hi - lo > 1
    return start, start + box_size(part)

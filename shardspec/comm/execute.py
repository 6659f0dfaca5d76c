"""Executes a step on one device: sends and receives its boxes, and reduces received addends."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Final

import torch

from shardspec.boxes import Box, box_shape, chunks, slices_within
from shardspec.comm.results import checked_result, combine_into, empty_hugepages
from shardspec.comm.senders import Copy
from shardspec.comm.steps import AllReduce, ReduceOp
from shardspec.comm.transfers import DeviceTransfers, Message, all_reduce_halves
from shardspec.comm.transports.stage import Stage, Transport, Wave

LEAST_BYTES: Final = 256 << 10
"""The least bytes of a message; shorter ones would cost more time than they save memory."""
_SENDER, _RECEIVER = attrgetter("sender"), attrgetter("receiver")


def run_transfers(
    transport: Transport, transfers: DeviceTransfers, shard: torch.Tensor
) -> torch.Tensor:
    """Execute a step on one device and send to the others; return its new shard."""
    if isinstance(transfers.step, AllReduce):
        return _all_reduce(transport, transfers, shard)
    result = empty_hugepages(shard, box_shape(transfers.after))
    with checked_result(transfers.step, result):
        transport.move([_stage(transfers, shard, result, transfers.op)])
    return result


def _all_reduce(
    transport: Transport, transfers: DeviceTransfers, shard: torch.Tensor
) -> torch.Tensor:
    """Reduce one part on every member, then gather the parts; this sends as much as a ring."""
    step = transfers.step
    if shard.is_contiguous():
        flat = shard.view(-1)
        result = empty_hugepages(flat, flat.shape)
    else:
        # The parts are reduced in place: only this rank reads the part that it reduces.
        result = flat = shard.clone(memory_format=torch.contiguous_format).view(-1)
    reducing, sharing = all_reduce_halves(step, transfers.device, transfers.members, shard.numel())
    reduced = result[slices_within(reducing.after, sharing.after)]
    with checked_result(step, result if result is not flat else result[:0]):
        transport.move([_stage(reducing, flat, reduced, transfers.op)])
        transport.move([_stage(sharing, reduced, result, None)])
    return result.view(shard.shape)


def _stage(
    transfers: DeviceTransfers, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp | None
) -> Stage:
    """Return the stage of a step: boxes go to the result, or addends of a reduction to buffers.

    Shard and result may share memory.
    """
    me, addends = transfers.device, dict[int, torch.Tensor]()
    count = 1 if op is None else len(transfers.members)
    stage = partial(
        Stage,
        str(transfers.step),
        me,
        frozenset(copy.receiver for copy in transfers.outgoing),
        frozenset(copy.sender for copy in transfers.incoming) - {me},
        dtype_of=lambda _: shard.dtype,
        source=dict.fromkeys(range(count), shard),
        source_region=lambda copy, strides, device: _within(
            copy.box, transfers.boxes_before[device], strides
        ),
        one_by_one=True,
    )
    if op is None:
        return stage(
            target={0: result},
            target_region=lambda copy, strides, _: _within(copy.box, transfers.after, strides),
            waves=partial(_copy_waves, transfers, shard, result),
        )
    return stage(
        target=addends,
        target_region=lambda copy, strides, _: (box_shape(copy.box), strides, 0),
        waves=partial(_reduction_waves, transfers, shard, result, op, addends),
        is_combined=True,
    )


def _within(
    box: Box, outer: Box, strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    steps = strides[: len(box)]
    starts = zip(box, outer, steps, strict=True)
    return box_shape(box), steps, sum((lo - start) * step for (lo, _), (start, _), step in starts)


def _copy_waves(
    transfers: DeviceTransfers, shard: torch.Tensor, result: torch.Tensor, most_bytes: int | None
) -> Iterator[Wave]:
    for sends, receives in _rounds(transfers, shard.itemsize, most_bytes):
        if _share(shard, result):  # the own part is already in place
            receives = [copy for copy in receives if copy.sender != transfers.device]
        yield Wave(_grouped(sends, _RECEIVER), _grouped(receives, _SENDER))


def _reduction_waves(
    transfers: DeviceTransfers,
    shard: torch.Tensor,
    result: torch.Tensor,
    op: ReduceOp,
    addends: dict[int, torch.Tensor],
    most_bytes: int | None,
) -> Iterator[Wave]:
    """Yield waves that fill buffers with addends; combine the addends after each wave."""
    shares = _share(shard, result)
    memory: dict[int, torch.Tensor] = {}
    for sends, copies in _rounds(transfers, shard.itemsize, most_bytes):
        receives: dict[int, Message] = {}
        combined = []
        addends.clear()
        for number, copy in enumerate(copies):
            if copy.sender == transfers.device:
                own = shard[slices_within(copy.box, transfers.before)]
                # The result may overwrite this device's own addend.
                combined.append(_like(memory, number, own).copy_(own) if shares else own)
                continue
            place = result[slices_within(copy.box, transfers.after)]
            addends[number] = _like(memory, number, place)
            combined.append(addends[number])
            receives[copy.sender] = [copy._replace(places=(number,))]
        yield Wave(_grouped(sends, _RECEIVER), receives)
        if combined:
            combine_into(result[slices_within(copies[0].box, transfers.after)], combined, op)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _like(memory: dict[int, torch.Tensor], key: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return memory shaped like a tensor: `memory[key]`, which every round of a step reuses."""
    if key not in memory or memory[key].numel() < tensor.numel():
        memory[key] = tensor.new_empty(tensor.numel())
    return memory[key][: tensor.numel()].view(tensor.shape)


def _grouped(copies: Iterable[Copy], peer_of: Callable[[Copy], int]) -> dict[int, Message]:
    """Group copies into one message per peer; `peer_of` returns the peer of a copy."""
    messages: dict[int, list[Copy]] = {}
    for copy in copies:
        messages.setdefault(peer_of(copy), []).append(copy)
    return dict(messages)


def _rounds(
    transfers: DeviceTransfers, item_bytes: int, most_bytes: int | None
) -> Iterator[tuple[list[Copy], list[Copy]]]:
    """Yield (sent, received) copies of each round; a round moves one chunk of every box."""
    sends, receives = (
        [copy._replace(item_bytes=item_bytes) for copy in side]
        for side in (transfers.outgoing, transfers.incoming)
    )
    if most_bytes is None:
        yield sends, receives
        return
    each = max(most_bytes // max(1, len(transfers.members) - 1), LEAST_BYTES) // item_bytes

    def cut(copies: list[Copy]) -> Iterable[tuple[Copy | None, ...]]:
        parts = ([copy._replace(box=box) for box in chunks(copy.box, each)] for copy in copies)
        return zip_longest(*parts)

    for sent, received in zip_longest(cut(sends), cut(receives), fillvalue=()):
        yield [copy for copy in sent if copy], [copy for copy in received if copy]

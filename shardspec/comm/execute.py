"""Executes a step on one device over any transport; checks and reduces results."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Final

import torch

from shardspec.boxes import Box, box_shape, box_size, chunks, slices_within
from shardspec.comm.results import checked_result, combine_into, empty_hugepages
from shardspec.comm.steps import AllReduce, ReduceOp
from shardspec.comm.transfers import DeviceTransfers, Message, Parts, Piece, all_reduce_halves
from shardspec.comm.transports.stage import Stage, Transport, Wave

LEAST_BYTES: Final = 256 << 10
"""The shortest chunk; shorter messages would cost more time than they save memory."""


def execute(transport: Transport, transfers: DeviceTransfers, shard: torch.Tensor) -> torch.Tensor:
    """Execute a step on one device while serving the others; return its new shard."""
    if isinstance(transfers.step, AllReduce):
        return _all_reduce(transport, transfers, shard)
    result = empty_hugepages(shard, box_shape(transfers.after))
    with checked_result(transfers.step, result):
        transport.move([_stage(transfers, shard, result, transfers.op)])
    return result


def _all_reduce(
    transport: Transport, transfers: DeviceTransfers, shard: torch.Tensor
) -> torch.Tensor:
    """Reduce one part on every member, then share the parts: as many bytes as a ring sends."""
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
    """Return the stage of a step: it moves boxes to the result, or addends to buffers.

    The shard may be a part of the result; the result of a reduction may be a part of the shard.
    """
    me, addends = transfers.device, dict[int, torch.Tensor]()
    count = 1 if op is None else len(transfers.members)
    stage = partial(
        Stage,
        str(transfers.step),
        me,
        frozenset(peer for peer, _ in transfers.outgoing),
        frozenset(peer for peer, _ in transfers.incoming) - {me},
        dtype_of=lambda _: shard.dtype,
        source=dict.fromkeys(range(count), shard),
        source_region=lambda piece, strides, device: _within(
            piece.box, transfers.boxes_before[device], strides
        ),
        one_by_one=True,
    )
    if op is None:
        return stage(
            target={0: result},
            target_region=lambda piece, strides, _: _within(piece.box, transfers.after, strides),
            waves=partial(_moves, transfers, shard, result),
        )
    return stage(
        target=addends,
        target_region=lambda piece, strides, _: (box_shape(piece.box), strides, 0),
        waves=partial(_reductions, transfers, shard, result, op, addends),
        is_combined=True,
    )


def _within(
    box: Box, outer: Box, strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    steps = strides[: len(box)]
    starts = zip(box, outer, steps, strict=True)
    return box_shape(box), steps, sum((lo - start) * step for (lo, _), (start, _), step in starts)


def _moves(
    transfers: DeviceTransfers, shard: torch.Tensor, result: torch.Tensor, most_bytes: int | None
) -> Iterator[Wave]:
    for sends, receives in _rounds(transfers, shard.itemsize, most_bytes):
        if _share(shard, result):  # the device's own part is already in place
            receives = [part for part in receives if part[0] != transfers.device]
        yield Wave(_messages(sends, shard.itemsize), _messages(receives, shard.itemsize))


def _reductions(
    transfers: DeviceTransfers,
    shard: torch.Tensor,
    result: torch.Tensor,
    op: ReduceOp,
    addends: dict[int, torch.Tensor],
    most_bytes: int | None,
) -> Iterator[Wave]:
    """Yield waves that fill buffers with addends, and combine these after each wave."""
    shares = _share(shard, result)
    memory: dict[int, torch.Tensor] = {}
    for sends, parts in _rounds(transfers, shard.itemsize, most_bytes):
        receives: dict[int, Message] = {}
        combined = []
        addends.clear()
        for number, (peer, box) in enumerate(parts):
            if peer == transfers.device:
                own = shard[slices_within(box, transfers.before)]
                # The result may overwrite this device's own addend.
                combined.append(_like(memory, number, own).copy_(own) if shares else own)
                continue
            place = result[slices_within(box, transfers.after)]
            addends[number] = _like(memory, number, place)
            combined.append(addends[number])
            receives[peer] = [Piece((number,), box, 0, box_size(box) * shard.itemsize)]
        yield Wave(_messages(sends, shard.itemsize), receives)
        if combined:
            combine_into(result[slices_within(parts[0][1], transfers.after)], combined, op)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _like(memory: dict[int, torch.Tensor], key: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory shaped like a tensor, reused by every round of a step."""
    if key not in memory or memory[key].numel() < tensor.numel():
        memory[key] = tensor.new_empty(tensor.numel())
    return memory[key][: tensor.numel()].view(tensor.shape)


def _messages(parts: Parts, item_bytes: int) -> dict[int, Message]:
    """Return one message per peer with all of its boxes."""
    messages: dict[int, list[Piece]] = {}
    for peer, box in parts:
        message = messages.setdefault(peer, [])
        start = message[-1].start + message[-1].step if message else 0
        message.append(Piece((0,), box, start, box_size(box) * item_bytes))
    return dict(messages)


def _rounds(
    transfers: DeviceTransfers, item_bytes: int, most_bytes: int | None
) -> Iterator[tuple[Parts, Parts]]:
    """Yield what is sent and received in each round: one chunk of every box."""
    if most_bytes is None:
        yield transfers.outgoing, transfers.incoming
        return
    each = max(most_bytes // max(1, len(transfers.members) - 1), LEAST_BYTES) // item_bytes

    def cut(parts: Parts) -> Iterable[tuple[tuple[int, Box] | None, ...]]:
        return zip_longest(*([(peer, part) for part in chunks(box, each)] for peer, box in parts))

    sides = cut(transfers.outgoing), cut(transfers.incoming)
    for sent, received in zip_longest(*sides, fillvalue=()):
        yield [part for part in sent if part], [part for part in received if part]

"""Steps on CUDA tensors by NCCL's collectives, where these fit."""

from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_shape, box_size, split_interval
from shardspec.comm.results import checked_result
from shardspec.comm.steps import AllGather, AllReduce, ReduceScatter
from shardspec.comm.transfers import DeviceTransfers
from shardspec.comm.transports.messages import as_bytes, errors_named

# Named anew in torch 2.13, which warns of the old names.
_NEW_NAMES: Final = torch.__version__ >= "2.13"  # compares as versions do
_ALL_GATHER: Final = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
_REDUCE_SCATTER: Final = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor
_SUMMED: Final = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes whose sum every backend has, with the rounding of the dtype itself."""


def run_collective(
    schedule: DeviceTransfers, shard: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Run a step that `has_collective` on CUDA tensors by NCCL's collective; see `run_transfers`.

    It is faster than sends and receives.
    """
    step, result = schedule.step, shard.new_empty(box_shape(schedule.after))
    with checked_result(step, result), errors_named(str(step), schedule.peers):
        if isinstance(step, AllReduce):
            dist.all_reduce(result.copy_(shard), group=group)
        elif schedule.op is None:
            _ALL_GATHER(as_bytes(result), as_bytes(shard.contiguous()), group=group)
        else:
            _REDUCE_SCATTER(result.view(-1), shard.contiguous().view(-1), group=group)
    return result.div_(len(schedule.members)) if schedule.op == "avg" else result


def has_collective(schedule: DeviceTransfers, dtype: torch.dtype) -> bool:
    """Return True if a collective of the backend does a step; all members return the same."""
    match schedule.step:
        case AllGather():
            coming = {copy.sender: copy.box for copy in schedule.incoming}
            return _are_in_order(schedule, coming, schedule.after)
        case ReduceScatter(op="sum" | "avg"):
            going = {copy.receiver: copy.box for copy in schedule.outgoing}
            going[schedule.device] = schedule.after
            return dtype in _SUMMED and _are_in_order(schedule, going, schedule.before)
        case AllReduce(op="sum" | "avg"):
            return dtype in _SUMMED
        case _:
            return False


def _are_in_order(schedule: DeviceTransfers, parts: Mapping[int, Box], box: Box) -> bool:
    """Return True if the members' parts of a box are adjacent in memory and equally long."""
    ranks, shape = sorted(schedule.members), box_shape(box)
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if dim is None or not box_size(box) or shape[dim] % len(ranks):
        return False
    cuts = (split_interval(*box[dim], len(ranks), at) for at in range(len(ranks)))
    return [parts.get(rank) for rank in ranks] == [(*box[:dim], c, *box[dim + 1 :]) for c in cuts]

"""Combining the addends of a pending reduction."""

from collections.abc import Iterable, Sequence
from typing import Final, assert_never

import torch

from shardspec.comm.reduce_op import ReduceOp

__all__ = ["combine", "combine_into"]

_WIDER: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Sums of many short floats are kept in a wider type and rounded once."""


def combine(addends: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Return the reduction of tensors of one shape and dtype, as a new tensor.

    Examples
    --------
    >>> combine([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])], "avg")
    tensor([2.0000, 3.5000])
    >>> combine([torch.tensor([1, 5]), torch.tensor([3, 2])], "max")
    tensor([3, 5])
    """
    result = torch.empty_like(addends[0], memory_format=torch.contiguous_format)
    combine_into(result, addends, op)
    return result


def combine_into(result: torch.Tensor, addends: Iterable[torch.Tensor], op: ReduceOp) -> None:
    """Write the reduction of at least one tensor into another of the same shape and dtype.

    Parameters
    ----------
    result
        Where it goes. It may be the first addend, and may share memory with no other.
    addends
        Looked at one after the other: the next may be made in the memory of the one before.
    op
        How they are combined; in their order, so equal addends give equal bits.
    """
    wider = _WIDER.get(result.dtype, result.dtype)
    total = result if wider == result.dtype else torch.empty_like(result, dtype=wider)
    count = 0
    for addend in addends:
        count += 1
        if count > 1:
            _add(total, addend, op)
        elif total.data_ptr() != addend.data_ptr():
            total.copy_(addend)
    assert count, "a reduction has addends"
    if op == "avg":
        total /= count
    if total is not result:
        result.copy_(total)


def _add(total: torch.Tensor, addend: torch.Tensor, op: ReduceOp) -> None:
    match op:
        case "sum" | "avg":
            total += addend
        case "prod":
            total *= addend
        case "min":
            torch.minimum(total, addend, out=total)
        case "max":
            torch.maximum(total, addend, out=total)
        case _:
            assert_never(op)

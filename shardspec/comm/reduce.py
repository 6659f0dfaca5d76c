"""Combining the addends of a pending reduction."""

from collections.abc import Sequence
from typing import Final, assert_never

import torch

from shardspec.comm.steps import ReduceOp

__all__ = ["combine"]

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
    dtype = addends[0].dtype
    total = addends[0].to(_WIDER.get(dtype, dtype), copy=True)
    for addend in addends[1:]:
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
    if op == "avg":
        total /= len(addends)
    return total.to(dtype)

"""Allocates results of steps, reduces addends, and checks that every element is written."""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch

from shardspec.comm.steps import ReduceOp
from shardspec.errors import CommunicatorError

_LARGE_BYTES: Final = 4 << 20
"""The smallest size of a tensor that contains a 2 MiB page at any start address."""
_WIDER: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Wider dtypes in which short floats are summed; the sum is rounded once."""
_COMBINE: Final[dict[ReduceOp, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_WINDOW_BYTES: Final = 4
"""Bytes per comparison with the noise; a single byte is often equal by chance."""


def empty_hugepages(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an uninitialized tensor with the dtype and device of another.

    Requests pages of 2 MiB from Linux: faults of 4 KiB pages take longer than writing the data.

    >>> empty_hugepages(torch.zeros(2, dtype=torch.int8), (3, 4)).shape
    torch.Size([3, 4])
    """
    result = like.new_empty(shape)
    library = libc()
    if library is not None and result.device.type == "cpu" and result.nbytes >= _LARGE_BYTES:
        page, address = mmap.PAGESIZE, result.data_ptr()
        start, end = -(-address // page) * page, (address + result.nbytes) // page * page
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
    return result


@contextmanager
def checked_result(step: object, result: torch.Tensor) -> Iterator[None]:
    """Check that the block writes every element of a tensor, if ``SHARDSPEC_CHECK=1`` is set.

    The tensor is first filled with noise. Four bytes in a row that keep it are an error.
    """
    if os.environ.get("SHARDSPEC_CHECK") != "1" or result.is_meta or result.numel() == 0:
        yield
        return
    flat, seeded = result.view(-1).view(torch.uint8), torch.Generator().manual_seed(0)
    noise = torch.randint(1, 256, flat.shape, generator=seeded, dtype=torch.uint8).to(flat.device)
    flat.copy_(noise)
    yield
    unwritten, width = flat == noise, max(_WINDOW_BYTES, result.element_size())
    if len(unwritten) < width:
        return
    windows = unwritten.unfold(0, width, width).all(dim=1)
    if bool(windows.any()) or bool(unwritten[-width:].all()):
        raise CommunicatorError(
            f"{step} left {int(windows.sum())} of {len(windows)} windows of a result of shape "
            f"{tuple(result.shape)} and {result.dtype} unwritten; this is a defect of shardspec"
        )


def combine_into(result: torch.Tensor, addends: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Reduce addends in order into the result, which may share memory with the first addend.

    >>> result = torch.empty(2)
    >>> combine_into(result, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])], "avg")
    >>> result
    tensor([2.0000, 3.5000])
    """
    wider = _WIDER.get(result.dtype)
    total = result if wider is None else torch.empty_like(result, dtype=wider)
    if total.data_ptr() != addends[0].data_ptr():
        total.copy_(addends[0])
    for addend in addends[1:]:
        _COMBINE[op](total, addend, out=total)
    if op == "avg":
        total /= len(addends)
    if total is not result:
        result.copy_(total)


@cache
def libc() -> ctypes.CDLL | None:
    """Return the C library of Linux; None elsewhere."""
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

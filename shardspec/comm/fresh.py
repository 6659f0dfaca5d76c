"""Memory for results: large tensors in large pages.

Every page of a fresh tensor costs a page fault when it is first written. With pages of 4 KiB that
takes longer than filling them. Linux gives pages of 2 MiB to those who ask (man 2 madvise).
"""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

__all__ = ["fresh"]

_LARGE_BYTES: Final = 4 << 20
"""From here on large pages save time: at least one fits in, wherever the tensor starts."""


def fresh(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that is not filled yet, of the dtype and on the device of another.

    Examples
    --------
    >>> fresh(torch.ones(2, dtype=torch.int64), (3, 4)).shape
    torch.Size([3, 4])
    """
    result = like.new_empty(shape)
    if result.device.type == "cpu" and result.nbytes >= _LARGE_BYTES:
        _ask_for_large_pages(result.data_ptr(), result.nbytes)
    return result


def _ask_for_large_pages(address: int, num_bytes: int) -> None:
    """Ask for them in the whole pages within a stretch of memory; the system may say no."""
    libc = _libc()
    if libc is not None:
        page = mmap.PAGESIZE
        start, end = -(-address // page) * page, (address + num_bytes) // page * page
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None

"""Reading the memory of another process of the same host, without its help and without a copy.

Linux has `process_vm_readv` for this (man 2 process_vm_readv, since 3.2). Whoever may trace a
process may read it: one of the same user, unless the kernel's Yama module or a container's filter
says no. Nothing is taken for granted here; `can_read` tries.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Region", "can_read", "read"]

_MOST_RUNS: Final = 1024
"""IOV_MAX: runs of bytes in one call."""
_MOST_BYTES: Final = 64 << 20
"""Bytes in one call; the kernel stops at 2 GiB."""

_Runs = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Where an array lies in the memory of a process."""

    address: int
    """Of the first element."""
    shape: tuple[int, ...]
    """Elements along each dim."""
    strides: tuple[int, ...]
    """Bytes between neighbours along each dim."""
    item_bytes: int
    """Bytes of an element."""

    def part(self, starts: Sequence[int], shape: Sequence[int]) -> "Region":
        """Return where a part of the array lies.

        Examples
        --------
        >>> Region(1000, (4, 6), (24, 4), 4).part((1, 2), (3, 2))
        Region(address=1032, shape=(3, 2), strides=(24, 4), item_bytes=4)
        """
        offset = sum(at * stride for at, stride in zip(starts, self.strides, strict=True))
        return Region(self.address + offset, tuple(shape), self.strides, self.item_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.item_bytes

    @property
    def span(self) -> int:
        """Bytes from the first element to behind the last one, gaps included.

        Examples
        --------
        >>> Region(0, (3, 2), (24, 4), 4).span
        56
        """
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return reach + self.item_bytes if prod(self.shape) else 0

    @property
    def run_bytes(self) -> int:
        """Bytes that lie next to each other before the first gap.

        Examples
        --------
        >>> Region(0, (3, 2), (24, 4), 4).run_bytes, Region(0, (3, 2), (8, 4), 4).run_bytes
        (8, 24)
        """
        run = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size == 1:
                continue
            if stride != run:
                break
            run *= size
        return run


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array from another process into this one.

    Parameters
    ----------
    pid
        The other process.
    source
        Where the array lies there.
    target
        Where it goes here; of the same shape and element size.

    Raises
    ------
    OSError
        If the process has gone, or this one may not read it, or no such memory is there.
    """
    run = min(source.run_bytes, target.run_bytes)
    theirs, ours = _starts(source, run), _starts(target, run)
    if run > _MOST_BYTES:
        for first in range(0, run, _MOST_BYTES):
            at = np.uint64(first)
            for there, here in zip(theirs + at, ours + at, strict=True):
                _call(pid, [there], [here], min(_MOST_BYTES, run - first))
        return
    at_once = max(1, min(_MOST_RUNS, _MOST_BYTES // run))
    for first in range(0, len(theirs), at_once):
        _call(pid, theirs[first : first + at_once], ours[first : first + at_once], run)


def can_read(pid: int, address: int, content: bytes) -> bool:
    """Say whether another process can be read, by reading something known.

    Examples
    --------
    >>> content = ctypes.create_string_buffer(b"known")
    >>> can_read(os.getpid(), ctypes.addressof(content), b"known")
    True
    >>> can_read(os.getpid(), 0, b"known")
    False
    """
    found = ctypes.create_string_buffer(len(content))
    size = (len(content),)
    try:
        read(pid, Region(address, size, (1,), 1), Region(ctypes.addressof(found), size, (1,), 1))
    except OSError:
        return False
    return found.raw == content


def _starts(region: Region, run: int) -> _Runs:
    """Return the address of every run of so many bytes, in the order of the elements."""
    starts: _Runs = np.full(1, region.address, dtype=np.uint64)
    inner = region.item_bytes
    dims = list(zip(region.shape, region.strides, strict=True))
    # Dims that lie within one stretch count as one; what is left of a stretch is cut into runs.
    while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
        size, _ = dims.pop()
        inner *= size
    if inner > run:
        dims.append((inner // run, run))
    for size, stride in dims:
        steps: _Runs = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        starts = np.add.outer(starts, steps).ravel()
    return starts


def _call(
    pid: int, theirs: _Runs | list[np.uint64], ours: _Runs | list[np.uint64], run: int
) -> None:
    vectors: _Runs = np.empty((2, len(ours), 2), dtype=np.uint64)
    vectors[0, :, 0], vectors[1, :, 0], vectors[:, :, 1] = ours, theirs, run
    here, there = (ctypes.c_void_p(vectors[side].ctypes.data) for side in (0, 1))
    count, no_flags = ctypes.c_ulong(len(ours)), ctypes.c_ulong(0)
    got = _libc().process_vm_readv(pid, here, count, there, count, no_flags)
    if got != len(ours) * run:
        code = ctypes.get_errno() if got < 0 else errno.EFAULT
        raise OSError(code, os.strerror(code))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{sys.platform} cannot read the memory of other processes")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc

"""Arrays in the memory of another process of the same host, read without its help.

`process_vm_readv` (Linux, man 2) copies them. Whoever may trace a process may read it: one of the
same user, unless Yama or a container's filter says no. `readable` tries it.
"""

import ctypes
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from shardspec.comm.links import Address

__all__ = ["MOST_BYTES", "MOST_RUNS", "Addresses", "Region", "read", "read_vectors", "readable"]

MOST_RUNS: Final = 1024
"""IOV_MAX: runs of bytes in one call."""
MOST_BYTES: Final = 64 << 20
"""Bytes in one call; the kernel stops at 2 GiB."""

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Where an array lies in the memory of a process; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    def part(self, index: tuple[slice, ...]) -> "Region":
        """Return where a part of the array lies."""
        offset = sum(part.start * step for part, step in zip(index, self.strides, strict=True))
        shape = tuple(part.stop - part.start for part in index)
        return Region(self.address + offset, shape, self.strides, self.item_bytes)

    def halves(self) -> Iterator[tuple[slice, ...]]:
        """Yield two parts of an array of several elements, cut where it reaches farthest."""
        dims = [dim for dim, size in enumerate(self.shape) if size > 1]
        widest = max(dims, key=lambda dim: self.strides[dim] * self.shape[dim])
        middle = self.shape[widest] // 2
        for half in (slice(0, middle), slice(middle, self.shape[widest])):
            yield tuple(
                half if dim == widest else slice(0, size) for dim, size in enumerate(self.shape)
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.item_bytes

    @property
    def span(self) -> int:
        """Bytes from the first element to behind the last one, gaps included."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return reach + self.item_bytes if prod(self.shape) else 0

    @property
    def run_bytes(self) -> int:
        """Bytes that lie next to each other before the first gap."""
        run = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != run:
                break
            run *= size
        return run

    def runs(self, run: int) -> Addresses:
        """Return the address of every run of so many bytes, in the order of the elements."""
        starts: Addresses = np.full(1, self.address, dtype=np.uint64)
        inner, dims = self.item_bytes, list(zip(self.shape, self.strides, strict=True))
        # Dims that lie within one stretch count as one; what is left of a stretch is cut into runs.
        while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
            inner *= dims.pop()[0]
        for size, stride in [*dims, (inner // run, run)]:
            steps: Addresses = np.arange(size, dtype=np.uint64) * np.uint64(stride)
            starts = np.add.outer(starts, steps).ravel()
        return starts


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of another process to one here, of the same shape and element size.

    `OSError` says that the process has gone, may not be read, or has no such memory.
    """
    if source.num_bytes > MOST_BYTES:
        for half in source.halves():
            read(pid, source.part(half), target.part(half))
        return
    run = min(source.run_bytes, target.run_bytes)
    theirs, ours = source.runs(run), target.runs(run)
    for first in range(0, len(ours), MOST_RUNS):
        count = min(MOST_RUNS, len(ours) - first)
        vectors: Addresses = np.full((2, count, 2), run, dtype=np.uint64)
        vectors[0, :, 0], vectors[1, :, 0] = ours[first:][:count], theirs[first:][:count]
        read_vectors(pid, vectors[0], vectors[1])


def read_vectors(pid: int, ours: Addresses, theirs: Addresses) -> None:
    """Read at most `MOST_RUNS` runs, given by rows of address and length."""
    ours, theirs = np.ascontiguousarray(ours), np.ascontiguousarray(theirs)
    here, there = (ctypes.c_void_p(vectors.ctypes.data) for vectors in (ours, theirs))
    length, no_flags = ctypes.c_ulong(len(ours)), ctypes.c_ulong(0)
    got = _libc().process_vm_readv(pid, here, length, there, length, no_flags)
    if got != int(ours[:, 1].sum()):
        code = ctypes.get_errno() if got < 0 else errno.EFAULT
        raise OSError(code, os.strerror(code))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def readable(addresses: Mapping[int, Address]) -> frozenset[int]:
    """Return which of some processes can be read, by reading what each says to have somewhere."""
    found = set()
    for peer, other in addresses.items():
        got, size = ctypes.create_string_buffer(len(other.content)), (len(other.content),)
        target = Region(ctypes.addressof(got), size, (1,), 1)
        with suppress(OSError):
            read(other.pid, Region(other.probe, size, (1,), 1), target)
            if got.raw == other.content:
                found.add(peer)
    return frozenset(found)

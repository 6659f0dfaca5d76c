"""Where arrays lie in the memory of a process."""

import ctypes
from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_DTYPES: Final = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128)
_BY_WIDTH: Final = {dtype.itemsize: dtype for dtype in _DTYPES}

Ints: TypeAlias = npt.NDArray[np.int64]


class Region(NamedTuple):
    """Where an array lies in the memory of a process; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        """Return where a tensor lies."""
        item = tensor.element_size()
        strides = tuple(stride * item for stride in tensor.stride())
        return cls(tensor.data_ptr(), tuple(tensor.shape), strides, item)

    def tensor(self) -> torch.Tensor:
        """Return an array of this process, as whole numbers; it has to outlive the tensor."""
        memory = (ctypes.c_char * self.span).from_address(self.address)
        steps = [stride // self.item_bytes for stride in self.strides]
        flat = torch.frombuffer(memory, dtype=_BY_WIDTH[self.item_bytes])
        return flat.as_strided(self.shape, steps)

    def part(self, index: tuple[slice, ...]) -> "Region":
        """Return where a part of the array lies."""
        offset = sum(part.start * step for part, step in zip(index, self.strides, strict=True))
        shape = tuple(part.stop - part.start for part in index)
        return self._replace(address=self.address + offset, shape=shape)

    def halves(self) -> Iterator[tuple[slice, ...]]:
        """Yield the indices of two halves, cut along the dim that spans most memory."""
        dims = [dim for dim, size in enumerate(self.shape) if size > 1]
        widest = max(dims, key=lambda dim: self.strides[dim] * self.shape[dim])
        middle = self.shape[widest] // 2
        whole = tuple(slice(0, size) for size in self.shape)
        for half in (slice(0, middle), slice(middle, self.shape[widest])):
            yield (*whole[:widest], half, *whole[widest + 1 :])

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.item_bytes

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one, gaps included."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return reach + self.item_bytes if prod(self.shape) else 0

    @property
    def run_bytes(self) -> int:
        """Bytes before the first gap."""
        run = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != run:
                break
            run *= size
        return run

    def runs(self, run: int) -> Ints:
        """Return the address of every run of so many bytes, in the order of the elements."""
        starts: Ints = np.full(1, self.address, dtype=np.int64)
        inner, dims = self.item_bytes, list(zip(self.shape, self.strides, strict=True))
        # Inner dims without gaps count as one, which is cut into runs.
        while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
            inner *= dims.pop()[0]
        for size, stride in [*dims, (inner // run, run)]:
            if size > 1:
                starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).ravel()
        return starts

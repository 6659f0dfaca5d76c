"""Finds tensors that are the same memory, and tensors that overlap.

Storages do not tell: arrays of numpy, buffers and shared memory make several of one memory. What
tells is where each element lies.
"""

from collections.abc import Hashable, Iterator, Mapping
from operator import itemgetter
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

K = TypeVar("K")

_MAX_WORK: Final = 100_000
"""Steps of the search for a byte that two strided arrays share; a longer search counts as a hit."""


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that tensors share exactly if they are the same elements of the same memory."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements lie in memory: not those of the meta device or of a freed storage."""
    if not tensor.numel():
        return True
    if tensor.is_meta:
        return False
    start = tensor.storage_offset() * tensor.element_size()
    return start + _span_bytes(tensor) <= tensor.untyped_storage().nbytes()


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last one, gaps included."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one do.

    Strides of another kind than slices, steps and permutations make count as overlapping.
    """
    if not tensor.numel() or tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


class Overlap(NamedTuple, Generic[K]):
    """Two arrays that have a byte in common; at least one is written."""

    written: K
    other: K
    both_written: bool
    same: bool
    """Whether they are the same elements of the same memory."""


class _Span(NamedTuple, Generic[K]):
    start: int
    end: int
    key: K
    tensor: torch.Tensor
    written: bool


def _spans(tensors: Mapping[K, torch.Tensor], *, written: bool) -> Iterator[_Span[K]]:
    for key, tensor in tensors.items():
        if tensor.numel():
            start = tensor.data_ptr()
            yield _Span(start, start + _span_bytes(tensor), key, tensor, written)


def memory_overlaps(
    read: Mapping[K, torch.Tensor], written: Mapping[K, torch.Tensor]
) -> Iterator[Overlap[K]]:
    """Yield the pairs of tensors that overlap, except those that are both only read."""
    reached, open_spans = 0, list[_Span[K]]()
    spans = [*_spans(read, written=False), *_spans(written, written=True)]
    for span in sorted(spans, key=itemgetter(0)):
        if span.start >= reached:
            open_spans = []
        for earlier in open_spans:
            if earlier.end <= span.start or not (span.written or earlier.written):
                continue
            if _share(earlier.tensor, span.tensor):
                first, second = (span, earlier) if span.written else (earlier, span)
                same = memory_of(span.tensor) == memory_of(earlier.tensor)
                yield Overlap(first.key, second.key, second.written, same)
        open_spans.append(span)
        reached = max(reached, span.end)


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two arrays whose spans overlap have a byte in common."""
    if first.device != second.device:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    try:
        # numpy's types allow but two of the numbers that it takes.
        return np.shares_memory(_array(first), _array(second), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Interface:
    """An array at an address, as numpy takes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{item}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
        }


def _array(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return an array over the memory of a tensor, which is only compared, never read."""
    return np.asarray(_Interface(tensor))

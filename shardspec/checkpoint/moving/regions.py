"""Reading a part of a stored box into memory: no byte more than needed, in few calls."""

from collections.abc import Callable
from math import gcd
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.moving.pieces import offset_in
from shardspec.checkpoint.source_files import SourceFile

__all__ = ["Bytes", "Seen", "read_region", "read_strided_region"]

Bytes: TypeAlias = NDArray[np.uint8]
Seen: TypeAlias = Callable[[int, memoryview], None]
"""Told of every stretch that was read: its position in the file, and its bytes."""

_PAGE: Final = 4096
"""Gaps shorter than this are read along: the system reads whole pages of a file anyway."""


def read_region(
    file: SourceFile,
    offset: int,
    outer: Box,
    region: Box,
    out: Bytes,
    scratch: memoryview,
    seen: Seen | None = None,
) -> None:
    """Read the part `region` of the box `outer` that lies row-major at `offset` of a file.

    Parameters
    ----------
    file, offset
        Where the box lies.
    outer, region
        The boxes, in bytes.
    out
        Where to put it; shaped as the region, its last dim contiguous.
    scratch
        Room for what is read before it is put in place; longer is faster, up to the CPU's cache.
    seen
        Called with every stretch that was read, while it is in the cache.

    Raises
    ------
    CheckpointError
        If the file ends too early or cannot be read.
    """
    strides = [1]
    for side in reversed(box_shape(outer)[1:]):
        strides.insert(0, strides[0] * side)
    start = offset + offset_in(outer, [lo for lo, _ in region])
    _read(file, start, tuple(strides), out, scratch, seen)


def read_strided_region(
    file: SourceFile,
    offset: int,
    strides: tuple[int, ...],
    item_bytes: int,
    outer: Box,
    region: Box,
    out: Bytes,
    scratch: memoryview,
    seen: Seen | None = None,
) -> None:
    """Read the part `region` of the box `outer` whose elements lie `strides` bytes apart.

    Parameters
    ----------
    strides
        Bytes from one element to the next along each dim of the box; 0 where all are the same one.
    item_bytes
        Bytes of an element; `outer` and `region` count their last dim in bytes, as `byte_box` does.

    The others are as for `read_region`.
    """
    if not strides:
        read_region(file, offset, outer, region, out, scratch, seen)
        return
    lows = [lo - first for (first, _), (lo, _) in zip(outer, region, strict=True)]
    lows[-1] //= item_bytes
    start = offset + sum(low * stride for low, stride in zip(lows, strides, strict=True))
    # The last dim is taken apart into elements and their bytes; then the longest stride goes first.
    items = out.reshape(*out.shape[:-1], -1, item_bytes)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    steps = (*(strides[dim] for dim in order), 1)
    _read(file, start, steps, items.transpose(*order, len(strides)), scratch, seen)


def _read(
    file: SourceFile,
    start: int,
    strides: tuple[int, ...],
    out: Bytes,
    scratch: memoryview,
    seen: Seen | None,
) -> None:
    span, gap = 1, 0
    for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        if size > 1:
            gap = max(gap, stride - span)
            span += (size - 1) * stride
    if out.flags.c_contiguous and all(
        size == 1 or stride == own
        for size, stride, own in zip(out.shape, strides, out.strides, strict=True)
    ):
        file.read_into(out.reshape(-1).data, start)
        if seen is not None:
            seen(start, out.reshape(-1).data)
    elif span <= len(scratch) and gap < _PAGE:
        file.read_into(scratch[:span], start)
        if seen is not None:
            seen(start, scratch[:span])
        _copy(np.ndarray(out.shape, np.uint8, scratch, strides=strides), out)
    else:
        # A single row is contiguous on both sides, so there is a dim left to go along.
        step = 1
        if gap < _PAGE:
            step = max(1, min(len(scratch) // strides[0], out.shape[0] - 1))
        for at in range(0, out.shape[0], step):
            part = out[at] if step == 1 else out[at : at + step]
            rest = strides[1:] if step == 1 else strides
            _read(file, start + at * strides[0], rest, part, scratch, seen)


def _copy(source: Bytes, out: Bytes) -> None:
    """Copy between arrays of bytes whose last dims are contiguous, in units as wide as they allow.

    numpy moves one item at a time where rows are short, so wider items mean fewer of them.
    """
    unit = gcd(
        8,
        out.shape[-1],
        source.__array_interface__["data"][0],
        out.__array_interface__["data"][0],
        *source.strides[:-1],
        *out.strides[:-1],
    )
    wide = np.dtype(f"u{unit}")
    np.copyto(out.view(wide), source.view(wide))

"""Putting blocks together by having the system read rows to their places.

What a box has of a block, if it lies in one stretch of its file, is read to rows of the block by
one call, or by few. Nothing is copied in between, and numpy, whose import takes as long as copying
a tenth of a GiB, is not needed.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardspec.boxes import Box, box_shape, intersect
from shardspec.checkpoint.catalog import StoredBox
from shardspec.checkpoint.moving.digests import crc32_of_rows
from shardspec.checkpoint.moving.pieces import Block, Place, offset_in
from shardspec.checkpoint.source_files import OpenFiles

__all__ = ["Rows", "crc32_of_part", "read_rows", "rows_of", "stretch_of"]


class Rows(NamedTuple):
    """What one stored box has of a block."""

    stored: StoredBox
    start: int
    """Where in its file that lies."""
    num_bytes: int
    places: tuple[slice, ...]
    """Where in the block its rows go, in the order of the file."""


def rows_of(block: Block, row_bytes: int) -> list[Rows] | None:
    """Return the rows of which a block is made.

    None if some are shorter than `row_bytes`, or what a box has of the block is not one stretch of
    its file.

    Examples
    --------
    >>> halves = [((0, 2), (0, 4096)), ((0, 2), (4096, 8192))]
    >>> places = [Place(box, StoredBox(box, (), 0, None, 100)) for box in halves]
    >>> block = Block(((1, 2), (0, 8192)), tuple(places), 8192, 8192)
    >>> [(rows.start, rows.places) for rows in rows_of(block, 1024)]
    [(4196, (slice(0, 4096, None),)), (4196, (slice(4096, 8192, None),))]
    """
    found = []
    for place in block.sources:
        shared = intersect(place.box, block.box)
        if shared is None:
            continue
        stretch = stretch_of(place, shared)
        if stretch is None:
            return None
        corner = [lo for lo, _ in shared]
        places = _places(box_shape(shared), box_shape(block.box), offset_in(block.box, corner))
        if places[0].stop - places[0].start < row_bytes:
            return None
        found.append(Rows(place.stored, *stretch, places))
    return found


def stretch_of(place: Place, part: Box) -> tuple[int, int] | None:
    """Return where in its file a part of a stored box lies: start and length.

    None if it is not one stretch of the file.

    Examples
    --------
    >>> whole = ((0, 4), (0, 10))
    >>> place = Place(whole, StoredBox(whole, (), 0, None, 100))
    >>> stretch_of(place, ((1, 3), (0, 10))), stretch_of(place, ((1, 3), (0, 5)))
    ((110, 20), None)
    """
    if place.stored.strides is not None or not _in_one(part, place.box):
        return None
    start = place.stored.offset + offset_in(place.box, [lo for lo, _ in part])
    return start, prod(box_shape(part))


def _in_one(part: Box, outer: Box) -> bool:
    """Return whether a part of a row-major box is one stretch of it."""
    whole = True
    for side, outer_side in zip(reversed(part), reversed(outer), strict=True):
        if not whole and side[1] - side[0] > 1:
            return False
        whole = whole and side == outer_side
    return True


@lru_cache(maxsize=64)
def _places(shape: tuple[int, ...], room: tuple[int, ...], first: int) -> tuple[slice, ...]:
    """Return the stretches of row-major memory that are a part of it, in ascending order.

    Parameters
    ----------
    shape, room
        Sides of the part, and of what the memory holds.
    first
        Where the part starts. Blocks of one tensor have most of these in common.
    """
    dim = len(shape) - 1
    while dim and shape[dim] == room[dim]:
        dim -= 1
    row = prod(shape[dim:])
    stride = prod(room[dim:])
    starts = [first]
    for size, side in zip(reversed(shape[:dim]), reversed(room[:dim]), strict=True):
        starts = [at + stride * step for step in range(size) for at in starts]
        stride *= side
    return tuple(slice(at, at + row) for at in starts)


def read_rows(parts: Sequence[Rows], room: memoryview, files: OpenFiles) -> None:
    """Read rows into the memory of their block.

    Parameters
    ----------
    parts
        What `rows_of` gave for the block.
    room
        Memory as long as the block.
    files
        As for `copy_box`.
    """
    for part in parts:
        file = files.file(part.stored.path)
        if len(part.places) == 1:
            file.read_into(room[part.places[0]], part.start)
        else:
            rows = [room[place] for place in part.places]
            file.read_rows(rows, part.start, part.num_bytes)


def crc32_of_part(part: Rows, room: memoryview) -> int:
    """Return the CRC-32 of what a box has of a block."""
    return crc32_of_rows([room[place] for place in part.places])

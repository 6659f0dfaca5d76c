"""Boxes that are stored more than once have to hold the same bytes."""

from collections.abc import Sequence
from math import prod
from typing import Final

from shardspec.boxes import box_shape
from shardspec.checkpoint.reading.source import StoredBox, StoredTensor, box_text
from shardspec.checkpoint.storage.files import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["check_replicas"]

_PIECE_BYTES: Final = 1 << 20


def check_replicas(
    tensor: StoredTensor,
    group: Sequence[StoredBox],
    files: OpenFiles,
    *,
    trust_digests: bool = False,
) -> None:
    """Compare the bytes of boxes that claim the same part of a tensor.

    Parameters
    ----------
    tensor, group
        The boxes, and what they are of.
    files
        Where they are read.
    trust_digests
        Take boxes whose digests are equal for equal, without reading them.

    Raises
    ------
    CheckpointError
        If they differ; names the tensor, the box, both ranks and files, and the first element.
    """
    first, *others = group
    size = item_bytes(tensor.dtype)
    shape = box_shape(first.box)
    num_bytes = prod(shape) * size
    for other in others:
        if trust_digests and _same_digest(first, other, num_bytes):
            continue
        for at in range(0, num_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, num_bytes - at)
            a, b = (_read(stored, at, length, files) for stored in (first, other))
            if a != b:
                place = next(i for i in range(length) if a[i] != b[i])
                index = _index(first, (at + place) // size)
                raise CheckpointError(
                    f"tensor {tensor.name!r}: ranks {first.rank} and {other.rank} claim different "
                    f"data for box {box_text(first.box)}, first at index {index}, in {first.path} "
                    f"and {other.path}; keep the right one of the two"
                )


def _same_digest(a: StoredBox, b: StoredBox, num_bytes: int) -> bool:
    """Return whether both have a digest of just their bytes, in the same order, and it is equal."""
    if a.digest is None or b.digest is None or a.strides != b.strides:
        return False
    whole = a.digest.num_bytes == b.digest.num_bytes == num_bytes
    return whole and a.digest.crc32 == b.digest.crc32


def _read(stored: StoredBox, at: int, length: int, files: OpenFiles) -> bytearray:
    data = bytearray(length)
    files.file(stored.path).read_into(memoryview(data), stored.offset + at)
    return data


def _index(stored: StoredBox, element: int) -> list[int]:
    """Return where in the global tensor an element of a box lies."""
    index: list[int] = []
    for lo, hi in reversed(stored.box):
        element, at = divmod(element, hi - lo)
        index.insert(0, lo + at)
    return index

"""CRC-32 of stored boxes, taken on the bytes as they pass through and compared when all have."""

from collections.abc import Iterable
from math import prod
from typing import Final, TypeAlias

from isal.isal_zlib import crc32 as _crc32
from isal.isal_zlib import crc32_combine

from shardspec.boxes import box_shape
from shardspec.checkpoint.source import StoredBox, StoredTensor, box_text
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

Buffer: TypeAlias = bytes | bytearray | memoryview

__all__ = ["Buffer", "Checks", "crc32", "crc32_combine", "crc_text", "stored_bytes"]


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32 of bytes (that of zlib and zip), going on from `value`.

    Examples
    --------
    >>> crc32(b"56789", crc32(b"1234")) == 0xCBF43926
    True
    """
    return int(_crc32(data, value))


def crc_text(value: int) -> str:
    """Write a CRC-32 as the eight digits under which it is stored and shown.

    Examples
    --------
    >>> crc_text(0xBEEF)
    '0000beef'
    """
    return f"{value:08x}"


def stored_bytes(tensor: StoredTensor, stored: StoredBox) -> int:
    """Return the bytes of a stored box."""
    return prod(box_shape(stored.box)) * item_bytes(tensor.dtype)


_STRETCHES: Final = 64
"""Stretches of a box kept apart: more of them come from columns of which not all are wanted."""


class Checks:
    """The digests of the boxes of one tensor, fed with stretches of them in any order.

    Stretches that touch are joined, so a box that is read from start to end takes one entry. A
    box of which some part is never read, that is read in more than a few stretches at once, or
    that has no digest, is not judged.

    Parameters
    ----------
    tensor
        The tensor; those of its boxes that have a digest are checked.
    """

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        # box -> {first byte: (end, crc)}; no two of the stretches touch.
        self._seen: dict[StoredBox, dict[int, tuple[int, int]]] = {
            stored: {} for stored in tensor.boxes if stored.crc32 is not None
        }

    def __contains__(self, stored: StoredBox) -> bool:
        return stored in self._seen

    def add(self, stored: StoredBox, start: int, data: Buffer) -> None:
        """Take in bytes of a box that begin `start` bytes after its first.

        Raises
        ------
        CheckpointError
            If they complete the box and its digest is another.
        """
        if stored not in self._seen:
            return
        spans = self._seen[stored]
        length = memoryview(data).nbytes
        end = start + length
        before = next((at for at, (stop, _) in spans.items() if stop == start), None)
        if before is None:
            first, value = start, crc32(data)
        else:
            first, value = before, crc32(data, spans.pop(before)[1])
        if end in spans:
            stop, tail = spans.pop(end)
            value = int(crc32_combine(value, tail, stop - end))
            end = stop
        spans[first] = (end, value)
        if len(spans) > _STRETCHES:
            del self._seen[stored]
            return
        if first == 0 and end == stored_bytes(self._tensor, stored):
            self._compare(stored, value)
            # Judged; what is read of it again adds nothing.
            del self._seen[stored]

    def _compare(self, stored: StoredBox, value: int) -> None:
        due = stored.crc32
        assert due is not None, "only boxes with a digest are followed"
        if value != due:
            raise CheckpointError(
                f"tensor {self._tensor.name!r}: rank {stored.rank}'s box {box_text(stored.box)} "
                f"in {stored.path} has CRC-32 {crc_text(value)}, but {crc_text(due)} was saved; "
                "its bytes were changed, restore the file or save again"
            )

    def pending(self) -> Iterable[StoredBox]:
        """Return the boxes that have a digest and were not read whole."""
        return tuple(self._seen)

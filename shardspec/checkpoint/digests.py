"""CRC-32 of stored boxes, taken on the bytes as they pass through and compared when all have."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from threading import Lock
from typing import Final, TypeAlias

from isal.isal_zlib import crc32 as _crc32
from isal.isal_zlib import crc32_combine

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import (
    Digest,
    FileBox,
    Outline,
    StoredBox,
    StoredTensor,
    box_text,
)
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

Buffer: TypeAlias = bytes | bytearray | memoryview

__all__ = [
    "Buffer",
    "Checks",
    "crc32",
    "crc32_combine",
    "crc_text",
    "stored_bytes",
]


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


def stored_bytes(tensor: Outline[FileBox], stored: FileBox) -> int:
    """Return the bytes of a stored box."""
    return prod(box_shape(stored.box)) * item_bytes(tensor.dtype)


def _compare(tensor: StoredTensor, stored: StoredBox, digest: Digest, value: int) -> None:
    if value != digest.crc32:
        raise CheckpointError(
            f"tensor {tensor.name!r}: rank {stored.rank}'s box {box_text(stored.box)} "
            f"in {stored.path} has CRC-32 {crc_text(value)}, but {crc_text(digest.crc32)} was "
            "saved; its bytes were changed, restore the file or save again"
        )


_STRETCHES: Final = 64
"""Stretches of a box kept apart: more of them come from columns of which not all are wanted."""
_PIECE_BYTES: Final = 1 << 20


class _Follow:
    """What was seen of one digested stretch of a file."""

    __slots__ = ("digest", "spans", "stored")

    def __init__(self, stored: StoredBox, digest: Digest) -> None:
        self.stored = stored
        self.digest = digest
        self.spans: dict[int, tuple[int, int]] | None = {}
        """First byte: (end, crc), no two touching; None once there were too many."""


class Checks:
    """The digests of the boxes of one tensor, fed with stretches of them in any order, by threads.

    Stretches that touch are joined, so a box that is read from start to end takes one entry.
    `finish` reads what was not fed; without it, a box of which some part is never read, or that
    is read in many stretches at once, is not judged.

    Parameters
    ----------
    tensor
        The tensor.
    boxes
        Those of its boxes that are followed, if they have a digest; all unless stated.
    """

    def __init__(self, tensor: StoredTensor, boxes: Iterable[StoredBox] | None = None) -> None:
        self._tensor = tensor
        self._lock = Lock()
        # Boxes that lie in one digested stretch, such as parts of a storage, are judged together.
        self._open: dict[tuple[Path, Digest], _Follow] = {}
        for stored in tensor.boxes if boxes is None else boxes:
            if stored.digest is not None:
                follow = _Follow(stored, stored.digest)
                self._open.setdefault((stored.path, stored.digest), follow)

    def __contains__(self, stored: StoredBox) -> bool:
        return stored.digest is not None and (stored.path, stored.digest) in self._open

    def add(self, stored: StoredBox, start: int, data: Buffer) -> int | None:
        """Take in bytes of a box that lie at position `start` of its file.

        Returns
        -------
        int or None
            Their CRC-32, if it was taken.

        Raises
        ------
        CheckpointError
            If they complete the box and its digest is another.
        """
        length = memoryview(data).nbytes
        with self._lock:
            wanted = self._wants(stored, start, start + length)
        if not wanted:
            return None
        value = crc32(data)
        self.add_known(stored, start, length, value)
        return value

    def add_known(self, stored: StoredBox, start: int, num_bytes: int, value: int) -> None:
        """Take in bytes whose CRC-32 is `value`; otherwise like `add`."""
        with self._lock:
            if self._wants(stored, start, start + num_bytes):
                self._join(stored, start, num_bytes, value)

    def _wants(self, stored: StoredBox, start: int, end: int) -> bool:
        """Return whether bytes say something new."""
        if stored.digest is None:
            return False
        follow = self._open.get((stored.path, stored.digest))
        if follow is None or follow.spans is None:
            return False
        # Gaps between the rows of one box are read as the rows of another.
        return not any(at < end and start < stop for at, (stop, _) in follow.spans.items())

    def _join(self, stored: StoredBox, start: int, length: int, value: int) -> None:
        digest = stored.digest
        assert digest is not None, "its bytes are wanted"
        follow = self._open[stored.path, digest]
        spans = follow.spans
        assert spans is not None, "its bytes are wanted"
        first, end = start, start + length
        before = next((at for at, (stop, _) in spans.items() if stop == start), None)
        if before is not None:
            first, value = before, int(crc32_combine(spans.pop(before)[1], value, length))
        if end in spans:
            stop, tail = spans.pop(end)
            value = int(crc32_combine(value, tail, stop - end))
            end = stop
        spans[first] = (end, value)
        if first == digest.start and end == first + digest.num_bytes:
            # Judged; what is read of it again adds nothing.
            del self._open[stored.path, digest]
            _compare(self._tensor, stored, digest, value)
        elif len(spans) > _STRETCHES:
            follow.spans = None

    def unjudged(self, boxes: Sequence[StoredBox]) -> Iterator[tuple[int, int, int, int]]:
        """Yield what was read of boxes that are not judged yet, for `add_known` elsewhere.

        Yields
        ------
        tuple
            Number of the box among `boxes`, position, bytes and CRC-32.
        """
        numbers = {id(stored): number for number, stored in enumerate(boxes)}
        for follow in self._open.values():
            spans = (follow.spans or {}).items()
            # A box of which nothing was read is still to be judged.
            for start, (end, value) in spans or [(follow.digest.start, (follow.digest.start, 0))]:
                yield numbers[id(follow.stored)], start, end - start, value

    def finish(self, files: OpenFiles) -> None:
        """Read what is missing of the boxes that are not judged yet, and judge them.

        Raises
        ------
        CheckpointError
            If a digest is another, or a file cannot be read.
        """
        for follow in list(self._open.values()):
            stored, digest = follow.stored, follow.digest
            if follow.spans is None:
                follow.spans = {}
            at, last = digest.start, digest.start + digest.num_bytes
            for start, end in [*((s, e) for s, (e, _) in sorted(follow.spans.items())), (last, 0)]:
                self._read(stored, at, start, files)
                at = end
            if not digest.num_bytes:
                self.add(stored, at, b"")

    def _read(self, stored: StoredBox, start: int, end: int, files: OpenFiles) -> None:
        for at in range(start, end, _PIECE_BYTES):
            data = files.file(stored.path).read(at, min(_PIECE_BYTES, end - at))
            self.add(stored, at, data)

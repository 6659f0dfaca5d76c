"""CRC-32 of stored boxes, taken on the bytes as they pass through and compared when all have."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, TypeAlias

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

_STRETCHES: Final = 64
"""Stretches of a box kept apart: more of them come from columns of which not all are wanted."""
_PIECE_BYTES: Final = 1 << 20


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32 of bytes (that of zlib and zip), going on from `value`."""
    return int(_crc32(data, value))


def crc_text(value: int) -> str:
    """Write a CRC-32 as the eight digits under which it is stored and shown."""
    return f"{value:08x}"


def stored_bytes(tensor: Outline[FileBox], stored: FileBox) -> int:
    """Return the bytes of a stored box."""
    return prod(box_shape(stored.box)) * item_bytes(tensor.dtype)


_Spans: TypeAlias = dict[int, tuple[int, int]]
"""First byte to the end and the CRC-32; no two touch."""


class _Seen(NamedTuple):
    """What was seen of a stretch of a file that has a digest."""

    stored: StoredBox
    digest: Digest
    spans: _Spans


class Checks:
    """The digests of the boxes of one tensor, fed with stretches of them in any order, by threads.

    Followed are those of `boxes` that have a digest; all unless stated. Stretches that touch are
    joined, so a box that is read from start to end takes one entry. `finish` reads what was not
    fed; without it, a box of which some part is never read, or that is read in many stretches at
    once, is not judged.
    """

    def __init__(self, tensor: StoredTensor, boxes: Iterable[StoredBox] | None = None) -> None:
        self._tensor = tensor
        self._lock = Lock()
        # Boxes that lie in one digested stretch, such as parts of a storage, are judged together.
        self._open: dict[tuple[Path, Digest | None], _Seen] = {}
        self._left_to_read: dict[tuple[Path, Digest | None], _Seen] = {}
        """Those that came in too many stretches."""
        for stored in tensor.boxes if boxes is None else boxes:
            if stored.digest is not None:
                self._open.setdefault(
                    (stored.path, stored.digest), _Seen(stored, stored.digest, {})
                )

    def __contains__(self, stored: StoredBox) -> bool:
        return (stored.path, stored.digest) in self._open

    def add(self, stored: StoredBox, start: int, data: Buffer) -> int | None:
        """Take in bytes of a box that lie at position `start` of its file.

        Returns their CRC-32, if it was taken. Raises `CheckpointError` if they complete the box
        and its digest is another.
        """
        length = memoryview(data).nbytes
        with self._lock:
            if self._news(stored, start, start + length) is None:
                return None
        value = crc32(data)
        self.add_known(stored, start, length, value)
        return value

    def _news(self, stored: StoredBox, start: int, end: int) -> _Seen | None:
        """Return what was seen of a box so far, if these bytes say something new."""
        seen = self._open.get((stored.path, stored.digest))
        # Gaps between the rows of one box are read as the rows of another.
        if seen is None or any(at < end and start < to for at, (to, _) in seen.spans.items()):
            return None
        return seen

    def add_known(self, stored: StoredBox, start: int, num_bytes: int, value: int) -> None:
        """Take in bytes whose CRC-32 is `value`; otherwise like `add`."""
        end = start + num_bytes
        with self._lock:
            seen = self._news(stored, start, end)
            if seen is None:
                return
            digest, spans = seen.digest, seen.spans
            before = next((at for at, (to, _) in spans.items() if to == start), None)
            if before is not None:
                start, value = before, int(crc32_combine(spans.pop(before)[1], value, num_bytes))
            if end in spans:
                at, (end, tail) = end, spans.pop(end)
                value = int(crc32_combine(value, tail, end - at))
            spans[start] = end, value
            if (start, end) == (digest.start, digest.start + digest.num_bytes):
                # What is read of it again adds nothing.
                del self._open[stored.path, digest]
                if value != digest.crc32:
                    raise CheckpointError(
                        f"tensor {self._tensor.name!r}: rank {stored.rank}'s box "
                        f"{box_text(stored.box)} in {stored.path} has CRC-32 {crc_text(value)}, "
                        f"but {crc_text(digest.crc32)} was saved; its bytes were changed, restore "
                        "the file or save again"
                    )
            elif len(spans) > _STRETCHES:
                spans.clear()
                self._left_to_read[stored.path, digest] = self._open.pop((stored.path, digest))

    def unjudged(self, boxes: Sequence[StoredBox]) -> Iterator[tuple[int, int, int, int]]:
        """Yield what was read of boxes that are not judged yet, for `add_known` elsewhere.

        That is the number of the box among `boxes`, position, bytes and CRC-32.
        """
        numbers = {id(stored): number for number, stored in enumerate(boxes)}
        for stored, digest, spans in (*self._open.values(), *self._left_to_read.values()):
            # A box of which nothing was read is still to be judged.
            for start, (end, value) in spans.items() or [(digest.start, (digest.start, 0))]:
                yield numbers[id(stored)], start, end - start, value

    def finish(self, files: OpenFiles) -> None:
        """Read what is missing of the boxes that are not judged yet, and judge them."""
        self._open.update(self._left_to_read)
        for stored, digest, spans in list(self._open.values()):
            last = digest.start + digest.num_bytes
            ends = sorted((start, end) for start, (end, _) in spans.items())
            at = digest.start
            for start, end in (*ends, (last, last)):
                for piece in range(at, start, _PIECE_BYTES):
                    count = min(_PIECE_BYTES, start - piece)
                    self.add(stored, piece, files.file(stored.path).read(piece, count))
                at = end
            if not digest.num_bytes:
                self.add(stored, at, b"")

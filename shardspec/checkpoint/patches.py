"""Tensors with deltas on them, read in a stream.

Frames are decompressed as the tensor is read, block by block, so memory does not grow with either.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import Patch, StoredTensor
from shardspec.checkpoint.checksums import extra, new_hash
from shardspec.checkpoint.storage.path import SourceFile
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.errors import CheckpointError
from shardspec.text import shown

_POSITIONS: Final = 1 << 16
"""Read at once."""
_HEAD_BYTES: Final = 18
"""The longest header of a frame."""
_WINDOW_BYTES: Final = 1 << 27
"""Most memory that a frame may ask for."""


def check_frame(name: str, patch: Patch, num_bytes: int, file: SourceFile) -> int:
    """Check that an entry is one frame that fits a tensor; return the bytes of its content."""
    zstandard = extra("zstandard")
    where = f"{patch.path}: the frame of tensor {shown(name)}"
    head = file.read(patch.start, min(_HEAD_BYTES, patch.num_bytes))
    try:
        about = zstandard.get_frame_parameters(head)
        at = zstandard.frame_header_size(head)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"{where} is damaged: {error}; fetch the delta again") from None
    size: int = about.content_size
    count, rest = divmod(size - 4, 5)
    fits = size == num_bytes if patch.encoding == "xor" else not rest and 0 <= count <= num_bytes
    if size == zstandard.CONTENTSIZE_UNKNOWN or not fits:
        holds = "an unknown number of" if size == zstandard.CONTENTSIZE_UNKNOWN else str(size)
        raise CheckpointError(
            f"{where} holds {holds} bytes as {patch.encoding}, for a tensor of {num_bytes} in the "
            "base; its shape or dtype has changed, or the delta is for another checkpoint"
        )
    if patch.encoding == "overwrite" and num_bytes > 1 << 32:
        raise CheckpointError(
            f"{where}: positions of {num_bytes} bytes do not fit 32 bits; take xor"
        )
    if about.window_size > _WINDOW_BYTES and about.window_size > size:
        raise CheckpointError(f"{where} asks for a window of {about.window_size} bytes")
    last = 0
    while not last:  # the headers of its blocks
        if at + 3 > patch.num_bytes:
            raise CheckpointError(f"{where} is cut short; fetch the delta again")
        block = int.from_bytes(file.read(patch.start + at, 3), "little")
        last, kind = block & 1, block >> 1 & 3
        at += 3 + (1 if kind == 1 else block >> 3)
    at += 4 if about.has_checksum else 0
    if at != patch.num_bytes:
        raise CheckpointError(
            f"{where} has {at} bytes, but {patch.num_bytes} are there; the delta is damaged"
        )
    return size


class _Change(Protocol):
    """What one delta does to a tensor that is read from start to end."""

    def apply(self, block: NDArray[np.uint8], start: int) -> None:
        """Change a block that starts at a byte of the tensor."""

    def finish(self) -> None:
        """Check that nothing is left."""


class Patching:
    """Changes the bytes of a tensor, which come in order, as its patches say."""

    def __init__(self, tensor: StoredTensor, files: OpenFiles) -> None:
        self._tensor, self._last = tensor, tensor.patches[-1]
        self._hash = new_hash(self._last.checksum_format, self._last.path)
        self._changes: list[_Change] = []
        for patch in tensor.patches:
            file = files.file(patch.path)
            size = check_frame(tensor.name, patch, tensor.num_bytes, file)

            def frame(patch: Patch = patch, file: SourceFile = file) -> _Frame:
                return _Frame(tensor.name, patch, file)

            xor = patch.encoding == "xor"
            self._changes.append(_Xor(frame()) if xor else _Overwrite(frame, size, tensor))

    def apply(self, block: memoryview, start: int) -> None:
        """Change a block that starts at a byte of the tensor."""
        numbers = np.frombuffer(block, np.uint8)
        for change in self._changes:
            change.apply(numbers, start)
        self._hash.update(numbers)

    def finish(self) -> None:
        """Check that all was used, and the checksum."""
        for change in self._changes:
            change.finish()
        if (value := self._hash.hexdigest()) != self._last.checksum:
            raise CheckpointError(
                f"tensor {self._tensor.name!r}: with {self._last.path} on it has "
                f"{self._last.checksum_format} {value}, but {self._last.checksum} was published; "
                "the base is another one, or a file is damaged"
            )


class _Frame:
    """The content of a frame, read in order."""

    def __init__(self, name: str, patch: Patch, file: SourceFile) -> None:
        self._name, self._patch, self._file, self._at = name, patch, file, 0
        self._zstd = extra("zstandard")
        decompressor = self._zstd.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        self._reader: Any = decompressor.stream_reader(self, read_size=1 << 17)

    def read(self, size: int) -> bytes:
        """Return compressed bytes, for the decompressor."""
        size = min(size, self._patch.num_bytes - self._at)
        data = self._file.read(self._patch.start + self._at, size) if size else b""
        self._at += size
        return data

    def fill(self, room: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fill memory with the next bytes."""
        at, view = 0, room.data
        try:
            while at < len(room):
                count = self._reader.readinto(view[at:])
                if not count:
                    break
                at += count
        except self._zstd.ZstdError as error:
            raise self._damaged(str(error)) from None
        if at < len(room):
            raise self._damaged("it ends early")
        return room

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._patch.path}: the frame of tensor {shown(self._name)} is damaged: {problem}; "
            "fetch the delta again"
        )


class _Xor:
    def __init__(self, frame: _Frame) -> None:
        self._frame, self._room = frame, np.empty(0, np.uint8)

    def apply(self, block: NDArray[np.uint8], start: int) -> None:  # noqa: ARG002  # it is in order
        if len(self._room) < len(block):
            self._room = np.empty(len(block), np.uint8)
        np.bitwise_xor(block, self._frame.fill(self._room[: len(block)]), out=block)

    def finish(self) -> None:
        pass  # its size was checked


class _Overwrite:
    """Positions and values lie one after the other: the frame is read twice at once."""

    def __init__(self, frame: Callable[[], _Frame], size: int, tensor: StoredTensor) -> None:
        self._positions, self._values = frame(), frame()
        self._tensor, self._left, self._last = tensor, (size - 4) // 5, -1
        stated = int(self._positions.fill(np.empty(4, np.uint8)).view("<u4")[0])
        if stated != self._left:
            raise self._wrong(f"states {stated} positions and has {self._left}")
        skipped, room = 4 + 4 * self._left, np.empty(_POSITIONS, np.uint8)
        while skipped:
            skipped -= len(self._values.fill(room[: min(skipped, len(room))]))
        self._places, self._bytes = np.empty(0, np.int64), np.empty(0, np.uint8)

    def apply(self, block: NDArray[np.uint8], start: int) -> None:
        while len(self._places) or self._left:
            if not len(self._places):
                self._refill()
            count = int(np.searchsorted(self._places, start + len(block)))
            block[self._places[:count] - start] = self._bytes[:count]
            self._places, self._bytes = self._places[count:], self._bytes[count:]
            if len(self._places):
                return

    def _refill(self) -> None:
        count = min(self._left, _POSITIONS)
        raw = self._positions.fill(np.empty(4 * count, np.uint8))
        self._places = raw.view("<u4").astype(np.int64)
        self._bytes = self._values.fill(np.empty(count, np.uint8))
        if (np.diff(self._places, prepend=self._last) <= 0).any():
            raise self._wrong("positions do not ascend")
        self._left, self._last = self._left - count, int(self._places[-1])

    def finish(self) -> None:
        if self._left or len(self._places):
            raise self._wrong(f"a position lies behind its {self._tensor.num_bytes} bytes")

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._tensor.patches[-1].path}: tensor {shown(self._tensor.name)}: {problem}; the "
            "delta is damaged, fetch it again"
        )

"""Applies the changes in a delta to the bytes of a tensor while the tensor is read.

The changes of a tensor are one zstd frame, decompressed block by block to bound memory.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import StoredTensor
from shardspec.checkpoint.storage.path import SourceFile, StoragePath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.errors import CheckpointError
from shardspec.text import shown

_POSITIONS: Final = 1 << 16
"""Positions read per step."""
_PIECE_BYTES: Final = 1 << 17
"""Bytes read and changed per step; they fit the CPU's cache."""
_HEAD_BYTES: Final = 18
"""Size of the longest header of a frame."""
_WINDOW_BYTES: Final = 1 << 27
"""Maximum memory that a frame may request."""

_Change: TypeAlias = Callable[[NDArray[np.uint8], int], object]
"""A function of a block of a tensor and its start that applies a delta; called in order."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Changes of one tensor in a delta: one zstd frame in a file."""

    path: StoragePath
    start: int
    """Position of the first byte in the file."""
    num_bytes: int
    content_bytes: int
    """Bytes of the frame after decompression."""
    encoding: str
    checksum_format: str
    checksum: str
    """Checksum of the whole changed tensor."""
    digest: str | None
    """Digest of the whole changed tensor; None if the delta does not contain it."""


class Hash(Protocol):
    """A checksum of bytes that arrive piece by piece."""

    def update(self, data: Any, /) -> None:  # noqa: ANN401
        """Add the next bytes to the checksum."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:  # noqa: ANN401
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_hash(name: str, where: object) -> Hash:
    """Return a checksum by its name in the index; raises CheckpointError if it is unknown.

    >>> new_hash("adler32", "index").hexdigest()
    '00000001'
    """
    if name == "adler32":
        return _Adler32()
    if name == "xxh3-128":
        xxh3: Hash = extra("xxhash").xxh3_128()
        return xxh3
    raise CheckpointError(
        f"{where}: has checksums of kind {shown(name)}, but only xxh3-128 and adler32 can be "
        "checked; make the delta with one of these"
    )


def extra(name: str) -> ModuleType:
    """Import an optional package that deltas need; CheckpointError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise CheckpointError(
            f"deltas need the package {name}: pip install 'shardspec[delta]'"
        ) from None


def content_bytes(name: str, start: int, num_bytes: int, file: SourceFile) -> int:
    """Return the bytes of a frame after decompression; raises if the entry is not one frame."""
    zstandard = extra("zstandard")
    where = f"{file.path}: the frame of tensor {shown(name)}"
    head = file.read(start, min(_HEAD_BYTES, num_bytes))
    try:
        about = zstandard.get_frame_parameters(head)
        at = zstandard.frame_header_size(head)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"{where} is damaged: {error}; fetch the delta again") from None
    size: int = about.content_size
    if size == zstandard.CONTENTSIZE_UNKNOWN:
        raise CheckpointError(f"{where} lacks its decompressed size; make the delta again")
    if about.window_size > _WINDOW_BYTES and about.window_size > size:
        raise CheckpointError(
            f"{where} has a window of {about.window_size} bytes, which is too large"
        )
    last, piece, piece_at = 0, b"", 0
    while not last:  # reads the header of each block
        if at + 3 > num_bytes:
            raise CheckpointError(f"{where} ends early; fetch the delta again")
        if at + 3 > piece_at + len(piece):
            piece, piece_at = file.read(start + at, min(_PIECE_BYTES, num_bytes - at)), at
        at_in = at - piece_at
        block = int.from_bytes(piece[at_in : at_in + 3], "little")
        last, kind = block & 1, block >> 1 & 3
        at += 3 + (1 if kind == 1 else block >> 3)
    at += 4 if about.has_checksum else 0
    if at != num_bytes:
        raise CheckpointError(
            f"{where} has {at} bytes, but the file lists {num_bytes}; the delta is damaged, fetch "
            "it again"
        )
    return size


def check_fits(name: str, patch: Patch, num_bytes: int) -> None:
    """Raise CheckpointError if the content of a frame does not fit a tensor of `num_bytes`."""
    where, size = f"{patch.path}: the frame of tensor {shown(name)}", patch.content_bytes
    count, rest = divmod(size - 4, 5)
    if size != num_bytes if patch.encoding == "xor" else rest or not 0 <= count <= num_bytes:
        raise CheckpointError(
            f"{where} has {size} bytes of {patch.encoding}, for a tensor of {num_bytes} bytes in "
            "the base; apply the delta to the checkpoint from which it was made"
        )
    if patch.encoding == "overwrite" and num_bytes > 1 << 32:
        raise CheckpointError(
            f"{where}: positions in {num_bytes} bytes do not fit 32 bits; use the encoding xor"
        )


class Patching:
    """Applies patches to the bytes of a tensor, in the order of the chain."""

    def __init__(self, tensor: StoredTensor, patches: Sequence[Patch], files: OpenFiles) -> None:
        self._name, self._last = tensor.name, patches[-1]
        self._hash = new_hash(self._last.checksum_format, self._last.path)
        self._changes: list[_Change] = [
            _Xor(_Frame(tensor.name, patch, files))
            if patch.encoding == "xor"
            else _Overwrite(tensor, patch, files)
            for patch in patches
        ]

    def apply(self, block: memoryview, start: int) -> None:
        """Apply the patches to a block, in place; `start` is its position in the tensor."""
        numbers = np.frombuffer(block, np.uint8)
        for at in range(0, len(numbers), _PIECE_BYTES):
            piece = numbers[at : at + _PIECE_BYTES]
            for change in self._changes:
                change(piece, start + at)
            self._hash.update(piece)

    def finish(self) -> None:
        """Raise CheckpointError if the checksum of all blocks differs."""
        if (value := self._hash.hexdigest()) != self._last.checksum:
            raise CheckpointError(
                f"tensor {self._name!r}: after {self._last.path} is applied, "
                f"{self._last.checksum_format} is {value} instead of {self._last.checksum}; the "
                "base is another checkpoint, or a file is damaged"
            )


class _Frame:
    """Decompresses a frame from start to end."""

    def __init__(self, name: str, patch: Patch, files: OpenFiles) -> None:
        self._name, self._patch, self._files, self._at = name, patch, files, 0
        self._zstd = extra("zstandard")
        decompressor = self._zstd.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        self._reader: Any = decompressor.stream_reader(self, read_size=1 << 17)

    def read(self, size: int) -> bytes:
        """Return the next compressed bytes to the decompressor."""
        size = min(size, self._patch.num_bytes - self._at)
        start = self._patch.start + self._at
        self._at += size
        return self._files.file(self._patch.path).read(start, size) if size else b""

    def fill(self, room: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fill an array with the next decompressed bytes, and return it."""
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
            raise self._damaged("the data ends early")
        return room

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._patch.path}: the frame of tensor {shown(self._name)} is damaged: {problem}; "
            "fetch the delta again"
        )


class _Xor:
    def __init__(self, frame: _Frame) -> None:
        self._frame, self._room = frame, np.empty(_PIECE_BYTES, np.uint8)

    def __call__(self, block: NDArray[np.uint8], start: int) -> None:  # noqa: ARG002  # in order
        np.bitwise_xor(block, self._frame.fill(self._room[: len(block)]), out=block)


class _Overwrite:
    """Applies the encoding "overwrite": a frame has all positions first, then all new values.

    Two readers decompress the frame, one for the positions and one for the values.
    """

    def __init__(self, tensor: StoredTensor, patch: Patch, files: OpenFiles) -> None:
        self._positions, self._values = (_Frame(tensor.name, patch, files) for _ in range(2))
        self._tensor, self._path = tensor, patch.path
        self._unread, self._last = (patch.content_bytes - 4) // 5, -1
        declared = int(self._positions.fill(np.empty(4, np.uint8)).view("<u4")[0])
        if declared != self._unread:
            raise self._wrong(f"declares {declared} positions and has {self._unread}")
        skipped, room = 4 + 4 * self._unread, np.empty(_POSITIONS, np.uint8)
        while skipped:
            skipped -= len(self._values.fill(room[: min(skipped, len(room))]))
        self._places, self._bytes = np.empty(0, np.int64), np.empty(0, np.uint8)

    def __call__(self, block: NDArray[np.uint8], start: int) -> None:
        while len(self._places) or self._unread:
            if not len(self._places):
                self._refill()
            count = int(np.searchsorted(self._places, start + len(block)))
            block[self._places[:count] - start] = self._bytes[:count]
            self._places, self._bytes = self._places[count:], self._bytes[count:]
            if len(self._places):
                return

    def _refill(self) -> None:
        count = min(self._unread, _POSITIONS)
        raw = self._positions.fill(np.empty(4 * count, np.uint8))
        self._places = raw.view("<u4").astype(np.int64)
        self._bytes = self._values.fill(np.empty(count, np.uint8))
        if (np.diff(self._places, prepend=self._last) <= 0).any():
            raise self._wrong("positions do not ascend")
        self._unread, self._last = self._unread - count, int(self._places[-1])
        if self._last >= self._tensor.num_bytes:
            raise self._wrong(f"a position is past its {self._tensor.num_bytes} bytes")

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: tensor {shown(self._tensor.name)}: {problem}; the delta is damaged, "
            "fetch it again"
        )

"""Checking that every byte of a checkpoint is there, and as it was saved."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import Catalog, StoredBox, StoredTensor
from shardspec.checkpoint.coordinate import Progress
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.read_boxes import Checks, stored_bytes
from shardspec.checkpoint.source_files import FileStretch, OpenFiles
from shardspec.checkpoint.tiling import check_replicas, check_tiling
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

_PIECE_BYTES: Final = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what is wrong."""

    directory: Path
    tensors: int
    boxes: int
    num_bytes: int
    """Bytes of all boxes."""
    digested_bytes: int
    """Bytes of the boxes that have a digest; whether others were changed cannot be told."""
    flaws: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "directory": str(self.directory),
            "tensors": self.tensors,
            "boxes": self.boxes,
            "bytes": self.num_bytes,
            "digested_bytes": self.digested_bytes,
            "flaws": list(self.flaws),
        }


def verify_checkpoint(
    directory: Path | str | Catalog, *, every: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte: check that boxes tile every tensor, replicas agree, and digests are right.

    The first flaw is raised as a `CheckpointError`; with `every`, all are listed in the report.
    `progress` is told of the bytes of boxes.
    """
    source = as_catalog(directory)
    boxes = num_bytes = digested = 0
    for tensor in map(source.tensor, source.names):
        for stored in tensor.boxes:
            size = stored_bytes(tensor, stored)
            boxes += 1
            num_bytes += size
            digested += size if stored.digest is not None else 0
    flaws: list[str] = []

    def look(check: Callable[[], _T]) -> _T | None:
        """Do a check; where all flaws are to be listed, go on after one."""
        try:
            return check()
        except CheckpointError as error:
            if not every:
                raise
            flaws.append(str(error))
            return None

    tensors = partial(map, source.tensor, source.names)
    room, done = memoryview(bytearray(_PIECE_BYTES)), 0
    with OpenFiles() as files:
        files.will_read(
            source.directory, (s for tensor in tensors() for _, s in _stretches(tensor))
        )
        for tensor in tensors():
            end = done + sum(stored_bytes(tensor, stored) for stored in tensor.boxes)
            for stored, stretch in _stretches(tensor):
                if stored.digest is None:
                    look(partial(_read, stretch, files, room))
                else:
                    look(partial(Checks(tensor, [stored]).finish, files))
                done += stored_bytes(tensor, stored)
                if progress is not None:
                    progress(done, num_bytes)
            if progress is not None and done != end:
                progress(end, num_bytes)
            done = end
            for group in look(partial(check_tiling, tensor)) or ():
                look(partial(check_replicas, tensor, group, files))
        look(source.check_unchanged)
    return VerifyReport(
        source.directory, len(source.names), boxes, num_bytes, digested, tuple(flaws)
    )


def _stretches(tensor: StoredTensor) -> Iterator[tuple[StoredBox, FileStretch]]:
    """Yield what of files is to be read to judge the boxes, each once, and a box that lies in it.

    Several boxes may lie in one digested stretch.
    """
    seen = set()
    for stored in tensor.boxes:
        digest = stored.digest
        if digest is None:
            stretch = FileStretch(stored.path, stored.offset, _span(tensor, stored))
        else:
            stretch = FileStretch(stored.path, digest.start, digest.num_bytes)
        if (stretch, digest) not in seen:
            seen.add((stretch, digest))
            yield stored, stretch


def _read(stretch: FileStretch, files: OpenFiles, room: memoryview) -> None:
    """Read bytes without a digest from start to end, which shows that they can be read."""
    end = stretch.start + stretch.num_bytes
    for at in range(stretch.start, end, _PIECE_BYTES):
        part = room[: min(_PIECE_BYTES, end - at)]
        files.file(stretch.path).read_into(part, at)


def _span(tensor: StoredTensor, stored: StoredBox) -> int:
    """Return how many bytes of its file a box lies in."""
    if stored.strides is None:
        return stored_bytes(tensor, stored)
    steps = zip(box_shape(stored.box), stored.strides, strict=True)
    return sum((size - 1) * step for size, step in steps) + item_bytes(tensor.dtype)

"""Checking that every byte of a checkpoint is there, and as it was saved."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Final

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import Catalog, Digest, StoredBox, StoredTensor
from shardspec.checkpoint.coordinate import Progress
from shardspec.checkpoint.digests import Checks, stored_bytes
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store_ranges import FileStretch
from shardspec.checkpoint.tiling import check_replicas, check_tiling
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["VerifyReport", "verify_checkpoint"]

_PIECE_BYTES: Final = 1 << 20


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
    directory: Path | str | Catalog,
    *,
    every: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check that boxes tile every tensor, replicas agree, and digests are right.

    Every byte is read, in memory that does not grow with the checkpoint; torch is not needed.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or what that has made of it.
    every
        Go on after a flaw, and list all of them in the report.
    progress
        Called with the bytes of the boxes that were read so far, and those of all.

    Raises
    ------
    CheckpointError
        At the first flaw, unless `every` is set; always if the checkpoint cannot be opened: a file
        is missing or cut short, or headers and info contradict each other.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import save_sharded
    >>> path = tempfile.mkdtemp()
    >>> save_sharded({"w": torch.zeros(3)}, path)
    >>> report = verify_checkpoint(path)
    >>> report.boxes, report.digested_bytes, report.flaws
    (1, 12, ())
    """
    source = as_catalog(directory)
    boxes = num_bytes = digested = 0
    for name in source.names:
        tensor = source.tensor(name)
        for stored in tensor.boxes:
            size = stored_bytes(tensor, stored)
            boxes += 1
            num_bytes += size
            digested += size if stored.digest is not None else 0
    flaws = []
    for flaw in _flaws(source, num_bytes, progress):
        if not every:
            raise flaw
        flaws.append(str(flaw))
    return VerifyReport(
        source.directory, len(source.names), boxes, num_bytes, digested, tuple(flaws)
    )


def _flaws(source: Catalog, total: int, progress: Progress | None) -> Iterator[CheckpointError]:
    done = 0
    with OpenFiles() as files:
        files.will_read(source.directory, _stretches(source))
        room = memoryview(bytearray(_PIECE_BYTES))
        for name in source.names:
            tensor = source.tensor(name)
            judged: set[tuple[Path, Digest]] = set()
            for stored in tensor.boxes:
                done += stored_bytes(tensor, stored)
                # Several boxes may lie in one digested stretch.
                if stored.digest is not None and (stored.path, stored.digest) in judged:
                    continue
                try:
                    if stored.digest is None:
                        _read(tensor, stored, files, room)
                    else:
                        judged.add((stored.path, stored.digest))
                        Checks(tensor, [stored]).finish(files)
                except CheckpointError as error:
                    yield error
                if progress is not None:
                    progress(done, total)
            try:
                groups = check_tiling(tensor)
            except CheckpointError as error:
                yield error
                continue
            for group in groups:
                try:
                    check_replicas(tensor, group, files)
                except CheckpointError as error:
                    yield error
    try:
        source.check_unchanged()
    except CheckpointError as error:
        yield error


def _stretches(source: Catalog) -> Iterator[FileStretch]:
    """Return what will be read to judge every box, in its order."""
    for name in source.names:
        tensor = source.tensor(name)
        found = {
            (stored.path, stored.offset, _span(tensor, stored))
            if stored.digest is None
            else (stored.path, stored.digest.start, stored.digest.num_bytes): None
            for stored in tensor.boxes
        }
        yield from starmap(FileStretch, found)


def _read(tensor: StoredTensor, stored: StoredBox, files: OpenFiles, room: memoryview) -> None:
    """Read a box without a digest from start to end, which shows that it can be read."""
    num_bytes = _span(tensor, stored)
    for at in range(0, num_bytes, _PIECE_BYTES):
        part = room[: min(_PIECE_BYTES, num_bytes - at)]
        files.file(stored.path).read_into(part, stored.offset + at)


def _span(tensor: StoredTensor, stored: StoredBox) -> int:
    """Return how many bytes of its file a box lies in."""
    if stored.strides is None:
        return stored_bytes(tensor, stored)
    steps = zip(box_shape(stored.box), stored.strides, strict=True)
    return sum((size - 1) * step for size, step in steps) + item_bytes(tensor.dtype)

"""Reads every byte of a checkpoint, compares it with stored digests, and compares replicas."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import PurePath

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import (
    Catalog,
    StoredBox,
    StoredTensor,
    row_major_strides,
)
from shardspec.checkpoint.compare.coverage import (
    check_replicas,
    check_tiling,
)
from shardspec.checkpoint.convert.copy import (
    Checks,
    Progress,
    pieces,
)
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.storage.path import FileStretch
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Bytes that were read, and the flaws that were found."""

    directory: PurePath
    tensors: int
    boxes: int
    num_bytes: int
    """Bytes of all boxes."""
    digested_bytes: int
    """Bytes of the boxes that have a digest; changes of other boxes cannot be detected."""
    flaws: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as a dict of plain values, ready for JSON."""
        facts = {**asdict(self), "directory": str(self.directory), "bytes": self.num_bytes}
        del facts["num_bytes"]
        return facts


def verify_checkpoint(
    directory: PurePath | str | Catalog, *, every: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte: check that boxes tile every tensor, replicas agree, and digests are right.

    The first flaw is raised as a `CheckpointError`; with `every`, all are listed in the report.

    >>> import tempfile, torch
    >>> from shardspec import save_sharded
    >>> path = tempfile.mkdtemp()
    >>> save_sharded({"w": torch.ones(2, 3)}, path)
    >>> report = verify_checkpoint(path)
    >>> report.num_bytes, report.digested_bytes, report.flaws
    (24, 24, ())
    """
    source = as_catalog(directory)
    boxes = num_bytes = digested = done = 0
    for outline in map(source.outline, source.names):
        boxes += len(outline.boxes)
        num_bytes += sum(outline.bytes_of(box) for box in outline.boxes)
    flaws: list[str] = []

    @contextmanager
    def listing() -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not every:
                raise
            flaws.append(str(error))

    with OpenFiles() as files:
        every_tensor = map(source.tensor, source.names)
        files.will_read(
            source.directory, (at for tensor in every_tensor for _, at in _stretches(tensor))
        )
        for tensor in map(source.tensor, source.names):
            digested += sum(tensor.bytes_of(box) for box in tensor.boxes if box.digest is not None)
            for stored, stretch in _stretches(tensor):
                with listing():
                    if stored.digest is None:
                        for _ in pieces(files, stretch):
                            pass  # without a digest, only a failed read is detected
                    else:
                        Checks(tensor, [stored]).finish(files)
                done += tensor.bytes_of(stored)
                if progress is not None:
                    progress(done, num_bytes)
            copies: Sequence[Sequence[StoredBox]] = ()
            with listing():
                copies = check_tiling(tensor)
            for group in copies:
                with listing():
                    check_replicas(tensor, group, files)
        if progress is not None:
            progress(num_bytes, num_bytes)
        with listing():
            source.check_unchanged()
    tensors = len(source.names)
    return VerifyReport(
        source.directory.public(), tensors, boxes, num_bytes, digested, tuple(flaws)
    )


def _stretches(tensor: StoredTensor) -> Iterator[tuple[StoredBox, FileStretch]]:
    """Yield (box, file range to read), where the range is the digest's if there is one."""
    yielded = set()
    for stored in tensor.boxes:
        digest = stored.digest
        if digest is not None:
            stretch = FileStretch(stored.path, digest.start, digest.num_bytes)
        else:
            width, shape = item_bytes(tensor.dtype), box_shape(stored.box)
            steps = zip(shape, stored.strides or row_major_strides(shape, width), strict=True)
            num_bytes = width + sum((size - 1) * step for size, step in steps)
            stretch = FileStretch(stored.path, stored.offset, num_bytes)
        if (stretch, digest) not in yielded:
            yielded.add((stretch, digest))
            yield stored, stretch

"""Filling files: what one process does for its share of an output, and what it makes sure of."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Event, Lock
from typing import Final, NamedTuple, Protocol, TypeAlias

from shardspec.checkpoint.catalog import Catalog, StoredBox, distinct
from shardspec.checkpoint.commit import reserve
from shardspec.checkpoint.moving.ahead import Stretch, in_files, stretches
from shardspec.checkpoint.moving.behind import Behind, different
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.cast_counts import CastCounts
from shardspec.checkpoint.moving.copy import copy_box
from shardspec.checkpoint.moving.digests import Arrival, Checks, crc32, crc32_combine
from shardspec.checkpoint.moving.sinks import FileSink, Sink
from shardspec.checkpoint.source_files import AHEAD_BYTES, OpenFiles, SourceFile
from shardspec.checkpoint.store import reason
from shardspec.checkpoint.writing.targets import OutputFile, Piece, Slot, Target
from shardspec.dtypes import is_cast, item_bytes
from shardspec.errors import CheckpointError

__all__ = [
    "Cancelled",
    "DigestingSink",
    "Filled",
    "Job",
    "Meter",
    "NewFile",
    "Order",
    "Progress",
    "check_again",
    "check_the_rest",
    "digest_of_file",
    "dtypes_of",
    "fill_by",
    "fill_slot",
    "parts_of",
    "plan",
    "wanted_by",
]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write in all."""

_PIECE_BYTES: Final = 1 << 20


class Cancelled(Exception):
    """Another thread has failed; this one stops where it is."""


class Meter:
    """Adds up what threads write, and stops them when one has failed."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.failed = Event()
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = Lock()

    def advance(self, num_bytes: int) -> None:
        """Count bytes; raise `Cancelled` if another thread has failed."""
        if self.failed.is_set():
            raise Cancelled
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


class Order(NamedTuple):
    """An output that is to be written."""

    source: Catalog
    """Where tensors come from; their boxes tile them, as `check_tiling` makes sure."""
    target: Target
    """What is to be written."""
    path: Path
    """Its final name."""
    overwrite: bool
    """Whether what has that name is replaced."""
    verify: bool
    """Compare what is read with the digests of the source."""
    reread: bool
    """Then also read what was written again, and compare it with what should be there."""
    replaced: frozenset[str]
    """Names of the files of what is replaced, where that is a directory."""
    threads: int
    """How many files are written at once."""
    cast_counts: CastCounts
    """Told of what casts do not keep."""
    progress: Progress | None
    """Called with the bytes written so far and in all."""

    def job(self, meter: "Meter", *, beside: bool = True) -> "Job":
        """Return what the writing of every file has in common."""
        digested = self.verify or self.target.digested
        reread = self.verify and self.reread
        at_once = max(1, min(self.threads, len(self.target.files)))
        return Job(
            self.source,
            self.path,
            self.verify,
            reread,
            digested,
            meter,
            beside,
            at_once,
            self.cast_counts,
        )


class Job(NamedTuple):
    """What the writing of every file has in common."""

    source: Catalog
    path: Path
    """The final name, for errors."""
    verify: bool
    reread: bool
    digested: bool
    meter: Meter
    beside: bool
    """Whether what is written is read again by a thread of its own."""
    files_at_once: int
    """How many files share what may be asked of a store ahead."""
    cast_counts: CastCounts | None = None


class NewFile:
    """A file of a given size to write into, flushed to the disk in the end.

    Parameters
    ----------
    place, path
        The file, and the final name of the output, for errors.
    num_bytes
        Its size: a disk that has no room for it shows before anything is written; None if it has
        that already.
    """

    def __init__(self, place: Path, path: Path, num_bytes: int | None) -> None:
        self._place = place
        self._path = path
        self._num_bytes = num_bytes

    def __enter__(self) -> int:
        try:
            # A file of its own is staged already; one in a staged directory is made here.
            made = self._num_bytes is None or os.path.exists(self._place)
            flags = os.O_RDWR | os.O_CLOEXEC
            flags |= 0 if made else os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._fd = os.open(self._place, flags, 0o600)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {reason(error)}") from None
        try:
            if self._num_bytes is not None:
                reserve(self._fd, self._num_bytes)
        except OSError as error:
            os.close(self._fd)
            raise self._refused(error) from None
        return self._fd

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                os.fsync(self._fd)
        except OSError as refusal:
            raise self._refused(refusal) from None
        finally:
            os.close(self._fd)

    def _refused(self, error: OSError) -> CheckpointError:
        needed = "" if self._num_bytes is None else f" ({self._num_bytes} bytes are needed)"
        return CheckpointError(
            f"{self._path}: cannot be written: {reason(error)}{needed}; make room or write "
            "elsewhere"
        )


def wanted_by(job: Job, slots: Iterable[Slot], least_bytes: int = 0) -> Iterator[Stretch]:
    """Return what will be read to fill slots of a file, as far as it is known and in their order.

    `Stretch.at` counts bytes of the slots, in the dtypes of the output; `least_bytes` is as for
    `stretches`.
    """
    written = 0
    for slot in slots:
        # Looking for the tensor may mean to read.
        yield Stretch(None, 0, 0, written)
        tensor = job.source.tensor(slot.tensor.source)
        size, wanted = item_bytes(tensor.dtype), item_bytes(slot.tensor.dtype)
        for stretch in stretches(tensor, slot.box, least_bytes):
            yield stretch._replace(at=written + stretch.at // size * wanted)
        written += slot.num_bytes


def plan(job: Job, slots: Iterable[Slot], files: OpenFiles) -> None:
    """Have stores asked ahead for what will be read to fill slots, in that order."""
    wanted = in_files(wanted_by(job, slots))
    files.will_read(job.source.directory, wanted, AHEAD_BYTES // job.files_at_once)


def fill_slot(
    job: Job,
    slot: Slot,
    behind: Behind,
    files: OpenFiles,
    buffers: Buffers,
    advance: Callable[[int], None] | None = None,
) -> "Filled":
    """Fill a slot of a file, and have it read again; `advance` is told of bytes written."""
    sink = FileSink(
        f"tensor {slot.tensor.name!r}",
        slot.offset,
        behind,
        advance or job.meter.advance,
        digested=job.digested,
        checked=job.reread,
        # A box of which this slot has a part only is judged by what is read of it.
        end_to_end=job.reread and slot.whole,
        dtypes=dtypes_of(job, slot),
        cast_counts=job.cast_counts,
    )
    return fill_by(job, slot, sink, files, buffers)


def dtypes_of(job: Job, slot: Slot) -> tuple[str, str] | None:
    """Return what numbers are cast from and to; None if they are not."""
    stored, wanted = job.source.tensor(slot.tensor.source).dtype, slot.tensor.dtype
    return (stored, wanted) if is_cast(stored, wanted) else None


class DigestingSink(Sink, Protocol):
    """A sink that takes the CRC-32 of what it is given."""

    crc32: int


class Filled(NamedTuple):
    """A slot that was filled."""

    job: Job
    name: str
    sink: DigestingSink
    in_part: Sequence[tuple[Arrival, int]]
    """As in `Checks`."""
    right: Sequence[StoredBox]

    def judged(self) -> tuple[int, Sequence[StoredBox]]:
        """Return the CRC-32 of its bytes, if taken, and the boxes found to be right, if some.

        For the time when the file has been read again.

        Raises
        ------
        CheckpointError
            If a part was read back differently.
        """
        for arrival, expected in self.in_part:
            if arrival.crc32 != expected:
                name = f"tensor {self.name!r}"
                raise different(self.job.path, name, arrival.crc32, expected)
        return self.sink.crc32, self.right


def fill_by(
    job: Job, slot: Slot, sink: DigestingSink, files: OpenFiles, buffers: Buffers
) -> Filled:
    """Fill a slot."""
    tensor = job.source.tensor(slot.tensor.source)
    name = slot.tensor.name
    if not job.verify:
        copy_box(tensor, slot.box, sink, files, buffers)
        return Filled(job, name, sink, (), ())
    boxes = distinct(tensor)
    checks = Checks(tensor, boxes)
    copy_box(tensor, slot.box, sink, files, buffers, checks=checks)
    if slot.whole:
        checks.finish(files)
        return Filled(job, name, sink, checks.in_part, ())
    return Filled(job, name, sink, (), [box for box in boxes if box not in checks])


def check_the_rest(job: Job, slots: Iterable[Slot], judged: Collection[StoredBox]) -> None:
    """Judge the boxes that no file needed whole, by reading them."""
    parted = {slot.tensor.source for slot in slots if not slot.whole}
    with OpenFiles() as files:
        for name in sorted(parted):
            tensor = job.source.tensor(name)
            boxes = [box for box in distinct(tensor) if box not in judged]
            Checks(tensor, boxes).finish(files)


def digest_of_file(file: OutputFile, pieces: Iterable[Piece], crcs: Sequence[int]) -> int:
    """Return the CRC-32 of a file made of pieces and slots, with zeros where there is neither."""
    value = at = 0
    for _, offset, num_bytes, crc in parts_of(pieces, file.slots, crcs):
        if offset > at:
            value = crc32(bytes(offset - at), value)
        value = int(crc32_combine(value, crc, num_bytes))
        at = offset + num_bytes
    return value


def parts_of(
    pieces: Iterable[Piece], slots: Sequence[Slot], crcs: Sequence[int]
) -> list[tuple[str, int, int, int]]:
    """Return what a file is made of: name, position, bytes and CRC-32, in ascending order."""
    parts = [("a header", p.offset, len(p.data), crc32(p.data)) for p in pieces]
    parts += [
        (f"tensor {slot.tensor.name!r}", slot.offset, slot.num_bytes, crc)
        for slot, crc in zip(slots, crcs, strict=True)
    ]
    return sorted(parts, key=lambda part: part[1:])


def check_again(place: Path, parts: Sequence[tuple[str, int, int, int]], path: Path) -> None:
    """Compare parts of a file, as the system gives them back, with what was written.

    Raises
    ------
    CheckpointError
        If one is different.
    """
    room = memoryview(bytearray(_PIECE_BYTES))
    with SourceFile(place) as written:
        for name, offset, num_bytes, crc in parts:
            value = 0
            for at in range(0, num_bytes, _PIECE_BYTES):
                part = room[: min(_PIECE_BYTES, num_bytes - at)]
                written.read_into(part, offset + at)
                value = crc32(part, value)
            if value != crc:
                raise different(path, name, value, crc)

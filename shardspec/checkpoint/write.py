"""Carrying out what is to be written: filled, flushed, read again and compared, and then named."""

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Final, TypeAlias

from shardspec.checkpoint.claim import claimed
from shardspec.checkpoint.copy import Buffers, FileSink, copy_box, write_all
from shardspec.checkpoint.digests import Checks, crc32, crc32_combine, crc_text
from shardspec.checkpoint.files import OpenFiles, SourceFile, reason
from shardspec.checkpoint.numbers import is_cast
from shardspec.checkpoint.output import sync_directory
from shardspec.checkpoint.source import CheckpointSource, StoredBox, distinct
from shardspec.checkpoint.targets import OutputFile, Piece, Slot, Target
from shardspec.errors import CheckpointError

__all__ = ["Progress", "Written", "write_target"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write in all."""

_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """What has been written."""

    files: tuple[str, ...]
    """Names in the output, the one that makes it count last."""
    num_bytes: int
    crc32: int | None
    """CRC-32 of all files one after the other; None if bytes were moved without being seen."""


class _Cancelled(Exception):
    """Another thread has failed; this one stops where it is."""


class _Meter:
    """Adds up what threads write, and stops them when one has failed."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.failed = Event()
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = Lock()

    def advance(self, num_bytes: int) -> None:
        if self.failed.is_set():
            raise _Cancelled
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Job:
    """What the writing of every file has in common."""

    source: CheckpointSource
    path: Path
    """The final name, for errors."""
    verify: bool
    digested: bool
    meter: _Meter


def write_target(
    source: CheckpointSource,
    target: Target,
    path: Path,
    *,
    overwrite: bool,
    verify: bool,
    threads: int,
    progress: Progress | None,
) -> Written:
    """Write an output whole or not at all.

    Parameters
    ----------
    source
        Where tensors come from; their boxes tile them, as `check_tiling` makes sure.
    target
        What is to be written.
    path
        Its final name.
    overwrite
        Whether what has that name is replaced.
    verify
        Compare what is read with the digests of the source, and what was written, read again, with
        what should be there.
    threads
        How many files are written at once.
    progress
        Called with the bytes written so far and in all.

    Raises
    ------
    OutputExistsError
        If there is something of that name and `overwrite` is not set.
    CheckpointError
        If another run is at work on it, a digest is wrong, or the system refuses.
    """
    job = _Job(source, path, verify, verify or target.digested, _Meter(target.num_bytes, progress))
    with claimed(path, directory=target.directory, overwrite=overwrite) as place:
        work = [
            partial(_write, job, file, place / file.name if target.directory else place)
            for file in target.files
        ]
        found = _together(work, threads, job.meter)
        digests = {file.name: digest for file, digest in zip(target.files, found, strict=True)}
        if verify:
            _check_the_rest(job, target, {box for digest in found for box in digest.judged})
        if target.last is not None:
            for name, data in target.last({name: at.slots for name, at in digests.items()}):
                with _opened(place / name, path, len(data)) as fd:
                    write_all(fd, memoryview(data), 0, path)
                digests[name] = _FileDigest((), crc32(data), len(data), ())
        if target.directory:
            sync_directory(place)
    num_bytes = sum(digest.num_bytes for digest in digests.values())
    if not job.digested:
        return Written(tuple(digests), num_bytes, None)
    value = 0
    for digest in digests.values():
        value = int(crc32_combine(value, digest.whole, digest.num_bytes))
    return Written(tuple(digests), num_bytes, value)


@dataclass(frozen=True, slots=True)
class _FileDigest:
    """CRC-32 of what was written into a file."""

    slots: tuple[int, ...]
    whole: int
    num_bytes: int
    judged: tuple[StoredBox, ...]
    """Boxes read from start to end for parts of their tensors, and found to be right."""


def _together(
    work: Sequence[Callable[[], _FileDigest]], threads: int, meter: _Meter
) -> list[_FileDigest]:
    """Do every piece of work, several at once; the first failure stops the others."""
    if threads == 1 or len(work) < 2:
        return [act() for act in work]

    def watched(act: Callable[[], _FileDigest]) -> _FileDigest:
        try:
            return act()
        except BaseException:
            meter.failed.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(watched, act) for act in work]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, _Cancelled):
            raise error
    return [future.result() for future in futures]


class _opened:
    """A new file of a given size, flushed to the disk in the end."""

    def __init__(self, place: Path, path: Path, num_bytes: int) -> None:
        self._place = place
        self._path = path
        self._num_bytes = num_bytes

    def __enter__(self) -> int:
        try:
            self._fd = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {reason(error)}") from None
        try:
            _reserve(self._fd, self._num_bytes)
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
        return CheckpointError(
            f"{self._path}: cannot be written: {reason(error)} ({self._num_bytes} bytes are "
            "needed); make room or write elsewhere"
        )


def _reserve(fd: int, num_bytes: int) -> None:
    """Give a file its size, and its room on the disk where the file system can promise that."""
    os.ftruncate(fd, num_bytes)
    if sys.platform == "linux" and num_bytes:
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def _write(job: _Job, file: OutputFile, place: Path) -> _FileDigest:
    """Write one file and return the CRC-32 of each slot and of all of it."""
    crcs: list[int] = []
    judged: list[StoredBox] = []
    with _opened(place, job.path, file.num_bytes) as fd, OpenFiles() as files:
        buffers = Buffers()

        def put(pieces: Sequence[Piece]) -> None:
            for piece in pieces:
                write_all(fd, memoryview(piece.data), piece.offset, job.path)
                job.meter.advance(len(piece.data))

        put(file.pieces)
        for slot in file.slots:
            crc, boxes = _fill(job, slot, fd, files, buffers)
            crcs.append(crc)
            judged += boxes
        late = tuple(file.late(crcs)) if file.late is not None else ()
        put(late)
    pieces = (*file.pieces, *late)
    whole = _digest_of(file, pieces, crcs)
    if job.verify:
        _read_again(file, pieces, crcs, whole, place, job.path)
    return _FileDigest(tuple(crcs), whole, file.num_bytes, tuple(judged))


def _fill(
    job: _Job, slot: Slot, fd: int, files: OpenFiles, buffers: Buffers
) -> tuple[int, Iterable[StoredBox]]:
    """Fill a slot; return the CRC-32 of its bytes, if taken, and the boxes found to be right."""
    tensor = job.source.tensor(slot.tensor.source)
    wanted = slot.tensor.dtype
    sink = FileSink(
        fd,
        job.path,
        slot.offset,
        buffers,
        job.meter.advance,
        digested=job.digested,
        dtypes=(tensor.dtype, wanted) if is_cast(tensor.dtype, wanted) else None,
    )
    if not job.verify:
        copy_box(tensor, slot.box, sink, files, buffers)
        return sink.crc32, ()
    boxes = distinct(tensor)
    checks = Checks(tensor, boxes)
    copy_box(tensor, slot.box, sink, files, buffers, checks=checks)
    if slot.whole:
        checks.finish(files)
    return sink.crc32, () if slot.whole else [box for box in boxes if box not in checks]


def _check_the_rest(job: _Job, target: Target, judged: Collection[StoredBox]) -> None:
    """Judge the boxes that no file needed whole, by reading them."""
    parted = {s.tensor.source for file in target.files for s in file.slots if not s.whole}
    with OpenFiles() as files:
        for name in sorted(parted):
            tensor = job.source.tensor(name)
            boxes = [box for box in distinct(tensor) if box not in judged]
            Checks(tensor, boxes).finish(files)


def _digest_of(file: OutputFile, pieces: Sequence[Piece], crcs: Sequence[int]) -> int:
    """Return the CRC-32 of a file made of pieces and slots, with zeros where there is neither."""
    parts = [(piece.offset, len(piece.data), crc32(piece.data)) for piece in pieces]
    parts += [
        (slot.offset, slot.num_bytes, crc) for slot, crc in zip(file.slots, crcs, strict=True)
    ]
    value = at = 0
    for offset, num_bytes, crc in sorted(parts):
        if offset > at:
            value = crc32(bytes(offset - at), value)
        value = int(crc32_combine(value, crc, num_bytes))
        at = offset + num_bytes
    return value


def _read_again(
    file: OutputFile,
    pieces: Sequence[Piece],
    crcs: Sequence[int],
    whole: int,
    place: Path,
    path: Path,
) -> None:
    """Compare a file, as the system gives it back, with what was written."""
    room = memoryview(bytearray(_PIECE_BYTES))
    with SourceFile(place) as written:
        value = 0
        for at in range(0, file.num_bytes, _PIECE_BYTES):
            part = room[: min(_PIECE_BYTES, file.num_bytes - at)]
            written.read_into(part, at)
            value = crc32(part, value)
        if value == whole and written.num_bytes == file.num_bytes:
            return
        for piece in pieces:
            if written.read(piece.offset, len(piece.data)) != piece.data:
                raise _changed(path, "its header")
        for slot, crc in zip(file.slots, crcs, strict=True):
            value = 0
            for at in range(0, slot.num_bytes, _PIECE_BYTES):
                part = room[: min(_PIECE_BYTES, slot.num_bytes - at)]
                written.read_into(part, slot.offset + at)
                value = crc32(part, value)
            if value != crc:
                raise _changed(
                    path,
                    f"tensor {slot.tensor.name!r} (CRC-32 {crc_text(value)} instead of "
                    f"{crc_text(crc)})",
                )
        raise _changed(path, "its size")


def _changed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: what was written was read back differently: {what}; the disk or the memory of "
        "this machine is at fault, nothing was kept"
    )

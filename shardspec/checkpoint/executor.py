"""Carrying out a copy plan: read, compare the source's digest, write, flush, read again, compare.

Threads take copies from one list. On this machine the list goes tensor by tensor, so that a stored
box is read and judged once whatever files it goes to; a store is given each file from its start to
its end.
"""

import heapq
import os
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeAlias

from shardspec.checkpoint.cast_counts import CastCounts
from shardspec.checkpoint.catalog import Catalog, StoredTensor, distinct
from shardspec.checkpoint.commit import reserve
from shardspec.checkpoint.copy_plan import (
    BLOCK_BYTES,
    Copy,
    Extent,
    OutputFile,
    RawBytes,
    Target,
    copies_of,
    stretches,
)
from shardspec.checkpoint.digests import Checks, crc32, crc32_combine, crc_text
from shardspec.checkpoint.read_boxes import Buffers, read_box
from shardspec.checkpoint.source_files import AHEAD_BYTES, FileStretch, OpenFiles, SourceFile
from shardspec.checkpoint.store import reason
from shardspec.checkpoint.upload import RemoteStaging, Upload
from shardspec.dtypes import is_cast, item_bytes
from shardspec.errors import CheckpointError

__all__ = [
    "Cancelled",
    "Execution",
    "Groups",
    "Progress",
    "Staged",
    "Writer",
    "copy_to_disk",
    "copy_to_store",
    "digest_of_file",
    "finish_file",
    "write_all",
]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write in all."""
Groups: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""Extents that are worked on together, by the number of their file and their own in that."""

WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than what one call brings: small ones are more work, and large ones can be slow to come by."""
_BEGUN_BYTES: Final = 8 << 20
"""Bytes that a disk is told of at a time."""
_PAGE: Final = 4096
"""What is told of ends with one, so that none is written to the disk twice."""
_CACHED_BYTES: Final = 2 << 20
"""Bytes flushed and read again at a time where flushing takes no time, as in memory."""
_FLUSHED_BYTES: Final = 256 << 20
"""Bytes flushed to a disk and read again at a time: each flush waits for its journal."""
_FLUSH_SECONDS: Final = 1e-3
"""A flush of so many cached bytes that takes longer is one to a disk."""
_OPEN_OUTPUTS: Final = 128


class Cancelled(Exception):
    """Another thread or process has failed; this one stops where it is."""


@dataclass(slots=True)
class Execution:
    """A plan that is being carried out; all threads have it in common."""

    source: Catalog
    target: Target
    path: Path
    """The final name, for errors."""
    verify: bool
    """Compare what is read with the digests of the source."""
    reread: bool
    """Also read what was written again, and compare."""
    cast_counts: CastCounts
    progress: Progress | None
    total: int
    """Bytes that this process writes."""
    failed: Event = field(default_factory=Event)
    """Set when all is to stop."""
    crcs: list["array[int]"] = field(init=False)
    """Of every extent of every file, if they are taken."""
    _parts: dict[tuple[int, int], dict[int, tuple[int, int]]] = field(default_factory=dict)
    _done: int = 0
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.crcs = [array("I", bytes(4 * len(file.extents))) for file in self.target.files]

    @property
    def digested(self) -> bool:
        """Whether the CRC-32 of what is written is taken."""
        return self.verify or self.target.digested

    def advance(self, num_bytes: int) -> None:
        """Count bytes; raise `Cancelled` if another has failed."""
        if self.failed.is_set():
            raise Cancelled
        with self._lock:
            self._done += num_bytes
            if self.progress is not None:
                self.progress(self._done, self.total)

    def put_crc(self, copy: Copy, value: int, num_bytes: int) -> None:
        """Note the CRC-32 of a copy."""
        with self._lock:
            parts = self._parts.setdefault((copy.file, copy.extent), {})
            parts[copy.part] = value, num_bytes
            if len(parts) < copy.parts:
                return
            del self._parts[copy.file, copy.extent]
        value = 0
        for part in range(copy.parts):
            value = int(crc32_combine(value, *parts[part]))
        self.crcs[copy.file][copy.extent] = value


class Staged(NamedTuple):
    """An output that is begun: a file, or a directory of files."""

    place: Path
    """Where, by its descriptor."""
    path: Path
    """Its final name, for errors."""
    directory: bool

    def create(self, name: str, num_bytes: int) -> None:
        """Make a file of a size: a disk that has no room for it shows before any is written."""
        try:
            fd = self._open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW if self.directory else 0)
            try:
                reserve(fd, num_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be written: {reason(error)} ({num_bytes} bytes are needed); "
                "make room or write elsewhere"
            ) from None

    def open(self, name: str) -> int:
        """Open a file that was made; return its descriptor."""
        try:
            return self._open(name, os.O_NOFOLLOW if self.directory else 0)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {reason(error)}") from None

    def _open(self, name: str, flags: int) -> int:
        place = self.place / name if self.directory else self.place
        return os.open(place, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


class _Tensor:
    """A tensor of which copies are made: its digests are judged once all have been."""

    def __init__(self, name: str, copies: int) -> None:
        self.name = name
        self._left = copies
        self._lock = Lock()
        self._stored: tuple[StoredTensor, Checks | None] | None = None

    def stored(self, job: Execution) -> tuple[StoredTensor, Checks | None]:
        """Return what is stored, and its digests if they are to be compared."""
        with self._lock:
            if self._stored is None:
                tensor = job.source.tensor(self.name)
                checks = Checks(tensor, distinct(tensor)) if job.verify else None
                self._stored = tensor, checks
            return self._stored

    def finish(self, files: OpenFiles) -> None:
        """Note that a copy was made; the last one judges what is left."""
        with self._lock:
            self._left -= 1
            if self._left or self._stored is None:
                return
            (_, checks), self._stored = self._stored, None
        if checks is not None:
            checks.finish(files)


def _name(extent: Extent) -> str:
    return f"tensor {extent.tensor.name!r}"


def _filled(
    job: Execution, copy: Copy, of: _Tensor, files: OpenFiles, buffers: Buffers
) -> Iterator[tuple[int, memoryview, int | None]]:
    """Yield what goes into a file: position, bytes, and their CRC-32 if it was taken."""
    tensor, checks = of.stored(job)
    extent = job.target.files[copy.file].extents[copy.extent]
    wanted = extent.tensor.dtype
    casts = is_cast(tensor.dtype, wanted)
    size, new_size = item_bytes(tensor.dtype), item_bytes(wanted)
    for offset, data, crc in read_box(tensor, copy.box, files, buffers, checks):
        if not casts:
            yield copy.offset + offset, data, crc
            continue
        from shardspec.checkpoint.numeric import cast

        room, losses = cast(data, tensor.dtype, wanted)
        job.cast_counts.add(_name(extent), losses)
        # Numbers that were cast may take more memory than a block.
        for at in range(0, len(room), BLOCK_BYTES):
            place = copy.offset + offset // size * new_size + at
            yield place, room[at : at + BLOCK_BYTES], None
    of.finish(files)


def _wanted(job: Execution, groups: Groups) -> Iterator[FileStretch]:
    """Yield what will be read to fill extents, in that order."""
    for group in groups:
        for place, number in group:
            extent = job.target.files[place].extents[number]
            yield from stretches(job.source.tensor(extent.tensor.source), extent.box)


def copy_to_disk(job: Execution, staged: Staged, groups: Groups, threads: int) -> None:
    """Make copies into files that were created; each group has all extents of a tensor."""

    def tasks() -> Iterator[tuple[_Tensor, Copy]]:
        for group in groups:
            copies = [
                copy for place, number in group for copy in copies_of(job.target, place, number)
            ]
            first_file, first = group[0]
            name = job.target.files[first_file].extents[first].tensor.source
            tensor = _Tensor(name, len(copies))
            yield from ((tensor, copy) for copy in copies)

    todo, lock = tasks(), Lock()

    def work() -> None:
        buffers = Buffers()
        with OpenFiles() as files, _Outputs(job, staged, buffers) as outputs:
            if threads == 1:
                files.will_read(job.source.directory, _wanted(job, groups))
            while not job.failed.is_set():
                with lock:
                    task = next(todo, None)
                if task is None:
                    return
                tensor, copy = task
                crc = num_bytes = 0
                extent = job.target.files[copy.file].extents[copy.extent]
                for offset, data, known in _filled(job, copy, tensor, files, buffers):
                    if job.digested:
                        known = crc32(data) if known is None else known
                        crc = int(crc32_combine(crc, known, len(data)))
                    outputs.write(copy.file, offset, data, known or 0, extent)
                    num_bytes += len(data)
                    job.advance(len(data))
                job.put_crc(copy, crc, num_bytes)

    _run([work] * threads, threads, job.failed)


class _Written(NamedTuple):
    """Bytes that are to be read again."""

    file: int
    offset: int
    num_bytes: int
    crc32: int
    extent: Extent


class _Outputs:
    """The files that a thread writes into, and what it has still to read again of them."""

    def __init__(self, job: Execution, staged: Staged, buffers: Buffers) -> None:
        self._job = job
        self._staged = staged
        self._buffers = buffers
        self._open: OrderedDict[int, Writer] = OrderedDict()
        self._written: list[_Written] = []
        self._num_bytes = 0
        self._enough = _CACHED_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._job.failed.is_set():
                self._check()
        finally:
            for writer in self._open.values():
                os.close(writer.fd)

    def _writer(self, file: int) -> "Writer":
        found = self._open.get(file)
        if found is not None:
            self._open.move_to_end(file)
            return found
        while len(self._open) >= _OPEN_OUTPUTS:
            os.close(self._open.popitem(last=False)[1].fd)
        fd = self._staged.open(self._job.target.files[file].name)
        writer = self._open[file] = Writer(fd, self._staged.path)
        return writer

    def write(self, file: int, offset: int, data: memoryview, crc: int, extent: Extent) -> None:
        """Write bytes that have a CRC-32."""
        self._writer(file).write(data, offset)
        if self._job.reread:
            self._written.append(_Written(file, offset, len(data), crc, extent))
            self._num_bytes += len(data)
            if self._num_bytes >= self._enough:
                self._check()

    def _check(self) -> None:
        """Flush what was written to the disk, read it again and compare."""
        self._written.sort(key=lambda one: one.file)
        flushed = -1
        for file, offset, num_bytes, crc, extent in self._written:
            fd = self._writer(file).fd
            if file != flushed:
                began = time.monotonic()
                _flush(fd, self._staged.path)
                if time.monotonic() - began > _FLUSH_SECONDS:
                    self._enough = _FLUSHED_BYTES
                flushed = file
            part = self._buffers.scratch[:num_bytes]
            _read_back(fd, part, offset, self._staged.path)
            if (found := crc32(part)) != crc:
                raise _different(self._job.path, _name(extent), found, crc)
        self._written.clear()
        self._num_bytes = 0


def _flush(fd: int, path: Path) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None


def _read_back(fd: int, room: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(room):
        try:
            count = os.preadv(fd, [room[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read again: {reason(error)}") from None
        if not count:
            raise CheckpointError(f"{path}: was cut short while it was written; nothing was kept")
        done += count


def _different(path: Path, name: str, found: int, expected: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: {name} was read back differently: its CRC-32 is {crc_text(found)} instead of "
        f"{crc_text(expected)}; the memory of this machine, or what it is stored on, is at fault; "
        "nothing was kept"
    )


def _run(work: Iterable[Callable[[], None]], threads: int, failed: Event) -> None:
    """Do pieces of work in threads; the first that fails stops the others."""
    if threads == 1:
        for act in work:
            act()
        return

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads, "shardspec-copy") as pool:
        futures = [pool.submit(guarded, act) for act in work]
        try:
            wait(futures)
        except BaseException:
            failed.set()
            # However often the user interrupts: no file may be closed that one writes into.
            while not all(future.done() for future in futures):
                with suppress(KeyboardInterrupt):
                    wait(futures)
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    cause = next((e for e in errors if not isinstance(e, Cancelled)), next(iter(errors), None))
    if cause is not None:
        try:
            raise cause
        finally:
            # Otherwise an error and its traceback hold each other, and buffers with them.
            del cause, errors, futures


def finish_file(job: Execution, staged: Staged, file: OutputFile, crcs: Sequence[int]) -> int:
    """Write and check what is no tensor's, flush a file, and return the CRC-32 of all of it."""
    fd = staged.open(file.name)
    try:
        trailer = () if file.trailer is None else file.trailer(crcs)
        for one in chain(file.raw, trailer):
            write_all(fd, memoryview(one.data), one.offset, job.path)
        _flush(fd, job.path)
        for one in chain(file.raw, trailer):
            part = memoryview(bytearray(len(one.data)))
            _read_back(fd, part, one.offset, job.path)
            if part != one.data:
                raise _different(job.path, "a header", crc32(part), crc32(one.data))
    finally:
        os.close(fd)
    return digest_of_file(file, trailer, crcs) if job.digested else 0


def digest_of_file(file: OutputFile, trailer: Sequence[RawBytes], crcs: Sequence[int]) -> int:
    """Return the CRC-32 of a file made of raw bytes and extents, with zeros between them."""
    # All are in ascending order, and there can be very many.
    raw = (
        ((one.offset, len(one.data), crc32(one.data)) for one in several)
        for several in (file.raw, trailer)
    )
    extents = (
        (extent.offset, extent.num_bytes, crc)
        for extent, crc in zip(file.extents, crcs, strict=True)
    )
    value = at = 0
    for offset, num_bytes, crc in heapq.merge(*raw, extents):
        if offset > at:
            value = crc32(bytes(offset - at), value)
        value = int(crc32_combine(value, crc, num_bytes))
        at = offset + num_bytes
    return value


def copy_to_store(
    job: Execution, staging: RemoteStaging, groups: Groups, empty: Sequence[int], threads: int
) -> dict[str, int]:
    """Write files into a store, and read them again; return the CRC-32 of each.

    Each group has all extents of a file; those with the numbers `empty` have none.
    """
    counts: dict[str, int] = {}
    for group in groups:
        for place, number in group:
            name = job.target.files[place].extents[number].tensor.source
            counts[name] = counts.get(name, 0) + 1
    tensors = {name: _Tensor(name, count) for name, count in counts.items()}
    at_once = max(1, min(threads, len(groups)))
    found: dict[str, int] = {}

    todo = SimpleQueue[int]()
    for number in (*(group[0][0] for group in groups), *empty):
        todo.put(number)

    def work() -> None:
        with suppress(Empty):
            while not job.failed.is_set():
                number = todo.get_nowait()
                name = job.target.files[number].name
                found[name] = _upload(job, staging, number, tensors, AHEAD_BYTES // at_once)

    _run([work] * at_once, at_once, job.failed)
    return found


def _upload(
    job: Execution,
    staging: RemoteStaging,
    number: int,
    tensors: dict[str, _Tensor],
    ahead: int,
) -> int:
    """Write one file."""
    file = job.target.files[number]
    place, crcs = staging.place(file.name), job.crcs[number]
    trailer: list[RawBytes] = []
    buffers = Buffers()
    parts: list[RawBytes | tuple[Extent, int]] = [*file.raw]
    parts += [(extent, n) for n, extent in enumerate(file.extents)]
    parts.sort(key=lambda part: part.offset if isinstance(part, RawBytes) else part[0].offset)
    with Upload(place, file.num_bytes, overwrite=staging.overwrite) as upload, OpenFiles() as files:
        files.will_read(
            job.source.directory,
            _wanted(job, [[(number, n) for n in range(len(file.extents))]]),
            ahead,
        )
        for part in parts:
            if isinstance(part, RawBytes):
                _upload_raw(upload, part)
                continue
            extent, n = part
            upload.write(bytes(extent.offset - upload.written))
            copy = Copy(number, n, extent.box, extent.offset, 0, 1)
            crc = 0
            for _, data, known in _filled(job, copy, tensors[extent.tensor.source], files, buffers):
                if job.digested:
                    known = crc32(data) if known is None else known
                    crc = int(crc32_combine(crc, known, len(data)))
                upload.write(data)
                job.advance(len(data))
            crcs[n] = crc
            for one in () if file.trailer is None else file.trailer(crcs[: n + 1], n):
                _upload_raw(upload, one)
                trailer.append(one)
        assert upload.written == file.num_bytes, "parts are as long as planned"
    staging.made.append(place)
    job.advance(file.other_bytes)
    again = [
        (e.offset, e.num_bytes, crc, _name(e)) for e, crc in zip(file.extents, crcs, strict=True)
    ]
    check_again(
        place,
        [
            *(
                (one.offset, len(one.data), crc32(one.data), "a header")
                for one in chain(file.raw, trailer)
            ),
            *(again if job.reread else ()),
        ],
        job.path,
    )
    return digest_of_file(file, trailer, crcs) if job.digested else 0


def _upload_raw(upload: Upload, raw: RawBytes) -> None:
    upload.write(bytes(raw.offset - upload.written))
    upload.write(raw.data)


def check_again(place: Path, parts: Sequence[tuple[int, int, int, str]], path: Path) -> None:
    """Compare parts of a file, given by position, bytes, CRC-32 and name, with what is there."""
    room = memoryview(bytearray(BLOCK_BYTES))
    with SourceFile(place) as written:
        for offset, num_bytes, crc, name in sorted(parts):
            value = 0
            for at in range(0, num_bytes, BLOCK_BYTES):
                part = room[: min(BLOCK_BYTES, num_bytes - at)]
                written.read_into(part, offset + at)
                value = crc32(part, value)
            if value != crc:
                raise _different(path, name, value, crc)


def write_all(
    fd: int, data: memoryview, offset: int, path: Path, at_once: int = WRITE_BYTES
) -> None:
    """Write bytes at a place in a file, so many by one call.

    Raises
    ------
    CheckpointError
        If the system refuses, as when the disk is full.
    """
    done, end = 0, len(data)
    while done < end:
        try:
            done += os.pwrite(fd, data[done : done + at_once], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from None


class Writer:
    """Writes blocks of a file, one after the other, and has the disk begin with them.

    Otherwise Linux begins when half a minute has passed or much of the memory is full, so that
    whoever flushes the file waits for most of it.

    Parameters
    ----------
    fd, path
        The file, open for writing; the path is for errors.
    """

    __slots__ = ("_end", "_first", "_num_bytes", "_path", "fd")

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self._path = path
        self._first = self._end = 0
        """Where what the disk was not told of yet begins and ends."""
        self._num_bytes = 0
        """Of what was written there."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at a place, mostly behind those before."""
        write_all(self.fd, data, offset, self._path)
        if not self._num_bytes:
            self._first = self._end = offset
        self._first = min(self._first, offset)
        self._end = max(self._end, offset + data.nbytes)
        self._num_bytes += data.nbytes
        if self._num_bytes >= _BEGUN_BYTES:
            end = self._end - self._end % _PAGE
            # What happens to be on the disk already leaves the cache. Files in memory stay as they
            # are, and a file system that knows no such advice begins when it will.
            if sys.platform == "linux":
                with suppress(OSError):
                    length = end - self._first
                    os.posix_fadvise(self.fd, self._first, length, os.POSIX_FADV_DONTNEED)
            self._first, self._num_bytes = end, self._end - end

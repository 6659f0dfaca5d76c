"""Files of an output on a disk: made with their size, written at any place, read again, flushed."""

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.digests import crc32, crc32_combine, crc_text
from shardspec.checkpoint.directories import open_below, reserve
from shardspec.checkpoint.executor import (
    CopiedTensor,
    Copy,
    Execution,
    plan_copies,
    run_in_threads,
    tensor_text,
    wanted_stretches,
)
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers
from shardspec.checkpoint.source_files import KeptOpen, OpenFiles, read_fully
from shardspec.checkpoint.store import RemotePath, system_errors
from shardspec.checkpoint.targets import OutputFile, Put, RawBytes, Target, Write
from shardspec.errors import CheckpointError

__all__ = ["Pieces", "Staged", "check_again", "digest_of_file", "write_all"]

_OPEN_OUTPUTS: Final = 128
_WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than what one call brings: small ones are more work, and large ones can be slow to come by."""


class Staged(NamedTuple):
    """An output that is begun: a file, or a directory of files."""

    place: Path
    """Where, by its descriptor."""
    path: Path
    """Its final name, for errors."""
    directory: bool

    def create(self, name: str, num_bytes: int) -> None:
        """Make a file of a size: a disk that has no room for it shows before any is written."""
        more = f" ({num_bytes} bytes are needed); make room or write elsewhere"
        with system_errors(self.path, "written", more):
            fd = self.open(name, os.O_CREAT | os.O_EXCL if self.directory else 0, make=True)
            try:
                reserve(fd, num_bytes)
            finally:
                os.close(fd)

    def open(self, name: str, flags: int = 0, *, make: bool = False) -> int:
        """Open a file, made unless it is there if the flags say so; return its descriptor."""
        with system_errors(self.path, "written"):
            if not self.directory:
                return os.open(self.place, os.O_RDWR | os.O_CLOEXEC)
            return open_below(self.place, name, os.O_RDWR | flags, make=make)

    def fill(self, job: Execution) -> None:
        """Make the copies of this process into files that were created."""
        threads = job.options.threads
        plan = partial(plan_copies, job.target, job.member.rank, job.member.size)
        tasks = (
            (tensor, copy)
            for source, copies, complete in plan()
            for tensor in [CopiedTensor(source, len(copies), complete=complete)]
            for copy in copies
        )

        def opened(number: int) -> int:
            return self.open(job.target.files[number].name)

        def work(tasks: Iterator[tuple[CopiedTensor, Copy]]) -> None:
            buffers = Buffers()
            scratch = buffers.scratch if job.reread else None
            with OpenFiles() as files, KeptOpen(opened, os.close, _OPEN_OUTPUTS) as outputs:
                if threads == 1:
                    wanted = ((one.source, copy) for one in plan() for copy in one.copies)
                    files.will_read(job.source.directory, wanted_stretches(job, wanted))
                for tensor, copy in tasks:
                    fd = outputs.get(copy.file)
                    for offset, data, crc in tensor.filled(job, copy, files, buffers):
                        found = write_all(fd, data, offset, self.path, scratch)
                        if job.reread and found != crc:
                            extent = job.target.files[copy.file].extents[copy.extent]
                            raise _different(self.path, tensor_text(extent), found, crc)

        run_in_threads(work, tasks, threads, job.failed)

    def finish(self, job: Execution) -> list[tuple[str, int, int]]:
        """Write what is no tensor's, flush the files, and return their names, bytes and CRC-32."""
        written = []
        for file, crcs in zip(job.target.files, job.crcs, strict=True):
            trailer = () if file.trailer is None else file.trailer(crcs)
            with self._opened(file.name) as fd:
                # There can be very many, made each time that they are asked for.
                for one in chain(file.raw, trailer):
                    write_all(fd, memoryview(one.data), one.offset, self.path)
                raw = chain(file.raw, trailer)
                self._flush(fd, ((r.offset, len(r.data), crc32(r.data), "a header") for r in raw))
            digest = digest_of_file(file, trailer, crcs) if job.digested else 0
            written.append((file.name, file.num_bytes, digest))
            job.advance(file.other_bytes)
        return written

    def publish(self, _: Target, write_last: Callable[[Put], None]) -> list[tuple[str, int, int]]:
        """Have the files written that list the others; return their names, bytes and CRC-32."""
        written: list[tuple[str, int, int]] = []

        def put(name: str, fill: Callable[[Write], object]) -> None:
            self.create(name, 0)
            with self._opened(name) as fd:
                pieces = Pieces(lambda block: write_all(fd, block, pieces.num_bytes, self.path))
                fill(pieces.write)
                pieces.flush()
                self._flush(fd, [(0, pieces.num_bytes, pieces.crc32, name)])
            written.append((name, pieces.num_bytes, pieces.crc32))

        write_last(put)
        return written

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        fd = self.open(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def _flush(self, fd: int, parts: Iterable[tuple[int, int, int, str]]) -> None:
        with system_errors(self.path, "written"):
            os.fsync(fd)
        check_again(lambda room, at: _read_back(fd, room, at, self.path), parts, self.path)


def write_all(
    fd: int, data: memoryview, offset: int, path: Path, scratch: memoryview | None = None
) -> int:
    """Write bytes at a place in a file; raise as when the disk is full.

    With `scratch`, memory as long as they are, each part is read again while it is in the CPU's
    cache. Returns the CRC-32 of what is there then.
    """
    done = found = 0
    with system_errors(path, "written"):
        while done < len(data):
            count = os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)
            if scratch is not None:
                _read_back(fd, scratch[:count], offset + done, path)
                found = crc32(scratch[:count], found)
            done += count
    return found


def _read_back(fd: int, room: memoryview, offset: int, path: Path) -> None:
    """Fill memory from a place in a file that was written."""
    with system_errors(path, "read again"):
        missing = read_fully(fd, room, offset)
    if missing:
        raise CheckpointError(f"{path}: was cut short while it was written; nothing was kept")


def check_again(
    read_into: Callable[[memoryview, int], None],
    parts: Iterable[tuple[int, int, int, str]],
    path: Path,
) -> None:
    """Compare parts of a file, given by position, bytes, CRC-32 and name, with what is there."""
    room = memoryview(bytearray(BLOCK_BYTES))
    for offset, num_bytes, crc, name in parts:
        value = 0
        for at in range(0, num_bytes, BLOCK_BYTES):
            part = room[: min(BLOCK_BYTES, num_bytes - at)]
            read_into(part, offset + at)
            value = crc32(part, value)
        if value != crc:
            raise _different(path, name, value, crc)


def _different(path: Path, name: str, found: int, expected: int) -> CheckpointError:
    why = "the memory of this machine, or what it is stored on, is at fault"
    if isinstance(path, RemotePath):
        why = "the store gives back something else than was sent, or another run has written there"
    return CheckpointError(
        f"{path}: {name} was read back differently: its CRC-32 is {crc_text(found)} instead of "
        f"{crc_text(expected)}; {why}; nothing was kept"
    )


class Pieces:
    """Pieces of a file, put together to blocks that are written; their bytes and CRC-32."""

    def __init__(self, write_block: Callable[[memoryview], object]) -> None:
        self._write_block = write_block
        self._waiting = bytearray()
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: bytes) -> None:
        """Write on."""
        self._waiting += data
        if len(self._waiting) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        block, self._waiting = self._waiting, bytearray()
        self.crc32 = crc32(block, self.crc32)
        self._write_block(memoryview(block))
        self.num_bytes += len(block)


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

"""Files of an output, on a disk or in a store: made, filled with copies, and read again.

A file on a disk is made with its size, and written at any position. One in a store is written from
start to end; it appears when it is complete, and a file that it replaces stays until then.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from isal.isal_zlib import crc32_combine

from shardspec.checkpoint.commit import (
    DIRECTORY,
    Destination,
    joined_output,
    real_path,
    reserve,
    staged_output,
)
from shardspec.checkpoint.coordinate import Workers
from shardspec.checkpoint.executor import Execution, Task
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, crc32, crc_text
from shardspec.checkpoint.source_files import KeptOpen, OpenFiles, SourceFile, read_fully
from shardspec.checkpoint.store import RemotePath, path_errors, reason, upload
from shardspec.checkpoint.targets import Extent, Put, RawBytes, Write
from shardspec.errors import CheckpointError

Written: TypeAlias = list[tuple[str, int, int]]
"""Name, bytes and CRC-32 of files."""

_MAX_OPEN: Final = 128
_WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than that: small ones are more work, and large ones can be slow to get."""
_TEMPORARY_SUFFIX: Final = ".shardspec-tmp"
"""How the names of files end that were not moved yet; a killed run leaves them."""


class _FilePart(NamedTuple):
    """A part of a file, and what errors call it."""

    offset: int
    num_bytes: int
    crc32: int
    name: str


def _raw_part(raw: RawBytes) -> _FilePart:
    return _FilePart(raw.offset, len(raw.data), crc32(raw.data), "a header")


def _extent_part(extent: Extent, crc: int) -> _FilePart:
    return _FilePart(extent.offset, extent.num_bytes, crc, f"tensor {extent.tensor.name!r}")


def _digest(parts: Iterable[_FilePart]) -> int:
    """Return the CRC-32 of a file, given its parts in order, with zeros between them."""
    value = at = 0
    for offset, num_bytes, crc, _ in parts:
        if offset > at:
            value = crc32(bytes(offset - at), value)
        value = int(crc32_combine(value, crc, num_bytes))
        at = offset + num_bytes
    return value


def _check_again(
    read_into: Callable[[memoryview, int], None], parts: Iterable[_FilePart], path: Path
) -> None:
    """Read parts of a file again and compare them."""
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


def _in_blocks(
    fill: Callable[[Write], object], write_block: Callable[[memoryview, int], object]
) -> tuple[int, int]:
    """Write small pieces in blocks, given with their positions; return size and CRC-32."""
    waiting = bytearray()
    num_bytes = crc = 0

    def flush() -> None:
        nonlocal waiting, num_bytes, crc
        block, waiting = waiting, bytearray()
        write_block(memoryview(block), num_bytes)
        crc = crc32(block, crc)
        num_bytes += len(block)

    def write(piece: bytes) -> None:
        waiting.extend(piece)
        if len(waiting) >= BLOCK_BYTES:
            flush()

    fill(write)
    flush()
    return num_bytes, crc


def _write_lists(job: Execution, put: Put) -> None:
    """Write the files that list the others."""
    if job.target.last is not None:
        files = zip(job.target.files, job.crcs, strict=True)
        job.target.last({file.name: crcs for file, crcs in files}, put)


class Staged(NamedTuple):
    """A staged file, or a directory of files, on a disk."""

    place: Path  # by its descriptor
    path: Path  # its final name, for errors
    directory: bool

    def create(self, name: str, num_bytes: int) -> None:
        """Make a file of a size: a full disk is reported before anything is written."""
        more = f" ({num_bytes} bytes are needed); make room or write elsewhere"
        with path_errors(self.path, "written", more):
            flags = os.O_CREAT | os.O_EXCL if self.directory else 0
            fd = self._open(name, flags, make=True)
            try:
                reserve(fd, num_bytes)
            finally:
                os.close(fd)

    def open(self, name: str) -> int:
        """Open a file that was made; return its descriptor."""
        with path_errors(self.path, "written"):
            return self._open(name)

    def _open(self, name: str, flags: int = 0, *, make: bool = False) -> int:
        """Open a file by its relative name, following no links; `make` its directories."""
        flags |= os.O_RDWR | os.O_CLOEXEC
        if not self.directory:
            return os.open(self.place, flags)
        *above, last = name.split("/")
        if not {"", ".", ".."}.isdisjoint((*above, last)):
            raise CheckpointError(f"{name!r} does not name a file in a directory; choose another")
        fd = os.open(self.place, DIRECTORY)
        try:
            for part in above:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=fd)
                inner = os.open(part, DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
            return os.open(last, flags | os.O_NOFOLLOW, 0o600, dir_fd=fd)
        finally:
            os.close(fd)

    @contextmanager
    def completing(self, name: str) -> Iterator[tuple[int, list[_FilePart]]]:
        """Open a file; in the end flush it, and check the parts that were listed."""
        fd = self.open(name)
        parts: list[_FilePart] = []
        try:
            yield fd, parts
            with path_errors(self.path, "written"):
                os.fsync(fd)
            _check_again(lambda room, at: _read_back(fd, room, at, self.path), parts, self.path)
        finally:
            os.close(fd)


class DiskOutput:
    """An output on a disk."""

    def __init__(self, job: Execution, staged: Staged) -> None:
        self._job, self._staged = job, staged

    def copy(self, task: Task, files: OpenFiles, buffers: Buffers) -> None:
        """Do a task of this process."""
        job, path = self._job, self._staged.path
        scratch = buffers.scratch if job.reread else None

        def opened(number: int) -> int:
            return self._staged.open(job.target.files[number].name)

        with KeptOpen(opened, os.close, _MAX_OPEN) as outputs:
            for tensor, copy in task.copies:
                fd = outputs.get(copy.file)
                for offset, data, crc in job.blocks(tensor, copy, files, buffers):
                    found = write_all(fd, data, offset, path, scratch)
                    if job.reread and found != crc:
                        extent = job.target.files[copy.file].extents[copy.extent]
                        raise _different(path, _extent_part(extent, crc).name, found, crc)

    def finish(self) -> Written:
        """Complete the files, write those that list the others, and return all."""
        job, staged = self._job, self._staged
        written: Written = []
        for file, crcs in zip(job.target.files, job.crcs, strict=True):
            with staged.completing(file.name) as (fd, parts):
                trailer = () if file.trailer is None else file.trailer(crcs)
                # There can be very many, which are made when they are asked for.
                for raw in heapq.merge(file.raw, trailer):
                    write_all(fd, memoryview(raw.data), raw.offset, staged.path)
                    parts.append(_raw_part(raw))
            digest = 0
            if job.digested:
                digest = _digest(heapq.merge(parts, map(_extent_part, file.extents, crcs)))
            written.append((file.name, file.num_bytes, digest))
            job.advance(file.other_bytes)

        def put(name: str, fill: Callable[[Write], object]) -> None:
            staged.create(name, 0)
            with staged.completing(name) as (fd, parts):
                size, crc = _in_blocks(fill, lambda data, at: write_all(fd, data, at, staged.path))
                parts.append(_FilePart(0, size, crc, name))
            written.append((name, size, crc))

        job.source.check_unchanged()
        _write_lists(job, put)
        return written


@contextmanager
def on_disk(job: Execution, workers: Workers, destination: Destination) -> Iterator[DiskOutput]:
    """Begin an output on a disk: files are staged, and opened by the other processes."""
    path, directory = destination.path, job.target.directory
    if job.member.rank:
        with joined_output(Path(workers.broadcast("place")), path) as place:
            yield DiskOutput(job, Staged(place, path, directory))
        return
    with staged_output(destination, directory=directory, overwrite=job.options.overwrite) as place:
        staged = Staged(place, path, directory)
        for file in job.target.files:
            staged.create(file.name, file.num_bytes)
        workers.broadcast("place", str(real_path(place)))
        yield DiskOutput(job, staged)


def write_all(
    fd: int, data: memoryview, offset: int, path: Path, scratch: memoryview | None = None
) -> int:
    """Write bytes at a position in a file; raise if the disk is full.

    With `scratch`, memory as long as they are, each part is read again while it is in the CPU's
    cache. Returns the CRC-32 of what was read.
    """
    done = found = 0
    with path_errors(path, "written"):
        while done < len(data):
            count = os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)
            if scratch is not None:
                back = scratch[:count]
                _read_back(fd, back, offset + done, path)
                found = crc32(back, found)
            done += count
    return found


def _read_back(fd: int, room: memoryview, offset: int, path: Path) -> None:
    """Fill memory from a position in a file that was written."""
    # Called so often that a context manager would cost time.
    try:
        missing = read_fully(fd, room, offset)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read again: {reason(error)}") from None
    if missing:
        raise CheckpointError(f"{path}: was cut short while it was written; nothing was kept")


def _is_list(name: str) -> bool:
    """Return whether a file says what the others are: without it, none counts."""
    return name.endswith((".json", ".metadata"))


class StoreOutput:
    """An output in a store, all of which has been read again before it counts.

    A file of a new name is uploaded under it. One whose name is taken is uploaded beside the old
    one, and in the end the store copies it over that in one step.
    """

    def __init__(
        self,
        job: Execution,
        path: RemotePath,
        token: str,
        there: frozenset[str],
        old: frozenset[str],
    ) -> None:
        self._job, self._path, self._token = job, path, token
        self._there, self._old = there, old
        self._made: list[RemotePath] = []
        """What was uploaded so far; removed on failure."""

    def _final(self, name: str) -> RemotePath:
        return self._path / name if self._job.target.directory else self._path

    def _place(self, name: str, *, beside: bool = False) -> RemotePath:
        """Return the name to upload a file under."""
        final = self._final(name)
        if not beside and name not in self._there:
            return final
        return final.with_name(f".{final.name}.{self._token}{_TEMPORARY_SUFFIX}")

    def copy(self, task: Task, files: OpenFiles, buffers: Buffers) -> None:
        """Do a task of this process."""
        job, file, crcs = self._job, self._job.target.files[task.file], self._job.crcs[task.file]
        place, parts, at = self._place(file.name), list[_FilePart](), 0
        raws = iter(file.raw)
        raw = next(raws, None)
        with upload(place, file.num_bytes, overwrite=job.options.overwrite) as write:

            def put(raw: RawBytes) -> None:
                nonlocal at
                write(bytes(raw.offset - at) + raw.data)
                at = raw.offset + len(raw.data)
                parts.append(_raw_part(raw))

            def put_before(offset: int) -> None:
                nonlocal raw
                while raw is not None and raw.offset < offset:
                    put(raw)
                    raw = next(raws, None)

            for tensor, copy in task.copies:
                put_before(copy.offset)
                write(bytes(copy.offset - at))
                for _, data, _ in job.blocks(tensor, copy, files, buffers):
                    write(data)
                at = copy.offset + copy.num_bytes
                parts.append(_extent_part(file.extents[copy.extent], crcs[copy.extent]))
                if file.trailer is not None:
                    for late in file.trailer(crcs[: copy.extent + 1], copy.extent):
                        put(late)
            put_before(file.num_bytes)
            assert at == file.num_bytes, "parts are as long as planned"
        self._made.append(place)
        job.advance(file.other_bytes)
        self._check(place, (part for part in parts if job.reread or part.name == "a header"))
        job.findings.files[file.name] = _digest(parts) if job.digested else 0

    def _check(self, place: RemotePath, parts: Iterable[_FilePart]) -> None:
        with SourceFile(place) as file:
            _check_again(file.read_into, parts, self._path)

    def finish(self) -> Written:
        """Complete the output, and move all files to where they belong.

        What killed runs have left is removed too.
        """
        job = self._job
        crcs = job.findings.files
        written = [(file.name, file.num_bytes, crcs[file.name]) for file in job.target.files]
        names = [file.name for file in job.target.files]
        moved = [name for name in names if name in self._there]
        lists: list[str] = []

        def put(name: str, fill: Callable[[Write], object]) -> None:
            place = self._place(name, beside=bool(moved))
            with upload(place, 0, overwrite=job.options.overwrite) as write:
                size, crc = _in_blocks(fill, lambda block, _: write(block))
            self._made.append(place)
            self._check(place, [_FilePart(0, size, crc, name)])
            written.append((name, size, crc))
            lists.append(name)

        job.source.check_unchanged()
        _write_lists(job, put)
        new = {*names, *lists}
        left = {name for name in self._there if name.endswith(_TEMPORARY_SUFFIX)}
        old = self._old & self._there | left
        if job.target.directory and moved:
            # Old and new ones side by side could be taken for one checkpoint.
            self._remove(n for n in self._there if n in new or (n in old and _is_list(n)))
            self._made.extend(map(self._final, moved))
        moved += [name for name in lists if moved or name in self._there]
        for name in moved:
            self._place(name, beside=True).replace(self._final(name))
        if job.target.directory:
            self._remove(old - new)
        return written

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, first those that say what the others are."""
        for name in sorted(names, key=lambda name: (not _is_list(name), name)):
            self._final(name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was uploaded, as far as the store lets us."""
        for file in self._made:
            with suppress(CheckpointError):
                file.unlink(missing_ok=True)


@contextmanager
def in_store(job: Execution, workers: Workers, destination: Destination) -> Iterator[StoreOutput]:
    """Begin an output in a store; nothing of what was uploaded stays if the run fails."""
    path = destination.path
    assert isinstance(path, RemotePath), "others are on a disk"
    there: Sequence[str] = []
    if job.member.rank == 0 and job.options.overwrite:
        if job.target.directory:
            with suppress(FileNotFoundError):
                there = sorted(path.listing())
        elif path.is_file():
            there = [path.name]
    names = frozenset(workers.broadcast("there", there))
    output = StoreOutput(job, path, workers.token, names, destination.replaced)
    try:
        yield output
    except BaseException:
        # Unless a process says that it has failed, the first one may have ended well.
        with suppress(CheckpointError):
            if job.member.rank == 0 or workers.has_failed():
                output.discard()
        raise

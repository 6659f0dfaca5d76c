"""Files of an output, on a disk or in a store: filled with copies, completed, and read again.

A file on a disk is made with its size, and written at any position. One in a store is written from
start to end; it appears when it is complete, and a file that it replaces stays until then.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from isal.isal_zlib import crc32_combine

from shardspec.checkpoint.commit import (
    FILE,
    NEW_FILE,
    Destination,
    joined_output,
    opened,
    reserve,
    staged_output,
)
from shardspec.checkpoint.executor import Execution, Task
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, crc32, crc_text
from shardspec.checkpoint.source_files import KeptOpen, OpenFiles, SourceFile, read_fully
from shardspec.checkpoint.store import RemotePath, path_errors, reason, upload
from shardspec.checkpoint.targets import Extent, OutputFile, RawBytes, Write
from shardspec.errors import CheckpointError

Written: TypeAlias = list[tuple[str, int, int]]
"""Name, bytes and CRC-32 of files."""

_MAX_OPEN: Final = 128
_TEMPORARY_SUFFIX: Final = ".shardspec-tmp"
"""How the names of files end that were not moved yet; a killed run leaves them."""
_HEADER: Final = "a header"
_WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than that: small ones are more work, and large ones can be slow to get."""


class _FilePart(NamedTuple):
    """A part of a file, and what errors call it."""

    offset: int
    num_bytes: int
    crc32: int
    name: str


def _write_in_order(
    file: OutputFile,
    crcs: Sequence[int],
    write: Callable[[int, bytes], object],
    copy: Callable[[int], object],
) -> Iterator[_FilePart]:
    """Write a file but for its extents, which are to be copied by their index; yield its parts."""
    pieces: Iterator[tuple[int, RawBytes | int]] = heapq.merge(
        ((raw.offset, raw) for raw in file.raw),
        ((extent.offset, number) for number, extent in enumerate(file.extents)),
        ((raw.offset, raw) for raw in (file.trailer(crcs) if file.trailer else ())),
        key=itemgetter(0),
    )
    for offset, piece in pieces:
        if isinstance(piece, RawBytes):
            data = piece.made()
            write(offset, data)
            yield _FilePart(offset, len(data), crc32(data), _HEADER)
        else:
            copy(piece)
            extent = file.extents[piece]
            yield _FilePart(offset, extent.num_bytes, crcs[piece], _name(extent))


def _name(extent: Extent) -> str:
    return f"tensor {extent.tensor.name!r}"


def _digest(parts: Iterable[_FilePart], check: list[_FilePart], *, extents: bool) -> int:
    """Return the CRC-32 of a file, with zeros between its parts; list those to be read again."""
    value = at = 0
    for part in parts:
        value = crc32(bytes(part.offset - at), value)
        value = int(crc32_combine(value, part.crc32, part.num_bytes))
        at = part.offset + part.num_bytes
        if extents or part.name == _HEADER:
            check.append(part)
    return value


def _check_again(
    read_into: Callable[[memoryview, int], None], parts: Iterable[_FilePart], path: Path
) -> None:
    """Read parts of a file again and compare them."""
    room = memoryview(bytearray(BLOCK_BYTES))
    for offset, num_bytes, crc, name in parts:
        value = 0
        for at in range(0, num_bytes, BLOCK_BYTES):
            block = room[: min(BLOCK_BYTES, num_bytes - at)]
            read_into(block, offset + at)
            value = crc32(block, value)
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


def _write_list(name: str, fill: Callable[[Write], object], write: Write) -> _FilePart:
    """Write a file that lists the others piece by piece."""
    num_bytes = crc = 0

    def append(piece: bytes) -> None:
        nonlocal num_bytes, crc
        write(piece)
        num_bytes, crc = num_bytes + len(piece), crc32(piece, crc)

    fill(append)
    return _FilePart(0, num_bytes, crc, name)


class Staged(NamedTuple):
    """A staged file, or a directory of files, opened."""

    fd: int
    path: Path  # its final name, for errors
    directory: bool

    def create(self, name: str, num_bytes: int) -> None:
        """Make a file of a size: a full disk is reported before anything is written."""
        more = f" ({num_bytes} bytes are needed); make room or write elsewhere"
        with path_errors(self.path, "written", more):
            fd = self._open(name, NEW_FILE)
            try:
                reserve(fd, num_bytes)
            finally:
                os.close(fd)

    def open(self, name: str) -> int:
        """Open a file that was made; return its descriptor."""
        with path_errors(self.path, "written"):
            return self._open(name, FILE)

    def _open(self, name: str, flags: int) -> int:
        """Open a file by its relative name, following no links; make those above a new one."""
        if not self.directory:
            return os.dup(self.fd)
        *above, last = name.split("/")
        if not {"", ".", ".."}.isdisjoint((*above, last)):
            raise CheckpointError(f"{name!r} does not name a file in a directory; choose another")
        with ExitStack() as held:
            fd = self.fd
            for part in above:
                if flags & os.O_CREAT:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=fd)
                fd = held.enter_context(opened(part, fd))
            return os.open(last, flags, 0o600, dir_fd=fd)


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
            for file, number in task.extents:
                fd = outputs.get(file)
                for offset, data, crc in job.blocks(file, number, files, buffers):
                    found = write_all(fd, data, offset, path, scratch)
                    if job.reread and found != crc:
                        name = _name(job.target.files[file].extents[number])
                        raise _different(path, name, found, crc)

    @contextmanager
    def _completing(self, name: str) -> Iterator[tuple[int, list[_FilePart]]]:
        """Open a file; in the end flush it, and check the parts that were listed."""
        path, check = self._staged.path, list[_FilePart]()
        fd = self._staged.open(name)
        try:
            yield fd, check
            with path_errors(path, "written"):
                os.fsync(fd)
            _check_again(lambda room, at: _read_back(fd, room, at, path), check, path)
        finally:
            os.close(fd)

    def finish(self) -> Written:
        """Complete the files, write those that list the others, and return all."""
        job, staged = self._job, self._staged
        written: Written = []
        for file, crcs in zip(job.target.files, job.crcs, strict=True):
            with self._completing(file.name) as (fd, check):

                def write(at: int, data: bytes, fd: int = fd) -> None:
                    write_all(fd, memoryview(data), at, staged.path)

                parts = _write_in_order(file, crcs, write, lambda _: None)
                digest = _digest(parts, check, extents=False)
            written.append((file.name, file.num_bytes, digest if job.digested else 0))
            job.advance(file.other_bytes)

        def put(name: str, fill: Callable[[Write], object]) -> None:
            staged.create(name, 0)
            with self._completing(name) as (fd, check), path_errors(staged.path, "written"):
                with open(fd, "wb", BLOCK_BYTES, closefd=False) as file:
                    part = _write_list(name, fill, file.write)
                check.append(part)
            written.append((name, part.num_bytes, part.crc32))

        job.source.check_unchanged()
        if job.target.last is not None:
            job.target.last(_crcs_by_name(job), put)
        return written


def _crcs_by_name(job: Execution) -> dict[str, Sequence[int]]:
    return {file.name: crcs for file, crcs in zip(job.target.files, job.crcs, strict=True)}


@contextmanager
def on_disk(job: Execution, destination: Destination) -> Iterator[DiskOutput]:
    """Begin an output on a disk: files are staged, and opened by the other processes."""
    path, directory, workers = destination.path, job.target.directory, job.workers
    if job.member.rank:
        with joined_output(Path(workers.broadcast("place")), path, directory=directory) as fd:
            yield DiskOutput(job, Staged(fd, path, directory))
        return
    overwrite = job.options.overwrite
    with staged_output(destination, directory=directory, overwrite=overwrite) as (fd, place):
        staged = Staged(fd, path, directory)
        for file in job.target.files:
            staged.create(file.name, file.num_bytes)
        workers.broadcast("place", str(place))
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
        self, job: Execution, path: RemotePath, there: frozenset[str], old: frozenset[str]
    ) -> None:
        self._job, self._path, self._there, self._old = job, path, there, old
        self._made: list[RemotePath] = []
        """What was uploaded so far; removed on failure."""

    def _final(self, name: str) -> RemotePath:
        return self._path / name if self._job.target.directory else self._path

    def _place(self, name: str, *, beside: bool = False) -> RemotePath:
        """Return the name to upload a file under."""
        final = self._final(name)
        if not beside and name not in self._there:
            return final
        return final.with_name(f".{final.name}.{self._job.workers.token}{_TEMPORARY_SUFFIX}")

    @contextmanager
    def _uploading(
        self, place: RemotePath, num_bytes: int
    ) -> Iterator[tuple[Callable[[bytes | memoryview], None], list[_FilePart]]]:
        """Upload a file, and check the parts that were listed."""
        check: list[_FilePart] = []
        with upload(place, num_bytes, overwrite=self._job.options.overwrite) as write:
            yield write, check
        self._made.append(place)
        with SourceFile(place) as file:
            _check_again(file.read_into, check, self._path)

    def copy(self, task: Task, files: OpenFiles, buffers: Buffers) -> None:
        """Do a task of this process."""
        job, file, crcs = self._job, self._job.target.files[task.file], self._job.crcs[task.file]
        at = 0
        with self._uploading(self._place(file.name), file.num_bytes) as (append, check):

            def write(offset: int, data: bytes | memoryview) -> None:
                nonlocal at
                append(bytes(offset - at))
                append(data)
                at = offset + len(data)

            def copy(number: int) -> None:
                for offset, data, _ in job.blocks(task.file, number, files, buffers):
                    write(offset, data)

            digest = _digest(_write_in_order(file, crcs, write, copy), check, extents=job.reread)
            assert at == file.num_bytes, "parts are as long as planned"
            job.advance(file.other_bytes)
        job.file_crcs[file.name] = digest if job.digested else 0

    def finish(self) -> Written:
        """Complete the output, and move all files to where they belong.

        What killed runs have left is removed too.
        """
        job = self._job
        names = [file.name for file in job.target.files]
        written = [
            (file.name, file.num_bytes, job.file_crcs[file.name]) for file in job.target.files
        ]
        moved = [name for name in names if name in self._there]
        lists: list[str] = []

        def put(name: str, fill: Callable[[Write], object]) -> None:
            with self._uploading(self._place(name, beside=bool(moved)), 0) as (append, check):
                part = _write_list(name, fill, append)
                check.append(part)
            written.append((name, part.num_bytes, part.crc32))
            lists.append(name)

        job.source.check_unchanged()
        if job.target.last is not None:
            job.target.last(_crcs_by_name(job), put)
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
def in_store(job: Execution, destination: Destination) -> Iterator[StoreOutput]:
    """Begin an output in a store; nothing of what was uploaded stays if the run fails."""
    path, workers = destination.path, job.workers
    assert isinstance(path, RemotePath), "others are on a disk"
    there: Sequence[str] = []
    if job.member.rank == 0 and job.options.overwrite:
        if job.target.directory:
            with suppress(FileNotFoundError):
                there = sorted(path.listing())
        elif path.is_file():
            there = [path.name]
    names = frozenset(workers.broadcast("there", there))
    output = StoreOutput(job, path, names, destination.replaced)
    try:
        yield output
    except BaseException:
        # Unless a process says that it has failed, the first one may have ended well.
        with suppress(CheckpointError):
            if job.member.rank == 0 or workers.has_failed():
                output.discard()
        raise

"""Files of an output, on a disk or in a store: made, filled with copies, and read again.

On a disk each is made with its size and written at any place. A store takes a file from its start
to its end; it appears when it is complete, and one that it replaces stays until then.
"""

import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from isal.isal_zlib import crc32_combine

from shardspec.checkpoint.digests import crc32, crc_text
from shardspec.checkpoint.directories import open_below, reserve
from shardspec.checkpoint.executor import (
    CopiedTensor,
    Copy,
    Execution,
    plan_copies,
    plan_files,
    run_in_threads,
    tensor_text,
    wanted_stretches,
)
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers
from shardspec.checkpoint.source_files import (
    AHEAD_BYTES,
    KeptOpen,
    OpenFiles,
    SourceFile,
    read_fully,
)
from shardspec.checkpoint.store import RemotePath, reason, system_errors, upload
from shardspec.checkpoint.targets import OutputFile, Put, RawBytes, Target, Write
from shardspec.errors import CheckpointError

Written: TypeAlias = list[tuple[str, int, int]]
"""Name, bytes and CRC-32 of files."""

_OPEN_OUTPUTS: Final = 128
_WRITE_BYTES: Final = 128 << 10
"""Bytes written to a disk by one call, as `cat` does. Linux makes the pages of its cache no larger
than what one call brings: small ones are more work, and large ones can be slow to come by."""
_BESIDE_SUFFIX: Final = ".shardspec-tmp"
"""How names end that were not moved yet; a killed run leaves them."""


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
            flags = os.O_CREAT | os.O_EXCL if self.directory else 0
            with _closing(self._open(name, flags, make=True)) as fd:
                reserve(fd, num_bytes)

    def open(self, name: str) -> int:
        """Open a file that was made; return its descriptor."""
        with system_errors(self.path, "written"):
            return self._open(name)

    def _open(self, name: str, flags: int = 0, *, make: bool = False) -> int:
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

    def finish(self, job: Execution) -> Written:
        """Write what is no tensor's, and flush the files."""
        written = []
        for file, crcs in zip(job.target.files, job.crcs, strict=True):
            trailer = () if file.trailer is None else file.trailer(crcs)
            with _closing(self.open(file.name)) as fd:
                # There can be very many, made each time that they are asked for.
                for one in chain(file.raw, trailer):
                    write_all(fd, memoryview(one.data), one.offset, self.path)
                self._flush(fd, _raw_parts(file, trailer))
            digest = _digest_of_file(file, trailer, crcs) if job.digested else 0
            written.append((file.name, file.num_bytes, digest))
            job.advance(file.other_bytes)
        return written

    def publish(self, _: Target, write_last: Callable[[Put], None]) -> Written:
        """Have the files written that list the others, and return these."""
        written: Written = []

        def put(name: str, fill: Callable[[Write], object]) -> None:
            self.create(name, 0)
            with _closing(self.open(name)) as fd:
                size, crc = _in_blocks(fill, lambda block, at: write_all(fd, block, at, self.path))
                self._flush(fd, [(0, size, crc, name)])
            written.append((name, size, crc))

        write_last(put)
        return written

    def _flush(self, fd: int, parts: "Iterable[_FilePart]") -> None:
        with system_errors(self.path, "written"):
            os.fsync(fd)
        _check_again(lambda room, at: _read_back(fd, room, at, self.path), parts, self.path)


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


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
                back = scratch[:count]
                _read_back(fd, back, offset + done, path)
                found = crc32(back, found)
            done += count
    return found


def _read_back(fd: int, room: memoryview, offset: int, path: Path) -> None:
    """Fill memory from a place in a file that was written."""
    # Called so often that a context manager would show.
    try:
        missing = read_fully(fd, room, offset)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read again: {reason(error)}") from None
    if missing:
        raise CheckpointError(f"{path}: was cut short while it was written; nothing was kept")


_FilePart: TypeAlias = tuple[int, int, int, str]
"""Position, bytes, CRC-32 and name of a part of a file."""


def _raw_parts(file: OutputFile, trailer: Sequence[RawBytes]) -> Iterator[_FilePart]:
    """Yield what of a file is no tensor's."""
    for one in chain(file.raw, trailer):
        yield one.offset, len(one.data), crc32(one.data), "a header"


def _check_again(
    read_into: Callable[[memoryview, int], None], parts: Iterable[_FilePart], path: Path
) -> None:
    """Compare parts of a file with what is there."""
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
    """Write in blocks, given with their positions, what comes in pieces; return size and CRC."""
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


def _digest_of_file(file: OutputFile, trailer: Sequence[RawBytes], crcs: Sequence[int]) -> int:
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


def _is_list(name: str) -> bool:
    """Return whether a file says what the others are: without it, none counts."""
    return name.endswith((".json", ".metadata"))


@dataclass(frozen=True, slots=True)
class RemoteStaging:
    """Where the files of an output go in a store, until all of them have been read again.

    A file of a new name is uploaded under it. One whose name is taken is uploaded beside the old
    one, and then copied over it by the store itself, in one step.
    """

    path: RemotePath
    directory: bool
    overwrite: bool
    token: str
    """A word of this run, for names that nobody else has."""
    there: frozenset[str]
    """Names of all files that are there."""
    replaced: frozenset[str] = frozenset()
    """Names of files that go; what has the name of a new file is replaced too."""
    made: list[RemotePath] = field(default_factory=list)
    """What was uploaded so far; removed on failure."""

    def _final(self, name: str) -> RemotePath:
        return self.path / name if self.directory else self.path

    def place(self, name: str, *, beside: bool = False) -> RemotePath:
        """Return the name to upload a file under; `beside` keeps it from counting at once."""
        final = self._final(name)
        if not beside and name not in self.there:
            return final
        return final.with_name(f".{final.name}.{self.token}{_BESIDE_SUFFIX}")

    def finish(self, job: Execution) -> Written:
        """Return name, bytes and CRC-32 of the files that all processes have uploaded."""
        crcs = job.findings.files
        return [(file.name, file.num_bytes, crcs[file.name]) for file in job.target.files]

    def publish(self, target: Target, write_last: Callable[[Put], None]) -> Written:
        """Have the files written that list the others, and move all to where they belong.

        What killed runs have left is removed too. Returns name, bytes and CRC-32 of the lists.
        """
        files = [file.name for file in target.files]
        moved = [name for name in files if name in self.there]
        last: Written = []

        def put(name: str, fill: Callable[[Write], object]) -> None:
            place = self.place(name, beside=bool(moved))
            with upload(place, 0, overwrite=self.overwrite) as write:
                size, crc = _in_blocks(fill, lambda block, _: write(block))
            self.made.append(place)
            _check_uploaded(place, [(0, size, crc, name)], self.path)
            last.append((name, size, crc))

        write_last(put)
        lists = [name for name, _, _ in last]
        new = {*files, *lists}
        left = {name for name in self.there if name.endswith(_BESIDE_SUFFIX)}
        old = self.replaced & self.there | left
        if self.directory and moved:
            # Old and new ones side by side could be taken for one checkpoint.
            self._remove(n for n in self.there if n in new or (n in old and _is_list(n)))
            self.made.extend(map(self._final, moved))
        for name in moved:
            self.place(name).replace(self._final(name))
        for name in lists:
            if moved or name in self.there:
                self.place(name, beside=True).replace(self._final(name))
        if self.directory:
            self._remove(old - new)
        return last

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, first those that say what the others are."""
        for name in sorted(names, key=lambda name: (not _is_list(name), name)):
            self._final(name).unlink(missing_ok=True)

    def discard(self, names: Iterable[str] = ()) -> None:
        """Remove what was uploaded, here and under these names, as far as the store lets us."""
        for file in [*self.made, *map(self.place, names)]:
            with suppress(CheckpointError):
                file.unlink(missing_ok=True)

    def fill(self, job: Execution) -> None:
        """Upload the files of this process and read them again; note their CRC-32."""
        mine = plan_files(job.target, job.member.rank, job.member.size)
        counts = _extents_by_tensor(job.target, mine)
        every = _extents_by_tensor(job.target, range(len(job.target.files)))
        tensors = {
            name: CopiedTensor(name, count, complete=count == every[name])
            for name, count in counts.items()
        }
        threads = max(1, min(job.options.threads, len(mine)))

        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                crc = self._upload(job, number, tensors, AHEAD_BYTES // threads)
                job.put_file(job.target.files[number].name, crc)

        run_in_threads(work, mine, threads, job.failed)

    def _upload(
        self, job: Execution, number: int, tensors: Mapping[str, CopiedTensor], ahead: int
    ) -> int:
        """Write one file from its start to its end, and return its CRC-32."""
        file = job.target.files[number]
        place, crcs = self.place(file.name), job.crcs[number]
        copies = [
            Copy(number, n, extent.box, extent.offset, extent.num_bytes)
            for n, extent in enumerate(file.extents)
        ]
        parts: list[RawBytes | Copy] = sorted([*file.raw, *copies], key=lambda part: part.offset)
        names = [extent.tensor.source for extent in file.extents]
        trailer: list[RawBytes] = []
        buffers = Buffers()
        at = 0
        with (
            upload(place, file.num_bytes, overwrite=self.overwrite) as write,
            OpenFiles() as files,
        ):
            wanted = ((names[copy.extent], copy) for copy in copies)
            files.will_read(job.source.directory, wanted_stretches(job, wanted), ahead)
            for part in parts:
                write(bytes(part.offset - at))
                if isinstance(part, RawBytes):
                    write(part.data)
                    at = part.offset + len(part.data)
                    continue
                for _, data, _ in tensors[names[part.extent]].filled(job, part, files, buffers):
                    write(data)
                at = part.offset + part.num_bytes
                follows = file.trailer and file.trailer(crcs[: part.extent + 1], part.extent)
                for raw in follows or ():
                    write(bytes(raw.offset - at) + raw.data)
                    at = raw.offset + len(raw.data)
                    trailer.append(raw)
            assert at == file.num_bytes, "parts are as long as planned"
        self.made.append(place)
        job.advance(file.other_bytes)
        checked = list(_raw_parts(file, trailer))
        if job.reread:
            checked += [
                (extent.offset, extent.num_bytes, crc, tensor_text(extent))
                for extent, crc in zip(file.extents, crcs, strict=True)
            ]
        _check_uploaded(place, checked, job.path)
        return _digest_of_file(file, trailer, crcs) if job.digested else 0


def _extents_by_tensor(target: Target, files: Iterable[int]) -> Counter[str]:
    return Counter(
        extent.tensor.source for number in files for extent in target.files[number].extents
    )


def _check_uploaded(place: Path, parts: Sequence[_FilePart], path: Path) -> None:
    with SourceFile(place) as written:
        _check_again(written.read_into, sorted(parts), path)

"""Carrying out a copy plan: read, compare the source's digest, write, read again and compare.

Threads take copies from one list, tensor by tensor, so that a stored box is read and judged once
whatever files it goes to. A store is given each file from its start to its end instead.
"""

import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from shardspec.checkpoint.catalog import Catalog, StoredTensor, distinct
from shardspec.checkpoint.coordinate import Progress
from shardspec.checkpoint.copy_plan import (
    BLOCK_BYTES,
    Copy,
    TensorCopies,
    plan_copies,
    stretches,
)
from shardspec.checkpoint.digests import Checks, crc32, crc32_combine
from shardspec.checkpoint.output_files import Staged, different, read_back, write_all
from shardspec.checkpoint.read_boxes import Buffers, read_box
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store_ranges import FileStretch
from shardspec.checkpoint.targets import Extent, Target
from shardspec.dtypes import is_cast, item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

__all__ = [
    "Cancelled",
    "CastCounts",
    "CopiedTensor",
    "Execution",
    "Findings",
    "copy_to_disk",
    "run_in_threads",
    "tensor_text",
    "wanted_stretches",
]

_OPEN_OUTPUTS: Final = 128


class Cancelled(Exception):
    """Another thread or process has failed; this one stops where it is."""


class Findings(NamedTuple):
    """What a process has found out while it made its copies, for the one that ends the output."""

    crcs: list[tuple[int, int, int, int, int]]
    """File, extent, position, bytes and CRC-32 of every copy."""
    unjudged: list[tuple[str, int, int, int, int]]
    """Tensor, number of its box, position, bytes and CRC-32 of what was read of boxes that no
    process has read whole."""


class CastCounts:
    """Adds up the losses of a run.

    Parameters
    ----------
    strict
        Whether any loss is an error.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._lock = Lock()
        self.losses: CastLosses | None = None
        """Of all blocks that were cast so far; None if there was none."""

    def add(self, name: str, losses: "CastLosses") -> None:
        """Count what a block lost.

        Raises
        ------
        CheckpointError
            If that is not allowed.
        """
        if self._strict and losses:
            raise CheckpointError(
                f"{name}: the cast would not keep its numbers: {losses}; choose another dtype, or "
                "allow for it without --strict-cast (strict_cast=False)"
            )
        with self._lock:
            self.losses = losses if self.losses is None else self.losses + losses


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
    rank: int
    """Which of several processes this is,"""
    size: int
    """and of how many."""
    total: int = 0
    """Bytes that this process writes."""
    failed: Event = field(default_factory=Event)
    """Set when all is to stop."""
    crcs: list["array[int]"] = field(init=False)
    """Of every extent of every file, if they are taken."""
    _parts: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    _findings: Findings = field(default_factory=lambda: Findings([], []))
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

    def put_crc(self, copy: Copy, crc: int) -> None:
        """Note the CRC-32 of a copy."""
        with self._lock:
            if self.size > 1:
                self._findings.crcs.append(
                    (copy.file, copy.extent, copy.offset, copy.num_bytes, crc)
                )
            self._put(copy.file, copy.extent, copy.offset, copy.num_bytes, crc)

    def _put(self, file: int, number: int, offset: int, num_bytes: int, crc: int) -> None:
        due = self.target.files[file].extents[number].num_bytes
        if num_bytes == due:
            self.crcs[file][number] = crc
            return
        parts = self._parts.setdefault((file, number), [])
        parts.append((offset, num_bytes, crc))
        if sum(length for _, length, _ in parts) < due:
            return
        value = 0
        for _, length, part in sorted(parts):
            value = int(crc32_combine(value, part, length))
        self.crcs[file][number] = value
        del self._parts[file, number]

    def put_unjudged(self, name: str, found: Iterable[tuple[int, int, int, int]]) -> None:
        """Note what was read of boxes of a tensor that other processes read too."""
        with self._lock:
            self._findings.unjudged.extend((name, *one) for one in found)

    def findings(self) -> Findings:
        """Return what this process has found."""
        return self._findings

    def join(self, every: Sequence[Findings]) -> None:
        """Take in what all processes have found, and judge the boxes that they read in parts."""
        for rank, found in enumerate(every):
            if rank != self.rank:
                for one in found.crcs:
                    self._put(*one)
        checks: dict[str, tuple[StoredTensor, Checks]] = {}
        for name, number, start, num_bytes, crc in chain.from_iterable(f.unjudged for f in every):
            if name not in checks:
                tensor = self.source.tensor(name)
                checks[name] = tensor, Checks(tensor, distinct(tensor))
            tensor, of_tensor = checks[name]
            of_tensor.add_known(distinct(tensor)[number], start, num_bytes, crc)
        with OpenFiles() as files:
            for _, of_tensor in checks.values():
                of_tensor.finish(files)


class CopiedTensor:
    """A tensor of which copies are made: its digests are judged once all have been.

    Parameters
    ----------
    name
        Its name in the source.
    copies
        How many copies this process makes.
    complete
        Whether they are all that are made of it.
    """

    def __init__(self, name: str, copies: int, *, complete: bool) -> None:
        self._name = name
        self._left = copies
        self._complete = complete
        self._lock = Lock()
        self._stored: tuple[StoredTensor, Checks | None] | None = None

    def filled(
        self, job: Execution, copy: Copy, files: OpenFiles, buffers: Buffers
    ) -> Iterator[tuple[int, memoryview, int]]:
        """Yield what goes into a file: position, bytes, and their CRC-32 (0 if none is taken)."""
        with self._lock:
            if self._stored is None:
                tensor = job.source.tensor(self._name)
                checks = Checks(tensor, distinct(tensor)) if job.verify else None
                self._stored = tensor, checks
            tensor, checks = self._stored
        extent = job.target.files[copy.file].extents[copy.extent]
        wanted = extent.tensor.dtype
        casts = is_cast(tensor.dtype, wanted)
        size, new_size = item_bytes(tensor.dtype), item_bytes(wanted)
        for offset, data, crc in read_box(tensor, copy.box, files, buffers, checks):
            if not casts:
                known = crc32(data) if crc is None and job.digested else crc or 0
                yield copy.offset + offset, data, known
                continue
            from shardspec.checkpoint.numeric import cast

            room, losses = cast(data, tensor.dtype, wanted)
            job.cast_counts.add(tensor_text(extent), losses)
            # Numbers that were cast may take more memory than a block.
            for at in range(0, len(room), BLOCK_BYTES):
                part = room[at : at + BLOCK_BYTES]
                place = copy.offset + offset // size * new_size + at
                yield place, part, crc32(part) if job.digested else 0
        self._finish(job, files)

    def _finish(self, job: Execution, files: OpenFiles) -> None:
        """Note that a copy was made; the last one judges what is left."""
        with self._lock:
            self._left -= 1
            if self._left or self._stored is None:
                return
            (tensor, checks), self._stored = self._stored, None
        if checks is None:
            return
        if self._complete:
            checks.finish(files)
        else:
            job.put_unjudged(self._name, checks.unjudged(distinct(tensor)))


def tensor_text(extent: Extent) -> str:
    """Return how errors name the tensor of an extent."""
    return f"tensor {extent.tensor.name!r}"


def copy_to_disk(job: Execution, staged: Staged, threads: int) -> None:
    """Make the copies of this process into files that were created."""

    def tasks() -> Iterator[tuple[CopiedTensor, Copy]]:
        for source, copies, complete in plan_copies(job.target, job.rank, job.size):
            tensor = CopiedTensor(source, len(copies), complete=complete)
            for copy in copies:
                yield tensor, copy

    todo, lock = tasks(), Lock()

    def work() -> None:
        buffers = Buffers()
        with OpenFiles() as files, _Outputs(job, staged) as outputs:
            if threads == 1:
                plan = plan_copies(job.target, job.rank, job.size)
                files.will_read(job.source.directory, wanted_stretches(job, plan))
            while not job.failed.is_set():
                with lock:
                    task = next(todo, None)
                if task is None:
                    return
                tensor, copy = task
                crc = 0
                fd = outputs.file(copy.file)
                for offset, data, known in tensor.filled(job, copy, files, buffers):
                    write_all(fd, data, offset, job.path)
                    if job.reread:
                        room = buffers.scratch[: len(data)]
                        read_back(fd, room, offset, job.path)
                        if (found := crc32(room)) != known:
                            extent = job.target.files[copy.file].extents[copy.extent]
                            raise different(job.path, tensor_text(extent), found, known)
                    crc = int(crc32_combine(crc, known, len(data)))
                    job.advance(len(data))
                job.put_crc(copy, crc)

    run_in_threads([work] * threads, job.failed)


def wanted_stretches(job: Execution, plan: Iterable[TensorCopies]) -> Iterator[FileStretch]:
    """Yield what will be read to make copies, in that order."""
    for tensor in plan:
        for copy in tensor.copies:
            yield from stretches(job.source.tensor(tensor.source), copy.box)


class _Outputs:
    """The files that a thread writes into; the ones used last are open."""

    def __init__(self, job: Execution, staged: Staged) -> None:
        self._job = job
        self._staged = staged
        self._open: OrderedDict[int, int] = OrderedDict()

    def file(self, number: int) -> int:
        """Return the descriptor of a file, good until the next call."""
        if number in self._open:
            self._open.move_to_end(number)
        else:
            while len(self._open) >= _OPEN_OUTPUTS:
                os.close(self._open.popitem(last=False)[1])
            self._open[number] = self._staged.open(self._job.target.files[number].name)
        return self._open[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd in self._open.values():
            os.close(fd)


def run_in_threads(work: Sequence[Callable[[], None]], failed: Event) -> None:
    """Do pieces of work at the same time, one a thread; the first that fails stops the others."""
    if len(work) == 1:
        work[0]()
        return

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(len(work), "shardspec-copy") as pool:
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

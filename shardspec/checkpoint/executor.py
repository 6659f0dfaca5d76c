"""Carrying out a copy plan: what all threads of a run have in common, and how one copy is read.

Threads take copies from one list, tensor by tensor, so that a stored box is read and judged once
whatever files it goes to. A store is given each file from its start to its end instead.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, NamedTuple

from shardspec.checkpoint.catalog import Catalog, StoredTensor, distinct
from shardspec.checkpoint.coordinate import Member, Progress
from shardspec.checkpoint.copy_plan import BLOCK_BYTES, Copy, stretches
from shardspec.checkpoint.digests import Checks, crc32, crc32_combine
from shardspec.checkpoint.read_boxes import Buffers, read_box
from shardspec.checkpoint.source_files import FileStretch, OpenFiles
from shardspec.checkpoint.targets import Extent, Target
from shardspec.dtypes import is_cast, item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

__all__ = [
    "CopiedTensor",
    "Execution",
    "Findings",
    "WriteOptions",
    "run_in_threads",
    "tensor_text",
    "wanted_stretches",
]


class _Cancelled(Exception):
    """Another thread or process has failed; this one stops where it is."""


class WriteOptions(NamedTuple):
    """How an output is written; see `merge`."""

    threads: int
    strict_cast: bool
    overwrite: bool
    verify: bool
    reread: bool
    dry_run: bool
    sidecars: bool
    progress: Progress | None
    member: Member | None


class Findings(NamedTuple):
    """What a process has found out while it made its copies, for the one that ends the output."""

    crcs: list[tuple[int, int, int, int, int]]
    """File, extent, position, bytes and CRC-32 of every copy."""
    unjudged: list[tuple[str, int, int, int, int]]
    """Tensor, number of its box, position, bytes and CRC-32 of what was read of boxes that no
    process has read whole."""
    files: dict[str, int]
    """CRC-32 of the files that it has written from start to end."""
    losses: dict[str, int] | None = None
    """What its casts lost, as JSON has it."""


@dataclass(slots=True)
class Execution:
    """A plan that is being carried out; all threads have it in common."""

    source: Catalog
    target: Target
    path: Path
    """The final name, for errors."""
    options: WriteOptions
    progress: Progress | None
    member: Member
    """Which of several processes this is."""
    total: int = 0
    """Bytes that this process writes."""
    failed: Event = field(default_factory=Event)
    """Set when all is to stop."""
    crcs: list["array[int]"] = field(init=False)
    """Of every extent of every file, if they are taken."""
    losses: "CastLosses | None" = None
    """Of all blocks that were cast so far; None if there was none."""
    _findings: Findings = field(default_factory=lambda: Findings([], [], {}))
    _parts: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    _done: int = 0
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.crcs = [array("I", bytes(4 * len(file.extents))) for file in self.target.files]

    @property
    def digested(self) -> bool:
        """Whether the CRC-32 of what is written is taken."""
        return self.options.verify or self.target.digested

    @property
    def reread(self) -> bool:
        """Whether what was written is read again and compared."""
        return self.options.verify and self.options.reread

    def advance(self, num_bytes: int) -> None:
        """Count bytes; stop if another has failed."""
        if self.failed.is_set():
            raise _Cancelled
        with self._lock:
            self._done += num_bytes
            if self.progress is not None:
                self.progress(self._done, self.total)

    def add_losses(self, name: str, losses: "CastLosses") -> None:
        """Count what a block lost when it was cast; raise if that is not allowed."""
        if self.options.strict_cast and losses:
            raise CheckpointError(
                f"{name}: the cast would not keep its numbers: {losses}; choose another dtype, or "
                "allow for it without --strict-cast (strict_cast=False)"
            )
        with self._lock:
            self.losses = losses if self.losses is None else self.losses + losses

    def put_crc(self, copy: Copy, crc: int) -> None:
        """Note the CRC-32 of a copy."""
        found = copy.file, copy.extent, copy.offset, copy.num_bytes, crc
        with self._lock:
            if self.member.size > 1:
                self._findings.crcs.append(found)
            self._put(*found)

    def _put(self, file: int, number: int, offset: int, num_bytes: int, crc: int) -> None:
        """Put the CRC-32 of an extent together from those of its copies, once all are there."""
        parts = self._parts.setdefault((file, number), [])
        parts.append((offset, num_bytes, crc))
        due = self.target.files[file].extents[number].num_bytes
        if sum(length for _, length, _ in parts) < due:
            return
        value = 0
        for _, length, part in sorted(parts):
            value = int(crc32_combine(value, part, length))
        self.crcs[file][number] = value
        del self._parts[file, number]

    def put_file(self, name: str, crc: int) -> None:
        """Note the CRC-32 of a file that was written from its start to its end."""
        self._findings.files[name] = crc

    @property
    def findings(self) -> Findings:
        """What this process has found out so far."""
        losses = None if self.losses is None else self.losses.to_json()
        return self._findings._replace(losses=losses)

    def put_unjudged(self, name: str, found: Iterable[tuple[int, int, int, int]]) -> None:
        """Note what was read of boxes of a tensor that other processes read too."""
        with self._lock:
            self._findings.unjudged.extend((name, *one) for one in found)

    def join(self, every: Sequence[Findings]) -> None:
        """Take in what all processes have found, and judge the boxes that they read in parts."""
        for rank, found in enumerate(every):
            self._findings.files.update(found.files)
            for one in found.crcs if rank != self.member.rank else ():
                self._put(*one)
        every_losses = [found.losses for found in every if found.losses is not None]
        if every_losses:
            from shardspec.checkpoint.numeric import CastLosses

            self.losses = sum((CastLosses(**losses) for losses in every_losses), CastLosses())
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
    """A tensor of which this process makes some copies: its digests are judged after the last.

    `complete` says whether these are all that are made of it.
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
                checks = Checks(tensor, distinct(tensor)) if job.options.verify else None
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
            job.add_losses(tensor_text(extent), losses)
            # Numbers that were cast may take more memory than a block.
            for at in range(0, len(room), BLOCK_BYTES):
                part = room[at : at + BLOCK_BYTES]
                place = copy.offset + offset // size * new_size + at
                yield place, part, crc32(part) if job.digested else 0
        with self._lock:
            self._left -= 1
            if self._left:
                return
            self._stored = None
        if checks is not None and self._complete:
            checks.finish(files)
        elif checks is not None:
            job.put_unjudged(self._name, checks.unjudged(distinct(tensor)))


def tensor_text(extent: Extent) -> str:
    """Return how errors name the tensor of an extent."""
    return f"tensor {extent.tensor.name!r}"


def wanted_stretches(job: Execution, copies: Iterable[tuple[str, Copy]]) -> Iterator[FileStretch]:
    """Yield what will be read to make copies of tensors of the source, in that order."""
    for name, copy in copies:
        yield from stretches(job.source.tensor(name), copy.box)


def run_in_threads(work: Callable[[], None], threads: int, failed: Event) -> None:
    """Have several threads do a piece of work; the first that fails stops the others."""
    if threads == 1:
        work()
        return
    # Importing it takes as long as copying 10 MiB.
    from concurrent.futures import ThreadPoolExecutor, wait

    def guarded() -> None:
        try:
            work()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads, "shardspec-copy") as pool:
        futures = [pool.submit(guarded) for _ in range(threads)]
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
    cause = next((e for e in errors if not isinstance(e, _Cancelled)), next(iter(errors), None))
    if cause is not None:
        try:
            raise cause
        finally:
            # Otherwise an error and its traceback hold each other, and buffers with them.
            del cause, errors, futures

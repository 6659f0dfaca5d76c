"""Carrying out a copy plan: what all threads of a run have in common, and how one copy is read.

Threads take copies from one list, tensor by tensor, so that a stored box is read and judged once
whatever files it goes to. A store is given each file from its start to its end instead.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from isal.isal_zlib import crc32_combine

from shardspec.boxes import Box, box_size, chunks
from shardspec.checkpoint.catalog import Catalog, StoredTensor, distinct
from shardspec.checkpoint.coordinate import Member, Progress
from shardspec.checkpoint.digests import Checks, crc32
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, read_box, stretches
from shardspec.checkpoint.source_files import FileStretch, OpenFiles
from shardspec.checkpoint.targets import Extent, Target
from shardspec.dtypes import is_cast, item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses


_COPY_BYTES: Final = 64 << 20
"""Most bytes of a copy, so that threads have their shares of a tensor that is larger."""
_SHARES: Final = 8
"""Copies that a process has at least, where there is more than a block for each."""


_Task = TypeVar("_Task")


class Copy(NamedTuple):
    """Some of a box of a tensor goes to a place in a file."""

    file: int
    """Number of the file in the target."""
    extent: int
    """Number of the extent in the file."""
    box: Box
    """What of the extent's box is copied."""
    offset: int
    """Position of its first byte in the file."""
    num_bytes: int
    """Bytes in the file."""


class TensorCopies(NamedTuple):
    """The copies of one tensor that one process makes."""

    source: str
    """Name of the tensor in the source."""
    copies: list[Copy]
    complete: bool
    """Whether no other process makes copies of the tensor."""


def plan_copies(target: Target, rank: int = 0, size: int = 1) -> Iterator[TensorCopies]:
    """Yield the copies that fill a target, tensor by tensor, so that each is read once.

    Of several processes, each has as many bytes as the others, in one stretch of the whole plan:
    a copy is made by the one in whose share its middle lies.
    """

    def source(code: int) -> str:
        return target.files[code >> 32].extents[code & 0xFFFFFFFF].tensor.source

    # Numbers take a fraction of the memory that pairs do.
    places = [
        place << 32 | number
        for place, file in enumerate(target.files)
        for number in range(len(file.extents))
    ]
    order: dict[str, int] = {}
    for code in places:
        order.setdefault(source(code), len(order))
    places.sort(key=lambda code: order[source(code)])
    total = sum(extent.num_bytes for file in target.files for extent in file.extents)
    most = _COPY_BYTES
    if size > 1:
        most = min(_COPY_BYTES, max(BLOCK_BYTES, total // (_SHARES * size)))
    before = 0
    for name, codes in groupby(places, source):
        mine: list[Copy] = []
        complete = True
        for code in codes:
            for copy in _copies_of(target, code >> 32, code & 0xFFFFFFFF, most):
                if _owner(before, copy.num_bytes, total, size) == rank:
                    mine.append(copy)
                else:
                    complete = False
                before += copy.num_bytes
        if mine:
            yield TensorCopies(name, mine, complete)


def plan_files(target: Target, rank: int = 0, size: int = 1) -> list[int]:
    """Return the numbers of the files that one of several processes writes from start to end."""
    total, before, mine = sum(file.num_bytes for file in target.files), 0, []
    for number, file in enumerate(target.files):
        if _owner(before, file.num_bytes, total, size) == rank:
            mine.append(number)
        before += file.num_bytes
    return mine


def _owner(before: int, num_bytes: int, total: int, size: int) -> int:
    """Return in whose share of all bytes the middle of some lies."""
    return min(size - 1, (2 * before + num_bytes) * size // (2 * max(1, total)))


def _copies_of(target: Target, place: int, number: int, most: int) -> Iterator[Copy]:
    """Yield the copies that fill an extent, of at most so many bytes."""
    extent = target.files[place].extents[number]
    item, offset = item_bytes(extent.tensor.dtype), extent.offset
    boxes = chunks(extent.box, most // item) if extent.num_bytes > most else (extent.box,)
    for box in boxes:
        num_bytes = box_size(box) * item
        yield Copy(place, number, box, offset, num_bytes)
        offset += num_bytes


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
        """Yield what goes into a file: position, bytes, and their CRC-32 (0 if none is taken).

        Each counts as written once the next one is asked for.
        """
        with self._lock:
            if self._stored is None:
                tensor = job.source.tensor(self._name)
                checks = Checks(tensor, distinct(tensor)) if job.options.verify else None
                self._stored = tensor, checks
            tensor, checks = self._stored
        extent = job.target.files[copy.file].extents[copy.extent]
        casts = is_cast(tensor.dtype, extent.tensor.dtype)
        at, crc = copy.offset, 0
        for _, block, known in read_box(tensor, copy.box, files, buffers, checks):
            data = _cast(job, tensor, extent, block) if casts else block
            # Numbers that were cast may take more memory than a block.
            for part in (data[n : n + BLOCK_BYTES] for n in range(0, len(data), BLOCK_BYTES)):
                of_part = 0
                if job.digested:
                    of_part = crc32(part) if known is None or data is not block else known
                yield at, part, of_part
                crc = int(crc32_combine(crc, of_part, len(part)))
                at += len(part)
                job.advance(len(part))
        job.put_crc(copy, crc)
        with self._lock:
            self._left -= 1
            if self._left:
                return
            self._stored = None
        if checks is not None and self._complete:
            checks.finish(files)
        elif checks is not None:
            job.put_unjudged(self._name, checks.unjudged(distinct(tensor)))


def _cast(job: Execution, tensor: StoredTensor, extent: Extent, block: memoryview) -> memoryview:
    """Return numbers of a tensor in the dtype of an extent."""
    from shardspec.checkpoint.numeric import cast

    room, losses = cast(block, tensor.dtype, extent.tensor.dtype)
    job.add_losses(tensor_text(extent), losses)
    return room


def tensor_text(extent: Extent) -> str:
    """Return how errors name the tensor of an extent."""
    return f"tensor {extent.tensor.name!r}"


def wanted_stretches(job: Execution, copies: Iterable[tuple[str, Copy]]) -> Iterator[FileStretch]:
    """Yield what will be read to make copies of tensors of the source, in that order."""
    for name, copy in copies:
        yield from stretches(job.source.tensor(name), copy.box)


def run_in_threads(
    work: Callable[[Iterator[_Task]], None], tasks: Iterable[_Task], threads: int, failed: Event
) -> None:
    """Have several threads do a piece of work, each for the tasks that it takes of all.

    The first that fails stops the others.
    """
    todo, lock = iter(tasks), Lock()

    def taken() -> Iterator[_Task]:
        while not failed.is_set():
            with lock:
                some = list(islice(todo, 1))
            if not some:
                return
            yield some[0]

    if threads == 1:
        work(taken())
        return
    # Importing it takes as long as copying 10 MiB.
    from concurrent.futures import ThreadPoolExecutor, wait

    def guarded() -> None:
        try:
            work(taken())
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

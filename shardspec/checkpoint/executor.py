"""Executing a copy plan: boxes are read, checked, cast, and handed to the output in blocks.

For a disk, threads take the copies tensor by tensor, so that a stored box is read and checked once
whatever files it goes to. For a store, they take whole files, each written from start to end.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from threading import Event, Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from isal.isal_zlib import crc32_combine

from shardspec.boxes import Box, box_size, chunks
from shardspec.checkpoint.catalog import Catalog, StoredTensor, distinct
from shardspec.checkpoint.coordinate import Member, Progress, Workers
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, Checks, crc32, read_box, stretches
from shardspec.checkpoint.source_files import AHEAD_BYTES, OpenFiles, prefetch_map
from shardspec.checkpoint.targets import Extent, Target
from shardspec.dtypes import is_cast, item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

_COPY_BYTES: Final = 64 << 20
"""Size limit of a copy, so that threads share the work of a larger tensor."""
_MIN_COPIES: Final = 8
"""Of several processes, where copies are longer than a block."""
_TASKS_AHEAD: Final = 2
"""Per thread."""


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


class Copy(NamedTuple):
    """A part of a tensor that is copied to a place in a file."""

    file: int  # index in the target
    extent: int  # index in the file
    box: Box  # which part of the extent's box
    offset: int  # position of its first byte in the file
    num_bytes: int  # in the file


class TensorCopies(NamedTuple):
    """The copies of one tensor that one process makes; all of them if `complete`."""

    source: str
    copies: list[Copy]
    complete: bool


def plan_copies(
    target: Target, rank: int = 0, size: int = 1, *, whole_files: bool = False
) -> Iterator[TensorCopies]:
    """Yield the copies that fill a target, tensor by tensor.

    Each of several processes gets an equal share of the bytes, which is one stretch of the plan, or
    of the files.
    """
    # Extents by tensor, as single numbers: there may be ten million.
    extents: dict[str, array[int]] = {}
    total = 0
    for place, file in enumerate(target.files):
        for number, extent in enumerate(file.extents):
            extents.setdefault(extent.tensor.source, array("q")).append(place << 32 | number)
            total += extent.num_bytes
    limit = _COPY_BYTES if size == 1 else max(BLOCK_BYTES, total // (_MIN_COPIES * size))
    limit = total if whole_files else min(_COPY_BYTES, limit)
    files = frozenset(plan_files(target, rank, size)) if whole_files else frozenset[int]()
    before = 0
    for name, codes in extents.items():
        mine: list[Copy] = []
        complete = True
        for code in codes:
            for copy in _copies_of(target, *divmod(code, 1 << 32), limit):
                owner = _owner(before, copy.num_bytes, total, size)
                if copy.file in files if whole_files else owner == rank:
                    mine.append(copy)
                else:
                    complete = False
                before += copy.num_bytes
        if mine:
            yield TensorCopies(name, mine, complete)


def _copies_of(target: Target, place: int, number: int, limit: int) -> Iterator[Copy]:
    """Yield the copies that fill an extent, each of at most so many bytes."""
    extent = target.files[place].extents[number]
    item, offset = item_bytes(extent.tensor.dtype), extent.offset
    for box in chunks(extent.box, limit // item) if extent.num_bytes > limit else (extent.box,):
        num_bytes = box_size(box) * item
        yield Copy(place, number, box, offset, num_bytes)
        offset += num_bytes


def plan_files(target: Target, rank: int, size: int) -> list[int]:
    """Return the indices of the files that one of several processes writes."""
    before, mine = 0, []
    for number, file in enumerate(target.files):
        if _owner(before, file.num_bytes, target.num_bytes, size) == rank:
            mine.append(number)
        before += file.num_bytes
    return mine


def _owner(before: int, num_bytes: int, total: int, size: int) -> int:
    """Return the process in whose share of all bytes the middle of some is."""
    return min(size - 1, (2 * before + num_bytes) * size // (2 * max(1, total)))


class _SharedTensor:
    """A tensor that several threads copy; its digests are checked after the last copy."""

    def __init__(self, name: str, copies: int, complete: bool) -> None:
        self.name, self.left, self.complete = name, copies, complete
        self.lock = Lock()
        self.stored: tuple[StoredTensor, Checks | None] | None = None


class Task(NamedTuple):
    """Copies that one thread makes, one after the other."""

    file: int  # index of their file, if files are written as a whole
    copies: Sequence[tuple[_SharedTensor, Copy]]


class Findings(NamedTuple):
    """What a process has found, for the first one; sent as JSON."""

    crcs: list[tuple[int, int, int, int, int]]
    """File, extent, position, bytes and CRC-32 of every copy."""
    unchecked: list[tuple[str, int, int, int, int]]
    """Tensor, index of its box, position, bytes and CRC-32 of what was read of boxes that no
    process has read whole."""
    files: dict[str, int]
    """CRC-32 of the files that were written from start to end."""
    losses: dict[str, int] | None = None


class Execution:
    """A plan that is being executed; all threads share it."""

    def __init__(
        self,
        source: Catalog,
        target: Target,
        options: WriteOptions,
        workers: Workers,
        *,
        whole_files: bool,
    ) -> None:
        self.source, self.target = source, target
        self.options = options
        self.member = member = workers.member
        self.digested = options.verify or target.digested
        """Whether the CRC-32 of what is written is computed."""
        self.reread = options.verify and options.reread
        """Whether what was written is read again and compared."""
        self.crcs = [array("I", bytes(4 * len(file.extents))) for file in target.files]
        """CRC-32 of every extent of every file, if they are computed."""
        self.losses: CastLosses | None = None
        self._plan = partial(plan_copies, target, member.rank, member.size, whole_files=whole_files)
        self._whole_files = whole_files
        self._files = plan_files(target, member.rank, member.size) if whole_files else []
        others = self._files if whole_files else range(0 if member.rank else len(target.files))
        self._total = sum(target.files[number].other_bytes for number in others)
        self._total += sum(copy.num_bytes for one in self._plan() for copy in one.copies)
        self._check, self._done = workers.check, 0
        self._failed = Event()
        self._findings = Findings([], [], {})
        self._parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self._lock = Lock()

    def run(self, copy: Callable[[Task, OpenFiles, Buffers], None]) -> None:
        """Do all tasks of this process, in threads; the first that fails stops the others."""
        threads = self.options.threads
        if self._whole_files:
            threads = max(1, min(threads, len(self._files)))

        spare = [Buffers() for _ in range(threads)]

        def work(task: Task) -> None:
            buffers = spare.pop()
            wanted = (
                stretch
                for tensor, copied in task.copies
                for stretch in stretches(self.source.tensor(tensor.name), copied.box)
            )
            try:
                with OpenFiles() as files:
                    files.will_read(self.source.directory, wanted, AHEAD_BYTES // threads)
                    copy(task, files, buffers)
            except _Cancelled:
                pass
            except BaseException:
                self._failed.set()
                raise
            finally:
                spare.append(buffers)

        ahead = _TASKS_AHEAD * threads if threads > 1 else 0
        with prefetch_map(self._tasks(), work, ahead, threads) as done:
            try:
                for _ in done:
                    pass
            except BaseException:
                self._failed.set()
                raise

    def _tasks(self) -> Iterator[Task]:
        by_file: dict[int, list[tuple[_SharedTensor, Copy]]] = {n: [] for n in self._files}
        batch: list[tuple[_SharedTensor, Copy]] = []
        num_bytes = 0
        for source, copies, complete in self._plan():
            tensor = _SharedTensor(source, len(copies), complete)
            for copy in copies:
                if self._whole_files:
                    by_file[copy.file].append((tensor, copy))
                    continue
                batch.append((tensor, copy))
                num_bytes += copy.num_bytes
                if num_bytes >= _COPY_BYTES // 2:
                    yield Task(0, batch)
                    batch, num_bytes = [], 0
        if batch:
            yield Task(0, batch)
        for number, of_file in by_file.items():
            yield Task(number, sorted(of_file, key=lambda one: one[1].offset))

    def blocks(
        self, tensor: _SharedTensor, copy: Copy, files: OpenFiles, buffers: Buffers
    ) -> Iterator[tuple[int, memoryview, int]]:
        """Yield what goes into a file: position, bytes, and their CRC-32 (0 if not computed).

        Each counts as written once the next one is asked for.
        """
        with tensor.lock:
            if tensor.stored is None:
                found = self.source.tensor(tensor.name)
                checks = Checks(found, distinct(found)) if self.options.verify else None
                tensor.stored = found, checks
            stored, checks = tensor.stored
        extent = self.target.files[copy.file].extents[copy.extent]
        casts = is_cast(stored.dtype, extent.tensor.dtype)
        at, crc = copy.offset, 0
        for block, known in read_box(stored, copy.box, files, buffers, checks):
            data = self._cast(block, stored.dtype, extent) if casts else block
            # After a cast, a block may be longer.
            for part in (data[n : n + BLOCK_BYTES] for n in range(0, len(data), BLOCK_BYTES)):
                of_part = 0
                if self.digested:
                    of_part = crc32(part) if known is None or casts else known
                yield at, part, of_part
                crc = int(crc32_combine(crc, of_part, len(part)))
                at += len(part)
                self.advance(len(part))
        with self._lock:
            self._put_crc(copy.file, copy.extent, copy.offset, copy.num_bytes, crc)
            if self.member.size > 1:
                self._findings.crcs.append((*copy[:2], *copy[3:], crc))
        with tensor.lock:
            tensor.left -= 1
            if tensor.left:
                return
            tensor.stored = None
        if checks is not None and tensor.complete:
            checks.finish(files)
        elif checks is not None:
            with self._lock:
                rest = checks.unchecked(distinct(stored))
                self._findings.unchecked.extend((tensor.name, *one) for one in rest)

    def advance(self, num_bytes: int) -> None:
        """Count bytes as written; stop if another thread has failed."""
        if self._failed.is_set():
            raise _Cancelled
        with self._lock:
            self._done += num_bytes
            self._check()
            if self.options.progress is not None:
                self.options.progress(self._done, self._total)

    def _cast(self, block: memoryview, dtype: str, extent: Extent) -> memoryview:
        """Cast a block; count what it lost, or raise if that is not allowed."""
        from shardspec.checkpoint.numeric import cast

        data, losses = cast(block, dtype, extent.tensor.dtype)
        if self.options.strict_cast and losses:
            raise CheckpointError(
                f"tensor {extent.tensor.name!r}: the cast would not keep its numbers: {losses}; "
                "choose another dtype, or allow for it without --strict-cast (strict_cast=False)"
            )
        with self._lock:
            self.losses = losses if self.losses is None else self.losses + losses
        return data

    def _put_crc(self, file: int, number: int, offset: int, num_bytes: int, crc: int) -> None:
        """Combine the CRC-32 of an extent from those of its copies, once all are there."""
        parts = self._parts.setdefault((file, number), [])
        parts.append((offset, num_bytes, crc))
        if sum(part[1] for part in parts) < self.target.files[file].extents[number].num_bytes:
            return
        value = 0
        for _, length, part in sorted(parts):
            value = int(crc32_combine(value, part, length))
        self.crcs[file][number] = value
        del self._parts[file, number]

    @property
    def findings(self) -> Findings:
        """What this process has found so far."""
        losses = None if self.losses is None else self.losses.to_json()
        return self._findings._replace(losses=losses)

    def join(self, every: Sequence[Findings]) -> None:
        """Take in what all processes have found, and check the boxes that they read in parts."""
        for rank, found in enumerate(every):
            self._findings.files.update(found.files)
            for one in found.crcs if rank != self.member.rank else ():
                self._put_crc(*one)
        if every_losses := [found.losses for found in every if found.losses is not None]:
            from shardspec.checkpoint.numeric import CastLosses

            self.losses = sum((CastLosses(**losses) for losses in every_losses), CastLosses())
        checks: dict[str, tuple[StoredTensor, Checks]] = {}
        for name, number, start, num_bytes, crc in chain.from_iterable(f.unchecked for f in every):
            if name not in checks:
                tensor = self.source.tensor(name)
                checks[name] = tensor, Checks(tensor, distinct(tensor))
            tensor, of_tensor = checks[name]
            of_tensor.add_known(distinct(tensor)[number], start, num_bytes, crc)
        with OpenFiles() as files:
            for _, of_tensor in checks.values():
                of_tensor.finish(files)


class _Cancelled(Exception):
    """Another thread has failed, so this one stops."""

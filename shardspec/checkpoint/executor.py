"""Executing a copy plan: threads read boxes, check and cast them, and hand them to the output.

To a disk a thread writes all extents of a tensor, so that a stored box is read and checked once
whatever files it goes to. To a store it writes a whole file, from start to end.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from isal.isal_zlib import crc32_combine

from shardspec.checkpoint.catalog import Catalog, StoredTensor, distinct
from shardspec.checkpoint.coordinate import Member, Progress, Workers
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, Checks, crc32, read_box, stretches
from shardspec.checkpoint.source_files import AHEAD_BYTES, OpenFiles, prefetch_map
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.targets import Extent, Target
from shardspec.dtypes import is_cast
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

_TASK_BYTES: Final = 32 << 20
"""Least bytes of the tensors that a thread takes at once."""
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


class Task(NamedTuple):
    """What one thread copies, one after the other."""

    file: int  # index of the file that is written whole; -1 if none is
    extents: list[tuple[int, int]]
    """Index of the file in the target, and of the extent in the file."""


def plan_tasks(
    target: Target, rank: int = 0, size: int = 1, *, whole_files: bool = False
) -> Iterator[Task]:
    """Yield the tasks of one of several processes: files, or tensors with all their extents.

    Each process gets an equal share of all bytes, as nearly as they allow it.
    """
    total = target.num_bytes
    before = 0

    def is_mine(num_bytes: int) -> bool:
        """Whether the middle of these bytes is in the share of this process."""
        nonlocal before
        owner = min(size - 1, (2 * before + num_bytes) * size // (2 * max(1, total)))
        before += num_bytes
        return owner == rank

    if whole_files:
        for number, file in enumerate(target.files):
            if is_mine(file.num_bytes):
                yield Task(number, [(number, extent) for extent in range(len(file.extents))])
        return
    # Extents by tensor, as single numbers: there may be ten million.
    by_tensor: dict[str, array[int]] = {}
    for number, file in enumerate(target.files):
        for place, extent in enumerate(file.extents):
            by_tensor.setdefault(extent.tensor.source, array("q")).append(number << 32 | place)
    total = sum(extent.num_bytes for file in target.files for extent in file.extents)
    task, task_bytes = Task(-1, []), 0
    for codes in by_tensor.values():
        extents = [divmod(code, 1 << 32) for code in codes]
        num_bytes = sum(target.files[file].extents[place].num_bytes for file, place in extents)
        if is_mine(num_bytes):
            task.extents.extend(extents)
            task_bytes += num_bytes
        if task_bytes >= _TASK_BYTES:
            yield task
            task, task_bytes = Task(-1, []), 0
    if task.extents:
        yield task


class Findings(NamedTuple):
    """What a process has found, for the first one; sent as JSON."""

    crcs: list[tuple[int, int, int]]
    """File, extent, and its CRC-32."""
    files: dict[str, int]
    """CRC-32 of the files that were written from start to end."""
    losses: dict[str, int] | None


class Execution:
    """A plan that is being executed; all threads share it."""

    def __init__(
        self, source: Catalog, target: Target, options: WriteOptions, workers: Workers, path: Path
    ) -> None:
        self.source, self.target, self.options = source, target, options
        self.workers, self.member = workers, workers.member
        self.digested = options.verify or target.digested
        """Whether the CRC-32 of what is written is computed."""
        self.reread = options.verify and options.reread
        """Whether what was written is read again and compared."""
        self.crcs = [array("I", bytes(4 * len(file.extents))) for file in target.files]
        """CRC-32 of every extent of every file, if they are computed."""
        self.file_crcs: dict[str, int] = {}
        """Those of the files that were written from start to end."""
        self.losses: CastLosses | None = None
        whole_files = isinstance(path, RemotePath)
        rank, size = self.member.rank, self.member.size
        self._tasks = partial(plan_tasks, target, rank, size, whole_files=whole_files)
        self._left: Counter[str] = Counter()
        """How many extents of each tensor are still to be copied."""
        self._open: dict[str, tuple[StoredTensor, Checks | None]] = {}
        """Tensors of which some extents are copied."""
        self._done = self._total = tasks = 0
        for task in self._tasks():
            tasks += 1
            for extent in map(self._extent, task.extents):
                self._left[extent.tensor.source] += 1
                self._total += extent.num_bytes
            if whole_files:
                self._total += target.files[task.file].other_bytes
        if not (whole_files or rank):
            self._total += sum(file.other_bytes for file in target.files)
        self._threads = max(1, min(options.threads, tasks))
        self._failed, self._lock = Event(), Lock()

    def _extent(self, at: tuple[int, int]) -> Extent:
        return self.target.files[at[0]].extents[at[1]]

    def run(self, copy: Callable[[Task, OpenFiles, Buffers], None]) -> None:
        """Do all tasks of this process, in threads; the first that fails stops the others."""
        threads = self._threads
        spare = [Buffers() for _ in range(threads)]

        def work(task: Task) -> None:
            buffers = spare.pop()
            wanted = (
                stretch
                for extent in map(self._extent, task.extents)
                for stretch in stretches(self.source.tensor(extent.tensor.source), extent.box)
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

    def blocks(
        self, file: int, number: int, files: OpenFiles, buffers: Buffers
    ) -> Iterator[tuple[int, memoryview, int]]:
        """Yield what goes into a file: position, bytes, and their CRC-32 (0 if not computed).

        Each counts as written once the next one is asked for.
        """
        tensor, box, at = self._extent((file, number))
        if (found := self._open.get(tensor.source)) is None:
            stored = self.source.tensor(tensor.source)
            checks = Checks(stored, distinct(stored)) if self.options.verify else None
            found = self._open.setdefault(tensor.source, (stored, checks))
        stored, checks = found
        casts = is_cast(stored.dtype, tensor.dtype)
        crc = 0
        for block, known in read_box(stored, box, files, buffers, checks):
            data = self._cast(block, stored.dtype, tensor.dtype, tensor.name) if casts else block
            # After a cast, a block may be longer.
            for part in (data[n : n + BLOCK_BYTES] for n in range(0, len(data), BLOCK_BYTES)):
                of_part = 0
                if self.digested:
                    of_part = crc32(part) if known is None or casts else known
                yield at, part, of_part
                crc = int(crc32_combine(crc, of_part, len(part)))
                at += len(part)
                self.advance(len(part))
        self.crcs[file][number] = crc
        with self._lock:
            self._left[tensor.source] -= 1
            left = self._left[tensor.source]
        if not left:
            del self._open[tensor.source]
            if checks is not None:
                checks.finish(files)

    def advance(self, num_bytes: int) -> None:
        """Count bytes as written; stop if another thread has failed."""
        if self._failed.is_set():
            raise _Cancelled
        with self._lock:
            self._done += num_bytes
            self.workers.check()
            if self.options.progress is not None:
                self.options.progress(self._done, self._total)

    def _cast(self, block: memoryview, dtype: str, new: str, name: str) -> memoryview:
        """Cast a block; count what it lost, or raise if that is not allowed."""
        from shardspec.checkpoint.numeric import cast

        data, losses = cast(block, dtype, new)
        if self.options.strict_cast and losses:
            raise CheckpointError(
                f"tensor {name!r}: the cast would not keep its numbers: {losses}; choose another "
                "dtype, or allow for it without --strict-cast (strict_cast=False)"
            )
        with self._lock:
            self.losses = losses if self.losses is None else self.losses + losses
        return data

    def findings(self) -> Findings:
        """Return what this process has found."""
        crcs = [
            (file, number, self.crcs[file][number])
            for task in (self._tasks() if self.member.size > 1 else ())
            for file, number in task.extents
        ]
        losses = None if self.losses is None else self.losses.to_json()
        return Findings(crcs, self.file_crcs, losses)

    def join(self, others: Iterable[Sequence[Any]]) -> None:
        """Take in what the other processes have found."""
        for crcs, files, losses in others:
            for file, number, crc in crcs:
                self.crcs[file][number] = crc
            self.file_crcs.update(files)
            if losses is not None:
                from shardspec.checkpoint.numeric import CastLosses

                self.losses = (self.losses or CastLosses()) + CastLosses(**losses)


class _Cancelled(Exception):
    """Another thread has failed, so this one stops."""

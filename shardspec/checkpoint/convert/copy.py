"""Copies boxes: reads stored boxes, checks and casts them, and writes them to files.

Data passes through a buffer that fits the CPU's cache, so memory does not grow with the size of a
tensor, and bytes are checked on the way. For cached files this is faster than copy_file_range.

Threads share the work. On a disk, a thread writes a whole tensor, perhaps into several files, so
each stored box is read and checked once. In an object store, a thread writes one file from start to
end. The file appears when it is complete, and the one that it replaces stays until then.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import product
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size, chunks, intersect
from shardspec.checkpoint.catalog import (
    ZEROS,
    Digest,
    StoredBox,
    StoredTensor,
    box_text,
    distinct,
    row_major_strides,
    whole_box,
)
from shardspec.checkpoint.storage.checksums import (
    BLOCK_BYTES,
    Buffer,
    crc32,
    crc32_combine,
    crc_text,
)
from shardspec.checkpoint.storage.path import FileStretch, Identity, StoragePath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.comm.senders import overlaps
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardspec.checkpoint.convert.numeric import Bytes

import heapq
from array import array
from collections import Counter
from contextlib import ExitStack
from operator import itemgetter
from threading import Event
from typing import TYPE_CHECKING

from shardspec.checkpoint.catalog import Catalog, Extent, RawBytes, Target
from shardspec.checkpoint.storage.path import Staged, Staging, WriteAt
from shardspec.checkpoint.storage.reading import AHEAD_BYTES, prefetch_map
from shardspec.dtypes import is_cast
from shardspec.resharding.digests import TensorDigest
from shardspec.text import Argument

if TYPE_CHECKING:
    from shardspec.checkpoint.convert.numeric import CastLosses


_LONG_ROW: Final = 2048
"""Row size from which rows are copied one by one instead of by numpy."""
_PAGE: Final = 4096
"""Shorter gaps are read too: the system reads entire pages anyway."""
_MAX_SPANS: Final = 64
"""Maximum number of separate spans of one box; reading a few of its columns makes more."""

Progress: TypeAlias = Callable[[int, int], None]
"""Function of the bytes done so far and the total."""
_Seen: TypeAlias = Callable[[int, memoryview], int]
"""Function of the file position and the bytes of each read."""
_Key: TypeAlias = tuple[StoragePath, Digest]
_Spans: TypeAlias = dict[int, tuple[int, int]]
"""Start of each span to its end and CRC-32; adjacent spans are merged."""


def pieces(files: OpenFiles, stretch: FileStretch) -> Iterator[tuple[int, memoryview]]:
    """Yield (position, bytes) of pieces of a file range; bytes are valid until the next piece."""
    room = memoryview(bytearray(min(BLOCK_BYTES, stretch.num_bytes)))
    end = stretch.start + stretch.num_bytes
    for at in range(stretch.start, end, BLOCK_BYTES):
        data = room[: end - at]
        files.file(stretch.path).read_into(data, at)
        yield at, data


class Checks:
    """Compares the bytes read of a tensor's boxes with their digests; reads may come in any order.

    Threads may share it. A box that was read only partially, or in many separate pieces, is not
    checked until `finish`.
    """

    def __init__(self, tensor: StoredTensor, boxes: Iterable[StoredBox] | None = None) -> None:
        self._tensor = tensor
        self._lock = Lock()
        # Boxes inside one digested stretch, such as parts of a storage, are checked together.
        self._open: dict[_Key, tuple[StoredBox, _Spans]] = {}
        self._late: dict[_Key, tuple[StoredBox, _Spans]] = {}
        """Boxes read in too many pieces."""
        for stored in tensor.boxes if boxes is None else boxes:
            if stored.digest is not None:
                self._open.setdefault((stored.path, stored.digest), (stored, {}))

    def __contains__(self, stored: StoredBox) -> bool:
        return (stored.path, stored.digest) in self._open

    def add(self, stored: StoredBox, start: int, data: Buffer) -> int:
        """Count bytes that were read at `start` in the file of a box; return their CRC-32.

        Raises `CheckpointError` if they complete the box and its digest differs.
        """
        digest, length = stored.digest, memoryview(data).nbytes
        assert digest is not None, "only those with a digest are checked"
        key, end = (stored.path, digest), start + length
        crc = value = crc32(data)
        with self._lock:
            spans = self._open[key][1] if key in self._open else None
            # Gaps between the rows of one box are read as the rows of another.
            if spans is None or any(at < end and start < to for at, (to, _) in spans.items()):
                return crc
            before = next((at for at, (to, _) in spans.items() if to == start), None)
            if before is not None:
                start, value = before, crc32_combine(spans.pop(before)[1], value, length)
            if end in spans:
                at, (end, tail) = end, spans.pop(end)
                value = crc32_combine(value, tail, end - at)
            spans[start] = end, value
            if (start, end) == (digest.start, digest.start + digest.num_bytes):
                del self._open[key]
                if value != digest.crc32:
                    raise CheckpointError(
                        f"tensor {self._tensor.name!r}: rank {stored.rank}'s box "
                        f"{box_text(stored.box)} in {stored.path} has CRC-32 {crc_text(value)}, "
                        f"but {crc_text(digest.crc32)} was saved; its bytes were changed, restore "
                        "the file or save again"
                    )
            elif len(spans) > _MAX_SPANS:
                spans.clear()
                self._late[key] = self._open.pop(key)
        return crc

    def finish(self, files: OpenFiles) -> None:
        """Read the rest of the boxes that are not checked yet, and check them."""
        self._open |= self._late
        for (path, digest), (stored, spans) in list(self._open.items()):
            at, last = digest.start, digest.start + digest.num_bytes
            for start, end in (*sorted((a, b) for a, (b, _) in spans.items()), (last, last)):
                for place, data in pieces(files, FileStretch(path, at, start - at)):
                    self.add(stored, place, data)
                at = end
            if not digest.num_bytes:
                self.add(stored, at, b"")


class BlockPart(NamedTuple):
    """The part of a stored box that goes into a block of memory, and how to copy it there."""

    stored: StoredBox
    start: int  # position of its first byte in the file
    at: int  # the same in the block
    steps: tuple[tuple[int, int, int], ...]
    """(count, stride in the file, stride in the block) per dim, strides in bytes; the largest file
    stride first, a row of bytes last."""

    @property
    def span(self) -> int:
        """Bytes in the file from the first to the last byte of the part, gaps included."""
        return 1 + sum((count - 1) * step for count, step, _ in self.steps)

    @property
    def contiguous(self) -> bool:
        """True if the part is one contiguous range of the file."""
        return self.span == prod(count for count, _, _ in self.steps)

    def rows(self, lo: int, hi: int) -> "BlockPart":
        """Return rows lo to hi of the part; a single row loses the first dim."""
        (_, step, step_in), *inner = self.steps
        first = [(hi - lo, step, step_in)] if hi - lo > 1 else []
        return BlockPart(
            self.stored, self.start + lo * step, self.at + lo * step_in, (*first, *inner)
        )


def block_part(stored: StoredBox, shared: Box, block: Box, width: int) -> BlockPart:
    """Return how to copy box `shared` from a stored box to `block`; items have `width` bytes."""
    inside = row_major_strides(box_shape(block), width)
    lies = stored.strides or row_major_strides(box_shape(stored.box), width)
    start, at = stored.offset, 0
    dims = []
    for (lo, hi), (first, _), (outer, _), step, step_in in zip(
        shared, stored.box, block, lies, inside, strict=True
    ):
        start += (lo - first) * step
        at += (lo - outer) * step_in
        dims.append((hi - lo, step, step_in))
    steps = [(width, 1, 1)]
    for count, step, step_in in sorted(dims, key=lambda dim: dim[1]):
        inner, by, by_in = steps[-1]
        if (step, step_in) == (inner * by, inner * by_in):
            steps[-1] = (count * inner, by, by_in)
        elif count > 1:
            steps.append((count, step, step_in))
    return BlockPart(stored, start, at, tuple(reversed(steps)))


def cut(
    tensor: StoredTensor, target: Box, most: int = BLOCK_BYTES
) -> Iterator[tuple[int, list[BlockPart]]]:
    """Yield the blocks of a box: the bytes of each, and the stored parts that it is copied from.

    A block has at most `most` bytes, a multiple of every item size.
    """
    width = item_bytes(tensor.dtype)
    stored = [holder for holder in distinct(tensor) if intersect(holder.box, target) is not None]
    blocks = chunks(target, most // width)
    for block, met in overlaps([holder.box for holder in stored], blocks):
        parts = [block_part(stored[number], shared, block, width) for number, shared in met]
        yield box_size(block) * width, parts


def stretches(tensor: StoredTensor, target: Box) -> Iterator[FileStretch]:
    """Yield the file ranges that a box of a tensor is read from, in order, for reading ahead.

    Skips the addends of a pending reduction, and parts with gaps.
    """
    for _, parts in () if tensor.pending else cut(tensor, target):
        for part in parts:
            stored = part.stored
            if part.contiguous and stored.path != ZEROS and stored.computed is None:
                yield FileStretch(stored.path, part.start, part.span)


class Buffers:
    """Memory of one thread: a block of the tensor, and the file bytes that are copied into it."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK_BYTES))
        self.scratch = memoryview(bytearray(BLOCK_BYTES))

    @cached_property
    def sums(self) -> "NDArray[np.uint8]":
        """Memory for the sums of a block; new memory for each block would take longer than they."""
        import numpy as np

        return np.empty(4 * BLOCK_BYTES, np.uint8)


def read_box(
    tensor: StoredTensor,
    target: Box,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None = None,
    out: memoryview | None = None,
) -> Iterator[tuple[memoryview, int | None]]:
    """Read a box of a tensor in blocks; yield (row-major bytes, their CRC-32 or None).

    The stored boxes must tile the tensor (`check_tiling`). Addends are summed. A block is valid
    until the next one, unless `out` receives the bytes, which is flat and as long as the box.
    """
    at = 0
    for num_bytes, parts in cut(tensor, target, len(buffers.block)):
        room = buffers.block[:num_bytes] if out is None else out[at : at + num_bytes]

        def read(part: BlockPart, room: memoryview = room) -> int | None:
            """Read a part into `room`; return its CRC-32 if `checks` has computed it, else None."""
            stored = part.stored
            if stored.computed is not None:
                stored.computed.fill(part.start, part.steps, room, part.at)
                return None
            hook = None if checks is None or stored not in checks else partial(checks.add, stored)
            read_into = _zeros if stored.path == ZEROS else files.file(stored.path).read_into
            return _read(read_into, part, room, buffers.scratch, hook)

        crc = None
        if tensor.pending:
            _reduce(tensor, parts, room, read, buffers)
        else:
            for part in parts:
                crc = read(part)
        yield room, crc if len(parts) == 1 else None
        at += num_bytes


def read_box_into(
    tensor: StoredTensor,
    target: Box,
    out: memoryview,
    files: OpenFiles,
    buffers: Buffers,
    checks: Checks | None = None,
) -> None:
    """Read a box of a tensor into `out`: flat memory, as long as the box."""
    for _ in read_box(tensor, target, files, buffers, checks, out):
        pass


def read_whole(tensor: StoredTensor, files: OpenFiles, buffers: Buffers) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in blocks, each valid until the next; check its digests."""
    checks = Checks(tensor)
    for block, _ in read_box(tensor, whole_box(tensor.shape), files, buffers, checks):
        yield block
    checks.finish(files)


def _reduce(
    tensor: StoredTensor,
    parts: list[BlockPart],
    room: memoryview,
    read: Callable[[BlockPart], object],
    buffers: Buffers,
) -> None:
    """Call `read` for `parts`, the addends of a block in files, and sum them into `room`."""
    import numpy as np

    from shardspec.checkpoint.convert.numeric import reduce

    numbers = np.frombuffer(room, np.uint8)

    def addends() -> "Iterator[Bytes]":
        for addend in product(*(range(pending.addends) for pending in tensor.pending)):
            for part in parts:
                if part.stored.addend == addend:
                    read(part)
            yield numbers

    reduce(tensor.dtype, tensor.pending, addends(), numbers, buffers.sums)


def _zeros(buffer: memoryview, offset: int) -> None:  # noqa: ARG001  # as `read_into` of files
    buffer[:] = bytes(len(buffer))


def _read(
    read_into: Callable[[memoryview, int], None],
    part: BlockPart,
    room: memoryview,
    scratch: memoryview,
    hook: _Seen | None,
) -> int | None:
    """Read a part into `room`; return its CRC-32, None without `hook` or if the part has gaps."""
    (count, step, _), *inner = part.steps
    if not inner:
        data = room[part.at : part.at + count]
        read_into(data, part.start)
        return None if hook is None else hook(part.start, data)
    span, gap = 1, 0
    for length, by, _ in reversed(part.steps):
        gap = max(gap, by - span)
        span += (length - 1) * by
    if span <= len(scratch) and gap < _PAGE:
        read_into(scratch[:span], part.start)
        if hook is not None:
            hook(part.start, scratch[:span])
        _spread(part, scratch, room)
        return None
    rows = max(1, min(len(scratch) // step, count - 1)) if gap < _PAGE else 1
    for lo in range(0, count, rows):
        _read(read_into, part.rows(lo, min(lo + rows, count)), room, scratch, hook)
    return None


def _spread(part: BlockPart, data: memoryview, room: memoryview) -> None:
    """Copy a part from `data`, its range of the file, to its positions in the block `room`."""
    *outer, (width, _, _) = part.steps
    # Importing numpy takes as long as copying 200 MiB, and long rows do not need it.
    if len(outer) == 1 and width >= _LONG_ROW:
        ((count, step, step_in),) = outer
        for row in range(count):
            at, start = part.at + row * step_in, row * step
            room[at : at + width] = data[start : start + width]
        return
    import numpy as np

    item = np.dtype(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")
    counts, steps, steps_in = zip(*outer, strict=True)
    source = np.ndarray(counts, item, data, 0, steps)
    np.copyto(np.ndarray(counts, item, room, part.at, steps_in), source)


# --- into the files of an output


class Destination(NamedTuple):
    """The path to write to, and the files that are there and will be replaced."""

    path: StoragePath
    overwrite: bool = False
    replaced: frozenset[str] = frozenset()
    """Names of the files in the directory; it is replaced only if no others have been added."""
    identity: Identity | None = None
    """Identity of the directory to replace: empty if there is none, None if it is unknown."""


_TASK_BYTES: Final = 32 << 20
"""Minimum bytes of the tensors in one task."""
_TASKS_AHEAD: Final = 2
"""Queued tasks per thread."""
_MAX_OPEN: Final = 128
"""Maximum number of files that a thread has open for writing."""

Written: TypeAlias = list[tuple[str, int, int]]
"""(name, bytes, CRC-32) of files."""
Extents: TypeAlias = list[tuple[int, int]]
"""(file index, extent index) pairs that one thread copies in order."""


def plan_tasks(target: Target, *, whole_files: bool = False) -> Iterator[Extents]:
    """Yield the tasks of threads, as (file, extent) indices: whole tensors, or entire files."""
    # Extents as single numbers: there may be ten million.
    groups: dict[object, array[int]] = {}
    for number, file in enumerate(target.files):
        for place, extent in enumerate(file.extents):
            key = number if whole_files else extent.tensor.source
            groups.setdefault(key, array("q")).append(number << 32 | place)
    task_bytes = 0
    task: Extents = []
    for codes in groups.values():
        extents = [divmod(code, 1 << 32) for code in codes]
        task += extents
        task_bytes += sum(target.files[file].extents[at].num_bytes for file, at in extents)
        if task and (whole_files or task_bytes >= _TASK_BYTES):
            yield task
            task, task_bytes = [], 0
    if task:
        yield task


_Blocks: TypeAlias = Iterator[tuple[int, memoryview]]
"""(file position, bytes) pairs to be written."""


class Output:
    """An output being written: copies boxes in threads, and publishes the finished files."""

    _staged: Staged

    def __init__(
        self,
        source: Catalog,
        target: Target,
        destination: Destination,
        *,
        threads: int,
        verify: bool,
        digests: bool,
        strict_cast: bool,
        progress: Progress | None,
    ) -> None:
        self.source, self.target, self.destination = source, target, destination
        self.path = destination.path
        self.whole_files = self.path.whole_files
        self.verify, self.strict_cast, self.progress = verify, strict_cast, progress
        self.digests = digests
        """True if digests of the tensors are computed."""
        self.digested = verify or target.digested
        """True if CRC-32 checksums of the written bytes are computed."""
        self.losses: CastLosses | None = None
        self.tensor_digests: dict[str, TensorDigest] = {}
        """Digests of the written tensors, if requested."""
        self._crcs = [array("I", bytes(4 * len(file.extents))) for file in target.files]
        """CRC-32 of every extent of every file, if they are computed."""
        self._file_crcs: dict[str, int] = {}
        """CRC-32 of every complete file; 0 if they are not computed."""
        self._tasks = partial(plan_tasks, target, whole_files=self.whole_files)
        self._left: Counter[str] = Counter()
        """Number of extents of each tensor that are not copied yet."""
        self._checks: dict[str, Checks] = {}
        """Checks of the tensors that are partially copied."""
        self._done = self._total = tasks = 0
        for task in self._tasks():
            tasks += 1
            for extent in map(self._extent, task):
                self._left[extent.tensor.source] += 1
                self._total += extent.num_bytes
            if self.whole_files:
                self._total += target.files[task[0][0]].other_bytes
        others = (file for file in target.files if not (self.whole_files and file.extents))
        self._total += sum(file.other_bytes for file in others)
        self._threads = max(1, min(threads, tasks))
        self._failed, self._lock = Event(), Lock()

    def _extent(self, at: tuple[int, int]) -> Extent:
        return self.target.files[at[0]].extents[at[1]]

    def write(self) -> Written:
        """Copy all boxes into files and publish them; return (name, bytes, CRC-32) per file."""
        files = {file.name: file.num_bytes for file in self.target.files}
        listing = None if self.target.listing is None else self.target.listing.name
        if listing is not None:
            files[listing] = 0
        output = Staging(
            files,
            self.target.directory,
            self.destination.overwrite,
            listing,
            self.destination.replaced,
            self.destination.identity,
        )
        with self.path.stage(output) as self._staged:
            self._run()
            return self._finish()

    def _finish(self) -> Written:
        """Write headers, then the index; return (name, bytes, CRC-32) of each file."""
        written = []
        for number, (name, num_bytes, *_) in enumerate(self.target.files):
            if name not in self._file_crcs:
                self._complete(number)
            written.append((name, num_bytes, self._file_crcs[name]))
        self.source.check_unchanged(self.target.beside)
        self.source.check_written(self.tensor_digests)
        if self.target.listing is not None:
            written.append(self._write_listing(*self.target.listing))
        return written

    def _run(self) -> None:
        """Copy all boxes in threads; the first error stops all threads."""
        threads = self._threads
        spare = [Buffers() for _ in range(threads)]

        def work(task: Extents) -> None:
            buffers = spare.pop()
            upcoming = (
                stretch
                for extent in map(self._extent, task)
                for stretch in stretches(self.source.tensor(extent.tensor.source), extent.box)
            )
            try:
                with OpenFiles() as files:
                    files.will_read(self.source.directory, upcoming, AHEAD_BYTES // threads)
                    self._copy(task, files, buffers)
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

    def _copy(self, task: Extents, files: OpenFiles, buffers: Buffers) -> None:
        """Copy the boxes of one task into their files."""
        if self.whole_files:
            ((file_number, _), *_) = task
            self._complete(file_number, lambda n: self._blocks(file_number, n, files, buffers))
            return
        with ExitStack() as stack:
            writers: dict[int, WriteAt] = {}
            for file, number in task:
                if file not in writers:
                    if len(writers) >= _MAX_OPEN:
                        stack.close()
                        writers.clear()
                    name = self.target.files[file].name
                    writers[file] = stack.enter_context(self._staged.file(name))
                for offset, data in self._blocks(file, number, files, buffers):
                    writers[file](offset, data)

    def _blocks(self, file: int, number: int, files: OpenFiles, buffers: Buffers) -> _Blocks:
        """Yield (file position, bytes) of one box, cast if requested; record CRC-32 and digest.

        A pair counts as written when the caller asks for the next one.
        """
        tensor, box, at = self._extent((file, number))
        stored, checks = self.source.tensor(tensor.source), None
        if self.verify and (checks := self._checks.get(tensor.source)) is None:
            new = Checks(stored, distinct(stored))
            checks = self._checks.setdefault(tensor.source, new)
        casts = is_cast(stored.dtype, tensor.dtype)
        needs_digest = self.digests or tensor.source in self.source.wants_digests
        digested = TensorDigest(tensor.dtype, tensor.shape) if needs_digest else None
        crc = done = 0
        for block, stored_crc in read_box(stored, box, files, buffers, checks):
            data = self._cast(block, stored.dtype, tensor.dtype, tensor.name) if casts else block
            # After a cast, a block may be longer.
            for part in (data[n : n + BLOCK_BYTES] for n in range(0, len(data), BLOCK_BYTES)):
                of_part = 0
                if self.digested:
                    of_part = crc32(part) if stored_crc is None or casts else stored_crc
                yield at, part
                if digested is not None:
                    digested = digested.with_bytes(part, box, done)
                done += len(part)
                crc = crc32_combine(crc, of_part, len(part))
                at += len(part)
                self._advance(len(part))
        self._crcs[file][number] = crc
        with self._lock:
            if digested is not None:
                self._add_digest(tensor.name, digested)
            self._left[tensor.source] -= 1
            last = not self._left[tensor.source]
        if last and checks is not None:
            del self._checks[tensor.source]
            checks.finish(files)

    def _add_digest(self, name: str, digested: TensorDigest) -> None:
        before = self.tensor_digests.get(name)
        self.tensor_digests[name] = digested if before is None else before + digested

    def _cast(self, block: memoryview, dtype: str, new: str, name: str) -> memoryview:
        """Cast bytes to dtype `new`; count lost numbers, or raise CheckpointError if strict."""
        from shardspec.checkpoint.convert.numeric import cast

        data, losses = cast(block, dtype, new)
        if self.strict_cast and losses:
            raise CheckpointError(
                f"tensor {name!r}: the cast would change values: {losses}; choose another dtype, "
                "or omit ",
                Argument("strict_cast", value=True),
            )
        with self._lock:
            self.losses = losses if self.losses is None else self.losses + losses
        return data

    def _advance(self, num_bytes: int) -> None:
        """Report progress; stop this thread if another one has failed."""
        if self._failed.is_set():
            raise _Cancelled
        with self._lock:
            self._done += num_bytes
            if self.progress is not None:
                self.progress(self._done, self._total)

    def _complete(self, number: int, blocks: Callable[[int], _Blocks] | None = None) -> None:
        """Write a file from start to end; if `blocks` is None, its boxes are already written."""
        file, crcs = self.target.files[number], self._crcs[number]
        pieces: Iterator[tuple[int, RawBytes | int]] = heapq.merge(
            ((raw.offset, raw) for raw in file.raw),
            ((extent.offset, place) for place, extent in enumerate(file.extents)),
            ((raw.offset, raw) for raw in (file.trailer(crcs) if file.trailer else ())),
            key=itemgetter(0),
        )
        value = end = 0
        with self._staged.file(file.name) as write:
            for offset, piece in pieces:
                if isinstance(piece, RawBytes):
                    data = piece.made()
                    write(offset, data)
                    num_bytes, crc = len(data), crc32(data)
                else:
                    for block in () if blocks is None else blocks(piece):
                        write(*block)
                    num_bytes, crc = file.extents[piece].num_bytes, crcs[piece]
                value = crc32(bytes(offset - end), value)
                value = crc32_combine(value, crc, num_bytes)
                end = offset + num_bytes
        self._file_crcs[file.name] = value if self.digested else 0
        self._advance(file.other_bytes)

    def _write_listing(self, name: str, fill: Callable[..., object]) -> tuple[str, int, int]:
        files = (file.name for file in self.target.files)
        num_bytes = crc = 0
        room = bytearray()
        with self._staged.file(name) as write:

            def flush() -> None:
                nonlocal num_bytes, crc
                write(num_bytes, bytes(room))
                num_bytes, crc = num_bytes + len(room), crc32(room, crc)
                room.clear()

            def append(piece: bytes) -> None:
                room.extend(piece)
                if len(room) >= BLOCK_BYTES:
                    flush()

            fill(dict(zip(files, self._crcs, strict=True)), append)
            flush()
        return name, num_bytes, crc


class _Cancelled(Exception):
    """Another thread has failed, so this one stops."""

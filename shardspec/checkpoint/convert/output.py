"""Writes merged and resharded checkpoints: `merge`, `reshard`, and the threads that copy for them.

First all is settled that needs no data (`prepare`). Then threads read boxes, check and cast them,
and write them where they belong.

To a disk a thread writes all extents of a tensor, so that a stored box is read and checked once
whatever files it goes to. To a store it writes a whole file, from start to end; it appears when it
is complete, and a file that it replaces stays until then.
"""

import heapq
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import PurePath
from threading import Event, Lock
from typing import TYPE_CHECKING, Final, TypeAlias, Unpack

from shardspec.checkpoint.catalog import Catalog, Extent, RawBytes, Target, distinct
from shardspec.checkpoint.compare.digest import check_digests_file, write_digests
from shardspec.checkpoint.convert.copy import Buffers, Checks, read_box, stretches
from shardspec.checkpoint.convert.prepare import (
    Destination,
    WriteKeywords,
    WriteOptions,
    WriteReport,
    prepared_output,
)
from shardspec.checkpoint.storage.checksums import BLOCK_BYTES, crc32, crc32_combine
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.storage.path import Staged, Staging, WriteAt
from shardspec.checkpoint.storage.reading import AHEAD_BYTES, OpenFiles, prefetch_map
from shardspec.dtypes import is_cast
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.layout.rules import Rules
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.text import Argument

if TYPE_CHECKING:
    from shardspec.checkpoint.convert.numeric import CastLosses


def merge(
    directory: PurePath | str | Catalog,
    output: PurePath | str,
    *,
    max_shard_bytes: int | None = None,
    **options: Unpack[WriteKeywords],
) -> WriteReport:
    """Write the global tensors of a checkpoint into one file, or into files of a limited size.

    Headers, tiling and replicas are checked before the first byte is written (but the headers that
    torch's DCP puts before chunks). Pending reductions are finished. The output appears under its
    name once it is complete and flushed to the disk. Needs neither torch nor a process
    group; memory does not grow with the sizes of the tensors.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or one that it has opened.
    output
        The file to write; a directory for the formats ``"huggingface"`` and ``"dcp"``.
    max_shard_bytes
        Most bytes of tensors in a file of the format ``"huggingface"``; 5 GB by default.

    Other Parameters
    ----------------
    format
        The default is a torch file if the output ends in ``.pt``, ``.pth`` or ``.bin``,
        ``"huggingface"`` if `max_shard_bytes` is given or the output is text that ends in ``/``,
        else one safetensors file. Installed packages may have others (``shardspec.formats``).
    dtype
        Cast floating point tensors to this dtype; quantized weights are dequantized to it.
    names
        A map to the tensors of another model: a `NameMap`, a list of them to be applied in turn, or
        new names. It has to have a use for every tensor that is to be written. `include` and
        `exclude` match names before it, `rename` those that it gives.
    overwrite
        Replace the checkpoint that is there: its own files, and those beside the weights that
        belong to it. A directory with any other file is refused.
    include, exclude
        Shell patterns of names, one or several. What matches any of `include`, or all if it is
        None, and none of `exclude`, is written.
    rename
        Regular expressions with their replacements, ``{"^model[.]": ""}`` or pairs. Each is applied
        in turn to its first match in every name.
    drop
        Shell patterns of names whose tensors the map need not use.
    quantize
        Quantize the weights of linear layers: ``"fp8-128x128"``, ``"mxfp8"`` or ``"mxfp4"``. Which
        these are, says the family of the model by its config, or else their names.
    quantize_include
        Shell patterns of names of the output: what matches any is quantized, and nothing else.
    drop_values
        Allow to lose entries that the format has no place for, which is an error otherwise; `merge`
        loses those without tensors in any case. Both formats of shards keep plain values (None,
        numbers, texts, bytes, lists and dicts of them); between checkpoints of torch everything is
        copied as it is stored.
    threads
        How many threads copy: each a few tensors at a time, or to a store a file.
    metadata
        Copy the metadata of safetensors files into safetensors files.
    strict_cast
        Refuse a cast that does not keep a number: one that overflows, becomes 0, or becomes NaN.
        Otherwise the report counts them.
    verify
        Compare all bytes that are read with the digests of the checkpoint, if it has any.
    dry_run
        Do all checks that come before writing, and write nothing.
    sidecars
        Copy the files beside the weights into directories, such as ``config.json``, a tokenizer's
        files and ``adapter_config.json``; into the format ``"dcp"`` also Megatron's ``common.pt``
        and Lightning's ``meta.pt``.
    progress
        Called with the bytes written so far and in all.
    digests
        A file to write digests of the output's tensors to, as `digest` finds them; they are of the
        bytes that are written anyway.

    Raises
    ------
    OutputExistsError
        If the output exists and `overwrite` is not set; it is kept.
    CheckpointError
        If the checkpoint is missing, unfinished, damaged or contradicts itself, if an object in it
        has tensors that would be lost, if the output would overwrite a part of it, or if the disk
        is full. Nothing appears under the name of the
        output, and no temporary file is left.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from shardspec import DTensor, DeviceMesh, save_sharded
    >>> directory = Path(tempfile.mkdtemp())
    >>> w = DTensor(torch.arange(12.0).view(4, 3), DeviceMesh(range(4), (2, 2)), "[S01,R]")
    >>> save_sharded({"w": w}, directory / "ckpt")
    >>> report = merge(directory / "ckpt", directory / "model.safetensors")
    >>> report.tensors, report.num_bytes
    (1, 144)
    """
    how = WriteOptions(way="merged", max_shard_bytes=max_shard_bytes, **options)
    return _converted(directory, output, how)


def reshard(
    directory: PurePath | str | Catalog,
    output: PurePath | str,
    *,
    device_mesh: DeviceMesh | None = None,
    rules: Rules | None = None,
    like: PurePath | str | Catalog | Mapping[str, Layout] | None = None,
    **options: Unpack[WriteKeywords],
) -> WriteReport:
    """Write a checkpoint of any format as the ranks of a mesh would have saved it.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or one that it has opened.
    output
        The directory to write.
    device_mesh
        The devices to shard for.
    rules
        Name pattern to spec, matched against the new names as by `match_rules`: the last rule that
        matches a tensor counts. One that no rule matches is replicated.
    like
        A checkpoint to take mesh and specs from, by name, in place of the two above; or the layout
        of each tensor, as `model_layouts` returns them.

    Other Parameters
    ----------------
    format
        shardspec's own, which is the default, or that of `torch.distributed.checkpoint`.
    dtype, names, overwrite, ...
        As for `merge`.

    Raises
    ------
    LayoutError, AxisError
        If the rules do not fit the tensors or the mesh.
    OutputExistsError, CheckpointError
        As for `merge`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from shardspec import save_sharded
    >>> place = Path(tempfile.mkdtemp())
    >>> save_sharded({"w": torch.arange(12.0).view(4, 3)}, place / "whole")
    >>> mesh = DeviceMesh(range(4), (4,))
    >>> report = reshard(place / "whole", place / "cut", device_mesh=mesh, rules={"w": "[S0,R]"})
    >>> len(report.files)
    5
    """
    how = WriteOptions(way="sharded", device_mesh=device_mesh, rules=rules, like=like, **options)
    return _converted(directory, output, how)


def _converted(
    checkpoint: PurePath | str | Catalog, place: PurePath | str, options: WriteOptions
) -> WriteReport:
    """Check that an output can be made of a checkpoint and may be written, and write it."""
    started = time.monotonic()
    output = storage_path(place)
    if isinstance(place, str) and place.endswith(("/", os.sep)):
        options = replace(options, in_directory=True)
    digests_file = None if options.digests is None else storage_path(options.digests)
    prepared = prepared_output(checkpoint, output, options, os.urandom(8).hex())
    if digests_file is not None:
        check_digests_file(digests_file, output, overwrite=options.overwrite)
    report = prepared.report
    if not options.dry_run:
        begun = Output(*prepared[:3], options)
        written = begun.write()
        crc = 0
        for _, num_bytes, value in written:
            crc = crc32_combine(crc, value, num_bytes)
        digests = None
        if digests_file is not None:
            digests = _digests(prepared.target, begun)
            write_digests(digests_file, digests, overwrite=options.overwrite)
        report = replace(
            report,
            writes={name: num_bytes for name, num_bytes, _ in written},
            crc32=crc if begun.digested else None,
            cast_losses=begun.losses,
            written=True,
            digests=digests,
        )
    return replace(report, seconds=time.monotonic() - started)


_TASK_BYTES: Final = 32 << 20
"""Least bytes of the tensors that a thread takes at once."""
_TASKS_AHEAD: Final = 2
"""Per thread."""
_MAX_OPEN: Final = 128
"""Files that a thread has open to be written."""

Written: TypeAlias = list[tuple[str, int, int]]
"""Name, bytes and CRC-32 of files."""
Extents: TypeAlias = list[tuple[int, int]]
"""Pairs of a file index and the index of an extent in it, copied in turn by one thread."""


def plan_tasks(target: Target, *, whole_files: bool = False) -> Iterator[Extents]:
    """Yield tasks: all extents of a few tensors, or of one file."""
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
"""What goes into a file, and where."""


class Output:
    """An output that is being written; all threads share it."""

    _staged: Staged

    def __init__(
        self,
        source: Catalog,
        target: Target,
        destination: Destination,
        options: WriteOptions,
    ) -> None:
        self.source, self.target, self.destination = source, target, destination
        self.path = destination.path
        self.whole_files = self.path.whole_files
        self.options = options
        self.digested = options.verify or target.digested
        """Whether the CRC-32 of what is written is computed."""
        self.losses: CastLosses | None = None
        self.tensor_digests: dict[str, TensorDigest] = {}
        """Digests of what was written, if they are wanted."""
        self._crcs = [array("I", bytes(4 * len(file.extents))) for file in target.files]
        """CRC-32 of every extent of every file, if they are computed."""
        self._file_crcs: dict[str, int] = {}
        """The same for whole files that are complete."""
        self._tasks = partial(plan_tasks, target, whole_files=self.whole_files)
        self._left: Counter[str] = Counter()
        """How many extents of each tensor are still to be copied."""
        self._checks: dict[str, Checks] = {}
        """Those of the tensors that are partly copied."""
        self._done = self._total = tasks = 0
        for task in self._tasks():
            tasks += 1
            for extent in map(self._extent, task):
                self._left[extent.tensor.source] += 1
                self._total += extent.num_bytes
            if self.whole_files:
                self._total += target.files[task[0][0]].other_bytes
        whole = (file for file in target.files if not (self.whole_files and file.extents))
        self._total += sum(file.other_bytes for file in whole)
        self._threads = max(1, min(options.threads, tasks))
        self._failed, self._lock = Event(), Lock()

    def _extent(self, at: tuple[int, int]) -> Extent:
        return self.target.files[at[0]].extents[at[1]]

    def write(self) -> Written:
        """Write all files and publish the output; return the files."""
        files = {file.name: file.num_bytes for file in self.target.files}
        listing = None if self.target.listing is None else self.target.listing.name
        if listing is not None:
            files[listing] = 0
        output = Staging(
            files, self.target.directory, self.options.overwrite, listing, *self.destination[1:]
        )
        with self.path.stage(output) as self._staged:
            self._run()
            return self._finish()

    def _finish(self) -> Written:
        """Complete the files, that which lists the others last, and return all of them."""
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
        """Do all tasks, in threads; the first that fails stops the others."""
        threads = self._threads
        spare = [Buffers() for _ in range(threads)]

        def work(task: Extents) -> None:
            buffers = spare.pop()
            wanted = (
                stretch
                for extent in map(self._extent, task)
                for stretch in stretches(self.source.tensor(extent.tensor.source), extent.box)
            )
            try:
                with OpenFiles() as files:
                    files.will_read(self.source.directory, wanted, AHEAD_BYTES // threads)
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
        """Do one task."""
        if self.whole_files:
            ((whole, _), *_) = task
            self._complete(whole, lambda number: self._blocks(whole, number, files, buffers))
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
        """Yield what goes into a file, and where; note the CRC-32 of all if it is computed.

        Each counts as written once the next one is asked for.
        """
        tensor, box, at = self._extent((file, number))
        stored, checks = self.source.tensor(tensor.source), None
        if self.options.verify and (checks := self._checks.get(tensor.source)) is None:
            new = Checks(stored, distinct(stored))
            checks = self._checks.setdefault(tensor.source, new)
        casts = is_cast(stored.dtype, tensor.dtype)
        wanted = self.options.digests is not None or tensor.source in self.source.wants_digests
        digested = TensorDigest(tensor.dtype, tensor.shape) if wanted else None
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
        """Cast a block; count what it lost, or raise if that is not allowed."""
        from shardspec.checkpoint.convert.numeric import cast

        data, losses = cast(block, dtype, new)
        if self.options.strict_cast and losses:
            raise CheckpointError(
                f"tensor {name!r}: the cast would not keep its numbers: {losses}; choose another "
                "dtype, or leave out ",
                Argument("strict_cast", value=True),
            )
        with self._lock:
            self.losses = losses if self.losses is None else self.losses + losses
        return data

    def _advance(self, num_bytes: int) -> None:
        """Count bytes as written; stop if another thread has failed."""
        if self._failed.is_set():
            raise _Cancelled
        with self._lock:
            self._done += num_bytes
            if self.options.progress is not None:
                self.options.progress(self._done, self._total)

    def _complete(self, number: int, blocks: Callable[[int], _Blocks] | None = None) -> None:
        """Write a file from start to end; all but its extents without `blocks`, which reads one."""
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


def _digests(target: Target, output: Output) -> Digests:
    """Return the digests of what was written; tensors that share bytes were written once."""
    digests = {}
    for tensor in target.tensors:
        empty = TensorDigest(tensor.dtype, tensor.shape)
        written = target.same.get(tensor.name, tensor.name)
        digests[tensor.name] = output.tensor_digests.get(written, empty)
    return Digests(digests)


class _Cancelled(Exception):
    """Another thread has failed, so this one stops."""

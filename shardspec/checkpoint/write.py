"""From a checkpoint to an output: open, select and lay out, plan, execute, commit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from isal.isal_zlib import crc32_combine

from shardspec.checkpoint.catalog import Catalog, distinct
from shardspec.checkpoint.commit import Destination
from shardspec.checkpoint.coordinate import Member, Workers, together
from shardspec.checkpoint.destination import check_place, check_replaced
from shardspec.checkpoint.executor import Execution, Findings, WriteOptions
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.output_files import in_store, on_disk
from shardspec.checkpoint.read_boxes import crc_text
from shardspec.checkpoint.sidecars import add_sidecars
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.targets import OutputTensor, Target
from shardspec.checkpoint.tiling import MemoizedByBoxes, check_replicas, check_tiling
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

LayOut: TypeAlias = Callable[[Catalog, str], tuple[Sequence[OutputTensor], Target]]
"""Selects tensors of a catalog and lays out the files for them, given a text to name them by."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was written, or what would be."""

    path: Path
    """The output, as the user named it."""
    format: str
    """Its format, as `merge` and `reshard` name it."""
    read: str
    """What the source is."""
    read_files: int
    """How many files tensors are read from."""
    read_bytes: int
    """Bytes of all boxes that are read, each once."""
    tensors: int
    files: tuple[str, ...]
    """Names of the files; that of the output itself if it is one."""
    num_bytes: int
    """Size of all files."""
    seconds: float
    crc32: int | None
    """CRC-32 of all files in their order; None if it was not computed."""
    cast_losses: "CastLosses | None"
    """What a cast to another dtype did not keep; None if nothing was cast."""
    left_out: tuple[str, ...]
    """Entries of the source that are no tensors, and that the output does not hold; the metadata of
    safetensors files is ``"__metadata__"``."""
    sidecars: tuple[str, ...]
    """Names of the files beside the weights of the source that were copied along."""
    written: bool
    """False after a dry run."""

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "path": str(self.path),
            "format": self.format,
            # Its former name.
            "form": self.format,
            "read": self.read,
            "read_files": self.read_files,
            "read_bytes": self.read_bytes,
            "tensors": self.tensors,
            "files": list(self.files),
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "crc32": None if self.crc32 is None else crc_text(self.crc32),
            "cast": None if self.cast_losses is None else self.cast_losses.to_json(),
            "left_out": list(self.left_out),
            "sidecars": list(self.sidecars),
            "written": self.written,
        }


def write_checkpoint(
    checkpoint: Path | str | Catalog,
    output: Path,
    format: str,  # as the report names it
    lay_out: LayOut,
    options: WriteOptions,
) -> WriteReport:
    """Check that an output can be made of a checkpoint and may be written, and write it.

    Raises as `merge` does.
    """
    started = time.monotonic()
    if options.threads < 1:
        raise CheckpointError(f"{options.threads} threads write nothing; give at least 1")
    member = None if options.dry_run else options.member
    with together(member, output.absolute()) as workers:
        source = as_catalog(checkpoint)
        tensors, target = lay_out(source, workers.token)
        if options.sidecars:
            target = add_sidecars(source, target, format)
        if isinstance(output, RemotePath) and any("/" in file.name for file in target.files):
            raise CheckpointError(
                f"{output}: the format {format!r} has files in directories, which are not written "
                "into a store; write to a directory here, and copy that"
            )
        destination = Destination(output)
        first, overwrite = workers.member.rank == 0, options.overwrite
        if first:
            path = check_place(output, source, directory=target.directory, overwrite=overwrite)
            destination = Destination(path)
        read_files, read_bytes = _check_tensors(source, tensors, options.verify, workers.member)
        if first and overwrite and target.directory:
            destination = check_replaced(destination.path, target, format)
        report = WriteReport(
            path=output,
            format=format,
            read=source.format,
            read_files=read_files,
            read_bytes=read_bytes,
            tensors=len(tensors),
            files=tuple(file.name for file in target.files),
            num_bytes=target.num_bytes,
            seconds=0.0,
            crc32=None,
            cast_losses=None,
            left_out=_left_out(source, target),
            sidecars=target.sidecars,
            written=False,
        )
        if not options.dry_run:
            report = _write(report, source, target, destination, options, workers)
    return replace(report, seconds=time.monotonic() - started)


def _write(
    report: WriteReport,
    source: Catalog,
    target: Target,
    destination: Destination,
    options: WriteOptions,
    workers: Workers,
) -> WriteReport:
    """Write all files; the first process completes the output."""
    remote = isinstance(destination.path, RemotePath)
    job = Execution(source, target, options, workers, whole_files=remote)
    written = []
    # The other processes are told of an error before their files are removed.
    begin = in_store if remote else on_disk
    with begin(job, workers, destination) as output, workers.failing_together():
        job.run(output.copy)
        if job.member.rank:
            source.check_unchanged()
        every = workers.gather("findings", job.findings)
        if job.member.rank == 0:
            job.join([Findings(*found) for found in every])
            written = output.finish()
        else:
            # Only the first process knows whether all went well.
            written = workers.broadcast("written")
    workers.broadcast("written", written)
    crc = 0
    for _, num_bytes, value in written:
        crc = int(crc32_combine(crc, value, num_bytes))
    return replace(
        report,
        files=tuple(name for name, _, _ in written),
        num_bytes=sum(num_bytes for _, num_bytes, _ in written),
        crc32=crc if job.digested else None,
        cast_losses=job.losses,
        written=True,
    )


def _left_out(source: Catalog, target: Target) -> tuple[str, ...]:
    """Return the names of what is not carried along."""
    left = sorted(source.extras.keys() - target.carried)
    metadata = source.file_metadata
    if (metadata.values.keys() | metadata.contradictions.keys()) - target.carried:
        left.append("__metadata__")
    return tuple(left)


def _check_tensors(
    source: Catalog, tensors: Sequence[OutputTensor], verify: bool, member: Member
) -> tuple[int, int]:
    """Check that the boxes of every tensor tile it, and that copies agree.

    Returns how many files, and how many bytes of them, will be read.
    """
    paths: set[Path] = set()
    num_bytes = 0
    tiled: set[object] = set()
    copies_of = MemoizedByBoxes(partial(check_tiling, tiled=tiled))
    files_of = MemoizedByBoxes(lambda outline: {held.path for held in distinct(outline)})
    with OpenFiles() as files:
        for place, name in enumerate(sorted({tensor.source for tensor in tensors})):
            outline = source.outline(name)
            unsure = copies_of(outline) and not (verify and source.copies_agree(name))
            # Each of several processes compares its share.
            if unsure and place % member.size == member.rank:
                tensor = source.tensor(name)
                for group in check_tiling(tensor, tiled):
                    check_replicas(tensor, group, files, trust_digests=verify)
            paths |= files_of(outline)
            # They tile it, for every addend once.
            addends = prod(pending.addends for pending in outline.pending)
            num_bytes += addends * prod(outline.shape) * item_bytes(outline.dtype)
    return len(paths), num_bytes

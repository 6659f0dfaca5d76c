"""From a checkpoint to an output: open, select and lay out, plan, execute, commit."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from isal.isal_zlib import crc32_combine

from shardspec.checkpoint.catalog import Catalog, distinct
from shardspec.checkpoint.commit import joined_output, real_path, staged_output
from shardspec.checkpoint.coordinate import Member, Workers, together
from shardspec.checkpoint.destination import check_destination, check_others, files_of_checkpoint
from shardspec.checkpoint.digests import crc_text
from shardspec.checkpoint.executor import Execution, Findings, WriteOptions, plan_copies, plan_files
from shardspec.checkpoint.formats.names import INDEX_SUFFIX, INFO_NAME, METADATA_NAME
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.output_files import RemoteStaging, Staged, Written
from shardspec.checkpoint.sidecars import add_sidecars
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.targets import OutputTensor, Put, Target
from shardspec.checkpoint.tiling import check_replicas, check_tiling, memoize_by_boxes
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

LayOut: TypeAlias = Callable[[Catalog, str], tuple[Sequence[OutputTensor], Target]]
"""Selects tensors of a catalog and lays out the files for them, given a word to name them by."""

_LISTS: Final = {
    "shardspec": INFO_NAME,
    "dcp": METADATA_NAME,
    "huggingface": f"model{INDEX_SUFFIX}",
}
"""What names the other files of an output, by its format."""


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
    """How many files bytes of tensors come from."""
    read_bytes: int
    """Bytes of all boxes that are read, each once."""
    tensors: int
    files: tuple[str, ...]
    """Names of the files; that of the output itself if it is one."""
    num_bytes: int
    """Size of all files."""
    seconds: float
    crc32: int | None
    """CRC-32 of all files in their order; None if it was not taken."""
    cast_losses: "CastLosses | None"
    """What a cast to another dtype did not keep; None if nothing was cast."""
    left_out: tuple[str, ...]
    """Entries of the source that are no tensors, and that the output does not hold; the metadata of
    safetensors files is ``"__metadata__"``."""
    sidecars: tuple[str, ...]
    """Names of the files that lay beside the weights of the source and went along."""
    written: bool
    """False if nothing was written because that was asked for."""

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
        report = _write(checkpoint, output, format, lay_out, options, workers)
    return replace(report, seconds=time.monotonic() - started)


def _write(
    checkpoint: Path | str | Catalog,
    output: Path,
    format: str,  # as the report names it
    lay_out: LayOut,
    options: WriteOptions,
    workers: Workers,
) -> WriteReport:
    source = as_catalog(checkpoint)
    tensors, target = lay_out(source, workers.token)
    if options.sidecars:
        target = add_sidecars(source, target, format)
    path = output
    if isinstance(path, RemotePath) and any("/" in file.name for file in target.files):
        raise CheckpointError(
            f"{output}: the format {format!r} has files in directories, which are not written into "
            "a store; write to a directory here, and copy that"
        )
    rank = workers.member.rank
    replaced: frozenset[str] = frozenset()
    old: int | None = None
    if rank == 0:
        path = check_destination(
            output, source, directory=target.directory, overwrite=options.overwrite
        )
    read_files, read_bytes = _check_tensors(source, tensors, options.verify, workers.member)
    if options.overwrite and target.directory and rank == 0:
        old = None if isinstance(path, RemotePath) else _inode(path)
        replaced = files_of_checkpoint(path)
        new = {file.name for file in target.files}
        if target.last is not None:
            new.add(_LISTS[format])
        check_others(path, replaced, frozenset(new), listed=format in ("shardspec", "dcp"))
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
    if options.dry_run:
        return report
    progress = workers.listener(options.progress)
    job = Execution(source, target, path, options, progress, workers.member)
    written = _write_files(job, workers, replaced, old)
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
    """Return the names of what does not go along."""
    left = sorted(source.extras.keys() - target.carried)
    metadata = source.file_metadata
    if (metadata.values.keys() | metadata.contradictions.keys()) - target.carried:
        left.append("__metadata__")
    return tuple(left)


def _write_files(
    job: Execution, workers: Workers, replaced: frozenset[str], old: int | None
) -> Written:
    """Write all files; return what the first process has written in the end."""
    if isinstance(job.path, RemotePath):
        begun: AbstractContextManager[Staged | RemoteStaging] = _in_store(job, workers, replaced)
    else:
        begun = _on_disk(job, workers, replaced, old)
    # The others hear of a failure before their files go away.
    with begun as staged, workers.failing_together():
        staged.fill(job)
        if job.member.rank:
            job.source.check_unchanged()
            workers.say("findings", job.findings)
            # The first process alone knows whether all went well.
            return [(name, size, crc) for name, size, crc in workers.hear("written")]
        workers.say("findings", job.findings)
        job.join([Findings(*said) for said in workers.gather("findings")])
        written = staged.finish(job)
        job.source.check_unchanged()
        # What lists the others is written once they are on the disk.
        written += staged.publish(job.target, partial(_write_last, job))
    workers.say("written", written)
    return written


@contextmanager
def _on_disk(
    job: Execution, workers: Workers, replaced: frozenset[str], old: int | None
) -> Iterator[Staged]:
    """Stage the files, which the other processes open."""
    path, directory = job.path, job.target.directory
    plan = plan_copies(job.target, job.member.rank, job.member.size)
    job.total = sum(copy.num_bytes for tensor in plan for copy in tensor.copies)
    if job.member.rank:
        with joined_output(Path(workers.hear("place")), path) as place:
            yield Staged(place, path, directory)
        return
    job.total += sum(file.other_bytes for file in job.target.files)

    with staged_output(
        path,
        directory=directory,
        overwrite=job.options.overwrite,
        replaced=replaced,
        inode=old,
    ) as place:
        staged = Staged(place, path, directory)
        for file in job.target.files:
            staged.create(file.name, file.num_bytes)
        workers.say("place", str(real_path(place)))
        yield staged


def _inode(path: Path) -> int:
    """Return what tells the directory of a name from one that takes its place; 0 without one."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


@contextmanager
def _in_store(
    job: Execution, workers: Workers, replaced: frozenset[str]
) -> Iterator[RemoteStaging]:
    """Find out what is there; of what was uploaded, nothing stays if all fails."""
    path, target = job.path, job.target
    assert isinstance(path, RemotePath), "others are on a disk"
    rank, overwrite = job.member.rank, job.options.overwrite
    job.total = sum(target.files[n].num_bytes for n in plan_files(target, rank, job.member.size))
    if rank == 0:
        there: list[str] = []
        if overwrite and target.directory:
            with suppress(FileNotFoundError):
                there = sorted(path.entries())
        elif overwrite and path.is_file():
            there = [path.name]
        workers.say("there", there)
    names = frozenset(workers.hear("there"))
    staging = RemoteStaging(path, target.directory, overwrite, workers.token, names, replaced)
    try:
        yield staging
    except BaseException:
        # Unless any says that it has failed, the first process may have ended well.
        with suppress(CheckpointError):
            if rank == 0:
                staging.discard()
                # Those of the others too: they may be killed by now.
                every = [Findings(*said) for said in workers.said("findings")]
                staging.discard(name for found in every for name in found.files)
            elif workers.has_failed():
                staging.discard()
        raise


def _write_last(job: Execution, put: Put) -> None:
    """Write what lists the other files."""
    if job.target.last is not None:
        files = zip(job.target.files, job.crcs, strict=True)
        job.target.last({file.name: crcs for file, crcs in files}, put)


def _check_tensors(
    source: Catalog, tensors: Sequence[OutputTensor], verify: bool, member: Member
) -> tuple[int, int]:
    """Check that the boxes of every tensor tile it, and that those stored twice agree.

    Returns how many files, and how many bytes of them, will be read.
    """
    paths: set[Path] = set()
    num_bytes = 0
    copies_of = memoize_by_boxes(check_tiling)
    files_of = memoize_by_boxes(lambda outline: {held.path for held in distinct(outline)})
    with OpenFiles() as files:
        for place, name in enumerate(sorted({tensor.source for tensor in tensors})):
            outline = source.outline(name)
            unsure = copies_of(outline) and not (verify and source.copies_agree(name))
            # Each of several processes compares its share.
            if unsure and place % member.size == member.rank:
                tensor = source.tensor(name)
                for group in check_tiling(tensor):
                    check_replicas(tensor, group, files, trust_digests=verify)
            paths |= files_of(outline)
            # They tile it, for every addend once.
            addends = prod(pending.addends for pending in outline.pending)
            num_bytes += addends * prod(outline.shape) * item_bytes(outline.dtype)
    return len(paths), num_bytes

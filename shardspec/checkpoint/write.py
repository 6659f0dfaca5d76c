"""From a checkpoint to an output: open, select and lay out, plan, execute, commit."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import Catalog, distinct
from shardspec.checkpoint.commit import joined_output, real_path, staged_output
from shardspec.checkpoint.coordinate import Alone, Member, Progress, together
from shardspec.checkpoint.copy_plan import plan_copies, plan_files
from shardspec.checkpoint.destination import check_destination, check_others, files_of_checkpoint
from shardspec.checkpoint.digests import crc32_combine
from shardspec.checkpoint.directories import sync_directory
from shardspec.checkpoint.executor import CastCounts, Execution, Findings, copy_to_disk
from shardspec.checkpoint.formats.names import INDEX_SUFFIX, INFO_NAME, METADATA_NAME
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.output_files import Staged, finish_file, write_list
from shardspec.checkpoint.report import WriteReport
from shardspec.checkpoint.sidecars import add_sidecars
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.targets import OutputTensor, Put, Target
from shardspec.checkpoint.tiling import MemoizedByBoxes, check_replicas, check_tiling
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

__all__ = ["LayOut", "WriteOptions", "write_checkpoint"]

LayOut: TypeAlias = Callable[[Catalog, str], tuple[Sequence[OutputTensor], Target]]
"""Selects tensors of a catalog and lays out the files for them, given a word to name them by."""
_Written: TypeAlias = list[tuple[str, int, int]]
"""Name, bytes and CRC-32 of every file, the one that makes the output count last."""

_LISTS: Final = {
    "shardspec": INFO_NAME,
    "dcp": METADATA_NAME,
    "huggingface": f"model{INDEX_SUFFIX}",
}
"""What names the other files of an output, by its format."""


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


def write_checkpoint(
    checkpoint: Path | str | Catalog,
    output: Path,
    format: str,  # as the report names it
    lay_out: LayOut,
    options: WriteOptions,
) -> WriteReport:
    """Check that an output can be made of a checkpoint and may be written, and write it.

    Raises
    ------
    OutputExistsError, CheckpointError
        As for `merge`.
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
    workers: Alone,
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
    rank, size = workers.member.rank, workers.member.size
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
    job = Execution(
        source,
        target,
        path,
        options.verify,
        options.verify and options.reread,
        CastCounts(strict=options.strict_cast),
        workers.listener(options.progress),
        rank,
        size,
    )
    if isinstance(path, RemotePath):
        written = _to_store(job, path, options, workers, replaced)
    else:
        written = _to_disk(job, path, options, workers, replaced, old)
    crc = 0
    for _, num_bytes, value in written:
        crc = int(crc32_combine(crc, value, num_bytes))
    return replace(
        report,
        files=tuple(name for name, _, _ in written),
        num_bytes=sum(num_bytes for _, num_bytes, _ in written),
        crc32=crc if job.digested else None,
        cast_losses=_cast_losses(job.cast_counts, workers),
        written=True,
    )


def _left_out(source: Catalog, target: Target) -> tuple[str, ...]:
    """Return the names of what does not go along."""
    left = sorted(source.extras.keys() - target.carried)
    metadata = source.file_metadata
    if (metadata.values.keys() | metadata.contradictions.keys()) - target.carried:
        left.append("__metadata__")
    return tuple(left)


def _to_disk(
    job: Execution,
    path: Path,
    options: WriteOptions,
    workers: Alone,
    replaced: frozenset[str],
    old: int | None,
) -> _Written:
    files = job.target.files
    plan = plan_copies(job.target, job.rank, job.size)
    job.total = sum(copy.num_bytes for tensor in plan for copy in tensor.copies)
    if job.rank:
        with joined_output(Path(str(workers.hear("place"))), path) as place:
            copy_to_disk(job, Staged(place, path, job.target.directory), options.threads)
            job.source.check_unchanged()
            workers.say("findings", job.findings())
        return _heard(workers)
    job.total += sum(file.other_bytes for file in files)
    written: _Written = []

    def check() -> None:
        if job.target.directory and options.overwrite and _inode(path) != old:
            raise CheckpointError(
                f"{path}: another run has replaced it meanwhile; run again to replace that"
            )

    with (
        staged_output(
            path,
            directory=job.target.directory,
            overwrite=options.overwrite,
            replaced=replaced,
            check=check,
        ) as place,
        # The others hear of a failure before their files go away.
        workers.failing_together(),
    ):
        staged = Staged(place, path, job.target.directory)
        for file in files:
            staged.create(file.name, file.num_bytes)
        workers.say("place", str(real_path(place)))
        copy_to_disk(job, staged, options.threads)
        _join(job, workers)
        for file, crcs in zip(files, job.crcs, strict=True):
            written.append(
                (file.name, file.num_bytes, finish_file(staged, file, crcs, digested=job.digested))
            )
            job.advance(file.other_bytes)
        job.source.check_unchanged()
        # What lists the others is written once they are on the disk.
        _last(job, lambda name, fill: written.append(write_list(staged, name, fill)))
        if staged.directory:
            sync_directory(place)
    workers.say("written", written)
    return written


def _inode(path: Path) -> int | None:
    """Return what tells the directory of a name from one that takes its place."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _to_store(
    job: Execution,
    path: RemotePath,
    options: WriteOptions,
    workers: Alone,
    replaced: frozenset[str],
) -> _Written:
    # Few outputs go to a store.
    from shardspec.checkpoint.upload import RemoteStaging, copy_to_store

    target = job.target
    job.total = sum(target.files[n].num_bytes for n in plan_files(target, job.rank, job.size))
    if job.rank:
        there = frozenset(map(str, _list(workers.hear("there"))))
        staging = RemoteStaging(
            path, target.directory, there, frozenset(), options.overwrite, workers.token
        )
        try:
            crcs = copy_to_store(job, staging, options.threads)
            job.source.check_unchanged()
            workers.say("files", crcs)
            workers.say("findings", job.findings())
        except BaseException:
            staging.discard()
            raise
        try:
            # The first process alone knows whether all went well.
            return _heard(workers)
        except BaseException:
            if workers.has_failed():
                staging.discard()
            raise
    staging = RemoteStaging.begun(
        path,
        workers.token,
        directory=target.directory,
        overwrite=options.overwrite,
        replaced=replaced,
    )
    workers.say("there", sorted(staging.there))
    try:
        workers.say("files", copy_to_store(job, staging, options.threads))
        job.source.check_unchanged()
        _join(job, workers)
        crcs = {name: crc for said in workers.gather("files") for name, crc in _dict(said).items()}
        written: _Written = [(f.name, f.num_bytes, crcs[f.name]) for f in target.files]
        written += staging.publish([file.name for file in target.files], partial(_last, job))
    except BaseException:
        names = {name for said in workers.said("files") for name in _dict(said)}
        staging.made.extend(map(staging.place, names))
        staging.discard()
        raise
    workers.say("written", written)
    return written


def _join(job: Execution, workers: Alone) -> None:
    """Wait for all copies, and take in what the processes have found."""
    workers.say("findings", job.findings())
    job.join([Findings(*_list(said)) for said in workers.gather("findings")])


def _last(job: Execution, put: Put) -> None:
    """Write what lists the other files."""
    if job.target.last is not None:
        files = zip(job.target.files, job.crcs, strict=True)
        job.target.last({file.name: crcs for file, crcs in files}, put)


def _heard(workers: Alone) -> _Written:
    """Return what the first process has written in the end."""
    return [(name, num_bytes, crc) for name, num_bytes, crc in _list(workers.hear("written"))]


def _list(said: object) -> Sequence[Any]:
    assert isinstance(said, list | tuple), "processes of one version talk to each other"
    return said


def _dict(said: object) -> Mapping[str, Any]:
    assert isinstance(said, dict), "processes of one version talk to each other"
    return said


def _cast_losses(counts: CastCounts, workers: Alone) -> "CastLosses | None":
    """Return what casts lost; the first of several processes learns of all."""
    found = counts.losses
    if workers.member.size == 1:
        return found
    workers.say("cast", None if found is None else found.to_json())
    if workers.member.rank:
        return found
    from shardspec.checkpoint.numeric import CastLosses

    every = [CastLosses(**said) for said in workers.gather("cast") if isinstance(said, dict)]
    return sum(every, CastLosses()) if every else None


def _check_tensors(
    source: Catalog, tensors: Sequence[OutputTensor], verify: bool, member: Member
) -> tuple[int, int]:
    """Check that the boxes of every tensor tile it, and that those stored twice agree.

    Returns
    -------
    tuple
        How many files, and how many bytes of them, will be read.
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

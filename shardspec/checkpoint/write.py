"""From a checkpoint to an output: open, select and lay out, plan, execute, commit."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from shardspec.checkpoint.cast_counts import CastCounts
from shardspec.checkpoint.catalog import Catalog, distinct
from shardspec.checkpoint.commit import joined_output, real_path, staged_output, sync_directory
from shardspec.checkpoint.compare import check_replicas
from shardspec.checkpoint.copy_plan import (
    OutputFile,
    OutputTensor,
    Target,
    copies_by_file,
    copies_by_tensor,
    share_of,
)
from shardspec.checkpoint.destination import (
    check_destination,
    check_others,
    files_of_checkpoint,
)
from shardspec.checkpoint.digests import crc32, crc32_combine
from shardspec.checkpoint.executor import (
    Execution,
    Groups,
    Progress,
    Staged,
    copy_to_disk,
    finish_file,
)
from shardspec.checkpoint.formats.names import INDEX_SUFFIX, INFO_NAME, METADATA_NAME
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.report import WriteReport
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.tiling import MemoizedByBoxes, check_tiling
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.coordinate import Member, Workers
    from shardspec.checkpoint.numeric import CastLosses

__all__ = ["LayOut", "WriteOptions", "write_checkpoint"]

LayOut: TypeAlias = Callable[[Catalog, str], tuple[Sequence[OutputTensor], Target]]
"""Selects tensors of a catalog and lays out the files for them, given a word to name them by."""


class WriteOptions(NamedTuple):
    """How an output is written; see `merge`."""

    threads: int
    strict_cast: bool
    overwrite: bool
    verify: bool
    reread: bool
    dry_run: bool
    progress: Progress | None
    member: "Member | None"


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
    if options.member is None or options.dry_run:
        report = _write(checkpoint, output, format, lay_out, options, None)
    else:
        # What few runs need is imported where it is.
        if "\0" in str(output):
            raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL")
        from shardspec.checkpoint.coordinate import together

        with together(options.member, output.absolute()) as workers:
            report = _write(checkpoint, output, format, lay_out, options, workers)
    return replace(report, seconds=time.monotonic() - started)


def _write(
    checkpoint: Path | str | Catalog,
    output: Path,
    format: str,  # as the report names it
    lay_out: LayOut,
    options: WriteOptions,
    workers: "Workers | None",
) -> WriteReport:
    token = os.urandom(8).hex() if workers is None else workers.token
    source = as_catalog(checkpoint)
    tensors, target = lay_out(source, token)
    path = output
    first = workers is None or workers.member.rank == 0
    if first:
        path = check_destination(
            output, source, directory=target.directory, overwrite=options.overwrite
        )
    read = _check_tensors(source, tensors, options.verify, workers)
    report = WriteReport(
        path=output,
        format=format,
        read=source.format,
        read_files=read.files,
        read_bytes=read.num_bytes,
        tensors=len(tensors),
        files=tuple(file.name for file in target.files),
        num_bytes=target.num_bytes,
        seconds=0.0,
        crc32=None,
        cast_losses=None,
        left_out=tuple(sorted(source.extras.keys() - target.carried)),
        written=False,
    )
    replaced: frozenset[str] = frozenset()
    if options.overwrite and target.directory and first:
        replaced = files_of_checkpoint(path)
        new = {file.name for file in target.files}
        if target.last is not None:
            new.add(_LISTS[format])
        check_others(path, replaced, frozenset(new), listed=format != "huggingface")
    if options.dry_run:
        return report
    remote = isinstance(path, RemotePath)
    groups = (copies_by_file if remote else copies_by_tensor)(target)
    if workers is not None:
        groups = share_of(target, groups, workers.member.rank, workers.member.size)
    extents = (target.files[place].extents[number] for group in groups for place, number in group)
    total = sum(extent.num_bytes for extent in extents)
    if remote:
        total += sum(target.files[group[0][0]].other_bytes for group in groups)
    elif first:
        total += sum(file.other_bytes for file in target.files)
    job = Execution(
        source,
        target,
        path,
        options.verify,
        options.verify and options.reread,
        CastCounts(strict=options.strict_cast),
        options.progress if workers is None else _listening(workers, options.progress),
        total,
    )
    if isinstance(path, RemotePath):
        written = _to_store(job, path, groups, options, workers, token, replaced)
    else:
        written = _to_disk(job, path, groups, options, workers, replaced)
    return replace(
        report,
        files=tuple(name for name, _, _ in written),
        num_bytes=sum(num_bytes for _, num_bytes, _ in written),
        crc32=_summed(written) if job.digested else None,
        cast_losses=_cast_losses(job.cast_counts, workers),
        written=True,
    )


_LISTS: Final = {
    "shardspec": INFO_NAME,
    "dcp": METADATA_NAME,
    "huggingface": f"model{INDEX_SUFFIX}",
}
"""What names the other files of an output, by its format."""

_LISTEN_S: Final = 1.0
"""How often to ask, while writing, whether another process has failed."""


def _listening(workers: "Workers", progress: Progress | None) -> Progress:
    """Return what is told of progress, and stops it when another process has failed."""
    due = time.monotonic() + _LISTEN_S

    def listen(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() > due:
            workers.listen()
            due = time.monotonic() + _LISTEN_S
        if progress is not None:
            progress(done, total)

    return listen


_Written: TypeAlias = list[tuple[str, int, int]]
"""Name, bytes and CRC-32 of every file, the one that makes the output count last."""


def _summed(written: _Written) -> int:
    value = 0
    for _, num_bytes, crc in written:
        value = int(crc32_combine(value, crc, num_bytes))
    return value


def _to_disk(
    job: Execution,
    path: Path,
    groups: Groups,
    options: WriteOptions,
    workers: "Workers | None",
    replaced: frozenset[str],
) -> _Written:
    target = job.target
    if workers is not None and workers.member.rank:
        with joined_output(Path(str(workers.hear("place", 0))), path) as place:
            copy_to_disk(job, Staged(place, path, target.directory), groups, options.threads)
            job.source.check_unchanged()
            workers.say("share", _crcs_of(job, groups))
        return _heard(workers)
    with staged_output(
        path, directory=target.directory, overwrite=options.overwrite, replaced=replaced
    ) as place:
        staged = Staged(place, path, target.directory)
        if workers is None:
            return _fill(job, staged, groups, options, None)
        from shardspec.checkpoint.coordinate import failing_together

        # The others hear of a failure before their files go away.
        with failing_together(workers):
            written = _fill(job, staged, groups, options, workers)
    workers.say("written", written)
    return written


def _fill(
    job: Execution,
    staged: Staged,
    groups: Groups,
    options: WriteOptions,
    workers: "Workers | None",
) -> _Written:
    for file in job.target.files:
        staged.create(file.name, file.num_bytes)
    if workers is not None:
        workers.say("place", str(real_path(staged.place)))
    copy_to_disk(job, staged, groups, options.threads)
    if workers is not None:
        workers.say("share", _crcs_of(job, groups))
        for said in workers.gather("share"):
            _take_crcs(job, _list(said))
    written = []
    for file, crcs in zip(job.target.files, job.crcs, strict=True):
        written.append((file.name, file.num_bytes, finish_file(job, staged, file, crcs)))
        job.advance(file.other_bytes)
    job.source.check_unchanged()
    # What lists the others is written once they are on the disk.
    for name, data in _last(job).items():
        staged.create(name, len(data))
        finish_file(job, staged, OutputFile.of_bytes(name, data), ())
        written.append((name, len(data), crc32(data)))
    if staged.directory:
        sync_directory(staged.place)
    return written


def _last(job: Execution) -> Mapping[str, bytes]:
    if job.target.last is None:
        return {}
    files = zip(job.target.files, job.crcs, strict=True)
    return dict(job.target.last({file.name: crcs for file, crcs in files}))


def _crcs_of(job: Execution, groups: Groups) -> list[tuple[int, int, int]]:
    """Return what this process knows for the others: file, extent and CRC-32."""
    return [(place, n, job.crcs[place][n]) for group in groups for place, n in group]


def _take_crcs(job: Execution, found: Sequence[Sequence[int]]) -> None:
    for place, number, crc in found:
        job.crcs[place][number] = crc


def _list(said: object) -> list[Any]:
    assert isinstance(said, list), "processes of one version talk to each other"
    return said


def _heard(workers: "Workers") -> _Written:
    """Return what the first process says in the end."""
    return [(name, num_bytes, crc) for name, num_bytes, crc in _list(workers.hear("written", 0))]


def _to_store(
    job: Execution,
    path: RemotePath,
    groups: Groups,
    options: WriteOptions,
    workers: "Workers | None",
    token: str,
    replaced: frozenset[str],
) -> _Written:
    # Few outputs go to a store.
    from shardspec.checkpoint.executor import copy_to_store
    from shardspec.checkpoint.upload import RemoteStaging

    target = job.target
    if workers is not None and workers.member.rank:
        there = frozenset(map(str, _list(workers.hear("there", 0))))
        staging = RemoteStaging(
            path, target.directory, there, frozenset(), options.overwrite, token
        )
        try:
            crcs = copy_to_store(job, staging, groups, (), options.threads)
            job.source.check_unchanged()
            workers.say("share", [crcs, _crcs_of(job, groups)])
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
        token,
        directory=target.directory,
        overwrite=options.overwrite,
        replaced=replaced,
    )
    if workers is not None:
        workers.say("there", sorted(staging.there))
    try:
        empty = [number for number, file in enumerate(target.files) if not file.extents]
        crcs = copy_to_store(job, staging, groups, empty, options.threads)
        job.source.check_unchanged()
        if workers is not None:
            workers.say("share", [crcs, _crcs_of(job, groups)])
            for said in workers.gather("share"):
                of_files, of_extents = _list(said)
                crcs.update(of_files)
                _take_crcs(job, of_extents)
        written: _Written = [(f.name, f.num_bytes, crcs[f.name]) for f in target.files]
        last = _last(job)
        written += [(name, len(data), crc32(data)) for name, data in last.items()]
        staging.publish([file.name for file in target.files], last)
    except BaseException:
        if workers is not None:
            names = (name for said in workers.said("share") for name in _list(said)[0])
            staging.made.extend(map(staging.place, names))
        staging.discard()
        raise
    if workers is not None:
        workers.say("written", written)
    return written


def _cast_losses(counts: CastCounts, workers: "Workers | None") -> "CastLosses | None":
    """Return what casts lost; the first of several processes learns of all."""
    found = counts.losses
    if workers is None:
        return found
    workers.say("cast", None if found is None else found.to_json())
    if workers.member.rank:
        return found
    from shardspec.checkpoint.numeric import CastLosses

    every = [CastLosses(**said) for said in workers.gather("cast") if isinstance(said, dict)]
    return sum(every, CastLosses()) if every else None


class _Read(NamedTuple):
    """What will be read."""

    files: int
    num_bytes: int


def _check_tensors(
    source: Catalog, tensors: Sequence[OutputTensor], verify: bool, workers: "Workers | None"
) -> _Read:
    """Check that the boxes of every tensor tile it, and that those stored twice agree."""
    paths: set[Path] = set()
    num_bytes = 0
    tiled: set[object] = set()
    copies_of = MemoizedByBoxes(partial(check_tiling, tiled=tiled))
    files_of = MemoizedByBoxes(lambda outline: {held.path for held in distinct(outline)})
    with OpenFiles() as files:
        for place, name in enumerate(sorted({tensor.source for tensor in tensors})):
            outline = source.outline(name)
            copies = copies_of(outline)
            unsure = copies and not (verify and source.copies_agree(name))
            # Each of several processes compares its share.
            if unsure and (workers is None or place % workers.member.size == workers.member.rank):
                tensor = source.tensor(name)
                for group in check_tiling(tensor, tiled):
                    check_replicas(tensor, group, files, trust_digests=verify)
            paths |= files_of(outline)
            # They tile it, for every addend once.
            addends = prod(pending.addends for pending in outline.pending)
            num_bytes += addends * prod(outline.shape) * item_bytes(outline.dtype)
    return _Read(len(paths), num_bytes)

"""From a checkpoint to an output: checked first, then written, by one process or by several."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import Catalog, distinct
from shardspec.checkpoint.compare import check_replicas
from shardspec.checkpoint.coordinate import Member
from shardspec.checkpoint.formats.names import INDEX_SUFFIX, INFO_NAME, METADATA_NAME
from shardspec.checkpoint.moving.cast_counts import CastCounts
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.report import WriteReport
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.tiling import MemoizedByBoxes, check_tiling
from shardspec.checkpoint.writing.destination import (
    check_destination,
    check_others,
    files_of_checkpoint,
)
from shardspec.checkpoint.writing.fill import Order, Progress
from shardspec.checkpoint.writing.targets import Target, Wanted
from shardspec.checkpoint.writing.write import Written, write_target
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    from shardspec.checkpoint.coordinate import Workers
    from shardspec.checkpoint.numeric import CastLosses

__all__ = ["Build", "How", "Plan", "produce"]

Plan: TypeAlias = tuple[Sequence[Wanted], Target]
"""Which tensors are wanted, and where they go."""
Build: TypeAlias = Callable[[Catalog, str | None], Plan]
"""Makes a plan for a source, given a word to name the output by, if it is to be a certain one."""


class How(NamedTuple):
    """How an output is written; see `merge`."""

    threads: int
    strict_cast: bool
    overwrite: bool
    verify: bool
    reread: bool
    dry_run: bool
    progress: Progress | None
    member: Member | None


def produce(
    checkpoint: Path | str | Catalog, output: Path, format: str, build: Build, how: How
) -> WriteReport:
    """Check that an output can be made of a checkpoint and may be written, and write it.

    Raises
    ------
    OutputExistsError, CheckpointError
        As for `merge`.
    """
    started = time.monotonic()
    if how.threads < 1:
        raise CheckpointError(f"{how.threads} threads write nothing; give at least 1")
    if how.member is None or how.dry_run:
        report = _produce(checkpoint, output, format, build, how, None)
    else:
        if "\0" in str(output):
            raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL")
        # What few runs need is imported where it is: starting is a tenth of merging a gigabyte.
        from shardspec.checkpoint.coordinate import together

        with together(how.member, output.absolute()) as workers:
            report = _produce(checkpoint, output, format, build, how, workers)
    return replace(report, seconds=time.monotonic() - started)


def _produce(
    checkpoint: Path | str | Catalog,
    output: Path,
    format: str,  # as the report names it
    build: Build,
    how: How,
    workers: "Workers | None",
) -> WriteReport:
    source = as_catalog(checkpoint)
    wanted, target = build(source, None if workers is None else workers.token)
    path = output
    first = workers is None or workers.member.rank == 0
    if first:
        path = check_destination(
            output, source, directory=target.directory, overwrite=how.overwrite
        )
    read = _check_tensors(source, wanted, how.verify, workers)
    report = WriteReport(
        path=output,
        format=format,
        read=source.format,
        read_files=read.files,
        read_bytes=read.num_bytes,
        tensors=len(wanted),
        files=tuple(file.name for file in target.files),
        num_bytes=target.num_bytes,
        seconds=0.0,
        crc32=None,
        cast_losses=None,
        left_out=tuple(sorted(source.extras.keys() - target.carried)),
        written=False,
    )
    replaced: frozenset[str] = frozenset()
    if how.overwrite and target.directory and first:
        replaced = files_of_checkpoint(path)
        new = {file.name for file in target.files}
        if target.last is not None:
            new.add(_LISTS[format])
        check_others(path, replaced, frozenset(new), listed=format != "huggingface")
    if how.dry_run:
        return report
    cast_counts = CastCounts(strict=how.strict_cast)
    order = Order(
        source,
        target,
        path,
        overwrite=how.overwrite,
        verify=how.verify,
        reread=how.reread,
        replaced=replaced,
        threads=how.threads,
        cast_counts=cast_counts,
        progress=how.progress,
    )
    done = _write(order, workers)
    return replace(
        report,
        files=done.files,
        num_bytes=done.num_bytes,
        crc32=done.crc32,
        cast_losses=_cast_losses(cast_counts, workers),
        written=True,
    )


_LISTS: Final = {
    "shardspec": INFO_NAME,
    "dcp": METADATA_NAME,
    "huggingface": f"model{INDEX_SUFFIX}",
}
"""What names the other files of an output, by its format."""


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


def _write(order: Order, workers: "Workers | None") -> Written:
    remote = isinstance(order.path, RemotePath)
    if remote and workers is not None:
        from shardspec.checkpoint.writing.write_remote_together import write_remote_together

        return write_remote_together(workers, order)
    if remote:
        from shardspec.checkpoint.writing.write_remote import write_remote

        return write_remote(order)
    if workers is not None:
        from shardspec.checkpoint.writing.write_together import write_together

        return write_together(workers, order)
    return write_target(order)


class _Read(NamedTuple):
    """What will be read."""

    files: int
    num_bytes: int


def _check_tensors(
    source: Catalog, wanted: Sequence[Wanted], verify: bool, workers: "Workers | None"
) -> _Read:
    """Check that the boxes of every tensor tile it, and that those stored twice agree.

    Raises
    ------
    CheckpointError
        If they do not.
    """
    paths: set[Path] = set()
    num_bytes = 0
    tiled: set[object] = set()
    copies_of = MemoizedByBoxes(partial(check_tiling, tiled=tiled))
    files_of = MemoizedByBoxes(lambda outline: {held.path for held in distinct(outline)})
    with OpenFiles() as files:
        for place, name in enumerate(sorted({tensor.source for tensor in wanted})):
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

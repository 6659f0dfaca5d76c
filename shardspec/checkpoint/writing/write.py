"""Carrying out what is to be written: filled, flushed, read again and compared, and then named."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import StoredBox
from shardspec.checkpoint.commit import staged_output, sync_directory
from shardspec.checkpoint.moving.ahead import LEAST_BYTES, Ahead
from shardspec.checkpoint.moving.behind import Behind
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.digests import crc32, crc32_combine
from shardspec.checkpoint.moving.to_disk import write_all
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.writing.fill import (
    Job,
    Meter,
    NewFile,
    Order,
    check_again,
    check_the_rest,
    digest_of_file,
    fill_slot,
    parts_of,
    plan,
    wanted_by,
)
from shardspec.checkpoint.writing.targets import OutputFile, Piece, Target
from shardspec.checkpoint.writing.threads import do_together

__all__ = [
    "FileDigest",
    "Written",
    "finish",
    "put_pieces",
    "summed",
    "write_target",
]


class Written(NamedTuple):
    """What has been written."""

    files: tuple[str, ...]
    """Names in the output, the one that makes it count last."""
    num_bytes: int
    crc32: int | None
    """CRC-32 of all files one after the other; None if it was not asked for."""


class FileDigest(NamedTuple):
    """CRC-32 of what was written into a file."""

    slots: tuple[int, ...]
    whole: int
    num_bytes: int


def write_target(order: Order) -> Written:
    """Write an output whole or not at all.

    Raises
    ------
    OutputExistsError
        If there is something of that name and it is not to be replaced.
    CheckpointError
        If another run is at work on it, a digest is wrong, or the system refuses.
    """
    target, path, threads = order.target, order.path, order.threads
    # With several files at once the CPU is busy enough.
    beside = threads == 1 or len(target.files) == 1
    job = order.job(Meter(target.num_bytes, order.progress), beside=beside)
    with staged_output(
        path, directory=target.directory, overwrite=order.overwrite, replaced=order.replaced
    ) as place:
        work = [
            partial(_write, job, file, place / file.name if target.directory else place)
            for file in target.files
        ]
        found = do_together(work, threads, job.meter.failed)
        if order.verify:
            slots = (slot for file in target.files for slot in file.slots)
            check_the_rest(job, slots, {box for _, judged in found for box in judged})
        return finish(job, target, place, [digest for digest, _ in found])


def finish(job: Job, target: Target, place: Path, found: Sequence[FileDigest]) -> Written:
    """Write the files that come last, once the others are on the disk.

    Parameters
    ----------
    job, target
        What is written.
    place
        Where, until it has its name.
    found
        The digest of every file of the target.
    """
    job.source.check_unchanged()
    digests = {file.name: digest for file, digest in zip(target.files, found, strict=True)}
    if target.last is not None:
        for name, data in target.last({name: at.slots for name, at in digests.items()}):
            with NewFile(place / name, job.path, len(data)) as fd:
                write_all(fd, memoryview(data), 0, job.path)
            digests[name] = FileDigest((), crc32(data), len(data))
            if job.reread:
                check_again(place / name, parts_of([Piece(0, data)], (), ()), job.path)
    if target.directory:
        sync_directory(place)
    return summed(job, digests)


def summed(job: Job, digests: Mapping[str, FileDigest]) -> Written:
    """Return what was written, given the digest of every file by name."""
    num_bytes = sum(digest.num_bytes for digest in digests.values())
    if not job.digested:
        return Written(tuple(digests), num_bytes, None)
    value = 0
    for digest in digests.values():
        value = int(crc32_combine(value, digest.whole, digest.num_bytes))
    return Written(tuple(digests), num_bytes, value)


_Found = tuple[FileDigest, list[StoredBox]]
_WORTH_READING_AHEAD: Final = 16 << 20
"""Bytes of a file that are worth a thread that has the disk read ahead."""


def _write(job: Job, file: OutputFile, place: Path) -> _Found:
    """Write one file; return its digest, and the boxes found to be right on the way."""
    crcs: list[int] = []
    judged: list[StoredBox] = []
    here = not isinstance(job.source.directory, RemotePath)
    worth = here and job.beside and file.num_bytes >= _WORTH_READING_AHEAD
    ahead = Ahead(wanted_by(job, file.slots, LEAST_BYTES) if worth else None)

    def advance(num_bytes: int) -> None:
        ahead.advance(num_bytes)
        job.meter.advance(num_bytes)

    with NewFile(place, job.path, file.num_bytes) as fd, OpenFiles() as files:
        buffers = Buffers()
        put_pieces(job, fd, file.pieces)
        plan(job, file.slots, files)
        with ahead, Behind(fd, job.path, beside=job.beside) as behind:
            filled = [fill_slot(job, slot, behind, files, buffers, advance) for slot in file.slots]
        for slot_filled in filled:
            crc, boxes = slot_filled.judged()
            crcs.append(crc)
            judged += boxes
        late = file.late(crcs) if file.late is not None else ()
        put_pieces(job, fd, late)
    check_again(place, parts_of(chain(file.pieces, late), (), ()), job.path)
    whole = digest_of_file(file, chain(file.pieces, late), crcs) if job.digested else 0
    return FileDigest(tuple(crcs), whole, file.num_bytes), judged


def put_pieces(job: Job, fd: int, pieces: Sequence[Piece]) -> None:
    """Write what is no tensor's."""
    for piece in pieces:
        write_all(fd, memoryview(piece.data), piece.offset, job.path)
        job.meter.advance(len(piece.data))

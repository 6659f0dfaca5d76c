"""Writing an output into an object store: every file from its start to its end, the last one last.

Nothing can be renamed there in one step, so each file appears under its own name once it is
complete, and what makes a directory count (an index, a sharding info) is written when the others
were read again.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardspec.checkpoint.catalog import StoredBox
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.digests import crc32, crc32_combine
from shardspec.checkpoint.moving.pieces import Block
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.writing.fill import (
    DigestingSink,
    Job,
    Meter,
    Order,
    check_again,
    check_the_rest,
    digest_of_file,
    dtypes_of,
    fill_by,
    parts_of,
    plan,
)
from shardspec.checkpoint.writing.replacing import Places
from shardspec.checkpoint.writing.targets import OutputFile, Piece, Slot, Target
from shardspec.checkpoint.writing.threads import do_together
from shardspec.checkpoint.writing.upload import Upload
from shardspec.checkpoint.writing.write import FileDigest, Written, summed

__all__ = ["Uploads", "write_remote"]


@dataclass(frozen=True, slots=True)
class Uploads:
    """What the writing of all files into a store has in common."""

    job: Job
    target: Target
    places: Places
    overwrite: bool
    made: list[RemotePath]
    """What is there so far; removed on failure."""

    def write(self, files: Sequence[OutputFile], threads: int) -> list["_Found"]:
        """Write files of the target, and read them again; return the digest of each."""
        work = [partial(_write, self, file) for file in files]
        return do_together(work, threads, self.job.meter.failed)

    def finish(self, digests: Mapping[str, FileDigest]) -> Written:
        """Write the files that come last, and publish all."""
        self.job.source.check_unchanged()
        files = tuple(digests)
        every = dict(digests)
        beside = not self.places.there.isdisjoint(files)
        if self.target.last is not None:
            for name, data in self.target.last({name: at.slots for name, at in digests.items()}):
                every[name] = _put(self, self.places.place(name, beside=beside), data)
        last = tuple(name for name in every if name not in digests)
        self.places.publish(files, last, self.made)
        return summed(self.job, every)


def write_remote(order: Order) -> Written:
    """Write an output so that it counts when it is whole, or not at all.

    What is replaced stays until the new files were read again; see `Places`. On failure what was
    written is removed.

    Raises
    ------
    OutputExistsError, CheckpointError
        As `write_target`.
    """
    target, path, overwrite = order.target, order.path, order.overwrite
    assert isinstance(path, RemotePath), "it is to be written to a store"
    job = order.job(Meter(target.num_bytes, order.progress))
    places = Places.found(
        path,
        os.urandom(8).hex(),
        directory=target.directory,
        overwrite=overwrite,
        replaced=order.replaced,
    )
    uploads = Uploads(job, target, places, overwrite, [])
    try:
        found = uploads.write(target.files, order.threads)
        if order.verify:
            slots = (slot for file in target.files for slot in file.slots)
            check_the_rest(job, slots, {box for _, judged in found for box in judged})
        names = (file.name for file in target.files)
        return uploads.finish(dict(zip(names, (digest for digest, _ in found), strict=True)))
    except BaseException:
        places.discard(uploads.made)
        raise


_Found = tuple[FileDigest, list[StoredBox]]


def _write(uploads: Uploads, file: OutputFile) -> _Found:
    """Write one file; return its digest, and the boxes found to be right on the way."""
    job, place = uploads.job, uploads.places.place(file.name)
    crcs: list[int] = []
    judged: list[StoredBox] = []
    pieces = list(file.pieces)
    parts: Sequence[Piece | Slot] = sorted((*file.pieces, *file.slots), key=lambda p: p.offset)
    with Upload(place, file.num_bytes, overwrite=uploads.overwrite) as upload, OpenFiles() as files:
        buffers = Buffers()
        plan(job, (part for part in parts if isinstance(part, Slot)), files)
        for part in parts:
            if isinstance(part, Piece):
                _write_piece(job, upload, part)
                continue
            upload.write(bytes(part.offset - upload.written))
            stream = _Stream(upload, buffers, job, part)
            crc, boxes = fill_by(job, part, stream, files, buffers).judged()
            crcs.append(crc)
            judged += boxes
            for piece in () if file.late is None else file.late(crcs, len(crcs) - 1):
                _write_piece(job, upload, piece)
                pieces.append(piece)
        assert upload.written == file.num_bytes, "parts are as long as planned"
    uploads.made.append(place)
    again = (file.slots, crcs) if job.reread else ((), ())
    check_again(place, parts_of(pieces, *again), job.path)
    whole = digest_of_file(file, pieces, crcs) if job.digested else 0
    return FileDigest(tuple(crcs), whole, file.num_bytes), judged


def _write_piece(job: Job, upload: Upload, piece: Piece) -> None:
    upload.write(bytes(piece.offset - upload.written))
    upload.write(piece.data)
    job.meter.advance(len(piece.data))


def _put(uploads: Uploads, place: RemotePath, data: bytes) -> FileDigest:
    """Write a small file."""
    with Upload(place, len(data), overwrite=uploads.overwrite) as upload:
        upload.write(data)
    uploads.made.append(place)
    if uploads.job.reread:
        check_again(place, parts_of([Piece(0, data)], (), ()), uploads.job.path)
    return FileDigest((), crc32(data), len(data))


class _Stream(DigestingSink):
    """A `Sink` that writes on where it stopped, as targets are filled from their start."""

    def __init__(self, upload: Upload, buffers: Buffers, job: Job, slot: Slot) -> None:
        self._upload = upload
        self._buffers = buffers
        self._job = job
        self._name = f"tensor {slot.tensor.name!r}"
        self._dtypes = dtypes_of(job, slot)
        self.crc32 = 0

    def room(self, block: Block) -> memoryview:
        """Return the start of the buffer."""
        return self._buffers.block[: block.num_bytes]

    # Sink names the parameters.
    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:  # noqa: ARG002
        """Write the block."""
        self._write(room, crc)

    def _write(self, room: memoryview, crc: int | None = None) -> None:
        if self._dtypes is not None:
            from shardspec.checkpoint.numeric import cast

            (room, losses), crc = cast(room, *self._dtypes), None
            assert self._job.cast_counts is not None, "what is cast is counted"
            self._job.cast_counts.add(self._name, losses)
        if self._job.digested:
            if crc is None:
                self.crc32 = crc32(room, self.crc32)
            else:
                self.crc32 = int(crc32_combine(self.crc32, crc, len(room)))
        self._upload.write(room)
        self._job.meter.advance(len(room))

"""Writing an output into an object store: every file from its start to its end, the last one last.

Nothing can be renamed there, so each file appears under its own name once it is complete, and what
makes a directory count (an index, a sharding info) is written when the others were read again.
"""

from collections.abc import Sequence
from functools import partial

from shardspec.checkpoint.copy import Buffers
from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.files import OpenFiles, SourceFile
from shardspec.checkpoint.fill import (
    Job,
    Meter,
    Progress,
    check_again,
    check_the_rest,
    digest_of_file,
    dtypes_of,
    fill_by,
    parts_of,
)
from shardspec.checkpoint.numbers import cast
from shardspec.checkpoint.pieces import Block, Run
from shardspec.checkpoint.regions import Bytes
from shardspec.checkpoint.remote import RemotePath
from shardspec.checkpoint.source import CheckpointSource, StoredBox
from shardspec.checkpoint.targets import OutputFile, Piece, Slot, Target
from shardspec.checkpoint.upload import Upload
from shardspec.checkpoint.write import FileDigest, Written, do_together, summed
from shardspec.errors import CheckpointError

__all__ = ["check_streams", "write_remote"]


def check_streams(path: RemotePath, target: Target) -> None:
    """Refuse a form that is not written from its start to its end.

    Raises
    ------
    CheckpointError
        If the target is of such a form.
    """
    for file in target.files:
        if file.late is not None:
            raise CheckpointError(
                f"{path}: a zip of torch, whose headers hold digests of what follows them, is not "
                "written to a URL; write it to a disk and copy it there, or write safetensors"
            )


def write_remote(
    source: CheckpointSource,
    target: Target,
    path: RemotePath,
    *,
    overwrite: bool,
    verify: bool,
    threads: int,
    progress: Progress | None,
) -> Written:
    """Write an output so that it counts when it is whole, or not at all.

    What is replaced stays until the new one counts, where no file of both has the same name; else
    it is removed first. On failure the files that were written are removed.

    Parameters
    ----------
    source, target, path, overwrite, verify, threads, progress
        As for `write_target`; `check_streams` has let the target pass.

    Raises
    ------
    OutputExistsError, CheckpointError
        As `write_target`.
    """
    job = Job(source, path, verify, verify or target.digested, Meter(target.num_bytes, progress))
    new = {file.name for file in target.files}
    old = _old(path, target)
    if old & new:
        _remove(path, old)
        old = set()
    made: list[RemotePath] = []
    try:
        work = [
            partial(
                _write, job, file, path / file.name if target.directory else path, overwrite, made
            )
            for file in target.files
        ]
        found = do_together(work, threads, job.meter)
        if verify:
            slots = (slot for file in target.files for slot in file.slots)
            check_the_rest(job, slots, {box for _, judged in found for box in judged})
        digests = {file.name: digest for file, (digest, _) in zip(target.files, found, strict=True)}
        if target.last is not None:
            for name, data in target.last({name: at.slots for name, at in digests.items()}):
                digests[name] = _put(job, path / name, data, overwrite, made)
    except BaseException:
        for file in made:
            file.unlink(missing_ok=True)
        raise
    _remove(path, old - digests.keys())
    return summed(job, digests)


def _old(path: RemotePath, target: Target) -> set[str]:
    """Return the files of a directory that is replaced."""
    if not target.directory:
        return set()
    try:
        return set(path.entries())
    except FileNotFoundError:
        return set()


def _remove(path: RemotePath, names: set[str]) -> None:
    """Remove files, first those that say what the others are: none of them counts then."""
    for name in sorted(names, key=lambda name: (not name.endswith((".json", ".metadata")), name)):
        (path / name).unlink(missing_ok=True)


_Found = tuple[FileDigest, list[StoredBox]]


def _write(
    job: Job, file: OutputFile, place: RemotePath, overwrite: bool, made: list[RemotePath]
) -> _Found:
    """Write one file; return its digest, and the boxes found to be right on the way."""
    crcs: list[int] = []
    judged: list[StoredBox] = []
    parts: Sequence[Piece | Slot] = sorted((*file.pieces, *file.slots), key=lambda p: p.offset)
    with Upload(place, file.num_bytes, overwrite=overwrite) as upload, OpenFiles() as files:
        buffers = Buffers()
        for part in parts:
            upload.write(bytes(part.offset - upload.written))
            if isinstance(part, Piece):
                upload.write(part.data)
                job.meter.advance(len(part.data))
                continue
            sink = _Stream(upload, buffers, job, part)
            crc, boxes = fill_by(job, part, sink, files, buffers)
            crcs.append(crc)
            judged += boxes
        assert upload.written == file.num_bytes, "parts are as long as planned"
    made.append(place)
    slots = file.slots if job.verify else ()
    check_again(place, parts_of(file.pieces, slots, crcs if job.verify else ()), job.path)
    whole = digest_of_file(file, file.pieces, crcs) if job.digested else 0
    return FileDigest(tuple(crcs), whole, file.num_bytes), judged


def _put(
    job: Job, place: RemotePath, data: bytes, overwrite: bool, made: list[RemotePath]
) -> FileDigest:
    """Write a small file."""
    with Upload(place, len(data), overwrite=overwrite) as upload:
        upload.write(data)
    made.append(place)
    if job.verify:
        check_again(place, parts_of([Piece(0, data)], (), ()), job.path)
    return FileDigest((), crc32(data), len(data))


class _Stream:
    """A `Sink` that writes on where it stopped, as targets are filled from their start."""

    def __init__(self, upload: Upload, buffers: Buffers, job: Job, slot: Slot) -> None:
        self._upload = upload
        self._buffers = buffers
        self._job = job
        self._dtypes = dtypes_of(job, slot)
        self.crc32 = 0

    @property
    def direct(self) -> bool:
        """False: all bytes pass through memory."""
        return False

    def copy(self, run: Run, file: SourceFile) -> None:
        """Write a run, a block at a time."""
        for at in range(0, run.num_bytes, self._buffers.block.size):
            block = self._buffers.block[: run.num_bytes - at]
            file.read_into(block.data, run.source_offset + at)
            self._write(block)

    def room(self, block: Block) -> Bytes:
        """Return the start of the buffer."""
        return self._buffers.block[: block.num_bytes]

    # The parameters are named by Sink.
    def put(self, block: Block, room: Bytes, crc: int | None = None) -> None:  # noqa: ARG002
        """Write the block."""
        self._write(room)

    def _write(self, room: Bytes) -> None:
        if self._dtypes is not None:
            room = cast(room, *self._dtypes)
        if self._job.digested:
            self.crc32 = crc32(room.data, self.crc32)
        self._upload.write(room.data)
        self._job.meter.advance(len(room))

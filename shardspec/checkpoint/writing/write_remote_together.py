"""Several processes write one output into an object store: each some of its files, one commits.

A store takes a file from one process. So it is whole files that are divided, and an output of one
file is written by one process.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

from shardspec.checkpoint.catalog import Catalog, StoredBox, distinct
from shardspec.checkpoint.coordinate import Member, Workers
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.writing.fill import Meter, Order, Progress, check_the_rest
from shardspec.checkpoint.writing.replacing import Places
from shardspec.checkpoint.writing.targets import OutputFile, Target
from shardspec.checkpoint.writing.write import FileDigest, Written
from shardspec.checkpoint.writing.write_remote import Uploads

__all__ = ["files_of", "write_remote_together"]

_LISTEN_S: Final = 1.0
"""How often to ask, while writing, whether another one has failed."""


def files_of(target: Target, member: Member) -> list[OutputFile]:
    """Return the files that one process writes: the next longest goes to who has least so far.

    Examples
    --------
    >>> files = tuple(OutputFile(str(n), n, (), ()) for n in (3, 9, 4, 5))
    >>> target = Target(files, directory=True)
    >>> [[file.name for file in files_of(target, Member(rank, 2))] for rank in range(2)]
    [['3', '9'], ['4', '5']]
    """
    loads = [(0, rank) for rank in range(member.size)]
    mine = set()
    for file in sorted(target.files, key=lambda file: -file.num_bytes):
        load, rank = min(loads)
        loads[loads.index((load, rank))] = (load + file.num_bytes, rank)
        if rank == member.rank:
            mine.add(file.name)
    return [file for file in target.files if file.name in mine]


def write_remote_together(workers: Workers, order: Order) -> Written:
    """Write an output so that it counts when it is whole, or not at all, as one of several.

    Parameters
    ----------
    workers
        The processes; all call this for the same source, target and path.
    order
        What to write; the target of the first process counts.

    Raises
    ------
    OutputExistsError, CheckpointError
        As `write_remote`, in every process.
    """
    source, target, path, overwrite = order.source, order.target, order.path, order.overwrite
    assert isinstance(path, RemotePath), "it is to be written to a store"
    mine = files_of(target, workers.member)
    total = sum(file.num_bytes for file in mine)
    job = order.job(Meter(total, _listening(workers, order.progress)))
    if workers.member.rank:
        there = frozenset(map(str, _list(workers.hear("there", 0))))
        places = Places(path, target.directory, there, frozenset(), workers.token)
        uploads = Uploads(job, target, places, overwrite, [])
        try:
            workers.say("share", _share(uploads, mine, order.threads))
        except BaseException:
            places.discard(uploads.made)
            raise
        return _outcome(workers, places, uploads.made)
    places = Places.found(
        path,
        workers.token,
        directory=target.directory,
        overwrite=overwrite,
        replaced=order.replaced,
    )
    uploads = Uploads(job, target, places, overwrite, [])
    workers.say("there", sorted(places.there))
    try:
        workers.say("share", _share(uploads, mine, order.threads))
        digests, judged = _joined(source, workers)
        if order.verify:
            slots = (slot for file in target.files for slot in file.slots)
            check_the_rest(job, slots, judged)
        written = uploads.finish({file.name: digests[file.name] for file in target.files})
    except BaseException:
        others = [places.place(name) for said in workers.said("share") for name in _list(said)[0]]
        places.discard([*uploads.made, *others])
        raise
    workers.say("written", [list(written.files), written.num_bytes, written.crc32])
    return written


def _outcome(workers: Workers, places: Places, made: Sequence[RemotePath]) -> Written:
    """Return what the first process says in the end, who alone knows whether all went well."""
    try:
        files, num_bytes, value = _list(workers.hear("written", 0))
    except BaseException:
        if workers.has_failed():
            places.discard(made)
        raise
    return Written(tuple(files), num_bytes, value)


def _listening(workers: Workers, progress: Progress | None) -> Progress:
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


def _list(said: object) -> list[Any]:
    assert isinstance(said, list), "processes of one version talk to each other"
    return said


def _share(uploads: Uploads, files: Sequence[OutputFile], threads: int) -> object:
    """Write files; return their digests, and which boxes were found to be right."""
    found = uploads.write(files, threads)
    digests = {
        file.name: (digest.slots, digest.whole, digest.num_bytes)
        for file, (digest, _) in zip(files, found, strict=True)
    }
    judged = []
    for file, (_, boxes) in zip(files, found, strict=True):
        right = set(boxes)
        for name in sorted({slot.tensor.source for slot in file.slots}):
            order = enumerate(distinct(uploads.job.source.tensor(name)))
            judged += [(name, place) for place, box in order if box in right]
    uploads.job.source.check_unchanged()
    return [digests, judged]


def _joined(source: Catalog, workers: Workers) -> tuple[dict[str, FileDigest], set[StoredBox]]:
    """Return the digest of every file, and the boxes that some process found right."""
    digests: dict[str, FileDigest] = {}
    judged: set[StoredBox] = set()
    for said in workers.gather("share"):
        of_files, found = _list(said)
        for name, (slots, whole, num_bytes) in of_files.items():
            digests[name] = FileDigest(tuple(slots), whole, num_bytes)
        judged |= {distinct(source.tensor(name))[place] for name, place in found}
    return digests, judged

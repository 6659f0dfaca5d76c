"""Several processes write one output into an object store: each some of its files, one commits.

A store takes a file from one process. So it is whole files that are divided, and an output of one
file is written by one process.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

from shardspec.checkpoint.catalog import Catalog, StoredBox, distinct
from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.writing.fill import Meter, Order, Progress, check_the_rest
from shardspec.checkpoint.writing.member import Member
from shardspec.checkpoint.writing.replacing import Places
from shardspec.checkpoint.writing.targets import OutputFile, Target
from shardspec.checkpoint.writing.team import Team
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


def write_remote_together(team: Team, order: Order) -> Written:
    """Write an output so that it counts when it is whole, or not at all, as one of several.

    Parameters
    ----------
    team
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
    mine = files_of(target, team.member)
    total = sum(file.num_bytes for file in mine)
    job = order.job(Meter(total, _listening(team, order.progress)))
    if team.member.rank:
        old = frozenset(map(str, _list(team.hear("old", 0))))
        places = Places(path, target.directory, old, team.token)
        uploads = Uploads(job, target, places, overwrite, [])
        try:
            team.say("share", _share(uploads, mine, order.threads))
        except BaseException:
            places.discard(uploads.made)
            raise
        return _outcome(team, places, uploads.made)
    places = Places.found(path, team.token, directory=target.directory, overwrite=overwrite)
    uploads = Uploads(job, target, places, overwrite, [])
    team.say("old", sorted(places.old))
    try:
        team.say("share", _share(uploads, mine, order.threads))
        digests, judged = _joined(source, team)
        if order.verify:
            slots = (slot for file in target.files for slot in file.slots)
            check_the_rest(job, slots, judged)
        written = uploads.finish({file.name: digests[file.name] for file in target.files})
    except BaseException:
        others = [places.place(name) for said in team.said("share") for name in _list(said)[0]]
        places.discard([*uploads.made, *others])
        raise
    team.say("written", [list(written.files), written.num_bytes, written.crc32])
    return written


def _outcome(team: Team, places: Places, made: Sequence[RemotePath]) -> Written:
    """Return what the first process says in the end, who alone knows whether all went well."""
    try:
        files, num_bytes, value = _list(team.hear("written", 0))
    except BaseException:
        if team.has_failed(0):
            places.discard(made)
        raise
    return Written(tuple(files), num_bytes, value)


def _listening(team: Team, progress: Progress | None) -> Progress:
    """Return what is told of progress, and stops it when another process has failed."""
    due = time.monotonic() + _LISTEN_S

    def listen(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() > due:
            team.listen()
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


def _joined(source: Catalog, team: Team) -> tuple[dict[str, FileDigest], set[StoredBox]]:
    """Return the digest of every file, and the boxes that some process found right."""
    digests: dict[str, FileDigest] = {}
    judged: set[StoredBox] = set()
    for said in team.gather("share"):
        of_files, found = _list(said)
        for name, (slots, whole, num_bytes) in of_files.items():
            digests[name] = FileDigest(tuple(slots), whole, num_bytes)
        judged |= {distinct(source.tensor(name))[place] for name, place in found}
    return digests, judged

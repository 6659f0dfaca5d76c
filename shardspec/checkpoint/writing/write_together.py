"""Several processes write one output: each the same share of its bytes, one of them names it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import Any

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import Catalog, StoredBox, distinct
from shardspec.checkpoint.commit import joined_output, real_path, staged_output
from shardspec.checkpoint.coordinate import Member, Workers, failing_together
from shardspec.checkpoint.moving.behind import Behind
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.digests import crc32_combine
from shardspec.checkpoint.source_files import OpenFiles
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
)
from shardspec.checkpoint.writing.targets import OutputFile, Slot, Target
from shardspec.checkpoint.writing.write import FileDigest, Written, finish, put_pieces
from shardspec.dtypes import item_bytes

__all__ = ["Share", "share_of", "write_together"]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a slot that one process fills."""

    file: int
    """Which file of the target."""
    slot: int
    """Which of its slots."""
    part: Slot
    """Some of its rows."""


def share_of(target: Target, member: Member) -> list[Share]:
    """Return what one process fills: a stretch of all slots, cut at a row of some box.

    Examples
    --------
    >>> from shardspec.checkpoint.writing.targets import Wanted
    >>> from shardspec.checkpoint.formats.safetensors import safetensors_target
    >>> target = safetensors_target("x", [Wanted("w", "w", (5, 2), "int8")])
    >>> [share.part.box for rank in range(2) for share in share_of(target, Member(rank, 2))]
    [((0, 3), (0, 2)), ((3, 5), (0, 2))]
    """
    total = sum(slot.num_bytes for file in target.files for slot in file.slots)
    low, high = (-(-total * rank // member.size) for rank in (member.rank, member.rank + 1))
    at = 0
    shares = []
    for number, file in enumerate(target.files):
        for place, slot in enumerate(file.slots):
            shares += [Share(number, place, part) for part in _rows(slot, low - at, high - at)]
            at += slot.num_bytes
    return shares


def _rows(slot: Slot, low: int, high: int) -> Iterator[Slot]:
    """Return the rows of a slot that start in a stretch of its bytes; none if there are none."""
    if not slot.box:
        if low <= 0 < high:
            yield slot
        return
    (first, end), *inner = slot.box
    row = prod(box_shape(tuple(inner))) * item_bytes(slot.tensor.dtype)
    if not row or first == end:
        return
    start, stop = (min(max(-(-edge // row), 0), end - first) for edge in (low, high))
    if start < stop:
        box = ((first + start, first + stop), *inner)
        yield Slot(slot.tensor, box, slot.offset + start * row)


def write_together(workers: Workers, order: Order) -> Written:
    """Write an output whole or not at all, as one of several processes.

    Parameters
    ----------
    workers
        The processes; all call this for the same source, target and path.
    order
        What to write; the target of the first process counts. Every process writes one file at a
        time.

    Raises
    ------
    OutputExistsError, CheckpointError
        As `write_target`, in every process.
    """
    source, target, path = order.source, order.target, order.path
    shares = share_of(target, workers.member)
    total = sum(share.part.num_bytes for share in shares)
    # The other processes keep the CPU busy enough.
    job = order.job(Meter(total, order.progress), beside=False)
    if workers.member.rank:
        with joined_output(Path(str(workers.hear("place", 0))), path) as place:
            workers.say("share", _fill(job, target, shares, place))
        files, num_bytes, value = _list(workers.hear("written", 0))
        return Written(tuple(files), num_bytes, value)
    # The others hear of a failure before their files go away.
    with (
        staged_output(
            path, directory=target.directory, overwrite=order.overwrite, replaced=order.replaced
        ) as place,
        failing_together(workers),
    ):
        for file in target.files:
            with NewFile(_place(place, target, file), path, file.num_bytes) as fd:
                put_pieces(job, fd, file.pieces)
        workers.say("place", str(real_path(place)))
        workers.say("share", _fill(job, target, shares, place))
        crcs, judged = _joined(source, target, workers)
        if order.verify:
            every = (
                share.part
                for rank in range(workers.member.size)
                for share in share_of(target, Member(rank, workers.member.size))
            )
            check_the_rest(job, every, judged)
        digests = [
            _close(job, file, _place(place, target, file), of_file)
            for file, of_file in zip(target.files, crcs, strict=True)
        ]
        written = finish(job, target, place, digests)
    workers.say("written", [list(written.files), written.num_bytes, written.crc32])
    return written


def _place(place: Path, target: Target, file: OutputFile) -> Path:
    return place / file.name if target.directory else place


def _list(said: object) -> list[Any]:
    assert isinstance(said, list), "processes of one version talk to each other"
    return said


def _fill(job: Job, target: Target, shares: Sequence[Share], place: Path) -> object:
    """Fill this process's share; return the digests, and which boxes were found to be right."""
    digests: list[tuple[int, int, int, int]] = []
    judged: list[tuple[str, int]] = []
    buffers = Buffers()
    with OpenFiles() as files:
        plan(job, (share.part for share in shares), files)
        for number, of_file in groupby(shares, lambda share: share.file):
            at = _place(place, target, target.files[number])
            with (
                NewFile(at, job.path, None) as fd,
                Behind(fd, job.path, beside=job.beside) as behind,
            ):
                filled = [
                    (share, fill_slot(job, share.part, behind, files, buffers)) for share in of_file
                ]
            for share, slot_filled in filled:
                crc, boxes = slot_filled.judged()
                digests.append((number, share.slot, crc, share.part.num_bytes))
                name = share.part.tensor.source
                order = {b: n for n, b in enumerate(distinct(job.source.tensor(name)))}
                judged += [(name, order[box]) for box in boxes]
    job.source.check_unchanged()
    return [digests, judged]


def _joined(
    source: Catalog, target: Target, workers: Workers
) -> tuple[list[list[int]], set[StoredBox]]:
    """Return the CRC-32 of every slot by file, and the boxes that some process found right."""
    crcs = [[0] * len(file.slots) for file in target.files]
    judged = set()
    # Shares are in ascending order, rank after rank, and so are the parts of a slot.
    for said in workers.gather("share"):
        digests, found = _list(said)
        for number, slot, crc, num_bytes in digests:
            crcs[number][slot] = int(crc32_combine(crcs[number][slot], crc, num_bytes))
        judged |= {distinct(source.tensor(name))[place] for name, place in found}
    return crcs, judged


def _close(job: Job, file: OutputFile, place: Path, crcs: Sequence[int]) -> FileDigest:
    """Add to a file what depends on its tensors, once all are there."""
    late = file.late(crcs) if file.late is not None else ()
    if late:
        with NewFile(place, job.path, None) as fd:
            put_pieces(job, fd, late)
    check_again(place, parts_of(chain(file.pieces, late), (), ()), job.path)
    whole = digest_of_file(file, chain(file.pieces, late), crcs) if job.digested else 0
    return FileDigest(tuple(crcs), whole, file.num_bytes)

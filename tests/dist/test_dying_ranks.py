"""A rank that ends, or never comes, is an error on the others: which, in what words, how soon."""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout
from shardspec.boxes import box_shape
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Step,
)
from shardspec.comm.transfers import Transfers
from shardspec.comm.transports import peer_memory
from shardspec.errors import CommunicatorError
from shardspec.layout.moving import transfers_of
from tests.dist.processes import communicator_by, rank_context

pytestmark = pytest.mark.dist

TIMEOUT_S = 2.0
SLACK_S = 6.0
"""For a busy machine."""
MESH = DeviceMesh(range(3), (3,))
VICTIM = 1
GATHER: tuple[Step, str, str] = (AllGather(1, (0,)), "[R,S0]", "[R,R]")
ALL_TO_ALL: tuple[Step, str, str] = (AllToAll(0, 1, (0,), (0,)), "[S0,R]", "[R,S0]")
SCATTER: tuple[Step, str, str] = (ReduceScatter(0, (0,), "sum"), "[R,R|P0]", "[S0,R]")
REDUCE: tuple[Step, str, str] = (AllReduce((0,), "max"), "[R,R|Pmax0]", "[R,R]")
SUM: tuple[Step, str, str] = (AllReduce((0,), "sum"), "[R,R|P0]", "[R,R]")


@dataclass(frozen=True)
class Seen:
    """What a rank saw."""

    kind: type[BaseException]
    text: str
    cause: bool
    at: float
    """On the clock of the whole machine."""


def _step(communicator: ProcessGroupCommunicator, move: tuple[Step, str, str], rank: int) -> None:
    step, source, target = move
    before = Layout(MESH, source, (600, 1200), "float32")
    shard = torch.ones(before.local_shape(rank))
    communicator.run(transfers_of(step, before, before.with_spec(target)), {rank: shard})


def _die(out: Any) -> None:
    out.put((VICTIM, time.monotonic()))
    os._exit(3)


def _rank(
    rank: int,
    store: str,
    work: Callable[..., None],
    move: tuple[Step, str, str],
    reads_peers: bool | None,
    timeout_s: float,
    out: Any,
) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=timeout_s),
    )
    communicator = communicator_by(MESH, reads_peers=reads_peers is not False)
    if reads_peers is not None:
        _step(communicator, GATHER, rank)
        assert (communicator.transport_name == "memory") == reads_peers
    try:
        work(rank, communicator, move, out)
    except BaseException as error:
        seen = Seen(type(error), str(error), error.__cause__ is not None, time.monotonic())
        out.put((rank, seen))
    else:
        out.put((rank, None))
    os._exit(0)  # the others are gone: there is nothing to take leave of


def _between(rank: int, communicator: Any, move: Any, out: Any) -> None:
    if rank == VICTIM:
        _die(out)
    _step(communicator, move, rank)


def _inside(rank: int, communicator: Any, move: Any, out: Any) -> None:
    if rank == VICTIM:
        threading.Timer(0.2, _die, [out]).start()
    while True:
        _step(communicator, move, rank)


def _never(rank: int, communicator: Any, move: Any, out: Any) -> None:
    if rank == VICTIM:
        out.put((VICTIM, time.monotonic()))
        time.sleep(TIMEOUT_S + SLACK_S)
        os._exit(0)
    _step(communicator, move, rank)


def seen_by_the_others(
    place: Path,
    work: Callable[..., None],
    move: tuple[Step, str, str],
    reads_peers: bool | None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[list[Any], Any]:
    """Run three ranks, of which one fails, and return what the others saw and when it failed."""
    context = rank_context()
    out = context.SimpleQueue()
    args = (str(place / "store"), work, move, reads_peers, timeout_s, out)
    ranks = [context.Process(target=_rank, args=(rank, *args)) for rank in range(3)]
    try:
        for process in ranks:
            process.start()
        told = dict(out.get() for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert set(told) == {0, 1, 2}
    return [told[rank] for rank in (0, 2)], told[VICTIM]


# By whether peers are read, and whether the rank never comes. Whoever notices first gives up, and
# then has ended for the third rank.
SAID = {
    (True, False): r"(the memory of )?rank [012] (has ended|cannot be read: it has ended)",
    (True, True): r"rank 1 did not answer within|rank [02] has ended or given up",
    (False, False): r"(Connection closed by peer|Read error|Write error|writev|Socket|Timed out)",
    (False, True): r"(Timed out waiting 2000ms|Connection closed by peer|Read error)",
}


def check_told(seen, failed_at, work, move, reads_peers):
    """Check what the others say of a rank that ends, or never comes, and when."""
    never = work is _never
    for rank, error in zip((0, 2), seen, strict=True):
        assert error.kind is CommunicatorError
        others = ", ".join(str(other) for other in range(3) if other != rank)
        assert error.text.startswith(f"{move[0]} with ranks {others} failed: ")
        said = error.text.removeprefix(f"{move[0]} with ranks {others} failed: ")
        assert re.match(SAID[reads_peers, never], said), said
        assert said.endswith("; the job cannot go on")
        assert error.at - failed_at < TIMEOUT_S + SLACK_S
        assert error.at - failed_at > 0.9 * TIMEOUT_S or not never


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reads_peers", [True, False], ids=["reading", "messages"])
@pytest.mark.parametrize(
    ("work", "move"),
    [(_between, ALL_TO_ALL), (_inside, SCATTER), (_inside, SUM)],
    ids=["between", "inside", "inside, all-reduce"],
)
def test_the_others_are_told(tmp_path, work, move, reads_peers):
    seen, failed_at = seen_by_the_others(tmp_path, work, move, reads_peers)
    check_told(seen, failed_at, work, move, reads_peers)


@pytest.mark.parametrize("reads_peers", [True, False], ids=["reading", "messages"])
def test_the_others_are_told_of_one_that_never_comes(waited, reads_peers):
    seen, failed_at = waited["reading" if reads_peers else "messages"]
    check_told(seen, failed_at, _never, REDUCE, reads_peers)


def test_a_rank_that_never_joins(waited):
    """The first step of a mesh, in which the processes of a host look for each other."""
    seen, failed_at = waited["never joins"]
    for others, error in zip(("1, 2", "0, 1"), seen, strict=True):
        assert error.kind is CommunicatorError
        assert re.match(f"ranks? [{others}]+ did not answer: ", error.text)
        assert "gathers a value of ranks 0, 1, 2" in error.text
        assert error.at - failed_at < TIMEOUT_S + SLACK_S


def _convert(rank: int, communicator: Any, _move: Any, out: Any) -> None:
    if rank == VICTIM:
        out.put((VICTIM, time.monotonic()))
        time.sleep(TIMEOUT_S + SLACK_S)
        os._exit(0)
    layout = Layout(MESH, "[S0,R]", (6, 6), "float32")
    tensor = DTensor.from_shards({rank: torch.ones(2, 6)}, layout, communicator)
    tensor.redistribute("[R,S0]")


def test_a_rank_that_never_says_what_to_convert(waited):
    seen, failed_at = waited["says nothing"]
    # Whoever gives up first has gone for the other one.
    for error in seen:
        assert error.kind is CommunicatorError
        assert re.match(r"ranks? [012](, [012])? did not answer: ", error.text)
        assert "source [S0,R], target [R,S0], shape [6, 6], dtype float32" in error.text
        assert error.at - failed_at < TIMEOUT_S + SLACK_S


def _leave(rank: int, communicator: Any, *_: Any) -> None:
    """Rank 0 takes rows of 1, and then of 2, which comes late; by then 1 has gone, as it may."""
    nothing = ((9, 9), (5, 5))
    before = {0: nothing, 1: ((0, 4), (0, 5)), 2: ((4, 9), (0, 5))}
    after = {0: ((0, 9), (0, 5)), 1: nothing, 2: nothing}
    shard = torch.full(box_shape(before[rank]), float(rank))
    if rank == 2:
        time.sleep(0.3)
    transfers = Transfers(Exchange((0,)), MESH, tuple(before.values()), tuple(after.values()))
    (got,) = communicator.run(transfers, {rank: shard}).values()
    assert got.sum() == (1 * 20 + 2 * 25 if rank == 0 else 0)


@pytest.mark.parametrize("reads_peers", [True, False], ids=["reading", "messages"])
def test_a_rank_may_leave_after_its_last_step(tmp_path, reads_peers):
    seen, by_one = seen_by_the_others(tmp_path, _leave, GATHER, reads_peers)
    assert [*seen, by_one] == [None, None, None]


CHILD_S = 3.0


def _fork(seconds: float) -> None:
    """Leave a child behind, as data loaders have, that holds all open sockets."""
    if os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)


def _end_with_a_child(rank: int, communicator: Any, _: Any, out: Any) -> None:
    tensor = DTensor(torch.ones(6, 6), MESH, "[S0,R]", communicator=communicator)
    tensor.redistribute("[R,S0]")
    if rank == VICTIM:
        _fork(CHILD_S)
        _die(out)
    time.sleep(0.1)  # so that no note is on its way yet
    tensor.redistribute("[R,S0]")


@pytest.mark.parametrize("reads_peers", [True, False], ids=["reading", "messages"])
def test_the_end_of_a_rank_with_a_child_is_noticed_when_the_child_ends(tmp_path, reads_peers):
    seen, failed_at = seen_by_the_others(tmp_path, _end_with_a_child, GATHER, reads_peers, 60)
    for error in seen:
        assert error.kind is CommunicatorError
        assert re.match(r"ranks? [012](, [012])? did not answer: ", error.text)
        assert error.at - failed_at < CHILD_S + SLACK_S


def _stopped(rank: int, communicator: Any, *_: Any) -> None:
    """Rank 1 reads so late that rank 0, which has a child, has given up and changed its shard."""
    nothing, everything = ((9, 9), (5, 5)), ((0, 9), (0, 5))
    before = {0: everything, 1: nothing, 2: nothing}
    after = {0: nothing, 1: everything, 2: nothing}
    shard = torch.ones(box_shape(before[rank]))
    transfers = Transfers(Exchange((0,)), MESH, tuple(before.values()), tuple(after.values()))
    read = peer_memory.read_rows

    def late(*given: Any) -> None:
        time.sleep(1.5 * TIMEOUT_S)
        read(*given)

    if rank == 0:
        _fork(4 * TIMEOUT_S)
    try:
        with mock.patch.object(peer_memory, "read_rows", late):
            communicator.run(transfers, {rank: shard})
    finally:
        shard.zero_()
        if rank == 0:
            time.sleep(2 * TIMEOUT_S)  # the memory of the shard stays, so it can be read


@pytest.fixture(scope="module")
def waited(tmp_path_factory):
    """Return what was seen in jobs that mostly wait, of which two run at once."""
    ways: dict[str, tuple[Any, ...]] = {
        "too late": (_stopped, GATHER, True),
        "reading": (_never, REDUCE, True),
        "messages": (_never, REDUCE, False),
        "never joins": (_never, GATHER, None),
        "says nothing": (_convert, GATHER, True),
    }

    def seen(way: tuple[Any, ...]) -> tuple[list[Any], Any]:
        return seen_by_the_others(tmp_path_factory.mktemp("job"), *way)

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(ways, threads.map(seen, ways.values()), strict=True))


def test_a_reader_that_comes_too_late_is_told(waited):
    (zero, two), one = waited["too late"]
    assert two is None
    assert "rank 1 did not answer within" in zero.text
    assert "rank 0 has ended or given up" in one.text

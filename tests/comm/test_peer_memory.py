"""Reading memory, tried on this process itself: the way is the same as to another."""

import os
import subprocess
import sys
import time
from itertools import permutations, product

import numpy as np
import pytest

from shardspec.comm.transports import peer_memory
from shardspec.comm.transports.peer_memory import Connection, Offer, PeerMemory, Region, read
from shardspec.errors import CommunicatorError


def region(array: np.ndarray) -> Region:
    return Region(array.ctypes.data, array.shape, array.strides, array.itemsize)


def arrays_of(numbers: np.ndarray) -> list[np.ndarray]:
    """Return equal arrays that lie differently in memory."""
    found = []
    for order in permutations(range(numbers.ndim)):
        for gaps in product((1, 3), repeat=numbers.ndim):
            room = np.zeros([numbers.shape[d] * gap for d, gap in zip(order, gaps, strict=True)])
            room = room.astype(numbers.dtype)[tuple(slice(None, None, gap) for gap in gaps)]
            placed = room.transpose(np.argsort(order))
            placed[...] = numbers
            found.append(placed)
    return found


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 4), (2, 3, 4), (3, 1, 2), (700, 5)])
@pytest.mark.parametrize("dtype", ["int8", "int16", "complex128"])
def test_every_order_and_gap_on_both_sides(shape, dtype):
    numbers = (np.arange(np.prod(shape)).reshape(shape) % 113).astype(dtype)
    pairs = list(product(arrays_of(numbers), arrays_of(np.zeros_like(numbers))))
    for source, target in pairs[:: 11 if len(pairs) > 1000 else 1]:
        target[...] = 0
        read(os.getpid(), region(source), region(target))
        assert (target == numbers).all()


def test_scalars_and_repeated_elements():
    one, got = np.array(7.5), np.zeros(())
    read(os.getpid(), region(one), region(got))
    assert got == 7.5
    spread, many = np.broadcast_to(np.arange(3), (4, 3)), np.zeros((4, 3), np.int64)
    read(os.getpid(), region(spread), region(many))
    assert many.tolist() == [[0, 1, 2]] * 4


def test_more_than_one_call_can_read():
    """Runs longer than the most bytes of a call, the last part shorter."""
    size = 2 * peer_memory.MOST_BYTES + 12345
    source = np.arange(2 * size, dtype=np.uint8).reshape(2, size)
    target = np.zeros((2, size + 3), np.uint8)[:, 3:]
    PeerMemory(0, {}, 1.0).fetch(0, region(source), region(target))
    assert (source == target).all()


def test_parts_and_sizes():
    numbers = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    part = region(numbers).part(0, 1, 3).part(2, 2, 5)
    got = np.zeros((2, 4, 3), np.int32)
    read(os.getpid(), part, region(got))
    assert (got == numbers[1:3, 0:4, 2:5]).all()
    assert part.run_bytes == 12
    assert part.span == (20 + 15 + 2 + 1) * 4
    assert region(numbers).run_bytes == region(numbers).span == 240
    assert region(numbers[:0]).span == 0


def test_what_cannot_be_read():
    got = np.zeros(3)
    with pytest.raises(OSError, match="No such process"):
        read(2**22 + 1, region(np.ones(3)), region(got))
    with pytest.raises(OSError, match="Bad address"):
        read(os.getpid(), Region(4096, (3,), (8,), 8), region(got))
    assert got.tolist() == [0, 0, 0]
    known = np.frombuffer(b"known", np.uint8)
    mine = Offer("here", os.getpid(), known.ctypes.data, b"known", {})
    others = [mine, mine._replace(token=b"other"), mine._replace(pid=2**22 + 1)]
    others.append(mine._replace(probe=0))
    assert [offer.is_readable() for offer in others] == [True, False, False, False]


def soon(seconds: float = 10) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def connected():
    """Rank 2's connection to rank 5, and rank 5's to rank 2."""
    flags = os.O_NONBLOCK | os.O_CLOEXEC
    (two, to_two), (five, to_five) = os.pipe2(flags), os.pipe2(flags)
    return Connection(5, os.getpid(), two, to_five), Connection(2, os.getpid(), five, to_two)


def test_signals_arrive_in_order(connected):
    to_five, to_two = connected
    to_five.send(1, 7, 2**40, 300)
    to_five.send(2, 7)
    to_two.send(2, 8)
    assert to_two.receive(1, 7, soon()) == (2**40, 300)
    assert to_two.receive(2, 7, soon()) == (0, 0)
    assert to_five.receive(2, 8, soon()) == (0, 0)
    to_five.send(1, 9)
    with pytest.raises(CommunicatorError, match="rank 2 executes another step"):
        to_two.receive(1, 7, soon())


def test_a_peer_that_does_not_come(connected):
    start = time.monotonic()
    with pytest.raises(CommunicatorError, match="rank 5 did not answer within"):
        connected[0].receive(1, 7, soon(0.05))
    assert 0.04 < time.monotonic() - start < 5


def test_a_peer_that_gives_up_is_noticed_though_signals_are_unread(connected):
    to_five, to_two = connected
    to_two.check()
    to_five.send(1, 7)
    to_five.send(peer_memory.GIVEN_UP)
    for _ in range(2):
        with pytest.raises(CommunicatorError, match="rank 2 has ended or given up"):
            to_two.check()
    assert to_two.receive(1, 7, soon()) == (0, 0)
    with pytest.raises(CommunicatorError, match="rank 2 has ended or given up"):
        to_two.receive(1, 8, soon())


def test_a_peer_that_ends_is_noticed_though_its_pipes_stay_open():
    command = [sys.executable, "-c", "input()"]
    inbox, outbox = os.pipe2(os.O_NONBLOCK)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        connection = Connection(3, process.pid, inbox, outbox)
        connection.check()
        process.kill()
        with pytest.raises(CommunicatorError, match="rank 3 has ended"):
            connection.receive(1, 7, soon())

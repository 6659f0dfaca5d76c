"""Reading memory, tried on this process itself: the way is the same as to another."""

import os
from itertools import permutations, product

import numpy as np
import pytest

from shardspec.comm.agreement import Address
from shardspec.comm.region import Region
from shardspec.comm.transports import peer_memory
from shardspec.comm.transports.peer_memory import PeerMemory, read, readable


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
    part = region(numbers).part((slice(1, 3), slice(0, 4), slice(2, 5)))
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
    mine = Address("here", os.getpid(), "known", known.ctypes.data)
    others = {
        0: mine,
        1: mine._replace(socket="other"),
        2: mine._replace(pid=2**22 + 1),
        3: mine._replace(probe=0),
    }
    assert readable(others) == {0}

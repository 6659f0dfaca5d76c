"""Writing, and reading again behind it: all is written, checked, and a failure is heard."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from shardspec.checkpoint.moving.behind import Behind
from shardspec.errors import CheckpointError

BLOCK = 64


@pytest.fixture
def file(tmp_path):
    """An empty file, open for reading and writing."""
    with (tmp_path / "out").open("w+b") as opened:
        yield opened


@pytest.fixture(params=[True, False], ids=["beside", "by-itself"])
def behind(request, file, tmp_path):
    """Who writes it in small blocks: with a thread that checks, and without."""
    return Behind(file.fileno(), tmp_path / "out", beside=request.param, block_bytes=BLOCK)


def checking():
    """Return the threads that check behind others."""
    return [thread for thread in threading.enumerate() if thread.name == "shardspec-behind"]


def blocks(number):
    """Blocks of a file, each with its place in it, of all lengths up to the most."""
    rng = np.random.default_rng(0)
    at = 3
    for _ in range(number):
        data = rng.bytes(int(rng.integers(1, BLOCK + 1)))
        yield at, data
        at += len(data)


def alike(name, data):
    """Return a check that what was read again is what was written."""

    def check(found):
        if found != data:
            raise CheckpointError(f"{name} is not as it was")

    return check


def put_all(behind, parts, checked=True):
    """Put blocks as one who reads does."""
    with behind:
        for at, data in parts:
            room = behind.room(len(data))
            room[:] = data
            behind.put(room, at, alike(f"block at {at}", data) if checked else None)


@pytest.mark.parametrize("checked", [True, False])
def test_many_blocks_are_written_from_one_buffer(behind, tmp_path, checked):
    parts = list(blocks(500))
    put_all(behind, parts, checked)
    expected = b"\0" * 3 + b"".join(data for _, data in parts)
    assert (tmp_path / "out").read_bytes() == expected
    assert not checking()


def test_other_memory_may_be_put_and_without_a_check_longer_than_a_block(behind, tmp_path):
    data = bytes(range(250)) * 10
    with behind:
        behind.put(memoryview(data)[:BLOCK], 0, alike("all", data[:BLOCK]))
        behind.put(memoryview(data)[BLOCK:], BLOCK, None)
    assert (tmp_path / "out").read_bytes() == data


def test_checks_come_in_the_order_of_blocks(behind):
    seen: list[bytes] = []
    parts = list(blocks(200))
    with behind:
        for at, data in parts:
            behind.put(memoryview(data), at, lambda found: seen.append(bytes(found)))
    assert seen == [data for _, data in parts]


def test_nothing_to_check_starts_no_thread_and_flushes_nothing(behind, monkeypatch):
    monkeypatch.setattr(os, "fsync", None)
    with behind:
        behind.put(behind.room(BLOCK), 0, None)
        assert not checking()


def noted(called, real):
    """Return a call of the system that leaves its name in a list."""

    def call(*args):
        called.append(real.__name__)
        return real(*args)

    return call


def test_what_was_checked_has_been_flushed_before(behind, monkeypatch):
    called: list[str] = []
    for name in ("fsync", "preadv", "pwrite"):
        monkeypatch.setattr(os, name, noted(called, getattr(os, name)))
    put_all(behind, blocks(5))
    assert called == ["pwrite"] * 5 + ["fsync"] + ["preadv"] * 5


MIB = bytes(range(256)) * 4096


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("seconds", [0, 0.01], ids=["memory", "disk"])
def test_a_disk_is_flushed_seldom_and_written_in_small_calls(
    file, tmp_path, monkeypatch, seconds, checked
):
    """Memory is read again while it is in the cache; a disk gets no pages larger than a call."""
    flushed: list[int] = []
    lengths: list[int] = []
    pwrite = os.pwrite

    clock = [0.0]

    def flush(fd):
        flushed.append(os.fstat(fd).st_size >> 20)
        clock[0] += seconds

    def write(fd, data, offset):
        lengths.append(len(data) >> 10)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Behind(file.fileno(), tmp_path / "out", beside=False) as behind:
        for at in range(42):
            behind.put(memoryview(MIB), at << 20, alike("x", MIB) if checked else None)
    if not checked:
        # Once, to learn what it is; whoever opened the file flushes the rest.
        assert flushed == [4]
    elif seconds:
        # Three of them, to learn what it is.
        assert flushed == [4, 8, 12, 42]
    else:
        assert flushed == list(range(4, 43))
    assert lengths == [128] * 4 * 8 + ([128] * 38 * 8 if seconds else [1024] * 38)


@pytest.mark.parametrize(
    ("quick", "memory"), [((), False), ((1,), True), ((3,), True), ((4, 5), False)]
)
def test_one_of_the_first_flushes_says_whether_it_is_memory(
    file, tmp_path, monkeypatch, quick, memory
):
    """Later ones find what a disk has written by itself."""
    flushed: list[int] = []
    clock = [0.0]

    def flush(fd):
        flushed.append(os.fstat(fd).st_size >> 20)
        clock[0] += 0 if len(flushed) in quick else 0.01

    def write(fd, data, offset):
        os.ftruncate(fd, offset + len(data))
        return len(data)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", lambda _fd, rooms, _at: len(rooms[0]))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Behind(file.fileno(), tmp_path / "out", beside=False) as behind:
        for at in range(800):
            behind.put(memoryview(MIB), at << 20, lambda _: None)
    assert flushed[:1] == [4]
    assert (len(flushed) > 700) == memory
    if not memory:
        assert flushed == [4, 8, 12, 268, 524, 780, 800]


def test_a_disk_is_told_to_begin(file, tmp_path, monkeypatch):
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, __: told.append((at, size)))
    for check in (None, alike("x", MIB)):
        with Behind(file.fileno(), tmp_path / "out") as behind:
            for at in range(9):
                behind.put(memoryview(MIB), at << 20, check)
    assert told == [(0, 8 << 20)] * 2


def test_what_a_disk_changes_is_found_and_named(behind, monkeypatch):
    parts = list(blocks(40))
    at, data = parts[30]
    real = os.fsync

    def change(fd):
        real(fd)
        os.pwrite(fd, bytes([data[0] ^ 1]), at)

    monkeypatch.setattr(os, "fsync", change)
    with pytest.raises(CheckpointError, match=f"block at {at} is not as it was"):
        put_all(behind, parts)
    assert not checking()


def test_what_a_disk_loses_is_found(behind, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: os.ftruncate(fd, 20))
    with pytest.raises(CheckpointError, match="out: ends at byte 20 when read again"):
        put_all(behind, blocks(40))


def test_what_was_read_back_differently_stops_the_one_who_writes(file, tmp_path, monkeypatch):
    behind = Behind(file.fileno(), tmp_path / "out")
    found = threading.Event()
    real = os.preadv

    def change(fd, rooms, at):
        count = real(fd, rooms, at)
        rooms[0][0] ^= 1
        found.set()
        return count

    monkeypatch.setattr(os, "preadv", change)

    def put_until_it_is_heard():
        for at in range(1000):
            behind.room(len(MIB))
            behind.put(memoryview(MIB), 0, alike(f"block {at}", MIB))
            if at == 8:
                assert found.wait(10)
                time.sleep(0.05)
        pytest.fail("nobody has heard of it")

    with pytest.raises(CheckpointError, match="block 0 is not as it was"), behind:
        put_until_it_is_heard()
    assert not checking()


def test_a_refusal_is_heard_at_once(tmp_path):
    (tmp_path / "out").touch()
    with (
        (tmp_path / "out").open("rb") as file,
        Behind(file.fileno(), tmp_path / "out") as behind,
        pytest.raises(CheckpointError, match="out: cannot be written: Bad file descriptor"),
    ):
        behind.put(behind.room(BLOCK), 0, None)


def test_a_disk_that_cannot_flush_is_heard(behind, monkeypatch):
    def refuse(_fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match="out: cannot be written: Input/output error"):
        put_all(behind, blocks(3))


def test_an_error_of_the_one_who_reads_is_his(behind, monkeypatch):
    monkeypatch.setattr(os, "fsync", None)

    def put_one_and_fail():
        behind.put(memoryview(b"x"), 0, alike("x", b"y"))
        raise ValueError("mine")

    # What he has written is not checked any more.
    with pytest.raises(ValueError, match="mine"), behind:
        put_one_and_fail()
    assert not checking()


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_at_the_end_waits_for_the_thread(file, tmp_path, monkeypatch):
    ended = []
    real = os.fsync

    def interrupted(fd):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        real(fd)
        ended.append(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    behind = Behind(file.fileno(), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        put_all(behind, [(0, b"x" * BLOCK)])
    assert ended == [file.fileno()]
    assert not checking()

"""Writing behind the one who reads: all is written, checked, and a failure anywhere is heard."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from shardspec.checkpoint.behind import Behind
from shardspec.checkpoint.digests import crc32
from shardspec.errors import CheckpointError

BLOCK = 64


@pytest.fixture
def file(tmp_path):
    """An empty file, open for reading and writing."""
    with (tmp_path / "out").open("w+b") as opened:
        yield opened


def blocks(number):
    """Blocks of a file, each with its place in it, of all lengths up to the most."""
    rng = np.random.default_rng(0)
    at = 3
    for _ in range(number):
        data = rng.integers(0, 256, rng.integers(1, BLOCK + 1), np.uint8)
        yield at, data
        at += data.size


def put_all(behind, parts, checked=True):
    """Put blocks as one who reads does."""
    for at, data in parts:
        room = behind.room(data.size)
        room[:] = data
        behind.put(room, at, f"block at {at}", crc32(data.data) if checked else None)


@pytest.mark.parametrize("checked", [True, False])
def test_many_blocks_are_written_in_few_buffers(file, tmp_path, checked):
    parts = list(blocks(500))
    with Behind(file.fileno(), tmp_path / "out", BLOCK) as behind:
        put_all(behind, parts, checked)
    expected = b"\0" * 3 + b"".join(data.tobytes() for _, data in parts)
    assert (tmp_path / "out").read_bytes() == expected
    assert threading.active_count() == 1


def test_other_memory_longer_than_a_block_may_be_put(file, tmp_path):
    data = np.arange(10 * BLOCK, dtype=np.uint8)
    with Behind(file.fileno(), tmp_path / "out", BLOCK) as behind:
        behind.room(BLOCK)
        behind.put(data, 0, "all", crc32(data.data))
    assert (tmp_path / "out").read_bytes() == data.tobytes()


def test_nothing_put_starts_nothing(file, tmp_path):
    with Behind(file.fileno(), tmp_path / "out", BLOCK) as behind:
        behind.room(BLOCK)
        assert threading.active_count() == 1


def noted(called, real):
    """Return a call of the system that leaves its name in a list."""

    def call(*args):
        called.append(real.__name__)
        return real(*args)

    return call


def test_what_was_checked_has_been_flushed_before(file, tmp_path, monkeypatch):
    called: list[str] = []
    monkeypatch.setattr(os, "fsync", noted(called, os.fsync))
    monkeypatch.setattr(os, "preadv", noted(called, os.preadv))
    with Behind(file.fileno(), tmp_path / "out", BLOCK) as behind:
        put_all(behind, blocks(5))
    assert called == ["fsync"] + ["preadv"] * 5


def test_what_a_disk_changes_is_found_and_named(file, tmp_path, monkeypatch):
    parts = list(blocks(40))
    at, data = parts[30]
    real = os.fsync

    def change(fd):
        real(fd)
        os.pwrite(fd, bytes([data[0] ^ 1]), at)

    monkeypatch.setattr(os, "fsync", change)
    with (
        pytest.raises(CheckpointError, match=f"out: block at {at} was read back differently"),
        Behind(file.fileno(), tmp_path / "out", BLOCK) as behind,
    ):
        put_all(behind, parts)


def test_what_a_disk_loses_is_found(file, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: os.ftruncate(fd, 20))
    with (
        pytest.raises(CheckpointError, match="out: ends at byte 20 when read again"),
        Behind(file.fileno(), tmp_path / "out", BLOCK) as behind,
    ):
        put_all(behind, blocks(40))


def test_a_refusal_stops_the_one_who_reads(tmp_path):
    (tmp_path / "out").touch()
    done: list[int] = []

    def put_until_it_fails(behind):
        while len(done) < 1000:
            behind.room(BLOCK)
            behind.put(np.zeros(BLOCK, np.uint8), 0, "x", None)
            time.sleep(0.001)
            done.append(BLOCK)

    with (
        (tmp_path / "out").open("rb") as file,
        pytest.raises(CheckpointError, match="out: cannot be written: Bad file descriptor"),
        Behind(file.fileno(), tmp_path / "out", BLOCK) as behind,
    ):
        put_until_it_fails(behind)
    assert len(done) < 1000
    assert threading.active_count() == 1


def test_a_refusal_of_the_last_block_is_heard_at_the_end(tmp_path):
    (tmp_path / "out").touch()
    with (
        (tmp_path / "out").open("rb") as file,
        pytest.raises(CheckpointError, match="out: cannot be written: Bad file descriptor"),
        Behind(file.fileno(), tmp_path / "out", BLOCK) as behind,
    ):
        put_all(behind, blocks(1))


def test_a_disk_that_cannot_flush_is_heard(file, tmp_path, monkeypatch):
    def refuse(_fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with (
        pytest.raises(CheckpointError, match="out: cannot be written: Input/output error"),
        Behind(file.fileno(), tmp_path / "out", BLOCK) as behind,
    ):
        put_all(behind, blocks(3))


def test_an_error_of_the_one_who_reads_stops_the_writing(file, tmp_path, monkeypatch):
    started, go = threading.Event(), threading.Event()
    real = os.pwrite

    def slow(*args):
        started.set()
        assert go.wait(10)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)

    def put_some_and_fail(behind):
        for at in range(4):
            room = behind.room(BLOCK)
            room[:] = at + 1
            behind.put(room, at * BLOCK, "x", None)
        assert started.wait(10)
        # The first block is being written: it ends, and the others are not begun.
        threading.Timer(0.05, go.set).start()
        raise ValueError("mine")

    with (
        pytest.raises(ValueError, match="mine"),
        Behind(file.fileno(), tmp_path / "out", BLOCK) as behind,
    ):
        put_some_and_fail(behind)
    assert (tmp_path / "out").read_bytes() == bytes([1]) * BLOCK


@pytest.fixture
def _interruptible():
    """A shell tells what it starts in the background to ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_at_the_end_waits_for_the_threads(file, tmp_path, monkeypatch):
    ended = []
    real = os.pwrite

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        written = real(*args)
        ended.append(written)
        return written

    monkeypatch.setattr(os, "pwrite", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        Behind(file.fileno(), tmp_path / "out", BLOCK) as behind,
    ):
        put_all(behind, [(0, np.zeros(BLOCK, np.uint8))])
    assert ended == [BLOCK]
    assert threading.active_count() == 1

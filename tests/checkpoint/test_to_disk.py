"""Writing a file so that the disk is at work meanwhile: all arrives, and the disk is told of it."""

import os

import pytest

from shardspec.checkpoint.executor import Writer, write_all
from shardspec.errors import CheckpointError

MIB = bytes(range(256)) * 4096


@pytest.fixture
def file(tmp_path):
    """An empty file, open for reading and writing."""
    with (tmp_path / "out").open("w+b") as opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["advised", "refused"])
def told(request, monkeypatch):
    """What the system was advised of, in MiB, which it may refuse to know."""
    found: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def tell(fd, offset, length, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        found.append((offset >> 20, length >> 20))
        if request.param:
            raise OSError(22, "Invalid argument")
        advise(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", tell)
    return found


def written(file, num_bytes, offset):
    """What the file has at a place."""
    return os.pread(file.fileno(), num_bytes, offset)


def test_the_disk_is_told_of_eight_mib_at_a_time(file, told):
    writer = Writer(file.fileno(), file.name)
    for at in range(3, 24):
        writer.write(memoryview(MIB), at << 20)
    assert told == [(3, 8), (11, 8)]
    assert written(file, 30 << 20, 0) == bytes(3 << 20) + MIB * 21


def test_gaps_and_steps_back_are_told_of_too(file, told):
    writer = Writer(file.fileno(), file.name)
    blocks = [0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15, 16, 2]
    for at in blocks:
        writer.write(memoryview(MIB), at << 20)
    assert told == [(0, 10), (2, 15)]
    assert written(file, 17 << 20, 0) == MIB * 7 + bytes(2 << 20) + MIB * 8


def test_no_page_is_told_of_twice(file, monkeypatch):
    stretches: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, __: stretches.append((at, size)))
    writer = Writer(file.fileno(), file.name)
    for at in range(24):
        writer.write(memoryview(MIB), (at << 20) + 5)
    eight = 8 << 20
    # The last five bytes of a stretch are in the page of the next.
    assert stretches == [(5, eight - 5), (eight, eight), (2 * eight, eight)]


def test_a_long_block_is_told_of_at_once(file, told):
    writer = Writer(file.fileno(), file.name)
    writer.write(memoryview(MIB * 20), 1 << 20)
    assert told == [(1, 20)]
    assert written(file, 30 << 20, 1 << 20) == MIB * 20


def test_calls_are_as_long_as_asked_for(file, monkeypatch):
    lengths: list[int] = []
    pwrite = os.pwrite

    def write(fd, data, offset):
        lengths.append(len(data))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    writer = Writer(file.fileno(), file.name)
    writer.write(memoryview(MIB[: 300 << 10]), 0)
    write_all(file.fileno(), memoryview(MIB[:1000]), 0, file.name, at_once=400)
    assert lengths == [128 << 10, 128 << 10, 44 << 10, 400, 400, 200]


def test_a_write_that_took_a_part_goes_on(file, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    Writer(file.fileno(), file.name).write(memoryview(MIB), 5)
    assert written(file, 2 << 20, 0) == bytes(5) + MIB


def test_a_full_disk_is_heard_of(tmp_path):
    with (
        open("/dev/full", "wb") as full,
        pytest.raises(CheckpointError, match="out: cannot be written: No space left on device"),
    ):
        Writer(full.fileno(), tmp_path / "out").write(memoryview(MIB), 0)

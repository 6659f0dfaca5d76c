"""Writing at a place in a file: all arrives, or an error says why not."""

import os
import threading

import pytest
import torch

from shardspec import merge, save_sharded
from shardspec.checkpoint.convert import copy
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.system_calls import write_all
from shardspec.errors import CheckpointError

MIB = bytes(range(256)) * 4096


@pytest.fixture
def file(tmp_path):
    """An empty file, open for reading and writing."""
    with (tmp_path / "out").open("w+b") as opened:
        yield opened


def written(file, num_bytes, offset):
    """What the file has at a place."""
    return os.pread(file.fileno(), num_bytes, offset)


def test_calls_are_short(file, monkeypatch):
    lengths: list[int] = []
    pwrite = os.pwrite

    def write(fd, data, offset):
        lengths.append(len(data))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    write_all(file.fileno(), memoryview(MIB[: 300 << 10]), 0, LocalPath(file.name))
    assert lengths == [128 << 10, 128 << 10, 44 << 10]


def test_a_write_that_took_a_part_goes_on(file, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    write_all(file.fileno(), memoryview(MIB), 5, LocalPath(file.name))
    assert written(file, 2 << 20, 0) == bytes(5) + MIB


def test_a_full_disk_is_heard_of(tmp_path):
    with (
        open("/dev/full", "wb") as full,
        pytest.raises(CheckpointError, match="out: cannot be written: No space left on device"),
    ):
        write_all(full.fileno(), memoryview(MIB), 0, LocalPath(tmp_path / "out"))


def test_several_threads_write_one_file(tmp_path, monkeypatch):
    save_sharded({name: torch.full((1 << 14,), ord(name)) for name in "abcd"}, tmp_path / "ckpt")
    merge(tmp_path / "ckpt", tmp_path / "one", threads=1)
    monkeypatch.setattr(copy, "_TASK_BYTES", 1)
    pwrite, seen, both = os.pwrite, set(), threading.Barrier(2, timeout=30)

    def write(fd, data, offset):
        here = threading.current_thread()
        if here is not threading.main_thread() and here not in seen:
            seen.add(here)
            both.wait()
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    merge(tmp_path / "ckpt", tmp_path / "two", threads=2)
    assert len(seen) == 2
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()

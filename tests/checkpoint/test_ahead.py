"""Having the disk read ahead: what is asked for, when, and when nothing is."""

import errno
import os
import threading
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from shardspec.checkpoint.merge import merge
from shardspec.checkpoint.moving import ahead as module
from shardspec.checkpoint.moving.ahead import LEAST_BYTES, Ahead, Stretch, stretches
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.writing import write
from shardspec.checkpoint.writing.fill import Job, Meter, wanted_by
from shardspec.checkpoint.writing.targets import Slot, Wanted
from shardspec.errors import CheckpointError
from tests.checkpoint.handmade import all_specs, handmade

MIB = 1 << 20


@pytest.mark.parametrize("mesh_shape", [(2, 3), (2, 2, 2)])
def test_stretches_are_what_a_box_is_made_of_once_and_in_order(tmp_path, mesh_shape):
    """Every number is another one, so that what is read says where it came from."""
    tensors = {}
    for shape in [(), (13,), (5, 7), (8, 3), (2, 7, 3), (3, 0)]:
        array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        for spec in all_specs(len(shape), len(mesh_shape)):
            tensors[f"{shape} {spec}"] = (str(spec), array)
    source = open_checkpoint(handmade(tensors, mesh_shape, replicas=True).write(tmp_path / "c"))
    looked_at = 0
    for name, (_, array) in tensors.items():
        tensor = source.tensor(name)
        sides = [[(0, size), (size // 3, size - size // 4)] for size in array.shape]
        for target in product(*sides):
            part = array[tuple(slice(lo, hi) for lo, hi in target)]
            read, at = [], 0
            for stretch in stretches(tensor, target):
                if stretch.path is None:
                    continue
                data = stretch.path.read_bytes()[stretch.start :][: stretch.num_bytes]
                read.append(np.frombuffer(data, np.int32))
                assert len(data) == stretch.num_bytes
                assert at <= stretch.at < part.nbytes
                at = stretch.at
            found = np.concatenate([np.zeros(0, np.int32), *read])
            assert np.isin(found, part).all()
            assert len(set(found)) == len(found)
            if target[1:] == tuple((0, size) for size in array.shape[1:]):
                # Of what is cut otherwise, parts lie in more than one stretch.
                np.testing.assert_array_equal(np.sort(found), np.sort(part.reshape(-1)))
                looked_at += 1
    assert looked_at > 120


class Recorder:
    """Takes the place of what makes the system read."""

    def __init__(self, monkeypatch, in_memory):
        self.brought: list[tuple[int, int]] = []
        self.looked_at: list[int] = []
        recorder = self

        class Drain(module._Drain):
            def bring(self, fd, start, num_bytes):
                recorder.brought.append((start, num_bytes))
                super().bring(fd, start, num_bytes)

        def look(_fd, at):
            recorder.looked_at.append(at)
            return in_memory(at)

        monkeypatch.setattr(module, "_Drain", Drain)
        monkeypatch.setattr(module, "_in_memory", look)

    def settled(self, least):
        """Return what was asked for: so much at least, and what comes in a while after that."""
        until = time.monotonic() + 60
        while len(self.brought) < least and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)
        return self.brought


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as f:
        f.truncate(64 * MIB)
    return path


def whole(path):
    return [Stretch(path, at * MIB, MIB if at < 60 else 5, at * MIB) for at in range(61)]


def test_so_much_is_asked_for_before_it_is_wanted_and_no_more(file, monkeypatch):
    recorder = Recorder(monkeypatch, lambda _: False)
    with Ahead(whole(file)) as ahead:
        assert recorder.settled(9) == [(at * MIB, MIB) for at in range(9)]
        ahead.advance(MIB // 2)
        assert len(recorder.settled(9)) == 9
        ahead.advance(MIB // 2)
        assert recorder.settled(10)[9:] == [(9 * MIB, MIB)]
        # Those before what has been written are not asked for any more.
        ahead.advance(29 * MIB)
        assert recorder.settled(19)[10:] == [(at * MIB, MIB) for at in range(30, 39)]
        ahead.advance(30 * MIB)
        assert recorder.settled(20)[19:] == [(60 * MIB, 5)]
    assert recorder.looked_at == [MIB - 1]


@pytest.mark.parametrize(("there", "first"), [(0, 0), (1, 32), (30, 32), (33, 61), (61, 61)])
def test_until_something_is_not_in_memory_only_few_are_looked_at(file, monkeypatch, there, first):
    """From then on, all that follows is asked for."""
    monkeypatch.setattr(module, "_AHEAD_BYTES", 64 * MIB)
    recorder = Recorder(monkeypatch, lambda at: at < there * MIB)
    with Ahead(whole(file)) as ahead:
        ahead._thread.join(60)
    blocks = [(at * MIB, MIB if at < 60 else 5) for at in range(61)]
    assert recorder.brought == blocks[first:]
    assert recorder.looked_at == [MIB - 1, 33 * MIB - 1][: 1 if there == 0 else 2]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_nothing_happens_where_the_system_cannot_say_what_it_has(file, monkeypatch, number):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    recorder = Recorder(monkeypatch, refuse)
    with Ahead(whole(file)) as ahead:
        ahead._thread.join(60)
        assert not ahead._thread.is_alive()
        ahead.advance(MIB)
    assert recorder.brought == []


@pytest.mark.parametrize("error", [CheckpointError, OSError, MemoryError, RecursionError])
def test_errors_are_left_to_the_one_that_copies(file, monkeypatch, capsys, error):
    recorder = Recorder(monkeypatch, lambda _: False)

    def wanted():
        yield Stretch(file, 0, MIB, 0)
        raise error("damaged")

    for case in [wanted(), [Stretch(file, 0, MIB, 0), Stretch(Path("none"), 0, MIB, MIB)]]:
        with Ahead(case) as ahead:
            ahead._thread.join(60)
            assert not ahead._thread.is_alive()
        assert recorder.brought.pop() == (0, MIB)
    assert capsys.readouterr() == ("", "")


def test_the_end_is_seen_where_nothing_can_be_asked_for(monkeypatch):
    """As in a checkpoint of strided boxes, for each of which headers have to be read."""
    Recorder(monkeypatch, lambda _: False)
    asked = []

    def wanted():
        for at in range(100):
            asked.append(at)
            yield Stretch(None, 0, 0, at * MIB)

    with Ahead(wanted()) as ahead:
        until = time.monotonic() + 60
        while len(asked) < 10 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)
    assert asked == list(range(10))
    assert not ahead._thread.is_alive()


def test_few_files_are_kept_open(tmp_path, monkeypatch):
    Recorder(monkeypatch, lambda _: False)
    for at in range(40):
        (tmp_path / str(at)).write_bytes(bytes(10))
    wanted = [Stretch(tmp_path / str(at), 0, 10, 0) for at in range(40)]
    before, seen = len(os.listdir("/proc/self/fd")), []

    def watched():
        for stretch in wanted:
            seen.append(len(os.listdir("/proc/self/fd")))
            yield stretch

    with Ahead(watched()) as ahead:
        ahead._thread.join(60)
    assert len(seen) == 40
    assert max(seen) <= before + 3 + 8
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_stays_in_memory_is_taken_to_be_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    recorder = Recorder(monkeypatch, lambda _: True)
    asked = []

    def wanted():
        for at in range(1000):
            asked.append(at)
            yield Stretch(path, 0, 10, 0)

    with Ahead(wanted()) as ahead:
        ahead._thread.join(60)
    assert (len(recorder.looked_at), len(asked)) == (8, 257)


@pytest.mark.parametrize("wanted", ["float16", "float32", "float64"])
def test_the_distance_is_that_of_the_output_also_if_numbers_are_cast(tmp_path, wanted):
    array = np.zeros((3000, 1000), np.float32)
    ckpt = handmade({"a": ("[S0,R]", array), "b": ("[S1,R]", array)}, (2, 2)).write(tmp_path / "c")
    source = open_checkpoint(ckpt)
    size = {"float16": 2, "float32": 4, "float64": 8}[wanted]
    slots = [
        Slot(Wanted(name, name, array.shape, wanted), ((0, 3000), (0, 1000)), 100 + at)
        for name, at in [("a", 0), ("b", 3_000_000 * size)]
    ]
    job = Job(source, tmp_path, True, True, True, Meter(1, None), True, 1)
    at, read = 0, 0
    for stretch in wanted_by(job, slots):
        # Every byte comes when those of the numbers before it have been written.
        assert at <= stretch.at
        at = stretch.at
        if stretch.path is not None:
            assert stretch.num_bytes <= MIB
            assert stretch.at == read // 4 * size
            read += stretch.num_bytes
    assert read == 2 * array.nbytes


def test_narrow_columns_are_not_looked_at_one_by_one(tmp_path):
    """What is asked for in pieces of less than 64 KiB costs more than it gains."""
    array = np.zeros((60_000, 128), np.uint8)
    source = open_checkpoint(handmade({"a": ("[R,S0]", array)}, (64,)).write(tmp_path / "c"))
    found = list(stretches(source.tensor("a"), ((0, 60_000), (0, 128)), LEAST_BYTES))
    assert {stretch.path for stretch in found} == {None}
    assert len(found) == 8


def test_a_file_that_ends_before_is_no_trouble(file, monkeypatch):
    os.truncate(file, MIB // 2)
    recorder = Recorder(monkeypatch, lambda _: False)
    with Ahead([Stretch(file, at * MIB, MIB, 0) for at in range(3)]):
        assert recorder.settled(3) == [(0, MIB), (MIB, MIB), (2 * MIB, MIB)]


def test_without_one_more_thread_all_goes_on(file, monkeypatch):
    starts: list[str] = []

    def start(thread):
        starts.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    for wanted in (whole(file), None):
        with Ahead(wanted) as ahead:
            ahead.advance(MIB)
            assert ahead._thread.ident is None
    assert starts == ["shardspec-ahead"]


def test_a_python_without_the_calls_starts_nothing(file, monkeypatch):
    assert module._SUPPORTED
    monkeypatch.setattr(module, "_SUPPORTED", False)
    with Ahead(whole(file)) as ahead:
        assert ahead._thread.ident is None
        ahead.advance(MIB)


def in_memory(path):
    """Say of every page of a file whether the system has it; None if it cannot say."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # From the end, as looking has the disk read what follows.
        return [module._in_memory(fd, at) for at in reversed(range(0, os.stat(path).st_size, 4096))]
    except OSError:
        return None
    finally:
        os.close(fd)


def test_a_real_disk_reads_what_was_asked_for(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(5 * MIB))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with Ahead([Stretch(path, at * MIB, MIB, 0) for at in range(5)]) as ahead:
        ahead._thread.join(60)
        assert not ahead._thread.is_alive()
    assert in_memory(path) in (None, [True] * 1280)


def test_a_merge_asks_for_all_of_its_source(tmp_path, monkeypatch):
    """Half as many bytes are written as are read, and the order of both is that of the output."""
    rng = np.random.default_rng(0)
    tensors = {
        "a": ("[S0,S1]", rng.standard_normal((2048, 1536), np.float32)),
        "b": ("[S01,R]", rng.standard_normal((3001, 1000), np.float32)),
        "c": ("[R,S10]", rng.standard_normal((1000, 3001), np.float32)),
    }
    ckpt = handmade(tensors, (2, 2)).write(tmp_path / "ckpt")
    num_bytes = sum(array.nbytes for _, array in tensors.values())
    recorder = Recorder(monkeypatch, lambda _: False)
    # However fast the other is.
    monkeypatch.setattr(Ahead, "advance", lambda *_: None)
    monkeypatch.setattr(module, "_AHEAD_BYTES", num_bytes)
    monkeypatch.setattr(write, "LEAST_BYTES", 0)
    real_exit = Ahead.__exit__

    def exit_late(ahead, *error):
        if ahead._thread.ident is not None:
            ahead._thread.join(60)
        real_exit(ahead, *error)

    monkeypatch.setattr(Ahead, "__exit__", exit_late)
    merge(ckpt, tmp_path / "out.safetensors")
    assert sum(length for _, length in recorder.brought) == num_bytes
    merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    for name, (_, array) in tensors.items():
        np.testing.assert_array_equal(merged[name], array)

    recorder.brought.clear()
    merge(ckpt, tmp_path / "half.safetensors", dtype="float16", overwrite=True)
    assert sum(length for _, length in recorder.brought) == num_bytes

    recorder.brought.clear()
    merge(ckpt, tmp_path / "files", max_shard_bytes=num_bytes // 2, threads=2)
    merge(ckpt, tmp_path / "small.safetensors", include=["c"])
    assert recorder.brought == []

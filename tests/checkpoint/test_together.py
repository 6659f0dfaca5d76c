"""Several processes write one output: the same bytes as one, and they fail together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec import DeviceMesh, DTensor, merge, reshard, save_sharded
from shardspec.checkpoint import coordinate
from shardspec.checkpoint.commit import Destination, staged_output
from shardspec.checkpoint.coordinate import Member
from shardspec.checkpoint.formats.safetensors import huggingface_target
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.output import plan_tasks
from shardspec.checkpoint.targets import OutputTensor
from shardspec.errors import CheckpointError, OutputExistsError, ShardSpecError
from tests.checkpoint.writers.states import save, state


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(act, size, answers, port, rank):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        report = act(member=Member(rank, size))
        answers.put((rank, None, report.crc32, report.files))
    except ShardSpecError as error:
        answers.put((rank, type(error).__name__, str(error), ()))


def in_processes(act, size=3):
    """Call it in several processes at once; return what each has to say, in their order."""
    context = get_context("fork")
    answers = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=run, args=(act, size, answers, port, rank)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return found


def contents(path):
    if path.is_dir():
        # Names of our own form are random.
        return Counter(file.read_bytes() for file in path.iterdir())
    return path.read_bytes()


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    big = {"big": torch.arange(300_000.0).view(500, 600), "cut": torch.arange(70_000).view(7, -1)}
    return save(tmp_path_factory.mktemp("together") / "ckpt", {**state(), **big})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out.safetensors", {}),
        ("out.safetensors", {"verify": False}),
        ("out.pt", {}),
        ("out", {"max_shard_bytes": 300_000}),
        ("out", {"format": "dcp"}),
        ("out.safetensors", {"dtype": "bf16"}),
    ],
)
def test_the_same_bytes_as_alone(ckpt, tmp_path, name, options):
    merge(ckpt, tmp_path / f"alone-{name}", **options)
    for size in (2, 5):
        out = tmp_path / f"{size}-{name}"
        found = in_processes(partial(merge, ckpt, out, **options), size)
        assert [answer[1] for answer in found] == [None] * size
        assert len({answer[2:] for answer in found}) == 1
        assert contents(out) == contents(tmp_path / f"alone-{name}")
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".")]


def test_resharding(ckpt, tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    act = partial(reshard, ckpt, tmp_path / "cut", device_mesh=mesh, rules={"big": "[S1,S0]"})
    assert [answer[1] for answer in in_processes(act)] == [None] * 3
    merge(tmp_path / "cut", tmp_path / "a.safetensors")
    merge(ckpt, tmp_path / "b.safetensors")
    assert contents(tmp_path / "a.safetensors") == contents(tmp_path / "b.safetensors")


def test_a_changed_byte_fails_all(tmp_path):
    ckpt = save(tmp_path / "ckpt", {"w": torch.arange(70_000.0), "v": torch.arange(7)})
    source = open_checkpoint(ckpt)
    for stored in source.tensor("w").boxes:
        data = bytearray(stored.path.read_bytes())
        data[stored.offset + 5] ^= 1
        stored.path.write_bytes(data)
        found = in_processes(partial(merge, ckpt, tmp_path / "out"))
        assert {answer[1] for answer in found} == {"CheckpointError"}
        assert len({answer[2] for answer in found}) == 1
        assert found[0][2].startswith("rank ")
        assert "its bytes were changed" in found[0][2]
        assert os.listdir(tmp_path) == ["ckpt"]
        data[stored.offset + 5] ^= 1
        stored.path.write_bytes(data)
    assert [answer[1] for answer in in_processes(partial(merge, ckpt, tmp_path / "out"))] == (
        [None] * 3
    )


def test_a_changed_byte_of_a_box_that_no_process_reads_whole(tmp_path):
    """Each reads some rows of boxes of columns; what they have read is judged together."""
    mesh = DeviceMesh(range(2), (2,))
    whole = torch.arange(3 << 20, dtype=torch.float32).view(1 << 11, -1)
    save_sharded({"w": DTensor(whole, mesh, "[R,S0]")}, tmp_path / "ckpt")
    found = in_processes(partial(merge, tmp_path / "ckpt", tmp_path / "a"))
    assert [answer[1] for answer in found] == [None] * 3
    merge(tmp_path / "ckpt", tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    stored = open_checkpoint(tmp_path / "ckpt").tensor("w").boxes[1]
    num_bytes = whole.nbytes // 2
    for at in (7, num_bytes // 2, num_bytes - 1):
        with stored.path.open("r+b") as file:
            file.seek(stored.offset + at)
            byte = file.read(1)
            file.seek(stored.offset + at)
            file.write(bytes((byte[0] ^ 4,)))
        found = in_processes(partial(merge, tmp_path / "ckpt", tmp_path / "c"))
        assert {answer[1] for answer in found} == {"CheckpointError"}
        assert "tensor 'w': rank 1's box [0:2048, 768:1536]" in found[0][2]
        assert "its bytes were changed" in found[0][2]
        assert not (tmp_path / "c").exists()
        with stored.path.open("r+b") as file:
            file.seek(stored.offset + at)
            file.write(byte)


def test_what_only_the_first_finds_out(ckpt, tmp_path):
    (tmp_path / "out").write_text("kept")
    found = in_processes(partial(merge, ckpt, tmp_path / "out"))
    assert found[0][1] == OutputExistsError.__name__
    assert "out: exists" in found[0][2]
    assert all("rank 0: " in answer[2] for answer in found)
    assert (tmp_path / "out").read_text() == "kept"
    assert os.listdir(tmp_path) == ["out"]


def test_beside_another_run(ckpt, tmp_path):
    with staged_output(Destination(tmp_path / "out"), directory=False, overwrite=True) as place:
        os.write(place[0], b"of the other")
        found = in_processes(partial(merge, ckpt, tmp_path / "out"))
        assert all("another run is writing it" in answer[2] for answer in found)
    assert (tmp_path / "out").read_text() == "of the other"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    st.integers(1, 9),
    st.integers(1, 50),
    st.booleans(),
)
def test_shares_fill_every_slot_once(shapes, size, limit, whole_files):
    tensors = [
        OutputTensor(str(place), str(place), tuple(shape), "int16")
        for place, shape in enumerate(shapes)
    ]
    target = huggingface_target(tensors, limit)
    filled: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        for task in plan_tasks(target, rank, size, whole_files=whole_files):
            for file, number in task:
                extent = target.files[file].extents[number]
                for at in range(extent.offset, extent.offset + extent.num_bytes):
                    filled[file, at] += 1
    assert filled == Counter(
        (number, at)
        for number, file in enumerate(target.files)
        for extent in file.extents
        for at in range(extent.offset, extent.offset + extent.num_bytes)
    )


def test_processes_share_the_tensors_by_bytes():
    tensors = [OutputTensor(f"{n}", f"{n}", (n % 7, 1 << 10), "float32") for n in range(200)]
    target = huggingface_target(tensors, 1 << 40)
    shares = []
    for rank in range(4):
        extents = [at for task in plan_tasks(target, rank, 4) for at in task]
        shares.append(sum(target.files[file].extents[n].num_bytes for file, n in extents))
    due = sum(tensor.num_bytes for tensor in tensors)
    assert sum(shares) == due
    assert max(shares) < due / 4 * 1.15


def test_processes_are_known_by_torchrun():
    launched = {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "3"}
    assert Member.of_environment(launched) == Member(2, 3)
    assert Member.of_environment({**launched, "WORLD_SIZE": "1"}) is None
    assert Member.of_environment({"RANK": "2", "WORLD_SIZE": "3"}) is None
    assert Member.of_environment({}) is None


@pytest.mark.dist
def test_under_torchrun(ckpt, tmp_path):
    merge(ckpt, tmp_path / "alone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    done = subprocess.run(
        [*command, "-m", "shardspec", "merge", ckpt, "-o", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    # One of them speaks for all.
    assert done.stdout.startswith("out: 24 tensors, ")
    assert done.stdout.count("\n") == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def kill_self(done, _total, rank, victim, how):
    if rank == victim and done:
        os.kill(os.getpid(), how)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_is_killed_or_stops_and_the_others_end(ckpt, tmp_path, monkeypatch, victim, how):
    monkeypatch.setattr(coordinate, "TIMEOUT_S", 3.0)
    monkeypatch.setattr(coordinate, "_HEARTBEAT_S", 0.3)
    context = get_context("fork")
    answers, port = context.Queue(), free_port()
    acts = [
        partial(
            merge,
            ckpt,
            tmp_path / "out",
            progress=partial(kill_self, rank=rank, victim=victim, how=how),
        )
        for rank in range(3)
    ]
    processes = [
        context.Process(target=run, args=(act, 3, answers, port, rank))
        for rank, act in enumerate(acts)
    ]
    start = time.monotonic()
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=30) for _ in range(2))
    assert time.monotonic() - start < 20
    for process in processes:
        process.kill()
        process.join()
    assert [rank for rank, *_ in found] == [rank for rank in range(3) if rank != victim]
    for _, kind, said, _ in found:
        assert kind == "CheckpointError"
        assert f"rank {victim} has sent no heartbeat" in said or "has ended" in said
    assert not (tmp_path / "out").exists()
    # What a killed first process has staged is cleared away by the next run.
    merge(ckpt, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_an_output_without_a_directory(ckpt, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; make it first"):
        merge(ckpt, tmp_path / "none" / "out")

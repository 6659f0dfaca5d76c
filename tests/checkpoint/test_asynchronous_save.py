"""Saves in the background: what was copied is saved, by all ranks or by none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardspec import DeviceMesh, DTensor, digest, load_sharded, save_sharded
from shardspec.checkpoint.digest import read_digests
from shardspec.errors import CheckpointError, OutputExistsError
from tests.dist.processes import run_ranks

MESH = DeviceMesh(range(4), (2, 2))


def state():
    w = torch.arange(12.0).view(4, 3)
    return {"w": DTensor(w, MESH, "[S0,R]"), "b": torch.ones(3), "step": 7, "lists": [1, [2]]}


def test_what_changes_after_the_call_is_not_saved(tmp_path):
    given = state()
    tensors = {name: given[name] for name in ("w", "b")}
    due = digest(tensors)
    pending = save_sharded(given, tmp_path / "a", asynchronous=True, digests=tmp_path / "d.json")
    for shard in given["w"].shards.values():
        shard.zero_()
    given["b"].zero_()
    given["lists"][1].append(3)
    assert digest(tensors) != due
    pending.wait()
    assert pending.done
    assert digest(tmp_path / "a") == read_digests(tmp_path / "d.json") == due
    loaded = load_sharded(tmp_path / "a")
    assert (loaded["step"], loaded["lists"]) == (7, [1, [2]])


def test_the_next_save_waits_and_raises_the_error_of_the_last(tmp_path):
    given = state()
    first = save_sharded(given, tmp_path / "a", asynchronous=True)
    save_sharded(given, tmp_path / "b")
    assert first.done
    (tmp_path / "file").write_text("in the way")
    failed = save_sharded(given, tmp_path / "file", asynchronous=True)
    with pytest.raises(CheckpointError, match="cannot be made a directory"):
        failed.wait()
    with pytest.raises(CheckpointError, match="cannot be made a directory"):
        save_sharded(given, tmp_path / "c", asynchronous=True)
    assert not (tmp_path / "c").exists()
    save_sharded(given, tmp_path / "c", asynchronous=True).wait()
    assert digest(tmp_path / "b") == digest(tmp_path / "c")


def test_what_is_known_at_once_is_raised_at_once(tmp_path):
    save_sharded(state(), tmp_path / "a")
    with pytest.raises(OutputExistsError):
        save_sharded(state(), tmp_path / "a", asynchronous=True)
    with pytest.raises(CheckpointError, match="replicas is 'some'"):
        save_sharded(state(), tmp_path / "b", replicas="some", asynchronous=True)  # type: ignore[call-overload]
    assert os.listdir(tmp_path) == ["a"]


def script(text, *args):
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, args)], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


OPEN = """
import sys, time, torch
from shardspec import save_sharded
from shardspec.checkpoint.storage.local import LocalPath
write = LocalPath.write
def slow(*args, **how):
    time.sleep(0.3)
    write(*args, **how)
LocalPath.write = slow
pending = save_sharded({"w": torch.ones(5)}, sys.argv[1], asynchronous=True)
print(pending.done)
"""
FULL = """
import resource, signal, sys, torch
from shardspec import save_sharded
from shardspec.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
pending = save_sharded({"w": torch.ones(5000)}, sys.argv[1], asynchronous=True)
try:
    pending.wait()
except CheckpointError as error:
    print(error)
"""


def test_a_process_with_an_open_save_ends_after_it(tmp_path):
    assert script(OPEN, tmp_path / "a") == (0, "False\n", "")
    assert digest(tmp_path / "a") == digest({"w": torch.ones(5)})


def test_a_disk_without_room_leaves_nothing_that_counts(tmp_path):
    code, said, _ = script(FULL, tmp_path / "a")
    assert code == 0
    assert "cannot be written" in said
    assert os.listdir(tmp_path / "a") == []


def _in_job(rank: int, place: str) -> list[str]:
    wrong = []
    mesh = DeviceMesh(range(4), (4,))
    whole = torch.arange(24.0).view(6, 4)
    for number in range(3):
        w = DTensor(whole + number, mesh, "[S0,R]")
        file = f"{place}/{number}.json"
        pending = save_sharded(
            {"w": w, "n": number}, f"{place}/{number}", asynchronous=True, digests=file
        )
        w.to_local().zero_()
        # The groups are free meanwhile.
        w.redistribute("[R,S0]")
        if number != 1:
            pending.wait()
            if load_sharded(f"{place}/{number}", mesh)["n"] != number:
                wrong.append(f"{number} is not there")
    differ = {"b": torch.full((3,), float(rank))}
    try:
        save_sharded(differ, f"{place}/differ", asynchronous=True).wait()
        wrong.append("replicas that differ were saved")
    except CheckpointError as error:
        wrong += [] if "'b'" in str(error) else [str(error)]
    try:
        save_sharded(differ, f"{place}/next")
        wrong.append("the error was not raised again")
    except CheckpointError:
        pass
    return wrong


@pytest.mark.dist
def test_all_ranks_save_in_the_background(tmp_path: Path) -> None:
    assert run_ranks(4, tmp_path, _in_job, str(tmp_path)) == [[], [], [], []]
    whole = torch.arange(24.0).view(6, 4)
    for number in range(3):
        due = digest({"w": whole + number})
        assert digest(tmp_path / str(number)) == read_digests(tmp_path / f"{number}.json") == due
    assert not (tmp_path / "next").exists()


DIES = """
import datetime, os, sys, torch
import torch.distributed as dist
from shardspec import DeviceMesh, DTensor, save_sharded
from shardspec.errors import ShardSpecError
import shardspec.checkpoint.save as save
rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=5),
)
if rank == 1:
    save._write_shards = lambda *_: os._exit(9)
w = DTensor(torch.ones(4), DeviceMesh(range(2), (2,)), "[S0]")
pending = save_sharded({"w": w}, f"{place}/out", asynchronous=True)
try:
    pending.wait()
    print("saved")
except ShardSpecError as error:
    print(type(error).__name__, error)
os._exit(0)
"""


@pytest.mark.dist
def test_a_rank_that_is_killed_fails_the_save(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, str(rank), tmp_path], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 9]
    assert said[0].startswith("CommunicatorError rank 1 did not join an asynchronous save")
    assert not (tmp_path / "out" / "sharding_info.json").exists()

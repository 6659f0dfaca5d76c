"""Saves in the background: what was copied is saved, by all ranks or by none."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, digest, load_sharded, save_sharded
from shardspec.checkpoint.compare.digest import read_digests
from shardspec.checkpoint.job import save
from shardspec.errors import CheckpointError, CommunicatorError, OutputExistsError
from tests.dist.processes import rank_context, run_ranks

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


def _full(_, place: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(CheckpointError) as caught:
        save_sharded({"w": torch.ones(5000)}, place, asynchronous=True).wait()
    return str(caught.value)


def test_a_process_with_an_open_save_ends_after_it(tmp_path):
    command = [sys.executable, "-c", OPEN, tmp_path / "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
    assert digest(tmp_path / "a") == digest({"w": torch.ones(5)})


FAILS = """
import sys, torch
from shardspec import save_sharded
pending = save_sharded({"w": torch.ones(5)}, sys.argv[1] + "/file/a", asynchronous=True)
"""


@pytest.mark.parametrize("then", ["", "sys.exit(0)", "import gc; del pending; gc.collect()"])
def test_an_error_that_nobody_fetched_is_printed_and_fails_the_process(tmp_path, then):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-c", FAILS + then, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "an asynchronous save has failed" in done.stderr
    assert str(tmp_path / "file") in done.stderr


def test_an_error_that_was_fetched_is_not_printed_again(tmp_path):
    (tmp_path / "file").write_text("")
    fetch = "try: pending.wait()\nexcept Exception: pass\n"
    command = [sys.executable, "-c", FAILS + fetch, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_next_save_of_other_tensors_waits(tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    for value in range(3):
        w = DTensor(torch.full((500, 500), float(value)), mesh, "[S0,S1]")
        pending = save_sharded({"w": w}, tmp_path / "a", overwrite=True, asynchronous=True)
    pending.wait()
    assert digest(tmp_path / "a") == digest({"w": torch.full((500, 500), 2.0)})


def test_a_disk_without_room_leaves_nothing_that_counts(tmp_path):
    (text,) = run_ranks(1, tmp_path, _full, str(tmp_path / "a"), backend=None)
    assert "cannot be written" in text
    assert os.listdir(tmp_path / "a") == []


def _in_job(rank: int, place: str) -> list[str]:
    wrong = []
    mesh = DeviceMesh(range(2))
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
    assert run_ranks(2, tmp_path, _in_job, str(tmp_path)) == [[], []]
    whole = torch.arange(24.0).view(6, 4)
    for number in range(3):
        due = digest({"w": whole + number})
        assert digest(tmp_path / str(number)) == read_digests(tmp_path / f"{number}.json") == due
    assert not (tmp_path / "next").exists()


def _dies(rank: int, place: Path) -> str:
    """Save together with a rank that is killed while it writes."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=5),
    )
    w = DTensor(torch.ones(4), DeviceMesh(range(2), (2,)), "[S0]")
    dies = patch.object(save, "_write_shards", lambda *_: os._exit(9))
    with dies if rank == 1 else nullcontext():
        pending = save_sharded({"w": w}, place / "out", asynchronous=True)
        with pytest.raises(CommunicatorError) as caught:
            pending.wait()
    return str(caught.value)


def _answer(rank: int, place: Path, answers: Any) -> None:
    answers.put(_dies(rank, place))
    answers.close()
    answers.join_thread()
    os._exit(0)


@pytest.mark.dist
def test_a_rank_that_is_killed_fails_the_save(tmp_path):
    context = rank_context()
    answers = context.Queue()
    ranks = [context.Process(target=_answer, args=(rank, tmp_path, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    assert answers.get(timeout=100).startswith("a rank ended during an asynchronous save")
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 9]
    assert not (tmp_path / "out" / "sharding_info.json").exists()

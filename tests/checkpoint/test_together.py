"""Several processes write one output: the same bytes as one, and they fail together."""

import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import _create_fake_pg

from shardspec import DeviceMesh, DTensor, merge, reshard, save_sharded
from shardspec.checkpoint.convert.output import plan_tasks
from shardspec.checkpoint.formats.huggingface import huggingface_target
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.commit import joined_output, staged_output
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.path import Staging
from shardspec.checkpoint.targets import OutputTensor
from shardspec.cli.main import cli
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.errors import CheckpointError
from tests.checkpoint.merging_ranks import answer_in_job, end_self, write_all
from tests.checkpoint.writers.states import save, state
from tests.dist.processes import rank_context, run_ranks
from tests.jobs import run_command

# It carries nothing: a process that has imported this may have it as its default group.
dist.Backend.register_backend("silent", _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])


def in_processes(tmp_path, *acts, size=3, work=write_all, backend="gloo"):
    """Carry out acts in several processes at once; return for each what the ranks answer."""
    meet = tmp_path / os.urandom(4).hex()
    meet.mkdir()
    try:
        answers = run_ranks(size, meet, work, acts, {}, backend=backend)
    finally:
        (meet / "rendezvous").unlink(missing_ok=True)
        meet.rmdir()
    return list(zip(*answers, strict=True))


def contents(path):
    if path.is_dir():
        # Names of our own form are random.
        return Counter(file.read_bytes() for file in path.iterdir())
    return path.read_bytes()


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    big = {"big": torch.arange(300_000.0).view(500, 600), "cut": torch.arange(70_000).view(7, -1)}
    return save(tmp_path_factory.mktemp("together") / "ckpt", {**state(), **big})


OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    ("a.safetensors", {}),
    ("b.safetensors", {"verify": False}),
    ("out.pt", {}),
    ("hub", {"max_shard_bytes": 300_000, "threads": 2}),
    ("dcp", {"format": "dcp"}),
    ("bf16.safetensors", {"dtype": "bf16", "exclude": "of.float8*"}),
]


@pytest.mark.parametrize("size", [2, 5])
def test_the_same_bytes_as_alone(ckpt, tmp_path, size):
    out, alone = tmp_path / "out", tmp_path / "alone"
    out.mkdir()
    alone.mkdir()
    # Where a name is a link, all of them write to where it leads.
    (tmp_path / "behind").mkdir()
    (out / OUTPUTS[0][0]).symlink_to(tmp_path / "behind" / "real")
    acts = [partial(merge, ckpt, out / name, **options) for name, options in OUTPUTS]
    answers = in_processes(tmp_path, *acts, size=size)
    for (name, options), answer in zip(OUTPUTS, answers, strict=True):
        report = merge(ckpt, alone / name, **options)
        assert list(answer) == [[None, report.crc32, list(report.files)]] * size
        assert contents(out / name) == contents(alone / name)
    assert sorted(os.listdir(out)) == sorted(os.listdir(alone))


def over_nccl(rank, acts, environment):
    """Let the default group stand for one of NCCL, which needs a GPU for every rank."""
    config = dist.get_backend_config
    dist.get_backend_config = lambda group=None: "cuda:nccl" if group is None else config(group)
    return write_all(rank, acts, environment)


def test_in_a_job_of_nccl_alone(ckpt, tmp_path):
    """What the processes tell each other goes through a group of gloo."""
    fine = partial(merge, ckpt, tmp_path / "out")
    torn = [partial(merge, at, tmp_path / "torn") for at in (ckpt, tmp_path / "none")]
    every = in_processes(tmp_path, fine, torn, size=2, work=over_nccl, backend="silent")
    assert [kind for kind, *_ in every[0]] == [None, None]
    merge(ckpt, tmp_path / "alone")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    for _, text, _ in every[1]:
        assert text == f"rank 1: {tmp_path}/none: there is no such checkpoint; check the path"


def test_processes_reshard_together(ckpt, tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    act = partial(reshard, ckpt, tmp_path / "cut", device_mesh=mesh, rules={"big": "[S1,S0]"})
    (answers,) = in_processes(tmp_path, act)
    assert [kind for kind, *_ in answers] == [None] * 3
    merge(tmp_path / "cut", tmp_path / "a.safetensors")
    merge(ckpt, tmp_path / "b.safetensors")
    assert contents(tmp_path / "a.safetensors") == contents(tmp_path / "b.safetensors")


def test_one_process_with_all_devices_of_a_mesh_works_alone(ckpt, tmp_path):
    mesh = DeviceMesh(range(3))
    merge(ckpt, tmp_path / "a", communicator=SimulatedCommunicator(mesh))
    merge(ckpt, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def flip(path, offset, bit):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes((byte[0] ^ bit,)))


def test_a_changed_byte_fails_all_and_they_can_go_on(tmp_path):
    """The second tensor has boxes of columns, of which no process reads one whole."""
    mesh = DeviceMesh(range(2), (2,))
    whole = torch.arange(3 << 20, dtype=torch.float32).view(1 << 11, -1)
    sound = {"v": torch.arange(7), "w": DTensor(whole, mesh, "[R,S0]")}
    save_sharded(sound, tmp_path / "sound")
    acts = [partial(merge, tmp_path / "sound", tmp_path / "good")]
    changed = []
    for name, at in (("v", 5), ("w", 7), ("w", whole.nbytes // 4), ("w", whole.nbytes // 2 - 1)):
        spoiled = tmp_path / f"spoiled-{len(acts)}"
        save_sharded(sound, spoiled)
        stored = open_checkpoint(spoiled).tensor(name).boxes[-1]
        flip(Path(stored.path), stored.offset + at, 4)
        acts.append(partial(merge, spoiled, tmp_path / "out"))
        changed.append(f"tensor {name!r}: rank ")
    before = set(os.listdir(tmp_path))
    good, *bad, again = in_processes(
        tmp_path, *acts, partial(merge, tmp_path / "sound", tmp_path / "again")
    )
    for answers, tensor in zip(bad, changed, strict=True):
        assert {kind for kind, *_ in answers} == {"CheckpointError"}
        assert len({text for _, text, _ in answers}) == 1
        assert answers[0][1].startswith("rank ")
        assert tensor in answers[0][1]
        assert "its bytes were changed" in answers[0][1]
    merge(tmp_path / "sound", tmp_path / "alone")
    assert {kind for kind, *_ in (*good, *again)} == {None}
    assert contents(tmp_path / "good") == contents(tmp_path / "again")
    assert contents(tmp_path / "good") == contents(tmp_path / "alone")
    assert set(os.listdir(tmp_path)) == before | {"good", "again", "alone"}


def test_what_only_one_process_finds_out_ends_all(ckpt, tmp_path):
    (tmp_path / "taken").write_text("kept")
    out = tmp_path / "out"
    merge(ckpt, tmp_path / "sound")
    acts = {
        "rank 0: ": partial(merge, ckpt, tmp_path / "taken"),
        "rank 1: ": [
            partial(merge, ckpt, out),
            partial(merge, tmp_path / "none", out),
            partial(merge, ckpt, out),
        ],
        "rank 2: ": [
            partial(merge, ckpt, out),
            partial(merge, ckpt, out),
            partial(merge, ckpt, out, threads=0),
        ],
        "output: rank 0 has ": [partial(merge, ckpt, tmp_path / f"out-{r}") for r in (1, 2, 1)],
        "checkpoint: rank 0 has ": [
            partial(merge, at, out) for at in (ckpt, tmp_path / "sound", ckpt)
        ],
        "option verify: rank 0 has ": [
            partial(merge, ckpt, out, verify=verify) for verify in (True, True, False)
        ],
        "option dry_run: rank 0 has ": [
            partial(merge, ckpt, out, dry_run=dry_run) for dry_run in (False, True, False)
        ],
        "option digests: rank 0 has ": [
            partial(merge, ckpt, out, digests=digests)
            for digests in (None, tmp_path / "digests.json", None)
        ],
        "format: rank 0 has ": [
            partial(merge, ckpt, out, format=name) for name in ("torch", "safetensors", "torch")
        ],
        "file 'out': rank 0 has ": [
            partial(merge, ckpt, out, rename=rename) for rename in ({}, {"^big$": "bog"}, {})
        ],
    }
    before = sorted(os.listdir(tmp_path))
    every = in_processes(tmp_path, *acts.values())
    for start, answers in zip(acts, every, strict=True):
        kinds, texts = {kind for kind, *_ in answers}, {text for _, text, _ in answers}
        assert len(kinds) == len(texts) == 1
        assert texts.pop().startswith(start)
        assert kinds == {"OutputExistsError" if start == "rank 0: " else "CheckpointError"}
    assert "out-1 but rank 1 has " in every[3][0][1]
    assert every[3][0][1].endswith("call it with the same arguments in every process")
    assert (tmp_path / "taken").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == before


def interrupt(_done, _total):
    raise KeyboardInterrupt


def interrupted(act, **more):
    """Do it where this process is interrupted as soon as it has copied something."""
    try:
        return act(progress=interrupt, **more)
    except KeyboardInterrupt:
        raise CheckpointError("interrupted") from None


def test_an_interrupt_of_one_process_ends_all_and_they_can_go_on(ckpt, tmp_path):
    out = tmp_path / "out"
    acts = []
    for rank in (0, 2):
        act = partial(merge, ckpt, out)
        acts.append([partial(interrupted, act) if r == rank else act for r in range(3)])
    *failed, fine = in_processes(tmp_path, *acts, partial(merge, ckpt, out))
    for rank, answers in zip((0, 2), failed, strict=True):
        assert answers[rank][1] == "interrupted"
        for text in {text for r, (_, text, _) in enumerate(answers) if r != rank}:
            assert text.startswith(f"rank {rank} has failed, so the call ends on all ranks")
            assert text.endswith(": KeyboardInterrupt")
    assert [kind for kind, *_ in fine] == [None] * 3
    assert os.listdir(tmp_path) == ["out"]


def test_beside_another_run(ckpt, tmp_path):
    out = LocalPath(tmp_path / "out")
    with staged_output(out, Staging({}, directory=False, overwrite=True)) as place:
        os.write(place.fd, b"of the other")
        (answers,) = in_processes(tmp_path, partial(merge, ckpt, tmp_path / "out"))
        assert all("another run is writing it" in text for _, text, _ in answers)
    assert (tmp_path / "out").read_text() == "of the other"


def elsewhere(left, act, **more):
    """Do it on a machine with a disk of its own, where a killed run may have left something."""

    def join(_, output, token):
        return joined_output(LocalPath(left), output, (LocalPath(left), token[1]))

    with patch.object(LocalPath, "join", join):
        return act(**more)


def test_a_directory_that_processes_do_not_share_is_noticed(ckpt, tmp_path):
    """Also if a killed run has left there what has the same name."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "file").write_bytes(b"of a killed run")
    (disk / "directory").mkdir()
    file = partial(merge, ckpt, tmp_path / "out")
    files = partial(file, max_shard_bytes=300_000)
    acts = [
        [act, act, partial(elsewhere, disk / left, act)]
        for left, act in (("nothing", file), ("file", file), ("directory", files))
    ]
    before = sorted(os.listdir(tmp_path))
    for answers in in_processes(tmp_path, *acts):
        assert {kind for kind, *_ in answers} == {"CheckpointError"}
        assert answers[0][1].startswith("rank 2: ")
        assert answers[0][1].endswith("write to a directory that all processes share")
    assert sorted(os.listdir(tmp_path)) == before


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
    filled, wanted = (
        [np.zeros(file.num_bytes, dtype=int) for file in target.files] for _ in range(2)
    )
    for rank in range(size):
        for task in plan_tasks(target, rank, size, whole_files=whole_files):
            for file, number in task:
                extent = target.files[file].extents[number]
                filled[file][extent.offset :][: extent.num_bytes] += 1
    for slots, output in zip(wanted, target.files, strict=True):
        for extent in output.extents:
            slots[extent.offset :][: extent.num_bytes] += 1
    for slots, given_slots in zip(wanted, filled, strict=True):
        assert slots.tolist() == given_slots.tolist()


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


def test_ranks_of_another_launcher_work_alone(ckpt, tmp_path, monkeypatch):
    """Only torchrun says where its processes meet."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    done = CliRunner().invoke(cli, ["merge", str(ckpt), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    merge(ckpt, tmp_path / "alone")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.dist
def test_of_a_job_one_process_speaks_for_all(ckpt, tmp_path):
    merge(ckpt, tmp_path / "alone")
    first, *others = run_command(3, tmp_path, "merge", ckpt, "-o", "out")
    assert (first.exit_code, first.stderr) == (0, "")
    assert first.stdout.startswith("out: 24 tensors, ")
    assert first.stdout.count("\n") == 1
    assert others == [(0, "", "")] * 2
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.dist
def test_under_torchrun_where_one_process_does_not_see_the_checkpoint(ckpt, tmp_path):
    for rank in range(2):
        (tmp_path / f"disk-{rank}").mkdir()
        if rank != 1:
            (tmp_path / f"disk-{rank}" / "ckpt").symlink_to(ckpt)
    script = tmp_path / "on_own_disk.py"
    script.write_text(
        "import os\n"
        "from shardspec.cli.main import cli\n"
        "os.chdir(f'disk-{os.environ[\"RANK\"]}')\n"
        "cli(prog_name='shardspec')\n"
    )
    before = sorted(os.listdir(tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, script, "merge", "ckpt", "-o", tmp_path / "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 1
    assert "Error: ckpt: there is no such checkpoint; check the path\n" in done.stderr
    # Each of them ends by itself.
    for word in ("SIGABRT", "terminate called", "shardspec/checkpoint"):
        assert word not in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


def begun(ckpt, place, victim, how):
    """Begin a job of three that merge, of which one is killed or stopped."""
    context = rank_context()
    place.mkdir()
    answers, meet, out = context.Queue(), str(place / "meet"), place / "out"
    act = partial(merge, ckpt, out, progress=partial(end_self, victim=victim, how=how))
    timeout_s = 30 if how == signal.SIGKILL else 4
    processes = [
        context.Process(target=answer_in_job, args=(rank, 3, meet, timeout_s, act, answers))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    return victim, how, out, processes, answers


def test_one_is_killed_or_stops_and_the_others_end(ckpt, tmp_path):
    """A stopped one is waited for until the timeout of the process group; all jobs run at once."""
    ways = product((0, 2), (signal.SIGKILL, signal.SIGSTOP))
    jobs = [begun(ckpt, tmp_path / f"{victim}-{how}", victim, how) for victim, how in ways]
    for victim, how, out, processes, answers in jobs:
        try:
            found = sorted(answers.get(timeout=60) for _ in range(2))
        finally:
            for process in processes:
                if process is processes[victim]:
                    process.kill()
                process.join()
        others = [rank for rank in range(3) if rank != victim]
        assert [rank for rank, *_ in found] == others
        assert [processes[rank].exitcode for rank in others] == [0, 0]
        for _, kind, text, _ in found:
            assert kind == "CommunicatorError"
            assert "has ended" in text or (how == signal.SIGSTOP and "in time" in text)
        assert any(f"rank {victim} " in text for _, _, text, _ in found)
        assert not out.exists()
        # What a killed first process has staged is cleared away by the next run.
        merge(ckpt, out)
        assert sorted(os.listdir(out.parent)) == ["meet", "out"]


def test_an_output_without_a_directory(ckpt, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; make it first"):
        merge(ckpt, tmp_path / "none" / "out")

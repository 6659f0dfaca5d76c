"""One run at a time works on an output; what a killed one has left is cleared away."""

import fcntl
import os
import signal
import stat
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from shardspec import DeviceMesh, merge, reshard, save_sharded
from shardspec.checkpoint.storage import system_calls
from shardspec.checkpoint.storage.commit import staged_output
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.path import Staging
from shardspec.checkpoint.storage.system_calls import lock
from shardspec.errors import CheckpointError, OutputExistsError


def fill(staged, directory, text):
    place = Path(staged.place)
    if directory:
        (place / "a").write_text(text)
    else:
        place.write_text(text)


def text_of(path, directory):
    return (path / "a" if directory else path).read_text()


A = frozenset("a")
"""All that a directory may hold that is replaced."""


def staged(path, directory, *, overwrite=True, replaced=frozenset()):
    return staged_output(LocalPath(path), Staging({}, directory, overwrite, replaced=replaced))


def work(path, directory, *, overwrite=True, interrupted=False):
    with staged(path, directory, overwrite=overwrite, replaced=A) as place:
        fill(place, directory, "newer")
        if interrupted:
            raise KeyboardInterrupt


@pytest.mark.parametrize("directory", [False, True])
def test_it_appears_when_done(tmp_path, directory):
    path = tmp_path / "out"
    with staged(path, directory, overwrite=False) as place:
        fill(place, directory, "new")
        assert set(os.listdir(tmp_path)) == {".out.shardspec-lock", ".out.shardspec-staging"}
        assert place.place == tmp_path / ".out.shardspec-staging"
        at = os.stat(place.place)
        assert stat.S_IMODE(at.st_mode) == (0o700 if directory else 0o600)
        assert not path.exists()
    assert text_of(path, directory) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("directory", [False, True])
def test_an_output_is_replaced_in_whole(tmp_path, directory):
    path = tmp_path / "out"
    for text in ("old", "new"):
        with staged(path, directory, replaced=A) as place:
            fill(place, directory, text)
    assert text_of(path, directory) == "new"
    with pytest.raises(OutputExistsError, match="out: exists"):
        work(path, directory, overwrite=False)
    assert text_of(path, directory) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("directory", [False, True])
def test_a_failure_leaves_nothing(tmp_path, directory):
    path = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        work(path, directory, interrupted=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("directory", [False, True])
def test_two_at_once(tmp_path, directory):
    path = tmp_path / "out"
    with staged(path, directory) as place:
        fill(place, directory, "first")
        with pytest.raises(CheckpointError, match="out: another run is writing it; wait"):
            work(path, directory)
        assert text_of(Path(place.place), directory) == "first"
    assert text_of(path, directory) == "first"


def work_until_killed(path, directory, ready):
    with staged(path, directory) as place:
        fill(place, directory, "half")
        ready.set()
        signal.pause()


@pytest.mark.parametrize("directory", [False, True])
def test_after_a_run_that_was_killed(tmp_path, directory):
    path = tmp_path / "out"
    context = get_context("fork")
    ready = context.Event()
    process = context.Process(target=work_until_killed, args=(path, directory, ready))
    process.start()
    assert ready.wait(30)
    with pytest.raises(CheckpointError, match="another run is writing it"):
        work(path, directory)
    process.kill()
    process.join()
    assert not path.exists()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".out.shardspec-")]
    with staged(path, directory, overwrite=False) as place:
        assert not directory or os.listdir(place.place) == []
        fill(place, directory, "whole")
    assert text_of(path, directory) == "whole"
    assert os.listdir(tmp_path) == ["out"]


def test_no_such_directory(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        work(tmp_path / "none" / "out", directory=False)


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize("name", ["lock", "staging", "old"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "of another user"])
def test_what_somebody_else_has_put_in_the_way_is_neither_followed_nor_removed(
    tmp_path, directory, name, kind
):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    place = tmp_path / f".out.shardspec-{name}"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind != "of another user":
        place.symlink_to(victim if kind == "link" else tmp_path / "nothing")
    elif os.geteuid() == 0:
        place.write_text("mine")
        os.chown(place, 4321, 4321)
    before = {name: os.lstat(tmp_path / name) for name in os.listdir(tmp_path)}
    if len(before) == 2:
        with pytest.raises(CheckpointError, match=rf"out: \.out\.shardspec-{name} beside it .*;"):
            work(tmp_path / "out", directory)
    assert {name: os.lstat(tmp_path / name).st_ino for name in os.listdir(tmp_path)} == {
        name: at.st_ino for name, at in before.items()
    }
    assert victim.read_text() == "precious"


def test_names_that_are_only_alike_are_left_alone(tmp_path):
    (tmp_path / ".out.shardspec-mine").write_text("kept")
    (tmp_path / ".other.shardspec-staging").mkdir()
    work(tmp_path / "out", directory=True)
    assert sorted(os.listdir(tmp_path)) == [
        ".other.shardspec-staging",
        ".out.shardspec-mine",
        "out",
    ]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("directory", [False, True])
def test_what_was_staged_as_a_file_does_not_hinder_a_directory(tmp_path, directory, left):
    staged = tmp_path / ".out.shardspec-staging"
    if left:
        (staged / "deep" / "er").mkdir(parents=True)
        (staged / "deep" / "x").write_text("left")
    else:
        staged.write_text("left")
    (tmp_path / ".out.shardspec-lock").write_text("")
    work(tmp_path / "out", directory)
    assert os.listdir(tmp_path) == ["out"]
    assert text_of(tmp_path / "out", directory) == "newer"


@pytest.mark.parametrize("directory", [False, True])
def test_modes_are_kept(tmp_path, directory):
    path = tmp_path / "out"
    with staged(path, directory) as place:
        fill(place, directory, "old")
    umask = os.umask(0o022)
    try:
        fresh = 0o777 & ~0o022 if directory else 0o644
        with staged(tmp_path / "fresh", directory) as place:
            fill(place, directory, "new")
        assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == fresh
        private = [path, path / "a"] if directory else [path]
        for file in private:
            file.chmod(0o750 if file.is_dir() else 0o600)
        with staged(path, directory, replaced=A) as place:
            fill(place, directory, "new")
        assert [stat.S_IMODE(file.stat().st_mode) for file in private] == (
            [0o750, 0o600] if directory else [0o600]
        )
    finally:
        os.umask(umask)


@pytest.mark.parametrize("late", ["late.txt", "a/late.txt", "empty/", "link"])
def test_a_file_that_is_put_there_meanwhile_is_not_lost(tmp_path, late):
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").write_text("of the old checkpoint")

    def replace():
        with staged(path, True, replaced=frozenset({"old"})) as place:
            fill(place, True, "new")
            put = path / late
            if late.endswith("/"):
                put.mkdir()
            elif late == "link":
                put.symlink_to(tmp_path)
            else:
                put.parent.mkdir(exist_ok=True)
                put.write_text("mine")

    with pytest.raises(CheckpointError, match=f"out: '{late}' was put there during this run"):
        replace()
    assert (path / "old").read_text() == "of the old checkpoint"
    assert os.path.lexists(path / late)
    assert os.listdir(tmp_path) == ["out"]


def test_a_directory_in_which_a_run_saves_is_not_replaced(tmp_path):
    path = tmp_path / "out"
    work(path, True)
    other = os.open(path, os.O_RDONLY)
    assert lock(other)
    with pytest.raises(CheckpointError, match="out: another run is saving there"):
        work(path, True)
    os.close(other)
    assert os.listdir(path) == ["a"]
    work(path, True)


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("calls", range(4))
def test_killed_while_names_change_the_old_or_the_new_one_is_there_in_the_end(
    tmp_path, monkeypatch, exchanges, calls
):
    path = tmp_path / "out"
    with staged(path, True, overwrite=False) as place:
        fill(place, True, "old")
    left = [calls]

    def dying(call):
        def act(*args, **kwargs):
            if not left[0]:
                os._exit(9)
            left[0] -= 1
            return call(*args, **kwargs)

        return act

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", dying(os.rename))
        exchange = system_calls.renameat2 if exchanges else lambda *_: False
        patched.setattr(system_calls, "renameat2", dying(exchange))
        patched.setattr(system_calls, "remove", dying(system_calls.remove))
        process = get_context("fork").Process(target=work, args=(path, True))
        process.start()
        process.join()
    assert process.exitcode == (9 if calls < (2 if exchanges else 4) else 0)
    if exchanges:
        assert path.exists()
    with pytest.raises(KeyboardInterrupt):
        work(path, True, interrupted=True)
    published = calls >= (1 if exchanges else 3)
    assert text_of(path, True) == ("newer" if published else "old")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["../x", "a/../x", "/x", "a//x", "a/", "a/./x"])
def test_names_do_not_lead_out(tmp_path, name):
    with (
        pytest.raises(CheckpointError, match="does not name a file in a directory"),
        staged(tmp_path / "out", True, overwrite=False) as place,
    ):
        place.create(name, 1)
    assert os.listdir(tmp_path) == []


def test_without_exchanging_names(tmp_path, monkeypatch):
    monkeypatch.setattr(system_calls, "renameat2", lambda *_: False)
    for directory in (False, True):
        here = tmp_path / f"more-{directory}"
        here.mkdir()
        test_an_output_is_replaced_in_whole(here, directory)


@pytest.mark.parametrize("directory", [False, True])
def test_two_at_once_without_locks(tmp_path, monkeypatch, directory):
    """Neither touches what the other has staged, and each publishes what is its own."""

    def refused(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "out"

    def both():
        with staged(path, directory, replaced=A) as place:
            fill(place, directory, "half")
            work(path, directory)
            assert text_of(path, directory) == "newer"
            fill(place, directory, "whole")

    with pytest.warns(RuntimeWarning, match="out: this file system has no locks"):
        both()
    assert text_of(path, directory) == "whole"
    assert os.listdir(tmp_path) == ["out"]


def plant(directory, victim, stop):
    """As another user who may write there: replace whatever is staged by links to a victim."""
    os.setgid(12345)
    os.setuid(12345)
    while not stop.is_set():
        for name in os.listdir(directory):
            if name.startswith((".out.shardspec", ".shardspec-")) and not name.endswith("planted"):
                with suppress(OSError):
                    os.rename(directory / name, directory / f"{name}-planted")
                    os.symlink(victim, directory / name)


@pytest.mark.parametrize("form", ["safetensors", "torch", "huggingface", "dcp", "sharded", "save"])
def test_another_user_cannot_lead_a_write_elsewhere(tmp_path, form):
    if os.geteuid() != 0:
        form = "safetensors"  # only root can be two users; the rest of the test still holds
    shared, private = tmp_path / "shared", tmp_path / "private"
    private.mkdir(mode=0o700)
    victim = private / "victim"
    victim.write_text("precious")
    save_sharded({"w": torch.arange(200_000.0), "v": torch.arange(7)}, tmp_path / "ckpt")
    shared.mkdir()
    shared.chmod(0o777)
    for parent in tmp_path.parents:  # the other user is to reach the directory
        if parent != parent.parent and os.geteuid() == 0 and "pytest" in parent.name:
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    context = get_context("fork")
    stop = context.Event()
    attacker = context.Process(target=plant, args=(shared, victim, stop))
    if os.geteuid() == 0:
        attacker.start()
    try:
        for number in range(15):
            out = shared / "out"
            with suppress(CheckpointError, FileNotFoundError):
                if form == "save":
                    save_sharded({"w": torch.arange(9.0)}, shared, overwrite=True)
                elif form == "sharded":
                    reshard(
                        tmp_path / "ckpt", out, device_mesh=DeviceMesh((0,), (1,)), overwrite=True
                    )
                else:
                    merge(tmp_path / "ckpt", out, format=form, overwrite=number > 0)
    finally:
        stop.set()
        if os.geteuid() == 0:
            attacker.join()
    assert victim.read_text() == "precious"
    assert os.listdir(private) == ["victim"]

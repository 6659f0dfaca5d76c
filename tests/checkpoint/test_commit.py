"""One run at a time works on an output; what a killed one has left is cleared away."""

import fcntl
import os
import re
import signal
import stat
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from shardspec import DeviceMesh, merge, reshard, save_sharded
from shardspec.checkpoint import commit
from shardspec.checkpoint.commit import FILE, NEW_FILE, Destination, open_below, staged_output
from shardspec.errors import CheckpointError, OutputExistsError


def by_descriptor(staged):
    """What is staged, whatever becomes of its name."""
    return Path(f"/proc/self/fd/{staged[0]}")


def fill(staged, directory, text):
    place = by_descriptor(staged)
    if directory:
        (place / "a").write_text(text)
    else:
        place.write_text(text)


def text_of(path, directory):
    return (path / "a" if directory else path).read_text()


def work(path, directory, *, overwrite=True, interrupted=False):
    with staged_output(Destination(path), directory=directory, overwrite=overwrite) as place:
        fill(place, directory, "newer")
        if interrupted:
            raise KeyboardInterrupt


@pytest.mark.parametrize("directory", [False, True])
def test_it_appears_when_done(tmp_path, directory):
    path = tmp_path / "out"
    with staged_output(Destination(path), directory=directory, overwrite=False) as place:
        fill(place, directory, "new")
        (staged,) = {place[1].name} & set(os.listdir(tmp_path))
        assert re.fullmatch(r"\.out\.shardspec-[0-9a-f]{16}", staged)
        at = (tmp_path / staged).stat()
        assert stat.S_IMODE(at.st_mode) == (0o700 if directory else 0o600)
        assert not path.exists()
    assert text_of(path, directory) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("directory", [False, True])
def test_replacing(tmp_path, directory):
    path = tmp_path / "out"
    for text in ("old", "new"):
        with staged_output(Destination(path), directory=directory, overwrite=True) as place:
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
    with staged_output(Destination(path), directory=directory, overwrite=True) as place:
        fill(place, directory, "first")
        with pytest.raises(CheckpointError, match="out: another run is writing it; wait"):
            work(path, directory)
        assert text_of(by_descriptor(place), directory) == "first"
    assert text_of(path, directory) == "first"


def work_until_killed(path, directory, ready):
    with staged_output(Destination(path), directory=directory, overwrite=True) as place:
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
    with staged_output(Destination(path), directory=directory, overwrite=False) as place:
        assert not directory or os.listdir(place[0]) == []
        fill(place, directory, "whole")
    assert text_of(path, directory) == "whole"
    assert os.listdir(tmp_path) == ["out"]


def test_no_such_directory(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        work(tmp_path / "none" / "out", directory=False)


def test_what_is_none_of_ours_is_left_alone(tmp_path):
    """Names like those of a killed run, of other kinds: nothing is followed or removed."""
    path = tmp_path / "out"
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".out.shardspec-{'0' * 16}").symlink_to(tmp_path / "victim")
    (tmp_path / f".out.shardspec-{'1' * 16}").mkdir()
    (tmp_path / f".out.shardspec-{'2' * 16}.lock").mkdir()
    (tmp_path / ".out.shardspec-mine").write_text("kept")
    before = set(os.listdir(tmp_path))
    for directory in (False, True):
        with staged_output(Destination(path), directory=directory, overwrite=False) as place:
            fill(place, directory, "new")
        path.unlink() if not directory else os.unlink(path / "a")
    path.rmdir()
    assert set(os.listdir(tmp_path)) == before
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("directory", [False, True])
def test_modes_are_kept(tmp_path, directory):
    path = tmp_path / "out"
    with staged_output(Destination(path), directory=directory, overwrite=True) as place:
        fill(place, directory, "old")
    umask = os.umask(0o022)
    try:
        fresh = 0o777 & ~0o022 if directory else 0o644
        with staged_output(
            Destination(tmp_path / "fresh"), directory=directory, overwrite=True
        ) as place:
            fill(place, directory, "new")
        assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == fresh
        private = [path, path / "a"] if directory else [path]
        for file in private:
            file.chmod(0o750 if file.is_dir() else 0o600)
        with staged_output(
            Destination(path, frozenset("a")), directory=directory, overwrite=True
        ) as place:
            fill(place, directory, "new")
        assert [stat.S_IMODE(file.stat().st_mode) for file in private] == (
            [0o750, 0o600] if directory else [0o600]
        )
    finally:
        os.umask(umask)


def test_only_what_is_replaced_goes_from_a_directory(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    (path / "a").write_text("same name")
    (path / "old").write_text("of the old checkpoint")
    (path / "config.json").write_text("kept")
    (path / "notes").mkdir()
    (path / "notes" / "one").write_text("kept")
    with staged_output(
        Destination(path, frozenset({"a", "old"})), directory=True, overwrite=True
    ) as place:
        fill(place, True, "new")
        (path / "late.txt").write_text("put there meanwhile")
    assert sorted(os.listdir(path)) == ["a", "config.json", "late.txt", "notes"]
    assert text_of(path, True) == "new"
    assert (path / "notes" / "one").read_text() == "kept"
    assert os.listdir(tmp_path) == ["out"]


def test_a_directory_in_the_way_of_a_file_is_kept(tmp_path):
    """One that appears when it is too late to write another name."""
    path = tmp_path / "out"
    path.mkdir()

    def replace():
        with staged_output(Destination(path), directory=True, overwrite=True) as place:
            fill(place, True, "new")
            (path / "a").mkdir()
            (path / "a" / "precious").write_text("kept")

    with pytest.raises(CheckpointError, match=r"is written, but what else was .* it is kept in "):
        replace()
    assert text_of(path, True) == "new"
    (kept,) = set(os.listdir(tmp_path)) - {"out"}
    assert (tmp_path / kept / "a" / "precious").read_text() == "kept"


def test_killed_when_it_has_its_name_it_loses_nothing_of_others(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "notes.md").write_text("mine")
    (path / "newer.md").write_text("older")
    with monkeypatch.context() as patched:
        patched.setattr(commit, "move_others", lambda *_: os._exit(9))
        process = get_context("fork").Process(target=work, args=(path, True))
        process.start()
        process.join()
    assert process.exitcode == 9
    assert os.listdir(path) == ["a"]
    (path / "newer.md").write_text("newer")
    with pytest.raises(KeyboardInterrupt):
        work(path, True, interrupted=True)
    assert (path / "notes.md").read_text() == "mine"
    # One that has been written anew is kept beside the old one, which is not lost.
    assert (path / "newer.md").read_text() == "newer"
    (kept,) = set(os.listdir(tmp_path)) - {"out"}
    assert os.listdir(tmp_path / kept) == ["newer.md"]
    assert (tmp_path / kept / "newer.md").read_text() == "older"


def test_a_directory_that_cannot_be_opened_does_not_stay(tmp_path, monkeypatch):
    opened = os.open

    def refused(name, flags, *args, **options):
        if str(name).startswith(".out") and flags & os.O_DIRECTORY:
            raise OSError(5, "Input/output error")
        return opened(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(CheckpointError, match="out: cannot be written: Input/output error"):
        work(tmp_path / "out", True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "a/../x", "/x", "a//x", "a/", "a/./x"])
def test_names_do_not_lead_out(tmp_path, name):
    with (
        pytest.raises(CheckpointError, match="does not name a file in a directory"),
        staged_output(Destination(tmp_path / "out"), directory=True, overwrite=False) as staged,
    ):
        open_below(staged[0], name, NEW_FILE)
    assert os.listdir(tmp_path) == []


def test_no_link_is_followed_on_the_way_to_a_file(tmp_path):
    (tmp_path / "victim").mkdir()
    with staged_output(Destination(tmp_path / "out"), directory=True, overwrite=False) as made:
        place = by_descriptor(made)
        fd = open_below(made[0], "a/b/c", NEW_FILE)
        os.write(fd, b"abc")
        os.close(fd)
        os.close(open_below(made[0], "a/b/c", FILE))
        assert stat.S_IMODE((place / "a" / "b").stat().st_mode) == 0o700
        (place / "z").symlink_to(tmp_path / "victim")
        for flags in (FILE, NEW_FILE):
            with pytest.raises(NotADirectoryError):
                open_below(made[0], "z/c", flags)
        (place / "z").unlink()
    assert os.listdir(tmp_path / "victim") == []
    assert (tmp_path / "out" / "a" / "b" / "c").read_bytes() == b"abc"


def test_without_exchanging_names(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "renameat2", lambda *_: False)
    test_only_what_is_replaced_goes_from_a_directory(tmp_path)
    for directory in (False, True):
        here = tmp_path / f"more-{directory}"
        here.mkdir()
        test_replacing(here, directory)


@pytest.mark.parametrize("directory", [False, True])
def test_two_at_once_without_locks(tmp_path, monkeypatch, directory):
    """Neither touches what the other has staged, and each publishes what is its own."""

    def refused(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "out"

    def both():
        with staged_output(Destination(path), directory=directory, overwrite=True) as place:
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

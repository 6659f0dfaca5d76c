"""One run at a time works on an output; what a killed one has left is cleared away."""

import os
import signal
from multiprocessing import get_context

import pytest

from shardspec.checkpoint.writing.claim import claimed, place_beside
from shardspec.errors import CheckpointError, OutputExistsError


def fill(place, directory, text):
    if directory:
        (place / "a").write_text(text)
    else:
        place.write_text(text)


def text_of(path, directory):
    return (path / "a" if directory else path).read_text()


def work(path, directory, *, overwrite=True, interrupted=False):
    with claimed(path, directory=directory, overwrite=overwrite) as place:
        fill(place, directory, "newer")
        if interrupted:
            raise KeyboardInterrupt


@pytest.mark.parametrize("directory", [False, True])
def test_it_appears_when_done(tmp_path, directory):
    path = tmp_path / "out"
    with claimed(path, directory=directory, overwrite=False) as place:
        assert place == place_beside(path)
        fill(place, directory, "new")
        assert not path.exists()
    assert text_of(path, directory) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("directory", [False, True])
def test_replacing(tmp_path, directory):
    path = tmp_path / "out"
    for text in ("old", "new"):
        with claimed(path, directory=directory, overwrite=True) as place:
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
    with claimed(path, directory=directory, overwrite=True) as place:
        fill(place, directory, "first")
        with pytest.raises(CheckpointError, match="out: another run is writing it; wait"):
            work(path, directory)
        assert text_of(place, directory) == "first"
    assert text_of(path, directory) == "first"


def work_until_killed(path, directory, ready):
    with claimed(path, directory=directory, overwrite=True) as place:
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
    assert place_beside(path).exists()
    with claimed(path, directory=directory, overwrite=False) as place:
        assert not directory or os.listdir(place) == []
        fill(place, directory, "whole")
    assert text_of(path, directory) == "whole"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_of_that_name_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    place_beside(tmp_path / "out").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match="out: cannot be written"):
        work(tmp_path / "out", directory=False)
    assert (tmp_path / "victim").read_text() == "precious"


def test_no_such_directory(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        work(tmp_path / "none" / "out", directory=False)

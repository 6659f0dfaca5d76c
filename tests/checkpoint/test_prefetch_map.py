"""Looking into several files at once: in their order, and with nothing left over."""

import time
from threading import Barrier, Event, Thread, get_ident
from threading import enumerate as enumerate_threads

import pytest

from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.errors import CheckpointError

WAIT_S = 60


def all_of(items, look, ahead):
    with prefetch_map(items, look, ahead) as found:
        return list(found)


def test_so_many_calls_are_made_at_once():
    together = Barrier(3)

    def look(item):
        together.wait(WAIT_S)
        return item * 2

    assert all_of(range(9), look, 3) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    together = Barrier(2)
    assert all_of(range(2), look, 7) == [0, 2]
    assert all_of([5], str, 3) == ["5"]
    assert all_of([], str, 3) == []


def test_no_more_is_looked_at_than_so_far_ahead():
    looked = []
    done = [Event() for _ in range(10)]

    def look(item):
        looked.append(item)
        done[item].set()
        return item

    with prefetch_map(range(10), look, 2) as found:
        for item in range(10):
            assert next(found) == item
            for ahead in done[item : item + 3]:
                assert ahead.wait(WAIT_S)
            assert sorted(looked) == list(range(min(item + 3, 10)))


def test_without_looking_ahead_the_caller_looks():
    assert set(all_of("ab", lambda _: get_ident(), 0)) == {get_ident()}
    assert get_ident() not in all_of("abc", lambda _: get_ident(), 1)


def test_an_error_comes_when_it_is_its_turn():
    made = [Event() for _ in range(4)]

    def look(item):
        if item == 1:
            # The one after it fails before.
            assert made[2].wait(WAIT_S)
        made[item].set()
        if item in (1, 2):
            raise CheckpointError(f"file {item}")
        return item

    found: list[int] = []

    def go_through():
        with prefetch_map(range(4), look, 3) as answers:
            found.append(next(answers))
            for event in made:
                assert event.wait(WAIT_S)
            # What was found is handed over a moment later.
            time.sleep(0.1)
            found.append(next(answers))

    with pytest.raises(CheckpointError, match=r"^file 1$"):
        go_through()
    assert found == [0]


def workers():
    return [
        thread for thread in enumerate_threads() if thread.name.startswith("shardspec-prefetch")
    ]


def test_threads_end_with_the_block():
    for worker in workers():
        worker.join(WAIT_S)
    together = Barrier(4)
    with prefetch_map(range(8), lambda _: together.wait(WAIT_S), 4) as found:
        next(found)
        started = workers()
        assert len(started) == 4
        list(found)
    for worker in started:
        worker.join(WAIT_S)
    assert not workers()


@pytest.mark.parametrize("possible", [0, 1])
def test_without_more_threads_all_goes_on(monkeypatch, possible):
    started: list[Thread] = []
    start = Thread.start

    def few(self):
        if len(started) == possible:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(Thread, "start", few)
    assert all_of(range(7), str, 3) == list("0123456")
    assert len(started) == possible


def test_stores_that_threads_share_are_asked_for_many_at_once(counted, tmp_path):
    assert storage_path(tmp_path).files_ahead() == 0
    assert storage_path(tmp_path).files_ahead(local=3) == 3
    assert storage_path(counted).files_ahead(local=3) == 0
    assert storage_path("together://x").files_ahead(local=3) == 7

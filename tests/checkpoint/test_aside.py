"""Looking into several files at once: in their order, and with nothing left over."""

import gc
import weakref
from threading import Barrier, Event, Thread, get_ident
from threading import enumerate as enumerate_threads

import pytest

from shardspec.checkpoint.storage import aside
from shardspec.checkpoint.storage.aside import Aside, in_turn, looks_ahead
from shardspec.checkpoint.storage.remote import RemotePath
from shardspec.errors import CheckpointError

WAIT_S = 60


def test_so_many_calls_are_made_at_once():
    together = Barrier(3)

    def look(item):
        together.wait(WAIT_S)
        return item * 2

    assert list(in_turn(range(9), look, 3)) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert list(in_turn([5], lambda item: item, 3)) == [5]
    assert list(in_turn([], lambda item: item, 3)) == []


def test_no_more_is_looked_at_than_so_far_ahead():
    looked = []
    done = [Event() for _ in range(10)]

    def look(item):
        looked.append(item)
        done[item].set()
        return item

    found = in_turn(range(10), look, 2)
    for item in range(10):
        assert next(found) == item
        for ahead in done[item : item + 3]:
            assert ahead.wait(WAIT_S)
        assert sorted(looked) == list(range(min(item + 3, 10)))


def test_without_looking_ahead_the_caller_looks():
    assert set(in_turn("ab", lambda _: get_ident(), 0)) == {get_ident()}
    assert get_ident() not in in_turn("abc", lambda _: get_ident(), 1)


def test_an_error_comes_when_it_is_its_turn():
    second_failed = Event()

    def look(item):
        if item == 1:
            try:
                raise CheckpointError(f"file {item}")
            finally:
                second_failed.set()
        assert second_failed.wait(WAIT_S)
        if item == 2:
            raise CheckpointError(f"file {item}")
        return item

    undone: list[int] = []
    found = in_turn(range(5), look, 3, undone.append)
    assert next(found) == 0
    with pytest.raises(CheckpointError, match=r"^file 1$"):
        next(found)
    # The one that failed as well is nobody's.
    assert sorted(undone) == [3, 4]


def test_what_is_not_wanted_any_more_is_undone():
    undone: list[str] = []
    found = in_turn(range(9), str, 3, undone.append)
    assert [next(found), next(found)] == ["0", "1"]
    found.close()
    assert undone == ["2", "3", "4"]


def workers():
    return [thread for thread in enumerate_threads() if thread.name == "shardspec-aside"]


def test_threads_end_with_the_calls():
    for worker in workers():
        worker.join(WAIT_S)
    together = Barrier(4)
    found = in_turn(range(8), lambda _: together.wait(WAIT_S), 4)
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

    class Few(Thread):
        def start(self):
            if len(started) == possible:
                raise RuntimeError("can't start new thread")
            started.append(self)
            super().start()

    monkeypatch.setattr(aside, "Thread", Few)
    assert list(in_turn(range(7), str, 3)) == list("0123456")
    call = Aside(get_ident)
    call.start()
    assert call.answer() == get_ident()
    assert len(started) == possible


def test_errors_hold_nothing():
    class Held:
        pass

    def look(_):
        held = Held()
        alive.append(weakref.ref(held))
        raise CheckpointError("no")

    alive: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        for _ in range(3):
            call = Aside(lambda: look(0))
            call.start()
            with pytest.raises(CheckpointError) as caught:
                call.answer()
            caught.value.__traceback__ = None
            del call, caught
            assert alive.pop()() is None
    finally:
        gc.enable()


def test_stores_that_threads_share_are_asked_for_many_at_once(counted, tmp_path):
    assert looks_ahead(tmp_path) == 0
    assert looks_ahead(tmp_path, here=3) == 3
    assert looks_ahead(RemotePath(counted), here=3) == 0
    assert looks_ahead(RemotePath("together://x"), here=3) == 7

"""Several pieces of work at once: all are done, or the first failure stops them."""

import signal
import threading
import time
from functools import partial
from threading import Event, Thread, get_ident

import pytest

from shardspec.checkpoint.writing.fill import Cancelled
from shardspec.checkpoint.writing.threads import do_together


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_results_come_in_the_order_of_the_work(threads, count):
    def act(index):
        time.sleep(0.01 * (index % 3))
        return index

    work = [partial(act, index) for index in range(count)]
    assert do_together(work, threads, Event()) == list(range(count))


def test_so_many_are_at_work_at_once_and_no_more():
    """Each waits until three are there; a fourth would be seen."""
    there, most, lock = [], [], threading.Lock()
    three = threading.Barrier(3, timeout=60)

    def act():
        with lock:
            there.append(get_ident())
            most.append(len(there))
        three.wait()
        with lock:
            there.remove(get_ident())

    do_together([act] * 6, 3, Event())
    assert max(most) == 3
    assert len(most) == 6


def test_the_first_failure_in_order_is_raised_and_nothing_more_is_begun():
    failed, begun = Event(), []

    def act(index):
        begun.append(index)
        if index == 1:
            raise ValueError(1)
        failed.wait(60)
        if index == 0:
            raise Cancelled
        raise AssertionError(index)

    with pytest.raises(ValueError, match="1"):
        do_together([partial(act, index) for index in range(9)], 2, failed)
    assert sorted(begun) == [0, 1]
    assert failed.is_set()


def test_of_two_that_fail_the_earlier_one_is_raised():
    both = threading.Barrier(2, timeout=60)

    def act(index):
        both.wait()
        raise ValueError(index)

    with pytest.raises(ValueError, match="0"):
        do_together([partial(act, 0), partial(act, 1)], 2, Event())


def test_what_was_cancelled_from_elsewhere_says_so():
    failed = Event()
    failed.set()
    with pytest.raises(Cancelled):
        do_together([int, int], 2, failed)


@pytest.mark.usefixtures("_interruptible")
def test_interrupts_wait_for_the_threads():
    """However often the user interrupts: no file may be closed that a thread still writes into."""
    failed, begun, ended = Event(), threading.Barrier(3, timeout=60), []

    def act():
        begun.wait()
        failed.wait(60)
        time.sleep(0.2)
        ended.append(get_ident())
        raise Cancelled

    main = get_ident()

    def interrupt():
        begun.wait()
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.03)

    user = Thread(target=interrupt)
    user.start()
    with pytest.raises(KeyboardInterrupt):
        do_together([act, act, act], 2, failed)
    assert len(ended) == 2
    user.join()


def test_threads_that_cannot_be_started_stop_the_others(monkeypatch):
    failed, ended, real = Event(), [], Thread.start

    def act():
        failed.wait(60)
        ended.append(get_ident())
        raise Cancelled

    def start(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    started = []
    monkeypatch.setattr(Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        do_together([act, act], 2, failed)
    assert len(ended) == 1

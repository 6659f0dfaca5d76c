"""Doing several pieces of work at once.

By threads of its own: importing `concurrent.futures`, and `logging` with it, takes as long as
copying 20 MiB.
"""

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeAlias, TypeVar

from shardspec.checkpoint.writing.fill import Cancelled

__all__ = ["do_together"]

_T = TypeVar("_T")


def do_together(work: Sequence[Callable[[], _T]], threads: int, failed: Event) -> list[_T]:
    """Do every piece of work, several at once; the first failure stops the others.

    Parameters
    ----------
    work
        What to do. Where `failed` is set it may raise `Cancelled`, and should before long.
    threads
        How many pieces at most are done at once.
    failed
        Set once one of them has failed, or the user interrupts.

    Returns
    -------
    list
        What each piece of work returned, in their order.

    Raises
    ------
    BaseException
        Of those that failed, what the first in their order raised; or what interrupted.

    Examples
    --------
    >>> do_together([lambda: 1, lambda: 2, lambda: 3], 2, Event())
    [1, 2, 3]
    """
    if threads == 1 or len(work) < 2:
        return [act() for act in work]
    results: dict[int, _T] = {}
    errors: dict[int, BaseException] = {}
    todo: SimpleQueue[int] = SimpleQueue()
    for index in range(len(work)):
        todo.put(index)

    def do_some(ended: Event) -> None:
        try:
            while not failed.is_set():
                index = todo.get_nowait()
                try:
                    results[index] = work[index]()
                except BaseException as error:
                    failed.set()
                    errors[index] = error
        except Empty:
            pass
        finally:
            ended.set()

    ends = [Event() for _ in range(min(threads, len(work)))]
    team = [(Thread(target=do_some, args=(ended,), daemon=True), ended) for ended in ends]
    try:
        for thread, _ in team:
            thread.start()
        _wait(team)
    except BaseException:
        failed.set()
        _wait_whatever_comes(team)
        raise
    if len(results) < len(work):
        in_order = [errors[index] for index in sorted(errors)]
        raise next((e for e in in_order if not isinstance(e, Cancelled)), Cancelled())
    return [results[index] for index in range(len(work))]


_Team: TypeAlias = Sequence[tuple[Thread, Event]]


def _wait(team: _Team) -> None:
    """Wait until all that were started have ended."""
    for thread, ended in team:
        if thread.ident is not None:
            # An interrupted join takes the thread for ended (bpo-45274), so it is not enough.
            ended.wait()
            thread.join()


def _wait_whatever_comes(team: _Team) -> None:
    """Wait even if the user interrupts again: no file may be closed that a thread writes into."""
    while True:
        try:
            _wait(team)
        except KeyboardInterrupt:
            continue
        return

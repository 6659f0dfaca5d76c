"""Doing several pieces of work at once.

By threads of its own: importing `concurrent.futures`, and `logging` with it, takes as long as
copying 20 MiB.
"""

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

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
    workers = _Team()

    def do_some() -> None:
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
            workers.leave()

    try:
        workers.start(do_some, min(threads, len(work)))
        workers.wait()
    except BaseException:
        while True:
            try:
                failed.set()
                # However often the user interrupts: no file may be closed that one writes into.
                workers.wait()
                break
            except KeyboardInterrupt:
                continue
        raise
    if len(results) < len(work):
        in_order = [errors[index] for index in sorted(errors)]
        error = next((e for e in in_order if not isinstance(e, Cancelled)), Cancelled())
        try:
            raise error
        finally:
            # Otherwise an error and its traceback hold each other, and buffers with them.
            del error, in_order
            errors.clear()
    return [results[index] for index in range(len(work))]


class _Team:
    """Threads that are waited for; whole whenever a signal comes, unlike events and joining."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []
        self._left: list[None] = []
        self._wake: SimpleQueue[None] = SimpleQueue()

    def start(self, act: Callable[[], None], count: int) -> None:
        """Start threads that call `leave` in the end."""
        for _ in range(count):
            self._threads.append(Thread(target=act, daemon=True))
            self._threads[-1].start()

    def leave(self) -> None:
        """Be waited for no longer."""
        self._left.append(None)
        self._wake.put(None)

    def wait(self) -> None:
        """Wait until all have left that have begun.

        After an interrupt there may be one that has not: it finds that there is nothing to do.
        """
        while len(self._left) < sum(thread.ident is not None for thread in self._threads):
            # Who has not left will say so.
            self._wake.get()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

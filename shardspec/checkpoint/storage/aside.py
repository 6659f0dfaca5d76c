"""Looking into several files at once where most of the time goes by waiting for them."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final, Generic, TypeVar

from shardspec.checkpoint.storage.remote import RemotePath

__all__ = ["Aside", "in_turn", "looks_ahead"]

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

_STORE_LOOKS: Final = 8
"""Files in a store that are looked into at once: each look is some requests, one after another."""


class Aside(Generic[_T]):
    """A call that is made by another thread than the one that asks for its answer.

    Examples
    --------
    >>> call = Aside(lambda: 2 + 3)
    >>> call.start()
    >>> call.answer()
    5
    """

    __slots__ = ("_call", "_outcome")

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._outcome: SimpleQueue[tuple[list[_T], BaseException | None]] = SimpleQueue()

    def start(self) -> None:
        """Make the call by a thread of its own, which nobody waits for; here if there is none."""
        try:
            Thread(target=self.make, daemon=True).start()
        except RuntimeError:
            self.make()

    def make(self) -> None:
        """Make the call here."""
        try:
            self._outcome.put(([self._call()], None))
        except BaseException as error:
            self._outcome.put(([], error))

    def answer(self) -> _T:
        """Wait for what the call returns; raises what it raises. To be asked for once."""
        found, error = self._outcome.get()
        if error is not None:
            try:
                raise error
            finally:
                # Otherwise the error and its traceback hold each other, and what is held there.
                del error
        return found.pop()


def looks_ahead(place: Path, *, here: int = 0) -> int:
    """Return into how many files beside the one in hand it is worth looking at once.

    Parameters
    ----------
    place
        One of them, or where they lie.
    here
        What is returned for files of this machine, which answer soon.

    Raises
    ------
    CheckpointError
        If there is no such store.

    Examples
    --------
    >>> looks_ahead(Path("models")), looks_ahead(RemotePath("memory://models"), here=3)
    (0, 0)
    """
    if not isinstance(place, RemotePath):
        return here
    # Of other stores every thread has one, and connects by itself.
    return _STORE_LOOKS - 1 if place.store.async_impl else 0


def in_turn(
    items: Iterable[_Item],
    look: Callable[[_Item], _Found],
    ahead: int,
    undo: Callable[[_Found], None] | None = None,
) -> Generator[_Found, None, None]:
    """Yield what a call for every item gives, in their order.

    Parameters
    ----------
    items, look
        What to call, and what for. What it raises is raised when it is the turn of that item.
    ahead
        How many calls are made beside while the caller has one answer in hand, by as many threads;
        with 0, all are made by the caller's own.
    undo
        Called with what was found ahead and is not yielded any more, when the iterator is closed
        or a call has failed; it is waited for then.

    Examples
    --------
    >>> list(in_turn("abc", str.upper, 2))
    ['A', 'B', 'C']
    """
    items = list(items)
    calls: SimpleQueue[Aside[_Found] | None] = SimpleQueue()
    workers = _start(calls, min(ahead, len(items)) if len(items) > 1 else 0)
    if not workers:
        yield from map(look, items)
        return
    handed: deque[Aside[_Found]] = deque()
    try:
        for item in items:
            handed.append(Aside(partial(look, item)))
            calls.put(handed[-1])
            if len(handed) > ahead:
                yield handed.popleft().answer()
        while handed:
            yield handed.popleft().answer()
    finally:
        for _ in range(workers):
            calls.put(None)
        while handed and undo is not None:
            try:
                found = handed.popleft().answer()
            except Exception:
                # It was not its turn, so nobody has asked.
                continue
            undo(found)


def _start(calls: "SimpleQueue[Aside[_Found] | None]", count: int) -> int:
    """Start threads that make calls, until they get None; return how many there could be."""

    def make_all() -> None:
        while (call := calls.get()) is not None:
            call.make()

    for started in range(count):
        try:
            Thread(target=make_all, name="shardspec-aside", daemon=True).start()
        except RuntimeError:
            return started
    return count

"""Looking into several files at once where most of the time goes by waiting for them."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final, Generic, NamedTuple, TypeVar

from shardspec.checkpoint.storage.remote import RemotePath

__all__ = ["Aside", "in_turn", "looks_ahead"]

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

_STORE_LOOKS: Final = 8
"""Files in a store that are looked into at once: each look is some requests, one after another."""


class _Outcome(NamedTuple, Generic[_T]):
    """What a call returned, or raised."""

    found: Sequence[_T]
    error: BaseException | None

    @classmethod
    def of(cls, call: Callable[[], _T]) -> "_Outcome[_T]":
        """Make a call."""
        try:
            return cls((call(),), None)
        except BaseException as error:
            return cls((), error)

    def answer(self) -> _T:
        """Return it or raise it."""
        error = self.error
        if error is not None:
            try:
                raise error
            finally:
                # Otherwise the error and its traceback hold each other, and what is held there.
                del error, self
        return self.found[0]


class Aside(Generic[_T]):
    """A call that is made by a thread of its own, which nobody waits for but who wants its answer.

    Examples
    --------
    >>> Aside(lambda: 2 + 3).answer()
    5
    """

    __slots__ = ("_call", "_outcome")

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._outcome: SimpleQueue[_Outcome[_T]] = SimpleQueue()
        try:
            Thread(target=self._make, daemon=True).start()
        except RuntimeError:
            # There can be no more threads.
            self._make()

    def _make(self) -> None:
        self._outcome.put(_Outcome.of(self._call))

    def answer(self) -> _T:
        """Wait for what the call returns; raises what it raises. To be asked for once."""
        return self._outcome.get().answer()


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
    return _STORE_LOOKS - 1 if place.shared_store else 0


@contextmanager
def in_turn(
    items: Iterable[_Item],
    look: Callable[[_Item], _Found],
    ahead: int,
    undo: Callable[[_Found], None] | None = None,
) -> Generator[Iterator[_Found], None, None]:
    """Return an iterator over what a call for every item gives, in their order.

    Parameters
    ----------
    items, look
        What to call, and what for. What it raises is raised when it is the turn of that item.
    ahead
        How many calls are made beside while the caller has one answer in hand, by as many threads;
        with 0, all are made by the caller's own.
    undo
        Called with what was found ahead and had no turn when the block ends.

    Yields
    ------
    Iterator
        For the ``with`` block. At its end nobody waits for calls that are being made.

    Examples
    --------
    >>> with in_turn("abc", str.upper, 2) as found:
    ...     list(found)
    ['A', 'B', 'C']
    """
    items = list(items)
    looks = _Looks(look, undo)
    try:
        workers = looks.start(min(ahead, len(items)) if len(items) > 1 else 0)
        yield looks.answers(items, ahead) if workers else map(look, items)
    finally:
        looks.end()


class _Looks(Generic[_Item, _Found]):
    """Calls that are made by some threads."""

    def __init__(
        self, look: Callable[[_Item], _Found], undo: Callable[[_Found], None] | None
    ) -> None:
        self._look = look
        self._undo = undo
        self._workers = 0
        self._ended = False
        self._lock = Lock()
        """Whoever has it knows whether all has ended, and what was found before that."""
        self._handed: SimpleQueue[tuple[_Item, SimpleQueue[_Outcome[_Found]]] | None] = (
            SimpleQueue()
        )
        self._waiting: deque[SimpleQueue[_Outcome[_Found]]] = deque()

    def start(self, count: int) -> int:
        """Start threads, and return how many there can be."""
        while self._workers < count:
            try:
                Thread(target=self._work, name="shardspec-aside", daemon=True).start()
            except RuntimeError:
                break
            self._workers += 1
        return self._workers

    def answers(self, items: Iterable[_Item], ahead: int) -> Iterator[_Found]:
        """Yield what is found, in the order of the items."""
        for item in items:
            self._waiting.append(SimpleQueue())
            self._handed.put((item, self._waiting[-1]))
            if len(self._waiting) > ahead:
                yield self._waiting.popleft().get().answer()
        while self._waiting:
            yield self._waiting.popleft().get().answer()

    def end(self) -> None:
        """Undo what had no turn; what is still to come is undone when it comes."""
        with self._lock:
            self._ended = True
        for _ in range(self._workers):
            self._handed.put(None)
        for outcome in self._waiting:
            try:
                self._drop(outcome.get_nowait())
            except Empty:
                # It was not made yet.
                continue

    def _work(self) -> None:
        while (handed := self._handed.get()) is not None:
            item, outcome = handed
            if self._ended:
                continue
            made = _Outcome.of(partial(self._look, item))
            with self._lock:
                wanted = not self._ended
                if wanted:
                    outcome.put(made)
            if not wanted:
                self._drop(made)

    def _drop(self, made: _Outcome[_Found]) -> None:
        if self._undo is not None:
            for found in made.found:
                self._undo(found)

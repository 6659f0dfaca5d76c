"""What is made of pickles that are read and not run: names, and records in the place of objects.

And what is noted on the way.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, SupportsIndex, TypeAlias

__all__ = [
    "Allowed",
    "Builder",
    "Global",
    "Halfway",
    "Record",
    "Shortcut",
    "Shortcuts",
    "Trace",
    "as_record",
]

_MOST_NOTED: Final = 1 << 18

Builder: TypeAlias = Callable[[tuple[object, ...]], object]
"""Makes a value from the arguments of a call that a pickle states."""
Allowed: TypeAlias = Mapping[str, Builder | None]
"""Full name to what a call of it makes; None where it may be named and not called."""
Shortcut: TypeAlias = Callable[[bytes, int, list[object]], tuple[object, int, int] | None]
"""Reads an object that is made without arguments from its instructions, all at once.

Given the pickle, where NEWOBJ and MEMOIZE stand after the empty arguments, and what has been
numbered so far, to which it adds as they would. Returns the object, where the next instruction
stands, and the bytes of memory that the object takes; None, with nothing done, if it does not know
the instructions."""
Shortcuts: TypeAlias = Mapping[str, Callable[[], Shortcut]]
"""Full name to what makes a shortcut for one pickle."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to, such as ``torch.float32``; nothing is imported."""

    name: str


class Record:
    """What stands for an object: the name of its class, how it was made and its state.

    A format may derive from it, to keep less of a state than all. Two records are equal only if
    they are one, so that hashing them looks at nothing inside.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name = name
        self.args = args
        self.state: object = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def build(self, state: object) -> None:
        """Take the state in, which a pickle states once, after the arguments.

        Raises
        ------
        ValueError
            If a class that is derived from this one has no use for it.
        """
        if self.state is not None:
            raise ValueError("it has a state already")
        self.state = state

    def get(self, key: str) -> object:
        """Return a member of the state; None if it has none of that name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def as_record(name: str) -> Builder:
    """Return a builder of records of that name."""
    return lambda args: Record(name, args)


class Halfway(NamedTuple):
    """What the rest of a pickle goes on from: all that it can refer to, or change."""

    memo: Sequence[object]
    """What has been numbered."""
    stacks: Sequence[Sequence[object]]
    """What is being put together: before every mark, and after the last."""


class Trace:
    """What is noted of a pickle while it is read."""

    __slots__ = ("counts", "ends", "last_end", "memo")

    def __init__(self) -> None:
        self.ends = array("Q")
        """Where calls end: places between two instructions. Of very many the first are noted."""
        self.last_end = 0
        """Where the last one did."""
        self.counts = array("Q")
        """How many values were numbered by then."""
        self.memo = TracedMemo()
        """What has been numbered."""

    def end(self, at: int) -> None:
        """Take note that a call ends."""
        self.last_end = at
        if len(self.ends) < _MOST_NOTED:
            self.ends.append(at)
            self.counts.append(len(self.memo))


class TracedMemo(list[object]):
    """A list that takes note of which of its places are referred to."""

    def __init__(self) -> None:
        self.taken_up: dict[int, int] = {}
        """By place, how many there were when it was last referred to."""
        self.complete = True
        """Whether all places that were referred to are noted; of very many, the first are."""

    # The parent's is overloaded for slices, which nobody takes.
    def __getitem__(self, place: SupportsIndex | slice) -> Any:  # noqa: ANN401
        """Return what is at a place."""
        if isinstance(place, int):
            if len(self.taken_up) < _MOST_NOTED or place in self.taken_up:
                self.taken_up[place] = len(self)
            else:
                self.complete = False
        return super().__getitem__(place)

"""Several runs at one output at once: one wins, the others are told, and the output is whole."""

import os
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tests.faults.checks import one_line
from tests.faults.forks import DONE, Fork
from tests.faults.harness import Case
from tests.faults.operations import ALL, SAVE, Operation, Stage

__all__ = ["saves", "writers"]

_MOST: Final = 8
_TOLD: Final = ("another run ", "exists;", "contains a finished save;")


def _race(operation: Operation, stage: Stage, count: int, overwrite: bool, old: bool) -> None:
    stage.clear()
    if old:
        operation.act(stage.inputs[-1], stage.out, False)
    wait, go = os.pipe()

    def act(number: int) -> None:
        os.close(go)
        # Ends when the last one that could write has closed it.
        os.read(wait, 1)
        operation.act(stage.inputs[number], stage.out, overwrite)

    forks = [Fork(partial(act, number)) for number in range(count)]
    os.close(wait)
    os.close(go)
    ends = [fork.end() for fork in forks]
    winners = [number for number, end in enumerate(ends) if end == DONE]
    for end in ends:
        if end != DONE:
            assert any(text in one_line(end) for text in _TOLD), end
    if old and not overwrite:
        assert winners == []
        assert stage.version(operation) == len(stage.inputs) - 1
    else:
        assert winners
        assert overwrite or len(winners) == 1, winners
        assert stage.version(operation) in winners
    stage.clean()


def _rounds(operations: Sequence[Operation], rounds: int, place: Path) -> Iterator[Case]:
    rng = random.Random(7)
    stage = Stage(place, _MOST + 1)
    for number in range(rounds):
        operation = operations[number % len(operations)]
        count = 2 + number % (_MOST - 1)
        overwrite, old = rng.choice(
            ((False, False), (False, False), (True, False), (True, True), (False, True))
        )
        label = (
            f"{count} x {operation.name}{' --overwrite' if overwrite else ''}"
            f"{', one there' if old else ''}"
        )
        yield Case(label, partial(_race, operation, stage, count, overwrite, old))


def writers(place: Path, whole: bool) -> Iterator[Case]:
    """Race merges and reshards."""
    yield from _rounds(ALL, 200 if whole else 7, place)


def saves(place: Path, whole: bool) -> Iterator[Case]:
    """Race saves."""
    yield from _rounds([SAVE], 40 if whole else 2, place)

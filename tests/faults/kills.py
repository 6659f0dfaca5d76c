"""Runs that are killed at random points: an output is old, new or none, and the next run cleans."""

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

from tests.faults.forks import KILLED, Fork
from tests.faults.harness import Case
from tests.faults.operations import ALL, SAVE, Operation, Stage

__all__ = ["kills", "saves"]

_LONGEST = 0.05
"""Seconds after which a run is killed at the latest: several outputs are written until then."""


def _again_and_again(operation: Operation, stage: Stage) -> None:
    for number in cycle(range(len(stage.inputs))):
        operation.act(stage.inputs[number], stage.out, True)


def _killed(operation: Operation, stage: Stage, seconds: float) -> None:
    fork = Fork(partial(_again_and_again, operation, stage))
    time.sleep(seconds)
    fork.kill()
    assert fork.end() == KILLED
    stage.version(operation)
    # Whatever was left, the next run finishes, and leaves nothing but its output.
    operation.act(stage.inputs[1], stage.out, True)
    assert stage.version(operation) == 1
    stage.clean()


def _kills(operations: Sequence[Operation], count: int, place: Path) -> Iterator[Case]:
    rng = random.Random(6)
    stage = Stage(place)
    for operation in operations:
        # Rounded up: as many as were asked for, or a few more.
        for number in range(-(-count // len(operations))):
            if number % 4 == 0:
                stage.clear()
            seconds = rng.random() * _LONGEST
            label = f"{operation.name} killed after {seconds * 1e3:.1f} ms"
            yield Case(label, partial(_killed, operation, stage, seconds))
        stage.clear()


def kills(place: Path, whole: bool) -> Iterator[Case]:
    """Kill merges and reshards of every form."""
    yield from _kills(ALL, 900 if whole else 12, place)


def saves(place: Path, whole: bool) -> Iterator[Case]:
    """Kill saves."""
    yield from _kills([SAVE], 100 if whole else 2, place)

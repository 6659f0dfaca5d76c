"""State dicts that are others when a plan runs than when it was made."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.faults.harness import Case

__all__ = ["changed"]


def _run(seed: int) -> None:
    # Other rows have to do without torch, which this imports.
    from tests.resharding.changed_states import changed_case, outcome

    case = changed_case(seed, ids=4)
    _, problems = outcome(case, case.devices, in_job=False)
    assert problems == []


def changed(_place: Path, whole: bool) -> Iterator[Case]:
    """Tie tensors and part them, move them in memory, state other layouts, take names away."""
    for seed in range(100_000, 101_000 if whole else 100_020):
        yield Case(f"state dict {seed}", partial(_run, seed))

"""The boxes of a tensor that a box of its view is: several where factors are turned around."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from shardspec.boxes import Box
from shardspec.errors import LayoutError
from shardspec.resharding.views import Factor, TensorView

MOST_PIECES: Final = 2**20
"""Of a tensor, each an interval of a file at even steps."""


def parts_of_view(
    side: TensorView, box: Box, steps: Sequence[int]
) -> Iterator[tuple[Box, tuple[int, ...], int]]:
    """Yield the boxes of a tensor that a box of its view is, given the steps of the view.

    With each come the steps along its dims, and how many bytes its first element lies behind that
    of the box of the view.
    """
    for runs in product(*(_runs(factors, box, steps) for factors in side.dims)):
        part = tuple((lo, lo + length) for lo, length, _, _ in runs)
        yield part, tuple(step for _, _, step, _ in runs), sum(before for *_, before in runs)


def _runs(
    factors: Sequence[Factor], box: Box, steps: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Return the intervals of one dim: first index, length, step, and bytes before the first."""
    runs, weight = [(0, 1, 0, 0)], 1
    for factor in reversed(factors):
        (lo, hi), step = box[factor.axis], steps[factor.axis]
        start, length, by, _ = runs[0]
        # Minor factors are one interval as long as each is whole, at even steps.
        if length == weight and (length == 1 or hi - lo == 1 or step == by * length):
            by = step if length == 1 < hi - lo else by
            runs = [(start + (factor.start + lo) * weight, length * (hi - lo), by, 0)]
        else:
            bounded(len(runs) * (hi - lo))
            runs = [
                (start + (factor.start + index) * weight, length, by, before + (index - lo) * step)
                for index in range(lo, hi)
                for start, length, by, before in runs
            ]
        weight *= factor.size
    return runs


def bounded(count: int) -> None:
    """Raise LayoutError if a map cuts a tensor into too many pieces."""
    if count > MOST_PIECES:
        raise LayoutError(
            f"the map cuts a tensor into more than {MOST_PIECES:,} pieces; turn fewer factors "
            "around in one step"
        )

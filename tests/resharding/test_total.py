"""Which elements views cover, against counting them one by one."""

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from shardspec.errors import LayoutError
from shardspec.resharding.total import covers, find_faults
from shardspec.resharding.views import Factor, TensorView


def counted(shape: tuple[int, ...], sides: Sequence[TensorView]) -> np.ndarray:
    """Return how many views cover each element."""
    counts = np.zeros(shape, int)
    for side in sides:
        inside = np.ones(shape, bool)
        for dim, factors in enumerate(side.dims):
            digits = np.arange(shape[dim])
            kept = np.ones(shape[dim], bool)
            for factor in reversed(factors):
                digits, at = np.divmod(digits, factor.size)
                kept &= (factor.start <= at) & (at < factor.start + factor.length)
            inside &= kept.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        counts += inside
    return counts


def first(marks: np.ndarray) -> tuple[int, ...] | None:
    return next((tuple(map(int, at)) for at in np.argwhere(marks)), None)


def factored(random_: random.Random, size: int) -> tuple[Factor, ...]:
    """Return a dim as random factors, some of which are cut."""
    sizes = []
    while size > 1 and random_.random() < 0.8:
        sizes.append(random_.choice([n for n in range(1, size + 1) if size % n == 0]))
        size //= sizes[-1]
    sizes.append(size)
    factors = []
    for n in random_.sample(sizes, len(sizes)):
        lo, hi = sorted(random_.choices(range(n + 1), k=2)) if random_.random() < 0.4 else (0, n)
        factors.append(Factor(0, n, lo, hi - lo))
    return tuple(factors)


@pytest.mark.parametrize("seed", range(6))
def test_first_overlap_and_hole(seed):
    random_ = random.Random(seed)
    for _ in range(150):
        shape = tuple(random_.choice((0, 1, 2, 3, 4, 6, 12, 24)) for _ in range(seed % 4))
        sides = [
            TensorView(tuple(factored(random_, n) if n else (Factor(0, 0, 0, 0),) for n in shape))
            for _ in range(random_.randrange(5))
        ]
        counts = counted(shape, sides) if 0 not in shape else np.ones(shape, int)
        twice = first(counts > 1)
        assert find_faults(shape, tuple(sides)) == (twice, first(counts == 0))
        if twice is not None:
            assert sum(covers(side, twice) for side in sides) == counts[twice]


def test_large_dims_take_no_memory():
    """Every second of 10^12 elements, and the others; a hole far behind."""
    size = 10**12
    halves = [
        TensorView(((Factor(0, size // 2, 0, size // 2), Factor(1, 2, at, 1)),)) for at in (0, 1)
    ]
    started = time.process_time()
    with pytest.raises(LayoutError, match="too many parts"):
        find_faults((size,), tuple(halves))
    whole = TensorView(((Factor(0, size, 0, size),),))
    cut = [TensorView(((Factor(0, size, lo, 10**11),),)) for lo in range(0, size, 10**11)]
    assert find_faults((size,), (whole,)) == (None, None)
    assert find_faults((size,), tuple(cut)) == (None, None)
    assert find_faults((size,), tuple(cut[:-1])) == (None, (size - 10**11,))
    assert time.process_time() - started < 5


def test_what_overlaps_in_too_many_ways_is_refused():
    """Twenty two halves of one dim by different bits, which differ along another too."""
    bits = 22
    sides = [
        TensorView(
            (
                tuple(Factor(0, 2, 0, 1 if at == bit else 2) for at in range(bits)),
                (Factor(0, bits, bit, 1),),
            )
        )
        for bit in range(bits)
    ]
    with pytest.raises(LayoutError, match="too many parts"):
        find_faults((2**bits, bits), tuple(sides))

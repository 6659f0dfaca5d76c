"""Random numbers by their place: any box of one global tensor, whatever else is made of it.

The tensor is taken row by row in blocks of 4096 numbers. Block *k* comes from the 4096 words of 64
bits that the counters *1024 k* to *1024 k + 1023* make in Philox 4x64 with ten rounds (Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the seed,
as in `numpy.random.Philox`, whose words are the same in every version. A uniform number is a word's
leading bits; two normal numbers come from two words by the method of Box and Muller (1958).
"""

from collections.abc import Callable, Iterator
from math import prod, tau
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.boxes import Box, box_shape

__all__ = ["Numbers", "box_of", "normal", "uniform"]

BLOCK: Final = 4096
_AT_ONCE: Final = 64 * BLOCK
"""Numbers that are made at a time; what is made needs no more memory than the box and these."""

Words: TypeAlias = npt.NDArray[np.uint64]
Numbers: TypeAlias = npt.NDArray[np.float64]


def uniform(bits: int) -> Callable[[Words], Numbers]:
    """Return what makes numbers from 0 up to but not including 1, multiples of ``2**-bits``."""

    def numbers(words: Words) -> Numbers:
        return (words >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits

    return numbers


def normal(words: Words) -> Numbers:
    """Make numbers of mean 0 and variance 1."""
    unit = uniform(53)(words)
    radius = np.sqrt(-2 * np.log1p(-unit[0::2]))
    angle = tau * unit[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def box_of(
    shape: tuple[int, ...], box: Box, seed: int, made_of: Callable[[Words], Numbers]
) -> Iterator[tuple[tuple[slice, ...], Numbers]]:
    """Yield the parts of a box of a tensor, each with its index in the box, one after the other.

    The seed is from 0 up to ``2**64``; `made_of` is `normal`, or what `uniform` returns.
    """
    if not prod(box_shape(box)):
        return
    yield from _parts(shape, box, 0, (), lambda lo, hi: _stretch(lo, hi, seed, made_of))


def _parts(
    shape: tuple[int, ...],
    box: Box,
    start: int,
    index: tuple[slice, ...],
    stretch: Callable[[int, int], Numbers],
) -> Iterator[tuple[tuple[slice, ...], Numbers]]:
    """Yield the parts of a box in a tensor whose first number is number `start` of all."""
    if not shape:
        yield index, stretch(start, start + 1).reshape(())
        return
    (lo, hi), inner = box[0], prod(shape[1:])
    rows = max(1, _AT_ONCE // inner)
    for first in range(lo, hi, rows):
        last = min(first + rows, hi)
        here = (*index, slice(first - lo, last - lo))
        if inner > _AT_ONCE:
            # One row at a time, each cut further.
            yield from _parts(shape[1:], box[1:], start + first * inner, here, stretch)
            continue
        rows_here = stretch(start + first * inner, start + last * inner)
        columns = tuple(slice(*side) for side in box[1:])
        yield here, rows_here.reshape(last - first, *shape[1:])[:, *columns]


def _stretch(lo: int, hi: int, seed: int, made_of: Callable[[Words], Numbers]) -> Numbers:
    first, last = lo // BLOCK, -(-hi // BLOCK)
    # Four words to a counter; numpy's generator counts up before it makes the first.
    words = np.random.Philox(key=seed, counter=first * BLOCK // 4).random_raw(
        (last - first) * BLOCK
    )
    return made_of(words)[lo - first * BLOCK : hi - first * BLOCK]

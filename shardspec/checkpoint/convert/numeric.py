"""Casts and sums the bytes of stored tensors, also of bfloat16 and float8, with numpy alone.

Only floating point numbers are cast. As in torch, a float64 is rounded to float32 before it
becomes a shorter float. Sums of short floats are accumulated in float32 and rounded once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cache
from math import prod
from operator import add
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import StoredReduction
from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import packed

Bytes: TypeAlias = NDArray[np.uint8]
RawNumbers: TypeAlias = NDArray[Any]
"""Numbers of any dtype as unsigned integers of its size."""

# dtype: (bits of the fraction, bias, True if the code of -0 is its only NaN)
_EIGHT_BITS: Final = {
    "float8_e4m3fn": (3, 7, False),
    "float8_e5m2": (2, 15, False),
    "float8_e4m3fnuz": (3, 8, True),
    "float8_e5m2fnuz": (2, 16, True),
}
_E4M3FN_LIMIT: Final = 464
"""Largest number that rounds to 448, the largest number of float8_e4m3fn."""
_UPPER_HALVES: Final = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
"""The upper half of every float32, followed by zeros."""
_AT_ONCE: Final = 1 << 16
"""Numbers per table lookup, so that the indices stay in the cache."""
_SUMMED_BYTES: Final = 1 << 17
"""Bytes of addends summed per step, so that they stay in the cache."""
FOUR_BITS: Final = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.complex64
)
"""The numbers of OCP's 4-bit floating point (e2m1), by their code."""


def strips(height: int, width: int) -> Iterator[slice]:
    """Yield slices of rows, so that `width` columns of each slice fit into the CPU's cache.

    >>> list(strips(3, 1 << 15))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    step = max(1, _AT_ONCE // max(1, width))
    for row in range(0, height, step):
        yield slice(row, min(row + step, height))


def numbers(raw: Bytes, dtype: str) -> NDArray[Any]:
    """Return the values of `raw` bytes as an array; bfloat16 and 8-bit floats become float32.

    Two numbers in one byte, the low half first, are one complex number.

    >>> numbers(np.uint8([0x80, 0x3F]), "bfloat16")
    array([1.], dtype=float32)
    """
    if dtype == "bfloat16":
        # bfloat16 is the upper half of a float32.
        return np.left_shift(raw.view(np.uint16), np.uint32(16)).view(np.float32)
    if packed(dtype) > 1:
        # A pair is one element; as a complex number it is compared like any other.
        pairs: NDArray[Any] = FOUR_BITS[raw & 15] + np.complex64(1j) * FOUR_BITS[raw >> 4]
        return pairs
    if dtype.startswith("float8"):
        return _eight_bit_table(dtype)[raw]
    return raw.view(np.dtype(dtype))


@cache
def _eight_bit_table(dtype: str) -> NDArray[np.float32]:
    """Return the values of the bytes 0 to 255 in a float8 dtype, such as float8_e4m3fn."""
    code = np.arange(256)
    if dtype == "float8_e8m0fnu":
        table = np.ldexp(1.0, code - 127)
        table[255] = np.nan
        return table.astype(np.float32)
    fraction_bits, bias, fnuz = _EIGHT_BITS[dtype]
    # Without its sign it is a float32 with another bias.
    unsigned = code & 0x7F
    size = (unsigned << (23 - fraction_bits)).astype(np.uint32).view(np.float32)
    size = np.ldexp(size, 127 - bias)
    if dtype == "float8_e5m2":
        size[unsigned == 0x7C] = np.inf
        size[unsigned > 0x7C] = np.nan
    elif not fnuz:
        size[unsigned == 0x7F] = np.nan
    table = np.where(code < 128, size, -size)
    if fnuz:
        table[0x80] = np.nan
    return table


def nearest_codes(table: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return 65,536 indices into an ascending table: for each upper half of a float32, the nearest.

    Signs are ignored, and ties go to even indices. The table is extended by one more step.
    """
    values = _UPPER_HALVES.view(np.float32)
    size = np.where(np.isnan(values), np.float32(np.inf), np.abs(values))
    grid = np.append(table, 2 * table[-1] - table[-2]).astype(np.float64)
    halfway = (grid[:-1] + grid[1:]) / 2
    code: NDArray[np.intp] = np.searchsorted(halfway, size)
    code += (code % 2 == 1) & (size == np.append(halfway, np.inf)[code])
    return code


def round_by(table: NDArray[Any], values: NDArray[np.float32]) -> NDArray[Any]:
    """Return the entry of a 65,536-long table for each value, found by the upper half of its bits.

    The last bit of the half is set if the lower half is not 0, so it rounds like the full number.
    """
    bits = values.view(np.uint32)
    odd = bits & np.uint32(0xFFFF)
    odd += np.uint32(0xFFFF)  # sets bit 16 if any lower bit was set
    odd |= bits
    odd >>= np.uint32(16)
    # Three times as fast as an index in brackets.
    rounded: NDArray[Any] = table.take(odd.astype(np.uint16), mode="clip")
    return rounded


@cache
def _eight_bit_codes(dtype: str) -> Bytes:
    """Return a table from the upper 16 bits of a float32 to the byte of the nearest float8."""
    fnuz = _EIGHT_BITS[dtype][2]
    values = _UPPER_HALVES.view(np.float32)
    table = _eight_bit_table(dtype)[:128]
    finite = table[np.isfinite(table)]
    code = nearest_codes(finite)
    largest = len(finite) - 1
    over = 0x80 if fnuz else 0x7C if dtype == "float8_e5m2" else largest
    code = np.where(code > largest, over, code)
    code = np.where(np.isnan(values), 0x80 if fnuz else 0x7F, code)
    negative = np.signbit(values) & ~(fnuz & (code == 0))
    return np.where(negative, code | 0x80, code).astype(np.uint8)


def narrow(values: NDArray[Any], dtype: str) -> Bytes:
    """Return values as the bytes of a shorter dtype, rounded to nearest, ties to even.

    For bfloat16 and signed 8-bit floats, `values` are float32.

    >>> narrow(np.float32([1.0]), "bfloat16").tolist()
    [128, 63]
    """
    if dtype != "bfloat16" and not dtype.startswith("float8"):
        return values.astype(np.dtype(dtype), copy=False).view(np.uint8)
    if dtype != "bfloat16":
        return round_by(_eight_bit_codes(dtype), values)
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    half = rounded.astype(np.uint16)
    # Rounding could carry a NaN into infinity; torch writes this NaN instead.
    if np.isnan(values.max(initial=0)):
        half[np.isnan(values)] = 0x7FC0
    return half.view(np.uint8)


@dataclass(frozen=True, slots=True)
class CastLosses:
    """Counts of the numbers that a cast made infinite, 0 or NaN."""

    overflows: int = 0
    """Numbers too large for the dtype; they became infinite, or its largest number."""
    underflows: int = 0
    """Nonzero numbers that became 0."""
    nans: int = 0
    """Numbers that became NaN."""

    def __add__(self, other: Self) -> "CastLosses":
        """Return the sum of the counts."""
        return CastLosses(*map(add, astuple(self), astuple(other)))

    def __bool__(self) -> bool:
        """Return True if any number was lost."""
        return any(astuple(self))

    def __str__(self) -> str:
        """Return the counts in words, as "3 numbers became 0"."""
        words = "too large", "too small (now 0)", "made NaN"
        counts = zip(astuple(self), words, strict=True)
        return ", ".join(f"{count} {what}" for count, what in counts if count) or "none"

    def to_json(self) -> dict[str, int]:
        """Return the counts as a dict."""
        return asdict(self)


def cast(data: memoryview, source: str, target: str) -> tuple[memoryview, CastLosses]:
    """Cast bytes from one floating point dtype to another, as torch would; also count what is lost.

    Numbers too large for float8_e4m3fn become its largest number, 448.

    >>> cast(memoryview(np.float32([1, 1e-9, 7e4])), "float32", "float16")[1]
    CastLosses(overflows=1, underflows=1, nans=0)
    """
    values = numbers(np.frombuffer(data, np.uint8), source)
    with np.errstate(all="ignore"):
        wide = values if target in ("float32", "float64") else values.astype(np.float32, copy=False)
        raw = narrow(wide, target)
    return raw.data, _losses(values, numbers(raw, target), target)


def _losses(before: NDArray[Any], after: NDArray[Any], target: str) -> CastLosses:
    """Count the elements that a cast to `target` has turned into infinity, 0 or NaN."""

    def more(is_so: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> int:
        return int(np.count_nonzero(is_so(after))) - int(np.count_nonzero(is_so(before)))

    if target == "float8_e4m3fn":
        # All larger numbers become its largest number.
        overflows = int(np.count_nonzero(np.abs(before) > _E4M3FN_LIMIT))
    else:
        overflows = max(more(np.isinf), 0)
    return CastLosses(overflows, more(lambda x: x == 0), max(more(np.isnan), 0))


_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def reduce(
    dtype: str,
    pending: Sequence[StoredReduction],
    addends: Iterable[Bytes],
    out: Bytes,
    sums: NDArray[np.uint8] | None = None,
) -> None:
    """Combine addends, such as the partial sums of two ranks, into `out`; all are bytes of `dtype`.

    The pending reductions share one operation, or are sums and means. A sum may have weights. All
    addends may be in the same memory, one after the other; `out` may be that memory too. `sums` is
    memory of four times the bytes of `out`, since 8-bit floats are summed in 32 bits.

    >>> out, addends = np.zeros(4, np.uint8), (np.float32([x]).view(np.uint8) for x in (1, 2))
    >>> reduce("float32", [StoredReduction("sum", 2)], addends, out)
    >>> out.view(np.float32)
    array([3.], dtype=float32)
    """
    combine = _UFUNCS[pending[0].op]
    divisor = prod(p.addends for p in pending if p.op == "avg")
    weights = pending[0].weights
    parts = [slice(at, at + _SUMMED_BYTES) for at in range(0, len(out), _SUMMED_BYTES)]
    sums = np.empty(4 * len(out), np.uint8) if sums is None else sums
    totals: list[NDArray[Any]] = []
    # Overflow and NaN are results, as in torch.
    with np.errstate(all="ignore"):
        for number, raw in enumerate(addends):
            for place, part in enumerate(parts):
                addend = numbers(raw[part], dtype)
                if dtype == "float16":
                    addend = addend.astype(np.float32)
                if not number:
                    room = sums[4 * part.start :][: addend.nbytes]
                    totals.append(room.view(addend.dtype))
                total = totals[place]
                if weights:
                    weight = addend.dtype.type(weights[number])
                    addend = np.multiply(addend, weight, out=addend if number else total)
                if number:
                    combine(total, addend, out=total)
                elif not weights:
                    np.copyto(total, addend)
        for part, total in zip(parts, totals, strict=True):
            if divisor != 1:
                total /= divisor
            out[part] = narrow(total, dtype)

"""Numbers that share a scale in blocks: made of codes, and rounded to codes, with numpy alone.

Tables do both. For the numbers of a block one is made of what each code times its scale is, rounded
once; microscaling formats (MX), whose scales are powers of two, need a single one. Codes are looked
up by the upper half of a float32.
"""

from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.numeric import FOUR_BITS, narrow, nearest_codes, numbers, round_by
from shardspec.checkpoint.schemes import MX, ScaleRule
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

Codes: TypeAlias = NDArray[np.uint8]
RawNumbers: TypeAlias = NDArray[Any]
"""Numbers of any dtype as unsigned integers of its size."""
Scales: TypeAlias = NDArray[Any]

_TABLES: Final = 256
"""Blocks in a lookup at once: with 256 codes each, indices have 16 bits."""
_ROWS: Final = 8
"""Rows in a lookup at once, so that indices stay in the cache."""
_STRIP: Final = 2048
"""The same of blocks of a microscaling format."""
_LARGEST: Final = np.float32(448)
"""Of float8_e4m3fn."""


def stored_as(values: NDArray[np.float32], dtype: str) -> RawNumbers:
    """Return numbers in a dtype, rounded once."""
    with np.errstate(all="ignore"):
        return narrow(np.ascontiguousarray(values), dtype).view(f"u{item_bytes(dtype)}")


@cache
def _values(dtype: str) -> NDArray[np.float32]:
    """Return the number of each code of 8 bits."""
    found: NDArray[np.float32] = numbers(np.arange(256, dtype=np.uint8), dtype)
    return found


def powers_of_two(codes: Codes) -> NDArray[np.float32]:
    """Return scales of microscaling formats: two to a power, or NaN."""
    return _values("float8_e8m0fnu").take(codes)


@cache
def _products(dtype: str, four: bool) -> RawNumbers:
    """Return what the scales of a microscaling format times the codes are.

    Two codes of 4 bits are one index, and their numbers one element, that of the lower bits first.
    """
    every = np.arange(256, dtype=np.uint8)
    values = _values("float8_e4m3fn")
    if four:
        values = FOUR_BITS.real.take(np.stack([every & 15, every >> 4], axis=1).ravel())
    with np.errstate(over="ignore"):
        found = stored_as(powers_of_two(every)[:, None] * values, dtype)
    return found.view(f"u{found.shape[1] // 256 * found.itemsize}").ravel()


def from_mx(codes: Codes, scales: Codes, out: RawNumbers, dtype: str, *, four: bool) -> None:
    """Fill `out`, a matrix, with the numbers of codes of a microscaling format."""
    table, height = _products(dtype, four), max(1, _STRIP // max(1, scales.shape[1]))
    for row in range(0, len(codes), height):
        some = slice(row, row + height)
        high = scales[some].reshape(-1, 1).astype(np.uint16) << np.uint16(8)
        index = codes[some].reshape(len(high), -1).astype(np.uint16)
        index |= high
        found = table.take(index, mode="clip")
        out[some] = found.view(out.dtype).reshape(out[some].shape)


def from_scaled(
    codes: Codes,
    scales: NDArray[np.float32],
    at: tuple[int, int],
    block: tuple[int, int],
    out: RawNumbers,
    dtypes: tuple[str, str],
) -> None:
    """Fill `out` with the numbers of codes, part of a matrix from a row and a column on.

    Parameters
    ----------
    scales
        Those of the whole matrix.
    block
        Rows and columns that share one.
    dtypes
        Of the codes, and of `out`.
    """
    (row, column), (high, wide) = at, block
    values, dtype = _values(dtypes[0]), dtypes[1]
    bands = max(1, _ROWS // high)
    """Rows of blocks that are looked up at once."""
    step = max(1, _TABLES // bands)
    tables = high * wide >= _TABLES
    eight = np.uint16(8)
    for left in range(column // wide, -(-(column + codes.shape[1]) // wide), step):
        columns = slice(max(left * wide - column, 0), (left + step) * wide - column)
        across = (np.arange(*columns.indices(codes.shape[1])) + column) // wide - left
        right = across.astype(np.uint16) << eight
        for first in range(row // high, -(-(row + len(codes)) // high), bands):
            top, end = max(first * high - row, 0), min((first + bands) * high - row, len(codes))
            some = scales[first : first + bands, left : left + step]
            if tables:
                with np.errstate(all="ignore"):
                    table = stored_as(some.reshape(-1, 1) * values, dtype).ravel()
            for lo in range(top, end, _ROWS):
                part = codes[lo : min(lo + _ROWS, end), columns]
                down = ((np.arange(lo, lo + len(part)) + row) // high - first)[:, None]
                if tables:
                    # Ten times as fast as an operation on two dtypes.
                    index = part.astype(np.uint16)
                    index |= right
                    if bands > 1:
                        index += (down * some.shape[1]).astype(np.uint16) << eight
                    found = table.take(index, mode="clip")
                else:
                    with np.errstate(all="ignore"):
                        found = stored_as(values.take(part) * some[down, across], dtype)
                out[lo : lo + len(part), columns] = found


def _amax(raw: RawNumbers, dtype: str, block: tuple[int, int], where: str) -> NDArray[np.float32]:
    """Return the largest size in each block of a matrix; CheckpointError if one is not finite."""
    # Sizes are in the order of their bits.
    if dtype == "bfloat16":
        sizes = raw & np.uint16(0x7FFF)
    else:
        sizes = np.ascontiguousarray(raw).view(np.uint32) & np.uint32(0x7FFFFFFF)
    high, wide = block
    if high > 1:
        bands = [sizes[row : row + high].max(axis=0) for row in range(0, len(sizes), high)]
        sizes = np.stack(bands)
    if wide > 1:
        sizes = np.maximum.reduceat(sizes, np.arange(0, sizes.shape[1], wide), axis=1)
    if dtype == "bfloat16":
        sizes = sizes.astype(np.uint32) << np.uint32(16)
    found: NDArray[np.float32] = sizes.view(np.float32)
    if not np.isfinite(found).all():
        raise CheckpointError(
            f"{where} has NaN or infinity, which no scale fits; correct the weights, or leave out "
            "the tensor"
        )
    return found


def _floats(raw: RawNumbers, dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float32).copy()


def to_scaled(
    raw: RawNumbers, dtype: str, block: tuple[int, int], rule: ScaleRule, where: str
) -> tuple[Codes, NDArray[np.float32]]:
    """Return numbers of bfloat16 or float32, whole blocks of a matrix, as float8_e4m3fn and scales.

    A scale is what codes are multiplied with to get the numbers back. By the rule ``transformers``
    numbers are multiplied with 448 · (1 / amax), both rounded, and the scale is 1 over that; by
    ``amax/448`` they are divided by this scale. Where all of a block is 0, or too small for its
    scale to be a float32, the scale is 1.
    """
    high, wide = block
    most = _amax(raw, dtype, block, where)
    with np.errstate(all="ignore"):
        if rule == "transformers":
            factors = np.float32(1) / most * _LARGEST
            factors = np.where((most > 0) & np.isfinite(factors), factors, np.float32(1))
            scales = np.float32(1) / factors
        else:
            scales = most / _LARGEST
            scales = factors = np.where(scales > 0, scales, np.float32(1))
    codes = np.empty(raw.shape, np.uint8)
    across = np.arange(raw.shape[1]) // wide
    for row in range(len(scales)):
        by = factors[row, across]
        for lo in range(row * high, min((row + 1) * high, len(raw)), _ROWS):
            some = slice(lo, min(lo + _ROWS, (row + 1) * high))
            values = _floats(raw[some], dtype)
            # In place, since new memory costs as much as the arithmetic.
            (np.multiply if rule == "transformers" else np.divide)(values, by, out=values)
            codes[some] = narrow(values, "float8_e4m3fn")
    return codes, scales


@cache
def _four_bit_codes() -> Codes:
    """Return the code of 4 bits (e2m1) for the upper half of every float32."""
    codes = np.minimum(nearest_codes(FOUR_BITS.real[:8]), 7)
    return np.where(np.arange(1 << 16) >> 15, codes | 8, codes).astype(np.uint8)


def to_mx(raw: RawNumbers, dtype: str, where: str, *, four: bool) -> tuple[Codes, Codes]:
    """Return numbers of bfloat16 or float32 as codes of a microscaling format, and scales.

    The scale is two to the floor of log2(amax), less the largest exponent of the codes; what is too
    large then becomes the largest code.
    """
    most = _amax(raw, dtype, (1, MX), where)
    exponents = (most.view(np.uint32) >> np.uint32(23)).astype(np.int16) - (2 if four else 8)
    scales = np.maximum(exponents, 0).astype(np.uint8)
    codes = np.empty(raw.shape, np.uint8)
    height = max(1, _STRIP // max(1, scales.shape[1]))
    for row in range(0, len(raw), height):
        some = slice(row, row + height)
        powers = np.int32(127) - scales[some].reshape(-1, 1).astype(np.int32)
        values = _floats(raw[some], dtype).reshape(len(powers), MX)
        with np.errstate(over="ignore", under="ignore"):
            values *= np.ldexp(np.float32(1), powers)
        found = round_by(_four_bit_codes(), values) if four else narrow(values, "float8_e4m3fn")
        codes[some] = found.reshape(codes[some].shape)
    if four:
        codes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return codes, scales

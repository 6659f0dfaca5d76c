"""Numbers that share a scale in blocks: made of codes, and rounded to codes, with numpy alone.

Tables do both. For the numbers of a block one is made of what each code times its scale is, rounded
once; microscaling formats (MX), whose scales are powers of two, need a single one. Codes are looked
up by the upper half of a float32.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.boxes.numeric import FOUR_BITS, narrow, nearest_codes, numbers, round_by
from shardspec.checkpoint.quantization.schemes import MX, ScaleRule
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

Codes: TypeAlias = NDArray[np.uint8]
RawNumbers: TypeAlias = NDArray[Any]
"""Numbers of any dtype as unsigned integers of its size."""
Scales: TypeAlias = NDArray[Any]

_TABLES: Final = 256
"""Blocks in a lookup at once: with 256 codes each, indices have 16 bits."""
_EIGHT: Final = np.uint16(8)
_AT_ONCE: Final = 1 << 16
"""Numbers in a lookup at once, so that indices stay in the cache."""
_LARGEST: Final = np.float32(448)
"""Of float8_e4m3fn."""


def stored_as(values: NDArray[np.float32], dtype: str) -> RawNumbers:
    """Return numbers in a dtype, rounded once."""
    with np.errstate(all="ignore"):
        return narrow(np.ascontiguousarray(values), dtype).view(f"u{item_bytes(dtype)}")


@cache
def _values(dtype: str) -> NDArray[np.float32]:
    """Return the number of each code of 8 bits."""
    values: NDArray[np.float32] = numbers(np.arange(256, dtype=np.uint8), dtype)
    return values


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
        products = stored_as(powers_of_two(every)[:, None] * values, dtype)
    return products.view(f"u{products.shape[1] // 256 * products.itemsize}").ravel()


def _look_up(table: RawNumbers, index: NDArray[np.uint16], out: RawNumbers) -> None:
    """Fill `out`, a matrix, with entries of a table; an entry may be two numbers."""
    if out.flags.c_contiguous:
        table.take(index.reshape(-1), out=out.reshape(-1).view(table.dtype), mode="clip")
    else:
        out[...] = table.take(index, mode="clip").view(out.dtype).reshape(out.shape)


def _strips(height: int, width: int) -> Iterator[slice]:
    """Yield rows of a matrix that are worked on at once."""
    step = max(1, _AT_ONCE // max(1, width))
    for row in range(0, height, step):
        yield slice(row, min(row + step, height))


def from_mx(codes: Codes, scales: Codes, out: RawNumbers, dtype: str, *, four: bool) -> None:
    """Fill `out`, a matrix, with the numbers of codes of a microscaling format."""
    table = _products(dtype, four)
    for rows in _strips(*out.shape):
        high = scales[rows].reshape(-1, 1).astype(np.uint16) << _EIGHT
        index = codes[rows].astype(np.uint16).reshape(len(high), -1)
        index |= high
        _look_up(table, index, out[rows])


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
    (height, width), values, dtype = codes.shape, _values(dtypes[0]), dtypes[1]
    scales = scales[row // high : -(-(row + height) // high)]
    scales = scales[:, column // wide : -(-(column + width) // wide)]
    row, column = row % high, column % wide
    across = (np.arange(width) + column) // wide
    if codes.size < _TABLES * scales.size:
        down = (np.arange(height) + row) // high
        for rows in _strips(height, width):
            factors = scales[down[rows]].take(across, axis=1)
            with np.errstate(all="ignore"):
                out[rows] = stored_as(values.take(codes[rows]) * factors, dtype)
        return
    with np.errstate(all="ignore"):
        tables = stored_as(scales.reshape(-1, 1) * values, dtype).reshape(*scales.shape, 256)
    for left in range(0, scales.shape[1], _TABLES):
        columns = slice(max(left * wide - column, 0), (left + _TABLES) * wide - column)
        right = (across[columns] - left).astype(np.uint16) << _EIGHT
        for band, every in enumerate(tables[:, left : left + _TABLES]):
            top, end = max(band * high - row, 0), min((band + 1) * high - row, height)
            for rows in _strips(end - top, len(right)):
                part = codes[top:end][rows, columns]
                # Ten times as fast as an operation on two dtypes.
                index = part.astype(np.uint16)
                index |= right
                _look_up(every.reshape(-1), index, out[top:end][rows, columns])


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
    most: NDArray[np.float32] = sizes.view(np.float32)
    if not np.isfinite(most).all():
        raise CheckpointError(
            f"{where} has NaN or infinity, which no scale fits; correct the weights, or leave out "
            "the tensor"
        )
    return most


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
        band = raw[row * high : (row + 1) * high]
        for rows in _strips(*band.shape):
            values = _floats(band[rows], dtype)
            # In place, since new memory costs as much as the arithmetic.
            (np.multiply if rule == "transformers" else np.divide)(values, by, out=values)
            codes[row * high :][rows] = narrow(values, "float8_e4m3fn")
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
    for rows in _strips(*raw.shape):
        powers = np.int32(127) - scales[rows].reshape(-1, 1).astype(np.int32)
        values = _floats(raw[rows], dtype).reshape(len(powers), MX)
        with np.errstate(over="ignore", under="ignore"):
            values *= np.ldexp(np.float32(1), powers)
        rounded = round_by(_four_bit_codes(), values) if four else narrow(values, "float8_e4m3fn")
        codes[rows] = rounded.reshape(codes[rows].shape)
    if four:
        codes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return codes, scales

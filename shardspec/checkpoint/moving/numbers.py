"""Bytes as numbers and back, for every dtype that has them, with numpy alone.

Only floating point numbers are cast. Short ones are made from float32, as torch makes them: a
float64 is rounded to float32 first.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.moving.regions import Bytes
from shardspec.dtypes import packed

__all__ = ["cast", "narrow", "numbers"]

# dtype: (bits of the fraction, bias, whether its only NaN is what would be -0)
_EIGHT_BITS: Final = {
    "float8_e4m3fn": (3, 7, False),
    "float8_e5m2": (2, 15, False),
    "float8_e4m3fnuz": (3, 8, True),
    "float8_e5m2fnuz": (2, 16, True),
}
_FOUR_BITS: Final = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.complex64
)
"""The numbers of OCP's 4-bit floating point (e2m1), by their code."""


def numbers(raw: Bytes, dtype: str) -> NDArray[Any]:
    """Return the numbers that bytes hold; those that numpy has no type for as float32.

    Two numbers in one byte, the low half first, are one complex number.

    Examples
    --------
    >>> numbers(np.array([0x80, 0x3F, 0xC0, 0xBF], np.uint8), "bfloat16").tolist()
    [1.0, -1.5]
    """
    if dtype == "bfloat16":
        # bfloat16 is the upper half of a float32.
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if packed(dtype) > 1:
        # A pair is one element; as a complex number it is compared like any other.
        pairs: NDArray[Any] = _FOUR_BITS[raw & 15] + np.complex64(1j) * _FOUR_BITS[raw >> 4]
        return pairs
    if dtype.startswith("float8"):
        return _eight_bit_table(dtype)[raw]
    return raw.view(np.dtype(dtype))


def _eight_bit_table(dtype: str) -> NDArray[np.float32]:
    """Return the number of each of the 256 bytes (OCP 8-bit floating point, and the fnuz kinds)."""
    code = np.arange(256)
    if dtype == "float8_e8m0fnu":
        table = np.ldexp(1.0, code - 127)
        table[255] = np.nan
        return table.astype(np.float32)
    fraction_bits, bias, fnuz = _EIGHT_BITS[dtype]
    fraction = code & ((1 << fraction_bits) - 1)
    exponent = (code & 0x7F) >> fraction_bits
    implied = np.where(exponent > 0, 1 << fraction_bits, 0)
    power = np.maximum(exponent, 1) - bias - fraction_bits
    table = np.ldexp((fraction + implied).astype(np.float64), power)
    if dtype == "float8_e5m2":
        table[exponent == 31] = np.nan
        table[0x7C] = table[0xFC] = np.inf
    elif not fnuz:
        table[(code & 0x7F) == 0x7F] = np.nan
    table = np.where(code >= 128, -table, table)
    if fnuz:
        table[0x80] = np.nan
    result: NDArray[np.float32] = table.astype(np.float32)
    return result


def narrow(values: NDArray[Any], dtype: str) -> Bytes:
    """Return the bytes of numbers in a dtype, rounded to nearest, ties to even.

    Parameters
    ----------
    values
        For bfloat16 in float32.
    dtype
        torch's name of a dtype that numpy has, or bfloat16.

    Examples
    --------
    >>> narrow(np.float32([1, np.nan]), "bfloat16").view(np.uint16).tolist() == [0x3F80, 0x7FC0]
    True
    """
    if dtype != "bfloat16":
        return values.astype(np.dtype(dtype), copy=False).view(np.uint8)
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    # Rounding could carry a NaN into infinity; torch writes this NaN instead.
    half = np.where(np.isnan(values), np.uint32(0x7FC0), rounded >> np.uint32(16))
    return half.astype(np.uint16).view(np.uint8)


def cast(data: memoryview, source: str, target: str) -> memoryview:
    """Return bytes of floating point numbers in another dtype, as torch would cast them.

    Examples
    --------
    >>> cast(memoryview(bytes.fromhex("0000803f")), "float32", "bfloat16").tolist()
    [128, 63]
    """
    raw = np.frombuffer(data, np.uint8)
    if target.startswith("float8"):
        return _cast_by_torch(raw, source, target).data
    values = numbers(raw, source)
    with np.errstate(all="ignore"):
        if target in ("bfloat16", "float16"):
            values = values.astype(np.float32, copy=False)
        return narrow(values, target).data


def _cast_by_torch(raw: Bytes, source: str, target: str) -> Bytes:
    """Cast to the numbers of eight bits, which only torch rounds."""
    import torch

    # A copy: torch wants memory that it may write.
    tensor = torch.from_numpy(raw.copy()).view(getattr(torch, source))
    result: Bytes = tensor.to(getattr(torch, target)).view(torch.uint8).numpy()
    return result

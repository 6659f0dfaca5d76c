"""Dequantizes the weights of a checkpoint while they are read, block by block."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import Catalog, StoredTensor, row_major_strides, whole_box
from shardspec.checkpoint.compare.coverage import check_tiling
from shardspec.checkpoint.convert.copy import Buffers
from shardspec.checkpoint.convert.numeric import (
    FOUR_BITS,
    Bytes,
    RawNumbers,
    narrow,
    numbers,
    strips,
)
from shardspec.checkpoint.convert.select import Choice, require_finished
from shardspec.checkpoint.quantization.cuts import quantized_in
from shardspec.checkpoint.quantization.derived import (
    ComputedCatalog,
    ComputedMatrices,
    Recent,
    Source,
    bytes_in_files,
)
from shardspec.checkpoint.quantization.detect import of_computed, sections, sections_of
from shardspec.checkpoint.quantization.schemes import MX, Coded, coded, schemes_in
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import QuantizedError
from shardspec.text import Argument

_INTO: Final = ("bfloat16", "float16", "float32", "float64")
_CHUNK_BYTES: Final = 2 << 20
"""Bytes of codes per read."""
_CACHE_BYTES: Final = 24 << 20
"""Bytes of cached codes: those of one expert, which is transposed strip by strip."""
_OF_LAYER: Final = re.compile(r"(.+)\.(input|output|activation)_scale(_ub)?")
"""Names of scales for the inputs and outputs of a layer with quantized weights."""

_TABLES: Final = 256
"""Blocks per table lookup: with 256 codes each, indices have 16 bits."""
_EIGHT: Final = np.uint16(8)


def stored_as(values: NDArray[np.float32], dtype: str) -> RawNumbers:
    """Return float32 numbers rounded to a dtype."""
    with np.errstate(all="ignore"):
        return narrow(np.ascontiguousarray(values), dtype).view(f"u{item_bytes(dtype)}")


@cache
def _values(dtype: str) -> NDArray[np.float32]:
    """Return the numbers that the codes 0 to 255 of an 8-bit dtype stand for."""
    values: NDArray[np.float32] = numbers(np.arange(256, dtype=np.uint8), dtype)
    return values


def powers_of_two(codes: Bytes) -> NDArray[np.float32]:
    """Return the scales that 8-bit exponents of microscaling formats stand for.

    >>> powers_of_two(np.array([126, 127, 128], np.uint8)).tolist()
    [0.5, 1.0, 2.0]
    """
    return _values("float8_e8m0fnu").take(codes)


@cache
def _products(dtype: str, four: bool) -> RawNumbers:
    """Return the table of all products of a scale and a code in a microscaling format.

    The index is 256 * scale + byte. With `four`, an entry is two products, the lower bits' first.
    """
    every = np.arange(256, dtype=np.uint8)
    values = _values("float8_e4m3fn")
    if four:
        values = FOUR_BITS.real.take(np.stack([every & 15, every >> 4], axis=1).ravel())
    with np.errstate(over="ignore"):
        products = stored_as(powers_of_two(every)[:, None] * values, dtype)
    return products.view(f"u{products.shape[1] // 256 * products.itemsize}").ravel()


def _look_up(table: RawNumbers, index: NDArray[np.uint16], out: RawNumbers) -> None:
    """Fill the matrix `out` with entries `index` of a table; an entry may be two numbers."""
    if out.flags.c_contiguous:
        table.take(index.reshape(-1), out=out.reshape(-1).view(table.dtype), mode="clip")
    else:
        out[...] = table.take(index, mode="clip").view(out.dtype).reshape(out.shape)


def from_mx(codes: Bytes, scales: Bytes, out: RawNumbers, dtype: str, *, four: bool) -> None:
    """Dequantize codes of a microscaling format into the matrix `out`."""
    table = _products(dtype, four)
    for rows in strips(*out.shape):
        high = scales[rows].reshape(-1, 1).astype(np.uint16) << _EIGHT
        index = codes[rows].astype(np.uint16).reshape(len(high), -1)
        index |= high
        _look_up(table, index, out[rows])


def from_scaled(
    codes: Bytes,
    scales: NDArray[np.float32],
    at: tuple[int, int],
    block: tuple[int, int],
    out: RawNumbers,
    dtypes: tuple[str, str],
) -> None:
    """Dequantize the part of a matrix that begins at a row and a column into `out`.

    Parameters
    ----------
    scales
        Scales of the full matrix.
    block
        Rows and columns that share a scale.
    dtypes
        Dtypes of the codes and of `out`.
    """
    (row, column), (high, wide) = at, block
    (height, width), values, dtype = codes.shape, _values(dtypes[0]), dtypes[1]
    scales = scales[row // high : -(-(row + height) // high)]
    scales = scales[:, column // wide : -(-(column + width) // wide)]
    row, column = row % high, column % wide
    across = (np.arange(width) + column) // wide
    if codes.size < _TABLES * scales.size:
        down = (np.arange(height) + row) // high
        for rows in strips(height, width):
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
            for rows in strips(end - top, len(right)):
                part = codes[top:end][rows, columns]
                # Ten times as fast as an operation on two dtypes.
                index = part.astype(np.uint16)
                index |= right
                _look_up(every.reshape(-1), index, out[top:end][rows, columns])


class _Numbers(ComputedMatrices):
    """A weight whose numbers are computed from its codes and scales when they are read."""

    def __init__(
        self, name: str, weight: Coded, tensors: tuple[StoredTensor, StoredTensor], dtype: str,
        recent: Recent, spare: list[Buffers],
    ) -> None:  # fmt: skip
        codes, scales = tensors
        reads = bytes_in_files(tensors)
        super().__init__(weight.rows, weight.columns, dtype, reads)
        self._name, self._weight, self._recent = name, weight, recent
        self._dtypes = codes.dtype, dtype
        self._codes = Source(codes, spare, 3 if weight.scheme.codes == "_blocks" else 2)
        self._scales = Source(scales, spare)
        self._chunk = max(1, _CHUNK_BYTES // max(1, weight.columns))
        powers = scales.dtype in ("uint8", "float8_e8m0fnu")
        plain = weight.scheme.four or codes.dtype == "float8_e4m3fn"
        self._mx = powers and plain and weight.block == (1, MX)

    def make(self, matrix: int, row: int, column: int, out: NDArray[Any]) -> None:
        """Fill `out` with the part of a matrix that begins at a row and a column."""
        filled, size = 0, self._chunk
        while filled < len(out):
            chunk, first = divmod(row + filled, size)
            lo, hi = chunk * size, min((chunk + 1) * size, self._weight.rows)
            codes = self._cached((matrix, lo), partial(self._codes.rows, matrix, lo, hi))
            part = out[filled : filled + hi - lo - first]
            some = codes[first : first + len(part)]
            if self._mx:
                scales = self._cached((matrix, lo, "s"), partial(self._scales.rows, matrix, lo, hi))
                self._from_mx(some, scales[first : first + len(part)], column, part)
            else:
                scales = self._cached((matrix, "s"), partial(self._grid, matrix))
                some = some[:, column : column + out.shape[1]]
                from_scaled(
                    some, scales, (row + filled, column), self._weight.block, part, self._dtypes
                )
            filled += len(part)

    def _cached(self, key: object, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        cached = self._recent.get((self._name, key))
        if cached is None:
            cached = read()
            self._recent.keep((self._name, key), cached)
        return cached

    def _from_mx(
        self, codes: NDArray[Any], scales: NDArray[Any], column: int, out: NDArray[Any]
    ) -> None:
        four = self._weight.scheme.four
        lo, hi = column // MX, -(-(column + out.shape[1]) // MX)
        wide = MX // 2 if four else MX
        codes, scales = codes[:, lo * wide : hi * wide], scales[:, lo:hi]
        aligned = out.shape[1] == (hi - lo) * MX
        made = out if aligned else np.empty((len(out), (hi - lo) * MX), out.dtype)
        from_mx(codes, scales, made, self._dtypes[1], four=four)
        if not aligned:
            out[:] = made[:, column - lo * MX :][:, : out.shape[1]]

    def _grid(self, matrix: int) -> NDArray[np.float32]:
        """Return the scales of matrix number `matrix`, one per block."""
        tensor, grid = self._scales.tensor, self._weight.grid
        if tensor.shape == (*self._weight.lead, *grid):
            raw = self._scales.rows(matrix, 0, grid[0])
        else:
            raw = self._scales.read(whole_box(tensor.shape)).reshape(-1, *grid)[matrix]
        if tensor.dtype in ("uint8", "float8_e8m0fnu"):
            return powers_of_two(raw)
        scales = numbers(np.ascontiguousarray(raw).view(np.uint8), tensor.dtype)
        return scales.astype(np.float32).reshape(grid)


class DequantizedCatalog(ComputedCatalog):
    """A checkpoint whose quantized weights are dequantized."""

    def __init__(
        self, base: Catalog, weights: Mapping[str, Coded], replaced: Collection[str], dtype: str
    ) -> None:
        super().__init__(base, replaced, weights.keys())
        self._weights, self._dtype, self._recent = weights, dtype, Recent(_CACHE_BYTES)

    def _look_up(self, name: str) -> StoredTensor:
        weight = self._weights[name]
        codes, scales = self.base.tensor(weight.codes), self.base.tensor(weight.scales)
        for tensor in (codes, scales):
            require_finished(tensor)
            check_tiling(tensor)
        shape, spec, strides = weight.shape, codes.spec, None
        if weight.scheme.transposed:
            stored_shape = *weight.lead, weight.rows, weight.columns
            *lead, row, column = row_major_strides(stored_shape, item_bytes(self._dtype))
            strides, spec = (*lead, column, row), None
        made = _Numbers(name, weight, (codes, scales), self._dtype, self._recent, self._spare)
        return self._made_tensor(name, shape, self._dtype, spec, codes, made, strides)


def dequantized(
    source: Catalog,
    dtype: object,
    choice: Choice | None = None,
    config: Mapping[str, object] | None = None,
) -> Catalog:
    """Return a checkpoint with dequantized weights, if `dtype` is a floating point dtype.

    Codes of unsupported schemes stay unchanged. Block sizes are read from `config`, by default the
    one beside the checkpoint.

    Raises
    ------
    QuantizedError
        If scales of selected weights are missing or do not fit, or no block size is recorded.
    """
    target = None if dtype is None else dtype_name(dtype)
    quantized = quantized_in(source) if target in _INTO else None
    if target is None or quantized is None or not quantized.why:
        return source
    outlines = map(source.outline, source.names)
    tensors = {outline.name: (outline.shape, outline.dtype) for outline in outlines}
    configs = list(sections(source.home)) or list(sections_of(config))
    schemes = schemes_in(configs)
    weights: dict[str, Coded] = {}
    for name in quantized.why:
        result = coded(name, tensors, schemes)
        weight = result[0] if isinstance(result, tuple) else name
        if weight != name and weight in tensors:
            result = f"{weight!r} is in the checkpoint too"
        if isinstance(result, tuple):
            weights[weight] = result[1]
        elif result is not None and (choice is None or choice.wants(name)):
            raise QuantizedError(
                f"{source.directory}: cannot cast to {target}: tensor {name!r} is quantized "
                f"({quantized.why[name]}), and {result}; omit ",
                Argument("dtype"),
                ", exclude these tensors, or repair the checkpoint",
            )
    if not weights:
        return source
    layers = {name.rpartition(".")[0] for name in weights}
    replaced = {name for weight in weights.values() for name in (weight.codes, weight.scales)}
    unchanged: set[str] = set()
    for name in quantized.why.keys() - replaced:
        match = _OF_LAYER.fullmatch(name)
        zeros = name.removesuffix("_zero_point") in weights  # symmetric schemes store zeros alone
        if zeros or (match is not None and match[1] in layers):
            replaced.add(name)
        elif of_computed(name):
            # Scales of caches have no reader without codes; others might be parameters.
            (replaced if prod(tensors[name][0]) == 1 else unchanged).add(name)
    made = DequantizedCatalog(
        source, weights, replaced, "float32" if target == "float64" else target
    )
    keeps = made.facts.keeps_dtype | unchanged
    return made.with_facts(replace(made.facts, keeps_dtype=keeps, quantization={}))

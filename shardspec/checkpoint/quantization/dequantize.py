"""A checkpoint with numbers where weights are quantized; they are made when they are read."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.boxes.copy import Buffers
from shardspec.checkpoint.boxes.coverage import check_tiling
from shardspec.checkpoint.boxes.derived import (
    ComputedCatalog,
    ComputedMatrices,
    Recent,
    Source,
    bytes_in_files,
)
from shardspec.checkpoint.boxes.numeric import numbers
from shardspec.checkpoint.catalog import Catalog, StoredTensor, row_major_strides, whole_box
from shardspec.checkpoint.quantization.blocks import from_mx, from_scaled, powers_of_two
from shardspec.checkpoint.quantization.cuts import quantized_in
from shardspec.checkpoint.quantization.detect import of_computed, sections, sections_of
from shardspec.checkpoint.quantization.schemes import MX, Coded, coded, schemes_in
from shardspec.checkpoint.select.choice import Choice
from shardspec.checkpoint.select.mapped import require_finished
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import QuantizedError
from shardspec.text import Argument

_INTO: Final = ("bfloat16", "float16", "float32", "float64")
_CHUNK_BYTES: Final = 2 << 20
"""Codes that are read at once."""
_KEPT_BYTES: Final = 24 << 20
"""Codes that are kept: those of an expert, as it is transposed strip by strip."""
_OF_LAYER: Final = re.compile(r"(.+)\.(input|output|activation)_scale(_ub)?")
"""Scales of what goes in and out of a layer whose weights are quantized."""


class _Numbers(ComputedMatrices):
    """What the codes of a weight mean."""

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
        """Fill `out` with a part of a matrix, from a row and a column on."""
        done, size = 0, self._chunk
        while done < len(out):
            chunk, first = divmod(row + done, size)
            lo, hi = chunk * size, min((chunk + 1) * size, self._weight.rows)
            codes = self._kept((matrix, lo), partial(self._codes.rows, matrix, lo, hi))
            part = out[done : done + hi - lo - first]
            some = codes[first : first + len(part)]
            if self._mx:
                scales = self._kept((matrix, lo, "s"), partial(self._scales.rows, matrix, lo, hi))
                self._from_mx(some, scales[first : first + len(part)], column, part)
            else:
                scales = self._kept((matrix, "s"), partial(self._grid, matrix))
                some = some[:, column : column + out.shape[1]]
                from_scaled(
                    some, scales, (row + done, column), self._weight.block, part, self._dtypes
                )
            done += len(part)

    def _kept(self, key: object, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        kept = self._recent.get((self._name, key))
        if kept is None:
            kept = read()
            self._recent.keep((self._name, key), kept)
        return kept

    def _from_mx(
        self, codes: NDArray[Any], scales: NDArray[Any], column: int, out: NDArray[Any]
    ) -> None:
        four = self._weight.scheme.four
        lo, hi = column // MX, -(-(column + out.shape[1]) // MX)
        wide = MX // 2 if four else MX
        codes, scales = codes[:, lo * wide : hi * wide], scales[:, lo:hi]
        whole = out.shape[1] == (hi - lo) * MX
        made = out if whole else np.empty((len(out), (hi - lo) * MX), out.dtype)
        from_mx(codes, scales, made, self._dtypes[1], four=four)
        if not whole:
            out[:] = made[:, column - lo * MX :][:, : out.shape[1]]

    def _grid(self, matrix: int) -> NDArray[np.float32]:
        """Return the scales of a matrix."""
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
    """A checkpoint whose quantized weights are numbers."""

    def __init__(
        self, base: Catalog, weights: Mapping[str, Coded], gone: Collection[str], dtype: str
    ) -> None:
        super().__init__(base, gone, weights.keys())
        self._weights, self._dtype, self._recent = weights, dtype, Recent(_KEPT_BYTES)

    def _look_up(self, name: str) -> StoredTensor:
        weight = self._weights[name]
        codes, scales = self.base.tensor(weight.codes), self.base.tensor(weight.scales)
        for tensor in (codes, scales):
            require_finished(tensor)
            check_tiling(tensor)
        shape, spec, strides = weight.shape, codes.spec, None
        if weight.scheme.transposed:
            lies = *weight.lead, weight.rows, weight.columns
            *lead, row, column = row_major_strides(lies, item_bytes(self._dtype))
            strides, spec = (*lead, column, row), None
        made = _Numbers(name, weight, (codes, scales), self._dtype, self._recent, self._spare)
        return self._made_tensor(name, shape, self._dtype, spec, codes, made, strides)


def dequantized(
    source: Catalog,
    dtype: object,
    choice: Choice | None = None,
    config: Mapping[str, object] | None = None,
) -> Catalog:
    """Return a checkpoint with numbers in place of codes, if it is to have a dtype of numbers.

    Codes of other schemes stay as they are. Block sizes are those that the config states which lies
    beside the checkpoint, or else a given one.

    Raises
    ------
    QuantizedError
        If scales of what `choice` wants are missing or do not fit, or no block size is stated.
    """
    target = None if dtype is None else dtype_name(dtype)
    quantized = quantized_in(source) if target in _INTO else None
    if target is None or quantized is None or not quantized.why:
        return source
    outlines = map(source.outline, source.names)
    tensors = {outline.name: (outline.shape, outline.dtype) for outline in outlines}
    stated = list(sections(source.home)) or list(sections_of(config))
    schemes = schemes_in(stated)
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
                f"({quantized.why[name]}), and {result}; leave out ",
                Argument("dtype"),
                ", exclude these tensors, or mend the checkpoint",
            )
    if not weights:
        return source
    layers = {name.rpartition(".")[0] for name in weights}
    gone = {name for weight in weights.values() for name in (weight.codes, weight.scales)}
    for name in quantized.why:
        match = _OF_LAYER.fullmatch(name)
        if match is not None and match[1] in layers:
            gone.add(name)
    made = DequantizedCatalog(source, weights, gone, "float32" if target == "float64" else target)
    made.keeps_dtype |= {name for name in quantized.why if name not in gone and of_computed(name)}
    made.quantization = {}
    return made

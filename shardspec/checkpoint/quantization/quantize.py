"""Quantizes the weights of a checkpoint while they are read, as in ``quantize="mxfp8"``."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import (
    Catalog,
    StoredTensor,
)
from shardspec.checkpoint.compare.coverage import check_tiling
from shardspec.checkpoint.convert.copy import Buffers
from shardspec.checkpoint.convert.numeric import (
    FOUR_BITS,
    Bytes,
    RawNumbers,
    cast,
    narrow,
    nearest_codes,
    round_by,
    strips,
)
from shardspec.checkpoint.convert.select import (
    Choice,
    Patterns,
    Renames,
    config_of,
    mapped,
    renamed_names,
    wanted_names,
    without_optimizer,
)
from shardspec.checkpoint.quantization.cuts import origins, quantized_in, refuse_quantized
from shardspec.checkpoint.quantization.derived import (
    ComputedCatalog,
    ComputedMatrices,
    Recent,
    Source,
    bytes_in_files,
)
from shardspec.checkpoint.quantization.detect import sections, sections_of
from shardspec.checkpoint.quantization.schemes import MX, QUANTIZATIONS, Shape
from shardspec.dtypes import dtype_name, is_cast, is_floating, item_bytes, packed
from shardspec.errors import CheckpointError, DTypeError
from shardspec.families.linear import LinearLayers, SkippedModules, is_exempt, module_of
from shardspec.resharding.name_map import Names
from shardspec.text import Argument, shown

_GPT_OSS: Final = {"quant_method": "mxfp4"}
"""Section for gpt-oss: only its experts are quantized, in transposed form."""
_FUSED: Final = re.compile(r"\b([qkv]|gate|up)_proj\b|\bw[13]\b")
"""Names of layers that inference engines fuse with others."""
_SKIPPED: Final = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"),
    "llm_int8_skip_modules",
)
"""Keys of configs that list unquantized layers."""
_TILE: Final = 1 << 20
"""Numbers quantized at once; a block is always quantized at once."""
_CODE_BYTES: Final = 16 << 20
_SCALE_BYTES: Final = 8 << 20
"""Bytes of codes, and of scales, that are cached until they are read."""

_LARGEST: Final = np.float32(448)
"""Largest number of float8_e4m3fn."""


def _amax(raw: RawNumbers, dtype: str, block: tuple[int, int], where: str) -> NDArray[np.float32]:
    """Return the largest magnitude in each block; raises CheckpointError if one is not finite."""
    # Magnitudes sort like their bits.
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
            f"{where} has NaN or infinity, which no scale fits; correct the weights, or exclude "
            "the tensor"
        )
    return most


def _floats(raw: RawNumbers, dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float32).copy()


def to_scaled(
    raw: RawNumbers, dtype: str, block: tuple[int, int], where: str
) -> tuple[Bytes, NDArray[np.float32]]:
    """Quantize blocks of a matrix in bfloat16 or float32; return float8_e4m3fn codes and scales.

    Numbers are multiplied by 448 · (1 / amax), both factors rounded as in transformers. The scale
    is the inverse of that product, or 1 for numbers that are 0 or too small for a float32 scale.
    """
    high, wide = block
    most = _amax(raw, dtype, block, where)
    with np.errstate(all="ignore"):
        factors = np.float32(1) / most * _LARGEST
        factors = np.where((most > 0) & np.isfinite(factors), factors, np.float32(1))
        scales = np.float32(1) / factors
    codes = np.empty(raw.shape, np.uint8)
    across = np.arange(raw.shape[1]) // wide
    for row in range(len(scales)):
        by = factors[row, across]
        band = raw[row * high : (row + 1) * high]
        for rows in strips(*band.shape):
            values = _floats(band[rows], dtype)
            # In place, since new memory costs as much as the arithmetic.
            np.multiply(values, by, out=values)
            codes[row * high :][rows] = narrow(values, "float8_e4m3fn")
    return codes, scales


@cache
def _four_bit_codes() -> Bytes:
    """Return a table from the upper 16 bits of a float32 to its 4-bit code (e2m1)."""
    codes = np.minimum(nearest_codes(FOUR_BITS.real[:8]), 7)
    return np.where(np.arange(1 << 16) >> 15, codes | 8, codes).astype(np.uint8)


def to_mx(raw: RawNumbers, dtype: str, where: str, *, four: bool) -> tuple[Bytes, Bytes]:
    """Quantize numbers in bfloat16 or float32 to a microscaling format; return codes and scales.

    The scale is 2 ** (floor(log2(amax)) - largest exponent of the codes). Numbers too large for
    this scale become the largest code.
    """
    most = _amax(raw, dtype, (1, MX), where)
    exponents = (most.view(np.uint32) >> np.uint32(23)).astype(np.int16) - (2 if four else 8)
    scales = np.maximum(exponents, 0).astype(np.uint8)
    codes = np.empty(raw.shape, np.uint8)
    for rows in strips(*raw.shape):
        powers = np.int32(127) - scales[rows].reshape(-1, 1).astype(np.int32)
        values = _floats(raw[rows], dtype).reshape(len(powers), MX)
        with np.errstate(over="ignore", under="ignore"):
            values *= np.ldexp(np.float32(1), powers)
        rounded = round_by(_four_bit_codes(), values) if four else narrow(values, "float8_e4m3fn")
        codes[rows] = rounded.reshape(codes[rows].shape)
    if four:
        codes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return codes, scales


class Quantize(NamedTuple):
    """Options for quantizing weights; see `merge`."""

    kind: str
    include: Patterns | None = None
    in_files: bool = True
    """True if codes go to files, whose readers limit the shapes; False for weights in memory."""


def quantize_of(kind: str | None, include: Patterns | None) -> Quantize | None:
    """Return the options of quantization; None without a scheme, DTypeError if it is unknown.

    >>> quantize_of("mxfp8", None)
    Quantize(kind='mxfp8', include=None, in_files=True)
    """
    if kind is None:
        if include is not None:
            raise DTypeError(Argument("quantize_include"), " is for ", Argument("quantize"))
        return None
    if kind not in QUANTIZATIONS:
        raise DTypeError(
            f"unknown quantization scheme {shown(kind)}; choose among {', '.join(QUANTIZATIONS)}"
        )
    return Quantize(kind, include)


class _Weight(NamedTuple):
    """A weight to quantize."""

    source: str
    lead: Shape
    rows: int
    columns: int
    transposed: bool


class _Quantizer:
    """Quantizes one weight, a tile at a time."""

    def __init__(
        self,
        weight: _Weight,
        tensor: StoredTensor,
        how: Quantize,
        dtype: str | None,
        caches: tuple[Recent, Recent],
        spare: list[Buffers],
    ) -> None:
        self.weight, self.how, self.four = weight, how, how.kind == "mxfp4"
        self.block = (128, 128) if how.kind == "fp8-128x128" else (1, MX)
        self._source, self._dtype, self._caches = Source(tensor, spare), dtype, caches
        high, wide = self.block
        self.width = max(wide, min(-(-weight.columns // wide) * wide, _TILE // high))
        self.height = max(1, _TILE // (high * self.width)) * high
        self.reads = bytes_in_files((tensor,))

    def tile(self, matrix: int, row: int, column: int, *, scales: bool) -> NDArray[Any]:
        """Return the codes, or the scales, of the tile that begins at a row and a column."""
        key = self.weight.source, matrix, row, column
        cached = self._caches[scales].get(key)
        if cached is not None:
            return cached
        both = self._quantized(matrix, row, column)
        # Codes and scales are read one after the other, but made together.
        for recent, made in zip(self._caches, both, strict=True):
            recent.keep(key, made)
        return both[scales]

    def _quantized(self, matrix: int, row: int, column: int) -> tuple[NDArray[Any], NDArray[Any]]:
        weight = self.weight
        rows = row, min(row + self.height, weight.rows)
        columns = column, min(column + self.width, weight.columns)
        if weight.transposed:
            columns_first = self._source.rows(matrix, *columns, (rows,))
            raw = np.ascontiguousarray(columns_first.T)
        else:
            raw = self._source.rows(matrix, *rows, (columns,))
        dtype = self._source.tensor.dtype
        for target in (self._dtype or dtype, "float32"):
            if is_cast(dtype, target) and (dtype, target) != ("bfloat16", "float32"):
                data, _ = cast(raw.reshape(-1).view(np.uint8).data, dtype, target)
                raw = np.frombuffer(data, f"u{item_bytes(target)}").reshape(raw.shape)
                dtype = target
        where = f"tensor {weight.source!r}"
        if self.block == (1, MX):
            return to_mx(raw, dtype, where, four=self.four)
        return to_scaled(raw, dtype, self.block, where)


class _CodesOrScales(ComputedMatrices):
    """The codes of a weight, or its scales."""

    def __init__(self, quantizer: _Quantizer, *, scales: bool) -> None:
        weight = quantizer.weight
        self.each = quantizer.block if scales else (1, 2 if quantizer.four else 1)
        """Rows and columns of the weight that become one element."""
        high, wide = self.each
        dtype = "float32" if high > 1 else "uint8"
        sides = -(-weight.rows // high), -(-weight.columns // wide)
        super().__init__(*sides, dtype, quantizer.reads)
        self._quantizer, self._scales = quantizer, scales

    def make(self, matrix: int, row: int, column: int, out: NDArray[Any]) -> None:
        """Fill `out` with the part of a matrix that begins at a row and a column."""
        tiles, (high, wide) = self._quantizer, self.each
        down, across = tiles.height // high, tiles.width // wide
        for top in range(row // down * down, row + out.shape[0], down):
            for left in range(column // across * across, column + out.shape[1], across):
                tile = tiles.tile(matrix, top * high, left * wide, scales=self._scales)
                inner = tile.view(out.dtype)[max(row - top, 0) :, max(column - left, 0) :]
                part = out[max(top - row, 0) :, max(left - column, 0) :]
                sides = tuple(map(min, inner.shape, part.shape))
                part[: sides[0], : sides[1]] = inner[: sides[0], : sides[1]]


class QuantizedCatalog(ComputedCatalog):
    """A checkpoint whose weights are replaced by codes and scales."""

    def __init__(
        self, base: Catalog, weights: Collection[_Weight], replaced: Collection[str],
        how: Quantize, dtype: str | None,
    ) -> None:  # fmt: skip
        self._how, self._dtype = how, None if dtype is None else dtype_name(dtype)
        self._weights: dict[str, tuple[_Weight, bool]] = {}
        for weight in weights:
            codes, scales = "", "_scale_inv"
            if how.kind == "mxfp4":
                suffixes = ("_blocks", "_scales") if weight.transposed else ("_packed", "_scale")
                codes, scales = suffixes
            for end, is_codes in ((codes, True), (scales, False)):
                self._weights[weight.source + end] = weight, is_codes
        super().__init__(base, replaced, self._weights.keys())
        self._recent = Recent(_CODE_BYTES), Recent(_SCALE_BYTES)
        keeps = self.facts.keeps_dtype | self._weights.keys()
        self.facts = replace(self.facts, keeps_dtype=keeps)

    def _look_up(self, name: str) -> StoredTensor:
        weight, is_codes = self._weights[name]
        source = self.base.tensor(weight.source)
        check_tiling(source)
        quantizer = _Quantizer(weight, source, self._how, self._dtype, self._recent, self._spare)
        made = _CodesOrScales(quantizer, scales=not is_codes)
        dtype = "float8_e4m3fn" if is_codes and not quantizer.four else made.dtype
        inner: Shape = (made.rows, made.columns)
        if is_codes and quantizer.four and weight.transposed:
            inner = (weight.rows, weight.columns // MX, MX // 2)
        shape = (*weight.lead, *inner)
        spec = source.spec if is_codes and shape == source.shape else None
        return self._made_tensor(name, shape, dtype, spec, source, made)


def with_codes(
    source: Catalog, names: Names | None, choice: Choice | None, dropped: Collection[str] = ()
) -> QuantizedCatalog:
    """Rename the tensors of a checkpoint, and quantize the weights of linear layers to FP8.

    Raises DTypeError if a selected tensor is already quantized.
    """
    config, how = config_of(source, names), Quantize("fp8-128x128", in_files=False)
    if names is None and (dropped or (choice is not None and choice.drop)):
        names = {}
    source = mapped(source, names, choice, dropped=dropped)
    why = quantized_in(source).why
    refuse_quantized(why, origins(source, source.names), "leave out ", Argument("dtype"))
    weights, _ = _weights(source, {name: name for name in source.names}, how, config)
    return QuantizedCatalog(source, weights, {weight.source for weight in weights}, how, None)


def quantized_as(
    source: Catalog,
    how: Quantize | None,
    choice: Choice,
    config: Mapping[str, object] | None = None,
    rename: Renames = (),
) -> Catalog:
    """Return the selected part of a checkpoint, with the weights of linear layers quantized.

    The model's family decides which weights these are, by the names that `rename` gives them later;
    its `config` is by default the one beside the checkpoint.

    Raises
    ------
    CheckpointError
        If a selected tensor is already quantized, or none can be.
    """
    if how is None:
        return source
    selected = wanted_names(source, choice)
    remedy = "dequantize it on the way with ", Argument("dtype", value="bf16"), ", or leave out "
    refuse_quantized(
        quantized_in(source).why, origins(source, selected), *remedy, Argument("quantize")
    )
    renamed, _ = renamed_names(selected, rename)
    weights, unquantized = _weights(source, renamed, how, config)
    if not weights:
        raise CheckpointError(
            f"{source.directory}: no tensor is recognized as the weight of a linear layer; name "
            "tensors to quantize with ",
            Argument("quantize_include"),
        )
    replaced = {*source.names} - {*selected} | {weight.source for weight in weights}
    made = QuantizedCatalog(source, weights, replaced, how, choice.dtype)
    key = "modules_to_not_convert"
    section = _GPT_OSS if any(weight.transposed for weight in weights) else QUANTIZATIONS[how.kind]
    if "config_groups" in section:
        key = "ignore"
    listed = SkippedModules(unquantized)
    if clash := next((name for each in weights if (name := renamed[each.source]) in listed), None):
        raise CheckpointError(
            f"{source.directory}: transformers cannot tell {clash!r} from a module that is not "
            "quantized, as one name begins or ends with the other; rename one"
        )
    section = {**section, key: sorted({*without_optimizer(unquantized)})}
    return made.with_facts(replace(made.facts, quantization=section))


def _weights(
    source: Catalog, names: Mapping[str, str], how: Quantize, config: Mapping[str, object] | None
) -> tuple[list[_Weight], list[str]]:
    """Return the weights to quantize, and the names of modules whose matrices are not.

    `names` maps source names to output names; a weight is selected by its output name.
    """
    linear = LinearLayers(config or {})
    gpt_oss = linear.model_type == "gpt_oss"
    configs = [*sections(source.home), *sections_of(config)]
    lists = [section.get(key) for section in configs for key in _SKIPPED]
    skipped = SkippedModules(
        module
        for modules in lists
        if isinstance(modules, list)
        for module in modules
        if isinstance(module, str)
    )
    weights, unquantized = [], []
    for own, name in names.items():
        outline = source.outline(own)
        shape = outline.shape
        plain = is_floating(outline.dtype) and not outline.dtype.startswith("complex")
        if len(shape) < 2 or not plain or packed(outline.dtype) > 1:
            continue
        if how.include is None:
            stacked = len(shape) > 2 and "expert" not in name and how.in_files
            chosen = name in linear and name not in skipped and not stacked
            chosen = chosen and (not gpt_oss or how.kind != "mxfp4" or ".experts." in name)
        else:
            patterns = [how.include] if isinstance(how.include, str) else how.include
            chosen = any(fnmatchcase(name, pattern) for pattern in patterns)
        if not chosen:
            unquantized.append(module_of(name))
            continue
        transposed = gpt_oss and how.kind == "mxfp4" and len(shape) == 3
        rows, columns = reversed(shape[-2:]) if transposed else shape[-2:]
        problem = _unread(name, shape, how, gpt_oss=gpt_oss) if how.in_files else ""
        if not problem and how.kind != "fp8-128x128" and columns % MX:
            problem = f"has {columns} columns, not a multiple of {MX}"
        if problem:
            raise CheckpointError(
                f"{source.directory}: tensor {name!r} {problem}; or choose others with ",
                Argument("quantize_include"),
            )
        weights.append(_Weight(own, shape[:-2], rows, columns, transposed))
    if not (how.in_files and how.kind == "fp8-128x128"):
        return weights, unquantized
    uneven = [weight for weight in weights if weight.rows % 128 or weight.columns % 128]
    if uneven and (how.include is not None or len(uneven) == len(weights)):
        raise CheckpointError(
            f"{source.directory}: 128 does not divide {uneven[0].rows}x{uneven[0].columns} of "
            f"{names[uneven[0].source]!r}, so transformers would not read it in FP8; choose others "
            "with ",
            *(Argument("quantize_include"), ", or give ", Argument("quantize", value="mxfp8")),
        )
    # Engines fuse these matrices, and read all of them in FP8 or none.
    fused = {weight: _FUSED.sub("", names[weight.source]) for weight in weights}
    uneven_names = {fused[weight] for weight in uneven}
    even = [weight for weight in weights if fused[weight] not in uneven_names]
    skipped_ones = [names[each.source] for each in weights if each not in even]
    return even, unquantized + list(map(module_of, skipped_ones))


def _unread(name: str, shape: Shape, how: Quantize, *, gpt_oss: bool) -> str:
    """Return why no tool would read the tensor if quantized, and a remedy; "" if one would."""
    if gpt_oss and how.kind != "mxfp4":
        return f"is of gpt-oss, which transformers reads in mxfp4 but not in {how.kind}; give that"
    if len(shape) > 2 and not gpt_oss:
        return (
            f"stacks matrices, which transformers does not read in {how.kind}; store experts one "
            "by one, as transformers' files have them"
        )
    if how.include is not None and is_exempt(name) and not name.endswith(("head", "head.weight")):
        return f"is no linear layer by its name, and transformers does not read it in {how.kind}"
    return ""

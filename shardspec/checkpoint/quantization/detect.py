r"""Which tensors are quantized: codes, what gives them a meaning, and where blocks share a scale.

A quantized weight is a tensor of codes and companions: scales, zero points, tables. Recognised are
companions by their names, dtypes that exist for codes only, and what the files beside the weights
say (``quantization_config`` in ``config.json``, also nested). Sizes of blocks are stated there, or
follow from the shapes of scales where these leave no choice:

=====================  ===================================  ========================================
scheme                 codes, companions                    one scale for
=====================  ===================================  ========================================
FP8 in blocks          W, W_scale_inv                       ``weight_block_size`` of the last dims
FP8, int8              W, W_scale (SCB, weight_scales)      a tensor, a row, or ``group_size``
compressed-tensors     weight_packed, weight_scale,         a tensor, a row, ``group_size``, or
                       weight_zero_point                    ``block_structure``
GPTQ                   qweight, scales, qzeros, g_idx       ``group_size`` down dim 0; zero points
                                                            of several columns lie in one number
AWQ                    qweight, scales, qzeros              ``group_size`` down dim 0
MLX                    weight, scales, biases               ``group_size`` along the last dim
MXFP4                  X_blocks, X_scales                   the last dim of X_blocks
MXFP4, NVFP4           weight, weight_scale (_scale_2)      32, 16 along the last dim
bitsandbytes           W, W.absmax                          a power of two of elements, row by row
torchao                X._weight_qdata, X._weight_scale     ``block_size`` in the metadata
=====================  ===================================  ========================================

Codes of other schemes lie in an order of their own and are not cut at all.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import gcd, lcm, prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.dtypes import item_bytes

Shape: TypeAlias = tuple[int, ...]

_MOST_CONFIG_BYTES: Final = 1 << 24
_CONFIGS: Final = {
    "config.json": False,
    "hf_quant_config.json": True,
    "quantize_config.json": True,
    "quant_config.json": True,
    "quantization_config.json": True,
    "params.json": False,
}
"""Files that say how weights are quantized, and whether the whole file does."""
SECTIONS: Final = frozenset({"quantization_config", "quantization", "compression_config"})
QUANTIZED_BY: Final = frozenset(name for name, whole in _CONFIGS.items() if whole)
"""Files that say nothing else."""
_SIZES: Final = re.compile(r"(q_|weight_)?group_size|(weight_)?block_(size|structure)|blocksize")
_BITS: Final = ("bits", "num_bits", "w_bit", "nbits", "weight_bits")
_OF_ACTIVATIONS: Final = re.compile(r"(input|output)_activations|kv_cache\w*")
_OWN_ORDER: Final = re.compile(
    r"aqlm|bitnet|eetq|exl\d?|fp_quant|higgs|hqq|marlin.*|quip.*|sinq|spqr|vptq"
)
"""Methods whose codes do not lie as the rows and columns of the weight do."""

_NARROW: Final = re.compile(r"u?int(8|16|32)|float[48]_.*")
"""Dtypes in which codes are stored."""
_CODES_WITH_SCALES: Final = re.compile(r"u?int\d+|float[48]_.*")
"""Dtypes of what has a name of codes, and scales."""
_CODES_ALONE: Final = re.compile(r"float[48]_.*")
"""Dtypes whose numbers are codes, whatever is beside them."""

_DOTTED: Final = (
    *("weight", "qweight", "weight_packed", "W_q", "codes", "q_weight", "indices", "trellis"),
    *("Qidxs", "weight_q", "dense_weights"),
)
_STEMS: Final = ("", "_packed", "_blocks", "_qdata", "_q")


class _Companion(NamedTuple):
    """Names of tensors that give codes their meaning."""

    name: re.Pattern[str]
    codes: tuple[str, ...]
    """What the codes may be called, given the groups of the match."""
    alone: bool
    """Whether the name says enough; else the codes must be there, of a narrow dtype."""
    flat: bool = False
    """Whether each number is that of a run of elements, row by row."""
    grid: bool = True
    """Whether there is a number for each block."""


def _companion(
    pattern: str, codes: Sequence[str], *, alone: bool = True, flat: bool = False, grid: bool = True
) -> _Companion:
    return _Companion(re.compile(pattern), tuple(codes), alone, flat, grid)


_AFTER_DOT: Final = [f"{{0}}.{last}" for last in _DOTTED]
_AFTER_STEM: Final = [f"{{0}}{end}" for end in _STEMS]
_COMPANIONS: Final = (
    _companion(r"(.+)\.nested_absmax", ["{0}.absmax"], flat=True),
    _companion(r"(.+)\.absmax", ["{0}"], flat=True),
    _companion(r"(.+)\.absmax(\d)", ["{0}.state{1}"], flat=True),
    _companion(r"(.+)\.((nested_)?quant_map|quant_state\..+)", ["{0}"], grid=False),
    _companion(r"(.+)\.qmap(\d)", ["{0}.state{1}"], grid=False),
    _companion(r"(.+)\.(SCB|qzeros)", _AFTER_DOT),
    _companion(
        r"(.+)\.(g_idx|weight_format|pre_quant_scale|scale_input"
        r"|(input|output|activation)_(global_)?scale(_ub)?)",
        _AFTER_DOT,
        alone=False,
        grid=False,
    ),
    _companion(r"(.+)\._(scale|shift|zeropoint)", ["{0}._data"]),
    _companion(r"(.+)_scale_inv", _AFTER_STEM),
    _companion(
        r"(.*\b_?weight)_(scale_2|global_scale|g_idx|shape|bitmask)", _AFTER_STEM, grid=False
    ),
    _companion(r"(.*\b_?weight)_(scales?|zero_points?|zeros?)", _AFTER_STEM),
    _companion(r"(.+)_(scales?|zero_points?)", _AFTER_STEM, alone=False),
    _companion(
        r"(.+)\.(scales?|zeros?|biases|qbiases|zero_point|scale_weight)", _AFTER_DOT, alone=False
    ),
    _companion(
        r"(.+)\.(codebooks?|centroids|tables2?|meta|nbits|suh|svh|q_scale(_max)?|q_groups"
        r"|q_group_map|q_perm|q_invperm|SU|SV)",
        _AFTER_DOT,
        alone=False,
        grid=False,
    ),
)
_MAYBE: Final = re.compile(
    r"absmax|qmap|quant_|SCB|zero|scale|shift|idx|shape|bitmask|biases|for"
    r"|codebook|centroid|table|meta|nbits|s[uv]h|q_|S[UV]$"
)
_OF_COMPUTED: Final = re.compile(
    r"(.+[._])?([qkv]|prob|input|output|activation)(_cache|_proj)?_scale"
)
"""Scales of what a quantized model computes."""
_KNOWN_TORCHAO: Final = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor")


class Stated(NamedTuple):
    """What files beside the weights, and their metadata, say of how weights are quantized."""

    anything: bool = False
    methods: frozenset[str] = frozenset()
    sizes: frozenset[int] = frozenset()
    """Of blocks and groups, in numbers."""
    last: Shape = ()
    """Block of the last dims, where all weights of 8 bits have the same."""
    bits: frozenset[int] = frozenset()
    whole_rows: bool = False
    """Whether some tensors or rows have one scale."""
    reordered: bool | None = None
    """Whether the rows of a group lie anywhere; None where nothing says it."""
    torchao: Mapping[str, tuple[Shape, str]] = {}
    """Codes to their block in numbers, and torchao's class; the block is empty where the order of
    the codes is not known."""


class Blocks(NamedTuple):
    """Where codes may be cut."""

    sides: Shape
    """Cuts along a dim lie at multiples of its side, or at the end."""
    scales: tuple[tuple[str, Shape], ...] = ()
    """Companions with as many dims: along each dim, how many elements share one of its numbers."""


class Quantized(NamedTuple):
    """The tensors of a checkpoint that mean nothing alone."""

    why: Mapping[str, str]
    """Name of each to what shows it."""
    blocks: Mapping[str, Blocks]
    """Codes that are not cut anywhere, or whose companions are cut where they are."""


def stated_by(stated: Sequence[object], metadata: Mapping[str, str]) -> Stated:
    """Return what parts of configs say, and the metadata of safetensors files."""
    torchao = dict(_torchao(metadata))
    if not stated:
        return Stated(bool(torchao), torchao=torchao)
    pairs = [pair for section in stated for pair in _pairs(section)]
    sizes = [_numbers(value) for key, value in pairs if _SIZES.fullmatch(key)]
    orders = [value for key, value in pairs if key in ("desc_act", "actorder")]
    return Stated(
        anything=True,
        methods=frozenset(
            str(value).lower()
            for key, value in pairs
            if key in ("quant_method", "quant_algo", "format", "checkpoint_format")
            and isinstance(value, str)
        ),
        sizes=frozenset(size for numbers in sizes for size in numbers),
        last=next((numbers for numbers in sizes if len(numbers) == 2), ()),
        bits=frozenset(bits for key, value in pairs if key in _BITS for bits in _numbers(value)),
        whole_rows=any(
            (key == "strategy" and value in ("tensor", "channel", "token"))
            or (_SIZES.fullmatch(key) and value == -1)
            for key, value in pairs
        ),
        reordered=any(value not in (False, None, "weight", "static") for value in orders),
        torchao=torchao,
    )


def find_quantized(tensors: Mapping[str, tuple[Shape, str]], stated: Stated) -> Quantized:
    """Return which tensors, name to shape and dtype, are quantized, and where these may be cut.

    >>> tensors = {"w": ((256, 256), "float8_e4m3fn"), "w_scale_inv": ((2, 2), "float32")}
    >>> find_quantized({**tensors, "norm": ((256,), "float32")}, Stated())
    Quantized(why={'w': "'w_scale_inv' goes with it", 'w_scale_inv': "it goes with 'w'"},\
 blocks={'w': Blocks(sides=(128, 128), scales=(('w_scale_inv', (128, 128)),))})
    """
    why: dict[str, str] = {}
    companions: dict[str, list[tuple[_Companion, str]]] = {}
    for name in filter(_MAYBE.search, tensors):
        codes, kind = _codes_of(name, tensors)
        if kind is None:
            continue
        if codes:
            companions.setdefault(codes, []).append((kind, name))
            why.setdefault(codes, f"{name!r} goes with it")
        why[name] = f"it goes with {codes!r}" if codes else "its name is that of scales of codes"
    for name, (_, dtype) in tensors.items():
        if _CODES_ALONE.fullmatch(dtype) or name in stated.torchao:
            why.setdefault(name, f"{dtype} numbers are codes, whose scales lie elsewhere")
    if stated.anything:
        homes = {
            name.rpartition(".")[0]
            for name, (shape, dtype) in tensors.items()
            if shape and _NARROW.fullmatch(dtype)
        } - {""}
        for name in tensors:
            inside = name.rpartition(".")[0] in homes and not name.endswith("bias")
            if inside or of_computed(name):
                why.setdefault(name, "the config says that weights are quantized")
    blocks = {}
    alone = {other for group in companions.values() for _, other in group} - companions.keys()
    for name in why.keys() - alone:
        shape, dtype = tensors[name]
        group = [(kind, other, tensors[other][0]) for kind, other in companions.get(name, ())]
        if any(kind.grid for kind, *_ in group) or _NARROW.fullmatch(dtype):
            cuts = _blocks(name, shape, dtype, group, stated)
            if cuts.scales or any(side > 1 for side in cuts.sides):
                blocks[name] = cuts
    return Quantized(dict(sorted(why.items())), blocks)


def _codes_of(name: str, tensors: Mapping[str, tuple[Shape, str]]) -> tuple[str, _Companion | None]:
    """Return the codes that a tensor belongs to, and as what; no kind if it belongs to none."""
    for kind in _COMPANIONS:
        match = kind.name.fullmatch(name)
        if match is None:
            continue
        for template in kind.codes:
            codes = template.format(*match.groups())
            if codes in tensors and codes != name:
                if kind.alone or _CODES_WITH_SCALES.fullmatch(tensors[codes][1]):
                    return codes, kind
                break
        if kind.alone:
            return "", kind
    return "", None


def of_computed(name: str) -> bool:
    """Return whether a tensor has the name of a scale of what a quantized model computes."""
    return _OF_COMPUTED.fullmatch(name) is not None


# --- blocks


def _blocks(
    name: str,
    shape: Shape,
    dtype: str,
    companions: Sequence[tuple[_Companion, str, Shape]],
    stated: Stated,
) -> Blocks:
    """Return where codes may be cut: all elements of a dim are between cuts if it is not cut."""
    last = name.rpartition(".")[2]
    if name in stated.torchao:
        return Blocks(_torchao_block(shape, dtype, *stated.torchao[name]))
    grids = [(kind, other, grid) for kind, other, grid in companions if kind.grid]
    # Codes of these lie in an order that is not known.
    by_order = last in ("W_q", "codes", "trellis", "Qidxs", "q_weight", "indices", "dense_weights")
    if by_order or any(map(_OWN_ORDER.fullmatch, stated.methods)):
        return Blocks(shape)
    block = tuple(1 for _ in shape)
    if not grids:
        # The scales may lie in another file.
        if dtype.startswith("float8") and len(shape) >= 2 and stated.last:
            return Blocks((*block[2:], *stated.last))
        if name.endswith("_blocks"):
            return Blocks((*block[1:], shape[-1]))
        return Blocks(shape if last in ("qweight", "weight_packed") else block)
    scales = []
    for kind, other, grid in grids:
        if kind.flat:
            sides = _of_runs(shape, prod(grid), nested=other.endswith("nested_absmax"))
        elif name.endswith("_blocks") and grid == shape[:-1]:
            sides = (*block[1:], shape[-1])
        else:
            sides = _of_grid(shape, dtype, grid, stated)
            if last == "_data" and any(a > b for a, b in zip(grid, shape, strict=False)):
                return Blocks(shape)
            if len(grid) == len(shape):
                scales.append((other, sides))
        block = tuple(map(lcm, block, sides))
    # GPTQ: g_idx says which group a row belongs to.
    indexed = any(other.endswith("g_idx") for _, other, _ in companions)
    along = 0 if last == "qweight" else len(shape) - 1
    if indexed and stated.reordered is not False and block[along] > 1:
        block = (*block[:along], shape[along], *block[along + 1 :])
    return Blocks(block, tuple(scales))


def _of_grid(shape: Shape, dtype: str, grid: Shape, stated: Stated) -> Shape:
    """Return the block, given the shape of the scales: one number for each block."""
    if len(grid) != len(shape):
        grid = tuple(count for count in grid if count > 1)
        rest = iter(shape)
        if all(count in rest for count in grid):
            return tuple(1 for _ in shape)  # one scale, or one for each index of some dims
    if len(grid) != len(shape):
        return shape
    sides = zip(shape, grid, strict=True)
    return tuple(_side(size, count, dtype, stated) for size, count in sides)


def _side(size: int, count: int, dtype: str, stated: Stated) -> int:
    """Return how many elements along a dim share a scale, if there are `count` scales.

    Where nothing states it, a cut has to suit every number that the shapes allow for: blocks of a
    power of two, and blocks that divide the dim.
    """
    if count >= size:
        return 1
    width = 8 * item_bytes(dtype)
    sizes = set(stated.sizes)
    for bits in {4, *stated.bits}:
        sizes |= {number * bits // width for number in stated.sizes if not number * bits % width}
    fit = {number for number in sizes if number and -(-size // number) == count}
    if count == 1 and (stated.whole_rows or not fit):
        return 1
    if not fit:
        powers = (1 << power for power in range(size.bit_length()))
        fit = {number for number in powers if -(-size // number) == count}
        fit |= {size // count} if not size % count else set()
        # Zero points of several columns in one number.
        packed = (bits for bits in stated.bits if -(-size * bits // width) == count)
        fit |= {width // gcd(width, bits) for bits in packed}
    return lcm(*fit) if fit else size


def _of_runs(shape: Shape, count: int, *, nested: bool) -> Shape:
    """Return the block if `count` runs of elements, row by row, have a number each."""
    total = prod(shape)
    powers = [256] if nested else [1 << power for power in range(total.bit_length() + 1)]
    run = next((size for size in powers if -(-total // size) == count), total)
    block, inner = [], 1
    for dim in reversed(range(len(shape))):
        aligned = dim == 0 or not shape[dim] * inner % run
        block.append(run // gcd(run, inner) if aligned else shape[dim])
        inner *= shape[dim]
    return tuple(reversed(block))


def _torchao_block(shape: Shape, dtype: str, numbers: Shape, kind: str) -> Shape:
    if kind not in _KNOWN_TORCHAO or len(numbers) != len(shape):
        return shape
    packed = 2 if kind == "Int4Tensor" and dtype in ("uint8", "int8") else 1
    whole = (*shape[:-1], shape[-1] * packed)
    # A block as long as the dim stands for one scale a row, also of a part.
    sides = [1 if side >= size else side for side, size in zip(numbers, whole, strict=True)]
    return (*sides[:-1], -(-sides[-1] // packed))


# --- what is stated


def _torchao(metadata: Mapping[str, str]) -> Iterator[tuple[str, tuple[Shape, str]]]:
    for key, text in metadata.items():
        described = _json(text) if "_tensor_data_names" in text else None
        if not isinstance(described, dict):
            continue
        data, names = described.get("_data"), described.get("_tensor_data_names")
        home, _, weight = key.rpartition(".")
        # Scales of the other classes lie as their codes do.
        if not (isinstance(data, dict) and isinstance(names, list) and "qdata" in names):
            continue
        if data.get("is_swizzled_scales") is not False:
            numbers, kind = _numbers(data.get("block_size")), str(described.get("_type"))
            yield f"{home}._{weight}_qdata".lstrip("."), (numbers, kind)


def sections(directory: StoragePath) -> Iterator[dict[str, object]]:
    """Yield the parts of configs that say how weights are quantized."""
    for name, whole in _CONFIGS.items():
        stated = json_beside(directory, name)
        yield from [stated] if whole and isinstance(stated, dict) else sections_of(stated)


def json_beside(directory: StoragePath, name: str) -> object:
    """Return what a JSON file in a directory says; None if none is there that can be read."""
    if not (directory / name).is_file():
        return None
    with file_inside(directory, name, directory).open() as file:
        return _json(file.read(0, min(file.num_bytes, _MOST_CONFIG_BYTES)))


def sections_of(config: object) -> Iterator[dict[str, object]]:
    """Yield the parts of a config that say how weights are quantized."""
    for key, value in _pairs(config):
        if key in SECTIONS and isinstance(value, dict):
            yield value


def _json(text: str | bytes) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _pairs(value: object) -> Iterator[tuple[str, object]]:
    """Yield every key with its value, of inner objects too."""
    below = [value]
    while below:
        value = below.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if not _OF_ACTIVATIONS.fullmatch(key):
                    yield key, inner
                    below.append(inner)
        elif isinstance(value, list):
            below += value


def _numbers(value: object) -> Shape:
    """Return the sizes of a block: a number, some, or text such as ``128x128``."""
    if isinstance(value, str):
        value = [int(digits) for digits in re.findall(r"\d{1,9}", value)]
    values = value if isinstance(value, list) else [value]
    return tuple(number for number in values if type(number) is int and number > 0)

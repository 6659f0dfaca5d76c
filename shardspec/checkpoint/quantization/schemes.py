"""Lists the quantization schemes that can be dequantized, and finds them in configs.

=====================  =======================================================================
config                 codes, scales, block
=====================  =======================================================================
fp8, mxfp8             W, W_scale_inv: ``weight_block_size``
fp8 without blocks     W, W_scale: the whole tensor
fbgemm_fp8             W, W_scale: a row
modelopt               W, W_scale: the whole tensor, a row, or 32 along the last dim (MXFP8)
compressed-tensors     W, W_scale: a tensor, a row, ``group_size`` or ``block_structure``;
                       W_packed, W_scale: 32 along the last dim (MXFP4)
mxfp4 (gpt-oss)        W_blocks, W_scales: 32 along the last dim, of the transposed W
=====================  =======================================================================

Block sizes are always read from the config, never derived from shapes.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.text import shown

Shape: TypeAlias = tuple[int, ...]
MX: Final = 32
"""Numbers in a block of a microscaling format, along the last dim."""
_FP8: Final = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
QUANTIZATIONS: Final[Mapping[str, Mapping[str, object]]] = {
    "fp8-128x128": {**_FP8, "weight_block_size": [128, 128]},
    "mxfp8": {
        **_FP8,
        "quant_method": "mxfp8",
        "weight_block_size": [1, MX],
        "scale_fmt": "ue8m0",
    },
    "mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp4-pack-quantized",
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": MX,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                },
            }
        },
    },
}
"""Quantization section of a config, by the value of `quantize=`."""
_FLOATS: Final = ("float32", "bfloat16")
_POWERS: Final = ("float8_e8m0fnu", "uint8")
"""Dtypes of scales that are powers of two."""
_EIGHT_BITS: Final = ("float8_e4m3fn", "float8_e5m2")
_COMPANIONS: Final = ("scale", "scales", "scale_inv", "scale_2", "zero_point")


class Scheme(NamedTuple):
    """One way to quantize weights."""

    codes: str
    """Suffix of the codes' name: ``_packed`` if the weight is W and its codes are W_packed."""
    scales: str
    block: tuple[int, int]
    """Rows and columns that share a scale; 0 stands for all rows or columns."""
    scale_dtypes: tuple[str, ...] = _FLOATS
    four: bool = False
    """True if codes have 4 bits, two in a byte, the lower first."""
    transposed: bool = False
    """True if rows of codes are columns of the weight."""
    stacked: bool = True
    """True if a tensor may contain several matrices."""

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        """Dtypes in which the codes of this scheme may be stored."""
        return ("uint8",) if self.four else _EIGHT_BITS


class Coded(NamedTuple):
    """A weight that is stored as codes and scales."""

    codes: str
    scales: str
    scheme: Scheme
    lead: Shape
    """Sizes of the dims before the last two, as of stacked experts."""
    rows: int
    columns: int

    @property
    def grid(self) -> tuple[int, int]:
        """Shape of the scales of one matrix: a scale per block."""
        high, wide = self.block
        return -(-self.rows // high), -(-self.columns // wide)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        high, wide = self.scheme.block
        return high or max(1, self.rows), wide or max(1, self.columns)

    @property
    def shape(self) -> Shape:
        """Shape of the weight before quantization."""
        sides = self.rows, self.columns
        return (*self.lead, *(reversed(sides) if self.scheme.transposed else sides))


_MX: Final = Scheme("", "_scale", (1, MX), _POWERS)
_ROWS: Final = Scheme("", "_scale", (1, 0))
_BLOCKS: Final = Scheme("", "_scale_inv", (128, 128))
_BY_KEY: Final[Mapping[tuple[str, str], tuple[Scheme, ...]]] = {
    ("quant_method", "fbgemm_fp8"): (_ROWS._replace(stacked=False),),
    ("quant_algo", "fp8_per_channel_per_token"): (_ROWS,),
    ("quant_algo", "fp8"): (Scheme("", "_scale", (0, 0)),),
    ("quant_algo", "fp8_pb_wo"): (_BLOCKS, _BLOCKS._replace(scales="_scale")),
    ("quant_algo", "mxfp8"): (_MX,),
    ("quant_method", "mxfp4"): (
        Scheme("_blocks", "_scales", (1, MX), _POWERS, four=True, transposed=True),
    ),
}
"""Schemes without parameters, by the key and value of a config that name them."""
USUAL: Final = (
    _BLOCKS._replace(scale_dtypes=(*_FLOATS, *_POWERS)),
    _MX._replace(scales="_scale_inv"),
    Scheme("", "_scale", (0, 0)),
    _ROWS,
    _MX,
    Scheme("_packed", "_scale", (1, MX), _POWERS, four=True),
    *_BY_KEY["quant_method", "mxfp4"],
)
"""Schemes that the checks of cuts assume without a config, if the shapes of scales fit."""


def schemes_in(sections: Iterable[Mapping[str, object]]) -> tuple[Scheme, ...]:
    """Return the schemes in sections of configs that can be dequantized.

    >>> schemes_in([{"quant_method": "fp8", "weight_block_size": [128, 128]}])[0].block
    (128, 128)
    """
    return tuple(dict.fromkeys(scheme for section in sections for scheme in _schemes(section)))


def _schemes(section: Mapping[str, object]) -> Iterator[Scheme]:
    inner = section.get("quantization")
    if isinstance(inner, Mapping):  # of hf_quant_config.json
        section = {"quant_method": "modelopt", **inner}
    method = str(section.get("quant_method", "")).lower()
    for key in ("quant_method", "quant_algo"):
        yield from _BY_KEY.get((key, str(section.get(key, "")).lower()), ())
    if method in ("fp8", "mxfp8"):
        yield from _of_fp8(section, mx=method == "mxfp8")
    elif method == "compressed-tensors":
        groups = section.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping) or weights.get("symmetric") is False:
                continue
            if weights.get("type") == "float":
                yield from _of_group(weights, str(group.get("format") or section.get("format")))


def _of_fp8(section: Mapping[str, object], *, mx: bool) -> Iterator[Scheme]:
    dtypes: tuple[str, ...] = _POWERS if mx else _FLOATS
    if section.get("scale_fmt") == "ue8m0" and not mx:
        dtypes += _POWERS
    block = _block(section.get("weight_block_size", [1, MX] if mx else None))
    if block is not None:
        yield Scheme("", "_scale_inv", block, dtypes)
    elif section.get("weight_block_size") is None:
        yield Scheme("", "_scale", (0, 0), (*dtypes, "float16"))
        if "weight_block_size" in section:
            yield Scheme("", "_scale_inv", (0, 0), dtypes)


def _of_group(weights: Mapping[str, object], format: str) -> Iterator[Scheme]:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    block = {"tensor": (0, 0), "channel": (1, 0)}.get(str(strategy))
    if strategy == "group":
        block = _block([1, weights.get("group_size")])
    elif strategy == "block":
        block = _block(weights.get("block_structure"))
    mx = format.startswith("mx")
    if bits == 8 and block is not None:
        yield Scheme("", "_scale", block, _POWERS if mx else (*_FLOATS, "float16"))
    elif bits == 4 and mx and block == (1, MX):
        yield Scheme("_packed", "_scale", block, _POWERS, four=True)


def _block(value: object) -> tuple[int, int] | None:
    sides = value if isinstance(value, list | tuple) else ()
    if len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        return sides[0], sides[1]
    return None


def coded(
    name: str, tensors: Mapping[str, tuple[Shape, str]], schemes: Iterable[Scheme]
) -> tuple[str, Coded] | str | None:
    """Return (name of the weight, description) if the tensor `name` has the codes of a weight.

    Returns an error text if the scales do not fit the codes, and None if the tensor has no codes of
    these schemes. `tensors` maps names to shapes and dtypes.

    >>> tensors = {"w": ((256, 256), "float8_e4m3fn"), "w_scale_inv": ((2, 2), "float32")}
    >>> name, weight = coded("w", tensors, USUAL)
    >>> name, weight.scales, weight.block
    ('w', 'w_scale_inv', (128, 128))
    """
    shape, dtype = tensors[name]
    if name.endswith(_COMPANIONS):
        return None
    problem = None
    for scheme in schemes:
        weight = name.removesuffix(scheme.codes)
        if dtype not in scheme.code_dtypes or not name.endswith(scheme.codes):
            continue
        fitted = _fitted(name, weight, shape, scheme)
        if fitted is None:
            problem = problem or f"its shape {list(shape)} does not fit blocks of 32"
            continue
        wrong = _wrong(fitted, tensors)
        if wrong is None:
            return weight, fitted
        # If there are several schemes, the names of the scales tell which one applies.
        problem = wrong if problem is None or fitted.scales in tensors else problem
    if problem is None and (dtype in _EIGHT_BITS or name.endswith("_blocks")):
        problem = "no config beside it gives the block that shares a scale"
        if f"{name}_zero_point" in tensors:
            problem = "it has zero points, as asymmetric FP8 has, which is not read"
    return problem


def _fitted(name: str, weight: str, shape: Shape, scheme: Scheme) -> Coded | None:
    scales = weight + scheme.scales
    if scheme.codes == "_blocks":
        if len(shape) < 3 or shape[-1] != 16:
            return None
        return Coded(name, scales, scheme, shape[:-3], shape[-3], MX * shape[-2])
    if len(shape) < 2:
        return None
    return Coded(name, scales, scheme, shape[:-2], shape[-2], shape[-1] * (1 + scheme.four))


def _wrong(weight: Coded, tensors: Mapping[str, tuple[Shape, str]]) -> str | None:
    """Return the reason why the scales do not fit the codes; None if they fit."""
    scheme = weight.scheme
    if weight.scales not in tensors:
        return f"its scales {shown(weight.scales)} are missing"
    if weight.lead and not scheme.stacked:
        return "stacked experts of fbgemm_fp8 have scales along an unknown dim"
    shape, dtype = tensors[weight.scales]
    if dtype not in scheme.scale_dtypes:
        return (
            f"its scales {shown(weight.scales)} are {dtype}, where the config says "
            f"{' or '.join(scheme.scale_dtypes)}"
        )
    if scheme.scale_dtypes == _POWERS and weight.columns % scheme.block[1]:
        return f"its last dim, {weight.columns}, is not a multiple of {scheme.block[1]}"
    if not _fits(shape, weight):
        high, wide = weight.block
        return (
            f"its scales {shown(weight.scales)} are {list(shape)}, where blocks of {high}x{wide} "
            f"have {[*weight.lead, *weight.grid]}"
        )
    return None


def _fits(shape: Shape, weight: Coded) -> bool:
    """Return True if scales have one number per block, in a shape that some tool writes."""
    lead, (rows, columns) = weight.lead, weight.grid
    forms = [(*lead, rows, columns), (*lead, rows, 1, columns, 1)]
    if weight.scheme.block == (1, 0) and not (lead and weight.rows == weight.columns):
        forms.append((*lead, rows))  # of stacked square matrices, it might be columns too
    if rows == columns == 1:
        dims = len(lead) if prod(lead) != 1 else 0
        return shape[:dims] == lead[:dims] and prod(shape[dims:]) == 1
    return shape in forms

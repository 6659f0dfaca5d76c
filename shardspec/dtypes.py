"""Handles dtypes by name, so that planning does not import torch.

A dtype is torch's name for it as text, such as ``"bfloat16"``. `dtype_name` also accepts short
forms (``"bf16"``), names in safetensors files (``"BF16"``), and dtypes of torch and numpy.

>>> dtype_name("bf16"), item_bytes("bfloat16"), is_floating("bfloat16"), bits_type(2)
('bfloat16', 2, True, 'u2')
>>> to_safetensors("bfloat16"), from_safetensors("F4"), packed("float4_e2m1fn_x2")
('BF16', 'float4_e2m1fn_x2', 2)
"""

from typing import Final

from shardspec.errors import DTypeError
from shardspec.text import first_of, shown

# name: (bytes per element, name in the safetensors format, short forms)
# Names as in https://github.com/huggingface/safetensors, which lacks C128.
_DTYPES: Final[dict[str, tuple[int, str, tuple[str, ...]]]] = {
    "float64": (8, "F64", ("f64", "fp64", "double")),
    "float32": (4, "F32", ("f32", "fp32", "float")),
    "float16": (2, "F16", ("f16", "fp16", "half")),
    "bfloat16": (2, "BF16", ("bf16",)),
    "float8_e4m3fn": (1, "F8_E4M3", ("f8_e4m3", "fp8", "fp8_e4m3")),
    "float8_e5m2": (1, "F8_E5M2", ("f8_e5m2", "fp8_e5m2")),
    "float8_e8m0fnu": (1, "F8_E8M0", ("f8_e8m0",)),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ", ("f8_e4m3fnuz",)),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ", ("f8_e5m2fnuz",)),
    "float4_e2m1fn_x2": (1, "F4", ("f4", "fp4")),
    "complex128": (16, "C128", ("c128", "cdouble")),
    "complex64": (8, "C64", ("c64", "cfloat")),
    "int64": (8, "I64", ("i64", "long")),
    "int32": (4, "I32", ("i32", "int")),
    "int16": (2, "I16", ("i16", "short")),
    "int8": (1, "I8", ("i8",)),
    "uint64": (8, "U64", ("u64",)),
    "uint32": (4, "U32", ("u32",)),
    "uint16": (2, "U16", ("u16",)),
    "uint8": (1, "U8", ("u8", "byte")),
    "bool": (1, "BOOL", ()),
}
_SAFETENSORS: Final[dict[str, str]] = {code: name for name, (_, code, _) in _DTYPES.items()}
_ALIASES: Final[dict[str, str]] = {
    alias: name for name, (_, _, short) in _DTYPES.items() for alias in (name, *short)
}


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype; raises `DTypeError` if it is unknown."""
    text = str(dtype).removeprefix("torch.")
    name = _SAFETENSORS.get(text) or _ALIASES.get(text.lower())
    if name is None:
        raise DTypeError(f"unknown dtype {shown(text)}; known: {first_of([*_DTYPES], 8)}")
    return name


def item_bytes(name: str) -> int:
    """Return the bytes of an element of a dtype."""
    return _DTYPES[name][0]


def bits_type(width: int) -> str:
    """Return a numpy type for the raw bits of an element of `width` bytes."""
    return "c16" if width == item_bytes("complex128") else f"u{width}"


def is_floating(name: str) -> bool:
    """Return True for a floating-point dtype, real or complex."""
    return name.startswith(("float", "bfloat", "complex"))


def packed(name: str) -> int:
    """Return the number of values in one element: 2 for packed 4-bit floats, else 1."""
    return 2 if name == "float4_e2m1fn_x2" else 1


def to_safetensors(name: str) -> str:
    """Return the safetensors name of a dtype."""
    return _DTYPES[name][1]


def from_safetensors(code: str) -> str:
    """Return torch's name for a safetensors dtype; raises `DTypeError` if unknown."""
    if code not in _SAFETENSORS:
        raise DTypeError(
            f"unknown safetensors dtype {shown(code)}; known: {', '.join(_SAFETENSORS)}"
        )
    return _SAFETENSORS[code]


def is_step_count(name: str) -> bool:
    """Return True if a tensor with this name counts the steps of an optimizer.

    >>> is_step_count("optim.state.up.weight.step"), is_step_count("optimizer.step.up.weight")
    (True, True)
    """
    return name.rpartition(".")[2] == "step" or name.startswith("optimizer.step.")


def keeps_dtype(name: str) -> bool:
    """Return True if a tensor with this name is never cast: a bias of routers, or a step count.

    These are float32, and 16 bits are too few for them: 1001 would become 1000.

    >>> keeps_dtype("model.layers.3.mlp.gate.e_score_correction_bias"), keeps_dtype("x.bias")
    (True, False)
    """
    return is_step_count(name) or name.endswith(("e_score_correction_bias", "router.expert_bias"))


def is_cast(source: str, target: str) -> bool:
    """Return True if a cast to `target` changes tensors of dtype `source`.

    Integers, complex numbers and 4-bit floats, which need scales, are never cast.

    >>> is_cast("float32", "bfloat16"), is_cast("int64", "bfloat16")
    (True, False)
    """
    is_exempt = source.startswith("complex") or packed(source) > 1
    return source != target and is_floating(source) and not is_exempt

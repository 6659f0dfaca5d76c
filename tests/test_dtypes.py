import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save

from shardspec import ShardSpecError
from shardspec.dtypes import dtype_name, from_safetensors, is_floating, item_bytes, to_safetensors
from shardspec.errors import DTypeError

TORCH = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
KNOWN = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
    "complex64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
]


@pytest.mark.parametrize("name", KNOWN)
def test_every_dtype_agrees_with_torch_and_with_the_file_that_safetensors_writes(name):
    dtype = getattr(torch, name)
    assert dtype_name(dtype) == dtype_name(str(dtype)) == dtype_name(name) == name
    assert item_bytes(name) == dtype.itemsize
    assert is_floating(name) == (dtype.is_floating_point or dtype.is_complex)
    data = save({"t": torch.zeros(3 * dtype.itemsize, dtype=torch.uint8).view(dtype)})
    (length,) = struct.unpack("<Q", data[:8])
    code = json.loads(data[8 : 8 + length])["t"]["dtype"]
    assert to_safetensors(name) == code
    assert from_safetensors(code) == dtype_name(code) == name


def test_known_dtypes_are_those_that_safetensors_can_store():
    refused = []
    for dtype in TORCH:
        try:
            dtype_name(dtype)
        except DTypeError:
            refused.append(str(dtype))
    assert sorted(map(str, TORCH)) == sorted([*(f"torch.{name}" for name in KNOWN), *refused])
    assert "torch.complex128" in refused


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("Float32", "float32"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("double", "float64"),
        ("fp8", "float8_e4m3fn"),
        ("long", "int64"),
        ("cfloat", "complex64"),
        (torch.float, "float32"),
        (torch.half, "float16"),
        (torch.int, "int32"),
        (np.dtype("float32"), "float32"),
        (np.dtype("uint16"), "uint16"),
        (np.dtype(bool), "bool"),
    ],
)
def test_short_forms(given, name):
    assert dtype_name(given) == name


@pytest.mark.parametrize(
    "given", ["float33", "", "torch.", None, np.dtype(">f4"), torch.complex128]
)
def test_an_unknown_dtype_is_named_together_with_the_known_ones(given):
    with pytest.raises(DTypeError) as caught:
        dtype_name(given)
    shown = str(given).removeprefix("torch.")
    assert str(caught.value) == f"unknown dtype {shown!r}; known: {', '.join(KNOWN)}"
    assert isinstance(caught.value, ShardSpecError)
    assert isinstance(caught.value, TypeError)


def test_an_unknown_safetensors_dtype_is_named():
    with pytest.raises(DTypeError, match=r"unknown safetensors dtype 'F6'; known: F64, F32,"):
        from_safetensors("F6")

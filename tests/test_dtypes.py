import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save

from shardspec import (
    DeviceMesh,
    DTensor,
    ShardSpecError,
    digest,
    load_sharded,
    merge,
    reshard,
    save_sharded,
)
from shardspec.dtypes import dtype_name, from_safetensors, is_floating, item_bytes, to_safetensors
from shardspec.errors import CheckpointError, DTypeError

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


def test_known_dtypes_are_those_that_safetensors_can_store_and_complex128():
    known = set()
    for dtype in TORCH:
        try:
            known.add(dtype_name(dtype))
        except DTypeError:
            assert dtype in {torch.complex32} or "int" in str(dtype) or "bits" in str(dtype)
    assert known == {*KNOWN, "complex128"}
    assert item_bytes(dtype_name("cdouble")) == torch.complex128.itemsize


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


@pytest.mark.parametrize("given", ["float33", "", "torch.", None, np.dtype(">f4"), torch.complex32])
def test_an_unknown_dtype_is_named_together_with_the_known_ones(given):
    with pytest.raises(DTypeError) as caught:
        dtype_name(given)
    shown = str(given).removeprefix("torch.")
    assert repr(shown) in str(caught.value)
    assert all(name in str(caught.value) for name in ("float32", "float16", "bfloat16"))
    assert isinstance(caught.value, ShardSpecError)
    assert isinstance(caught.value, TypeError)


def test_complex128_travels_to_the_bit_but_in_no_safetensors_file(tmp_path):
    bits = torch.randint(0, 256, (6 * 4 * 16,), dtype=torch.uint8)
    w, mesh = bits.view(torch.complex128).view(6, 4), DeviceMesh(range(4), (2, 2))
    state = {"w": DTensor(w, mesh, "[S0,S1]")}
    assert (
        state["w"].redistribute("[S1,S0]").to_global().view(torch.uint8).equal(w.view(bits.dtype))
    )
    assert digest(state) == digest({"w": w})
    torch.save({"w": w}, tmp_path / "w.pt")
    back = load_sharded(tmp_path / "w.pt", mesh, {"w": "[R,S10]"})["w"].to_global()
    assert back.view(torch.uint8).equal(w.view(torch.uint8))
    reshard(
        tmp_path / "w.pt", tmp_path / "dcp", device_mesh=mesh, rules={"w": "[S01,R]"}, format="dcp"
    )
    merge(tmp_path / "dcp", tmp_path / "again.pt", format="torch")
    again = torch.load(tmp_path / "again.pt")["w"]
    assert again.view(torch.uint8).equal(w.view(torch.uint8))
    assert digest(tmp_path / "dcp") == digest(tmp_path / "again.pt") == digest({"w": w})
    for write in (
        lambda out: save_sharded(state, out),
        lambda out: merge(tmp_path / "w.pt", out, format="safetensors"),
        lambda out: reshard(tmp_path / "w.pt", out, device_mesh=mesh, rules={"w": "[S0,R]"}),
    ):
        with pytest.raises(CheckpointError, match=r"'w' is complex128.*\.pt.*DCP"):
            write(tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_unknown_safetensors_dtype_is_named():
    with pytest.raises(DTypeError, match=r"unknown safetensors dtype 'F6'; known: F64, F32,"):
        from_safetensors("F6")

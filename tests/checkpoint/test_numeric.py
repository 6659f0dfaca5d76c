"""Reductions and casts with numpy, against torch's arithmetic bit by bit."""

from typing import get_args

import numpy as np
import pytest
import torch

from shardspec.checkpoint.catalog import StoredReduction
from shardspec.checkpoint.convert.numeric import CastLosses, cast, narrow, numbers, reduce
from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import is_floating
from tests.comm.test_results import combine

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
]
OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


def exists(op, dtype):
    return not (
        (op == "avg" and not is_floating(dtype)) or (op in ("min", "max") and "complex" in dtype)
    )


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def reduced(addends, dtype, pending):
    out = np.empty_like(raw(addends[0]))
    reduce(dtype, pending, map(raw, addends), out)
    return out


@pytest.mark.parametrize(("op", "dtype"), [(o, d) for o in OPS for d in DTYPES if exists(o, d)])
def test_every_operation_of_every_dtype_as_in_torch(op, dtype):
    torch.manual_seed(0)
    addends = [(torch.randn(1001) * 90).to(getattr(torch, dtype)) for _ in range(3)]
    if op == "prod" and is_floating(dtype):
        addends = [addend / 90 for addend in addends]
    if dtype.startswith(("float", "bfloat")):
        for place, value in enumerate([float("inf"), -0.0, 1e-40, 3e38]):
            addends[place % 3][place] = value
    if "complex" in dtype:
        # Products of complex numbers are rounded in another order.
        product = reduced(addends, dtype, [StoredReduction(op, 3)]).view(dtype)
        np.testing.assert_allclose(product, combine(addends, op).numpy(), rtol=1e-6)
        return
    found = torch.from_numpy(reduced(addends, dtype, [StoredReduction(op, 3)])).view(
        getattr(torch, dtype)
    )
    expected = combine(addends, op)
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected))


def test_a_nan_stays_a_nan_in_every_operation():
    for dtype in ("float32", "bfloat16", "float16"):
        for op in OPS:
            addends = [torch.tensor(v).to(getattr(torch, dtype)) for v in ([1.0, 2], [np.nan, 3])]
            found = torch.from_numpy(reduced(addends, dtype, [StoredReduction(op, 2)]))
            assert torch.isnan(found.view(getattr(torch, dtype))).tolist() == [True, False]


def test_float32_rounds_to_bfloat16_as_in_torch():
    # Every upper half, with the lower halves around a tie.
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        numbers = (upper | lower).view(np.float32)
        expected = torch.from_numpy(numbers.copy()).bfloat16()
        found = torch.from_numpy(narrow(numbers, "bfloat16").view(np.int16)).view(torch.bfloat16)
        numbers_only = ~torch.isnan(expected)
        assert torch.equal(torch.isnan(found), ~numbers_only)
        assert torch.equal(
            found.view(torch.int16)[numbers_only], expected.view(torch.int16)[numbers_only]
        )


def test_sums_of_short_floats_are_rounded_once():
    # One by one in bfloat16, adding 1 to 256 changes nothing.
    ones = [torch.tensor([256.0]).bfloat16(), *([torch.tensor([1.0]).bfloat16()] * 4)]
    found = torch.from_numpy(reduced(ones, "bfloat16", [StoredReduction("sum", 5)])).view(
        torch.bfloat16
    )
    assert found.tolist() == [260.0]


def test_a_sum_of_means():
    addends = [torch.tensor([float(v)]) for v in range(6)]
    found = reduced(addends, "float32", [StoredReduction("sum", 2), StoredReduction("avg", 3)])
    assert found.view(np.float32).tolist() == [5.0]


EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_float32_rounds_to_eight_bits_as_in_torch(dtype):
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | lower).view(np.float32)
        expected = torch.from_numpy(values.copy()).to(getattr(torch, dtype)).view(torch.uint8)
        assert narrow(values, dtype).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", *EIGHT_BITS])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_what_a_cast_does_not_keep_is_counted(source, dtype):
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.5, 448.0, 460.0, 465.0, -7e4, 6e4]
    values += [1e-9, -1e-9, 1e-40, 1e39, -1e300, 1e-300, 3.4e38, 3.39e38]
    stored = torch.tensor(values, dtype=torch.float64).to(getattr(torch, source))
    after = stored.to(getattr(torch, dtype)).double()
    before = stored.double()
    overflows = after.isinf() & ~before.isinf()
    if dtype == "float8_e4m3fn":
        overflows = before.abs() > 464
    expected = CastLosses(
        int(overflows.sum()),
        int(((after == 0) & (before != 0)).sum()),
        int((after.isnan() & ~before.isnan()).sum()),
    )
    raw, losses = cast(raw_view(stored), source, dtype)
    assert losses == expected
    found = torch.from_numpy(numbers(np.frombuffer(raw, np.uint8), dtype).astype(np.float64))
    assert torch.equal(found.isnan(), after.isnan())
    assert torch.equal(found.nan_to_num(), after.nan_to_num())


def raw_view(tensor):
    return memoryview(raw(tensor))


def test_losses_add_up_and_say_what_they_are():
    assert CastLosses(1, 2, 0) + CastLosses(0, 3, 4) == CastLosses(1, 5, 4)
    assert not CastLosses()
    assert str(CastLosses(2, 1, 3)) == "2 too large, 1 too small (now 0), 3 made NaN"
    assert CastLosses(1, 2, 3).to_json() == {"overflows": 1, "underflows": 2, "nans": 3}

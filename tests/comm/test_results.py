import pytest
import torch

from shardspec.comm.results import checked_result, combine_into
from shardspec.errors import CommunicatorError


def combine(addends, op):
    result = torch.empty_like(addends[0])
    combine_into(result, addends, op)
    return result


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [2.0, 1.5, -3.0]),
        ("avg", [0.5, 0.375, -0.75]),
        ("min", [-2.0, -1.0, -3.0]),
        ("max", [3.0, 2.0, 0.0]),
        ("prod", [12.0, 0.0, 0.0]),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_addends_are_combined_by_every_operation(op, expected, dtype):
    addends = torch.tensor([[3.0, 0.5, 0.0], [-2.0, 2.0, -3.0], [2.0, -1.0, 0.0], [-1.0, 0.0, 0.0]])
    result = combine(list(addends.to(dtype)), op)
    assert result.dtype == dtype
    assert result.tolist() == expected


@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_whole_numbers_and_truth(op):
    numbers = [torch.tensor([1, 5, -2]), torch.tensor([3, 2, -2])]
    assert (
        combine(numbers, op).tolist()
        == {
            "sum": [4, 7, -4],
            "min": [1, 2, -2],
            "max": [3, 5, -2],
            "prod": [3, 10, 4],
        }[op]
    )
    assert combine(numbers, op).dtype == torch.int64
    truths = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    either, both = [True, True, False], [True, False, False]
    assert combine(truths, op).tolist() == (either if op in ("sum", "max") else both)


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_complex_addends_are_combined(op):
    pair = [torch.tensor([1 + 2j]), torch.tensor([3 - 1j])]
    assert combine(pair, op).tolist() == {"sum": [4 + 1j], "avg": [2 + 0.5j], "prod": [5 + 5j]}[op]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_are_rounded_once(dtype):
    """One and many halves of its last place: added one by one in the dtype they would be lost."""
    tiny = torch.finfo(dtype).eps / 2
    addends = [torch.ones(1, dtype=dtype)] + [torch.full((1,), tiny, dtype=dtype)] * 8
    alone = addends[0].clone()
    for addend in addends[1:]:
        alone += addend
    assert alone.item() == 1
    assert combine(addends, "sum").item() == 1 + 8 * tiny


def test_not_a_number_is_kept():
    pair = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 2.0])]
    for op in ("sum", "avg", "min", "max", "prod"):
        assert combine(pair, op).isnan().all()


@pytest.mark.parametrize("count", [1, 3])
def test_addends_are_only_read(count):
    addends = [torch.full((2, 3), float(i + 1)) for i in range(count)]
    copies = [addend.clone() for addend in addends]
    result = combine(addends, "sum")
    result += 100
    assert all(map(torch.equal, addends, copies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_result_may_be_the_first_addend_and_have_gaps(dtype):
    result = torch.ones(2, 2, dtype=dtype)
    combine_into(result, [result, torch.full_like(result, 2), torch.full_like(result, 4)], "sum")
    assert result.tolist() == [[7, 7], [7, 7]]
    combine_into(result.T[0], [torch.tensor([1, 2], dtype=dtype)], "avg")
    assert result.tolist() == [[1, 7], [2, 7]]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128], ids=str
)
@pytest.mark.parametrize("left_out", ["all", "a row", "the last element", "nothing"])
def test_what_is_left_unwritten_is_noticed(dtype, left_out):
    result = torch.empty((7, 32), dtype=dtype)
    last = max(1, 4 // dtype.itemsize)  # windows of four bytes are compared
    kept = {
        "all": result[:0],
        "a row": result[:6],
        "the last element": result.view(-1)[:-last],
        "nothing": result,
    }[left_out]
    if left_out == "nothing":
        with checked_result("a step", result):
            kept.fill_(1)
        return
    with (
        pytest.raises(CommunicatorError, match=r"a step left \d+ of \d+ windows .*\(7, 32\)"),
        checked_result("a step", result),
    ):
        kept.fill_(1)


def test_nothing_is_filled_without_the_check(monkeypatch):
    monkeypatch.setenv("SHARDSPEC_CHECK", "0")
    result = torch.zeros(8)
    with checked_result("a step", result):
        pass
    assert result.tolist() == [0.0] * 8

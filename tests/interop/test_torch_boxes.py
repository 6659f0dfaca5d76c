"""What torch is not given: shards whose places it would compute otherwise."""

import subprocess
import sys

import pytest
import torch

from shardspec import DeviceMesh, Layout
from shardspec.errors import LossyConversionError, ShardSpecError
from shardspec.interop.torch_dtensor import torch_dtensor


def error_of(shape: tuple[int, ...], rows: int) -> ShardSpecError:
    layout = Layout(DeviceMesh(range(shape[0] * shape[1]), shape), "[S10,R]", (rows, 3), "f32")
    shard = torch.zeros(layout.local_shape(0))
    with pytest.raises(ShardSpecError) as raised:  # without a job torch has no mesh either
        torch_dtensor(shard, layout)
    return raised.value


@pytest.mark.parametrize(("shape", "rows"), [((4, 2), 9), ((4, 2), 25), ((3, 2), 7)])
def test_shards_that_torch_puts_elsewhere_are_refused(shape: tuple[int, ...], rows: int) -> None:
    error = error_of(shape, rows)
    assert isinstance(error, LossyConversionError)
    assert str(rows) in str(error)
    assert "save_sharded" in str(error)
    assert "redistribute" in str(error)


@pytest.mark.parametrize(("shape", "rows"), [((4, 2), 8), ((2, 2), 7), ((2, 3), 5)])
def test_shards_that_torch_puts_at_the_same_place_are_not(
    shape: tuple[int, ...], rows: int
) -> None:
    assert not isinstance(error_of(shape, rows), LossyConversionError)


def test_operators_on_whole_tensors_do_not_import_the_dtensor_of_torch() -> None:
    program = """
import sys, torch
from shardspec import DeviceMesh, DTensor
t = DTensor(torch.zeros(0, 2, 2), DeviceMesh([0, 1]), "[R,R,R]")
assert t.flatten(1).shape == (0, 4) and t.reshape(-1).shape == (0,)
assert (t + 1).exp().shape == t.shape
print("torch.distributed.tensor" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]

"""Every pair with a reduction pending at the source: all of it finished, a part of it, or none.

Where there are many, `make test` takes some, and `make exhaustive` takes all.

How many there are, by hand: k axes cut two dims in 1, 3, 11 or 49 ways. Of three axes, one that is
pending gives 3 * 11 sources with 11 + 49 targets each; two give 3 * 3 with 3 + 2 * 11 + 49; three
give 1 with 1 + 3 * 3 + 3 * 11 + 49. Together 1980 + 666 + 92 = 2738.
"""

from math import prod

import pytest

from shardspec import DeviceMesh, DTensor, Layout
from shardspec.comm.communicator import SimulatedCommunicator
from tests.conversions import (
    OPS,
    partial_specs,
    reduced,
    same_bits,
    shard_of,
    stack_of,
    targets_of,
)


def wrong_pairs(mesh, shape, dtype, sources, every=1):
    """Convert from sources to all or some targets; return how many there are, and what is wrong."""
    pairs, wrong = 0, []
    for source in sources:
        layout = Layout(mesh, source, shape, dtype)
        stack = stack_of(layout)
        shards = {device: shard_of(layout, stack, device) for device in mesh.ids}
        start = DTensor.from_shards(shards, layout, SimulatedCommunicator(mesh))
        for target in targets_of(source, mesh.ndim):
            pairs += 1
            if pairs % every:
                continue
            end = start.redistribute(target)
            expected = reduced(stack, source, target)
            if end.sharding_spec != target or not all(
                same_bits(shard, shard_of(end.layout, expected, device))
                for device, shard in end.shards.items()
            ):
                wrong.append(f"{source} → {target}")
    return pairs, wrong


def sampled(every):
    """Try one of so many in `make test`, and all in `make exhaustive`."""
    return pytest.mark.parametrize("every", [every, pytest.param(1, marks=pytest.mark.exhaustive)])


@pytest.mark.parametrize("op", OPS)
def test_every_pending_conversion_on_two_axes(op):
    mesh = DeviceMesh([4, 0, 5, 2, 1, 3], (2, 3))
    sources = list(partial_specs(2, 2, [op]))
    assert wrong_pairs(mesh, (7, 5), "float32", sources) == (102, [])


@sampled(5)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(6, 12), (1, 2), (0, 3)], ids=str)
def test_even_short_and_empty_tensors(op, shape, every):
    mesh = DeviceMesh([4, 0, 5, 2, 1, 3], (2, 3))
    sources = list(partial_specs(2, 2, [op]))
    assert wrong_pairs(mesh, shape, "float32", sources, every) == (102, [])


@sampled(5)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1), (1, 1)], ids=str)
def test_axes_of_one_device(op, mesh_shape, every):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    sources = list(partial_specs(2, 2, [op]))
    assert wrong_pairs(mesh, (7, 5), "float32", sources, every) == (102, [])


@sampled(5)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_every_pending_conversion_of_three_dims(op, every):
    mesh = DeviceMesh(range(6), (2, 3))
    assert wrong_pairs(mesh, (5, 3, 4), "int64", partial_specs(3, 2, [op]), every) == (212, [])


@sampled(67)
@pytest.mark.parametrize(("op", "shape"), [("sum", (11, 5)), ("prod", (8, 16))])
def test_every_pending_conversion_on_three_axes(op, shape, every):
    mesh = DeviceMesh([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2))
    assert wrong_pairs(mesh, shape, "float32", partial_specs(2, 3, [op]), every) == (2738, [])


@sampled(67)
def test_sum_and_mean_together(every):
    mesh = DeviceMesh(range(12), (2, 3, 2))
    sources = list(partial_specs(2, 3, mixed=True))
    assert all({"sum", "avg"} == set(source.partial.values()) for source in sources)
    assert wrong_pairs(mesh, (7, 5), "float64", sources, every) == (1884, [])


@pytest.mark.parametrize("op", OPS)
def test_every_pending_conversion_of_a_scalar(op):
    mesh = DeviceMesh(range(6), (2, 3))
    assert wrong_pairs(mesh, (), "float32", partial_specs(0, 2, [op])) == (8, [])

"""Every pair of layouts of odd tensors on odd meshes: axes of size 1, one device, ranks 0 to 4."""

from itertools import product

import pytest

from shardspec import DeviceMesh, DTensor, Layout
from shardspec.comm.communicator import SimulatedCommunicator
from tests.conversions import plain_specs, same_bits, shard_of, stack_of, strided

MESHES = [
    DeviceMesh([7], (1,)),
    DeviceMesh([7], (1, 1)),
    DeviceMesh([2, 0, 1], (3,)),
    DeviceMesh([9, 4, 2], (1, 3)),
    DeviceMesh([3, 1, 2, 0], (2, 1, 2)),
]


def wrong_pairs(mesh, shape, dtype, every=1):
    """Convert shards with gaps in memory between layouts; return how many, and wrong ones."""
    communicator = SimulatedCommunicator(mesh)
    specs = plain_specs(len(shape), mesh.ndim)
    wrong = []
    pairs = list(product(specs, specs))[::every]
    for source, target in pairs:
        before = Layout(mesh, source, shape, dtype)
        stack = stack_of(before)
        held = {device: strided(shard_of(before, stack, device)) for device in mesh.ids}
        start = DTensor.from_local(
            held, mesh, source, global_shape=shape, communicator=communicator
        )
        end = start.redistribute(target)
        if end.sharding_spec != target or not all(
            same_bits(end.shards[device], shard_of(end.layout, stack, device))
            for device in mesh.ids
        ):
            wrong.append(f"{before} → {target}")
        wrong += [
            f"input of {before} → {target} changed"
            for device in mesh.ids
            if not same_bits(held[device], shard_of(before, stack, device))
        ]
    return len(pairs), wrong


SPECS = {(): (1, 1, 1), (0,): (2, 5, 16), (13,): (2, 5, 16), (3, 0): (3, 11, 49)}
"""By shape, how many specs there are on one, two and three axes."""


def _meshes_and_shapes():
    """Where there are thousands of pairs, `make test` takes some."""
    for mesh, shape in product(MESHES, SPECS):
        specs = SPECS[shape][mesh.ndim - 1]
        name = f"{mesh.shape}-{shape}"
        yield pytest.param(mesh, shape, specs, 29 if specs == 49 else 1, id=name)
        if specs == 49:
            marks = pytest.mark.exhaustive
            yield pytest.param(mesh, shape, specs, 1, id=f"{name} all", marks=marks)


@pytest.mark.parametrize(("mesh", "shape", "specs", "every"), list(_meshes_and_shapes()))
def test_every_conversion_on_odd_meshes(mesh, shape, specs, every):
    assert wrong_pairs(mesh, shape, "float32", every) == (-(-(specs**2) // every), [])


@pytest.mark.parametrize(
    ("shape", "every"),
    [
        ((3, 2, 5, 4), 17),
        pytest.param((3, 2, 5, 4), 1, marks=pytest.mark.exhaustive),
        pytest.param((2, 0, 3, 4), 1, marks=pytest.mark.exhaustive),
    ],
)
def test_every_conversion_of_four_dims(shape, every):
    mesh = DeviceMesh([4, 0, 5, 2, 1, 3], (2, 3))
    assert wrong_pairs(mesh, shape, "int64", every) == (-(-841 // every), [])


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(7, 5), (1, 4), (0, 5)], ids=str)
def test_short_dtypes_with_gaps_in_memory(shape, dtype, every):
    mesh = DeviceMesh([4, 0, 5, 2, 1, 3], (2, 3))
    assert wrong_pairs(mesh, shape, dtype, every) == (-(-121 // every), [])

"""The plan's cost is the optimum over the declared moves, found by brute force.

`python -m benchmarks.exactness` looks at every pair at every size; here the same pairs are spread
over models and sizes, so that each is looked at under some of them.
"""

from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, ShardingSpec
from shardspec.comm.curves import Link
from shardspec.errors import MeshError
from tests.layout.brute_force import Brute, Model

FAST, SLOW = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9)
BUS = Link(2e-6, 1 / 10e9)
KIB, MIB, GIB = 2**10, 2**20, 2**30
COPY_S = 2 / 3.35e12
MODELS = ["two-tier", "uniform", "shared-bus", "copies"]
# One model here, and all of them in `make exhaustive`.
EACH_MODEL = [MODELS[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS[1:])]
SIZES = [64 * KIB, MIB, 64 * MIB, GIB]
SPACES = [
    (mesh, dims)
    for mesh in [(2, 2), (2, 4), (2, 3), (2, 2, 2), (1, 2), (2, 1), (1, 1), (1, 3, 2)]
    for dims in (2, 3)
]
UNEVEN = [
    ((2, 2), (5, 3)),
    ((2, 3), (1000, 777)),
    ((2, 4), (130, 7)),
    ((2, 3), (5, 7, 1)),
    ((2, 2, 2), (5, 3)),  # some shards are empty
    ((2, 2, 2), (13, 5)),
    ((1, 2), (5, 3)),
    ((2, 1), (7, 1, 3)),
    ((1, 3, 2), (5, 3)),
]


def links_of(name, mesh):
    if name in ("two-tier", "copies"):
        return (SLOW, *[FAST] * (len(mesh) - 1))
    return (FAST if name == "uniform" else BUS,) * len(mesh)


def model_of(name, mesh):
    return CostModel(
        mesh,
        links_of(name, mesh),
        "shared-bus" if name == "shared-bus" else "ring",
        copy_s=COPY_S * (name == "copies"),
    )


def oracle_of(name, mesh):
    links = links_of(name, mesh)
    return Model(
        tuple(link.latency_s for link in links),
        tuple(link.seconds_per_byte for link in links),
        name == "shared-bus",
        COPY_S * (name == "copies"),
    )


@cache
def brute_of(mesh, shape):
    return Brute(mesh, shape)


@cache
def optimum(name, mesh, shape):
    """States of the brute force, and seconds of the cheapest chains between them.

    Where every mesh divides, a longer tensor has the same boxes, but of more bytes.
    """
    brute, times = brute_of(mesh, shape), 1
    if set(shape[1:]) == {24}:
        brute, times = brute_of(mesh, (24,) * len(shape)), shape[0] // 24
    return brute, brute.optimum(oracle_of(name, mesh), 4 * times)


def even_shape(dims, num_bytes):
    """Sizes that every mesh here divides, as near to the bytes of a float32 tensor as it gets."""
    first = max(1, num_bytes // 4 // 24**dims)
    return (24 * first, *(24,) * (dims - 1))


def layouts_of(brute, shape):
    mesh = DeviceMesh(range(prod(brute.mesh)), brute.mesh)
    return [
        Layout(
            mesh,
            ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=dict.fromkeys(left, "sum")),
            shape,
            "float32",
        )
        for cuts, left in brute.states
    ]


def check_plans(mesh, shape, name, every=1, first=0):
    """Compare the cost of plans with the optimum, pending sources and targets included."""
    brute, best = optimum(name, mesh, shape)
    converter = LayoutConverter(model_of(name, mesh))
    layouts = layouts_of(brute, shape)
    pairs = [
        (i, j)
        for i, (_, pending) in enumerate(brute.states)
        for j, (_, left) in enumerate(brute.states)
        if set(left) <= set(pending)
    ][first::every]
    for i, j in pairs:
        plan = converter.plan(layouts[i], layouts[j])
        assert plan.target == layouts[j]
        assert plan.cost_seconds == pytest.approx(best[i, j], rel=1e-9, abs=2e-11), (
            f"{layouts[i]} → {layouts[j].spec}"
        )
    return len(pairs)


def check_table(mesh, shape, name):
    """Compare the table of all conversions with the optimum; and the triangle inequality."""
    brute, best = optimum(name, mesh, shape)
    best = best[: len(brute.cuts), : len(brute.cuts)]
    device_mesh = DeviceMesh(range(prod(mesh)), mesh)
    table = LayoutConverter(model_of(name, mesh)).cost_table(device_mesh, shape, "float32")
    place = {label: i for i, label in enumerate(table.labels)}
    order = [place[str(layout.spec)] for layout in layouts_of(brute, shape)[: len(brute.cuts)]]
    found = table.seconds[np.ix_(order, order)]
    np.testing.assert_allclose(found, best, rtol=1e-9, atol=2e-11)
    through = min((found[:, [k]] + found[[k]] - found).min() for k in range(len(found)))
    assert through > -2e-11
    return found.size


def _tensors():
    """Yield every other pair of space and size, so that all of both are tried; else the rest."""
    for (place, (mesh, dims)), (size, num_bytes) in product(enumerate(SPACES), enumerate(SIZES)):
        marks = [pytest.mark.exhaustive] if (place + place // 2 + size) % 2 else []
        yield pytest.param(mesh, dims, num_bytes, marks=marks)


@pytest.mark.parametrize("name", EACH_MODEL)
@pytest.mark.parametrize(("mesh", "dims", "num_bytes"), list(_tensors()))
def test_every_conversion_in_the_table_is_the_optimum(mesh, dims, num_bytes, name):
    assert check_table(mesh, even_shape(dims, num_bytes), name) in (121, 361, 2401, 11236)


@pytest.mark.parametrize("name", EACH_MODEL)
@pytest.mark.parametrize(("mesh", "dims", "num_bytes"), list(_tensors()))
def test_plans_are_the_optimum_with_sums_pending_too(mesh, dims, num_bytes, name):
    rarely = 12 if len(mesh) < 3 else 96
    first = MODELS.index(name) * len(SIZES) + SIZES.index(num_bytes)
    checked = check_plans(mesh, even_shape(dims, num_bytes), name, rarely, first % rarely)
    assert checked >= 15


@pytest.mark.parametrize("name", EACH_MODEL)
@pytest.mark.parametrize(("mesh", "shape"), UNEVEN)
def test_plans_of_uneven_shapes_are_optimal(mesh, shape, name):
    rarely = 3 if len(mesh) < 3 and len(shape) < 3 else 48
    check_plans(mesh, shape, name, rarely, MODELS.index(name))
    check_table(mesh, shape, name)


@pytest.mark.parametrize(("mesh", "shape"), [((2, 4), (4096, 4096)), ((2, 2, 2), (64, 24, 512))])
def test_copies_are_priced_in_plans_and_tables(mesh, shape):
    check_table(mesh, shape, "copies")
    check_plans(mesh, shape, "copies", 4 if len(mesh) < 3 else 288)


@pytest.mark.parametrize(
    ("source", "target", "copied"),
    [
        ("[S0,R]", "[R,R]", 0),
        ("[R,S0]", "[R,R]", 8),
        ("[S0,R]", "[R,S0]", 1),
        ("[R,S0]", "[S0,R]", 1),
        ("[R,R|P0]", "[S0,R]", 0),
        ("[R,R|P0]", "[R,S0]", 8),
        ("[R,R|P0]", "[R,R]", 0),
        ("[R,R]", "[R,S0]", 0),
    ],
)
def test_what_is_packed_and_unpacked(source, target, copied):
    """In eighths of the tensor, by hand."""
    mesh = DeviceMesh(range(8), (8,))
    plain = CostModel.from_presets(mesh, ["h100-nvswitch"], copies=False)
    priced = CostModel.from_presets(mesh, ["h100-nvswitch"])
    assert CostModel.of_mesh(mesh).copy_s == priced.copy_s
    assert (plain.copy_s, priced.copy_s) == (0, 2 / 3.35e12)
    layout = Layout(mesh, source, (2048, 2048), "bfloat16")
    seconds = [
        LayoutConverter(model).plan(layout, target).cost_seconds for model in (plain, priced)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(copied * 2**20 * 2 / 3.35e12, rel=1e-9)


def test_rates_that_are_none():
    mesh = DeviceMesh(range(8), (8,))
    with pytest.raises(MeshError, match="no memory rate is known for unit, so local copies have"):
        CostModel.from_presets(mesh, ["unit"], copies=True)
    with pytest.raises(MeshError, match="copy_s is nan s a byte; give a finite number from 0 on"):
        CostModel((8,), (FAST,), copy_s=float("nan"))

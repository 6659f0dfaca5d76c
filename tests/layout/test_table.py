from math import prod
from typing import Any

import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.comm.curves import Link
from shardspec.errors import LayoutError
from shardspec.layout.graph import count_states, distances, orbits, space_of, spec_of
from shardspec.layout.plan import communicating_moves

FAST, SLOW = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9)


@pytest.mark.parametrize(
    "link_model", ["ring", pytest.param("shared-bus", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    ("mesh_shape", "shape"),
    [
        ((2, 3), (600, 36)),
        ((2, 3), (7, 5)),
        pytest.param((2, 2, 2), (64, 4096), marks=pytest.mark.exhaustive),
        ((2, 4), (8, 16, 24)),
        ((1, 2), (600, 36)),
        ((2, 1), (7, 5)),
        ((1, 1), (7, 5)),
        pytest.param((1, 3, 2), (600, 36), marks=pytest.mark.exhaustive),
        pytest.param((1, 3, 2), (7, 5), marks=pytest.mark.exhaustive),
    ],
)
def test_the_table_is_what_the_converter_says(mesh_shape, shape, link_model):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    model = CostModel(mesh_shape, (SLOW, *[FAST] * (len(mesh_shape) - 1)), link_model)
    converter = LayoutConverter(model)
    table = converter.cost_table(mesh, shape, "bf16")
    assert len(table.labels) == count_states(len(mesh_shape), len(shape), 0)
    for row, source in enumerate(table.labels):
        layout = Layout(mesh, source, shape, "bf16")
        for column, target in enumerate(table.labels):
            assert table.seconds[row, column] == pytest.approx(
                converter.cost(layout, target), rel=1e-9, abs=2e-11
            )


@pytest.mark.parametrize("shape", [(600, 36), (7, 5)])
def test_bytes_are_those_of_the_plans_and_sums_may_be_pending(shape):
    """Every pair, against the plan: seconds, bytes received, peak; inf where there is none."""
    mesh = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
    converter = LayoutConverter(CostModel(mesh.shape, (SLOW, FAST)))
    table = converter.cost_table(mesh, shape, "bf16", partial=("sum",))
    assert len(table.labels) == count_states(2, 2, 2) == 18
    assert table.axis_names == ("dp", "tp")
    assert table.index("[S(dp),R|P(tp)]") == table.index("[S0,R|P1]")
    assert table.labels[table.index("S1,S(dp)")] == "[S(tp),S(dp)]"
    assert table.index("[S1,S0]") == table.index("[S(tp),S(dp)]")
    on = f"{list(shape)} bfloat16 on a mesh of shape (2, 3)"
    assert repr(table) == f"CostTable(18 layouts of {on})"
    impossible = 0
    for row, source in enumerate(table.labels):
        layout = Layout(mesh, source, shape, "bf16")
        assert table.local_bytes[row] == layout.max_local_bytes
        for column, target in enumerate(table.labels):
            numbers = table.seconds[row, column], table.bytes_received[row, column]
            goal = layout.with_spec(target)
            if set(goal.spec.partials) <= set(layout.spec.partials):
                plan = converter.plan(layout, goal)
                assert numbers[0] == pytest.approx(plan.cost_seconds, rel=1e-9, abs=2e-11)
                assert numbers[1] == plan.bytes_received
                # Of slices along two dims either may come first.
                assert table.peak_bytes[row, column] == pytest.approx(plan.peak_bytes, rel=0.35)
                if len(communicating_moves(plan)) == len(plan.steps):
                    assert table.peak_bytes[row, column] == plan.peak_bytes
            else:
                assert (*numbers, table.peak_bytes[row, column]) == (np.inf, -1, -1)
                impossible += 1
    assert impossible > 50


def test_one_kind_of_sum_at_a_time():
    mesh = DeviceMesh(range(4), (4,))
    wrong: list[Any] = [("sum", "max"), "sum"]
    for partial in wrong:
        with pytest.raises(LayoutError, match=r"give partial=\('sum',\)$"):
            LayoutConverter().cost_table(mesh, (8,), "f32", partial=partial)
    table = LayoutConverter().cost_table(mesh, (8,), "f32")
    with pytest.raises(LayoutError, match=r"spec \[R\|P0\] is not in the table of 2 layouts"):
        table.index("[R|P0]")


def test_a_table_that_does_not_fit_says_how_much_it_would_take():
    mesh = DeviceMesh(range(32), (2,) * 5)
    with pytest.raises(LayoutError, match=r"it would take 28.37 GiB; ask for single costs"):
        LayoutConverter().cost_table(mesh, (64,) * 4, "f32")


def test_many_pairs_at_once():
    """Of several tensors and meshes, pending ones too; each as if it were asked for alone."""
    first = DeviceMesh(range(6), (2, 3))
    second = DeviceMesh(range(6), (6,))
    ends = [
        (Layout(mesh, source, shape, "bf16"), Layout(mesh, target, shape, "bf16"))
        for mesh, shape, pairs in (
            (first, (600, 36), (("[S0,R]", "[R,S01]"), ("[R,R|P0]", "[S1,S0]"))),
            (first, (7, 5), (("[S01,R]", "[R,R]"), ("[R,R|P01]", "[R,S0|P1]"))),
            (second, (7, 5), (("[R,R]", "[S0,R]"), ("[R,S0]", "[S0,R]"))),
        )
        for source, target in pairs
    ]
    across = ends[2][0], Layout(second, "[S0,R]", (7, 5), "bf16")
    pairs = [
        *ends,
        across,
        *ends[::-1],
        *((a.with_spec(a.spec), b.with_spec(b.spec)) for a, b in ends),
    ]
    converter = LayoutConverter()
    found = converter.costs(*zip(*pairs, strict=True))
    assert found == pytest.approx([converter.cost(*pair) for pair in pairs], rel=1e-9, abs=2e-11)
    assert converter.costs([], []).shape == (0,)


def test_pairs_that_are_none():
    a, b = (Layout(DeviceMesh(range(2), (2,)), "[R]", shape, "f32") for shape in ((8,), (9,)))
    with pytest.raises(LayoutError, match="2 sources for 1 targets; give pairs"):
        LayoutConverter().costs([a, a], [a])
    with pytest.raises(LayoutError, match=r"^pair 1 is of two .*same shape and dtype$"):
        LayoutConverter().costs([a, a, b], [a, b, b])
    with pytest.raises(LayoutError, match="a conversion only finishes reductions"):
        LayoutConverter().costs([a], [a.with_spec("[R|P0]")])


def test_what_it_refuses():
    table = LayoutConverter().cost_table(DeviceMesh(range(4), (2, 2)), (64, 32), "bf16")
    with pytest.raises(LayoutError, match=r"\[S2,R\] is not in the table of 11 layouts"):
        table.cost("[S2,R]", "[R,R]")
    with pytest.raises(LayoutError, match="ask for single costs"):
        LayoutConverter().cost_table(DeviceMesh(range(64), (2,) * 6), (64, 64), "bf16")
    with pytest.raises(LayoutError, match="ask for single costs"):
        LayoutConverter().cost_table(DeviceMesh(range(4096), (16, 16, 16)), (64, 64), "bf16")


def test_distances_against_single_searches():
    space = space_of(2, 3, ())
    generator = np.random.default_rng(1)
    move = generator.random((19, 19))
    move[generator.random((19, 19)) < 0.7] = np.inf
    best = distances(move, np.arange(19))
    expected = move.copy()
    np.fill_diagonal(expected, 0)
    for middle in range(19):
        expected = np.minimum(expected, expected[:, [middle]] + expected[[middle]])
    assert np.allclose(best, expected, rtol=1e-12, atol=0)
    assert len(space.states) == 19


def test_orbits_are_permutations_of_the_dims():
    space = space_of(2, 3, ())
    stands_for, relabeled = orbits(space, (0, 1))
    for state, (cuts, _) in enumerate(space.states):
        same = space.states[stands_for[state]][0]
        assert sorted(cuts) == sorted(same)
        assert relabeled[state][state] == stands_for[state]
    assert str(spec_of(space.states[0])) == "[R,R,R]"


def test_orbits_are_permutations_of_alike_axes_too():
    space = space_of(3, 2, ())
    stands_for, relabeled = orbits(space, (0, 1, 1))
    plain, _ = orbits(space, (0, 1, 2))
    assert len(np.unique(stands_for)) < len(np.unique(plain))
    swapped = {0: 0, 1: 2, 2: 1}
    for state, (cuts, _) in enumerate(space.states):
        other = space.index[tuple(tuple(swapped[a] for a in axes) for axes in cuts), ()]
        assert stands_for[other] == stands_for[state]
        assert relabeled[state][state] == stands_for[state]
        assert sorted(relabeled[state]) == list(range(len(space.states)))


@pytest.mark.parametrize(
    ("mesh_shape", "shape"),
    [
        ((2, 4, 2, 4), (64, 128, 192, 64)),
        pytest.param((2, 2, 2, 2), (64,) * 4, marks=pytest.mark.exhaustive),
        pytest.param((8, 8, 8), (513, 4096, 100), marks=pytest.mark.exhaustive),
    ],
)
def test_tables_of_large_meshes_have_the_plans_and_no_detour_is_cheaper(mesh_shape, shape):
    """Dims that divide evenly, and dims that do not."""
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    model = CostModel(mesh_shape, (SLOW, *[FAST] * (len(mesh_shape) - 1)))
    table = LayoutConverter(model).cost_table(mesh, shape, "bf16")
    assert len(table.labels) == count_states(len(mesh_shape), len(shape), 0)
    assert (np.diag(table.seconds) == 0).all()
    for middle in range(0, len(table.labels), 79):
        detour = table.seconds[:, [middle]] + table.seconds[[middle]]
        assert (table.seconds <= detour * (1 + 1e-12) + 1e-18).all()
    generator = np.random.default_rng(7)
    for row, column in generator.integers(0, len(table.labels), (12, 2)):
        layout = Layout(mesh, table.labels[row], shape, "bf16")
        plan = LayoutConverter(model).plan(layout, table.labels[column])
        assert table.seconds[row, column] == pytest.approx(plan.cost_seconds, rel=1e-9, abs=2e-11)

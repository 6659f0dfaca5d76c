"""Layouts drawn as text."""

from itertools import product

import pytest

from shardspec import DeviceMesh, Layout
from shardspec.boxes import box_size
from shardspec.layout.picture import ids_text


def drawn(spec, shape, mesh=None):
    """Return the picture without its title."""
    layout = Layout(mesh or DeviceMesh(range(4), (2, 2)), spec, shape, "f32")
    first, _, rest = layout.picture().partition("\n")
    assert first == layout.title
    return f"\n{rest}\n"


def test_cells_are_drawn_to_scale():
    assert (
        drawn("[S0,R]", (4, 4))
        == """
           0:4
    ┌───────────────┐
    │               │
0:2 │      0,1      │
    │               │
    ├───────────────┤
    │               │
2:4 │      2,3      │
    │               │
    └───────────────┘
"""
    )
    assert (
        drawn("[S01,R]", (4, 4))
        == """
           0:4
    ┌───────────────┐
0:1 │       0       │
    ├───────────────┤
1:2 │       1       │
    ├───────────────┤
2:3 │       2       │
    ├───────────────┤
3:4 │       3       │
    └───────────────┘
"""
    )


def test_rows_and_columns_of_unequal_sizes_and_shuffled_ids():
    mesh = DeviceMesh([40, 7, 12, 3, 9, 10], (2, 3))
    assert (
        drawn("[S1,S0]", (4, 3), mesh)
        == """
       0:2   2:3
    ┌───────┬───┐
    │       │   │
0:2 │   40  │ 3 │
    │       │   │
    ├───────┼───┤
    │       │   │
2:4 │   7   │ 9 │
    │       │   │
    └───────┴───┘
nothing is held by 10,12
"""
    )


def test_large_dims_take_one_line_a_part():
    assert (
        drawn("[S10,R]", (100, 2000))
        == """
        0:2000
       ┌──────┐
0:25   │  0   │
       ├──────┤
25:50  │  2   │
       ├──────┤
50:75  │  1   │
       ├──────┤
75:100 │  3   │
       └──────┘
"""
    )


def test_one_dim_is_one_row():
    assert (
        drawn("[S01]", (3,))
        == """
 0:1 1:2 2:3
┌───┬───┬───┐
│ 0 │ 1 │ 2 │
└───┴───┴───┘
nothing is held by 3
"""
    )


def test_a_scalar_is_one_cell():
    assert (
        drawn("[]", ())
        == """
┌─────┐
│ 0-3 │
└─────┘
"""
    )


def test_three_dims_are_one_grid_per_block_of_the_first():
    assert (
        drawn("[S0,R,S1]", (3, 1, 30))
        == """
[0:2, :, :]
      0:15 15:30
    ┌─────┬─────┐
0:1 │  0  │  1  │
    └─────┴─────┘
[2:3, :, :]
      0:15 15:30
    ┌─────┬─────┐
0:1 │  2  │  3  │
    └─────┴─────┘
"""
    )


def test_a_tensor_without_elements_is_held_by_nobody():
    assert drawn("[S0,R]", (0, 3)) == "\nnothing is held by 0-3\n"


def test_pending_reductions_are_told():
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    assert (
        drawn("[R|P(tp),Pavg(dp)]", (2,), mesh)
        == """
   0:2
┌───────┐
│  0-3  │
└───────┘
pending over axis tp: the sum of what its devices hold
pending over axis dp: the avg of what its devices hold
"""
    )


@pytest.mark.parametrize("shape", [(2, 3), (9, 7), (5, 8, 11), (1, 2, 3, 10)])
def test_every_cell_is_one_box_of_a_rectangular_drawing(shape):
    mesh = DeviceMesh([5, 3, 1, 0, 2, 4], (2, 3))
    cuts = ["R", "S0", "S1", "S01", "S10"]
    specs = [
        f"[{','.join(chosen)}]"
        for chosen in product(cuts, repeat=len(shape))
        if all("".join(chosen).count(axis) <= 1 for axis in "01")
    ]
    assert len(specs) >= 11
    for spec in specs:
        layout = Layout(mesh, spec, shape, "f32")
        boxes = {box for box in layout.boxes().values() if box_size(box)}
        lines = [line for line in layout.picture().splitlines() if set(line) & set("│┌├└")]
        assert {len(line) for line in lines if line[0] != "["} == {len(lines[0])}
        cells = [c.strip() for line in lines for c in line.split("│")[1:-1] if c.strip()]
        found = {ids_text([d for d, b in layout.boxes().items() if b == box]): box for box in boxes}
        assert sorted(cells) == sorted(found)


def test_text_of_ids_joins_three_or_more_in_a_row():
    assert ids_text([]) == ""
    assert ids_text([3]) == "3"
    assert ids_text([1, 0]) == "0,1"
    assert ids_text([2, 0, 1, 9, 7, 6]) == "0-2,6,7,9"

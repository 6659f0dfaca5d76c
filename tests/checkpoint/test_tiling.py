"""Holes and overlaps are found, against painting every element; large grids are fast."""

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec import DeviceMesh, Layout
from shardspec.boxes import split_interval
from shardspec.checkpoint.catalog import (
    StoredBox,
    StoredReduction,
    StoredTensor,
    replica_holders,
    replica_keys,
    stored_reductions,
)
from shardspec.checkpoint.compare.coverage import check_tiling, find_flaw
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.errors import CheckpointError


def grid(shape, parts):
    """The boxes of a grid with so many parts along each dim."""
    sides = [
        [split_interval(0, size, n, i) for i in range(n)]
        for size, n in zip(shape, parts, strict=True)
    ]
    return list(product(*sides))


@st.composite
def boxes_in_a_tensor(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    sides = [st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape]
    box = st.tuples(*(side.map(lambda s: (min(s), max(s[0] + 1, s[1]))) for side in sides))
    return shape, draw(st.lists(box, max_size=6))


@settings(max_examples=120)
@given(boxes_in_a_tensor())
def test_flaws_are_those_that_painting_finds(drawn):
    shape, boxes = drawn
    painted = np.zeros(shape, int)
    for box in boxes:
        painted[tuple(slice(lo, hi) for lo, hi in box)] += 1
    match find_flaw(tuple(shape), tuple(boxes)):
        case None:
            assert (painted == 1).all()
        case box, places:
            assert all(lo < hi for lo, hi in box)
            shared = np.zeros(shape, int)
            for place in places:
                shared[tuple(slice(lo, hi) for lo, hi in boxes[place])] += 1
            part = tuple(slice(lo, hi) for lo, hi in box)
            assert (painted[part] == len(places)).all()
            assert (shared[part] == len(places)).all()
            assert len(places) != 1


@settings(max_examples=120)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=3), st.randoms())
def test_grids_tile_and_grids_less_one_box_do_not(sides, random):
    shape, parts = [s for s, _ in sides], [min(s, p) for s, p in sides]
    boxes = [box for box in grid(shape, parts) if all(lo < hi for lo, hi in box)]
    random.shuffle(boxes)
    assert find_flaw(tuple(shape), tuple(boxes)) is None
    missing = boxes.pop()
    assert find_flaw(tuple(shape), tuple(boxes)) == (missing, ())
    boxes += [missing, missing]
    assert find_flaw(tuple(shape), tuple(boxes)) == (missing, (len(boxes) - 2, len(boxes) - 1))


def test_a_pinwheel_that_is_no_grid_tiles():
    pinwheel = [
        ((0, 2), (0, 1)),
        ((0, 1), (1, 3)),
        ((1, 3), (2, 3)),
        ((2, 3), (0, 2)),
        ((1, 2), (1, 2)),
    ]
    assert find_flaw((3, 3), tuple(pinwheel)) is None
    assert find_flaw((3, 3), tuple(pinwheel[:-1])) == (((1, 2), (1, 2)), ())


def test_tensors_without_elements_need_no_boxes_and_scalars_need_one():
    assert find_flaw((0, 3), ()) is None
    assert find_flaw((), ((),)) is None
    assert find_flaw((), ()) == ((), ())
    assert find_flaw((), ((), ())) == ((), (0, 1))


def test_ten_thousand_boxes_are_checked_in_a_moment():
    boxes = grid((1000, 1000), (100, 100))
    started = time.monotonic()
    assert find_flaw((1000, 1000), tuple(boxes)) is None
    assert find_flaw((1000, 1000), tuple(boxes[:-1])) == (((990, 1000), (990, 1000)), ())
    assert time.monotonic() - started < 2  # all pairs would take a minute


def stored(box, rank=0, addend=()):
    return StoredBox(box, addend, rank, LocalPath(f"rank{rank}"), 0)


def tensor(shape, boxes, pending=()):
    return StoredTensor("w", shape, "int32", None, pending, tuple(boxes))


def test_boxes_stored_twice_are_returned_to_be_compared():
    a, b, c = stored(((0, 2),), 0), stored(((2, 4),), 1), stored(((0, 2),), 2)
    assert check_tiling(tensor((4,), [a, b, c])) == ((a, c),)
    assert check_tiling(tensor((4,), [a, b])) == ()


def test_every_addend_has_to_be_there():
    pending = (StoredReduction("sum", 2), StoredReduction("avg", 3))
    boxes = [
        stored(((0, 4),), rank, addend) for rank, addend in enumerate(product(range(2), range(3)))
    ]
    assert check_tiling(tensor((4,), boxes, pending)) == ()
    with pytest.raises(CheckpointError, match=r"no file contains box \[0:4\] of addend \[1, 2\]"):
        check_tiling(tensor((4,), boxes[:-1], pending))


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([stored(((0, 3),))], r"tensor 'w' of shape \[4\]: no file contains box \[3:4\]"),
        (
            [stored(((0, 3),), 5), stored(((2, 4),), 7)],
            r"rank 5's box \[0:3\] in rank5 and rank 7's box \[2:4\] in rank7 partially overlap",
        ),
        ([stored(((0, 5),))], r"rank 0's box \[0:5\] in rank0 is empty or outside"),
        ([stored(((2, 2),))], "is empty or outside the tensor"),
        ([stored(((0, 4), (0, 1)))], "is empty or outside the tensor"),
        ([stored(((0, 4),), 0, (1,))], r"is addend \[1\] of a pending reduction of \[\] addends"),
    ],
)
def test_what_does_not_tile(boxes, problem):
    with pytest.raises(CheckpointError, match=problem):
        check_tiling(tensor((4,), boxes))


def test_what_replicas_have_in_common():
    mesh = DeviceMesh(range(6), (2, 3))
    partial = Layout(mesh, "[S0|P1]", (4,), "f32")
    assert replica_keys(partial, 5) == ((((2, 4),), (2,)),)
    parts = Layout(mesh, "[S1{3,2/1}]", (5,), "f32")
    assert replica_keys(parts, 5) == ((((2, 3),), ()), (((3, 5),), ()))
    assert replica_keys(Layout(mesh, "[S1]", (2,), "f32"), 5) == ()
    assert stored_reductions(partial) == (StoredReduction("sum", 3),)
    # Of the third row of devices there is nothing left.
    uneven = Layout(DeviceMesh(range(6), (3, 2)), "[S0]", (2,), "f32")
    assert replica_holders(uneven) == {(((0, 1),), ()): (0, 1), (((1, 2),), ()): (2, 3)}

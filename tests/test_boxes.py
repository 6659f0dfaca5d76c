from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardspec.boxes import (
    box_shape,
    box_size,
    contains,
    intersect,
    slices_within,
    split_interval,
)


@pytest.mark.parametrize("parts", range(1, 10))
def test_split_interval_is_torch_chunk_with_empty_parts_at_the_end(parts):
    for size in range(40):
        ours = [split_interval(100, 100 + size, parts, i) for i in range(parts)]
        chunks = [chunk.tolist() for chunk in torch.arange(100, 100 + size).chunk(parts)]
        chunks += [[]] * (parts - len(chunks))
        assert [list(range(lo, hi)) for lo, hi in ours] == chunks
        assert ours[0][0] == 100
        assert all(a[1] == b[0] for a, b in pairwise(ours))
        assert ours[-1][1] == 100 + size


def intervals(size):
    return [(lo, hi) for lo in range(size + 1) for hi in range(lo, size + 1)]


def mask(box, shape):
    held = np.zeros(shape, dtype=bool)
    held[tuple(slice(lo, hi) for lo, hi in box)] = True
    return held


def test_arithmetic_of_all_boxes_of_a_small_array_equals_that_of_masks():
    shape = (2, 3)
    boxes = list(product(intervals(2), intervals(3)))
    assert len(boxes) == 60
    for a, b in product(boxes, boxes):
        both = mask(a, shape) & mask(b, shape)
        shared = intersect(a, b)
        if shared is None:
            assert not both.any()
        else:
            assert (mask(shared, shape) == both).all()
            assert box_size(shared) == both.sum() > 0
        if contains(a, b):
            assert (mask(b, shape) <= mask(a, shape)).all()
        elif box_size(b):
            assert not (mask(b, shape) <= mask(a, shape)).all()
    for a in boxes:
        assert box_size(a) == mask(a, shape).sum() == prod(box_shape(a))


@st.composite
def nested_boxes(draw):
    outer, inner = [], []
    for _ in range(draw(st.integers(0, 3))):
        marks = sorted(draw(st.lists(st.integers(0, 7), min_size=4, max_size=4)))
        outer.append((marks[0], marks[3]))
        inner.append((marks[1], marks[2]))
    return tuple(outer), tuple(inner)


@given(nested_boxes())
def test_slices_within_selects_the_inner_box_from_the_outer_one(boxes):
    outer, inner = boxes
    shape = (7,) * len(outer)
    whole = np.arange(prod(shape)).reshape(shape)
    held = whole[tuple(slice(lo, hi) for lo, hi in outer)]
    wanted = whole[tuple(slice(lo, hi) for lo, hi in inner)]
    assert contains(outer, inner)
    np.testing.assert_array_equal(held[slices_within(inner, outer)], wanted)


def test_the_box_of_a_scalar_holds_one_element():
    assert box_shape(()) == ()
    assert box_size(()) == 1
    assert intersect((), ()) == ()
    assert contains((), ())
    assert slices_within((), ()) == ()


@pytest.mark.parametrize("function", [intersect, contains, slices_within])
def test_boxes_of_different_rank_are_refused(function):
    with pytest.raises(ValueError, match="zip"):
        function(((0, 1),), ((0, 1), (0, 1)))

from itertools import product

import numpy as np
import pytest

from shardspec.boxes import box_size, chunks, slices_within


@pytest.mark.parametrize("shape", [(), (7,), (0,), (2, 0), (5, 3), (2, 3, 5), (1, 1, 4), (3, 1, 2)])
def test_they_fill_the_box_in_the_order_of_memory(shape):
    box = tuple((start, start + size) for start, size in zip((4, 0, 9), shape, strict=False))
    numbers = np.arange(box_size(box)).reshape(shape)
    for most in range(1, 32):
        parts = list(chunks(box, most))
        assert all(0 < box_size(part) <= most for part in parts)
        seen = [n for part in parts for n in numbers[slices_within(part, box)].ravel().tolist()]
        assert seen == list(range(box_size(box)))


@pytest.mark.parametrize(("most", "count"), [(1, 30), (5, 6), (9, 6), (10, 4), (15, 2), (30, 1)])
def test_they_are_as_long_as_whole_rows_allow(most, count):
    assert len(list(chunks(((0, 2), (0, 3), (0, 5)), most))) == count


def test_chunks_of_a_scalar():
    assert list(chunks((), 1)) == [()]
    assert [list(chunks(((3, 3),), most)) for most in (1, 2)] == [[], []]
    assert [len(list(chunks(((0, a), (0, b)), 4))) for a, b in product((1, 5), repeat=2)] == [
        1,
        2,
        2,
        10,
    ]

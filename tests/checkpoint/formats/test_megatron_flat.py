"""Tensors that Megatron-core has made flat are taken apart into boxes of what they were."""

from itertools import product
from math import prod

import numpy as np
import pytest

from shardspec.checkpoint.torch_files.dcp_metadata import unflattened


@pytest.mark.parametrize(
    ("block", "counts"),
    [((6,), (2,)), ((2, 3), (2, 2)), ((1, 3, 4), (2, 1, 2)), ((2, 2, 3), (1, 2, 1)), ((), ())],
)
def test_every_stretch_is_where_a_reshape_of_its_block_puts_it(
    block: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    shape = tuple(size * count for size, count in zip(block, counts, strict=True))
    whole = np.arange(prod(shape)).reshape(shape)
    elements = prod(block)
    for at in product(*map(range, counts)):
        part = tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, block, strict=True))
        flat = whole[part].reshape(-1)
        for lo, hi in product(range(elements), range(1, elements + 1)):
            if lo >= hi:
                continue
            chunk = (*((i, i + 1) for i in at), (lo, hi))
            found = list(unflattened((*counts, elements), shape, chunk))
            held = [whole[tuple(slice(*side) for side in box)].reshape(-1) for box, _ in found]
            assert np.array_equal(np.concatenate(held), flat[lo:hi])
            starts = [start for _, start in found]
            assert starts == list(np.cumsum([0, *(len(part) for part in held[:-1])]))


def test_blocks_are_those_that_make_up_the_tensor() -> None:
    for flat, shape in (
        ((4, 3, 1, 4096), (4, 256, 64)),
        ((4, 4, 1, 4095), (4, 256, 64)),
        ((4, 4096), (4, 64, 64)),
        ((0, 64), (64,)),
        ((), (64,)),
    ):
        chunk = (*((0, 1) for _ in flat[1:]), (0, 1)) if flat else ()
        with pytest.raises(ValueError, match="into blocks"):
            list(unflattened(flat, shape, chunk))
    with pytest.raises(ValueError, match="is in several"):
        list(unflattened((2, 2, 4), (4, 4), ((0, 2), (0, 1), (0, 4))))

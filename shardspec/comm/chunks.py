"""Cutting a box into chunks, by a rule that both ends of a message follow."""

from collections.abc import Iterator

from shardspec.boxes import Box, box_size

__all__ = ["chunks"]


def chunks(box: Box, most: int) -> Iterator[Box]:
    """Yield parts of a box of at most so many elements, in the order of memory.

    Together they are the box. Each is as long as the bound allows, whole rows where rows fit; an
    empty box has none.

    Parameters
    ----------
    box
        What to cut.
    most
        Elements of a chunk; from 1.

    Examples
    --------
    >>> list(chunks(((4, 9), (0, 10)), 25))
    [((4, 6), (0, 10)), ((6, 8), (0, 10)), ((8, 9), (0, 10))]
    >>> list(chunks(((4, 6), (0, 5)), 3))
    [((4, 5), (0, 3)), ((4, 5), (3, 5)), ((5, 6), (0, 3)), ((5, 6), (3, 5))]
    """
    assert most > 0, "a chunk holds something"
    size = box_size(box)
    if size == 0:
        return
    if size <= most:
        yield box
        return
    dim = next(d for d, (lo, hi) in enumerate(box) if hi - lo > 1)
    lo, hi = box[dim]
    row = size // (hi - lo)
    rows = max(1, most // row)
    for start in range(lo, hi, rows):
        part = (*box[:dim], (start, min(start + rows, hi)), *box[dim + 1 :])
        if row <= most:
            yield part
        else:
            yield from chunks(part, most)

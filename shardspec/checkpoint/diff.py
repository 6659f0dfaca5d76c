"""Comparing two checkpoints tensor by tensor, a block at a time and without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.copy import Buffers, MemorySink, copy_box
from shardspec.checkpoint.files import OpenFiles
from shardspec.checkpoint.numbers import numbers
from shardspec.checkpoint.open import as_source
from shardspec.checkpoint.source import CheckpointSource, StoredTensor
from shardspec.checkpoint.tiling import check_tiling
from shardspec.dtypes import item_bytes

__all__ = ["Difference", "diff_checkpoints"]

_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not the same in both."""

    name: str
    problem: str
    """What differs, as a sentence without the name."""
    index: tuple[int, ...] | None = None
    """The first element that differs, in row-major order; None if shapes, dtypes or names do."""
    ranks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The ranks whose boxes hold that element, on each side."""

    def to_json(self) -> dict[str, object]:
        """Return it as plain values."""
        return {
            "name": self.name,
            "problem": self.problem,
            "index": None if self.index is None else list(self.index),
            "ranks": [list(ranks) for ranks in self.ranks],
        }


def diff_checkpoints(
    a: Path | str | CheckpointSource,
    b: Path | str | CheckpointSource,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Iterator[Difference]:
    """Yield every tensor that differs, by name.

    Without tolerances, bits are compared: equal NaNs are the same, 0 and -0 are not. With any,
    numbers are: ``|x - y| <= atol + rtol * |y|`` in float64; NaN is the same as any NaN, an
    infinity only as itself.

    Parameters
    ----------
    a, b
        Checkpoints in any form that `open_checkpoint` knows, or what that has made of them.
    atol, rtol
        Tolerances.

    Raises
    ------
    CheckpointError
        If either cannot be read or contradicts itself.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import save_sharded
    >>> a, b = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> save_sharded({"w": torch.tensor([1.0, 2.0])}, a)
    >>> save_sharded({"w": torch.tensor([1.0, 3.0])}, b)
    >>> [(d.name, d.index) for d in diff_checkpoints(a, b)]
    [('w', (1,))]
    >>> list(diff_checkpoints(a, b, atol=1.0))
    []
    """
    left, right = as_source(a), as_source(b)
    yield from _diff(left, right, atol, rtol)


def _diff(
    left: CheckpointSource, right: CheckpointSource, atol: float, rtol: float
) -> Iterator[Difference]:
    names = set(left.names), set(right.names)
    buffers = Buffers()
    with OpenFiles() as files:
        for name in sorted(names[0] | names[1]):
            if name not in names[0] or name not in names[1]:
                only = left if name in names[0] else right
                yield Difference(name, f"is only in {only.directory}")
                continue
            x, y = left.tensor(name), right.tensor(name)
            if x.shape != y.shape:
                yield Difference(name, f"has shape {list(x.shape)}, and {list(y.shape)}")
            elif x.dtype != y.dtype:
                yield Difference(name, f"is {x.dtype}, and {y.dtype}")
            else:
                check_tiling(x)
                check_tiling(y)
                found = _first(x, y, atol, rtol, files, buffers)
                if found is not None:
                    yield found


def _first(
    x: StoredTensor, y: StoredTensor, atol: float, rtol: float, files: OpenFiles, buffers: Buffers
) -> Difference | None:
    size = item_bytes(x.dtype)
    rooms = np.empty(_BLOCK_BYTES, np.uint8), np.empty(_BLOCK_BYTES, np.uint8)
    for box in _blocks(x.shape, _BLOCK_BYTES // size):
        length = box_size(box) * size
        one, other = rooms[0][:length], rooms[1][:length]
        copy_box(x, box, MemorySink(one), files, buffers)
        copy_box(y, box, MemorySink(other), files, buffers)
        if np.array_equal(one, other):
            continue
        differs = (one != other).reshape(-1, size).any(1)
        if atol or rtol:
            differs &= ~_close(numbers(one, x.dtype), numbers(other, x.dtype), atol, rtol)
        if differs.any():
            place = int(differs.argmax())
            index = _index(box, place)
            values = [numbers(raw, x.dtype)[place].item() for raw in (one, other)]
            ranks = _holders(x, index), _holders(y, index)
            text = f"differs first at index {list(index)}: {values[0]!r} (rank "
            text += f"{_ranks(ranks[0])}), and {values[1]!r} (rank {_ranks(ranks[1])})"
            return Difference(x.name, text, index, ranks)
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _blocks(shape: Sequence[int], most: int, prefix: Box = ()) -> Iterator[Box]:
    """Cut a tensor into stretches of at most `most` elements, in row-major order."""
    if 0 in shape:
        return
    if len(prefix) == len(shape):
        yield prefix
        return
    size, *inner = shape[len(prefix) :]
    row = prod(inner)
    rest = tuple((0, n) for n in inner)
    if row <= most:
        step = most // row
        for lo in range(0, size, step):
            yield (*prefix, (lo, min(lo + step, size)), *rest)
    else:
        for at in range(size):
            yield from _blocks(shape, most, (*prefix, (at, at + 1)))


def _index(box: Box, element: int) -> tuple[int, ...]:
    index: list[int] = []
    for lo, hi in reversed(box):
        element, at = divmod(element, hi - lo)
        index.insert(0, lo + at)
    return tuple(index)


def _holders(tensor: StoredTensor, index: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose boxes hold an element."""
    found = {
        stored.rank
        for stored in tensor.boxes
        if all(lo <= at < hi for at, (lo, hi) in zip(index, stored.box, strict=True))
    }
    return tuple(sorted(found))


def _close(x: NDArray[Any], y: NDArray[Any], atol: float, rtol: float) -> NDArray[np.bool_]:
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    return np.isclose(x.astype(wide), y.astype(wide), rtol=rtol, atol=atol, equal_nan=True)

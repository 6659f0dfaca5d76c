"""Comparing two checkpoints tensor by tensor, a block at a time and without torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import box_size, chunks
from shardspec.checkpoint.catalog import Catalog, FileBox, Outline, StoredTensor
from shardspec.checkpoint.coordinate import Progress
from shardspec.checkpoint.numeric import Bytes, numbers
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, read_box_into
from shardspec.checkpoint.select import Choice, Patterns, Renames, select
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.tiling import check_tiling, element_index
from shardspec.dtypes import is_floating, item_bytes, packed
from shardspec.errors import CheckpointError
from shardspec.layout.picture import ids_text


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


def names_to_compare(a: Catalog, b: Catalog, choice: Choice) -> tuple[dict[str, str], set[str]]:
    """Return what is to be found in two checkpoints.

    Of the first, the chosen tensors: new name to old name; of the second, the names that stand for
    one of these, or that could have been chosen too.
    """
    chosen = {wanted.name: wanted.source for wanted in select(a, choice)}
    return chosen, {name for name in b.names if name in chosen or choice.wants(name)}


def diff_checkpoints(
    a: Path | str | Catalog,
    b: Path | str | Catalog,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Renames = (),
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress | None = None,
) -> Iterator[Difference]:
    """Yield every tensor that differs, by name; tensors of the first are chosen as by `merge`.

    Without tolerances, bits are compared: equal NaNs are the same, 0 and -0 are not. With any,
    numbers are: ``|x - y| <= atol + rtol * |y|`` in float64, of which ``x - y`` is exact for whole
    numbers; NaN is the same as any NaN, an infinity only as itself. Floating point numbers of two
    dtypes are then compared too. `progress` is told of the bytes of the first.
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not (isfinite(value) and value >= 0):
            raise CheckpointError(f"{name} {value!r} is not a tolerance; give a number from 0")
    left, right = as_catalog(a), as_catalog(b)
    old, others = names_to_compare(left, right, Choice(include, exclude, rename))
    total, done = sum(_num_bytes(left.outline(name)) for name in old.values()), 0

    def told(num_bytes: int) -> None:
        if progress is not None:
            progress(done + num_bytes, total)

    buffers = Buffers()
    with OpenFiles() as files:
        for name in sorted(old.keys() | others):
            if name not in old:
                yield Difference(name, f"is only in {right.directory}")
                continue
            x = left.tensor(old[name])
            if name not in others:
                yield Difference(name, f"is only in {left.directory}")
            else:
                found = _difference(x, right.tensor(name), atol, rtol, files, buffers, told)
                if found is not None:
                    yield replace(found, name=name)
            # A tensor that differs is left at its first difference.
            done += _num_bytes(x)
            told(0)
    left.check_unchanged()
    right.check_unchanged()


def _num_bytes(tensor: Outline[FileBox]) -> int:
    return prod(tensor.shape) * item_bytes(tensor.dtype)


def _difference(
    x: StoredTensor,
    y: StoredTensor,
    atol: float,
    rtol: float,
    files: OpenFiles,
    buffers: Buffers,
    told: Callable[[int], None],
) -> Difference | None:
    """Return what differs, of elements the first; `told` hears how many bytes were compared."""
    if x.shape != y.shape:
        shapes = f"{list(x.shape)} in the first, {list(y.shape)} in the second"
        return Difference(x.name, f"has shape {shapes}")
    if not _comparable(x.dtype, y.dtype, atol, rtol):
        return Difference(x.name, f"is {x.dtype} in the first, {y.dtype} in the second")
    check_tiling(x)
    check_tiling(y)
    compared = 0
    sizes = item_bytes(x.dtype), item_bytes(y.dtype)
    rooms = np.empty(BLOCK_BYTES, np.uint8), np.empty(BLOCK_BYTES, np.uint8)
    whole = tuple((0, size) for size in x.shape)
    for box in chunks(whole, BLOCK_BYTES // max(sizes)):
        one, other = (room[: box_size(box) * size] for room, size in zip(rooms, sizes, strict=True))
        read_box_into(x, box, one.data, files, buffers)
        read_box_into(y, box, other.data, files, buffers)
        compared += one.size
        told(compared)
        if x.dtype == y.dtype and np.array_equal(one, other):
            continue
        differs = np.ones(box_size(box), np.bool_)
        if x.dtype == y.dtype:
            differs = (one != other).reshape(-1, sizes[0]).any(1)
        if atol or rtol:
            differs &= ~_close(numbers(one, x.dtype), numbers(other, y.dtype), atol, rtol)
        if differs.any():
            place = int(differs.argmax())
            index = element_index(box, place)
            values = _values((one, x.dtype), (other, y.dtype), place)
            ranks = _holders(x, index), _holders(y, index)
            text = f"differs first at index {list(index)}: {values[0]} in the first "
            text += f"({_who(ranks[0])}), {values[1]} in the second ({_who(ranks[1])})"
            return Difference(x.name, text, index, ranks)
    return None


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ids_text(ranks)}"


def _values(one: tuple[Bytes, str], other: tuple[Bytes, str], place: int) -> list[str]:
    """Write an element of both; with its bits, where the numbers look alike."""
    texts = [repr(numbers(raw, dtype)[place].item()) for raw, dtype in (one, other)]
    if texts[0] == texts[1]:
        for at, (raw, dtype) in enumerate((one, other)):
            size = item_bytes(dtype)
            bits = raw[place * size :][:size].tobytes()[::-1].hex()
            texts[at] += f" of bits 0x{bits}"
    return texts


def _comparable(x: str, y: str, atol: float, rtol: float) -> bool:
    """Whether numbers of two dtypes can be compared: real ones, as near as is asked for."""
    return x == y or (
        bool(atol or rtol)
        and all(
            is_floating(dtype) and not dtype.startswith("complex") and packed(dtype) == 1
            for dtype in (x, y)
        )
    )


def _holders(tensor: StoredTensor, index: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose boxes hold an element."""
    found = {
        stored.rank
        for stored in tensor.boxes
        if all(lo <= at < hi for at, (lo, hi) in zip(index, stored.box, strict=True))
    }
    return tuple(sorted(found))


def _close(x: NDArray[Any], y: NDArray[Any], atol: float, rtol: float) -> NDArray[np.bool_]:
    if x.dtype.kind in "iu":
        # In float64, 2**53 and the number after it are one. Without signs, what wraps wraps back.
        one, other = x.astype(np.uint64), y.astype(np.uint64)
        apart = np.where(x > y, one - other, other - one)
        close: NDArray[np.bool_] = apart <= atol + rtol * np.abs(y.astype(np.float64))
        return close
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    return np.isclose(x.astype(wide), y.astype(wide), rtol=rtol, atol=atol, equal_nan=True)

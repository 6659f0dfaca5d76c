"""Do stored boxes make up a whole tensor? Checked before anything is written."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Final, Generic, NamedTuple, TypeVar

from shardspec.boxes import Box, contains
from shardspec.checkpoint.catalog import FileBox, Outline, box_text
from shardspec.errors import CheckpointError

__all__ = [
    "Hole",
    "MemoizedByBoxes",
    "Overlap",
    "check_tiling",
    "find_flaw",
]

_Box = TypeVar("_Box", bound=FileBox)
_Found = TypeVar("_Found")


_MOST_KNOWN: Final = 64
"""Outlines whose boxes are remembered: a model has few kinds of tensors."""


class Hole(NamedTuple):
    """A part of the tensor that no box covers."""

    box: Box


class Overlap(NamedTuple):
    """Two boxes, by their places in the sequence, that share some element."""

    first: int
    second: int


def find_flaw(shape: Sequence[int], boxes: Sequence[Box]) -> Hole | Overlap | None:
    """Return the first reason why boxes, none of them empty, do not tile a tensor, if there is one.

    A sweep along the first dim; between two cuts the same boxes are met all the way, and there
    the remaining dims are swept in turn. A grid of n boxes takes O(n log n) a dim.

    Examples
    --------
    >>> find_flaw((4, 2), [((0, 4), (0, 1)), ((0, 3), (1, 2))])
    Hole(box=((3, 4), (1, 2)))
    >>> find_flaw((3,), [((0, 2),), ((1, 3),)])
    Overlap(first=0, second=1)
    """
    if 0 in shape:
        return None
    return _sweep(shape, boxes, range(len(boxes)), ())


def _sweep(
    shape: Sequence[int], boxes: Sequence[Box], met: Sequence[int], prefix: Box
) -> Hole | Overlap | None:
    """Check the part of the tensor that lies in `prefix`, where all boxes of `met` reach."""
    dim = len(prefix)
    if not met:
        return Hole((*prefix, *((0, size) for size in shape[dim:])))
    if dim == len(shape):
        return Overlap(met[0], met[1]) if len(met) > 1 else None
    starts: dict[int, list[int]] = {}
    cuts = {0, shape[dim]}
    for place in met:
        lo, hi = boxes[place][dim]
        starts.setdefault(lo, []).append(place)
        cuts.update((lo, hi))
    ordered = sorted(cuts)
    active: list[int] = []
    for lo, hi in pairwise(ordered):
        active = [place for place in active if boxes[place][dim][1] > lo] + starts.get(lo, [])
        flaw = _sweep(shape, boxes, active, (*prefix, (lo, hi)))
        if flaw is not None:
            return flaw
    return None


def check_tiling(
    tensor: Outline[_Box], tiled: set[object] | None = None
) -> tuple[tuple[_Box, ...], ...]:
    """Check that the boxes of a tensor tile it, once for every addend that is pending.

    Returns groups of two or more boxes that claim the same part: their bytes must agree. Shapes
    with boxes that tile them are added to `tiled`, so that tensors sharded alike are checked once.
    """
    same: dict[tuple[tuple[int, ...], Box], list[_Box]] = {}
    for stored in tensor.boxes:
        same.setdefault((stored.addend, stored.box), []).append(stored)
    whole = tuple((0, size) for size in tensor.shape)
    by_addend: dict[tuple[int, ...], list[_Box]] = {
        addend: [] for addend in product(*(range(p.addends) for p in tensor.pending))
    }
    for (addend, box), (first, *_) in same.items():
        if len(box) != len(whole) or not contains(whole, box) or any(lo >= hi for lo, hi in box):
            raise CheckpointError(
                f"{_where(tensor, first)} is empty or lies outside the tensor of shape "
                f"{list(tensor.shape)}"
            )
        if addend not in by_addend:
            raise CheckpointError(
                f"{_where(tensor, first)} is addend {list(addend)} of a pending reduction of "
                f"{[p.addends for p in tensor.pending]} addends"
            )
        by_addend[addend].append(first)
    tiled = set() if tiled is None else tiled
    for addend, group in by_addend.items():
        boxes = tuple(stored.box for stored in group)
        if (tensor.shape, boxes) in tiled:
            continue
        match find_flaw(tensor.shape, boxes):
            case Hole(box):
                of = f" of addend {list(addend)}" if addend else ""
                raise CheckpointError(
                    f"tensor {tensor.name!r} of shape {list(tensor.shape)}: no file holds its "
                    f"part {box_text(box)}{of}; restore the missing file or save again"
                )
            case Overlap(i, j):
                a, b = group[i], group[j]
                raise CheckpointError(
                    f"tensor {tensor.name!r}: rank {a.rank}'s box {box_text(a.box)} in {a.path} "
                    f"and rank {b.rank}'s box {box_text(b.box)} in {b.path} overlap in part, "
                    "which no layout gives; the checkpoint contradicts itself"
                )
            case None:
                tiled.add((tensor.shape, boxes))
    return tuple(tuple(group) for group in same.values() if len(group) > 1)


class MemoizedByBoxes(Generic[_Found]):
    """What follows from the boxes of outlines, found once for tensors that have them in common."""

    def __init__(self, find: Callable[[Outline[FileBox]], _Found]) -> None:
        self._find = find
        self._known: dict[int, tuple[Outline[FileBox], _Found]] = {}
        """By the id of the boxes, which live as long as the outline is here."""

    def __call__(self, outline: Outline[FileBox]) -> _Found:
        """Return what was found for these boxes; raises what `find` does."""
        known = self._known.get(id(outline.boxes))
        if known is not None:
            like, found = known
            if (like.shape, like.pending) == (outline.shape, outline.pending):
                return found
        found = self._find(outline)
        if len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[id(outline.boxes)] = outline, found
        return found


def _where(tensor: Outline[_Box], stored: _Box) -> str:
    box = box_text(stored.box)
    return f"tensor {tensor.name!r}: rank {stored.rank}'s box {box} in {stored.path}"

"""Whether stored boxes make up a whole tensor, and those of one part agree."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Final, Generic, NamedTuple, TypeVar

from shardspec.boxes import Box, box_size, chunks, contains
from shardspec.checkpoint.catalog import (
    FileBox,
    Outline,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    box_text,
    whole_box,
)
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, read_box_into
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

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
    same: dict[ReplicaKey, list[_Box]] = {}
    for stored in tensor.boxes:
        same.setdefault((stored.box, stored.addend), []).append(stored)
    whole = whole_box(tensor.shape)
    by_addend: dict[tuple[int, ...], list[_Box]] = {
        addend: [] for addend in product(*(range(p.addends) for p in tensor.pending))
    }
    for (box, addend), (first, *_) in same.items():
        problem = ""
        if len(box) != len(whole) or not contains(whole, box) or any(lo >= hi for lo, hi in box):
            problem = f"is empty or lies outside the tensor of shape {list(tensor.shape)}"
        elif addend not in by_addend:
            counts = [p.addends for p in tensor.pending]
            problem = f"is addend {list(addend)} of a pending reduction of {counts} addends"
        if problem:
            raise CheckpointError(
                f"tensor {tensor.name!r}: rank {first.rank}'s box {box_text(box)} in {first.path} "
                f"{problem}"
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
        self._known: dict[tuple[object, ...], tuple[Outline[FileBox], _Found]] = {}
        """The outlines keep alive the boxes of which the keys have the ids."""

    def __call__(self, outline: Outline[FileBox]) -> _Found:
        """Return what was found for these boxes; raises what `find` does."""
        key = id(outline.boxes), outline.shape, outline.pending
        if key not in self._known:
            found = self._find(outline)
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = outline, found
        return self._known[key][1]


def element_index(box: Box, element: int) -> tuple[int, ...]:
    """Return where in the global tensor an element of a box lies."""
    index: list[int] = []
    for lo, hi in reversed(box):
        element, at = divmod(element, hi - lo)
        index.insert(0, lo + at)
    return tuple(index)


def check_replicas(
    tensor: StoredTensor,
    group: Sequence[StoredBox],
    files: OpenFiles,
    *,
    trust_digests: bool = False,
) -> None:
    """Compare the elements of boxes that claim the same part of a tensor, bit by bit.

    With `trust_digests`, those whose digests are equal are equal, without being read.
    """
    first, *others = group
    size = item_bytes(tensor.dtype)
    buffers = Buffers()
    rooms = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
    for other in others:
        if trust_digests and _same_digest(first, other, box_size(first.box) * size):
            continue
        # Each by itself, wherever its elements lie in its file.
        alone = [
            replace(tensor, pending=(), boxes=(replace(b, addend=()),)) for b in (first, other)
        ]
        for block in chunks(first.box, BLOCK_BYTES // size):
            a, b = (room[: box_size(block) * size] for room in rooms)
            read_box_into(alone[0], block, a, files, buffers)
            read_box_into(alone[1], block, b, files, buffers)
            if a.tobytes() != b.tobytes():
                at = next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                index = list(element_index(block, at // size))
                remedy = "keep the right one of the two"
                if len(tensor.shape) == 1 and first.path.suffix == ".distcp":
                    remedy += (
                        "; but if ranks have saved flat parts of their own under one name, as "
                        "FSDP1's local optimizer states are, keep all, and save them in a run of "
                        "as many ranks with FSDP.optim_state_dict"
                    )
                raise CheckpointError(
                    f"tensor {tensor.name!r}: ranks {first.rank} and {other.rank} claim different "
                    f"data for box {box_text(first.box)}, first at index {index}, in {first.path} "
                    f"and {other.path}; {remedy}"
                )


def _same_digest(a: StoredBox, b: StoredBox, num_bytes: int) -> bool:
    """Return whether both have a digest of just their bytes, in the same order, and it is equal."""
    if a.digest is None or b.digest is None or a.strides != b.strides:
        return False
    whole = a.digest.num_bytes == b.digest.num_bytes == num_bytes
    return whole and a.digest.crc32 == b.digest.crc32

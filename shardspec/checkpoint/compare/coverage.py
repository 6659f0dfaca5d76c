"""Checks that boxes cover each tensor exactly once, and that replicas have the same bytes."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Final, TypeAlias, TypeVar

from shardspec.boxes import Box, box_size, chunks, contains
from shardspec.checkpoint.catalog import (
    ZEROS,
    AnyBox,
    AnyOutline,
    Catalog,
    Computed,
    Outline,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    box_text,
    distinct,
    whole_box,
)
from shardspec.checkpoint.convert.copy import Buffers, read_box_into
from shardspec.checkpoint.storage.checksums import BLOCK_BYTES
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

_MOST_KINDS: Final = 64
"""Number of cached results; a model has few kinds of tensors."""
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")

_Result = TypeVar("_Result")
_Place: TypeAlias = tuple[StoragePath, Computed | None]
"""A file, and the tensor computed from it, if any."""
Flaw: TypeAlias = tuple[Box, tuple[int, ...]]
"""A region of a tensor, and the indices of the boxes that cover it: no box, or several."""


@lru_cache(_MOST_KINDS)
def find_flaw(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Flaw | None:
    """Return the first region of a tensor that boxes do not cover exactly once; None if they tile.

    Boxes must not be empty. n boxes take O(n log n) per dim.

    >>> find_flaw((4, 2), (((0, 3), (0, 2)),))
    (((3, 4), (0, 2)), ())
    """

    def sweep(met: Sequence[int], prefix: Box) -> Flaw | None:
        """Return the first part of a region that boxes do not cover exactly once; None without one.

        The region has the intervals `prefix` in the first dims, and all indices in the others.
        `met` has the indices of the boxes that contain `prefix` in the first dims.
        """
        dim = len(prefix)
        if not met or dim == len(shape):
            rest = ((0, size) for size in shape[dim:])
            return None if len(met) == 1 else ((*prefix, *rest), tuple(met))
        starts: dict[int, list[int]] = {}
        cuts = {0, shape[dim]}
        for place in met:
            lo, hi = boxes[place][dim]
            starts.setdefault(lo, []).append(place)
            cuts.update((lo, hi))
        active: list[int] = []
        for lo, hi in pairwise(sorted(cuts)):
            active = [place for place in active if boxes[place][dim][1] > lo] + starts.get(lo, [])
            flaw = sweep(active, (*prefix, (lo, hi)))
            if flaw is not None:
                return flaw
        return None

    return None if 0 in shape else sweep(range(len(boxes)), ())


def check_tiling(tensor: Outline[AnyBox]) -> tuple[tuple[AnyBox, ...], ...]:
    """Check that the boxes of a tensor tile it, once for every addend of a pending reduction.

    Returns groups of two or more replicas, whose bytes must be equal.

    >>> check_tiling(Outline("w", (4,), "int8", None, (), ()))
    Traceback (most recent call last):
    shardspec.errors.CheckpointError: tensor 'w' of shape [4]: no file contains box [0:4]; \
restore the missing file or save again
    """
    full = whole_box(tensor.shape)
    alone = [(stored.box, stored.addend) for stored in tensor.boxes] == [(full, ())]
    if alone and not tensor.pending and 0 not in tensor.shape:
        return ()  # a tenth of the time of the checks below
    same: dict[ReplicaKey, list[AnyBox]] = {}
    for stored in tensor.boxes:
        same.setdefault((stored.box, stored.addend), []).append(stored)
    addends = [pending.addends for pending in tensor.pending]
    by_addend: dict[tuple[int, ...], list[AnyBox]] = {
        addend: [] for addend in product(*map(range, addends))
    }

    def text(stored: AnyBox) -> str:
        return f"rank {stored.rank}'s box {box_text(stored.box)} in {stored.path}"

    for (box, addend), (first, *_) in same.items():
        if len(box) != len(full) or not contains(full, box) or any(lo >= hi for lo, hi in box):
            raise CheckpointError(
                f"tensor {tensor.name!r}: {text(first)} is empty or outside the tensor of shape "
                f"{list(tensor.shape)}"
            )
        if addend not in by_addend:
            raise CheckpointError(
                f"tensor {tensor.name!r}: {text(first)} is addend {list(addend)} of a pending "
                f"reduction of {addends} addends"
            )
        by_addend[addend].append(first)
    for addend, group in by_addend.items():
        flaw = find_flaw(tensor.shape, tuple(stored.box for stored in group))
        if flaw is None:
            continue
        part, places = flaw
        if not places:
            of = f" of addend {list(addend)}" if addend else ""
            raise CheckpointError(
                f"tensor {tensor.name!r} of shape {list(tensor.shape)}: no file contains box "
                f"{box_text(part)}{of}; restore the missing file or save again"
            )
        one_box, other_box = (text(group[place]) for place in places[:2])
        raise CheckpointError(
            f"tensor {tensor.name!r}: {one_box} and {other_box} partially overlap; the checkpoint "
            "is inconsistent, save it again"
        )
    return tuple(tuple(group) for group in same.values() if len(group) > 1)


def memoize_by_boxes(
    find: Callable[[AnyOutline], _Result],
) -> Callable[[AnyOutline], _Result]:
    """Return `find` with a cache; outlines that share a tuple of boxes share the result."""
    # Keys contain ids of tuples, which the outlines keep alive.
    results: dict[tuple[object, ...], tuple[AnyOutline, _Result]] = {}

    def memoized(outline: AnyOutline) -> _Result:
        key = id(outline.boxes), outline.shape, outline.pending
        if key not in results:
            results[key] = outline, find(outline)
            if len(results) > _MOST_KINDS:
                del results[next(iter(results))]
        return results[key][1]

    return memoized


# --- the same box of two tensors


def element_index(box: Box, element: int) -> tuple[int, ...]:
    """Return the global index of an element of a box.

    >>> element_index(((2, 4), (1, 4)), 5)
    (3, 3)
    """
    index: list[int] = []
    for lo, hi in reversed(box):
        element, at = divmod(element, hi - lo)
        index.insert(0, lo + at)
    return tuple(index)


def read_both(
    a: StoredTensor, b: StoredTensor, box: Box, files: OpenFiles
) -> Iterator[tuple[Box, memoryview, memoryview]]:
    """Yield (block of a box, its bytes in `a`, in `b`); the next block reuses the memory."""
    buffers, most = Buffers(), max(item_bytes(a.dtype), item_bytes(b.dtype))
    rooms = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
    for block in chunks(box, BLOCK_BYTES // most):
        blocks = []
        for tensor, room in zip((a, b), rooms, strict=True):
            blocks.append(room[: box_size(block) * item_bytes(tensor.dtype)])
            read_box_into(tensor, block, blocks[-1], files, buffers)
        yield block, blocks[0], blocks[1]


def check_replicas(
    tensor: StoredTensor,
    group: Sequence[StoredBox],
    files: OpenFiles,
    *,
    trust_digests: bool = False,
) -> None:
    """Compare the replicas of one box of a tensor bit by bit.

    With `trust_digests`, boxes with equal digests count as equal and are not read.
    """
    # One tensor for each replica, whatever its strides.
    by_itself = replace(tensor, pending=())
    alone = [replace(by_itself, boxes=(replace(box, addend=()),)) for box in group]
    first = group[0]
    for other, of_other in zip(group[1:], alone[1:], strict=True):
        if trust_digests and _same_digest(first, other, tensor.bytes_of(first)):
            continue
        for block, a, b in read_both(alone[0], of_other, first.box, files):
            if a.tobytes() == b.tobytes():
                continue
            at = next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            index = element_index(block, at // item_bytes(tensor.dtype))
            remedy = "keep the right one of the two"
            if first.path.suffix in _TORCH_SUFFIXES and first.box == whole_box(tensor.shape):
                remedy += (
                    " if they should be equal, as plain tensors are on all ranks; if each rank has "
                    "a part, save it as a DTensor, and what is its own under a name for each rank"
                )
            elif len(tensor.shape) == 1 and first.path.suffix == ".distcp":
                remedy += (
                    "; but if ranks have saved flat parts of their own under one name, as FSDP1's "
                    "local optimizer states are, keep all, and save them in a run of as many ranks "
                    "with FSDP.optim_state_dict"
                )
            raise CheckpointError(
                f"tensor {tensor.name!r}: ranks {first.rank} and {other.rank} claim different data "
                f"for box {box_text(first.box)}, first at index {list(index)}, in "
                f"{first.path} and {other.path}; {remedy}"
            )


def _same_digest(a: StoredBox, b: StoredBox, num_bytes: int) -> bool:
    """Return True if both boxes have equal digests of exactly `num_bytes` row-major bytes."""
    if a.digest is None or b.digest is None or a.strides != b.strides:
        return False
    covers_all = a.digest.num_bytes == b.digest.num_bytes == num_bytes
    return covers_all and a.digest.crc32 == b.digest.crc32


# --- all tensors of an output


def check_tensors(source: Catalog, names: Iterable[str], verify: bool) -> Counter[StoragePath]:
    """Check that boxes tile every tensor and replicas agree; count the bytes to read per file.

    With `verify`, replicas with equal digests are not compared, since digests are checked later.
    """
    copies_of = memoize_by_boxes(check_tiling)
    elements_of = memoize_by_boxes(_elements_by_file)
    # Tensors with the same layout share one count.
    counts: dict[int, Counter[_Place]] = {}
    widths: Counter[int] = Counter()
    with OpenFiles() as files:
        for name in sorted({*names}):
            outline = source.outline(name)
            if copies_of(outline) and not (verify and source.copies_agree(name)):
                tensor = source.tensor(name)
                for group in check_tiling(tensor):
                    check_replicas(tensor, group, files, trust_digests=verify)
            elements = elements_of(outline)
            counts[id(elements)] = elements
            widths[id(elements)] += item_bytes(outline.dtype)
    reads: Counter[StoragePath] = Counter()
    made: dict[int, Mapping[StoragePath, int]] = {}
    """Reads by id. Codes and scales that are computed from the same bytes share one entry."""
    for key, elements in counts.items():
        for (path, computed), size in elements.items():
            if computed is None:
                reads[path] += size * widths[key]
            else:
                made[id(computed.reads)] = computed.reads
    for files_read in made.values():
        reads.update(files_read)
    return reads


def _elements_by_file(outline: AnyOutline) -> Counter[_Place]:
    sizes: Counter[_Place] = Counter()
    for stored in distinct(outline):
        computed = stored.computed if isinstance(stored, StoredBox) else None
        if stored.path != ZEROS:
            sizes[stored.path, computed] += box_size(stored.box)
    return sizes

"""A copy plan, as plain values: the files to write, and which boxes of which tensors they hold.

A format says where everything goes. How the bytes get there, are checked and committed is the same
for all of them. Below a box everything counts bytes: its last dim is its length times the item
size, so that no later step needs to know a dtype.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple, Protocol, overload

from shardspec.boxes import Box, box_shape, box_size, intersect
from shardspec.checkpoint.catalog import (
    ReplicaKey,
    StoredBox,
    StoredTensor,
    distinct,
    replica_holders,
)
from shardspec.checkpoint.sharding_info import BoxEntry
from shardspec.checkpoint.source_files import FileStretch
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

__all__ = [
    "BLOCK_BYTES",
    "Block",
    "Copy",
    "Extent",
    "MadeBytes",
    "OutputFile",
    "OutputTensor",
    "Place",
    "RawBytes",
    "Run",
    "Target",
    "Trailer",
    "assign_boxes",
    "byte_box",
    "copies_by_file",
    "copies_by_tensor",
    "copies_of",
    "offset_in",
    "pieces",
    "share_of",
    "stretches",
]

BLOCK_BYTES: Final = 1 << 20
"""Most bytes that are copied at once: they fit the L2 cache of common CPUs."""
_COPY_BYTES: Final = 64 << 20
"""Most bytes of a copy, so that threads have their shares of a tensor that is larger."""


class OutputTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    """Its name in the output."""
    source: str
    """Its name in the checkpoint that is read."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype in the output."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return box_size(tuple((0, size) for size in self.shape)) * item_bytes(self.dtype)


class Extent(NamedTuple):
    """Room in a file for a box of a tensor, row-major."""

    tensor: OutputTensor
    box: Box
    offset: int
    """Position of the first byte in the file."""

    @property
    def whole(self) -> bool:
        """Whether the box is all of the tensor."""
        return self.box == tuple((0, size) for size in self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return box_size(self.box) * item_bytes(self.tensor.dtype)


class RawBytes(NamedTuple):
    """Bytes that are no tensor's, such as a header."""

    offset: int
    data: bytes


class MadeBytes(Sequence[RawBytes]):
    """Raw bytes that are made each time that they are asked for, as there are many.

    Parameters
    ----------
    count
        How many there are.
    make
        Given a number from 0, returns them.
    """

    def __init__(self, count: int, make: Callable[[int], RawBytes]) -> None:
        self._numbers = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> RawBytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[RawBytes]: ...
    def __getitem__(self, place: int | slice) -> RawBytes | list[RawBytes]:
        """Return one, or some."""
        found = self._numbers[place]
        return self._make(found) if isinstance(found, int) else list(map(self._make, found))


class Trailer(Protocol):
    """Makes the pieces of a file that depend on the CRC-32 of its extents."""

    def __call__(self, crcs: Sequence[int], first: int = 0) -> Sequence[RawBytes]:
        """Return what follows the extents from number `first` on, in ascending order.

        Given the CRC-32 of the first extents of a file, not of all, it is what follows these: so a
        file can be written from its start to its end.
        """
        ...


class OutputFile(NamedTuple):
    """A file to be written."""

    name: str
    """A plain name; that of the output itself if it is a file."""
    num_bytes: int
    raw: Sequence[RawBytes]
    """In ascending order."""
    extents: tuple[Extent, ...]
    """In ascending order."""
    trailer: Trailer | None = None

    @property
    def other_bytes(self) -> int:
        """Bytes that are no tensor's."""
        return self.num_bytes - sum(extent.num_bytes for extent in self.extents)

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> "OutputFile":
        """Return a file that holds no tensor."""
        return cls(name, len(data), (RawBytes(0, data),), ())


class Target(NamedTuple):
    """A whole output: one file, or a directory of files."""

    files: tuple[OutputFile, ...]
    directory: bool
    last: Callable[[Mapping[str, Sequence[int]]], Sequence[tuple[str, bytes]]] | None = None
    """Makes, from the CRC-32 of every extent by file, the small files that say what is in it."""
    digested: bool = False
    """Whether the form needs the CRC-32 of every extent."""
    carried: frozenset[str] = frozenset()
    """Names, in the source, of the values that are no tensors and go along."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.num_bytes for file in self.files)


class Copy(NamedTuple):
    """One entry of a plan: a box of a tensor goes to a place in a file."""

    file: int
    """Number of the file in the target."""
    extent: int
    """Number of the extent in the file."""
    box: Box
    """The part of the extent's box that is copied, of which it is one stretch."""
    offset: int
    """Position of its first byte in the file."""
    part: int
    """Which of the parts of the extent it is,"""
    parts: int
    """and of how many."""


def copies_by_tensor(target: Target) -> list[list[tuple[int, int]]]:
    """Return file and number of the extents of every tensor, so that each is read once."""
    found: dict[str, list[tuple[int, int]]] = {}
    for place, file in enumerate(target.files):
        for number, extent in enumerate(file.extents):
            found.setdefault(extent.tensor.source, []).append((place, number))
    return list(found.values())


def copies_by_file(target: Target) -> list[list[tuple[int, int]]]:
    """Return the extents of every file that has any, in its order."""
    groups = [[(p, n) for n in range(len(f.extents))] for p, f in enumerate(target.files)]
    return list(filter(None, groups))


def copies_of(target: Target, place: int, number: int) -> list[Copy]:
    """Return the copies that fill an extent; more than one if it is long.

    Examples
    --------
    >>> tensor = OutputTensor("w", "w", (100, 1 << 20), "int8")
    >>> extent = Extent(tensor, ((0, 100), (0, 1 << 20)), 8)
    >>> target = Target((OutputFile("a", 8, (), (extent,)),), directory=False)
    >>> [(copy.box[0], copy.offset) for copy in copies_of(target, 0, 0)]
    [((0, 64), 8), ((64, 100), 67108872)]
    """
    extent = target.files[place].extents[number]
    box, size = extent.box, extent.num_bytes
    rows = box[0][1] - box[0][0] if box else 0
    step = max(1, _COPY_BYTES * rows // size) if size > _COPY_BYTES else rows
    if step >= rows:
        return [Copy(place, number, box, extent.offset, 0, 1)]
    starts = range(box[0][0], box[0][1], step)
    return [
        Copy(
            place,
            number,
            ((lo, min(lo + step, box[0][1])), *box[1:]),
            extent.offset + (lo - box[0][0]) * (size // rows),
            part,
            len(starts),
        )
        for part, lo in enumerate(starts)
    ]


def share_of(
    target: Target, groups: Sequence[list[tuple[int, int]]], rank: int, size: int
) -> list[list[tuple[int, int]]]:
    """Return the groups of extents that one of several processes copies: as many bytes as others.

    Each group goes, in order, to the process in whose share of all bytes its middle lies.
    """
    sizes = [sum(target.files[p].extents[n].num_bytes for p, n in group) for group in groups]
    total, before, mine = max(1, sum(sizes)), 0, []
    for group, num_bytes in zip(groups, sizes, strict=True):
        if min(size - 1, (2 * before + num_bytes) * size // (2 * total)) == rank:
            mine.append(group)
        before += num_bytes
    return mine


def assign_boxes(
    mesh: DeviceMesh, tensors: Mapping[str, Layout], *, spread: bool = True
) -> dict[int, list[BoxEntry]]:
    """Choose one of the devices that hold a box to store it, for every box that is not empty.

    Every rank computes the same answer alone: boxes of one holder first, then the others from the
    largest down, each to the holder that has the fewest bytes so far (the first of equals). If
    they are not to be `spread`, each box goes to the first of its holders.

    Returns
    -------
    dict
        For every device of the mesh its boxes, by tensor name.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> chosen = assign_boxes(mesh, {name: Layout(mesh, "[R]", (3,), "int8") for name in "abc"})
    >>> [[entry.tensor for entry in chosen[rank]] for rank in mesh.ids]
    [['a', 'c'], ['b']]
    """
    parts_of: dict[Layout, dict[ReplicaKey, tuple[int, ...]]] = {}
    chosen: dict[int, list[BoxEntry]] = {rank: [] for rank in mesh.ids}
    load = dict.fromkeys(mesh.ids, 0)
    shared: list[tuple[int, BoxEntry, tuple[int, ...]]] = []
    for name in sorted(tensors):
        layout = tensors[name]
        if layout not in parts_of:
            parts_of[layout] = replica_holders(layout)
        for (box, addend), ranks in parts_of[layout].items():
            num_bytes = box_size(box) * item_bytes(layout.dtype)
            entry = BoxEntry(name, box, addend)
            if len(ranks) > 1 and spread:
                shared.append((num_bytes, entry, ranks))
            else:
                chosen[ranks[0]].append(entry)
                load[ranks[0]] += num_bytes
    # A stable sort: boxes of equal size keep their order, by name and then by holder.
    for num_bytes, entry, ranks in sorted(shared, key=lambda item: -item[0]):
        rank = min(ranks, key=load.__getitem__)
        chosen[rank].append(entry)
        load[rank] += num_bytes
    for entries in chosen.values():
        entries.sort(key=lambda entry: entry.tensor)
    return chosen


class Place(NamedTuple):
    """A stored box by the bytes it covers."""

    box: Box
    """The box in bytes, as `byte_box` gives it."""
    stored: StoredBox


class Run(NamedTuple):
    """Bytes that are contiguous both in a file and in the target."""

    source: StoredBox
    source_offset: int
    """Position of the first byte in the file."""
    target_offset: int
    """Position of the first byte in the target."""
    num_bytes: int


class Block(NamedTuple):
    """A stretch of the target that has to be gathered from several places."""

    box: Box
    """Which part it is, in bytes."""
    sources: tuple[Place, ...]
    """What holds some of it."""
    target_offset: int
    num_bytes: int


def byte_box(box: Box, item_bytes: int) -> Box:
    """Return a box with its last dim in bytes; that of a scalar gets the one dim.

    Examples
    --------
    >>> byte_box(((0, 2), (3, 7)), 4), byte_box((), 4)
    (((0, 2), (12, 28)), ((0, 4),))
    """
    if not box:
        return ((0, item_bytes),)
    *outer, (lo, hi) = box
    return (*outer, (lo * item_bytes, hi * item_bytes))


def offset_in(outer: Box, corner: Sequence[int]) -> int:
    """Return how many bytes precede a position in a row-major box.

    Examples
    --------
    >>> offset_in(((0, 2), (4, 10)), (1, 6))
    8
    """
    offset = 0
    for (lo, hi), at in zip(outer, corner, strict=True):
        offset = offset * (hi - lo) + at - lo
    return offset


def pieces(
    target: Box, places: Sequence[Place], block_bytes: int, *, runs: bool = True
) -> Iterator[Run | Block]:
    """Cut a target box into pieces that can be moved one after the other.

    Parameters
    ----------
    target
        The box wanted, in bytes.
    places
        Stored boxes that together cover it.
    block_bytes
        Most bytes of a `Block`; a multiple of every item size.
    runs
        Whether a `Run` may be used; without, everything comes as blocks (for sums).

    Yields
    ------
    Run or Block
        Pieces that cover the target once, in ascending order.

    Examples
    --------
    >>> def place(box):
    ...     return Place(box, StoredBox(box, (), 0, None, 100))
    >>> rows = [place(((0, 1), (0, 6))), place(((1, 2), (0, 6)))]
    >>> [(p.source_offset, p.target_offset, p.num_bytes) for p in pieces(((0, 2), (0, 6)), rows, 8)]
    [(100, 0, 6), (100, 6, 6)]
    >>> columns = [place(((0, 2), (0, 3))), place(((0, 2), (3, 6)))]
    >>> [(p.box, p.num_bytes) for p in pieces(((0, 2), (0, 6)), columns, 16)]
    [(((0, 2), (0, 6)), 12)]
    """
    if not box_size(target):
        return
    met = [place for place in places if intersect(place.box, target) is not None]
    yield from _cut(target, met, (), block_bytes, runs)


def _cut(
    target: Box, met: Sequence[Place], prefix: Box, block_bytes: int, runs: bool
) -> Iterator[Run | Block]:
    """Cut the part of the target in `prefix` (one index a dim), which all of `met` reach."""
    dim = len(prefix)
    inner = target[dim + 1 :]
    row_bytes = prod(box_shape(inner))
    low, high = target[dim]
    cuts = {low, high}
    starts: dict[int, list[Place]] = {}
    for place in met:
        lo, hi = max(place.box[dim][0], low), min(place.box[dim][1], high)
        starts.setdefault(lo, []).append(place)
        cuts.update((lo, hi))
    active: list[Place] = []
    for lo, hi in pairwise(sorted(cuts)):
        active = [place for place in active if place.box[dim][1] > lo] + starts.get(lo, [])
        alone = active[0] if runs and len(active) == 1 else None
        if alone and alone.stored.strides is None and alone.box[dim + 1 :] == inner:
            corner = [side[0] for side in (*prefix, (lo, hi), *inner)]
            yield Run(
                alone.stored,
                alone.stored.offset + offset_in(alone.box, corner),
                offset_in(target, corner),
                (hi - lo) * row_bytes,
            )
        elif row_bytes <= block_bytes:
            step = block_bytes // row_bytes
            for at in range(lo, hi, step):
                box = (*prefix, (at, min(at + step, hi)), *inner)
                first = offset_in(target, [side[0] for side in box])
                yield Block(box, tuple(active), first, box_size(box))
        else:
            for at in range(lo, hi):
                yield from _cut(target, active, (*prefix, (at, at + 1)), block_bytes, runs)


def stretches(tensor: StoredTensor, target: Box) -> Iterator[FileStretch]:
    """Return what will be read to put one box of a tensor together, in that order.

    Addends of a pending reduction are left out, and so is what does not lie in a file as one
    stretch.

    Examples
    --------
    >>> from pathlib import Path
    >>> boxes = tuple(
    ...     StoredBox(((0, 4), (c, c + 3)), (), c, Path(f"{c}"), 64) for c in (0, 3)
    ... )
    >>> tensor = StoredTensor("w", (4, 6), "int8", None, (), boxes)
    >>> [(str(s.path), s.start, s.num_bytes) for s in stretches(tensor, ((1, 3), (0, 6)))]
    [('0', 67, 6), ('3', 67, 6)]
    """
    if tensor.pending:
        return
    size = item_bytes(tensor.dtype)
    places = [Place(byte_box(stored.box, size), stored) for stored in distinct(tensor)]
    for piece in pieces(byte_box(target, size), places, BLOCK_BYTES):
        if isinstance(piece, Run):
            yield FileStretch(piece.source.path, piece.source_offset, piece.num_bytes)
            continue
        for box, stored in piece.sources:
            shared = intersect(box, piece.box)
            if shared is not None and stored.strides is None and _in_one(shared, box):
                start = stored.offset + offset_in(box, [lo for lo, _ in shared])
                yield FileStretch(stored.path, start, prod(box_shape(shared)))


def _in_one(part: Box, outer: Box) -> bool:
    """Return whether a part of a row-major box is one stretch of it."""
    whole = True
    for side, outer_side in zip(reversed(part), reversed(outer), strict=True):
        if not whole and side[1] - side[0] > 1:
            return False
        whole = whole and side == outer_side
    return True

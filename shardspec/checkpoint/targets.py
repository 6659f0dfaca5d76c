"""What an output consists of, as plain values: files, and which boxes of which tensors they hold.

A format says where everything goes. How the bytes get there, are checked and committed is the same
for all of them.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias, overload

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import ReplicaKey, replica_holders
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

__all__ = [
    "BoxColumns",
    "BoxEntry",
    "Extent",
    "FileEntry",
    "MadeBytes",
    "OutputFile",
    "OutputTensor",
    "Put",
    "RawBytes",
    "Target",
    "Trailer",
    "Write",
    "assign_boxes",
    "stored_shape",
    "whole_box",
]


class BoxEntry(NamedTuple):
    """One box in a file, stored under the name of its tensor."""

    tensor: str
    box: Box
    """Never empty."""
    addend: tuple[int, ...]
    """Which addend of a pending reduction: one index per pending axis, in the order of the spec."""
    crc32: int | None = None
    """CRC-32 of its bytes; None where it was saved without."""


class BoxColumns(Sequence[BoxEntry]):
    """Boxes of a file as columns: for each 24 bytes, and what others do not have in common.

    Examples
    --------
    >>> boxes = BoxColumns()
    >>> boxes.add("w", (((0, 2),), ()), 7)
    >>> boxes[0]
    BoxEntry(tensor='w', box=((0, 2),), addend=(), crc32=7)
    """

    __slots__ = ("_crcs", "_names", "_parts")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._parts: list[ReplicaKey] = []
        self._crcs = array("q")
        """Less than 0 where there is none."""

    def add(self, tensor: str, part: ReplicaKey, crc32: int | None) -> None:
        """Append a box."""
        self._names.append(tensor)
        self._parts.append(part)
        self._crcs.append(-1 if crc32 is None else crc32)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> BoxEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BoxEntry]: ...
    def __getitem__(self, index: int | slice) -> BoxEntry | Sequence[BoxEntry]:
        if isinstance(index, slice):
            return tuple(self)[index]
        crc32 = self._crcs[index]
        box, addend = self._parts[index]
        return BoxEntry(self._names[index], box, addend, None if crc32 < 0 else crc32)

    def __iter__(self) -> Iterator[BoxEntry]:
        for name, (box, addend), crc32 in zip(self._names, self._parts, self._crcs, strict=True):
            yield BoxEntry(name, box, addend, None if crc32 < 0 else crc32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


def stored_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the shape under which a file holds boxes of one tensor, one after the other.

    It is that of the box, and of several, as parts are, the number of their elements.

    Examples
    --------
    >>> stored_shape([((0, 2), (0, 3))]), stored_shape([((0, 2), (0, 3)), ((4, 5), (0, 3))])
    ((2, 3), (9,))
    """
    return box_shape(boxes[0]) if len(boxes) == 1 else (sum(map(box_size, boxes)),)


class FileEntry(NamedTuple):
    """One file and the boxes it holds; those of one tensor follow each other, as their bytes do."""

    name: str
    """A plain name in the directory of the checkpoint."""
    rank: int
    """Physical id of the device whose boxes these are."""
    num_bytes: int
    """Size of the file."""
    boxes: Sequence[BoxEntry]


@lru_cache(1024)
def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of a tensor; one object for tensors of one shape."""
    return tuple((0, size) for size in shape)


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
        return box_size(whole_box(self.shape)) * item_bytes(self.dtype)


class Extent(NamedTuple):
    """Room in a file for a box of a tensor, row-major."""

    tensor: OutputTensor
    box: Box
    offset: int
    """Position of the first byte in the file."""

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


Write: TypeAlias = Callable[[bytes], object]
"""Writes on where it stopped."""
Put: TypeAlias = Callable[[str, Callable[[Write], object]], None]
"""Makes a file of a name, and has it written piece by piece."""


class Target(NamedTuple):
    """A whole output: one file, or a directory of files."""

    files: tuple[OutputFile, ...]
    directory: bool
    last: Callable[[Mapping[str, Sequence[int]], "Put"], None] | None = None
    """Writes, given the CRC-32 of every extent by file, the files that say what is in it."""
    digested: bool = False
    """Whether the form needs the CRC-32 of every extent."""
    carried: frozenset[str] = frozenset()
    """Names, in the source, of the values that are no tensors and go along."""
    sidecars: tuple[str, ...] = ()
    """Names of the files that lie beside the weights of the source and go along."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.num_bytes for file in self.files)


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
        entries.sort(key=lambda entry: (entry.tensor, entry.box))
    return chosen

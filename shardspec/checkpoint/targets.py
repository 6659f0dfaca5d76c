"""What an output consists of, as plain values: files, and which boxes of which tensors they hold.

A format says what goes where. How the bytes get there, are checked and committed is the same for
all formats.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias, overload

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import replica_holders, whole_box
from shardspec.copies import whole_senders
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh


class BoxEntry(NamedTuple):
    """One box in a file, stored under the name of its tensor."""

    tensor: str
    box: Box  # never empty
    addend: tuple[int, ...]  # of pending reductions: an index per axis, in the order of the spec
    crc32: int | None = None


def stored_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the shape under which a file stores boxes of one tensor, one after the other.

    It is that of a single box, else, as for parts, the number of elements.
    """
    return _shape(boxes[0]) if len(boxes) == 1 else (sum(map(box_size, boxes)),)


_shape = lru_cache(1024)(box_shape)
"""One object for equal boxes."""


class FileEntry(NamedTuple):
    """One file of a rank; boxes of one tensor follow each other, as their bytes do."""

    name: str
    rank: int
    num_bytes: int
    boxes: Sequence[BoxEntry]


class OutputTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    source: str  # its name in the checkpoint that is read
    shape: tuple[int, ...]
    dtype: str  # in the output

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return box_size(whole_box(self.shape)) * item_bytes(self.dtype)


class Extent(NamedTuple):
    """A box of a tensor in a file, row-major."""

    tensor: OutputTensor
    box: Box
    offset: int  # in the file

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return box_size(self.box) * item_bytes(self.tensor.dtype)


class RawBytes(NamedTuple):
    """Bytes of a file that are no tensor's, such as a header."""

    offset: int
    data: bytes


class _MadeBytes(Sequence[RawBytes]):
    def __init__(self, places: range, make: Callable[[int], RawBytes]) -> None:
        self._places, self._make = places, make

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> RawBytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RawBytes]: ...
    def __getitem__(self, index: int | slice) -> RawBytes | Sequence[RawBytes]:
        if isinstance(index, slice):
            return _MadeBytes(self._places[index], self._make)
        return self._make(self._places[index])


def made_bytes(count: int, make: Callable[[int], RawBytes]) -> Sequence[RawBytes]:
    """Return raw bytes that are made by index each time they are used."""
    return _MadeBytes(range(count), make)


class Trailer(Protocol):
    """Makes the pieces of a file that depend on the CRC-32 of its extents."""

    def __call__(self, crcs: Sequence[int], first: int = 0) -> Sequence[RawBytes]:
        """Return what follows the extents from index `first` on, in ascending order.

        Given the CRC-32 of the first extents only, it is what follows these: so a file can be
        written from start to end.
        """
        ...


class OutputFile(NamedTuple):
    """A file to be written; raw bytes and extents are in ascending order."""

    name: str  # relative to the output, with slashes; that of the output if it is one file
    num_bytes: int
    raw: Sequence[RawBytes]
    extents: Sequence[Extent]
    trailer: Trailer | None = None

    @property
    def other_bytes(self) -> int:
        """Bytes that are no tensor's."""
        return self.num_bytes - sum(extent.num_bytes for extent in self.extents)


Write: TypeAlias = Callable[[bytes], object]
"""Appends to a file."""
Put: TypeAlias = Callable[[str, Callable[[Write], object]], None]
"""Makes a file of a name, and has it written piece by piece."""


class Target(NamedTuple):
    """A whole output: one file, or a directory of files."""

    files: tuple[OutputFile, ...]
    directory: bool
    last: Callable[[Mapping[str, Sequence[int]], Put], None] | None = None
    """Writes the files that list the others, given the CRC-32 of every extent by file."""
    digested: bool = False  # whether the format needs the CRC-32 of every extent
    carried: frozenset[str] = frozenset()  # names of the source's plain values that go along
    sidecars: tuple[str, ...] = ()  # names of the files beside the weights that go along

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.num_bytes for file in self.files)


def assign_boxes(
    mesh: DeviceMesh, tensors: Mapping[str, Layout], *, spread: bool = True
) -> dict[int, list[BoxEntry]]:
    """Choose the device that stores each box, among those that hold it.

    Every rank computes the same answer: boxes of one holder first, then the others from the largest
    down, each to the holder that has the fewest bytes so far, or without `spread` to the first.
    Returns for every device its boxes, by tensor name.

    >>> mesh = DeviceMesh(range(2), (2,))
    >>> chosen = assign_boxes(mesh, {name: Layout(mesh, "[R]", (3,), "int8") for name in "abc"})
    >>> [[entry.tensor for entry in chosen[rank]] for rank in mesh.ids]
    [['a', 'c'], ['b']]
    """
    parts_of = lru_cache(None)(replica_holders)
    load = dict.fromkeys(mesh.ids, 0)
    names = sorted(tensors)
    shared: list[tuple[int, ...]] = []  # the holders of every box that has several
    sizes = array("q")  # its bytes
    for name in names:
        layout = tensors[name]
        for (box, _), ranks in parts_of(layout).items():
            num_bytes = box_size(box) * item_bytes(layout.dtype)
            if len(ranks) > 1 and spread:
                shared.append(ranks)
                sizes.append(num_bytes)
            else:
                load[ranks[0]] += num_bytes
    # A stable sort: boxes of equal size keep their order, by name and then by holder.
    order = sorted(range(len(shared)), key=lambda number: -sizes[number])
    chosen = array("q", bytes(8 * len(shared)))
    for number, rank in zip(
        order, whole_senders(((shared[n], sizes[n]) for n in order), load), strict=True
    ):
        chosen[number] = rank
    found: dict[int, list[BoxEntry]] = {rank: [] for rank in mesh.ids}
    several = iter(chosen)
    for name in names:
        parts = [
            (part, next(several) if len(ranks) > 1 and spread else ranks[0])
            for part, ranks in parts_of(tensors[name]).items()
        ]
        for part, rank in sorted(parts):
            found[rank].append(BoxEntry(name, *part))
    return found

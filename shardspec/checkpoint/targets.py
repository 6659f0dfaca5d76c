"""Contents of an output as plain values: files, and the boxes of tensors in them.

A format says what goes where. How the bytes get there, are checked and committed is the same for
all formats.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import replica_holders, whole_box
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.comm.senders import whole_senders
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import KeyPath

_PIECE_BYTES: Final = 1 << 20


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
    """Bytes of a file that belong to no tensor, such as a header."""

    offset: int
    data: bytes | Callable[[], bytes]
    """A function makes them when they are written."""

    def made(self) -> bytes:
        """Return the bytes."""
        return self.data if isinstance(self.data, bytes) else self.data()


Trailer: TypeAlias = Callable[[Sequence[int]], Iterable[RawBytes]]
"""Returns the bytes of a file that depend on the CRC-32 of its extents, in ascending order.

It is given a list that is filled meanwhile: bytes that follow an extent may be made from the CRC-32
of the extents before them."""


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


def copied_bytes(path: StoragePath, start: int, num_bytes: int, offset: int) -> list[RawBytes]:
    """Return bytes of another file, to be written at `offset`; they are read by then."""

    def piece(at: int) -> bytes:
        with path.open() as file:
            return file.read(start + at, min(_PIECE_BYTES, num_bytes - at))

    return [RawBytes(offset + at, partial(piece, at)) for at in range(0, num_bytes, _PIECE_BYTES)]


def copied_file(path: StoragePath, name: str) -> OutputFile:
    """Return a file with the content of another one, which is read while this one is written."""
    with path.open() as file:
        size = file.num_bytes
    return OutputFile(name, size, copied_bytes(path, 0, size, 0), ())


Write: TypeAlias = Callable[[bytes], object]
"""Appends to a file."""


class Listing(NamedTuple):
    """The file that lists the others of an output; written last."""

    name: str
    fill: Callable[[Mapping[str, Sequence[int]], Write], object]
    """Writes it piece by piece, given the CRC-32 of every extent by file."""


class Carried(NamedTuple):
    """Entries that are not tensors and go along into an output."""

    names: frozenset[str]
    """In the checkpoint."""
    values: Mapping[str, object]
    """By their names in the output: plain ones, and those that are copied as they are stored."""
    paths: Mapping[str, KeyPath]
    """The keys of tensors and values in a nested state dict, by those names of the output."""


class Target(NamedTuple):
    """A whole output: one file, or a directory of files."""

    files: tuple[OutputFile, ...]
    directory: bool
    tensors: Sequence[OutputTensor]
    """All that are written; empty ones may be in no file."""
    listing: Listing | None = None
    digested: bool = False  # whether the format needs the CRC-32 of every extent
    carried: frozenset[str] = frozenset()  # names of the source's plain values that go along
    sidecars: tuple[str, ...] = ()  # names of the files beside the weights that go along
    beside: tuple[StoragePath, ...] = ()  # those of them that were there when it was opened
    not_copied: tuple[str, ...] = ()  # names of what stays behind
    sharding: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Tensor to the rule for it, empty where none matches, and its spec; if it is for a mesh."""
    same: Mapping[str, str] = MappingProxyType({})
    """Tensor to the one whose bytes it shares in the files, which are written once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.num_bytes for file in self.files)


def assign_boxes(
    mesh: DeviceMesh, tensors: Mapping[str, Layout], *, spread: bool = True
) -> dict[int, list[BoxEntry]]:
    """Choose the device that stores each box, among those that hold it.

    Every rank computes the same answer. Boxes with a single holder come first, then the others from
    the largest down: each for the holder with the fewest bytes so far, or without `spread` for the
    first.
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
    assigned: dict[int, list[BoxEntry]] = {rank: [] for rank in mesh.ids}
    several = iter(chosen)
    for name in names:
        parts = [
            (part, next(several) if len(ranks) > 1 and spread else ranks[0])
            for part, ranks in parts_of(tensors[name]).items()
        ]
        for part, rank in sorted(parts):
            assigned[rank].append(BoxEntry(name, *part))
    return assigned

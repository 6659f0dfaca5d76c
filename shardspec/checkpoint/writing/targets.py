"""What is to be written, as plain values: files, and the parts of tensors that they hold.

A form of checkpoint says where everything goes; how the bytes get there, are checked and published
is the same for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, overload

from shardspec.boxes import Box, box_size
from shardspec.dtypes import item_bytes

__all__ = ["Late", "MadePieces", "OutputFile", "Piece", "Slot", "Target", "Wanted"]


class Wanted(NamedTuple):
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


class Slot(NamedTuple):
    """Room in a file for a box of a tensor, row-major."""

    tensor: Wanted
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


class Piece(NamedTuple):
    """Bytes that are no tensor's, such as a header."""

    offset: int
    data: bytes


class MadePieces(Sequence[Piece]):
    """Pieces that are made each time that they are asked for, as there are many.

    Parameters
    ----------
    count
        How many there are.
    make
        Given a number from 0, returns the piece.
    """

    def __init__(self, count: int, make: Callable[[int], Piece]) -> None:
        self._numbers = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Piece: ...
    @overload
    def __getitem__(self, place: slice) -> list[Piece]: ...
    def __getitem__(self, place: int | slice) -> Piece | list[Piece]:
        """Return a piece, or some."""
        found = self._numbers[place]
        return self._make(found) if isinstance(found, int) else list(map(self._make, found))


class Late(Protocol):
    """Makes the pieces of a file that depend on the CRC-32 of its slots."""

    def __call__(self, crcs: Sequence[int], first: int = 0) -> Sequence[Piece]:
        """Return what follows the slots from number `first` on, in ascending order.

        Given the CRC-32 of the first slots of a file, not of all, it is what follows these: so a
        file can be written from its start to its end.
        """
        ...


class OutputFile(NamedTuple):
    """A file to be written."""

    name: str
    """A plain name; that of the output itself if it is a file."""
    num_bytes: int
    pieces: Sequence[Piece]
    slots: tuple[Slot, ...]
    """In ascending order."""
    late: Late | None = None


class Target(NamedTuple):
    """A whole output: one file, or a directory of files."""

    files: tuple[OutputFile, ...]
    directory: bool
    last: Callable[[Mapping[str, Sequence[int]]], Sequence[tuple[str, bytes]]] | None = None
    """Makes, from the CRC-32 of every slot by file, the small files that say what is in it."""
    digested: bool = False
    """Whether the form needs the CRC-32 of every slot."""
    carried: frozenset[str] = frozenset()
    """Names, in the source, of the values that are no tensors and go along."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.num_bytes for file in self.files)

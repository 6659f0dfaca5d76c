"""What a checkpoint looks like to those who read it, whatever its format.

A format lists its tensors, and for each the boxes that are stored: which part of the tensor, and
where its bytes lie. Whoever merges or loads copies bytes between places and needs to know no more,
so that a new format is one new file that makes these values.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from shardspec.boxes import Box
from shardspec.comm.reduce_op import ReduceOp
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = [
    "AllKnown",
    "CheckpointSource",
    "Described",
    "Digest",
    "HeldBox",
    "Outline",
    "Pending",
    "StoredBox",
    "StoredTensor",
    "box_text",
    "distinct",
]


@dataclass(frozen=True, slots=True)
class Digest:
    """CRC-32 of a stretch of a file, which holds a box and perhaps more."""

    crc32: int
    start: int
    """Position of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A part of a tensor that lies in a file, somewhere."""

    box: Box
    """Which part of the global tensor; never empty."""
    addend: tuple[int, ...]
    """Which addend of a pending reduction, one index per entry of `StoredTensor.pending`."""
    rank: int
    """Physical id of the device that wrote it."""
    path: Path
    """The file."""


@dataclass(frozen=True, slots=True)
class StoredBox(HeldBox):
    """A part of a tensor of which is known where in the file it lies.

    It is row-major and contiguous unless it says otherwise.
    """

    offset: int
    """Position in the file of its first byte."""
    digest: Digest | None = None
    """Of all its bytes, where the format has one."""
    strides: tuple[int, ...] | None = None
    """Bytes from one element to the next along each dim; None if row-major and contiguous."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A reduction that is still to be carried out when the tensor is read."""

    op: ReduceOp
    addends: int
    """How many addends there are: the size of the mesh axis."""


_Box_co = TypeVar("_Box_co", bound=HeldBox, covariant=True)
_Box = TypeVar("_Box", bound=HeldBox)


@dataclass(frozen=True, slots=True)
class Outline(Generic[_Box_co]):
    """What plans need to know of a tensor: how it is cut, and in which files its boxes are."""

    name: str
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    dtype: str
    """torch's name of the element type."""
    spec: ShardingSpec | None
    """How it is cut, where the format says so; axes by number."""
    pending: tuple[Pending, ...]
    """One entry per axis over which a reduction is pending, in the order of the spec."""
    boxes: tuple[_Box_co, ...]
    """Every stored box; one box may be stored more than once. It may be one object for tensors of
    which the same ranks hold the same parts."""


@dataclass(frozen=True, slots=True)
class StoredTensor(Outline[StoredBox]):
    """A tensor of a checkpoint and all its boxes, with the places where their bytes lie."""


@dataclass(frozen=True, slots=True)
class Described:
    """Stands for a value that was not read, because reading it could run code."""

    text: str
    """What it is."""


def distinct(tensor: Outline[_Box]) -> tuple[_Box, ...]:
    """Return the boxes of a tensor without copies: of each part, the one stored first."""
    first: dict[tuple[tuple[int, ...], Box], _Box] = {}
    for stored in tensor.boxes:
        first.setdefault((stored.addend, stored.box), stored)
    return tuple(first.values())


class CheckpointSource(Protocol):
    """A checkpoint that can be read."""

    @property
    def format(self) -> str:
        """What wrote it, in a few words."""
        ...

    @property
    def directory(self) -> Path:
        """Where it lies."""
        ...

    @property
    def mesh(self) -> DeviceMesh | None:
        """The devices that wrote it, where the format says so."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, sorted."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file it consists of; none of them may be written over."""
        ...

    @property
    def others(self) -> Mapping[str, object]:
        """Entries that are no tensors, by name: plain values, or `Described` ones."""
        ...

    def outline(self, name: str) -> Outline[HeldBox]:
        """Return what is known of one of the tensors that `names` lists.

        Where the bytes of its boxes lie need not be: looking into every file for each of a million
        boxes takes minutes, and what is done with a tensor reads there anyway.
        """
        ...

    def tensor(self, name: str) -> StoredTensor:
        """Return one of the tensors that `names` lists, all of it."""
        ...

    def origin(self, name: str) -> Hashable:
        """Return what is equal for tensors that lie at the same places; for few others it is.

        It is known without looking into files, as `outline` is.
        """
        ...

    def copies_agree(self, name: str) -> bool:
        """Say whether digests that are known like `outline` show that all copies are alike."""
        ...


class AllKnown(ABC):
    """The part of a `CheckpointSource` that is alike where all is known of tensors at once."""

    __slots__ = ()

    @abstractmethod
    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor and its boxes."""

    def outline(self, name: str) -> StoredTensor:
        """Return a tensor: all is known of it."""
        return self.tensor(name)

    def origin(self, name: str) -> Hashable:
        """Return where its bytes lie."""
        return frozenset((box.path, box.offset, box.box) for box in self.tensor(name).boxes)

    def copies_agree(self, name: str) -> bool:  # noqa: ARG002
        """Say no: that is looked at when they are read."""
        return False


def box_text(box: Box) -> str:
    """Write a box as the index that selects it.

    Examples
    --------
    >>> box_text(((0, 2), (3, 7))), box_text(())
    ('[0:2, 3:7]', '[]')
    """
    return f"[{', '.join(f'{lo}:{hi}' for lo, hi in box)}]"

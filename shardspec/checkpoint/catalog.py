"""What a checkpoint looks like to those who read it, whatever its format.

A format lists its tensors, and for each the boxes that are stored: which part of the tensor, and
where its bytes lie. Whoever merges or loads copies bytes between places and needs to know no more.
"""

from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, overload

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.store import Snapshot
from shardspec.comm.steps import ReduceOp
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Digest:
    """CRC-32 of a stretch of a file, which holds a box and perhaps more."""

    crc32: int
    start: int
    """Position of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileBox:
    """A part of a tensor that lies in a file, somewhere."""

    box: Box
    """Which part of the global tensor; never empty."""
    addend: tuple[int, ...]
    """Which addend of a pending reduction, one index per entry of `StoredTensor.pending`."""
    rank: int
    """Physical id of the device that wrote it."""
    path: Path


@dataclass(frozen=True, slots=True)
class StoredBox(FileBox):
    """A part of a tensor of which is known where in the file it lies."""

    offset: int
    """Position in the file of its first byte."""
    digest: Digest | None = None
    """Of all its bytes, where the format has one."""
    strides: tuple[int, ...] | None = None
    """Bytes from one element to the next along each dim; None if row-major and contiguous."""


@dataclass(frozen=True, slots=True)
class StoredReduction:
    """A reduction that is still to be carried out when the tensor is read, over a mesh axis."""

    op: ReduceOp
    addends: int


_Box_co = TypeVar("_Box_co", bound=FileBox, covariant=True)
_Box = TypeVar("_Box", bound=FileBox)


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
    pending: tuple[StoredReduction, ...]
    """One entry per axis over which a reduction is pending, in the order of the spec."""
    boxes: tuple[_Box_co, ...]
    """Every stored box, those that are stored more than once too. It may be one object for tensors
    of which the same ranks hold the same parts."""


@dataclass(frozen=True, slots=True)
class StoredTensor(Outline[StoredBox]):
    """A tensor of a checkpoint and all its boxes, with the places where their bytes lie."""


class StoredObject(NamedTuple):
    """An object of a format that keeps each apart, to be copied as it is."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """Stands for a value that was not read, because reading it could run code: says what it is."""

    text: str

    def __repr__(self) -> str:
        return self.text if self.text.startswith("<") else f"<{self.text}>"


def distinct(tensor: Outline[_Box]) -> tuple[_Box, ...]:
    """Return the boxes of a tensor without copies: of each part, the one stored first."""
    first: dict[ReplicaKey, _Box] = {}
    for stored in tensor.boxes:
        first.setdefault((stored.box, stored.addend), stored)
    return tuple(first.values())


class FileMetadata(NamedTuple):
    """What files of safetensors say besides their tensors, put together."""

    values: Mapping[str, str] = MappingProxyType({})
    """What the files that say anything under a key agree on."""
    contradictions: Mapping[str, tuple[Path, Path]] = MappingProxyType({})
    """Keys under which two files say different things, and these."""


class Catalog(ABC):
    """A checkpoint that can be read.

    It says what wrote it (`format`), where it lies, its tensors and all its files, the mesh of the
    devices that wrote it where the format says so, and its entries that are not tensors (`extras`):
    plain values, or `OpaqueValue` ones.
    """

    def __init__(
        self,
        format: str,  # as it is called
        directory: Path,
        names: Iterable[str],
        files: Iterable[Path],
        mesh: DeviceMesh | None = None,
        extras: Mapping[str, object] | None = None,
    ) -> None:
        self.format = format
        self.directory = directory
        self.names = tuple(sorted(names))
        self.files = tuple(files)
        self.mesh = mesh
        self.snapshot: Snapshot | None = None
        """What its files were before they were opened; `open_checkpoint` takes it."""
        self.file_metadata = FileMetadata()
        """What goes along into files of safetensors."""
        self.beside: tuple[Path, ...] = ()
        """Files beside the weights that are copied with them; `sidecars` finds them."""
        self.notes: tuple[str, ...] = ()
        """What was taken for granted when it was opened, in a line each, for the user."""
        self.objects: Mapping[str, StoredObject] = {}
        """Those of `extras` that torch's DCP can hold without their being understood."""
        self._extras = extras or {}

    @property
    def extras(self) -> Mapping[str, object]:
        """Entries that are not tensors, by name."""
        return self._extras

    @abstractmethod
    def tensor(self, name: str) -> StoredTensor:
        """Return one of the tensors that `names` lists, all of it."""

    def outline(self, name: str) -> Outline[FileBox]:
        """Return what is known of a tensor without a look into the file of each of its boxes."""
        return self.tensor(name)

    def origin(self, name: str) -> Hashable:
        """Return a key that is equal for tensors that lie at the same places; like `outline`."""
        return frozenset((box.path, box.offset, box.box) for box in self.tensor(name).boxes)

    def copies_agree(self, name: str) -> bool:  # noqa: ARG002  # others know
        """Say whether digests that are known like `outline` show that all copies are alike."""
        return False

    def check_unchanged(self) -> None:
        """Check that the files are those that were opened; to be asked once all has been read."""
        if self.snapshot is not None:
            self.snapshot.check_unchanged((*self.files, *self.beside))


class ListedCatalog(Catalog):
    """A checkpoint whose tensors were all listed when it was opened; most formats are read so."""

    def __init__(
        self,
        format: str,  # as it is called
        directory: Path,
        tensors: Mapping[str, StoredTensor],
        files: Iterable[Path],
        mesh: DeviceMesh | None = None,
        extras: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(format, directory, tensors, files, mesh, extras)
        self.tensors = tensors

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor and its boxes."""
        return self.tensors[name]


def box_text(box: Box) -> str:
    """Write a box as the index that selects it, such as ``[0:2, 3:7]``."""
    return f"[{', '.join(f'{lo}:{hi}' for lo, hi in box)}]"


ReplicaKey: TypeAlias = tuple[Box, tuple[int, ...]]
"""A box, and which addend of the pending reductions it is."""


def stored_reductions(layout: Layout) -> tuple[StoredReduction, ...]:
    """Return the pending reductions of a layout, in the order of its spec."""
    mesh = layout.mesh
    return tuple(StoredReduction(p.op, mesh.shape[mesh.axis(p.axis)]) for p in layout.spec.partials)


def replica_keys(layout: Layout, physical_id: int) -> tuple[ReplicaKey, ...]:
    """Return what a device holds: a box, or with parts one a part; none where that is nothing."""
    at = layout.mesh.coordinates(physical_id)
    addend = tuple(at[layout.mesh.axis(p.axis)] for p in layout.spec.partials)
    if layout.spec.is_plain:
        # One box, four times as fast.
        box = layout.box(physical_id)
        return ((box, addend),) if box_size(box) else ()
    boxes = (LayoutCell(layout, cell).box(physical_id) for cell in cells_of(layout))
    return tuple((box, addend) for box in boxes if box_size(box))


def replica_holders(layout: Layout) -> dict[ReplicaKey, tuple[int, ...]]:
    """Return every part that is not empty and the devices that hold it, in the mesh's order."""
    found: dict[ReplicaKey, list[int]] = {}
    for physical_id in layout.mesh.ids:
        for part in replica_keys(layout, physical_id):
            found.setdefault(part, []).append(physical_id)
    return {part: tuple(ids) for part, ids in found.items()}


@lru_cache(maxsize=1024)
def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of a tensor; one object for tensors of one shape."""
    return tuple((0, size) for size in shape)


def unsharded_tensor(
    name: str, shape: tuple[int, ...], dtype: str, path: Path, offset: int
) -> StoredTensor:
    """Return a tensor that lies whole, row-major, at a place in one file."""
    boxes = () if 0 in shape else (StoredBox(whole_box(shape), (), 0, path, offset),)
    return StoredTensor(name, shape, dtype, None, (), boxes)


_MOST_BOXES: Final = 1 << 17
"""Boxes of tensors that are kept; each takes some 400 bytes."""


class LazyTensorCache:
    """Looks tensors up when they are asked for, and keeps those asked for last; for all threads."""

    def __init__(
        self, look_up: Callable[[str], StoredTensor], most_boxes: int = _MOST_BOXES
    ) -> None:
        self._look_up = look_up
        self._most_boxes = most_boxes
        self._num_boxes = 0
        self._lock = Lock()
        self._known: dict[str, StoredTensor] = {}
        """The one that was asked for last is the last."""

    def __call__(self, name: str) -> StoredTensor:
        """Return a tensor; raises what looking it up does."""
        with self._lock:
            known = self._known.pop(name, None)
            if known is not None:
                self._known[name] = known
                return known
        found = self._look_up(name)
        with self._lock:
            # Another thread may have been first; all are to have the same one.
            first = self._known.setdefault(name, found)
            if first is found:
                self._num_boxes += len(found.boxes)
            while self._num_boxes > self._most_boxes and len(self._known) > 1:
                self._num_boxes -= len(self._known.pop(next(iter(self._known))).boxes)
        return first


_Row = TypeVar("_Row")


class Columns(Sequence[_Row]):
    """Rows that are kept by columns, and made when they are asked for: there are very many.

    `row` makes one of its values; columns are lists or arrays of equal length.
    """

    __slots__ = ("_columns", "_row")

    def __init__(self, row: Callable[..., _Row], *columns: MutableSequence[Any]) -> None:
        self._row = row
        self._columns = columns

    def append(self, *values: object) -> None:
        """Add a row."""
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[_Row, ...]: ...
    def __getitem__(self, index: int | slice) -> _Row | tuple[_Row, ...]:
        """Return a row, or some."""
        if isinstance(index, slice):
            return tuple(map(self._row, *(column[index] for column in self._columns)))
        return self._row(*[column[index] for column in self._columns])

    def __iter__(self) -> Iterator[_Row]:
        return map(self._row, *self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

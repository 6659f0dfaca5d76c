"""What a checkpoint holds, whatever its format: tensors, and where the bytes of their boxes are."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.store import Snapshot
from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Digest:
    """CRC-32 of a range of a file, which holds a box and perhaps more."""

    crc32: int
    start: int
    """Position of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileBox:
    """A part of a tensor that is somewhere in a file."""

    box: Box
    """Which part of the global tensor; never empty."""
    addend: tuple[int, ...]
    """Which addend of a pending reduction, one index per entry of `StoredTensor.pending`."""
    rank: int
    """Physical id of the device that wrote it."""
    path: Path


@dataclass(frozen=True, slots=True)
class StoredBox(FileBox):
    """A part of a tensor with its place in the file."""

    offset: int
    """Position in the file of its first byte."""
    digest: Digest | None = None
    """Of all its bytes, where the format has one."""
    strides: tuple[int, ...] | None = None
    """Bytes from one element to the next along each dim; None if row-major and contiguous."""


@dataclass(frozen=True, slots=True)
class StoredReduction:
    """A reduction over a mesh axis that is pending: readers finish it."""

    op: ReduceOp
    addends: int


_Box_co = TypeVar("_Box_co", bound=FileBox, covariant=True)
_Box = TypeVar("_Box", bound=FileBox)


@dataclass(frozen=True, slots=True)
class Outline(Generic[_Box_co]):
    """What plans need to know of a tensor: how it is sharded, and which files have its boxes."""

    name: str
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    dtype: str
    """torch's name of the element type."""
    spec: ShardingSpec | None
    """How it is sharded, where the format says so; axes by number."""
    pending: tuple[StoredReduction, ...]
    """One entry per axis over which a reduction is pending, in the order of the spec."""
    boxes: tuple[_Box_co, ...]
    """All stored boxes, replicas too. Tensors that are sharded alike may share one tuple."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return prod(self.shape) * item_bytes(self.dtype)

    def bytes_of(self, stored: FileBox) -> int:
        """Return the bytes of one of its boxes."""
        return box_size(stored.box) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor(Outline[StoredBox]):
    """A tensor of a checkpoint and the places of all its boxes."""


class StoredObject(NamedTuple):
    """A pickled object that is copied as it is."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """Stands for a value that was not read, because reading it could run code."""

    text: str

    def __repr__(self) -> str:
        return self.text if self.text.startswith("<") else f"<{self.text}>"


def distinct(tensor: Outline[_Box]) -> tuple[_Box, ...]:
    """Return the boxes of a tensor without replicas: of each part, the one stored first."""
    first: dict[ReplicaKey, _Box] = {}
    for stored in tensor.boxes:
        first.setdefault((stored.box, stored.addend), stored)
    return tuple(first.values())


class FileMetadata(NamedTuple):
    """The metadata of all safetensors files of a checkpoint."""

    values: Mapping[str, str] = MappingProxyType({})
    """What no two files contradict each other on."""
    contradictions: Mapping[str, tuple[Path, Path]] = MappingProxyType({})
    """Keys for which two files have different values, and these files."""


class Catalog(ABC):
    """A checkpoint that is open for reading."""

    snapshot: Snapshot | None = None
    """State of its files before they were opened; `open_checkpoint` takes it."""
    file_metadata = FileMetadata()
    beside: tuple[Path, ...] = ()
    """Files beside the weights that are copied with them; `sidecars` finds them."""
    notes: tuple[str, ...] = ()
    """What was assumed when it was opened, for the user, a line each."""
    objects: Mapping[str, StoredObject] = MappingProxyType({})
    """Those of `extras` that can be copied into torch's DCP unread."""

    def __init__(
        self,
        format: str,  # as it is called
        directory: Path,
        names: Iterable[str],
        files: Iterable[Path],
        mesh: DeviceMesh | None = None,
        extras: Mapping[str, object] | None = None,
    ) -> None:
        self.format, self.directory, self.mesh = format, directory, mesh
        self.names = tuple(sorted(names))
        self.files = tuple(files)
        self._extras = extras or {}

    @property
    def extras(self) -> Mapping[str, object]:
        """Entries that are not tensors, by name: plain values, or `OpaqueValue` ones."""
        return self._extras

    @abstractmethod
    def tensor(self, name: str) -> StoredTensor:
        """Return one of the tensors that `names` lists."""

    def outline(self, name: str) -> Outline[FileBox]:
        """Return what is known of a tensor without reading the files of its boxes."""
        return self.tensor(name)

    def origin(self, name: str) -> Hashable:
        """Return a key that is equal for tensors at the same places; reads what `outline` does."""
        return frozenset((box.path, box.offset, box.box) for box in self.tensor(name).boxes)

    def copies_agree(self, name: str) -> bool:  # noqa: ARG002  # others know
        """Say whether digests show that all replicas are equal; reads no more than `outline`."""
        return False

    def check_unchanged(self) -> None:
        """Check that the files are still those that were opened; to be called after all reads."""
        if self.snapshot is not None:
            self.snapshot.check_unchanged((*self.files, *self.beside))


class ListedCatalog(Catalog):
    """A checkpoint whose tensors were all listed when it was opened, as in most formats."""

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
"""A box, and which addend of the pending reductions it is. Replicas have the same key."""


def stored_reductions(layout: Layout) -> tuple[StoredReduction, ...]:
    """Return the pending reductions of a layout, in the order of its spec."""
    mesh = layout.mesh
    return tuple(StoredReduction(p.op, mesh.shape[mesh.axis(p.axis)]) for p in layout.spec.partials)


def replica_keys(layout: Layout, physical_id: int) -> tuple[ReplicaKey, ...]:
    """Return the boxes of a device that are not empty; several if the spec has parts."""
    at = layout.mesh.coordinates(physical_id)
    addend = tuple(at[layout.mesh.axis(p.axis)] for p in layout.spec.partials)
    if layout.spec.is_plain:
        # Four times as fast.
        box = layout.box(physical_id)
        return ((box, addend),) if box_size(box) else ()
    boxes = (LayoutCell(layout, cell).box(physical_id) for cell in cells_of(layout))
    return tuple((box, addend) for box in boxes if box_size(box))


@lru_cache(32)
def replica_holders(layout: Layout) -> dict[ReplicaKey, tuple[int, ...]]:
    """Return every box that is not empty and the devices that hold it, in the order of the mesh."""
    found: dict[ReplicaKey, list[int]] = {}
    for physical_id in layout.mesh.ids:
        for part in replica_keys(layout, physical_id):
            found.setdefault(part, []).append(physical_id)
    return {part: tuple(ids) for part, ids in found.items()}


@lru_cache(maxsize=1024)
def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def unsharded_tensor(
    name: str, shape: tuple[int, ...], dtype: str, path: Path, offset: int
) -> StoredTensor:
    """Return a tensor that is stored as one row-major box."""
    boxes = () if 0 in shape else (StoredBox(whole_box(shape), (), 0, path, offset),)
    return StoredTensor(name, shape, dtype, None, (), boxes)


LazyTensorCache: Final = lru_cache(128)
"""Decorates what looks tensors up: the last ones are kept, for all threads."""

"""Defines types for the contents of checkpoints: tensors, their boxes, and files to write."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.reading import Snapshot
from shardspec.comm.senders import whole_senders
from shardspec.comm.steps import ReduceOp
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import KeyPath

if TYPE_CHECKING:
    from shardspec.resharding.digests import TensorDigest

_MAX_NAME_CHARS: Final = 1 << 16

ZEROS: Final = storage_path("/dev/zero")
"""Path of boxes of zeros, which no file stores; it is never opened."""


@dataclass(frozen=True, slots=True)
class Digest:
    """CRC-32 of a range of a file that contains a box, and possibly other bytes."""

    crc32: int
    start: int
    """Position of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileBox:
    """One stored box of a tensor: its file, without the position in it."""

    box: Box
    """Box in the global tensor; never empty."""
    addend: tuple[int, ...]
    """Index of the addend in each pending reduction of `StoredTensor.pending`."""
    rank: int
    """Physical id of the device that wrote the box."""
    path: StoragePath


class Computed(Protocol):
    """Makes the bytes of a tensor that no file stores, for example from codes and their scales."""

    @property
    def reads(self) -> "Mapping[StoragePath, int]":
        """Files to read, and the number of bytes from each."""

    def fill(
        self, start: int, steps: Sequence[tuple[int, int, int]], room: memoryview, at: int
    ) -> None:
        """Copy a part of the tensor, from byte `start` on, into `room[at:]`.

        `steps` are (count, bytes between in the tensor, bytes between in `room`) for each dim.
        """


@dataclass(frozen=True, slots=True)
class StoredBox(FileBox):
    """One stored box of a tensor: its file, and the position of its bytes there."""

    offset: int
    """Position of the first byte in the file."""
    digest: Digest | None = None
    """Digest of all bytes of the box; None if the format has none."""
    strides: tuple[int, ...] | None = None
    """Bytes from one element to the next along each dim; None if row-major and contiguous."""
    computed: Computed | None = None
    """Source of the bytes if no file stores them. Then `path` is the file that contributes most,
    and `offset` a position in the computed bytes."""


@dataclass(frozen=True, slots=True)
class StoredReduction:
    """A reduction of stored addends: over a partial mesh axis, or over several checkpoints."""

    op: ReduceOp
    addends: int
    weights: tuple[float, ...] = ()
    """Factor of each addend; empty if all are 1."""


_Box_co = TypeVar("_Box_co", bound=FileBox, covariant=True)
AnyBox = TypeVar("AnyBox", bound=FileBox)


@dataclass(frozen=True, slots=True)
class Outline(Generic[_Box_co]):
    """A tensor of a checkpoint: shape, dtype, spec, and boxes with files but without offsets."""

    name: str
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    dtype: str
    """torch's name of the element type."""
    spec: ShardingSpec | None
    """Sharding spec, axes by number; None if the format does not record it."""
    pending: tuple[StoredReduction, ...]
    """One entry per axis over which a reduction is pending, in the order of the spec."""
    boxes: tuple[_Box_co, ...]
    """All stored boxes, replicas too. Tensors with the same layout may share one tuple."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return prod(self.shape) * item_bytes(self.dtype)

    def bytes_of(self, stored: FileBox) -> int:
        """Return the bytes of a stored box: a box of 2 x 3 float32 elements has 24."""
        return box_size(stored.box) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor(Outline[StoredBox]):
    """A tensor of a checkpoint: shape, dtype, spec, and the file position of every box."""


AnyOutline: TypeAlias = Outline[FileBox]
"""Outline of a tensor with or without file offsets."""


class StoredObject(NamedTuple):
    """Pickled entry of torch's DCP that is not a tensor; outputs get a copy of its bytes."""

    path: StoragePath
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """Stands for a value that was not read, because reading it could run code."""

    text: str
    digest: str | None = field(default=None, compare=False)
    """Digest of the value; None if it cannot be compared."""
    tensors: bool = field(default=False, compare=False)
    """True if the value contains tensors, or may contain them."""
    inside: bool = field(default=True, compare=False)
    """False for a file the checkpoint refers to but does not contain."""

    def __repr__(self) -> str:
        return self.text if self.text.startswith("<") else f"<{self.text}>"


def is_plain_entry(value: object) -> bool:
    """Return True if a value of `extras` is plain: numbers, text, bytes, lists, dicts of these.

    >>> is_plain_entry({"betas": (0.9, 0.999)}), is_plain_entry([OpaqueValue("a generator")])
    (True, False)
    """
    return next(opaque_parts(value), None) is None


def opaque_parts(value: object) -> Iterator[OpaqueValue]:
    """Yield the parts of a value of `extras` that are not plain.

    >>> [part.text for part in opaque_parts({"step": 1, "rng": [OpaqueValue("a generator")]})]
    ['a generator']
    """
    if isinstance(value, OpaqueValue):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(opaque_parts, (*value.keys(), *value.values())))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(opaque_parts, value))


def distinct(tensor: Outline[AnyBox]) -> tuple[AnyBox, ...]:
    """Return the boxes of a tensor, with one stored copy of each box: the first.

    >>> copies = [unsharded_tensor("w", (2,), "int8", storage_path(p), 0).boxes[0] for p in "ab"]
    >>> tensor = StoredTensor("w", (2,), "int8", None, (), tuple(copies))
    >>> [str(stored.path) for stored in distinct(tensor)]
    ['a']
    """
    first: dict[ReplicaKey, AnyBox] = {}
    for stored in tensor.boxes:
        first.setdefault((stored.box, stored.addend), stored)
    return tuple(first.values())


class FileMetadata(NamedTuple):
    """The metadata of all safetensors files of a checkpoint."""

    values: Mapping[str, str] = MappingProxyType({})
    """Values that are the same in all files."""
    contradictions: Mapping[str, tuple[StoragePath, StoragePath]] = MappingProxyType({})
    """Keys for which two files have different values, and these files."""


NO_METADATA: Final = FileMetadata()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Facts about a checkpoint besides its tensors and values, such as notes for the user.

    A derived catalog copies them, and replaces the fields that contain names of tensors.
    """

    snapshot: Snapshot | None = None
    """State of the files before they were opened, recorded by `open_checkpoint`."""
    below: tuple[Snapshot, ...] = ()
    """Snapshots of subdirectories with files that an index names."""
    file_metadata: FileMetadata = NO_METADATA
    notes: tuple[str, ...] = ()
    """Assumptions made when the checkpoint was opened: lines for the user."""
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    """Entries of `extras` that can be copied into torch's DCP unread."""
    pickled: Mapping[str, Sequence[StoredTensor]] = field(default_factory=dict)
    """Tensors inside copied `objects`, which the catalog does not list separately."""
    restored: bool = False
    """True if the format stores plain values and the nesting of the state dict."""
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    """Keys in the nested state dict, for names that differ from their key."""
    described_in: StoragePath | None = None
    """Directory of the model's config and tokenizer; None for the checkpoint's own."""
    filled: tuple[str, ...] = ()
    """Names of the missing tensors that were taken from another checkpoint."""
    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors that are missing because their sources were dropped."""
    keeps_dtype: frozenset[str] = frozenset()
    """Names of tensors that are never cast: codes and scales."""
    summed: tuple[str, ...] = ()
    """Notes for the user on how checkpoints were combined."""
    differing: frozenset[str] = frozenset()
    """Names in `extras` of values that differ between the combined checkpoints."""
    quantization: Mapping[str, object] | None = None
    """Section for the model's config about quantized weights: empty removes it, None keeps it."""


NO_FACTS: Final = CheckpointFacts()


class Catalog:
    """An open checkpoint.

    Most formats list all tensors on opening. For the others a subclass looks up each tensor
    on demand, and caches the most recent ones.
    """

    def __init__(
        self,
        format: str,  # `Format.called`
        directory: StoragePath,
        tensors: Mapping[str, StoredTensor] | Iterable[str],  # names alone if they are looked up
        files: Iterable[StoragePath],
        mesh: DeviceMesh | None = None,
        extras: Mapping[str, object] | None = None,
        facts: CheckpointFacts = NO_FACTS,
    ) -> None:
        self.format, self.directory, self.mesh, self.facts = format, directory, mesh, facts
        self.names = tuple(sorted(tensors))
        self._listed = tensors if isinstance(tensors, Mapping) else {}
        self._tensors = lru_cache(128)(self._look_up)
        self.files = tuple(files)
        self._extras = extras or {}
        longest = max(map(len, (*self.names, *self._extras)), default=0)
        if longest > _MAX_NAME_CHARS:
            raise CheckpointError(
                f"{directory}: a name has {longest} characters, more than {_MAX_NAME_CHARS}; "
                "rename it and save again"
            )

    def with_facts(self, facts: CheckpointFacts) -> Self:
        """Return a catalog of the same tensors with other `CheckpointFacts`."""
        other = copy(self)
        other.facts = facts
        return other

    @property
    def home(self) -> StoragePath:
        """Directory with the files of the checkpoint."""
        return self.directory if self.directory.is_dir() else self.directory.parent

    @property
    def extras(self) -> Mapping[str, object]:
        """Entries that are not tensors, such as the step: name to plain value or `OpaqueValue`."""
        return self._extras

    def tensor(self, name: str) -> StoredTensor:
        """Return shape, dtype and the file positions of a tensor's boxes; reads no data."""
        return self._tensors(name)

    def _look_up(self, name: str) -> StoredTensor:
        return self._listed[name]

    def outline(self, name: str) -> AnyOutline:
        """Return shape, dtype and boxes of a tensor from the index; opens no weight file."""
        return self.tensor(name)

    def origin(self, name: str) -> Hashable:
        """Return a key of the stored bytes of a tensor; tied tensors have equal keys."""
        boxes = self.tensor(name).boxes
        return frozenset((box.path, box.offset, box.box, box.computed) for box in boxes)

    @property
    def sources(self) -> "tuple[Catalog, ...]":
        """The checkpoints whose files are read: this one, or those that this view derives from."""
        return (self,)

    def as_stored(self) -> "Catalog":
        """Return a view that lists pickled objects as they are, without the tensors in them."""
        return self

    def copies_agree(self, name: str) -> bool:  # noqa: ARG002  # subclasses override it
        """Return True if recorded digests prove that all replicas of a tensor are equal."""
        return False

    wants_digests: frozenset[str] = frozenset()
    """Names of the tensors whose digests `check_written` needs."""

    def check_written(self, digests: "Mapping[str, TensorDigest]") -> None:
        """Compare the digests of written tensors with those of the source, before publishing."""

    def check_unchanged(self, beside: Iterable[StoragePath] = ()) -> None:
        """Check that the checkpoint's files, and those in `beside`, are unchanged since opening.

        Call it after all reads.
        """
        files = (*self.files, *beside)
        first, others = self.facts.snapshot, self.facts.below
        below = {snapshot.place: snapshot for snapshot in others}
        for snapshot in (first, *others):
            if snapshot is not None:
                own = (at for at in files if below.get(at.parent, first) is snapshot)
                snapshot.check_unchanged(own)


class DerivedCatalog(Catalog, ABC):
    """A view of another checkpoint that computes each tensor on demand, such as a renamed one.

    It copies the facts of that checkpoint, except those with names of tensors if names change.
    """

    def __init__(
        self,
        base: Catalog,
        names: Iterable[str],
        extras: Mapping[str, object],
        mesh: DeviceMesh | None = None,
        facts: CheckpointFacts | None = None,
    ) -> None:
        facts = base.facts if facts is None else facts
        super().__init__(base.format, base.directory, names, base.files, mesh, extras, facts)
        self.base = base

    @property
    def sources(self) -> tuple[Catalog, ...]:
        """The checkpoints whose files are read."""
        return self.base.sources

    @abstractmethod
    def _look_up(self, name: str) -> StoredTensor:
        """Return tensor `name`, made from tensors of the checkpoint `base`."""

    def check_unchanged(self, beside: Iterable[StoragePath] = ()) -> None:
        """Check that the files of the other checkpoint have not changed since it was opened."""
        self.base.check_unchanged(beside)


def box_text(box: Box) -> str:
    """Return a box as the index that selects it.

    >>> box_text(((0, 2), (3, 7)))
    '[0:2, 3:7]'
    """
    return f"[{', '.join(f'{lo}:{hi}' for lo, hi in box)}]"


ReplicaKey: TypeAlias = tuple[Box, tuple[int, ...]]
"""A box and its index in each pending reduction. Replicas have the same key."""


def stored_reductions(layout: Layout) -> tuple[StoredReduction, ...]:
    """Return the pending reductions of a layout, one for each partial mesh axis.

    >>> stored_reductions(Layout(DeviceMesh(range(2), (2,)), "[R|P0]", (4,), "float32"))
    (StoredReduction(op='sum', addends=2, weights=()),)
    """
    mesh = layout.mesh
    return tuple(StoredReduction(p.op, mesh.shape[mesh.axis(p.axis)]) for p in layout.spec.partials)


def replica_keys(layout: Layout, physical_id: int) -> tuple[ReplicaKey, ...]:
    """Return the boxes that a device has; several if the sharded dim has parts, none if empty.

    >>> replica_keys(Layout(DeviceMesh(range(2), (2,)), "[S0]", (4,), "int8"), 1)
    ((((2, 4),), ()),)
    """
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
    """Return every nonempty box and the devices that store it, in the order of the mesh.

    >>> replica_holders(Layout(DeviceMesh(range(4), (2, 2)), "[S0]", (4,), "int8"))
    {(((0, 2),), ()): (0, 1), (((2, 4),), ()): (2, 3)}
    """
    holders: dict[ReplicaKey, list[int]] = {}
    for physical_id in layout.mesh.ids:
        for part in replica_keys(layout, physical_id):
            holders.setdefault(part, []).append(physical_id)
    return {part: tuple(ids) for part, ids in holders.items()}


@lru_cache(maxsize=1024)
def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of the full tensor.

    >>> whole_box((4, 3))
    ((0, 4), (0, 3))
    """
    return tuple((0, size) for size in shape)


def row_major_strides(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """Return the bytes from one element of a row-major box to the next along each dim.

    >>> row_major_strides((4, 3), 2)
    (6, 2)
    """
    return tuple(width * prod(shape[dim + 1 :]) for dim in range(len(shape)))


def unsharded_tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    path: StoragePath,
    offset: int,
    digest: Digest | None = None,
    strides: tuple[int, ...] | None = None,
    rank: int = 0,
) -> StoredTensor:
    """Return a tensor that is stored as one box; see `StoredBox`.

    >>> unsharded_tensor("w", (4, 3), "int8", storage_path("model"), 64).boxes[0].offset
    64
    """
    box = StoredBox(whole_box(shape), (), rank, path, offset, digest, strides)
    boxes = () if 0 in shape else (box,)
    return StoredTensor(name, shape, dtype, None, (), boxes)


# --- outputs: a format lays out the files, and one writer serves all formats

_PIECE_BYTES: Final = 1 << 20


class BoxEntry(NamedTuple):
    """One box in a file, stored under the name of its tensor."""

    tensor: str
    box: Box  # never empty
    addend: tuple[int, ...]  # index of the addend in each pending reduction
    crc32: int | None = None


def stored_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the shape under which a file stores boxes of one tensor, one after the other.

    A single box keeps its shape. Several boxes (parts of one shard) are stored as a flat array.

    >>> stored_shape([((0, 2), (0, 3))]), stored_shape([((0, 2), (0, 3)), ((4, 6), (0, 3))])
    ((2, 3), (12,))
    """
    return _shape(boxes[0]) if len(boxes) == 1 else (sum(map(box_size, boxes)),)


_shape = lru_cache(1024)(box_shape)
"""Shape of a box; equal boxes share one object."""


class FileEntry(NamedTuple):
    """A file of one rank with its boxes; those of one tensor follow each other."""

    name: str
    rank: int
    num_bytes: int
    boxes: Sequence[BoxEntry]


class OutputTensor(NamedTuple):
    """A tensor of an output: its new name and dtype, and the stored boxes to read."""

    name: str
    source: str  # its name in the checkpoint that is read
    shape: tuple[int, ...]
    dtype: str  # in the output

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return box_size(whole_box(self.shape)) * item_bytes(self.dtype)


class Extent(NamedTuple):
    """A box of a tensor, and where it is written: a file position, in row-major order."""

    tensor: OutputTensor
    box: Box
    offset: int  # in the file

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return box_size(self.box) * item_bytes(self.tensor.dtype)


class RawBytes(NamedTuple):
    """Bytes of a file outside of tensors, such as a header."""

    offset: int
    data: bytes | Callable[[], bytes]
    """Bytes, or a function that makes them at the time of writing."""

    def made(self) -> bytes:
        """Return `data`, or call it if it is a function."""
        return self.data if isinstance(self.data, bytes) else self.data()


Trailer: TypeAlias = Callable[[Sequence[int]], Iterable[RawBytes]]
"""Function from the CRC-32 of each extent to the bytes that depend on them, in ascending order.

The list is filled while the file is written: the bytes after an extent may depend on the CRC-32 of
all extents before them."""


class OutputFile(NamedTuple):
    """A file to be written; raw bytes and extents are in ascending order."""

    name: str  # relative to the output, with slashes; the output's own name if it is one file
    num_bytes: int
    raw: Sequence[RawBytes]
    extents: Sequence[Extent]
    trailer: Trailer | None = None

    @property
    def other_bytes(self) -> int:
        """Number of bytes outside of tensors."""
        return self.num_bytes - sum(extent.num_bytes for extent in self.extents)


def copied_bytes(path: StoragePath, start: int, num_bytes: int, offset: int) -> list[RawBytes]:
    """Return a range of another file, to be written at `offset`; it is read while writing."""

    def piece(at: int) -> bytes:
        with path.open() as file:
            return file.read(start + at, min(_PIECE_BYTES, num_bytes - at))

    return [RawBytes(offset + at, partial(piece, at)) for at in range(0, num_bytes, _PIECE_BYTES)]


def copied_file(path: StoragePath, name: str) -> OutputFile:
    """Return a copy of a file; the original is read while the copy is written."""
    with path.open() as file:
        size = file.num_bytes
    return OutputFile(name, size, copied_bytes(path, 0, size, 0), ())


Write: TypeAlias = Callable[[bytes], object]
"""Function that appends to a file."""


class Listing(NamedTuple):
    """The index file of an output, written last."""

    name: str
    fill: Callable[[Mapping[str, Sequence[int]], Write], object]
    """Function that writes the index in pieces, given the CRC-32 of every extent, by file."""


class Carried(NamedTuple):
    """Entries of a checkpoint, other than tensors, that are copied into the output."""

    names: frozenset[str]
    """Names in the checkpoint."""
    values: Mapping[str, object]
    """Name in the output to value: a plain value, or an object that is copied unread."""
    paths: Mapping[str, KeyPath]
    """Name in the output to the keys of a tensor or value in the nested state dict."""


class Target(NamedTuple):
    """The files of an output, and the position of every box of a tensor in them."""

    files: tuple[OutputFile, ...]
    directory: bool
    tensors: Sequence[OutputTensor]
    """All tensors of the output; empty ones may be in no file."""
    listing: Listing | None = None
    digested: bool = False  # True if the format needs the CRC-32 of every extent
    carried: frozenset[str] = frozenset()  # names of the copied entries of `extras`
    sidecars: tuple[str, ...] = ()  # names of the copied non-weight files
    beside: tuple[StoragePath, ...] = ()  # sidecars that existed when the source was opened
    not_copied: tuple[str, ...] = ()  # names of the files that are not copied
    sharding: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Tensor to its rule (empty if none matches) and its spec, if the output is for a mesh."""
    same: Mapping[str, str] = MappingProxyType({})
    """Tied tensor to the tensor whose bytes it shares; they are written once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.num_bytes for file in self.files)


def assign_boxes(
    mesh: DeviceMesh, tensors: Mapping[str, Layout], *, spread: bool = True
) -> dict[int, list[BoxEntry]]:
    """Return the boxes that each device stores, by tensor name; replicas are stored once.

    Every rank computes the same answer. Boxes with a single holder come first, then the others from
    the largest down: each goes to the holder with the fewest bytes so far, or without `spread` to
    the first one.

    >>> mesh = DeviceMesh(range(2), (2,))
    >>> chosen = assign_boxes(mesh, {name: Layout(mesh, "[R]", (3,), "int8") for name in "abc"})
    >>> [[entry.tensor for entry in chosen[rank]] for rank in mesh.ids]
    [['a', 'c'], ['b']]
    """
    parts_of = lru_cache(None)(replica_holders)
    load = dict.fromkeys(mesh.ids, 0)
    names = sorted(tensors)
    shared: list[tuple[int, ...]] = []  # the holders of each replicated box
    sizes = array("q")  # the bytes of each
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

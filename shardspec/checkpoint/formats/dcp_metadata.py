"""What `.metadata` of `torch.distributed.checkpoint` says, as plain values.

Source: ``metadata.py`` and ``planner.py`` of ``torch/distributed/checkpoint``.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeAlias

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import box_text
from shardspec.checkpoint.formats.megatron_core import (
    PLAN_NAMES,
    block_of,
    check_optimizer,
    original_shapes,
)
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.unpickler import (
    MOST_PICKLE_BYTES,
    Global,
    Names,
    Record,
    RefusedError,
    made_by,
    record_class,
    unpickle,
)
from shardspec.checkpoint.torch_files.values import TORCH_NAMES, sizes_of
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError

__all__ = ["DcpChunk", "DcpEntry", "DcpMetadata", "DcpPlace", "read_metadata"]

_MOST: Final = 2**63


class DcpPlace(NamedTuple):
    """Where something was written."""

    file: str
    """Name of the file in the directory."""
    offset: int
    """Position of the first byte in the file."""
    num_bytes: int


DcpChunk: TypeAlias = tuple[Box, DcpPlace]
"""Which part of a tensor it is, never an empty one, and where it lies."""


class DcpEntry(NamedTuple):
    """A tensor as the metadata lists it."""

    dtype: str
    """As torch names it (``"torch.float32"``)."""
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    chunks: tuple[DcpChunk, ...]
    """Those that hold any element, no two alike."""
    repeated: bool
    """Whether one was listed more often, as older versions do where they keep replicas."""
    block: tuple[int, ...] | None = None
    """Shape of the blocks of which chunks are stretches, where Megatron-core made them flat."""


class DcpMetadata(NamedTuple):
    """What there is, and where."""

    tensors: Mapping[str, DcpEntry]
    others: Mapping[str, DcpPlace]
    """Entries that are no tensors."""
    paths: Mapping[str, tuple[str | int, ...]]
    """Where in nested dicts and lists an entry was, where the metadata says so."""
    by_file: Mapping[str, list[DcpPlace]]
    """All that lies in a file, by its name."""


# --- the three kinds of objects of which the metadata has one a chunk


class _ChunkRecord(metaclass=Global):
    """A `ChunkStorageMetadata`: where a chunk starts, and its sizes."""

    __slots__ = ("offsets", "sizes")
    name: ClassVar[str] = "chunk"

    def __setstate__(self, state: dict[str, object]) -> None:
        self.offsets, self.sizes = state.get("offsets"), state.get("sizes")
        # The unpickler keeps the dict until it is done.
        state.clear()


class _IndexRecord(metaclass=Global):
    """A `MetadataIndex`: the name of a tensor, and where a chunk of it starts."""

    __slots__ = ("fqn", "offset")
    name: ClassVar[str] = "index"

    def __setstate__(self, state: dict[str, object]) -> None:
        self.fqn, self.offset = state.get("fqn"), state.get("offset")
        state.clear()


class _InfoRecord(metaclass=Global):
    """A `_StorageInfo`: where in which file something lies."""

    __slots__ = ("place", "transforms")
    name: ClassVar[str] = "info"

    def __setstate__(self, state: dict[str, object]) -> None:
        file, start, length = map(state.get, ("relative_path", "offset", "length"))
        if (
            not (isinstance(file, str) and _is_utf8(file))
            or not (isinstance(start, int) and 0 <= start < _MOST)
            or not (isinstance(length, int) and 0 <= length < _MOST)
        ):
            raise RefusedError("lists a place that is none; it is damaged")
        self.place = DcpPlace(file, start, length)
        self.transforms = state.get("transform_descriptors")
        state.clear()


_HOME: Final = "torch.distributed.checkpoint.metadata"
_OLD_HOME: Final = "torch.distributed._shard.sharded_tensor.metadata"
_MEMORY_FORMAT: Final = record_class("memory format")
_ENUMS: Final = (_MEMORY_FORMAT, PLAN_NAMES["torch.distributed.checkpoint.planner.WriteItemType"])


def _member(*args: object) -> Record:
    """Stand for a member of an enum, as Python 3.11.0 to 3.11.3 pickle them."""
    match args:
        case kind, str() as name if kind in _ENUMS:
            return Record(name)
    raise ValueError(
        "only a memory format is taken from its class by name; nothing of it was run. If you trust "
        "its writer, save it again as a state dict of tensors and plain values"
    )


_NAMES: Final[Names] = {
    **TORCH_NAMES,
    **PLAN_NAMES,
    f"{_HOME}.Metadata": record_class("Metadata"),
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": record_class("Metadata"),
    f"{_HOME}.TensorStorageMetadata": record_class("tensor"),
    f"{_HOME}.BytesStorageMetadata": record_class("bytes"),
    f"{_HOME}.StorageMeta": record_class("StorageMeta"),
    f"{_HOME}.ChunkStorageMetadata": _ChunkRecord,
    f"{_HOME}.MetadataIndex": _IndexRecord,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _InfoRecord,
    # How a tensor lay in memory; torch 2.2 and before had both elsewhere.
    f"{_HOME}.TensorProperties": record_class("properties"),
    f"{_OLD_HOME}.TensorProperties": record_class("properties"),
    f"{_HOME}._MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{_OLD_HOME}.MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    "builtins.getattr": made_by("builtins.getattr", _member),
    # Where the checkpoint was once; shown to nobody.
    **{
        f"{home}.{kind}": record_class("path")
        for home in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}

_Places: TypeAlias = dict[tuple[str, tuple[int, ...] | None], DcpPlace]
"""By name and, for a chunk, by its offsets."""
_Boxes: TypeAlias = dict[
    tuple[tuple[int, ...], int], dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Box, int]]
]
"""For shape and item size of a tensor, the box of offsets and sizes, and its bytes: many tensors
are cut alike."""


def _read_root(path: Path) -> Record:
    """Return what the pickle says; its bytes are let go of."""
    with SourceFile(path) as file:
        if file.num_bytes > MOST_PICKLE_BYTES:
            raise CheckpointError(
                f"{path}: has {file.num_bytes} bytes, past the limit of {MOST_PICKLE_BYTES}"
            )
        root = unpickle(file.read(0, file.num_bytes), _NAMES, path, "metadata")
    if not isinstance(root, Record) or root.name != "Metadata":
        raise CheckpointError(f"{path}: is no metadata of a torch distributed checkpoint")
    return root


def _entries(
    listed: dict[object, object],
    places: _Places,
    originals: Mapping[str, tuple[int, ...]],
    path: Path,
) -> tuple[dict[str, DcpEntry], dict[str, DcpPlace]]:
    """Return the tensors, and where other entries lie."""
    tensors: dict[str, DcpEntry] = {}
    others: dict[str, DcpPlace] = {}
    known: _Boxes = {}
    for name, entry in listed.items():
        if not isinstance(name, str) or not _is_utf8(name) or not isinstance(entry, Record):
            raise CheckpointError(f"{path}: has an entry without a name or a kind; it is damaged")
        if entry.name == "tensor":
            found = _entry(name, entry, places, path, known)
            original = originals.get(name)
            if original is not None:
                block = block_of(name, found.shape, original, path)
                found = found._replace(shape=original, block=block)
            tensors[name] = found
            entry.state = None
        elif entry.name != "bytes":
            raise CheckpointError(f"{path}: entry {name!r} is of no known kind; it is damaged")
        elif (name, None) not in places:
            raise CheckpointError(f"{path}: says of no file that it holds entry {name!r}")
        else:
            others[name] = places[name, None]
    return tensors, others


def _is_utf8(name: str) -> bool:
    """Say whether a name can be written: a pickle may hold halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _places(storage: dict[object, object], path: Path) -> _Places:
    """Return where each thing lies; the records are let go of on the way."""
    places: _Places = {}
    try:
        for index in list(storage):
            info = storage.pop(index)
            if not isinstance(index, _IndexRecord) or not isinstance(info, _InfoRecord):
                raise ValueError("a place is none")
            fqn, offset = index.fqn, None if index.offset is None else sizes_of(index.offset)
            if not isinstance(fqn, str):
                raise ValueError("a name is none")
            if info.transforms:
                kinds = info.transforms if isinstance(info.transforms, list | tuple) else ()
                shown = ", ".join(kind[:40] for kind in kinds[:4] if isinstance(kind, str))
                raise CheckpointError(
                    f"{path}: entry {fqn!r} was transformed when it was written ({shown}); load it "
                    "with torch and save it again without _extensions"
                )
            places[fqn, offset] = info.place
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: lists where things lie ({error}); damaged") from None
    return places


def _entry(name: str, entry: Record, places: _Places, path: Path, known: _Boxes) -> DcpEntry:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or not isinstance(chunks, list):
        raise CheckpointError(f"{path}: tensor {name!r} has no dtype or no chunks; it is damaged")
    boxes: dict[Box, DcpPlace] = {}
    repeated = False
    try:
        shape = sizes_of(entry.get("size"))
        size = _item_bytes(dtype.name)
        alike = known.setdefault((shape, size), {})
        for chunk in chunks:
            if not isinstance(chunk, _ChunkRecord):
                raise ValueError("a chunk is none")
            offsets, sizes = sizes_of(chunk.offsets), sizes_of(chunk.sizes)
            if 0 in sizes:
                # Ranks that hold nothing write nothing that matters.
                continue
            known_box = alike.get((offsets, sizes))
            if known_box is None:
                known_box = alike[offsets, sizes] = _box(offsets, sizes, shape), prod(sizes) * size
            box, num_bytes = known_box
            place = places.get((name, offsets))
            if place is None:
                raise ValueError(f"no file holds its chunk {box_text(box)}")
            if num_bytes > place.num_bytes:
                raise ValueError(
                    f"its chunk {box_text(box)} is said to lie in {place.num_bytes} bytes, which "
                    "do not hold it"
                )
            repeated |= box in boxes
            boxes[box] = place
    except (AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {name!r}: {error}; the metadata contradicts itself, save again"
        ) from None
    return DcpEntry(dtype.name, shape, tuple(boxes.items()), repeated)


def _item_bytes(dtype: str) -> int:
    """Return the bytes of an element; 0 for dtypes that are refused once they are asked for."""
    try:
        return item_bytes(dtype_name(dtype))
    except DTypeError:
        return 0


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """Return the box of a chunk; raise `ValueError` if there is none in the tensor."""
    box = tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))
    if len(box) != len(shape) or any(hi > n for (_, hi), n in zip(box, shape, strict=True)):
        raise ValueError(f"its chunk {box_text(box)} lies outside of shape {list(shape)}")
    return box


def _paths(planner_data: object) -> dict[str, tuple[str | int, ...]]:
    """Return the places of entries as torch's own planner keeps them; others are their own."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: place
        for name, place in planner_data.items()
        if isinstance(name, str)
        and isinstance(place, tuple)
        and all(isinstance(step, str | int) for step in place)
    }


def read_metadata(path: Path) -> DcpMetadata:
    """Read and check the metadata; nothing of the files that it names is looked at."""
    root = _read_root(path)
    listed, storage = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{path}: lacks its list of entries or of files; it is damaged")
    places = _places(storage, path)
    originals = original_shapes(root.get("mcore_data"), path)
    tensors, others = _entries(listed, places, originals, path)
    check_optimizer({name: entry.shape for name, entry in tensors.items()}, path)
    by_file: dict[str, list[DcpPlace]] = {}
    for place in places.values():
        by_file.setdefault(place.file, []).append(place)
    return DcpMetadata(tensors, others, _paths(root.get("planner_data")), by_file)

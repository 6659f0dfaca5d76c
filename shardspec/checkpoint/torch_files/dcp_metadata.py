"""Reads the file ``.metadata`` of torch's distributed checkpoints, which locates chunks of tensors.

The file is a pickle. Source: metadata.py and filesystem.py of torch/distributed/checkpoint;
strategies/torch.py and resharding.py of megatron/core/dist_checkpointing.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Final, TypeAlias, TypeGuard

from shardspec.boxes import Box, box_size, row_major_boxes
from shardspec.checkpoint.catalog import FileBox, Outline, StoredObject, box_text
from shardspec.checkpoint.state.state_dict import is_path
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.strict_json import is_size
from shardspec.checkpoint.torch_files import unpickler, values
from shardspec.checkpoint.torch_files.unpickler import Global, Record, made_by, record_class
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError
from shardspec.resharding.state import KeyPath, Place

METADATA_NAME: Final = ".metadata"
_ROOM_PER_BYTE: Final = 24
"""Bytes of memory per byte of metadata; millions of chunks take half of that."""
Places: TypeAlias = dict[tuple[str, tuple[int, ...] | None], StoredObject]
"""(Name of an entry, offsets of its chunk or None) -> its place."""


@dataclass(frozen=True, slots=True)
class StoredChunk(FileBox):
    """A box of a tensor, and the chunk that contains it."""

    place: StoredObject
    stored: tuple[int, ...]
    """Shape of the chunk."""
    start: int = 0
    """Elements of the chunk before the box; a flat chunk may contain several boxes."""


_HOME: Final = "torch.distributed.checkpoint"
_PATHS: Final = "PosixPath PurePosixPath WindowsPath PureWindowsPath"
_KINDS: Final = {
    f"{_HOME}.metadata": (
        "Metadata StorageMeta TensorProperties TensorStorageMetadata BytesStorageMetadata "
        "ChunkStorageMetadata MetadataIndex _MEM_FORMAT_ENCODING"
    ),
    # Names of torch 2.2 and before.
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    f"{_HOME}.filesystem": "_StorageInfo _StoragePrefix",
    # The save plans of all ranks, from Megatron-core 0.10 to 0.16; not used.
    f"{_HOME}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    # Where the checkpoint was written; not used.
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
_ENUMS: Final = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "WriteItemType")


def _member(*args: object) -> Record:
    """Return a record for an enum member pickled by name, as by Python 3.11.0 to 3.11.3."""
    match args:
        case (Global() as kind, str() as name) if kind.name in _ENUMS:
            return Record(name)
    raise ValueError(
        "only members of known enums are read by name; nothing of it was run. If you trust "
        "its author, save it again as a state dict of tensors and plain values"
    )


class _Size(tuple[int, ...]):
    """The result of a call of torch.Size: checked numbers."""

    __slots__ = ()


@lru_cache(1 << 17)
def _size(value: object = ()) -> _Size:
    """Return a pickled torch.Size, cached; raises ValueError unless it has whole numbers."""
    return _Size(values.sizes_of(value))


def _sizes(value: object) -> tuple[int, ...]:
    return value if type(value) is _Size else values.sizes_of(value)


_NAMES: Final[unpickler.PickledNames] = {
    **values.TORCH_NAMES,
    "torch.Size": made_by("torch.Size", _size),
    **{f"{home}.{kind}": record_class(kind) for home in _KINDS for kind in _KINDS[home].split()},
    "builtins.getattr": made_by("builtins.getattr", _member),
}


def read_metadata(
    path: StoragePath,
) -> tuple[dict[object, object], Places, dict[object, object], dict[str, KeyPath]]:
    """Return four dicts by name: entries, places in files, Megatron's flat shapes, nested keys."""
    with path.open() as file:
        data = file.read(0, min(file.num_bytes, unpickler.MAX_PICKLE_BYTES + 1))
    root = unpickler.unpickle(data, _NAMES, path, "metadata", room_per_byte=_ROOM_PER_BYTE)
    if not isinstance(root, Record) or root.name not in ("Metadata", "MCoreMetadata"):
        raise CheckpointError(f"{path}: is not metadata of a torch distributed checkpoint")
    match root.get("state_dict_metadata"), root.get("storage_data"), root.get("mcore_data") or {}:
        case (dict() as entries, dict() as storage, dict() as flat):
            return entries, _places(storage, path), flat, dict(_keys(root.get("planner_data")))
    raise CheckpointError(f"{path}: lacks its list of entries or of files; it is damaged")


def _keys(planned: object) -> Iterator[tuple[str, KeyPath]]:
    """Yield (name, nested keys) of the entries in `planned`, except those at the top level."""
    for name, keys in planned.items() if isinstance(planned, dict) else ():
        # To torch, a number is a position in a list.
        if is_text(name) and isinstance(keys, tuple) and keys != (name,):
            path = tuple(Place((key,)) if type(key) is int else key for key in keys)
            if is_path(path) and ".".join(map(str, keys)) == name:
                yield name, path


def _places(storage: Mapping[Any, Any], path: StoragePath) -> Places:
    """Return (entry, offsets of a chunk or None) -> its file, position and length."""
    places: Places = {}
    files: dict[str, StoragePath] = {}
    for index, info in storage.items():
        try:
            key, place = index.state, info.state
            name, at, file = key["fqn"], key.get("offset"), place["relative_path"]
            start, size = place["offset"], place["length"]
            offsets = None if at is None else _sizes(at)
            named = file in files or is_text(file)
            if not (named and isinstance(name, str) and is_size(start) and is_size(size)):
                raise ValueError
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: storage_data has an entry without a name, file, offset or length; it is "
                "damaged"
            ) from None
        if file not in files:
            files[file] = file_inside(path.parent, file, path)
        places[name, offsets] = StoredObject(files[file], start, size)
        if transforms := place.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: entry {name!r} was transformed when it was written "
                f"({transforms!r:.100}); load it with torch and save it again without _extensions"
            )
    return places


def outline_of(
    name: str, entry: Record, places: Places, ranks: Mapping[StoragePath, int], flat: object
) -> tuple[Outline[StoredChunk], bool]:
    """Return (tensor as the metadata describes it, True if a chunk is listed twice).

    Raises ValueError or TypeError if the metadata is inconsistent.
    """
    match entry.get("properties"), entry.get("chunks"):
        case (Record(state=(Global(name=dtype), *_)), list() as listed):
            shape, item = values.sizes_of(entry.get("size")), 0
        case _:
            raise ValueError("it has no dtype or no chunks")
    # Other dtypes are refused when the tensor is selected.
    with suppress(DTypeError):
        dtype = dtype_name(dtype)
        item = item_bytes(dtype)
    by_box: dict[Box, StoredChunk] = {}
    repeated = False
    for chunk in listed:
        if not isinstance(chunk, Record):
            raise ValueError(f"a chunk is a {type(chunk).__name__}, not a ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        if 0 in sizes:
            continue
        box = _box(offsets, sizes, shape)
        place = places.get((name, offsets))
        if place is None:
            raise ValueError(f"no file contains its chunk {box_text(box)}")
        if prod(sizes) * item > place.num_bytes:
            raise ValueError(
                f"its chunk {box_text(box)} is listed with {place.num_bytes} bytes, which is too "
                "few"
            )
        repeated |= box in by_box
        by_box[box] = StoredChunk(box, (), ranks[place.path], place.path, place, sizes)
    chunks = tuple(by_box.values())
    if flat in (None, {}):
        return Outline(name, shape, dtype, None, (), chunks), repeated
    match flat:
        case {"nd_reformulated_orig_global_shape": original, **rest} if not rest:
            full_shape = values.sizes_of(original)
            chunks = tuple(
                replace(chunk, box=part, start=start)
                for chunk in chunks
                for part, start in unflattened(shape, full_shape, chunk.box)
            )
            return Outline(name, full_shape, dtype, None, (), chunks), repeated
    raise ValueError(
        f"mcore_data has {flat!r:.100}, unknown up to Megatron-core 0.16; convert it with "
        "Megatron's own tools to fully_reshardable"
    )


@lru_cache(1 << 17)
def _box(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """Return the box of a chunk; raises `ValueError` if it is not inside the tensor."""
    if not len(offsets) == len(sizes) == len(shape):
        raise ValueError(
            f"a chunk at {list(offsets)} of shape {list(sizes)} is in a tensor with {len(shape)} "
            "dims"
        )
    box = tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))
    if any(hi > n for (_, hi), n in zip(box, shape, strict=True)):
        raise ValueError(f"its chunk {box_text(box)} is outside of shape {list(shape)}")
    return box


def is_text(name: object) -> TypeGuard[str]:
    """Return True for text that can be encoded: a pickle may contain lone surrogates."""
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        return False


def unflattened(
    flat: tuple[int, ...], shape: tuple[int, ...], chunk: Box
) -> Iterator[tuple[Box, int]]:
    """Yield the boxes in a chunk of a flat tensor, each with the number of elements before it.

    >>> list(unflattened((2, 1, 6), (4, 3), ((1, 2), (0, 1), (2, 6))))
    [(((2, 3), (2, 3)), 0), (((3, 4), (0, 3)), 1)]
    """
    *counts, elements = flat or (-1,)
    block = tuple(size // max(1, count) for size, count in zip(shape, counts, strict=False))
    covered = tuple(count * size for count, size in zip(counts, block, strict=False))
    *at, (lo, hi) = chunk or ((0, 0),)
    several = any(end - start != 1 for start, end in at)
    if len(counts) != len(shape) or covered != shape or prod(block) != elements or several:
        raise ValueError(
            f"its flat shape {list(flat)} does not divide its shape {list(shape)} into blocks, or "
            f"chunk {box_text(chunk)} is in several blocks"
        )
    start_at = 0
    for inner in row_major_boxes(block, lo, hi):
        box = tuple(
            (first + start * size, last + start * size)
            for (first, last), (start, _), size in zip(inner, at, block, strict=True)
        )
        yield box, start_at
        start_at += box_size(box)

"""Reading the directories of `torch.distributed.checkpoint`: ``.metadata`` and ``*.distcp``.

The metadata, a pickle, says which chunks make up every tensor and in which file each lies. A chunk
is a small zip of its own, in which the tensor's bytes are read in place. Source: ``metadata.py``,
``planner.py``, ``filesystem.py`` and ``default_planner.py`` of ``torch/distributed/checkpoint``.

Nothing in a file names its rank, and the metadata has no digests. So a file in the place of another
is found by the lengths, shapes and dtypes of its chunks. **That files were swapped or copied cannot
be told where these are equal.**
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.catalog import (
    Catalog,
    FileBox,
    LazyTensorCache,
    OpaqueValue,
    Outline,
    StoredBox,
    StoredObject,
    StoredTensor,
    box_text,
)
from shardspec.checkpoint.formats.megatron_core import (
    MEGATRON_OBJECT,
    PLAN_NAMES,
    block_of,
    boxes_of_stretch,
    check_optimizer,
    original_shapes,
)
from shardspec.checkpoint.formats.names import (
    DCP,
    DCP_OF_A_RANK,
    DCP_OWN_METADATA,
    METADATA_NAME,
)
from shardspec.checkpoint.formats.torch_file import plain_value
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.unpickler import (
    MOST_PICKLE_BYTES,
    Global,
    Names,
    Record,
    UnlistedNameError,
    made_by,
    record_class,
    unpickle,
)
from shardspec.checkpoint.torch_files.values import (
    TORCH_NAMES,
    TorchTensor,
    read_torch_pickle,
    sizes_of,
    tensor_place,
)
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError

_MOST_OBJECT_BYTES: Final = 2**26


class _Place(NamedTuple):
    """Where something was written."""

    file: str
    """Name of the file in the directory."""
    offset: int
    num_bytes: int


class _Entry(NamedTuple):
    """A tensor as the metadata lists it."""

    dtype: str
    """As torch names it (``"torch.float32"``)."""
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    chunks: tuple[tuple[Box, _Place], ...]
    """Those that hold any element, no two alike, and where they lie."""
    repeated: bool
    """Whether one was listed more often, as older versions list replicas that they keep."""
    block: tuple[int, ...] | None
    """Shape of the blocks of which chunks are stretches, where Megatron-core made them flat."""

    def boxes(self, chunk: Box) -> list[tuple[Box, int]]:
        """Return the boxes that a chunk holds, and how many elements come before each."""
        return [(chunk, 0)] if self.block is None else boxes_of_stretch(self.block, chunk)


class DcpCheckpoint(Catalog):
    """A `Catalog` over a directory of torch's; made by `open_dcp`."""

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, _Entry],
        others: Mapping[str, _Place],
        files: Mapping[str, Path],
    ) -> None:
        # Names inside nested dicts and lists are joined by dots.
        super().__init__(DCP, directory, tensors, (directory / METADATA_NAME, *files.values()))
        self._entries, self._others, self._files = tensors, others, files
        # Megatron loads these by their names alone, and what is in them is its own affair.
        self.objects = {
            name: StoredObject(files[place.file], place.offset, place.num_bytes)
            for name, place in others.items()
            if MEGATRON_OBJECT.search(name) and place.num_bytes <= _MOST_OBJECT_BYTES
        }
        # A file is its rank's, as its name says, or else of its place among the files.
        self._ranks = {
            name: int(match[1]) if (match := DCP_OF_A_RANK.fullmatch(name)) else at
            for at, name in enumerate(files)
        }
        self._tensors = LazyTensorCache(self._look_up)

    @cached_property
    def extras(self) -> Mapping[str, object]:
        """Entries that are no tensors; read when they are first asked for."""
        return {name: self._other(name, place) for name, place in self._others.items()}

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor by the metadata alone."""
        entry = self._entries[name]
        boxes = tuple(
            FileBox(box, (), self._ranks[place.file], self._files[place.file])
            for chunk, place in entry.chunks
            for box, _ in entry.boxes(chunk)
        )
        try:
            return Outline(name, entry.shape, dtype_name(entry.dtype), None, (), boxes)
        except DTypeError:
            raise CheckpointError(
                f"{self.directory}: tensor {name!r} is of dtype {entry.dtype}, which is not "
                "supported; cast it before saving, or leave it out"
            ) from None

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor; the headers of its chunks are read, and checked against the metadata."""
        return self._tensors(name)

    def origin(self, name: str) -> Hashable:
        """Return where its chunks lie, by the metadata."""
        chunks = self._entries[name].chunks
        return frozenset((place.file, place.offset, box) for box, place in chunks)

    def _look_up(self, name: str) -> StoredTensor:
        entry, like = self._entries[name], self.outline(name)
        look = partial(self._chunk, like, entry)
        with prefetch_map(entry.chunks, look, prefetch_depth(self.directory)) as chunks:
            boxes = tuple(box for chunk in chunks for box in chunk)
            return StoredTensor(name, like.shape, like.dtype, None, (), boxes)

    def _chunk(
        self, like: Outline[FileBox], entry: _Entry, chunk: tuple[Box, _Place]
    ) -> list[StoredBox]:
        box, (in_file, offset, num_bytes) = chunk
        path = self._files[in_file]
        what = f"{path}: tensor {like.name!r}, box {box_text(box)}"
        with SourceFile(path) as file:
            found = read_torch_zip(file, offset, num_bytes, what)
            value = read_torch_pickle(found.pickle(file), what)
            if not isinstance(value, TorchTensor):
                raise CheckpointError(
                    f"{what}: holds a {type(value).__name__}, not a tensor; the file is damaged or "
                    "from another save"
                )
            if (value.dtype, value.shape) != (like.dtype, box_shape(box)):
                raise CheckpointError(
                    f"{what}: is {list(value.shape)} of {value.dtype} there, but {METADATA_NAME} "
                    f"says {list(box_shape(box))} of {like.dtype}; the file is from another save, "
                    "restore the right one"
                )
            place = tensor_place(value, file, found)
        if entry.block is not None and place.strides is not None:
            raise CheckpointError(f"{what}: a stretch of a flat tensor has strides; it is damaged")
        rank, size = self._ranks[in_file], item_bytes(like.dtype)
        boxes = []
        for part, start in entry.boxes(box):
            at = place.offset + start * size
            boxes.append(StoredBox(part, (), rank, path, at, place.digest, place.strides))
        return boxes

    def _other(self, name: str, place: _Place) -> object:
        path = self._files[place.file]
        what = f"{path}: entry {name!r}"
        with SourceFile(path) as file:
            found = read_torch_zip(file, place.offset, place.num_bytes, what)
            try:
                return plain_value(read_torch(found, found.pickle(file)))
            except UnlistedNameError as error:
                return OpaqueValue(f"an object that is not read: {error}")


def open_dcp(directory: Path) -> DcpCheckpoint:
    """Read the metadata, and check that the files it names are there and of the right length."""
    path = file_inside(directory, METADATA_NAME, directory)
    if not path_exists(path):
        why = "which is written last; the save did not finish"
        if any(DCP_OWN_METADATA.fullmatch(other.name) for other in directory.iterdir()):
            why = "each rank has one of its own; save with use_collectives=True"
        raise CheckpointError(f"{directory}: has no {METADATA_NAME}, {why}")
    tensors, others, places = _read_metadata(path)
    by_file: dict[str, list[_Place]] = {}
    for place in places:
        by_file.setdefault(place.file, []).append(place)
    files = {name: file_inside(directory, name, path) for name in sorted(by_file)}
    # Of replicas, which older versions can be told to keep, only one place is listed.
    exact = not any(entry.repeated for entry in tensors.values())
    for name, path in files.items():
        _check_file(path, by_file[name], exact=exact)
    return DcpCheckpoint(directory, tensors, others, files)


def _check_file(path: Path, places: list[_Place], *, exact: bool) -> None:
    listed = f"but {METADATA_NAME} lists"
    if not path_exists(path):
        raise CheckpointError(
            f"{path}: is missing, {listed} {len(places)} entries in it; restore it or save again"
        )
    with SourceFile(path) as file:
        num_bytes = file.num_bytes
    end = 0
    for place in sorted(places, key=lambda place: place.offset):
        if place.offset < end:
            raise CheckpointError(
                f"{path.parent / METADATA_NAME}: two entries in {path.name} share byte "
                f"{place.offset}; the metadata contradicts itself"
            )
        end = place.offset + place.num_bytes
    if end > num_bytes or (exact and end < num_bytes):
        why = "was cut short" if end > num_bytes else "is of another rank or another save"
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, {listed} entries up to byte {end}; it {why}, restore "
            "the right one"
        )


def _slim_record(name: str, *fields: str) -> Global:
    """Return a class of records, of which there is one a chunk, that keep only some members."""

    def set_state(record: object, state: dict[str, object]) -> None:
        for field in fields:
            setattr(record, field, state.get(field))
        # The unpickler keeps the dict until it is done.
        state.clear()

    return Global(name, (), {"__slots__": fields, "__setstate__": set_state})


_CHUNK: Final[Any] = _slim_record("chunk", "offsets", "sizes")
_INDEX: Final[Any] = _slim_record("index", "fqn", "offset")
_INFO: Final[Any] = _slim_record(
    "info", "relative_path", "offset", "length", "transform_descriptors"
)
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


_HOME: Final = "torch.distributed.checkpoint.metadata"
_OLD_HOME: Final = "torch.distributed._shard.sharded_tensor.metadata"
_NAMES: Final[Names] = {
    **TORCH_NAMES,
    **PLAN_NAMES,
    f"{_HOME}.Metadata": record_class("Metadata"),
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": record_class("Metadata"),
    f"{_HOME}.TensorStorageMetadata": record_class("tensor"),
    f"{_HOME}.BytesStorageMetadata": record_class("bytes"),
    f"{_HOME}.StorageMeta": record_class("StorageMeta"),
    f"{_HOME}.ChunkStorageMetadata": _CHUNK,
    f"{_HOME}.MetadataIndex": _INDEX,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _INFO,
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

_Places: TypeAlias = dict[tuple[str, tuple[int, ...] | None], _Place]  # by name and offsets


def _read_metadata(
    path: Path,
) -> tuple[dict[str, _Entry], dict[str, _Place], Collection[_Place]]:
    """Return the tensors, where other entries lie, and all places; no file is looked at."""
    with SourceFile(path) as file:
        if file.num_bytes > MOST_PICKLE_BYTES:
            raise CheckpointError(
                f"{path}: has {file.num_bytes} bytes, past the limit of {MOST_PICKLE_BYTES}"
            )
        root = unpickle(file.read(0, file.num_bytes), _NAMES, path, "metadata")
    if not isinstance(root, Record) or root.name != "Metadata":
        raise CheckpointError(f"{path}: is no metadata of a torch distributed checkpoint")
    listed, storage = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{path}: lacks its list of entries or of files; it is damaged")
    places = _places(storage, path)
    originals = original_shapes(root.get("mcore_data"), path)
    tensors: dict[str, _Entry] = {}
    others: dict[str, _Place] = {}
    # Many tensors are cut alike.
    boxes = lru_cache(None)(_box)
    for name, entry in listed.items():
        kind = entry.name if isinstance(entry, Record) else None
        if not _is_text(name) or kind not in ("tensor", "bytes"):
            raise CheckpointError(f"{path}: has an entry without a name or a kind; it is damaged")
        if kind == "bytes":
            if (name, None) not in places:
                raise CheckpointError(f"{path}: says of no file that it holds entry {name!r}")
            others[name] = places[name, None]
            continue
        try:
            found = _entry(name, entry, places, boxes)
        except (AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: tensor {name!r}: {error}; the metadata contradicts itself, save again"
            ) from None
        if name in originals:
            block = block_of(name, found.shape, originals[name], path)
            found = found._replace(shape=originals[name], block=block)
        tensors[name] = found
        entry.state = None
    check_optimizer({name: entry.shape for name, entry in tensors.items()}, path)
    return tensors, others, places.values()


def _places(storage: dict[object, object], path: Path) -> _Places:
    """Return where each thing lies; the records are let go of on the way."""
    places: _Places = {}
    for index in list(storage):
        info = storage.pop(index)
        try:
            if not isinstance(index, _INDEX) or not isinstance(info, _INFO):
                raise ValueError
            name, offset = index.fqn, None if index.offset is None else sizes_of(index.offset)
            place = _Place(info.relative_path, info.offset, info.length)
            transforms = info.transform_descriptors
            in_range = all(isinstance(at, int) and 0 <= at < 2**63 for at in place[1:])
            if not (isinstance(name, str) and _is_text(place.file) and in_range):
                raise ValueError
        except (AttributeError, ValueError):
            raise CheckpointError(
                f"{path}: the metadata lists a place that is none; it is damaged"
            ) from None
        if transforms:
            kinds = transforms if isinstance(transforms, list | tuple) else ()
            shown = ", ".join(kind[:40] for kind in kinds[:4] if isinstance(kind, str))
            raise CheckpointError(
                f"{path}: entry {name!r} was transformed when it was written ({shown}); load it "
                "with torch and save it again without _extensions"
            )
        places[name, offset] = place
    return places


def _entry(
    name: str, entry: Record, places: _Places, box_of: Callable[..., tuple[Box, int]]
) -> _Entry:
    """Return what is said of a tensor; raise `ValueError` where that cannot be."""
    properties, chunks = entry.get("properties"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or not isinstance(chunks, list):
        raise ValueError("has no dtype or no chunks")
    shape, size = sizes_of(entry.get("size")), 0
    # Other dtypes are refused once they are asked for.
    with suppress(DTypeError):
        size = item_bytes(dtype_name(dtype.name))
    boxes: dict[Box, _Place] = {}
    repeated = False
    for chunk in chunks:
        if not isinstance(chunk, _CHUNK):
            raise ValueError("a chunk is none")
        offsets, sizes = sizes_of(chunk.offsets), sizes_of(chunk.sizes)
        if 0 in sizes:
            # Ranks that hold nothing write nothing that matters.
            continue
        box, num_bytes = box_of(offsets, sizes, shape, size)
        place = places.get((name, offsets))
        if place is None:
            raise ValueError(f"no file holds its chunk {box_text(box)}")
        if num_bytes > place.num_bytes:
            raise ValueError(
                f"its chunk {box_text(box)} is said to lie in {place.num_bytes} bytes, which do "
                "not hold it"
            )
        repeated |= box in boxes
        boxes[box] = place
    return _Entry(dtype.name, shape, tuple(boxes.items()), repeated, None)


def _box(
    offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], size: int
) -> tuple[Box, int]:
    """Return the box of a chunk and its bytes; raise `ValueError` if it lies not in the tensor."""
    box = tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))
    if len(box) != len(shape) or any(hi > n for (_, hi), n in zip(box, shape, strict=True)):
        raise ValueError(f"its chunk {box_text(box)} lies outside of shape {list(shape)}")
    return box, prod(sizes) * size


def _is_text(name: object) -> bool:
    """Say whether a name can be written: a pickle may hold halves of characters."""
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        return False

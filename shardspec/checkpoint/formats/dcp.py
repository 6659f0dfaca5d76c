"""Reading the directories of `torch.distributed.checkpoint`: ``.metadata`` and ``*.distcp``.

The metadata, a pickle, says which chunks make up every tensor and in which file each lies. A chunk
is a small zip of its own, in which the tensor's bytes are read in place. Source: ``metadata.py``,
``filesystem.py`` and ``default_planner.py`` of ``torch/distributed/checkpoint``.

Nothing in a file names its rank, and the metadata has no digests. So a file in the place of another
is found by the lengths, shapes and dtypes of its chunks. **That files were swapped or copied cannot
be told where these are equal.**
"""

from collections.abc import Hashable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.catalog import (
    Catalog,
    FileBox,
    LazyTensorCache,
    OpaqueValue,
    Outline,
    StoredBox,
    StoredTensor,
    box_text,
)
from shardspec.checkpoint.formats.names import (
    DCP,
    DCP_OF_A_RANK,
    DCP_OWN_METADATA,
    METADATA_NAME,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.torch_files.pickle_screen import MOST_PICKLE_BYTES, RefusedError
from shardspec.checkpoint.torch_files.torch_dtensors import read_dtensors
from shardspec.checkpoint.torch_files.torch_state import plain_value
from shardspec.checkpoint.torch_files.torch_values import (
    TORCH_NAMES,
    TorchTensor,
    read_torch_pickle,
    sizes_of,
    tensor_place,
)
from shardspec.checkpoint.torch_files.unpickler import (
    Global,
    Names,
    Record,
    UnlistedNameError,
    made_by,
    record_class,
    unpickle,
)
from shardspec.checkpoint.torch_files.zip_files import read_torch_zip
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError

__all__ = ["DcpCheckpoint", "open_dcp"]

_MOST: Final = 2**63
_MOST_KEPT: Final = 1024
"""Pickles of chunks whose meaning is kept: they differ only where shapes or dtypes do."""
_MOST_KEPT_BYTES: Final = 1024
"""Of each; torch writes some 200."""


class _Place(NamedTuple):
    """Where something was written."""

    file: str
    """Name of the file in the directory."""
    offset: int
    """Position of the first byte in the file."""
    num_bytes: int


_Chunk: TypeAlias = tuple[Box, _Place]
"""Which part of a tensor it is, never an empty one, and where it lies."""


class _Entry(NamedTuple):
    """A tensor as the metadata lists it."""

    dtype: str
    """As torch names it (``"torch.float32"``)."""
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    chunks: tuple[_Chunk, ...]
    """Those that hold any element, no two alike."""
    repeated: bool
    """Whether one was listed more often, as older versions do where they keep replicas."""


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
        self.place = _Place(file, start, length)
        self.transforms = state.get("transform_descriptors")
        state.clear()


_HOME: Final = "torch.distributed.checkpoint.metadata"
_OLD_HOME: Final = "torch.distributed._shard.sharded_tensor.metadata"
_MEMORY_FORMAT: Final = record_class("memory format")


def _member(*args: object) -> Record:
    """Stand for a memory format, as Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    match args:
        case kind, str() as name if kind is _MEMORY_FORMAT:
            return Record(name)
    raise ValueError(
        "only a memory format is taken from its class by name; nothing of it was run. If you trust "
        "its writer, save it again as a state dict of tensors and plain values"
    )


_NAMES: Final[Names] = {
    **TORCH_NAMES,
    f"{_HOME}.Metadata": record_class("Metadata"),
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

_Places: TypeAlias = dict[tuple[str, tuple[int, ...] | None], _Place]
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
    listed: dict[object, object], places: _Places, path: Path
) -> tuple[dict[str, _Entry], dict[str, _Place]]:
    """Return the tensors, and where other entries lie."""
    tensors: dict[str, _Entry] = {}
    others: dict[str, _Place] = {}
    known: _Boxes = {}
    for name, entry in listed.items():
        if not isinstance(name, str) or not _is_utf8(name) or not isinstance(entry, Record):
            raise CheckpointError(f"{path}: has an entry without a name or a kind; it is damaged")
        if entry.name == "tensor":
            tensors[name] = _entry(name, entry, places, path, known)
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


def _entry(name: str, entry: Record, places: _Places, path: Path, known: _Boxes) -> _Entry:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or not isinstance(chunks, list):
        raise CheckpointError(f"{path}: tensor {name!r} has no dtype or no chunks; it is damaged")
    boxes: dict[Box, _Place] = {}
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
    return _Entry(dtype.name, shape, tuple(boxes.items()), repeated)


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


class DcpCheckpoint(Catalog):
    """A `Catalog` over a directory of torch's; made by `open_dcp`."""

    def __init__(
        self,
        directory: Path,
        entries: Mapping[str, _Entry],
        others: Mapping[str, _Place],
        paths: Mapping[str, tuple[str | int, ...]],
        files: Mapping[str, Path],
    ) -> None:
        # Names inside nested dicts and lists are joined by dots.
        super().__init__(DCP, directory, entries, (directory / METADATA_NAME, *files.values()))
        self._entries = entries
        self._other_places = others
        self.paths = paths
        """Where in nested dicts and lists an entry was, where the metadata says so."""
        self._files = files
        # A file is its rank's, as its name says, or else of its place among the files.
        matches = {name: DCP_OF_A_RANK.fullmatch(name) for name in files}
        self._ranks = {
            name: at if match is None else int(match[1])
            for at, (name, match) in enumerate(matches.items())
        }
        self._tensors = LazyTensorCache(self._look_up)
        self._meant: dict[bytes, TorchTensor] = {}
        self._others: dict[str, object] | None = None

    @property
    def extras(self) -> Mapping[str, object]:
        """Entries that are no tensors; read when they are first asked for."""
        if self._others is None:
            self._others = {
                name: self._other(name, place) for name, place in self._other_places.items()
            }
        return self._others

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor by the metadata alone."""
        entry = self._entries[name]
        boxes = tuple(
            FileBox(box, (), self._ranks[place.file], self._files[place.file])
            for box, place in entry.chunks
        )
        return Outline(name, entry.shape, self._dtype(name, entry), None, (), boxes)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor; the headers of its chunks are read, and checked against the metadata."""
        return self._tensors(name)

    def origin(self, name: str) -> Hashable:
        """Return where its chunks lie, by the metadata."""
        chunks = self._entries[name].chunks
        return frozenset((place.file, place.offset, box) for box, place in chunks)

    def _dtype(self, name: str, entry: _Entry) -> str:
        try:
            return dtype_name(entry.dtype)
        except DTypeError:
            raise CheckpointError(
                f"{self.directory}: tensor {name!r} is of dtype {entry.dtype}, which is not "
                "supported; cast it before saving, or leave it out"
            ) from None

    def _look_up(self, name: str) -> StoredTensor:
        entry = self._entries[name]
        dtype = self._dtype(name, entry)
        look = partial(self._box, name, dtype)
        with prefetch_map(entry.chunks, look, prefetch_depth(self.directory)) as boxes:
            return StoredTensor(name, entry.shape, dtype, None, (), tuple(boxes))

    def _box(self, name: str, dtype: str, chunk: _Chunk) -> StoredBox:
        box, (in_file, offset, num_bytes) = chunk
        path = self._files[in_file]
        what = f"{path}: tensor {name!r}, box {box_text(box)}"
        with SourceFile(path) as file:
            found = read_torch_zip(file, offset, num_bytes, what)
            value = self._value(found.pickle(file), what)
            if (value.dtype, value.shape) != (dtype, box_shape(box)):
                raise CheckpointError(
                    f"{what}: is {list(value.shape)} of {value.dtype} there, but {METADATA_NAME} "
                    f"says {list(box_shape(box))} of {dtype}; the file is from another save, "
                    "restore the right one"
                )
            place = tensor_place(value, file, found)
        rank = self._ranks[in_file]
        return StoredBox(box, (), rank, path, place.offset, place.digest, place.strides)

    def _value(self, data: bytes, what: str) -> TorchTensor:
        """Return what the pickle of a chunk says; pickles of the same bytes say the same."""
        known = self._meant.get(data)
        if known is not None:
            return known
        value = read_torch_pickle(data, what)
        if not isinstance(value, TorchTensor):
            raise CheckpointError(
                f"{what}: holds a {type(value).__name__}, not a tensor; the file is damaged or "
                "from another save"
            )
        if len(data) <= _MOST_KEPT_BYTES and len(self._meant) < _MOST_KEPT:
            self._meant[data] = value
        return value

    def _other(self, name: str, place: _Place) -> object:
        path = self._files[place.file]
        what = f"{path}: entry {name!r}"
        with SourceFile(path) as file:
            found = read_torch_zip(file, place.offset, place.num_bytes, what)
            try:
                return plain_value(read_dtensors(file, found))
            except UnlistedNameError as error:
                return OpaqueValue(f"an object that is not read: {error}")


def open_dcp(directory: Path) -> DcpCheckpoint:
    """Read the metadata, and check that the files it names are there and of the right length.

    Raises
    ------
    CheckpointError
        If the metadata is missing, damaged, contradicts itself or would run code; if a file is
        missing, too short or too long, or named so that it would lie elsewhere; or if chunks were
        transformed when they were written, or share bytes.
    """
    path = file_inside(directory, METADATA_NAME, directory)
    if not path_exists(path):
        own = any(DCP_OWN_METADATA.fullmatch(other.name) for other in directory.iterdir())
        raise CheckpointError(
            f"{directory}: has no {METADATA_NAME}, "
            + (
                "each rank has one of its own; save with use_collectives=True"
                if own
                else "which is written last; the save did not finish"
            )
        )
    root = _read_root(path)
    listed, storage = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{path}: lacks its list of entries or of files; it is damaged")
    places = _places(storage, path)
    tensors, others = _entries(listed, places, path)
    by_file: dict[str, list[_Place]] = {}
    for place in places.values():
        by_file.setdefault(place.file, []).append(place)
    files = {name: file_inside(directory, name, path) for name in sorted(by_file)}
    # Of replicas, which older versions can be told to keep, only one place is listed.
    exact = not any(entry.repeated for entry in tensors.values())
    for name, inside in by_file.items():
        _check_file(files[name], inside, exact=exact)
    return DcpCheckpoint(directory, tensors, others, _paths(root.get("planner_data")), files)


def _check_file(path: Path, places: list[_Place], *, exact: bool) -> None:
    if not path_exists(path):
        raise CheckpointError(
            f"{path}: is missing, but {METADATA_NAME} lists {len(places)} entries in it; restore "
            "it or save again"
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
    if end > num_bytes:
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {METADATA_NAME} lists entries up to byte {end}; "
            "it was cut short, restore it"
        )
    if exact and end < num_bytes:
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {METADATA_NAME} lists none after byte {end}; it "
            "is of another rank or another save, restore the right one"
        )

"""Directories of `torch.distributed.checkpoint`: ``.metadata`` and ``*.distcp`` files.

The metadata, a pickle, lists the chunks of every tensor and the file that stores each. A chunk is a
small zip, in which the tensor's bytes are read in place. No file names its rank, and the metadata
has no digests: a file in the place of another is found by the lengths, shapes and dtypes of its
chunks. **Swapped or copied files whose chunks agree in these cannot be told apart.**

Megatron-core's ``torch_dist`` is such a directory. Before 0.13 its distributed optimizer stores
tensors **flat**: each data parallel rank has a stretch of a block of the tensor, which is listed
with one dim for each fragmented axis and one for the elements of a block. Source: metadata.py,
planner.py, filesystem.py, default_planner.py of torch/distributed/checkpoint; strategies/torch.py
and resharding.py of megatron/core/dist_checkpointing.
"""

import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard

from shardspec.boxes import Box, box_shape, box_size, row_major_boxes
from shardspec.checkpoint import catalog
from shardspec.checkpoint.catalog import FileBox, Outline, StoredBox, StoredObject, box_text
from shardspec.checkpoint.formats import names
from shardspec.checkpoint.formats.names import METADATA_NAME
from shardspec.checkpoint.formats.torch_file import (
    ARGUMENT_NAMES,
    StateTensor,
    flat_contents,
    plain_value,
    whole_tensor,
)
from shardspec.checkpoint.read_boxes import crc32
from shardspec.checkpoint.state_dict import KeyPath, Place, is_path
from shardspec.checkpoint.storage.path import SourceFile, StoragePath, file_inside
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.checkpoint.strict_json import is_size
from shardspec.checkpoint.torch_files import unpickler, values
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.unpickler import Global, Record, made_by, record_class
from shardspec.checkpoint.torch_files.values import tensor_place
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError

_PIECE_BYTES: Final = 1 << 20
_OF_OPTIMIZER: Final = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|param|fp32_param)\.")

_Places: TypeAlias = dict[tuple[str, tuple[int, ...] | None], StoredObject]
"""Where entries are stored, by their names and, of a chunk, its offsets."""


@dataclass(frozen=True, slots=True)
class _Chunk(FileBox):
    """A box of a tensor, and the chunk that has it."""

    place: StoredObject
    stored: tuple[int, ...]
    """Shape of the chunk."""
    start: int = 0
    """Elements of the chunk before the box: a stretch of a flat tensor may be several boxes."""


class _DcpCatalog(catalog.Catalog):
    """A directory of torch's; nested names are joined by dots, as torch does.

    Tensors that are pickled within entries are among its tensors; `as_stored` has these entries.
    """

    def __init__(
        self,
        directory: StoragePath,
        tensors: Mapping[str, Outline[_Chunk]],
        files: Sequence[StoragePath],
        inside: "_Inside",
        objects: Mapping[str, StoredObject],
        as_stored: "_DcpCatalog | None" = None,
    ) -> None:
        held = tensors.keys() | inside.tensors.keys()
        listed = (directory / METADATA_NAME, *files)
        super().__init__(names.DCP, directory, held, listed, None, inside.values)
        self._outlines, self._inside, self.objects = tensors, inside, objects
        self._tensors = catalog.LazyTensorCache(self._look_up)
        self._as_stored = as_stored or self

    def as_stored(self) -> catalog.Catalog:
        """Return the checkpoint with its entries whole."""
        self._as_stored.snapshot = self.snapshot
        return self._as_stored

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor by the metadata alone."""
        if (pickled := self._inside.tensors.get(name)) is not None:
            return pickled
        return self._outlines[name]

    def tensor(self, name: str) -> catalog.StoredTensor:
        """Return a tensor; the headers of its chunks are read and checked against the metadata."""
        return self._inside.tensors.get(name) or self._tensors(name)

    def origin(self, name: str) -> Hashable:
        """Return where its chunks lie, by the metadata."""
        if name in self._inside.tensors:
            return super().origin(name)
        boxes = self._outlines[name].boxes
        return frozenset((chunk.path, chunk.place.offset, chunk.box) for chunk in boxes)

    def _look_up(self, name: str) -> catalog.StoredTensor:
        outline = self._outlines[name]
        read = partial(_read_chunk, outline)
        with prefetch_map(outline.boxes, read, self.directory.files_ahead()) as boxes:
            return catalog.StoredTensor(name, outline.shape, outline.dtype, None, (), tuple(boxes))


def _read_chunk(outline: Outline[_Chunk], chunk: _Chunk) -> StoredBox:
    what = f"{chunk.path}: tensor {outline.name!r}, box {box_text(chunk.box)}"
    with chunk.path.open() as file:
        found = read_torch_zip(file, chunk.place.offset, chunk.place.num_bytes, what)
        value = read_torch(found, found.pickle(file))
        said, due = f"a {type(value).__name__}", f"{list(chunk.stored)} of {outline.dtype}"
        if isinstance(value, values.TorchTensor) and value.placed is None:
            said = f"{list(value.shape)} of {value.dtype}"
        if not isinstance(value, values.TorchTensor) or said != due:
            raise CheckpointError(
                f"{what}: is {said} there, but {METADATA_NAME} says {due}; the file is from "
                "another save, restore the right one"
            )
        place = tensor_place(value, file, found)
    if place.strides is not None and chunk.stored != box_shape(chunk.box):
        raise CheckpointError(f"{what}: a stretch of a flat tensor has strides; it is damaged")
    at = place.offset + chunk.start * item_bytes(outline.dtype)
    return StoredBox(chunk.box, (), chunk.rank, chunk.path, at, place.digest, place.strides)


class _Inside(NamedTuple):
    """What the pickles of entries hold, by names joined with dots."""

    tensors: Mapping[str, catalog.StoredTensor]
    values: Mapping[str, object]
    paths: Mapping[str, KeyPath]
    of: Mapping[str, Sequence[catalog.StoredTensor]]
    """The tensors by entries."""


def _look_inside(
    entries: Mapping[str, StoredObject],
    keys: Mapping[str, KeyPath],
    taken: Collection[str],
    ranks: Mapping[StoragePath, int],
) -> _Inside:
    """Read the pickles of entries; `taken` are the names of tensors beside them."""
    tensors: dict[str, catalog.StoredTensor] = {}
    others: dict[str, object] = {}
    paths: dict[str, KeyPath] = {}
    of: dict[str, list[catalog.StoredTensor]] = {}
    known = taken, tensors, others
    for name, place in entries.items():
        at = keys.get(name, (name,))
        with place.path.open() as file:
            found = read_torch_zip(file, *place[1:], f"{place.path}: entry {name!r}")
            try:
                value = read_torch(found, found.pickle(file), ARGUMENT_NAMES)
                if names.MEGATRON_OBJECT.search(name):
                    # Megatron loads these by name; they are of no use to others.
                    plain = plain_value(value, found)
                    if not catalog.is_plain(plain):
                        plain = catalog.OpaqueValue("an object of Megatron", _digest(file, place))
                    others[name] = plain
                    continue
                held = flat_contents(value, at, place.path)
                for inner in (*held.tensors, *held.others):
                    if any(inner in held_names for held_names in known) or (
                        inner != name and inner in entries
                    ):
                        raise unpickler.PickleError(f"{inner!r} is another entry, or in one")
            except unpickler.PickleError as error:
                # It can be copied, but who knows what is in it.
                text = f"a pickle that is not read: {error}"
                others[name] = catalog.OpaqueValue(text, _digest(file, place), tensors=True)
                continue
            for inner, tensor in held.tensors.items():
                if tensor.shape == tensor.global_shape:
                    whole = StateTensor(tensor, tensor_place(tensor, file, found))
                    tensors[inner] = whole_tensor(inner, place.path, whole, ranks[place.path])
                    of.setdefault(name, []).append(tensors[inner])
                else:
                    text = f"a part of a tensor of shape {list(tensor.global_shape)}"
                    others[inner] = catalog.OpaqueValue(text, _digest(file, place), tensors=True)
            for inner, part in held.others.items():
                plain = plain_value(part, found)
                if isinstance(plain, catalog.OpaqueValue) and plain.digest is None:
                    plain = replace(plain, digest=_digest(file, place))
                others[inner] = plain
            paths |= held.paths
    return _Inside(tensors, others, paths, of)


def _digest(file: SourceFile, place: StoredObject) -> str:
    """Return a digest of all bytes of an entry."""
    crc, end = 0, place.offset + place.num_bytes
    for start in range(place.offset, end, _PIECE_BYTES):
        crc = crc32(file.read(start, min(_PIECE_BYTES, end - start)), crc)
    return f"{place.num_bytes} bytes of CRC-32 {crc:08x}"


@unpickler.no_collection()
def open_dcp(directory: StoragePath) -> catalog.Catalog:
    """Read the metadata, and check that its files exist and have the right length."""
    path = file_inside(directory, METADATA_NAME, directory)
    if not path.exists():
        why = "which is written last; the save did not finish"
        if any(map(names.DCP_OWN_METADATA.fullmatch, directory.names())):
            why = "each rank has one of its own; save with use_collectives=True"
        raise CheckpointError(f"{directory}: has no {METADATA_NAME}, {why}")
    entries, places, flat, keys = _read_metadata(path)
    by_file: dict[StoragePath, list[StoredObject]] = {}
    for place in places.values():
        by_file.setdefault(place.path, []).append(place)
    files = sorted(by_file, key=attrgetter("name"))
    said = map(names.DCP_OF_A_RANK.fullmatch, (file.name for file in files))
    ranks = {
        file: int(match[1]) if match else number
        for number, (file, match) in enumerate(zip(files, said, strict=True))
    }
    tensors: dict[str, Outline[_Chunk]] = {}
    others: dict[str, StoredObject] = {}
    repeated = False
    for name, entry in entries.items():
        try:
            match entry:
                case Record(name="TensorStorageMetadata") if _is_text(name):
                    tensors[name], twice = _outline(name, entry, places, ranks, flat.get(name))
                    repeated |= twice
                case Record(name="BytesStorageMetadata") if _is_text(name):
                    if (name, None) not in places:
                        raise ValueError("no file holds this entry")
                    others[name] = places[name, None]
                case _:
                    raise ValueError("an entry needs a name and a kind")
        except (TypeError, ValueError) as error:
            # Those of Python itself say nothing of the file.
            problem = "it is not as torch writes it" if isinstance(error, TypeError) else error
            raise CheckpointError(
                f"{path}: {name!r:.200}: {problem}; the metadata contradicts itself, save again"
            ) from None
    for name, tensor in tensors.items():
        match = _OF_OPTIMIZER.match(name)
        model = tensors.get(name[match.end() :]) if match else None
        if model and tensor.shape != model.shape and prod(tensor.shape) == prod(model.shape):
            raise CheckpointError(
                f"{path}: tensor {name!r} is {list(tensor.shape)}, but that of the model "
                f"{list(model.shape)}, and nothing says how it was made flat (mcore_data); convert "
                "it with Megatron's own tools to fully_reshardable"
            )
    for file in files:
        # Of replicas that older versions were told to keep, only one place is listed.
        _check_file(file, by_file[file], exact=not repeated)
    unread = {name: _unread(found) for name, found in tensors.items() if not _is_read(found)}
    tensors = {name: found for name, found in tensors.items() if name not in unread}
    whole = _DcpCatalog(
        directory, tensors, files, _Inside({}, {**others, **unread}, {}, {}), others
    )
    whole.paths = {name: keys[name] for name in (*tensors, *others) if name in keys}
    inside = _look_inside(others, keys, {*tensors, *unread}, ranks)
    inside = inside._replace(values={**inside.values, **unread})
    whole.pickled = inside.of
    found = _DcpCatalog(directory, tensors, files, inside, {}, whole)
    found.paths = {**{name: keys[name] for name in tensors if name in keys}, **inside.paths}
    return found


def _is_read(outline: Outline[_Chunk]) -> bool:
    try:
        dtype_name(outline.dtype)
    except DTypeError:
        return False
    return True


def _unread(outline: Outline[_Chunk]) -> catalog.OpaqueValue:
    """Return what stands for a tensor of a dtype that is not supported."""
    chunks = sorted((chunk.place for chunk in outline.boxes), key=attrgetter("path", "offset"))
    digests = [str(outline.shape)]
    for place in chunks:
        with place.path.open() as file:
            digests.append(_digest(file, place))
    text = f"a tensor of {outline.dtype}, which is not supported; cast it before saving"
    return catalog.OpaqueValue(text, ", ".join(digests), tensors=True)


def _check_file(path: StoragePath, places: Sequence[StoredObject], *, exact: bool) -> None:
    if not path.exists():
        raise CheckpointError(
            f"{path}: is missing, but {METADATA_NAME} lists {len(places)} entries in it; restore "
            "it or save again"
        )
    with path.open() as file:
        num_bytes = file.num_bytes
    ranges = sorted((place.offset, place.offset + place.num_bytes) for place in places)
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise CheckpointError(
                f"{path.parent / METADATA_NAME}: two entries in {path.name} share byte {start}; "
                "the metadata contradicts itself"
            )
    end = ranges[-1][1]
    if end > num_bytes or (exact and end < num_bytes):
        why = "was cut short" if end > num_bytes else "is of another rank or another save"
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {METADATA_NAME} lists entries up to byte {end}; "
            f"it {why}, restore the right one"
        )


_HOME: Final = "torch.distributed.checkpoint"
_PATHS: Final = "PosixPath PurePosixPath WindowsPath PureWindowsPath"
_KINDS: Final = {
    f"{_HOME}.metadata": (
        "Metadata StorageMeta TensorProperties TensorStorageMetadata BytesStorageMetadata "
        "ChunkStorageMetadata MetadataIndex _MEM_FORMAT_ENCODING"
    ),
    # Of torch 2.2 and before.
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    f"{_HOME}.filesystem": "_StorageInfo _StoragePrefix",
    # The plans by which ranks wrote, which Megatron-core 0.10 to 0.16 keeps; they are not needed.
    f"{_HOME}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    # Where the checkpoint was written; not used.
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
_ENUMS: Final = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "WriteItemType")


def _member(*args: object) -> Record:
    """Stand for a member of an enum, as Python 3.11.0 to 3.11.3 pickle them."""
    match args:
        case (Global() as kind, str() as name) if kind.name in _ENUMS:
            return Record(name)
    raise ValueError(
        "only members of known enums are taken by name; nothing of it was run. If you trust its "
        "writer, save it again as a state dict of tensors and plain values"
    )


class _Size(tuple[int, ...]):
    """What a call of torch.Size makes: checked numbers."""

    __slots__ = ()


@lru_cache(1 << 17)
def _size(value: object = ()) -> _Size:
    """Many tensors are sharded alike: equal arguments are checked once, and kept once."""
    return _Size(values.sizes_of(value))


def _sizes(value: object) -> tuple[int, ...]:
    return value if type(value) is _Size else values.sizes_of(value)


_NAMES: Final[unpickler.Names] = {
    **values.TORCH_NAMES,
    "torch.Size": made_by("torch.Size", _size),
    **{f"{home}.{kind}": record_class(kind) for home in _KINDS for kind in _KINDS[home].split()},
    "builtins.getattr": made_by("builtins.getattr", _member),
}


def _read_metadata(
    path: StoragePath,
) -> tuple[dict[object, object], _Places, dict[object, object], dict[str, KeyPath]]:
    """Return the entries, where they are stored, and what Megatron-core says of flat tensors.

    The last are the keys of entries in the nested state dict that was saved.
    """
    with path.open() as file:
        data = file.read(0, min(file.num_bytes, unpickler.MOST_PICKLE_BYTES + 1))
    root = unpickler.unpickle(data, _NAMES, path, "metadata")
    if not isinstance(root, Record) or root.name not in ("Metadata", "MCoreMetadata"):
        raise CheckpointError(f"{path}: is not metadata of a torch distributed checkpoint")
    match root.get("state_dict_metadata"), root.get("storage_data"), root.get("mcore_data") or {}:
        case (dict() as entries, dict() as storage, dict() as flat):
            return entries, _places(storage, path), flat, dict(_keys(root.get("planner_data")))
    raise CheckpointError(f"{path}: lacks its list of entries or of files; it is damaged")


def _keys(planned: object) -> Iterator[tuple[str, KeyPath]]:
    """Yield the names of entries that are not keys themselves, and the keys that torch notes."""
    for name, keys in planned.items() if isinstance(planned, dict) else ():
        # To torch, a number is a position in a list.
        if _is_text(name) and isinstance(keys, tuple) and keys != (name,):
            path = tuple(Place((key,)) if type(key) is int else key for key in keys)
            if is_path(path) and ".".join(map(str, keys)) == name:
                yield name, path


def _places(storage: Mapping[Any, Any], path: StoragePath) -> _Places:
    """Return where each entry is stored."""
    places: _Places = {}
    files: dict[str, StoragePath] = {}
    for index, info in storage.items():
        try:
            key, place = index.state, info.state
            name, at, file = key["fqn"], key.get("offset"), place["relative_path"]
            start, size = place["offset"], place["length"]
            offsets = None if at is None else _sizes(at)
            known = file in files or _is_text(file)
            if not (known and isinstance(name, str) and is_size(start) and is_size(size)):
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


def _outline(
    name: str, entry: Record, places: _Places, ranks: Mapping[StoragePath, int], flat: object
) -> tuple[Outline[_Chunk], bool]:
    """Return what the metadata says of a tensor, and whether it lists a chunk twice."""
    match entry.get("properties"), entry.get("chunks"):
        case (Record(state=(Global(name=dtype), *_)), list() as listed):
            shape, item = values.sizes_of(entry.get("size")), 0
        case _:
            raise ValueError("it has no dtype or no chunks")
    # Other dtypes are refused when the tensor is asked for.
    with suppress(DTypeError):
        dtype = dtype_name(dtype)
        item = item_bytes(dtype)
    found: dict[Box, _Chunk] = {}
    repeated = False
    for chunk in listed:
        if not isinstance(chunk, Record):
            raise ValueError(f"a chunk is a {type(chunk).__name__}")
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        if 0 in sizes:
            continue
        box = _box(offsets, sizes, shape)
        place = places.get((name, offsets))
        if place is None:
            raise ValueError(f"no file holds its chunk {box_text(box)}")
        if prod(sizes) * item > place.num_bytes:
            raise ValueError(
                f"its chunk {box_text(box)} is said to lie in {place.num_bytes} bytes, which do "
                "not hold it"
            )
        repeated |= box in found
        found[box] = _Chunk(box, (), ranks[place.path], place.path, place, sizes)
    chunks = tuple(found.values())
    if flat in (None, {}):
        return Outline(name, shape, dtype, None, (), chunks), repeated
    match flat:
        case {"nd_reformulated_orig_global_shape": original, **rest} if not rest:
            whole = values.sizes_of(original)
            chunks = tuple(
                replace(chunk, box=part, start=start)
                for chunk in chunks
                for part, start in unflattened(shape, whole, chunk.box)
            )
            return Outline(name, whole, dtype, None, (), chunks), repeated
    raise ValueError(
        f"mcore_data says {flat!r:.100} of it, as no version of Megatron-core up to 0.16 does; "
        "convert it with Megatron's own tools to fully_reshardable"
    )


@lru_cache(1 << 17)
def _box(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """Return the box of a chunk; raises `ValueError` if it is not inside the tensor."""
    if not len(offsets) == len(sizes) == len(shape):
        raise ValueError(
            f"a chunk from {list(offsets)} of sizes {list(sizes)} is not one of a tensor with "
            f"{len(shape)} dims"
        )
    box = tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))
    if any(hi > n for (_, hi), n in zip(box, shape, strict=True)):
        raise ValueError(f"its chunk {box_text(box)} lies outside of shape {list(shape)}")
    return box


def _is_text(name: object) -> TypeGuard[str]:
    """Return whether a name can be written: a pickle may hold half characters."""
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        return False


def unflattened(
    flat: tuple[int, ...], shape: tuple[int, ...], chunk: Box
) -> Iterator[tuple[Box, int]]:
    """Yield the boxes that a chunk of a flat tensor holds, each with the elements before it.

    >>> list(unflattened((2, 1, 6), (4, 3), ((1, 2), (0, 1), (2, 6))))
    [(((2, 3), (2, 3)), 0), (((3, 4), (0, 3)), 1)]
    """
    *counts, elements = flat or (-1,)
    block = tuple(size // max(1, count) for size, count in zip(shape, counts, strict=False))
    whole = tuple(count * size for count, size in zip(counts, block, strict=False))
    *at, (lo, hi) = chunk or ((0, 0),)
    several = any(end - start != 1 for start, end in at)
    if len(counts) != len(shape) or whole != shape or prod(block) != elements or several:
        raise ValueError(
            f"it is said to be flat, {list(flat)}, of shape {list(shape)}, which is not made of "
            f"such blocks, or its chunk {box_text(chunk)} is of several"
        )
    done = 0
    for inner in row_major_boxes(block, lo, hi):
        box = tuple(
            (first + start * size, last + start * size)
            for (first, last), (start, _), size in zip(inner, at, block, strict=True)
        )
        yield box, done
        done += box_size(box)

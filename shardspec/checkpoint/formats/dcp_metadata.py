"""The ``.metadata`` of a torch distributed checkpoint: a pickle, read by a list of names."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import box_text
from shardspec.checkpoint.formats.dcp_records import (
    RECORD_NAMES,
    RECORD_SHORTCUTS,
    ChunkRecord,
    IndexRecord,
    InfoRecord,
)
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.pickles import (
    MOST_PICKLE_BYTES,
    Allowed,
    Global,
    Record,
    as_record,
    unpickle,
)
from shardspec.checkpoint.torch_files.torch_values import TORCH_NAMES, sizes_of
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError

__all__ = ["Chunk", "DcpMetadata", "Item", "TensorEntry", "read_metadata"]

_MOST: Final = 2**63


class Item(NamedTuple):
    """Where something was written."""

    file: str
    """Name of the file in the directory."""
    offset: int
    """Position of the first byte in the file."""
    num_bytes: int


class Chunk(NamedTuple):
    """A part of a tensor."""

    box: Box
    """Which part; never empty."""
    item: Item


class TensorEntry(NamedTuple):
    """A tensor as the metadata lists it."""

    dtype: str
    """As torch names it (``"torch.float32"``)."""
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    chunks: tuple[Chunk, ...]
    """Those that hold any element, no two alike."""
    repeated: bool
    """Whether one was listed more often, as older versions do where they keep replicas."""


class DcpMetadata(NamedTuple):
    """What the metadata says."""

    tensors: Mapping[str, TensorEntry]
    extras: Mapping[str, Item]
    """Entries that are no tensors."""
    paths: Mapping[str, tuple[str | int, ...]]
    """Where in nested dicts and lists an entry was, where that is known."""
    items: tuple[Item, ...]
    """Every place that is listed, also of chunks that hold nothing."""


_HOME: Final = "torch.distributed.checkpoint.metadata"
_OLD_HOME: Final = "torch.distributed._shard.sharded_tensor.metadata"
_MEMORY_FORMATS: Final = (f"{_HOME}._MEM_FORMAT_ENCODING", f"{_OLD_HOME}.MEM_FORMAT_ENCODING")


def _member(args: tuple[object, ...]) -> Record:
    """Stand for a memory format, as Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    match args:
        case (Global(name=name), str()) if name in _MEMORY_FORMATS:
            return Record("memory format", args)
    raise ValueError(
        "only a memory format is taken from its class by name; nothing of it was run. If you trust "
        "its writer, save it again as a state dict of tensors and plain values"
    )


_NAMES: Final[Allowed] = {
    **TORCH_NAMES,
    f"{_HOME}.Metadata": as_record("Metadata"),
    f"{_HOME}.TensorStorageMetadata": as_record("tensor"),
    f"{_HOME}.BytesStorageMetadata": as_record("bytes"),
    f"{_HOME}.StorageMeta": as_record("StorageMeta"),
    **RECORD_NAMES,
    # How a tensor lay in memory; torch 2.2 and before had both elsewhere.
    f"{_HOME}.TensorProperties": as_record("properties"),
    f"{_OLD_HOME}.TensorProperties": as_record("properties"),
    **dict.fromkeys(_MEMORY_FORMATS, as_record("memory format")),
    "builtins.getattr": _member,
    # Where the checkpoint was once; shown to nobody.
    **{
        f"{home}.{kind}": as_record("path")
        for home in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def read_metadata(path: Path) -> DcpMetadata:
    """Read and check the metadata of a directory.

    Raises
    ------
    CheckpointError
        If it cannot be read, is damaged, names what does not belong there, has a chunk that no file
        holds or that lies outside of its tensor, or if chunks were transformed by an extension.
    """
    with SourceFile(path) as file:
        if file.num_bytes > MOST_PICKLE_BYTES:
            raise CheckpointError(
                f"{path}: has {file.num_bytes} bytes, past the limit of {MOST_PICKLE_BYTES}"
            )
        data = file.read(0, file.num_bytes)
    root = unpickle(data, _NAMES, path, "metadata", shortcuts=RECORD_SHORTCUTS)
    if not isinstance(root, Record) or root.name != "Metadata":
        raise CheckpointError(f"{path}: is no metadata of a torch distributed checkpoint")
    listed, storage = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{path}: lacks its list of entries or of files; it is damaged")
    items = _items(storage, path)
    tensors: dict[str, TensorEntry] = {}
    others: dict[str, Item] = {}
    known: _Boxes = {}
    for name, entry in listed.items():
        if not isinstance(name, str) or not _is_utf8(name) or not isinstance(entry, Record):
            raise CheckpointError(f"{path}: has an entry without a name or a kind; it is damaged")
        if entry.name == "tensor":
            tensors[name] = _tensor(name, entry, items, path, known)
        elif entry.name == "bytes":
            item = items.get((name, None))
            if item is None:
                raise CheckpointError(f"{path}: says of no file that it holds entry {name!r}")
            others[name] = item
        else:
            raise CheckpointError(f"{path}: entry {name!r} is of no known kind; it is damaged")
    return DcpMetadata(tensors, others, _paths(root.get("planner_data")), tuple(items.values()))


def _is_utf8(name: str) -> bool:
    """Say whether a name can be written: a pickle may hold halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(
    storage: dict[object, object], path: Path
) -> dict[tuple[str, tuple[int, ...] | None], Item]:
    """Return where each thing lies, by name and, for a chunk, by its offsets."""
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for index, info in storage.items():
        if not isinstance(index, IndexRecord) or not isinstance(info, InfoRecord):
            raise CheckpointError(f"{path}: lists a place that is none; it is damaged")
        try:
            fqn, offset = index.fqn, None if index.offset is None else sizes_of(index.offset)
            file, start, length, transforms = info.file, info.offset, info.length, info.transforms
        except (AttributeError, ValueError):
            raise CheckpointError(f"{path}: lists a place without saying it; damaged") from None
        if (
            not isinstance(fqn, str)
            or not isinstance(file, str)
            or not _is_utf8(file)
            or not (isinstance(start, int) and 0 <= start < _MOST)
            or not (isinstance(length, int) and 0 <= length < _MOST)
        ):
            raise CheckpointError(f"{path}: lists a place that is none; it is damaged")
        if transforms:
            kinds = transforms if isinstance(transforms, list | tuple) else ()
            shown = ", ".join(kind[:40] for kind in kinds[:4] if isinstance(kind, str))
            raise CheckpointError(
                f"{path}: entry {fqn!r} was transformed when it was written ({shown}); load it "
                "with torch and save it again without _extensions"
            )
        items[fqn, offset] = Item(file, start, length)
    return items


_Boxes: TypeAlias = dict[
    tuple[tuple[int, ...], int], dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Box, int]]
]
"""For shape and item size of a tensor, the box of offsets and sizes, and its bytes: many tensors
are cut alike."""


def _item_bytes(dtype: str) -> int:
    """Return the bytes of an element; 0 for dtypes that are refused once they are asked for."""
    try:
        return item_bytes(dtype_name(dtype))
    except DTypeError:
        return 0


def _tensor(
    name: str,
    entry: Record,
    items: Mapping[tuple[str, tuple[int, ...] | None], Item],
    path: Path,
    known: _Boxes,
) -> TensorEntry:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or not isinstance(chunks, list):
        raise CheckpointError(f"{path}: tensor {name!r} has no dtype or no chunks; it is damaged")
    boxes: dict[Box, Item] = {}
    repeated = False
    try:
        shape = sizes_of(entry.get("size"))
        size = _item_bytes(dtype.name)
        alike = known.setdefault((shape, size), {})
        for chunk in chunks:
            if not isinstance(chunk, ChunkRecord):
                raise ValueError("a chunk is none")
            offsets, sizes = sizes_of(chunk.offsets), sizes_of(chunk.sizes)
            if 0 in sizes:
                # Ranks that hold nothing write nothing that matters.
                continue
            known_box = alike.get((offsets, sizes))
            if known_box is None:
                known_box = alike[offsets, sizes] = _box(offsets, sizes, shape), prod(sizes) * size
            box, num_bytes = known_box
            item = items.get((name, offsets))
            if item is None:
                raise ValueError(f"no file holds its chunk {box_text(box)}")
            if num_bytes > item.num_bytes:
                raise ValueError(
                    f"its chunk {box_text(box)} is said to lie in {item.num_bytes} bytes, which do "
                    "not hold it"
                )
            repeated |= box in boxes
            boxes[box] = item
    except (AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {name!r}: {error}; the metadata contradicts itself, save again"
        ) from None
    parts = tuple(Chunk(box, item) for box, item in boxes.items())
    return TensorEntry(dtype.name, shape, parts, repeated)


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

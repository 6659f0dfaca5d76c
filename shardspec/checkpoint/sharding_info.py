"""The sharding info: what `sharding_info.json` says about a checkpoint. See ``docs/format.md``."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shardspec.checkpoint.catalog import ReplicaKey
from shardspec.checkpoint.formats.names import INFO_NAME
from shardspec.checkpoint.formats.safetensors_header import MAX_DIMS
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.state_dict import (
    KeyPath,
    decode_path,
    decode_value,
    encode_path,
    encode_value,
)
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.strict_json import JSONStream, checked, field
from shardspec.checkpoint.targets import BoxEntry, FileEntry, box_columns
from shardspec.dtypes import from_safetensors, to_safetensors
from shardspec.errors import CheckpointError, ShardSpecError, SpecSyntaxError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

SAVE_KEY: Final = "shardspec.save"
"""By which the metadata of every file says which save it is of."""
VERSION: Final = 1
"""The version of the format that this code reads and writes."""
_FORMAT: Final = "shardspec"
_CRC: Final = re.compile("[0-9a-f]{8}")
_MOST_SPEC: Final = 4096
"""Characters of a spec, in which axes stand by number."""
_MOST_BYTES: Final = 2 << 30
"""A checkpoint of 10,000 tensors on 1,024 ranks takes some 50 MB."""

# The members of the objects that are always the same, and their kinds as `checked` knows them.
_MESH: Final = {"ids": tuple, "shape": tuple, "axis_names": object}
_TENSOR: Final = {"shape": tuple, "dtype": str, "spec": str}
_FILE: Final = {"name": str, "rank": int, "bytes": int}


class ShardingInfo(NamedTuple):
    """A whole checkpoint: the mesh, how each tensor is cut, and which file holds which boxes."""

    save: str
    """Names this save; every file of it carries the same text in its metadata."""
    mesh: DeviceMesh
    tensors: Mapping[str, Layout]
    files: tuple[FileEntry, ...]
    values: Mapping[str, object] = MappingProxyType({})
    """Plain values of the state dict that was saved, by name."""
    paths: Mapping[str, KeyPath] = MappingProxyType({})
    """Names that were no keys of it, but joined: the keys that led there."""
    file_metadata: Mapping[str, str] = MappingProxyType({})
    """What safetensors files that it was made of said besides their tensors."""


def format_info(info: ShardingInfo) -> str:
    """Return the text of `sharding_info.json`: one line per tensor and per box."""
    return "".join(info_lines(info, info.files))


def info_lines(info: ShardingInfo, files: Iterable[FileEntry]) -> Iterator[str]:
    """Yield the text of an info in pieces; `files` take the place of its own."""
    mesh = info.mesh
    yield f'{{\n"format": {_dump(_FORMAT)},\n"version": {VERSION},\n"save": {_dump(info.save)},\n'
    yield f'"mesh": {_dump(_named(_MESH, mesh.ids, mesh.shape, mesh.axis_names))},\n'
    tensors = (
        (name, _named(_TENSOR, at.global_shape, to_safetensors(at.dtype), str(at.spec)))
        for name, at in info.tensors.items()
    )
    yield from _block('"tensors": {', _members(tensors), "},\n")
    yield from _block('"files": [', map(_file_text, files), "]")
    for key, encoded in (
        ("values", {name: encode_value(value, name) for name, value in info.values.items()}),
        ("paths", {name: encode_path(path) for name, path in info.paths.items()}),
        ("file_metadata", info.file_metadata),
    ):
        if encoded:
            yield from _block(f',\n"{key}": {{', _members(encoded.items()), "}")
    yield "\n}\n"


def _file_text(file: FileEntry) -> str:
    head = _dump(_named(_FILE, file.name, file.rank, file.num_bytes))
    boxes = (
        (name, _boxes_json(entries)) for name, entries in groupby(file.boxes, attrgetter("tensor"))
    )
    return "".join(_block(f'  {head[:-1]}, "boxes": {{', _members(boxes, "    "), "}}", "  "))


def _boxes_json(entries: Iterable[BoxEntry]) -> object:
    """Return what stands for the boxes of a tensor: an object, or of several a list of them."""
    found = []
    for entry in entries:
        box: dict[str, object] = {"box": entry.box}
        if entry.addend:
            box["addend"] = entry.addend
        if entry.crc32 is not None:
            box["crc32"] = f"{entry.crc32:08x}"
        found.append(box)
    return found[0] if len(found) == 1 else found


def _members(items: Iterable[tuple[str, object]], indent: str = "  ") -> Iterator[str]:
    return (f"{indent}{_dump(name)}: {_dump(value)}" for name, value in items)


def _block(head: str, items: Iterable[str], end: str, indent: str = "") -> Iterator[str]:
    """Yield items, each on a line of its own, between a head and an end."""
    yield head
    separator = "\n"
    for item in items:
        yield separator + item
        separator = ",\n"
    yield end if separator == "\n" else f"\n{indent}{end}"


def _named(fields: Mapping[str, type], *values: object) -> dict[str, object]:
    return dict(zip(fields, values, strict=True))


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_info(directory: Path) -> ShardingInfo:
    """Read and check the sharding info of a checkpoint directory."""
    path = file_inside(directory, INFO_NAME, directory)
    if not path_exists(path):
        raise CheckpointError(
            f"{directory}: has no {INFO_NAME}, which is written last; the save did not finish, or "
            "this is no checkpoint; save again"
        )
    with SourceFile(path) as file:
        if file.num_bytes > _MOST_BYTES:
            raise CheckpointError(
                f"{path}: has {file.num_bytes} bytes, past the {_MOST_BYTES} that it may have; it "
                "is damaged, restore it"
            )
        return _parse(JSONStream(file.read, file.num_bytes, path, "sharding info"), path)


class _Kind(NamedTuple):
    """What the info says of tensors that are sharded alike."""

    shape: tuple[int, ...]
    dtype: str
    spec: str


_DECODERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "values": decode_value,
    "paths": decode_path,
    "file_metadata": lambda text: text,
}


def _parse(stream: JSONStream, path: Path) -> ShardingInfo:
    """Read an info value by value, as it may be long; what is equal is kept once."""
    stated: dict[str, object] = {}
    kinds: dict[str, _Kind] = {}
    files: list[FileEntry] = []
    decoded: dict[str, dict[str, Any]] = {key: {} for key in _DECODERS}
    shared: dict[Any, Any] = {}
    for key in stream.members("the sharding info"):
        stated[key] = None
        if key == "tensors":
            for name in stream.members(key):
                kind = _parse_kind(stream.value(), f"tensors[{name!r}]", path)
                kinds[shared.setdefault(name, name)] = shared.setdefault(kind, kind)
        elif key == "files":
            files = [
                _parse_file(stream, f"files[{place}]", shared, path) for place in stream.items(key)
            ]
        elif key in decoded:
            for name in stream.members(key):
                value = stream.value()
                try:
                    decoded[key][name] = _DECODERS[key](value)
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"{path}: {key}[{name!r}] {error}") from None
        else:
            stated[key] = stream.value()
            _check_version(stated, path)
    stream.end()
    shared.clear()
    for key in ("format", "version", "mesh", "tensors", "files"):
        field(stated, key, object, path, "")
    mesh = _parse_mesh(stated["mesh"], path)
    layouts = _layouts(mesh, kinds, path)
    _check_files(files, mesh, layouts, path)
    for name, text in decoded["file_metadata"].items():
        checked(text, str, path, f"file_metadata[{name!r}]")
    for name in decoded["values"].keys() & layouts.keys():
        raise CheckpointError(f"{path}: {name!r} is both a tensor and a value")
    for name in decoded["paths"].keys() - layouts.keys() - decoded["values"].keys():
        raise CheckpointError(f"{path}: paths[{name!r}] is of nothing that the info lists")
    return ShardingInfo(
        field(stated, "save", str, path, ""), mesh, layouts, tuple(files), **decoded
    )


def _check_version(stated: dict[str, object], path: Path) -> None:
    """Refuse what says that it is something else; asked early, as the rest may look otherwise."""
    if (name := stated.get("format", _FORMAT)) != _FORMAT:
        raise CheckpointError(f"{path}: format is {shown(name)}, not {_FORMAT!r}")
    version = checked(stated.get("version", VERSION), int, path, "version")
    if version != VERSION:
        remedy = "upgrade shardspec" if version > VERSION else "the file is damaged, restore it"
        raise CheckpointError(
            f"{path}: has version {version}, but this shardspec reads version {VERSION}; {remedy}"
        )


def _fields(value: object, kinds: Mapping[str, type], path: Path, key: str) -> list[Any]:
    stated = checked(value, dict, path, key)
    return [field(stated, name, kind, path, key) for name, kind in kinds.items()]


def _parse_mesh(value: object, path: Path) -> DeviceMesh:
    ids, shape, names = _fields(value, _MESH, path, "mesh")
    key = "mesh.axis_names"
    if names is not None:
        names = [checked(name, str, path, key) for name in checked(names, list, path, key)]
    try:
        return DeviceMesh(ids, shape, axis_names=names)
    except ShardSpecError as error:
        raise CheckpointError(f"{path}: mesh: {error}") from None


def _parse_kind(value: object, key: str, path: Path) -> _Kind:
    kind = _Kind(*_fields(value, _TENSOR, path, key))
    for what, size, unit, most in (
        ("shape", len(kind.shape), "dims", MAX_DIMS),
        ("spec", len(kind.spec), "characters", _MOST_SPEC),
    ):
        if size > most:
            raise CheckpointError(f"{path}: {key}.{what} has {size} {unit}, at most {most}")
    return kind


def _layouts(mesh: DeviceMesh, kinds: Mapping[str, _Kind], path: Path) -> dict[str, Layout]:
    known: dict[_Kind, Layout] = {}
    for name, kind in kinds.items():
        if kind not in known:
            key = f"{path}: tensors[{name!r}]"
            try:
                known[kind] = Layout(mesh, kind.spec, kind.shape, from_safetensors(kind.dtype))
            except SpecSyntaxError as error:
                raise CheckpointError(f"{key}.spec {shown(kind.spec)}: {error.problem}") from None
            except ShardSpecError as error:
                raise CheckpointError(f"{key}: {error}") from None
    return {name: known[kind] for name, kind in kinds.items()}


def _parse_file(stream: JSONStream, key: str, shared: dict[Any, Any], path: Path) -> FileEntry:
    stated: dict[str, object] = {}
    boxes = box_columns()
    for member in stream.members(key):
        if member != "boxes":
            stated[member] = stream.value()
            continue
        stated[member] = None
        for name in stream.members(f"{key}.boxes"):
            said = stream.value()
            for box in said if isinstance(said, list) and said else [said]:
                part, crc32 = _parse_box(box, f"{key}.boxes[{name!r}]", path)
                boxes.append(shared.setdefault(name, name), shared.setdefault(part, part), crc32)
    field(stated, "boxes", object, path, key)
    name, rank, num_bytes = _fields(stated, _FILE, path, key)
    file_inside(path.parent, name, path)
    return FileEntry(name, rank, num_bytes, boxes)


def _parse_box(value: object, key: str, path: Path) -> tuple[ReplicaKey, int]:
    """Return a box with its addend, and its CRC-32 or -1."""
    stated = checked(value, dict, path, key)
    sides = []
    for side in field(stated, "box", list, path, key):
        interval = checked(side, tuple, path, f"{key}.box")
        if len(interval) != 2:
            raise CheckpointError(f"{path}: {key}.box has {side}, which is no [low, high] pair")
        sides.append(interval)
    addend = checked(stated.get("addend", []), tuple, path, f"{key}.addend")
    crc = stated.get("crc32", "")
    if "crc32" in stated and not (isinstance(crc, str) and _CRC.fullmatch(crc)):
        raise CheckpointError(
            f"{path}: {key}.crc32 is {shown(crc)}, not a string of eight hexadecimal digits"
        )
    return (tuple(sides), addend), int(crc, 16) if crc else -1


def _check_files(
    files: Iterable[FileEntry], mesh: DeviceMesh, tensors: Mapping[str, Layout], path: Path
) -> None:
    """Check that names, ranks and tensors of files can be."""
    names: set[str] = set()
    for place, file in enumerate(files):
        key = f"{path}: files[{place}]"
        if file.name in names:
            raise CheckpointError(f"{key} repeats the file name {file.name!r}")
        names.add(file.name)
        if file.rank not in mesh:
            raise CheckpointError(f"{key}.rank is {file.rank}, which is no device of the mesh")
        for entry in file.boxes:
            if entry.tensor not in tensors:
                raise CheckpointError(
                    f"{key}.boxes[{entry.tensor!r}] is of a tensor that 'tensors' does not list"
                )

"""The sharding info: what `sharding_info.json` says about a checkpoint. See ``docs/format.md``."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from shardspec.boxes import Box
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
from shardspec.checkpoint.strict_json import (
    JSONStream,
    as_list,
    as_object,
    as_size,
    as_sizes,
    as_text,
    field,
    member,
)
from shardspec.checkpoint.targets import BoxEntry, FileEntry, box_columns
from shardspec.dtypes import from_safetensors, to_safetensors
from shardspec.errors import CheckpointError, ShardSpecError, SpecSyntaxError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

__all__ = [
    "SAVE_KEY",
    "VERSION",
    "ShardingInfo",
    "format_info",
    "info_lines",
    "read_info",
]

_T = TypeVar("_T")

SAVE_KEY: Final = "shardspec.save"
"""By which the metadata of every file says which save it is of."""
VERSION: Final = 1
"""The version of the format that this code reads and writes."""
_FORMAT: Final = "shardspec"
_FILE_METADATA: Final = "file_metadata"
_CRC: Final = re.compile("[0-9a-f]{8}")
_MOST_SPEC: Final = 4096
"""Characters of a spec, in which axes stand by number."""
_MOST_BYTES: Final = 2 << 30
"""A checkpoint of 10,000 tensors on 1,024 ranks takes some 50 MB."""


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
    """Return the text of `sharding_info.json`: one line per tensor and per box.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> box = BoxEntry("w", ((0, 2),), ())
    >>> info = ShardingInfo("a1", mesh, {"w": Layout(mesh, "[S0]", (3,), "bf16")},
    ...                     (FileEntry("x.safetensors", 0, 99, (box,)),))
    >>> print(format_info(info))
    {
    "format": "shardspec",
    "version": 1,
    "save": "a1",
    "mesh": {"ids": [0, 1], "shape": [2], "axis_names": null},
    "tensors": {
      "w": {"shape": [3], "dtype": "BF16", "spec": "[S0]"}
    },
    "files": [
      {"name": "x.safetensors", "rank": 0, "bytes": 99, "boxes": {
        "w": {"box": [[0, 2]]}
      }}
    ]
    }
    <BLANKLINE>
    """
    return "".join(
        info_lines(
            info.save,
            info.mesh,
            info.tensors,
            info.files,
            info.values,
            info.paths,
            info.file_metadata,
        )
    )


def info_lines(
    save: str,
    mesh: DeviceMesh,
    tensors: Mapping[str, Layout],
    files: Iterable[FileEntry],
    values: Mapping[str, object] = MappingProxyType({}),
    paths: Mapping[str, KeyPath] = MappingProxyType({}),
    file_metadata: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield the text of `format_info` in pieces; the parameters are the members of the info."""
    stated = {"ids": mesh.ids, "shape": mesh.shape, "axis_names": mesh.axis_names}
    yield f'{{\n"format": {_dump(_FORMAT)},\n"version": {VERSION},\n"save": {_dump(save)},\n'
    yield f'"mesh": {_dump(stated)},\n"tensors": {{'
    yield from _lines((f"  {_dump(name)}: {_tensor_json(at)}" for name, at in tensors.items()), "")
    yield '},\n"files": ['
    separator = "\n"
    for file in files:
        head = _dump({"name": file.name, "rank": file.rank, "bytes": file.num_bytes})
        yield f'{separator}  {head[:-1]}, "boxes": {{'
        boxes = (
            f"    {_dump(name)}: {_dump(_boxes_json(list(entries)))}"
            for name, entries in groupby(file.boxes, attrgetter("tensor"))
        )
        yield from _lines(boxes, "  ")
        yield "}}"
        separator = ",\n"
    yield "]" if separator == "\n" else "\n]"
    for key, encoded in (
        ("values", {name: encode_value(value, name) for name, value in values.items()}),
        ("paths", {name: encode_path(path) for name, path in paths.items()}),
        (_FILE_METADATA, file_metadata),
    ):
        if encoded:
            yield f',\n"{key}": {{'
            yield from _lines((f"  {_dump(n)}: {_dump(value)}" for n, value in encoded.items()), "")
            yield "}"
    yield "\n}\n"


def _tensor_json(layout: Layout) -> str:
    dtype, spec = to_safetensors(layout.dtype), str(layout.spec)
    return _dump({"shape": layout.global_shape, "dtype": dtype, "spec": spec})


def _lines(items: Iterable[str], indent: str) -> Iterator[str]:
    """Put each item on a line of its own between brackets that stand at `indent`."""
    separator = "\n"
    for item in items:
        yield separator + item
        separator = ",\n"
    if separator != "\n":
        yield "\n" + indent


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _boxes_json(entries: Sequence[BoxEntry]) -> object:
    """Return what stands for the boxes of a tensor: an object, or of several a list of them."""
    found = [_box_json(entry) for entry in entries]
    return found[0] if len(found) == 1 else found


def _box_json(entry: BoxEntry) -> dict[str, object]:
    box: dict[str, object] = {"box": entry.box}
    if entry.addend:
        box["addend"] = entry.addend
    if entry.crc32 is not None:
        box["crc32"] = f"{entry.crc32:08x}"
    return box


def read_info(directory: Path) -> ShardingInfo:
    """Read and check the sharding info of a checkpoint directory."""
    if not path_exists(directory):
        raise CheckpointError(f"{directory}: there is no such checkpoint directory; check the path")
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is a file; give the directory that holds {INFO_NAME}")
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


def _parse(stream: JSONStream, path: Path) -> ShardingInfo:
    """Read an info value by value; what many tensors and boxes have in common is kept once."""
    stated: dict[str, object] = {}
    tensors: dict[str, _StatedTensor] = {}
    files: list[FileEntry] = []
    values: dict[str, object] = {}
    paths: dict[str, KeyPath] = {}
    file_metadata: dict[str, str] = {}
    names: dict[str, str] = {}
    kinds: dict[_StatedTensor, _StatedTensor] = {}
    parts: dict[ReplicaKey, ReplicaKey] = {}
    for key in stream.members("the sharding info"):
        stated[key] = None
        match key:
            case "tensors":
                for name in stream.members(key):
                    kind = _parse_tensor(stream.value(), f"tensors[{name!r}]", path)
                    tensors[name] = kinds.setdefault(kind, kind)
                    names[name] = name
            case "files":
                files.extend(
                    _parse_file(stream, f"files[{place}]", names, parts, path)
                    for place in stream.items(key)
                )
            case "values":
                for name in stream.members(key):
                    values[name] = _decoded(decode_value, stream.value(), f"values[{name!r}]", path)
            case "paths":
                for name in stream.members(key):
                    paths[name] = _decoded(decode_path, stream.value(), f"paths[{name!r}]", path)
            case _ if key == _FILE_METADATA:
                for name in stream.members(key):
                    file_metadata[name] = as_text(stream.value(), path, f"{key}[{name!r}]")
            case _:
                stated[key] = stream.value()
                _check_version(stated, path)
    stream.end()
    names.clear()
    for key in ("format", "version", "mesh", "tensors", "files", "save"):
        member(stated, key, path, key)
    mesh = _parse_mesh(as_object(stated["mesh"], path, "mesh"), path)
    layouts = _layouts(mesh, tensors, path)
    _check_files(files, mesh, layouts, path)
    for name in values.keys() & layouts.keys():
        raise CheckpointError(f"{path}: {name!r} is both a tensor and a value")
    for name in paths.keys() - layouts.keys() - values.keys():
        raise CheckpointError(f"{path}: paths[{name!r}] is of nothing that the info lists")
    save = as_text(stated["save"], path, "save")
    return ShardingInfo(save, mesh, layouts, tuple(files), values, paths, file_metadata)


def _check_version(stated: dict[str, object], path: Path) -> None:
    """Refuse what says that it is something else; asked early, as the rest may look otherwise."""
    if (name := stated.get("format", _FORMAT)) != _FORMAT:
        raise CheckpointError(f"{path}: format is {shown(name)}, not {_FORMAT!r}")
    version = as_size(stated.get("version", VERSION), path, "version")
    if version != VERSION:
        remedy = "upgrade shardspec" if version > VERSION else "the file is damaged, restore it"
        raise CheckpointError(
            f"{path}: has version {version}, but this shardspec reads version {VERSION}; {remedy}"
        )


def _decoded(decode: Callable[[object], _T], value: object, key: str, path: Path) -> _T:
    try:
        return decode(value)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {key} {error}") from None


def _parse_mesh(stated: dict[str, object], path: Path) -> DeviceMesh:
    ids = field(stated, "ids", as_sizes, path, "mesh")
    shape = field(stated, "shape", as_sizes, path, "mesh")
    key = "mesh.axis_names"
    names = member(stated, "axis_names", path, key)
    texts = None if names is None else [as_text(n, path, key) for n in as_list(names, path, key)]
    try:
        return DeviceMesh(ids, shape, axis_names=texts)
    except ShardSpecError as error:
        raise CheckpointError(f"{path}: mesh: {error}") from None


class _StatedTensor(NamedTuple):
    """What the info says of tensors that are sharded alike."""

    shape: tuple[int, ...]
    dtype: str
    spec: str


def _parse_tensor(value: object, key: str, path: Path) -> _StatedTensor:
    stated = as_object(value, path, key)
    shape = field(stated, "shape", as_sizes, path, key)
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{path}: {key}.shape has {len(shape)} dims, at most {MAX_DIMS}")
    dtype = field(stated, "dtype", as_text, path, key)
    spec = field(stated, "spec", as_text, path, key)
    if len(spec) > _MOST_SPEC:
        raise CheckpointError(
            f"{path}: {key}.spec has {len(spec)} characters, at most {_MOST_SPEC}"
        )
    return _StatedTensor(shape, dtype, spec)


def _layouts(
    mesh: DeviceMesh, tensors: Mapping[str, _StatedTensor], path: Path
) -> dict[str, Layout]:
    known: dict[_StatedTensor, Layout] = {}
    found = {}
    for name, kind in tensors.items():
        if kind not in known:
            key = f"tensors[{name!r}]"
            try:
                known[kind] = Layout(mesh, kind.spec, kind.shape, from_safetensors(kind.dtype))
            except SpecSyntaxError as error:
                raise CheckpointError(
                    f"{path}: {key}.spec {shown(kind.spec)}: {error.problem}"
                ) from None
            except ShardSpecError as error:
                raise CheckpointError(f"{path}: {key}: {error}") from None
        found[name] = known[kind]
    return found


def _parse_file(
    stream: JSONStream,
    key: str,
    names: Mapping[str, str],
    parts: dict[ReplicaKey, ReplicaKey],
    path: Path,
) -> FileEntry:
    stated: dict[str, object] = {}
    boxes = box_columns()
    for part in stream.members(key):
        stated[part] = None
        if part != "boxes":
            stated[part] = stream.value()
            continue
        for tensor in stream.members(f"{key}.boxes"):
            at, said = f"{key}.boxes[{tensor!r}]", stream.value()
            for box in said if isinstance(said, list) and said else [said]:
                held, crc32 = _parse_box(box, at, path)
                part_of, crc = parts.setdefault(held, held), -1 if crc32 is None else crc32
                boxes.append(names.get(tensor, tensor), part_of, crc)
    member(stated, "boxes", path, f"{key}.boxes")
    name = field(stated, "name", as_text, path, key)
    file_inside(path.parent, name, path)
    rank = field(stated, "rank", as_size, path, key)
    return FileEntry(name, rank, field(stated, "bytes", as_size, path, key), boxes)


def _parse_box(value: object, key: str, path: Path) -> tuple[ReplicaKey, int | None]:
    stated = as_object(value, path, key)
    sides = []
    for side in field(stated, "box", as_list, path, key):
        interval = as_sizes(side, path, f"{key}.box")
        if len(interval) != 2:
            raise CheckpointError(f"{path}: {key}.box has {side}, which is no [low, high] pair")
        sides.append((interval[0], interval[1]))
    addend = field(stated, "addend", as_sizes, path, key) if "addend" in stated else ()
    crc32 = None
    if "crc32" in stated:
        text = stated["crc32"]
        if not isinstance(text, str) or _CRC.fullmatch(text) is None:
            raise CheckpointError(
                f"{path}: {key}.crc32 is {shown(text)}, not a string of eight hexadecimal digits"
            )
        crc32 = int(text, 16)
    return (tuple(sides), addend), crc32


def _check_files(
    files: Sequence[FileEntry], mesh: DeviceMesh, tensors: Mapping[str, Layout], path: Path
) -> None:
    """Check that names, ranks and boxes of files can be."""
    names: set[str] = set()
    checked: set[tuple[tuple[int, ...], Box]] = set()
    for place, file in enumerate(files):
        key = f"files[{place}]"
        if file.name in names:
            raise CheckpointError(f"{path}: {key} repeats the file name {file.name!r}")
        names.add(file.name)
        if file.rank not in mesh:
            raise CheckpointError(
                f"{path}: {key}.rank is {file.rank}, which is no device of the mesh"
            )
        for tensor, box, _, _ in file.boxes:
            if tensor not in tensors:
                raise CheckpointError(
                    f"{path}: {key}.boxes[{tensor!r}] is of a tensor that 'tensors' does not list"
                )
            shape = tensors[tensor].global_shape
            if (shape, box) in checked:
                continue
            checked.add((shape, box))
            if len(box) != len(shape) or not all(
                lo < hi <= size for (lo, hi), size in zip(box, shape, strict=True)
            ):
                raise CheckpointError(
                    f"{path}: {key}.boxes[{tensor!r}].box {[list(side) for side in box]} is empty "
                    f"or does not lie in the tensor of shape {list(shape)}"
                )
